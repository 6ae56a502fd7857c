"""The results explorer of this project, and the generated tables of its pages.

    .venv/bin/python -m paper.results                    # rewrite docs/explorer.html and the tables
    .venv/bin/python -m paper.results --add runs/digits  # keep the values of a grid first
    .venv/bin/python -m paper.results --rows runs/some   # the same for the grid's defences alone
    .venv/bin/python -m paper.results --demo runs/demo-report    # keep what `make demo` measured

The values of a grid are in docs/benchmark/NAME: `grid.toml`, `summary.csv.gz` and, where there are
any, `tuning.json` and `strengths.json`. Those of `make demo` are in docs/benchmark/demo. A table of
a page follows the comment `<!-- generated: NAME -->`. The table of the grid `preregistered` comes
first on docs/results.md, with its heading.
"""

import argparse
import dataclasses
import functools
import gzip
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pandas as pd
import tomli_w
from paper import board, preregistered, preregistered_2
from paper.adaptive import adaptive_table
from paper.distil import ablation_table
from paper.former import former_regrets, former_table
from paper.frontier import frontier_table
from paper.last_layer import last_layer_table
from paper.long_training import long_training_table
from paper.losses import Comparison, losses_table, other_comparisons
from paper.trial import trial_table
from paper.triggers import choice_table, triggers_table
from paper.weak_places import weak_places_table
from PIL import Image

from fedcb2o.records import read_json_with_checksum, slug
from fedcb2o.report import GridResults, SettingResults, explorer_page, read_grid, to_markdown
from fedcb2o.report._grid_metrics import COMPARED_METRICS
from fedcb2o.report._regret import worst_regret
from fedcb2o.report._statistics import seed_statistics

DOCS = Path(__file__).parents[1] / "docs"
EXPLORER = DOCS / "explorer.html"
PAGE = DOCS / "results.md"
README = DOCS.parent / "README.md"
PAGES = (
    PAGE,
    README,
    *(DOCS / f"{name}.md" for name in ("index", "criteria", "method")),
    board.PAGE,
)
"""Pages with generated tables."""
DEMO_VALUES = DOCS / "benchmark" / "demo" / "seeds.csv"
DEMO_FIGURE = DOCS / "figures" / "digits-curves.png"
DEMO_PANEL = DEMO_FIGURE.with_name("digits-attack-success.png")
"""The last panel of the figure with its legend, for narrow screens."""
DEMO_COLUMNS = {
    "accuracy/worst agent's": [("accuracy", "mean"), ("accuracy_worst", "mean")],
    "source class accuracy": [("source_accuracy", "mean")],
    "attack success/worst agent's mean/maximum": [
        ("attack_success_rate", "mean"),
        ("attack_success_rate_worst", "mean"),
        ("attack_success_rate_worst", "max"),
    ],
}
"""Columns of the table of `make demo`: metrics, and what is taken of their values by seed."""
_TEXTS = ("title", "description")
PREREGISTERED = "preregistered"
SEEN = "Letters"
"""The setting of the pre-registered test on whose images FedAssay's settings were chosen."""
ANSWER_COLUMNS = ("Worst regret, points", f"Without {SEEN.lower()}, points")
MAIN_GRIDS = ("rivals", "attacks-all-data", "emnist-all-data", "fashion-all-data")
GRIDS = (PREREGISTERED, *MAIN_GRIDS, "settings", "rules", "criteria")
"""Grids of the explorer."""
MEASURES = (
    "accuracy",
    "attack_success_rate",
    "accuracy_worst",
    "accuracy_worst_tenth",
    "attack_success_rate_worst",
)
TRIGGERS = (
    "Backdoor",
    "Black square",
    "Checkerboard",
    "Waves",
    "Blended",
    "Distributed backdoor",
    "Clean label",
    "Clean-label waves",
    "Edge case",
)
"""Attacks by triggers, which a method without a search for backdoors lets through."""
METHOD = "FedAssay"
VARIANTS = (
    METHOD,
    *(f"{METHOD}, {name}" for name in ("max_sensitivity", "backdoor search")),
)
"""The recommended method, and with defences against backdoors."""
FEDCBO = ("FedCBO, all data", "FedCBO")
"""FedCBO that trains on the same samples as the recommended method, by the grid's name for it."""
PARTS = ("without G", "average loss", "without guards")
"""Variants of the recommended method without a part, or with another criterion."""
_COMMENT = re.compile(
    r"(?P<mark>^<!-- generated: (?P<name>\w+) -->\n\n)(?:^\|.*\n)*\n?", re.MULTILINE
)
_FIRST_SECTION = re.compile(
    rf"(?<=^<!-- begin: {PREREGISTERED} -->\n).*?(?=^<!-- end -->$)", re.DOTALL | re.MULTILINE
)


@functools.cache
def grid_results(name: str) -> GridResults:
    """Read a committed grid.

    Args:
        name: Name of its folder in docs/benchmark.
    """
    return read_grid(DOCS / "benchmark" / name)


def make_explorer() -> str:
    """Render the explorer of all grids."""
    grids = [grid_results(name) for name in GRIDS]
    return explorer_page(grids, "Which defence withstands which attack?", measures=MEASURES)


def explorer_link(results: GridResults, setting: str = "", **state: str) -> str:
    """Return the link from a page in docs to a state of the explorer.

    Args:
        setting: Name of the setting.
        state: Keys of the fragment, such as measure, show, to and row.
    """
    name = str(results.table["name"])
    grid = "/".join(filter(None, [slug(name), setting and slug(setting)]))
    return f"explorer.html#{urlencode({'grid': grid, **state})}"


def summary_table() -> pd.DataFrame:
    """Compare the recommended method and its best rival in the main grids.

    Returns:
        Text, one row per grid and method: accuracy without attack and under the worst attack
        except triggers, success of the worst trigger, and the worst regret with and without
        triggers.
    """
    rows = []
    for name in MAIN_GRIDS:
        view = SettingResults(grid_results(name), "")
        regret = worst_regrets(view, without=TRIGGERS)
        rivals = [defence for defence in regret.index if not defence.startswith(METHOD)]
        best = str(regret.loc[rivals].idxmin())
        for method in [*filter(regret.index.__contains__, VARIANTS), best]:
            rows.append(_summary_row(view, method, float(regret[method])))
    return pd.DataFrame(rows).set_index("Grid")


def parts_table() -> pd.DataFrame:
    """Compare the recommended method with its variants that lack a part.

    Returns:
        Text, one row per grid and setting: the worst regrets in points, triggers left aside. A
        variant that a grid does not have has a dash.
    """
    rows = {}
    for title, view in grid_views():
        regret = worst_regrets(view, without=TRIGGERS).mul(100).map("{:.1f}".format)
        variants = [METHOD, *(f"{METHOD}, {part}" for part in PARTS)]
        rows[title] = regret.reindex(variants).fillna("–").to_numpy()
    return pd.DataFrame.from_dict(rows, orient="index", columns=[METHOD, *PARTS]).rename_axis(
        "Grid"
    )


def regrets_table() -> pd.DataFrame:
    """Compare worst regrets of the recommended method, FedCBO and the best other method.

    Returns:
        Text, one row per grid and setting: worst regrets in points, triggers left aside. FedCBO
        trains on the same samples. The best other method is none of the method's variants. The
        pre-registered test has the former default alone.
    """
    rows = {}
    former = former_regrets()
    for title, view in grid_views():
        regret = 100 * worst_regrets(view, without=TRIGGERS)
        fedcbo = next(filter(regret.index.__contains__, FEDCBO))
        others = regret[~regret.index.str.startswith(METHOD)]
        rows[title] = {
            METHOD: f"{regret[METHOD]:.1f}" if title in former else "–",
            "its former default": f"{former.get(title, regret[METHOD]):.1f}",
            "FedCBO": f"{regret[fedcbo]:.1f}",
            "best other method": f"{others.min():.1f} ({others.idxmin()})",
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("Grid")


def title_of(view: SettingResults) -> str:
    """Return the title of a grid and its setting."""
    return ": ".join(filter(None, [view.results.title, view.setting]))


def preregistered_section() -> str:
    """Return the first section of the results page: the answer of the pre-registered test.

    Returns:
        Markdown with a table of worst regrets and one of accuracy by data set.
    """
    results = grid_results(PREREGISTERED)
    description = str(results.table.get("description", ""))
    tables = [to_markdown(table).strip() for table in (_answer_table(results), data_table())]
    parts = filter(None, ["## The pre-registered test", description, *tables])
    return "\n" + "\n\n".join(parts) + "\n\n"


def _answer_table(results: GridResults) -> pd.DataFrame:
    """Return the answer of the pre-registered test, with and without `SEEN`, as text."""
    reference = str(results.reference)
    answer = preregistered.answer(preregistered.scores(results), reference)
    found = pd.DataFrame(index=answer.index.rename("Defence"))
    found[ANSWER_COLUMNS[0]] = answer["Worst regret"].map("{:.1f}".format)
    found["In"] = answer["In"]
    found[f"{reference} is"] = answer["Verdict"]
    unseen = preregistered.answer(preregistered.scores(results, without=[SEEN]), reference)
    unseen = unseen.loc[found.index]
    found[ANSWER_COLUMNS[1]] = unseen["Worst regret"].map("{:.1f}".format)
    found[f"{reference} then is"] = unseen["Verdict"]
    return found


def data_table() -> pd.DataFrame:
    """Return the pre-registered test in one row per data set.

    Returns:
        Text: accuracy without attack and under the worst attack, for the grid's reference and for
        the other method with the smallest worst regret on these data.
    """
    results = grid_results(PREREGISTERED)
    rows = {}
    for setting in results.settings:
        view = SettingResults(results, setting)
        regrets = worst_regrets(view, without=TRIGGERS).sort_values()
        ours = str(results.reference)
        best = next(str(name) for name in regrets.index if not str(name).startswith(ours))
        rows[setting] = {ours: _cell(view, ours), "best other": f"{_cell(view, best)} ({best})"}
    return pd.DataFrame(rows).T.rename_axis("data")


def _cell(view: SettingResults, method: str) -> str:
    """Return accuracy without attack and under the worst attack, in a table cell."""
    accuracy = seed_statistics(view.rows, "accuracy")["mean"].loc[method]
    return (
        f"{100 * accuracy['Attackers clean']:.1f}/{100 * _under_attack(view, accuracy).min():.1f}"
    )


def _under_attack(view: SettingResults, accuracy: "pd.Series[float]") -> "pd.Series[float]":
    """Return the accuracy under each attack, triggers left aside."""
    return accuracy.reindex([name for name in view.attacks if name not in TRIGGERS])


def _summary_row(view: SettingResults, method: str, regret: float) -> dict[str, str]:
    accuracy = seed_statistics(view.rows, "accuracy")["mean"].loc[method]
    under_attack = _under_attack(view, accuracy)
    success = seed_statistics(view.rows, "attack_success_rate")["mean"].loc[method]
    triggers = success.reindex([name for name in view.attacks if name in TRIGGERS])
    agent = seed_statistics(view.rows, "accuracy_worst")["mean"].loc[method]
    agent = _under_attack(view, agent)
    link = explorer_link(view.results, view.setting, row=method)
    return {
        "Grid": title_of(view),
        "Method": f"[{method}]({link})",
        "No attack": f"{100 * accuracy['Attackers clean']:.1f}",
        "Worst attack": f"{100 * under_attack.min():.1f} ({under_attack.idxmin()})",
        "Worst agent": f"{100 * agent.min():.1f} ({agent.idxmin()})",
        "Worst trigger succeeds": _worst_trigger(triggers.dropna()),
        "Regret": f"{100 * regret:.1f}",
        "Regret with triggers": f"{100 * float(worst_regrets(view)[method]):.1f}",
    }


def _worst_trigger(success: "pd.Series[float]") -> str:
    if success.empty:
        return "–"
    return f"{100 * success.max():.0f} ({success.idxmax()})"


def worst_regrets(view: SettingResults, without: tuple[str, ...] = ()) -> "pd.Series[float]":
    """Return the worst regret of each defence with all seeds, in accuracy or success.

    In the pre-registered test success is net, as its registered script computes it.
    """
    values = tuple(COMPARED_METRICS)
    if view.results.table["name"] == PREREGISTERED:
        values = preregistered.MEASURES
    worst = []
    for value in values:
        columns = [name for name in view.columns(value) if name not in without]
        if columns:
            worst.append(worst_regret(view.shortfalls(value), columns)["mean"])
    table = pd.concat(worst, axis="columns").max(axis="columns", skipna=False)
    return table[table.index.isin(_complete_defences(view))].dropna()


def _complete_defences(view: SettingResults) -> list[str]:
    """Return the defences with all seeds of a table."""
    counts = view.rows.dropna(subset="accuracy").groupby("defence").seed.nunique()
    return [str(name) for name in counts.index[counts == counts.max()]]


def grid_views() -> Iterator[tuple[str, SettingResults]]:
    """Yield the title and the results of each setting of the grids with the recommended method."""
    for name in GRIDS[: GRIDS.index("settings") + 1]:
        for setting in grid_results(name).settings:
            view = SettingResults(grid_results(name), setting)
            yield title_of(view), view


def comparisons() -> Iterator[Comparison]:
    """Yield all measurements with the recommended method and rivals, the grids first."""
    for title, view in grid_views():
        state = {"show": "difference", "to": METHOD}
        link = functools.partial(_measure_link, view, **state)
        rows = view.rows[view.rows.defence.isin(_complete_defences(view))]
        yield Comparison(title, rows, link)
    yield from other_comparisons()


def _measure_link(view: SettingResults, measure: str, **state: str) -> str:
    return explorer_link(view.results, view.setting, measure=measure, **state)


def demo_table() -> pd.DataFrame:
    """Return the results of `make demo` in percent, as text.

    The best value of a column is bold; oracles, which have no attackers, take no part in this.
    """
    runs = pd.read_csv(DEMO_VALUES).groupby("run", sort=False)
    table = pd.DataFrame()
    for column, parts in DEMO_COLUMNS.items():
        texts = []
        for metric, statistic in parts:
            values = 100 * runs[metric].agg(statistic)
            methods = values[~values.index.str.startswith("Oracle")]
            best = methods.min() if "success" in metric else methods.max()
            is_best = (values == best) & values.index.isin(methods.index)
            text = values.map("{:.1f}".format)
            texts.append(text.mask(is_best, "**" + text + "**"))
        table[column] = pd.concat(texts, axis="columns").agg("/".join, axis="columns")
    return table.rename_axis("method")


TABLES = {
    "demo": demo_table,
    "second_test": preregistered_2.answer_table,
    "second_accuracy": preregistered_2.accuracy_table,
    "summary": summary_table,
    "parts": parts_table,
    "ablation": ablation_table,
    "losses": lambda: losses_table(METHOD, comparisons()),
    "former": lambda: former_table(METHOD, grid_views()),
    "regrets": regrets_table,
    "frontier": functools.partial(frontier_table, TRIGGERS),
    "long_training": long_training_table,
    "trial": trial_table,
    "weak_places": weak_places_table,
    "adaptive": adaptive_table,
    "last_layer": last_layer_table,
    "triggers": triggers_table,
    "trigger_choice": choice_table,
    "board": board.table,
    "adversary": board.adversary_table,
    "forms": board.forms_table,
}


def rewrite_page(page: Path = PAGE) -> str:
    """Return the text of a page with its generated tables made anew.

    Args:
        page: A page with comments that name tables.
    """

    def table(match: re.Match[str]) -> str:
        return match["mark"] + to_markdown(TABLES[match["name"]]()) + "\n"

    text = _FIRST_SECTION.sub(
        lambda match: preregistered_section(), page.read_text(encoding="utf-8")
    )
    return _COMMENT.sub(table, text)


def keep_grid(folder: Path) -> None:
    """Copy the values of a report or a grid to docs/benchmark.

    Args:
        folder: Folder of the grid, or of its report.
    """
    results = read_grid(folder)
    target = DOCS / "benchmark" / str(results.table["name"])
    target.mkdir(exist_ok=True)
    _write_summary(target, results)
    for name in ("grid.toml", "tuning.json", "strengths.json"):
        source = folder / name
        if source.is_file() and source.resolve() != (target / name).resolve():
            shutil.copyfile(source, target / name)


def keep_rows(folder: Path) -> None:
    """Replace the values of some defences in docs/benchmark by those of a grid of these alone.

    Args:
        folder: Folder of a grid with the same name, attacks, settings and seeds.

    Raises:
        ValueError: The grid differs from the kept one in more than its defences.
    """
    new = read_grid(folder)
    kept = read_grid(DOCS / "benchmark" / str(new.table["name"]))
    differing = [
        key
        for key in sorted({*new.table, *kept.table} - {"defences", "tuning", *_TEXTS})
        if new.table.get(key) != kept.table.get(key)
    ]
    if differing or not {*new.defences} <= {*kept.defences}:
        raise ValueError(f"{folder} is another grid than {kept.folder}: {differing}")

    kept.table["defences"].update(new.table["defences"])
    (kept.folder / "grid.toml").write_text(tomli_w.dumps(kept.table), encoding="utf-8")
    new_rows = new.rows[new.rows.defence.isin(new.defences)]
    rows = pd.concat([kept.rows[~kept.rows.defence.isin(new.defences)], new_rows])
    order = {name: place for place, name in enumerate(kept.defences)}
    rows = rows.sort_values("defence", key=lambda names: names.map(order), kind="stable")
    _write_summary(kept.folder, dataclasses.replace(kept, rows=rows))

    strengths = kept.folder / "strengths.json"
    if strengths.is_file():
        old, choices = (_read_strengths(results) for results in (kept, new))
        choices = [choice for choice in old if choice["defence"] not in new.defences] + choices
        strengths.write_text(json.dumps({"choices": choices}, indent=1) + "\n", encoding="utf-8")


def _read_strengths(results: GridResults) -> list[dict[str, Any]]:
    """Return the choices in strengths.json for the attacks and defences of a grid."""
    path = results.folder / "strengths.json"
    choices = read_json_with_checksum(path)["choices"] if path.is_file() else []
    return [
        choice
        for choice in choices
        if choice["defence"] in results.defences and choice["attack"] in results.attacks
    ]


def _write_summary(folder: Path, results: GridResults) -> None:
    with gzip.GzipFile(folder / "summary.csv.gz", "wb", mtime=0) as file:
        file.write(results.summary_csv().encode())


def keep_demo(folder: Path) -> None:
    """Copy the values and the figure of `make demo` to docs.

    Args:
        folder: Folder of its report.
    """
    DEMO_VALUES.parent.mkdir(exist_ok=True)
    shutil.copyfile(folder / "seeds.csv", DEMO_VALUES)
    shutil.copyfile(folder / "curves.png", DEMO_FIGURE)
    draw_demo_panel()


def draw_demo_panel() -> None:
    """Cut the last of the three panels out of the demo's figure, with the legend in rows below."""
    with Image.open(DEMO_FIGURE) as opened:
        figure = opened.convert("RGB")
    width, height = figure.size
    legend_top = round(0.922 * height)
    panel = figure.crop((round(0.672 * width), 0, width, legend_top))
    legend = figure.crop((0, legend_top, width, height))
    inked = np.flatnonzero((np.asarray(legend) < 250).any(axis=(0, 2)))
    # Entries of the legend are further apart than the parts of one entry.
    entries = np.split(inked, np.flatnonzero(np.diff(inked) > 0.0125 * width) + 1)
    rows = [entries[i : i + 2] for i in range(0, len(entries), 2)]
    picture = Image.new("RGB", (panel.width, legend_top + len(rows) * legend.height), "white")
    picture.paste(panel)
    for row, pair in enumerate(rows):
        for column, entry in enumerate(pair):
            part = legend.crop((int(entry[0]), 0, int(entry[-1]) + 1, legend.height))
            left = round((0.02, 0.53)[column] * panel.width)
            picture.paste(part, (left, legend_top + row * legend.height))
    picture.save(DEMO_PANEL, optimize=True)


def main() -> None:
    """Rewrite the explorer and the tables of the pages; keep grids and the demo first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--add", type=Path, action="append", default=[], help="folder of a grid")
    parser.add_argument(
        "--rows", type=Path, action="append", default=[], help="folder of a grid of some defences"
    )
    parser.add_argument("--demo", type=Path, help="folder of the report of `make demo`")
    arguments = parser.parse_args()
    for folder in arguments.add:
        keep_grid(folder)
    for folder in arguments.rows:
        keep_rows(folder)
    if arguments.demo:
        keep_demo(arguments.demo)
    EXPLORER.write_text(make_explorer(), encoding="utf-8")
    for page in PAGES:
        page.write_text(rewrite_page(page), encoding="utf-8")
    print(f"{EXPLORER} has {EXPLORER.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
