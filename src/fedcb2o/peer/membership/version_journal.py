"""Journal of the versions that an organisation signed, in the folder of its keys.

A member signs one successor of each version. Otherwise two successors could both have a majority,
and the federation would be divided. The journal reaches the disk before the signature is made, so
that after a crash the same successor can be signed again, and no other one.
"""

from collections.abc import Sequence
from typing import Any

from fedcb2o import records
from fedcb2o.errors import ConfigError
from fedcb2o.peer.membership.identity import SIGNED_VERSIONS_FILE, Identity, spelled_hex

_MAX_CHANGES = 5
_PURPOSE = "it keeps this organisation from signing two successors of one version"


def reserve_version(
    identity: Identity, run: bytes, version: int, digest: bytes, changes: Sequence[str]
) -> None:
    """Write down that a version will be signed, unless another one of its number was.

    A later error shows `changes`, the descriptions of what the version changes.
    """
    path = identity.folder / SIGNED_VERSIONS_FILE
    with records.exclusive_lock(identity.folder, "wait for it"):
        journal: dict[str, Any] = {}
        try:
            journal = records.read_toml(path)
            signed = journal.get(run.hex(), {}).get(str(version))
            previous = None if signed is None else bytes.fromhex(signed["digest"])
        except FileNotFoundError:
            previous = None
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}), and {_PURPOSE}: restore it"
            ) from error
        # The same version may be signed again.
        if previous == digest:
            return
        if previous is not None:
            raise ConfigError(
                f"{identity.member.name} has signed another version {version} of this run, "
                f"{spelled_hex(previous[:8])} ({str(signed.get('changes'))[:500]}), and two could "
                "divide the federation: complete the signatures of that one and correct it by "
                f"version {version + 1}, or have the other members sign this one. Only if no other "
                f"member has a copy with that signature, remove its entry from {path}"
            )
        more = f" and {len(changes) - _MAX_CHANGES} more" if len(changes) > _MAX_CHANGES else ""
        entry = {"digest": digest.hex(), "changes": "; ".join(changes[:_MAX_CHANGES]) + more}
        versions = {**journal.get(run.hex(), {}), str(version): entry}
        records.write_toml(path, {**journal, run.hex(): versions})
