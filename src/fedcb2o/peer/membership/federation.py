"""What all members of a federation agree on, as one file that a human can read: federation.toml.

The hash of its first version is the run's id, for ever; later versions change members alone (see `versions`).

What that promises: a member that a version removed is refused by everyone who runs with this version. Who still runs
with an older one goes on to accept it, until it is given the new file. There is no consensus on which version is the
newest: two different successors of one version can only both be valid where a member signed both, and the two files
then show which.
"""

import functools
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import tomli_w
import torch
from pydantic import Field, ValidationError

from fedcb2o import plugins, records
from fedcb2o.data._dataset import Dataset
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config.build import module_of, neighbours_of
from fedcb2o.experiments.config.datasets import most_samples as largest
from fedcb2o.experiments.config.settings import Experiment, Part
from fedcb2o.experiments.config.settings import load as load_experiment
from fedcb2o.federated import algorithms
from fedcb2o.nn import parameters
from fedcb2o.peer.membership import versions as chain
from fedcb2o.peer.membership.federation_schema import (
    AGENTS,
    PRIMITIVES,
    Limits,
    Samples,
    Settings,
    check_plain,
    parts_of,
)
from fedcb2o.peer.membership.identity import Identity, Member, read_bounded, spoken
from fedcb2o.peer.membership.versions import Version

PROTOCOL: Final = 1
MOST = 2**20
"""The bytes of the largest federation.toml."""

Seconds = Annotated[float, Field(ge=0, le=1e7)]


class Federation(Part):
    """What all members agree on, in one version.

    A round takes `round_seconds` or longer, and waits for answers until `deadline_seconds`. A model is taken that is up
    to `lag` rounds behind the receiver's own; with `synchronous` only one of the same round. Rules assume that a
    `share` of all attacks, and no member is believed to hold more than `most_samples`.

    `own` is no part of the agreement: the functions outside fedcb2o that this organisation lets the file name.
    """

    protocol: Literal[1]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    rounds: Annotated[int, Field(ge=1, lt=2**31)]
    synchronous: bool = False
    round_seconds: Seconds = 0.0
    deadline_seconds: Annotated[Seconds, Field(gt=0)] = 60.0
    lag: Annotated[int, Field(ge=0, lt=2**31)] = 5
    encoding: Literal["float32", "int8"] = "float32"
    share: Annotated[float, Field(ge=0, lt=1)]
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

    @property
    def members(self) -> Mapping[int, Member]:
        """The members of this version by their ids, ascending."""
        return self._members[-1]

    @property
    def run(self) -> bytes:
        """The run's id: the hash of version 1."""
        return self._digests[0]

    @property
    def digest(self) -> bytes:
        """The hash of this version."""
        return self._digests[-1]

    @property
    def told(self) -> str:
        """What members read to each other to know that they hold the same: it covers terms, endpoints and keys."""
        run = spoken(self.run if self.version == 1 else self.run[:8])
        later = "" if self.version == 1 else f" {spoken(self.digest)}"
        return f"{self.name}, run {run}, version {self.version}{later}, {len(self.members)} members"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample."""
        return self.data.shape

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes' names, in order."""
        return self.data.class_names

    @functools.cached_property
    def num_agents(self) -> int:
        """N: one more than the highest id that was ever given, so that it never shrinks."""
        return 1 + max(id for members in self._members for id in members)

    @functools.cached_property
    def experiment(self) -> Experiment:
        """The experiment that all agree on, of one cluster and without attackers.

        Raises ConfigError where it is none, or names functions that are not in `own`: these would run here.
        """
        if unknown := [part for part in self.parts if part not in self.own]:
            raise ConfigError(
                f"`experiment` names {unknown[0][:100]!r}, which is no part of fedcb2o and would run here: read its "
                "code, install it, and allow it with --own"
            )
        settings = self.settings.model_dump(exclude_none=True)
        if (stray := next((key for key in settings["agents"] if key not in AGENTS), None)) is not None:
            raise ConfigError(f"there is no key `experiment.agents.{stray[:100]}`.{plugins.nearest(stray, AGENTS)}")
        agents = {
            **{"num_clusters": 1, "benign": self.num_agents, "malicious": 0},
            **{"benign_samples": self.most_samples, "malicious_samples": 1},
            **settings["agents"],
        }
        once = {"name": self.name, "seeds": [self.seed], "rounds": self.rounds, "data": {"name": brought}}
        experiment = load_experiment({**settings, **once, "agents": agents})
        _check_possible(experiment)
        return experiment

    @functools.cached_property
    def parts(self) -> tuple[str, ...]:
        """The functions outside fedcb2o that the experiment names by their import path."""
        return tuple(dict.fromkeys(parts_of(self.settings.model_dump(exclude_none=True))))

    def id_of(self, member: Member) -> int:
        """A member's id, by its key; raises ConfigError where it is none, or stands here with another certificate."""
        id = next((id for id, each in self.members.items() if each.key == member.key), None)
        if id is None:
            if same := next((each for each in self.members.values() if each.name == member.name), None):
                raise ConfigError(
                    f"{member.name} is a member of {self.name}, version {self.version}, but with another key "
                    f"({same.fingerprint}, not {member.fingerprint}): take the identity that it was made with, or "
                    "have the others sign a version with this one (`peer amend --replace`)"
                )
            raise ConfigError(
                f"{member.name} is no member of {self.name}, version {self.version}: its key is not there"
            )
        mine, theirs = member.table(), self.members[id].table()
        if other := [key for key in mine if mine[key] != theirs[key]]:
            raise ConfigError(
                f"{member.name} stands in {self.name}, version {self.version}, with another `{other[0]}`: take the "
                "identity that it was made with, or have the others sign a version with this one (`peer amend`)"
            )
        return id

    def keys(self) -> dict[str, str]:
        """A short hash of each value by its dotted key, by which two files are compared."""
        return dict(self._keys)

    @functools.cached_property
    def _keys(self) -> dict[str, str]:
        members = {member.name: {"id": id, **member.table()} for id, member in self.members.items()}
        previous = self._digests[-2].hex() if self.version > 1 else None
        content = {**self.terms(), "version": self.version, "previous": previous, "members": members}
        return {key: _short(value) for key, value in _flat(records.canonical(content))}

    def differing(self, other: Mapping[str, str]) -> list[str]:
        """The dotted keys whose values another file has otherwise, or only one of the two has."""
        mine = self.keys()
        return sorted(key for key in {*mine, *other} if mine.get(key) != other.get(key))

    def unsigned(self) -> list[str]:
        """The members of the version before who did not sign this one."""
        return chain.unsigned(self.versions[-1], self._members[-2]) if self.version > 1 else []

    @property
    def lacking(self) -> int:
        """How many signatures this version still needs."""
        if self.version == 1:
            return 0
        return max(0, chain.needed(self._members[-2]) - len(self.versions[-1].signatures))

    def changes(self) -> list[str]:
        """What this version does to the members of the one before, a few words for each; the first adds them all."""
        return chain.changes(self._members[-2] if self.version > 1 else {}, self.members)

    def follows(self, earlier: "Federation") -> bool:
        """Whether this is the version that another is, or one that came of it."""
        return self._digests[: earlier.version][-1] == earlier.digest

    def terms(self) -> dict[str, Any]:
        """What no version changes, as the file has it: a later release with more keys finds the same hash."""
        return self.model_dump(by_alias=True, exclude_none=True, exclude_unset=True, exclude={"versions", "own"})

    def table(self) -> dict[str, Any]:
        """The content of federation.toml."""
        *before, last = (version.model_dump() for version in self.versions)
        history = {"history": before} if before else {}
        last = {key: value for key, value in last.items() if value}
        return {"protocol": self.protocol, "version": self.version, **self.terms(), **last, **history}

    @functools.cached_property
    def _members(self) -> tuple[chain.Members, ...]:
        return chain.members_of(self.versions)

    @functools.cached_property
    def _digests(self) -> tuple[bytes, ...]:
        return chain.digests(self.terms(), self.versions)


KEYS = {field.alias or name for name, field in Federation.model_fields.items()} - {"versions", "own"}
KEYS |= {"version", "members", "signatures", "history"}
"""The keys of federation.toml."""


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

    `options` are the other keys of a `Federation`. Raises ConfigError where members or options do not fit.
    """
    experiment = load_experiment(experiment)
    agents = experiment.agents
    if agents.num_agents != len(members):
        raise ConfigError(
            f"the experiment `{experiment.name}` has {agents.num_agents} agents, and there are {len(members)} members: "
            "give one member for each agent, or change `agents.benign`, `agents.malicious` or `agents.num_clusters`"
        )
    if agents.participation < 1:
        raise ConfigError("`agents.participation` below 1 is for simulations: a real peer is there, or it is not")
    _check_possible(experiment)
    settings = experiment.settings()
    chosen = {key: settings[key] for key in (*PRIMITIVES, "model", "training", "algorithm") if key in settings}
    chosen["agents"] = {key: settings["agents"][key] for key in AGENTS if key in settings["agents"]}
    try:
        check_plain(chosen)
    except ValueError as error:
        raise ConfigError(f"the experiment `{experiment.name}` cannot be agreed on: {error}") from error
    believed = largest(experiment, dataset)
    dim = parameters.dimension(module_of(experiment, experiment.seeds[0], dataset))
    table = {
        "protocol": PROTOCOL,
        "name": experiment.name,
        "rounds": experiment.rounds,
        "seed": experiment.seeds[0] if seed is None else seed,
        "share": agents.share if share is None else share,
        "most_samples": believed if most_samples is None else most_samples,
        "data": {"shape": list(dataset.pool.x.shape[1:]), **_told(dataset)},
        "experiment": records.canonical(chosen),
        "versions": [{"members": [{"id": id, **member.table()} for id, member in enumerate(members)]}],
        "own": list(parts_of(chosen)),
    }
    made = _checked({**table, **options}, "the federation")
    if "limits" not in options:
        size = 4 * dim if made.encoding == "float32" else dim
        made = made.model_copy(update={"limits": Limits.fitted(size, made.round_seconds)})
    whole = made.model_dump(by_alias=True, exclude_none=True)  # with the defaults written out
    return _linked(_checked(whole, "the federation"))


def _told(dataset: Dataset) -> dict[str, Any]:
    """What is to be told of a sample: its class, or numbers."""
    return (
        {"class_names": list(dataset.class_names)}
        if dataset.class_names
        else {"target": list(dataset.pool.y.shape[1:])}
    )


def brought() -> Dataset:
    """The data set of a federation's experiment, which each member brings itself."""
    raise ConfigError("a federation's file holds no data: each member brings its own, with --data")


def read(path: Path | str, *, own: Collection[str] = (), unsigned: bool = False) -> Federation:
    """The federation in a file; raises ConfigError of one line where it, or a version before, is not valid.

    `own` are the functions outside fedcb2o ("package.module:function") that it may name; with others it can be read and
    signed, but has no `experiment`. `unsigned`: the last version may lack signatures.
    """
    path = Path(path)
    try:
        table = read_bounded(path, MOST)
        check_plain(table)
    except (OSError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path} is no federation's file: {told}") from error
    if "protocol" not in table and (other := _other_file(table)):
        raise ConfigError(f"{path} is {other}")
    if stray := next((key for key in table if key not in KEYS), None):
        raise ConfigError(f"{path}: there is no key `{stray[:100]}`.{plugins.nearest(stray, KEYS)}")
    version, history = table.pop("version", None), table.pop("history", [])
    last = {key: table.pop(key) for key in ("members", "signatures") if key in table}
    versions = [*history, last] if isinstance(history, list) else history
    federation = _checked({**table, "versions": versions, "own": list(own)}, str(path), unsigned=unsigned)
    if isinstance(version, bool) or version != federation.version:
        raise ConfigError(
            f"{path}: `version` is {str(version)[:20]}, and {federation.version - 1} earlier versions are in `history`"
        )
    if not unsigned:
        for member in federation.members.values():
            member.check_time()
    return federation


def _other_file(table: Mapping[str, Any]) -> str:
    """What a file is that was given for a federation's, and its cure; "" where that is not known."""
    if {"endpoint", "key", "root"} <= table.keys():
        return "a member's file, and no federation's: `fedcb2o peer federation EXPERIMENT --member ...` makes one"
    if {"agents", "algorithm", "seeds"} & table.keys():
        return "an experiment, and no federation's file: `fedcb2o peer federation` makes one of it, with --member"
    return ""


def write(federation: Federation, path: Path | str) -> None:
    """Write federation.toml, which is the same for all members."""
    head = f"# What the members of {federation.name} agree on. All hold the same; `fedcb2o peer check` compares.\n\n"
    records.atomic_write(Path(path), (head + tomli_w.dumps(federation.table(), multiline_strings=True)).encode())


def amended(
    federation: Federation,
    *,
    remove: Collection[str] = (),
    replace: Sequence[Member] = (),
    add: Sequence[Member] = (),
) -> Federation:
    """The next version, unsigned: without some members, with another certificate, endpoint or key of some, and with new
    ones, whose ids follow all that there were. Raises ConfigError where it changes nothing, or a member twice."""
    if federation.lacking:
        raise ConfigError(f"version {federation.version} is not signed by enough members: no other can follow it yet")
    entries = {entry.name: entry.model_dump() for entry in federation.versions[-1].members}
    for name in (*remove, *(member.name for member in replace)):
        if name not in entries:
            raise ConfigError(f"there is no member `{name}`.{plugins.nearest(name, entries)}")
    for member in add:
        if member.name in entries:
            raise ConfigError(f"{member.name} is a member: --replace gives it another certificate, endpoint or key")
    changed = [*remove, *(member.name for member in (*replace, *add))]
    if not changed or len(set(changed)) < len(changed):
        raise ConfigError("a new version removes, replaces or adds members, and each of them once")
    for member in replace:
        entries[member.name] = {"id": entries[member.name]["id"], **member.table()}
    for id, member in enumerate(add, start=federation.num_agents):
        entries[member.name] = {"id": id, **member.table()}
    kept = [entry for name, entry in entries.items() if name not in remove]
    if kept == [entry.model_dump() for entry in federation.versions[-1].members]:
        raise ConfigError("the new version would be the same as the last one")
    return _linked(_with(federation, *federation.versions, {"members": kept}))


def sign(path: Path | str, identity: Identity, *, merge: Sequence[Path | str] = ()) -> Federation:
    """Add this member's signature, and those in other copies of the same version, to a file; a second time changes
    nothing."""
    federation = read(path, unsigned=True)
    if federation.version == 1:
        raise ConfigError(f"{path} is version 1, which needs no signature: whoever runs with it agrees to it")
    version = federation.versions[-1]
    for other in merge:
        copy = read(other, unsigned=True)
        if copy.digest != federation.digest:
            keys = ", ".join(f"`{key}`" for key in federation.differing(copy.keys())[:10])
            raise ConfigError(f"{other} is another version than {path}, which differs in {keys}")
        version = chain.merged(version, copy.versions[-1].signatures)
    version = chain.signed(version, federation.digest, federation._members[-2], identity)
    made = _with(federation, *federation.versions[:-1], version.model_dump())
    write(made, path)
    return made


def _linked(federation: Federation) -> Federation:
    """The same; raises ConfigError where the graph of who asks whom cannot be made of so many agents, which is better
    known before anybody signs."""
    if not set(federation.parts) - federation.own:
        neighbours_of(federation.experiment, federation.seed, torch.zeros(federation.num_agents, dtype=torch.int64))
    return federation


def _with(federation: Federation, *versions: Any) -> Federation:
    """The same terms with other versions, of which the last may lack signatures."""
    table = {**federation.terms(), "own": federation.own, "versions": versions}
    return _checked(table, "the new version", unsigned=True)


def _checked(table: Mapping[str, Any], where: str, *, unsigned: bool = False) -> Federation:
    try:
        made = Federation.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_first_problem(error)}") from error
    try:
        chain.check(made.versions, made._members, made._digests)
        chain.check_signed(made.versions[:-1] if unsigned else made.versions, made._members)
        if not set(made.parts) - made.own:
            made.experiment  # noqa: B018
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return made


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    place, of = [str(part)[:50] for part in problem["loc"]], ""
    if place[0] == "versions" and len(place) > 1:
        place, of = place[2:], f" of version {int(place[1]) + 1}"
    key = "history" if place == ["versions"] else ".".join(place)
    if problem["type"] == "extra_forbidden":
        return f"there is no key `{key}`{of}"
    if problem["type"] == "too_short" and key == "members":
        return "a federation has at least 2 members"
    if problem["type"] == "missing":
        return f"the key `{key}`{of} is missing"
    if key == "protocol":
        return f"it speaks protocol {problem['input']!r:.20}, and this fedcb2o {PROTOCOL}: take the others' release"
    told = str(problem["ctx"]["error"]) if problem["type"] == "value_error" else problem["msg"]
    got = "" if isinstance(problem["input"], Mapping | list | tuple) else f", got {problem['input']!r:.50}"
    told = told[0].lower() + told[1:].replace("tuple", "list").replace("dictionary", "table")
    return f"`{key}`{of}: {told}{got}"


def _check_possible(experiment: Experiment) -> None:
    """Raises ConfigError for what real peers cannot do."""
    clusters = experiment.algorithm.function("algorithm", algorithms)().clusters
    if clusters is not None:
        why = "has models of clusters" if clusters.each else "has a coordinator"
        raise ConfigError(f"`{plugins.label(experiment.algorithm.name)}` {why}, and real peers have none")


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value


def _short(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
