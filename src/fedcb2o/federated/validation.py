"""Line 3 of Algorithm 2, what agents think of models on their own validation data; and how theirs do in the test."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fedcb2o import plugins
from fedcb2o.data._dataset import Shard, features
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.decisions import Inbox
from fedcb2o.federated.inference import (
    Interpolation,
    Reference,
    confusion_matrices,
    input_gradients,
    logits,
    logits_per_model,
    mean_test_losses,
    model_losses,
    per_agent_losses,
)
from fedcb2o.federated.metrics import Confusion, EvaluationResult, Score
from fedcb2o.federated.plugin_outputs import apply_sample_transform
from fedcb2o.federated.ragged import Indices
from fedcb2o.federated.run_spec import RunSpec
from fedcb2o.federated.types import (
    CriterionInput,
    Losses,
    Outputs,
    Received,
    SampleTransform,
    ScalarObjective,
)
from fedcb2o.nn.batch_norm import estimate_statistics_
from fedcb2o.nn.parameters import bind_


@dataclass(frozen=True)
class AgentBatch:
    """Agents in places `those` of a part, who are judged at once since they received and hold equally many: what they
    look at, and `where` what they received lies in the inbox of the part."""

    members: Indices
    inbox_index: Int[np.ndarray, " k"]
    inputs: CriterionInput


def validate_batches(
    group: AgentGroup, agents: Indices, members: Indices, inbox: Inbox, n: int
) -> tuple[list[AgentBatch], Float[np.ndarray, " m"] | None]:
    """Line 3 for `those` of a part of agents: what each looks at, and in the order of the inbox the losses of all that
    they received, where the algorithm judges; NaN of what others did."""
    found = []
    losses = np.full(len(inbox.rows), np.nan)
    for alike, where, received in inbox.group_by_size(members, group.data.validation.sizes[agents]):
        me = own_models(group, agents[alike], n)
        both = None
        if group.spec.algorithm.needs_losses:
            both = validation_losses(group, agents[alike], received.with_own(me))
            losses[where] = both.mean[:, :-1].flatten().numpy()
        theirs, own = (
            (None, None)
            if both is None
            else (both.select(slice(None, -1)), both.select(slice(-1, None)))
        )
        losses_of = functools.partial(validation_losses, group, agents[alike])
        began = (
            None
            if group.layout.previous is None
            else torch.from_numpy(group.layout.previous[agents[alike]])
        )
        judged = CriterionInput(
            n, group.models, theirs, own, received, me, losses_of, None, previous=began
        )
        found.append(AgentBatch(alike, where, judged))
    return found, losses if group.spec.algorithm.needs_losses else None


def own_models(group: AgentGroup, members: Indices, n: int) -> Received:
    """The own models of agents in some places as if each was received [a, 1]."""
    columns = (
        group.agents[members],
        group.layout.own[members],
        group.data.train.sizes[members].astype(float),
    )
    return Received(
        *(torch.from_numpy(each).unsqueeze(1) for each in (*columns, np.full(len(members), n)))
    )


def validation_losses(
    group: AgentGroup, members: Indices, models: Received, transform: SampleTransform | None = None
) -> Losses:
    """The losses of models [a, m] on the validation data of agents in some places, which hold equally many
    (alg:localAggregation, line 3), or on these as a criterion changes them: of the models themselves or, where the
    algorithm has `judged_at` below 1, of what lies so far on the way to them from the own one."""
    terms, (x, y) = group.spec, group.data.validation_data(members)
    own = torch.from_numpy(group.layout.own[members])
    share = terms.algorithm.interpolation
    if transform is not None:
        seen = [
            apply_sample_transform("criterion", transform, Shard(*one))
            for one in zip(x, y, strict=True)
        ]
        x = torch.stack([each.x for each in seen])
    with plugins.attribute_errors("model", terms.model):
        return per_agent_losses(
            terms.module,
            group.models,
            models.rows,
            x,
            y,
            terms.num_classes,
            average=terms.loss_average,
            batch_size=terms.training.batch_size,
            models_per_batch=terms.kernels.models_per_batch,
            references=group.references(members),
            loss=terms.training.loss,
            interpolation=None if share == 1 else Interpolation(own, share),
        )


def training_losses(
    spec: RunSpec,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    data: Shard,
    reference: Reference | None,
) -> Losses:
    """The losses of models on what an agent trains on, whole; `reference` is its own."""
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


def losses_seen_by(
    group: AgentGroup, k: int
) -> Callable[[Received, SampleTransform | None], Losses]:
    """The losses of models [m] on the validation data of the agent in place k, or on those changed."""

    def losses(models: Received, change: SampleTransform | None) -> Losses:
        one = Received(
            *(
                each.unsqueeze(0)
                for each in (models.ids, models.rows, models.num_samples, models.round)
            )
        )
        return validation_losses(group, np.array([k]), one, change)[0]

    return losses


def outputs_seen_by(group: AgentGroup, k: int) -> Callable[..., Outputs]:
    """What models [m] make of the validation data of the agent in place k, or of so many of them, or of those changed,
    and their labels."""

    def outputs(
        models: Received, change: SampleTransform | None = None, count: int | None = None
    ) -> Outputs:
        terms = group.spec
        seen = _validation(group, k, count)
        reference = group.reference(k)
        if change is not None:
            seen = apply_sample_transform("criterion", change, seen)
        with plugins.attribute_errors("model", terms.model):
            found = logits(
                terms.module,
                group.models,
                models.rows,
                seen.x,
                terms.kernels.models_per_batch,
                reference,
            )
        return found.cpu(), seen.y.cpu()

    return outputs


def some_samples_of(group: AgentGroup, k: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """So many of the validation samples of the agent in place k, spread over all, or all; and their labels."""

    def some(count: int) -> tuple[Tensor, Tensor]:
        few = _validation(group, k, count)
        return features(few.x).cpu(), few.y.cpu()

    return some


def outputs_seen_at(group: AgentGroup, k: int) -> Callable[[Received, Tensor], Tensor]:
    """What models [m] of the agent in place k make of samples of their own."""

    def outputs(models: Received, x: Tensor) -> Tensor:
        terms = group.spec
        pool = group.models
        reference = group.reference(k)
        with plugins.attribute_errors("model", terms.model):
            together = terms.kernels.models_per_batch
            return logits_per_model(
                terms.module, pool, models.rows, x.to(pool.device), together, reference
            ).cpu()

    return outputs


def gradients_seen_by(
    group: AgentGroup, k: int
) -> Callable[[Received, Tensor, ScalarObjective], Tensor]:
    """The `gradients` of models [m] of the agent in place k at samples of their own."""

    def found(models: Received, x: Tensor, of: ScalarObjective) -> Tensor:
        terms = group.spec
        pool = group.models
        reference = group.reference(k)
        with plugins.attribute_errors("model", terms.model):
            together = terms.kernels.models_per_batch
            return input_gradients(
                terms.module, pool, models.rows, x.to(pool.device), of, together, reference
            ).cpu()

    return found


def _validation(group: AgentGroup, k: int, count: int | None = None) -> Shard:
    """The validation data of the agent in place k, or so many of them, spread over all, if there are more."""
    x, y = group.data.validation_data(np.array([k]))
    data = Shard(x[0], y[0])
    if count is None or count >= len(data):
        return data
    return data.part(np.arange(count) * len(data) // max(1, count))


def agent_network(group: AgentGroup, k: int) -> nn.Module:
    """The block's network with a copy of the model of the agent in place k, as that reads it, in evaluation mode."""
    module = group.spec.module.eval()
    reference = group.reference(k)
    bind_(module, group.models[int(group.layout.own[k])].clone())
    if reference is not None:
        estimate_statistics_(module, features(reference))
    return module


def evaluate_models(group: AgentGroup, some: Indices) -> list[EvaluationResult]:
    """How the models of agents in some places do on their test samples; on these with the trigger of a backdoor; and on
    those that test everybody, where agents have their own."""
    holdings = group.data
    trigger = group.adversary.trigger
    own = dict[int, Score]()
    common = dict[int, Score]()
    triggered = dict[int, Confusion | None]()
    for members, test in holdings.test_sets(some):
        own |= _score(group, members, test)
        if trigger is not None:
            marked = apply_sample_transform(plugins.display_name("trigger", trigger), trigger, test)
            triggered |= _confusion_matrices(group, members, marked)
    if (everybodys := holdings.common_test_set()) is not None:
        common = _score(group, some, everybodys)
    return [EvaluationResult(own[k], triggered.get(k), common.get(k)) for k in some.tolist()]


def _score(group: AgentGroup, members: Indices, test: Shard) -> dict[int, Score]:
    """How the models of agents in some places do on the same test samples, by these places."""
    terms = group.spec
    rows = torch.from_numpy(group.layout.own[members])
    losses = [None] * len(members)
    if (loss := terms.training.loss) is not None:
        with plugins.attribute_errors("model", terms.model):
            losses = mean_test_losses(
                terms.module,
                group.models,
                rows,
                test,
                loss,
                terms.kernels.models_per_batch,
                group.references(members),
            ).tolist()
    counts = _confusion_matrices(group, members, test)
    return {k: Score(counts[k], each) for k, each in zip(members.tolist(), losses, strict=True)}


def _confusion_matrices(
    group: AgentGroup, members: Indices, test: Shard
) -> dict[int, Confusion | None]:
    """For what classes these models take the samples; None where there are no classes."""
    terms = group.spec
    rows = torch.from_numpy(group.layout.own[members])
    if terms.num_classes == 1:
        return dict.fromkeys(members.tolist())
    with plugins.attribute_errors("model", terms.model):
        counts = confusion_matrices(
            terms.module,
            group.models,
            rows,
            test,
            terms.num_classes,
            terms.kernels.models_per_batch,
            group.references(members),
        )
    return dict(zip(members.tolist(), counts, strict=True))
