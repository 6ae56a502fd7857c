"""A whole run as plain, slow loops: from a TOML file to accuracy, source accuracy and attack
success rate.

García Trillos, Akash, Li, Riedl, Zhu, "Defending Against Diverse Attacks in Federated Learning
Through Consensus-Based Bi-Level Optimization" (arXiv 2412.02535), Section sec:experiments:
clusters deal out the same images and turn them by their own angle ("Dataset & Attack Setup"),
benign agents hold out validation data ("Baselines & Implementations"), malicious agents flip
labels (eq:MaliAgentObj), and benign agents' models are scored on test images turned as their own
("Performance Metrics"). The rounds between are Algorithms 1 and 2 as in `tests/reference.py`.

Nothing is taken from the library but what is no mathematics of the paper: the random streams by
their names, the digits as they are loaded, and the networks with their first numbers. No model is
ever set to what the library has for it.
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

# What a file leaves out, as docs/configuration.md has it.

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
    """What one agent holds, as places in the pool."""

    cluster: int
    malicious: bool
    train: list[int]
    validation: list[int]


@dataclass(frozen=True)
class Scores:
    """The paper's three metrics of one model, and the shares of samples on which rounding may
    decide, of all and of the source class."""

    accuracy: float
    source_accuracy: float
    attack_success_rate: float
    unsure: float
    source_unsure: float


@dataclass(frozen=True)
class Done:
    """One round: the mean loss of each agent's mini-batches, what each did, and benign agents'
    scores by their id."""

    n: int
    train_loss: list[float]
    infos: list[reference.Info]
    scores: dict[int, Scores] | None  # None in rounds that are not evaluated


class Whole:
    """One seed of the run that a TOML file describes."""

    def __init__(self, path: Path, seed: int, *, margin: float) -> None:
        self.settings, self.seed, self.margin = read(path), seed, margin
        chosen = {key: value for key, value in self.settings["data"].items() if key != "name"}
        self.dataset = digits(**chosen)
        if self.settings["evaluate_on"] == "redrawn":
            self.dataset = redrawn(self.dataset, seed)
        self.training = reference.Training(**self.settings["training"])
        labels = [int(y) for y in self.dataset.pool.y]
        self.shares, self.tuning = deal(labels, self.settings["agents"], seed)
        self.agents = [self._agent(j) for j in range(len(self.shares))]
        self.true_labels = [agent.train_y for agent in self.agents]
        clusters = range(len(counts_of(self.settings["agents"], "benign")))
        self.scored_on = [self._scored_on(cluster) for cluster in clusters]

    def rounds(self) -> Iterator[Done]:
        """Algorithm 1 from the first round to the last, each with what it led to."""
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
            every, last = self.settings["evaluate_every"], self.settings["rounds"] - 1
            scored = (n + 1) % every == 0 or n == last
            yield Done(
                n,
                [sum(each) / len(each) for each in steps],
                infos,
                self._scores() if scored else None,
            )

    def _agent(self, j: int) -> reference.Agent:
        share, role, pool = (
            self.shares[j],
            self.settings["agents"]["malicious_role"],
            self.dataset.pool,
        )
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
        """Images as a cluster sees them: turned by cluster * 360 / K degrees, or with other labels,
        each of them `cluster` classes on."""
        agents = self.settings["agents"]
        if agents.get("cluster_transform") == "permute_labels":
            return x, (y + cluster) % len(self.dataset.class_names)
        K = len(counts_of(agents, "benign"))
        angles = agents.get("cluster_transform", {}).get("angles", [k * 360 // K for k in range(K)])
        return turned(x, quarters=angles[cluster] // 90), y

    def _poison(self, n: int) -> None:
        """Attackers train on flipped labels from the attack's first round on, and nobody else ever
        does."""
        attack, role = self.settings["attack"], self.settings["agents"]["malicious_role"]
        for agent, true in zip(self.agents, self.true_labels, strict=True):
            attacks = agent.malicious and role == "attack" and n >= attack.get("from_round", 0)
            agent.train_y = flipped(true, attack["source"], attack["target"]) if attacks else true

    def _scores(self) -> dict[int, Scores]:
        """Each benign agent's, on images turned as its own cluster's are."""
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
        """The test images as a cluster sees them, or tuning images: those of the pool that nobody
        holds."""
        test, pool = self.dataset.test, self.dataset.pool
        if self.settings["evaluate_on"] != "tuning":
            return self._seen(test.x, test.y, cluster)
        held = self.tuning[: len(test.y)]
        return self._seen(pool.x[held], pool.y[held], cluster)


# ---- the file ----


def read(path: Path) -> dict[str, Any]:
    """The settings of a file, with the defaults of what it leaves out."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    assert "extends" not in table
    algorithm = table["algorithm"]
    return {
        **EXPERIMENT,
        **table,
        "agents": {**AGENTS, **table["agents"]},
        "algorithm": {**ALGORITHMS[algorithm["name"]], **algorithm},
        "training": table.get("training", {}),
    }


def options_of(settings: dict[str, Any]) -> reference.Options:
    """What an agent of the configured algorithm does."""
    chosen = {key: value for key, value in settings["algorithm"].items() if key != "name"}
    if isinstance(chosen["criterion"], dict):
        table = chosen["criterion"]
        chosen["criterion"] = table["name"]
        chosen |= {key: value for key, value in table.items() if key != "name"}
    chosen |= chosen.pop("guards", {})
    if chosen["mixing_factor"] == "lambda1*gamma":
        chosen["mixing_factor"] = None
    agents = settings["agents"]
    return reference.Options(
        **chosen, budget=agents["budget"], validation_loss=agents["validation_loss"]
    )


def colluder_of(settings: dict[str, Any]) -> reference.Options:
    """What a malicious agent does: fellows first, then benign agents of its cluster, by numbers of
    samples."""
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
    """theta_0^j, one for all agents or each its own."""
    chosen = {key: value for key, value in settings["model"].items() if key != "name"}
    make = NETWORKS[settings["model"]["name"]]
    key = (j,) if settings["agents"]["initialisation"] == "independent" else ()
    return parameters.initialise(
        lambda: make(shape, num_classes, **chosen), stream(seed, "model", *key)
    )


def smooth_mlp(input_shape: Sequence[int], num_classes: int, *, hidden: int = 12) -> nn.Module:
    """A dense network without a kink: what rounding does to it stays rounding."""
    return nn.Sequential(
        *(
            nn.Flatten(),
            nn.Linear(math.prod(input_shape), hidden),
            nn.Tanh(),
            nn.Linear(hidden, num_classes),
        )
    )


def smooth_cnn(input_shape: Sequence[int], num_classes: int, *, width: int = 6) -> nn.Module:
    """A convolutional network for 8 x 8 pixels without a kink."""
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


# ---- who holds what ----


def redrawn(dataset: Dataset, seed: int) -> Dataset:
    """Pool and test set put together, and as many test images of each class drawn from them."""
    x, y = (torch.cat([getattr(dataset.pool, name), getattr(dataset.test, name)]) for name in "xy")
    wanted, held = [int((dataset.test.y == c).sum()) for c in range(10)], list[int]()
    for i in stream(seed, "test").permutation(len(y)):
        if wanted[int(y[i])] > 0:
            wanted[int(y[i])] -= 1
            held.append(int(i))
    rest = [i for i in range(len(y)) if i not in held]
    return replace(dataset, pool=Shard(x[rest], y[rest]), test=Shard(x[held], y[held]))


def deal(labels: list[int], agents: dict[str, Any], seed: int) -> tuple[list[Share], list[int]]:
    """Every cluster deals the same samples out anew: benign agents first, then malicious ones; and
    who got none."""
    drawn = [int(i) for i in stream(seed, "partition", "pool").permutation(len(labels))]
    counts = zip(counts_of(agents, "benign"), counts_of(agents, "malicious"), strict=True)
    shares, first, most = [], 0, 0
    for cluster, (good, bad) in enumerate(counts):
        roles = [False] * good + [True] * bad
        sizes = [agents["malicious_samples" if each else "benign_samples"] for each in roles]
        shared = drawn[: sum(sizes)]
        most = max(most, sum(sizes))
        order = [int(i) for i in stream(seed, "partition", cluster).permutation(shared)]
        start = 0
        for place, (malicious, size) in enumerate(zip(roles, sizes, strict=True)):
            held = order[start : start + size]
            start += size
            train, validation = held, list[int]()
            if not malicious:
                draw = stream(seed, "split", first + place).permutation(size)
                train, validation = split(
                    [labels[i] for i in held], [int(k) for k in draw], held, agents
                )
            if not (malicious and agents["malicious_role"] == "removed"):
                shares.append(Share(cluster, malicious, train, validation))
        first += len(roles)
    return shares, drawn[most:]


def counts_of(agents: dict[str, Any], role: str) -> list[int]:
    """How many benign or malicious agents each cluster has."""
    counts = agents[role]
    return [counts] * agents["num_clusters"] if isinstance(counts, int) else counts


def split(
    labels: list[int], draw: list[int], held: list[int], agents: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Training and validation samples of a benign agent; `draw` are its places 0 to n - 1 in
    random order."""
    fraction, chosen = agents["validation"], set()
    if agents["split"] == "random":
        chosen = set(draw[: round(fraction * len(held))])
    else:
        for c in set(labels):
            members = [k for k in draw if labels[k] == c]
            if agents["split"] == "stratified":
                count = min(max(round(fraction * len(members)), 1), len(members) - 1)
            else:
                count = int(fraction * len(members))
                if count == 0:
                    count = len(members)
            chosen |= set(members[:count])
    validation = [i for k, i in enumerate(held) if k in chosen]
    train = [i for k, i in enumerate(held) if k not in chosen]
    return train if agents["hold_out"] else train + validation, validation


# ---- what an agent sees, and what an attacker makes of it ----


def turned(x: Tensor, quarters: int) -> Tensor:
    """Square images [n, channels, s, s] turned counter-clockwise by so many times 90 degrees,
    pixel by pixel."""
    size = x.shape[-1]
    for _ in range(quarters):
        before, x = x, torch.empty_like(x)
        for row in range(size):
            for column in range(size):
                # The last column, from top to bottom, becomes the first row.
                x[:, :, row, column] = before[:, :, column, size - 1 - row]
    return x


def flipped(labels: Tensor, source: int, target: int) -> Tensor:
    """c_S becomes c_T, and every other label stays (eq:MaliAgentObj)."""
    return torch.tensor([target if y == source else y for y in labels.tolist()])


# ---- how good a model is ----


def scores(
    module: nn.Module, x: Tensor, y: Tensor, source: int, target: int, margin: float
) -> Scores:
    """Overall accuracy, accuracy on the source class and attack success rate (sec:experiments).

    Of two classes whose logits are less than `margin` apart, rounding may decide which one is
    predicted.
    """
    module.eval()
    with torch.no_grad():
        logits = module(x).tolist()
    right = unsure = of_source = source_right = taken = source_unsure = 0
    for row, true in zip(logits, y.tolist(), strict=True):
        second, first = sorted(row)[-2:]
        predicted = row.index(first)
        right += predicted == true
        unsure += first - second < margin
        if true == source:
            of_source += 1
            source_right += predicted == source
            taken += predicted == target
            source_unsure += first - second < margin
    shares = (
        source_right / of_source,
        taken / of_source,
        unsure / len(y),
        source_unsure / of_source,
    )
    return Scores(right / len(y), *shares)
