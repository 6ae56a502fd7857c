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

from fedcb2o.data.shard import features
from fedcb2o.federated.evaluate import dense_layers, outputs_of
from fedcb2o.federated.local_update import Training, batches_of, mean_loss, products_in, training_with
from fedcb2o.models import stacked

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
    parameters = [view.detach().requires_grad_() for view in stacked(module, thetas)]
    x, steps = features(x), batches_of(x.shape[1], training, draws, device)
    everyone = torch.arange(len(x), device=device).unsqueeze(1)
    outputs, losses, momentum = outputs_of(module, dim), [], list[Tensor]()
    with training_with(module, training, draws[0], device.type):
        for chosen in steps:
            labels = y[everyone, chosen]
            with products_in(training.precision, device.type):
                found = outputs(parameters, x[everyone, chosen])
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
    return mean_loss(losses, (len(thetas),)).tolist()
