"""Download of peers' models: line 2 of Algorithm 2 (alg:localAggregation).

No peer is trusted. Before other code sees a model, it passes these checks in this order: the form
of the answer, `protocol.validate_manifest` (member, signature, run, version, agent, round, size),
then hash, type, finiteness and bound. A model that fails is dropped and counted by its reason.

Example:
    >>> backoff = Backoff()
    >>> backoff.record_stall(peer=3, n=0)
    >>> backoff.suspended(1), backoff.suspended(2)
    ({3}, set())
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

from fedcb2o.federated import is_admissible, max_abs
from fedcb2o.peer.membership.federation import Federation
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.wire import _protocol
from fedcb2o.peer.wire._compression import Codec
from fedcb2o.peer.wire._equivocation import Ledger
from fedcb2o.peer.wire._protocol import Answer, AnswerStatus, Manifest, Request, RequestKind
from fedcb2o.peer.wire._transport import Transport

_CHUNKS_IN_FLIGHT = 4  # of one model
_MAX_TRIES = 3  # at a peer that does not answer
_MAX_WITNESSES = 4  # manifests that one answer may make us ask for
_RETRY_SECONDS = 0.01, 0.25  # first and longest pause before a peer without a model is asked again
HELLO_SECONDS = 2.0  # time for an answer to HELLO
_GRACE_SECONDS = 0.5  # time after the deadline to check models that have arrived
_MAX_STALLS = 5  # a peer with this many stalls is suspended for 31 rounds
_LATE, _NO_ANSWER, _MOVED_ON, _EQUIVOCATION = "late", "no answer", "not here", "equivocation"
FAILED = "failed"  # an unexpected error: a peer never breaks a round
NOT_YET = "not yet"
_RETRIABLE_REASONS = (_NO_ANSWER, NOT_YET, "busy")
"""Reasons of a missing model that may soon be gone."""
BLAMELESS_REASONS = (_LATE, *_RETRIABLE_REASONS, _MOVED_ON)
"""Reasons of a missing model that do not indicate a fault of the peer."""


class StoppedError(Exception):
    """The agent was asked to stop."""


@dataclass(frozen=True)
class Arrival:
    """A model that arrived.

    Attributes:
        round: Its round.
        num_samples: Claimed number of training samples.
        size: Received bytes.
        seconds: Duration of the download and its checks.
    """

    round: int
    num_samples: int
    size: int
    seconds: float


class Backoff:
    """Suspension of peers that repeatedly delay rounds.

    A peer stalls if a round waits for it for more than half of the deadline and gets no model.
    After its first stall it is not asked for one round, then 3, 7 and so on. Each model that
    arrives removes one stall. A peer that never answers, or never ends an answer, therefore delays
    a few rounds instead of every round.
    """

    def __init__(self) -> None:
        self.stall_counts: dict[int, int] = {}
        self.suspended_until: dict[int, int] = {}

    def record_stall(self, peer: int, n: int) -> None:
        """Note that round `n` waited for a peer in vain.

        Args:
            peer: The peer.
            n: The round.
        """
        count = min(_MAX_STALLS, self.stall_counts.get(peer, 0) + 1)
        self.stall_counts[peer] = count
        self.suspended_until[peer] = n + 2**count

    def record_arrival(self, peer: int) -> None:
        """Note that a peer's model arrived.

        Args:
            peer: The peer.
        """
        self.stall_counts[peer] = max(0, self.stall_counts.get(peer, 0) - 1)

    def suspended(self, n: int) -> set[int]:
        """Return the peers that are not asked in a round.

        Args:
            n: The round.

        Returns:
            Their ids.
        """
        return {peer for peer, end in self.suspended_until.items() if n < end}


class PeerClient:
    """Client that asks other members for models and descriptions.

    Args:
        federation: The federation.
        identity: This organisation.
        transport: Carrier of requests and answers.
        ledger: Manifests seen so far.
        codec: Encoding of models.
        dim: Number of parameters.
        stop: Event after which a download ends with StoppedError.

    Attributes:
        last_rounds: Round of the last model accepted from each peer; older ones are refused.
        backoff: Peers that delayed rounds.
        received_bytes: Bytes received so far.
    """

    def __init__(
        self,
        federation: Federation,
        identity: Identity,
        transport: Transport,
        ledger: Ledger,
        codec: Codec,
        dim: int,
        stop: threading.Event | None = None,
    ) -> None:
        self.federation = federation
        self.identity = identity
        self.transport = transport
        self.ledger = ledger
        self.codec = codec
        self.dim = dim
        self.agent_id = federation.id_of(identity.member)
        self.last_rounds: dict[int, int] = {}
        self.backoff = Backoff()
        self.received_bytes = 0
        self.has_logged_error = False
        self.stop = threading.Event() if stop is None else stop
        self.lock = threading.Lock()

    def fetch(
        self, n: int, rows: Mapping[int, Float[Tensor, " d"]], deadline: float | None
    ) -> tuple[dict[int, Arrival], dict[int, str]]:
        """Download the models of some peers at once.

        Nothing is written to the rows after the return.

        Args:
            n: The agent's round.
            rows: For each peer the tensor to fill, shape [d].
            deadline: Time in seconds; by default that of the federation.

        Returns:
            The arrivals by peer, and for the other peers the reasons, both by ascending id.

        Raises:
            StoppedError: The agent was asked to stop.
        """
        if not rows:
            return {}, {}
        seconds = self.federation.deadline_seconds if deadline is None else deadline
        start = time.monotonic()
        end = start + seconds
        pool = ThreadPoolExecutor(len(rows), thread_name_prefix="download")
        tasks = {peer: _ModelDownload(self, n, peer, row, end) for peer, row in rows.items()}
        futures = {peer: pool.submit(task.run) for peer, task in tasks.items()}
        arrivals = dict[int, Arrival]()
        failures = dict[int, str]()
        try:
            self._wait(futures.values(), (start + end) / 2)
            slow = {peer for peer, future in futures.items() if not future.done()}
            self._wait(futures.values(), end + _GRACE_SECONDS)
            for peer, task in tasks.items():
                result = task.result(futures[peer])
                if isinstance(result, Arrival):
                    arrivals[peer] = result
                    self.last_rounds[peer] = result.round
                    self.backoff.record_arrival(peer)
                    continue
                failures[peer] = result
                if peer in slow:
                    self.backoff.record_stall(peer, n)
        finally:
            for task in tasks.values():
                task.cancel()
            pool.shutdown(wait=False, cancel_futures=True)
        return dict(sorted(arrivals.items())), dict(sorted(failures.items()))

    def _wait(self, futures: Collection["Future[Arrival | str]"], end: float) -> None:
        """Wait for all futures until a time; raise if the agent stops."""
        while (left := end - time.monotonic()) > 0:
            if not wait(futures, min(left, _RETRY_SECONDS[1])).not_done:
                return
            if self.stop.is_set():
                raise StoppedError

    def hello(self, peer: int, seconds: float) -> dict[str, Any] | None:
        """Ask a peer for its description of itself.

        Args:
            peer: The peer.
            seconds: Time to wait.

        Returns:
            The signed description, or None if none came in time.
        """
        member = self.federation.members[peer]
        session = _PeerSession(self, peer, time.monotonic() + seconds)
        for answer in session.ask(RequestKind.HELLO, digest=self.identity.member.key):
            with contextlib.suppress(_protocol.MalformedError):
                return _protocol.decode_hello(answer.body, answer.nonce, member)
        return None

    def newest_own_manifest(self, peers: Iterable[int], seconds: float) -> Manifest | None:
        """Ask peers for the newest manifest that this agent signed.

        Args:
            peers: The peers.
            seconds: Time to wait.

        Returns:
            The newest one, or None.
        """
        end = time.monotonic() + seconds
        silent = set(peers)
        manifests = list[Manifest]()
        while silent and time.monotonic() < end and not self.stop.is_set():
            answers_by_peer = {
                peer: _PeerSession(self, peer, end).ask(RequestKind.WITNESS, index=self.agent_id)
                for peer in silent
            }
            for peer, answers in answers_by_peer.items():
                for answer in answers:
                    silent.discard(peer)
                    _, manifest = _protocol.verify_member_manifest(answer.body, self.federation)
                    if manifest is not None and self._is_own(manifest):
                        manifests.append(manifest)
            if silent:  # a new link may not lead to the other agent yet
                self.stop.wait(_RETRY_SECONDS[1])
        return max(manifests, key=lambda manifest: manifest.round, default=None)

    def _is_own(self, manifest: Manifest) -> bool:
        return manifest.agent == self.agent_id and manifest.round < self.federation.rounds

    def peek(self, n: int, ids: Iterable[int]) -> dict[int, Float[Tensor, " d"]]:
        """Download models for an attacker of a simulation.

        Args:
            n: The agent's round.
            ids: The peers.

        Returns:
            The models that arrived, by peer.
        """
        rows = {i: torch.empty(self.dim) for i in ids}
        arrivals, _ = self.fetch(n, rows, None)
        return {i: rows[i] for i in arrivals}


class _PeerSession:
    """Requests to one peer until a time; counts the received bytes."""

    def __init__(self, client: PeerClient, peer: int, end: float) -> None:
        self.client = client
        self.peer = peer
        self.end = end
        self.received_bytes = 0

    def ask(
        self,
        kind: RequestKind,
        *,
        round: int = 0,
        index: int = 0,
        digest: bytes = _protocol.ZERO_DIGEST,
    ) -> "Iterator[Answer]":
        """Send a request now, and return its answers as they arrive."""
        client = self.client
        nonce = secrets.token_bytes(16)
        request = Request(
            kind=kind,
            run=client.federation.run,
            sender=client.agent_id,
            receiver=self.peer,
            nonce=nonce,
            round=round,
            index=index,
            digest=digest,
        )
        left = max(0.0, self.end - time.monotonic())
        answers = client.transport.ask(self.peer, request.encode(client.identity.sign), left)
        return self._decode(answers, nonce)

    def _decode(self, answers: Iterable[bytes], nonce: bytes) -> "Iterator[Answer]":
        for data in answers:
            self.received_bytes += len(data)
            with self.client.lock:
                self.client.received_bytes += len(data)
            with contextlib.suppress(_protocol.MalformedError):
                answer = _protocol.decode_answer(data)
                if answer.nonce == nonce:
                    yield answer


class _ModelDownload:
    """Download of one peer's model into a row: manifest, then chunks."""

    def __init__(
        self, client: PeerClient, n: int, peer: int, row: Float[Tensor, " d"], deadline: float
    ) -> None:
        self.client = client
        self.n = n
        self.peer = peer
        self.row = row
        self.deadline = deadline
        self.session = _PeerSession(client, peer, deadline)
        self.is_open = True
        self.lock = threading.Lock()

    def result(self, future: "Future[Arrival | str]") -> "Arrival | str":
        """End the download, and return the arrival or a reason."""
        self.cancel()
        if not future.done():
            return _LATE
        error = future.exception()
        if error is None:
            return future.result()
        if not self.client.has_logged_error:  # log the first error only
            self.client.has_logged_error = True
            logging.getLogger(__name__).error("a model could not be downloaded", exc_info=error)
        return FAILED

    def cancel(self) -> None:
        """Write nothing from now on, and send no requests."""
        with self.lock:
            self.is_open = False

    def run(self) -> "Arrival | str":
        """Download the model, with retries.

        In a synchronous federation a peer without a model is asked again until the deadline.
        Otherwise a peer is asked again a few times if it does not answer, because a message may be
        lost, or if its snapshot was replaced by a newer one.
        """
        start = time.monotonic()
        pause = _RETRY_SECONDS[0]
        tries = 0
        while self.is_open and (left := self.deadline - time.monotonic()) > 0:
            result = self._attempt(start)
            tries += 1
            if isinstance(result, Arrival) or not self._may_retry(result, tries):
                return result
            time.sleep(min(pause, left))
            pause = min(2 * pause, _RETRY_SECONDS[1])
        return _LATE

    def _may_retry(self, reason: str, tries: int) -> bool:
        if self.client.federation.synchronous:
            return reason in _RETRIABLE_REASONS
        return tries < _MAX_TRIES and reason in (_NO_ANSWER, _MOVED_ON)

    def _attempt(self, start: float) -> "Arrival | str":
        manifest = self._fetch_manifest()
        if isinstance(manifest, str):
            return manifest
        buffer = self.client.codec.buffer(manifest.size, self.row)
        if reason := self._fetch_chunks(manifest, buffer):
            return reason
        with self.lock:
            if not self.is_open:
                return _LATE
            if self.client.codec.decode_(buffer, self.row):
                return "content"
            if reason := rejection_reason(self.row):
                return reason
        seconds = time.monotonic() - start
        size = self.session.received_bytes
        return Arrival(manifest.round, manifest.num_samples, size, seconds)

    def _fetch_manifest(self) -> "Manifest | str":
        """Return the first valid manifest, or the reason why there is none."""
        reason = _NO_ANSWER
        for answer in self.session.ask(RequestKind.MANIFEST, round=self.n):
            if answer.status is not AnswerStatus.OK:
                reason = answer.status.label
                continue
            result = self._validate_offer(answer.body)
            if isinstance(result, Manifest):
                return result
            reason = result
        return reason

    def _validate_offer(self, body: _protocol.BytesLike) -> "Manifest | str":
        """Return an offer's valid manifest or a reason; fetch conflicting manifests."""
        client = self.client
        codec = client.codec
        try:
            signed, digests = _protocol.decode_offer(body)
        except _protocol.MalformedError as error:
            return error.reason
        reason, manifest = _protocol.validate_manifest(
            signed,
            federation=client.federation,
            peer=self.peer,
            n=self.n,
            min_round=client.last_rounds.get(self.peer, 0),
            dim=client.dim,
            min_bytes=codec.min_bytes,
            max_bytes=codec.max_bytes,
            encoding=codec.encoding,
            base=codec.base,
        )
        if manifest is None:
            return reason

        client.ledger.record(signed)
        longest = _protocol.manifest_bytes(codec.max_bytes)  # no peer accepts a longer one
        for agent, n, digest in client.ledger.find_conflicts(digests)[:_MAX_WITNESSES]:
            answers = self.session.ask(RequestKind.WITNESS, round=n, index=agent, digest=digest)
            for answer in answers:
                if answer.status is AnswerStatus.OK and len(answer.body) <= longest:
                    client.ledger.record(bytes(answer.body))
        if self.peer in client.ledger.equivocators:
            return _EQUIVOCATION
        return manifest

    def _fetch_chunks(self, manifest: Manifest, buffer: memoryview) -> str:
        """Fill the buffer by chunks; return an empty text or a reason."""
        count = len(manifest.chunks)
        whole = hashlib.sha256()
        pending = deque(
            self._request_chunk(manifest, k) for k in range(min(count, _CHUNKS_IN_FLIGHT))
        )
        for k, expected in enumerate(manifest.chunks):
            start = k * _protocol.CHUNK_BYTES
            size = min(_protocol.CHUNK_BYTES, manifest.size - start)

            chunk, reason = self._first_valid_chunk(pending.popleft(), size, expected)
            if chunk is None and time.monotonic() < self.deadline:
                answers = self._request_chunk(manifest, k)
                chunk, reason = self._first_valid_chunk(answers, size, expected)
            if chunk is None:
                return _LATE if time.monotonic() > self.deadline else reason

            if k + _CHUNKS_IN_FLIGHT < count:
                pending.append(self._request_chunk(manifest, k + _CHUNKS_IN_FLIGHT))
            whole.update(chunk)
            with self.lock:
                if not self.is_open:
                    return _LATE
                buffer[start : start + size] = chunk
        return "" if whole.digest() == manifest.sha256 else "hash"

    def _first_valid_chunk(
        self, answers: "Iterator[Answer]", size: int, expected: bytes
    ) -> "tuple[_protocol.BytesLike | None, str]":
        """Return the first chunk with the expected hash, or a reason."""
        reason = _NO_ANSWER
        for answer in answers:
            if answer.status is not AnswerStatus.OK:  # the peer may have replaced the snapshot
                reason = answer.status.label
            elif len(answer.body) == size and _sha256(answer.body) == expected:
                return answer.body, ""
            else:
                reason = "hash"
        return None, reason

    def _request_chunk(self, manifest: Manifest, k: int) -> "Iterator[Answer]":
        return self.session.ask(RequestKind.CHUNK, index=k, digest=manifest.digest)


def rejection_reason(theta: Float[Tensor, " d"]) -> str:
    """Check the numbers of a received model.

    Args:
        theta: The model, shape [d].

    Returns:
        An empty text, "bound" or "not finite".
    """
    largest = float(max_abs(theta.unsqueeze(0), [0])[0])
    if is_admissible(np.array([largest])).all():
        return ""
    return "bound" if math.isfinite(largest) else "not finite"


def _sha256(content: _protocol.BytesLike) -> bytes:
    return hashlib.sha256(content).digest()
