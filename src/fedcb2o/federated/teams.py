"""LocalUpdate of several agents at once (alg:FedCB2O): one batched program in place of one for each agent.

On a CPU that pays for small dense networks, where calls cost more than their arithmetic; on other devices for any. It
takes agents with equally many samples. Bits may depend on who is trained together, so `teams` decides that once, from
the population alone.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from fedcb2o import plugins
from fedcb2o.data.shard import Shard, features
from fedcb2o.federated.admit import extents
from fedcb2o.federated.block import Block
from fedcb2o.federated.evaluate import dense_layers, outputs_of
from fedcb2o.federated.lists import Places
from fedcb2o.federated.local_update import (
    Training,
    batches_of,
    local_update_,
    mean_loss,
    products_in,
    training_with,
)
from fedcb2o.models import follow, rows_of, stacked, stacked_to_train
from fedcb2o.streams import streams

SMALL = 2**19  # parameters of a team: with gradients and momentum 6 MiB
MOST = 64  # agents of a team, so that there are enough teams for the workers


def teams(module: nn.Module, dim: int, num_samples: Sequence[int], together: int | None = None) -> list[list[int]]:
    """Which agents train together: those with equally many samples, at most so many of them `together`; by default
    as many as there is room for near the core of small dense networks, and of others each alone."""
    size = together or (max(1, min(MOST, SMALL // dim)) if dense_layers(module, dim) else 1)
    alike: dict[int, list[int]] = {}
    for j, count in enumerate(num_samples):
        alike.setdefault(count, []).append(j)
    return [same[i : i + size] for same in alike.values() for i in range(0, len(same), size)]


def train_(block: Block, some: Places, n: int) -> tuple[Float[np.ndarray, " a"], Float[np.ndarray, " a"]]:
    """LocalUpdate in round n for agents in some places, which hold equally many samples (alg:FedCB2O, line 3): their
    mean training losses, and the extents of their models then.

    What an attacker began with lies where it will craft, and what each agent began with where a rule looks for it.
    """
    terms, pool, layout, attackers = block.terms, block.pool, block.layout, block.attackers
    rows = layout.own[some].tolist()
    for k, row in zip(some.tolist(), rows, strict=True):
        if attackers.attack.crafts(n) and block.holdings.malicious[k]:
            pool[layout.crafts[k]] = pool[row]
        if layout.before is not None:
            pool[layout.before[k]] = pool[row]
    x, y = block.holdings.trained_on(some, n)
    draws = streams(terms.seed, "batches", n, agents=block.agents[some].tolist())
    with plugins.blamed("model", terms.model):
        if len(some) == 1 or terms.training.optimiser is not None:  # which may look at a model as a whole
            each = zip(rows, x, y, draws, strict=True)
            losses = [local_update_(pool[i], terms.module, Shard(x, y), terms.training, draw) for i, x, y, draw in each]
        else:
            thetas = rows_of(pool, rows)
            losses = local_updates_(thetas, terms.module, x, y, terms.training, draws)
            if not follow(rows):
                torch._foreach_copy_([pool[row] for row in rows], thetas.unbind())
    return np.array(losses), extents(pool, rows)


def local_updates_(
    thetas: Float[Tensor, "a d"],
    module: nn.Module,
    x: Shaped[Tensor, "a n *features"],
    y: Int[Tensor, "a n"],
    training: Training,
    draws: Sequence[np.random.Generator],
) -> list[float]:
    """Train the models of a team in place, each on its own samples; the mean of the mini-batch losses of each.

    A network that draws while it trains draws otherwise than one by one.
    """
    dim, device = thetas.shape[1], thetas.device
    tensors = stacked_to_train(module, thetas)
    parameters = [tensor for tensor in tensors if tensor.requires_grad]
    x, steps = features(x), batches_of(x.shape[1], training, draws, device)
    everyone = torch.arange(len(x), device=device).unsqueeze(1)
    outputs, losses, momentum = outputs_of(module, dim), [], list[Tensor]()
    with training_with(module, training, draws[0], device.type):
        for chosen in steps:
            labels = y[everyone, chosen]
            with products_in(training.precision, device.type):
                found = outputs(tensors, x[everyone, chosen])
                each = F.cross_entropy(found.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
            loss = each.mean(1)
            gradients = torch.autograd.grad(loss.sum(), parameters, allow_unused=True, materialize_grads=True)
            with torch.no_grad():
                if momentum:
                    torch._foreach_mul_(momentum, training.momentum)
                    torch._foreach_add_(momentum, gradients)
                else:
                    momentum = [gradient.clone() for gradient in gradients]
                torch._foreach_add_(parameters, momentum, alpha=-training.lambda2 * training.gamma)
            losses.append(loss.detach())
    for view, tensor in zip(stacked(module, thetas), tensors, strict=False):  # local statistics are not kept
        if not tensor.requires_grad:
            view.copy_(tensor)
    return mean_loss(losses, (len(thetas),)).tolist()
