"""Save and resume a run: everything that its next round depends on and its seed does not give.

A safetensors file, written under another name and renamed, so that a half-written one is never read. The header
says which configuration it belongs to and what its content adds up to.
"""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedcb2o.errors import RunError
from fedcb2o.federated.types import Contacts
from fedcb2o.records import atomic_write

FILE = "checkpoint.safetensors"


def save(folder: Path, rounds: int, models: Tensor, contacts: Sequence[Contacts], fingerprint: str) -> None:
    """Write the state after `rounds` rounds, atomically. Raises RunError where it cannot be written."""
    met = torch.tensor([len(c.ids) for c in contacts])
    tensors = {
        "models": models.cpu().contiguous(),
        "met": met,
        "ids": torch.cat([c.ids for c in contacts]),
        "likelihood": torch.cat([c.likelihood for c in contacts]),
    }
    header = {"rounds": str(rounds), "fingerprint": fingerprint, "sums": json.dumps(_sums(rounds, tensors))}
    atomic_write(folder / FILE, lambda path: save_file(tensors, path, metadata=header))


def load_(folder: Path, models: Tensor, fingerprint: str) -> tuple[int, list[Contacts]] | None:
    """Read the last checkpoint into `models`; the rounds done and the contacts, or None where there is none.

    Raises RunError for a damaged file or one of another configuration.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("fingerprint") != fingerprint:
                raise RunError(
                    f"{path} is the checkpoint of another configuration: choose another --out, or run the one "
                    f"that {folder.parent / 'config.toml'} holds"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        rounds = int(header["rounds"])
        if _sums(rounds, tensors) != json.loads(header["sums"]) or tensors["models"].shape != models.shape:
            raise ValueError("its content does not add up")
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise RunError(
            f"the checkpoint {path} is damaged ({error}): delete it to run this seed from the start"
        ) from error
    models.copy_(tensors["models"])
    sizes = tensors["met"].tolist()
    pairs = zip(tensors["ids"].split(sizes), tensors["likelihood"].split(sizes), strict=True)
    return rounds, [Contacts(ids, likelihood) for ids, likelihood in pairs]


def _sums(rounds: int, tensors: dict[str, Tensor]) -> dict[str, int | str]:
    return {"rounds": rounds, **{name: f"{t.dtype} {adds_up_to(t)}" for name, t in sorted(tensors.items())}}


def adds_up_to(tensor: Tensor) -> int:
    """The CRC-32 of a tensor's content."""
    return zlib.crc32(tensor.contiguous().view(torch.uint8).flatten().numpy().data)
