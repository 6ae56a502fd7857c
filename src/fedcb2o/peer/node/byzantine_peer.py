"""A member that sends garbage: a stand-in for a hostile organisation, for the demo and for tests.

It has a valid identity, so that its answers arrive; what is in them is wrong in another way in every round, and towards
the end it tells every peer something else. As a process, `python -m fedcb2o.peer.node.byzantine_peer FEDERATION.toml IDENTITY`, it
lives until its standard input ends.
"""

import secrets
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedcb2o.nn import parameters
from fedcb2o.peer.membership.federation import Federation, read_federation
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.node.agent import build_network
from fedcb2o.peer.wire.protocol import (
    CHUNK_BYTES,
    ZERO_DIGEST,
    Answer,
    AnswerStatus,
    MalformedError,
    Manifest,
    Request,
    RequestKind,
    encode_offer,
)
from fedcb2o.peer.wire.protocol import decode_request as parsed
from fedcb2o.peer.wire.transport import Zenoh

FAULTS = (
    "random bytes",
    "NaN",
    "unsigned",
    "another size",
    "1e38",
    "other chunks",
    "another run",
    "another agent's",
)
_EQUIVOCATION = "another model for each"
EQUIVOCATION_START = 0.75
"""The share of the rounds after which it signs another model for each peer."""


class ByzantinePeer:
    """A member of a federation whose models have `dim` parameters, which keeps to nothing of it."""

    def __init__(self, federation: Federation, identity: Identity, dim: int) -> None:
        self.federation = federation
        self.identity = identity
        self.dim = dim
        self.agent_id = federation.id_of(identity.member)
        self._signed: dict[
            bytes, bytes
        ] = {}  # what is sent, by the digest of the manifest that goes before it

    def on_request(self, data: bytes, reply: Callable[[bytes], None]) -> None:
        """Answer a request, on a thread of its own."""
        try:
            request, _, _ = parsed(data)
        except MalformedError:
            return
        threading.Thread(target=lambda: reply(self.answer(request)), daemon=True).start()

    def answer(self, request: Request) -> bytes:
        """What it answers: which kind of garbage depends on the round."""
        body: bytes = secrets.token_bytes(1000)
        if request.kind is RequestKind.MANIFEST:
            kind = FAULTS[request.round % len(FAULTS)]
            if request.round >= EQUIVOCATION_START * self.federation.rounds:
                kind = _EQUIVOCATION
            if kind == "random bytes":
                return body
            body = encode_offer(self._craft_manifest(kind, request.round, request.sender))
        elif (
            request.kind is RequestKind.CHUNK
            and (content := self._signed.get(request.digest)) is not None
        ):
            body = content[request.index * CHUNK_BYTES : (request.index + 1) * CHUNK_BYTES]
        return Answer(request.nonce, AnswerStatus.OK, body).encode()

    def _craft_manifest(self, kind: str, n: int, receiver: int) -> bytes:
        """A manifest for round n that is wrong in one way, or promises something that is."""
        theta = {
            "NaN": np.full(self.dim, np.nan),
            "another size": np.zeros(self.dim - 1),
            "1e38": np.full(self.dim, 1e38),
            _EQUIVOCATION: np.append(np.full(self.dim - 1, np.nan), receiver),
        }.get(kind, np.zeros(self.dim))
        content = theta.astype("<f4").tobytes()
        manifest = Manifest.from_content(
            content,
            run=ZERO_DIGEST if kind == "another run" else self.federation.run,
            agent=next(i for i in self.federation.members if i != self.agent_id)
            if kind == "another agent's"
            else self.agent_id,
            round=n,
            dim=len(theta),
            num_samples=self.federation.most_samples,
            encoding=0,
            base=ZERO_DIGEST,
        )
        if kind == "other chunks":
            content = secrets.token_bytes(len(content))
        self._signed[manifest.digest] = content
        signed = manifest.to_signed_bytes(self.identity.sign)
        return signed[:-64] + secrets.token_bytes(64) if kind == "unsigned" else signed


def main(federation: str, folder: str) -> None:
    """Take part until standard input ends."""
    agreed = read_federation(federation)
    identity = Identity.read(Path(folder))
    transport = Zenoh(agreed, identity)
    try:
        transport.serve(
            ByzantinePeer(
                agreed, identity, len(parameters.flatten(build_network(agreed)))
            ).on_request
        )
        sys.stdin.read()
    finally:
        transport.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
