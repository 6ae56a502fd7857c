"""The sub-level set of an agent's average loss (eq:clustered_csp): which models count in its consensus point."""

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
MinContacts = Literal["first", "second"]
NEAR_COPY_VALUE = 2.0
"""G of who is hardly apart from the own model, in nats: about as much as is lost by a model of ten classes that knows
nothing. It is on record, as G is, but not for ever, since benign peers may be near after a round or two."""
LevelTest = Callable[[Float[Tensor, " m"]], Bool[Tensor, " m"]]
"""The losses of some models -> which do not exceed the level."""


@dataclass(frozen=True)
class SublevelSet:
    """Who is in the set: by a `level` of the losses, as in the paper, or all.

    Beyond the paper: with `tested`, models count, too, whose loss exceeds the own one's by at most so many standard
    errors, on the same samples; without a `level` these alone. With `ball` nobody counts who is farther from the own
    model than so many times its norm: the ball B_R of eq:Q_beta, about the own model, for who cannot tell by losses
    yet. With `apart` nobody counts who is nearer to the own model than so many times what that has moved in its
    LocalUpdate: by the samples that it trained on the own model, and what hardly differs from it, is better than all
    others. With counts_from="second" a model counts from the second time on that its agent was asked.
    """

    level: LevelTest | None = None
    loss_tolerance: float | None = None
    max_distance: float | None = None
    min_distance: float | None = None
    min_contacts: MinContacts = "first"

    def distance_masks(
        self, inputs: CriterionInput
    ) -> tuple[Bool[Tensor, "*a m"], Bool[Tensor, "*a m"]]:
        """Which received models lie outside of the ball, and which of peers are hardly apart from the own one."""
        ids = inputs.received.ids
        outside = torch.zeros_like(ids, dtype=torch.bool)
        near = torch.zeros_like(ids, dtype=torch.bool)
        if self.max_distance is None and self.min_distance is None:
            return outside, near
        m = ids.shape[-1]
        everyone = inputs.received.with_own(inputs.own_entry).rows.view(-1, m + 1)
        if self.min_distance is not None:
            assert inputs.previous is not None
            everyone = torch.cat([inputs.previous.view(-1, 1), everyone], -1)
        a = len(everyone)
        for far, close, rows in zip(outside.view(a, m), near.view(a, m), everyone, strict=True):
            distances = relative_distances(inputs.models, rows)
            if self.max_distance is not None:
                far[:] = ~(distances[len(distances) - m :] <= self.max_distance)
            if self.min_distance is not None:
                close[:] = distances[1:] < self.min_distance * distances[0]
        return outside, near & (ids != inputs.own_entry.ids)

    def membership(
        self, inputs: CriterionInput, own_model: OwnModel, excluded: Bool[Tensor, "*a m"]
    ) -> Bool[Tensor, "*a k"]:
        """Which of the received models and, last, the agent's own one are in the set (eq:clustered_csp); none that is
        `out` for its distance."""
        assert inputs.losses is not None
        assert inputs.own_losses is not None
        received = ~excluded
        if own_model != "excluded":
            received &= (
                inputs.received.ids != inputs.own_entry.ids
            )  # it may have drawn itself: it counts once
        if self.min_contacts == "second":
            received &= torch.isin(inputs.received.ids, inputs.context.contacts.ids)
        own = torch.full((*received.shape[:-1], 1), own_model != "excluded")
        members = torch.cat([received, own], -1)
        counted = members.clone()
        k = members.shape[-1]
        if self.level is not None:
            lower = torch.cat([inputs.losses.mean, inputs.own_losses.mean], -1)
            for each, some, losses in zip(
                *(x.view(-1, k) for x in (counted, members, lower)), strict=True
            ):
                if some.any():
                    each[some] = self.level(losses[some])
        if self.loss_tolerance is not None:
            bound = inputs.own_losses.mean + self.loss_tolerance * standard_error(
                inputs.losses, inputs.own_losses
            ).nan_to_num(nan=0.0)
            near = torch.cat([inputs.losses.mean <= bound, torch.ones_like(own)], -1)
            counted = members & (near if self.level is None else near | counted)
        return counted
