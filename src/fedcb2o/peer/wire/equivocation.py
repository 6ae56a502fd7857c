"""What agents signed: the proof where one signed two models for one round, and the journal that keeps us from doing so.

A manifest is signed, so two different ones of one agent, run and round show to anybody, offline, that it told its peers
different things. Peers exchange digests of the manifests that they received, newest first, and ask for those that they
have otherwise.
"""

import base64
import binascii
import errno
import heapq
import json
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedcb2o import records
from fedcb2o.errors import DataError, RunError
from fedcb2o.peer.membership.certificates import DNS_LABEL
from fedcb2o.peer.membership.federation import Federation
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
from fedcb2o.records.files import fsync, write_error

_EXTRA_ROUNDS = 8  # manifests of each agent beyond the lag
_MAX_PROOF_BYTES = 2**21  # bytes of a proof's file: two of the longest manifests, as text
PROOF_SUFFIX = ".proof.toml"
JOURNAL_FILE = "signed.jsonl"


@dataclass(frozen=True)
class Proof:
    """Two different manifests that one key signed for one agent, run and round; the name is what a federation says."""

    name: str
    agent: int
    round: int
    run: bytes
    key: bytes
    manifests: tuple[bytes, bytes]

    @property
    def file(self) -> str:
        """What its file is called."""
        return f"{self.name}-{self.round}{PROOF_SUFFIX}"

    def write(self, folder: Path) -> None:
        """Write it into a folder, where no file of this name is there; raises RunError where it cannot be written."""
        path = folder / self.file
        if path.exists():
            return
        table = {
            "name": self.name,
            "agent": self.agent,
            "round": self.round,
            "run": self.run.hex(),
            "key": base64.b64encode(self.key).decode(),
            "manifests": [base64.b64encode(manifest).decode() for manifest in self.manifests],
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make {folder}: {error.strerror or error}") from error
        records.atomic_write(path, tomli_w.dumps(table).encode())

    @classmethod
    def read(cls, path: Path) -> "Proof":
        """The proof in a file of which nothing is believed; raises DataError where it does not hold."""
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_PROOF_BYTES + 1)
            if len(content) > _MAX_PROOF_BYTES:
                raise ValueError(f"it is longer than {_MAX_PROOF_BYTES} bytes")
            proof = _parse_proof(records.parse_toml(content))
            proof.verify()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise DataError(f"{path} is no proof: {error}") from error
        return proof

    def verify(self) -> None:
        """Raises ValueError unless it shows what it says, the name aside."""
        found: list[Manifest] = []
        for each in self.manifests:
            try:
                manifest, body, signature = decode_manifest(each)
            except MalformedError as error:
                raise ValueError(f"a manifest in it cannot be read ({error.reason})") from error
            if (manifest.agent, manifest.round, manifest.run) != (self.agent, self.round, self.run):
                raise ValueError("a manifest in it is of another agent, round or run than it says")
            if not _is_signed(self.key, MANIFEST_CONTEXT + body, signature):
                raise ValueError("a manifest in it was not signed by its key")
            found.append(manifest)
        if found[0] == found[1]:
            raise ValueError("its manifests are one and the same")


def verify_proof(path: Path, federation: Federation | None = None) -> str:
    """What a proof's file shows, in a line; raises DataError where it shows nothing, or nothing of this federation."""
    proof = Proof.read(path)
    shown = (
        f"two different models for round {proof.round} of run {proof.run.hex()[:16]} are signed by"
    )
    if federation is None:
        key = base64.b64encode(proof.key).decode()
        return f"{shown} the key {key} as agent {proof.agent}; --federation tells whose it is (the file says {proof.name})"
    if proof.run != federation.run:
        raise DataError(
            f"{path} is of run {proof.run.hex()[:16]}, and this federation's is {federation.run.hex()[:16]}"
        )
    everyone = [members.get(proof.agent) for members in parse_members(federation.versions)]
    if not any(
        each is not None and (each.name, each.key) == (proof.name, proof.key) for each in everyone
    ):
        raise DataError(
            f"{path} is not of the key of {proof.name}, agent {proof.agent}, in this federation"
        )
    now = "" if _is_current_key(proof, federation) else ", whose key this is no more"
    return f"{shown} {proof.name}, agent {proof.agent} of {federation.name}{now}"


class Ledger:
    """The manifests that were seen of late, and who equivocated; for any thread.

    Proofs are kept in `folder`/proofs, one an agent. One that the disk does not take holds until the process ends, and
    is tried again.
    """

    def __init__(self, folder: Path, federation: Federation) -> None:
        self._folder = folder / "proofs"
        self._federation = federation
        self._lock = threading.Lock()
        # agent -> round -> its digest and signed manifest, and how many were kept before it
        self._held: dict[int, dict[int, tuple[bytes, bytes, int]]] = {}
        self._kept = 0
        self._proofs: dict[int, Proof] = {}
        self._unwritten: list[Proof] = []
        for path in sorted(self._folder.glob(f"*{PROOF_SUFFIX}")):
            with suppress(DataError):  # of another run, or no proof
                verify_proof(path, federation)
                proof = Proof.read(path)
                if _is_current_key(proof, federation):  # and not of a key that was replaced since
                    self._proofs.setdefault(proof.agent, proof)

    @property
    def equivocators(self) -> frozenset[int]:
        """Who signed two models for one round."""
        with self._lock:
            return frozenset(self._proofs)

    def record(self, signed: bytes) -> Proof | None:
        """Keep a manifest, whoever gave it, if a member signed it for this run; the proof, where it is one's second."""
        _, manifest = verify_member_manifest(signed, self._federation)
        if manifest is None or manifest.round >= self._federation.rounds:
            return None
        with self._lock:
            self._write()
            if manifest.agent in self._proofs:
                return None
            held = self._held.setdefault(manifest.agent, {})
            digest, before, _ = held.setdefault(
                manifest.round, (manifest.digest, signed, self._kept)
            )
            self._kept += 1
            if digest != manifest.digest:
                return self._prove(manifest, before, signed)
            while len(held) > self._federation.lag + _EXTRA_ROUNDS:
                del held[next(iter(held))]
        return None

    def digests(self) -> list[ManifestDigest]:
        """What was seen, for others to compare: both manifests of a proof first, then those that came last, at most 64.

        Not those of the highest rounds: a few agents who claim to be far ahead would leave room for nobody else's.
        """
        with self._lock:
            proven = list(self._proven())
            rest = (
                (when, agent, n, digest)
                for agent, held in self._held.items()
                for n, (digest, _, when) in held.items()
            )
            newest = [
                (agent, n, digest) for _, agent, n, digest in heapq.nlargest(MAX_DIGESTS, rest)
            ]
        return [*proven[: MAX_DIGESTS // 2], *newest][:MAX_DIGESTS]

    def find_conflicts(self, digests: Iterable[ManifestDigest]) -> list[ManifestDigest]:
        """Those of a peer's digests that differ from what was seen here, or from each other: what to ask it for."""
        found: dict[ManifestDigest, None] = {}
        told: dict[tuple[int, int], bytes] = {}
        with self._lock:
            for agent, n, digest in digests:
                if (
                    agent not in self._federation.members
                    or agent in self._proofs
                    or n >= self._federation.rounds
                ):
                    continue
                other = told.setdefault((agent, n), digest)
                mine, *_ = self._held.get(agent, {}).get(n, (None, b"", 0))
                if other != digest:
                    found |= {(agent, n, each): None for each in (other, digest) if each != mine}
                elif mine not in (None, digest):
                    found[agent, n, digest] = None
        return list(found)

    def get(self, agent: int, n: int, digest: bytes) -> bytes | None:
        """The signed manifest of an agent that has this digest, where it is held; without a digest, the newest one."""
        with self._lock:
            held = self._held.get(agent, {})
            found, signed, _ = held.get(
                n if digest != ZERO_DIGEST else max(held, default=n), (None, b"", 0)
            )
            if found is not None and digest in (found, ZERO_DIGEST):
                return signed
            proof = self._proofs.get(agent)
            both = proof.manifests if proof is not None else ()
        return next((each for each in both if decode_manifest(each)[0].digest == digest), None)

    def _prove(self, manifest: Manifest, *signed: bytes) -> Proof:
        member = self._federation.members[manifest.agent]
        first, second = sorted(signed)
        proof = Proof(
            member.name, manifest.agent, manifest.round, manifest.run, member.key, (first, second)
        )
        self._proofs[manifest.agent] = proof
        del self._held[manifest.agent]
        self._unwritten.append(proof)
        self._write()
        return proof

    def _write(self) -> None:
        with suppress(RunError):  # a full disk: the next manifest tries again
            while self._unwritten:
                self._unwritten[-1].write(self._folder)
                self._unwritten.pop()

    def _proven(self) -> Iterator[ManifestDigest]:
        for proof in reversed(self._proofs.values()):
            for each in proof.manifests:
                yield proof.agent, proof.round, decode_manifest(each)[0].digest


class SigningJournal:
    """What this agent signed, `folder`/signed.jsonl: on the disk before the signature is made.

    So an agent that was killed, and trains the round again otherwise, signs nothing rather than two models for a round.
    It signs rounds in their order alone: what came before its last line, and is not there, may have been signed too.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL_FILE
        self._signed: dict[int, bytes] = {}
        self._size = 0  # of the whole lines: what follows was never finished, and is written over
        try:
            lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        except OSError as error:
            raise RunError(f"cannot read {self._path}: {error.strerror or error}") from error
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                content = json.loads(line)
                self._signed[int(content["round"])] = bytes.fromhex(content["digest"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise RunError(
                    f"{self._path} is damaged in line {number}: restore it, since without it this agent could sign two "
                    "models for one round, which others take for fraud"
                ) from error
            self._size += len(line)

    @property
    def last_round(self) -> int:
        """The last round that was signed; -1 where none was."""
        return max(self._signed, default=-1)

    def reserve(self, n: int, digest: bytes) -> bool:
        """Whether the manifest of round `n` with this digest may be signed: this was signed before, or nothing was of
        this round and of later ones.

        Raises RunError where the disk does not take the line.
        """
        if n <= self.last_round:
            return self._signed.get(n) == digest
        line = json.dumps({"round": n, "digest": digest.hex()}).encode() + b"\n"
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                whole = os.pwrite(file, line, self._size) == len(line)
                os.ftruncate(file, self._size + len(line) * whole)
                if not whole:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file)
            finally:
                os.close(file)
            if not self._size:
                fsync(self._path.parent)
        except OSError as error:
            raise write_error(self._path, error) from error
        self._size += len(line)
        self._signed[n] = digest
        return True


def _parse_proof(table: dict[str, Any]) -> Proof:
    """The proof that a table describes; raises ValueError where it describes none."""
    kinds = {"name": str, "agent": int, "round": int, "run": str, "key": str, "manifests": list}
    if set(table) != set(kinds) or any(type(table[key]) is not kind for key, kind in kinds.items()):
        raise ValueError(f"it must have the keys {', '.join(kinds)}, and each of its kind")
    if not DNS_LABEL.fullmatch(table["name"]):
        raise ValueError("its `name` is no member's")
    manifests = table["manifests"]
    if len(manifests) != 2 or not all(isinstance(each, str) for each in manifests):
        raise ValueError("its `manifests` must be two texts")
    try:
        key, first, second = (
            base64.b64decode(each.encode(), validate=True) for each in (table["key"], *manifests)
        )
        run = bytes.fromhex(table["run"])
    except (binascii.Error, ValueError) as error:
        raise ValueError(
            "its `run` is no hexadecimal, or its `key` or `manifests` no base64"
        ) from error
    return Proof(table["name"], table["agent"], table["round"], run, key, (first, second))


def _is_current_key(proof: Proof, federation: Federation) -> bool:
    """Whether the key of a proof is the member's now."""
    member = federation.members.get(proof.agent)
    return member is not None and member.key == proof.key


def _is_signed(key: bytes, message: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
