"""Evaluation of agents' models on test samples."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from fedcb2o import plugins
from fedcb2o.data import Shard, features
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.inference import (
    SAMPLES_PER_PASS,
    Reference,
    bound_networks,
    per_sample_losses,
)
from fedcb2o.federated.losses import Loss, predicts_labels
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
        For each member the results on its test set; on that set with a backdoor's trigger, or with
        an attacker's answers; and on the common test set, where agents have test sets of their own.
    """
    trigger, loss = group.adversary.trigger, group.spec.training.loss
    wanted_answers = group.adversary.wanted_answers
    own = dict[int, Score]()
    triggered = dict[int, Confusion | None]()
    wanted = dict[int, float | None]()
    for test_members, test in group.data.test_sets(members):
        own |= _score(group, test_members, test, loss)
        if trigger is not None:
            name = plugins.display_name("trigger", trigger)
            marked = apply_sample_transform(name, trigger, test, group.data.value_range)
            for k, score in _score(group, test_members, marked, None).items():
                triggered[k] = score.confusion
        if wanted_answers is not None:
            probe = wanted_answers(test.to("cpu")).to(test.x.device)
            if len(probe):
                for k, score in _score(group, test_members, probe, loss).items():
                    wanted[k] = score.exact

    common = dict[int, Score]()
    common_test = group.data.common_test_set()
    if common_test is not None:
        common = _score(group, members, common_test, loss)
    return [
        EvaluationResult(own[k], triggered.get(k), common.get(k), wanted.get(k))
        for k in members.tolist()
    ]


def _score(group: AgentGroup, members: Indices, test: Shard, loss: Loss | None) -> dict[int, Score]:
    """Evaluate the members' models on one test set; return scores by index."""
    spec = group.spec
    models, models_per_batch = group.models, spec.kernels.models_per_batch
    rows = torch.from_numpy(group.layout.own[members])
    references = group.references(members)

    losses: list[float | None] = [None] * len(members)
    exact: list[float | None] = [None] * len(members)
    counts: list[Confusion | None] = [None] * len(members)
    with plugins.attribute_errors("model", spec.model):
        if not predicts_labels(loss):
            losses, exact = answer_scores(
                spec.module, models, rows, test, models_per_batch, references
            ).T.tolist()
        elif loss is not None:
            losses = mean_test_losses(
                spec.module, models, rows, test, loss, models_per_batch, references
            ).tolist()
        if spec.num_classes > 1 and predicts_labels(loss):
            matrices = confusion_matrices(
                spec.module, models, rows, test, spec.num_classes, models_per_batch, references
            )
            counts = list(matrices)
    return {k: Score(counts[i], losses[i], exact[i]) for i, k in enumerate(members.tolist())}


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
        models_per_batch: Models in one program; see `inference.logits`.
        references: Samples for local batch-norm statistics, of each model.

    Returns:
        One confusion matrix per model.
    """
    m = len(rows)
    predicted = predictions(module, models, rows, test, models_per_batch, references)
    pairs = test.y.cpu() * num_classes + predicted
    counts = torch.zeros(m, num_classes * num_classes, dtype=torch.int64)
    counts.scatter_add_(1, pairs, torch.ones_like(pairs))
    return counts.view(m, num_classes, num_classes)


def predictions(
    module: nn.Module,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    test: Shard,
    models_per_batch: int | None = None,
    references: Sequence[Reference] | None = None,
) -> Int[Tensor, "m n"]:
    """Predict the class of each test sample.

    Args:
        module: The network.
        models: Model buffer.
        rows: Rows of the models.
        test: Test samples.
        models_per_batch: Models in one program; see `inference.logits`.
        references: Samples for local batch-norm statistics, of each model.

    Returns:
        Predicted classes of each model.
    """
    return _measure_on_test_set(
        module,
        models,
        rows,
        test,
        lambda outputs, _: outputs.argmax(-1),
        models_per_batch,
        references,
    )


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
        models_per_batch: Models in one program; see `inference.logits`.
        references: Samples for local batch-norm statistics, of each model.

    Returns:
        Mean losses; infinite where they are not a number.
    """

    def measure(outputs: Tensor, y: Tensor) -> Tensor:
        targets = y.unsqueeze(0).expand(len(outputs), *y.shape)
        return per_sample_losses(loss, outputs, targets, 2).double()

    losses = _measure_on_test_set(module, models, rows, test, measure, models_per_batch, references)
    return losses.mean(1).nan_to_num(nan=torch.inf, posinf=torch.inf)


def answer_scores(
    module: nn.Module,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    test: Shard,
    models_per_batch: int | None = None,
    references: Sequence[Reference] | None = None,
) -> Float[Tensor, "m 2"]:
    """Compute the mean loss of m language models, and their share of exact answers.

    Args:
        module: The network.
        models: Model buffer.
        rows: Rows of the models.
        test: Test samples.
        models_per_batch: Models in one program; see `inference.logits`.
        references: Samples for local batch-norm statistics, of each model.

    Returns:
        Loss and share of each model; a loss that is not a number is infinite.
    """
    scores = _measure_on_test_set(
        module,
        models,
        rows,
        test,
        lambda outputs, _: outputs.double(),
        models_per_batch,
        references,
    ).mean(1)
    losses = (-scores[:, 0]).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return torch.stack([losses, scores[:, 1]], 1)


def _measure_on_test_set(
    module: nn.Module,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    test: Shard,
    measure: Callable[[Tensor, Tensor], Tensor],
    models_per_batch: int | None,
    references: Sequence[Reference] | None,
) -> Shaped[Tensor, "m n *k"]:
    """Apply `measure` to outputs [k, n, C] and targets [n], some test samples at a time."""
    batches: list[tuple[Tensor, Reference | None]] = [(rows, None)]
    if references is not None:
        batches = list(zip(torch.split(rows, 1), references, strict=True))
    xs = torch.split(test.x, SAMPLES_PER_PASS)
    parts = list(zip(xs, torch.split(test.y, SAMPLES_PER_PASS), strict=True))

    measured = []
    with torch.no_grad():
        for chunk, reference in batches:
            for _, network in bound_networks(module, models, chunk, models_per_batch, reference):
                columns = []
                for x, y in parts:
                    columns.append(measure(network(features(x).unsqueeze(0)), y))
                measured.append(torch.cat(columns, 1))
    return torch.cat(measured).cpu()
