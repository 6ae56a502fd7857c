"""Algorithm 1, LocalUpdate: tau epochs (or steps) of mini-batch SGD with momentum on one agent's own data.

theta <- theta - lambda2 * gamma * grad L_j(theta) (alg:FedCB2O), with the momentum of the paper's experiments. The
optimiser is fresh in every round: no momentum is carried over.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.sgd import sgd

from fedcb2o.data._dataset import Shard, features
from fedcb2o.errors import ConfigError
from fedcb2o.federated.losses import Loss, per_sample_losses
from fedcb2o.federated.optimisers import Optimiser, make_step, optimiser_name
from fedcb2o.nn import batch_norm
from fedcb2o.nn.parameters import bind_, is_bound

Precision = Literal["float32", "tf32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Training:
    """How an agent trains: `local_epochs` passes over its data, or `local_steps` mini-batches where that is given.

    `precision="bfloat16"` computes products in that type, on float32 parameters: about twice as fast on processors
    that have it, tens of times as slow on others, for which runs take float32. "tf32" lets CUDA devices round the
    factors of float32 products to 10 bits of mantissa. An `optimiser` takes the steps in place of SGD with momentum.
    `loss` is what they minimise, by default the cross-entropy. Where `singles` are refused, as by batch norms, a last
    batch of one sample joins the one before.
    Where samples are `apart`, what the network makes of one in training does not depend on those beside it.
    """

    gamma: float
    lambda2: float
    momentum: float
    batch_size: int
    local_epochs: int
    local_steps: int | None = None
    precision: Precision = "float32"
    optimiser: Optimiser | None = None
    loss: Loss | None = None
    accepts_single_sample: bool = True
    is_sample_independent: bool = False


def mini_batches(
    n: int, training: Training, draw: np.random.Generator
) -> list[Int[np.ndarray, " b"]]:
    """The sample numbers of each mini-batch of one LocalUpdate (alg:FedCB2O): every epoch anew, the last short."""
    return [
        chosen[0].numpy()
        for chosen in batched_mini_batches([n], training, [draw], torch.device("cpu"))
    ]


def batched_mini_batches(
    counts: Sequence[int],
    training: Training,
    draws: Sequence[np.random.Generator],
    device: torch.device,
) -> tuple[Int[Tensor, "a b"], ...]:
    """The same of some agents with so many samples each, of which each makes equally many batches; they move to the
    device at once.

    The last batch of an epoch is as wide as the widest of theirs: who has fewer samples repeats its last one.
    """
    n = max(counts)
    full, rest = divmod(n, training.batch_size)
    epoch = [training.batch_size] * full + [rest] * (rest > 0)
    if full and rest == 1 and not training.accepts_single_sample:
        epoch[-2:] = [training.batch_size + 1]
    steps = (
        training.local_epochs * len(epoch) if training.local_steps is None else training.local_steps
    )
    epochs = -(-steps // max(1, len(epoch)))
    drawn = [
        np.pad(draw.permutation(count), (0, n - count), "edge")
        if count < n
        else draw.permutation(n)
        for count, draw in zip(counts, draws, strict=True)
        for _ in range(epochs)
    ]
    widths = (epoch * epochs)[:steps]
    if not widths:
        return ()
    orders = torch.from_numpy(np.concatenate(drawn).reshape(len(draws), epochs * n)).to(device)
    return torch.split(orders[:, : sum(widths)], widths, dim=1)


@contextlib.contextmanager
def training_mode(
    module: nn.Module, training: Training, draw: np.random.Generator, device: str
) -> Iterator[None]:
    """Within it a module trains: it draws what it draws (dropout) from a generator of its own, and products on a CUDA
    device are rounded as `training.precision` says."""
    batch_norm.train_(module)
    with torch.random.fork_rng(devices=[]), allow_tf32(training.precision == "tf32", device):
        # The second of these tells every kind of device there could be, which takes longer than a small network's step.
        seed = torch.default_generator.manual_seed if device == "cpu" else torch.random.manual_seed
        seed(int(draw.integers(2**63)))
        yield


@contextlib.contextmanager
def allow_tf32(tf32: bool, device: str) -> Iterator[None]:
    """Within it, CUDA devices may round the factors of float32 products, or may not: by PyTorch's defaults they do so
    in convolutions. Other devices never do."""
    if device != "cuda":
        yield
        return
    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    key: str = "allow_tf32"
    value: bool | str = tf32
    if hasattr(torch.backends.cudnn, "conv"):  # PyTorch 2.9 and later
        backends[1], key, value = (
            torch.backends.cudnn.conv,
            "fp32_precision",
            ("ieee", "tf32")[tf32],
        )
    before = [getattr(backend, key) for backend in backends]
    try:
        for backend in backends:
            setattr(backend, key, value)
        yield
    finally:
        for backend, was in zip(backends, before, strict=True):
            setattr(backend, key, was)


def autocast(precision: Precision, device: str) -> contextlib.AbstractContextManager[Any]:
    """Within it the products of a network are in bfloat16, where the precision says so."""
    return (
        torch.autocast(device, torch.bfloat16)
        if precision == "bfloat16"
        else contextlib.nullcontext()
    )


def mean_loss(
    losses: Sequence[Float[Tensor, "*k"]], shape: tuple[int, ...] = ()
) -> Float[Tensor, "*k"]:
    """The mean over steps, in float64 on the CPU: losses that lie on a device move here once."""
    found = (
        torch.stack(list(losses)).cpu().double()
        if losses
        else torch.zeros(1, *shape, dtype=torch.float64)
    )
    return found.cumsum(0)[-1] / max(1, len(losses))


def local_update_(
    theta: Float[Tensor, " d"],
    module: nn.Module,
    shard: Shard,
    training: Training,
    draw: np.random.Generator,
) -> float:
    """Train `theta` in place on `shard` (alg:FedCB2O, LocalUpdate); the mean of the mini-batch losses.

    `module` gives the network; its parameters are bound to `theta`. Not finite where training diverged.
    """
    bind_(module, theta)
    parameters: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
    x = features(shard.x)
    steps = batched_mini_batches([len(shard)], training, [draw], theta.device)
    losses = []
    own = training.optimiser
    lr = training.lambda2 * training.gamma
    step = (
        _sgd(parameters, lr, training.momentum) if own is None else make_step(own, parameters, lr)
    )
    with training_mode(module, training, draw, theta.device.type):
        for (chosen,) in steps:
            with autocast(training.precision, theta.device.type):
                found = module(x[chosen])
                labels = shard.y[chosen]
                if training.loss is None:
                    loss = F.cross_entropy(found, labels)
                else:
                    loss = per_sample_losses(training.loss, found, labels, 1).mean()
            grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            # Fused SGD reads memory as it lies, and a convolution in channels-last has gradients that lie otherwise.
            gradients = [gradient.contiguous() for gradient in grads]
            step(gradients)
            losses.append(loss.detach())
    if own is not None and not is_bound(module, theta):
        raise ConfigError(
            f"the optimiser `{optimiser_name(own)}` puts new tensors in the place of parameters: let it write into those that "
            "it is given, by `p.add_()` or `p.copy_()`"
        )
    assert is_bound(module, theta), "training moved a parameter out of its row"
    return float(mean_loss(losses))


def _sgd(parameters: list[Tensor], lr: float, factor: float) -> Callable[[list[Tensor]], None]:
    """What takes a step of SGD with momentum by gradients."""
    momentum: list[Tensor | None] = [None] * len(parameters)

    def step(gradients: list[Tensor]) -> None:
        # The function behind torch.optim.SGD, whose class takes a second to import its compiler.
        with torch.no_grad():
            sgd(
                parameters,
                gradients,
                momentum,
                fused=True,
                weight_decay=0.0,
                momentum=factor,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )

    return step
