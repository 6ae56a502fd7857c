"""The group of one agent that a round computes, with a buffer for the models of others."""

import dataclasses

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o.data import Shard, transforms, value_range
from fedcb2o.federated import (
    Adversary,
    AgentData,
    AgentGroup,
    Attack,
    BufferLayout,
    Ragged,
    RunSpec,
)


def data_of_one(
    spec: RunSpec, id: int, samples: Shard, num_training: int, attack: Attack | None = None
) -> AgentData:
    """Return the data of one agent.

    The agent validates on `samples`. They also stand for its `num_training` training samples.
    """
    indices = np.arange(len(samples))
    return AgentData(
        agents=np.array([id]),
        samples=samples,
        test=samples,
        train=Ragged.from_arrays([np.resize(indices, num_training)]),
        validation=Ragged.from_arrays([indices]),
        cluster=np.zeros(1, np.int64),
        view=transforms.unchanged,
        num_classes=spec.num_classes,
        malicious=np.array([attack is not None]),
        attack=attack or Attack(),
        seed=spec.seed,
        value_range=value_range(samples.x),
    )


def group_of_one(
    spec: RunSpec,
    data: AgentData,
    models: Float[Tensor, "rows d"],
    adversary: Adversary | None = None,
    num_crafted: int = 0,
) -> AgentGroup:
    """Return a group with the buffer [own | crafted | before the round | received]."""
    keeps_previous = spec.algorithm.keeps_previous and not num_crafted
    layout = BufferLayout.create(
        np.zeros(1, np.int64), 1, np.array([num_crafted > 0]), num_crafted, keeps_previous
    )
    return AgentGroup(spec, data, adversary, layout, models)


def with_candidates(
    spec: RunSpec, id: int, num_agents: int, candidates: Int[np.ndarray, " k"], budget: int
) -> RunSpec:
    """Return a specification in which an agent may ask some peers.

    The ids are ascending. `budget` is M.
    """
    # A graph in which this agent alone has neighbours: no other agent selects here.
    neighbours = [torch.zeros(0, dtype=torch.int64)] * num_agents
    neighbours[id] = torch.from_numpy(candidates)
    return dataclasses.replace(
        spec,
        num_agents=num_agents,
        agents=spec.agents.model_copy(update={"budget": budget}),
        neighbours=tuple(neighbours),
    )
