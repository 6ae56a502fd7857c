"""Codecs: raw models are exact, int8 models within a step, hostile bytes are refused."""

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
from fedcb2o.federated import MAX_VALUE
from fedcb2o.peer.wire import Codec, Int8Codec, RawCodec
from fedcb2o.peer.wire._compression import BLOCK_SIZE, MAX_SCALE, MAX_WINDOW_BYTES

DIM = 3 * BLOCK_SIZE + 5  # the last block is not full


def drawn(seed: int, dim: int = DIM, size: float = 1.0) -> Tensor:
    return size * torch.randn(dim, generator=torch.Generator().manual_seed(seed))


def received(coding: Codec, content: bytes, dim: int = DIM) -> Tensor:
    into = torch.full((dim,), torch.nan)
    assert coding.decode_(content, into) == ""
    return into


def refused(coding: Codec, content: bytes, dim: int = DIM) -> str:
    into = torch.full((dim,), 7.0)
    reason = coding.decode_(content, into)
    assert reason
    assert "\n" not in reason
    assert (into == 7).all(), "what is refused leaves no trace"
    return reason


def frame(plain: bytes, **how: bool) -> bytes:
    return zstandard.ZstdCompressor(**how).compress(plain)


def plain_of(scales: list[float], numbers: bytes) -> bytes:
    return struct.pack(f"<{len(scales)}f", *scales) + numbers


# Raw


def test_raw_bytes_are_little_endian_float32():
    assert RawCodec(3).encode(torch.tensor([1.0, -2.0, 0.15625])) == bytes.fromhex(
        "0000803f 000000c0 0000203e"
    )
    assert RawCodec(3).base == bytes(32)
    assert RawCodec(3).max_bytes == 12


def test_a_raw_model_comes_back_to_the_bit():
    theta = torch.cat(
        [torch.tensor([0.0, -0.0, 1e-45, 3e38, torch.inf, torch.nan]), drawn(0, 300_000)]
    )
    back = received(
        RawCodec(len(theta)), memoryview(RawCodec(len(theta)).encode(theta)), len(theta)
    )
    assert torch.equal(
        back.view(torch.int32), theta.view(torch.int32)
    )  # what is not finite is for others to refuse


@pytest.mark.parametrize("coding", [RawCodec(DIM), Int8Codec(drawn(0))], ids=["raw", "int8"])
def test_a_packed_model_is_a_copy(coding):
    theta = drawn(1)
    content = coding.encode(theta)
    before, there = received(coding, content), bytes(content)
    theta.zero_()
    assert bytes(content) == there
    assert torch.equal(received(coding, content), before)


@pytest.mark.parametrize("coding", [RawCodec(DIM), Int8Codec(drawn(0))], ids=["raw", "int8"])
def test_a_model_is_put_together_in_its_room_chunk_by_chunk(coding):
    content, into = coding.encode(drawn(1)), torch.zeros(2, DIM)[1]
    room = coding.buffer(len(content), into)
    for k in range(0, len(content), 1000):
        room[k : k + 1000] = content[k : k + 1000]
    assert coding.decode_(room, into) == ""
    assert torch.equal(into, received(coding, content))


def test_room_is_never_larger_than_asked_for_nor_over_the_edge_of_the_row():
    for size in (0, 7, 4 * DIM - 4):
        assert len(RawCodec(DIM).buffer(size, torch.zeros(DIM))) == size
        assert RawCodec(DIM).decode_(RawCodec(DIM).buffer(size, torch.zeros(DIM)), torch.zeros(DIM))


@pytest.mark.parametrize("size", [0, 4 * DIM - 1, 4 * DIM + 1, 8 * DIM])
def test_raw_bytes_of_another_length_are_refused(size):
    assert refused(RawCodec(DIM), bytes(size)) == f"it has {size} bytes, expected {4 * DIM}"


# Int8 by hand


def test_the_bytes_of_a_small_model_and_what_rounding_owes():
    coding = Int8Codec(torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0]))
    theta = torch.tensor(
        [128.0, -63.0, 1.375, 1.625, 1.0]
    )  # differences 127, -64, 0.375, 0.625, 0: a step is 1
    content = coding.encode(theta)
    assert zstandard.decompress(content) == bytes.fromhex("0000803f 7f c0 00 01 00")
    assert received(coding, content, 5).tolist() == [128.0, -63.0, 1.0, 2.0, 1.0]
    assert coding.state()["owed"].tolist() == [0.0, 0.0, 0.375, -0.375, 0.0]
    again = received(coding, coding.encode(theta), 5)  # 0.75 and 0.25 are wanted now
    assert again.tolist() == [128.0, -63.0, 2.0, 1.0, 1.0]
    assert coding.state()["owed"].tolist() == [0.0, 0.0, -0.25, 0.25, 0.0]
    assert coding.base == hashlib.sha256(bytes.fromhex("0000803f") * 5).digest()


def test_each_block_has_a_scale_of_its_own():
    coding, theta = Int8Codec(torch.zeros(DIM)), drawn(3)
    theta[BLOCK_SIZE : 2 * BLOCK_SIZE] *= 1e-6
    theta[2 * BLOCK_SIZE : 3 * BLOCK_SIZE] = 0
    back = received(coding, coding.encode(theta))
    for start in range(0, DIM, BLOCK_SIZE):
        block = slice(start, start + BLOCK_SIZE)
        half = theta[block].abs().max() / 127 / 2
        assert (back[block] - theta[block]).abs().max() <= 1.0001 * half
    assert (back[2 * BLOCK_SIZE : 3 * BLOCK_SIZE] == 0).all()


def test_the_model_everybody_begins_with_is_sent_exactly_in_few_bytes():
    coding = Int8Codec(drawn(0))
    content = coding.encode(drawn(0))
    assert torch.equal(received(coding, content), drawn(0))
    assert len(content) < 100


@pytest.mark.parametrize("size", [1e-45, 1e-43, 3e-43, 1e-38, 1.0, MAX_VALUE])
def test_no_size_of_numbers_breaks_the_rounding(size):
    theta = torch.linspace(-1, 1, DIM) * size
    sender, receiver = Int8Codec(torch.full((DIM,), -size)), Int8Codec(torch.full((DIM,), -size))
    for _ in range(3):
        back = received(receiver, sender.encode(theta))
        assert (
            back - theta
        ).abs().max() <= 2.1 * size / 127 + 1e-42  # the smallest scales are rounded themselves


# Feedback


def test_what_was_sent_over_the_rounds_adds_up_to_the_models_but_for_one_rounding():
    coding, theta = Int8Codec(torch.zeros(DIM)), drawn(1)
    sent, there = torch.zeros(DIM, dtype=torch.float64), torch.zeros(DIM, dtype=torch.float64)
    for n in range(1, 30):
        theta = theta + drawn(n, size=1e-3)
        sent += received(coding, coding.encode(theta))
        there += theta
        assert torch.allclose(there - sent, coding.state()["owed"].double(), rtol=0, atol=1e-6 * n)
        assert (there - sent).abs().max() <= 1.05 * theta.abs().max() / 127 / 2


def test_a_model_that_moves_by_less_than_a_step_is_followed_and_never_more_than_a_step_away():
    coding, theta, drift = Int8Codec(torch.zeros(DIM)), drawn(1), torch.zeros(DIM)
    drift[100] = theta[:BLOCK_SIZE].abs().max() / 127 / 20
    seen = []
    for _ in range(40):
        back = received(coding, coding.encode(theta))
        assert (back - theta).abs().max() <= 1.02 * theta.abs().max() / 127
        seen.append(back[100] - theta[100])
        theta = theta + drift
    step = drift[100] * 20
    assert abs(torch.stack(seen).mean()) < step / 40


def test_a_model_that_is_not_finite_is_refused_and_owes_nothing():
    coding = Int8Codec(drawn(0))
    for bad in (torch.nan, torch.inf, -torch.inf, 1e38):
        theta = drawn(1)
        theta[5] = bad
        assert "scales" in refused(coding, coding.encode(theta))
    coding = Int8Codec(drawn(0))
    theta = drawn(1)
    theta[5] = torch.nan
    coding.encode(theta)
    assert torch.equal(
        received(coding, coding.encode(drawn(1))),
        received(coding, Int8Codec(drawn(0)).encode(drawn(1))),
    )


# Bits and checkpoints


def test_the_same_models_give_the_same_bytes_also_after_a_restart():
    models = [drawn(n, 200_000) for n in range(1, 4)]
    one, two = Int8Codec(drawn(0, 200_000)), Int8Codec(drawn(0, 200_000))
    first = [one.encode(theta) for theta in models]
    assert two.encode(models[0]) == first[0]
    state = {name: tensor.clone() for name, tensor in two.state().items()}
    resumed = Int8Codec(drawn(0, 200_000))
    resumed.load_state(state)
    assert [resumed.encode(theta) for theta in models[1:]] == first[1:]
    assert one.base == two.base != Int8Codec(drawn(9, 200_000)).base


def test_the_bits_do_not_depend_on_the_number_of_threads():
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            coding = Int8Codec(drawn(0, 200_000))
            content = coding.encode(drawn(1, 200_000))
            found.append((content, received(coding, content, 200_000).numpy().tobytes()))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "state", [{}, {"owed": torch.zeros(DIM - 1)}, {"owed": torch.zeros(DIM).double()}]
)
def test_a_state_of_another_model_is_refused(state):
    with pytest.raises(RunError, match="another encoding"):
        Int8Codec(drawn(0)).load_state(state)
    if state:
        with pytest.raises(RunError, match="another encoding"):
            RawCodec(DIM).load_state(state)


# Hostile bytes


BLOCKS = -(-DIM // BLOCK_SIZE)
GOOD = plain_of([1.0] * BLOCKS, bytes(DIM))
SKIPPED = struct.pack("<II", 0x184D2A50, len(GOOD)) + bytes(len(GOOD))


def test_a_good_frame_made_by_another_is_taken():
    assert torch.equal(received(Int8Codec(torch.ones(DIM)), frame(GOOD)), torch.ones(DIM))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "decompressed"),
        (b"\x28\xb5\x2f\xfd", "decompressed"),
        (bytes(1000), "decompressed"),
        (frame(GOOD)[:-1], "decompressed"),
        (frame(GOOD) + b"x", "decompressed"),
        (frame(GOOD) + frame(GOOD), "decompressed"),
        (frame(GOOD, write_content_size=False), "its frame has"),
        (frame(GOOD[:-1]), f"its frame has {len(GOOD) - 1} bytes"),
        (frame(GOOD + b"x"), f"its frame has {len(GOOD) + 1} bytes"),
        (frame(b""), "its frame has 0 bytes"),
        (bytes(2 * len(GOOD)), f"it has {2 * len(GOOD)} bytes"),
        (frame(plain_of([1.0, torch.nan, 1.0, 1.0], bytes(DIM))), "scales"),
        (frame(plain_of([1.0, 1.0, 1.0, torch.inf], bytes(DIM))), "scales"),
        (frame(plain_of([1.0, 1.0, 3e38, 1.0], bytes(DIM))), "scales"),
        (frame(plain_of([1.0, 1.0, -1.0, 1.0], bytes(DIM))), "scales"),
        (frame(plain_of([1.001 * MAX_SCALE, 1.0, 1.0, 1.0], bytes(DIM))), "scales"),
    ],
)
def test_what_is_no_model_is_refused_with_the_reason(content, reason):
    assert reason in refused(Int8Codec(drawn(0)), content)


def test_a_frame_to_be_skipped_and_one_with_a_dictionary_are_refused():
    assert refused(Int8Codec(drawn(0)), SKIPPED)
    words = zstandard.ZstdCompressionDict(b"scale" * 100, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    assert (
        received(Int8Codec(torch.zeros(DIM)), frame(GOOD, dict_data=words)).abs().max() == 0
    )  # it names none
    content = bytearray(frame(GOOD))
    content[4] |= 1  # ... and this one says that it has one
    assert "dictionary" in refused(Int8Codec(drawn(0)), bytes(content[:5] + b"\x07" + content[5:]))


def test_what_passes_is_finite_also_at_its_largest():
    found = received(
        Int8Codec(torch.full((DIM,), -MAX_VALUE)),
        frame(plain_of([MAX_SCALE] * BLOCKS, b"\x80" * DIM)),
    )
    assert found.isfinite().all()
    assert found.min() < -MAX_VALUE  # ... and for the receiver to refuse


def bomb(claims: int | None) -> bytes:
    """64 MiB of zeros in some kB, whose frame claims to hold so many bytes."""
    press = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    found = b"".join(press.compress(bytes(2**20)) for _ in range(64)) + press.flush()
    assert found[4] == 0  # a header of a descriptor and a window
    return (
        found
        if claims is None
        else found[:4] + b"\x80" + found[5:6] + struct.pack("<I", claims) + found[6:]
    )


def huge_window(log: int) -> bytes:
    """A frame of the right size that asks for 2^log bytes to look back, and then ends."""
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
def test_memory_is_bounded_whatever_a_frame_claims(content):
    coding, into = Int8Codec(drawn(0)), torch.zeros(DIM)
    tracemalloc.start()
    try:
        assert coding.decode_(content, into)
        assert tracemalloc.get_traced_memory()[1] < 2**18
    finally:
        tracemalloc.stop()


def test_unpacking_takes_a_byte_a_number_and_little_more():
    dim = 2_000_000
    coding = Int8Codec(torch.zeros(dim))
    content, into = coding.encode(drawn(1, dim)), torch.zeros(dim)
    tracemalloc.start()
    try:
        assert coding.decode_(content, into) == ""
        assert tracemalloc.get_traced_memory()[1] < dim + 2**21
    finally:
        tracemalloc.stop()


def test_a_message_is_never_larger_than_a_receiver_takes():
    for dim in (1, 5, BLOCK_SIZE, DIM, 150_001):
        coding = Int8Codec(torch.zeros(dim))
        noise = torch.from_numpy(
            np.random.default_rng(0).integers(-127, 128, dim).astype(np.float32)
        )
        content = coding.encode(noise)
        assert len(content) <= coding.max_bytes
        assert torch.allclose(received(coding, content, dim), noise, rtol=0, atol=0.51)


def test_a_window_larger_than_ours_is_refused():
    dim = 4 * MAX_WINDOW_BYTES
    content = zstandard.ZstdCompressor(level=19).compress(
        plain_of([1.0] * (dim // BLOCK_SIZE), bytes(dim))
    )
    assert "window" in refused(Int8Codec(torch.zeros(dim)), content, dim)


PACKED = {"raw": RawCodec(DIM).encode(drawn(1)), "int8": Int8Codec(drawn(0)).encode(drawn(1))}


@settings(max_examples=60)
@given(st.sampled_from(["raw", "int8"]), st.data())
def test_mutated_bytes_are_refused_or_a_model_and_never_an_error(name, data):
    coding: Codec = RawCodec(DIM) if name == "raw" else Int8Codec(drawn(0))
    content = bytearray(PACKED[name])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.one_of(st.integers(0, 20), st.integers(0, len(content) - 1)))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                content[place] ^= data.draw(st.integers(1, 255))
            case "cut":
                del content[place : place + data.draw(st.integers(1, 9))]
            case "insert":
                content[place:place] = data.draw(st.binary(min_size=1, max_size=9))
    into = torch.full((DIM,), 7.0)
    if coding.decode_(content, into):
        assert (into == 7).all()
    elif name == "int8":
        assert into.isfinite().all()


@settings(max_examples=40)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(content):
    assert refused(Int8Codec(drawn(0)), content)
    assert refused(Int8Codec(drawn(0)), frame(content))
    assert refused(RawCodec(DIM), content)
