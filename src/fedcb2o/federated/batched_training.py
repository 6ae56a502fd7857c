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
from fedcb2o.federated.admission import extents
from fedcb2o.federated.agent_data import Samples
from fedcb2o.federated.agent_group import Block
from fedcb2o.federated.inference import dense_layers, outputs_of
from fedcb2o.federated.local_update import (
    Training,
    batches_of,
    local_update_,
    mean_loss,
    products_in,
    training_with,
)
from fedcb2o.federated.losses import cross_entropy, of_samples
from fedcb2o.federated.ragged import Places
from fedcb2o.federated.run_spec import Terms
from fedcb2o.nn.parameters import follow, in_one_piece, rows_of, stacked, stacked_to_train
from fedcb2o.rng import streams

SMALL = 2**19  # parameters of a team: with gradients and momentum 6 MiB
MOST = 64  # agents of a team, so that there are enough teams for the workers


def teams_of(terms: Terms, num_samples: Sequence[int]) -> list[list[int]]:
    """The `teams` of a run's agents."""
    training, together = terms.training, terms.primitives.together
    batch = training.batch_size if together is not None and training.apart else 1
    return teams(terms.module, terms.dim, num_samples, together, batch)


def teams(
    module: nn.Module, dim: int, num_samples: Sequence[int], together: int | None = None, batch: int = 1
) -> list[list[int]]:
    """Which agents train together: those with equally many batches of this size, at most so many of them `together`; by
    default as many as there is room for near the core of small dense networks, and of others each alone. Where
    there are more than one team takes, those with the nearest numbers of samples."""
    size = together or (max(1, min(MOST, SMALL // dim)) if dense_layers(module, dim) else 1)
    alike: dict[int, list[int]] = {}
    for j, count in enumerate(num_samples):
        alike.setdefault(-(-count // batch), []).append(j)
    ordered = [sorted(same, key=lambda j: num_samples[j]) for same in alike.values()]
    return [sorted(same[i : i + size]) for same in ordered for i in range(0, len(same), size)]


def train_(block: Block, some: Places, n: int) -> tuple[Float[np.ndarray, " a"], Float[np.ndarray, " a"]]:
    """LocalUpdate in round n for agents in some places, a team (alg:FedCB2O, line 3): their mean training losses, and
    the extents of their models then.

    What an attacker began with lies where it will craft, and what each agent began with where a rule looks for it.
    """
    terms, pool, layout, attackers = block.terms, block.pool, block.layout, block.attackers
    rows = layout.own[some].tolist()
    for k, row in zip(some.tolist(), rows, strict=True):
        if attackers.attack.crafts(n) and block.holdings.malicious[k]:
            pool[layout.crafts[k]] = pool[row]
        if layout.before is not None:
            pool[layout.before[k]] = pool[row]
    counts, (x, y) = block.holdings.train.sizes[some].tolist(), _trained_on(block, some, n)
    draws = streams(terms.seed, "batches", n, agents=block.agents[some].tolist())
    with plugins.blamed("model", terms.model):
        if len(some) == 1 or terms.training.optimiser is not None:  # which may look at a model as a whole
            losses = [
                local_update_(pool[i], terms.module, Shard(x[:count], y[:count]), terms.training, draw)
                for i, x, y, count, draw in zip(rows, x, y, counts, draws, strict=True)
            ]
        else:
            thetas = rows_of(pool, rows)
            losses = local_updates_(thetas, terms.module, x, y, terms.training, draws, counts)
            if not follow(rows):
                torch._foreach_copy_([pool[row] for row in rows], thetas.unbind())
    return np.array(losses), extents(pool, rows)


def _trained_on(block: Block, some: Places, n: int) -> Samples:
    """What a team trains on. Who holds fewer samples than another has zeros after them, which nobody reads."""
    sizes = block.holdings.train.sizes[some]
    alike = [np.flatnonzero(sizes == size) for size in np.unique(sizes)]
    parts = [block.holdings.trained_on(some[those], n) for those in alike]
    if len(parts) == 1:
        return parts[0]

    def whole(each: Sequence[Tensor]) -> Tensor:
        found = each[-1].new_zeros(len(some), *each[-1].shape[1:])  # the last have the most
        for those, part in zip(alike, each, strict=True):
            found[torch.from_numpy(those), : part.shape[1]] = part
        return found

    x, y = zip(*parts, strict=True)
    return whole(x), whole(y)


def local_updates_(
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
    dim, device = thetas.shape[1], thetas.device
    tensors = stacked_to_train(module, thetas)
    copied = device.type != "cpu"
    if copied:
        tensors = in_one_piece(tensors)
    parameters = [tensor for tensor in tensors if tensor.requires_grad]
    counts = counts or [x.shape[1]] * len(x)
    x, steps = features(x), batches_of(counts, training, draws, device)
    everyone = torch.arange(len(x), device=device).unsqueeze(1)
    outputs, losses, momentum = outputs_of(module, dim), [], list[Tensor]()
    with training_with(module, training, draws[0], device.type):
        for chosen in steps:
            labels = y[everyone, chosen]
            with products_in(training.precision, device.type):
                found = outputs(tensors, x[everyone, chosen])
                each = of_samples(training.loss or cross_entropy, found, labels, 2)
            if min(counts) == max(counts):
                loss = each.mean(1)
            else:
                again = chosen.diff(prepend=chosen.new_full((len(x), 1), -1)) == 0  # what fills a last batch up
                loss = each.masked_fill(again, 0.0).sum(1) / (~again).sum(1)
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
        if copied or not tensor.requires_grad:
            view.copy_(tensor.detach())
    return mean_loss(losses, (len(thetas),)).tolist()
