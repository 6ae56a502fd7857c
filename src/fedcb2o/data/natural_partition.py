"""Who holds what where agents bring their own data: each owner is an agent, with as many samples as it has.

Nobody knows of clusters, and nothing is turned. Malicious ones are drawn among the owners.
"""

import numpy as np
import torch

from fedcb2o.data._dataset import Dataset, Owners, group_members
from fedcb2o.data._partition import Population, validation_mask
from fedcb2o.errors import ConfigError, DataError
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
    seed: int,
) -> Population:
    """The owners of a data set as `benign` + `malicious` agents, in their order; which are malicious is drawn anew for
    each seed and, where there are more owners, which take part.

    Who has more than `benign_samples`, or `malicious_samples`, holds so many of its own at random. A benign agent
    validates on what it brought for that, else on a share of its own, as `partition` has it. `hold_out` and
    `remove_malicious` are those of `partition`. Raises ConfigError or DataError where an agent is left without
    training, validation or test data.
    """
    there = len(owners.names)
    n = benign + malicious
    if n > there:
        raise ConfigError(
            f"`agents.benign` + `agents.malicious` = {n}, and the data have {there} owners: take at most as many"
        )
    drawn = np.sort(stream(seed, "owners").permutation(there)[:n])
    bad = np.isin(np.arange(n), stream(seed, "owners", "malicious").permutation(n)[:malicious])
    pool = group_members(owners.pool.numpy(), there)
    test = group_members(owners.test.numpy(), there)
    kept = owners.validates.numpy()
    labels = dataset.labels(dataset.pool).numpy()
    common = (owners.test < 0).any()
    agents = []
    train = []
    held = []
    tests = []
    for agent, owner in enumerate(drawn.tolist()):
        if bad[agent] and remove_malicious:
            continue
        mine = pool[owner]
        most = malicious_samples if bad[agent] else benign_samples
        name = f"owner {owners.names[owner]!r}"
        brought = kept[mine].any()
        if most is not None and len(mine) > most:
            mine = np.sort(
                stream(seed, "owners", "samples", owner).choice(mine, most, replace=False)
            )
        holds = kept[mine] & (not bad[agent])
        if not bad[agent]:
            if not brought:
                holds = validation_mask(
                    labels[mine], agent, validation, split, seed, hold_out=hold_out, name=name
                )
            if (hold_out and holds.all()) or not holds.any():
                what = "validation" if not holds.any() else "training"
                raise DataError(
                    f"{name} is left without {what} samples: give it some, or leave it out"
                )
            if not (len(test[owner]) or common):
                raise DataError(
                    f"{name} has no test samples: give it some, or a test set for everybody"
                )
        agents.append(agent)
        train.append(
            torch.from_numpy(
                mine[~holds] if hold_out else np.concatenate([mine[~holds], mine[holds]])
            )
        )
        held.append(torch.from_numpy(mine[holds]))
        tests.append(torch.from_numpy(test[owner]))
    return Population(
        cluster=torch.zeros(len(agents), dtype=torch.int64),
        malicious=torch.from_numpy(bad[agents]),
        train=tuple(train),
        validation=tuple(held),
        tuning=torch.zeros(0, dtype=torch.int64),
        num_clusters=1,
        tests=tuple(tests),
        names=tuple(owners.names[drawn[agent]] for agent in agents),
    )
