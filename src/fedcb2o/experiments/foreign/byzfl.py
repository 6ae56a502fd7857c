"""ByzFL's benchmark: its `config.json`, version 0.0.11, as a grid.

ByzFL runs the combinations of all lists. A combination is a cell here: the setting is the number of
attackers and the distribution of the data, and the defence has the clients' hyperparameters.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from fedcb2o.aggregators.server import ALGORITHM
from fedcb2o.experiments.foreign.conversion import NO_ATTACK, PARTS, POOLS, Conversion, Names

# Data sets, with the mean and the standard deviation that ByzFL scales pixels by.
_CIFAR10 = {"mean": [0.4914, 0.4822, 0.4465], "std": [0.2023, 0.1994, 0.201]}
_DATA: dict[str, tuple[str, dict[str, Any]]] = {
    "mnist": ("mnist", {"mean": [0.1307], "std": [0.3081]}),
    "fashionmnist": ("fashion_mnist", {}),
    "cifar10": ("cifar10", _CIFAR10),
}
_MODELS = ("cnn_mnist", "fc_mnist", "logreg_mnist", "cnn_cifar")
_ALIE = {"estimated_from": "benign", "correction": 1}
_SEARCH = {"evals": "evaluations", "start": "start", "delta": "step", "ratio": "ratio"}
_ATTACKS: Names = {
    "SignFlipping": ({"name": "ipm", "eps": 1.0}, {}),
    "InnerProductManipulation": ({"name": "ipm", "eps": 2.0}, {"tau": "eps"}),
    "Optimal_InnerProductManipulation": ({"name": "optimal_ipm", "rule": "server"}, _SEARCH),
    "ALittleIsEnough": ({"name": "alie", "z": 1.5, **_ALIE}, {"tau": "z"}),
    "Optimal_ALittleIsEnough": (
        {"name": "optimal_alie", "rule": "server", "correction": 1, "step": 10.0},
        _SEARCH,
    ),
    "Mimic": ({"name": "mimic"}, {"epsilon": "agent"}),
    "Inf": ({"name": "not_finite", "value": "inf"}, {}),
    "Gaussian": ({"name": f"{PARTS}:gaussian_update"}, {"mu": "mean", "sigma": "std"}),
    "LabelFlipping": ({"name": "reversed_labels"}, {}),
}
_PARAMETERS = {key: key for key in ("nu", "T", "L", "tau", "idx", "c", "s")}
_KRUM = {"definition": "byzfl"}
_AGGREGATORS: Names = {
    **{name: ({"name": name, **_KRUM}, {}) for name in ("Krum", "MultiKrum")},
    **{
        name: ({"name": name}, _PARAMETERS)
        for name in (
            *("Average", "Median", "TrMean", "GeometricMedian", "CenteredClipping", "MDA"),
            *("MoNNA", "Meamed", "CAF", "SMEA"),
        )
    },
}
_PRE_AGGREGATORS: Names = {
    name: ({"name": name}, _PARAMETERS) for name in ("NNM", "Bucketing", "Clipping", "ARC")
}

_Entry = tuple[str, str, dict[str, Any]]
"""Title of an entry of an axis, details that are added to equal titles, and its changes."""


def convert(config: Mapping[str, Any]) -> Conversion:
    """Convert the content of a `config.json`."""
    found = Conversion()
    axes: dict[str, list[_Entry]] = {"settings": [], "defences": [], "attacks": []}
    trains = "LabelFlipping" in str(config["attack"])
    for one in _combinations(config):
        found.table = found.table or _shared(one, found)
        entries = (_setting(one, trains, found), _defence(one, found), _attack(one, found))
        for axis, entry in zip(axes.values(), entries, strict=True):
            axis += [entry] if entry and entry not in axis else []
    found.require(all(axes.values()))
    for name, axis in axes.items():
        titles = [title for title, _, _ in axis]
        found.table[name] = {
            title if titles.count(title) == 1 else f"{title}, {detail}": table
            for title, detail, table in axis
        }
    several = "each choice of hyperparameters is a defence; ByzFL shows the best of them"
    found.differ(several, any(", lr " in name for name in found.table["defences"]))
    return found


def _combinations(value: Any, key: str = "") -> Iterator[Any]:
    """Yield the combinations of all lists in a table, as ByzFL does."""
    is_whole = key in ("pre_aggregators", "milestones")
    if isinstance(value, list) and value and not (is_whole and not isinstance(value[0], list)):
        for item in value:
            yield from _combinations(item) if isinstance(item, dict) else [item]
    elif isinstance(value, dict):
        parts = [list(_combinations(item, name)) for name, item in value.items()]
        for values in itertools.product(*parts):
            yield dict(zip(value, values, strict=True))
    else:
        yield value


def _training(one: Mapping[str, Any]) -> tuple[bool, int, float]:
    """Return whether clients average, their local steps, and the share of them in a round."""
    section = one["benchmark_config"].get("training_algorithm", {"name": "DSGD"})
    if section["name"] != "FedAvg":
        return False, 1, 1.0
    parameters = section["parameters"]
    return True, parameters["local_steps_per_client"], parameters["proportion_selected_clients"]


def _shared(one: Mapping[str, Any], found: Conversion) -> dict[str, Any]:
    """Return the keys that all cells share."""
    benchmark, model = one["benchmark_config"], one["model"]
    algorithm = benchmark.get("training_algorithm", {"name": "DSGD"})["name"]
    found.check("training algorithm", algorithm, ("DSGD", "FedAvg"))
    found.check("data set", model["dataset_name"], _DATA)
    found.check("model", model["name"], _MODELS)
    found.require(not found.missing)
    found.check("loss", model.get("loss", "NLLLoss"), ("NLLLoss", "CrossEntropyLoss"))
    found.check("optimiser", model.get("optimizer_name", "SGD"), ("SGD",))
    data, scale = _DATA[model["dataset_name"]]
    is_average, steps, share = _training(one)
    found.differ("images are neither flipped nor cropped at random", data != "mnist")
    found.differ(f"a client takes part in a round with probability {share}", share < 1)
    found.differ("logreg_mnist has no sigmoid", model["name"] == "logreg_mnist")
    local = {"gamma": model.get("learning_rate", 0.1), "momentum": 0.0, "local_steps": steps}
    # The clients' schedulers are never stepped in ByzFL's FedAvg.
    if model.get("milestones") and not is_average:
        rates = {"milestones": model["milestones"], "gamma": model["learning_rate_decay"]}
        local["schedule"] = {"name": "MultiStepLR", **rates}
    first = benchmark.get("training_seed", 0)
    seeds = benchmark.get("nb_training_seeds", 1) * benchmark.get("nb_data_distribution_seeds", 1)
    delta = one["evaluation_and_results"].get("evaluation_delta", 50)
    return {
        "title": f"ByzFL: {model['dataset_name']}, {model['name']}",
        "seeds": list(range(first, first + seeds)),
        "baselines": ["removed"],
        "rounds": benchmark.get("nb_steps", 1000),
        "evaluate_every": delta,
        "checkpoint_every": delta,
        "data": {"name": data},
        "agents": {"num_clusters": 1, "hold_out": False, "budget": 1, "participation": share},
        "model": {"name": f"{PARTS}:network", "kind": model["name"], **scale},
        "training": local,
        "algorithm": {"name": ALGORITHM},
    }


def _detail(given: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{key} {value}" for key, value in (given or {}).items())


def _attack(one: Mapping[str, Any], found: Conversion) -> _Entry | None:
    name, given = one["attack"]["name"], one["attack"].get("parameters")
    if name == "NoAttack":
        return name, "", NO_ATTACK
    table = found.translate("attack", name, given, _ATTACKS)
    if table is None:
        return None
    found.differ("LabelFlipping flips labels of attackers' own samples", name == "LabelFlipping")
    found.differ("the server drops the vectors of Inf", name == "Inf")
    # Deviations of gradients are the opposite ones of models.
    if "ALittleIsEnough" in name and not _training(one)[0]:
        table |= {key: 0.0 - table[key] for key in ("z", "start", "step") if key in table}
    if name == "Gaussian":  # of gradients, which the step size makes updates
        rate = found.table["training"]["gamma"]
        found.differ("Gaussian keeps the first step size")
        table |= {"mean": -rate * table.get("mean", 0.0), "std": rate * table.get("std", 1.0)}
    return name, _detail(given), {"attack": table}


def _defence(one: Mapping[str, Any], found: Conversion) -> _Entry | None:
    entry, clients = one["aggregator"], one.get("honest_clients", {})
    name, given, chain = entry["name"], entry.get("parameters"), one.get("pre_aggregators") or []
    aggregator = found.translate("aggregator", name, given, _AGGREGATORS)
    steps = [
        found.translate("pre-aggregator", step["name"], step.get("parameters"), _PRE_AGGREGATORS)
        for step in chain
    ]
    if aggregator is None or None in steps:
        return None
    is_average, num_steps, _ = _training(one)
    rate, decay = one["model"].get("learning_rate", 0.1), clients.get("weight_decay", 1e-4)
    momentum = 0.0 if is_average else clients.get("momentum", 0.9)
    algorithm = {
        "name": ALGORITHM,
        "sent": "models" if is_average else "gradients",
        "aggregator": aggregator,
        "pre_aggregators": steps,
        "momentum": momentum,
        "dampening": momentum,
        "weight_decay": decay * num_steps,
    }
    table = {"algorithm": algorithm, "training": {"gamma": rate}}
    table["training"]["batch_size"] = clients.get("batch_size", 32)
    before = f" after {', '.join(step['name'] for step in chain)}" if chain else ""
    hyper = {**(given or {}), "lr": rate, "momentum": momentum, "decay": decay}
    return name + before, _detail(hyper), table


def _setting(one: Mapping[str, Any], trains: bool, found: Conversion) -> _Entry | None:
    """Return a setting "f = 1, similarity 0.5", of which reports make a heat map."""
    benchmark = one["benchmark_config"]
    f, honest = benchmark["f"], benchmark.get("nb_honest_clients", 10)
    tolerated = benchmark.get("tolerated_f", f)
    benign = honest - f if benchmark.get("set_honest_clients_as_clients") else honest
    row, skew = _skew(benchmark.get("data_distribution", {"name": "iid"}), benign, found)
    if tolerated < f or skew is None:  # ByzFL leaves the former out, too
        return None
    pool = POOLS[found.table["data"]["name"]]
    own = int(benchmark.get("size_train_set", 0.8) * pool) // benign
    # Attackers that train need samples; others hold one, which the pool must have.
    own = min(own, pool // (benign + f) if trains else (pool - f) // benign)
    agents = {"benign": benign, "malicious": f, "benign_samples": own, **skew}
    agents["malicious_samples"] = own if trains else 1
    column = f"f = {f}" + (f" of {tolerated}" if tolerated != f else "")
    changes = {"agents": agents, "algorithm": {"name": ALGORITHM, "f": tolerated}}
    return f"{column}, {row}", f"{honest} clients", changes


def _skew(
    entry: Mapping[str, Any], benign: int, found: Conversion
) -> tuple[str, dict[str, Any] | None]:
    name: str = entry["name"]
    value: Any = entry.get("distribution_parameter")
    similar = {"name": f"{PARTS}:similarity", "agents": benign}
    if name == "dirichlet_niid":
        found.differ("dirichlet_niid: clients hold equally many samples")
        return f"Dirichlet {value}", {"skew": {"name": "dirichlet", "concentration": 10 * value}}
    if name == "gamma_similarity_niid":
        return f"similarity {value}", {"skew": {**similar, "share": value}}
    if name == "extreme_niid":
        return "similarity 0", {"skew": {**similar, "share": 0.0}}
    return "iid", {} if found.check("data distribution", name, ("iid",)) else None
