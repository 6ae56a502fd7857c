"""Codecs: raw models are exact, int8 models accurate to a step, hostile bytes refused.

Top-k differences are those of `tests/federated/test_top_k.py`; here are their bytes and receivers.
"""

import hashlib
import struct
import tracemalloc

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedcb2o.errors import RunError
from fedcb2o.federated.guards.acceptance import MAX_VALUE
from fedcb2o.peer.wire.compression import (
    BLOCK_SIZE,
    MAX_SCALE,
    MAX_WINDOW_BYTES,
    Codec,
    Int8Codec,
    RawCodec,
    TopKCodec,
)
from fedcb2o.peer.wire.protocol import Manifest

DIM = 3 * BLOCK_SIZE + 5  # the last block is not full


def random_model(seed: int, dim: int = DIM, size: float = 1.0) -> Tensor:
    return size * torch.randn(dim, generator=torch.Generator().manual_seed(seed))


def decode(codec: Codec, content: bytes, dim: int = DIM) -> Tensor:
    into = torch.full((dim,), torch.nan)
    assert codec.decode_(content, into) == ""
    return into


def refusal_reason(codec: Codec, content: bytes, dim: int = DIM) -> str:
    into = torch.full((dim,), 7.0)
    reason = codec.decode_(content, into)
    assert reason
    assert "\n" not in reason
    assert (into == 7).all(), "what is refused leaves no trace"
    return reason


def frame(plain: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(plain)


def plain_content(scales: list[float], numbers: bytes) -> bytes:
    return struct.pack(f"<{len(scales)}f", *scales) + numbers


# Raw


def test_raw_bytes_are_little_endian_float32():
    assert RawCodec(3).encode(torch.tensor([1.0, -2.0, 0.15625])) == bytes.fromhex(
        "0000803f 000000c0 0000203e"
    )
    assert RawCodec(3).base == bytes(32)
    assert RawCodec(3).max_bytes == 12


def test_raw_codec_returns_the_model_bit_for_bit():
    theta = torch.cat(
        [torch.tensor([0.0, -0.0, 1e-45, 3e38, torch.inf, torch.nan]), random_model(0, 300_000)]
    )
    decoded = decode(
        RawCodec(len(theta)), memoryview(RawCodec(len(theta)).encode(theta)), len(theta)
    )
    # a later check refuses values that are not finite
    assert torch.equal(decoded.view(torch.int32), theta.view(torch.int32))


@pytest.mark.parametrize("codec", [RawCodec(DIM), Int8Codec(random_model(0))], ids=["raw", "int8"])
def test_an_encoded_model_is_a_copy(codec):
    theta = random_model(1)
    content = codec.encode(theta)
    decoded, content_copy = decode(codec, content), bytes(content)
    theta.zero_()
    assert bytes(content) == content_copy
    assert torch.equal(decode(codec, content), decoded)


@pytest.mark.parametrize("codec", [RawCodec(DIM), Int8Codec(random_model(0))], ids=["raw", "int8"])
def test_a_model_is_assembled_chunk_by_chunk_in_its_buffer(codec):
    content, into = codec.encode(random_model(1)), torch.zeros(2, DIM)[1]
    chunk_buffer = codec.buffer(len(content), into)
    for k in range(0, len(content), 1000):
        chunk_buffer[k : k + 1000] = content[k : k + 1000]
    assert codec.decode_(chunk_buffer, into) == ""
    assert torch.equal(into, decode(codec, content))


def test_a_buffer_has_the_requested_size_and_fits_the_row():
    for size in (0, 7, 4 * DIM - 4):
        assert len(RawCodec(DIM).buffer(size, torch.zeros(DIM))) == size
        assert RawCodec(DIM).decode_(RawCodec(DIM).buffer(size, torch.zeros(DIM)), torch.zeros(DIM))


@pytest.mark.parametrize("size", [0, 4 * DIM - 1, 4 * DIM + 1, 8 * DIM])
def test_raw_bytes_of_wrong_length_are_refused(size):
    assert refusal_reason(RawCodec(DIM), bytes(size)) == "size"


# Int8 by hand


def test_int8_bytes_and_rounding_errors_of_a_small_model():
    codec = Int8Codec(torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0]))
    # differences 127, -64, 0.375, 0.625, 0: a step is 1
    theta = torch.tensor([128.0, -63.0, 1.375, 1.625, 1.0])
    content = codec.encode(theta)
    assert zstandard.decompress(content) == bytes.fromhex("0000803f 7f c0 00 01 00")
    assert decode(codec, content, 5).tolist() == [128.0, -63.0, 1.0, 2.0, 1.0]
    assert codec.state()["owed"].tolist() == [0.0, 0.0, 0.375, -0.375, 0.0]
    # with the rounding errors the differences are 0.75 and 0.25
    again = decode(codec, codec.encode(theta), 5)
    assert again.tolist() == [128.0, -63.0, 2.0, 1.0, 1.0]
    assert codec.state()["owed"].tolist() == [0.0, 0.0, -0.25, 0.25, 0.0]
    assert codec.base == hashlib.sha256(bytes.fromhex("0000803f") * 5).digest()


def test_each_block_has_its_own_scale():
    codec, theta = Int8Codec(torch.zeros(DIM)), random_model(3)
    theta[BLOCK_SIZE : 2 * BLOCK_SIZE] *= 1e-6
    theta[2 * BLOCK_SIZE : 3 * BLOCK_SIZE] = 0
    decoded = decode(codec, codec.encode(theta))
    for start in range(0, DIM, BLOCK_SIZE):
        block = slice(start, start + BLOCK_SIZE)
        half = theta[block].abs().max() / 127 / 2
        assert (decoded[block] - theta[block]).abs().max() <= 1.0001 * half
    assert (decoded[2 * BLOCK_SIZE : 3 * BLOCK_SIZE] == 0).all()


def test_the_initial_model_is_encoded_exactly_in_few_bytes():
    codec = Int8Codec(random_model(0))
    content = codec.encode(random_model(0))
    assert torch.equal(decode(codec, content), random_model(0))
    assert len(content) < 100


@pytest.mark.parametrize("size", [1e-45, 1e-43, 3e-43, 1e-38, 1.0, MAX_VALUE])
def test_rounding_errors_are_bounded_for_all_magnitudes(size):
    theta = torch.linspace(-1, 1, DIM) * size
    sender, receiver = Int8Codec(torch.full((DIM,), -size)), Int8Codec(torch.full((DIM,), -size))
    for _ in range(3):
        decoded = decode(receiver, sender.encode(theta))
        # the smallest scales are rounded, too
        assert (decoded - theta).abs().max() <= 2.1 * size / 127 + 1e-42


# Feedback


def test_sent_models_sum_to_the_models_up_to_one_rounding_error():
    codec, theta = Int8Codec(torch.zeros(DIM)), random_model(1)
    sent_sum, model_sum = (
        torch.zeros(DIM, dtype=torch.float64),
        torch.zeros(DIM, dtype=torch.float64),
    )
    for n in range(1, 30):
        theta = theta + random_model(n, size=1e-3)
        sent_sum += decode(codec, codec.encode(theta))
        model_sum += theta
        assert torch.allclose(
            model_sum - sent_sum, codec.state()["owed"].double(), rtol=0, atol=1e-6 * n
        )
        assert (model_sum - sent_sum).abs().max() <= 1.05 * theta.abs().max() / 127 / 2


def test_error_feedback_follows_changes_smaller_than_a_step():
    codec, theta, drift = Int8Codec(torch.zeros(DIM)), random_model(1), torch.zeros(DIM)
    drift[100] = theta[:BLOCK_SIZE].abs().max() / 127 / 20
    errors = []
    for _ in range(40):
        decoded = decode(codec, codec.encode(theta))
        assert (decoded - theta).abs().max() <= 1.02 * theta.abs().max() / 127
        errors.append(decoded[100] - theta[100])
        theta = theta + drift
    step = drift[100] * 20
    assert abs(torch.stack(errors).mean()) < step / 40


def test_a_non_finite_model_is_refused_and_leaves_no_rounding_error():
    codec = Int8Codec(random_model(0))
    for value in (torch.nan, torch.inf, -torch.inf, 1e38):
        theta = random_model(1)
        theta[5] = value
        assert "scales" in refusal_reason(codec, codec.encode(theta))
    codec = Int8Codec(random_model(0))
    theta = random_model(1)
    theta[5] = torch.nan
    codec.encode(theta)
    assert torch.equal(
        decode(codec, codec.encode(random_model(1))),
        decode(codec, Int8Codec(random_model(0)).encode(random_model(1))),
    )


# Bits and checkpoints


def test_encoding_is_deterministic_also_after_a_restart():
    models = [random_model(n, 200_000) for n in range(1, 4)]
    one, two = Int8Codec(random_model(0, 200_000)), Int8Codec(random_model(0, 200_000))
    first = [one.encode(theta) for theta in models]
    assert two.encode(models[0]) == first[0]
    state = {name: tensor.clone() for name, tensor in two.state().items()}
    resumed = Int8Codec(random_model(0, 200_000))
    resumed.load_state(state)
    assert [resumed.encode(theta) for theta in models[1:]] == first[1:]
    assert one.base == two.base != Int8Codec(random_model(9, 200_000)).base


def test_encoding_does_not_depend_on_the_number_of_threads():
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            codec = Int8Codec(random_model(0, 200_000))
            content = codec.encode(random_model(1, 200_000))
            results.append((content, decode(codec, content, 200_000).numpy().tobytes()))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "state", [{}, {"owed": torch.zeros(DIM - 1)}, {"owed": torch.zeros(DIM).double()}]
)
def test_a_state_of_another_model_is_refused(state):
    with pytest.raises(RunError, match="another encoding"):
        Int8Codec(random_model(0)).load_state(state)
    if state:
        with pytest.raises(RunError, match="another encoding"):
            RawCodec(DIM).load_state(state)


# Hostile bytes


BLOCKS = -(-DIM // BLOCK_SIZE)
GOOD = plain_content([1.0] * BLOCKS, bytes(DIM))
SKIPPED = struct.pack("<II", 0x184D2A50, len(GOOD)) + bytes(len(GOOD))


def test_a_valid_frame_of_another_encoder_is_accepted():
    assert torch.equal(decode(Int8Codec(torch.ones(DIM)), frame(GOOD)), torch.ones(DIM))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "compression"),
        (b"\x28\xb5\x2f\xfd", "compression"),
        (bytes(1000), "compression"),
        (frame(GOOD)[:-1], "compression"),
        (frame(GOOD) + b"x", "compression"),
        (frame(GOOD) + frame(GOOD), "compression"),
        (frame(GOOD, write_content_size=False), "frame"),
        (frame(GOOD[:-1]), "frame"),
        (frame(GOOD + b"x"), "frame"),
        (frame(b""), "frame"),
        (bytes(2 * len(GOOD)), "size"),
        (frame(plain_content([1.0, torch.nan, 1.0, 1.0], bytes(DIM))), "scales"),
        (frame(plain_content([1.0, 1.0, 1.0, torch.inf], bytes(DIM))), "scales"),
        (frame(plain_content([1.0, 1.0, 3e38, 1.0], bytes(DIM))), "scales"),
        (frame(plain_content([1.0, 1.0, -1.0, 1.0], bytes(DIM))), "scales"),
        (frame(plain_content([1.001 * MAX_SCALE, 1.0, 1.0, 1.0], bytes(DIM))), "scales"),
    ],
)
def test_invalid_content_is_refused_with_a_reason(content, reason):
    assert reason == refusal_reason(Int8Codec(random_model(0)), content)


def test_skippable_frames_and_frames_with_a_dictionary_are_refused():
    assert refusal_reason(Int8Codec(random_model(0)), SKIPPED)
    dictionary = zstandard.ZstdCompressionDict(
        b"scale" * 100, dict_type=zstandard.DICT_TYPE_RAWCONTENT
    )
    assert (
        decode(Int8Codec(torch.zeros(DIM)), frame(GOOD, dict_data=dictionary)).abs().max() == 0
    )  # this frame names no dictionary
    content = bytearray(frame(GOOD))
    content[4] |= 1  # this header claims a dictionary
    assert "frame" in refusal_reason(
        Int8Codec(random_model(0)), bytes(content[:5] + b"\x07" + content[5:])
    )


def test_decoded_models_are_finite_also_at_the_largest_scale():
    decoded = decode(
        Int8Codec(torch.full((DIM,), -MAX_VALUE)),
        frame(plain_content([MAX_SCALE] * BLOCKS, b"\x80" * DIM)),
    )
    assert decoded.isfinite().all()
    assert decoded.min() < -MAX_VALUE  # the receiver refuses it later


def bomb(claims: int | None) -> bytes:
    """Return 64 MiB of zeros compressed to a few kB; the frame claims to hold `claims` bytes."""
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    compressed = b"".join(compressor.compress(bytes(2**20)) for _ in range(64)) + compressor.flush()
    assert compressed[4] == 0  # the header consists of a descriptor and a window
    return (
        compressed
        if claims is None
        else compressed[:4] + b"\x80" + compressed[5:6] + struct.pack("<I", claims) + compressed[6:]
    )


def huge_window(log: int) -> bytes:
    """Return a frame of valid size that requires a window of 2^log bytes and then ends."""
    return (
        b"\x28\xb5\x2f\xfd\x80"
        + bytes([(log - 10) << 3])
        + struct.pack("<I", len(GOOD))
        + frame(GOOD)[8:-8]
    )


@pytest.mark.parametrize(
    "content",
    [
        bomb(None),
        bomb(2**26),
        bomb(2**32 - 1),
        bomb(len(GOOD)),
        huge_window(31),
        huge_window(25),
        frame(GOOD)[:-3],
    ],
    ids=["unsaid", "honest", "4 GiB", "lying", "window of 2 GiB", "window of 32 MiB", "truncated"],
)
def test_memory_is_bounded_for_all_claimed_frame_sizes(content):
    codec, into = Int8Codec(random_model(0)), torch.zeros(DIM)
    tracemalloc.start()
    try:
        assert codec.decode_(content, into)
        assert tracemalloc.get_traced_memory()[1] < 2**18
    finally:
        tracemalloc.stop()


def test_decoding_takes_little_more_than_one_byte_per_parameter():
    dim = 2_000_000
    codec = Int8Codec(torch.zeros(dim))
    content, into = codec.encode(random_model(1, dim)), torch.zeros(dim)
    tracemalloc.start()
    try:
        assert codec.decode_(content, into) == ""
        assert tracemalloc.get_traced_memory()[1] < dim + 2**21
    finally:
        tracemalloc.stop()


def test_an_encoded_model_never_exceeds_max_bytes():
    for dim in (1, 5, BLOCK_SIZE, DIM, 150_001):
        codec = Int8Codec(torch.zeros(dim))
        noise = torch.from_numpy(
            np.random.default_rng(0).integers(-127, 128, dim).astype(np.float32)
        )
        content = codec.encode(noise)
        assert len(content) <= codec.max_bytes
        assert torch.allclose(decode(codec, content, dim), noise, rtol=0, atol=0.51)


def test_a_window_above_the_limit_is_refused():
    dim = 4 * MAX_WINDOW_BYTES
    content = zstandard.ZstdCompressor(level=19).compress(
        plain_content([1.0] * (dim // BLOCK_SIZE), bytes(dim))
    )
    assert "frame" in refusal_reason(Int8Codec(torch.zeros(dim)), content, dim)


ENCODED = {
    "raw": RawCodec(DIM).encode(random_model(1)),
    "int8": Int8Codec(random_model(0)).encode(random_model(1)),
}


@settings(max_examples=60)
@given(st.sampled_from(["raw", "int8"]), st.data())
def test_mutated_bytes_are_refused_or_decoded_without_an_exception(name, data):
    codec: Codec = RawCodec(DIM) if name == "raw" else Int8Codec(random_model(0))
    content = bytearray(ENCODED[name])
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.one_of(st.integers(0, 20), st.integers(0, len(content) - 1)))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                content[position] ^= data.draw(st.integers(1, 255))
            case "cut":
                del content[position : position + data.draw(st.integers(1, 9))]
            case "insert":
                content[position:position] = data.draw(st.binary(min_size=1, max_size=9))
    into = torch.full((DIM,), 7.0)
    if codec.decode_(content, into):
        assert (into == 7).all()
    elif name == "int8":
        assert into.isfinite().all()


@settings(max_examples=40)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(content):
    assert refusal_reason(Int8Codec(random_model(0)), content)
    assert refusal_reason(Int8Codec(random_model(0)), frame(content))
    assert refusal_reason(RawCodec(DIM), content)


# Top-k differences


class Follower:
    """Receiver of one sender's models, by the ranges of bytes that it asks for."""

    def __init__(self, sender: TopKCodec, origin: Tensor) -> None:
        self.sender, self.codec, self.content = sender, TopKCodec(origin), b""
        self.dim = len(origin)

    def manifest(self, n: int) -> Manifest:
        content = self.content[: self.sender.max_bytes]
        return Manifest.from_content(
            content, run=bytes(32), agent=1, round=n, dim=self.dim, num_samples=1, encoding=2,
            base=self.sender.base,
        )  # fmt: skip

    def receive(self, n: int) -> tuple[Tensor, list[int]]:
        """Return the model and the sizes of the downloads that it took."""
        into, sizes = torch.full((self.dim,), torch.nan), []
        for part in self.codec.ranges(1, n):
            sizes.append(len(part))
            content = self.content[part.start : part.stop]
            assert len(content) == len(part)
            if not self.codec.follow_(1, self.manifest(n), content, into):
                return into, sizes
        raise AssertionError("nothing fits")


def sender_and_follower(dim: int = DIM) -> tuple[TopKCodec, Follower]:
    origin = random_model(0, dim)
    sender = TopKCodec(origin)
    return sender, Follower(sender, origin)


def test_top_k_bytes_of_a_small_model_by_hand():
    """Index 16 with code 0, of the positive difference 2, then index 17 with code 3, of -4."""
    codec, theta = TopKCodec(torch.zeros(18)), torch.zeros(18)
    theta[16], theta[17] = 2.0, -4.0
    content = codec.encode(theta, 0)
    bits = f"{16:012b}00{17:012b}11".ljust(32, "0")
    expected = struct.pack("<2f", 2.0, 4.0) + int(bits, 2).to_bytes(4)
    assert content[: codec.max_bytes] == expected
    assert content[codec.max_bytes : 32 * codec.max_bytes] == bytes(31 * len(expected))
    assert content[32 * codec.max_bytes :] == theta.numpy().tobytes()
    assert codec.base == hashlib.sha256(theta.numpy().tobytes()).digest()


def test_a_receiver_needs_the_differences_since_its_last_model():
    sender, follower = sender_and_follower()
    size = sender.max_bytes
    theta = random_model(1)
    expected = []
    for n, is_asked in enumerate([True, True, False, False, True]):
        theta = theta + random_model(n + 2, size=0.1)
        follower.content = sender.encode(theta, n)
        if is_asked:
            model, sizes = follower.receive(n)
            assert torch.equal(model, sender.state()["sent"])
            expected.append(sizes)
    assert expected == [[size], [size], [3 * size]]
    assert follower.receive(4)[1] == [0]


def test_a_receiver_that_is_far_behind_or_meets_a_restart_needs_the_whole_model():
    sender, follower = sender_and_follower()
    for n in range(40):
        follower.content = sender.encode(random_model(n), n)
    model, sizes = follower.receive(39)
    assert sizes == [4 * DIM]
    assert torch.equal(model, sender.state()["sent"])

    # A sender that restarts has its published model, and not the differences before.
    restarted = TopKCodec(random_model(0))
    restarted.load_state(sender.state())
    follower.sender = restarted
    restarted.encode(random_model(40), 40)
    follower.content = restarted.encode(random_model(41), 41)
    assert follower.receive(41)[1] == [2 * sender.max_bytes]
    restarted.load_state(restarted.state())
    other = TopKCodec(random_model(0))
    other.load_state(restarted.state())
    other.encode(random_model(42), 42)  # a third one knows nothing of round 42
    third = TopKCodec(random_model(0))
    third.load_state(other.state())
    follower.sender = third
    follower.content = third.encode(random_model(43), 43)
    model, sizes = follower.receive(43)
    assert sizes == [2 * sender.max_bytes, 4 * DIM]
    assert torch.equal(model, third.state()["sent"])


def test_skipped_rounds_are_no_difference():
    sender, follower = sender_and_follower()
    follower.content = sender.encode(random_model(1), 0)
    follower.receive(0)
    follower.content = sender.encode(random_model(2), 9)
    model, sizes = follower.receive(9)
    assert sizes == [9 * sender.max_bytes]
    assert torch.equal(model, sender.state()["sent"])


def test_a_model_that_is_not_finite_does_not_enter_later_ones():
    sender, follower = sender_and_follower()
    follower.content = sender.encode(torch.full((DIM,), torch.nan), 0)
    assert follower.receive(0)[0].isnan().all()  # refused by a later check
    follower.content = sender.encode(random_model(1), 1)
    model, _ = follower.receive(1)
    assert model.isfinite().all()
    assert torch.equal(model, sender.state()["sent"])


@pytest.mark.parametrize(
    ("levels", "words", "reason"),
    [
        ([torch.nan, 1.0], [4, 8], "content"),
        ([0.0, torch.inf], [4, 8], "content"),
        ([-1.0, 1.0], [4, 8], "content"),
        ([1.0, 3e38], [4, 8], "content"),
        ([1.0, 2.0], [8, 8], "content"),  # one position twice
        ([1.0, 2.0], [8, 4], "content"),  # not ascending
        ([1.0, 2.0], [4, 4 * 18], "content"),  # beyond the model
        ([1.0, 2.0], [4, 4 * 4095], "content"),
        ([1.0, 2.0], [4, 8], "hash"),
        ([0.0, 0.0], [0, 0], "hash"),
    ],
)
def test_crafted_differences_are_refused_and_change_nothing(levels, words, reason):
    codec = TopKCodec(torch.zeros(18))
    bits = "".join(f"{word:014b}" for word in words).ljust(32, "0")
    message = struct.pack("<2f", *levels) + int(bits, 2).to_bytes(4)
    manifest = Follower(codec, torch.zeros(18)).manifest(0)
    into = torch.full((18,), 7.0)
    assert codec.follow_(1, manifest, message, into) == reason
    assert (into == 7).all()
    assert codec.ranges(1, 0)[0] == range(codec.max_bytes)  # it still has theta_0


def test_one_of_several_models_of_a_round_is_whole_and_leaves_no_trace():
    """Simulated attackers send each peer another model, whole."""
    sender, follower = sender_and_follower()
    follower.content = sender.encode_exactly(random_model(5))
    model, sizes = follower.receive(0)
    assert torch.equal(model, random_model(5))
    assert sizes == [sender.max_bytes, 4 * DIM]
    assert torch.equal(sender.state()["sent"], random_model(0))
