"""Byzantine member that sends invalid models, for the demo and for tests.

It has a valid identity, so that its answers arrive. The fault of its answers depends on the round.
Towards the end it sends each peer a different model. The process `python -m
fedcb2o.peer.node.byzantine_peer FEDERATION.toml IDENTITY` runs until its standard input ends.
"""

import secrets
import sys
from pathlib import Path

import numpy as np

from fedcb2o.nn import parameters
from fedcb2o.peer.membership.federation import Federation, read_federation
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.node.agent import build_network
from fedcb2o.peer.wire.protocol import (
    ZERO_DIGEST,
    Answer,
    AnswerStatus,
    MalformedError,
    Manifest,
    Request,
    RequestKind,
    decode_request,
    encode_offer,
)
from fedcb2o.peer.wire.transport import Https, Reply

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
"""Share of the rounds after which it signs another model for each peer."""


class ByzantinePeer:
    """Member of a federation that violates the protocol.

    `dim` is the number of parameters of a model.
    """

    def __init__(self, federation: Federation, identity: Identity, dim: int) -> None:
        self.federation = federation
        self.identity = identity
        self.dim = dim
        self.agent_id = federation.id_of(identity.member)
        self._contents: dict[bytes, bytes] = {}  # by the digest of the manifest

    def on_request(self, data: bytes, reply: Reply) -> None:
        """Answer a request that can be read."""
        try:
            request, _, _ = decode_request(data)
        except MalformedError:
            return
        reply(self.answer(request))

    def answer(self, request: Request) -> Answer:
        """Return an invalid answer, with the fault of the round."""
        body: bytes = secrets.token_bytes(1000)
        if request.kind is RequestKind.MANIFEST:
            # Another fault in each round, so that a demonstration shows all of them.
            fault = FAULTS[request.round % len(FAULTS)]
            if request.round >= EQUIVOCATION_START * self.federation.rounds:
                fault = _EQUIVOCATION
            if fault == "random bytes":
                return Answer(AnswerStatus.OK, body)
            body = encode_offer(self._craft_manifest(fault, request.round, request.sender))
        elif request.kind is RequestKind.MODEL:
            content = self._contents.get(request.digest)
            if content is not None:
                body = content[request.first : None if request.last is None else request.last + 1]
        return Answer(AnswerStatus.OK, body)

    def _craft_manifest(self, fault: str, n: int, receiver: int) -> bytes:
        """Return a manifest for round `n`, or of a model, with one fault."""
        theta = {
            "NaN": np.full(self.dim, np.nan),
            "another size": np.zeros(self.dim - 1),
            "1e38": np.full(self.dim, 1e38),
            _EQUIVOCATION: np.append(np.full(self.dim - 1, np.nan), receiver),
        }.get(fault, np.zeros(self.dim))
        agent = self.agent_id
        if fault == "another agent's":
            agent = next(i for i in self.federation.members if i != self.agent_id)

        content = theta.astype("<f4").tobytes()
        manifest = Manifest.from_content(
            content,
            run=ZERO_DIGEST if fault == "another run" else self.federation.run,
            agent=agent,
            round=n,
            dim=len(theta),
            # The largest claim that receivers believe.
            num_samples=self.federation.most_samples,
        )
        # After the manifest, which has the hashes of the content before.
        if fault == "other chunks":
            content = secrets.token_bytes(len(content))
        self._contents[manifest.digest] = content

        signed = manifest.to_signed_bytes(self.identity.sign)
        if fault == "unsigned":
            return signed[:-64] + secrets.token_bytes(64)
        return signed


def main(federation_path: str, folder: str, *allowed: str) -> None:
    """Take part until standard input ends.

    `allowed` has the functions and models outside fedcb2o that the federation may name.
    """
    federation = read_federation(federation_path, allowed_functions=allowed)
    identity = Identity.read(Path(folder))
    dim = len(parameters.flatten(build_network(federation)))
    transport = Https(federation, identity)
    try:
        transport.serve(ByzantinePeer(federation, identity, dim).on_request)
        sys.stdin.read()
    finally:
        transport.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
