"""The sub-level set of an agent's average loss (eq:clustered_csp): which models count in its consensus point."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedcb2o.federated.aggregation.gram_matrix import relative_distances
from fedcb2o.federated.aggregation.standard_errors import error
from fedcb2o.federated.types import Judged

OwnModel = Literal["excluded", "judged", "trusted"]
Meeting = Literal["first", "second"]
NEAR = 2.0
"""G of who is hardly apart from the own model, in nats: about as much as is lost by a model of ten classes that knows
nothing. It is on record, as G is, but not for ever, since benign peers may be near after a round or two."""
Level = Callable[[Float[Tensor, " m"]], Bool[Tensor, " m"]]
"""The losses of some models -> which do not exceed the level."""


@dataclass(frozen=True)
class Sublevel:
    """Who is in the set: by a `level` of the losses, as in the paper, or all.

    Beyond the paper: with `tested`, models count, too, whose loss exceeds the own one's by at most so many standard
    errors, on the same samples; without a `level` these alone. With `ball` nobody counts who is farther from the own
    model than so many times its norm: the ball B_R of eq:Q_beta, about the own model, for who cannot tell by losses
    yet. With `apart` nobody counts who is nearer to the own model than so many times what that has moved in its
    LocalUpdate: by the samples that it trained on the own model, and what hardly differs from it, is better than all
    others. With counts_from="second" a model counts from the second time on that its agent was asked.
    """

    level: Level | None = None
    tested: float | None = None
    ball: float | None = None
    apart: float | None = None
    counts_from: Meeting = "first"

    def by_distance(self, judged: Judged) -> tuple[Bool[Tensor, "*a m"], Bool[Tensor, "*a m"]]:
        """Which received models lie outside of the ball, and which of peers are hardly apart from the own one."""
        ids = judged.received.ids
        outside, near = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
        if self.ball is None and self.apart is None:
            return outside, near
        m = ids.shape[-1]
        everyone = judged.received.with_own(judged.me).rows.view(-1, m + 1)
        if self.apart is not None:
            assert judged.before is not None
            everyone = torch.cat([judged.before.view(-1, 1), everyone], -1)
        a = len(everyone)
        for far, close, rows in zip(outside.view(a, m), near.view(a, m), everyone, strict=True):
            distances = relative_distances(judged.pool, rows)
            if self.ball is not None:
                far[:] = ~(distances[len(distances) - m :] <= self.ball)
            if self.apart is not None:
                close[:] = distances[1:] < self.apart * distances[0]
        return outside, near & (ids != judged.me.ids)

    def counted(self, judged: Judged, own_model: OwnModel, out: Bool[Tensor, "*a m"]) -> Bool[Tensor, "*a k"]:
        """Which of the received models and, last, the agent's own one are in the set (eq:clustered_csp); none that is
        `out` for its distance."""
        assert judged.losses is not None
        assert judged.own is not None
        received = ~out
        if own_model != "excluded":
            received &= judged.received.ids != judged.me.ids  # it may have drawn itself: it counts once
        if self.counts_from == "second":
            received &= torch.isin(judged.received.ids, judged.local.contacts.ids)
        own = torch.full((*received.shape[:-1], 1), own_model != "excluded")
        members = torch.cat([received, own], -1)
        counted, k = members.clone(), members.shape[-1]
        if self.level is not None:
            lower = torch.cat([judged.losses.mean, judged.own.mean], -1)
            for each, some, losses in zip(*(x.view(-1, k) for x in (counted, members, lower)), strict=True):
                if some.any():
                    each[some] = self.level(losses[some])
        if self.tested is not None:
            bound = judged.own.mean + self.tested * error(judged.losses, judged.own).nan_to_num(nan=0.0)
            near = torch.cat([judged.losses.mean <= bound, torch.ones_like(own)], -1)
            counted = members & (near if self.level is None else near | counted)
        return counted
