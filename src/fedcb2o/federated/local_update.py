"""Algorithm 1, LocalUpdate: tau epochs or steps of mini-batch SGD with momentum on an agent's data.

theta <- theta - lambda2 * gamma * grad L_j(theta) (alg:FedCB2O), with the momentum of the paper's
experiments. The optimiser is new in every round: no momentum is carried over.

>>> training = Training(gamma=0.1, lambda2=1.0, momentum=0.9, batch_size=4, local_epochs=2)
>>> [len(batch) for batch in mini_batches(10, training, np.random.default_rng(0))]
[4, 4, 2, 4, 4, 2]
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

from fedcb2o.data import Shard, features
from fedcb2o.errors import ConfigError
from fedcb2o.federated.losses import Loss, per_sample_losses
from fedcb2o.federated.optimisers import Optimiser, make_step, optimiser_name
from fedcb2o.nn import batch_norm
from fedcb2o.nn.parameters import bind_, is_bound

Precision = Literal["float32", "tf32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of LocalUpdate.

    Attributes:
        gamma: gamma, the step size.
        lambda2: lambda2, the drift along the gradient.
        momentum: Momentum of SGD, in [0, 1).
        batch_size: Samples in a mini-batch.
        local_epochs: tau, the number of passes over the data.
        local_steps: Number of mini-batches in place of epochs.
        precision: Type of the products. "bfloat16" is about twice as fast on processors that have
            it and much slower on others. "tf32" rounds the factors of float32 products on CUDA
            devices to 10 bits of mantissa.
        optimiser: Replaces SGD with momentum.
        loss: Loss to minimise; None for the cross-entropy.
        accepts_single_sample: Whether a mini-batch may have one sample, which batch norms reject; a
            last sample otherwise joins the batch before.
        is_sample_independent: Whether the network's output for a sample does not depend on the
            other samples of a training batch.
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
    """Draw the mini-batches of one LocalUpdate (alg:FedCB2O), shuffled anew in every epoch.

    Args:
        n: Number of samples.
        training: Settings.
        draw: Source of randomness.

    Returns:
        Indices of each mini-batch; the last of an epoch may be smaller.
    """
    batches = batched_mini_batches([n], training, [draw], torch.device("cpu"))
    return [batch[0].numpy() for batch in batches]


def batched_mini_batches(
    counts: Sequence[int],
    training: Training,
    draws: Sequence[np.random.Generator],
    device: torch.device,
) -> tuple[Int[Tensor, "a b"], ...]:
    """Draw the mini-batches of several agents with equally many batches.

    The last batch of an epoch is as wide as the widest among the agents. An agent with fewer
    samples repeats its last one.

    Args:
        counts: Number of samples of each agent.
        training: Settings.
        draws: Source of randomness of each agent.
        device: Device of the indices.

    Returns:
        Indices of each mini-batch, with an axis over the agents.
    """
    n = max(counts)
    num_full, rest = divmod(n, training.batch_size)
    epoch = [training.batch_size] * num_full + [rest] * (rest > 0)
    if num_full and rest == 1 and not training.accepts_single_sample:
        epoch[-2:] = [training.batch_size + 1]

    steps = training.local_steps
    if steps is None:
        steps = training.local_epochs * len(epoch)
    epochs = -(-steps // max(1, len(epoch)))
    orders = []
    for count, draw in zip(counts, draws, strict=True):
        for _ in range(epochs):
            order = draw.permutation(count)
            orders.append(np.pad(order, (0, n - count), "edge") if count < n else order)

    widths = (epoch * epochs)[:steps]
    if not widths:
        return ()
    stacked = np.concatenate(orders).reshape(len(draws), epochs * n)
    return torch.split(torch.from_numpy(stacked).to(device)[:, : sum(widths)], widths, dim=1)


@contextlib.contextmanager
def training_mode(
    module: nn.Module, training: Training, draw: np.random.Generator, device: str
) -> Iterator[None]:
    """Put a module in training mode, with its own seed (for dropout) and precision.

    Args:
        module: The network.
        training: Settings.
        draw: Source of the seed.
        device: Type of the device.

    Yields:
        Nothing; afterwards PyTorch's generator and its precision are as before.
    """
    batch_norm.train_(module)
    with torch.random.fork_rng(devices=[]), allow_tf32(training.precision == "tf32", device):
        # `torch.random.manual_seed` seeds every kind of device, which takes longer than a small
        # network's step.
        seed = torch.default_generator.manual_seed if device == "cpu" else torch.random.manual_seed
        seed(int(draw.integers(2**63)))
        yield


@contextlib.contextmanager
def allow_tf32(tf32: bool, device: str) -> Iterator[None]:
    """Set whether CUDA devices may round the factors of float32 products.

    By PyTorch's defaults they round them in convolutions. Other devices never do.

    Args:
        tf32: Whether they may.
        device: Type of the device.

    Yields:
        Nothing; afterwards the setting is as before.
    """
    if device != "cuda":
        yield
        return

    backends: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    key: str = "allow_tf32"
    value: bool | str = tf32
    if hasattr(torch.backends.cudnn, "conv"):  # PyTorch 2.9 and later
        backends[1] = torch.backends.cudnn.conv
        key = "fp32_precision"
        value = ("ieee", "tf32")[tf32]

    original = [getattr(backend, key) for backend in backends]
    try:
        for backend in backends:
            setattr(backend, key, value)
        yield
    finally:
        for backend, setting in zip(backends, original, strict=True):
            setattr(backend, key, setting)


def autocast(precision: Precision, device: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a network's products have the precision.

    Args:
        precision: Type of the products.
        device: Type of the device.

    Returns:
        Autocast to bfloat16, or a context that does nothing.
    """
    if precision == "bfloat16":
        return torch.autocast(device, torch.bfloat16)
    return contextlib.nullcontext()


def mean_loss(
    losses: Sequence[Float[Tensor, "*k"]], shape: tuple[int, ...] = ()
) -> Float[Tensor, "*k"]:
    """Compute the mean of the losses of all steps, in float64 on the CPU.

    Args:
        losses: Loss of each step.
        shape: Shape of a loss, for an update without steps.

    Returns:
        The mean; 0 without steps.
    """
    if not losses:
        return torch.zeros(*shape, dtype=torch.float64)
    stacked = torch.stack(list(losses)).cpu().double()
    return stacked.cumsum(0)[-1] / len(losses)


def local_update_(
    theta: Float[Tensor, " d"],
    module: nn.Module,
    shard: Shard,
    training: Training,
    draw: np.random.Generator,
) -> float:
    """Train a model in place (alg:FedCB2O, LocalUpdate).

    Args:
        theta: The model, to which the parameters of `module` are bound.
        module: The network.
        shard: Training samples.
        training: Settings.
        draw: Source of randomness.

    Returns:
        Mean of the mini-batch losses; not finite if training diverged.

    Raises:
        ConfigError: An optimiser replaced parameters in place of changing them.
    """
    bind_(module, theta)
    parameters: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
    lr = training.lambda2 * training.gamma
    step = _make_step(training, parameters, lr)
    x, device = features(shard.x), theta.device
    batches = batched_mini_batches([len(shard)], training, [draw], device)  # before the seed
    losses = []

    with training_mode(module, training, draw, device.type):
        for (batch,) in batches:
            with autocast(training.precision, device.type):
                outputs = module(x[batch])
                loss = _batch_loss(training.loss, outputs, shard.y[batch])
            gradients = torch.autograd.grad(
                loss, parameters, allow_unused=True, materialize_grads=True
            )
            # Fused SGD reads memory in order, and the gradients of a channels-last convolution are
            # in another order.
            step([gradient.contiguous() for gradient in gradients])
            losses.append(loss.detach())

    if training.optimiser is not None and not is_bound(module, theta):
        raise ConfigError(
            f"the optimiser `{optimiser_name(training.optimiser)}` puts new tensors in the place "
            "of parameters: let it write into those that it is given, by `p.add_()` or `p.copy_()`"
        )
    assert is_bound(module, theta), "training moved a parameter out of its row"
    return float(mean_loss(losses))


def _batch_loss(loss: Loss | None, outputs: Tensor, targets: Tensor) -> Tensor:
    if loss is None:
        return F.cross_entropy(outputs, targets)
    return per_sample_losses(loss, outputs, targets, 1).mean()


def _make_step(
    training: Training, parameters: list[Tensor], lr: float
) -> Callable[[list[Tensor]], None]:
    """Return the step of the optimiser, a function of the gradients."""
    if training.optimiser is not None:
        return make_step(training.optimiser, parameters, lr)
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
                momentum=training.momentum,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )

    return step
