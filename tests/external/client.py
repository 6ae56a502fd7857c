"""Independent member of a federation, written from docs/protocol.md without fedcb2o.

    python client.py FEDERATION.toml KEYS OUT.npz

It needs zenoh, NumPy and cryptography. In each round it publishes the mean of its models and
downloads the models of all other members. At the end it writes the models to OUT.npz, with the
digests of their manifests. It reads version 1 of a federation with float32 models.
"""

import base64
import hashlib
import json
import secrets
import struct
import sys
import threading
import time
import tomllib
from pathlib import Path

import numpy as np
import zenoh
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

CHUNK = 2**20
VERSION = 1
HELLO, MANIFEST, CHUNK_OF_MODEL, WITNESS = 1, 2, 3, 4
OK, NOT_YET, NOT_HERE = 0, 1, 3
HEAD = struct.Struct("<7sBBB")
REQUEST = struct.Struct("<7sBBB32sIIII32s16s")
ANSWER = struct.Struct("<7sBBB16s")
MANIFEST_HEAD = struct.Struct("<7sBBB32sIIQQ32sQ32sI")
SEEN = struct.Struct("<II32s")


def canonical(value):
    """Replace 2.0 by 2, as the hash of a run requires."""
    if isinstance(value, dict):
        return {key: canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def run_id(table):
    """Return the hash of a federation of version 1."""
    content = {key: value for key, value in table.items() if key not in ("version", "members")}
    content |= {"version": 1, "members": sorted(table["members"], key=lambda entry: entry["id"])}
    text = json.dumps(canonical(content), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def encode_manifest(content, run, agent, n, samples, sign):
    """Return the signed manifest of a model in encoding 0, and its digest."""
    chunks = [
        hashlib.sha256(content[k : k + CHUNK]).digest() for k in range(0, len(content), CHUNK)
    ]
    whole = hashlib.sha256(content).digest()
    head = (b"fedcb2o", VERSION, 1, 0, run, agent, n, len(content) // 4, samples, bytes(32))
    body = MANIFEST_HEAD.pack(*head, len(content), whole, len(chunks)) + b"".join(chunks)
    return body + sign(b"fedcb2o manifest v1\0" + body), hashlib.sha256(body).digest()


class Client:
    """One member: its links, its newest two models, and the models of its peers."""

    def __init__(self, federation, keys):
        table = tomllib.loads(Path(federation).read_text())
        assert table["version"] == 1
        assert table.get("encoding", "float32") == "float32"
        self.table = table
        self.run = run_id(table)
        self.key = load_pem_private_key((keys / "signing.key").read_bytes(), password=None)
        own = base64.b64encode(self.key.public_key().public_bytes_raw()).decode()
        self.members = {entry["id"]: entry for entry in table["members"]}
        (self.me,) = [id for id, entry in self.members.items() if entry["key"] == own]
        self.publics = {
            id: Ed25519PublicKey.from_public_bytes(base64.b64decode(entry["key"]))
            for id, entry in self.members.items()
        }
        self.round = 0
        self.dim = None
        self.offers = {}  # by round: the signed manifest, its digest and the model's bytes
        self.models = {}  # by agent and round: the digest of the manifest, and the model
        self.lock = threading.Lock()
        roots = "".join(entry["root"] for entry in self.members.values())
        endpoint = self.members[self.me]["endpoint"]
        self.incoming = open_session(keys, roots, {"listen/endpoints": [f"tls/{endpoint}"]})
        self.incoming.declare_queryable(self.key_of(self.me), self.on_query, complete=True)
        self.links = {
            id: open_session(
                keys, entry["root"], {"connect/endpoints": [f"tls/{entry['endpoint']}"]}
            )
            for id, entry in self.members.items()
            if id != self.me
        }

    @staticmethod
    def key_of(agent):
        return f"fedcb2o/agents/{agent}"

    # Answers to requests of peers

    def on_query(self, query):
        with query:
            answer = self.answer(query.payload.to_bytes())
            if answer:
                query.reply(self.key_of(self.me), answer)

    def answer(self, data):
        """Return the answer to a request; empty if the request is invalid."""
        if len(data) != REQUEST.size + 64 or data[:9] != b"fedcb2o\x01\x02":
            return b""
        body = data[: REQUEST.size]
        _, _, _, kind, run, sender, receiver, n, index, digest, nonce = REQUEST.unpack(body)
        if sender not in self.links or (run, receiver) != (self.run, self.me):
            return b""
        try:
            self.publics[sender].verify(data[REQUEST.size :], b"fedcb2o request v1\0" + body)
        except InvalidSignature:
            return b""
        status, content = self.content(kind, n, index, digest, nonce)
        return ANSWER.pack(b"fedcb2o", VERSION, 3, status, nonce) + content

    def content(self, kind, n, index, digest, nonce):
        with self.lock:
            if kind == HELLO:
                about = {"name": self.members[self.me]["name"], "protocol": VERSION}
                about |= {"round": self.round, "run": self.run.hex(), "federation": self.run.hex()}
                text = json.dumps(about, sort_keys=True, separators=(",", ":")).encode()
                return OK, text + self.key.sign(b"fedcb2o hello v1\0" + nonce + text)
            if kind == MANIFEST:
                newest = max(self.offers, default=-1)
                if newest < 0 or newest < n - self.table.get("lag", 5):
                    return NOT_YET, b""
                signed = self.offers[newest][0]
                seen = [SEEN.pack(*key, received[0]) for key, received in self.models.items()][-64:]
                return OK, struct.pack("<I", len(signed)) + signed + b"".join(seen)
            for _, offered, content in self.offers.values():
                if kind == CHUNK_OF_MODEL and digest == offered and index * CHUNK < len(content):
                    return OK, content[index * CHUNK : (index + 1) * CHUNK]
            return NOT_HERE, b""

    def publish(self, n, theta, samples):
        content = np.asarray(theta, "<f4").tobytes()
        signed, digest = encode_manifest(content, self.run, self.me, n, samples, self.key.sign)
        with self.lock:
            self.offers[n] = signed, digest, content
            for stale_round in sorted(self.offers)[:-2]:
                del self.offers[stale_round]

    # Requests to peers

    def ask(self, peer, kind, n=0, index=0, digest=bytes(32)):
        """Return the content of the first answer with the status OK, or None."""
        nonce = secrets.token_bytes(16)
        head = (b"fedcb2o", VERSION, 2, kind, self.run, self.me, peer, n, index, digest, nonce)
        body = REQUEST.pack(*head)
        data = body + self.key.sign(b"fedcb2o request v1\0" + body)
        replies = self.links[peer].get(
            self.key_of(peer),
            payload=data,
            timeout=5.0,
            target=zenoh.QueryTarget.ALL,
            consolidation=zenoh.ConsolidationMode.NONE,
            congestion_control=zenoh.CongestionControl.BLOCK,
        )
        expected = ANSWER.pack(b"fedcb2o", VERSION, 3, OK, nonce)
        for reply in replies:
            if reply.ok is not None:
                answer = reply.ok.payload.to_bytes()
                if answer[: ANSWER.size] == expected:
                    return answer[ANSWER.size :]
        return None

    def download(self, peer, n):
        """Return a peer's round, the digest of its manifest and its model, or None."""
        offer = self.ask(peer, MANIFEST, n)
        if offer is None or len(offer) < 4:
            return None
        signed = offer[4 : 4 + int.from_bytes(offer[:4], "little")]
        if len(signed) < MANIFEST_HEAD.size + 64:
            return None
        body = signed[:-64]
        values = MANIFEST_HEAD.unpack_from(body)
        magic, version, message, encoding, run, agent, n_peer, dim, _, base, size, whole, count = (
            values
        )
        expected = (b"fedcb2o", VERSION, 1, 0, self.run, peer, bytes(32))
        if (magic, version, message, encoding, run, agent, base) != expected:
            return None
        try:
            self.publics[peer].verify(signed[-64:], b"fedcb2o manifest v1\0" + body)
        except InvalidSignature:
            return None
        lengths = (4 * dim, -(-size // CHUNK), MANIFEST_HEAD.size + 32 * count)
        if (size, count, len(body)) != lengths or self.dim not in (None, dim):
            return None
        if not n - self.table.get("lag", 5) <= n_peer < self.table["rounds"]:
            return None
        digest = hashlib.sha256(body).digest()
        content = bytearray()
        for k in range(count):
            chunk = self.ask(peer, CHUNK_OF_MODEL, 0, k, digest) or b""
            start = MANIFEST_HEAD.size + 32 * k
            if hashlib.sha256(chunk).digest() != body[start : start + 32]:
                return None
            content += chunk
        theta = np.frombuffer(bytes(content), "<f4")
        is_acceptable = len(content) == size and np.isfinite(theta).all()
        if hashlib.sha256(content).digest() != whole or not is_acceptable:
            return None
        if np.abs(theta).max(initial=0) > 1e6:
            return None
        self.dim = dim
        return n_peer, digest, theta

    def take_part(self):
        """Run all rounds."""
        theta = None
        for n in range(self.table["rounds"]):
            end = time.monotonic() + max(0.2, self.table.get("round_seconds", 0.0))
            if theta is not None:
                self.publish(n, theta, 1)
            received = []
            while not received and time.monotonic() < end + self.table.get(
                "deadline_seconds", 60.0
            ):
                for peer in self.links:
                    arrival = self.download(peer, n)
                    if arrival is not None:
                        n_peer, digest, model = arrival
                        with self.lock:
                            self.models[peer, n_peer] = digest, model
                        received.append(model)
                time.sleep(0.05)
            own = [] if theta is None else [theta]
            if received:
                theta = np.mean([*own, *received], axis=0, dtype=np.float32)
            with self.lock:
                self.round = n + 1
            time.sleep(max(0.0, end - time.monotonic()))

    def close(self):
        for session in (self.incoming, *self.links.values()):
            session.close()


def open_session(keys, roots, changes):
    """Open a session with the settings of docs/protocol.md."""
    settings = {
        "mode": "peer",
        "listen/endpoints": [],
        "scouting/multicast/enabled": False,
        "scouting/gossip/enabled": False,
        "open/return_conditions": {"connect_scouted": False, "declares": False},
        "transport/shared_memory/enabled": False,
        "transport/unicast/qos/enabled": False,
        "transport/link/protocols": ["tls"],
        "transport/link/rx/max_message_size": 2**21 + 2**10,
        "transport/link/tls": {
            "root_ca_certificate_base64": base64.b64encode(roots.encode()).decode(),
            "enable_mtls": True,
            "verify_name_on_connect": True,
            "close_link_on_expiration": True,
            "listen_certificate": str(keys / "tls.pem"),
            "listen_private_key": str(keys / "tls.key"),
            "connect_certificate": str(keys / "tls.pem"),
            "connect_private_key": str(keys / "tls.key"),
        },
    }
    config = zenoh.Config()
    for name, value in {**settings, **changes}.items():
        config.insert_json5(name, json.dumps(value))
    return zenoh.open(config)


def main(federation, keys, out):
    client = Client(federation, Path(keys))
    try:
        client.take_part()
        time.sleep(3.0)  # peers may still need the last model
    finally:
        client.close()
    models = {f"{agent}-{n}": theta for (agent, n), (_, theta) in client.models.items()}
    digests = {
        f"{agent}-{n}-digest": np.frombuffer(digest, np.uint8)
        for (agent, n), (digest, _) in client.models.items()
    }
    np.savez(out, run=np.frombuffer(client.run, np.uint8), **models, **digests)


if __name__ == "__main__":
    main(*sys.argv[1:])
