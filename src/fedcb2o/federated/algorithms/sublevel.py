"""Sub-level set of an agent's average loss (eq:clustered_csp).

Only its members count in the consensus point. Some variants go beyond the paper.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o.federated.aggregation.gram_matrix import relative_distances
from fedcb2o.federated.aggregation.standard_errors import standard_error
from fedcb2o.federated.types import CriterionInput

OwnModel = Literal["excluded", "judged", "trusted"]
MinContacts = Literal[1, 2]
LevelTest = Callable[[Float[Tensor, " m"]], Bool[Tensor, " m"]]
"""Function from losses to a mask of those that do not exceed the level."""

NEAR_COPY_VALUE = 2.0
"""Least value of G, in nats, for a model that is almost identical to the agent's own.

A model of ten classes that knows nothing loses about as much. The value is recorded like every G,
but it decays, because benign peers may be near after a round or two.
"""


@dataclass(frozen=True)
class SublevelSet:
    """Sub-level set by a level of the losses, or all models.

    All other attributes go beyond the paper.

    Attributes:
        level: Test of the losses against the level (eq:Q_beta); None for no level.
        loss_tolerance: Also accept models whose loss exceeds the agent's own loss by at most this
            number of standard errors, on the same samples. Without a level, accept only these.
        max_distance: Reject models farther from the agent's own model than this multiple of its
            norm. This is the ball B_R of eq:Q_beta, about the agent's own model, for agents whose
            losses are not yet informative.
        min_distance: Reject models nearer to the agent's own model than this multiple of its
            movement in LocalUpdate. On the samples that it was trained on, the agent's own model is
            better than all others, and so is an almost identical model.
        min_contacts: 2 accepts a peer's model only from the second time on that it was sampled.
    """

    level: LevelTest | None = None
    loss_tolerance: float | None = None
    max_distance: float | None = None
    min_distance: float | None = None
    min_contacts: MinContacts = 1

    def distance_masks(
        self, inputs: CriterionInput
    ) -> tuple[Bool[Tensor, "*a m"], Bool[Tensor, "*a m"]]:
        """Find received models that are too far or almost identical.

        Args:
            inputs: View of one or several agents.

        Returns:
            Models outside of the ball, shape [*a, m], and peers' models that are almost identical
            to the agent's own model, shape [*a, m].
        """
        ids = inputs.received.ids
        is_far = torch.zeros_like(ids, dtype=torch.bool)
        is_near = torch.zeros_like(ids, dtype=torch.bool)
        if self.max_distance is None and self.min_distance is None:
            return is_far, is_near

        m = ids.shape[-1]
        rows_of_agents = inputs.received.with_own(inputs.own_entry).rows.view(-1, m + 1)
        if self.min_distance is not None:
            assert inputs.previous is not None
            rows_of_agents = torch.cat([inputs.previous.view(-1, 1), rows_of_agents], -1)
        a = len(rows_of_agents)
        agents = zip(is_far.view(a, m), is_near.view(a, m), rows_of_agents, strict=True)
        for far, near, rows in agents:  # views of the masks, filled in place
            distances = relative_distances(inputs.models, rows)
            if self.max_distance is not None:
                far[:] = ~(distances[len(distances) - m :] <= self.max_distance)
            if self.min_distance is not None:
                near[:] = distances[1:] < self.min_distance * distances[0]
        return is_far, is_near & (ids != inputs.own_entry.ids)

    def membership(
        self, inputs: CriterionInput, own_model: OwnModel, excluded: Bool[Tensor, "*a m"]
    ) -> Bool[Tensor, "*a k"]:
        """Find the members of the set (eq:clustered_csp).

        Args:
            inputs: View of one or several agents.
            own_model: "excluded" leaves the agent's own model out.
            excluded: Received models that do not count because of their distance, shape [*a, m].

        Returns:
            Membership of the received models and, last, the agent's own model, shape [*a, m + 1].
        """
        assert inputs.losses is not None
        assert inputs.own_losses is not None

        # 1. The candidates.
        received = ~excluded
        if own_model != "excluded":  # an agent may sample itself; its model counts once
            received &= inputs.received.ids != inputs.own_entry.ids
        if self.min_contacts == 2:
            received &= torch.isin(inputs.received.ids, inputs.context.contacts.ids)
        own = torch.full((*received.shape[:-1], 1), own_model != "excluded")
        candidates = torch.cat([received, own], -1)

        # 2. The level of the candidates' losses, for one agent at a time.
        members = candidates.clone()
        if self.level is not None:
            k = candidates.shape[-1]
            lower = torch.cat([inputs.losses.mean, inputs.own_losses.mean], -1)
            agents = zip(*(x.view(-1, k) for x in (members, candidates, lower)), strict=True)
            for members_of_agent, candidates_of_agent, losses in agents:
                if candidates_of_agent.any():
                    below = self.level(losses[candidates_of_agent])
                    members_of_agent[candidates_of_agent] = below

        # 3. The tolerance of the agent's own loss.
        if self.loss_tolerance is None:
            return members
        errors = standard_error(inputs.losses, inputs.own_losses).nan_to_num(nan=0.0)
        bound = inputs.own_losses.mean + self.loss_tolerance * errors
        tolerated = torch.cat([inputs.losses.mean <= bound, torch.ones_like(own)], -1)
        if self.level is not None:
            tolerated = tolerated | members
        return candidates & tolerated
