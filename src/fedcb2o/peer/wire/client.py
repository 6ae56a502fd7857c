"""Line 2 of Algorithm 2 among real peers: download what each asked peer offers, and take no peer's word for anything.

Each arrival passes, in this order, before its model is seen by anything else: the answer's form, `protocol.refusal`
(member, signature, run, version, agent, round, size), then hash, type, finiteness and bound. What fails is dropped and
counted by its reason.
"""

import contextlib
import hashlib
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated.admission import extents, within
from fedcb2o.peer.membership.federation import Federation
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.wire import protocol
from fedcb2o.peer.wire.compression import Coding
from fedcb2o.peer.wire.equivocation import Ledger
from fedcb2o.peer.wire.protocol import Answer, Kind, Manifest, Request, Status
from fedcb2o.peer.wire.transport import Transport

IN_FLIGHT = 4  # chunks of a model that are asked for at once
TRIES = 3  # at a peer from which nothing comes
WITNESSES = 4  # manifests that one answer may make us ask for
PAUSE = 0.01, 0.25  # seconds until a peer that has nothing yet is asked again: at first, at most
HELLO_SECONDS = 2.0  # in which a peer that is there says how far it is
GRACE = 0.5  # seconds beyond the deadline for what has arrived to be looked at
MOST_STALLS = 5  # that count: who stalls so often rests for 31 rounds
LATE, NOTHING, MOVED_ON, EQUIVOCATION = "late", "no answer", "not here", "equivocation"
FAILED = "failed"  # at something that nobody thought of: a peer never breaks a round
NOT_YET = "not yet"
AGAIN = (NOTHING, NOT_YET, "busy")
"""Why nothing came, which may be otherwise soon."""
MISSED = (LATE, *AGAIN, MOVED_ON)
"""Why nothing came that says nothing against the peer."""


class StoppedError(Exception):
    """The agent was told to end."""


@dataclass(frozen=True)
class Arrival:
    """A model that arrived: of which round, its claimed samples, how many bytes it took and how many seconds."""

    round: int
    num_samples: int
    size: int
    seconds: float


class Patience:
    """Whom not to ask for a while: who kept a round waiting for more than half of its deadline, and for nothing, rests
    for one round, the next time for 3, then 7 and so on; each model that arrives takes one time back. So a peer that
    answers nothing, or begins and never ends, costs a few deadlines and not one in each round."""

    def __init__(self) -> None:
        self.stalls: dict[int, int] = {}
        self.until: dict[int, int] = {}

    def stalled(self, peer: int, n: int) -> None:
        """Round n waited for it, for nothing."""
        self.stalls[peer] = min(MOST_STALLS, self.stalls.get(peer, 0) + 1)
        self.until[peer] = n + 2 ** self.stalls[peer]

    def arrived(self, peer: int) -> None:
        """Its model came."""
        self.stalls[peer] = max(0, self.stalls.get(peer, 0) - 1)

    def resting(self, n: int) -> set[int]:
        """Who is not asked in round n."""
        return {peer for peer, until in self.until.items() if n < until}


class Downloads:
    """Downloads for agent `me`. `least` is the round of the last model that it had from each peer: no older one is
    taken again. `patience` knows who kept it waiting, and `received` counts bytes. Once `stop` is set, a fetch ends
    with StoppedError."""

    def __init__(
        self,
        federation: Federation,
        identity: Identity,
        transport: Transport,
        ledger: Ledger,
        coding: Coding,
        dim: int,
        stop: threading.Event | None = None,
    ) -> None:
        self.federation, self.identity, self.transport = federation, identity, transport
        self.ledger, self.coding, self.dim = ledger, coding, dim
        self.me = federation.id_of(identity.member)
        self.least: dict[int, int] = {}
        self.patience = Patience()
        self.received, self.failed = 0, False
        self.stop = threading.Event() if stop is None else stop
        self.lock = threading.Lock()

    def fetch(
        self, n: int, rows: Mapping[int, Float[Tensor, " d"]], deadline: float | None
    ) -> tuple[dict[int, Arrival], dict[int, str]]:
        """Download the models of some peers into rows of theirs, within `deadline` seconds: what arrived, and of the
        others why it did not. After it returns nothing is written to the rows."""
        if not rows:
            return {}, {}
        began = time.monotonic()
        until = began + (self.federation.deadline_seconds if deadline is None else deadline)
        pool = ThreadPoolExecutor(len(rows), thread_name_prefix="download")
        tasks = {peer: _Fetch(self, n, peer, row, until) for peer, row in rows.items()}
        futures = {peer: pool.submit(task.run) for peer, task in tasks.items()}
        arrivals, failures = dict[int, Arrival](), dict[int, str]()
        try:
            self._wait(futures.values(), (began + until) / 2)
            slow = {peer for peer, future in futures.items() if not future.done()}
            self._wait(futures.values(), until + GRACE)
            for peer, task in tasks.items():
                found = task.result(futures[peer])
                if isinstance(found, Arrival):
                    arrivals[peer] = found
                    self.least[peer] = found.round
                    self.patience.arrived(peer)
                else:
                    failures[peer] = found
                    if peer in slow:
                        self.patience.stalled(peer, n)
        finally:
            for task in tasks.values():
                task.end()
            pool.shutdown(wait=False, cancel_futures=True)
        return dict(sorted(arrivals.items())), dict(sorted(failures.items()))

    def _wait(self, running: Collection["Future[Arrival | str]"], until: float) -> None:
        """Wait for all, until a moment; raises StoppedError where the agent is told to end meanwhile."""
        while (left := until - time.monotonic()) > 0 and wait(running, min(left, PAUSE[1])).not_done:
            if self.stop.is_set():
                raise StoppedError

    def hello(self, peer: int, seconds: float) -> dict[str, Any] | None:
        """What a peer says of itself, or None where nothing that it signed came in time."""
        member, key = self.federation.members[peer], self.identity.member.key
        for answer in _Questions(self, peer, time.monotonic() + seconds).ask(Kind.HELLO, digest=key):
            with contextlib.suppress(protocol.MalformedError):
                return protocol.read_hello(answer.body, answer.nonce, member)
        return None

    def mine(self, peers: Iterable[int], seconds: float) -> Manifest | None:
        """The newest manifest that some peers can show which this agent signed."""
        until, silent, found = time.monotonic() + seconds, set(peers), list[Manifest]()
        while silent and time.monotonic() < until and not self.stop.is_set():
            asked = [(peer, _Questions(self, peer, until).ask(Kind.WITNESS, index=self.me)) for peer in silent]
            for peer, answers in asked:
                for answer in answers:
                    silent.discard(peer)
                    manifest = protocol.signed_by_member(answer.body, self.federation)[1]
                    if manifest is not None and manifest.agent == self.me and manifest.round < self.federation.rounds:
                        found.append(manifest)
            if silent:  # a link that is just there may not yet lead to who answers
                self.stop.wait(PAUSE[1])
        return max(found, key=lambda manifest: manifest.round, default=None)

    def look(self, n: int, ids: Iterable[int]) -> dict[int, Float[Tensor, " d"]]:
        """The models of some peers in tensors of their own: what an attacker of a simulation sees."""
        rows = {i: torch.empty(self.dim) for i in ids}
        found, _ = self.fetch(n, rows, None)
        return {i: rows[i] for i in found}


class _Questions:
    """Questions to one peer until a moment; `size` are the bytes of what came back."""

    def __init__(self, of: Downloads, peer: int, until: float) -> None:
        self.of, self.peer, self.until, self.size = of, peer, until, 0

    def ask(self, kind: Kind, *, round: int = 0, index: int = 0, digest: bytes = protocol.NONE) -> "Iterator[Answer]":
        """Ask now; the answers to this very request as they come."""
        of, nonce = self.of, secrets.token_bytes(16)
        request = Request(
            kind=kind,
            run=of.federation.run,
            sender=of.me,
            receiver=self.peer,
            nonce=nonce,
            round=round,
            index=index,
            digest=digest,
        )
        left = max(0.0, self.until - time.monotonic())
        return self._read(of.transport.ask(self.peer, request.encode(of.identity.sign), left), nonce)

    def _read(self, coming: Iterable[bytes], nonce: bytes) -> "Iterator[Answer]":
        for data in coming:
            self.size += len(data)
            with self.of.lock:
                self.of.received += len(data)
            with contextlib.suppress(protocol.MalformedError):
                answer = protocol.read_answer(data)
                if answer.nonce == nonce:
                    yield answer


class _Fetch:
    """One model from one peer: its manifest, then its chunks, into a row, until a moment."""

    def __init__(self, of: Downloads, n: int, peer: int, row: Float[Tensor, " d"], until: float) -> None:
        self.of, self.n, self.peer, self.row, self.until = of, n, peer, row, until
        self.questions = _Questions(of, peer, until)
        self.open, self.lock = True, threading.Lock()

    def result(self, running: "Future[Arrival | str]") -> "Arrival | str":
        """What it found; who is not done is late."""
        self.end()
        if not running.done():
            return LATE
        if (error := running.exception()) is None:
            return running.result()
        if not self.of.failed:  # a fault of ours, the first of which is logged
            self.of.failed = True
            logging.getLogger(__name__).error("a model could not be downloaded", exc_info=error)
        return FAILED

    def end(self) -> None:
        """Write nothing from now on, and ask no more."""
        with self.lock:
            self.open = False

    def run(self) -> "Arrival | str":
        """The arrival, or why there is none; who has nothing yet is asked again where a round waits for everybody, and
        else a few times who says nothing, as a message may be lost, or has a newer one by now."""
        began, pause, tries = time.monotonic(), PAUSE[0], 0
        while self.open and (left := self.until - time.monotonic()) > 0:
            found, tries = self._once(began), tries + 1
            again = found in AGAIN if self.of.federation.synchronous else tries < TRIES and found in (NOTHING, MOVED_ON)
            if isinstance(found, Arrival) or not again:
                return found
            time.sleep(min(pause, left))
            pause = min(2 * pause, PAUSE[1])
        return LATE

    def _once(self, began: float) -> "Arrival | str":
        """The arrival, where the peer has a model and gives it."""
        manifest = self._manifest()
        if isinstance(manifest, str):
            return manifest
        room = self.of.coding.room(manifest.size, self.row)
        if failed := self._chunks(manifest, room):
            return failed
        with self.lock:
            if not self.open:
                return LATE
            if self.of.coding.unpack_(room, self.row):
                return "content"
            if failed := unfit(self.row):
                return failed
        return Arrival(manifest.round, manifest.num_samples, self.questions.size, time.monotonic() - began)

    def _manifest(self) -> "Manifest | str":
        """A manifest that passes, or why there is none."""
        reason = NOTHING
        for answer in self.questions.ask(Kind.MANIFEST, round=self.n):
            if answer.status is not Status.OK:
                reason = answer.status.word
                continue
            found = self._judged(answer.body)
            if isinstance(found, Manifest):
                return found
            reason = found
        return reason

    def _judged(self, body: protocol.Bytes) -> "Manifest | str":
        """The manifest in an offer, where it passes; what it says of others' is looked into where it is a conflict."""
        of, federation = self.of, self.of.federation
        try:
            signed, digests = protocol.read_offer(body)
        except protocol.MalformedError as error:
            return error.reason
        reason, manifest = protocol.refusal(
            signed,
            federation=federation,
            asked=self.peer,
            n=self.n,
            least=of.least.get(self.peer, 0),
            dim=of.dim,
            fewest=of.coding.least,
            most=of.coding.most,
            encoding=of.coding.number,
            base=of.coding.base,
        )
        if manifest is None:
            return reason
        of.ledger.seen(signed)
        longest = protocol.manifest_length(of.coding.most)  # no longer one was taken by anybody
        for agent, n, digest in of.ledger.conflicts(digests)[:WITNESSES]:
            for answer in self.questions.ask(Kind.WITNESS, round=n, index=agent, digest=digest):
                if answer.status is Status.OK and len(answer.body) <= longest:
                    of.ledger.seen(bytes(answer.body))
        return EQUIVOCATION if self.peer in of.ledger.guilty else manifest

    def _chunks(self, manifest: Manifest, room: memoryview) -> str:
        """Fill the room with the chunks of a snapshot, some in flight at once; "" or why not."""
        count, whole = len(manifest.chunks), hashlib.sha256()
        asked = deque(self._chunk(manifest, k) for k in range(min(count, IN_FLIGHT)))
        for k, expected in enumerate(manifest.chunks):
            start, answers = k * protocol.CHUNK, asked.popleft()
            size = min(protocol.CHUNK, manifest.size - start)
            chunk, reason = self._right(answers, size, expected)
            if chunk is None and time.monotonic() < self.until:
                chunk, reason = self._right(self._chunk(manifest, k), size, expected)
            if chunk is None:
                return LATE if time.monotonic() > self.until else reason
            if k + IN_FLIGHT < count:
                asked.append(self._chunk(manifest, k + IN_FLIGHT))
            whole.update(chunk)
            with self.lock:
                if not self.open:
                    return LATE
                room[start : start + size] = chunk
        return "" if whole.digest() == manifest.sha256 else "hash"

    def _right(self, answers: "Iterator[Answer]", size: int, expected: bytes) -> "tuple[protocol.Bytes | None, str]":
        """The first chunk with the expected hash, or None and why it did not come."""
        reason = NOTHING
        for answer in answers:
            if answer.status is not Status.OK:  # a peer that has moved on since has this model no more
                reason = answer.status.word
            elif len(answer.body) == size and _sha(answer.body) == expected:
                return answer.body, ""
            else:
                reason = "hash"
        return None, reason

    def _chunk(self, manifest: Manifest, k: int) -> "Iterator[Answer]":
        return self.questions.ask(Kind.CHUNK, index=k, digest=manifest.digest)


def unfit(theta: Float[Tensor, " d"]) -> str:
    """Why a model's numbers are not received; "" where they are."""
    size = float(extents(theta.unsqueeze(0), [0])[0])
    if within(np.array([size])).all():
        return ""
    return "bound" if math.isfinite(size) else "not finite"


def _sha(content: protocol.Bytes) -> bytes:
    return hashlib.sha256(content).digest()
