"""The declaration of an algorithm."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fedcb2o.federated.types import Select

Likelihood = Literal["loss", "loss+criterion"]


@dataclass(frozen=True)
class ClusterModels:
    """So many `models`, one for each cluster, that a coordinator holds (IFCA) or `each` agent (DFCA), and of which each
    agent trains the one that fits it best.

    What agents made of a model is averaged with equal weights, `by_samples`, or by a robust `rule`. Of `restarts` sets
    of first models that set is taken which fits best after `trial` rounds.
    """

    num_models: int
    per_agent: bool = False
    by_samples: bool = False
    rule: functools.partial[Any] | None = None
    restarts: int = 1
    trial_rounds: int = 0

    def num_rows(self, num_agents: int) -> int:
        """How many models there are in all."""
        return self.num_models * (num_agents if self.per_agent else self.restarts)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """How a benign agent aggregates (alg:localAggregation).

    `weigh` is a rule: normalised weights of the received models and, last, of the agent's own; `judges` says whether
    it needs losses, of models or of what lies so far (`judged_at`) on the way to them. `mixing_factor` is lambda1 *
    gamma, or replaces it; `own_candidate` lets an agent draw itself. `likelihood` says what a peer's record counts.
    `keeps_before` says that it looks at the model before the round, `remembers` that `weigh` has a memory, and `admits`
    raises ConfigError for a budget that it does not go with. `clusters` are those of IFCA and DFCA, and else None.
    """

    select: Select
    rule: Callable[..., Any]
    needs_losses: bool
    lambda1: float
    mixing_factor: float | None
    own_candidate: bool = False
    kappa: float = 2.0
    zeta: float = 0.5
    likelihood: Likelihood = "loss"
    interpolation: float = 1.0
    first_contact: str = "average"
    keeps_previous: bool = False
    is_stateful: bool = False
    validate_budget: Callable[[int], None] | None = None
    clusters: ClusterModels | None = None

    def factor(self, gamma: float) -> float:
        """The share of the consensus point in the new model (eq:local_agg_update)."""
        return self.lambda1 * gamma if self.mixing_factor is None else self.mixing_factor
