"""Checkpoints: all that the next round depends on and the seed does not determine.

A checkpoint is a safetensors file, written under a temporary name and renamed, so that a partial
file is never read. Its header names the configuration and holds checksums of the content. The file
is the same for every engine: the models of all agents in their order, written in parts and read by
each process that holds some of them.

>>> tensor_crc32(torch.zeros(2))
1696784233
"""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedcb2o.errors import RunError
from fedcb2o.federated.contacts import AgentState, ContactTable
from fedcb2o.federated.plugin_outputs import STATE_DTYPES
from fedcb2o.federated.ragged import Ragged
from fedcb2o.records import CHECKPOINT_FILE, atomic_write, canonical_settings, damaged_error
from fedcb2o.records._checksums import Checksum, header_crc, read_checkpoint_header
from fedcb2o.records._files import read_error
from fedcb2o.safe_files import check_regular

FILE = CHECKPOINT_FILE

_STATE_PREFIX = "state."  # of tensors named by an agent and a part of its rule's state
_CLOCK = "clock"
_CONTACTS = ("met", "ids", "likelihood")  # names of the tensors of all agents' contacts
_LARGEST_ENTRY = 10**18  # in the header's reserved room
_LONGEST_CHECKSUM = f"{torch.bfloat16} {10**10}"


def save(
    folder: Path,
    rounds: int,
    models: Iterable[Tensor],
    state: AgentState,
    fingerprint: str,
    lines: Mapping[str, Checksum] | None = None,
) -> None:
    """Write the state after some finished rounds into a seed's folder, atomically.

    The models of all agents come in their order, in parts of shape [k, d]. `fingerprint` is that of
    the configuration and the data, and `lines` has checksums of the record files up to this round.
    RunError is raised if the file cannot be written.
    """
    states = {
        f"{_STATE_PREFIX}{agent}.{name}": tensor
        for agent, rule_state in enumerate(state.rule_states)
        for name, tensor in rule_state.items()
    }
    by_item_size = sorted(states.items(), key=lambda item: -item[1].element_size())  # for alignment
    tensors = {
        "met": torch.from_numpy(state.contacts.ids.sizes),
        "ids": torch.from_numpy(state.contacts.ids.values.astype(np.int64)),
        "likelihood": torch.from_numpy(state.contacts.likelihood),
        **dict(by_item_size),
    }
    if state.clock is not None:
        tensors[_CLOCK] = torch.from_numpy(state.clock)
    parts: dict[str, Iterable[Tensor]] = {"models": models}
    parts |= {name: [tensor] for name, tensor in tensors.items()}
    header = {
        "rounds": str(rounds),
        "fingerprint": fingerprint,
        "lines": json.dumps(lines or {}),
    }
    atomic_write(folder / CHECKPOINT_FILE, lambda file: _write(file, header, parts))


def load_models_(
    folder: Path, models: Tensor, fingerprint: str, rows: slice = slice(None)
) -> tuple[int, AgentState] | None:
    """Read models of the last checkpoint into a buffer of shape [k, d].

    `rows` are those of the checkpoint; by default all. Returns the finished rounds and the state of
    all agents, or None without a checkpoint. RunError is raised if the file is damaged or belongs
    to another configuration.
    """
    checkpoint = read_checkpoint(folder, fingerprint, tuple(models.shape), rows)
    if checkpoint is None:
        return None
    rounds, state, saved = checkpoint
    models.copy_(saved)
    return rounds, state


def read_checkpoint(
    folder: Path, fingerprint: str, shape: tuple[int, ...], rows: slice = slice(None)
) -> tuple[int, AgentState, Tensor] | None:
    """Read the last checkpoint; the models are mapped from the file.

    `shape` is the expected one of the models in `rows`, by default all. Returns the finished
    rounds, the state of all agents, and the models; None without a checkpoint. RunError is raised
    if the file is damaged or belongs to another configuration.
    """
    path = folder / CHECKPOINT_FILE
    if not path.exists():
        return None
    header = read_checkpoint_header(path)
    if _parse_fingerprint(header.get("fingerprint", "")) != _parse_fingerprint(fingerprint):
        raise RunError(
            f"{path} is the checkpoint of another configuration: choose another --out, or run the "
            f"one in {folder.parent / 'config.toml'}"
        )

    try:
        tensors = _read_tensors(path)
        rounds = int(header["rounds"])
        checksums = json.loads(header["sums"])
        checksums.pop("header", None)
        models = tensors["models"][rows]
        if _checksums(rounds, tensors) != checksums or tuple(models.shape) != shape:
            raise ValueError("its content does not match its checksums")
        state = _agent_state(tensors)
    except OSError as error:
        raise read_error(path, error) from error
    except (SafetensorError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise damaged_error(path, str(error)) from error
    return rounds, state, models


def rounds_done(folder: Path) -> int:
    """Return the finished rounds of the last checkpoint, by its header; 0 without one."""
    path = folder / CHECKPOINT_FILE
    return int(read_checkpoint_header(path).get("rounds", 0)) if path.exists() else 0


def tensor_crc32(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor's content, of any shape and dtype."""
    return zlib.crc32(_content(tensor))


def _write(
    file: BinaryIO, metadata: Mapping[str, str], tensors: Mapping[str, Iterable[Tensor]]
) -> None:
    """Write a safetensors file of tensors that come in parts [k, ...], one after the other.

    The format is 8 bytes with the length of the header, the header as JSON, and the data.
    """
    entries: dict[str, Any] = {
        name: _entry("BF16", [_LARGEST_ENTRY] * 8, _LARGEST_ENTRY, _LARGEST_ENTRY)
        for name in tensors
    }
    longest = dict.fromkeys(["rounds", "header", *tensors], _LONGEST_CHECKSUM)
    # The header is written last, when shapes and checksums are known, into the room reserved for
    # it.
    room = len(_header(metadata, entries, longest)) // 8 * 8 + 64
    checksums: dict[str, int | str] = {
        "rounds": int(metadata["rounds"]),
        "header": header_crc(metadata),
    }
    data_start = file.seek(8 + room)
    for name, parts in tensors.items():
        start = file.tell() - data_start
        rows = 0
        crc = 0
        for part in parts:
            data = _content(part)
            crc = zlib.crc32(data, crc)
            rows += len(part) if part.ndim else 0
            file.write(data)
        shape = [rows, *part.shape[1:]] if part.ndim else []  # a scalar has no shape
        stop = file.tell() - data_start
        entries[name] = _entry(STATE_DTYPES[part.dtype], shape, start, stop)
        checksums[name] = f"{part.dtype} {crc}"
    file.seek(0)
    header = _header(metadata, entries, checksums).ljust(room)
    file.write(room.to_bytes(8, "little") + header)


def _entry(dtype: str, shape: Sequence[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def _header(
    metadata: Mapping[str, str], entries: Mapping[str, Any], checksums: Mapping[str, int | str]
) -> bytes:
    content = {"__metadata__": {**metadata, "sums": json.dumps(checksums)}, **entries}
    return json.dumps(content).encode()


def _read_tensors(path: Path) -> dict[str, Tensor]:
    check_regular(path)
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def _agent_state(tensors: Mapping[str, Tensor]) -> AgentState:
    sizes, ids, likelihood = (tensors[name].numpy() for name in _CONTACTS)
    rule_states: list[dict[str, Tensor]] = [{} for _ in sizes]
    for name in sorted(tensors.keys() - {"models", _CLOCK, *_CONTACTS}):
        agent, _, key = name.removeprefix(_STATE_PREFIX).partition(".")
        rule_states[int(agent)][key] = tensors[name]
    clock = tensors[_CLOCK].numpy() if _CLOCK in tensors else None
    return AgentState(ContactTable(Ragged(ids, sizes), likelihood), tuple(rule_states), clock)


def _parse_fingerprint(fingerprint: str) -> Any:
    """Return a fingerprint's settings in a canonical form, and its data."""
    settings, _, data = fingerprint.partition(" data ")
    try:
        return canonical_settings(json.loads(settings)), data
    except (ValueError, AttributeError):
        return fingerprint


def _checksums(rounds: int, tensors: dict[str, Tensor]) -> dict[str, int | str]:
    checksums = {name: f"{tensor.dtype} {tensor_crc32(tensor)}" for name, tensor in tensors.items()}
    return {"rounds": rounds, **checksums}


def _content(tensor: Tensor) -> memoryview:
    """Return a tensor's content, without a copy where it is contiguous on the CPU."""
    if not tensor.numel():
        return memoryview(b"")
    content: np.ndarray = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return content.data
