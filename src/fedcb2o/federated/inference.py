"""Outputs and losses of models on samples (alg:localAggregation, line 3; eq:benignAgentObj).

Models and samples are on one device, and results on the CPU: one transfer for all models.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from fedcb2o import plugins
from fedcb2o.data import Shard, features
from fedcb2o.errors import ConfigError, describe_type
from fedcb2o.federated.loss_groups import grouped, num_groups
from fedcb2o.federated.losses import Loss, is_cross_entropy, predicts_labels
from fedcb2o.federated.sections import LossAverage
from fedcb2o.federated.types import Losses, ScalarObjective
from fedcb2o.nn import batch_norm
from fedcb2o.nn.parameters import agent_state, bind_, gather_rows, unstack_views

_MAX_BATCH_PARAMETERS = 2**21  # of the models in one product: 8 MiB
_MAX_BATCH_MODELS = 512  # whose outputs on a pass of samples fit a core's cache
MAX_BATCH_INPUTS = 2**20
"""Numbers in the samples of several agents, once per model, in one product: 4 MiB."""
SAMPLES_PER_PASS = 128
"""Samples in one forward pass, whose activations fit a core's cache."""

_NUM_LANES = {"AVX2": 8, "AVX512": 16}.get(torch.backends.cpu.get_cpu_capability(), 0)
"""Numbers of type float32 in a vector of the processor, where it was measured."""

Reference = Shaped[Tensor, "k *features"]
"""Training samples on which an agent estimates its local batch-norm statistics."""


@dataclass(frozen=True)
class Interpolation:
    """Points at a `share` in (0, 1] of the way from own models, in rows `own`, to received ones."""

    own: Int[Tensor, "*a"]
    share: float

    def points(
        self, models: Float[Tensor, "p d"], thetas: Float[Tensor, "*m d"]
    ) -> Float[Tensor, "*m d"]:
        """Return the points to evaluate in place of received models."""
        return torch.lerp(models[self.own], thetas, self.share)


# (tensors of m networks [m, ...], samples [m, n, ...] or [1, n, ...]) -> outputs [m, n, ...].
_BatchedForward = Callable[[Sequence[Tensor], Tensor], Tensor]


def logits(
    module: nn.Module,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    x: Shaped[Tensor, "n *features"],
    models_per_batch: int | None = None,
    reference: Reference | None = None,
    interpolation: Interpolation | None = None,
) -> Float[Tensor, "m n *C"]:
    """Compute the outputs of m models on the same n samples, before the softmax.

    `models_per_batch` models are in one program. By default small dense networks fill 8 MiB; other
    models are evaluated one by one, on views of their rows. `reference` has the samples for local
    batch-norm statistics, and `interpolation` the points to evaluate in place of the models.
    """
    # A network other than a dense one reads few samples at a time, whose activations fit a core's
    # cache.
    parts = (x,) if dense_layers(module, models.shape[1]) else torch.split(x, SAMPLES_PER_PASS)
    outputs = []
    with torch.no_grad():
        for _, network in bound_networks(
            module, models, rows, models_per_batch, reference, interpolation
        ):
            passes = [network(features(part).unsqueeze(0)) for part in parts]
            outputs.append(torch.cat(passes, 1))
    return torch.cat(outputs)


def logits_per_model(
    module: nn.Module,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    x: Float[Tensor, "m n *features"],
    models_per_batch: int | None = None,
    reference: Reference | None = None,
) -> Float[Tensor, "m n *C"]:
    """Compute the outputs of m models, each on its own n samples, before the softmax."""
    outputs = []
    start = 0
    with torch.no_grad():
        for k, network in bound_networks(module, models, rows, models_per_batch, reference):
            # One network reads few samples at a time, whose activations fit a core's cache.
            size = SAMPLES_PER_PASS if k == 1 else x.shape[1]
            passes = [network(part) for part in torch.split(x[start : start + k], size, 1)]
            outputs.append(torch.cat(passes, 1))
            start += k
    return torch.cat(outputs)


def input_gradients(
    module: nn.Module,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    x: Float[Tensor, "m n *features"],
    objective: ScalarObjective,
    models_per_batch: int | None = None,
    reference: Reference | None = None,
) -> Float[Tensor, "m n *features"]:
    """Compute the gradients of an objective of the outputs with respect to the samples."""
    gradients = []
    start = 0
    with torch.enable_grad():
        for k, network in bound_networks(module, models, rows, models_per_batch, reference):
            samples = x[start : start + k].detach().clone().requires_grad_()
            start += k
            outputs = network(samples)
            with plugins.attribute_errors("objective of", "input_gradients"):
                total = objective(outputs).sum()
            gradients.append(torch.autograd.grad(total, samples)[0])
    return torch.cat(gradients)


def bound_networks(
    module: nn.Module,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    models_per_batch: int | None,
    reference: Reference | None,
    interpolation: Interpolation | None = None,
) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
    """Iterate over networks: k, and a function of samples [1, n, ...] or [k, n, ...].

    It is valid until the next one. The other arguments are those of `logits`.
    """
    dim = models.shape[1]
    layers = dense_layers(module, dim)
    if models_per_batch is None:
        models_per_batch = min(_MAX_BATCH_PARAMETERS // dim, _MAX_BATCH_MODELS) if layers else 1
    module.eval()

    if models_per_batch < 2:
        # One model at a time needs no copy: the network reads a view of its row.
        for row in rows.tolist():
            theta = models[row]
            if interpolation is not None:
                theta = interpolation.points(models, theta)
            bind_(module, theta)
            if reference is not None:
                batch_norm.estimate_statistics_(module, features(reference))
            yield 1, lambda x: module(x[0]).unsqueeze(0)
        return

    forward = batched_forward(module, layers)
    local = batch_norm.statistics(module, "local").values()
    for chunk in torch.split(rows, models_per_batch):
        thetas = gather_rows(models, chunk.tolist())
        if interpolation is not None:
            thetas = interpolation.points(models, thetas)
        tensors = unstack_views(module, thetas)
        # Each network has statistics of its own, which an estimate changes.
        tensors += [statistic.expand(len(chunk), -1).contiguous() for statistic in local]
        if reference is not None:
            with batch_norm.estimate_statistics_mode(module):
                forward(tensors, features(reference).unsqueeze(0))
        yield len(chunk), functools.partial(forward, tensors)


def batched_forward(module: nn.Module, layers: list[nn.Module]) -> _BatchedForward:
    """Return the forward pass of m networks: products of dense `layers`, or vmap in groups."""
    return functools.partial(_dense_logits, layers) if layers else _vmapped(module)


def _vmapped(module: nn.Module) -> _BatchedForward:
    """Return the forward pass by `torch.func.vmap`."""
    index = {id(tensor): i for i, tensor in enumerate(agent_state(module).values())}
    # Layers and parameters may be used several times: name every place of a tensor.
    places = {}
    for prefix, part in module.named_modules():
        for name, tensor in itertools.chain(
            part.named_parameters(recurse=False, remove_duplicate=False),
            part.named_buffers(recurse=False, remove_duplicate=False),
        ):
            if id(tensor) in index:
                places[f"{prefix}.{name}".lstrip(".")] = index[id(tensor)]

    def forward_one(values: Sequence[Tensor], x: Tensor) -> Tensor:
        tensors = {name: values[i] for name, i in places.items()}
        outputs: Tensor = functional_call(module, tensors, (x,), tie_weights=False)
        return outputs

    def forward(
        parameters: Sequence[Float[Tensor, "m ..."]], x: Float[Tensor, "k n *features"]
    ) -> Tensor:
        # Samples that all models share are read once, and not copied for each model.
        is_shared = len(x) < len(parameters[0])
        in_dims = (0, None if is_shared else 0)
        forward_all = vmap(forward_one, in_dims=in_dims, randomness="different")
        outputs: Float[Tensor, "m n *C"] = forward_all(list(parameters), x[0] if is_shared else x)
        return outputs

    return forward


def dense_layers(module: nn.Module, dim: int) -> list[nn.Module]:
    """Return the layers of a network of flatten, dense layers used once, and ReLU; else none."""
    layers = list(module) if type(module) is nn.Sequential else []
    # Batched products would skip hooks, so that a network with hooks is not plain.
    is_plain = all(
        type(layer) in (nn.Flatten, nn.ReLU)
        or (type(layer) is nn.Linear and layer.bias is not None)
        for layer in layers
    ) and not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    # A layer that is used twice counts twice: the sum is then above the model's length.
    is_used_once = sum(p.numel() for layer in layers for p in layer.parameters()) == dim
    return layers if is_plain and is_used_once and type(layers[0]) is nn.Flatten else []


def _dense_logits(
    layers: list[nn.Module],
    parameters: Sequence[Float[Tensor, "m ..."]],
    x: Float[Tensor, "k n *features"],
) -> Float[Tensor, "m n C"]:
    """Compute the outputs of m dense networks from weights [m, out, in] and biases [m, out]."""
    h = x.expand(len(parameters[0]), *x.shape[1:]).flatten(2)
    remaining = iter(parameters)
    for layer in layers:
        if isinstance(layer, nn.ReLU):
            h = h.relu()
        elif isinstance(layer, nn.Linear):
            weight = next(remaining)
            bias = next(remaining)
            h = torch.baddbmm(bias.unsqueeze(1), h, weight.mT)
    return h


def per_sample_losses(
    loss: Loss | None, outputs: Float[Tensor, "..."], targets: Shaped[Tensor, "..."], num_axes: int
) -> Float[Tensor, "..."]:
    """Compute and validate losses over the first `num_axes` axes; None is the cross-entropy."""
    shape = targets.shape[:num_axes]
    outputs = outputs.flatten(0, num_axes - 1)
    targets = targets.flatten(0, num_axes - 1)
    if loss is None:
        return F.cross_entropy(outputs, targets, reduction="none").view(shape)
    losses: Any = loss(outputs, targets)
    is_tensor = isinstance(losses, Tensor)
    if is_tensor and losses.shape == (shape.numel(),) and losses.is_floating_point():
        per_sample: Tensor = losses.view(shape)
        return per_sample
    got = describe_type(losses)
    if is_tensor and losses.is_floating_point():
        got = f"shape {tuple(losses.shape)}"
    elif is_tensor:
        got = f"numbers of type {losses.dtype}"
    raise ConfigError(
        f"the {plugins.display_name('loss', loss)} returned {got} for {shape.numel()} samples, "
        f"expected a number for each, of shape ({shape.numel()},) and floating point: "
        'take reduction="none", and the mean over the numbers of a sample where it has several'
    )


def model_losses(
    module: nn.Module,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    validation: Shard,
    num_classes: int,
    *,
    average: LossAverage = "samples",
    batch_size: int = 64,
    models_per_batch: int | None = None,
    reference: Reference | None = None,
    loss: Loss | None = None,
) -> Losses:
    """Compute the losses L_j and L_{j,c} of m models on one agent's data (eq:benignAgentObj).

    Losses that are not a number are infinite. The average over "batches" is the unweighted mean of
    the means of mini-batches, as in the authors' released code. `num_classes` is 1 without classes.
    """
    losses = per_agent_losses(
        module,
        models,
        rows.unsqueeze(0),
        validation.x.unsqueeze(0),
        validation.y.unsqueeze(0),
        num_classes,
        average=average,
        batch_size=batch_size,
        models_per_batch=models_per_batch,
        references=None if reference is None else [reference],
        loss=loss,
    )
    return losses[0]


def per_agent_losses(
    module: nn.Module,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, "a m"],
    x: Shaped[Tensor, "a n *features"],
    y: Shaped[Tensor, "a n *target"],
    num_classes: int,
    *,
    average: LossAverage = "samples",
    batch_size: int = 64,
    models_per_batch: int | None = None,
    references: Sequence[Reference] | None = None,
    loss: Loss | None = None,
    interpolation: Interpolation | None = None,
    groups: functools.partial[Any] | None = None,
) -> Losses:
    """Compute the losses of m models of each of several agents, on the agents' own samples.

    Data without classes count as one class, and their entropy is NaN. With `groups` of samples,
    these stand for the classes. The other arguments are those of `model_losses` and `logits`.
    """
    (a, m), n = rows.shape, y.shape[1]
    outputs = models.new_zeros(a, 0, n, num_classes)
    if m:
        outputs = _per_agent_logits(
            module, models, rows, x, models_per_batch, references, interpolation
        )

    per_sample = outputs.new_full((a, m, n), torch.nan)
    entropy_of = functools.partial(torch.full, (a, m), torch.nan, dtype=torch.float64)
    if num_classes > 1 and predicts_labels(loss):
        log_p = _log_softmax(outputs)
        per_sample = -log_p.gather(-1, y.view(a, 1, n, 1).expand(a, m, n, 1)).squeeze(-1)
        entropy_of = functools.partial(_mean_entropy, log_p)
    if loss is not None and m:
        with torch.no_grad():
            targets = y.unsqueeze(1).expand(a, m, *y.shape[1:])
            per_sample = per_sample_losses(loss, outputs, targets, 3).to(outputs.dtype)

    # One transfer for all models.
    per_sample = per_sample.cpu().double().nan_to_num(nan=torch.inf, posinf=torch.inf)

    batches: tuple[Tensor, ...] = (per_sample,)
    if average == "batches":
        batches = torch.split(per_sample, batch_size, dim=-1)
    mean = torch.stack([batch.mean(-1) for batch in batches]).mean(0)

    labels = y.cpu() if num_classes > 1 else torch.zeros(a, n, dtype=torch.int64)
    if groups is not None:
        labels, num_classes = grouped(groups, x, y), num_groups(groups)
    by_class, present = _class_means(per_sample, labels, num_classes)
    of_classes = num_classes > 1 and groups is None and is_cross_entropy(loss)
    return Losses(
        mean, by_class, present, entropy_of, per_sample, labels, is_cross_entropy=of_classes
    )


def _mean_entropy(log_p: Float[Tensor, "a m n C"]) -> Float[Tensor, "a m"]:
    """Average the entropy of predictions over samples, on the CPU."""
    negative_entropy = (log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)  # 0 * log 0 is 0
    return -negative_entropy.cpu().double().mean(-1)


def _log_softmax(outputs: Float[Tensor, "a m n C"]) -> Float[Tensor, "a m n C"]:
    """Compute logarithms of probabilities, with the bits of `F.log_softmax`."""
    if not _reads_columns(outputs):
        return F.log_softmax(outputs, dim=-1)
    shape, num_classes = outputs.shape[:-1], outputs.shape[-1]
    log_p = F.log_softmax(_columns(outputs), dim=0)
    return log_p[:, : shape.numel()].view(num_classes, *shape).movedim(0, -1)


def cross_entropies(
    outputs: Float[Tensor, "*a C"], labels: Int[Tensor, "*a"]
) -> Float[Tensor, "*a"]:
    """Compute cross-entropies, with the bits of `F.cross_entropy` and of its gradient."""
    if not _reads_columns(outputs):
        return per_sample_losses(None, outputs, labels, labels.ndim)
    log_p = F.log_softmax(_columns(outputs), dim=0)
    return -log_p.gather(0, labels.reshape(1, -1)).view(labels.shape)


def _reads_columns(outputs: Float[Tensor, "*a C"]) -> bool:
    """Return whether a softmax over columns of outputs is faster, and has the same bits."""
    # For fewer classes than lanes PyTorch's kernel takes several times as long as that for another
    # axis.
    is_plain = outputs.device.type == "cpu" and outputs.dtype == torch.float32
    return is_plain and outputs.shape[-1] < _NUM_LANES and outputs.numel() > 0


def _columns(outputs: Float[Tensor, "*a C"]) -> Float[Tensor, "C l"]:
    rows = outputs.reshape(-1, outputs.shape[-1])
    columns: Tensor = _Columns.apply(rows)  # type: ignore[no-untyped-call]  # PyTorch has no types
    return columns


class _Columns(torch.autograd.Function):
    """Transposition of outputs [k, C]; zeros fill vectors, outside of which bits are others."""

    @staticmethod
    def forward(ctx: Any, outputs: Float[Tensor, "k C"]) -> Float[Tensor, "C l"]:
        ctx.count, num_classes = outputs.shape
        width = -(-ctx.count // _NUM_LANES) * _NUM_LANES
        columns = outputs.new_empty(num_classes, width)
        columns[:, : ctx.count] = outputs.T
        columns[:, ctx.count :] = 0.0
        return columns

    @staticmethod
    def backward(ctx: Any, gradient: Float[Tensor, "C l"]) -> Float[Tensor, "k C"]:
        # The bits of a product depend on the layout of its factors.
        return gradient[:, : ctx.count].T.contiguous()


def losses_from_samples(
    per_sample: Float[Tensor, "m n"], labels: Int[Tensor, " n"], num_classes: int | None = None
) -> Losses:
    """Return losses from those of samples, without entropy; by default up to the last label.

    With labels they are taken for cross-entropies.
    """
    per_sample = per_sample.double().nan_to_num(nan=torch.inf, posinf=torch.inf)
    if num_classes is None:
        num_classes = 1 + int(labels.max()) if len(labels) else 1
    by_class, present = _class_means(per_sample.unsqueeze(0), labels.unsqueeze(0), num_classes)
    mean = per_sample.mean(-1)
    entropy_of = functools.partial(torch.full_like, mean, torch.nan)
    of_classes = num_classes > 1
    return Losses(
        mean, by_class[0], present[0], entropy_of, per_sample, labels, is_cross_entropy=of_classes
    )


def _class_means(
    per_sample: Float[Tensor, "a m n"], labels: Int[Tensor, "a n"], num_classes: int
) -> tuple[Float[Tensor, "a m C"], Bool[Tensor, "a C"]]:
    """Average losses by class, 0 for a class without samples; return the classes with samples."""
    a, m, n = per_sample.shape
    counts = F.one_hot(labels, num_classes).sum(1)
    sums = per_sample.new_zeros(a, m, num_classes)
    sums.scatter_add_(-1, labels.unsqueeze(1).expand(a, m, n), per_sample)
    return sums.div_(counts.clamp(min=1).unsqueeze(1)), counts > 0


def _per_agent_logits(
    module: nn.Module,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, "a m"],
    x: Shaped[Tensor, "a n *features"],
    models_per_batch: int | None,
    references: Sequence[Reference] | None,
    interpolation: Interpolation | None,
) -> Float[Tensor, "a m n *C"]:
    """Compute the outputs of m models of each agent on its own samples."""
    (a, m), dim = rows.shape, models.shape[1]
    layers = dense_layers(module, dim)
    agents_per_batch = (models_per_batch or 1) // m
    if layers:
        num_models = models_per_batch
        if num_models is None:
            num_models = _MAX_BATCH_PARAMETERS // dim
        # Both the models and their samples are copied: neither may take more than a few MiB.
        agents_per_batch = min(num_models // m, MAX_BATCH_INPUTS // max(1, m * x[0].numel()))
    outputs = []

    # 1. One agent after the other.
    # Local statistics are estimated for one agent at a time, too.
    if a == 1 or agents_per_batch < 2 or references is not None:
        for k in range(a):
            reference = None if references is None else references[k]
            points = None
            if interpolation is not None:
                points = Interpolation(interpolation.own[k], interpolation.share)
            found = logits(module, models, rows[k], x[k], models_per_batch, reference, points)
            outputs.append(found)
        return torch.stack(outputs)

    # 2. Several agents in one program.
    module.eval()
    with torch.no_grad():
        forward = batched_forward(module, layers)
        for start in range(0, a, agents_per_batch):
            chunk = slice(start, start + agents_per_batch)
            thetas = models.index_select(0, rows[chunk].flatten().to(models.device))
            if interpolation is not None:
                own = interpolation.own[chunk].unsqueeze(1)
                each = Interpolation(own, interpolation.share)
                thetas = each.points(models, thetas.view(len(own), m, dim)).flatten(0, 1)
            parameters = unstack_views(module, thetas)
            samples = features(x[chunk]).repeat_interleave(m, 0)
            parts = (samples,) if layers else torch.split(samples, SAMPLES_PER_PASS, 1)
            joined = torch.cat([forward(parameters, part) for part in parts], 1)
            outputs.append(joined.view(-1, m, *joined.shape[1:]))
        return torch.cat(outputs)
