"""Decision of an agent about the models of one round."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedcb2o.federated.algorithm2 import CriterionWeighing
from fedcb2o.federated.decisions import Decisions
from fedcb2o.federated.guards.checks import ADMITTED, GUARDS_OF_OUTCOMES, OUTCOMES
from fedcb2o.federated.run_spec import Algorithm
from fedcb2o.federated.trigger_exchange import ExchangeWeighing
from fedcb2o.federated.types import CriterionInput, CriterionValues, Weighing

SELF = "itself"
"""Key of the agent's own model where it received that, too."""


@dataclass(frozen=True)
class Decision:
    """Decision of an agent about the models of one round.

    Attributes:
        weights: Weight mu of each received model in the consensus point, by peer. They sum to 1
            with `own_weight`, or to 0 where no model is trusted: the agent then keeps its own.
            NaN for a rule without weights, such as a median.
        own_weight: Weight of the agent's own model.
        mixing_factor: Share of the consensus point in the new model, lambda1 * gamma by default.
        losses: Validation loss of each received model; empty for a rule that needs none.
        own_loss: Validation loss of the agent's own model; NaN if it is not needed.
        criterion: Value of the criterion G of each received model, low is trusted; empty for a
            method without a criterion.
        outside: Peers whose models are outside the sub-level set Q_beta.
        refused: Peers whose models were not evaluated, with the reason: they are invalid, or the
            guards of the method did not admit them.
    """

    weights: dict[Any, float]
    own_weight: float
    mixing_factor: float
    losses: dict[Any, float]
    own_loss: float
    criterion: dict[Any, float]
    outside: tuple[Any, ...]
    refused: dict[Any, str]


class Observer:
    """Algorithm whose criterion stores its last input and values."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.inputs: CriterionInput | None = None
        self.values: CriterionValues | None = None
        self.algorithm = algorithm
        # The guard weighs around the algorithm, of which the criterion is observed.
        exchange = algorithm.weigh if isinstance(algorithm.weigh, ExchangeWeighing) else None
        original = exchange.weigh if exchange else algorithm.weigh
        if isinstance(original, CriterionWeighing):
            self._original = original
            weigh: Weighing = dataclasses.replace(original, function=self._observe)
            weigh = dataclasses.replace(exchange, weigh=weigh) if exchange else weigh
            self.algorithm = dataclasses.replace(algorithm, weigh=weigh)

    def _observe(self, inputs: CriterionInput) -> CriterionValues:
        self.inputs = inputs
        copy = inputs.copy()  # a user's criterion may write into its input
        self.values = self._original.function(copy)
        return self.values


def decision_of(
    decisions: Decisions, observer: Observer, names: Mapping[int, Any], refused: dict[Any, str]
) -> Decision:
    """Return the decision of an agent by the names of its peers.

    `names` includes the agent's own id. `refused` has the reason for each refused model.
    """
    received = [names[id] for id in decisions.received.values.tolist()]
    outcomes = list(zip(received, decisions.admission.tolist(), strict=True))
    admitted = [name for name, outcome in outcomes if outcome == ADMITTED]
    for name, outcome in outcomes:
        if outcome != ADMITTED:
            guard = GUARDS_OF_OUTCOMES[outcome]
            refused = {**refused, name: f"it is {OUTCOMES[outcome]} (guard `{guard}`)"}
    losses: dict[Any, float] = {}
    criterion: dict[Any, float] = {}
    outside: tuple[Any, ...] = ()
    inputs = observer.inputs
    values = observer.values
    if inputs is not None and inputs.losses is not None:
        losses = dict(zip(admitted, inputs.losses.mean.tolist(), strict=True))
    if values is not None:
        criterion = dict(zip(admitted, values.values.tolist(), strict=True))
        members = values.in_sublevel_set.tolist()[: len(admitted)]
        pairs = zip(admitted, members, strict=True)
        outside = tuple(name for name, is_member in pairs if not is_member)
    return Decision(
        weights=dict(zip(received, decisions.weights.tolist(), strict=True)),
        own_weight=float(decisions.own_weight[0]),
        mixing_factor=float(decisions.factor[0]),
        losses=losses,
        own_loss=float(decisions.own_loss[0]),
        criterion=criterion,
        outside=outside,
        refused=refused,
    )
