"""Results explorer: one page with all cells of grids, seed by seed.

A table of the page is a grid in one setting. The page holds the value of each seed, so that the
reader's browser computes means, intervals, regrets and paired differences.
"""

import base64
import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from fedcb2o.records import MATRIX_METRICS, slug
from fedcb2o.report._grid_metrics import chosen_infos
from fedcb2o.report._html import render_block, render_explorer
from fedcb2o.report.grid_results import GridResults
from fedcb2o.report.grid_tables import SettingResults, describe_changes

MEASURES = tuple(
    dict.fromkeys(
        (
            "accuracy",
            "attack_success_rate",
            "source_accuracy",
            "accuracy_worst",
            "attack_success_rate_worst",
            *MATRIX_METRICS,
            "seconds",
            "megabytes",
        )
    )
)
"""Measures of a page, where a grid has values of them."""
_RATE_STEP = 1 / 10000
_MISSING = 65535
_NON_SETTING_KEYS = ("tune", "seeds", "strengths")
_DEFINITIONS = (
    "Rows are defences, columns are attacks. A number is the mean over seeds of the mean over "
    "benign agents, after the last round. A defence has the same hyperparameters in all columns.",
    "Two columns have no attack: malicious agents train on true labels (Attackers clean), or are "
    "removed with their data (Attackers removed).",
    "The attack success rate is the share of the samples of the attack's goal that are classified "
    "as its target. An attack without a target has no rate.",
    "Points behind the best: the distance to the best defence of the column, paired by seeds. The "
    "worst column of a defence is the largest possible cost of choosing it.",
    "A difference is paired by seeds. An asterisk marks a significant difference: Student's "
    "p-value is below 0.05 after Holm's correction over the shown table.",
    "Only defences with all seeds of a table take part in comparisons. An interval needs five "
    "seeds. The interval of a rate is computed on the logit scale, others are Student's.",
    "A dagger marks cells in which a benign agent received more malicious models in a round than "
    "its rule assumes.",
)


def explorer_page(
    grids: Sequence[GridResults],
    title: str,
    *,
    measures: Sequence[str] = MEASURES,
    warnings: Iterable[str] = (),
    blocks: Sequence[Markup] = (),
) -> str:
    """Render the explorer of grids as one self-contained HTML page.

    Args:
        grids: Results of the grids, the most important one first.
        title: Title of the page.
        measures: Names of metrics, in order; a grid shows those that it has.
        warnings: Highlighted sentences above the table.
        blocks: Further markup below the table.

    Returns:
        The HTML document.
    """
    tables, values = explorer_tables(grids, measures)
    return render_explorer(
        title=title,
        tables=len(tables),
        warnings=render_block("warnings", list(warnings)),
        definitions=_DEFINITIONS,
        blocks=blocks,
        data=pack(tables, values),
    )


def explorer_tables(
    grids: Sequence[GridResults], measures: Sequence[str]
) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Collect the tables of the explorer and their values, as integers of 16 bits.

    A measure begins at its `offset`, in the order defence, column, seed. A value is `step` times
    its integer; 65535 stands for a missing one.
    """
    tables = []
    parts: list[np.ndarray] = []
    offset = 0
    for results in grids:
        for setting in results.settings:
            view = SettingResults(results, setting)
            # A setting whose runs have not begun would be an empty table.
            if not view.rows[view.main].notna().any():
                continue
            table = _describe_table(view)
            for name in dict.fromkeys([view.main, *measures, *chosen_infos(results.chosen)]):
                if name not in view.rows or view.rows[name].isna().all():
                    continue
                measure, integers = _measure_values(view, name, table)
                table["measures"].append({**measure, "offset": offset})
                parts.append(integers)
                offset += integers.size
            tables.append(table)
    return tables, np.concatenate(parts) if parts else np.empty(0, np.uint16)


def pack(tables: list[dict[str, Any]], values: np.ndarray) -> str:
    """Return base64 of the deflated length of the JSON, JSON, low bytes and high bytes."""
    text = json.dumps(tables, ensure_ascii=False, separators=(",", ":")).encode()
    low = (values & 255).astype(np.uint8).tobytes()
    high = (values >> 8).astype(np.uint8).tobytes()
    data = struct.pack("<I", len(text)) + text + low + high
    return base64.b64encode(zlib.compress(data, 9)).decode()


def unpack(page: str) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Read the data of an explorer from its page, the inverse of `pack`."""
    start = page.index('id="data">') + len('id="data">')
    data = zlib.decompress(base64.b64decode(page[start : page.index("<", start)]))
    (length,) = struct.unpack_from("<I", data)
    numbers = np.frombuffer(data[4 + length :], np.uint8).astype(np.uint16).reshape(2, -1)
    return json.loads(data[4 : 4 + length]), numbers[0] + 256 * numbers[1]


def _describe_table(view: SettingResults) -> dict[str, Any]:
    results = view.results
    columns = view.columns(view.main)
    seeds = sorted({int(seed) for seed in view.rows.dropna(subset=view.main).seed})
    measured = view.rows.dropna(subset=view.main).groupby("defence").seed.nunique()
    defences = [name for name in results.defences if name in measured.index]
    flat_exceeded = view.exceeded_cells(columns).loc[defences].to_numpy().ravel()
    flat_failed = view.failed_cells(columns).loc[defences].to_numpy().ravel()
    changes = [_describe_defence(results, name) for name in defences]
    name = str(results.table.get("name") or results.folder.name)
    return {
        "id": "/".join(filter(None, [slug(name), view.setting and slug(view.setting)])),
        "title": ": ".join(filter(None, [results.title, view.setting])),
        "about": _about(view),
        "facts": _facts(view),
        "defences": defences,
        "changes": changes,
        "counts": [int(measured[each]) for each in defences],
        "columns": columns,
        "baselines": len(view.baselines),
        "reference": defences.index(results.reference) if results.reference in defences else 0,
        "seeds": seeds,
        "exceeded": np.flatnonzero(flat_exceeded).tolist(),
        "failed": np.flatnonzero(flat_failed).tolist(),
        "measures": [],
    }


def _describe_defence(results: GridResults, name: str) -> str:
    """Describe what a defence changes, and the candidate that tuning chose."""
    text = describe_changes(_without(results.table["defences"][name], _NON_SETTING_KEYS))
    choice = results.tuning.get(name)
    if choice is None:
        return text
    chosen = describe_changes(choice["asked"]["candidates"][choice["best"]])
    return f"{text}; tuned: {chosen}"


def _measure_values(
    view: SettingResults, name: str, table: Mapping[str, Any]
) -> tuple[dict[str, Any], np.ndarray]:
    """Return the description and the integers of one measure."""
    metric = view.results.info(name)
    rows = view.rows.dropna(subset=name).drop_duplicates(["defence", "attack", "seed"])
    index = pd.MultiIndex.from_product([table["defences"], table["columns"], table["seeds"]])
    values = rows.set_index(["defence", "attack", "seed"])[name].reindex(index).to_numpy(float)
    # Only metrics such as R2 can be below 0.
    least = min(0.0, float(np.nanmin(values)))
    largest = float(np.nanmax(values)) - least
    # Rates are exact to the decimals that tables show. Others use all integers up to their largest
    # value.
    step = _RATE_STEP if metric.is_percent else max(largest, 1e-12) / (_MISSING - 1)
    integers = np.where(
        np.isnan(values), _MISSING, np.round((np.nan_to_num(values) - least) / step)
    )
    description = {
        "name": name,
        "title": metric.title,
        "caption": metric.caption,
        "worse": metric.worse_direction,
        "percent": metric.is_percent,
        "largest": largest,
        "step": step,
    }
    if least:
        description["least"] = least
    return description, integers.astype(np.uint16)


def _about(view: SettingResults) -> str:
    """Describe data, attackers and regret in one sentence."""
    table = view.results.table
    setting = table.get("settings", {}).get(view.setting, {})
    agents = {**_as_section(table.get("agents")), **_as_section(setting.get("agents"))}
    data = {**_as_section(table.get("data")), **_as_section(setting.get("data"))}.get("name")
    clusters = agents.get("num_clusters", 1)
    benign, malicious = (
        sum(number) if isinstance(number, list) else number * clusters
        for number in (agents.get("benign", 0), agents.get("malicious", 0))
    )
    who = f"{benign + malicious} agents, {malicious} of them malicious," if benign else "Agents"
    return (
        f"{who} learn {data or 'from their data'}; a column is one attack, and the regret of a "
        "defence is its distance to the best defence under the same attack."
    )


def _facts(view: SettingResults) -> list[tuple[str, str]]:
    """Describe the set-up of a table in about ten lines."""
    table = view.results.table
    setting = table.get("settings", {}).get(view.setting, {})
    sections = {}
    for name in ("data", "model", "agents", "training"):
        sections[name] = {**_as_section(table.get(name)), **_as_section(setting.get(name))}
    seeds = table["seeds"]
    facts = {
        "What it is": str(table.get("description", "")),
        "Data": _join(sections["data"]),
        "Network": _join(sections["model"]),
        "Agents": _join(sections["agents"]),
        "Training": _join(sections["training"]),
        "Rounds": str(setting.get("rounds", table.get("rounds", ""))),
        "Test images": str(table.get("evaluate_on", "test")),
        "Seeds": f"{len(seeds)} ({seeds[0]} to {seeds[-1]})" if seeds else "",
        "Tuning": _join(_without(table.get("tuning", {}), ("attacks",))),
        "Strength of attacks": _join(table.get("adversary", {})),
    }
    return [(key, text) for key, text in facts.items() if text]


def _as_section(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    return {"name": value} if value else {}


def _without(entry: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in keys}


def _join(section: Mapping[str, Any]) -> str:
    return describe_changes(dict(section)) if section else ""
