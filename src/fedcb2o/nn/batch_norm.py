"""The statistics of norms: no parameters, and yet part of what a network computes.

A batch norm (Ioffe and Szegedy, 2015), or an instance norm that tracks, keeps running means and variances of what it
saw in training and divides by them in evaluation. They are "shared", a part of theta that the forward pass changes and
gradients do not; "local", estimated by each agent on its own training data for whatever model it reads (as in AdaBN: Li
et al., "Revisiting batch normalization for practical domain adaptation", 2016); or "dropped", for ever what they were
at first. A norm whose own parameters are frozen is frozen as a whole, with its statistics. Numbers of batches are never
part of a model: they begin each LocalUpdate at 0.
"""

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fedcb2o.errors import ConfigError

StatisticsMode = Literal["shared", "local", "dropped"]

_MODE_ATTRIBUTE = "agents_statistics"  # the attribute of a norm that says it
_STATISTIC_NAMES = ("running_mean", "running_var")
MAX_REFERENCE_SAMPLES = 256  # samples, at most, on which local statistics are estimated


def set_statistics_mode(module: nn.Module, statistics: StatisticsMode) -> None:
    """Have the norms of a network say what becomes of their statistics."""
    for part in module.modules():
        if isinstance(part, _NormBase):
            setattr(part, _MODE_ATTRIBUTE, statistics)


def require_tracked_statistics(module: nn.Module) -> None:
    """Raises ConfigError for a norm that divides by the statistics of a batch when it is evaluated."""
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and part.running_mean is None:
            raise ConfigError(
                f"the model's norm `{name}` keeps no statistics (track_running_stats=False), so that what it makes of "
                "a sample depends on those beside it, in tests too: let it track them, or take a group norm"
            )


def statistics(module: nn.Module, *kinds: StatisticsMode) -> dict[str, Float[Tensor, " c"]]:
    """The statistics of the norms of some kinds, by their names in the network."""
    found = _norm_layers(module, *kinds).items()
    return {
        f"{name}.{each}".lstrip("."): getattr(part, each)
        for name, part in found
        for each in _STATISTIC_NAMES
    }


def has_local_statistics(module: nn.Module) -> bool:
    """Whether a network is read only after its agent has estimated statistics."""
    return bool(_norm_layers(module, "local"))


def train_(module: nn.Module) -> None:
    """As `module.train()`, but dropped statistics are divided by and stay what they are; no batch is counted yet."""
    module.train()
    for part in _norm_layers(module, "dropped").values():
        part.eval()
    for part in _norm_layers(module, "shared", "local").values():
        if part.num_batches_tracked is not None:
            part.num_batches_tracked.zero_()


@contextlib.contextmanager
def estimate_statistics_mode(module: nn.Module) -> Iterator[None]:
    """Within it what a network reads becomes its local statistics, and else it is as in evaluation."""
    module.eval()
    parts = _norm_layers(module, "local").values()
    before = [part.momentum for part in parts]
    for part in parts:
        part.train()
        part.momentum = 1.0
    try:
        with torch.no_grad():
            yield
    finally:
        for part, momentum in zip(parts, before, strict=True):
            part.eval()
            part.momentum = momentum


def estimate_statistics_(module: nn.Module, x: Float[Tensor, "n *features"]) -> None:
    """Have a network's local statistics be those of samples as its parameters see them."""
    with estimate_statistics_mode(module):
        module(x)


def find_changed_buffer(module: nn.Module, x: Float[Tensor, "n *features"]) -> str:
    """The name of a buffer that a network changes while it trains, other than the statistics of its norms; nothing
    where there is none. The network is left as it was, in evaluation mode."""
    known = statistics(module, "shared", "local", "dropped").keys()
    counted = {name for name, _ in module.named_buffers() if name.endswith("num_batches_tracked")}
    others = [name for name, _ in module.named_buffers() if name not in known | counted]
    if not others:
        return ""
    with _trial_training(module) as before:
        module(x)
        now = dict(module.named_buffers())
        changed = [name for name in others if not torch.equal(now[name], before[name])]
    return changed[0] if changed else ""


def rejects_single_sample(module: nn.Module, x: Float[Tensor, "1 *features"]) -> bool:
    """Whether the norms of a network cannot train on this sample by itself, which may have no variance. The network is
    left as it was, in evaluation mode."""
    if not _norm_layers(module, "shared", "local"):
        return False
    try:
        with _trial_training(module):
            module(x)
    except ValueError:
        return True
    except Exception:  # whatever else a user's network does in training, training tells
        return False
    return False


def is_sample_independent(module: nn.Module, x: Float[Tensor, "2 *features"]) -> bool:
    """Whether what a network makes of one of two samples in training is the same without the other. Not so where it
    draws, or its norms keep statistics. The network is left as it was, in evaluation mode."""
    if _norm_layers(module, "shared", "local"):
        return False
    try:
        with _trial_training(module):
            torch.default_generator.manual_seed(0)  # so that the network alone decides
            both = module(x)[:1]
            alone = module(x[:1])
            return torch.allclose(both, alone, rtol=0.0, atol=1e-4 * float(both.abs().max()))
    except Exception:  # whatever else a user's network does in training, training tells
        return False


@contextlib.contextmanager
def _trial_training(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Within it a network is in training, without gradients; after it all is as before, in evaluation mode. Its buffers
    as they were before."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    train_(module)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield before
    finally:
        for name, buffer in module.named_buffers():
            buffer.copy_(before[name])
        module.eval()


def _norm_layers(module: nn.Module, *kinds: StatisticsMode) -> dict[str, _NormBase]:
    return {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, _NormBase)
        and part.running_mean is not None
        and _statistics_mode(part) in kinds
    }


def _statistics_mode(part: _NormBase) -> StatisticsMode:
    own = list(part.parameters(recurse=False))
    if own and not any(p.requires_grad for p in own):
        return "dropped"
    kind: StatisticsMode = getattr(part, _MODE_ATTRIBUTE, "shared")  # of a network by itself
    return kind
