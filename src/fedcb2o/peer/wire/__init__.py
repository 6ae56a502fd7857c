"""Messages between peers: their bytes, links, server, client, and checks."""

from fedcb2o.peer.wire.client import PeerClient
from fedcb2o.peer.wire.compression import Codec, Int8Codec, RawCodec
from fedcb2o.peer.wire.equivocation import Ledger, Proof, SigningJournal, verify_proof
from fedcb2o.peer.wire.protocol import (
    Answer,
    AnswerStatus,
    MalformedError,
    Manifest,
    Request,
    RequestKind,
)
from fedcb2o.peer.wire.server import Server, Snapshot
from fedcb2o.peer.wire.transport import Transport, Zenoh

__all__ = [
    "Answer",
    "AnswerStatus",
    "Codec",
    "Int8Codec",
    "Ledger",
    "MalformedError",
    "Manifest",
    "PeerClient",
    "Proof",
    "RawCodec",
    "Request",
    "RequestKind",
    "Server",
    "SigningJournal",
    "Snapshot",
    "Transport",
    "Zenoh",
    "verify_proof",
]
