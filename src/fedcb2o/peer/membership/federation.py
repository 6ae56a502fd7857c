"""Federation: the agreed settings and members, in the readable file federation.toml.

The hash of the first version is the run's id. Later versions change members only, see `versions`.

A member that a version removed is refused by every node with this version. A node with an older
version accepts it until it gets the new file. There is no consensus on the newest version: two
different successors of one version are both valid only if a member signed both, and the two files
show which member did.
"""

import functools
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import tomli_w
from pydantic import Field, ValidationError

from fedcb2o import plugins, records
from fedcb2o.errors import ConfigError
from fedcb2o.federated.sections import Section
from fedcb2o.peer.membership import versions as chain
from fedcb2o.peer.membership.federation_schema import (
    AgreedSettings,
    Limits,
    SampleSchema,
    validate_plain,
)
from fedcb2o.peer.membership.identity import (
    Identity,
    Member,
    parse_bounded_toml,
    read_bounded_toml,
    spelled_hex,
)
from fedcb2o.peer.membership.versions import Version

if TYPE_CHECKING:
    from fedcb2o.experiments.config.settings import Experiment

PROTOCOL_VERSION: Final = 1
MAX_FILE_BYTES = 2**20

_Seconds = Annotated[float, Field(ge=0, le=1e7)]


class Federation(Section):
    """Settings and members that all agree on, in one version.

    Attributes:
        protocol: Version of the wire protocol.
        name: Name of the experiment.
        seed: Seed of all random streams.
        rounds: Number of rounds T.
        synchronous: Accept only models of the same round.
        round_seconds: Minimum duration of a round.
        deadline_seconds: Time that a round waits for answers.
        lag: Largest number of rounds that a received model may be behind the receiver.
        encoding: Codec of the models.
        share: Share of malicious agents that rules assume.
        most_samples: Upper bound of claimed sample counts.
        limits: Limits of a node's answers.
        data: Format of the samples.
        settings: Agreed sections of the experiment; `experiment` in the file.
        versions: All versions of the membership.
        allowed_functions: User functions that this organisation allows; not in the file.
    """

    protocol: Literal[1]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    rounds: Annotated[int, Field(ge=1, lt=2**31)]
    synchronous: bool = False
    round_seconds: _Seconds = 0.0
    deadline_seconds: Annotated[_Seconds, Field(gt=0)] = 60.0
    lag: Annotated[int, Field(ge=0, lt=2**31)] = 5
    encoding: Literal["float32", "int8", "top_k"] = "float32"
    share: Annotated[float, Field(ge=0, lt=1)]
    most_samples: Annotated[int, Field(ge=1, lt=2**53)]
    limits: Limits = Limits()
    data: SampleSchema
    settings: Annotated[AgreedSettings, Field(alias="experiment")]
    versions: Annotated[tuple[Version, ...], Field(strict=False, min_length=1, max_length=1000)]
    allowed_functions: Annotated[frozenset[str], Field(strict=False)] = frozenset()

    @property
    def version(self) -> int:
        """Number of this version, from 1."""
        return len(self.versions)

    @property
    def members(self) -> Mapping[int, Member]:
        """Members of this version by ascending id."""
        return self._members[-1]

    @property
    def run(self) -> bytes:
        """The run's id: the hash of version 1."""
        return self._digests[0]

    @property
    def digest(self) -> bytes:
        """Hash of this version."""
        return self._digests[-1]

    @property
    def verification_phrase(self) -> str:
        """Text that members compare; as a whole it covers all settings, endpoints and keys.

        The hash of a later version comes first, because the run's id does not cover its keys.
        """
        size = f"{len(self.members)} members"
        if self.version == 1:
            return f"{self.name}, run {spelled_hex(self.run)}, version 1, {size}"
        version = f"version {self.version} {spelled_hex(self.digest)}"
        return f"{self.name}, {version}, {size}, of run {spelled_hex(self.run[:8])}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a sample."""
        return self.data.shape

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, in order."""
        return self.data.class_names

    @functools.cached_property
    def num_agents(self) -> int:
        """N: one more than the highest id of all versions."""
        return 1 + max(id for members in self._members for id in members)

    @functools.cached_property
    def experiment(self) -> "Experiment":
        """The agreed experiment, with one cluster and without attackers.

        A ConfigError says that the settings are invalid, or name a function that is not allowed
        here.
        """
        from fedcb2o.peer.membership._agreed_experiment import agreed_experiment  # needs PyTorch

        return agreed_experiment(self)

    @functools.cached_property
    def user_functions(self) -> tuple[str, ...]:
        """Functions and models outside fedcb2o that the experiment names."""
        settings = self.settings.model_dump(exclude_none=True)
        return tuple(dict.fromkeys(plugins.foreign_names_in(settings)))

    def id_of(self, member: Member) -> int:
        """Return a member's id.

        Its key decides. A member with other values in this file is a ConfigError.
        """
        title = f"{self.name}, version {self.version}"
        ids = [id for id, other in self.members.items() if other.key == member.key]
        if not ids:
            for other in self.members.values():
                if other.name == member.name:
                    raise ConfigError(
                        f"{member.name} is a member of {title}, but with another key "
                        f"({other.fingerprint}, not {member.fingerprint}): take the identity that "
                        "it was made with, or have the others sign a version with this one (`peer "
                        "amend --replace`)"
                    )
            raise ConfigError(f"{member.name} is no member of {title}: its key is not in it")

        own = member.to_table()
        registered = self.members[ids[0]].to_table()
        for key, value in own.items():
            if registered[key] != value:
                raise ConfigError(
                    f"{member.name} is in {title} with another `{key}`: take the identity that it "
                    "was made with, or have the others sign a version with this one (`peer amend`)"
                )
        return ids[0]

    def value_hashes(self) -> dict[str, str]:
        """Return a short hash of each value by dotted key, to compare two files."""
        return dict(self._value_hashes)

    @functools.cached_property
    def _value_hashes(self) -> dict[str, str]:
        members = {
            member.name: {"id": id, **member.to_table()} for id, member in self.members.items()
        }
        content = {
            **self.fixed_content(),
            "version": self.version,
            "previous": self._digests[-2].hex() if self.version > 1 else None,
            "members": members,
        }
        # Hashes, because a HELLO also reaches members of another federation, who must not read this
        # one.
        flat = _flatten(records.canonical_settings(content))
        return {key: _short_hash(value) for key, value in flat}

    def differing_keys(self, other: Mapping[str, str]) -> list[str]:
        """Return the keys that differ from `value_hashes` of another file.

        These are sorted dotted keys that are missing in one of the files or have different values.
        """
        own = self.value_hashes()
        return sorted(key for key in {*own, *other} if own.get(key) != other.get(key))

    def unsigned_members(self) -> list[str]:
        """Return the members that did not sign this version but may."""
        if self.version == 1:
            return []
        return chain.unsigned_members(self.versions[-1], self._members[-2])

    @property
    def missing_signatures(self) -> int:
        """Number of signatures that this version still needs."""
        if self.version == 1:
            return 0
        required = chain.required_signatures(self._members[-2])
        return max(0, required - len(self.versions[-1].signatures))

    def describe_changes(self) -> list[str]:
        """Return one phrase per difference from the previous version.

        The first version adds all its members.
        """
        previous = self._members[-2] if self.version > 1 else {}
        return chain.describe_changes(previous, self.members)

    def former_members(self) -> list[tuple[int, Member]]:
        """Return members of earlier versions whose keys this version removed or replaced.

        Each has its id and its former entry, the oldest first.
        """
        former = dict.fromkeys(
            (id, member) for members in self._members[:-1] for id, member in members.items()
        )
        # A member with another endpoint or root keeps its key, and is no former one.
        keys = {member.key for member in self.members.values()}
        return [(id, member) for id, member in former if member.key not in keys]

    def is_successor_of(self, earlier: "Federation") -> bool:
        """Check that this version is, or follows, another one, by the hashes in this file."""
        # A file with fewer versions ends with another hash.
        return self._digests[: earlier.version][-1] == earlier.digest

    def fixed_content(self) -> dict[str, Any]:
        """Return what no version changes, as in the file.

        Unset keys are left out, so that a later release with more keys finds the same hash.
        """
        return self.model_dump(
            by_alias=True,
            exclude_none=True,
            exclude_unset=True,
            exclude={"versions", "allowed_functions"},
        )

    def to_table(self) -> dict[str, Any]:
        """Return the content of federation.toml."""
        *previous, last = (version.model_dump() for version in self.versions)
        return {
            "protocol": self.protocol,
            "version": self.version,
            **self.fixed_content(),
            **{key: value for key, value in last.items() if value},
            **({"history": previous} if previous else {}),
        }

    @functools.cached_property
    def _members(self) -> tuple[chain.MembersById, ...]:
        return chain.parse_members(self.versions)

    @functools.cached_property
    def _digests(self) -> tuple[bytes, ...]:
        return chain.version_digests(self.fixed_content(), self.versions)


_FIELD_KEYS = {field.alias or name for name, field in Federation.model_fields.items()}
_FILE_KEYS = _FIELD_KEYS - {"versions", "allowed_functions"}
_FILE_KEYS |= {"version", "members", "signatures", "history"}


def read_federation(
    path: Path | str,
    *,
    allowed_functions: Collection[str] = (),
    allow_unsigned: bool = False,
    check_experiment: bool = True,
) -> Federation:
    """Read a federation and verify all its versions.

    Args:
        path: The file.
        allowed_functions: Functions outside fedcb2o ("package.module:function") that it may name.
            A file that names others can be read and signed, but has no `experiment`.
        allow_unsigned: The last version may lack signatures.
        check_experiment: Check the experiment's settings, which takes PyTorch. A program that only
            signs versions or passes messages on does not need them.

    Returns:
        The federation.

    Raises:
        ConfigError: The file, or one of its versions, is not valid.
    """
    path = Path(path)
    try:
        table = read_bounded_toml(path, MAX_FILE_BYTES)
        validate_plain(table)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path} is no federation's file: {reason}") from error
    # A file of another kind has its own error, before its keys are called unknown.
    if "protocol" not in table and (description := _describe_other_file(table)):
        raise ConfigError(f"{path} is {description}")
    # Pydantic would name keys of its own model, which are not those of the file.
    for key in table:
        if key not in _FILE_KEYS:
            hint = plugins.did_you_mean(key, _FILE_KEYS)
            raise ConfigError(f"{path}: there is no key `{key[:100]}`.{hint}")

    version = table.pop("version", None)
    history = table.pop("history", [])
    last = {key: table.pop(key) for key in ("members", "signatures") if key in table}
    table["versions"] = [*history, last] if isinstance(history, list) else history
    table["allowed_functions"] = list(allowed_functions)
    federation = validated_federation(
        table, str(path), allow_unsigned=allow_unsigned, check_experiment=check_experiment
    )
    # TOML's true equals 1 in Python.
    if isinstance(version, bool) or version != federation.version:
        raise ConfigError(
            f"{path}: `version` is {str(version)[:20]}, and {federation.version - 1} earlier "
            "versions are in `history`"
        )
    if not allow_unsigned:
        for member in federation.members.values():
            member.check_not_expired()
    return federation


def _describe_other_file(table: Mapping[str, Any]) -> str:
    """Describe a file of another kind and the remedy, if known."""
    if {"endpoint", "key", "root"} <= table.keys():
        return (
            "a member's file, and no federation's: `fedcb2o peer federation EXPERIMENT --member "
            "...` makes one"
        )
    if {"agents", "algorithm", "seeds"} & table.keys():
        return (
            "an experiment, and no federation's file: `fedcb2o peer federation` makes one of it, "
            "with --member"
        )
    return ""


def write_federation(federation: Federation, path: Path | str) -> None:
    """Write federation.toml, which is the same for all members.

    Args:
        federation: Any version, also one that lacks signatures.
        path: The file.
    """
    records.atomic_write(Path(path), file_content(federation))


def file_content(federation: Federation) -> bytes:
    """Return the content of federation.toml."""
    head = (
        f"# What the members of {federation.name} agree on. All hold the same; `fedcb2o peer check`"
        " compares.\n\n"
    )
    return (head + tomli_w.dumps(federation.to_table(), multiline_strings=True)).encode()


def removal_notice(federation: Federation, member: Member, content: bytes) -> str:
    """Describe how a later version that somebody sent removes or changes a member.

    The sender is not trusted. Only the versions in the content are read. They count if they follow
    the known version, each signed by more than half of the members before. The notice is empty if
    no such version removes or changes the member.
    """
    try:
        later = _parse_versions(federation, content)
    except ValueError:
        return ""
    is_later = later.version > federation.version and later.is_successor_of(federation)
    if not is_later or later.missing_signatures:
        return ""

    id = federation.id_of(member)
    entries = {
        number: members.get(id)
        for number, members in enumerate(later._members, start=1)
        if number > federation.version
    }
    name = member.name
    removals = [number for number, entry in entries.items() if entry is None]
    changes = [number for number, entry in entries.items() if entry != member]
    # A version may have undone an earlier change.
    if not changes or entries[later.version] == member:
        return ""
    number = (removals or changes)[0]
    signers = [signature.name for signature in later.versions[number - 1].signatures]
    signed = f"version {number} of the federation, signed by {', '.join(signers)}"
    if removals:
        return f"{signed}, removes {name}: this node takes part no more"
    return (
        f"{signed}, gives {name} another key, root or endpoint: get the new federation.toml, and "
        "go on with it, the identity that it names, and --resume"
    )


def _parse_versions(federation: Federation, content: bytes) -> Federation:
    """Return the federation with the versions of a file that somebody sent.

    A ValueError says that they are invalid.
    """
    # Its other keys are ignored: they cannot change the settings of this run.
    table = parse_bounded_toml(content, MAX_FILE_BYTES)
    validate_plain(table)
    last = {key: table[key] for key in ("members", "signatures") if key in table}
    history = table.get("history", [])
    if not isinstance(history, list):
        raise ConfigError("`history` must be a list")
    return _with_versions(federation, *history, last)


def amend_federation(
    federation: Federation,
    *,
    remove: Collection[str] = (),
    replace: Sequence[Member] = (),
    add: Sequence[Member] = (),
) -> Federation:
    """Create the next version, without signatures.

    Args:
        federation: The current version.
        remove: Names of members to remove.
        replace: Members with another certificate, endpoint or key.
        add: New members; their ids follow all earlier ids.

    Returns:
        The next version.

    Raises:
        ConfigError: Nothing changes, or a member changes twice.
    """
    if federation.missing_signatures:
        raise ConfigError(
            f"version {federation.version} is not signed by enough members: no other can follow it "
            "yet"
        )
    current = [entry.model_dump() for entry in federation.versions[-1].members]
    entries = {entry["name"]: entry for entry in current}
    replaced = [member.name for member in replace]
    added = [member.name for member in add]
    for name in (*remove, *replaced):
        if name not in entries:
            raise ConfigError(f"there is no member `{name}`.{plugins.did_you_mean(name, entries)}")
    for name in added:
        if name in entries:
            raise ConfigError(
                f"{name} is a member: --replace gives it another certificate, endpoint or key"
            )
    changed = [*remove, *replaced, *added]
    if not changed or len(set(changed)) < len(changed):
        raise ConfigError("a new version removes, replaces or adds members, and each of them once")

    for member in replace:
        entries[member.name] = {"id": entries[member.name]["id"], **member.to_table()}
    for id, member in enumerate(add, start=federation.num_agents):
        entries[member.name] = {"id": id, **member.to_table()}
    remaining = [entry for name, entry in entries.items() if name not in remove]
    if remaining == current:
        raise ConfigError("the new version would be the same as the last one")
    versions = (*federation.versions, {"members": remaining})
    amended = _with_versions(federation, *versions)
    # Other graphs may not allow every number of agents.
    if "graph" in federation.settings.agents:
        from fedcb2o.peer.membership._agreed_experiment import check_topology  # needs PyTorch

        check_topology(amended)
    return amended


def sign_federation(
    path: Path | str, identity: Identity, *, merge: Sequence[Path | str] = ()
) -> Federation:
    """Add this member's signature to a file; a second call changes nothing.

    The folder of the identity has a journal of the signed versions. It allows one successor of each
    version.

    Args:
        path: The file.
        identity: This organisation.
        merge: Copies of the same version, whose signatures are added too.

    Returns:
        The signed federation.

    Raises:
        ConfigError: The file needs no signature of this member, a copy differs, or this member
            signed another version of this number.
        RunError: The journal or the file cannot be written.
    """
    federation = read_federation(path, allow_unsigned=True, check_experiment=False)
    if federation.version == 1:
        raise ConfigError(
            f"{path} is version 1, which needs no signature: running with it is agreement"
        )
    version = federation.versions[-1]
    for other in merge:
        copy = read_federation(other, allow_unsigned=True, check_experiment=False)
        if copy.digest != federation.digest:
            differing = federation.differing_keys(copy.value_hashes())[:10]
            keys = ", ".join(f"`{key}`" for key in differing)
            raise ConfigError(f"{other} is another version than {path}, which differs in {keys}")
        version = chain.merge_signatures(version, copy.versions[-1].signatures)
    version = chain.add_signature(version, federation._digests, federation._members, identity)
    signed = _with_versions(federation, *federation.versions[:-1], version.model_dump())
    write_federation(signed, path)
    return signed


def _with_versions(federation: Federation, *versions: Any) -> Federation:
    """Return the federation with other versions; the last may lack signatures.

    The experiment is the same in all versions, and is not checked again.
    """
    table = {
        **federation.fixed_content(),
        "allowed_functions": federation.allowed_functions,
        "versions": versions,
    }
    return validated_federation(
        table, "the new version", allow_unsigned=True, check_experiment=False
    )


def validated_federation(
    table: Mapping[str, Any],
    source: str,
    *,
    allow_unsigned: bool = False,
    check_experiment: bool = True,
) -> Federation:
    """Return the federation of a table; a ConfigError begins with its source."""
    try:
        federation = Federation.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_format_validation_error(error)}") from error
    versions = federation.versions
    try:
        chain.validate_versions(versions, federation._members, federation._digests)
        signed = versions[:-1] if allow_unsigned else versions
        chain.validate_signatures(signed, federation._members)
        # A file that names other functions can be read and signed, but has no experiment.
        if check_experiment and not set(federation.user_functions) - federation.allowed_functions:
            federation.experiment  # noqa: B018
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    return federation


def _format_validation_error(error: ValidationError) -> str:
    """Format the first problem in the words of the file."""
    # The first one: later ones often follow from it.
    problem = error.errors(include_url=False)[0]
    path = [str(part)[:50] for part in problem["loc"]]
    suffix = ""
    if path[0] == "versions" and len(path) > 1:
        suffix = f" of version {int(path[1]) + 1}"
        path = path[2:]
    key = "history" if path == ["versions"] else ".".join(path)

    if problem["type"] == "extra_forbidden":
        return f"there is no key `{key}`{suffix}"
    if problem["type"] == "too_short" and key == "members":
        return "a federation has at least 2 members"
    if problem["type"] == "missing":
        return f"the key `{key}`{suffix} is missing"
    value = problem["input"]
    if key == "protocol":
        return (
            f"it speaks protocol {value!r:.20}, and this fedcb2o {PROTOCOL_VERSION}: take the "
            "others' release"
        )
    message = problem["msg"]
    if problem["type"] == "string_pattern_mismatch":
        message = "must have up to 100 letters, digits, `.`, `_` and `-`"
    if problem["type"] == "value_error":
        message = str(problem["ctx"]["error"])
    message = message.replace("tuple", "list").replace("dictionary", "table")
    got = "" if isinstance(value, Mapping | list | tuple) else f", got {value!r:.50}"
    return f"`{key}`{suffix}: {message[0].lower()}{message[1:]}{got}"


def _flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flatten(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value


def _short_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
