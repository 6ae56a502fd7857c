"""Skews: differences in labels between the agents of a cluster.

A configuration names a skew by a function in `__all__`: (labels [n], sizes [N], draw, *, ...) ->
agent of each sample [n], from 0 to N - 1. `labels` are those of all samples of a cluster, in random
order; agent i gets `sizes[i]` samples.

Example:
    >>> labels = np.array([0, 1, 0, 1])
    >>> shards(labels, np.array([2, 2]), np.random.default_rng(0), classes=1).tolist()
    [0, 1, 0, 1]
"""

import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray

from fedcb2o.docstrings import share_entries
from fedcb2o.errors import ConfigError

__all__ = ["dirichlet", "shards"]


def dirichlet(
    labels: Int[np.ndarray, " n"],
    sizes: Int[np.ndarray, " N"],
    draw: np.random.Generator,
    *,
    concentration: float = 0.5,
) -> Int[np.ndarray, " n"]:
    """Draw each agent's class proportions q ~ Dirichlet(concentration * p), p the cluster's.

    Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated
    Visual Classification" (2019). Agents take their samples at the same time and without
    replacement. Where too few samples of a class are left, chance distributes them, and the
    remaining agents take from other classes by their proportions. (Many authors draw
    q ~ Dirichlet(a, ..., a): with C classes of equal size, that is concentration = C a.)

    Args:
        concentration: Above 0. Large values give every agent p, small ones few classes.

    Raises:
        ConfigError: `concentration` is not a finite number above 0.
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
        # Agents whose classes are used up take from all remaining classes.
        p = np.where(p.sum(1, keepdims=True) > np.finfo(float).tiny, p, left)
        wanted = draw.multinomial(missing, p / p.sum(1, keepdims=True))
        for c in np.flatnonzero(wanted.sum(0) > left):
            wanted[:, c] = draw.multivariate_hypergeometric(wanted[:, c], left[c])
        taken = taken + wanted
        left = left - wanted.sum(0)
        missing = missing - wanted.sum(1)

    agents = np.tile(np.arange(len(sizes)), q.shape[1])
    return _assign_along_labels(labels, agents, taken.T.ravel())


def shards(
    labels: Int[np.ndarray, " n"],
    sizes: Int[np.ndarray, " N"],
    draw: np.random.Generator,
    *,
    classes: int = 2,
) -> Int[np.ndarray, " n"]:
    """Cut the samples, sorted by label, into `classes` random shards per agent.

    McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-Efficient Learning of Deep
    Networks from Decentralized Data" (2017), for agents of different sizes: each agent cuts its own
    number of samples into `classes` shards, and all shards are placed along the sorted samples in
    random order. A shard across a border holds two classes, and a long shard may hold more.

    Args:
        classes: Shards of each agent, at least 1.

    Raises:
        ConfigError: `classes` is below 1.
    """
    if classes < 1:
        raise ConfigError(f"`classes` of the skew shards must be at least 1, got {classes}")
    index = np.arange(classes)
    # [N, classes]; each row sums to the agent's size.
    lengths = sizes[:, None] // classes + (index < sizes[:, None] % classes)
    order = draw.permutation(lengths.size)
    return _assign_along_labels(labels, order // classes, lengths.ravel()[order])


def _assign_along_labels(
    labels: Int[np.ndarray, " n"],
    agents: Int[np.ndarray, " parts"],
    lengths: Int[np.ndarray, " parts"],
) -> NDArray[np.int64]:
    """Assign consecutive parts of the samples, sorted by label, to agents."""
    assignment = np.empty(len(labels), np.int64)
    assignment[np.argsort(labels, kind="stable")] = np.repeat(agents, lengths)
    return assignment


_ARGUMENTS = {
    "labels": "Labels of a cluster's samples.",
    "sizes": "Number of samples of each agent.",
    "draw": "Source of randomness.",
}
for _name in __all__:
    share_entries(globals()[_name], _ARGUMENTS, "Agent of each sample.")
