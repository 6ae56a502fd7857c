"""Codecs of a model: raw float32, and int8 or top-k differences with error feedback.

`Int8Codec` sends the difference of a model from theta_0, the initial model that the whole
federation knows. Blocks of 2048 numbers share a scale, numbers are rounded to 8 bits, and zstandard
compresses the result. The rounding error is added to the difference of the next round (Seide, Fu,
Droppo, Li and Yu 2014, "1-bit stochastic gradient descent and its application to data-parallel
distributed training of speech DNNs"; Karimireddy, Rebjock, Stich and Jaggi 2019, "Error feedback
fixes SignSGD and other gradient compression schemes"). The models sent over several rounds
therefore add up to the true ones except for one rounding. Differences from the previously sent
model, as in EF21 (Richtarik, Sokolov and Fatkhullin 2021), are smaller, but only for receivers of
an earlier model. `TopKCodec` sends these, and offers the last 32 of them and the whole model.
"""

import hashlib
import sys
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch
import zstandard
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from fedcb2o.errors import RunError
from fedcb2o.federated import top_k
from fedcb2o.federated.guards.acceptance import MAX_VALUE
from fedcb2o.peer.wire.protocol import ZERO_DIGEST, BytesLike, Manifest

BLOCK_SIZE = 2048  # numbers that share a scale
_MAX_LEVEL = 127  # largest magnitude of an 8-bit number that is sent
MAX_SCALE = 4 * MAX_VALUE / _MAX_LEVEL  # models within the bound differ by at most half of this
_ZSTD_LEVEL = 1  # levels 2 and 3 are slower and save less than 0.2% on trained networks
MAX_WINDOW_BYTES = 2**19  # of zstandard; a decompressor needs this much memory
_SLICE_SIZE = 64 * BLOCK_SIZE  # numbers per step, so that they stay in the cache


class _Codec:
    """Codec whose `state` is what the next `encode` depends on, for a checkpoint.

    `base` is the digest in the manifest of the last model that it encoded, and `expected_base` that
    which a manifest must have; None for any.
    """

    base: bytes
    min_bytes: int
    max_bytes: int

    @property
    def expected_base(self) -> bytes | None:
        return self.base

    def encode(self, theta: Float[Tensor, " d"], n: int = 0) -> bytes:
        """Encode the model of round n; the manifest is of at most `max_bytes` at the start."""
        raise NotImplementedError

    def encode_exactly(self, theta: Float[Tensor, " d"]) -> bytes:
        """Encode one of several models of a round, for simulated attackers."""
        return self.encode(theta)

    def ranges(self, peer: int, n: int) -> list[range]:
        """Return the bytes to download of a peer's model of round n; others if these fail."""
        return []

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        formats = [
            {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
            for tensors in (state, self.state())
        ]
        if formats[0] != formats[1]:
            raise RunError(
                f"the checkpoint is of another encoding or model: it holds {sorted(state)} of it, "
                f"expected {sorted(self.state())}; go on with the federation file that it was "
                "begun with"
            )
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


class RawCodec(_Codec):
    """Little-endian float32 numbers. The sizes are those of an encoded model."""

    encoding = 0
    base = ZERO_DIGEST

    def __init__(self, dim: int) -> None:
        self.min_bytes = self.max_bytes = 4 * dim

    def encode(self, theta: Float[Tensor, " d"], n: int = 0) -> bytes:
        """Encode a model as a copy; it may be trained further afterwards."""
        return _little_endian(theta).tobytes()

    def buffer(self, size: int, into: Float[Tensor, " d"]) -> memoryview:
        """Return writable memory for received bytes: that of `into` if its format is right."""
        if size == self.max_bytes and sys.byteorder == "little" and into.device.type == "cpu":
            return into.numpy().data.cast("B")
        return memoryview(bytearray(size))

    def decode_(self, content: BytesLike, into: Float[Tensor, " d"]) -> str:
        """Decode a hostile model in place; return why its bytes are none, or an empty text."""
        if len(content) != self.max_bytes:
            return "size"
        numbers = np.frombuffer(content, "<f4")
        if numbers.ctypes.data == into.data_ptr() and sys.byteorder == "little":
            return ""  # received into the tensor's own memory
        for k in range(0, len(into), _SLICE_SIZE):
            into[k : k + _SLICE_SIZE] = _to_tensor(numbers[k : k + _SLICE_SIZE])
        return ""


class Int8Codec(_Codec):
    """Differences from theta_0 in 8 bits, with error feedback.

    A message is one zstandard frame: the scales of all blocks as little-endian float32, then one
    signed byte per number; theta = theta_0 + byte * scale of its block.

    A single model is off by at most one step, 1/127 of its block's largest difference; without
    feedback it would be half a step. In exchange no rounding error is lost for good. Without
    feedback a model that moves by less than half a step per round would seem to stand still.
    """

    encoding = 1
    min_bytes = 1

    def __init__(self, origin: Float[Tensor, " d"]) -> None:
        self.base = hashlib.sha256(_little_endian(origin).data).digest()
        self._origin = origin.detach().cpu().clone()
        self._residual = torch.zeros_like(self._origin)  # accumulated rounding error
        self._num_blocks = -(-len(origin) // BLOCK_SIZE)
        self._size = 4 * self._num_blocks + len(origin)
        # Incompressible data grow by less.
        self.max_bytes = self._size + self._size // 256 + 1024

    def encode(self, theta: Float[Tensor, " d"], n: int = 0) -> bytes:
        """Encode a model and keep its rounding error for the next one."""
        theta = theta.detach().cpu()
        content = np.empty(self._size, np.uint8)
        scales = content[: 4 * self._num_blocks].view("<f4")
        numbers = content[4 * self._num_blocks :].view(np.int8)

        for k in range(0, len(theta), _SLICE_SIZE):
            part = slice(k, k + _SLICE_SIZE)
            blocks = slice(k // BLOCK_SIZE, (k + _SLICE_SIZE) // BLOCK_SIZE)
            wanted = theta[part] - self._origin[part] + self._residual[part]
            levels, scale = _quantize(wanted)
            numbers[part] = levels.to(torch.int8).numpy()
            scales[blocks] = scale.numpy()
            self._residual[part] = wanted - _dequantize(levels, scale)
            # Every receiver refuses such a model, but the next one may be finite again.
            if not scale.isfinite().all():
                self._residual[part] = 0

        # A small window bounds the memory of every receiver.
        parameters = zstandard.ZstdCompressionParameters.from_level(
            _ZSTD_LEVEL,
            source_size=self._size,
            window_log=MAX_WINDOW_BYTES.bit_length() - 1,
            write_content_size=True,
        )
        return zstandard.ZstdCompressor(compression_params=parameters).compress(content.data)

    def buffer(self, size: int, into: Float[Tensor, " d"]) -> memoryview:
        """Return new memory, about a quarter of the model's."""
        return memoryview(bytearray(size))

    def decode_(self, content: BytesLike, into: Float[Tensor, " d"]) -> str:
        if len(content) > self.max_bytes:
            return "size"
        try:
            # The decompressor allocates the size that a frame claims, whatever its limit.
            frame = zstandard.get_frame_parameters(content)
            is_expected = frame.content_size == self._size and not frame.dict_id
            if not is_expected or frame.window_size > MAX_WINDOW_BYTES:
                return "frame"
            decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
            plain = decompressor.decompress(content, allow_extra_data=False)
        except zstandard.ZstdError:
            return "compression"
        # A skippable frame is empty, whatever size it claims.
        if len(plain) != self._size:
            return "frame"

        scales = _to_tensor(np.frombuffer(plain, "<f4", self._num_blocks))
        # NaN fails both comparisons.
        if not ((scales >= 0) & (scales <= MAX_SCALE)).all():
            return "scales"

        numbers = np.frombuffer(plain, np.int8, offset=4 * self._num_blocks)
        for k in range(0, len(into), _SLICE_SIZE):
            part = slice(k, k + _SLICE_SIZE)
            blocks = slice(k // BLOCK_SIZE, (k + _SLICE_SIZE) // BLOCK_SIZE)
            difference = _dequantize(_to_tensor(numbers[part]), scales[blocks])
            into[part] = difference.add_(self._origin[part])
        return ""

    def state(self) -> dict[str, Tensor]:
        return {"owed": self._residual}


class TopKCodec(_Codec):
    """Top-k differences from the model that was published before (`federated.top_k`).

    The content is the differences of the last 32 rounds, the newest first, and the whole model.
    The manifest has size and hash of the first one, and as `base` the SHA-256 of the model. A
    receiver keeps the last model of each peer, and needs only the differences since then. It needs
    the whole one from a peer that restarted or that it last asked more than 32 rounds ago. All
    receivers begin with theta_0. Bytes of zeros are no difference, as in rounds that were skipped.

    A message has two magnitudes per chunk of 4096 numbers, the smaller one first, as little-endian
    float32. For each kept number follow 14 bits: its index in the chunk, then its code.
    """

    encoding = 2
    expected_base = None

    def __init__(self, origin: Float[Tensor, " d"]) -> None:
        self._origin = origin.detach().cpu().clone()
        self._sent = self._origin.clone()
        self._history: dict[int, bytes] = {}
        self._held: dict[int, tuple[int, Tensor]] = {}
        self._counts = top_k.kept_counts(len(origin))
        self.min_bytes = self.max_bytes = top_k.message_bytes(len(origin))
        self.base = ZERO_DIGEST

    def encode(self, theta: Float[Tensor, " d"], n: int = 0) -> bytes:
        """Move the published model towards a model of round n; offer the way there."""
        difference = theta.detach().cpu() - self._sent
        # No receiver accepts such a model, but the next one may be finite again.
        if not (difference.abs() <= 2 * MAX_VALUE).all():
            return self.encode_exactly(theta)
        message = top_k.top_k(difference)
        top_k.add_(self._sent, *message)
        self._history = {m: old for m, old in self._history.items() if n - top_k.HISTORY < m < n}
        self._history[n] = _pack(*message)
        return self._content(self._sent, n)

    def encode_exactly(self, theta: Float[Tensor, " d"]) -> bytes:
        return self._content(theta, -1)

    def _content(self, theta: Float[Tensor, " d"], n: int) -> bytes:
        whole = _little_endian(theta).tobytes()
        self.base = hashlib.sha256(whole).digest()
        none = bytes(self.max_bytes)
        messages = [self._history.get(n - j, none) for j in range(top_k.HISTORY)]
        return b"".join([*messages, whole])

    def ranges(self, peer: int, n: int) -> list[range]:
        start, size = top_k.HISTORY * self.max_bytes, 4 * len(self._origin)
        behind = n - self._held.get(peer, (-1, self._origin))[0]
        whole = range(start, start + size)
        is_near = 0 <= behind <= top_k.HISTORY and behind * self.max_bytes < size
        return [range(behind * self.max_bytes), whole] if is_near else [whole]

    def follow_(
        self, peer: int, manifest: Manifest, content: BytesLike, into: Float[Tensor, " d"]
    ) -> str:
        """Decode differences, or a whole model, that a peer sent; keep the model if it fits."""
        if len(content) == 4 * len(into):
            theta = _to_tensor(np.frombuffer(content, "<f4"))
        else:
            theta = self._held.get(peer, (-1, self._origin))[1].clone()
            for start in reversed(range(0, len(content), self.max_bytes)):
                message = self._unpack(memoryview(content)[start : start + self.max_bytes])
                if message is None:
                    return "content"
                top_k.add_(theta, *message)
        if hashlib.sha256(_little_endian(theta).data).digest() != manifest.base:
            return "hash"
        self._held[peer] = (manifest.round, theta)
        into.copy_(theta)
        return ""

    def _unpack(self, message: BytesLike) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return positions, codes and magnitudes of a hostile message; None if they are none."""
        count = len(self._counts)
        levels = _to_tensor(np.frombuffer(message, "<f4", 2 * count)).view(count, 2)
        total = int(self._counts.sum())
        bits = np.unpackbits(np.frombuffer(message, np.uint8, offset=8 * count))
        numbers = bits[: top_k.CODE_BITS * total].reshape(total, -1) @ _PLACES
        words = torch.from_numpy(numbers)
        chunks = torch.arange(count).repeat_interleave(self._counts)
        positions = top_k.CHUNK * chunks + words // 4
        is_level = (levels >= 0) & (levels <= 4 * MAX_VALUE)  # NaN fails
        if not is_level.all() or positions.max() >= len(self._origin):
            return None
        # Of equal positions, which a message of zeros has, only one difference would count.
        is_empty = (levels == 0).all(1)[chunks[1:]]
        if not (is_empty | (positions.diff() > 0)).all():
            return None
        return positions, words % 4, levels

    def state(self) -> dict[str, Tensor]:
        return {"sent": self._sent}


Codec: TypeAlias = RawCodec | Int8Codec | TopKCodec

_PLACES = 2 ** np.arange(top_k.CODE_BITS)[::-1]  # of the bits of a number, the largest first


def _pack(positions: Tensor, codes: Tensor, levels: Float[Tensor, "c 2"]) -> bytes:
    """Return the bytes of a message."""
    words = (positions % top_k.CHUNK * 4 + codes).numpy()
    bits = words[:, None] // _PLACES % 2
    return _little_endian(levels).tobytes() + np.packbits(bits.astype(np.uint8)).tobytes()


def _quantize(x: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " b"]]:
    """Return integers from -127 to 127 and the scale of each block."""
    blocks = _blocks(x)
    scale = blocks.abs().amax(1) / _MAX_LEVEL
    # A block of zeros has scale 0.
    steps = scale.where(scale > 0, 1)
    # Tiny numbers, of which the scale itself is rounded, may need more steps than a byte holds.
    levels = (blocks / steps[:, None]).round_().clamp_(-_MAX_LEVEL, _MAX_LEVEL)
    return levels.flatten()[: len(x)], scale


def _dequantize(levels: Float[Tensor, " n"], scale: Float[Tensor, " b"]) -> Float[Tensor, " n"]:
    return _blocks(levels).mul(scale[:, None]).flatten()[: len(levels)]


def _blocks(x: Float[Tensor, " n"]) -> Float[Tensor, "b size"]:
    """Return the numbers in blocks, the last one padded with zeros."""
    return F.pad(x, (0, -len(x) % BLOCK_SIZE)).view(-1, BLOCK_SIZE)


def _little_endian(theta: Float[Tensor, " d"]) -> Float[np.ndarray, " d"]:
    """Return little-endian numbers, without a copy where possible."""
    numbers: np.ndarray = theta.detach().cpu().contiguous().numpy().astype("<f4", copy=False)
    return numbers


def _to_tensor(numbers: np.ndarray) -> Float[Tensor, " n"]:
    """Return a copy of received numbers as native float32."""
    return torch.from_numpy(numbers.astype(np.float32))
