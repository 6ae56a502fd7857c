"""Partition of data with natural owners, each an agent with its samples.

Samples are not transformed. The malicious agents are drawn among the owners.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedcb2o.data._dataset import Dataset, Owners, group_members
from fedcb2o.data._partition import Population, validation_mask
from fedcb2o.errors import ConfigError, DataError
from fedcb2o.plugins import did_you_mean
from fedcb2o.rng import stream


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

    Example:
        >>> from fedcb2o.data import typefaces
        >>> data = typefaces()
        >>> agents = partition_by_owner(
        ...     data, data.owners, benign=3, malicious=0, benign_samples=50, malicious_samples=None,
        ...     validation=0.2, split="random", seed=0,
        ... )
        >>> [len(train) for train in agents.train]
        [40, 40, 40]
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
                    labels[samples], agent, validation, split, seed, hold_out=hold_out, name=name
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
