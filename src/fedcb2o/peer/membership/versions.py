"""Who the members of a federation are, version by version, each signed by the majority of the one before.

Version 1 is an agreement by itself: whoever runs with it has said yes. Version k + 1 counts where more than half of the
members of version k signed its hash, in which is that of version k. As a file carries all versions, whoever holds
version 1 can check the others offline.
"""

import base64
import binascii
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from fedcb2o import records
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config.settings import Section
from fedcb2o.peer.membership.identity import Identity, Member

_SIGNATURE_CONTEXT = b"fedcb2o federation 1\n"
"""What precedes the hash in what members sign, so that it can be taken for nothing else."""

MembersById = Mapping[int, Member]


class MemberEntry(Section):
    """A member with its id."""

    id: Annotated[int, Field(ge=0, lt=2**16)]
    name: str
    endpoint: str
    key: str
    root: str


class Signature(Section):
    """That a member of the version before agrees to this one."""

    name: Annotated[str, Field(max_length=100)]
    signature: Annotated[str, Field(max_length=100)]


class Version(Section):
    """The members of one version, and who of the version before signed it."""

    members: Annotated[tuple[MemberEntry, ...], Field(strict=False, min_length=2, max_length=2**12)]
    signatures: Annotated[tuple[Signature, ...], Field(strict=False, max_length=2**12)] = ()


def parse_members(versions: Sequence[Version]) -> tuple[MembersById, ...]:
    """The members of each version by their ids, ascending; raises ConfigError for what is no member."""
    known: dict[MemberEntry, Member] = {}  # most stay from version to version
    found = []
    for number, version in enumerate(versions, start=1):
        members = {}
        for entry in sorted(version.members, key=lambda entry: entry.id):
            if entry not in known:
                try:
                    known[entry] = Member.from_table(entry.model_dump(exclude={"id"}))
                except ConfigError as error:
                    raise ConfigError(f"version {number}, agent {entry.id}: {error}") from error
            members[entry.id] = known[entry]
        found.append(members)
    return tuple(found)


def version_digests(terms: Mapping[str, Any], versions: Sequence[Version]) -> tuple[bytes, ...]:
    """The SHA-256 of each version: of the terms, its number, its members and, in hex, the hash of the version before
    where there is one, as JSON in ASCII
    with sorted keys and without blanks, in which 2.0 is written as 2."""
    found: list[bytes] = []
    for number, version in enumerate(versions, start=1):
        previous = found[-1].hex() if found else None
        members = [
            entry.model_dump() for entry in sorted(version.members, key=lambda entry: entry.id)
        ]
        content = records.canonical_settings(
            {**terms, "version": number, "previous": previous, "members": members}
        )
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        found.append(hashlib.sha256(text.encode()).digest())
    return tuple(found)


def validate_versions(
    versions: Sequence[Version], members: Sequence[MembersById], hashes: Sequence[bytes]
) -> None:
    """Raises ConfigError where members of one version cannot be together, or versions cannot follow each other.

    A member keeps its id and its name; neither ever returns once it was removed.
    """
    names: dict[int, str] = {}
    for number, version in enumerate(versions, start=1):
        for key in ("id", "name", "endpoint", "key", "root"):
            if twice := _duplicates(getattr(entry, key) for entry in version.members):
                shown = f": {twice[0]!r}" if len(str(twice[0])) <= 100 else ""
                raise ConfigError(f"version {number} has two members of the same `{key}`{shown}")
        before = members[number - 2] if number > 1 else {}
        new = [id for id in members[number - 1] if id not in before]
        if new != list(range(len(names), len(names) + len(new))):
            raise ConfigError(
                f"version {number} gives ids out of order: those of new members follow all that there were, from "
                f"{len(names)}, and none returns"
            )
        taken = set(names.values())
        for id, member in members[number - 1].items():
            if id in before and names[id] != member.name:
                raise ConfigError(
                    f"version {number} names agent {id} {member.name}, who was {names[id]}: names stay"
                )
            if id not in before and member.name in taken:
                raise ConfigError(
                    f"version {number} has {member.name} again, who was removed: take another name"
                )
            names[id] = member.name
        voters = {member.name: member for member in before.values()}
        if wrong := [
            each.name
            for each in version.signatures
            if not _is_valid_signature(each, voters, hashes[number - 1])
        ]:
            raise ConfigError(
                f"version {number} has a signature of {wrong[0]!r} that is not good: was the file changed? Ask for it "
                "again, or take this signature out"
            )
        if twice := _duplicates(
            signature.name for signature in version.signatures
        ):  # a signature may be made in many ways
            raise ConfigError(
                f"version {number} has two signatures of {twice[0]!r}, who has one vote: take one out"
            )


def describe_changes(before: MembersById, after: MembersById) -> list[str]:
    """What a version does to the members of the one before, a few words for each, with the fingerprints of keys."""
    told = [f"removes {before[id].name}" for id in before if id not in after]
    for id, member in after.items():
        if id not in before:
            told.append(f"adds {member.name} ({member.endpoint}, key {member.fingerprint})")
            continue
        old = before[id]
        other = []
        if member.endpoint != old.endpoint:
            other.append(f"endpoint ({member.endpoint}, not {old.endpoint})")
        if member.key != old.key:
            other.append(f"key ({member.fingerprint}, not {old.fingerprint})")
        if member.root != old.root:
            other.append("root")
        told += [f"gives {member.name} another {' and '.join(other)}"] if other else []
    return told


def required_signatures(before: MembersById) -> int:
    """How many signatures the next version needs: of more than half of the members."""
    return len(before) // 2 + 1


def validate_signatures(versions: Sequence[Version], members: Sequence[MembersById]) -> None:
    """Raises ConfigError unless each of these versions, checked before, was signed by enough members of the one
    before."""
    for number, version in enumerate(versions[1:], start=2):
        before = members[number - 2]
        if (lacking := required_signatures(before) - len(version.signatures)) > 0:
            others = unsigned_members(version, before)
            raise ConfigError(
                f"version {number} lacks {lacking} of the {required_signatures(before)} signatures that it needs of members of "
                f"version {number - 1}: `fedcb2o peer sign` adds that of {' or '.join(others[:5])}"
                + (f" or {len(others) - 5} others" if len(others) > 5 else "")
            )


def unsigned_members(version: Version, before: MembersById) -> list[str]:
    """The members of the version before who did not sign this one."""
    signed = {signature.name for signature in version.signatures}
    return [member.name for member in before.values() if member.name not in signed]


def add_signature(
    version: Version, hash: bytes, before: MembersById, identity: Identity
) -> Version:
    """A version with this member's signature too; raises ConfigError where it was no member of the version before."""
    name = next(
        (member.name for member in before.values() if member.key == identity.member.key), None
    )
    if name is None:
        raise ConfigError(
            f"the key in {identity.folder} is that of no member of the version before, and these alone sign"
        )
    made = Signature(
        name=name, signature=base64.b64encode(identity.sign(_SIGNATURE_CONTEXT + hash)).decode()
    )
    return merge_signatures(version, (made,))


def merge_signatures(version: Version, signatures: Sequence[Signature]) -> Version:
    """A version with these signatures too, in the order of names."""
    found = {each.name: each for each in (*signatures, *version.signatures)}
    return Version(members=version.members, signatures=tuple(found[name] for name in sorted(found)))


def _is_valid_signature(signature: Signature, voters: Mapping[str, Member], hash: bytes) -> bool:
    member = voters.get(signature.name)
    try:
        content = base64.b64decode(signature.signature.encode(), validate=True)
    except (binascii.Error, ValueError):
        return False
    return member is not None and member.verify(_SIGNATURE_CONTEXT + hash, content)


def _duplicates(values: Iterable[Any]) -> list[Any]:
    """Those that are there more than once."""
    return [value for value, count in Counter(values).items() if count > 1]
