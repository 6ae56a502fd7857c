"""What a node wrote about its rounds, read back and checked: a folder may be cut short, damaged or somebody else's."""

import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedcb2o.errors import RunError
from fedcb2o.records.files import damaged, unreadable

LONGEST = 2**24  # bytes of a line, of a proof or of agent.json: far more than a node writes
WHOLE = 2**63

Id = Annotated[int, Field(ge=0, lt=2**32)]
Count = Annotated[int, Field(ge=0, lt=WHOLE)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
Word = Annotated[str, Field(max_length=200)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Part(BaseModel):
    """A table of a record; a key that is not known here is of a later version, and left alone."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, strict=True)


class About(Part):
    """Who wrote a folder: agent.json."""

    name: Name
    id: Id
    names: dict[Id, Name]
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    version: Annotated[int, Field(ge=1, lt=WHOLE)]
    num_samples: Count
    validation_samples: Count
    rounds: Annotated[int, Field(ge=1, lt=WHOLE)] | None = None

    def name_of(self, agent: int) -> str:
        """An agent's name, also of one that the file does not know."""
        return self.names.get(agent, f"agent-{agent}")


class Received(Part):
    """A model that was taken in a round, and the weight that it got."""

    id: Id
    seconds: Seconds
    bytes: Count
    weight: float | None = None


class Line(Part):
    """A round, as one line of rounds.jsonl tells it."""

    round: Annotated[int, Field(ge=1, lt=2**31)]
    train_loss: float | None = None
    own_loss: float | None = None
    accuracy: Share | None = None
    source_accuracy: Share | None = None
    attack_success_rate: Share | None = None
    test_loss: float | None = None
    global_accuracy: Share | None = None
    global_loss: float | None = None
    asked: list[Id]
    received: list[Received]
    own_weight: float | None = None
    refused: dict[Id, Word] = {}
    late: list[Id] = []
    alive: list[Id] = []
    sent: Count = 0
    got: Count | None = None
    served: Count = 0
    turned_away: dict[Word, Count] = {}
    seconds: dict[Word, Seconds] = {}

    @property
    def incoming(self) -> int:
        """The bytes that came in: all of them where they were counted, else those of models that were taken."""
        return sum(each.bytes for each in self.received) if self.got is None else self.got

    @property
    def took(self) -> float:
        """The seconds of the whole round: those told, else those of its phases, of which the exchange is in another."""
        return self.seconds.get("round", sum(took for name, took in self.seconds.items() if name != "exchange"))

    @model_validator(mode="after")
    def _once(self) -> "Line":
        ids = [each.id for each in self.received]
        if len(set(ids)) < len(ids):
            raise ValueError("an agent's model is received twice")
        return self


@dataclass(frozen=True)
class Proof:
    """A proof of equivocation by what its file says of itself; `fedcb2o peer proof FILE` checks it."""

    file: str
    agent: str
    round: str


@dataclass(frozen=True)
class Recorded:
    """A node's folder: `about` the node, its rounds, and the proofs that it holds."""

    folder: Path
    about: About
    lines: tuple[Line, ...]

    @classmethod
    def read(cls, folder: Path) -> "Recorded":
        """What is in a folder by now; raises RunError with one line where it is no node's, or damaged."""
        if not (folder / "agent.json").is_file():
            raise RunError(f"{folder} holds no agent.json: name the folder of a `fedcb2o peer run`, its --out")
        about = _validated(About, folder / "agent.json", _bytes(folder / "agent.json"), "")
        return cls(folder, about, tuple(_lines(folder / "rounds.jsonl")))

    @cached_property
    def peers(self) -> list[int]:
        """The ids of all others that the folder speaks of, in their order."""
        told: set[int] = set(self.about.names)
        for line in self.lines:
            told.update(line.asked, line.refused, line.late, line.alive, (each.id for each in line.received))
        return sorted(told - {self.about.id})

    def untaken(self, among: Iterable[int]) -> dict[str, str]:
        """Those of whom no model was ever taken, by name, and why: a refusal, "no answer", or "never there"."""
        taken = {each.id for line in self.lines for each in line.received}
        there = {peer for line in self.lines for peer in line.alive}
        why = {peer: "no answer" for line in self.lines for peer in line.asked}  # who was never asked is left out
        why |= {peer: reason for line in self.lines for peer, reason in line.refused.items()}
        why = {peer: "never there" for peer in among if peer not in there} | why
        return {self.about.name_of(peer): why[peer] for peer in among if peer in why.keys() - taken}

    @cached_property
    def proofs(self) -> list[Proof]:
        """The proofs of equivocation, by their file names."""
        return [_proof(path) for path in sorted((self.folder / "proofs").glob("*.proof.toml"))]

    @property
    def last_fifth(self) -> tuple[Line, ...]:
        """The last fifth of the rounds, at least one where there is one."""
        return self.lines[-max(1, len(self.lines) // 5) :]


Kind = TypeVar("Kind", bound=Part)


def _validated(kind: type[Kind], path: Path, content: bytes, where: str) -> Kind:
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise damaged(path, f"{where}{f'`{place}`: ' if place else ''}{first['msg']}") from error


def _lines(path: Path) -> Iterator[Line]:
    """The rounds in their order; the last line counts once its end is written."""
    last = 0
    try:
        with path.open("rb") as file:
            for number in range(1, WHOLE):
                text = file.readline(LONGEST + 1)
                if len(text) > LONGEST:
                    raise damaged(path, f"line {number} is longer than {LONGEST} bytes")
                if not text.endswith(b"\n"):
                    return
                line = _validated(Line, path, text, f"line {number}: ")
                if line.round <= last:
                    raise damaged(path, f"line {number}: round {line.round} comes after round {last}")
                last = line.round
                yield line
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(path, error) from error


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(LONGEST + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(content) > LONGEST:
        raise damaged(path, f"it is longer than {LONGEST} bytes")
    return content


def _proof(path: Path) -> Proof:
    try:
        table = tomllib.loads(_bytes(path).decode())
    except (RunError, ValueError, RecursionError):  # a page tells of what is there; the command tells what is wrong
        return Proof(path.name, "cannot be read", "")
    return Proof(path.name, str(table.get("name", ""))[:200], str(table.get("round", ""))[:20])
