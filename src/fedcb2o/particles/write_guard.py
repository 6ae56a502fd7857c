"""What a user's function is shown is not its to change: one that writes into the particles is told so, by name.

PyTorch counts the writes into a tensor, so these are noticed at once; those of a NumPy array that shares its memory are
not counted, and noticed where a copy was kept.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.errors import ConfigError


def write_count(x: Tensor) -> int:
    """How often PyTorch has written into a tensor, or any view of it; 0 where it does not count (inference mode)."""
    return 0 if x.is_inference() else x._version


def require_unwritten(
    name: str,
    function: Callable[..., Any],
    x: Tensor,
    before: int,
    copy: Tensor | None = None,
    kind: str = "particles",
) -> None:
    """Raise ConfigError if what a function was shown is no longer what it was, by the count `before` or by a `copy`."""
    if write_count(x) != before or (copy is not None and not _same_bits(x, copy)):
        raise ConfigError(
            f"{name}, {plugins.label(function)}, writes into the {kind} that it is shown: let it work on a copy, such"
            " as x.clone()"
        )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, NaN to NaN too."""
    words = torch.int64 if a.dtype == torch.float64 else torch.int32
    return torch.equal(a.detach().contiguous().view(words), b.contiguous().view(words))
