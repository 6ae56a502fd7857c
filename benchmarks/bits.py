"""Does this checkout compute the same bits as another one?

    python benchmarks/bits.py --out here.json                       # run everything, write digests
    python benchmarks/bits.py --against there.json [--only PATTERN] # run everything (or some) and compare

Small experiments on scikit-learn's digits, of every kind that a configuration knows, each run whole; what its seed and
settings determine is digested by SHA-256: each tensor of the checkpoint, metrics.jsonl, pairs.jsonl, agents.json and
summary.json (not timing.jsonl and environment.json, which differ from run to run). A line for each experiment that
differs says in what; the exit status is 1 if any does.

It uses the public names alone, so that it runs unchanged on other commits: copy it there, or set PYTHONPATH to their
`src`. Bits can be compared on one kind of machine and with one version of PyTorch; what a timing could choose is fixed
in the settings, and so is every choice whose default is a matter of taste.
"""

import argparse
import hashlib
import json
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import fedcb2o

SEED = 7
FILES = ("metrics.jsonl", "pairs.jsonl", "agents.json", "summary.json")
SHORT = 12  # hexadecimal digits of the digests that say where a file or tensor differs

Table = dict[str, Any]
Digests = dict[str, dict[str, Any]]


# The experiments


FLIP = {"name": "label_flip", "source": 9, "target": 4}
BACKDOOR = {"name": "backdoor", "target": 3}
FEDCB2O: Table = {
    "name": "fedcb2o", "criterion": "class_loss_gap", "criterion_from_round": 0, "alpha": 2.0, "own_model": "trusted",
    "own_candidate": False, "selection": "prob_sampling", "kappa": 2.0, "zeta": 0.5, "first_contact": "average",
    "lambda1": 10.0, "mixing_factor": 1.0,
}  # fmt: skip
BASE: Table = {
    "name": "bits",
    "seeds": [SEED],
    "rounds": 3,
    "linear": "torch",
    "layout": "contiguous",
    "convolution": "grouped",
    "data": {"name": "digits", "test_per_class": 24},
    "agents": {
        "num_clusters": 2, "benign": 3, "malicious": 2, "benign_samples": 40, "malicious_samples": 50, "budget": 5,
        "validation": 0.2, "split": "random", "hold_out": True, "validation_loss": "samples",
        "initialisation": "common", "colluders_own_model": True,
    },
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"gamma": 0.05, "lambda2": 1.0, "momentum": 0.9, "batch_size": 8, "local_epochs": 1},
    "algorithm": FEDCB2O,
    "attack": FLIP,
}  # fmt: skip
FEDCBO = {**FEDCB2O, "name": "fedcbo", "own_model": "judged"}
del FEDCBO["criterion"]
AVERAGE = {"name": "dfedavgm", "selection": "uniform", "own_model": "judged"}
IFCA = {"name": "ifca", "models": 2, "weights": "equal"}
LARGE = {"model": {"hidden": [2000]}, "rounds": 2}
TABLE = {"data": {"name": "breast_cancer"}, "agents": {"num_clusters": 1, "budget": 3}}


@dataclass(frozen=True)
class Case:
    """An experiment, and how it is run: by so many processes, stopped after round `stop` and resumed, in so much
    memory (bytes)."""

    table: Table
    workers: int = 1
    stop: int | None = None
    memory: int | None = None


class StopError(Exception):
    """What a run is interrupted by."""


def with_dropout(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network that draws while it trains."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, classes))


def changed(**changes: Any) -> Table:
    """The base with some keys changed: within a section, unless that names another function."""
    table = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in BASE.items()
    }
    for key, value in changes.items():
        merge = isinstance(value, Mapping) and value.get("name", table[key].get("name")) == table[
            key
        ].get("name")
        table[key] = {**table[key], **value} if merge else value
    return {key: value for key, value in table.items() if value is not None}


def by_rule(rule: Any, **more: Any) -> Table:
    """The algorithm of a robust rule."""
    return {"name": "by_rule", "rule": rule, **more}


def cases() -> dict[str, Case]:
    """Every experiment by its name; those of several processes last, so that these start once."""
    made: dict[str, Case] = {}
    for parts in (algorithms, rules, attacks, populations, settings, resumed, several):
        for name, case in parts():
            if name in made:
                raise ValueError(f"two experiments are called {name!r}")
            made[name] = case
    return made


def algorithms() -> Iterator[tuple[str, Case]]:
    """Every algorithm, in its options."""
    options: dict[str, Table] = {
        "as it is": {},
        "own model judged": {"own_model": "judged"},
        "own model excluded": {"own_model": "excluded"},
        "own candidate": {"own_candidate": True},
        "own candidate, judged": {"own_candidate": True, "own_model": "judged"},
        "first contact whole": {"first_contact": "whole"},
        "beta 0.25": {"beta": 0.25},
        "beta 0.5, judged": {"beta": 0.5, "own_model": "judged"},
        "beta 0.5, excluded": {"beta": 0.5, "own_model": "excluded"},
        "beta 1": {"beta": 1.0},
        "exact": {"selection": "everyone", "beta": 0.25, "own_model": "judged"},
        "T_G 1": {"criterion_from_round": 1},
        "T_G 2, judged": {"criterion_from_round": 2, "own_model": "judged"},
        "uniform": {"selection": "uniform"},
        "everyone": {"selection": "everyone"},
        "alpha 0": {"alpha": 0.0},
        "alpha 50": {"alpha": 50.0},
        "kappa 0, zeta 1": {"kappa": 0.0, "zeta": 1.0},
        "kappa 8, zeta 0.1": {"kappa": 8.0, "zeta": 0.1},
        "half way": {"mixing_factor": 0.5},
        "lambda1 gamma": {"mixing_factor": "lambda1*gamma", "lambda1": 3.0},
        "as in the text": {
            "own_model": "excluded", "mixing_factor": "lambda1*gamma", "lambda1": 10.0, "alpha": 10.0,
        },
        "as released": {
            "own_candidate": True, "first_contact": "whole", "criterion": {"name": "class_loss_gap", "absent": "zero"},
        },
    }  # fmt: skip
    for name, option in options.items():
        yield f"fedcb2o: {name}", Case(changed(algorithm=option))
    for name, criterion in CRITERIA.items():
        yield (
            f"criterion: {name}",
            Case(changed(algorithm={"criterion": criterion, "own_model": "judged"})),
        )
    for name in ("average_loss", "class_loss_entropy", "worst_class_loss", "distance"):
        yield (
            f"criterion: {name}, trusted, from round 1",
            Case(changed(algorithm={"criterion": name, "criterion_from_round": 1})),
        )
    yield "fedcbo", Case(changed(algorithm=FEDCBO))
    yield (
        "fedcbo: excluded, alpha 10",
        Case(changed(algorithm={**FEDCBO, "own_model": "excluded", "alpha": 10.0})),
    )
    yield (
        "fedcbo: as released",
        Case(
            changed(
                algorithm={**FEDCBO, "own_candidate": True, "first_contact": "whole", "alpha": 10.0}
            )
        ),
    )
    for own in ("judged", "excluded"):
        yield f"dfedavgm: own model {own}", Case(changed(algorithm={**AVERAGE, "own_model": own}))
    yield "dfedavgm: everyone", Case(changed(algorithm={**AVERAGE, "selection": "everyone"}))
    yield (
        "dfedavgm: prob_sampling",
        Case(changed(algorithm={**AVERAGE, "selection": "prob_sampling"})),
    )
    yield "local_training", Case(changed(algorithm={"name": "local_training"}))
    clean = {"malicious_role": "clean"}
    for weights in ("equal", "samples"):
        yield f"ifca: {weights}", Case(changed(algorithm={**IFCA, "weights": weights}))
        yield (
            f"ifca: {weights}, clean",
            Case(changed(algorithm={**IFCA, "weights": weights}, agents=clean)),
        )
    yield (
        "ifca: 3 models, crafted",
        Case(changed(algorithm={**IFCA, "models": 3}, attack={"name": "alie"})),
    )
    yield "ifca: for every receiver", Case(changed(algorithm=IFCA, attack={"name": "dissensus"}))
    yield "ifca: few online", Case(changed(algorithm=IFCA, agents={"participation": 0.5}))


CRITERIA: dict[str, Any] = {
    "average_loss": "average_loss",
    "class_loss_gap": "class_loss_gap",
    "class_loss_gap, absent zero": {"name": "class_loss_gap", "absent": "zero"},
    "worst_class_loss": "worst_class_loss",
    "class_loss_entropy": "class_loss_entropy",
    "trigger_sensitivity": "trigger_sensitivity",
    "trigger_sensitivity, overlap": {
        "name": "trigger_sensitivity", "tiles": 3, "overlap": True, "values": [0.0, 1.0],
    },
    "distance": "distance",
    "largest": {"name": "largest", "of": ["class_loss_gap", {"name": "trigger_sensitivity", "scale": 2.0}]},
    "largest, together": {"name": "largest", "of": ["class_loss_gap", {"name": "worst_class_loss", "scale": 0.5}]},
    "weighted_sum": {"name": "weighted_sum", "of": ["average_loss", {"name": "distance", "scale": 3.0}]},
    "weighted_sum, together": {"name": "weighted_sum", "of": ["average_loss", "class_loss_entropy"]},
}  # fmt: skip


ON_MODELS = (
    "mean", "coordinate_median", "trimmed_mean", "meamed", "geometric_median", "krum", "multi_krum", "bulyan",
    "centred_clipping", "norm_clipping", "clipped_gossip", "fltrust", "balance", "monna",
)  # fmt: skip
ON_VALUES: dict[str, Any] = {
    "ubar": "ubar",
    "sageflow": {
        "name": "sageflow",
        "threshold": 2.3,
    },  # at first none is surer than the default asks
    "lfighter": "lfighter",
}
GIVEN: dict[str, Table] = {
    "krum": {"f": 1, "neighbours": 2},
    "multi_krum": {"f": 1, "selected": 2},
    "bulyan": {"f": 1},
    "trimmed_mean": {"f": 1},
    "meamed": {"f": 2},
    "monna": {"f": 2},
    "ubar": {"f": 1, "alpha": 0.3},
    "clipped_gossip": {"f": 2, "radius": 0.5},
    "geometric_median": {"smoothing": 1e-3, "iterations": 5},
    "centred_clipping": {"radius": 0.5, "iterations": 3},
    "norm_clipping": {"radius": 0.3},
    "balance": {"gamma": 0.5, "kappa": 2.0, "alpha": 0.3},
    "sageflow": {"threshold": 2.28, "delta": 0.5},
}


def rules() -> Iterator[tuple[str, Case]]:
    """Every robust rule, with the own model and without, after pre-steps, with parameters given."""
    for name, rule in {**dict(zip(ON_MODELS, ON_MODELS, strict=True)), **ON_VALUES}.items():
        for own in ("judged", "excluded"):
            yield (
                f"rule: {name}, own model {own}",
                Case(changed(algorithm=by_rule(rule, own_model=own))),
            )
    for name in ON_MODELS:
        for step in ("nnm", "bucketing"):
            yield (
                f"rule: {name} after {step}",
                Case(changed(algorithm=by_rule(name, pre_step=step))),
            )
    for name, given in GIVEN.items():
        table = changed(algorithm=by_rule({"name": name, **given}), agents={"budget": 6})
        yield (
            f"rule: {name} with {', '.join(f'{key} {value}' for key, value in given.items())}",
            Case(table),
        )
    more: dict[str, Table] = {
        "mean after nnm with f 1": by_rule("mean", pre_step={"name": "nnm", "f": 1}),
        "krum after bucketing by 3": by_rule("krum", pre_step={"name": "bucketing", "size": 3}),
        "norm_clipping after nnm, excluded": by_rule(
            "norm_clipping", pre_step="nnm", own_model="excluded"
        ),
        "krum by prob_sampling": by_rule("krum", selection="prob_sampling"),
        "ubar by prob_sampling": by_rule("ubar", selection="prob_sampling", own_model="excluded"),
        "trimmed_mean of everyone": by_rule("trimmed_mean", selection="everyone"),
        "geometric_median half way": by_rule("geometric_median", mixing_factor=0.5),
        "by_num_samples": by_rule("by_num_samples"),
        "by_num_samples, unjudged": by_rule("by_num_samples", judges=False),
    }
    for name, algorithm in more.items():
        yield f"rule: {name}", Case(changed(algorithm=algorithm))
    for name in ("coordinate_median", "krum", "fltrust", "lfighter", "bulyan"):
        few = {"participation": 0.5, "graph": {"name": "erdos_renyi", "p": 0.4}}
        yield f"rule: {name} of few", Case(changed(algorithm=by_rule(name), agents=few))


NEEDED: dict[str, Table] = {
    "label_flips": {"pairs": [[9, 4], [4, 9]]},
    "backdoor": {"target": 3},
    "clean_label": {"target": 3},
    "signal": {"target": 3},
    "blended": {"target": 3},
    "rarest_flip": {"target": 3},
    "spread_flip": {"target": 3},
    "boosting": {"data": FLIP},
    "echo": {"data": FLIP},
    "gap_aware": {"data": FLIP},
    "slow_drift": {"data": FLIP},
}
EVERY_ATTACK = (
    "label_flips", "random_labels", "spread_flip", "rarest_flip", "shifted_labels", "backdoor", "clean_label",
    "feature_noise", "sign_flip", "gaussian_noise", "trash", "boosting", "free_rider", "not_finite", "alie", "ipm",
    "min_max", "min_sum", "mimic", "dissensus", "equivocation", "gap_aware", "slow_drift", "signal", "blended",
    "hybrid_sparse", "spectral", "echo",
)  # fmt: skip
ATTACKS: dict[str, Table] = {
    "random_labels, a share": {"name": "random_labels", "share": 0.4},
    "backdoor in parts": {
        **BACKDOOR,
        "parts": 2,
        "pattern": "cross",
        "size": 3,
        "corner": "top left",
        "margin": 1,
    },
    "clean_label, a share": {
        "name": "clean_label",
        "target": 3,
        "share": 0.5,
        "pattern": "checkerboard",
    },
    "free_rider in disguise": {"name": "free_rider", "noise": 0.01},
    "not_finite huge": {"name": "not_finite", "value": "huge"},
    "alie from the benign": {"name": "alie", "z": 1.5, "estimated_from": "benign"},
    "min_max by sign": {"name": "min_max", "direction": "sign"},
    "min_sum by unit": {"name": "min_sum", "direction": "unit"},
    "mimic of the outermost": {"name": "mimic", "whom": "outermost"},
    "mimic across": {"name": "mimic", "whom": 1, "clusters_on": 1},
    "boosted backdoor": {"name": "boosting", "factor": 3.0, "data": BACKDOOR},
    "sign_flip of poisoned": {"name": "sign_flip", "scale": 2.0, "data": FLIP},
}


def attacks() -> Iterator[tuple[str, Case]]:
    """Every attack; sleepers and sybils; attacks against other algorithms."""
    for name in EVERY_ATTACK:
        yield f"attack: {name}", Case(changed(attack={"name": name, **NEEDED.get(name, {})}))
    for name, attack in ATTACKS.items():
        yield f"attack: {name}", Case(changed(attack=attack))
    sleepers = ("label_flips", "alie", "dissensus", "not_finite", "boosting")
    for name in sleepers:
        yield (
            f"sleeper: {name}",
            Case(changed(attack={"name": name, **NEEDED.get(name, {}), "from_round": 2})),
        )
    yield "sybils: label_flip", Case(changed(attack={**FLIP, "sybils": True}))
    yield (
        "sybils: trash, from round 1",
        Case(changed(attack={"name": "trash", "sybils": True, "from_round": 1})),
    )
    yield (
        "sybils: first contact whole",
        Case(
            changed(
                attack={**FLIP, "sybils": True},
                algorithm={"first_contact": "whole", "own_candidate": True},
            )
        ),
    )
    against: dict[str, Table] = {
        "dfedavgm": AVERAGE,
        "krum": by_rule("krum"),
        "coordinate_median": by_rule("coordinate_median"),
        "bulyan after nnm": by_rule("bulyan", pre_step="nnm"),
        "norm_clipping": by_rule("norm_clipping"),
        "ubar": by_rule("ubar"),
        "fedcbo": FEDCBO,
    }
    for defence, algorithm in against.items():
        for name in ("alie", "dissensus", "not_finite"):
            yield (
                f"{name} against {defence}",
                Case(changed(attack={"name": name}, algorithm=algorithm)),
            )


def populations() -> Iterator[tuple[str, Case]]:
    """Who takes part, what they hold, and how they meet."""
    graphs: dict[str, Any] = {
        "ring": "ring",
        "ring, 2 near": {"name": "ring", "near": 2},
        "torus": "torus",
        "random_regular": {"name": "random_regular", "degree": 3},
        "erdos_renyi": {"name": "erdos_renyi", "p": 0.3},
        "small_world": {"name": "small_world", "near": 2, "p": 0.3},
        "same_cluster": "same_cluster",
    }
    for name, graph in graphs.items():
        yield f"graph: {name}", Case(changed(agents={"graph": graph}))
    yield "graph: ring, dfedavgm", Case(changed(agents={"graph": "ring"}, algorithm=AVERAGE))
    yield (
        "graph: same_cluster, everyone",
        Case(changed(agents={"graph": "same_cluster"}, algorithm={"selection": "everyone"})),
    )
    agents: dict[str, Table] = {
        "participation 0.7": {"participation": 0.7},
        "participation 0.2": {"participation": 0.2},
        "dirichlet": {"skew": {"name": "dirichlet", "concentration": 0.5}},
        "dirichlet, stratified": {
            "skew": {"name": "dirichlet", "concentration": 2.0},
            "split": "stratified",
        },
        "shards": {"skew": {"name": "shards", "classes": 3}},
        "stratified": {"split": "stratified"},
        "split as released": {"split": "released", "validation": 0.5},
        "split as released, nothing held out": {
            "split": "released",
            "validation": 0.5,
            "hold_out": False,
        },
        "nothing held out": {"hold_out": False},
        "validation loss by batches": {"validation_loss": "batches", "validation": 0.5},
        "independent start": {"initialisation": "independent"},
        "clean": {"malicious_role": "clean"},
        "removed": {"malicious_role": "removed"},
        "colluders without their own": {"colluders_own_model": False},
        "1 cluster": {"num_clusters": 1, "budget": 3},
        "4 clusters": {"num_clusters": 4},
        "budget 1": {"budget": 1},
        "budget 9": {"budget": 9},
        "no malicious": {"malicious": 0},
        "one benign, many malicious": {"benign": 1, "malicious": 4},
    }
    for name, part in agents.items():
        yield f"agents: {name}", Case(changed(agents=part))
    benign = {"malicious_role": "benign"}
    yield "agents: malicious are benign, dfedavgm", Case(changed(agents=benign, algorithm=AVERAGE))
    yield (
        "agents: malicious are benign, krum",
        Case(changed(agents=benign, algorithm=by_rule("krum"))),
    )
    yield (
        "agents: removed, dfedavgm",
        Case(changed(agents={"malicious_role": "removed"}, algorithm=AVERAGE)),
    )
    yield (
        "agents: colluders without their own, one each",
        Case(changed(agents={"colluders_own_model": False, "malicious": 1, "budget": 3})),
    )
    yield (
        "agents: 4 clusters, ifca",
        Case(changed(agents={"num_clusters": 4}, algorithm={**IFCA, "models": 4})),
    )


def settings() -> Iterator[tuple[str, Case]]:
    """Models, training, precision, and how the work is done."""
    models: dict[str, Table] = {
        "logistic": {"name": "logistic"},
        "mlp of two layers": {"hidden": [12, 6]},
        "cnn": {"name": "cnn", "hidden": 4},
        "cnn, linear between": {"name": "cnn", "hidden": 4, "dense_activation": "none"},
        "resnet": {"name": "resnet", "width": 8, "blocks": 1},
        "dropout": {"name": with_dropout},
    }
    for name, model in models.items():
        rounds = 1 if name == "resnet" else 2
        yield f"model: {name}", Case(changed(model=model, rounds=rounds))
    for name in ("cnn", "resnet"):
        yield f"model: {name} together 3", Case(changed(model=models[name], rounds=1, together=3))
    trainings: dict[str, Table] = {
        "bfloat16": {"precision": "bfloat16"},
        "no momentum": {"momentum": 0.0},
        "local steps": {"local_steps": 7},
        "2 epochs, lambda2 0.5": {"local_epochs": 2, "lambda2": 0.5},
        "one batch": {"batch_size": 1000},
    }
    for name, training in trainings.items():
        yield f"training: {name}", Case(changed(training=training))
    yield (
        "training: cnn in bfloat16",
        Case(changed(model=models["cnn"], training={"precision": "bfloat16"}, rounds=1)),
    )
    for together in (1, 3, 32):
        yield f"together {together}", Case(changed(together=together))
        yield (
            f"together {together}, few online",
            Case(changed(together=together, agents={"participation": 0.6})),
        )
    yield "together 3, ifca", Case(changed(together=3, algorithm=IFCA))
    yield "together 3, dropout", Case(changed(together=3, model=models["dropout"]))
    yield "evaluated on tuning images", Case(changed(evaluate_on="tuning"))
    yield (
        "evaluated and saved every second round",
        Case(changed(rounds=5, evaluate_every=2, checkpoint_every=2)),
    )
    yield "a table", Case(changed(**TABLE, attack={"name": "random_labels"}))
    yield (
        "a table, logistic, from fedcbo",
        Case(
            changed(
                **TABLE,
                model={"name": "logistic"},
                algorithm=FEDCBO,
                attack={"name": "shifted_labels"},
            )
        ),
    )
    yield "large", Case(changed(**LARGE))
    yield "large, crafted", Case(changed(**LARGE, attack={"name": "min_max"}))
    yield (
        "large, by columns",
        Case(changed(**LARGE, algorithm=by_rule("trimmed_mean", pre_step="nnm"))),
    )
    yield "large, ifca", Case(changed(**LARGE, algorithm={**IFCA, "models": 3}))
    yield "large, bfloat16", Case(changed(**LARGE, training={"precision": "bfloat16"}))
    yield (
        "large, on disk",
        Case(changed(**LARGE, attack={"name": "dissensus"}), memory=2**28 + 20 * 2**20),
    )
    wide = {
        "rounds": 1,
        "model": {"hidden": [1100, 1000]},
        "agents": {"benign": 2, "malicious": 1, "budget": 3},
    }
    for linear in ("torch", "onednn"):
        yield f"very large, by {linear}", Case(changed(**wide, linear=linear))


RESUMED: dict[str, Table] = {
    "fedcb2o": {},
    "fedcb2o, few online": {"agents": {"participation": 0.6}, "rounds": 4},
    "first contact whole, T_G 2": {
        "algorithm": {"first_contact": "whole", "criterion_from_round": 2}
    },
    "fedcbo": {"algorithm": FEDCBO},
    "ifca": {"algorithm": IFCA},
    "norm_clipping": {"algorithm": by_rule("norm_clipping")},
    "balance": {"algorithm": by_rule("balance")},
    "dissensus": {"attack": {"name": "dissensus"}},
    "sleeping alie": {"attack": {"name": "alie", "from_round": 2}},
    "sybils": {"attack": {**FLIP, "sybils": True}},
    "saved every second round": {"rounds": 5, "checkpoint_every": 2},
    "dropout": {"model": {"name": with_dropout}},
}


def resumed() -> Iterator[tuple[str, Case]]:
    """Runs that are stopped after a round and go on."""
    for name, changes in RESUMED.items():
        yield f"resumed after 1: {name}", Case(changed(**changes), stop=1)
    yield (
        "resumed after 3: saved every second round",
        Case(changed(rounds=5, checkpoint_every=2), stop=3),
    )


def several() -> Iterator[tuple[str, Case]]:
    """Runs by two processes, and one of them resumed."""
    for name in ("fedcb2o, few online", "ifca", "norm_clipping", "dissensus", "sybils"):
        yield f"2 workers: {name}", Case(changed(**RESUMED[name]), workers=2)
    yield "2 workers: large", Case(changed(**LARGE), workers=2)
    yield "2 workers: large, crafted", Case(changed(**LARGE, attack={"name": "min_max"}), workers=2)
    yield (
        "2 workers: large, by columns",
        Case(changed(**LARGE, algorithm=by_rule("trimmed_mean", pre_step="nnm")), workers=2),
    )
    yield "2 workers: cnn", Case(changed(model={"name": "cnn", "hidden": 4}, rounds=1), workers=2)
    yield (
        "2 workers, resumed after 1: dissensus",
        Case(changed(**RESUMED["dissensus"]), workers=2, stop=1),
    )


# Running them


def digests_of(case: Case) -> dict[str, Any]:
    """The digests of a run, or the error that ended it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            carry_out(case, Path(folder))
        except (
            Exception
        ) as error:  # another checkout may lack something: the other experiments go on
            return {"error": f"{type(error).__name__}: {str(error).replace(folder, 'FOLDER')}"}
        return digested(Path(folder) / f"seed-{SEED}")


def carry_out(case: Case, folder: Path) -> None:
    """Run an experiment, in two parts where it is to be stopped."""

    def run(watch: Callable[[Any, int, Mapping[str, Any]], None], resume: bool) -> None:
        experiment = fedcb2o.load(case.table)
        fedcb2o.run(
            experiment,
            out=folder,
            workers=case.workers,
            memory=case.memory,
            watch=watch,
            resume=resume,
        )

    def until(experiment: Any, seed: int, line: Mapping[str, Any]) -> None:
        if line["round"] == case.stop:
            raise StopError

    if case.stop is not None:
        try:
            run(until, resume=False)
        except StopError:
            pass
        else:
            raise RuntimeError(f"the run was not stopped after round {case.stop}")
    run(lambda experiment, seed, line: None, resume=case.stop is not None)


def digested(folder: Path) -> dict[str, Any]:
    """The digest of each file and tensor of a seed's folder and, shorter, of their parts, to say where they differ."""
    dim = json.loads((folder / "agents.json").read_text())["dim"]
    found: dict[str, Any] = {}
    for name, tensor in sorted(load_file(folder / "checkpoint.safetensors").items()):
        rows = tensor[:, :dim].contiguous() if name == "models" else tensor
        found[f"checkpoint {name}"] = sha(bytes_of(rows))
        if name in ("models", "met"):
            found[f"parts of checkpoint {name}"] = {
                f"row {j}": short(bytes_of(row)) for j, row in enumerate(rows)
            }
    for name in FILES:
        text = (folder / name).read_text()
        found[name] = sha(text.encode())
        lines = [json.loads(line) for line in (text.splitlines() if name.endswith("l") else [text])]
        found[f"parts of {name}"] = {
            f"{key} of round {line['round']}" if name.endswith("l") else key: short(
                json.dumps(value).encode()
            )
            for line in lines
            for key, value in line.items()
        }
    return found


def bytes_of(tensor: torch.Tensor) -> bytes:
    """What a tensor is, bit by bit."""
    return f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + tensor.contiguous().numpy().tobytes()


def sha(content: bytes) -> str:
    """SHA-256."""
    return hashlib.sha256(content).hexdigest()


def short(content: bytes) -> str:
    """The beginning of SHA-256."""
    return sha(content)[:SHORT]


# Comparing


def difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    """What differs between the digests of two runs, in words; None where nothing does."""
    if "error" in here or "error" in there:
        told = (each.get("error", "no error") for each in (here, there))
        return None if here == there else "here {}, there {}".format(*told)
    names = [name for name in {**there, **here} if not name.startswith("parts of ")]
    differ = [name for name in names if here.get(name) != there.get(name)]
    return "; ".join(name + where(name, here, there) for name in differ) or None


def where(name: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """The first few parts in which a file or tensor differs, in brackets."""
    ours, theirs = (each.get(f"parts of {name}", {}) for each in (here, there))
    parts = [part for part in {**theirs, **ours} if ours.get(part) != theirs.get(part)]
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    return f" ({', '.join(parts[:3])}{more})" if parts else ""


def compared(here: Digests, there: Digests, chosen: Callable[[str], Any]) -> int:
    """Print a line for each experiment that differs, or that one side lacks; the number of those lines."""
    count = 0
    for name in filter(chosen, {**there, **here}):
        if name not in here or name not in there:
            told: str | None = f"only {'there' if name not in here else 'here'}"
        else:
            told = difference(here[name], there[name])
        if told is not None:
            count += 1
            print(f"{name}: {told}")
    return count


def surroundings() -> dict[str, str]:
    """What bits depend on beside the code."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
    }


def main() -> int:
    """Run, write and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the digests there")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="compare with the digests there"
    )
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        help="experiments in whose name this regular expression is found",
    )
    parser.add_argument(
        "--list", action="store_true", help="print the experiments' names, and run none"
    )
    options = parser.parse_args()
    chosen = re.compile(options.only or "", re.IGNORECASE).search
    some = {name: case for name, case in cases().items() if chosen(name)}
    if options.list:
        print("\n".join(some))
        return 0
    if not some:
        parser.error(f"no experiment's name has {options.only!r} in it")
    there = json.loads(options.against.read_text()) if options.against else None
    print(
        f"fedcb2o of {Path(fedcb2o.__file__).parent}, {len(some)} experiments",
        file=sys.stderr,
        flush=True,
    )
    start = time.perf_counter()
    here = {}
    for i, (name, case) in enumerate(some.items(), 1):
        began = time.perf_counter()
        here[name] = digests_of(case)
        told = f" ({here[name]['error']})" if "error" in here[name] else ""
        seconds = time.perf_counter() - began
        print(f"{i:>3}/{len(some)} {seconds:5.2f} s  {name}{told}", file=sys.stderr, flush=True)
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    if options.out:
        options.out.write_text(
            json.dumps({"surroundings": surroundings(), "digests": here}, indent=1) + "\n"
        )
    failed = sum("error" in found for found in here.values())
    if there is None:
        print(f"{len(here)} experiments, {failed} ended in an error")
        return 1 if failed else 0
    for key, value in surroundings().items():
        if (theirs := there["surroundings"].get(key)) != value:
            print(
                f"Note: {key} is {value} here and {theirs} there: bits may differ for that.",
                file=sys.stderr,
            )
    count = compared(here, there["digests"], chosen)
    print(f"{len(here)} experiments, {count} differ, {failed} ended in an error")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
