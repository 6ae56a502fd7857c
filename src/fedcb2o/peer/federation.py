"""What all members of a federation agree on, as one file that a human can read: federation.toml.

Its first version is an agreement by itself: whoever runs with it has said yes, and its hash is the run's id, for ever.
A later version changes members alone and counts where more than half of the members of the version before signed it;
the file carries all earlier ones, so that whoever holds version 1 can check it offline.

What that promises: a member that a version removed is refused by everyone who runs with this version. Who still runs
with an older one goes on to accept it, until it is given the new file. There is no consensus on which version is the
newest: two different successors of one version can both be valid only where a member signed both, and the signatures
show which.
"""

import base64
import binascii
import functools
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import tomli_w
from pydantic import Field, ValidationError

from fedcb2o import plugins, records
from fedcb2o.data.shard import Dataset
from fedcb2o.errors import ConfigError
from fedcb2o.experiments import config
from fedcb2o.experiments.config import Experiment, Part, Positive
from fedcb2o.federated import algorithms
from fedcb2o.peer.identity import Identity, Member

PROTOCOL: Final = 1
MOST = 2**23
"""The bytes of the largest federation.toml."""
CONTEXT = b"fedcb2o federation 1\n"
AGENTS = ("budget", "validation", "split", "hold_out", "validation_loss", "initialisation", "graph")
"""The keys of an experiment's [agents] that peers agree on: the others make up who is there, which is known here."""
PRIMITIVES = ("linear", "layout", "convolution")

Seconds = Annotated[float, Field(ge=0, le=1e7, strict=False)]


class Limits(Part):
    """What one peer may ask of another: answers a minute, models sent at once to all and to one."""

    answers_per_minute: Annotated[int, Field(ge=1, le=10**9)] = 6000
    uploads: Annotated[int, Field(ge=1, le=1000)] = 8
    per_peer: Annotated[int, Field(ge=1, le=1000)] = 4


class Samples(Part):
    """What samples look like, each member's own."""

    shape: Annotated[tuple[Positive, ...], Field(strict=False, max_length=8)]
    class_names: Annotated[tuple[str, ...], Field(strict=False, min_length=2, max_length=100_000)]


class Settings(Part):
    """The parts of an experiment that all agree on, as tables of one; `Federation.experiment` checks them."""

    linear: str | None = None
    layout: str | None = None
    convolution: str | None = None
    agents: dict[str, Any]
    model: dict[str, Any]
    training: Annotated[dict[str, Any], Field(default_factory=dict)]
    algorithm: dict[str, Any]


class Entry(Part):
    """A member's line of the file."""

    id: Annotated[int, Field(ge=0, lt=2**16)]
    name: str
    endpoint: str
    key: str
    root: str


class Signature(Part):
    """That a member of the version before agrees to this one."""

    name: str
    signature: str


class Version(Part):
    """The members of one version, and who of the version before signed it."""

    members: Annotated[tuple[Entry, ...], Field(strict=False, min_length=2, max_length=2**12)]
    signatures: Annotated[tuple[Signature, ...], Field(strict=False)] = ()


class Federation(Part):
    """What all members agree on, in one version.

    `own` is no part of that: the packages, of those whose functions the file names, that this organisation has
    allowed to run.
    """

    protocol: Literal[1] = PROTOCOL
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    rounds: Annotated[int, Field(ge=1, lt=2**31)]
    synchronous: bool = False
    round_seconds: Seconds = 0.0
    deadline_seconds: Annotated[Seconds, Field(gt=0)] = 60.0
    lag: Annotated[int, Field(ge=0, lt=2**31)] = 5
    encoding: Literal["float32", "int8"] = "float32"
    share: Annotated[float, Field(ge=0, lt=1, strict=False)]
    most_samples: Annotated[int, Field(ge=1, lt=2**53)]
    limits: Limits = Limits()
    data: Samples
    settings: Annotated[Settings, Field(alias="experiment")]
    versions: Annotated[tuple[Version, ...], Field(strict=False, min_length=1, max_length=1000)]
    own: Annotated[frozenset[str], Field(strict=False)] = frozenset()

    @property
    def version(self) -> int:
        """1 for the first, and one more for each that followed."""
        return len(self.versions)

    @functools.cached_property
    def members(self) -> Mapping[int, Member]:
        """The members of this version by their ids, ascending."""
        return self._members(self.version)

    @functools.cached_property
    def _digests(self) -> tuple[bytes, ...]:
        """The hash of each version, in which is the one before."""
        found: list[bytes] = []
        for number, version in enumerate(self.versions, start=1):
            previous = {"previous": found[-1].hex()} if found else {}
            members = [entry.model_dump() for entry in version.members]
            content = records.canonical({**self._terms(), "version": number, **previous, "members": members})
            text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
            found.append(hashlib.sha256(text.encode()).digest())
        return tuple(found)

    @property
    def run(self) -> bytes:
        """The run's id: the hash of version 1."""
        return self._digests[0]

    @property
    def digest(self) -> bytes:
        """The hash of this version."""
        return self._digests[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample."""
        return self.data.shape

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes' names, in order."""
        return self.data.class_names

    @property
    def num_agents(self) -> int:
        """One more than the highest id that was ever given."""
        return 1 + max(entry.id for version in self.versions for entry in version.members)

    @functools.cached_property
    def experiment(self) -> Experiment:
        """The experiment that all agree on, of one cluster and without attackers; raises ConfigError where it is none,
        or where it names functions of packages that are not in `own`: these would run here."""
        for part in self.parts:
            if (package := re.split("[.:]", part)[0]) not in self.own:
                raise ConfigError(
                    f"the federation names {part!r}, which is no part of fedcb2o: read the package's code, install it, "
                    f"and allow it with --own {package}"
                )
        settings = self.settings.model_dump(exclude_none=True)
        if stray := next((key for key in settings["agents"] if key not in AGENTS), None):
            near = plugins.nearest(stray, AGENTS)
            raise ConfigError(f"the federation's `experiment.agents` has no key `{stray[:100]}`.{near}")
        most = {"benign_samples": self.most_samples, "malicious_samples": 1}
        everybody = {"num_clusters": 1, "benign": self.num_agents, "malicious": 0}
        experiment = config.load(
            {
                **settings,
                "name": self.name,
                "seeds": [self.seed],
                "rounds": self.rounds,
                "data": {"name": brought},
                "agents": {**settings["agents"], **everybody, **most},
            }
        )
        _check(experiment)
        return experiment

    @functools.cached_property
    def parts(self) -> tuple[str, ...]:
        """The functions that are named by an import path, which are no part of this package."""
        tables = self.settings.model_dump(exclude_none=True)
        return tuple(dict.fromkeys(text for text in _texts(tables) if ":" in text))

    def id_of(self, member: Member) -> int:
        """A member's id, by its key; raises ConfigError where it is none."""
        for id, each in self.members.items():
            if each.key == member.key:
                return id
        raise ConfigError(f"{member.name} is no member of {self.name}, version {self.version}: its key is not there")

    def keys(self) -> dict[str, str]:
        """A short hash of each value by its dotted key, by which two files are compared."""
        content = {**self._terms(), "version": self.version}
        content["members"] = {m.name: {"id": id, **m.table()} for id, m in self.members.items()}
        flat = _flat(records.canonical(content))
        return {key: hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16] for key, value in flat}

    def differing(self, other: Mapping[str, str]) -> list[str]:
        """The dotted keys whose values another file has otherwise, or only one of both has."""
        mine = self.keys()
        return sorted(key for key in {*mine, *other} if mine.get(key) != other.get(key))

    def unsigned(self) -> list[str]:
        """The members of the version before who did not sign this one."""
        if self.version == 1:
            return []
        signed = {signature.name for signature in self.versions[-1].signatures}
        return [member.name for member in self._members(self.version - 1).values() if member.name not in signed]

    def table(self) -> dict[str, Any]:
        """The content of federation.toml."""
        *before, last = (version.model_dump() for version in self.versions)
        history = {"history": before} if before else {}
        signatures = {"signatures": last["signatures"]} if last["signatures"] else {}
        return {**self._terms(), "version": self.version, "members": last["members"], **signatures, **history}

    def _terms(self) -> dict[str, Any]:
        """What no version changes."""
        return self.model_dump(mode="python", by_alias=True, exclude_none=True, exclude={"versions", "own"})

    def _members(self, version: int) -> Mapping[int, Member]:
        found = {}
        for entry in sorted(self.versions[version - 1].members, key=lambda entry: entry.id):
            found[entry.id] = Member.of_table(entry.model_dump(exclude={"id"}))
        return found

    def _votes(self, version: int) -> int:
        """How many members of the version before signed a version; raises ConfigError for a signature of none."""
        before = {member.name: member for member in self._members(version - 1).values()}
        message, seen = CONTEXT + self._digests[version - 1], set()
        for signature in self.versions[version - 1].signatures:
            member = before.get(signature.name)
            if member is None or member.name in seen or not member.verify(message, _decoded(signature.signature)):
                raise ConfigError(
                    f"the signature of {signature.name[:100]!r} under version {version} is not good: take its table "
                    "[[signatures]] out, or ask for the file again"
                )
            seen.add(member.name)
        return len(seen)


def make(
    experiment: Experiment | str | Path | Mapping[str, Any],
    members: Sequence[Member],
    *,
    dataset: Dataset,
    seed: int | None = None,
    share: float | None = None,
    most_samples: int | None = None,
    **options: Any,
) -> Federation:
    """Version 1 of a federation that does what an experiment simulates: its agents become these members, in order.

    `options` are the other keys of a federation. Raises ConfigError where members or options do not fit.
    """
    experiment = config.load(experiment)
    agents = experiment.agents
    if agents.num_agents != len(members):
        raise ConfigError(
            f"the experiment `{experiment.name}` has {agents.num_agents} agents, and there are {len(members)} members: "
            "give one member for each agent, or change `agents.benign`, `agents.malicious` or `agents.num_clusters`"
        )
    if agents.participation < 1:
        raise ConfigError("`agents.participation` below 1 is for simulations: real peers are there, or are not")
    _check(experiment)
    all_settings = experiment.settings()
    settings = {
        key: all_settings[key] for key in (*PRIMITIVES, "model", "training", "algorithm") if key in all_settings
    }
    settings["agents"] = {key: all_settings["agents"][key] for key in AGENTS if key in all_settings["agents"]}
    made = _validated(
        {
            "name": experiment.name,
            "rounds": experiment.rounds,
            **options,
            "seed": experiment.seeds[0] if seed is None else seed,
            "share": agents.share if share is None else share,
            "most_samples": max(agents.benign_samples, agents.malicious_samples)
            if most_samples is None
            else most_samples,
            "data": {"shape": list(dataset.pool.x.shape[1:]), "class_names": list(dataset.class_names)},
            "experiment": records.canonical(settings),
            "versions": [{"members": [{"id": id, **member.table()} for id, member in enumerate(members)]}],
            "own": {re.split("[.:]", text)[0] for text in _texts(settings) if ":" in text},
        },
        "the federation",
    )
    _check_chain(made, "the federation", unsigned=False)
    return made


def brought() -> Dataset:
    """The data set of a federation's experiment, which each member brings itself."""
    raise ConfigError("a federation's file holds no data: each member brings its own with --data")


def read(path: Path | str, *, own: Collection[str] = (), unsigned: bool = False) -> Federation:
    """The federation in a file, with the packages of `own` allowed to run; raises ConfigError of one line.

    `unsigned`: the last version may lack signatures, so that it can be signed.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            content = file.read(MOST + 1)
        if len(content) > MOST:
            raise ValueError(f"it is longer than {MOST} bytes")
        table = records.parse_toml(content)
    except (OSError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path} is no federation's file: {told}") from error
    version, last, history = table.pop("version", None), {}, table.pop("history", [])
    for key in ("versions", "own", "settings"):
        if key in table:
            raise ConfigError(f"{path}: there is no key `{key}`")
    for key in ("members", "signatures"):
        if key in table:
            last[key] = table.pop(key)
    if not isinstance(history, list):
        raise ConfigError(f"{path}: `history` must be a list of tables")
    federation = _validated({**table, "versions": [*history, last], "own": set(own)}, str(path))
    if type(version) is not int or version != federation.version:
        raise ConfigError(
            f"{path}: `version` is {str(version)[:20]}, and it carries {federation.version - 1} earlier ones: "
            "restore it"
        )
    _check_chain(federation, str(path), unsigned=unsigned)
    return federation


def write(federation: Federation, path: Path | str) -> None:
    """Write federation.toml, the same file for all members."""
    head = (
        f"# What the members of {federation.name} agree on, version {federation.version}: all hold the same file.\n"
        f"# Run {federation.run.hex()}\n# This version {federation.digest.hex()}\n\n"
    )
    records.atomic_write(Path(path), (head + tomli_w.dumps(federation.table(), multiline_strings=True)).encode())


def amended(
    federation: Federation,
    *,
    remove: Collection[str] = (),
    replace: Sequence[Member] = (),
    add: Sequence[Member] = (),
) -> Federation:
    """The next version, unsigned: without some members, with another certificate, endpoint or key of some, and with new
    ones, whose ids follow all that there were. Raises ConfigError where it changes nothing or something twice."""
    entries = {entry.name: entry for entry in federation.versions[-1].members}
    for name in (*remove, *(member.name for member in replace)):
        if name not in entries:
            raise ConfigError(f"there is no member `{name}`.{plugins.nearest(name, entries)}")
    names = [*remove, *(member.name for member in (*replace, *add))]
    if len(set(names)) < len(names) or not names:
        raise ConfigError("a new version removes, replaces or adds members, each once")
    for member in replace:
        entries[member.name] = Entry(id=entries[member.name].id, **member.table())
    kept = [entry for name, entry in entries.items() if name not in remove]
    kept += [Entry(id=federation.num_agents + place, **member.table()) for place, member in enumerate(add)]
    if len(kept) < 2:
        raise ConfigError(f"a federation has two members or more, and {len(kept)} would be left")
    made = _with(federation, *federation.versions, Version(members=tuple(kept)))
    _check_chain(made, "the new version", unsigned=True)
    return made


def sign(path: Path | str, identity: Identity, *, merge: Sequence[Path | str] = ()) -> Federation:
    """Add this member's signature, and those in other copies of the same version, to a file; twice does no more."""
    federation = read(path, unsigned=True)
    if federation.version == 1:
        raise ConfigError(f"{path} is version 1, which needs no signatures: whoever runs with it agrees")
    before = federation._members(federation.version - 1)
    if all(member.key != identity.member.key for member in before.values()):
        raise ConfigError(
            f"{identity.member.name} was no member of version {federation.version - 1}, whose members sign: the key in "
            f"{identity.folder} is not there"
        )
    name = next(member.name for member in before.values() if member.key == identity.member.key)
    found = {signature.name: signature for signature in federation.versions[-1].signatures}
    for other in merge:
        copy = read(other, unsigned=True)
        if copy.digest != federation.digest:
            raise ConfigError(
                f"{other} is another version than {path}: they differ in {_few(federation.differing(copy.keys()))}"
            )
        found = {**{each.name: each for each in copy.versions[-1].signatures}, **found}
    signature = base64.b64encode(identity.sign(CONTEXT + federation.digest)).decode()
    found[name] = Signature(name=name, signature=signature)
    last = federation.versions[-1].model_copy(update={"signatures": tuple(found[each] for each in sorted(found))})
    signed = _with(federation, *federation.versions[:-1], last)
    write(signed, path)
    return signed


def _validated(table: Mapping[str, Any], where: str) -> Federation:
    try:
        return Federation.model_validate(table)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part)[:50] for part in problem["loc"][:6])
        got = "" if isinstance(problem["input"], Mapping | list) else f", got {repr(problem['input'])[:100]}"
        raise ConfigError(f"{where}: `{key}`: {problem['msg'][:200]}{got}") from error


def _with(federation: Federation, *versions: Version) -> Federation:
    """The same terms with other versions."""
    tables = [version.model_dump() for version in versions]
    return _validated({**federation._terms(), "own": federation.own, "versions": tables}, "the federation")


def _check(experiment: Experiment) -> None:
    """Raises ConfigError for what real peers cannot do."""
    if experiment.algorithm.function("algorithm", algorithms)().coordinator is not None:
        raise ConfigError(f"`{plugins.label(experiment.algorithm.name)}` has a coordinator, and real peers have none")


def _check_chain(federation: Federation, where: str, *, unsigned: bool) -> None:
    """Raises ConfigError unless each version follows from the one before."""
    ids: dict[int, str] = {}
    for number in range(1, federation.version + 1):
        try:
            members = federation._members(number)
        except ConfigError as error:
            raise ConfigError(f"{where}, version {number}: {error}") from error
        entries = federation.versions[number - 1].members
        for what, values in (
            ("ids", [entry.id for entry in entries]),
            ("names", [entry.name for entry in entries]),
            ("endpoints", [entry.endpoint for entry in entries]),
            ("keys", [entry.key for entry in entries]),
            ("roots", [entry.root for entry in entries]),
        ):
            if len(set(values)) < len(values):
                raise ConfigError(f"{where}, version {number}: its members' {what} must differ")
        highest = max(ids, default=-1)
        before = set(federation._members(number - 1)) if number > 1 else set()
        new = sorted(id for id in members if id not in before)
        if new != list(range(highest + 1, highest + 1 + len(new))):
            raise ConfigError(f"{where}, version {number}: ids of new members follow those before and never return")
        for id, member in members.items():
            if ids.setdefault(id, member.name) != member.name:
                raise ConfigError(f"{where}, version {number}: agent {id} was {ids[id]}, and names never change")
        if len(set(ids.values())) < len(ids):
            raise ConfigError(f"{where}, version {number}: a removed member's name does not return: take another")
        if number > 1:
            votes = federation._votes(number)
            if 2 * votes <= len(before) and not (unsigned and number == federation.version):
                lacking = len(before) // 2 + 1 - votes
                who = f" (not signed: {_few(federation.unsigned())})" if number == federation.version else ""
                raise ConfigError(
                    f"{where}: version {number} lacks {lacking} of the {len(before) // 2 + 1} signatures of members of "
                    f"version {number - 1} that it needs{who}: `fedcb2o peer sign` adds one"
                )
    if not federation.parts or federation.own:
        try:
            federation.experiment  # noqa: B018
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text.encode(), validate=True)
    except (binascii.Error, ValueError):
        return b""


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "") or "nothing"
