"""Exchange of triggers, the guard `trigger_exchange`: one agent finds a trigger, and all test it.

After "Argus" (arXiv 2605.19969). An agent searches the models that it holds in one of
some rounds, and publishes what it found: a few pixels, and the class to which they lead. A receiver
stamps them on its own samples and runs the models that it holds. So an accusation counts as
much as what the receiver measures, and its sender is not trusted.

r_i(t) is the share of the samples of other classes that model i gives to the class of trigger t,
less the share without the trigger. The weight of model i is multiplied by

    exp(-SCALE max_t max(0, r_i(t) - max(r_own(t), w, 0.3) - 2 e)),    e = their standard error,

and all weights are divided by their sum. w is the rate of the worst trigger for the agent's own
model, by its own search at the same size. So a trigger that moves the agent's own model as much, as
a natural feature does, costs no weight, nor does one that moves a model no more than a search
moves the agent's own.

In a round an agent tests at most `KEPT` + `INBOX` triggers and, after a search, one per model,
whatever it receives. A trigger is kept while it is useful: its largest excess, halved every round.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int8
from torch import Tensor

from fedcb2o.data import Shard
from fedcb2o.errors import ConfigError, DataError, describe_type
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.criteria import universal_perturbation
from fedcb2o.federated.decisions import Inbox
from fedcb2o.federated.ragged import AgentIds
from fedcb2o.federated.types import (
    AgentContext,
    CriterionInput,
    Received,
    RuleOutput,
    RuleState,
    Weighing,
)

SCALE = 20.0
"""Nats for a rate of 1."""
INBOX = 8
"""Largest number of received triggers that are tested in a round."""
KEPT = 8
"""Largest number of triggers that an agent keeps."""
QUOTA = 2
"""Largest number of triggers that an agent publishes, and of one sender that are tested."""

_PAINTED = 32  # pixels of an image for each one that a trigger paints
_SEARCHED, _TESTED = 12, 64  # samples
_LEAST_RATE = 0.3  # honest models, too, are moved that far by the pixels worst for them
_ERRORS = 2.0  # standard errors that chance explains
_LEAST_VALUE = 0.05  # below which a trigger is dropped
_PIXELS_PER_BYTE = 4

_SIGNS, _CLASSES, _VALUES, _REFERENCE, _INBOX_SIGNS, _INBOX_CLASSES = _KEYS = tuple(
    f"triggers_{part}"
    for part in ("signs", "classes", "values", "reference", "received", "received_classes")
)
_STORED = (_SIGNS, _CLASSES), (_INBOX_SIGNS, _INBOX_CLASSES)


@dataclass(frozen=True)
class Triggers:
    """Triggers: the sign of each pixel, as in `universal_perturbation`, and their classes."""

    signs: Int8[Tensor, "t *features"]
    classes: Int[Tensor, " t"]

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, k: Any) -> "Triggers":
        """Return some triggers."""
        return Triggers(self.signs[k], self.classes[k])

    def to_bytes(self) -> bytes:
        """Return two bytes for the class of each trigger, and two bits for each pixel's sign."""
        records = []
        for signs, label in zip(self.signs.flatten(1).numpy(), self.classes.tolist(), strict=True):
            digits = np.zeros(-(-len(signs) // _PIXELS_PER_BYTE) * _PIXELS_PER_BYTE, np.uint8)
            digits[: len(signs)] = signs % 3  # -1 as 2
            shifted = digits.reshape(-1, _PIXELS_PER_BYTE) << np.arange(0, 8, 2, dtype=np.uint8)
            records.append(label.to_bytes(2, "little") + shifted.sum(1, dtype=np.uint8).tobytes())
        return b"".join(records)


def from_bytes(data: Any, shape: Sequence[int], num_classes: int) -> Triggers:
    """Read the triggers of one sender for samples of a shape; DataError if they are none."""
    if not isinstance(data, bytes):
        raise DataError(f"triggers are bytes, got {describe_type(data)}")
    count = math.prod(shape)
    length = max_bytes(shape) // QUOTA
    if len(data) % length or len(data) > max_bytes(shape):
        raise DataError(
            f"triggers for samples of shape {tuple(shape)} have {length} bytes each, and at most "
            f"{QUOTA} come from one sender: got {len(data)} bytes"
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, length)
    classes = records[:, :2].copy().view("<u2").astype(np.int64).ravel()
    digits = (records[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3
    digits = digits.reshape(len(records), _PIXELS_PER_BYTE * (length - 2))
    # A peer may have sent any bytes.
    if (digits == 3).any() or digits[:, count:].any():
        raise DataError("a pixel of a trigger is white, black or as it is: got another sign")
    if (classes >= num_classes).any():
        raise DataError(f"a trigger leads to class {classes.max()}, and there are {num_classes}")
    signs = np.where(digits == 2, -1, digits)[:, :count].astype(np.int8)
    triggers = Triggers(
        torch.from_numpy(signs.reshape(len(records), *shape)), torch.from_numpy(classes)
    )
    # A pixel counts once, however many of its channels are painted.
    painted = (triggers.signs != 0).flatten(1, -3).any(1) if len(shape) > 2 else triggers.signs != 0
    if (painted.flatten(1).sum(1) > max_pixels(shape)).any():
        raise DataError(
            f"a trigger paints at most {max_pixels(shape)} pixels of samples of shape "
            f"{tuple(shape)}: got {int(painted.flatten(1).sum(1).max())}"
        )
    return triggers


def check_samples(samples: Shard) -> None:
    """Raise ConfigError where samples are not images with classes."""
    if samples.y.is_floating_point() or samples.x.ndim < 3:
        raise ConfigError(
            "`guards.trigger_exchange` looks for pixels that change the class of images, and the "
            f"samples have shape {tuple(samples.x.shape[1:])}: leave it out"
        )


def max_bytes(shape: Sequence[int]) -> int:
    """Return the largest number of bytes of one sender's triggers for samples of a shape."""
    return QUOTA * (2 + -(-math.prod(shape) // _PIXELS_PER_BYTE))


def max_pixels(shape: Sequence[int]) -> int:
    """Return the largest number of pixels that a trigger paints."""
    return max(2, math.prod(shape[-2:]) // _PAINTED)


def published(state: RuleState) -> Triggers | None:
    """Return the most useful triggers of an agent; None without any."""
    if _SIGNS not in state:
        return None
    return Triggers(state[_SIGNS], state[_CLASSES])[:QUOTA]


def published_part(state: RuleState) -> RuleState:
    """Return the part of a state with the triggers that `published` returns; empty without any."""
    triggers = published(state)
    return {} if triggers is None else {_SIGNS: triggers.signs, _CLASSES: triggers.classes}


def received_part(state: RuleState) -> RuleState:
    """Return the part of a state that `with_received` wrote."""
    return {key: state[key] for key in _STORED[1] if key in state}


def published_bytes(state: RuleState) -> bytes:
    """Return the bytes of the most useful triggers of an agent; empty without any."""
    triggers = published(state)
    return b"" if triggers is None else triggers.to_bytes()


def with_received(state: RuleState, received: Sequence[Triggers | None]) -> RuleState:
    """Return the state with triggers by sender: the first of each, then the second, to `INBOX`."""
    # In turns, so that no sender displaces the first trigger of another one.
    senders = [triggers for triggers in received if triggers is not None]
    chosen = [sent[k : k + 1] for k in range(QUOTA) for sent in senders if k < len(sent)][:INBOX]
    if not chosen:
        return state
    signs = torch.cat([trigger.signs for trigger in chosen])
    classes = torch.cat([trigger.classes for trigger in chosen])
    return {**state, _INBOX_SIGNS: signs, _INBOX_CLASSES: classes}


def deliver(
    agents: Sequence[AgentIds], states: Sequence[AgentState], received: Sequence[Inbox]
) -> list[AgentState]:
    """Give each agent the triggers that the senders of its models published after their last round.

    Agents, states and inboxes are those of a simulation's batches.
    """
    sent = {
        id: published(rule_state)
        for ids, state in zip(agents, states, strict=True)
        for id, rule_state in zip(ids.tolist(), state.rule_states, strict=True)
    }
    delivered = []
    for state, inbox in zip(states, received, strict=True):
        rule_states = tuple(
            with_received(rule_state, [sent.get(id) for id in ids.tolist()])
            for rule_state, ids in zip(state.rule_states, inbox.ids, strict=True)
        )
        delivered.append(dataclasses.replace(state, rule_states=rule_states))
    return delivered


@dataclass(frozen=True)
class ExchangeWeighing:
    """Weights of an algorithm (eq:comp_csp), less those of models that a trigger moves."""

    weigh: Weighing
    period: int
    is_stateful = True

    @property
    def function(self) -> Callable[..., Any]:
        """The criterion or the rule."""
        return self.weigh.function

    @property
    def sees_all(self) -> bool:
        """True if it gets models outside of `CriterionInput.tolerated`, too."""
        return self.weigh.sees_all

    @property
    def is_batched(self) -> bool:
        """True if several agents are weighed at once, before their triggers are tested."""
        return self.weigh.is_batched

    def __call__(self, inputs: CriterionInput, state: RuleState) -> tuple[RuleOutput, RuleState]:
        """Return the weights, and the state with the triggers that were useful."""
        output, others = self.weigh(inputs, _without_triggers(state))
        ours = {name: tensor for name, tensor in state.items() if name in _KEYS}
        weights, state = self.lower(inputs, output.outcome, {**others, **ours})
        return dataclasses.replace(output, outcome=weights), state

    def has_triggers(self, n: int, agent: int, state: RuleState) -> bool:
        """Return whether an agent searches in round n, or has triggers to test."""
        return _searches(n, agent, state, self.period) or any(s in state for s, _ in _STORED)

    def lower(
        self, inputs: CriterionInput, weights: Any, state: RuleState
    ) -> tuple[Float[Tensor, " k"], RuleState]:
        """Lower the weights of models that a trigger moves; return the state with its triggers."""
        if not isinstance(weights, Tensor) or len(weights) == len(inputs.received.ids):
            raise ConfigError(
                "`guards.trigger_exchange` gives the weight of received models to the agent's own, "
                'which this algorithm does not weigh: take own_model = "judged", or leave it out'
            )
        excess, ours = _examine(inputs, weights[:-1] > 0, state, self.period)
        if excess.any():
            lower = weights.clone()
            lower[:-1] *= torch.exp(-SCALE * excess).to(weights)
            weights = lower * (weights.sum() / lower.sum())
        return weights, {**_without_triggers(state), **ours}


def _without_triggers(state: RuleState) -> RuleState:
    return {name: tensor for name, tensor in state.items() if name not in _KEYS}


def _searches(n: int, agent: int, state: RuleState, period: int) -> bool:
    # In its first round all peers are strangers.
    return (n + agent) % period == 0 or _REFERENCE not in state


def _examine(
    inputs: CriterionInput, is_weighed: Bool[Tensor, " m"], state: RuleState, period: int
) -> tuple[Float[Tensor, " m"], RuleState]:
    """Return the largest excess of each received model over all triggers, and the new state."""
    context, own = inputs.context, inputs.own_entry
    # A model without weight harms nothing, and is not tested.
    held = inputs.received[is_weighed]
    excess = torch.zeros(len(is_weighed), dtype=torch.float64)
    is_searching = _searches(inputs.n, int(own.ids), state, period)
    parts = [Triggers(state[s], state[c]) for s, c in _STORED if s in state]
    models = held.with_own(own)
    if is_searching:
        parts.append(search(context, models))
    if not parts:
        return excess, {_REFERENCE: state[_REFERENCE]}

    triggers, places = _distinct(parts)
    rate = rates(context, models, triggers)
    # The last trigger found is the worst for the agent's own model, the last.
    reference = rate[-1:, places[-1]].clamp(min=0) if is_searching else state[_REFERENCE]
    kept: RuleState = {_REFERENCE: reference}
    if not len(held.ids):
        return excess, kept

    values = torch.zeros(len(triggers), dtype=torch.float64)
    if _VALUES in state:
        values[: len(state[_VALUES])] = state[_VALUES] / 2
    found_excess = excesses(context, rate, reference)
    excess[is_weighed] = found_excess.amax(1)
    values = values.maximum(found_excess.amax(0))
    best = values.argsort(descending=True, stable=True)[:KEPT]
    best = best[values[best] >= _LEAST_VALUE]
    if len(best):
        kept = {
            **kept,
            _SIGNS: triggers.signs[best],
            _CLASSES: triggers.classes[best],
            _VALUES: values[best],
        }
    return excess, kept


def _distinct(parts: Sequence[Triggers]) -> tuple[Triggers, list[int]]:
    """Return the triggers of all parts, each once, in their order; and the place of each."""
    joined = Triggers(
        torch.cat([part.signs for part in parts]), torch.cat([part.classes for part in parts])
    )
    first: dict[tuple[bytes, int], int] = {}
    keys = zip(map(bytes, joined.signs.flatten(1).numpy()), joined.classes.tolist(), strict=True)
    places = [first.setdefault(key, len(first)) for key in keys]
    _, chosen = np.unique(places, return_index=True)
    return joined[torch.from_numpy(chosen)], places


def search(context: AgentContext, models: Received) -> Triggers:
    """Find the trigger of `max_pixels` that leads most samples of other classes to its class.

    It is one per model, by the gradient of one step for each class. Gradients that are not finite
    lead to no pixel.
    """
    x, y = context.samples(_SEARCHED)
    num_models = len(models.rows)
    num_classes = context.outputs_per_model(models[:1], x[:1].unsqueeze(0)).shape[-1]
    classes = torch.arange(num_classes)
    empty = torch.zeros(num_models, num_classes, *x.shape[1:])
    signs, _ = universal_perturbation.add_pixels(
        context, models, x, y, empty, classes, max_pixels(x.shape[1:])
    )
    signs = signs.nan_to_num(nan=0.0)
    images = universal_perturbation.paint(
        x, signs=signs.unsqueeze(2), value_range=context.value_range
    )
    outputs = context.outputs_per_model(models, images.flatten(1, 2))
    shares = outputs.view(num_models, num_classes, len(y), -1).softmax(-1)
    towards = shares.diagonal(dim1=1, dim2=3)  # [m, n, c]
    is_other = y.unsqueeze(1) != classes
    effects = (towards * is_other).sum(1) / is_other.sum(0).clamp(min=1)
    best = effects.nan_to_num(nan=0.0).argmax(1)
    return Triggers(signs[torch.arange(num_models), best].to(torch.int8), best)


def rates(context: AgentContext, models: Received, triggers: Triggers) -> Float[Tensor, "m t"]:
    """Return r_i(t): the share of other samples that a trigger leads to its class, less without."""
    x, y = context.samples(_TESTED)
    m, n = len(models.rows), len(y)
    # The first are not painted.
    signs = torch.cat([torch.zeros_like(triggers.signs[:1]), triggers.signs])
    images = universal_perturbation.paint(
        x, signs=signs.unsqueeze(1), value_range=context.value_range
    ).flatten(0, 1)
    outputs = context.outputs_per_model(models, images.expand(m, *images.shape))
    predicted = outputs.argmax(-1).view(m, len(signs), n)
    classes = triggers.classes.unsqueeze(1)
    before, after = torch.split(predicted, [1, len(triggers)], 1)
    is_other = y != classes
    change = ((after == classes).double() - (before == classes).double()) * is_other
    shares: Tensor = change.sum(-1) / is_other.sum(-1).clamp(min=1)
    return shares


def excesses(
    context: AgentContext, rate: Float[Tensor, "k t"], reference: Float[Tensor, "1"]
) -> Float[Tensor, "m t"]:
    """Return what chance and the agent's own model, the last of k, do not explain of the rates."""
    least = rate[-1].maximum(reference).clamp(min=_LEAST_RATE)
    n = len(context.samples(_TESTED)[1])
    # Among few samples a rate of 0 or 1 would have no error.
    p = torch.cat([rate[:-1], least.unsqueeze(0)]).clamp(1 / n, 1 - 1 / n)
    variances = p * (1 - p) / n
    errors = (variances[:-1] + variances[-1]).sqrt()
    return (rate[:-1] - least - _ERRORS * errors).clamp(min=0)
