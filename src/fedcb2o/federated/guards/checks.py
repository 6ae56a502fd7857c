"""Guards: options against hostile peers that go with any algorithm and rule (beyond the paper).

A round has five steps: select, admit, evaluate, weigh and mix. Each guard is an option of a step.
A model that is not admitted has weight 0: neither the criterion nor the rule gets it, and its
sender's likelihood falls. Colluding attackers have no guards.
"""

import math
from typing import Annotated, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from fedcb2o.federated.aggregation.gram_matrix import distances_to_own
from fedcb2o.federated.losses import standard_error_of_mean
from fedcb2o.federated.sections import Section, key_field
from fedcb2o.federated.types import Losses

Off = Literal[False]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]

ADMITTED, TOO_FAR, TOO_NEAR, TOO_SENSITIVE = range(4)
"""Outcomes of the step "admit", as `Decisions.admission` records them."""

GUARDS_OF_OUTCOMES = ("", "max_distance", "min_distance", "max_sensitivity")
"""The guard behind each outcome."""

OUTCOMES = (
    "admitted",
    "too far from the agent's own model",
    "too near to the agent's own model",
    "too sensitive to noise in one class",
)
"""The outcomes in words."""


class Guards(Section):
    """Guards of an algorithm (section `algorithm.guards`); without any, the algorithm as it is."""

    newcomer_share: Annotated[
        Share | Off,
        key_field(
            "select: largest share of the budget for peers that were never asked, rounded up; more "
            "only where too few are known. Against peers that have a new identity in every round",
            values="above 0, to 1",
        ),
    ] = False
    max_distance: Annotated[
        Positive | Off,
        key_field(
            "admit: largest distance from the agent's own model, in units of that model's norm. "
            "Against random models in rounds in which losses do not reveal them",
            values="above 0",
        ),
    ] = False
    min_distance: Annotated[
        Positive | Off,
        key_field(
            "admit: least distance from the agent's own model, in units of its movement in this "
            "round's LocalUpdate; models at least a third as far as the farthest admitted one "
            "are never too near. Against slightly changed copies of a receiver's own model. Takes "
            "the memory of N more models, those before the round",
            values="above 0",
        ),
    ] = False
    max_sensitivity: Annotated[
        Positive | Off,
        key_field(
            "admit: largest rise of a class's sensitivity to noise above the agent's own model, in "
            "units of its change in this round's LocalUpdate. Against backdoors. Takes the memory "
            "of N more models, and evaluates each model on 64 images of noise",
            values="above 0",
        ),
    ] = False
    interpolation: Annotated[
        Share,
        key_field(
            "evaluate: losses are those of the point at this fraction of the way from the agent's "
            "own model to the received one"
        ),
    ] = 1.0
    loss_tolerance: Annotated[
        Annotated[float, Field(ge=0)] | Off,
        key_field(
            "weigh: a model outside of the sub-level set counts too if its loss exceeds that of "
            "the agent's own model by at most this many standard errors, on the same samples. "
            "Without a sub-level set (no `beta`, or a rule) only such models count",
            values="from 0",
        ),
    ] = False

    trigger_exchange: Annotated[
        Annotated[int, Field(ge=1)] | Off,
        key_field(
            "weigh: an agent searches the models that it holds for triggers in one of this many "
            "rounds, and all test what their peers found; "
            "[against backdoors](criteria.md#exchange-of-triggers)",
            values="a whole number from 1",
        ),
    ] = False
    exit_test: Annotated[
        Annotated[float, Field(gt=0, le=0.5)] | Off,
        key_field(
            "mix: error rate of the test after which an agent that loses by cooperation "
            "[trains alone](method.md#trial-of-training-alone). In the first quarter of the rounds "
            "agents train two models, on 70% of their samples",
            values="above 0, to 0.5",
        ),
    ] = False

    @property
    def needs_previous(self) -> bool:
        """True if the models before the round are needed."""
        needing = (self.min_distance, self.max_sensitivity, self.exit_test)
        return any(guard is not False for guard in needing)

    @property
    def selection_keywords(self) -> dict[str, float]:
        """Keyword arguments that the guards add to the peer selection."""
        return {"newcomer_share": self.newcomer_share} if self.newcomer_share else {}

    @property
    def checks_distance(self) -> bool:
        """True if received models may be refused because of their distance."""
        return self.max_distance is not False or self.min_distance is not False

    @property
    def checks_models(self) -> bool:
        """True if the step "admit" may refuse received models."""
        return self.checks_distance or self.max_sensitivity is not False


_NEAR_SHARE = 1 / 3
"""Share of the farthest admitted model's distance from which no model is too near."""

NO_GUARDS = Guards()
"""The paper's algorithm as it is."""


def distance_check(
    guards: Guards,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, "a m"],
    own: Int[Tensor, " a"],
    previous: Int[Tensor, " a"] | None,
) -> Int[np.ndarray, "a m"]:
    """Return an outcome for each received model, by its distance from the agent's own model.

    The largest distance is the ball B_R of eq:Q_beta, about the agent's own model. The least one is
    at most a third of that of the farthest received model in this ball.
    """
    outcome = torch.full(rows.shape, ADMITTED)
    if not rows.numel():
        return outcome.numpy()
    # One pass over the models gives the agent's own movement, too.
    ahead = [] if previous is None else [previous[:, None]]
    distances = distances_to_own(models, torch.cat([*ahead, rows], 1), own)
    movement, distances = distances[:, : len(ahead)], distances[:, len(ahead) :]
    if guards.min_distance is not False:
        is_within = distances <= (guards.max_distance or torch.inf)
        farthest = torch.where(is_within, distances, 0.0).amax(1, keepdim=True)
        # In low dimension, and in a first round, all honest models are near.
        least = (guards.min_distance * movement).minimum(_NEAR_SHARE * farthest)
        outcome[distances < least] = TOO_NEAR
    if guards.max_distance is not False:
        # Written this way, a distance that is not a number is too far.
        outcome[~(distances <= guards.max_distance)] = TOO_FAR
    return outcome.numpy()


def counted_losses(outcomes: Int[np.ndarray, " m"], num_classes: int) -> Float[np.ndarray, " m"]:
    """Return the losses that the likelihoods of refused models count (line 4).

    One that is too near counts as a model that knows nothing, log C; numbers count as 2 classes.
    All others have infinity, which the losses of admitted ones replace.
    """
    # Benign peers may be near after a round or two, and are asked again.
    return np.where(outcomes == TOO_NEAR, math.log(max(num_classes, 2)), np.inf)


def tolerated(
    guards: Guards, losses: Losses | None, own_losses: Losses | None
) -> Bool[Tensor, "*a m"] | None:
    """Return the models within the guard `loss_tolerance`, on the same samples; None without it.

    They widen the sub-level set of eq:clustered_csp.
    """
    if guards.loss_tolerance is False:
        return None
    assert losses is not None
    assert own_losses is not None
    differences = losses.per_sample - own_losses.per_sample
    errors = standard_error_of_mean(differences).nan_to_num(nan=0.0)
    return losses.mean <= own_losses.mean + guards.loss_tolerance * errors
