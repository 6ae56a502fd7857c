"""A simulated device: tensors that report the device "meta" and are computed on the CPU.

A run on it fails where an operation mixes tensors of two devices, and counts the synchronisations
with the device.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
CROSS_DEVICE = {aten._to_copy.default, aten.copy_.default}  # operations that copy between devices
INDEX = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten.index_put.default,
}
# change a tensor's shape in place
SHAPES = {aten.squeeze_.dim, aten.squeeze_.default, aten.unsqueeze_.default}
WAITS = {
    aten._local_scalar_dense.default: "item",
    aten.nonzero.default: "nonzero",
    aten.equal.default: "equal",
}


class DeviceTensor(Tensor):
    """A tensor that reports the simulated device."""

    cpu_tensor: Tensor

    @staticmethod
    def __new__(cls, cpu_tensor: Tensor) -> "DeviceTensor":
        wrapper = Tensor._make_wrapper_subclass(
            cls, cpu_tensor.size(), strides=cpu_tensor.stride(), storage_offset=cpu_tensor.storage_offset(),
            dtype=cpu_tensor.dtype, device="meta",
        )  # fmt: skip
        wrapper.cpu_tensor = cpu_tensor
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of the simulated device")


class SimulatedDevice(TorchDispatchMode):
    """Context in which the device "meta" is simulated; `waits` counts synchronisations by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        arguments, _ = tree_flatten((args, kwargs))
        device_tensors = [t for t in arguments if isinstance(t, DeviceTensor)]
        requested_device = kwargs.get("device")
        if any(
            t.is_meta
            for t in arguments
            if isinstance(t, Tensor) and not isinstance(t, DeviceTensor)
        ):
            raise RuntimeError(
                f"{func}: a list as an index, whose numbers the simulated device does not see"
            )
        if device_tensors and func not in CROSS_DEVICE:
            for i, other in enumerate(
                t for t in arguments if isinstance(t, Tensor) and not isinstance(t, DeviceTensor)
            ):
                index = (
                    func in INDEX
                    and isinstance(args[0], DeviceTensor)
                    and not other.is_floating_point()
                )
                if other.ndim and not index:
                    raise RuntimeError(
                        f"{func}: tensors on the device and on the CPU, {tuple(other.shape)} at {i}"
                    )
        if (
            device_tensors
            and any(func in INDEX and isinstance(t, DeviceTensor) for t in arguments)
            and not isinstance(args[0], Tensor)
        ):
            raise RuntimeError(f"{func}: what is indexed lies on the CPU, its indices do not")
        to_cpu = requested_device is not None and torch.device(requested_device).type == "cpu"
        if device_tensors:
            if func in WAITS:
                self.waits[WAITS[func]] += 1
            if (func in CROSS_DEVICE and to_cpu) or (
                func is aten.copy_.default and not isinstance(args[0], DeviceTensor)
            ):
                self.waits["transfer"] += 1
        to_device = requested_device is not None and torch.device(requested_device).type == "meta"
        if to_device:
            kwargs["device"] = torch.device("cpu")

        def unwrap(t: Any) -> Any:
            return t.cpu_tensor if isinstance(t, DeviceTensor) else t

        result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
        if device_tensors and func in SHAPES:
            with torch._C._ExcludeDispatchKeyGuard(
                torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
            ):
                func(*args)
        if to_device and result is unwrap(args[0] if args else None):
            result = result.clone()
        if not (to_device or (device_tensors and not to_cpu)):
            return result
        if func is aten.copy_.default and not isinstance(args[0], DeviceTensor):
            return result
        # Tensors changed in place keep their identity.
        wrappers = {id(t.cpu_tensor): t for t in device_tensors}

        def wrap(t: Any) -> Any:
            return (
                (wrappers[id(t)] if id(t) in wrappers else DeviceTensor(t))
                if isinstance(t, Tensor)
                else t
            )

        return tree_map(wrap, result)


@contextlib.contextmanager
def simulated_device(monkeypatch) -> Iterator[SimulatedDevice]:
    """Simulate a device "meta" of 1 GiB, without timing of kernels."""
    from fedcb2o.kernels import _autotune, devices

    monkeypatch.setattr(devices, "device_memory", lambda device: 2**30)
    monkeypatch.setattr(devices, "device_name", lambda device: "a simulated device")
    monkeypatch.setattr(_autotune, "fastest_batched_convolution", lambda *_: "grouped")
    with SimulatedDevice() as mode:
        yield mode


def assume_fast_bfloat16(monkeypatch) -> None:
    """Train in bfloat16 on any processor where an experiment asks for it."""
    from fedcb2o.kernels import _autotune

    monkeypatch.setattr(_autotune, "_bfloat16_speedup", lambda _: 1.0)
