"""Comparison of results with another checkout, bit by bit.

    python benchmarks/bits.py --out here.json                       # run all cases, write digests
    python benchmarks/bits.py --against there.json [--only PATTERN] # run all or some cases, compare

The cases are small experiments on scikit-learn's digits, with every kind of configuration. Each
runs completely. SHA-256 digests cover everything that its seed and settings determine: each tensor
of the checkpoint, metrics.jsonl, pairs.jsonl, agents.json and summary.json (not timing.jsonl and
environment.json, which differ between runs). One line per differing experiment lists the
differences; the exit status is 1 if there are any.

The script uses public names only, so that it runs unchanged on other commits: copy it there, or set
PYTHONPATH to their `src`. Bits are comparable on one kind of machine with one version of PyTorch.
The settings fix all choices by timing, and all options with debatable defaults.
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
SHORT_LENGTH = 12  # hexadecimal digits of the digests that locate differences

Table = dict[str, Any]
Digests = dict[str, dict[str, Any]]


# The experiments


FLIP = {"name": "label_flip", "source": 9, "target": 4}
BACKDOOR = {"name": "backdoor", "target": 3}
FEDCB2O: Table = {
    **{"name": "fedcb2o", "criterion": "class_loss_gap", "criterion_from_round": 0, "alpha": 2.0},
    **{"own_model": "trusted", "own_candidate": False, "selection": "prob_sampling"},
    **{"kappa": 2.0, "zeta": 0.5, "first_contact": "average"},
    **{"lambda1": 10.0, "mixing_factor": 1.0},
}
BASE: Table = {
    **{"name": "bits", "seeds": [SEED], "rounds": 3},
    **{"linear": "torch", "layout": "contiguous", "convolution": "grouped"},
    "data": {"name": "digits", "test_per_class": 24},
    "agents": {
        **{"num_clusters": 2, "benign": 3, "malicious": 2, "budget": 5},
        **{"benign_samples": 40, "malicious_samples": 50, "validation": 0.2, "split": "random"},
        **{"hold_out": True, "validation_loss": "samples"},
        **{"initialisation": "common", "colluders_own_model": True},
    },
    "model": {"name": "mlp", "hidden": [8]},
    "training": {
        **{"gamma": 0.05, "lambda2": 1.0, "momentum": 0.9, "batch_size": 8, "local_epochs": 1},
    },
    "algorithm": FEDCB2O,
    "attack": FLIP,
}
FEDCBO = {**FEDCB2O, "name": "fedcbo", "own_model": "judged"}
del FEDCBO["criterion"]
AVERAGE = {"name": "dfedavgm", "selection": "uniform", "own_model": "judged"}
IFCA = {"name": "ifca", "models": 2, "weights": "equal"}
LARGE = {"model": {"hidden": [2000]}, "rounds": 2}
FEDASSAY: Table = {"name": "fedassay"}
GUARDS: Table = {
    **{"newcomer_share": 0.4, "max_distance": 1.0, "min_distance": 1.0},
    **{"interpolation": 0.5, "loss_tolerance": 1.0},
}
TABLE = {"data": {"name": "breast_cancer"}, "agents": {"num_clusters": 1, "budget": 3}}
CNN = {"name": "cnn", "hidden": 4}


@dataclass(frozen=True)
class Case:
    """An experiment and its execution.

    Attributes:
        table: The configuration.
        workers: Number of processes.
        stop: Round after which the run is stopped and resumed, or None.
        memory: Memory budget in bytes, or None.
    """

    table: Table
    workers: int = 1
    stop: int | None = None
    memory: int | None = None


Changes = Iterator[tuple[str, Table | Case]]
"""Names of experiments with their changes of the base, or with complete cases."""


class StopError(Exception):
    """Interruption of a run."""


def with_dropout(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a network that draws random numbers in training."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, classes))


def changed(**changes: Any) -> Table:
    """Return the base with changes, merged by section unless it names another function."""
    table = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in BASE.items()
    }
    for key, value in changes.items():
        if isinstance(value, Mapping):
            name = table[key].get("name")
            if value.get("name", name) == name:
                value = {**table[key], **value}
        table[key] = value
    return {key: value for key, value in table.items() if value is not None}


def by_rule(rule: Any, **options: Any) -> Table:
    """Return the algorithm with a robust rule."""
    return {"name": "by_rule", "rule": rule, **options}


def cases() -> dict[str, Case]:
    """Return all experiments by name, those with several processes last."""
    result: dict[str, Case] = {}
    for section in (algorithms, rules, attacks, populations, settings, resumed, several):
        for name, item in section():
            if name in result:
                raise ValueError(f"two experiments have the name {name!r}")
            result[name] = item if isinstance(item, Case) else Case(changed(**item))
    return result


FEDCB2O_OPTIONS: dict[str, Table] = {
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
        **{"own_model": "excluded", "alpha": 10.0},
        **{"mixing_factor": "lambda1*gamma", "lambda1": 10.0},
    },
    "as released": {
        **{"own_candidate": True, "first_contact": "whole"},
        "criterion": {"name": "class_loss_gap", "absent": "zero"},
    },
}
GAP_AND_TRIGGER = ["class_loss_gap", {"name": "trigger_sensitivity", "scale": 2.0}]
GAP_AND_WORST = ["class_loss_gap", {"name": "worst_class_loss", "scale": 0.5}]
TILES = {"name": "trigger_sensitivity", "tiles": 3, "overlap": True, "values": [0.0, 1.0]}
CRITERIA: dict[str, Any] = {
    "average_loss": "average_loss",
    "class_loss_gap": "class_loss_gap",
    "class_loss_gap, absent zero": {"name": "class_loss_gap", "absent": "zero"},
    "worst_class_loss": "worst_class_loss",
    "class_loss_entropy": "class_loss_entropy",
    "trigger_sensitivity": "trigger_sensitivity",
    "trigger_sensitivity, overlap": TILES,
    "distance": "distance",
    "last_layer_excess": "last_layer_excess",
    "largest": {"name": "largest", "of": GAP_AND_TRIGGER},
    "largest, together": {"name": "largest", "of": GAP_AND_WORST},
    "weighted_sum": {
        "name": "weighted_sum",
        "of": ["average_loss", {"name": "distance", "scale": 3.0}],
    },
    "weighted_sum, together": {
        "name": "weighted_sum",
        "of": ["average_loss", "class_loss_entropy"],
    },
}


def algorithms() -> Changes:
    """Yield all algorithms with their options."""
    for name, option in FEDCB2O_OPTIONS.items():
        yield f"fedcb2o: {name}", {"algorithm": option}
    for name, criterion in CRITERIA.items():
        algorithm = {"criterion": criterion, "own_model": "judged"}
        yield f"criterion: {name}", {"algorithm": algorithm}
    for name in ("average_loss", "class_loss_entropy", "worst_class_loss", "distance"):
        algorithm = {"criterion": name, "criterion_from_round": 1}
        yield f"criterion: {name}, trusted, from round 1", {"algorithm": algorithm}
    yield "fedcbo", {"algorithm": FEDCBO}
    excluded = {**FEDCBO, "own_model": "excluded", "alpha": 10.0}
    yield "fedcbo: excluded, alpha 10", {"algorithm": excluded}
    released = {**FEDCBO, "own_candidate": True, "first_contact": "whole", "alpha": 10.0}
    yield "fedcbo: as released", {"algorithm": released}
    for own in ("judged", "excluded"):
        yield f"dfedavgm: own model {own}", {"algorithm": {**AVERAGE, "own_model": own}}
    for selection in ("everyone", "prob_sampling"):
        yield f"dfedavgm: {selection}", {"algorithm": {**AVERAGE, "selection": selection}}
    yield "local_training", {"algorithm": {"name": "local_training"}}
    for weights in ("equal", "samples"):
        algorithm = {**IFCA, "weights": weights}
        yield f"ifca: {weights}", {"algorithm": algorithm}
        clean = {"malicious_role": "clean"}
        yield f"ifca: {weights}, clean", {"algorithm": algorithm, "agents": clean}
    for attack in ("label_flips", "alie", "dissensus", "random_model"):
        poison = {"name": attack, **ATTACK_PARAMETERS.get(attack, {})}
        yield f"fedassay: {attack}", {"algorithm": FEDASSAY, "attack": poison}
    kept = {"hold_out": False, "validation": 1.0}
    yield "fedassay: nothing held out", {"algorithm": FEDASSAY, "agents": kept}
    yield "fedassay: without guards", {"algorithm": {**FEDASSAY, "guards": False}}
    yield "guards: fedcbo", {"algorithm": {**FEDCBO, "guards": GUARDS}}
    krum = by_rule("krum", selection="prob_sampling", guards=GUARDS)
    yield "guards: krum by prob_sampling", {"algorithm": krum}
    yield "guards: dfedavgm", {"algorithm": {**AVERAGE, "guards": GUARDS}}
    three = {**IFCA, "models": 3}
    yield "ifca: 3 models, crafted", {"algorithm": three, "attack": {"name": "alie"}}
    yield "ifca: for every receiver", {"algorithm": IFCA, "attack": {"name": "dissensus"}}
    yield "ifca: few online", {"algorithm": IFCA, "agents": {"participation": 0.5}}


RULES_ON_MODELS = (
    *("mean", "coordinate_median", "trimmed_mean", "meamed", "geometric_median", "krum"),
    *("multi_krum", "bulyan", "centred_clipping", "norm_clipping", "clipped_gossip", "fltrust"),
    *("balance", "monna"),
)
RULES_ON_VALUES: dict[str, Any] = {
    "ubar": "ubar",
    "sageflow": {"name": "sageflow", "threshold": 2.3},  # no early model reaches the default
    "lfighter": "lfighter",
}
RULE_PARAMETERS: dict[str, Table] = {
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
RULE_VARIANTS: dict[str, Table] = {
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
    "by_num_samples, unjudged": by_rule("by_num_samples", needs_losses=False),
}


def rules() -> Changes:
    """Yield all robust rules, after pre-steps, and with parameters."""
    for name, rule in {**{name: name for name in RULES_ON_MODELS}, **RULES_ON_VALUES}.items():
        for own in ("judged", "excluded"):
            yield f"rule: {name}, own model {own}", {"algorithm": by_rule(rule, own_model=own)}
    for name in RULES_ON_MODELS:
        for step in ("nnm", "bucketing"):
            yield f"rule: {name} after {step}", {"algorithm": by_rule(name, pre_step=step)}
    for name, parameters in RULE_PARAMETERS.items():
        text = ", ".join(f"{key} {value}" for key, value in parameters.items())
        algorithm = by_rule({"name": name, **parameters})
        yield f"rule: {name} with {text}", {"algorithm": algorithm, "agents": {"budget": 6}}
    for name, algorithm in RULE_VARIANTS.items():
        yield f"rule: {name}", {"algorithm": algorithm}
    few = {"participation": 0.5, "graph": {"name": "erdos_renyi", "p": 0.4}}
    for name in ("coordinate_median", "krum", "fltrust", "lfighter", "bulyan"):
        yield f"rule: {name} of few", {"algorithm": by_rule(name), "agents": few}


ATTACK_PARAMETERS: dict[str, Table] = {
    "label_flips": {"pairs": [[9, 4], [4, 9]]},
    **{key: {"target": 3} for key in ("backdoor", "clean_label", "signal", "blended")},
    **{key: {"target": 3} for key in ("rarest_flip", "spread_flip")},
    **{key: {"data": FLIP} for key in ("boosting", "echo", "gap_aware", "slow_drift")},
}
EVERY_ATTACK = (
    *("label_flips", "random_labels", "spread_flip", "rarest_flip", "shifted_labels", "backdoor"),
    *("clean_label", "feature_noise", "sign_flip", "gaussian_noise", "random_model", "boosting"),
    *("free_rider", "not_finite", "alie", "ipm", "min_max", "min_sum", "mimic", "dissensus"),
    *("equivocation", "gap_aware", "slow_drift", "signal", "blended", "hybrid_sparse", "spectral"),
    "echo",
)
DBA = {"parts": 2, "pattern": "cross", "size": 3, "corner": "top left", "margin": 1}
CHECKERBOARD = {"target": 3, "share": 0.5, "pattern": "checkerboard"}
ATTACKS: dict[str, Table] = {
    "random_labels, a share": {"name": "random_labels", "share": 0.4},
    "backdoor in parts": {**BACKDOOR, **DBA},
    "clean_label, a share": {"name": "clean_label", **CHECKERBOARD},
    "free_rider in disguise": {"name": "free_rider", "noise": 0.01},
    "not_finite huge": {"name": "not_finite", "value": "huge"},
    "alie from the benign": {"name": "alie", "z": 1.5, "estimated_from": "benign"},
    "min_max by sign": {"name": "min_max", "direction": "sign"},
    "min_sum by unit": {"name": "min_sum", "direction": "unit"},
    "mimic of the outermost": {"name": "mimic", "agent": "outermost"},
    "mimic across": {"name": "mimic", "agent": 1, "cluster_offset": 1},
    "boosted backdoor": {"name": "boosting", "factor": 3.0, "data": BACKDOOR},
    "sign_flip of poisoned": {"name": "sign_flip", "scale": 2.0, "data": FLIP},
}
ATTACKED: dict[str, Table] = {
    "dfedavgm": AVERAGE,
    "krum": by_rule("krum"),
    "coordinate_median": by_rule("coordinate_median"),
    "bulyan after nnm": by_rule("bulyan", pre_step="nnm"),
    "norm_clipping": by_rule("norm_clipping"),
    "ubar": by_rule("ubar"),
    "fedcbo": FEDCBO,
}


def attacks() -> Changes:
    """Yield all attacks, sleepers and sybils, and attacks against other algorithms."""
    for name in EVERY_ATTACK:
        yield f"attack: {name}", {"attack": {"name": name, **ATTACK_PARAMETERS.get(name, {})}}
    for name, attack in ATTACKS.items():
        yield f"attack: {name}", {"attack": attack}
    for name in ("label_flips", "alie", "dissensus", "not_finite", "boosting"):
        sleeper = {"name": name, **ATTACK_PARAMETERS.get(name, {}), "from_round": 2}
        yield f"sleeper: {name}", {"attack": sleeper}
    sybils = {**FLIP, "sybils": True}
    yield "sybils: label_flip", {"attack": sybils}
    random_models = {"name": "random_model", "sybils": True, "from_round": 1}
    yield "sybils: random models, from round 1", {"attack": random_models}
    whole = {"first_contact": "whole", "own_candidate": True}
    yield "sybils: first contact whole", {"attack": sybils, "algorithm": whole}
    for defence, algorithm in ATTACKED.items():
        for name in ("alie", "dissensus", "not_finite"):
            yield f"{name} against {defence}", {"attack": {"name": name}, "algorithm": algorithm}


GRAPHS: dict[str, Any] = {
    "ring": "ring",
    "ring, 2 near": {"name": "ring", "near": 2},
    "torus": "torus",
    "random_regular": {"name": "random_regular", "degree": 3},
    "erdos_renyi": {"name": "erdos_renyi", "p": 0.3},
    "small_world": {"name": "small_world", "near": 2, "p": 0.3},
    "same_cluster": "same_cluster",
}
DIRICHLET = {"name": "dirichlet", "concentration": 2.0}
AGENTS: dict[str, Table] = {
    "participation 0.7": {"participation": 0.7},
    "participation 0.2": {"participation": 0.2},
    "dirichlet": {"skew": {"name": "dirichlet", "concentration": 0.5}},
    "dirichlet, stratified": {"skew": DIRICHLET, "split": "stratified"},
    "shards": {"skew": {"name": "shards", "classes": 3}},
    "stratified": {"split": "stratified"},
    "split as released": {"split": "released", "validation": 0.5},
    "split as released, nothing held out": {
        **{"split": "released", "validation": 0.5, "hold_out": False},
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


def populations() -> Changes:
    """Yield numbers, data and graphs of agents."""
    for name, graph in GRAPHS.items():
        yield f"graph: {name}", {"agents": {"graph": graph}}
    yield "graph: ring, dfedavgm", {"agents": {"graph": "ring"}, "algorithm": AVERAGE}
    same_cluster = {"agents": {"graph": "same_cluster"}, "algorithm": {"selection": "everyone"}}
    yield "graph: same_cluster, everyone", same_cluster
    for name, agents in AGENTS.items():
        yield f"agents: {name}", {"agents": agents}
    benign = {"malicious_role": "benign"}
    yield "agents: malicious are benign, dfedavgm", {"agents": benign, "algorithm": AVERAGE}
    yield "agents: malicious are benign, krum", {"agents": benign, "algorithm": by_rule("krum")}
    removed = {"malicious_role": "removed"}
    yield "agents: removed, dfedavgm", {"agents": removed, "algorithm": AVERAGE}
    single = {"colluders_own_model": False, "malicious": 1, "budget": 3}
    yield "agents: colluders without their own, one each", {"agents": single}
    four = {"agents": {"num_clusters": 4}, "algorithm": {**IFCA, "models": 4}}
    yield "agents: 4 clusters, ifca", four


MODELS: dict[str, Table] = {
    "logistic": {"name": "logistic"},
    "mlp of two layers": {"hidden": [12, 6]},
    "cnn": CNN,
    "cnn, linear between": {**CNN, "dense_activation": "none"},
    "resnet": {"name": "resnet", "width": 8, "blocks": 1},
    "dropout": {"name": with_dropout},
}
TRAININGS: dict[str, Table] = {
    "bfloat16": {"precision": "bfloat16"},
    "no momentum": {"momentum": 0.0},
    "local steps": {"local_steps": 7},
    "2 epochs, lambda2 0.5": {"local_epochs": 2, "lambda2": 0.5},
    "one batch": {"batch_size": 1000},
}
BFLOAT16 = {"precision": "bfloat16"}
BY_COLUMNS = by_rule("trimmed_mean", pre_step="nnm")


def settings() -> Changes:
    """Yield models, training, precision, and ways of computation."""
    for name, model in MODELS.items():
        yield f"model: {name}", {"model": model, "rounds": 1 if name == "resnet" else 2}
    for name in ("cnn", "resnet"):
        yield f"model: {name} together 3", {"model": MODELS[name], "rounds": 1, "together": 3}
    for name, training in TRAININGS.items():
        yield f"training: {name}", {"training": training}
    yield "training: cnn in bfloat16", {"model": CNN, "training": BFLOAT16, "rounds": 1}
    for count in (1, 3, 32):
        yield f"together {count}", {"together": count}
        few = {"together": count, "agents": {"participation": 0.6}}
        yield f"together {count}, few online", few
    yield "together 3, ifca", {"together": 3, "algorithm": IFCA}
    yield "together 3, dropout", {"together": 3, "model": MODELS["dropout"]}
    yield "evaluated on tuning images", {"evaluate_on": "tuning"}
    every_second = {"rounds": 5, "evaluate_every": 2, "checkpoint_every": 2}
    yield "evaluated and saved every second round", every_second
    yield "a table", {**TABLE, "attack": {"name": "random_labels"}}
    logistic = {"model": {"name": "logistic"}, "algorithm": FEDCBO}
    shifted = {"attack": {"name": "shifted_labels"}}
    yield "a table, logistic, from fedcbo", {**TABLE, **logistic, **shifted}
    yield "large", {**LARGE}
    yield "large, crafted", {**LARGE, "attack": {"name": "min_max"}}
    yield "large, by columns", {**LARGE, "algorithm": BY_COLUMNS}
    yield "large, ifca", {**LARGE, "algorithm": {**IFCA, "models": 3}}
    yield "large, bfloat16", {**LARGE, "training": BFLOAT16}
    on_disk = changed(**LARGE, attack={"name": "dissensus"})
    yield "large, on disk", Case(on_disk, memory=2**28 + 20 * 2**20)
    agents = {"benign": 2, "malicious": 1, "budget": 3}
    wide = {"rounds": 1, "model": {"hidden": [1100, 1000]}, "agents": agents}
    for linear in ("torch", "onednn"):
        yield f"very large, by {linear}", {**wide, "linear": linear}


RESUMED: dict[str, Table] = {
    "fedcb2o": {},
    "fedcb2o, few online": {"agents": {"participation": 0.6}, "rounds": 4},
    "first contact whole, T_G 2": {
        "algorithm": {"first_contact": "whole", "criterion_from_round": 2},
    },
    "fedcbo": {"algorithm": FEDCBO},
    "fedassay": {"algorithm": FEDASSAY},
    "ifca": {"algorithm": IFCA},
    "norm_clipping": {"algorithm": by_rule("norm_clipping")},
    "balance": {"algorithm": by_rule("balance")},
    "dissensus": {"attack": {"name": "dissensus"}},
    "sleeping alie": {"attack": {"name": "alie", "from_round": 2}},
    "sybils": {"attack": {**FLIP, "sybils": True}},
    "saved every second round": {"rounds": 5, "checkpoint_every": 2},
    "dropout": {"model": {"name": with_dropout}},
}


def resumed() -> Changes:
    """Yield runs that are stopped after a round and resumed."""
    for name, changes in RESUMED.items():
        yield f"resumed after 1: {name}", Case(changed(**changes), stop=1)
    every_second = changed(**RESUMED["saved every second round"])
    yield "resumed after 3: saved every second round", Case(every_second, stop=3)


def several() -> Changes:
    """Yield runs with two processes, one of them resumed."""
    for name in ("fedcb2o, few online", "fedassay", "ifca", "norm_clipping", "dissensus", "sybils"):
        yield f"2 workers: {name}", Case(changed(**RESUMED[name]), workers=2)
    yield "2 workers: large", Case(changed(**LARGE), workers=2)
    crafted = changed(**LARGE, attack={"name": "min_max"})
    yield "2 workers: large, crafted", Case(crafted, workers=2)
    by_columns = changed(**LARGE, algorithm=BY_COLUMNS)
    yield "2 workers: large, by columns", Case(by_columns, workers=2)
    yield "2 workers: cnn", Case(changed(model=CNN, rounds=1), workers=2)
    dissensus = Case(changed(**RESUMED["dissensus"]), workers=2, stop=1)
    yield "2 workers, resumed after 1: dissensus", dissensus


# Execution


def digests_of(case: Case) -> dict[str, Any]:
    """Return the digests of a run, or its error."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_case(case, Path(folder))
        except Exception as error:  # another checkout may lack a feature; continue with the rest
            return {"error": f"{type(error).__name__}: {str(error).replace(folder, 'FOLDER')}"}
        return digest_folder(Path(folder) / f"seed-{SEED}")


def run_case(case: Case, folder: Path) -> None:
    """Run an experiment, in two parts if it has a stop."""

    def run(watch: Callable[[Any, int, Mapping[str, Any]], None], resume: bool) -> None:
        experiment = fedcb2o.load(case.table)
        options: dict[str, Any] = {"workers": case.workers, "memory": case.memory}
        fedcb2o.run(experiment, out=folder, watch=watch, resume=resume, **options)

    def stop(experiment: Any, seed: int, line: Mapping[str, Any]) -> None:
        if line["round"] == case.stop:
            raise StopError

    if case.stop is not None:
        try:
            run(stop, resume=False)
        except StopError:
            pass
        else:
            raise RuntimeError(f"the run was not stopped after round {case.stop}")
    run(lambda experiment, seed, line: None, resume=case.stop is not None)


def digest_folder(folder: Path) -> dict[str, Any]:
    """Return digests of a seed's files and tensors, and short digests of their parts."""
    dim = json.loads((folder / "agents.json").read_text())["dim"]
    digests: dict[str, Any] = {}
    for name, tensor in sorted(load_file(folder / "checkpoint.safetensors").items()):
        rows = tensor[:, :dim].contiguous() if name == "models" else tensor
        digests[f"checkpoint {name}"] = sha256(tensor_bytes(rows))
        if name in ("models", "met"):
            parts = {f"row {j}": short_digest(tensor_bytes(row)) for j, row in enumerate(rows)}
            digests[f"parts of checkpoint {name}"] = parts

    for name in FILES:
        text = (folder / name).read_text()
        digests[name] = sha256(text.encode())
        is_log = name.endswith("l")
        parts = {}
        for line in map(json.loads, text.splitlines() if is_log else [text]):
            for key, value in line.items():
                part = f"{key} of round {line['round']}" if is_log else key
                parts[part] = short_digest(json.dumps(value).encode())
        digests[f"parts of {name}"] = parts
    return digests


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return dtype, shape and all bits of a tensor."""
    header = f"{tensor.dtype} {tuple(tensor.shape)} "
    return header.encode() + tensor.contiguous().numpy().tobytes()


def sha256(content: bytes) -> str:
    """Return the SHA-256 digest."""
    return hashlib.sha256(content).hexdigest()


def short_digest(content: bytes) -> str:
    """Return the first digits of the SHA-256 digest."""
    return sha256(content)[:SHORT_LENGTH]


# Comparison


def difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    """Describe the difference between the digests of two runs; None if they are equal."""
    if "error" in here or "error" in there:
        if here == there:
            return None
        return f"here {here.get('error', 'no error')}, there {there.get('error', 'no error')}"
    names = [name for name in {**there, **here} if not name.startswith("parts of ")]
    different = [name for name in names if here.get(name) != there.get(name)]
    return "; ".join(name + differing_parts(name, here, there) for name in different) or None


def differing_parts(name: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """Return the first differing parts of a file or tensor, in brackets."""
    ours = here.get(f"parts of {name}", {})
    theirs = there.get(f"parts of {name}", {})
    parts = [part for part in {**theirs, **ours} if ours.get(part) != theirs.get(part)]
    if not parts:
        return ""
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    return f" ({', '.join(parts[:3])}{more})"


def compare(here: Digests, there: Digests, is_selected: Callable[[str], Any]) -> int:
    """Print one line per differing or missing experiment; return the number of lines."""
    count = 0
    for name in filter(is_selected, {**there, **here}):
        if name not in here or name not in there:
            text: str | None = f"only {'there' if name not in here else 'here'}"
        else:
            text = difference(here[name], there[name])
        if text is not None:
            count += 1
            print(f"{name}: {text}")
    return count


def environment() -> dict[str, str]:
    """Return the versions that bits depend on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
    }


def run_cases(selected: Mapping[str, Case]) -> Digests:
    """Run cases and return their digests, with progress on standard error."""
    start = time.perf_counter()
    digests: Digests = {}
    for i, (name, case) in enumerate(selected.items(), 1):
        case_start = time.perf_counter()
        digests[name] = digests_of(case)
        error = f" ({digests[name]['error']})" if "error" in digests[name] else ""
        seconds = time.perf_counter() - case_start
        line = f"{i:>3}/{len(selected)} {seconds:5.2f} s  {name}{error}"
        print(line, file=sys.stderr, flush=True)
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    return digests


def main() -> int:
    """Run cases, write digests and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the digests to this file")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with this file")
    parser.add_argument("--only", metavar="PATTERN", help="regular expression for names")
    parser.add_argument("--list", action="store_true", help="only print the names")
    options = parser.parse_args()
    is_selected = re.compile(options.only or "", re.IGNORECASE).search
    selected = {name: case for name, case in cases().items() if is_selected(name)}
    if options.list:
        print("\n".join(selected))
        return 0
    if not selected:
        parser.error(f"no experiment's name contains {options.only!r}")

    there = json.loads(options.against.read_text()) if options.against else None
    source = f"fedcb2o of {Path(fedcb2o.__file__).parent}, {len(selected)} experiments"
    print(source, file=sys.stderr, flush=True)
    here = run_cases(selected)
    if options.out:
        content = {"surroundings": environment(), "digests": here}
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    failed = sum("error" in digests for digests in here.values())
    if there is None:
        print(f"{len(here)} experiments, {failed} ended in an error")
        return 1 if failed else 0

    for key, value in environment().items():
        other = there["surroundings"].get(key)
        if other != value:
            print(
                f"Note: {key} is {value} here and {other} there; bits may differ.", file=sys.stderr
            )
    count = compare(here, there["digests"], is_selected)
    print(f"{len(here)} experiments, {count} differ, {failed} ended in an error")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
