"""Losses of m models on an agent's validation data (alg:localAggregation, line 3; eq:benignAgentObj), and tests.

Models and samples lie on one device, and what is found on the CPU: it moves there once for all m models.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from fedcb2o import plugins
from fedcb2o.data._dataset import Shard, features
from fedcb2o.federated.losses import Loss, per_sample_losses
from fedcb2o.federated.types import Losses, ScalarObjective
from fedcb2o.nn import batch_norm
from fedcb2o.nn.parameters import (
    agent_state,
    bind_,
    empty_local_statistics,
    gather_rows,
    unstack_views,
)

_MAX_BATCH_PARAMETERS = (
    2**21
)  # parameters of the models that are evaluated in one product: 8 MiB, small beside any copy of a pool
MAX_BATCH_INPUTS = (
    2**20
)  # numbers in the samples of several agents, once for each of their models, in one product: 4 MiB
SAMPLES_PER_PASS = (
    128  # samples that go through a network at once: their activations stay near a core's cache
)

LossAverage = Literal["samples", "batches"]
Reference = Shaped[Tensor, "k *features"]
"""Samples of an agent's training data, on which it estimates the statistics of norms that are local."""


@dataclass(frozen=True)
class Interpolation:
    """Where models are looked at: after `share` of the way to them from an agent's `own`, a row of the pool (or one
    for each of several agents)."""

    own: Int[Tensor, "*a"]
    share: float


_BatchedForward = Callable[[Sequence[Tensor], Tensor], Tensor]
"""The tensors of m networks [m, ...], as `state` has them, and the samples of each [m, n, ...], or the same for all
[1, n, ...] -> their outputs [m, n, C], or of another shape from the third axis on."""


def logits(
    module: nn.Module,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    x: Shaped[Tensor, "n *features"],
    models_per_batch: int | None = None,
    reference: Reference | None = None,
    interpolation: Interpolation | None = None,
) -> Float[Tensor, "m n *C"]:
    """The outputs of m models, rows of `pool`, or of the models on the way `towards` them, on the same n samples.

    So many of them are evaluated `together`, in one program; by default small dense networks, as many as 8 MiB hold.
    Others are evaluated one by one, on views of their rows. Local statistics are first estimated on a `reference`.
    """
    parts = (x,) if dense_layers(module, models.shape[1]) else torch.split(x, SAMPLES_PER_PASS)
    with torch.no_grad():
        found = [
            torch.cat([network(features(part).unsqueeze(0)) for part in parts], 1)
            for _, network in _networks(
                module, models, rows, models_per_batch, reference, interpolation
            )
        ]
    return torch.cat(found)


def logits_per_model(
    module: nn.Module,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    x: Float[Tensor, "m n *features"],
    models_per_batch: int | None = None,
    reference: Reference | None = None,
) -> Float[Tensor, "m n *C"]:
    """The outputs of m models on n samples each, otherwise as `logits`."""
    found = []
    rest = x
    with torch.no_grad():
        for k, network in _networks(module, models, rows, models_per_batch, reference):
            found.append(network(rest[:k]))
            rest = rest[k:]
    return torch.cat(found)


def input_gradients(
    module: nn.Module,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    x: Float[Tensor, "m n *features"],
    objective: ScalarObjective,
    models_per_batch: int | None = None,
    reference: Reference | None = None,
) -> Float[Tensor, "m n *features"]:
    """The gradients, with respect to each of n samples of each of m models, of what `of` makes of its outputs, which
    are those of `logits_of_own`."""
    found = []
    rest = x
    with torch.enable_grad():
        for k, network in _networks(module, models, rows, models_per_batch, reference):
            seen = rest[:k].detach().clone().requires_grad_()
            rest = rest[k:]
            outputs = network(seen)
            with plugins.attribute_errors("function of", "gradients_of"):
                total = objective(outputs).sum()
            found.append(torch.autograd.grad(total, seen)[0])
    return torch.cat(found)


def _networks(
    module: nn.Module,
    pool: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    models_per_batch: int | None,
    reference: Reference | None,
    interpolation: Interpolation | None = None,
) -> Iterator[tuple[int, Callable[[Tensor], Tensor]]]:
    """The models of `logits`, k at a time: k, and how they are computed on samples, the same for all [1, n, ...] or of
    each [k, n, ...]. The next are bound where these were."""
    dim = pool.shape[1]
    if models_per_batch is None:
        models_per_batch = _MAX_BATCH_PARAMETERS // dim if dense_layers(module, dim) else 1
    module.eval()
    if models_per_batch < 2:
        for row in rows.tolist():
            bind_(module, _interpolate(pool, pool[row], interpolation))
            if reference is not None:
                batch_norm.estimate_statistics_(module, features(reference))
            yield 1, lambda x: module(x[0]).unsqueeze(0)
        return
    at_once = batched_forward(module, dim)
    for some in torch.split(rows, models_per_batch):
        models = _interpolate(pool, gather_rows(pool, some.tolist()), interpolation)
        tensors = [*unstack_views(module, models), *empty_local_statistics(module, len(some))]
        if reference is not None:
            with batch_norm.estimate_statistics_mode(module):
                at_once(tensors, features(reference).unsqueeze(0))
        yield len(some), functools.partial(at_once, tensors)


def _interpolate(
    pool: Float[Tensor, "p d"], models: Float[Tensor, "*m d"], interpolation: Interpolation | None
) -> Float[Tensor, "*m d"]:
    """The models themselves, or where the way `towards` them leads from one model."""
    return (
        models
        if interpolation is None
        else torch.lerp(pool[interpolation.own], models, interpolation.share)
    )


def batched_forward(module: nn.Module, dim: int) -> _BatchedForward:
    """How m networks are computed at once: dense ones by a batched product a layer, any other by `torch.func.vmap`,
    under which convolutions have m groups, or on the same samples m times the channels."""
    layers = dense_layers(module, dim)
    return functools.partial(_dense_logits, layers) if layers else _vmapped(module)


def _vmapped(module: nn.Module) -> _BatchedForward:
    place = {id(tensor): i for i, tensor in enumerate(agent_state(module).values())}
    # Every place where one of these tensors stands, once: layers and parameters may be used several times.
    slots = {
        f"{prefix}.{name}".lstrip("."): place[id(tensor)]
        for prefix, part in module.named_modules()
        for name, tensor in itertools.chain(
            part.named_parameters(recurse=False, remove_duplicate=False),
            part.named_buffers(recurse=False, remove_duplicate=False),
        )
        if id(tensor) in place
    }

    def one(values: Sequence[Tensor], x: Tensor) -> Tensor:
        given = {name: values[i] for name, i in slots.items()}
        outputs: Tensor = functional_call(module, given, (x,), tie_weights=False)
        return outputs

    def outputs(
        parameters: Sequence[Float[Tensor, "m ..."]], x: Float[Tensor, "k n *features"]
    ) -> Tensor:
        shared = len(x) < len(parameters[0])
        of_each = vmap(one, in_dims=(0, None if shared else 0), randomness="different")
        found: Float[Tensor, "m n *C"] = of_each(list(parameters), x[0] if shared else x)
        return found

    return outputs


def dense_layers(module: nn.Module, dim: int) -> list[nn.Module]:
    """The layers of a network that `dense_logits` can read: flattened samples, dense layers with a bias, none of
    them twice, and ReLU; of any other network none."""
    layers = list(module) if type(module) is nn.Sequential else []
    plain = all(
        type(p) in (nn.Flatten, nn.ReLU) or (type(p) is nn.Linear and p.bias is not None)
        for p in layers
    )
    once = sum(p.numel() for layer in layers for p in layer.parameters()) == dim
    return layers if plain and once and type(layers[0]) is nn.Flatten else []


def _dense_logits(
    layers: list[nn.Module],
    parameters: Sequence[Float[Tensor, "m ..."]],
    x: Float[Tensor, "k n *features"],
) -> Float[Tensor, "m n C"]:
    """The outputs of m networks, each on its own n samples or all on the same (k = 1), from their weights [m, out, in]
    and biases [m, out]."""
    h = x.expand(len(parameters[0]), *x.shape[1:]).flatten(2)
    given = iter(parameters)
    for layer in layers:
        if isinstance(layer, nn.ReLU):
            h = h.relu()
        elif isinstance(layer, nn.Linear):
            weight = next(given)
            bias = next(given)
            h = torch.baddbmm(bias.unsqueeze(1), h, weight.mT)
    return h


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
    """The losses L_j and L_{j,c} of m models on one agent's data (eq:benignAgentObj); what is not a number counts as
    infinite.

    `average="batches"` takes the unweighted mean of the means of mini-batches, as the authors' released code does.
    `together` and `reference` are those of `logits`, `loss` that of each sample, by default the cross-entropy.
    """
    one = validation.x.unsqueeze(0), validation.y.unsqueeze(0)
    each = per_agent_losses(
        module,
        models,
        rows.unsqueeze(0),
        *one,
        num_classes,
        average=average,
        batch_size=batch_size,
        models_per_batch=models_per_batch,
        references=None if reference is None else [reference],
        loss=loss,
    )
    return each[0]


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
) -> Losses:
    """`losses_of` for several agents: of m models for each, or on the way `towards` them, on its own n samples. Without
    classes (`num_classes` 1) all samples count as one, and there is no entropy of predictions: NaN."""
    (a, m), n = rows.shape, y.shape[1]
    outputs = models.new_zeros(a, 0, n, num_classes)
    if m:
        outputs = _per_agent_logits(
            module, models, rows, x, models_per_batch, references, interpolation
        )
    certain = lost = outputs.new_full((a, m, n), torch.nan)
    if num_classes > 1:
        log_p = F.log_softmax(outputs, dim=-1)
        lost = -log_p.gather(-1, y.view(a, 1, n, 1).expand(a, m, n, 1)).squeeze(-1)
        certain = (log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)  # 0 * log 0 is 0
    if loss is not None and m:
        with torch.no_grad():
            targets = y.unsqueeze(1).expand(a, m, *y.shape[1:])
            lost = per_sample_losses(loss, outputs, targets, 3).to(outputs.dtype)
    losses, certain = torch.stack([lost, certain]).cpu().double()
    losses = losses.nan_to_num(nan=torch.inf, posinf=torch.inf)
    entropy = -certain.mean(-1)
    y = y.cpu() if num_classes > 1 else torch.zeros(a, n, dtype=torch.int64)
    parts = torch.split(losses, batch_size, dim=-1) if average == "batches" else (losses,)
    mean = torch.stack([part.mean(-1) for part in parts]).mean(0)
    counts = F.one_hot(y, num_classes).sum(1)
    by_class = losses.new_zeros(a, m, num_classes).scatter_add_(
        -1, y.unsqueeze(1).expand(a, m, n), losses
    )
    by_class /= counts.clamp(min=1).unsqueeze(1)
    return Losses(mean, by_class, counts > 0, entropy, losses, y)


def _per_agent_logits(
    module: nn.Module,
    pool: Float[Tensor, "p d"],
    rows: Int[Tensor, "a m"],
    x: Shaped[Tensor, "a n *features"],
    models_per_batch: int | None,
    references: Sequence[Reference] | None,
    interpolation: Interpolation | None,
) -> Float[Tensor, "a m n *C"]:
    """The outputs of m models for each agent on its own samples: those of several agents in one program too."""
    (a, m), dim = rows.shape, pool.shape[1]
    dense = bool(dense_layers(module, dim))
    size = (
        (_MAX_BATCH_PARAMETERS // dim if dense else 1)
        if models_per_batch is None
        else models_per_batch
    ) // m
    size = min(size, MAX_BATCH_INPUTS // max(1, m * x[0].numel())) if dense else size
    if a == 1 or size < 2 or references is not None:
        froms = (
            [None] * a
            if interpolation is None
            else [Interpolation(own, interpolation.share) for own in interpolation.own]
        )
        each = zip(rows, x, [None] * a if references is None else references, froms, strict=True)
        return torch.stack(
            [
                logits(module, pool, row, one, models_per_batch, reference, way)
                for row, one, reference, way in each
            ]
        )
    module.eval()
    with torch.no_grad():
        at_once = batched_forward(module, dim)
        found = []
        starts = rows[:, 0] if interpolation is None else interpolation.own
        for some, own, seen in zip(
            *(torch.split(each, size) for each in (rows, starts, x)), strict=True
        ):
            way = (
                None
                if interpolation is None
                else Interpolation(own.repeat_interleave(m), interpolation.share)
            )
            models = pool.index_select(0, some.flatten().to(pool.device))
            parameters = unstack_views(module, _interpolate(pool, models, way))
            seen = features(seen).repeat_interleave(m, 0)
            parts = (seen,) if dense else torch.split(seen, SAMPLES_PER_PASS, 1)
            outputs = torch.cat([at_once(parameters, part) for part in parts], 1)
            found.append(outputs.view(-1, m, *outputs.shape[1:]))
        return torch.cat(found)


def confusion_matrices(
    module: nn.Module,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    test: Shard,
    num_classes: int,
    models_per_batch: int | None = None,
    references: Sequence[Reference] | None = None,
) -> Int[Tensor, "m C C"]:
    """How often each of m models takes a sample of class c (row) for class c' (column); `together` is that of `logits`,
    and each model has its own of `references`, where they are needed.

    A model that is not finite takes everything for class 0, as argmax does.
    """
    m = len(rows)
    counts = torch.zeros(m, num_classes * num_classes, dtype=torch.int64)
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
    return counts.scatter_add_(1, pairs, torch.ones_like(pairs)).view(m, num_classes, num_classes)


def mean_test_losses(
    module: nn.Module,
    models: Float[Tensor, "p d"],
    rows: Int[Tensor, " m"],
    test: Shard,
    loss: Loss,
    models_per_batch: int | None = None,
    references: Sequence[Reference] | None = None,
) -> Float[Tensor, " m"]:
    """The mean loss of each of m models on test samples; what is not a number counts as infinite. `together` and
    `references` are those of `confusion`."""

    def lost(outputs: Tensor, y: Tensor) -> Tensor:
        return per_sample_losses(
            loss, outputs, y.unsqueeze(0).expand(len(outputs), *y.shape), 2
        ).double()

    losses = _measure_on_test_set(module, models, rows, test, lost, models_per_batch, references)
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
    """What `measure` makes of the outputs [k, n, C] of models and of the targets [n], some test samples at a time."""
    alone = (
        [(rows, None)] if references is None else zip(torch.split(rows, 1), references, strict=True)
    )
    found = []
    for some, reference in alone:
        size = (
            SAMPLES_PER_PASS if reference is None else len(test)
        )  # what is estimated on a reference is, once
        parts = zip(torch.split(test.x, size), torch.split(test.y, size), strict=True)
        with torch.no_grad():
            each = [
                measure(logits(module, models, some, x, models_per_batch, reference), y).cpu()
                for x, y in parts
            ]
        found.append(torch.cat(each, 1))
    return torch.cat(found)
