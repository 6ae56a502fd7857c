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
from fedcb2o.experiments.config.build import build_module, build_neighbours
from fedcb2o.experiments.config.datasets import max_samples as largest
from fedcb2o.experiments.config.settings import Experiment, Section
from fedcb2o.experiments.config.settings import load as load_experiment
from fedcb2o.federated import algorithms
from fedcb2o.nn import parameters
from fedcb2o.peer.membership import versions as chain
from fedcb2o.peer.membership.federation_schema import (
    AGREED_AGENT_KEYS,
    KERNEL_KEYS,
    AgreedSettings,
    Limits,
    SampleSchema,
    user_functions_in,
    validate_plain,
)
from fedcb2o.peer.membership.identity import Identity, Member, read_bounded_toml, spelled_hex
from fedcb2o.peer.membership.versions import Version

_PROTOCOL_VERSION: Final = 1
MAX_FILE_BYTES = 2**20
"""The bytes of the largest federation.toml."""

_Seconds = Annotated[float, Field(ge=0, le=1e7)]


class Federation(Section):
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
    round_seconds: _Seconds = 0.0
    deadline_seconds: Annotated[_Seconds, Field(gt=0)] = 60.0
    lag: Annotated[int, Field(ge=0, lt=2**31)] = 5
    encoding: Literal["float32", "int8"] = "float32"
    share: Annotated[float, Field(ge=0, lt=1)]
    most_samples: Annotated[int, Field(ge=1, lt=2**53)]
    limits: Limits = Limits()
    data: SampleSchema
    settings: Annotated[AgreedSettings, Field(alias="experiment")]
    versions: Annotated[tuple[Version, ...], Field(strict=False, min_length=1, max_length=1000)]
    allowed_functions: Annotated[frozenset[str], Field(strict=False)] = frozenset()

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
    def verification_phrase(self) -> str:
        """What members read to each other to know that they hold the same: it covers terms, endpoints and keys."""
        run = spelled_hex(self.run if self.version == 1 else self.run[:8])
        later = "" if self.version == 1 else f" {spelled_hex(self.digest)}"
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
        if unknown := [part for part in self.user_functions if part not in self.allowed_functions]:
            raise ConfigError(
                f"`experiment` names {unknown[0][:100]!r}, which is no part of fedcb2o and would run here: read its "
                "code, install it, and allow it with --own"
            )
        settings = self.settings.model_dump(exclude_none=True)
        if (
            stray := next((key for key in settings["agents"] if key not in AGREED_AGENT_KEYS), None)
        ) is not None:
            raise ConfigError(
                f"there is no key `experiment.agents.{stray[:100]}`.{plugins.did_you_mean(stray, AGREED_AGENT_KEYS)}"
            )
        agents = {
            **{"num_clusters": 1, "benign": self.num_agents, "malicious": 0},
            **{"benign_samples": self.most_samples, "malicious_samples": 1},
            **settings["agents"],
        }
        once = {
            "name": self.name,
            "seeds": [self.seed],
            "rounds": self.rounds,
            "data": {"name": missing_dataset},
        }
        experiment = load_experiment({**settings, **once, "agents": agents})
        _check_supported(experiment)
        return experiment

    @functools.cached_property
    def user_functions(self) -> tuple[str, ...]:
        """The functions outside fedcb2o that the experiment names by their import path."""
        return tuple(dict.fromkeys(user_functions_in(self.settings.model_dump(exclude_none=True))))

    def id_of(self, member: Member) -> int:
        """A member's id, by its key; raises ConfigError where it is none, or stands here with another certificate."""
        id = next((id for id, each in self.members.items() if each.key == member.key), None)
        if id is None:
            if same := next(
                (each for each in self.members.values() if each.name == member.name), None
            ):
                raise ConfigError(
                    f"{member.name} is a member of {self.name}, version {self.version}, but with another key "
                    f"({same.fingerprint}, not {member.fingerprint}): take the identity that it was made with, or "
                    "have the others sign a version with this one (`peer amend --replace`)"
                )
            raise ConfigError(
                f"{member.name} is no member of {self.name}, version {self.version}: its key is not there"
            )
        mine = member.to_table()
        theirs = self.members[id].to_table()
        if other := [key for key in mine if mine[key] != theirs[key]]:
            raise ConfigError(
                f"{member.name} stands in {self.name}, version {self.version}, with another `{other[0]}`: take the "
                "identity that it was made with, or have the others sign a version with this one (`peer amend`)"
            )
        return id

    def value_hashes(self) -> dict[str, str]:
        """A short hash of each value by its dotted key, by which two files are compared."""
        return dict(self._value_hashes)

    @functools.cached_property
    def _value_hashes(self) -> dict[str, str]:
        members = {
            member.name: {"id": id, **member.to_table()} for id, member in self.members.items()
        }
        previous = self._digests[-2].hex() if self.version > 1 else None
        content = {
            **self.fixed_content(),
            "version": self.version,
            "previous": previous,
            "members": members,
        }
        return {
            key: _short_hash(value) for key, value in _flatten(records.canonical_settings(content))
        }

    def differing_keys(self, other: Mapping[str, str]) -> list[str]:
        """The dotted keys whose values another file has otherwise, or only one of the two has."""
        mine = self.value_hashes()
        return sorted(key for key in {*mine, *other} if mine.get(key) != other.get(key))

    def unsigned_members(self) -> list[str]:
        """The members of the version before who did not sign this one."""
        return (
            chain.unsigned_members(self.versions[-1], self._members[-2]) if self.version > 1 else []
        )

    @property
    def missing_signatures(self) -> int:
        """How many signatures this version still needs."""
        if self.version == 1:
            return 0
        return max(
            0, chain.required_signatures(self._members[-2]) - len(self.versions[-1].signatures)
        )

    def describe_changes(self) -> list[str]:
        """What this version does to the members of the one before, a few words for each; the first adds them all."""
        return chain.describe_changes(self._members[-2] if self.version > 1 else {}, self.members)

    def is_successor_of(self, earlier: "Federation") -> bool:
        """Whether this is the version that another is, or one that came of it."""
        return self._digests[: earlier.version][-1] == earlier.digest

    def fixed_content(self) -> dict[str, Any]:
        """What no version changes, as the file has it: a later release with more keys finds the same hash."""
        return self.model_dump(
            by_alias=True, exclude_none=True, exclude_unset=True, exclude={"versions", "own"}
        )

    def to_table(self) -> dict[str, Any]:
        """The content of federation.toml."""
        *before, last = (version.model_dump() for version in self.versions)
        history = {"history": before} if before else {}
        last = {key: value for key, value in last.items() if value}
        return {
            "protocol": self.protocol,
            "version": self.version,
            **self.fixed_content(),
            **last,
            **history,
        }

    @functools.cached_property
    def _members(self) -> tuple[chain.MembersById, ...]:
        return chain.parse_members(self.versions)

    @functools.cached_property
    def _digests(self) -> tuple[bytes, ...]:
        return chain.version_digests(self.fixed_content(), self.versions)


_FILE_KEYS = {field.alias or name for name, field in Federation.model_fields.items()} - {
    "versions",
    "own",
}
_FILE_KEYS |= {"version", "members", "signatures", "history"}
"""The keys of federation.toml."""


def make_federation(
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
        raise ConfigError(
            "`agents.participation` below 1 is for simulations: a real peer is there, or it is not"
        )
    _check_supported(experiment)
    settings = experiment.settings()
    chosen = {
        key: settings[key]
        for key in (*KERNEL_KEYS, "model", "training", "algorithm")
        if key in settings
    }
    chosen["agents"] = {
        key: settings["agents"][key] for key in AGREED_AGENT_KEYS if key in settings["agents"]
    }
    try:
        validate_plain(chosen)
    except ValueError as error:
        raise ConfigError(
            f"the experiment `{experiment.name}` cannot be agreed on: {error}"
        ) from error
    believed = largest(experiment, dataset)
    dim = parameters.dimension(build_module(experiment, experiment.seeds[0], dataset))
    table = {
        "protocol": _PROTOCOL_VERSION,
        "name": experiment.name,
        "rounds": experiment.rounds,
        "seed": experiment.seeds[0] if seed is None else seed,
        "share": agents.malicious_share if share is None else share,
        "most_samples": believed if most_samples is None else most_samples,
        "data": {"shape": list(dataset.pool.x.shape[1:]), **_target_schema(dataset)},
        "experiment": records.canonical_settings(chosen),
        "versions": [
            {"members": [{"id": id, **member.to_table()} for id, member in enumerate(members)]}
        ],
        "own": list(user_functions_in(chosen)),
    }
    made = _validated_federation({**table, **options}, "the federation")
    if "limits" not in options:
        size = 4 * dim if made.encoding == "float32" else dim
        made = made.model_copy(update={"limits": Limits.for_model(size, made.round_seconds)})
    whole = made.model_dump(by_alias=True, exclude_none=True)  # with the defaults written out
    return _check_topology(_validated_federation(whole, "the federation"))


def _target_schema(dataset: Dataset) -> dict[str, Any]:
    """What is to be told of a sample: its class, or numbers."""
    return (
        {"class_names": list(dataset.class_names)}
        if dataset.class_names
        else {"target": list(dataset.pool.y.shape[1:])}
    )


def missing_dataset() -> Dataset:
    """The data set of a federation's experiment, which each member brings itself."""
    raise ConfigError("a federation's file holds no data: each member brings its own, with --data")


def read_federation(
    path: Path | str, *, allowed_functions: Collection[str] = (), allow_unsigned: bool = False
) -> Federation:
    """The federation in a file; raises ConfigError of one line where it, or a version before, is not valid.

    `own` are the functions outside fedcb2o ("package.module:function") that it may name; with others it can be read and
    signed, but has no `experiment`. `unsigned`: the last version may lack signatures.
    """
    path = Path(path)
    try:
        table = read_bounded_toml(path, MAX_FILE_BYTES)
        validate_plain(table)
    except (OSError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path} is no federation's file: {told}") from error
    if "protocol" not in table and (other := _describe_other_file(table)):
        raise ConfigError(f"{path} is {other}")
    if stray := next((key for key in table if key not in _FILE_KEYS), None):
        raise ConfigError(
            f"{path}: there is no key `{stray[:100]}`.{plugins.did_you_mean(stray, _FILE_KEYS)}"
        )
    version = table.pop("version", None)
    history = table.pop("history", [])
    last = {key: table.pop(key) for key in ("members", "signatures") if key in table}
    versions = [*history, last] if isinstance(history, list) else history
    federation = _validated_federation(
        {**table, "versions": versions, "own": list(allowed_functions)},
        str(path),
        allow_unsigned=allow_unsigned,
    )
    if isinstance(version, bool) or version != federation.version:
        raise ConfigError(
            f"{path}: `version` is {str(version)[:20]}, and {federation.version - 1} earlier versions are in `history`"
        )
    if not allow_unsigned:
        for member in federation.members.values():
            member.check_not_expired()
    return federation


def _describe_other_file(table: Mapping[str, Any]) -> str:
    """What a file is that was given for a federation's, and its cure; "" where that is not known."""
    if {"endpoint", "key", "root"} <= table.keys():
        return "a member's file, and no federation's: `fedcb2o peer federation EXPERIMENT --member ...` makes one"
    if {"agents", "algorithm", "seeds"} & table.keys():
        return "an experiment, and no federation's file: `fedcb2o peer federation` makes one of it, with --member"
    return ""


def write_federation(federation: Federation, path: Path | str) -> None:
    """Write federation.toml, which is the same for all members."""
    head = f"# What the members of {federation.name} agree on. All hold the same; `fedcb2o peer check` compares.\n\n"
    records.atomic_write(
        Path(path), (head + tomli_w.dumps(federation.to_table(), multiline_strings=True)).encode()
    )


def amend_federation(
    federation: Federation,
    *,
    remove: Collection[str] = (),
    replace: Sequence[Member] = (),
    add: Sequence[Member] = (),
) -> Federation:
    """The next version, unsigned: without some members, with another certificate, endpoint or key of some, and with new
    ones, whose ids follow all that there were. Raises ConfigError where it changes nothing, or a member twice."""
    if federation.missing_signatures:
        raise ConfigError(
            f"version {federation.version} is not signed by enough members: no other can follow it yet"
        )
    entries = {entry.name: entry.model_dump() for entry in federation.versions[-1].members}
    for name in (*remove, *(member.name for member in replace)):
        if name not in entries:
            raise ConfigError(f"there is no member `{name}`.{plugins.did_you_mean(name, entries)}")
    for member in add:
        if member.name in entries:
            raise ConfigError(
                f"{member.name} is a member: --replace gives it another certificate, endpoint or key"
            )
    changed = [*remove, *(member.name for member in (*replace, *add))]
    if not changed or len(set(changed)) < len(changed):
        raise ConfigError("a new version removes, replaces or adds members, and each of them once")
    for member in replace:
        entries[member.name] = {"id": entries[member.name]["id"], **member.to_table()}
    for id, member in enumerate(add, start=federation.num_agents):
        entries[member.name] = {"id": id, **member.to_table()}
    kept = [entry for name, entry in entries.items() if name not in remove]
    if kept == [entry.model_dump() for entry in federation.versions[-1].members]:
        raise ConfigError("the new version would be the same as the last one")
    return _check_topology(_with_versions(federation, *federation.versions, {"members": kept}))


def sign_federation(
    path: Path | str, identity: Identity, *, merge: Sequence[Path | str] = ()
) -> Federation:
    """Add this member's signature, and those in other copies of the same version, to a file; a second time changes
    nothing."""
    federation = read_federation(path, allow_unsigned=True)
    if federation.version == 1:
        raise ConfigError(
            f"{path} is version 1, which needs no signature: whoever runs with it agrees to it"
        )
    version = federation.versions[-1]
    for other in merge:
        copy = read_federation(other, allow_unsigned=True)
        if copy.digest != federation.digest:
            keys = ", ".join(
                f"`{key}`" for key in federation.differing_keys(copy.value_hashes())[:10]
            )
            raise ConfigError(f"{other} is another version than {path}, which differs in {keys}")
        version = chain.merge_signatures(version, copy.versions[-1].signatures)
    version = chain.add_signature(version, federation.digest, federation._members[-2], identity)
    made = _with_versions(federation, *federation.versions[:-1], version.model_dump())
    write_federation(made, path)
    return made


def _check_topology(federation: Federation) -> Federation:
    """The same; raises ConfigError where the graph of who asks whom cannot be made of so many agents, which is better
    known before anybody signs."""
    if not set(federation.user_functions) - federation.allowed_functions:
        build_neighbours(
            federation.experiment,
            federation.seed,
            torch.zeros(federation.num_agents, dtype=torch.int64),
        )
    return federation


def _with_versions(federation: Federation, *versions: Any) -> Federation:
    """The same terms with other versions, of which the last may lack signatures."""
    table = {
        **federation.fixed_content(),
        "own": federation.allowed_functions,
        "versions": versions,
    }
    return _validated_federation(table, "the new version", allow_unsigned=True)


def _validated_federation(
    table: Mapping[str, Any], source: str, *, allow_unsigned: bool = False
) -> Federation:
    try:
        made = Federation.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_format_validation_error(error)}") from error
    try:
        chain.validate_versions(made.versions, made._members, made._digests)
        chain.validate_signatures(
            made.versions[:-1] if allow_unsigned else made.versions, made._members
        )
        if not set(made.user_functions) - made.allowed_functions:
            made.experiment  # noqa: B018
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    return made


def _format_validation_error(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    place = [str(part)[:50] for part in problem["loc"]]
    of = ""
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
        return f"it speaks protocol {problem['input']!r:.20}, and this fedcb2o {_PROTOCOL_VERSION}: take the others' release"
    told = str(problem["ctx"]["error"]) if problem["type"] == "value_error" else problem["msg"]
    got = (
        ""
        if isinstance(problem["input"], Mapping | list | tuple)
        else f", got {problem['input']!r:.50}"
    )
    told = told[0].lower() + told[1:].replace("tuple", "list").replace("dictionary", "table")
    return f"`{key}`{of}: {told}{got}"


def _check_supported(experiment: Experiment) -> None:
    """Raises ConfigError for what real peers cannot do."""
    clusters = experiment.algorithm.bind("algorithm", algorithms)().clusters
    if clusters is not None:
        why = "has models of clusters" if clusters.each else "has a coordinator"
        raise ConfigError(
            f"`{plugins.label(experiment.algorithm.name)}` {why}, and real peers have none"
        )


def _flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flatten(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value


def _short_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
