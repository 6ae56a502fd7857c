"""Declaration of an algorithm: the choices of LocalAggregation, and the models of clusters."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from fedcb2o.federated.types import BATCHED, CriterionInput, CriterionValues, RuleOutput, Select
from fedcb2o.plugins import USER_FUNCTION

Likelihood = Literal["loss", "loss+criterion"]


@dataclass(frozen=True)
class ClusterModels:
    """Models of the clusters in IFCA and DFCA.

    A coordinator holds them (IFCA), or each agent (DFCA). An agent trains the model that fits it
    best.

    Attributes:
        num_models: Number K of models per holder.
        per_agent: Each agent holds K models (DFCA), not a coordinator (IFCA).
        by_samples: Weigh agents by numbers of samples instead of equally.
        rule: Robust rule instead of the average; None for the average.
        restarts: Number of sets of initial models; the one that fits best goes on.
        trial_rounds: Rounds after which the sets are compared.
    """

    num_models: int
    per_agent: bool = False
    by_samples: bool = False
    rule: functools.partial[Any] | None = None
    restarts: int = 1
    trial_rounds: int = 0

    def num_rows(self, num_agents: int) -> int:
        """Return the number of rows that the models take in the model buffer.

        Args:
            num_agents: Number of agents.

        Returns:
            Number of models of all holders and restarts.
        """
        return self.num_models * (num_agents if self.per_agent else self.restarts)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The choices of a benign agent in LocalAggregation (alg:localAggregation).

    Attributes:
        select: Peer selection (line 1).
        needs_losses: Validation losses are computed (line 3).
        lambda1: lambda1, the drift towards the consensus point (line 7).
        mixing_factor: Replaces lambda1 * gamma; None for the product.
        criterion: Values of the criterion G (line 5); None for an algorithm with a rule.
        alpha: alpha, the sharpness of the weights exp(-alpha G) (line 6).
        point: Turns the weights into another point than the weighted mean; None for the mean.
        rule: Weights of an algorithm without a criterion (line 6).
        own_candidate: An agent may sample itself.
        kappa: kappa in the update of the likelihoods (line 4).
        zeta: zeta in the update of the likelihoods, in (0, 1].
        likelihood: Losses that the likelihoods count.
        interpolation: Share of the way to a received model at which losses are computed, in (0, 1].
        first_contact: "whole" takes the first likelihood of a peer without averaging.
        keeps_previous: The rule or the criterion reads the model before the round.
        is_stateful: The rule keeps a state from round to round.
        validate_budget: Raises ConfigError for a budget that the rule does not admit.
        clusters: Models of IFCA and DFCA; None for other algorithms.
    """

    select: Select
    needs_losses: bool
    lambda1: float
    mixing_factor: float | None
    criterion: Callable[[CriterionInput], CriterionValues] | None = None
    alpha: float = 0.0
    point: Callable[[CriterionInput, Tensor], RuleOutput] | None = None
    rule: Callable[..., Any] | None = None
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

    @property
    def is_batched(self) -> bool:
        """True if the criterion or the rule accepts several agents at once."""
        function = self.criterion or self.rule
        return function is not None and bool(BATCHED.get(function))

    def criterion_values(self, inputs: CriterionInput) -> CriterionValues | None:
        """Compute the values of the criterion (line 5).

        Args:
            inputs: View of one or several agents.

        Returns:
            The values; None for an algorithm with a rule.
        """
        if self.criterion is None:
            return None
        if USER_FUNCTION.get(self.criterion) is not None:
            inputs = inputs.copy()  # a user's algorithm may write into its input
        return self.criterion(inputs)

    def factor(self, gamma: float) -> float:
        """Return the share of the consensus point in the new model (eq:local_agg_update).

        Args:
            gamma: Step size.

        Returns:
            `mixing_factor`, or lambda1 * gamma without one.
        """
        return self.lambda1 * gamma if self.mixing_factor is None else self.mixing_factor
