"""Who holds what in decentralised clustered federated learning (paper, sec:experiments, "Dataset & Attack Setup").

Every cluster holds the same images, rotated by its own angle, and deals them out anew among its agents: at random, or
by a skew (`skews`), so that labels differ between agents too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from fedcb2o.errors import ConfigError, DataError
from fedcb2o.rng import stream

_SPLITS = ("random", "stratified", "released")

_Skew = Callable[[NDArray[np.int64], NDArray[np.int64], np.random.Generator], NDArray[np.integer]]


@dataclass(frozen=True)
class Population:
    """The agents in order (cluster 0 benign, cluster 0 malicious, cluster 1 benign, ...) and the samples they hold.

    `train` and `validation` are indices into the pool, one tensor an agent; those of an agent differ in length, and
    malicious agents validate on nothing. `tuning` are samples that no agent holds. Where agents bring their own,
    `tests` are each one's own among the test samples, and `names` what they are called.
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
    benign: int,
    malicious: int,
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
    """Deals samples out to `benign` + `malicious` agents in each of `num_clusters` clusters (sec:experiments).

    The samples are drawn from the pool without replacement, once for all clusters; each cluster deals them out anew,
    at random or as `skew`(their labels, the agents' numbers of samples, a generator) says: to whom each sample goes.
    A benign agent splits its `benign_samples` into training and validation data, `validation` being the fraction:

    - "random": round(validation * n) samples validate (the paper's text).
    - "stratified": round(validation * n_c) of each class c do, at least one and not all of them; a class with a
      single sample stays in training.
    - "released": int(validation * n_c) of each class do, and where that is 0 the whole class (the authors' code).

    `hold_out=False` trains on the validation data too, which may be all then. `remove_malicious` leaves malicious
    agents out and changes nothing else: neither it nor the number of clusters changes what an agent of cluster 0 holds.
    `tuning` are up to `tuning_size` other samples of the pool, in random order. Raises ConfigError for clusters that
    cannot be filled, a skew that does not give every agent its number of samples, or a split that leaves one without
    training or validation data.
    """
    _check_clusters(num_clusters)
    for name, value, least in (
        ("benign", benign, 1),
        ("malicious", malicious, 0),
        ("benign_samples", benign_samples, 2),
        ("malicious_samples", malicious_samples, 1 if malicious else 0),
        ("tuning_size", tuning_size, 0),
    ):
        if value < least:
            raise ConfigError(f"`{name}` must be at least {least}, got {value}")
    if not 0 < validation <= 1:
        raise ConfigError(
            f"`validation` is the fraction of a benign agent's samples, above 0 and at most 1, got {validation}"
        )
    if split not in _SPLITS:
        raise ConfigError(f"`split` must be one of {', '.join(_SPLITS)}, got {split!r}")
    need = benign * benign_samples + malicious * malicious_samples
    n = len(labels)
    if need > n:
        raise ConfigError(
            f"clusters cannot be filled: `benign` * `benign_samples` + `malicious` * `malicious_samples` ="
            f" {benign} * {benign_samples} + {malicious} * {malicious_samples} = {need}, and the pool has {n} samples"
        )
    y = labels.numpy()
    if n and not (y.min() >= 0 and y.max() < num_classes):
        raise DataError(
            f"labels must be between 0 and {num_classes - 1}, got {y.min()} to {y.max()}"
        )
    drawn = stream(seed, "partition", "pool").permutation(n)
    sizes = np.array([benign_samples] * benign + [malicious_samples] * malicious)
    is_malicious = [False] * benign + [True] * malicious
    cluster = []
    roles = []
    train = []
    held = []
    for c in range(num_clusters):
        dealt = stream(seed, "partition", c).permutation(drawn[:need])
        if skew is not None:
            owners = skew(y[dealt], sizes.copy(), stream(seed, "skew", c))
            _check_skew(owners, sizes)
            dealt = dealt[np.argsort(owners, kind="stable")]
        shares = np.split(dealt, np.cumsum(sizes)[:-1])
        for i, (share, bad) in enumerate(zip(shares, is_malicious, strict=True)):
            if bad and remove_malicious:
                continue
            agent = (
                c * len(sizes) + i
            )  # in the full population, so that removal changes nobody's split
            holds = np.zeros(len(share), bool)
            if not bad:
                holds = validation_mask(y[share], agent, validation, split, seed, hold_out=hold_out)
            order = (share[~holds], share[holds])
            cluster.append(c)
            roles.append(bad)
            train.append(torch.from_numpy(order[0] if hold_out else np.concatenate(order)))
            held.append(torch.from_numpy(order[1]))
    return Population(
        cluster=torch.tensor(cluster),
        malicious=torch.tensor(roles),
        train=tuple(train),
        validation=tuple(held),
        tuning=torch.from_numpy(drawn[need : need + tuning_size]),
        num_clusters=num_clusters,
    )


def rotate(
    x: Shaped[Tensor, "n *features"], cluster: int, num_clusters: int
) -> Shaped[Tensor, "n *features"]:
    """Images [n, ..., s, s] as a cluster sees them: turned counter-clockwise by cluster * 360 / num_clusters degrees.

    As in the paper (sec:experiments). Raises ConfigError if `num_clusters` is not 1, 2 or 4, or if there is more than
    one and the samples are not square images.
    """
    _check_clusters(num_clusters)
    if num_clusters > 1 and (x.ndim < 3 or x.shape[-1] != x.shape[-2]):
        raise ConfigError(
            f"`num_clusters` = {num_clusters} turns square images, and the samples have shape {tuple(x.shape[1:])};"
            " set `num_clusters` = 1 for them"
        )
    return torch.rot90(x, cluster * 4 // num_clusters, dims=(-2, -1)).contiguous() if cluster else x


def validation_mask(
    y: NDArray[np.integer],
    agent: int,
    fraction: float,
    split: str,
    seed: int,
    *,
    hold_out: bool = True,
    name: str | None = None,
) -> NDArray[np.bool_]:
    """Which of an agent's samples, labelled `y`, are validation data, as `partition` has it; messages call it so."""
    order = stream(seed, "split", agent).permutation(len(y))
    holds = np.zeros(len(y), bool)
    if split == "random" or fraction == 1:
        holds[order[: round(fraction * len(y))]] = True
    else:
        for c in np.unique(y):
            members = order[y[order] == c]
            n_c = len(members)
            stratified = min(max(round(fraction * n_c), 1), n_c - 1)
            released = int(fraction * n_c) or n_c
            holds[members[: stratified if split == "stratified" else released]] = True
    for what, there in (("training", not (hold_out and holds.all())), ("validation", holds.any())):
        if not there:
            cure = "set another fraction" + (" or `hold_out` = false" if what == "training" else "")
            raise ConfigError(
                f"`validation` = {fraction} with `split` = {split!r} leaves {name or f'agent {agent}'} no {what} data"
                f" among its {len(y)} samples; {cure}, or give it more samples"
            )
    return holds


def _check_skew(owners: object, sizes: NDArray[np.int64]) -> None:
    if (
        not isinstance(owners, np.ndarray)
        or owners.dtype.kind not in "iu"
        or owners.shape != (sizes.sum(),)
    ):
        got = (
            f"{owners.dtype} {list(owners.shape)}"
            if isinstance(owners, np.ndarray)
            else type(owners).__name__
        )
        raise ConfigError(
            f"the skew returned {got}, expected an array of {sizes.sum()} integers: who gets each sample"
        )
    if owners.min() < 0 or owners.max() >= len(sizes):
        raise ConfigError(
            f"the skew gives samples to agents {owners.min()} to {owners.max()}, and a cluster has agents 0 to"
            f" {len(sizes) - 1}"
        )
    counts = np.bincount(owners, minlength=len(sizes))
    if (wrong := np.flatnonzero(counts != sizes)).size:
        raise ConfigError(
            f"the skew gives agent {wrong[0]} {counts[wrong[0]]} samples instead of {sizes[wrong[0]]}"
        )


def _check_clusters(num_clusters: int) -> None:
    if num_clusters not in (1, 2, 4):
        raise ConfigError(
            f"`num_clusters` must be 1, 2 or 4, as images turn by multiples of 90°, got {num_clusters}"
        )
