"""Messages between peers: their bytes, the links that carry them, and the checks of received models."""

from fedcb2o.peer.wire.client import Downloads
from fedcb2o.peer.wire.compression import Coding, Int8, Raw
from fedcb2o.peer.wire.equivocation import Journal, Ledger, Proof, check_proof
from fedcb2o.peer.wire.protocol import Answer, Kind, MalformedError, Manifest, Request, Status
from fedcb2o.peer.wire.server import Server, Snapshot
from fedcb2o.peer.wire.transport import Transport, Zenoh

__all__ = [
    "Answer",
    "Coding",
    "Downloads",
    "Int8",
    "Journal",
    "Kind",
    "Ledger",
    "MalformedError",
    "Manifest",
    "Proof",
    "Raw",
    "Request",
    "Server",
    "Snapshot",
    "Status",
    "Transport",
    "Zenoh",
    "check_proof",
]
