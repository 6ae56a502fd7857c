"""Versions of a federation's membership, signed by majorities.

Version 1 is an agreement by itself: a member that runs with it accepts it. Version k + 1 is valid
if more than half of the members of version k signed its hash, which includes the hash of version k.
A file contains all versions, so that a holder of version 1 can verify the later ones offline.
"""

import base64
import binascii
import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, field_validator

from fedcb2o import records
from fedcb2o.errors import ConfigError
from fedcb2o.federated.sections import Section
from fedcb2o.peer.membership.certificates import canonical_endpoint
from fedcb2o.peer.membership.identity import Identity, Member
from fedcb2o.peer.membership.version_journal import reserve_version

_SIGNATURE_CONTEXT = b"fedcb2o federation 1\n"
"""Prefix of the signed hash, so that the signature is valid for no other purpose."""

MembersById = Mapping[int, Member]


class _MemberEntry(Section):
    """A member with its id, as in the file."""

    id: Annotated[int, Field(ge=0, lt=2**16)]
    name: str
    endpoint: str
    key: str
    root: str

    @field_validator("endpoint")
    @classmethod
    def _write_in_one_way(cls, endpoint: str) -> str:
        """Return the canonical endpoint; `Member` refuses a text that is none."""
        with contextlib.suppress(ConfigError):
            return canonical_endpoint(endpoint)
        return endpoint


class Signature(Section):
    """Signature of one version by a member of the previous version."""

    name: Annotated[str, Field(max_length=100)]
    signature: Annotated[str, Field(max_length=100)]


class Version(Section):
    """Members of one version, and signatures of previous members."""

    members: Annotated[
        tuple[_MemberEntry, ...], Field(strict=False, min_length=2, max_length=2**12)
    ]
    signatures: Annotated[tuple[Signature, ...], Field(strict=False, max_length=2**12)] = ()


def parse_members(versions: Sequence[Version]) -> tuple[MembersById, ...]:
    """Parse the members of each version by ascending id."""
    # Most members stay from version to version.
    cache: dict[_MemberEntry, Member] = {}
    parsed = []
    for number, version in enumerate(versions, start=1):
        members = {}
        for entry in sorted(version.members, key=lambda entry: entry.id):
            if entry not in cache:
                try:
                    table = entry.model_dump(exclude={"id"})
                    cache[entry] = Member.from_table(table)
                except ConfigError as error:
                    raise ConfigError(f"version {number}, agent {entry.id}: {error}") from error
            members[entry.id] = cache[entry]
        parsed.append(members)
    return tuple(parsed)


def version_digests(
    fixed_content: Mapping[str, Any], versions: Sequence[Version]
) -> tuple[bytes, ...]:
    """Return the SHA-256 of each version.

    The hashed text is JSON in ASCII with sorted keys and without blanks, in which 2.0 is written as
    2. It contains the fixed content, the version's number and members, and the hexadecimal hash of
    the previous version. The fixed content is the part of the file that no version changes.
    """
    hashes: list[bytes] = []
    for number, version in enumerate(versions, start=1):
        previous = hashes[-1].hex() if hashes else None
        entries = sorted(version.members, key=lambda entry: entry.id)
        content = {
            **fixed_content,
            "version": number,
            # Each hash covers all versions before.
            "previous": previous,
            "members": [entry.model_dump() for entry in entries],
        }
        text = json.dumps(
            records.canonical_settings(content),
            sort_keys=True,
            separators=(",", ":"),
            allow_nan=False,
        )
        hashes.append(hashlib.sha256(text.encode()).digest())
    return tuple(hashes)


def validate_versions(
    versions: Sequence[Version], members: Sequence[MembersById], hashes: Sequence[bytes]
) -> None:
    """Check that each version is consistent and may follow the previous one.

    A member keeps its id and its name. Neither is used again after the member was removed. The
    number of signatures is not checked; see `validate_signatures`.
    """
    names: dict[int, str] = {}
    for number, version in enumerate(versions, start=1):
        previous = members[number - 2] if number > 1 else {}
        _check_unique_entries(number, version)
        _check_ids_and_names(number, members[number - 1], previous, names)
        _check_signatures(number, version, previous, hashes[number - 1])


def _check_unique_entries(number: int, version: Version) -> None:
    for key in ("id", "name", "endpoint", "key", "root"):
        if repeated := _duplicates(getattr(entry, key) for entry in version.members):
            value = f": {repeated[0]!r}" if len(str(repeated[0])) <= 100 else ""
            raise ConfigError(f"version {number} has two members of the same `{key}`{value}")


def _check_ids_and_names(
    number: int, members: MembersById, previous: MembersById, names: dict[int, str]
) -> None:
    """Check one version; add its members to `names`, all names by id."""
    new_ids = [id for id in members if id not in previous]
    # Records of earlier rounds name members by their ids.
    if new_ids != list(range(len(names), len(names) + len(new_ids))):
        raise ConfigError(
            f"version {number} gives ids out of order: those of new members follow all earlier "
            f"ids, from {len(names)}, and no id is used again"
        )

    used_names = set(names.values())
    for id, member in members.items():
        if id in previous and names[id] != member.name:
            raise ConfigError(
                f"version {number} names agent {id} {member.name}, but its name was {names[id]}: "
                "names stay"
            )
        if id not in previous and member.name in used_names:
            raise ConfigError(
                f"version {number} has {member.name} again, which was removed: take another name"
            )
        names[id] = member.name


def _check_signatures(number: int, version: Version, previous: MembersById, hash: bytes) -> None:
    voters = {member.name: member for member in previous.values()}
    for signature in version.signatures:
        if not _is_valid_signature(signature, voters, hash):
            raise ConfigError(
                f"version {number} has an invalid signature of {signature.name!r}: was the file "
                "changed? Ask for it again, or remove this signature"
            )
    # Compare names: one key can make several valid signatures
    if repeated := _duplicates(signature.name for signature in version.signatures):
        raise ConfigError(
            f"version {number} has two signatures of {repeated[0]!r}, but a member has one vote: "
            "remove one"
        )


def describe_changes(previous: MembersById, current: MembersById) -> list[str]:
    """Return one phrase per difference between two versions, with new fingerprints."""
    changes = [f"removes {previous[id].name}" for id in previous if id not in current]
    for id, member in current.items():
        if id not in previous:
            place = "behind a relay" if member.is_outbound_only else member.endpoint
            changes.append(f"adds {member.name} ({place}, key {member.fingerprint})")
            continue
        old = previous[id]
        differences = []
        if member.endpoint != old.endpoint:
            differences.append(f"endpoint ({member.endpoint}, not {old.endpoint})")
        if member.key != old.key:
            differences.append(f"key ({member.fingerprint}, not {old.fingerprint})")
        if member.root != old.root:
            differences.append("root")
        if differences:
            changes.append(f"gives {member.name} another {' and '.join(differences)}")
    return changes


def required_signatures(previous: MembersById) -> int:
    """Return the number of signatures for the next version, more than half of these members."""
    # Two majorities have a member in common, who then signed two versions of one number.
    return len(previous) // 2 + 1


def validate_signatures(versions: Sequence[Version], members: Sequence[MembersById]) -> None:
    """Check that each version has enough signatures, after `validate_versions`."""
    for number, version in enumerate(versions[1:], start=2):
        previous = members[number - 2]
        required = required_signatures(previous)
        missing = required - len(version.signatures)
        if missing > 0:
            names = unsigned_members(version, previous)
            others = f" or {len(names) - 5} others" if len(names) > 5 else ""
            raise ConfigError(
                f"version {number} lacks {missing} of the {required} signatures that it needs of "
                f"members of version {number - 1}: `fedcb2o peer sign` adds that of "
                f"{' or '.join(names[:5])}{others}"
            )


def unsigned_members(version: Version, previous: MembersById) -> list[str]:
    """Return the members that did not sign this version but may, by ascending id."""
    signers = {signature.name for signature in version.signatures}
    return [member.name for member in previous.values() if member.name not in signers]


def add_signature(
    version: Version, hashes: Sequence[bytes], members: Sequence[MembersById], identity: Identity
) -> Version:
    """Sign the last version, after an entry in the journal of the identity.

    Only a member of the previous version can sign, and only one version of a number; else
    ConfigError is raised.
    """
    previous, current = members[-2:]
    signers = [member.name for member in previous.values() if member.key == identity.member.key]
    if not signers:
        raise ConfigError(
            f"the key in {identity.folder} belongs to no member of the version before, and only "
            "these sign"
        )
    changes = describe_changes(previous, current)
    # The entry comes first: after a crash in between, a signature without an entry could get a
    # rival.
    reserve_version(identity, hashes[0], len(hashes), hashes[-1], changes)
    content = identity.sign(_SIGNATURE_CONTEXT + hashes[-1])
    signature = Signature(name=signers[0], signature=base64.b64encode(content).decode())
    return merge_signatures(version, (signature,))


def merge_signatures(version: Version, signatures: Sequence[Signature]) -> Version:
    """Add signatures to a version, sorted by name; a member's existing one stays."""
    by_name = {signature.name: signature for signature in (*signatures, *version.signatures)}
    # In one order, so that copies that were signed in turn become the same file.
    merged = tuple(by_name[name] for name in sorted(by_name))
    return Version(members=version.members, signatures=merged)


def _is_valid_signature(signature: Signature, voters: Mapping[str, Member], hash: bytes) -> bool:
    member = voters.get(signature.name)
    try:
        content = base64.b64decode(signature.signature.encode(), validate=True)
    except (binascii.Error, ValueError):
        return False
    return member is not None and member.verify(_SIGNATURE_CONTEXT + hash, content)


def _duplicates(values: Iterable[Any]) -> list[Any]:
    return [value for value, count in Counter(values).items() if count > 1]
