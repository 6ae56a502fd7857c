"""What users' functions returned, checked: whatever it is, who wrote it is told in one line."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fedcb2o.data.shard import Shard
from fedcb2o.errors import ConfigError
from fedcb2o.federated.peers import Peers
from fedcb2o.federated.types import Change, Criterion, Judged, State

# The types of what a rule may keep, by their names in a checkpoint.
KEPT = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
KEPT |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
KEPT |= {torch.uint8: "U8", torch.bool: "BOOL"}


def tensor_of(kind: str, values: Any) -> Tensor:
    """What a user's function returned as a tensor; raises ConfigError for what holds no numbers."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the {kind} returned a {type(values).__name__}, expected a tensor") from error


def asked_of(asked: Any, peers: Peers, k: int, budget: int) -> Int[np.ndarray, " s"]:
    """The ids that a selection chose for the agent in place k; raises ConfigError unless they are different ones of its
    peers, and no more than the budget."""
    asked = tensor_of("selection", asked).cpu()
    asked = asked if asked.numel() else asked.long()  # an empty list has no integer type
    if asked.ndim != 1:
        raise ConfigError(f"the selection returned shape {tuple(asked.shape)}, expected ids of shape [s]")
    ours = asked.dtype == torch.int64 and len(set(asked.tolist())) == len(asked)
    if not (ours and peers.find(np.full(len(asked), k), asked.numpy())[0].all()):
        raise ConfigError(f"the selection chose {asked.tolist()}, expected different ones of {peers.ids(k).tolist()}")
    if len(asked) > budget:
        raise ConfigError(f"the selection chose {len(asked)} peers, more than `budget` = {budget}: {asked.tolist()}")
    found: np.ndarray = asked.numpy()
    return found


def values_of(criterion: Criterion, judged: Judged) -> Float[Tensor, "*a m"]:
    """The criterion's value for each received model, in float64; raises ConfigError where it has another shape.

    Where that is no finite number, be it NaN or an infinity of either sign, nothing is known that speaks for the model:
    it counts as plus infinity, which has no weight.
    """
    values = tensor_of("criterion", criterion(judged))
    if values.shape != judged.received.ids.shape:
        raise ConfigError(
            f"the criterion returned shape {tuple(values.shape)}, expected {tuple(judged.received.ids.shape)}: "
            "a value for each received model"
        )
    values = values.cpu().double()
    return values.masked_fill(~values.isfinite(), torch.inf)


def weights_of(
    weights: Any, shape: tuple[int, ...], *, rest: float = 0.0
) -> tuple[Float[Tensor, "*a m"], Float[Tensor, "*a"]]:
    """The weights of received models, of that `shape` [*a, m], and that of the own one, which may follow them; with the
    `rest` they sum to 1.

    Raises ConfigError for weights of another shape, or that are not a convex combination (or all zero).
    """
    weights, (*several, m) = tensor_of("rule", weights), shape
    if weights.shape not in (shape, (*several, m + 1)):
        which = ", which is declared `together`," if several else ""
        raise ConfigError(
            f"the rule{which} returned weights of shape {tuple(weights.shape)}, expected {shape} or {(*several, m + 1)}"
        )
    weights = weights.cpu().double()
    total = weights.sum(-1) + rest
    good = weights.isfinite().all(-1) & (weights >= 0).all(-1) & (((total - 1).abs() < 1e-6) | (total == 0))
    if not good.all():
        wrong = weights[~good].tolist() if several else weights.tolist()
        raise ConfigError(f"the rule returned weights that are not positive with sum 1: {wrong}")
    return weights[..., :m], weights[..., m:].sum(-1)


def state_of(made: Any) -> tuple[State, Any]:
    """What a rule with memory keeps, and what it decided; raises ConfigError where it returned something else."""
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], dict)):
        raise ConfigError(
            f"the rule, which declares a memory, returned a {type(made).__name__}, expected (state, weights) with a "
            "dictionary of tensors for the state"
        )
    kept, decided = made
    for name, value in kept.items():
        if not (isinstance(name, str) and isinstance(value, Tensor) and value.layout is torch.strided):
            raise ConfigError(
                f"the rule keeps `{name}`, a {type(value).__name__}, in its state: expected dense tensors by name"
            )
        if value.dtype not in KEPT:
            raise ConfigError(
                f"the rule keeps `{name}` of type {value.dtype}: expected one of {', '.join(map(str, KEPT))}"
            )
    own = {name: kept[name].detach().cpu().clone(memory_format=torch.contiguous_format) for name in sorted(kept)}
    return own, decided  # copies: what a rule keeps may be a row of the pool


def poisoned_of(poisoned: Any, shard: Shard) -> Shard:
    """What an attack made of a shard; raises ConfigError where it is none, or of another shape."""
    if not isinstance(poisoned, Shard):
        raise ConfigError(f"the attack returned a {type(poisoned).__name__}, expected a fedcb2o.Shard")
    for name, new, old in (("samples", poisoned.x, shard.x), ("labels", poisoned.y, shard.y)):
        if new.shape != old.shape or new.dtype.is_floating_point != old.dtype.is_floating_point:
            raise ConfigError(
                f"the attack returned {name} of shape {tuple(new.shape)} and type {new.dtype}, "
                f"expected {tuple(old.shape)} and {old.dtype}: it may change values only"
            )
    return poisoned


def check_labels(labels: Int[Tensor, "a n"], num_classes: int) -> None:
    """Raises ConfigError where an attack gave samples other labels than there are."""
    if labels.numel() and not (labels.min() >= 0 and labels.max() < num_classes):
        raise ConfigError(f"the attack returned labels outside 0 to {num_classes - 1}")


def crafted_of(crafted: Any, shape: tuple[int, int]) -> Shaped[Tensor, "..."]:
    """The models [r, d] that an attack crafted, or the one [d] for everybody; raises ConfigError for other shapes."""
    models, (receivers, dim) = tensor_of("attack", crafted), shape
    if models.shape not in ((dim,), shape):
        wanted = f"({dim},)" + (f" or {shape}" if receivers > 1 else "")
        raise ConfigError(f"the attack returned models of shape {tuple(models.shape)}, expected {wanted}")
    return models


def changed_by(change: Change, data: Shard) -> Shard:
    """Validation data as a criterion changes them; raises ConfigError where it changes their shape."""
    x = tensor_of("criterion's change of the samples", change(data.x.cpu()))
    if x.shape != data.x.shape:
        raise ConfigError(
            f"the criterion changed samples of shape {tuple(data.x.shape)} into {tuple(x.shape)}: it may change values"
        )
    return Shard(x.to(data.x.device), data.y)
