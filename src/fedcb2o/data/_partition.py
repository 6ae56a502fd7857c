"""Partition of samples among agents in clusters (paper, sec:experiments, "Dataset & Attack Setup").

Every cluster holds the same samples, changed by its own transform (`transforms`). It distributes
them anew among its agents: at random, or by a skew (`skews`), so that labels differ between agents
too. A cluster of fewer agents holds a part of these samples. In data with owners each agent has its
own samples, without a transform.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor

from fedcb2o.data._dataset import Dataset, Groups, Owners, group_mask, group_members
from fedcb2o.errors import ConfigError, DataError, describe_type
from fedcb2o.plugins import did_you_mean
from fedcb2o.rng import agent_streams, permutations, stream

_SPLITS = ("random", "stratified", "released")
_AGENTS_PER_DRAW = 1024

_Skew = Callable[[NDArray[np.int64], NDArray[np.int64], np.random.Generator], NDArray[np.integer]]


@dataclass(frozen=True)
class Population:
    """The agents and their samples, as indices into the pool.

    Agents are in the order: cluster 0 benign, cluster 0 malicious, cluster 1 benign, and so on.
    Malicious agents have no validation samples. `tuning` are samples that no agent holds. Where
    agents bring their own data, `tests` are the indices of each agent's own test samples, and
    `names` the agents' names.
    """

    cluster: Int[Tensor, " N"]
    malicious: Bool[Tensor, " N"]
    train: tuple[Int[Tensor, " _n"], ...]
    validation: tuple[Int[Tensor, " _v"], ...]
    tuning: Int[Tensor, " u"]
    num_clusters: int
    tests: tuple[Int[Tensor, " _t"], ...] | None = None
    names: tuple[str, ...] = ()


def partition(
    labels: Int[Tensor, " n"],
    *,
    num_clusters: int,
    benign: int | Sequence[int],
    malicious: int | Sequence[int],
    benign_samples: int,
    malicious_samples: int,
    validation: float,
    split: str,
    skew: _Skew | None = None,
    hold_out: bool = True,
    remove_malicious: bool = False,
    num_classes: int,
    seed: int,
    tuning_size: int = 2000,
) -> Population:
    """Distribute samples among the agents of every cluster (sec:experiments).

    The samples are drawn from the pool without replacement, once for all clusters. Neither the
    removal of malicious agents nor the number of clusters changes the samples of an agent in
    cluster 0. The splits into training and validation data are:

    - "random": round(validation * n) samples validate (the paper's text).
    - "stratified": round(validation * n_c) samples of each class c, at least one and not all of
      them; a class with a single sample stays in training.
    - "released": int(validation * n_c) samples of each class, and the whole class where that is 0
      (the authors' code).

    `benign` and `malicious` are numbers of agents in each cluster, or one number per cluster.
    `validation` is the fraction of a benign agent's samples, in (0, 1]. Without `hold_out`,
    validation samples are trained on as well, and all samples may validate. A skew is a function
    (labels, sizes of agents, generator) -> agent of each sample. At most `tuning_size` samples
    outside all agents are kept, in random order.

    ConfigError is raised if a setting is out of range, the pool is too small, the skew returns
    other numbers of samples, or an agent has no training or validation data. DataError is raised
    for a label that is not a class.
    """
    # 1. The settings, and labels that are classes.
    benign_counts = _per_cluster(benign, num_clusters)
    malicious_counts = _per_cluster(malicious, num_clusters)
    for name, value, minimum in (
        ("num_clusters", num_clusters, 1),
        ("benign", min(benign_counts, default=1), 1),
        ("malicious", min(malicious_counts, default=0), 0),
        ("benign_samples", benign_samples, 2),
        ("malicious_samples", malicious_samples, 1 if any(malicious_counts) else 0),
        ("tuning_size", tuning_size, 0),
    ):
        if value < minimum:
            raise ConfigError(f"`{name}` must be at least {minimum}, got {value}")
    if not 0 < validation <= 1:
        raise ConfigError(
            "`validation` is the fraction of a benign agent's samples, above 0 and at most 1,"
            f" got {validation}"
        )
    if split not in _SPLITS:
        raise ConfigError(f"`split` must be one of {', '.join(_SPLITS)}, got {split!r}")

    n = len(labels)
    needed = 0
    for b, m in zip(benign_counts, malicious_counts, strict=True):
        size = b * benign_samples + m * malicious_samples
        needed = max(needed, size)
        if size > n:
            raise ConfigError(
                "clusters cannot be filled: `benign` * `benign_samples` + `malicious` *"
                f" `malicious_samples` = {b} * {benign_samples} + {m} *"
                f" {malicious_samples} = {size}, and the pool has {n} samples"
            )
    y = labels.numpy()
    if n and not (y.min() >= 0 and y.max() < num_classes):
        raise DataError(
            f"labels must be between 0 and {num_classes - 1}, got {y.min()} to {y.max()}"
        )

    # 2. The pool, once for all clusters, so that their number changes no agent of cluster 0.
    drawn = stream(seed, "partition", "pool").permutation(n)
    first = 0  # number of the cluster's first agent in the full population
    cluster: list[int] = []
    is_malicious: list[bool] = []
    train: list[Tensor] = []
    held_out: list[Tensor] = []
    # 3. Each cluster deals out the same samples anew; one of fewer agents holds a part of them.
    for c, (b, m) in enumerate(zip(benign_counts, malicious_counts, strict=True)):
        sizes = np.array([benign_samples] * b + [malicious_samples] * m)
        order = stream(seed, "partition", c).permutation(drawn[: sizes.sum()])
        if skew is not None:
            assignment = skew(y[order], sizes.copy(), stream(seed, "skew", c))
            _check_skew(assignment, sizes)
            order = order[np.argsort(assignment, kind="stable")]

        # Arrays of the benign agents, one row each; a malicious agent trains on all of its samples.
        shares = order[: b * benign_samples].reshape(b, benign_samples)
        is_held_out = _held_out(
            y[shares], range(first, first + b), validation, split, seed, hold_out
        )
        held_out_sizes = is_held_out.sum(1)
        held_out += _rows(shares[is_held_out], held_out_sizes)
        if hold_out:
            train += _rows(shares[~is_held_out], benign_samples - held_out_sizes)
        else:
            places = is_held_out.argsort(1, kind="stable")  # validation samples are last
            train += _rows(np.take_along_axis(shares, places, 1), np.full(b, benign_samples))
        num_malicious = 0 if remove_malicious else m
        rest = order[b * benign_samples :]
        train += _rows(rest, np.full(m, malicious_samples))[:num_malicious]
        held_out += _rows(rest[:0], np.zeros(num_malicious, np.int64))
        cluster += [c] * (b + num_malicious)
        is_malicious += [False] * b + [True] * num_malicious
        first += len(sizes)

    return Population(
        cluster=torch.tensor(cluster),
        malicious=torch.tensor(is_malicious),
        train=tuple(train),
        validation=tuple(held_out),
        tuning=torch.from_numpy(drawn[needed : needed + tuning_size]),
        num_clusters=num_clusters,
    )


def _per_cluster(count: int | Sequence[int], num_clusters: int) -> list[int]:
    """Return one number per cluster."""
    return [count] * num_clusters if isinstance(count, int) else list(count)


def _held_out(
    y: NDArray[np.integer], agents: range, fraction: float, split: str, seed: int, hold_out: bool
) -> NDArray[np.bool_]:
    """Select the validation samples of agents with equally many samples, shape [a, n]."""
    count = y.shape[1]
    masks = np.zeros(y.shape, bool)
    for start in range(0, len(agents), _AGENTS_PER_DRAW):
        some = agents[start : start + _AGENTS_PER_DRAW]
        orders = permutations(agent_streams(seed, "split", agents=some), count, 1)
        part = masks[start : start + len(some)]
        # The first agent is checked; with a random split, all agents have equal numbers.
        num_checked = 1 if split == "random" or fraction == 1 else len(some)
        for k in range(num_checked):
            part[k] = validation_mask(
                y[start + k], some[k], fraction, split, seed, hold_out=hold_out, order=orders[k]
            )
        np.put_along_axis(part[num_checked:], orders[num_checked:, : int(part[0].sum())], True, 1)
    return masks


def _rows(samples: NDArray[np.int64], sizes: NDArray[np.int64]) -> Sequence[Tensor]:
    """Return the samples of each agent, as views of one tensor."""
    return torch.split(torch.from_numpy(samples).flatten(), sizes.tolist())


def validation_mask(
    y: NDArray[np.integer],
    agent: int,
    fraction: float,
    split: str,
    seed: int,
    *,
    hold_out: bool = True,
    name: str | None = None,
    groups: Groups | None = None,
    order: NDArray[np.int64] | None = None,
) -> NDArray[np.bool_]:
    """Select an agent's validation samples, as described in `partition`.

    With `groups` of the samples, whole groups are held out, whatever their classes.
    `name` is that of the agent in messages, and `order` its permutation where it was drawn before.
    ConfigError is raised if the agent has no training or
    no validation data.
    """
    if groups is not None and hold_out:
        if len(np.unique(groups.pool)) < 2:
            raise ConfigError(
                f"{name or f'agent {agent}'} has one group to train on, and `agents.hold_out` needs"
                " a second one to validate: set `hold_out` = false, or give it more groups"
            )
        return group_mask(
            groups.pool.numpy(), fraction, None if groups.by_time else stream(seed, "split", agent)
        )
    if order is None:
        order = stream(seed, "split", agent).permutation(len(y))
    mask = np.zeros(len(y), bool)
    if split == "random" or fraction == 1:
        mask[order[: round(fraction * len(y))]] = True
    else:
        for c in np.unique(y):
            members = order[y[order] == c]
            n_c = len(members)
            count = int(fraction * n_c) or n_c
            if split == "stratified":
                count = min(max(round(fraction * n_c), 1), n_c - 1)
            mask[members[:count]] = True

    purpose = ""
    cure = "set another fraction"
    if hold_out and mask.all():
        purpose = "training"
        cure += " or `hold_out` = false"
    elif not mask.any():
        purpose = "validation"
    if purpose:
        raise ConfigError(
            f"`validation` = {fraction} with `split` = {split!r} leaves {name or f'agent {agent}'}"
            f" no {purpose} data among its {len(y)} samples; {cure}, or give it more samples"
        )
    return mask


def _check_skew(assignment: object, sizes: NDArray[np.int64]) -> None:
    total = sizes.sum()
    if (
        not isinstance(assignment, np.ndarray)
        or assignment.dtype.kind not in "iu"
        or assignment.shape != (total,)
    ):
        got = describe_type(assignment)
        if isinstance(assignment, np.ndarray):
            got = f"{assignment.dtype} {list(assignment.shape)}"
        raise ConfigError(
            f"the skew returned {got}, expected an array of {total} integers: the agent of each"
            " sample"
        )
    if assignment.min() < 0 or assignment.max() >= len(sizes):
        raise ConfigError(
            f"the skew gives samples to agents {assignment.min()} to {assignment.max()}, and a"
            f" cluster has agents 0 to {len(sizes) - 1}"
        )
    counts = np.bincount(assignment, minlength=len(sizes))
    wrong = np.flatnonzero(counts != sizes)
    if wrong.size:
        agent = wrong[0]
        raise ConfigError(
            f"the skew gives agent {agent} {counts[agent]} samples instead of {sizes[agent]}"
        )


def partition_by_owner(
    dataset: Dataset,
    owners: Owners,
    *,
    benign: int,
    malicious: int,
    benign_samples: int | None,
    malicious_samples: int | None,
    validation: float,
    split: str,
    hold_out: bool = True,
    remove_malicious: bool = False,
    clusters: Sequence[Sequence[str]] | None = None,
    seed: int,
) -> Population:
    """Make the owners of a data set the agents, in their order.

    The malicious agents, and with more owners than agents the participants, are drawn anew for each
    seed. A benign agent validates on its owner's validation samples, or else on a share of its
    samples, as in `partition`. Numbers of samples are the largest ones of an agent; None for all
    its samples. `clusters` has the names of the owners in each cluster; None for one cluster. With
    `remove_malicious`, the malicious agents are left out and nothing else changes.

    ConfigError is raised if there are fewer owners than agents, or an owner is not in one cluster,
    and DataError if an agent has no training, validation or test samples.
    """
    num_owners = len(owners.names)
    num_agents = benign + malicious
    if num_agents > num_owners:
        raise ConfigError(
            f"`agents.benign` + `agents.malicious` = {num_agents}, and the data have {num_owners}"
            " owners: take at most as many"
        )
    cluster = _owner_clusters(owners.names, clusters or [owners.names])
    # Sorted, because agents are in the order of the owners.
    participants = np.sort(stream(seed, "owners").permutation(num_owners)[:num_agents])
    malicious_agents = stream(seed, "owners", "malicious").permutation(num_agents)[:malicious]
    is_malicious = np.isin(np.arange(num_agents), malicious_agents)

    pool = group_members(owners.pool.numpy(), num_owners)
    test = group_members(owners.test.numpy(), num_owners)
    reserved = owners.validates.numpy()
    labels = dataset.labels(dataset.pool).numpy()
    has_common_test = (owners.test < 0).any()

    agents: list[int] = []
    train = []
    held_out = []
    tests = []
    # A removed agent keeps its number, so that the others hold the same samples.
    for agent, owner in enumerate(participants.tolist()):
        if is_malicious[agent] and remove_malicious:
            continue
        samples = pool[owner]
        limit = malicious_samples if is_malicious[agent] else benign_samples
        # Before the limit: an owner that reserved samples never validates on other ones.
        has_reserved = reserved[samples].any()
        if limit is not None and len(samples) > limit:
            draw = stream(seed, "owners", "samples", owner)
            samples = np.sort(draw.choice(samples, limit, replace=False))

        mask: NDArray[np.bool_] = reserved[samples] & (not is_malicious[agent])
        if not is_malicious[agent]:
            name = f"owner {owners.names[owner]!r}"
            if not has_reserved:
                mask = validation_mask(
                    *(labels[samples], agent, validation, split, seed),
                    hold_out=hold_out,
                    name=name,
                    groups=None if dataset.groups is None else dataset.groups.part(samples),
                )
            if (hold_out and mask.all()) or not mask.any():
                purpose = "training" if mask.any() else "validation"
                raise DataError(
                    f"{name} is left without {purpose} samples: give it some, or leave it out"
                )
            if not (len(test[owner]) or has_common_test):
                raise DataError(
                    f"{name} has no test samples: give it some, or a test set for all agents"
                )

        training = samples[~mask]
        if not hold_out:
            training = np.concatenate([samples[~mask], samples[mask]])
        agents.append(agent)
        train.append(torch.from_numpy(training))
        held_out.append(torch.from_numpy(samples[mask]))
        tests.append(torch.from_numpy(test[owner]))

    return Population(
        cluster=torch.from_numpy(cluster[participants[agents]]),
        malicious=torch.from_numpy(is_malicious[agents]),
        train=tuple(train),
        validation=tuple(held_out),
        tuning=torch.zeros(0, dtype=torch.int64),
        num_clusters=len(clusters or [owners.names]),
        tests=tuple(tests),
        names=tuple(owners.names[participants[agent]] for agent in agents),
    )


def _owner_clusters(names: Sequence[str], clusters: Sequence[Sequence[str]]) -> NDArray[np.int64]:
    """Return the cluster of each owner."""
    cluster = np.full(len(names), -1)
    for k, members in enumerate(clusters):
        for name in members:
            if name not in names:
                raise ConfigError(
                    f"`owner_clusters` names {name!r}, which is no owner of the data."
                    f"{did_you_mean(name, names)}"
                )
            if cluster[names.index(name)] >= 0:
                raise ConfigError(f"`owner_clusters` names {name!r} twice: keep one of them")
            cluster[names.index(name)] = k
    missing = [names[i] for i in np.flatnonzero(cluster < 0).tolist()]
    if missing:
        raise ConfigError(
            f"`owner_clusters` leaves out {len(missing)} of {len(names)} owners, such as"
            f" {missing[0]!r}: put each owner in one cluster"
        )
    return cluster
