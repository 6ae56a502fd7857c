"""IFCA: a coordinator holds K models, and each becomes the average of what the agents that it fits best made of it
(Ghosh, Chung, Yin and Ramchandran, "An efficient framework for clustered federated learning", NeurIPS 2020,
Algorithm 1, by model averaging).

The clustered baseline. What nothing else here needs, it has: a coordinator that all agents reach and trust, and the
number K of clusters. What all else here has, it lacks: nobody judges the models that are averaged, so that those of
malicious agents count like any other.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int

from fedcb2o import plugins
from fedcb2o.federated.block import Block
from fedcb2o.federated.choices import Choices, Inbox
from fedcb2o.federated.evaluate import losses_of
from fedcb2o.federated.lists import Lists, Places


def adopt_(block: Block, some: Places, held: Sequence[int]) -> list[int]:
    """Which of the coordinator's models, in the rows `held`, fits each of some agents best: that of the least loss on
    its true training data, of equals the first. It takes a copy."""
    terms, chosen = block.terms, []
    for k in some.tolist():
        with plugins.blamed("model", terms.model):
            rows, together = torch.tensor(held), terms.primitives.together
            losses = losses_of(
                terms.module, block.pool, rows, block.holdings.true(k), terms.num_classes, together=together
            )
        chosen.append(int(losses.mean.argmin()))
        block.pool[int(block.layout.own[k])] = block.pool[held[chosen[-1]]]
    return chosen


def averages(ids: Int[np.ndarray, " K"], inbox: Inbox, by_samples: bool) -> Choices:
    """How the K models, whose `ids` follow the agents', change: each to the average of what arrived for it, with equal
    weights or by numbers of samples. One that nobody chose stays."""
    counts, owner = inbox.num_samples if by_samples else np.ones(len(inbox.rows)), inbox.ids.owners
    choices = Choices.none(ids, Lists.empty(len(ids)), inbox)
    total = np.bincount(owner, counts, len(ids))[owner]
    choices.weights[:] = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
    return choices


def seen_by_agents(averages: Choices, chosen: Int[np.ndarray, " N"]) -> Choices:
    """The average that each agent's model is, from its view: its own model is not among those that it received."""
    agents, received = np.arange(len(chosen)), averages.received.take(chosen)
    places, own = averages.received.places(chosen), received.values == agents[received.owners]
    weights, rows = averages.weights[places], averages.rows[places]
    inbox = Inbox(received.only(~own), rows[~own], np.zeros((~own).sum()), np.zeros((~own).sum(), np.int64))
    choices = Choices.none(agents, Lists.empty(len(agents)), inbox)
    choices.weights[:] = weights[~own]
    choices.own_weight[:] = np.bincount(received.owners[own], weights[own], len(agents))
    return choices
