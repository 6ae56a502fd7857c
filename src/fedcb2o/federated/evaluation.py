"""Evaluation of agents' models on test samples."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from fedcb2o import plugins
from fedcb2o.data import Shard, features
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.inference import SAMPLES_PER_PASS, Reference, logits, per_sample_losses
from fedcb2o.federated.losses import Loss
from fedcb2o.federated.metrics import Confusion, EvaluationResult, Score
from fedcb2o.federated.plugin_outputs import apply_sample_transform
from fedcb2o.federated.ragged import Indices
from fedcb2o.nn.batch_norm import estimate_statistics_
from fedcb2o.nn.parameters import bind_


def evaluate_models(group: AgentGroup, members: Indices) -> list[EvaluationResult]:
    """Evaluate the members' models on their test samples.

    Args:
        group: Group of the agents.
        members: Indices of agents in the group.

    Returns:
        For each member the results on its test set; on that set with a backdoor's trigger; and on
        the common test set, where agents have test sets of their own.
    """
    trigger = group.adversary.trigger
    own = dict[int, Score]()
    triggered = dict[int, Confusion | None]()
    for test_members, test in group.data.test_sets(members):
        own |= _score(group, test_members, test)
        if trigger is not None:
            name = plugins.display_name("trigger", trigger)
            marked = apply_sample_transform(name, trigger, test)
            triggered |= _confusion_matrices(group, test_members, marked)

    common = dict[int, Score]()
    common_test = group.data.common_test_set()
    if common_test is not None:
        common = _score(group, members, common_test)
    return [EvaluationResult(own[k], triggered.get(k), common.get(k)) for k in members.tolist()]


def _score(group: AgentGroup, members: Indices, test: Shard) -> dict[int, Score]:
    """Evaluate the members' models on one test set; return scores by index."""
    spec = group.spec
    rows = torch.from_numpy(group.layout.own[members])

    losses = [None] * len(members)
    if spec.training.loss is not None:
        with plugins.attribute_errors("model", spec.model):
            losses = mean_test_losses(
                spec.module,
                group.models,
                rows,
                test,
                spec.training.loss,
                spec.kernels.models_per_batch,
                group.references(members),
            ).tolist()

    counts = _confusion_matrices(group, members, test)
    return {k: Score(counts[k], loss) for k, loss in zip(members.tolist(), losses, strict=True)}


def _confusion_matrices(
    group: AgentGroup, members: Indices, test: Shard
) -> dict[int, Confusion | None]:
    """Count the members' predictions on one test set; None for data without classes."""
    spec = group.spec
    if spec.num_classes == 1:
        return dict.fromkeys(members.tolist())
    with plugins.attribute_errors("model", spec.model):
        counts = confusion_matrices(
            spec.module,
            group.models,
            torch.from_numpy(group.layout.own[members]),
            test,
            spec.num_classes,
            spec.kernels.models_per_batch,
            group.references(members),
        )
    return dict(zip(members.tolist(), counts, strict=True))


def agent_network(group: AgentGroup, k: int) -> nn.Module:
    """Return the group's network with a copy of one agent's model, in evaluation mode.

    Args:
        group: Group of the agent.
        k: Index of the agent.

    Returns:
        The network.
    """
    module = group.spec.module.eval()
    reference = group.reference(k)
    bind_(module, group.models[int(group.layout.own[k])].clone())
    if reference is not None:
        estimate_statistics_(module, features(reference))
    return module


def confusion_matrices(
    module: nn.Module,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    test: Shard,
    num_classes: int,
    models_per_batch: int | None = None,
    references: Sequence[Reference] | None = None,
) -> Int[Tensor, "m C C"]:
    """Count how often each of m models predicts class c' (column) for class c (row).

    A model that is not finite predicts class 0, as argmax does.

    Args:
        module: The network.
        models: Model buffer.
        rows: Rows of the models.
        test: Test samples.
        num_classes: Number of classes.
        models_per_batch: Models in one program; see `logits`.
        references: Samples for local batch-norm statistics, of each model.

    Returns:
        One confusion matrix per model.
    """
    m = len(rows)
    predicted = _measure_on_test_set(
        module,
        models,
        rows,
        test,
        lambda outputs, _: outputs.argmax(-1),
        models_per_batch,
        references,
    )
    pairs = test.y.cpu() * num_classes + predicted
    counts = torch.zeros(m, num_classes * num_classes, dtype=torch.int64)
    counts.scatter_add_(1, pairs, torch.ones_like(pairs))
    return counts.view(m, num_classes, num_classes)


def mean_test_losses(
    module: nn.Module,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    test: Shard,
    loss: Loss,
    models_per_batch: int | None = None,
    references: Sequence[Reference] | None = None,
) -> Float[Tensor, " m"]:
    """Compute the mean loss of each of m models on test samples.

    Args:
        module: The network.
        models: Model buffer.
        rows: Rows of the models.
        test: Test samples.
        loss: Loss of a sample.
        models_per_batch: Models in one program; see `logits`.
        references: Samples for local batch-norm statistics, of each model.

    Returns:
        Mean losses; infinite where they are not a number.
    """

    def measure(outputs: Tensor, y: Tensor) -> Tensor:
        targets = y.unsqueeze(0).expand(len(outputs), *y.shape)
        return per_sample_losses(loss, outputs, targets, 2).double()

    losses = _measure_on_test_set(module, models, rows, test, measure, models_per_batch, references)
    return losses.mean(1).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _measure_on_test_set(
    module: nn.Module,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    test: Shard,
    measure: Callable[[Tensor, Tensor], Tensor],
    models_per_batch: int | None,
    references: Sequence[Reference] | None,
) -> Shaped[Tensor, "m n"]:
    """Apply `measure` to outputs [k, n, C] and targets [n], some test samples at a time."""
    size = SAMPLES_PER_PASS
    batches: list[tuple[Tensor, Reference | None]] = [(rows, None)]
    if references is not None:
        size = len(test)  # so that statistics are estimated once
        batches = list(zip(torch.split(rows, 1), references, strict=True))

    measured = []
    for chunk, reference in batches:
        parts = zip(torch.split(test.x, size), torch.split(test.y, size), strict=True)
        with torch.no_grad():
            columns = []
            for x, y in parts:
                outputs = logits(module, models, chunk, x, models_per_batch, reference)
                columns.append(measure(outputs, y).cpu())
        measured.append(torch.cat(columns, 1))
    return torch.cat(measured)
