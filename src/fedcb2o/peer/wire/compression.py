"""A model as bytes: raw float32, or int8 differences with error feedback.

`Int8` sends how a model differs from theta_0, the initial model that the whole federation knows. The numbers lie in
blocks of 2048, each with a scale, and are rounded to 8 bits; zstandard takes what is left to take. What the rounding
lost is added to the difference of the next round (Seide, Fu, Droppo, Li and Yu 2014, "1-bit stochastic gradient descent
and its application to data-parallel distributed training of speech DNNs"; Karimireddy, Rebjock, Stich and Jaggi 2019,
"Error feedback fixes SignSGD and other gradient compression schemes"), so that the models sent over some rounds add up
to those that were there, but for one rounding. Differences from what was sent last, as in EF21 (Richtarik, Sokolov and
Fatkhullin 2021), would be smaller, but only for receivers that took every model before: here whoever is asked changes.
"""

import hashlib
import sys
from collections.abc import Mapping
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
import zstandard
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.errors import RunError
from fedcb2o.federated.admission import MAX_VALUE

_BytesLike: TypeAlias = bytes | bytearray | memoryview

BLOCK_SIZE = 2048  # numbers that share a scale
_MAX_LEVEL = 127  # the largest number of 8 bits that is sent, of either sign
MAX_SCALE = (
    4 * MAX_VALUE / _MAX_LEVEL
)  # the largest scale: models within the bound differ by at most half of what it gives
_ZSTD_LEVEL = (
    1  # of zstandard: on trained networks 2 and 3 are slower and save less than 0.2 % more
)
MAX_WINDOW_BYTES = 2**19  # bytes that zstandard may look back, and so needs memory for
_SLICE_SIZE = 64 * BLOCK_SIZE  # numbers at hand at once, so that they stay in the cache


@runtime_checkable
class Codec(Protocol):
    """How models are sent: `number` and `base` as the manifest tells them, in `least` to `most` bytes a model."""

    @property
    def encoding(self) -> int: ...  # noqa: D102
    @property
    def base(self) -> bytes: ...  # noqa: D102
    @property
    def min_bytes(self) -> int: ...  # noqa: D102
    @property
    def max_bytes(self) -> int: ...  # noqa: D102

    def encode(self, theta: Float[Tensor, " d"]) -> bytes:
        """A model as bytes of their own, while `theta` goes on to be trained."""
        ...

    def buffer(self, size: int, into: Float[Tensor, " d"]) -> memoryview:
        """Where so many bytes may be received that `into` is to be filled from; at most `most`."""
        ...

    def decode_(self, content: _BytesLike, into: Float[Tensor, " d"]) -> str:
        """Fill `into` from bytes that may be hostile; where they hold no model, say why, and `into` is none then."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What the next `pack` depends on besides its model, by name, for a checkpoint; `pack` changes it."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from such a state; raises RunError for one of another coding or model."""
        ...


class RawCodec:
    """Little-endian float32, one number after the other, on whatever machine."""

    encoding = 0
    base = bytes(32)

    def __init__(self, dim: int) -> None:
        self.min_bytes = self.max_bytes = 4 * dim

    def encode(self, theta: Float[Tensor, " d"]) -> bytes:
        """A model as bytes of their own, while `theta` goes on to be trained."""
        return _little_endian(theta).tobytes()

    def buffer(self, size: int, into: Float[Tensor, " d"]) -> memoryview:
        """The memory of `into` itself, where this machine's numbers are as they are sent."""
        if size == self.max_bytes and sys.byteorder == "little" and into.device.type == "cpu":
            return into.numpy().data.cast("B")
        return memoryview(bytearray(size))

    def decode_(self, content: _BytesLike, into: Float[Tensor, " d"]) -> str:
        """Fill `into` from bytes that may be hostile; where they hold no model, leave it as it was and say why."""
        if len(content) != self.max_bytes:
            return f"it has {len(content)} bytes, expected {self.max_bytes}"
        numbers = np.frombuffer(content, "<f4")
        if (
            numbers.ctypes.data == into.data_ptr() and sys.byteorder == "little"
        ):  # they were received into it
            return ""
        for k in range(0, len(into), _SLICE_SIZE):
            into[k : k + _SLICE_SIZE] = _to_tensor(numbers[k : k + _SLICE_SIZE])
        return ""

    def state(self) -> dict[str, Tensor]:
        """Nothing: every model is sent as it is."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from such a state; raises RunError for one of another coding."""
        _check_state(state, self.state())


class Int8Codec:
    """Differences from `origin` (theta_0) in 8 bits, each rounding made good by the next model.

    A message is one zstandard frame, of the scales of all blocks as little-endian float32 and then a signed byte for
    each number: theta = origin + byte * scale of its block.

    A single model is off by up to one step, a 127th of its block's largest difference, where it would be half a step
    without the feedback; what was lost is not lost for good, while a model that moves by less than half a step a round
    would without it seem to stand still.
    """

    encoding = 1
    min_bytes = 1

    def __init__(self, origin: Float[Tensor, " d"]) -> None:
        self.base = hashlib.sha256(_little_endian(origin).data).digest()
        self._origin = origin.detach().cpu().clone()
        self._residual = torch.zeros_like(self._origin)  # what rounding has lost so far
        self._blocks = -(-len(origin) // BLOCK_SIZE)
        self._size = 4 * self._blocks + len(origin)
        self.max_bytes = (
            self._size + self._size // 256 + 1024
        )  # what cannot be compressed grows by less

    def encode(self, theta: Float[Tensor, " d"]) -> bytes:
        """A model as bytes of their own, while `theta` goes on to be trained; what its rounding loses is owed."""
        theta = theta.detach().cpu()
        content = np.empty(self._size, np.uint8)
        scales = content[: 4 * self._blocks].view("<f4")
        numbers = content[4 * self._blocks :].view(np.int8)
        for k in range(0, len(theta), _SLICE_SIZE):
            part = slice(k, k + _SLICE_SIZE)
            blocks = slice(k // BLOCK_SIZE, (k + _SLICE_SIZE) // BLOCK_SIZE)
            wanted = theta[part] - self._origin[part] + self._residual[part]
            rounded, scale = _quantize(wanted)
            numbers[part], scales[blocks] = rounded.to(torch.int8).numpy(), scale.numpy()
            self._residual[part] = wanted - _dequantize(rounded, scale)
            if (
                not scale.isfinite().all()
            ):  # nobody takes such a model, and the next may be a good one
                self._residual[part] = 0
        how = zstandard.ZstdCompressionParameters.from_level(
            _ZSTD_LEVEL,
            source_size=self._size,
            window_log=MAX_WINDOW_BYTES.bit_length() - 1,
            write_content_size=True,
        )
        return zstandard.ZstdCompressor(compression_params=how).compress(content.data)

    def buffer(self, size: int, into: Float[Tensor, " d"]) -> memoryview:
        """Memory of its own, which is about a quarter of the model's."""
        return memoryview(bytearray(size))

    def decode_(self, content: _BytesLike, into: Float[Tensor, " d"]) -> str:
        """Fill `into` from bytes that may be hostile; where they hold no model, leave it as it was and say why.

        It takes memory for one byte a number, whatever the content claims.
        """
        if len(content) > self.max_bytes:
            return f"it has {len(content)} bytes, expected at most {self.max_bytes}"
        try:
            # The decompressor reserves what a frame says, whatever limit it is given.
            frame = zstandard.get_frame_parameters(content)
            if (
                frame.content_size != self._size
                or frame.window_size > MAX_WINDOW_BYTES
                or frame.dict_id
            ):
                return (
                    f"its frame is of {frame.content_size} bytes, with a window of {frame.window_size} and the "
                    f"dictionary {frame.dict_id}, expected {self._size}, at most {MAX_WINDOW_BYTES}, and 0"
                )
            expand = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
            plain = expand.decompress(content, allow_extra_data=False)
        except zstandard.ZstdError as error:
            return f"it cannot be decompressed: {error}"
        if len(plain) != self._size:  # a frame to be skipped holds nothing
            return f"it holds {len(plain)} bytes, expected {self._size}"
        scales = _to_tensor(np.frombuffer(plain, "<f4", self._blocks))
        if not ((scales >= 0) & (scales <= MAX_SCALE)).all():
            return f"it has scales that are not finite, negative, or above {MAX_SCALE:g}"
        numbers = np.frombuffer(plain, np.int8, offset=4 * self._blocks)
        for k in range(0, len(into), _SLICE_SIZE):
            part = slice(k, k + _SLICE_SIZE)
            blocks = slice(k // BLOCK_SIZE, (k + _SLICE_SIZE) // BLOCK_SIZE)
            into[part] = _dequantize(_to_tensor(numbers[part]), scales[blocks]).add_(
                self._origin[part]
            )
        return ""

    def state(self) -> dict[str, Tensor]:
        """What the roundings so far have lost, by name, for a checkpoint; `pack` changes it."""
        return {"owed": self._residual}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from such a state; raises RunError for one of another coding or model."""
        _check_state(state, self.state())
        self._residual.copy_(state["owed"])


def _quantize(x: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " b"]]:
    """Numbers as whole ones from -127 to 127, and the scale of each block; a block of zeros has the scale zero."""
    lines = _blocks(x)
    scale = lines.abs().amax(1) / _MAX_LEVEL
    steps = scale.where(scale > 0, 1)
    # Where numbers are so small that the scale itself is rounded, there may be more steps than a byte holds.
    return (lines / steps[:, None]).round_().clamp_(-_MAX_LEVEL, _MAX_LEVEL).flatten()[
        : len(x)
    ], scale


def _dequantize(numbers: Float[Tensor, " n"], scale: Float[Tensor, " b"]) -> Float[Tensor, " n"]:
    """Each number times the scale of its block."""
    return _blocks(numbers).mul(scale[:, None]).flatten()[: len(numbers)]


def _blocks(x: Float[Tensor, " n"]) -> Float[Tensor, "b size"]:
    """Blocks of numbers, the last one filled up with zeros."""
    return F.pad(x, (0, -len(x) % BLOCK_SIZE)).view(-1, BLOCK_SIZE)


def _little_endian(theta: Float[Tensor, " d"]) -> Float[np.ndarray, " d"]:
    """Numbers as they are sent, which are those of `theta` where the machine is little-endian."""
    found: np.ndarray = theta.detach().cpu().contiguous().numpy().astype("<f4", copy=False)
    return found


def _to_tensor(numbers: np.ndarray) -> Float[Tensor, " n"]:
    """A copy of received numbers, as this machine computes with them."""
    return torch.from_numpy(numbers.astype(np.float32))


def _check_state(state: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    found, expected = (
        {name: (t.dtype, t.shape) for name, t in each.items()} for each in (state, like)
    )
    if found != expected:
        raise RunError(
            f"the checkpoint is of another encoding or model: it holds {sorted(state)} of it, expected {sorted(like)}; "
            "go on with the federation file that it was begun with"
        )
