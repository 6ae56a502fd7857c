"""Evaluation of agents' models on test samples."""

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from fedcb2o import plugins
from fedcb2o.data import Shard, features
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.evaluation.metrics import EvaluationResult, Score
from fedcb2o.federated.inference import (
    SAMPLES_PER_PASS,
    Reference,
    bound_networks,
    dense_layers,
    per_sample_losses,
)
from fedcb2o.federated.losses import Loss, predicts_labels
from fedcb2o.federated.plugin_outputs import apply_sample_transform, metric_value
from fedcb2o.federated.ragged import AgentIds, Indices
from fedcb2o.federated.validation import own_models, validation_losses
from fedcb2o.nn.batch_norm import estimate_statistics_
from fedcb2o.nn.parameters import bind_, gather_rows, unstack_views

Measure = Callable[[Tensor, Tensor], Tensor]
"""(outputs of k models [k, n, ...], labels or targets [n, ...]) -> a measure [k, n, ...]."""
_Test = tuple[str, Indices, Shard, Loss | None]
_MAX_OUTPUTS = 2**20  # of several models at once
_MAX_LINEAR_OUTPUTS = 2**18  # which stay in a core's cache


def evaluate_models(group: AgentGroup, members: Indices) -> EvaluationResult:
    """Evaluate members' models on their test samples, marked ones, and the common ones."""
    members = np.sort(members)
    found: dict[str, list[tuple[Indices, Score]]] = {}
    for name, tested, test, loss in _tests(group, members):
        # The predictions of many members would take much memory.
        size = max(1, _MAX_OUTPUTS // max(1, len(test)))
        for start in range(0, len(tested), size):
            part = tested[start : start + size]
            found.setdefault(name, []).append((part, _score(group, name, part, test, loss)))
    scores: dict[str, Score] = {}
    for name, parts in found.items():
        order = np.concatenate([tested for tested, _ in parts]).argsort()
        scores[name] = Score.concatenate([score for _, score in parts], order)
    validation = _validation_losses(group, members) if group.spec.keep_best else None
    agents = AgentIds(group.agents[members])
    return EvaluationResult(agents, **{"own": Score(), **scores}, validation=validation)


def _score(group: AgentGroup, name: str, members: Indices, test: Shard, loss: Loss | None) -> Score:
    """Evaluate members' models on one test."""
    spec = group.spec
    if not len(test):
        return Score(exact=np.full(len(members), np.nan))
    rows = torch.from_numpy(group.layout.own[members])
    measure = functools.partial(
        measure_samples,
        spec.module,
        group.models,
        rows,
        test,
        models_per_batch=spec.kernels.models_per_batch,
        references=group.references(members),
    )
    chosen: dict[str, Float[np.ndarray, " a"]] = {}
    predicted: Tensor | None = None
    confusion: Tensor | None = None
    losses: Float[np.ndarray, " a"] | None = None
    if name == "own" and spec.metrics:
        chosen, predicted = _chosen_metrics(group, members, test)
    with plugins.attribute_errors("model", spec.model):
        if not predicts_labels(loss):
            # A language model returns the log-likelihood of an answer, and whether it is exact.
            scores = measure(lambda outputs, _: outputs.double()).mean(1)
            losses = _finite_or_inf(-scores[:, 0]).numpy()
            return Score(loss=losses, exact=scores[:, 1].numpy(), chosen=chosen)
        if loss is not None:
            losses = measure(sample_loss(loss)).mean(1).numpy()
        if spec.num_classes == 1:
            return Score(loss=losses, chosen=chosen)
        if predicted is None:
            batch = spec.kernels.models_per_batch
            confusion = linear_confusion(
                spec.module, group.models, rows, test, spec.num_classes, batch
            )
        if confusion is None:
            predicted = measure(predicted_class) if predicted is None else predicted
            confusion = confusion_matrices(predicted, test.y, spec.num_classes)
    return Score(confusion.int().numpy(), losses, chosen=chosen)


def linear_confusion(
    module: nn.Module,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    test: Shard,
    num_classes: int,
    models_per_batch: int | None = None,
) -> Float[Tensor, "m C C"] | None:
    """Count the predictions of linear models in one product; None for other models.

    Sums in another order round differently. Where that may change the largest output for a sample,
    the predictions of the model are those of `predicted_class`.
    """
    layers = dense_layers(module, models.shape[1])
    if [*map(type, layers)] != [nn.Flatten, nn.Linear] or models.device.type != "cpu":
        return None
    x = features(test.x[test.y.argsort()]).flatten(1)
    counts = torch.bincount(test.y, minlength=num_classes).tolist()
    # Twice the bound of Higham (2002, Section 3.1) on the rounding of two outputs, each in two
    # orders.
    unit = 4 * (x.shape[1] + 1) * torch.finfo(torch.float32).eps
    largest = x.norm(dim=1).max()
    found, is_bounded = [], []
    for part in torch.split(rows, max(1, _MAX_LINEAR_OUTPUTS // (len(x) * num_classes))):
        weight, bias = unstack_views(module, gather_rows(models, part.tolist()))
        outputs = torch.addmm(bias.reshape(-1, 1), weight.flatten(0, 1), x.T)
        outputs = outputs.view(len(part), num_classes, len(x))
        scale = largest * weight.norm(dim=2).amax(1) + bias.abs().amax(1)
        least = outputs.amax(1).sub_((unit * scale).unsqueeze(1))
        is_largest = torch.ge(outputs, least.unsqueeze(1), out=outputs)
        columns = [samples.sum(-1) for samples in torch.split(is_largest, counts, -1)]
        found.append(torch.stack(columns, 1))
        is_bounded.append(scale.isfinite())
    confusion = torch.cat(found)
    # A sample with several outputs near the largest one counts several times.
    is_unsure = ~torch.cat(is_bounded) | (confusion.sum((1, 2)) != len(x))
    if is_unsure.any():
        measure = functools.partial(measure_samples, models_per_batch=models_per_batch)
        predicted = measure(module, models, rows[is_unsure], test, predicted_class)
        exact = confusion_matrices(predicted, test.y, num_classes)
        confusion[is_unsure] = exact.to(confusion.dtype)
    return confusion


def _tests(group: AgentGroup, members: Indices) -> Iterator[_Test]:
    """Yield the name of each test, the members that take it, its samples and its loss."""
    loss = group.spec.training.loss
    trigger = getattr(group.adversary, "trigger", None)
    wanted_answers = getattr(group.adversary, "wanted_answers", None)
    for tested, test in group.data.test_sets(members):
        yield "own", tested, test, loss
        if trigger is not None:
            # A backdoor is measured by predictions, without a loss.
            name = plugins.display_name("trigger", trigger)
            marked = apply_sample_transform(name, trigger, test, group.data.value_range)
            yield "triggered", tested, marked, None
        if wanted_answers is not None:
            probe = wanted_answers(test.to("cpu")).to(test.x.device)
            yield "wanted", tested, probe, loss
    common_test = group.data.common_test_set()
    if common_test is not None:
        yield "common", members, common_test, loss


def _chosen_metrics(
    group: AgentGroup, members: Indices, test: Shard
) -> tuple[dict[str, Float[np.ndarray, " m"]], Int[Tensor, "m n"]]:
    """Compute the metrics that the configuration added, and the classes that models predict."""
    spec = group.spec
    y = test.y.cpu()
    size = max(1, _MAX_OUTPUTS // max(1, len(test) * spec.num_classes))
    chosen: dict[str, list[float | None]] = {name: [] for name in spec.metrics}
    predicted = []
    for part in np.split(members, range(size, len(members), size)):
        outputs = measure_samples(
            spec.module,
            group.models,
            torch.from_numpy(group.layout.own[part]),
            test,
            lambda outputs, _: outputs,
            models_per_batch=spec.kernels.models_per_batch,
            references=group.references(part),
        )
        predicted.append(predicted_class(outputs, y))
        for own in outputs:
            for name, metric in spec.metrics.items():
                chosen[name].append(metric_value(metric, own, y))
    columns = {name: np.array(values, np.float64) for name, values in chosen.items()}
    return columns, torch.cat(predicted)


def _validation_losses(group: AgentGroup, members: Indices) -> Float[np.ndarray, " m"]:
    """Compute the losses of members' own models on their validation samples; NaN without any."""
    losses = np.full(len(members), np.nan)
    for i in np.flatnonzero(group.data.validation.sizes[members]).tolist():
        one = members[i : i + 1]
        losses[i] = float(validation_losses(group, one, own_models(group, one, 0)).mean)
    return losses


def _finite_or_inf(losses: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    return losses.nan_to_num(nan=torch.inf, posinf=torch.inf)


def agent_network(group: AgentGroup, k: int) -> nn.Module:
    """Return the group's network with a copy of one agent's model, in evaluation mode."""
    module = group.spec.module.eval()
    reference = group.reference(k)
    bind_(module, group.models[int(group.layout.own[k])].clone())
    if reference is not None:
        estimate_statistics_(module, features(reference))
    return module


def measure_samples(
    module: nn.Module,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    test: Shard,
    measure: Measure,
    *,
    models_per_batch: int | None = None,
    references: Sequence[Reference] | None = None,
) -> Shaped[Tensor, "m n *k"]:
    """Measure m models on n test samples on the CPU; statistics are from `references`."""
    batches: list[tuple[Tensor, Reference | None]] = [(rows, None)]
    if references is not None:
        # A program estimates the statistics of its models on one reference.
        batches = list(zip(torch.split(rows, 1), references, strict=True))
    # The activations of one pass fit a core's cache.
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


def predicted_class(outputs: Float[Tensor, "k n C"], y: Shaped[Tensor, " n"]) -> Int[Tensor, "k n"]:
    """Return each model's class for each sample; 0, as argmax, for one that is not finite."""
    return outputs.argmax(-1)


def sample_loss(loss: Loss) -> Measure:
    """Return the measure of a model's loss on each sample; infinite where it is not a number."""

    def measure(outputs: Tensor, y: Tensor) -> Tensor:
        targets = y.unsqueeze(0).expand(len(outputs), *y.shape)
        return _finite_or_inf(per_sample_losses(loss, outputs, targets, 2).double())

    return measure


def confusion_matrices(
    predicted: Int[Tensor, "m n"], labels: Int[Tensor, " n"], num_classes: int
) -> Int[Tensor, "m C C"]:
    """Count how often each model predicts class c' (column) for class c (row), on the CPU."""
    pairs = labels.cpu() * num_classes + predicted
    counts = torch.zeros(len(predicted), num_classes * num_classes, dtype=torch.int64)
    counts.scatter_add_(1, pairs, torch.ones_like(pairs))
    return counts.view(-1, num_classes, num_classes)
