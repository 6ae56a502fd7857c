"""Algorithm 1, LocalUpdate: tau epochs or steps of mini-batch SGD with momentum on an agent's data.

theta <- theta - lambda2 * gamma * grad L_j(theta) (alg:FedCB2O), with the momentum of the paper's
experiments. The optimiser is new in every round: no momentum is carried over.

`train_` updates the models of a group. `local_update_` trains one agent's model, and
`batched_local_update_` those of several agents in one program. On a CPU the program pays for small
dense networks, whose calls cost more than their arithmetic; on other devices for any network. The
agents of a batch have equally many mini-batches. With `training.privacy` every agent trains alone,
with the gradients of `privacy`. In training, bits may depend on the other agents of a batch, so
that batches are planned once, from all agents alone.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.sgd import sgd

from fedcb2o import plugins
from fedcb2o.data import Shard, features
from fedcb2o.errors import ConfigError
from fedcb2o.federated.agent_group import AgentGroup, SampleBatch
from fedcb2o.federated.guards.acceptance import max_abs
from fedcb2o.federated.inference import (
    batched_forward,
    cross_entropies,
    dense_layers,
    per_sample_losses,
)
from fedcb2o.federated.optimisers import make_step
from fedcb2o.federated.privacy import noise_multiplier, poisson_batches, private_gradients
from fedcb2o.federated.ragged import Indices
from fedcb2o.federated.run_spec import RunSpec, Training
from fedcb2o.federated.sample_weights import relative_weights
from fedcb2o.federated.sections import Precision
from fedcb2o.nn import batch_norm
from fedcb2o.nn.mixed_precision import autocast_positions, has_triton
from fedcb2o.nn.parameters import (
    bind_,
    contiguous_leaves,
    copy_rows_,
    gather_rows,
    is_bound,
    is_contiguous_range,
    row_checksums,
    trainable_stack,
    unstack_views,
)
from fedcb2o.rng import agent_streams, permutations, stream

MAX_BATCH_PARAMETERS = 2**19
"""Parameters in a batch of small networks: with gradients and momentum 6 MiB."""

_MAX_BATCH_AGENTS = 512
_SMALL_BATCH_AGENTS = 64
_TRIAL = 0.25  # of the rounds
_HELD_OUT = 0.3  # of an agent's samples, in the trial
_NUM_BATCHES = 16  # of a large run, so that every worker gets several


TrainResult = tuple[Float[np.ndarray, " a"], Float[np.ndarray, " a"], bool]
"""Mean training loss of each agent; largest absolute value of its model; False if none changed."""


def train_(group: AgentGroup, members: Indices, n: int) -> TrainResult:
    """Train a batch of agents in place (alg:FedCB2O, line 3); tell if the first round did."""
    spec, models, layout = group.spec, group.models, group.layout
    rows = layout.own[members].tolist()

    # 1. Keep the models before the round where a rule or a guard reads them.
    if layout.previous is not None:
        copy_rows_(models, layout.previous[members].tolist(), rows)

    # 2. Train.
    before = None
    if n == 0:
        # A first round that changes no model is reported: nothing would be trained.
        before = row_checksums(gather_rows(models, rows))
    x, y = training_samples(group, members, n)
    counts = group.data.train.sizes[members].tolist()
    seed = spec.seed if spec.training_seed is None else spec.training_seed
    draws = agent_streams(seed, "batches", n, agents=group.agents[members].tolist())
    training = spec.training.in_round(n)
    with plugins.attribute_errors("model", spec.model):
        # An optimiser may use a model as a whole, so that it gets one model at a time.
        frozen = spec.algorithm.frozen_factor(n)
        is_separate = any(x is not None for x in (training.optimiser, training.privacy, frozen))
        if len(members) == 1 or is_separate:
            losses = []
            for k, (row, count, draw) in enumerate(zip(rows, counts, draws, strict=True)):
                shard = Shard(x[k, :count], y[k, :count])
                noise = noise_multiplier(training, count, spec.rounds)
                loss = local_update_(models[row], spec.module, shard, training, draw, noise, frozen)
                losses.append(loss)
        else:
            thetas = gather_rows(models, rows)
            losses = batched_local_update_(thetas, spec.module, x, y, training, draws, counts)
            if not is_contiguous_range(rows):
                torch._foreach_copy_([models[row] for row in rows], thetas.unbind())

    server = spec.algorithm.server
    if server is not None:
        x, memory = models[spec.num_agents], models[spec.num_agents + 2 :]
        for k, row in zip(members.tolist(), rows, strict=True):
            server.add_momentum_(models[row], memory[k], x, training.lambda2 * training.gamma)

    has_trained = before is None or not row_checksums(gather_rows(models, rows)).equal(before)
    return np.array(losses), max_abs(models, rows), has_trained


def trial_rounds(spec: RunSpec) -> int:
    """Return the number of rounds in which the guard `exit_test` holds samples out."""
    return 0 if spec.algorithm.guards.exit_test is False else max(2, round(_TRIAL * spec.rounds))


def held_out(spec: RunSpec, agent: int, count: int) -> tuple[Indices, Indices]:
    """Return the positions of held-out samples, and of those that replace them in training."""
    draw = stream(spec.seed, "trial", agent)
    held, others = np.split(draw.permutation(count), [int(_HELD_OUT * count)])
    return np.sort(held), others[draw.integers(max(1, len(others)), size=len(held))]


def training_samples(group: AgentGroup, members: Indices, n: int) -> SampleBatch:
    """Return training data in round n, where others replace held-out samples."""
    x, y = group.data.training_data(members, n)
    if n < trial_rounds(group.spec):
        sizes = group.data.train.sizes[members].tolist()
        for k, (agent, count) in enumerate(zip(group.agents[members].tolist(), sizes, strict=True)):
            held, others = held_out(group.spec, agent, count)
            x[k, held], y[k, held] = x[k, others], y[k, others]
    return x, y


def train_alone_(group: AgentGroup, k: int, n: int, theta: Float[Tensor, " d"]) -> None:
    """Train a model that no peer receives, and that needs no noise, on the data of round n."""
    spec = group.spec
    training = spec.training.model_copy(update={"privacy": None}).in_round(n)
    x, y = training_samples(group, np.array([k]), n)
    draw = stream(spec.seed, "batches", n, int(group.agents[k]))
    with plugins.attribute_errors("model", spec.model):
        local_update_(theta, spec.module, Shard(x[0], y[0]), training, draw)


def local_update_(
    theta: Float[Tensor, " d"],
    module: nn.Module,
    shard: Shard,
    training: Training,
    draw: np.random.Generator,
    noise: float | None = None,
    frozen: str | None = None,
) -> float:
    """Train a model in place (alg:FedCB2O, LocalUpdate); return the mean mini-batch loss.

    It is not finite if training diverged. `noise` is `privacy.noise_multiplier`; None without
    privacy. Parameters with `frozen` in their names are not trained.
    """
    bind_(module, theta)
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    is_trained = [frozen is None or frozen not in name for name, _ in named]
    parameters: list[Tensor] = [p for _, p in itertools.compress(named, is_trained)]
    lr = training.lambda2 * training.gamma
    step = _make_step(training, parameters, lr)
    x, device = features(shard.x), theta.device
    batches: Iterable[Any]
    if noise is None:
        batches = batched_mini_batches([len(shard)], training, [draw], device)  # before the seed
    else:
        batches = poisson_batches(len(shard), training, draw)
    losses = []
    weights = None
    if training.weights is not None:
        weights = relative_weights(training.weights, shard.x, shard.y)

    with training_mode(module, training, draw, device.type):
        for (batch,) in batches:
            if noise is not None:
                with autocast(training.precision, device.type):
                    loss, noisy = private_gradients(module, shard, batch, training, noise, draw)
                step(list(itertools.compress(noisy, is_trained)))
                losses.append(loss)
                continue
            with autocast(training.precision, device.type):
                outputs = module(x[batch])
                if training.loss is None and weights is None:
                    loss = F.cross_entropy(outputs, shard.y[batch])
                else:
                    per_sample = per_sample_losses(training.loss, outputs, shard.y[batch], 1)
                    if weights is not None:
                        per_sample = per_sample * weights[batch]
                    loss = per_sample.mean()
            # PyTorch's optimisers skip a parameter without a gradient: it does not decay.
            gradients = torch.autograd.grad(
                loss, parameters, allow_unused=True, materialize_grads=training.optimiser is None
            )
            step([None if gradient is None else _dense(gradient) for gradient in gradients])
            losses.append(loss.detach())

    if training.optimiser is not None and not is_bound(module, theta):
        name = plugins.function_name(training.optimiser)
        raise ConfigError(
            f"the optimiser `{name}` puts new tensors in the place "
            "of parameters: let it write into those that it is given, by `p.add_()` or `p.copy_()`"
        )
    assert is_bound(module, theta), "training moved a parameter out of its row"
    return float(_mean_loss(losses))


def _dense(gradient: Tensor) -> Tensor:
    """Return a dense gradient whose numbers are in order, as fused SGD reads them."""
    return gradient.to_dense() if gradient.is_sparse else gradient.contiguous()


def _make_step(
    training: Training, parameters: list[Tensor], lr: float
) -> Callable[[list[Any]], None]:
    """Return the step of the optimiser, a function of the gradients."""
    if training.optimiser is not None:
        return make_step(training.optimiser, parameters, lr)
    momentum: list[Tensor | None] = [None] * len(parameters)

    def step(gradients: list[Any]) -> None:
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


def batched_local_update_(
    thetas: Float[Tensor, "a d"],
    module: nn.Module,
    x: Shaped[Tensor, "a n *features"],
    y: Shaped[Tensor, "a n *target"],
    training: Training,
    draws: Sequence[np.random.Generator],
    counts: Sequence[int] | None = None,
) -> list[float]:
    """Train several models in place (alg:FedCB2O, LocalUpdate); return their mean losses.

    Each has `counts` of the n samples. A network with dropout draws other numbers than one model at
    a time does.
    """
    device = thetas.device
    tensors = trainable_stack(module, thetas)
    is_copied = device.type != "cpu"
    if is_copied:
        # GPUs read contiguous copies several times faster than views of rows.
        tensors = contiguous_leaves(tensors)
    step, inputs = _make_batched_step(module, tensors, training, device)
    leaves = [tensor for tensor in inputs if tensor.requires_grad]

    counts = counts or [x.shape[1]] * len(x)
    weights = None
    if training.weights is not None:
        weights = y.new_zeros(y.shape[:2], dtype=torch.float32)
        for k, count in enumerate(counts):
            weights[k, :count] = relative_weights(training.weights, x[k, :count], y[k, :count])
    x = features(x)
    agents = torch.arange(len(x), device=device).unsqueeze(1)
    forward = batched_forward(module, dense_layers(module, thetas.shape[1]))
    batches = batched_mini_batches(counts, training, draws, device)  # before the seed is drawn
    losses = []

    with training_mode(module, training, draws[0], device.type):
        for batch in batches:
            with autocast(training.precision, device.type):
                outputs = forward(inputs, x[agents, batch])
                if training.loss is None:
                    per_sample = cross_entropies(outputs, y[agents, batch])
                else:
                    per_sample = per_sample_losses(training.loss, outputs, y[agents, batch], 2)
                if weights is not None:
                    per_sample = per_sample * weights[agents, batch]
            if min(counts) == max(counts):
                loss = per_sample.mean(1)
            else:  # without the repeated samples that fill up a batch
                is_repeated = batch.diff(prepend=batch.new_full((len(batch), 1), -1)) == 0
                loss = per_sample.masked_fill(is_repeated, 0.0).sum(1) / (~is_repeated).sum(1)
            gradients = torch.autograd.grad(
                loss.sum(), leaves, allow_unused=True, materialize_grads=True
            )
            with torch.no_grad():
                step(gradients)
            losses.append(loss.detach())

    # `tensors` also holds local statistics, which are not kept.
    for view, tensor in zip(unstack_views(module, thetas), tensors, strict=False):
        if is_copied or not tensor.requires_grad:
            view.copy_(tensor.detach())
    return _mean_loss(losses, (len(thetas),)).tolist()


def _make_batched_step(
    module: nn.Module, tensors: Sequence[Tensor], training: Training, device: torch.device
) -> tuple[Callable[[tuple[Tensor, ...]], None], list[Tensor]]:
    """Return the optimiser's step, and tensors to read: copies for bfloat16 on NVIDIA GPUs."""
    lr = training.lambda2 * training.gamma
    parameters = [tensor for tensor in tensors if tensor.requires_grad]
    momentum: list[Tensor] = []

    def foreach_step(gradients: tuple[Tensor, ...]) -> None:
        if momentum:
            torch._foreach_mul_(momentum, training.momentum)
            torch._foreach_add_(momentum, gradients)
        else:
            momentum.extend(gradient.clone() for gradient in gradients)
        torch._foreach_add_(parameters, momentum, alpha=-lr)

    if training.precision != "bfloat16" or not has_triton(device):
        return foreach_step, list(tensors)

    from fedcb2o.nn.fused_momentum import momentum_step_

    # Autocast would write copies in bfloat16, and their gradients in float32, in every step.
    inputs = list(tensors)
    for i in autocast_positions(module):
        inputs[i] = tensors[i].detach().bfloat16().requires_grad_(tensors[i].requires_grad)
    copies = [
        None if low is tensor else low
        for tensor, low in zip(tensors, inputs, strict=True)
        if tensor.requires_grad
    ]
    momentum.extend(torch.zeros_like(parameter) for parameter in parameters)

    def fused_step(gradients: tuple[Tensor, ...]) -> None:
        for theta, m, g, low in zip(parameters, momentum, gradients, copies, strict=True):
            momentum_step_(theta, m, g, low, lr, training.momentum)

    return fused_step, inputs


def _mean_loss(
    losses: Sequence[Float[Tensor, "*a"]], shape: tuple[int, ...] = ()
) -> Float[Tensor, "*a"]:
    """Compute the mean over all steps in float64 on the CPU; 0 without steps."""
    if not losses:
        return torch.zeros(*shape, dtype=torch.float64)
    # One transfer for all steps.
    stacked = torch.stack(list(losses)).cpu().double()
    return stacked.cumsum(0)[-1] / len(losses)


def plan_training_batches(spec: RunSpec, num_samples: Sequence[int]) -> list[list[int]]:
    """Plan which agents of a run train together, as lists of indices."""
    training, models_per_batch = spec.training, spec.kernels.models_per_batch
    # Repeated samples may fill up a mini-batch only where they do not change the others.
    may_differ = models_per_batch is not None and training.is_sample_independent
    batch_size = training.batch_size if may_differ else 1
    return training_batches(spec.module, spec.dim, num_samples, models_per_batch, batch_size)


def training_batches(
    module: nn.Module,
    dim: int,
    num_samples: Sequence[int],
    models_per_batch: int | None = None,
    batch_size: int = 1,
) -> list[list[int]]:
    """Group agents that have equally many mini-batches, as ascending indices.

    By default small dense networks train together as far as a core's cache holds them, other
    networks alone. With `batch_size` 1, the agents of a batch have equally many samples.
    """
    size = models_per_batch or 1
    if not models_per_batch and dense_layers(module, dim):
        share = max(_SMALL_BATCH_AGENTS, len(num_samples) // _NUM_BATCHES)
        size = max(1, min(share, _MAX_BATCH_AGENTS, MAX_BATCH_PARAMETERS // dim))

    equal: dict[int, list[int]] = {}
    for j, count in enumerate(num_samples):
        # Agents of one program take their steps together, so that they need equally many.
        equal.setdefault(-(-count // batch_size), []).append(j)

    batches = []
    for agents in equal.values():
        # Agents of similar numbers of samples repeat few of them.
        agents.sort(key=lambda j: num_samples[j])
        batches += [sorted(agents[i : i + size]) for i in range(0, len(agents), size)]
    return batches


def batched_mini_batches(
    counts: Sequence[int],
    training: Training,
    draws: Sequence[np.random.Generator],
    device: torch.device,
) -> tuple[Int[Tensor, "a b"], ...]:
    """Draw the mini-batches of several agents (alg:FedCB2O), shuffled anew in every epoch."""
    n = max(counts)
    num_full, rest = divmod(n, training.batch_size)
    epoch = [training.batch_size] * num_full + [rest] * (rest > 0)
    if num_full and rest == 1 and not training.accepts_single_sample:
        # Batch norms reject a mini-batch of a single sample: it joins the one before.
        epoch[-2:] = [training.batch_size + 1]

    steps = training.local_steps
    if steps is None:
        steps = training.local_epochs * len(epoch)
    epochs = -(-steps // max(1, len(epoch)))
    widths = (epoch * epochs)[:steps]
    if not widths:
        return ()
    if min(counts) == n:
        orders = permutations(draws, n, epochs)
    else:
        # An agent with fewer samples repeats its last one, for tensors of one width.
        padded = [
            np.pad(draw.permutation(count), (0, n - count), "edge")
            for count, draw in zip(counts, draws, strict=True)
            for _ in range(epochs)
        ]
        orders = np.concatenate(padded).reshape(len(draws), epochs * n)
    return torch.split(torch.from_numpy(orders).to(device)[:, : sum(widths)], widths, dim=1)


@contextlib.contextmanager
def training_mode(
    module: nn.Module, training: Training, draw: np.random.Generator, device: str
) -> Iterator[None]:
    """Put a module in training mode within a context, with its own seed and precision."""
    batch_norm.train_(module)
    with torch.random.fork_rng(devices=[]), allow_tf32(training.precision == "tf32", device):
        # `torch.random.manual_seed` seeds every kind of device, which takes longer than a small
        # network's step.
        seed = torch.default_generator.manual_seed if device == "cpu" else torch.random.manual_seed
        seed(int(draw.integers(2**63)))
        yield


@contextlib.contextmanager
def allow_tf32(tf32: bool, device: str) -> Iterator[None]:
    """Set within a context whether CUDA may round the factors of float32 products."""
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
    """Return a context in which a network's products have the precision."""
    if precision == "bfloat16":
        return torch.autocast(device, torch.bfloat16)
    return contextlib.nullcontext()
