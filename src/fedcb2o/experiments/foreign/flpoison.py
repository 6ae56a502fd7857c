"""FLPoison's configuration, a YAML file, as a grid of all its attacks against all its defences."""

from collections.abc import Mapping
from typing import Any

from fedcb2o.aggregators.server import ALGORITHM
from fedcb2o.experiments.foreign.conversion import NO_ATTACK, PARTS, POOLS, Conversion, Names

# Data sets, with the mean and the standard deviation that FLPoison scales pixels by.
_DATA: dict[str, tuple[str, dict[str, Any]]] = {
    "MNIST": ("mnist", {"mean": [0.1307], "std": [0.3081]}),
    "FashionMNIST": ("fashion_mnist", {"mean": [0.2859], "std": [0.353]}),
}
_SENT = {"FedSGD": "updates", "FedOpt": "updates", "FedAvg": "models"}
# Parameters that all attacks may have; `_attacks` reads them.
_TIMES = dict.fromkeys(("attack_start_epoch", "attack_strategy", "attack_model"), "")
_SEARCH = {**_TIMES, "gamma_init": "", "stop_threshold": ""}  # a formula takes its place
_BACKDOOR = {"name": "backdoor", "target": 6, "share": 0.32, "size": 5}
_KEYS = {"poisoning_ratio": "share", "target_label": "target", "trigger_size": "size"}
_IN_DATA = {**_TIMES, **{key: f"data.{name}" for key, name in _KEYS.items()}, "source_label": ""}
_ATTACKS: Names = {
    "IPM": ({"name": "ipm", "eps": 0.1}, {**_TIMES, "scaling_factor": "eps"}),
    "ALIE": ({"name": "alie", "estimated_from": "benign"}, {**_TIMES, "z_max": "z"}),
    "Gaussian": (
        {"name": f"{PARTS}:gaussian_update"},
        {**_TIMES, "noise_mean": "mean", "noise_std": "std"},
    ),
    "SignFlipping": ({"name": "sign_flip"}, _TIMES),
    "Mimic": ({"name": "mimic"}, {**_TIMES, "choice": "agent"}),
    "MinMax": ({"name": "min_max", "direction": "unit"}, _SEARCH),
    "MinSum": ({"name": "min_sum", "direction": "unit"}, _SEARCH),
    "LabelFlipping": (
        {"name": "label_flip", "source": 2, "target": 7},
        {**_TIMES, "source_label": "source", "target_label": "target", "poisoning_ratio": ""},
    ),
    "BadNets": (_BACKDOOR, {**_TIMES, **_KEYS, "source_label": ""}),
    "ModelReplacement": (
        {"name": "boosting", "factor": 50, "data": _BACKDOOR},
        {**_IN_DATA, "scaling_factor": "factor"},
    ),
    "Neurotoxin": (
        {"name": "neurotoxin", "masked_share": 0.1, "data": _BACKDOOR},
        {**_IN_DATA, "topk_ratio": "masked_share"},
    ),
}
_KRUM = {"definition": "byzfl"}
_CHECK = {"enable_check": ""}
_DEFENCES: Names = {
    "Mean": ({"name": "Average"}, {}),
    "Median": ({"name": "Median"}, {}),
    "TrimmedMean": ({"name": "TrMean"}, {"beta": ""}),
    "Krum": ({"name": "Krum", **_KRUM}, _CHECK),
    "MultiKrum": ({"name": "MultiKrum", **_KRUM}, {**_CHECK, "avg_percentage": ""}),
    "Bulyan": ({"name": "Bulyan"}, _CHECK),
    "RFA": (
        {"name": "GeometricMedian", "nu": 1e-6, "T": 3},
        {"epsilon": "nu", "num_iters": "T"},
    ),
    "CenteredClipping": (
        {"name": "CenteredClipping", "tau": 100.0, "L": 1},
        {"norm_threshold": "tau", "num_iters": "L"},
    ),
    "DnC": ({"name": "DnC"}, {"fliter_frac": "removed"}),
    "Bucketing": ({"name": "Bucketing", "s": 2}, {"bucket_size": "s", "selected_aggregator": ""}),
    "NormClipping": ({"name": "Clipping", "c": 3.0}, {"norm_threshold": "c"}),
}


def convert(config: Mapping[str, Any]) -> Conversion:
    """Convert the content of a configuration."""
    found = Conversion()
    distribution, algorithm = config["distribution"], config["algorithm"]
    found.check("dataset", config["dataset"], _DATA)
    found.check("model", config["model"], ("lenet",))
    found.check("algorithm", algorithm, _SENT)
    found.check("distribution", distribution, ("iid", "non-iid"))
    found.check("optimizer", config.get("optimizer", "SGD"), ("SGD",))
    found.require(not found.missing)
    found.check("lr_scheduler", config.get("lr_scheduler"), (None,))
    n, adversaries = config["num_clients"], config["num_adv"]
    f = int(adversaries if adversaries >= 1 else adversaries * n)
    attacks = _attacks(config["attacks"], found)
    defences = _defences(config["defenses"], n, f, found)
    found.require(attacks and defences)

    # One local step continues the momentum of the last round; several steps begin a new one.
    is_single = algorithm == "FedSGD"
    momentum, steps = config.get("momentum", 0.0), 1 if is_single else config["local_epochs"]
    # A constant gradient, such as the decay, moves the model by these multiples of a step.
    moves = [(1 - momentum**t) / (1 - momentum) for t in range(1, steps + 1)]
    decay = 1 / (1 - momentum) if is_single else sum(moves)
    found.differ("the clients' momentum begins anew in each round", momentum and not is_single)
    found.differ("non-iid: clients hold equally many samples", distribution == "non-iid")
    found.differ("lenet pads images of 28 x 28 pixels, and does not resize them to 32 x 32")
    data, scale = _DATA[config["dataset"]]
    own = POOLS[data] // n
    agents = {"benign": n - f, "malicious": f, "benign_samples": own, "malicious_samples": own}
    if distribution == "non-iid":
        agents["skew"] = {"name": "dirichlet", "concentration": 10 * config["dirichlet_alpha"]}
    rounds = config["epochs"]
    training = {
        "gamma": config["learning_rate"],
        "batch_size": config["batch_size"],
        "local_steps": steps,
        "momentum": 0.0 if is_single else momentum,
    }
    found.table = {
        "title": f"FLPoison: {algorithm}, {config['dataset']}, {distribution}",
        "seeds": [config.get("seed", 0)],
        "baselines": ["clean"],
        "rounds": rounds,
        "evaluate_every": max(1, rounds // 30),
        "checkpoint_every": max(1, rounds // 30),
        "data": {"name": data},
        "agents": {"num_clusters": 1, "hold_out": False, "budget": 1, **agents},
        "model": {"name": f"{PARTS}:network", "kind": "lenet", **scale},
        "training": training,
        "algorithm": {
            "name": ALGORITHM,
            "sent": _SENT[algorithm],
            "momentum": momentum if is_single else 0.0,
            "weight_decay": config.get("weight_decay", 0.0) * decay,
        },
        "defences": defences,
        "attacks": attacks,
    }
    return found


def _attacks(entries: list[dict[str, Any]], found: Conversion) -> dict[str, Any]:
    attacks: dict[str, Any] = {}
    for entry in entries:
        name, given = entry["attack"], entry.get("attack_params") or {}
        if name == "NoAttack":
            attacks[name] = NO_ATTACK
            continue
        wanted = "targeted" if name == "LabelFlipping" else "all2one"
        if name in _ATTACKS and given.get("attack_model", wanted) != wanted:
            found.check("attack", f"{name} ({given['attack_model']})", ())
            continue
        table = found.translate("attack", name, given, _ATTACKS)
        if table is None:
            continue
        is_always = given.get("attack_strategy", "continuous") == "continuous"
        found.differ(f"{name} attacks in every round", not is_always)
        start = given.get("attack_start_epoch")
        attacks[name] = {"attack": {**table, **({"from_round": start} if start else {})}}
    return attacks


def _defences(entries: list[dict[str, Any]], n: int, f: int, found: Conversion) -> dict[str, Any]:
    defences: dict[str, Any] = {}
    for entry in entries:
        name, given = entry["defense"], entry.get("defense_params") or {}
        if name == "NormClipping" and given.get("weakDP"):
            found.check("defense", "NormClipping with noise", ())
            continue
        table = found.translate("defense", name, given, _DEFENCES)
        steps = []
        if name in ("Bucketing", "NormClipping") and table:
            steps, inner = [table], given.get("selected_aggregator", "Krum")
            inner = "Mean" if name == "NormClipping" else inner
            table = found.translate("defense", inner, {}, _DEFENCES)
        if table is None:
            continue
        if name == "MultiKrum":
            table["selected"] = max(1, int(given.get("avg_percentage", 0.2) * n))
        is_krum = table["name"] in ("Krum", "MultiKrum", "Bulyan")
        found.differ("Krum, MultiKrum and Bulyan sum squared distances", is_krum)
        found.differ("rules assume at most the f that they admit", is_krum)
        found.differ("DnC compares all parameters, once", name == "DnC")
        # The trimmed mean leaves a share of its own out.
        assumed = int(given.get("beta", 0.1) * n) if name == "TrimmedMean" else f
        choice = {"f": assumed, "aggregator": table, "pre_aggregators": steps}
        defences[name] = {"algorithm": {"name": ALGORITHM, **choice}}
    return defences
