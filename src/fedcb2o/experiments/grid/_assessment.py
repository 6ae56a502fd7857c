"""The assessment of a method by the fixed adversary: a grid with the method as the only defence.

A version of the adversary is a frozen file in `experiments/adversary`: attacks, shares of
attackers, graphs, label skews and data. The quick form varies one of them at a time; the full form
runs all combinations.
"""

import hashlib
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

from fedcb2o import records
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments.config import tables
from fedcb2o.experiments.grid._baseline import Changes
from fedcb2o.experiments.grid._eta import GridProgress
from fedcb2o.experiments.grid._grid_runner import GridResult, bench
from fedcb2o.experiments.grid._loading import load_grid
from fedcb2o.experiments.runs._runner import run_loaded

VERSION = "1"
"""The newest version of the fixed adversary."""

_FILE = "assessment.json"

_AGENT_KEYS = ("hold_out", "validation", "split", "validation_loss", "assumed_share")
_AVERAGING = {"name": "dfedavgm"}
_REPEATS = 3  # of each timed run


@dataclass(frozen=True)
class FixedAdversary:
    """A version of the fixed adversary, and the SHA-256 checksum of its file."""

    version: str
    table: Mapping[str, Any]
    sha256: str

    def settings(self, *, full: bool) -> dict[str, Changes]:
        """Return the settings of a form by name: data, share of attackers, graph and skew."""
        axes = [self.table[key] for key in ("data", "shares", "graphs", "skews")]
        centre = (self.table["centre"][key] for key in ("share", "graph", "skew"))
        names = list(product(*axes))
        if not full:
            # One axis at a time: all combinations take a night.
            middle = tuple(centre)
            names = [
                name
                for name in names
                if sum(a != b for a, b in zip(name[1:], middle, strict=True)) < 2
            ]
        settings = {}
        for name in names:
            merged: Changes = {}
            for axis, entry in zip(axes, name, strict=True):
                for key, value in axis[entry].items():
                    merged[key] = tables.merge(merged.get(key), value)
            settings[", ".join(name)] = merged
        return settings

    @property
    def central_setting(self) -> str:
        """The name of the setting in the centre, on the first data set."""
        centre = self.table["centre"]
        return ", ".join(
            [next(iter(self.table["data"])), centre["share"], centre["graph"], centre["skew"]]
        )


def fixed_adversary(version: str = VERSION) -> FixedAdversary:
    """Read a version of the fixed adversary."""
    path = resources.files("fedcb2o.experiments") / "adversary" / f"{version}.toml"
    content = path.read_bytes()
    return FixedAdversary(version, records.parse_toml(content), hashlib.sha256(content).hexdigest())


def assessment_grid(
    source: str | Path, *, full: bool = False, adversary: FixedAdversary | None = None
) -> dict[str, Any]:
    """Return the grid of an assessment.

    `source` is a preset or a configuration file. The method is its section `algorithm`, with the
    keys of `agents` that say how a method validates; all others belong to the adversary.
    """
    adversary = adversary or fixed_adversary()
    is_file = str(source).endswith(".toml")
    table = tables.read_table(Path(source)) if is_file else tables.preset(str(source))
    algorithm = table.get("algorithm")
    if algorithm is None:
        raise ConfigError(f"{source} has no section [algorithm], which is what is assessed: add it")
    # All else is the adversary's, so that methods differ in nothing but themselves.
    method: Changes = {"algorithm": algorithm}
    agents = {key: value for key, value in table.get("agents", {}).items() if key in _AGENT_KEYS}
    if agents:
        method["agents"] = agents
    form = "full" if full else "quick"
    return {
        "name": f"assess-{'full-' * full}{records.slug(table['name'])}",
        "title": adversary.table["title"],
        **adversary.table["shared"],
        **adversary.table[form],
        "settings": adversary.settings(full=full),
        "attacks": adversary.table["attacks"],
        "defences": {table.get("title") or table["name"]: method},
    }


def assess(
    source: str | Path,
    *,
    full: bool = False,
    adversary: FixedAdversary | None = None,
    out: Path | None = None,
    jobs: int | None = None,
    data_dir: Path | None = None,
    watch: GridProgress | None = None,
) -> GridResult:
    """Run or continue an assessment; at its end write version, form and cost to assessment.json.

    Raises as `bench` does.
    """
    adversary = adversary or fixed_adversary()
    grid = assessment_grid(source, full=full, adversary=adversary)
    result = bench(
        grid,
        out=out,
        jobs=jobs,
        data_dir=data_dir,
        resume=True,
        watch=watch,
    )
    path = result.folder / _FILE
    if not result.failed and not path.exists():
        form = "full" if full else "quick"
        about = {"adversary": adversary.version, "definition": adversary.sha256, "form": form}
        cost = _relative_cost(grid, adversary.central_setting, data_dir)
        records.write_json_with_checksum(path, {**about, "cost": cost})
    return result


def _relative_cost(grid: Mapping[str, Any], setting: str, data_dir: Path | None) -> float:
    """Return the processor time of a round, relative to plain averaging, without an attack."""
    (method,) = grid["defences"].values()
    pair = {"method": method, "averaging": {"algorithm": _AVERAGING}}
    # Strengths do not matter here, and their setting may be another one.
    attack = {"agents": {"malicious_role": "clean"}}
    shared = {key: value for key, value in grid.items() if key != "adversary"}
    timed = {**shared, "settings": {}, "attacks": {"none": attack}, "defences": pair}
    for key, value in grid["settings"][setting].items():
        timed[key] = tables.merge(timed.get(key), value)
    del timed["settings"]
    plan = load_grid(timed, None, data_dir)
    seconds: dict[str, list[float]] = {name: [] for name in pair}
    for _ in range(_REPEATS):
        for name in pair:
            experiment = plan.experiment("", name, "none").model_copy(
                update={"seeds": tuple(plan.seeds[:1])}
            )
            seconds[name] += _round_seconds(experiment, data_dir)
    if not median(seconds["averaging"]):
        raise RunError("the processor's clock is too coarse for the cost of a round")
    return round(median(seconds["method"]) / median(seconds["averaging"]), 2)


def _round_seconds(experiment: Any, data_dir: Path | None) -> list[float]:
    """Return the processor seconds of each round but the first, in this process."""
    times: list[float] = []

    def on_round(*_: object) -> None:
        times.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        run_loaded(experiment, None, out=folder, data_dir=data_dir, workers=1, watch=on_round)
    return [after - before for before, after in pairwise(times)]
