"""A device that there is not: tensors that say they lie on "meta" and are computed on the CPU, so
that a whole run can show where tensors of two devices meet, and how often something waits for the
device."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
CROSS = {aten._to_copy.default, aten.copy_.default}  # what takes numbers from one device to another
INDEX = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten.index_put.default,
}
SHAPES = {
    aten.squeeze_.dim,
    aten.squeeze_.default,
    aten.unsqueeze_.default,
}  # change a tensor's shape in place
WAITS = {
    aten._local_scalar_dense.default: "item",
    aten.nonzero.default: "nonzero",
    aten.equal.default: "equal",
}


class Elsewhere(Tensor):
    """A tensor that says it lies on the device."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> "Elsewhere":
        made = Tensor._make_wrapper_subclass(
            cls, here.size(), strides=here.stride(), storage_offset=here.storage_offset(),
            dtype=here.dtype, device="meta",
        )  # fmt: skip
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of the pretended device")


class Pretend(TorchDispatchMode):
    """Within it "meta" is there. `waits` counts what a device's queue would have to be emptied
    for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        given, _ = tree_flatten((args, kwargs))
        ours = [t for t in given if isinstance(t, Elsewhere)]
        asked = kwargs.get("device")
        if any(t.is_meta for t in given if isinstance(t, Tensor) and not isinstance(t, Elsewhere)):
            raise RuntimeError(
                f"{func}: a list as an index, whose numbers the pretended device does not see"
            )
        if ours and func not in CROSS:
            for i, other in enumerate(
                t for t in given if isinstance(t, Tensor) and not isinstance(t, Elsewhere)
            ):
                index = (
                    func in INDEX
                    and isinstance(args[0], Elsewhere)
                    and not other.is_floating_point()
                )
                if other.ndim and not index:
                    raise RuntimeError(
                        f"{func}: tensors on the device and on the CPU, {tuple(other.shape)} at {i}"
                    )
        if (
            ours
            and any(func in INDEX and isinstance(t, Elsewhere) for t in given)
            and not isinstance(args[0], Tensor)
        ):
            raise RuntimeError(f"{func}: what is indexed lies on the CPU, its indices do not")
        to_here = asked is not None and torch.device(asked).type == "cpu"
        if ours:
            if func in WAITS:
                self.waits[WAITS[func]] += 1
            if (func in CROSS and to_here) or (
                func is aten.copy_.default and not isinstance(args[0], Elsewhere)
            ):
                self.waits["transfer"] += 1
        there = asked is not None and torch.device(asked).type == "meta"
        if there:
            kwargs["device"] = torch.device("cpu")

        def plain(t: Any) -> Any:
            return t.here if isinstance(t, Elsewhere) else t

        found = func(*tree_map(plain, args), **tree_map(plain, kwargs))
        if ours and func in SHAPES:
            with torch._C._ExcludeDispatchKeyGuard(
                torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
            ):
                func(*args)
        if there and found is plain(args[0] if args else None):
            found = found.clone()
        if not (there or (ours and not to_here)):
            return found
        if func is aten.copy_.default and not isinstance(args[0], Elsewhere):
            return found
        known = {id(t.here): t for t in ours}  # what is changed in place stays what it was

        def back(t: Any) -> Any:
            return (
                (known[id(t)] if id(t) in known else Elsewhere(t)) if isinstance(t, Tensor) else t
            )

        return tree_map(back, found)


@contextlib.contextmanager
def pretended(monkeypatch) -> Iterator[Pretend]:
    """A device "meta" of 1 GiB, on which nothing is timed."""
    from fedcb2o.kernels import _autotune, devices

    monkeypatch.setattr(devices, "device_memory", lambda device: 2**30)
    monkeypatch.setattr(devices, "device_name", lambda device: "a pretended device")
    monkeypatch.setattr(_autotune, "fastest_batched_convolution", lambda *_: "grouped")
    with Pretend() as mode:
        yield mode
