"""Messages between peers: their bytes, links, server, client, and checks."""

from fedcb2o.peer.wire._client import FAILED, PeerClient, number_fault
from fedcb2o.peer.wire._compression import Codec, Int8Codec, RawCodec
from fedcb2o.peer.wire._equivocation import Ledger, Proof, SigningJournal, verify_proof
from fedcb2o.peer.wire._patience import Backoff, Patience, Wait
from fedcb2o.peer.wire._protocol import (
    CHUNK_BYTES,
    SIGNATURE_BYTES,
    ZERO_DIGEST,
    Answer,
    AnswerStatus,
    BytesLike,
    MalformedError,
    Manifest,
    Request,
    RequestKind,
    decode_answer,
    decode_hello,
    decode_manifest,
    decode_offer,
    decode_request,
    encode_hello,
    encode_offer,
    manifest_bytes,
    num_chunks,
    validate_manifest,
)
from fedcb2o.peer.wire._relay import Relay
from fedcb2o.peer.wire._relayed import Mixed, open_transport
from fedcb2o.peer.wire._server import Server, Snapshot
from fedcb2o.peer.wire._transport import Https, Reply, RequestHandler, Transport

__all__ = [
    "CHUNK_BYTES",
    "FAILED",
    "SIGNATURE_BYTES",
    "ZERO_DIGEST",
    "Answer",
    "AnswerStatus",
    "Backoff",
    "BytesLike",
    "Codec",
    "Https",
    "Int8Codec",
    "Ledger",
    "MalformedError",
    "Manifest",
    "Mixed",
    "Patience",
    "PeerClient",
    "Proof",
    "RawCodec",
    "Relay",
    "Reply",
    "Request",
    "RequestHandler",
    "RequestKind",
    "Server",
    "SigningJournal",
    "Snapshot",
    "Transport",
    "Wait",
    "decode_answer",
    "decode_hello",
    "decode_manifest",
    "decode_offer",
    "decode_request",
    "encode_hello",
    "encode_offer",
    "manifest_bytes",
    "num_chunks",
    "number_fault",
    "open_transport",
    "validate_manifest",
    "verify_proof",
]
