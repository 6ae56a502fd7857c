"""Settings of FedAssay that trade one regret for another, in the grids where it has the largest.

    .venv/bin/python -m paper.frontier             # measure grids that are not kept
    .venv/bin/python -m paper.frontier --dry-run   # write the grids to runs/frontier alone
    .venv/bin/python -m paper.results              # the table of docs/results.md

The values are in docs/benchmark/frontier/NAME, a grid of variants alone with the attacks, settings
and seeds of the grid NAME. Nothing is chosen by them.
"""

import argparse
import dataclasses
import gzip
import tomllib
from pathlib import Path
from typing import Any

import pandas as pd
import tomli_w

import fedcb2o
from fedcb2o.report import SettingResults, read_grid
from fedcb2o.report._regret import worst_regret

BENCHMARK = Path(__file__).parents[1] / "docs" / "benchmark"
RUNS = Path("runs") / "frontier"
METHOD = "FedAssay"
VARIANTS: dict[str, dict[str, Any]] = {
    "alpha 0.3": {"alpha": 0.3},
    "alpha 3": {"alpha": 3.0},
    "interpolation 0.75": {"guards": {"interpolation": 0.75}},
    "label_coverage 0.5": {"label_coverage": 0.5},
    "loss_tolerance 1": {"guards": {"loss_tolerance": 1.0}},
}
"""Changes of the algorithm, by name."""
GRIDS: dict[str, tuple[str, ...]] = {
    "rivals": (),
    "settings": ("Dirichlet 0.5", "Shards of 2"),
    "emnist-all-data": (),
    "fashion-all-data": (),
}
"""Grids, and the settings of each that are measured; none for a grid without settings."""
MISSING = {
    "emnist-all-data": ("loss_tolerance 1",),
    "fashion-all-data": ("alpha 3", "label_coverage 0.5", "loss_tolerance 1"),
}
"""Variants that slow grids do not have."""
MEASURES = {"accuracy": "accuracy", "attack_success_rate": "success"}


def variant_grid(name: str) -> dict[str, Any]:
    """Return a kept grid with the variants in place of its defences."""
    table = tomllib.loads((BENCHMARK / name / "grid.toml").read_text(encoding="utf-8"))
    method = table["defences"][METHOD]
    chosen = [variant for variant in VARIANTS if variant not in MISSING.get(name, ())]
    table["defences"] = {
        variant: {**method, "algorithm": {**method["algorithm"], **VARIANTS[variant]}}
        for variant in chosen
    }
    if GRIDS[name]:
        table["settings"] = {setting: table["settings"][setting] for setting in GRIDS[name]}
    table.pop("tuning", None)
    return table | {"name": f"frontier-{name}", "reference": chosen[0]}


def keep(name: str, folder: Path) -> None:
    """Copy the values of a grid of variants to docs/benchmark/frontier.

    Args:
        name: Name of the kept grid.
        folder: Folder of the grid of variants.
    """
    target = BENCHMARK / "frontier" / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "grid.toml").write_bytes((folder / "grid.toml").read_bytes())
    with gzip.GzipFile(target / "summary.csv.gz", "wb", mtime=0) as file:
        file.write(read_grid(folder).summary_csv().encode())


def frontier_table(set_aside: tuple[str, ...]) -> pd.DataFrame:
    """Return worst regrets in accuracy and in success, in points, as text.

    Args:
        set_aside: Attacks that are left out.

    Returns:
        One row per variant, one column per grid and setting. The best defence of an attack is one
        of the kept grid or the variant itself.
    """
    columns = {}
    for name, settings in GRIDS.items():
        kept = read_grid(BENCHMARK / name)
        variants = read_grid(BENCHMARK / "frontier" / name)
        defences = kept.table["defences"] | variants.table["defences"]
        table = kept.table | {"defences": defences}
        for setting in settings or ("",):
            cells = {METHOD: _regrets(SettingResults(kept, setting), METHOD, set_aside)}
            for variant in variants.defences:
                own = variants.rows[variants.rows.defence == variant]
                rows = pd.concat([kept.rows, own])
                view = SettingResults(dataclasses.replace(kept, table=table, rows=rows), setting)
                cells[variant] = _regrets(view, variant, set_aside)
            columns[setting or kept.title] = cells
    rows = [METHOD, *VARIANTS]
    return pd.DataFrame(columns).reindex(rows).fillna("–").rename_axis("Setting")


def _regrets(view: SettingResults, method: str, set_aside: tuple[str, ...]) -> str:
    texts = []
    for measure in MEASURES:
        attacks = [name for name in view.columns(measure) if name not in set_aside]
        worst = worst_regret(view.shortfalls(measure), attacks).loc[method]
        texts.append(f"{100 * worst['mean']:.1f}")
    return " / ".join(texts)


def main() -> None:
    """Measure the grids of variants."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="write the grids alone")
    dry_run = parser.parse_args().dry_run
    for name in GRIDS:
        RUNS.mkdir(parents=True, exist_ok=True)
        file, text = RUNS / f"{name}.toml", tomli_w.dumps(variant_grid(name))
        file.write_text(text, encoding="utf-8")
        kept = BENCHMARK / "frontier" / name / "grid.toml"
        is_kept = kept.is_file() and kept.read_text(encoding="utf-8") == text
        if not dry_run and not is_kept:
            fedcb2o.bench(file, out=RUNS / name, resume=True)
            keep(name, RUNS / name)


if __name__ == "__main__":
    main()
