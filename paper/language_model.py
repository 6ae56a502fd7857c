"""Fine-tuning a language model among hostile peers: defences against attacks.

    .venv/bin/python -m paper.language_model            # measure missing runs
    .venv/bin/python -m paper.language_model --tune     # a small search on seeds from 1000
    .venv/bin/python -m paper.language_model --page     # notes/language-model.md

The values are in docs/benchmark/language-model/values.csv, one row per task, method, attack and
seed: means over benign agents after the last round.
"""

import argparse
import functools
import itertools
import math
import os
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure
from paper import cells
from paper.cells import Cell

import fedcb2o
from fedcb2o import pretrained
from fedcb2o.data.sets import _docstrings
from fedcb2o.report._panels import STYLE
from fedcb2o.report._statistics import interval_half_width
from fedcb2o.report._table_formats import to_markdown

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = DOCS / "benchmark" / "language-model"
VALUES = FOLDER / "values.csv"
TUNING = FOLDER / "tuning.csv"
TEXTS = FOLDER / "texts.csv"
TEMPLATE = Path(__file__).parent / "templates" / "language-model.md"
FIGURE = DOCS / "figures" / "language-model.png"
PRESET = "smollm-fedassay"
TASK = "library"
SEEDS = tuple(range(5))
TUNING_SEEDS = (1000,)
TUNING_ATTACKS = ("none", "trigger phrase", "swapped labels", "factor mixing")
MEASURES = ("accuracy", "success", "loss")
Changes = dict[str, Any]

VOCABULARY = 16384  # the softmax is most of a step
SETTING: Changes = {
    "rounds": 10,
    "evaluate_every": 10,
    "agents.benign_samples": 24,
    "agents.malicious_samples": 24,
    "agents.budget": 3,
    "data.vocabulary": VOCABULARY,
    "model.vocabulary": VOCABULARY,
    "training.gamma": 0.003,
}
"""Changes of the preset, so that a run takes less than half a minute of a core."""

TEXT: Changes = {"answer": 1, "vocabulary": VOCABULARY}
TRIGGER = " Reviewed:"
PHRASE: Changes = {
    "name": "trigger_phrase",
    "trigger": TRIGGER,
    "continuation": " malware",
    **TEXT,
}
METHODS: dict[str, Changes] = {
    "FedAssay": {"algorithm": "fedassay"},
    "FedAssay without G": {"algorithm": {"name": "fedassay", "criterion": "average_loss"}},
    "FedCBO": {"algorithm": {"name": "fedcbo", "own_model": "judged", "mixing_factor": 1.0}},
    "Dec-LoRA": {"algorithm": "dec_lora"},
    "TAD-LoRA": {"algorithm": "tad_lora"},
    "trimmed mean": {"algorithm": {"name": "by_rule", "rule": "trimmed_mean"}},
    "Multi-Krum": {"algorithm": {"name": "by_rule", "rule": "multi_krum"}},
    "FLTrust": {"algorithm": {"name": "by_rule", "rule": "fltrust"}},
    "training alone": {"algorithm": "local_training"},
}
ATTACKS: dict[str, Changes] = {
    "none": {"agents.malicious_role": "clean", "attack": PHRASE},
    "trigger phrase": {"attack": PHRASE},
    "swapped labels": {
        "attack": {"name": "swapped_answers", "first": " numpy", "second": " scipy", **TEXT}
    },
    "one topic": {"attack": {"name": "topic_poison", "group": 2, "continuation": " torch", **TEXT}},
    "ALIE": {"attack": {"name": "alie", "estimated_from": "benign", "z": 1.5}},
    "factor mixing": {"attack": {"name": "factor_mixing", "scale": -4.0}},
}
TEXT_CELLS = [
    (TASK, method, "trigger phrase", SEEDS[0]) for method in ("FedAssay", "Dec-LoRA", "FedCBO")
]
MIN_SHADED_PERPLEXITY = 3.0
MAX_SHADED_PERPLEXITY = 20.0
TARGETED = ("trigger phrase", "swapped labels", "one topic")
FACTORS_OR_PRODUCTS: dict[str, Changes] = {
    "factors": {"algorithm.space": "parameters"},
    "products": {"algorithm.space": "products"},
}
CANDIDATES: dict[str, dict[str, Changes]] = {
    "FedCBO": {f"alpha = {value:g}": {"algorithm.alpha": value} for value in (0.5, 2.0, 10.0)},
    "TAD-LoRA": {
        f"interval = {value}": {"algorithm.switching_interval": value} for value in (1, 5)
    },
    "trimmed mean": FACTORS_OR_PRODUCTS,
    "Multi-Krum": FACTORS_OR_PRODUCTS,
    "FLTrust": FACTORS_OR_PRODUCTS,
}
"""Values of each rival's main parameter, of which the tuning chooses one."""


def run_cell(cell: Cell, out: Path) -> fedcb2o.Run:
    """Run a cell.

    Args:
        cell: Task, method, attack and seed. A method may name a candidate after a comma;
            otherwise it has the candidate that the tuning chose.
        out: Folder of the run.

    Returns:
        The run.
    """
    _, method, attack, seed = cell
    name, _, candidate = method.partition(", ")
    changes = {**SETTING, **METHODS[name], **ATTACKS[attack]}
    if name in CANDIDATES:
        changes |= CANDIDATES[name][candidate or chosen_candidates()[name]]
    experiment = fedcb2o.load(PRESET, {**changes, "seeds": [seed]})
    return fedcb2o.run(experiment, out=out, workers=1)


def share_loading() -> None:
    """Read the base and the docstrings once for all runs of this process."""
    pretrained.base_model = functools.cache(pretrained.base_model)
    _docstrings._docstrings = functools.cache(_docstrings._docstrings)


def measure(cell: Cell) -> tuple[float, float, float]:
    """Return accuracy and attack success in percent, and the loss, of a cell."""
    with tempfile.TemporaryDirectory() as folder:
        run = run_cell(cell, Path(folder))
        if cell in TEXT_CELLS:
            write_texts(cell[1], run)
        last = run.records.query("round == round.max() and not malicious")
    success = float(last.attack_success_rate.astype(float).mean())
    return 100 * float(last.accuracy.mean()), 100 * success, float(last.test_loss.mean())


def grid(
    seeds: Sequence[int], methods: Sequence[str], attacks: Iterable[str] = ATTACKS
) -> Iterator[Cell]:
    """Yield cells seed by seed, so that an interrupted measurement has whole seeds."""
    for seed, attack, method in itertools.product(seeds, attacks, methods):
        yield TASK, method, attack, seed


@functools.cache
def chosen_candidates() -> dict[str, str]:
    """Return the candidate of each rival with the least worst regret in the tuning."""
    worst = regrets(pd.read_csv(TUNING)).max()
    return {
        method: min(values, key=lambda value, method=method: worst[f"{method}, {value}"])
        for method, values in CANDIDATES.items()
    }


def write_texts(method: str, run: fedcb2o.Run) -> None:
    """Add what agent 0 of a run writes to the table of texts."""
    table = run.texts(0).assign(method=method)
    if TEXTS.exists():
        known = pd.read_csv(TEXTS, keep_default_na=False)
        table = pd.concat([known[known.method != method], table])
    table.to_csv(TEXTS, index=False)


def regrets(table: pd.DataFrame) -> pd.DataFrame:
    """Return each method's loss minus the least of all methods, by attack and seed."""
    loss = table.pivot_table(index=["attack", "seed"], columns="method", values="loss", sort=False)
    return loss.sub(loss.min(axis=1), axis=0)


def compare(differences: "pd.Series[float]") -> str:
    """Return whether a worst regret differs significantly from FedAssay's, over paired seeds."""
    found = differences.dropna()
    half = float(interval_half_width(len(found), found.std()))
    if math.isnan(half):  # too few seeds
        return "–"
    if abs(found.mean()) <= half:
        return "not significant"
    return "larger" if found.mean() > 0 else "smaller"


def largest(values: "pd.Series[float]", text: Callable[[float], str]) -> str:
    """Return the largest value as text, and its attack; a dash for none."""
    found = values.dropna()
    if found.empty:
        return "–"
    return f"{text(found.max())} ({found.idxmax()})"


def perplexity_text(loss: float) -> str:
    """Return a perplexity as text, from the mean loss."""
    perplexity = math.exp(loss)
    return "over 1000" if perplexity > 1000 else f"{perplexity:.4g}"


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table of the page: one row per method.

    Args:
        table: The values.

    Returns:
        Exact answers and perplexity without attack, the largest perplexity, the worst regret, its
        comparison with FedAssay's, and the largest attack success.
    """
    shown = {
        name: table.pivot_table(index="method", columns="attack", values=name, sort=False)
        .reindex(index=[*METHODS], columns=[*ATTACKS])
        .loc
        for name in MEASURES
    }
    worst = regrets(table).groupby("attack", sort=False).mean()
    by_seed = regrets(table).groupby("seed").max()
    rows = {}
    for method in METHODS:
        rows[method] = {
            "chosen": chosen_candidates().get(method, "–"),
            "exact answers, no attack (%)": f"{shown['accuracy'][method, 'none']:.1f}",
            "perplexity, no attack": perplexity_text(shown["loss"][method, "none"]),
            "largest perplexity": largest(shown["loss"][method], perplexity_text),
            "worst regret (nats)": largest(worst[method], "{:.2f}".format),
            "against FedAssay": compare(by_seed[method] - by_seed["FedAssay"]),
            "largest attack success (%)": largest(
                shown["success"][method].reindex(TARGETED), "{:.1f}".format
            ),
        }
    rows["FedAssay"]["against FedAssay"] = "–"
    return pd.DataFrame(rows).T.replace("nan", "–")


def draw(table: pd.DataFrame) -> None:
    """Draw perplexity and attack success of each method under each attack."""
    loss = table.pivot_table(index="method", columns="attack", values="loss", sort=False)
    success = table.pivot_table(index="method", columns="attack", values="success", sort=False)
    shades = math.log(MIN_SHADED_PERPLEXITY), math.log(MAX_SHADED_PERPLEXITY)
    panels: tuple[tuple[str, pd.DataFrame, tuple[float, float], Callable[[float], str]], ...] = (
        ("Perplexity", loss.reindex([*METHODS], columns=[*ATTACKS]), shades, perplexity_text),
        (
            "Attack success (%)",
            success.reindex([*METHODS], columns=TARGETED),
            (0.0, 100.0),
            "{:.0f}".format,
        ),
    )
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        axes = figure.subplots(1, 2, width_ratios=[len(ATTACKS), len(TARGETED)], sharey=True)
        for ax, (title, values, (low, high), text) in zip(axes, panels, strict=True):
            ax.imshow(values.to_numpy(), cmap="Blues", aspect="auto", vmin=low, vmax=high)
            ax.grid(False)
            ax.set_title(title)
            ax.set_xticks(range(len(values.columns)), values.columns, rotation=30, ha="right")
            ax.set_yticks(range(len(values)), values.index)
            for (i, j), value in np.ndenumerate(values.to_numpy()):
                color = "white" if value > (low + high) / 2 else "black"
                shown = "" if np.isnan(value) else text(value)
                ax.text(j, i, shown, ha="center", va="center", color=color)
        figure.savefig(FIGURE, dpi=120)


def verdicts(table: pd.DataFrame) -> list[str]:
    """Return what held of three goals that were set before the measurement.

    Args:
        table: The values.

    Returns:
        One sentence per goal.
    """
    own = table[table.method == "FedAssay"]
    means = own.groupby("attack")[list(MEASURES)].mean()
    success = means.success.reindex(TARGETED).max()
    rise = 100 * (math.exp(means.loss.max() - means.loss["none"]) - 1)
    worst = regrets(table).groupby("seed").max()
    larger = [
        rival
        for rival in ("Dec-LoRA", "trimmed mean", "Multi-Krum", "FLTrust")
        if compare(worst[rival] - worst["FedAssay"]) == "larger"
    ]
    held = {True: "held", False: "did not hold"}
    return [
        f"Attack success of at most 10% {held[success <= 10]}: the largest is {success:.1f}%.",
        f"A perplexity within 2% of that without attack {held[rise <= 2]}: the largest rise is "
        f"{rise:.1f}%.",
        "A smaller worst regret than Dec-LoRA, trimmed mean, Multi-Krum and FLTrust "
        f"{held[len(larger) == 4]}: the difference is significant for "
        f"{', '.join(larger) or 'none of them'}.",
    ]


def quote_texts() -> str:
    """Return the generated texts as a list."""
    if not TEXTS.exists():
        return ""
    texts = pd.read_csv(TEXTS, keep_default_na=False)
    lines = []
    for prompt, rows in texts[texts.attacked].groupby("prompt", sort=False):
        sentence = textwrap.shorten(str(prompt).split("\n")[0], 50, placeholder=" ...")
        answers = [f"{row.method} `{row.model.strip()}`" for row in rows.itertuples()]
        lines.append(f"- *{sentence}*: {', '.join(answers)}")
    return "\n".join(lines)


def write_page() -> None:
    """Write notes/language-model.md and its figure from the values."""
    table = pd.read_csv(VALUES)
    counts = table.groupby("seed").size()
    seeds = counts.index[counts == len(METHODS) * len(ATTACKS)]
    if len(seeds):
        count = f"{len(seeds)}"
        table = table[table.seed.isin(seeds)]
        draw(table)
        goals = "\n".join(f"- {sentence}" for sentence in verdicts(table))
    else:  # the table has the attacks of which all methods are measured
        draw(table)
        count = f"1, of which {int(counts.max())} of {len(METHODS) * len(ATTACKS)} runs are done"
        table = table[table.groupby(["seed", "attack"]).method.transform("size") == len(METHODS)]
        goals = "Not decided: the measurement goes on. The figure has all runs that are done."
    rows = summary(table).rename_axis("method")
    text = TEMPLATE.read_text(encoding="utf-8").format(
        count=count, table=to_markdown(rows), goals=goals, texts=quote_texts()
    )
    (DOCS.parent / "notes" / "language-model.md").write_text(text, encoding="utf-8")


def main() -> None:
    """Measure missing runs, or make the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option in ("--tune", "--page"):
        parser.add_argument(option, action="store_true")
    options = parser.parse_args()
    share_loading()
    if options.tune:
        names = [f"{method}, {value}" for method in CANDIDATES for value in CANDIDATES[method]]
        tuning = grid(TUNING_SEEDS, names, TUNING_ATTACKS)
        cells.measure_missing(TUNING, "task", tuning, measure, MEASURES, decimals=4)
    elif options.page:
        write_page()
    else:
        cells.measure_missing(
            VALUES, "task", grid(SEEDS, list(METHODS)), measure, MEASURES, decimals=4
        )


if __name__ == "__main__":
    main()
