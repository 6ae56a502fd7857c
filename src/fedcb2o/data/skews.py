"""Skews: how labels differ between the agents of a cluster.

A configuration names a skew by a function in `__all__`: (labels [n], sizes [N], draw, *, ...) -> who gets each sample
[n]: the number of an agent from 0 to N - 1. `labels` are those of all samples of a cluster, in random order; agent i
gets `sizes[i]` of them.
"""

import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray

from fedcb2o.errors import ConfigError

__all__ = ["dirichlet", "shards"]


def dirichlet(
    labels: Int[np.ndarray, " n"],
    sizes: Int[np.ndarray, " N"],
    draw: np.random.Generator,
    *,
    concentration: float = 0.5,
) -> Int[np.ndarray, " n"]:
    """Every agent draws its own class proportions q ~ Dirichlet(concentration * p), p those of the whole cluster.

    Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification"
    (2019). Large concentrations give every agent p, small ones few classes. Agents take their samples all at once and
    without replacement: where fewer of a class are left than are wanted, chance decides who gets them, and the others
    take by their proportions from the classes that are left. (Many draw q ~ Dirichlet(a, ..., a) instead: with C
    classes of equal size, that is concentration = C a.)
    """
    if not 0 < concentration < np.inf:
        raise ConfigError(
            f"`concentration` of the skew dirichlet must be above 0, got {concentration}"
        )
    _, left = np.unique(labels, return_counts=True)
    q = draw.dirichlet(concentration * left / left.sum(), size=len(sizes))
    taken = np.zeros(q.shape, np.int64)
    missing = sizes
    while missing.any():
        p = np.where(left > 0, q, 0.0)
        p = np.where(
            p.sum(1, keepdims=True) > np.finfo(float).tiny, p, left
        )  # nothing left of what it would take
        wanted = draw.multinomial(missing, p / p.sum(1, keepdims=True))
        for c in np.flatnonzero(wanted.sum(0) > left):
            wanted[:, c] = draw.multivariate_hypergeometric(wanted[:, c], left[c])
        taken = taken + wanted
        left = left - wanted.sum(0)
        missing = missing - wanted.sum(1)
    return _along_labels(labels, np.tile(np.arange(len(sizes)), q.shape[1]), taken.T.ravel())


def shards(
    labels: Int[np.ndarray, " n"],
    sizes: Int[np.ndarray, " N"],
    draw: np.random.Generator,
    *,
    classes: int = 2,
) -> Int[np.ndarray, " n"]:
    """The samples, sorted by label, are cut into shards, of which every agent gets `classes` random ones.

    McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from
    Decentralized Data" (2017), for agents of different sizes: each cuts its own number of samples into `classes`
    parts, and all parts lie along the sorted samples in random order. A shard holds a second class where it lies across
    a border, and more where it is longer than a class.
    """
    if classes < 1:
        raise ConfigError(f"`classes` of the skew shards must be at least 1, got {classes}")
    parts = np.arange(classes)
    lengths = sizes[:, None] // classes + (
        parts < sizes[:, None] % classes
    )  # [N, classes], each row sums to its size
    order = draw.permutation(lengths.size)
    return _along_labels(labels, order // classes, lengths.ravel()[order])


def _along_labels(
    labels: Int[np.ndarray, " n"],
    agents: Int[np.ndarray, " parts"],
    lengths: Int[np.ndarray, " parts"],
) -> NDArray[np.int64]:
    """Who gets each sample, where parts of the samples sorted by label go to `agents`, one part after the other."""
    owners = np.empty(len(labels), np.int64)
    owners[np.argsort(labels, kind="stable")] = np.repeat(agents, lengths)
    return owners
