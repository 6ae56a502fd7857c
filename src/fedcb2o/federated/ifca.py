"""IFCA: a coordinator holds K models, and each becomes the average of what the agents that it fits best made of it
(Ghosh, Chung, Yin and Ramchandran, "An efficient framework for clustered federated learning", NeurIPS 2020,
Algorithm 1, by model averaging).

The clustered baseline. What nothing else here needs, it has: a coordinator that all agents reach and trust, and the
number K of clusters. What all else here has, it lacks: nobody judges the models that are averaged, so that those of
malicious agents count like any other.
"""

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedcb2o.federated.round import Mixed, stay
from fedcb2o.federated.types import Losses


def best_fit(losses: Losses) -> int:
    """The cluster that an agent takes for its own: the model of least loss on its own samples, of equals the first."""
    return int(losses.mean.argmin())


def averages(
    chosen: Sequence[int],
    arrived: Bool[Tensor, " N"],
    rows: Int[Tensor, " N"],
    counts: Float[Tensor, " N"],
    num_models: int,
) -> list[Mixed]:
    """The K models after a round: each the average of those that arrived of the agents that chose it.

    `rows` say where in the pool the coordinator finds what each agent publishes, and `counts` how much each counts.
    The weights of a model that nobody chose are all 0: it stays.
    """
    made = []
    for k in range(num_models):
        ids = ((torch.tensor(chosen) == k) & arrived).nonzero().flatten()
        weights = counts[ids] / counts[ids].sum()
        made.append(dataclasses.replace(stay(), ids=ids, rows=rows[ids], weights=weights))
    return made


def seen_by(j: int, average: Mixed) -> Mixed:
    """The average that agent j's model is, from its view: its own model is not among those that it received."""
    others = average.ids != j
    own_weight = float(average.weights[~others].sum())
    ids, rows, weights = average.ids[others], average.rows[others], average.weights[others]
    return dataclasses.replace(stay(), ids=ids, rows=rows, weights=weights, own_weight=own_weight)
