"""What a node wrote about its rounds, read back and checked: a folder may be cut short, damaged or somebody else's."""

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedcb2o.errors import RunError
from fedcb2o.records.files import damaged_error, read_error

MAX_LINE_BYTES = 2**24  # bytes of a line, of a proof or of agent.json: far more than a node writes
_MAX_INT = 2**63

_Id = Annotated[int, Field(ge=0, lt=2**32)]
_Count = Annotated[int, Field(ge=0, lt=_MAX_INT)]
_Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
_Word = Annotated[str, Field(max_length=200)]
_Seconds = Annotated[float, Field(ge=0)]
_Share = Annotated[float, Field(ge=0, le=1)]


class _Record(BaseModel):
    """A table of a record; a key that is not known here is of a later version, and left alone."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, strict=True)


class NodeInfo(_Record):
    """Who wrote a folder: agent.json."""

    name: _Name
    id: _Id
    names: dict[_Id, _Name]
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    version: Annotated[int, Field(ge=1, lt=_MAX_INT)]
    num_samples: _Count
    validation_samples: _Count
    rounds: Annotated[int, Field(ge=1, lt=_MAX_INT)] | None = None

    def name_of(self, agent: int) -> str:
        """An agent's name, also of one that the file does not know."""
        return self.names.get(agent, f"agent-{agent}")


class ReceivedModel(_Record):
    """A model that was taken in a round, and the weight that it got."""

    id: _Id
    seconds: _Seconds
    bytes: _Count
    weight: float | None = None


class RoundRecord(_Record):
    """A round, as one line of rounds.jsonl tells it."""

    round: Annotated[int, Field(ge=1, lt=2**31)]
    train_loss: float | None = None
    own_loss: float | None = None
    accuracy: _Share | None = None
    source_accuracy: _Share | None = None
    attack_success_rate: _Share | None = None
    test_loss: float | None = None
    global_accuracy: _Share | None = None
    global_loss: float | None = None
    asked: list[_Id]
    received: list[ReceivedModel]
    own_weight: float | None = None
    refused: dict[_Id, _Word] = {}
    late: list[_Id] = []
    alive: list[_Id] = []
    sent: _Count = 0
    got: _Count | None = None
    served: _Count = 0
    turned_away: dict[_Word, _Count] = {}
    seconds: dict[_Word, _Seconds] = {}

    @property
    def incoming_bytes(self) -> int:
        """The bytes that came in: all of them where they were counted, else those of models that were taken."""
        return sum(each.bytes for each in self.received) if self.got is None else self.got

    @property
    def duration_seconds(self) -> float:
        """The seconds of the whole round: those told, else those of its phases, of which the exchange is in another."""
        return self.seconds.get(
            "round", sum(took for name, took in self.seconds.items() if name != "exchange")
        )

    @model_validator(mode="after")
    def _check_unique_peers(self) -> "RoundRecord":
        ids = [each.id for each in self.received]
        if len(set(ids)) < len(ids):
            raise ValueError("an agent's model is received twice")
        return self


@dataclass(frozen=True)
class ProofSummary:
    """A proof of equivocation by what its file says of itself; `fedcb2o peer proof FILE` checks it."""

    file: str
    agent: str
    round: str


@dataclass(frozen=True)
class PeerRecords:
    """A node's folder: `about` the node, its rounds, and the proofs that it holds."""

    folder: Path
    info: NodeInfo
    rounds: tuple[RoundRecord, ...]

    @classmethod
    def read(cls, folder: Path) -> "PeerRecords":
        """What is in a folder by now; raises RunError with one line where it is no node's, or damaged."""
        if not (folder / "agent.json").is_file():
            raise RunError(
                f"{folder} holds no agent.json: name the folder of a `fedcb2o peer run`, its --out"
            )
        about = _validated(
            NodeInfo, folder / "agent.json", _read_bounded(folder / "agent.json"), ""
        )
        return cls(folder, about, tuple(_read_rounds(folder / "rounds.jsonl")))

    @cached_property
    def peers(self) -> list[int]:
        """The ids of all others that the folder speaks of, in their order."""
        told: set[int] = set(self.info.names)
        for line in self.rounds:
            told.update(
                line.asked, line.refused, line.late, line.alive, (each.id for each in line.received)
            )
        return sorted(told - {self.info.id})

    def missing_models(self, peers: Iterable[int]) -> dict[str, str]:
        """Those of whom no model was ever taken, by name, and why: a refusal, "no answer", or "never there"."""
        taken = {each.id for line in self.rounds for each in line.received}
        there = {peer for line in self.rounds for peer in line.alive}
        why = {
            peer: "no answer" for line in self.rounds for peer in line.asked
        }  # who was never asked is left out
        why |= {peer: reason for line in self.rounds for peer, reason in line.refused.items()}
        why = {peer: "never there" for peer in peers if peer not in there} | why
        return {self.info.name_of(peer): why[peer] for peer in peers if peer in why.keys() - taken}

    @cached_property
    def proofs(self) -> list[ProofSummary]:
        """The proofs of equivocation, by their file names."""
        return [_read_proof(path) for path in sorted((self.folder / "proofs").glob("*.proof.toml"))]

    @property
    def last_fifth(self) -> tuple[RoundRecord, ...]:
        """The last fifth of the rounds, at least one where there is one."""
        return self.rounds[-max(1, len(self.rounds) // 5) :]


_RecordType = TypeVar("_RecordType", bound=_Record)


def _validated(kind: type[_RecordType], path: Path, content: bytes, where: str) -> _RecordType:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise damaged_error(
            path, f"{where}{f'`{place}`: ' if place else ''}{first['msg']}"
        ) from error


def _read_rounds(path: Path) -> Iterator[RoundRecord]:
    """The rounds in their order; the last line counts once its end is written."""
    last = 0
    try:
        with path.open("rb") as file:
            for number in range(1, _MAX_INT):
                text = file.readline(MAX_LINE_BYTES + 1)
                if len(text) > MAX_LINE_BYTES:
                    raise damaged_error(
                        path, f"line {number} is longer than {MAX_LINE_BYTES} bytes"
                    )
                if not text.endswith(b"\n"):
                    return
                line = _validated(RoundRecord, path, text, f"line {number}: ")
                if line.round <= last:
                    raise damaged_error(
                        path, f"line {number}: round {line.round} comes after round {last}"
                    )
                last = line.round
                yield line
    except FileNotFoundError:
        return
    except OSError as error:
        raise read_error(path, error) from error


def _read_bounded(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_LINE_BYTES + 1)
    except OSError as error:
        raise read_error(path, error) from error
    if len(content) > MAX_LINE_BYTES:
        raise damaged_error(path, f"it is longer than {MAX_LINE_BYTES} bytes")
    return content


def _read_proof(path: Path) -> ProofSummary:
    try:
        table = tomllib.loads(_read_bounded(path).decode())
    except (
        RunError,
        ValueError,
        RecursionError,
    ):  # a page tells of what is there; the command tells what is wrong
        return ProofSummary(path.name, "cannot be read", "")
    return ProofSummary(
        path.name, str(table.get("name", ""))[:200], str(table.get("round", ""))[:20]
    )
