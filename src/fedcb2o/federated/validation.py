"""Admission by guards, and validation losses, of received models (Algorithm 2, line 3)."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.data import Shard, features
from fedcb2o.errors import ConfigError
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.contacts import ContactTable
from fedcb2o.federated.decisions import Inbox
from fedcb2o.federated.guards.checks import ADMITTED, TOO_SENSITIVE, distance_check, tolerated
from fedcb2o.federated.guards.sensitivity import class_sensitivities, noise_images, rises
from fedcb2o.federated.inference import (
    Interpolation,
    Reference,
    input_gradients,
    logits,
    logits_per_model,
    model_losses,
    per_agent_losses,
)
from fedcb2o.federated.plugin_outputs import apply_sample_transform
from fedcb2o.federated.ragged import Entries, Indices, Members, Positions
from fedcb2o.federated.run_spec import RunSpec
from fedcb2o.federated.types import (
    AgentContext,
    Contacts,
    CriterionInput,
    Losses,
    Outputs,
    Received,
    SampleTransform,
    ScalarObjective,
)
from fedcb2o.rng import stream


class ValidationOracle:
    """Answers about models from the validation data of the agent at index k."""

    def __init__(self, group: AgentGroup, k: int) -> None:
        self.group = group
        self.k = k

    def losses(self, models: Received, transform: SampleTransform | None = None) -> Losses:
        """Compute the losses of models, on changed samples if there is a `transform`."""
        one = Received(
            models.ids.unsqueeze(0),
            models.rows.unsqueeze(0),
            models.num_samples.unsqueeze(0),
            models.round.unsqueeze(0),
        )
        return validation_losses(self.group, np.array([self.k]), one, transform)[0]

    def outputs(
        self, models: Received, transform: SampleTransform | None = None, count: int | None = None
    ) -> Outputs:
        """Return outputs on `count` spaced validation samples, or all, and their labels."""
        data = self._data(count)
        if transform is not None:
            value_range = self.group.data.value_range
            data = apply_sample_transform("criterion", transform, data, value_range)
        return self._evaluate(logits, models, data.x), data.y.cpu()

    def samples(self, count: int) -> tuple[Tensor, Tensor]:
        """Return `count` spaced validation samples, or all, as a network reads them; labels."""
        data = self._data(count)
        return features(data.x).cpu(), data.y.cpu()

    def outputs_per_model(
        self, models: Received, x: Float[Tensor, "m k *features"]
    ) -> Float[Tensor, "m k *C"]:
        """Compute the outputs of m models, each on its own samples, before the softmax."""
        return self._evaluate(logits_per_model, models, x)

    def input_gradients(
        self, models: Received, x: Float[Tensor, "m k *features"], objective: ScalarObjective
    ) -> Float[Tensor, "m k *features"]:
        """Compute the gradients of an objective at each model's own samples."""
        return self._evaluate(input_gradients, models, x, objective)

    def _evaluate(
        self, compute: Callable[..., Tensor], models: Received, x: Tensor, *arguments: Any
    ) -> Tensor:
        """Apply a function of `inference` to models and samples; return its result on the CPU."""
        group, spec = self.group, self.group.spec
        with plugins.attribute_errors("model", spec.model):
            values = compute(
                spec.module,
                group.models,
                models.rows,
                x.to(group.models.device),
                *arguments,
                models_per_batch=spec.kernels.models_per_batch,
                reference=group.reference(self.k),
            )
        # Criteria of users compute on the CPU, whatever the device of the models.
        return values.cpu()

    def _data(self, count: int | None) -> Shard:
        shard = self._validation
        # Spaced over all samples, because these may be sorted by class.
        if count is None or count >= len(shard):
            return shard
        return shard.part(np.arange(count) * len(shard) // max(1, count))

    @functools.cached_property
    def _validation(self) -> Shard:
        data = self.group.data
        x, y = data.gather(np.array([self.k]), data.validation)
        return Shard(x[0], y[0])


def agent_context(
    oracle: ValidationOracle, n: int, contacts: Callable[[], Contacts]
) -> AgentContext:
    """Return what an agent knows in round n, except the models that it received."""
    group, spec = oracle.group, oracle.group.spec
    return AgentContext(
        outputs=oracle.outputs,
        samples=oracle.samples,
        outputs_per_model=oracle.outputs_per_model,
        input_gradients=oracle.input_gradients,
        malicious_share=spec.malicious_share,
        value_range=group.data.value_range,
        progress=n / spec.rounds,
        layer_shapes=spec.layer_shapes,
        factor_pairs=spec.factor_pairs,
        contacts_of=contacts,
        draw_of=functools.partial(stream, spec.seed, "rule", n, int(group.agents[oracle.k])),
    )


def admit(
    group: AgentGroup, members: Members, positions: Positions, inbox: Inbox, n: int
) -> Int[np.ndarray, " m"]:
    """Return an outcome of `guards` for each received model of active agents at `positions`."""
    guards = group.spec.algorithm.guards
    outcome = np.full(len(inbox.rows), ADMITTED)
    if not guards.checks_models:
        return outcome

    if guards.checks_distance:
        for equal, entries, received in inbox.group_by_size(positions):
            own = torch.from_numpy(group.layout.own[members[equal]])
            previous = group.previous_rows(members[equal])
            checked = distance_check(guards, group.models, received.rows, own, previous)
            outcome[entries] = checked.flatten()
    # The agent's own model, where it sampled itself, is always admitted.
    is_own = inbox.ids.values == np.repeat(group.agents[members], inbox.ids.sizes)
    outcome[is_own] = ADMITTED
    if guards.max_sensitivity is False:
        return outcome

    for position in positions.tolist():
        index = inbox.ids.flat_index(np.array([position]))
        # The check costs a forward pass, so that models which are refused anyway have none.
        suspects = index[(outcome[index] == ADMITTED) & ~is_own[index]]
        if suspects.size:
            rise = sensitivity_rises(group, int(members[position]), inbox.rows[suspects], n)
            # Not `rise > ...`: NaN is refused, too.
            outcome[suspects[~(rise <= guards.max_sensitivity)]] = TOO_SENSITIVE
    return outcome


def sensitivity_rises(
    group: AgentGroup, k: int, rows: Int[np.ndarray, " m"], n: int
) -> Float[np.ndarray, " m"]:
    """Compute the rises that the guard `max_sensitivity` bounds; NaN if there are none."""
    spec, x = group.spec, group.data.samples.x
    if spec.num_classes < 2 or not (x.is_floating_point() or x.dtype == torch.uint8):
        raise ConfigError(
            "the guard `max_sensitivity` compares classes on images of noise, and the data have "
            "no classes or no pixels: leave it out"
        )
    # All models of a round get the same noise; an attacker cannot know that of the next one.
    draw = stream(spec.seed, "noise", n, int(group.agents[k]))
    noise = noise_images(x.shape[1:], group.data.value_range, draw).to(group.models.device)
    own = torch.from_numpy(group.layout.own[[k]])
    previous = group.previous_rows(np.array([k]))
    assert previous is not None
    with plugins.attribute_errors("model", spec.model):
        outputs = logits(
            spec.module,
            group.models,
            torch.cat([torch.from_numpy(rows), own, previous]),
            noise,
            models_per_batch=spec.kernels.models_per_batch,
            reference=group.reference(k),
        )
    sensitivities = class_sensitivities(outputs.cpu())
    received, own_sensitivity, before = torch.split(sensitivities, [len(rows), 1, 1])
    return rises(received, own_sensitivity, before).numpy()


@dataclass(frozen=True)
class RuleCall:
    """One call of a criterion or a rule: agents, their models' entries, and its input.

    `view` makes the view of the agent at an index of the call.
    """

    positions: Positions
    entries: Entries
    inputs: CriterionInput
    view: Callable[[int], CriterionInput]


def validate_batches(
    group: AgentGroup,
    members: Members,
    positions: Positions,
    contacts: ContactTable,
    inbox: Inbox,
    n: int,
) -> Iterator[RuleCall]:
    """Compute losses (alg:localAggregation, line 3); yield a call per set of equal agents."""
    algorithm = group.spec.algorithm
    sizes = group.data.validation.sizes[members]
    # Agents with equally many models and validation samples are evaluated together.
    for equal, entries, received in inbox.group_by_size(positions, sizes):
        equal_members = members[equal]
        own = own_models(group, equal_members, n)

        losses = own_losses = None
        if algorithm.needs_losses:
            # One call with the agent's model last: its samples are gathered once.
            both = validation_losses(group, equal_members, received.with_own(own))
            losses, own_losses = both.select(slice(None, -1)), both.select(slice(-1, None))

        inputs = CriterionInput(
            n=n,
            models=group.models,
            losses=losses,
            own_losses=own_losses,
            received=received,
            own_entry=own,
            losses_of=functools.partial(validation_losses, group, equal_members),
            agent_context=None,
            previous=group.previous_rows(equal_members),
            tolerated=tolerated(algorithm.guards, losses, own_losses),
            last_layer=group.spec.last_layer,
        )
        view = functools.partial(_agent_view, group, equal_members, equal, contacts, inputs)
        if algorithm.is_batched:
            yield RuleCall(equal, entries, inputs, view)
            continue

        entries_of = entries.reshape(len(equal_members), -1)  # of each agent's models
        for a in range(len(equal_members)):
            position = Positions(equal[a : a + 1])
            yield RuleCall(position, Entries(entries_of[a]), view(a), view)


def _agent_view(
    group: AgentGroup,
    members: Indices,
    positions: Positions,
    contacts: ContactTable,
    inputs: CriterionInput,
    a: int,
) -> CriterionInput:
    """Return the view of one of several agents, without the axis over agents."""
    oracle = ValidationOracle(group, int(members[a]))
    contacts_of = functools.partial(contacts.__getitem__, int(positions[a]))
    return inputs.for_agent(a, oracle.losses, agent_context(oracle, inputs.n, contacts_of))


def own_models(group: AgentGroup, members: Indices, n: int) -> Received:
    """Return the members' own models as if they were received, shape [a, 1]."""
    columns = (
        group.agents[members],
        group.layout.own[members],
        group.data.num_samples[members],
        np.full(len(members), n),
    )
    return Received(*(torch.from_numpy(column).unsqueeze(1) for column in columns))


def validation_losses(
    group: AgentGroup, members: Indices, models: Received, transform: SampleTransform | None = None
) -> Losses:
    """Compute losses on validation data (alg:localAggregation, line 3; eq:benignAgentObj).

    Where `interpolation` of the guards is below 1, the loss is that of a point between the agent's
    own model and the received one.
    """
    spec, data = group.spec, group.data
    x, y = data.gather(members, data.validation)
    if transform is not None:
        # A plug-in gets the samples of one agent at a time.
        shards = [
            apply_sample_transform("criterion", transform, Shard(*one), data.value_range)
            for one in zip(x, y, strict=True)
        ]
        x = torch.stack([shard.x for shard in shards])

    interpolation = None
    if spec.algorithm.guards.interpolation != 1:
        own = torch.from_numpy(group.layout.own[members])
        interpolation = Interpolation(own, spec.algorithm.guards.interpolation)

    with plugins.attribute_errors("model", spec.model):
        return per_agent_losses(
            spec.module,
            group.models,
            models.rows,
            x,
            y,
            spec.num_classes,
            average=spec.agents.validation_loss,
            batch_size=spec.training.batch_size,
            models_per_batch=spec.kernels.models_per_batch,
            references=group.references(members),
            loss=spec.training.loss,
            interpolation=interpolation,
            groups=spec.loss_groups,
        )


def training_losses(
    spec: RunSpec,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    data: Shard,
    reference: Reference | None,
) -> Losses:
    """Compute the losses of models on an agent's training data."""
    with plugins.attribute_errors("model", spec.model):
        return model_losses(
            spec.module,
            models,
            rows,
            data,
            spec.num_classes,
            models_per_batch=spec.kernels.models_per_batch,
            reference=reference,
            loss=spec.training.loss,
        )
