"""Checks of users' functions: one door, and one table of what is checked, when and why.

When a configuration is loaded, `Component.resolve` checks the name, import and parameters of each
function. Every call turns a failure into an error with the function's name and line
(`wrap_user_function`). The other checks are in the table. Those of the start tell a fault before
the first training; those of a round are where the function is called.

| part | when | check | reason |
|---|---|---|---|
| data set | start | `datasets.load_dataset` | samples, labels and owners belong together |
| cluster transform | each use | `changed_samples.changed_shard` | samples stay of one kind |
| graph | start | `plugin_outputs.validated_graph` | neighbours are agents |
| model | start | `check_model` | agents exchange parameters alone |
| loss | start | `check_loss` | mixed samples or no slope would train something else |
| loss | each batch | `inference.per_sample_losses` | one number for each sample |
| metric | start | `check_metrics` | it is first computed after a training |
| trigger | start | `check_trigger` | it is first applied after a training |
| optimiser | start | `check_optimiser` | a step without effect would look like a run |
| optimiser | each round | `optimisers.make_optimiser` | it holds all parameters |
| attack on data | each round | `plugin_outputs.validated_poison` | samples stay of one kind |
| attack on models | each round | `plugin_outputs.validated_queries` | losses are of models |
| attack on models | each round | `plugin_outputs.validated_crafted_models` | it fills a row |
| selection | each round | `plugin_outputs.validated_selection` | the budget bounds traffic |
| criterion | each round | `plugin_outputs.validated_criterion` | not finite means no weight |
| transform, trigger | each use | `plugin_outputs.apply_sample_transform` | pixels keep a scale |
| rule | each round | `plugin_outputs.validated_weights` | the new model is a mean |
| robust rule | each round | `plugin_outputs.validated_row_weights` | the new model is a mean |
| rule by coordinates | each block | `plugin_outputs.validated_reduction` | numbers stay finite |
| pre-step | each round | `plugin_outputs.validated_mixing` | mixed models are means |
| rule with memory | each round | `plugin_outputs.validated_state` | a checkpoint holds tensors |
| metric | each evaluation | `plugin_outputs.metric_value` | records hold numbers |
"""

import inspect
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from fedcb2o.data import Shard, ValueRange, features
from fedcb2o.errors import ConfigError
from fedcb2o.federated.inference import per_sample_losses
from fedcb2o.federated.losses import Loss, is_cross_entropy, predicts_labels
from fedcb2o.federated.optimisers import Optimiser, make_optimiser
from fedcb2o.federated.plugin_outputs import Metric, apply_sample_transform, metric_value
from fedcb2o.federated.types import SampleTransform
from fedcb2o.nn import network_checks
from fedcb2o.nn.comparison import agree, equal
from fedcb2o.plugins import attribute_errors, display_name, function_name

_LOG = logging.getLogger(__name__)

_OUTPUT_SCALES = (1.0, 10.0, 100.0)  # of outputs, on all of which a loss without slope has none

_SEVERAL = 8  # samples of a check on outputs

_MAX_CANDIDATES = 1024  # samples among which a different one is searched


def different_samples(shard: Shard) -> list[int]:
    """Return 0 and the index of another sample, if possible with another target."""
    is_other = shard.y.ne(shard.y[0]).reshape(len(shard), -1).any(1)
    candidates = is_other.nonzero().flatten()[:_MAX_CANDIDATES]
    if not len(candidates):
        candidates = torch.arange(len(shard))[:_MAX_CANDIDATES]
    differs = shard.x[candidates].ne(shard.x[0]).reshape(len(candidates), -1).any(1)
    return [0, int(candidates[differs.int().argmax()])]


def check_model(
    name: str,
    networks: Sequence[nn.Module],
    samples: Shard,
    seed: int,
    *,
    num_classes: int,
    loss: Loss | None,
    layout: str | None = None,
    random_evaluation: bool = False,
) -> None:
    """Check on two samples that a network and a loss are functions of one sample.

    `networks` has, for a user's, a second one that was made in the same way. A network that draws
    random numbers in evaluation is seeded, with a warning unless `random_evaluation` is set.
    """
    # Two equal samples would hide a network that mixes them.
    rows = different_samples(samples)
    outputs, kind = network_checks.check_networks(
        name,
        networks,
        features(samples.x[rows].clone()),
        features(samples.x[:_SEVERAL].clone()),
        seed,
        num_outputs=num_classes if predicts_labels(loss) else 1,
        layout=layout,
        random_evaluation=random_evaluation,
    )
    if kind:
        _warn_of_bounded_outputs(name, kind, loss, num_classes)
    if loss is not None:
        loss_name = function_name(loss)
        check_loss(loss_name, loss, outputs, samples.y[rows].clone())
        if num_classes > 1 and predicts_labels(loss):
            _warn_of_negative_losses(loss_name, loss, outputs)


def _warn_of_bounded_outputs(name: str, kind: str, loss: Loss | None, num_classes: int) -> None:
    """Warn where a cross-entropy takes the softmax of outputs that are probabilities."""
    if not _is_cross_entropy(loss, num_classes):
        return
    is_softmax = kind == "softmax"
    shown = "the cross-entropy" if loss is None else f"the loss `{function_name(loss)}`"
    least = math.log1p((num_classes - 1) / math.e)
    warnings.warn(
        f"the model `{name}` returns {'probabilities' if is_softmax else 'numbers from 0 to 1'}, of"
        f" which {shown} takes the softmax itself: no loss can be below that of outputs 0 and 1"
        f" ({least:.2f} in nats without weights and smoothing), and training is slow. Leave out the"
        f" {'Softmax' if is_softmax else 'Sigmoid or the like'} at its end (LogSoftmax is right)",
        stacklevel=3,
    )


def _warn_of_negative_losses(name: str, loss: Loss, outputs: Float[Tensor, "n C"]) -> None:
    """Warn where a loss of a class is below 0, as that of scores in place of log-probabilities."""
    labels = range(min(outputs.shape[1], _SEVERAL))
    targets = [torch.full((len(outputs),), label) for label in labels]
    losses = torch.cat([per_sample_losses(loss, outputs, target, 1) for target in targets])
    if losses.min() < 0:
        warnings.warn(
            f"the loss `{name}` of a class is {float(losses.min()):.4g}, below 0: a loss such as"
            " nll_loss reads log-probabilities (LogSoftmax), and has no least value for other"
            " outputs, so that losses of models do not compare",
            stacklevel=3,
        )


def _is_cross_entropy(loss: Loss | None, num_classes: int) -> bool:
    """Return whether a loss is the cross-entropy, up to a factor for each class."""
    if is_cross_entropy(loss):
        return True
    draw = torch.Generator().manual_seed(0)
    # Two classes and two draws: a factor for each class leaves the ratios equal.
    targets = torch.tensor([0, 1])
    ratios = []
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            outputs = torch.randn(2, num_classes, generator=draw)
            try:
                losses = per_sample_losses(loss, outputs.clone(), targets.clone(), 1)
            except Exception:  # it reads other outputs or targets; `check_loss` tells a fault
                return False
            ratios.append(losses / per_sample_losses(None, outputs, targets, 1))
    return agree(*ratios)


def check_loss(
    name: str, loss: Loss, outputs: Float[Tensor, "2 *k"], targets: Shaped[Tensor, "2 *target"]
) -> None:
    """Check that a loss is a differentiable function of one output and its target.

    The outputs are for two samples with different targets. A loss of a sample that depends on other
    samples gives a UserWarning.
    """
    original = targets.clone()
    # The slope is asked of the outputs alone: the network has been checked before.
    leaf = outputs.detach().clone().requires_grad_()
    # Twice together and once apart, to find random numbers, state and mixed samples.
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            together = per_sample_losses(loss, leaf.clone(), targets, 1)
        except ConfigError:
            raise
        except (RuntimeError, IndexError, ValueError) as error:
            raise ConfigError(
                f"the loss `{name}` cannot compare outputs of shape {tuple(outputs.shape)} and type"
                f" {outputs.dtype} with targets of shape {tuple(targets.shape)} and type"
                f" {targets.dtype}: {error}"
            ) from error
        again = per_sample_losses(loss, leaf.clone(), targets, 1)
        rows = range(len(targets))
        alone = torch.cat(
            [per_sample_losses(loss, leaf[[i]], targets[[i]], 1) for i in rows]
        ).detach()

    if not equal(targets, original):
        raise ConfigError(f"the loss `{name}` writes into the targets: let it compute new tensors")
    if together.isnan().any():
        raise ConfigError(
            f"the loss `{name}` is NaN for outputs {outputs.flatten().tolist()[:4]} and targets"
            f" {targets.flatten().tolist()[:4]}: let it be a number for any outputs"
        )
    if not agree(together, again):
        raise ConfigError(
            f"the loss `{name}` draws random numbers or keeps state: two calls differ. Let it be a"
            " function of outputs and targets"
        )
    if not agree(together, alone):
        warnings.warn(
            f"the loss `{name}` of a sample depends on other samples, so that training and"
            f" validation depend on the batch: two samples have the losses {_shown(together)}"
            f" together and {_shown(alone)} one by one. Compare equal shapes, such as"
            f" outputs.squeeze(1) (outputs are {tuple(outputs.shape)}, targets"
            f" {tuple(targets.shape)}), and take no mean over samples",
            stacklevel=2,
        )
    _check_slope(name, loss, _slope(together, leaf), outputs, targets)


def check_optimiser(optimiser: Optimiser, module: nn.Module, lr: float) -> None:
    """Refuse an optimiser whose step changes no parameter of (a copy of) a network."""
    named = {key: p.detach() for key, p in module.named_parameters() if p.requires_grad}
    # Copies, so that a check trains no model.
    trial = [p.clone().requires_grad_() for p in named.values()]
    instance = make_optimiser(optimiser, trial, lr)
    name = function_name(optimiser)
    kind = f"the optimiser `{name}` returned a {type(instance).__name__}"
    needed = _required_arguments(instance.step)
    if needed:
        raise ConfigError(
            f"{kind}, whose step needs the argument `{needed[0]}`: return a torch.optim.Optimizer"
            " whose step needs no argument, such as SGD or Adam (not LBFGS, which needs a closure)"
        )

    # No number is 0, so that each parameter should move.
    for p in trial:
        p.grad = torch.linspace(0.5, 1.5, p.numel()).view_as(p)
    with attribute_errors("optimiser", name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of schedulers, which are refused below
        instance.step()
    if any(not torch.equal(p, q) for p, q in zip(trial, named.values(), strict=True)):
        return
    # A rate of 0 may be the start of a schedule, and no fault.
    groups = getattr(instance, "param_groups", None)
    if groups and all(group.get("lr") == 0 for group in groups):
        _LOG.warning("the optimiser `%s` has learning rate 0: training changes no model.", name)
        return
    raise ConfigError(
        f"{kind}, whose step changes no parameter: return a torch.optim.Optimizer over"
        " `parameters` (not a learning-rate scheduler)"
    )


def check_metrics(metrics: Mapping[str, Metric], module: nn.Module, samples: Shard) -> None:
    """Compute metrics of a network's outputs for some samples; a failure is a ConfigError."""
    if not metrics:
        return
    some = Shard(samples.x[:_SEVERAL], samples.y[:_SEVERAL])
    with torch.no_grad():
        outputs = module.eval()(features(some.x))
    for metric in metrics.values():
        metric_value(metric, outputs, some.y)


def check_trigger(trigger: SampleTransform | None, samples: Shard, value_range: ValueRange) -> None:
    """Check on the first sample that samples can bear the trigger of a backdoor."""
    if trigger is not None:
        first = Shard(samples.x[:1], samples.y[:1])
        apply_sample_transform(display_name("trigger", trigger), trigger, first, value_range)


def _slope(losses: Tensor, outputs: Tensor) -> Tensor | None:
    """Return the gradient of losses with respect to outputs; None without one."""
    if not losses.requires_grad:
        return None
    with torch.enable_grad():
        total = losses.sum()
    return torch.autograd.grad(total, outputs, allow_unused=True)[0]


def _check_slope(
    name: str, loss: Loss, slope: Tensor | None, outputs: Tensor, targets: Tensor
) -> None:
    """Refuse a loss without a gradient, or whose gradient is 0 for any outputs."""
    cure = "take out `argmax`, `round`, comparisons, `detach()` and `torch.no_grad()`"
    if slope is None:
        raise ConfigError(f"the loss `{name}` has no gradient, so that nothing trains: {cure}")
    if slope.any():
        return

    # The gradient may be 0 at these outputs alone: others are tried, of several scales.
    draw = torch.Generator().manual_seed(0)
    for scale in _OUTPUT_SCALES:
        noise = torch.randn(outputs.shape, generator=draw)
        leaf = (outputs.detach() + scale * noise).requires_grad_()
        try:
            with torch.enable_grad():
                other = _slope(per_sample_losses(loss, leaf.clone(), targets, 1), leaf)
        except Exception:  # outputs may have to be probabilities
            return
        if other is not None and other.any():
            return
    raise ConfigError(f"the loss `{name}` has gradient 0, so that nothing trains: {cure}")


def _shown(losses: Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in losses.tolist())


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of compiled functions
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]
