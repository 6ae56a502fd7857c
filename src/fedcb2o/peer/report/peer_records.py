"""Records of a node's run, checked: they may be damaged or forged."""

import errno
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedcb2o.errors import RunError
from fedcb2o.federated.evaluation.gain import Gain, is_comparable, mean_gain
from fedcb2o.peer.membership.identity import parse_bounded_toml
from fedcb2o.records._files import damaged_error, read_error
from fedcb2o.safe_files import open_regular, read_regular

MEAN_ROUNDS = 20  # last rounds with a gain, over which it is averaged
MAX_LINE_BYTES = 2**24  # of a line or agent.json; a node writes far less
_MAX_PROOF_BYTES = 2**21
_MAX_PROOFS = 10_000  # of all members
_MAX_INT = 2**63

_Id = Annotated[int, Field(ge=0, lt=2**32)]
_Count = Annotated[int, Field(ge=0, lt=_MAX_INT)]
_Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
_Word = Annotated[str, Field(max_length=200)]
_Seconds = Annotated[float, Field(ge=0)]
_Share = Annotated[float, Field(ge=0, le=1)]


class _Record(BaseModel):
    """Table of a record; unknown keys of later versions are ignored."""

    # A text that looks like a number is a forged or damaged record.
    model_config = ConfigDict(frozen=True, allow_inf_nan=False, strict=True)


class _NodeInfo(_Record):
    """Node that wrote a folder, from agent.json."""

    name: _Name
    id: _Id
    names: dict[_Id, _Name]
    removed: list[_Id] = []
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    version: Annotated[int, Field(ge=1, lt=_MAX_INT)]
    num_samples: _Count
    validation_samples: _Count
    rounds: Annotated[int, Field(ge=1, lt=_MAX_INT)] | None = None

    def name_of(self, agent: int) -> str:
        """Return an agent's name, or a substitute for an id that the file does not contain.

        Removed members are marked.
        """
        name = self.names.get(agent, f"agent-{agent}")
        return f"{name} (removed)" if agent in self.removed else name


class ReceivedModel(_Record):
    """Model received in a round, and its weight."""

    id: _Id
    seconds: _Seconds
    bytes: _Count
    weight: float | None = None
    # Reason why a guard did not admit it; empty for an admitted model.
    admission: _Word = ""
    # Reason why an admitted model has weight 0; empty for an averaged model.
    not_averaged: _Word = ""
    contribution: float | None = None

    @property
    def unused_reason(self) -> str:
        """Reason why it has weight 0; empty for an averaged model."""
        if self.admission or self.not_averaged or self.weight != 0:
            return self.admission or self.not_averaged
        # A former release wrote no reason.
        return "weight 0"


class GainRecord(_Record):
    """Accuracy of the model and of training alone, and the interval of the difference."""

    samples: _Count
    accuracy: _Share
    alone: _Share
    low: Annotated[float, Field(ge=-1, le=1)]
    high: Annotated[float, Field(ge=-1, le=1)]

    def __str__(self) -> str:
        """Return the difference and its interval in points."""
        difference = 100 * (self.accuracy - self.alone)
        return f"{difference:+.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}]"

    def to_gain(self) -> Gain:
        """Return the gain for computations."""
        return Gain(**self.model_dump())


def mean_gain_record(gains: Sequence[GainRecord]) -> tuple[GainRecord, int] | None:
    """Average gains of several rounds; return the mean and the number of rounds.

    None for less than two rounds.
    """
    if len(gains) < 2:
        return None
    mean = mean_gain([gain.to_gain() for gain in gains])
    return GainRecord(**asdict(mean)), len(gains)


class RoundRecord(_Record):
    """Round of a node, one line of rounds.jsonl."""

    round: Annotated[int, Field(ge=1, lt=2**31)]
    train_loss: float | None = None
    own_loss: float | None = None
    accuracy: _Share | None = None
    source_accuracy: _Share | None = None
    attack_success_rate: _Share | None = None
    test_loss: float | None = None
    global_accuracy: _Share | None = None
    global_loss: float | None = None
    epsilon: float | None = None
    metrics: dict[_Word, float | None] = {}
    gain: GainRecord | None = None
    class_gains: dict[_Word, GainRecord] = {}
    alone_rounds: _Count | None = None
    sent_auc: _Share | None = None
    sent_tpr: _Share | None = None
    kept_auc: _Share | None = None
    kept_tpr: _Share | None = None
    asked: list[_Id]
    received: list[ReceivedModel]
    own_weight: float | None = None
    refused: dict[_Id, _Word] = {}
    late: list[_Id] = []
    behind: list[_Id] = []
    no_model: list[_Id] = []
    relay_down: list[_Id] = []
    alive: list[_Id] = []
    sent: _Count = 0
    got: _Count | None = None
    served: _Count = 0
    turned_away: dict[_Word, _Count] = {}
    seconds: dict[_Word, _Seconds] = {}

    @property
    def comparable_gain(self) -> GainRecord | None:
        """Gain over training alone, if both models trained about as many rounds."""
        return self.gain if is_comparable(self.alone_rounds, self.round) else None

    @property
    def incoming_bytes(self) -> int:
        """Received bytes; those of received models if they were not counted."""
        if self.got is not None:
            return self.got
        return sum(model.bytes for model in self.received)

    @property
    def duration_seconds(self) -> float:
        """Duration of the round, at least the sum of its phases."""
        # The exchange is part of another phase.
        phases = (seconds for name, seconds in self.seconds.items() if name != "exchange")
        return self.seconds.get("round", sum(phases))

    @model_validator(mode="after")
    def _check_unique_peers(self) -> "RoundRecord":
        ids = [model.id for model in self.received]
        if len(set(ids)) < len(ids):
            raise ValueError("an agent's model is received twice")
        return self


@dataclass(frozen=True)
class _ProofSummary:
    """Unverified content of a proof; `fedcb2o peer proof FILE` verifies it."""

    file: str
    agent: str
    round: str


@dataclass(frozen=True)
class PeerRecords:
    """Records of a node's run."""

    folder: Path
    info: _NodeInfo
    rounds: tuple[RoundRecord, ...]

    @classmethod
    def read(cls, folder: Path) -> "PeerRecords":
        """Read the records of a run, which may still go on.

        A folder that is not that of a node, or is damaged, is a RunError.
        """
        path = folder / "agent.json"
        if not path.is_file():
            raise RunError(
                f"{folder} holds no agent.json: name the folder of a `fedcb2o peer run`, its --out"
            )
        info = _validated(_NodeInfo, path, _read_bounded(path), "")
        return cls(folder, info, tuple(_read_rounds(folder / "rounds.jsonl")))

    @cached_property
    def peers(self) -> list[int]:
        """Ids of all other agents in the records, ascending."""
        ids: set[int] = set(self.info.names)
        for record in self.rounds:
            received = (model.id for model in record.received)
            ids.update(record.asked, record.refused, record.late, record.behind, record.alive)
            ids.update(record.no_model, record.relay_down, received)
        return sorted(ids - {self.info.id})

    def missing_models(self, peers: Iterable[int]) -> dict[str, str]:
        """Return by name the reason why a peer has no admitted model.

        The reason is that of a refusal or of a guard, "too far behind", "offers no model", "relay
        down", "no answer" or "never there". A peer that was linked and never asked is left out.
        """
        received = [model for record in self.rounds for model in record.received]
        admitted = {model.id for model in received if not model.admission}
        linked = {peer for record in self.rounds for peer in record.alive}
        # From the vaguest reason to the most exact one, which replaces the others.
        reasons = {peer: "never there" for peer in peers if peer not in linked}
        for record in self.rounds:
            reasons.update(dict.fromkeys(record.asked, "no answer"))
        for record in self.rounds:
            cut_off = set(record.asked) & set(record.relay_down)
            reasons.update(dict.fromkeys(cut_off, "relay down"))
        for record in self.rounds:
            reasons.update(dict.fromkeys(record.no_model, "offers no model"))
            reasons.update(dict.fromkeys(record.behind, "too far behind"))
        for record in self.rounds:
            reasons.update(record.refused)
        reasons.update({model.id: model.admission for model in received})
        return {
            self.info.name_of(peer): reasons[peer]
            for peer in peers
            if peer in reasons and peer not in admitted
        }

    @cached_property
    def proofs(self) -> list[_ProofSummary]:
        """Proofs of equivocation, sorted by file name."""
        # Another program may have filled the folder.
        paths = islice((self.folder / "proofs").glob("*.proof.toml"), _MAX_PROOFS)
        return [_read_proof(path) for path in sorted(paths)]

    @cached_property
    def last_assessed(self) -> RoundRecord | None:
        """Last round with a gain over training alone; None without one."""
        return next((record for record in reversed(self.rounds) if record.gain), None)

    @cached_property
    def mean_gain(self) -> tuple[GainRecord, int] | None:
        """Mean gain over the last rounds with a gain, and their number; None without one."""
        gains = [record.comparable_gain for record in self.rounds]
        return mean_gain_record([gain for gain in gains if gain is not None][-MEAN_ROUNDS:])

    @property
    def last_fifth(self) -> tuple[RoundRecord, ...]:
        """Last fifth of the rounds, at least one if there is one."""
        return self.rounds[-max(1, len(self.rounds) // 5) :]


_RecordType = TypeVar("_RecordType", bound=_Record)


def _validated(
    record_type: type[_RecordType], path: Path, content: bytes, prefix: str
) -> _RecordType:
    try:
        return record_type.model_validate_json(content)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        key = ".".join(map(str, problems[0]["loc"]))
        key = f"`{key}`: " if key else ""
        raise damaged_error(path, f"{prefix}{key}{problems[0]['msg']}") from error


def _read_rounds(path: Path) -> Iterator[RoundRecord]:
    """Yield the rounds in order, without a partial last line."""
    last_round = 0
    try:
        with open_regular(path) as file:
            for number in range(1, _MAX_INT):
                # A file without line breaks could fill the memory.
                line = file.readline(MAX_LINE_BYTES + 1)
                if len(line) > MAX_LINE_BYTES:
                    reason = f"line {number} is longer than {MAX_LINE_BYTES} bytes"
                    raise damaged_error(path, reason)
                # The node may be writing this line.
                if not line.endswith(b"\n"):
                    return
                record = _validated(RoundRecord, path, line, f"line {number}: ")
                if record.round <= last_round:
                    reason = f"line {number}: round {record.round} comes after round {last_round}"
                    raise damaged_error(path, reason)
                last_round = record.round
                yield record
    except FileNotFoundError:
        return
    except OSError as error:
        raise read_error(path, error) from error


def _read_bounded(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_LINE_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise damaged_error(path, str(error.strerror)) from error
        raise read_error(path, error) from error


def _read_proof(path: Path) -> _ProofSummary:
    try:
        table = parse_bounded_toml(read_regular(path, _MAX_PROOF_BYTES), _MAX_PROOF_BYTES)
    except (OSError, ValueError):
        # The page lists every file, also one that cannot be read.
        return _ProofSummary(path.name, "cannot be read", "")
    agent = str(table.get("name", ""))[:200]
    round = str(table.get("round", ""))[:20]
    return _ProofSummary(path.name, agent, round)
