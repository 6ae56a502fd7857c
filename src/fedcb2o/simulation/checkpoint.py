"""Save and resume a run: everything that its next round depends on and its seed does not give.

A safetensors file, written under another name and renamed, so that a half-written one is never read. The header
says which configuration it belongs to and what its content adds up to. It is the same for every engine: the models of
all agents in their order, written as they come, however many at a time, and read by whoever holds some of them.
"""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedcb2o.errors import RunError
from fedcb2o.federated.contacts import AgentState, ContactTable
from fedcb2o.federated.plugin_outputs import STATE_DTYPES
from fedcb2o.federated.ragged import Ragged
from fedcb2o.records import CHECKPOINT_FILE, atomic_write, canonical_settings, damaged_error
from fedcb2o.records.checksums import Checksum, header_crc, read_checkpoint_header
from fedcb2o.records.files import read_error

FILE = CHECKPOINT_FILE
_STATE_PREFIX = "state."  # then the agent and the name of what its rule keeps


def save(
    folder: Path,
    rounds: int,
    models: Iterable[Tensor],
    memory: AgentState,
    fingerprint: str,
    lines: Mapping[str, Checksum] | None = None,
) -> None:
    """Write the state after `rounds` rounds, atomically: the `models` of all agents in their order, some [k, d] at a
    time, what the agents remember, and the sums of the records' `lines` up to here.

    Raises RunError where it cannot be written.
    """
    states = {
        f"{_STATE_PREFIX}{j}.{name}": each
        for j, state in enumerate(memory.rule_states)
        for name, each in state.items()
    }
    tensors = {
        "met": torch.from_numpy(memory.contacts.ids.sizes),
        "ids": torch.from_numpy(memory.contacts.ids.values),
        "likelihood": torch.from_numpy(memory.contacts.likelihood),
        **dict(
            sorted(states.items(), key=lambda each: -each[1].element_size())
        ),  # so that each is aligned
    }
    header = {"rounds": str(rounds), "fingerprint": fingerprint, "lines": json.dumps(lines or {})}
    atomic_write(
        folder / FILE,
        lambda path: _write(
            path, header, {"models": models} | {n: [t] for n, t in tensors.items()}
        ),
    )


def _write(
    path: Path, metadata: Mapping[str, str], tensors: Mapping[str, Iterable[Tensor]]
) -> None:
    """A safetensors file of tensors that come whole or in parts [k, ...], one after the other.

    By the format's description: 8 bytes with the length of the header, the header as JSON, the data. The header is
    written last, when shapes and sums are known, into the room that was left for it.
    """
    known: dict[str, Any] = {name: _entry("BF16", [10**18] * 8, 10**18, 10**18) for name in tensors}
    longest = dict.fromkeys(["rounds", "header", *tensors], f"{torch.bfloat16} {10**10}")
    room = len(_header(metadata, known, longest)) // 8 * 8 + 64
    sums: dict[str, int | str] = {"rounds": int(metadata["rounds"]), "header": header_crc(metadata)}
    with path.open("wb") as file:
        start = file.seek(8 + room)
        for name, parts in tensors.items():
            rows = 0
            total = 0
            end = file.tell() - start
            for part in parts:
                data = _content(part)
                total = zlib.crc32(data, total)
                rows = rows + (len(part) if part.ndim else 0)
                file.write(data)
            shape = [rows, *part.shape[1:]] if part.ndim else []  # a single number has none
            known[name] = _entry(STATE_DTYPES[part.dtype], shape, end, file.tell() - start)
            sums[name] = f"{part.dtype} {total}"
        file.seek(0)
        file.write(room.to_bytes(8, "little") + _header(metadata, known, sums).ljust(room))


def _entry(dtype: str, shape: Sequence[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def _header(
    metadata: Mapping[str, str], known: Mapping[str, Any], sums: Mapping[str, int | str]
) -> bytes:
    return json.dumps({"__metadata__": {**metadata, "sums": json.dumps(sums)}, **known}).encode()


def load_models_(
    folder: Path, models: Tensor, fingerprint: str, rows: slice = slice(None)
) -> tuple[int, AgentState] | None:
    """Read some `rows` of the last checkpoint into `models`, by default all; the rounds done and what all agents
    remember, or None where there is none. Raises RunError as `read` does."""
    found = read_checkpoint(folder, fingerprint, tuple(models.shape), rows)
    if found is None:
        return None
    models.copy_(found[2])
    return found[:2]


def read_checkpoint(
    folder: Path, fingerprint: str, shape: tuple[int, ...], rows: slice = slice(None)
) -> tuple[int, AgentState, Tensor] | None:
    """Of the last checkpoint the rounds done, what all agents remember, and some `rows` of the models, which have a
    known shape and stay in the file until they are looked at; None where there is none.

    Raises RunError for a damaged file or one of another configuration.
    """
    path = folder / FILE
    if not path.exists():
        return None
    header = read_checkpoint_header(path)
    if _parse_fingerprint(header.get("fingerprint", "")) != _parse_fingerprint(fingerprint):
        raise RunError(
            f"{path} is the checkpoint of another configuration: choose another --out, or run the one that "
            f"{folder.parent / 'config.toml'} holds"
        )
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        rounds = int(header["rounds"])
        sums = json.loads(header["sums"])
        sums.pop("header", None)
        if _checksums(rounds, tensors) != sums or tuple(tensors["models"][rows].shape) != shape:
            raise ValueError("its content does not add up")
        sizes, ids, likelihood = (tensors[name].numpy() for name in ("met", "ids", "likelihood"))
        states: list[dict[str, Tensor]] = [{} for _ in sizes]
        for name in sorted(tensors.keys() - {"models", "met", "ids", "likelihood"}):
            agent, _, key = name.removeprefix(_STATE_PREFIX).partition(".")
            states[int(agent)][key] = tensors[name]
    except OSError as error:
        raise read_error(path, error) from error
    except (SafetensorError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise damaged_error(path, str(error)) from error
    return (
        rounds,
        AgentState(ContactTable(Ragged(ids, sizes), likelihood), tuple(states)),
        tensors["models"][rows],
    )


def rounds_done(folder: Path) -> int:
    """The rounds that were done at the last checkpoint, as its header says; 0 where there is none."""
    path = folder / FILE
    return int(read_checkpoint_header(path).get("rounds", 0)) if path.exists() else 0


def _parse_fingerprint(fingerprint: str) -> Any:
    """What a fingerprint says, however its settings were written."""
    settings, _, data = fingerprint.partition(" data ")
    try:
        return canonical_settings(json.loads(settings)), data
    except (ValueError, AttributeError):
        return fingerprint


def _checksums(rounds: int, tensors: dict[str, Tensor]) -> dict[str, int | str]:
    return {
        "rounds": rounds,
        **{name: f"{t.dtype} {tensor_crc32(t)}" for name, t in tensors.items()},
    }


def tensor_crc32(tensor: Tensor) -> int:
    """The CRC-32 of a tensor's content."""
    return zlib.crc32(_content(tensor))


def _content(tensor: Tensor) -> memoryview:
    """A tensor's content, which is not copied where it lies in memory as it should."""
    if not tensor.numel():
        return memoryview(b"")
    content: np.ndarray = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return content.data
