"""The board: methods judged by the fixed adversary, one file for each.

An entry is a TOML file that `fedcb2o assess` writes. Accuracies and success rates are percentages
of benign agents after the last round, as means over seeds. Each is the worst over attacks.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedcb2o.errors import RunError
from fedcb2o.records import read_json_with_checksum, read_toml, to_toml
from fedcb2o.report._panels import PALETTE, STYLE
from fedcb2o.report._statistics import add_attack_effects
from fedcb2o.report.grid_results import BASELINES, read_grid

_Percent = Annotated[float, Field(ge=0, le=100)]
_PANELS_PER_ROW = 4


class Setting(BaseModel):
    """The results of one setting: data, share of attackers, graph and label skew."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: str
    share: str
    graph: str
    skew: str
    no_attack: _Percent
    mean: Annotated[_Percent, Field(description="Accuracy of the mean owner.")]
    mean_attack: str
    worst: Annotated[_Percent, Field(description="Accuracy of the worst owner.")]
    worst_attack: str
    success: Annotated[
        float, Field(ge=-100, le=100, description="Attack success minus that without the attack.")
    ]
    success_attack: str


class Entry(BaseModel):
    """A method on the board."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: Annotated[str, Field(min_length=1, max_length=60)]
    link: Annotated[str | None, Field(pattern=r"^https?://\S+$")] = None
    adversary: Annotated[str, Field(description="Version of the fixed adversary.")]
    definition: Annotated[
        str, Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 checksum of its file.")
    ]
    form: Literal["quick", "full"]
    seeds: Annotated[int, Field(ge=1, description="Number of seeds.")]
    cost: Annotated[
        float, Field(gt=0, description="Processor time of a round relative to plain averaging.")
    ]
    algorithm: dict[str, Any]
    agents: dict[str, Any] = {}
    settings: Annotated[list[Setting], Field(min_length=1)]

    def curve(self, data: str) -> list[Setting]:
        """Return the settings of a data set along the share of attackers, as in the quick form."""
        rows = [row for row in self.settings if row.data == data]
        kinds = [(row.graph, row.skew) for row in rows]
        # The centre is the combination of graph and skew with the most shares.
        centre = max(kinds, key=kinds.count)
        return [row for row, kind in zip(rows, kinds, strict=True) if kind == centre]


def read_entry(path: Path) -> Entry:
    """Read an entry; RunError for a file that does not follow the schema."""
    try:
        return Entry.model_validate(read_toml(path))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise RunError(f"{path}: `{place}`: {first['msg']}") from error
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}") from error


def make_entry(folder: Path) -> Entry:
    """Return the entry of a finished assessment."""
    about = read_json_with_checksum(folder / "assessment.json")
    results = read_grid(folder)
    (title,) = results.defences
    rows = []
    for name in results.settings:
        data, share, graph, skew = name.split(", ")
        effects = add_attack_effects(results, name)
        means = effects.groupby("attack")[["accuracy", "accuracy_worst", "success"]].mean()
        attacked = means.loc[results.attacks]
        row: dict[str, Any] = {"data": data, "share": share, "graph": graph, "skew": skew}
        row["no_attack"] = _percent(means.accuracy[BASELINES["clean"]])
        for key, column in (("mean", "accuracy"), ("worst", "accuracy_worst")):
            row |= {
                key: _percent(attacked[column].min()),
                f"{key}_attack": attacked[column].idxmin(),
            }
        row |= {
            "success": _percent(attacked.success.max()),
            "success_attack": attacked.success.idxmax(),
        }
        rows.append(Setting(**row))
    return Entry(
        title=title,
        **{key: about[key] for key in ("adversary", "definition", "form", "cost")},
        seeds=len(results.seeds),
        **results.table["defences"][title],
        settings=rows,
    )


def entry_toml(entry: Entry) -> str:
    """Return the file of an entry, with one line per setting."""
    table = entry.model_dump(exclude_none=True)
    settings = table.pop("settings")
    lines = []
    for row in settings:
        values = ", ".join(f"{key} = {json.dumps(value)}" for key, value in row.items())
        lines.append(f"    {{ {values} }},\n")
    # Keys of the file come before its sections.
    head = {key: value for key, value in table.items() if not isinstance(value, dict)}
    sections = {key: value for key, value in table.items() if isinstance(value, dict) and value}
    return f"{to_toml(head)}settings = [\n{''.join(lines)}]\n\n{to_toml(sections)}"


def _percent(value: float) -> float:
    return round(100 * float(value), 1)


def entry_table(entry: Entry) -> pd.DataFrame:
    """Tabulate an entry, one row per setting."""
    rows = {
        ", ".join([row.data, row.share, row.graph, row.skew]): {
            "No attack": f"{row.no_attack:.1f}",
            "Mean owner": f"{row.mean:.1f} ({row.mean_attack})",
            "Worst owner": f"{row.worst:.1f} ({row.worst_attack})",
            "Attack success": f"{row.success:.1f} ({row.success_attack})",
        }
        for row in entry.settings
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("Setting")


def ranked(entries: Iterable[Entry]) -> list[Entry]:
    """Sort entries by the accuracy of the mean owner under the worst attack, over all settings."""
    return sorted(entries, key=lambda entry: (-_mean(entry.settings, "mean"), entry.title))


def board_table(entries: Iterable[Entry]) -> pd.DataFrame:
    """Tabulate entries: means over the settings of each data set, under the worst attack each."""
    rows = {}
    for entry in ranked(entries):
        name = f"[{entry.title}]({entry.link})" if entry.link else entry.title
        row = {}
        for data in dict.fromkeys(setting.data for setting in entry.settings):
            settings = [setting for setting in entry.settings if setting.data == data]
            columns = {
                "no attack": "no_attack",
                "mean owner": "mean",
                "worst owner": "worst",
                "success": "success",
            }
            for label, key in columns.items():
                row[f"{data}: {label}"] = f"{_mean(settings, key):.1f}"
        row["Cost"] = f"{entry.cost:.1f}"
        rows[name] = row
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("Method")


def _mean(settings: Sequence[Setting], key: str) -> float:
    return fmean(getattr(setting, key) for setting in settings)


@mpl.rc_context(STYLE)
def board_figure(entries: Iterable[Entry], data: str) -> Figure:
    """Draw the accuracy over the share of attackers, one panel per entry, all others in grey."""
    shown = ranked(entries)
    count = len(shown)
    rows = -(-count // _PANELS_PER_ROW)
    figure = Figure(figsize=(2.3 * _PANELS_PER_ROW, 1.9 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, _PANELS_PER_ROW, sharex=True, sharey=True, squeeze=False).flat
    curves = [entry.curve(data) for entry in shown]
    for place, (entry, curve) in enumerate(zip(shown, curves, strict=True)):
        panel = axes[place]
        others = [list(zip(*_points(other, "mean"), strict=True)) for other in curves]
        panel.add_collection(LineCollection(others, colors="0.85", linewidths=0.8, zorder=1))
        panel.plot(*_points(curve, "mean"), color=PALETTE[0], marker="o", markersize=3)
        panel.plot(
            *_points(curve, "worst"), color=PALETTE[1], marker="s", markersize=3, linestyle="--"
        )
        panel.set_title(entry.title, fontsize=9)
        panel.set_ylim(0, 100)
        # The lowest panel of each column, which need not be in the last row.
        panel.tick_params(labelbottom=place + _PANELS_PER_ROW >= count)
        _label_first(panel, place)
    for panel in list(axes)[count:]:
        panel.axis("off")
    figure.supxlabel("attackers, percent of the agents", fontsize=9)
    figure.supylabel("accuracy under the worst attack, percent", fontsize=9)
    return figure


def _points(curve: Sequence[Setting], key: str) -> tuple[list[float], list[float]]:
    shares = [float(setting.share.rstrip("%")) for setting in curve]
    return shares, [getattr(setting, key) for setting in curve]


def _label_first(panel: Axes, place: int) -> None:
    """Name the lines in the first panel, in place of a legend."""
    if place == 0:
        panel.text(
            0.04, 0.16, "mean owner", color=PALETTE[0], transform=panel.transAxes, fontsize=8
        )
        panel.text(
            0.04, 0.05, "worst owner", color=PALETTE[1], transform=panel.transAxes, fontsize=8
        )
