"""LocalUpdate of several agents at once (alg:FedCB2O): one batched program in place of one for each agent.

On a CPU that pays for small dense networks, where calls cost more than their arithmetic; on other devices for any. It
takes agents whose samples make equally many batches. Bits may depend on who is trained together, so `teams` decides
that once, from the population alone.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from fedcb2o import plugins
from fedcb2o.data._dataset import Shard, features
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

MAX_BATCH_PARAMETERS = 2**19  # parameters of a team: with gradients and momentum 6 MiB
_MAX_BATCH_AGENTS = 64  # agents of a team, so that there are enough teams for the workers


def plan_training_batches(spec: RunSpec, num_samples: Sequence[int]) -> list[list[int]]:
    """The `teams` of a run's agents."""
    training = spec.training
    together = spec.kernels.models_per_batch
    batch = training.batch_size if together is not None and training.is_sample_independent else 1
    return training_batches(spec.module, spec.dim, num_samples, together, batch)


def training_batches(
    module: nn.Module,
    dim: int,
    num_samples: Sequence[int],
    models_per_batch: int | None = None,
    batch_size: int = 1,
) -> list[list[int]]:
    """Which agents train together: those with equally many batches of this size, at most so many of them `together`; by
    default as many as there is room for near the core of small dense networks, and of others each alone. Where
    there are more than one team takes, those with the nearest numbers of samples."""
    size = models_per_batch or (
        max(1, min(_MAX_BATCH_AGENTS, MAX_BATCH_PARAMETERS // dim))
        if dense_layers(module, dim)
        else 1
    )
    alike: dict[int, list[int]] = {}
    for j, count in enumerate(num_samples):
        alike.setdefault(-(-count // batch_size), []).append(j)
    ordered = [sorted(same, key=lambda j: num_samples[j]) for same in alike.values()]
    return [sorted(same[i : i + size]) for same in ordered for i in range(0, len(same), size)]


def train_(
    group: AgentGroup, members: Indices, n: int
) -> tuple[Float[np.ndarray, " a"], Float[np.ndarray, " a"]]:
    """LocalUpdate in round n for agents in some places, a team (alg:FedCB2O, line 3): their mean training losses, and
    the extents of their models then.

    What an attacker began with lies where it will craft, and what each agent began with where a rule looks for it.
    """
    terms = group.spec
    pool = group.models
    layout = group.layout
    attackers = group.adversary
    rows = layout.own[members].tolist()
    for k, row in zip(members.tolist(), rows, strict=True):
        if attackers.attack.is_crafting(n) and group.data.malicious[k]:
            pool[layout.first_crafted[k]] = pool[row]
        if layout.previous is not None:
            pool[layout.previous[k]] = pool[row]
    counts, (x, y) = (
        group.data.train.sizes[members].tolist(),
        _padded_training_data(group, members, n),
    )
    draws = agent_streams(terms.seed, "batches", n, agents=group.agents[members].tolist())
    with plugins.attribute_errors("model", terms.model):
        if (
            len(members) == 1 or terms.training.optimiser is not None
        ):  # which may look at a model as a whole
            losses = [
                local_update_(
                    pool[i], terms.module, Shard(x[:count], y[:count]), terms.training, draw
                )
                for i, x, y, count, draw in zip(rows, x, y, counts, draws, strict=True)
            ]
        else:
            thetas = gather_rows(pool, rows)
            losses = batched_local_update_(
                thetas, terms.module, x, y, terms.training, draws, counts
            )
            if not is_contiguous_range(rows):
                torch._foreach_copy_([pool[row] for row in rows], thetas.unbind())
    return np.array(losses), max_abs(pool, rows)


def _padded_training_data(group: AgentGroup, members: Indices, n: int) -> SampleBatch:
    """What a team trains on. Who holds fewer samples than another has zeros after them, which nobody reads."""
    sizes = group.data.train.sizes[members]
    alike = [np.flatnonzero(sizes == size) for size in np.unique(sizes)]
    parts = [group.data.training_data(members[those], n) for those in alike]
    if len(parts) == 1:
        return parts[0]

    def whole(each: Sequence[Tensor]) -> Tensor:
        found = each[-1].new_zeros(len(members), *each[-1].shape[1:])  # the last have the most
        for those, part in zip(alike, each, strict=True):
            found[torch.from_numpy(those), : part.shape[1]] = part
        return found

    x, y = zip(*parts, strict=True)
    return whole(x), whole(y)


def batched_local_update_(
    thetas: Float[Tensor, "a d"],
    module: nn.Module,
    x: Shaped[Tensor, "a n *features"],
    y: Shaped[Tensor, "a n *target"],
    training: Training,
    draws: Sequence[np.random.Generator],
    counts: Sequence[int] | None = None,
) -> list[float]:
    """Train the models of a team in place, each on its own samples, of which it has all n or the first of so many
    `counts`; the mean of the mini-batch losses of each.

    A network that draws while it trains draws otherwise than one by one.
    """
    dim = thetas.shape[1]
    device = thetas.device
    tensors = trainable_stack(module, thetas)
    copied = device.type != "cpu"
    if copied:
        tensors = contiguous_leaves(tensors)
    parameters = [tensor for tensor in tensors if tensor.requires_grad]
    counts = counts or [x.shape[1]] * len(x)
    x = features(x)
    steps = batched_mini_batches(counts, training, draws, device)
    everyone = torch.arange(len(x), device=device).unsqueeze(1)
    outputs = batched_forward(module, dim)
    losses = []
    momentum = list[Tensor]()
    with training_mode(module, training, draws[0], device.type):
        for chosen in steps:
            labels = y[everyone, chosen]
            with autocast(training.precision, device.type):
                found = outputs(tensors, x[everyone, chosen])
                each = per_sample_losses(training.loss or cross_entropy, found, labels, 2)
            if min(counts) == max(counts):
                loss = each.mean(1)
            else:
                again = (
                    chosen.diff(prepend=chosen.new_full((len(x), 1), -1)) == 0
                )  # what fills a last batch up
                loss = each.masked_fill(again, 0.0).sum(1) / (~again).sum(1)
            gradients = torch.autograd.grad(
                loss.sum(), parameters, allow_unused=True, materialize_grads=True
            )
            with torch.no_grad():
                if momentum:
                    torch._foreach_mul_(momentum, training.momentum)
                    torch._foreach_add_(momentum, gradients)
                else:
                    momentum = [gradient.clone() for gradient in gradients]
                torch._foreach_add_(parameters, momentum, alpha=-training.lambda2 * training.gamma)
            losses.append(loss.detach())
    for view, tensor in zip(
        unstack_views(module, thetas), tensors, strict=False
    ):  # local statistics are not kept
        if copied or not tensor.requires_grad:
            view.copy_(tensor.detach())
    return mean_loss(losses, (len(thetas),)).tolist()
