"""LocalUpdate of several agents in one batched program (alg:FedCB2O).

On a CPU this pays for small dense networks, whose calls cost more than their arithmetic; on other
devices for any network. The agents of a batch have equally many mini-batches. Bits may depend on
the other agents of a batch, so that batches are planned once, from all agents alone.

>>> network = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
>>> training_batches(network, 10, [8, 5, 8])
[[0, 2], [1]]
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from fedcb2o import plugins
from fedcb2o.data import Shard, features
from fedcb2o.federated.admission import max_abs
from fedcb2o.federated.agent_data import SampleBatch
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.inference import batched_forward, dense_layers
from fedcb2o.federated.local_update import (
    Training,
    autocast,
    batched_mini_batches,
    local_update_,
    mean_loss,
    training_mode,
)
from fedcb2o.federated.losses import cross_entropy, per_sample_losses
from fedcb2o.federated.ragged import Indices
from fedcb2o.federated.run_spec import RunSpec
from fedcb2o.nn.parameters import (
    contiguous_leaves,
    gather_rows,
    is_contiguous_range,
    trainable_stack,
    unstack_views,
)
from fedcb2o.rng import agent_streams

MAX_BATCH_PARAMETERS = 2**19
"""Parameters in a batch of small networks: with gradients and momentum 6 MiB."""

_MAX_BATCH_AGENTS = 64  # so that every worker gets a batch


def plan_training_batches(spec: RunSpec, num_samples: Sequence[int]) -> list[list[int]]:
    """Plan which agents of a run train together.

    Args:
        spec: Run specification.
        num_samples: Training samples of each agent.

    Returns:
        Indices of the agents of each batch.
    """
    training, models_per_batch = spec.training, spec.kernels.models_per_batch
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
    """Group agents that have equally many mini-batches.

    Args:
        module: The network.
        dim: Length d of a model.
        num_samples: Training samples of each agent.
        models_per_batch: Largest number of agents that train together. By default small dense
            networks train together as far as a core's cache holds them, other networks alone.
        batch_size: Samples in a mini-batch; 1 for agents with equally many samples.

    Returns:
        Ascending indices of the agents of each batch; agents with similar numbers of samples are
        together.
    """
    size = models_per_batch or 1
    if not models_per_batch and dense_layers(module, dim):
        size = max(1, min(_MAX_BATCH_AGENTS, MAX_BATCH_PARAMETERS // dim))

    equal: dict[int, list[int]] = {}
    for j, count in enumerate(num_samples):
        equal.setdefault(-(-count // batch_size), []).append(j)

    batches = []
    for agents in equal.values():
        agents.sort(key=lambda j: num_samples[j])
        batches += [sorted(agents[i : i + size]) for i in range(0, len(agents), size)]
    return batches


def train_(
    group: AgentGroup, members: Indices, n: int
) -> tuple[Float[np.ndarray, " a"], Float[np.ndarray, " a"]]:
    """Train the models of a batch of agents in place (alg:FedCB2O, line 3).

    The model before the round is kept where an attacker crafts or a rule uses it.

    Args:
        group: Group of the agents.
        members: Indices of the agents of a batch.
        n: Round.

    Returns:
        Mean training loss of each agent, and the largest absolute value of its model.
    """
    spec, models = group.spec, group.models
    rows = group.layout.own[members].tolist()
    _keep_previous_(group, members, rows, n)

    x, y = _padded_training_data(group, members, n)
    counts = group.data.train.sizes[members].tolist()
    draws = agent_streams(spec.seed, "batches", n, agents=group.agents[members].tolist())
    with plugins.attribute_errors("model", spec.model):
        # An optimiser may use a model as a whole, so that it gets one model at a time.
        if len(members) == 1 or spec.training.optimiser is not None:
            losses = []
            for k, (row, count, draw) in enumerate(zip(rows, counts, draws, strict=True)):
                shard = Shard(x[k, :count], y[k, :count])
                loss = local_update_(models[row], spec.module, shard, spec.training, draw)
                losses.append(loss)
        else:
            thetas = gather_rows(models, rows)
            losses = batched_local_update_(thetas, spec.module, x, y, spec.training, draws, counts)
            if not is_contiguous_range(rows):
                torch._foreach_copy_([models[row] for row in rows], thetas.unbind())
    return np.array(losses), max_abs(models, rows)


def _keep_previous_(group: AgentGroup, members: Indices, rows: Sequence[int], n: int) -> None:
    """Copy models before the round to their rows of the buffer."""
    models, layout = group.models, group.layout
    is_crafting = group.adversary.attack.is_crafting(n)
    for k, row in zip(members.tolist(), rows, strict=True):
        if is_crafting and group.data.malicious[k]:
            models[layout.first_crafted[k]] = models[row]
        if layout.previous is not None:
            models[layout.previous[k]] = models[row]


def _padded_training_data(group: AgentGroup, members: Indices, n: int) -> SampleBatch:
    """Return training data of a batch, padded with zeros that are never read."""
    sizes = group.data.train.sizes[members]
    groups = [np.flatnonzero(sizes == size) for size in np.unique(sizes)]
    parts = [group.data.training_data(members[equal], n) for equal in groups]
    if len(parts) == 1:
        return parts[0]

    def pad(tensors: Sequence[Tensor]) -> Tensor:
        largest = tensors[-1]
        padded = largest.new_zeros(len(members), *largest.shape[1:])
        for equal, part in zip(groups, tensors, strict=True):
            padded[torch.from_numpy(equal), : part.shape[1]] = part
        return padded

    return pad([x for x, _ in parts]), pad([y for _, y in parts])


def batched_local_update_(
    thetas: Float[Tensor, "a d"],
    module: nn.Module,
    x: Shaped[Tensor, "a n *features"],
    y: Shaped[Tensor, "a n *target"],
    training: Training,
    draws: Sequence[np.random.Generator],
    counts: Sequence[int] | None = None,
) -> list[float]:
    """Train several models in place, each on its own samples.

    A network with dropout draws other numbers than one model at a time does.

    Args:
        thetas: The models.
        module: The network.
        x: Samples of each agent.
        y: Their labels or targets.
        training: Settings of LocalUpdate.
        draws: Source of randomness of each agent.
        counts: Number of samples of each agent, the first ones of n; by default n.

    Returns:
        Mean of the mini-batch losses of each agent.
    """
    device = thetas.device
    tensors = trainable_stack(module, thetas)
    is_copied = device.type != "cpu"
    if is_copied:
        tensors = contiguous_leaves(tensors)
    parameters = [tensor for tensor in tensors if tensor.requires_grad]

    counts = counts or [x.shape[1]] * len(x)
    x = features(x)
    agents = torch.arange(len(x), device=device).unsqueeze(1)
    forward = batched_forward(module, thetas.shape[1])
    lr = training.lambda2 * training.gamma
    batches = batched_mini_batches(counts, training, draws, device)  # before the seed is drawn
    losses = []
    momentum = list[Tensor]()

    with training_mode(module, training, draws[0], device.type):
        for batch in batches:
            with autocast(training.precision, device.type):
                outputs = forward(tensors, x[agents, batch])
                per_sample = per_sample_losses(
                    training.loss or cross_entropy, outputs, y[agents, batch], 2
                )
            loss = _batch_means(per_sample, batch, counts)
            gradients = torch.autograd.grad(
                loss.sum(), parameters, allow_unused=True, materialize_grads=True
            )
            with torch.no_grad():
                if momentum:
                    torch._foreach_mul_(momentum, training.momentum)
                    torch._foreach_add_(momentum, gradients)
                else:
                    momentum = [gradient.clone() for gradient in gradients]
                torch._foreach_add_(parameters, momentum, alpha=-lr)
            losses.append(loss.detach())

    # `tensors` also holds local statistics, which are not kept.
    for view, tensor in zip(unstack_views(module, thetas), tensors, strict=False):
        if is_copied or not tensor.requires_grad:
            view.copy_(tensor.detach())
    return mean_loss(losses, (len(thetas),)).tolist()


def _batch_means(
    per_sample: Float[Tensor, "a b"], batch: Int[Tensor, "a b"], counts: Sequence[int]
) -> Float[Tensor, " a"]:
    """Compute the mean loss of each agent, without the repeated samples that fill up a batch."""
    if min(counts) == max(counts):
        return per_sample.mean(1)
    is_repeated = batch.diff(prepend=batch.new_full((len(batch), 1), -1)) == 0
    return per_sample.masked_fill(is_repeated, 0.0).sum(1) / (~is_repeated).sum(1)
