"""Equivocation: proofs of two models for one round, and its prevention.

Manifests are signed. Two different ones of one agent, run and round prove to anybody, offline, that
the agent sent different models to its peers. Peers exchange digests of the manifests that they
received, the newest first, and ask for those that differ from their own.

A manifest enters the ledger in two ways only: from the agent that signed it, or as the second of
two that prove something. No member can therefore displace manifests of another.
"""

import base64
import errno
import json
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedcb2o import records
from fedcb2o.errors import DataError, RunError
from fedcb2o.peer.membership.certificates import DNS_LABEL
from fedcb2o.peer.membership.federation import Federation
from fedcb2o.peer.membership.identity import Member, is_signed, read_bounded_toml
from fedcb2o.peer.membership.versions import parse_members
from fedcb2o.peer.wire.protocol import (
    MANIFEST_CONTEXT,
    MAX_DIGESTS,
    ZERO_DIGEST,
    MalformedError,
    Manifest,
    ManifestDigest,
    decode_manifest,
    verify_member_manifest,
)
from fedcb2o.records._files import fsync, write_error

_EXTRA_ROUNDS = 8  # manifests of each agent that are kept beyond the lag, whatever their size
_HELD_BYTES = 2**20  # further manifests of each agent
_MAX_PROOF_BYTES = 2**21  # two of the longest manifests, as text
_PROOF_SUFFIX = ".proof.toml"
JOURNAL_FILE = "signed.jsonl"
RESTORED_FILE = "restored"  # mark of a journal that may be older than the last signature


@dataclass(frozen=True)
class Proof:
    """Two different manifests, sorted, of one agent, run and round (from 0), signed alike."""

    name: str
    agent: int
    round: int
    run: bytes
    key: bytes
    manifests: tuple[bytes, bytes]

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"{self.name}-{self.round}{_PROOF_SUFFIX}"

    @property
    def table(self) -> dict[str, Any]:
        """Content of its file."""
        return {
            "name": self.name,
            "agent": self.agent,
            "round": self.round,
            "run": self.run.hex(),
            "key": base64.b64encode(self.key).decode(),
            "manifests": [base64.b64encode(manifest).decode() for manifest in self.manifests],
        }

    def write(self, folder: Path) -> None:
        """Write the proof, unless a file of its name exists."""
        path = folder / self.file
        if path.exists():
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make {folder}: {error.strerror or error}") from error
        records.atomic_write(path, tomli_w.dumps(self.table).encode())

    @classmethod
    def read(cls, path: Path) -> "Proof":
        """Read and verify a proof of any origin; a DataError says why it is none."""
        try:
            proof = _parse_proof(read_bounded_toml(path, _MAX_PROOF_BYTES))
            proof.verify()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise DataError(f"{path} is no proof: {error}") from error
        return proof

    def verify(self) -> None:
        """Check both manifests and signatures, but not the name; raise ValueError."""
        decoded: list[Manifest] = []
        for signed in self.manifests:
            try:
                manifest, body, signature = decode_manifest(signed)
            except MalformedError as error:
                raise ValueError(f"a manifest in it cannot be read ({error.reason})") from error
            if (manifest.agent, manifest.round, manifest.run) != (self.agent, self.round, self.run):
                raise ValueError("a manifest in it is of another agent, round or run than it says")
            if not is_signed(self.key, MANIFEST_CONTEXT + body, signature):
                raise ValueError("a manifest in it was not signed by its key")
            decoded.append(manifest)
        if decoded[0] == decoded[1]:
            raise ValueError("its manifests are one and the same")


def verify_proof(path: Path, federation: Federation | None = None) -> str:
    """Describe in one line what the proof in a file proves; DataError if it proves nothing.

    With a federation, it must accuse one of its members.
    """
    proof = Proof.read(path)
    summary = (
        f"two different models for round {proof.round} of run {proof.run.hex()[:16]} are signed by"
    )
    if federation is None:
        key = base64.b64encode(proof.key).decode()
        return (
            f"{summary} the key {key} as agent {proof.agent}; --federation tells whose it is (the "
            f"file says {proof.name})"
        )

    if proof.run != federation.run:
        raise DataError(
            f"{path} is of run {proof.run.hex()[:16]}, and this federation's is "
            f"{federation.run.hex()[:16]}"
        )
    if not any(_is_of(proof, members) for members in parse_members(federation.versions)):
        raise DataError(
            f"{path} is not of the key of {proof.name}, agent {proof.agent}, in this federation"
        )
    now = "" if _is_of(proof, federation.members) else ", whose key was replaced since"
    return f"{summary} {proof.name}, agent {proof.agent} of {federation.name}{now}"


class Ledger:
    """Recent manifests of all agents, and proofs; safe in any thread.

    Proofs are stored in `folder`/proofs, one per agent. A proof that cannot be written is valid
    until the process ends, and writing is tried again.
    """

    def __init__(self, folder: Path, federation: Federation) -> None:
        self._folder = folder / "proofs"
        self._federation = federation
        self._lock = threading.Lock()
        # By agent, then by round: digest and signed manifest.
        self._held: dict[int, dict[int, tuple[bytes, bytes]]] = {}
        self._recent: deque[ManifestDigest] = deque(maxlen=2 * MAX_DIGESTS)
        self._proofs: dict[int, Proof] = {}
        self._unwritten: list[Proof] = []
        # A member that equivocated stays banned after a restart.
        for path in sorted(self._folder.glob(f"*{_PROOF_SUFFIX}")):
            # Files of another run, or without a proof, are ignored.
            with suppress(DataError):
                proof = Proof.read(path)
                if proof.run == federation.run and _is_of(proof, federation.members):
                    self._proofs.setdefault(proof.agent, proof)

    @property
    def equivocators(self) -> frozenset[int]:
        """Agents that signed two models for one round."""
        with self._lock:
            return frozenset(self._proofs)

    def record(self, signed: bytes, verified: Manifest | None = None) -> Proof | None:
        """Keep a manifest that came from the agent that signed it; ignore an invalid one.

        `verified` is the manifest in it, if its signature was verified already.
        The proof is returned if the agent signed another one for this round. The manifests of the
        highest rounds stay: `lag` + 8 of each agent, and as many more as have 1 MiB together.
        """
        manifest = verified or verify_member_manifest(signed, self._federation)[1]
        # Rounds after the end would only displace manifests that matter.
        if manifest is None or manifest.round >= self._federation.rounds:
            return None
        with self._lock:
            self._write()
            if manifest.agent in self._proofs:
                return None
            held = self._held.setdefault(manifest.agent, {})
            if manifest.round not in held:
                held[manifest.round] = (manifest.digest, signed)
                self._recent.append((manifest.agent, manifest.round, manifest.digest))
            digest, first_signed = held[manifest.round]
            if digest != manifest.digest:
                return self._prove(manifest, first_signed, signed)
            max_count = self._federation.lag + _EXTRA_ROUNDS + _HELD_BYTES // len(signed)
            while len(held) > max_count:
                del held[min(held)]
        return None

    def prove(self, agent: int, n: int, witnesses: Mapping[bytes, bytes]) -> Proof | None:
        """Compare manifests from other agents with each other and with the recorded one.

        `witnesses` has signed manifests from any sender by the digests that were asked for. Those
        of another agent, round or digest are ignored. They are kept only if they prove that the
        agent signed two models for round `n`; then the proof is returned.
        """
        signed_by_digest: dict[bytes, bytes] = {}
        for digest, signed in witnesses.items():
            _, manifest = verify_member_manifest(signed, self._federation)
            if manifest is None or (manifest.agent, manifest.round) != (agent, n):
                continue
            if manifest.digest == digest:
                signed_by_digest[digest] = signed
        with self._lock:
            if agent in self._proofs or n >= self._federation.rounds:
                return None
            if n in self._held.get(agent, {}):
                digest, signed = self._held[agent][n]
                signed_by_digest[digest] = signed
            if len(signed_by_digest) < 2:
                return None
            # Two are enough for a proof, however many there are.
            first, second, *_ = signed_by_digest.values()
            return self._prove(decode_manifest(first)[0], first, second)

    def digests(self) -> list[ManifestDigest]:
        """Return at most 64 digests for other agents to compare."""
        with self._lock:
            proven = [
                (one.agent, one.round, decode_manifest(signed)[0].digest)
                for one in reversed(self._proofs.values())
                for signed in one.manifests
            ]
            newest = [one for one in reversed(self._recent) if one[0] not in self._proofs]
        return [*proven[: MAX_DIGESTS // 2], *newest][:MAX_DIGESTS]

    def find_conflicts(self, digests: Iterable[ManifestDigest]) -> list[ManifestDigest]:
        """Find digests that differ from recorded manifests, or from each other."""
        claims: dict[tuple[int, int], dict[bytes, None]] = {}
        for agent, n, digest in digests:
            if agent in self._federation.members and n < self._federation.rounds:
                claims.setdefault((agent, n), {})[digest] = None
        conflicts = list[ManifestDigest]()
        with self._lock:
            for (agent, n), claimed in claims.items():
                own, _ = self._held.get(agent, {}).get(n, (None, b""))
                others = [digest for digest in claimed if digest != own]
                if agent not in self._proofs and len(others) + (own is not None) > 1:
                    conflicts += [(agent, n, digest) for digest in others]
        return conflicts

    def get(self, agent: int, n: int, digest: bytes) -> bytes | None:
        """Return the recorded manifest of a digest; one of zeros means the agent's newest."""
        with self._lock:
            held = self._held.get(agent, {})
            if digest == ZERO_DIGEST:
                n = max(held, default=n)
            found, signed = held.get(n, (None, b""))
            if found is not None and digest in (found, ZERO_DIGEST):
                return signed
            proof = self._proofs.get(agent)
        for candidate in proof.manifests if proof is not None else ():
            if decode_manifest(candidate)[0].digest == digest:
                return candidate
        return None

    def _prove(self, manifest: Manifest, *signed: bytes) -> Proof:
        member = self._federation.members[manifest.agent]
        # In this order, members that received them in another one write the same file.
        first, second = sorted(signed)
        run, key = manifest.run, member.key
        proof = Proof(member.name, manifest.agent, manifest.round, run, key, (first, second))
        self._proofs[manifest.agent] = proof
        # Two manifests prove it, and no further one is of use.
        self._held.pop(manifest.agent, None)
        self._unwritten.append(proof)
        self._write()
        return proof

    def _write(self) -> None:
        # On a full disk, the next manifest tries again.
        with suppress(RunError):
            while self._unwritten:
                self._unwritten[-1].write(self._folder)
                self._unwritten.pop()


class SigningJournal:
    """Journal of this agent's signed manifests, `folder`/signed.jsonl.

    A line reaches the disk before its signature is made. An agent that was killed and trains a
    round again with another result therefore signs nothing, rather than a second model. It signs
    rounds in ascending order only: a round without a line before the last line may have been signed
    too. `suspension` is the reason why nothing may be signed for now, or an empty text. A damaged
    journal is a RunError.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL_FILE
        self._restored = folder / RESTORED_FILE
        self.suspension = ""
        self._signed: dict[int, bytes] = {}
        self._size = 0  # of the complete lines; a partial last line is overwritten
        for line, entry in records.read_lines(self._path):
            with suppress(ValueError, KeyError, TypeError):
                self._signed[entry["round"]] = bytes.fromhex(entry["digest"])
                self._size += len(line)
                continue
            raise records.damaged_error(self._path, f"round {entry['round']} has no digest")

    @property
    def is_complete(self) -> bool:
        """False for a journal that is missing or may be older than the last signature."""
        return self.last_round >= 0 and not self._restored.exists()

    @property
    def last_round(self) -> int:
        """Last signed round; -1 if there is none."""
        return max(self._signed, default=-1)

    def reserve(self, n: int, digest: bytes) -> bool:
        """Write down that a manifest will be signed; False if another, or a later one, was."""
        if n <= self.last_round:
            # The same bytes again are no second model.
            return self._signed.get(n) == digest
        line = json.dumps({"round": n, "digest": digest.hex()}).encode() + b"\n"
        try:
            self._append(line)
            # A new file survives a power failure only with its folder.
            if not self._size:
                fsync(self._path.parent)
        except OSError as error:
            raise write_error(self._path, error) from error
        self._size += len(line)
        self._signed[n] = digest
        return True

    def complete(self, n: int) -> None:
        """Sign no round up to `n`, the last that may have been signed; be complete then."""
        self.reserve(n, ZERO_DIGEST)
        self._restored.unlink(missing_ok=True)

    def _append(self, line: bytes) -> None:
        """Write a whole line after the complete lines, or none of it."""
        # Not by a new file and a rename: the journal grows with each round.
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            is_complete = os.pwrite(file, line, self._size) == len(line)
            os.ftruncate(file, self._size + len(line) * is_complete)
            if not is_complete:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file)
        finally:
            os.close(file)


def _parse_proof(table: dict[str, Any]) -> Proof:
    """Parse a proof's table; raise ValueError if it describes none."""
    with suppress(ValueError, KeyError, TypeError):
        texts = (table["key"], *table["manifests"])
        key, first, second = (base64.b64decode(text) for text in texts)
        numbers = int(table["agent"]), int(table["round"]), bytes.fromhex(table["run"])
        proof = Proof(table["name"], *numbers, key, (first, second))
        # Each proof has one table. As JSON, true differs from 1.
        is_same = json.dumps(proof.table, sort_keys=True) == json.dumps(table, sort_keys=True)
        if is_same and DNS_LABEL.fullmatch(proof.name):
            return proof
    raise ValueError(
        "it must have the keys name (of a member), agent, round, run (hexadecimal), key and two "
        "manifests (base64), and no others"
    )


def _is_of(proof: Proof, members: Mapping[int, Member]) -> bool:
    """Check that a proof is of the name and the key of one of some members."""
    member = members.get(proof.agent)
    return member is not None and (member.name, member.key) == (proof.name, proof.key)
