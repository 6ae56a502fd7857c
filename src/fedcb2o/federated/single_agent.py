"""One agent as a group: in a user's loop (`fedcb2o.Agent`), and in a node among real peers."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated.adversary import Adversary
from fedcb2o.federated.agent_group import AgentData, AgentGroup, BufferLayout
from fedcb2o.federated.decisions import Inbox
from fedcb2o.federated.ragged import Ragged, Rows
from fedcb2o.federated.run_spec import RunSpec
from fedcb2o.nn.parameters import row_stride

ReceivedModel = tuple[int, float, int]
"""Row of a received model in the buffer, number of samples that its sender claims, and round."""


def agent_group(
    spec: RunSpec,
    data: AgentData,
    adversary: Adversary | None = None,
    models: Float[Tensor, "rows d"] | None = None,
    num_received: int = 0,
) -> AgentGroup:
    """Return a group with the buffer [own | crafted | before the round | received].

    Without `models` it has new memory on the device of its samples.
    """
    num_crafted = 0
    if adversary is not None:
        num_crafted = adversary.attack.num_published(1, len(adversary.benign_ids))
    is_crafting = data.malicious & (num_crafted > 0)
    layout = BufferLayout.create(
        np.zeros(1, np.int64), 1, is_crafting, num_crafted, spec.algorithm.keeps_previous
    )
    if models is None:
        num_rows = layout.first_received + num_received
        # Not zeros: only rows that are written to take memory, and none is read before.
        models = torch.empty(num_rows, row_stride(spec.dim), device=data.samples.x.device)
    return AgentGroup(spec, data, adversary, layout, models[:, : spec.dim])


def with_candidates(
    spec: RunSpec, agent: int, candidates: Collection[int], **changes: Any
) -> RunSpec:
    """Return a specification with the peers that an agent may ask, and with other changes."""
    # A graph in which this agent alone has neighbours: no other agent selects here.
    num_agents = changes.get("num_agents", spec.num_agents)
    neighbours = [torch.zeros(0, dtype=torch.int64)] * num_agents
    neighbours[agent] = torch.tensor(sorted(candidates), dtype=torch.int64)
    return dataclasses.replace(spec, neighbours=tuple(neighbours), **changes)


def inbox_of_one(
    agent: AgentGroup,
    n: int,
    asked: Collection[int],
    models: Mapping[int, ReceivedModel],
    triggers: Mapping[int, Any] | None = None,
) -> Inbox:
    """Return the inbox of an agent, in the order of the senders' ids.

    Its own model is one if it sampled itself. Claims above `max_samples` are clipped. Triggers of
    agents without a model are left out.
    """
    own = int(agent.agents[0])
    received = dict(models)
    if own in asked:
        received[own] = (int(agent.layout.own[0]), float(agent.data.num_samples[0]), n)
    ids = sorted(received)
    columns = np.array([received[i] for i in ids], dtype=float).reshape(-1, 3)
    rows, rounds = columns[:, [0, 2]].astype(np.int64).T
    claims = np.minimum(columns[:, 1], agent.spec.max_samples)
    published = [(triggers or {}).get(id) for id in ids]
    return Inbox(
        Ragged.from_arrays([np.array(ids, np.int64)]), Rows(rows), claims, rounds, published
    )
