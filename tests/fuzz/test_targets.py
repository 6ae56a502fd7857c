"""First inputs, kept inputs and simple mutations of each fuzz target; make fuzz does the rest."""

import random

import pytest
from tests.fuzz import targets

NUM_MUTATIONS = 40


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Return the content with up to four changes, or its start."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(changed) + 1)
        match draw.randrange(4):
            case 0:
                changed[place : place + 1] = draw.randbytes(1)
            case 1:
                changed[place:place] = draw.randbytes(draw.randrange(9))
            case 2:
                del changed[place : place + draw.randrange(20)]
            case _:
                del changed[place:]
    return bytes(changed)


@pytest.mark.parametrize("name", targets.TARGETS)
def test_first_and_kept_inputs_keep_the_properties(name):
    for content in [*targets.first_inputs(name), *targets.large_inputs(name)]:
        targets.check(name, content)


@pytest.mark.parametrize("name", targets.TARGETS)
def test_mutated_inputs_keep_the_properties(name):
    draw = random.Random(name)
    contents = targets.first_inputs(name)
    for content in contents:
        for _ in range(NUM_MUTATIONS // len(contents)):
            targets.check(name, mutated(content, draw))


def test_every_kept_input_has_a_target():
    kept = {folder.name for folder in targets.CORPUS.iterdir()}
    assert kept <= targets.TARGETS.keys()


@pytest.mark.parametrize(
    "fault", [KeyError("another exception"), AssertionError("a property"), MemoryError()]
)
def test_another_exception_of_a_parser_is_found(fault, monkeypatch):
    def broken(data, **_):
        raise fault

    monkeypatch.setattr(targets.protocol, "decode_manifest", broken)
    with pytest.raises(type(fault)):
        targets.check("wire", b"")


def test_a_parser_that_takes_too_long_is_found(monkeypatch):
    monkeypatch.setattr(targets, "MAX_SECONDS", 0.0)
    with pytest.raises(AssertionError, match=r"wire: .* s for 3 bytes"):
        targets.check("wire", b"abc")


def test_a_parser_that_allocates_too_much_is_found(monkeypatch):
    monkeypatch.setattr(targets, "MAX_GROWTH", -1)
    with pytest.raises(AssertionError, match="wire: 0 bytes for 3 bytes"):
        targets.check("wire", b"abc")
