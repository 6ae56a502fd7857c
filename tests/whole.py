"""Oracle of a whole run, from a TOML file to the paper's three metrics, in plain, slow loops.

García Trillos, Akash, Li, Riedl, Zhu, "Defending Against Diverse Attacks in Federated Learning
Through Consensus-Based Bi-Level Optimization" (arXiv 2412.02535), Section sec:experiments:

    "Dataset & Attack Setup"         clusters partition the same images, each with its rotation
    "Baselines & Implementations"    benign agents hold out validation data
    eq:MaliAgentObj                  malicious agents flip labels
    alg:FedCB2O, alg:localAggregation    rounds, as in `tests/reference.py`
    "Performance Metrics"            benign agents' models on test images with their rotation

The library provides only the named random streams, the loaded digits, and the networks with their
initial parameters. No model is copied from a run of the library.
"""

import math
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedcb2o.data import Dataset, Shard, digits
from fedcb2o.nn import architectures, parameters
from fedcb2o.rng import stream
from tests import reference

# Defaults of the keys that a file omits, as in docs/configuration.md.

EXPERIMENT: dict[str, Any] = {"seeds": [0, 1, 2], "evaluate_every": 1, "evaluate_on": "test"}
AGENTS: dict[str, Any] = {
    "num_clusters": 2,
    "malicious_role": "attack",
    "validation": 0.2,
    "split": "random",
    "hold_out": True,
    "validation_loss": "samples",
    "participation": 1.0,
    "initialisation": "common",
    "colluders_own_model": True,
}
FEDCB2O: dict[str, Any] = {
    "criterion": "class_loss_gap",
    "criterion_from_round": 0,
    "alpha": 10.0,
    "own_model": "excluded",
    "own_candidate": False,
    "selection": "prob_sampling",
    "kappa": 2.0,
    "zeta": 0.5,
    "first_contact": "average",
    "lambda1": 10.0,
    "mixing_factor": "lambda1*gamma",
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedcb2o": FEDCB2O,
    "fedcbo": {**FEDCB2O, "criterion": "average_loss"},
    "dfedavgm": {
        "criterion": "num_samples",
        "selection": "uniform",
        "own_model": "judged",
        "mixing_factor": 1.0,
    },
}


@dataclass(frozen=True)
class Share:
    """Data of one agent, as indices into the pool."""

    cluster: int
    malicious: bool
    train: list[int]
    validation: list[int]


@dataclass(frozen=True)
class Scores:
    """The paper's three metrics of one model.

    `unsure` and `source_unsure` are the shares of samples, of all and of the source class, whose
    predicted class may depend on rounding.
    """

    accuracy: float
    source_accuracy: float
    attack_success_rate: float
    unsure: float
    source_unsure: float


@dataclass(frozen=True)
class RoundResult:
    """One round: mean training losses and decisions of all agents, scores of the benign ones."""

    n: int
    train_loss: list[float]
    infos: list[reference.Info]
    scores: dict[int, Scores] | None  # by agent id; None in rounds without evaluation


class WholeRun:
    """A run of one seed by the settings of a TOML file."""

    def __init__(self, path: Path, seed: int, *, margin: float) -> None:
        self.settings, self.seed, self.margin = read(path), seed, margin
        options = {key: value for key, value in self.settings["data"].items() if key != "name"}
        self.dataset = digits(**options)
        if self.settings["evaluate_on"] == "redrawn":
            self.dataset = redrawn(self.dataset, seed)
        self.training = reference.Training(**self.settings["training"])
        labels = [int(y) for y in self.dataset.pool.y]
        self.shares, self.tuning = deal(labels, self.settings["agents"], seed)
        self.agents = [self._agent(j) for j in range(len(self.shares))]
        self.true_labels = [agent.train_y for agent in self.agents]
        clusters = range(len(counts_of(self.settings["agents"], "benign")))
        self.scored_on = [self._scored_on(cluster) for cluster in clusters]

    def rounds(self) -> Iterator[RoundResult]:
        """Run Algorithm 1; yield the result of each round."""
        for n in range(self.settings["rounds"]):
            self._poison(n)
            steps = reference.local_updates(self.agents, n, seed=self.seed, training=self.training)
            infos = reference.local_aggregations(
                self.agents,
                n,
                seed=self.seed,
                training=self.training,
                num_classes=len(self.dataset.class_names),
                participation=self.settings["agents"]["participation"],
            )
            interval, last = self.settings["evaluate_every"], self.settings["rounds"] - 1
            is_evaluated = (n + 1) % interval == 0 or n == last
            yield RoundResult(
                n,
                [sum(losses) / len(losses) for losses in steps],
                infos,
                self._scores() if is_evaluated else None,
            )

    def _agent(self, j: int) -> reference.Agent:
        share = self.shares[j]
        role = self.settings["agents"]["malicious_role"]
        pool = self.dataset.pool
        colluding = share.malicious and role in ("attack", "clean")
        train = self._seen(pool.x[share.train], pool.y[share.train], share.cluster)
        validation = self._seen(pool.x[share.validation], pool.y[share.validation], share.cluster)
        return reference.Agent(
            module=first_model(
                self.settings, self.seed, j, list(pool.x.shape[1:]), len(self.dataset.class_names)
            ),
            train_x=train[0],
            train_y=train[1],
            validation_x=validation[0],
            validation_y=validation[1],
            malicious=share.malicious,
            cluster=share.cluster,
            algorithm=colluder_of(self.settings) if colluding else options_of(self.settings),
        )

    def _seen(self, x: Tensor, y: Tensor, cluster: int) -> tuple[Tensor, Tensor]:
        """Return a cluster's view of images: rotated by cluster * 360 / K degrees.

        With "permute_labels", the labels are shifted by `cluster` classes instead.
        """
        agents = self.settings["agents"]
        if agents.get("cluster_transform") == "permute_labels":
            return x, (y + cluster) % len(self.dataset.class_names)
        K = len(counts_of(agents, "benign"))
        angles = agents.get("cluster_transform", {}).get("angles", [k * 360 // K for k in range(K)])
        return turned(x, quarters=angles[cluster] // 90), y

    def _poison(self, n: int) -> None:
        """Flip the training labels of the attackers, from the attack's first round on."""
        attack, role = self.settings["attack"], self.settings["agents"]["malicious_role"]
        for agent, true in zip(self.agents, self.true_labels, strict=True):
            attacks = agent.malicious and role == "attack" and n >= attack.get("from_round", 0)
            agent.train_y = flipped(true, attack["source"], attack["target"]) if attacks else true

    def _scores(self) -> dict[int, Scores]:
        """Return the scores of benign agents on images with their cluster's rotation."""
        attack = self.settings["attack"]
        return {
            j: scores(
                agent.module,
                *self.scored_on[agent.cluster],
                attack["source"],
                attack["target"],
                self.margin,
            )
            for j, agent in enumerate(self.agents)
            if not agent.malicious
        }

    def _scored_on(self, cluster: int) -> tuple[Tensor, Tensor]:
        """Return a cluster's evaluation images: test images, or pool images without an agent."""
        test, pool = self.dataset.test, self.dataset.pool
        if self.settings["evaluate_on"] != "tuning":
            return self._seen(test.x, test.y, cluster)
        indices = self.tuning[: len(test.y)]
        return self._seen(pool.x[indices], pool.y[indices], cluster)


# ---- Settings ----


def read(path: Path) -> dict[str, Any]:
    """Return the settings of a file, with defaults for omitted keys."""
    config = tomllib.loads(path.read_text(encoding="utf-8"))
    assert "extends" not in config
    algorithm = config["algorithm"]
    return {
        **EXPERIMENT,
        **config,
        "agents": {**AGENTS, **config["agents"]},
        "algorithm": {**ALGORITHMS[algorithm["name"]], **algorithm},
        "training": config.get("training", {}),
    }


def options_of(settings: dict[str, Any]) -> reference.Options:
    """Return the settings of an agent that runs the configured algorithm."""
    options = {key: value for key, value in settings["algorithm"].items() if key != "name"}
    if isinstance(options["criterion"], dict):
        table = options["criterion"]
        options["criterion"] = table["name"]
        options |= {key: value for key, value in table.items() if key != "name"}
    options |= options.pop("guards", {})
    if options["mixing_factor"] == "lambda1*gamma":
        options["mixing_factor"] = None
    agents = settings["agents"]
    return reference.Options(
        **options, budget=agents["budget"], validation_loss=agents["validation_loss"]
    )


def colluder_of(settings: dict[str, Any]) -> reference.Options:
    """Return the settings of a colluder, which weighs models by numbers of samples."""
    agents = settings["agents"]
    return reference.Options(
        selection="colluding",
        criterion="num_samples",
        mixing_factor=1.0,
        budget=agents["budget"],
        own_model="judged" if agents["colluders_own_model"] else "excluded",
    )


def first_model(
    settings: dict[str, Any], seed: int, j: int, shape: list[int], num_classes: int
) -> nn.Module:
    """Return theta_0^j, equal for all agents or independent."""
    options = {key: value for key, value in settings["model"].items() if key != "name"}
    make = NETWORKS[settings["model"]["name"]]
    key = (j,) if settings["agents"]["initialisation"] == "independent" else ()
    return parameters.initialise(
        lambda: make(shape, num_classes, **options), stream(seed, "model", *key)
    )


def smooth_mlp(input_shape: Sequence[int], num_classes: int, *, hidden: int = 12) -> nn.Module:
    """Return a smooth dense network, so that rounding errors stay small."""
    return nn.Sequential(
        *(
            nn.Flatten(),
            nn.Linear(math.prod(input_shape), hidden),
            nn.Tanh(),
            nn.Linear(hidden, num_classes),
        )
    )


def smooth_cnn(input_shape: Sequence[int], num_classes: int, *, width: int = 6) -> nn.Module:
    """Return a smooth convolutional network for 8 x 8 pixels."""
    channels = input_shape[0]
    return nn.Sequential(
        *(nn.Conv2d(channels, width, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(2 * width * 4, num_classes)),
    )


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "logistic": architectures.logistic,
    "mlp": architectures.mlp,
    "cnn": architectures.cnn,
    "tests.whole:smooth_mlp": smooth_mlp,
    "tests.whole:smooth_cnn": smooth_cnn,
}


# ---- Data of the agents ----


def redrawn(dataset: Dataset, seed: int) -> Dataset:
    """Merge pool and test set, and draw a new test set with the same number of images per class."""
    x, y = (torch.cat([getattr(dataset.pool, name), getattr(dataset.test, name)]) for name in "xy")
    remaining, test_indices = [int((dataset.test.y == c).sum()) for c in range(10)], list[int]()
    for i in stream(seed, "test").permutation(len(y)):
        if remaining[int(y[i])] > 0:
            remaining[int(y[i])] -= 1
            test_indices.append(int(i))
    pool_indices = [i for i in range(len(y)) if i not in test_indices]
    pool = Shard(x[pool_indices], y[pool_indices])
    return replace(dataset, pool=pool, test=Shard(x[test_indices], y[test_indices]))


def deal(labels: list[int], agents: dict[str, Any], seed: int) -> tuple[list[Share], list[int]]:
    """Partition the samples in each cluster: benign agents come first, then malicious ones.

    All clusters partition the same samples. The second value is the samples without an agent.
    """
    order_of_pool = [int(i) for i in stream(seed, "partition", "pool").permutation(len(labels))]
    counts = zip(counts_of(agents, "benign"), counts_of(agents, "malicious"), strict=True)
    shares, first_agent, largest = [], 0, 0
    for cluster, (num_benign, num_malicious) in enumerate(counts):
        roles = [False] * num_benign + [True] * num_malicious
        sizes = [
            agents["malicious_samples" if is_malicious else "benign_samples"]
            for is_malicious in roles
        ]
        shared = order_of_pool[: sum(sizes)]
        largest = max(largest, sum(sizes))
        order = [int(i) for i in stream(seed, "partition", cluster).permutation(shared)]
        start = 0
        for position, (is_attacker, size) in enumerate(zip(roles, sizes, strict=True)):
            own_samples = order[start : start + size]
            start += size
            train, validation = own_samples, list[int]()
            if not is_attacker:
                draw = stream(seed, "split", first_agent + position).permutation(size)
                train, validation = split(
                    [labels[i] for i in own_samples], [int(k) for k in draw], own_samples, agents
                )
            if not (is_attacker and agents["malicious_role"] == "removed"):
                shares.append(Share(cluster, is_attacker, train, validation))
        first_agent += len(roles)
    return shares, order_of_pool[largest:]


def counts_of(agents: dict[str, Any], role: str) -> list[int]:
    """Return the number of agents with a role in each cluster."""
    counts = agents[role]
    return [counts] * agents["num_clusters"] if isinstance(counts, int) else counts


def split(
    labels: list[int], draw: list[int], samples: list[int], agents: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Split a benign agent's samples into training and validation samples.

    `draw` is a random permutation of range(n).
    """
    fraction, validation_positions = agents["validation"], set()
    if agents["split"] == "random":
        validation_positions = set(draw[: round(fraction * len(samples))])
    else:
        for c in set(labels):
            members = [k for k in draw if labels[k] == c]
            if agents["split"] == "stratified":
                count = min(max(round(fraction * len(members)), 1), len(members) - 1)
            else:
                count = int(fraction * len(members))
                if count == 0:
                    count = len(members)
            validation_positions |= set(members[:count])
    validation = [i for k, i in enumerate(samples) if k in validation_positions]
    train = [i for k, i in enumerate(samples) if k not in validation_positions]
    return train if agents["hold_out"] else train + validation, validation


# ---- Views and attacks ----


def turned(x: Tensor, quarters: int) -> Tensor:
    """Rotate square images [n, channels, s, s] counter-clockwise by `quarters` times 90 degrees."""
    size = x.shape[-1]
    for _ in range(quarters):
        before, x = x, torch.empty_like(x)
        for row in range(size):
            for column in range(size):
                # The last column, from top to bottom, becomes the first row.
                x[:, :, row, column] = before[:, :, column, size - 1 - row]
    return x


def flipped(labels: Tensor, source: int, target: int) -> Tensor:
    """Replace label c_S by c_T, and keep all other labels (eq:MaliAgentObj)."""
    return torch.tensor([target if y == source else y for y in labels.tolist()])


# ---- Metrics ----


def scores(
    module: nn.Module, x: Tensor, y: Tensor, source: int, target: int, margin: float
) -> Scores:
    """Compute overall accuracy, source class accuracy and attack success rate (sec:experiments).

    Rounding may decide between two classes whose logits differ by less than `margin`.
    """
    module.eval()
    with torch.no_grad():
        logits = module(x).tolist()
    num_right = unsure = num_source = source_right = num_taken = source_unsure = 0
    for row, true in zip(logits, y.tolist(), strict=True):
        second_logit, first_logit = sorted(row)[-2:]
        predicted = row.index(first_logit)
        num_right += predicted == true
        unsure += first_logit - second_logit < margin
        if true == source:
            num_source += 1
            source_right += predicted == source
            num_taken += predicted == target
            source_unsure += first_logit - second_logit < margin
    shares = (
        source_right / num_source,
        num_taken / num_source,
        unsure / len(y),
        source_unsure / num_source,
    )
    return Scores(num_right / len(y), *shares)
