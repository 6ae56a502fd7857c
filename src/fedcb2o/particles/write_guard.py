"""Detection of user functions that write into the tensors that they receive.

PyTorch counts writes into a tensor, so these are noticed at once. Writes into a NumPy array that
shares the memory are not counted; a copy of the tensor reveals them.

Example:
    >>> x = torch.zeros(2)
    >>> before = write_count(x)
    >>> _ = x.add_(1)
    >>> write_count(x) - before
    1
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.errors import ConfigError


def write_count(x: Tensor) -> int:
    """Return the number of PyTorch's writes into a tensor or its views.

    It is 0 in inference mode, where PyTorch does not count.
    """
    return 0 if x.is_inference() else x._version


def require_unwritten(
    name: str,
    function: Callable[..., Any],
    x: Tensor,
    before: int,
    copy: Tensor | None = None,
    kind: str = "particles",
) -> None:
    """Refuse a function that wrote into its input.

    `before` is the `write_count` before the call, `copy` the input's copy from before the call, if
    there is one.
    """
    if write_count(x) != before or (copy is not None and not _same_bits(x, copy)):
        raise ConfigError(
            f"{name}, {plugins.label(function)}, writes into the {kind} that it receives: let it"
            " work on a copy, such as x.clone()"
        )


@contextlib.contextmanager
def forbid_writes(
    name: str,
    function: Callable[..., Any],
    guarded: Sequence[tuple[Tensor, str]],
    check_writes: bool,
) -> Iterator[None]:
    """Refuse writes into tensors inside a `with` block.

    Each tensor has the name of its contents. A write is a ConfigError that names `function`.
    `check_writes` notices writes by way of NumPy too.
    """
    before = [(write_count(x), x.clone() if check_writes else None) for x, _ in guarded]
    yield
    for (x, kind), (count, copy) in zip(guarded, before, strict=True):
        require_unwritten(name, function, x, count, copy, kind)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, where NaN equals NaN."""
    # As integers, because NaN differs from itself and -0 equals 0.
    words = torch.int64 if a.dtype == torch.float64 else torch.int32
    return torch.equal(a.detach().contiguous().view(words), b.contiguous().view(words))
