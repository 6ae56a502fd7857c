"""Independent member of a federation, written from docs/protocol.md without fedcb2o.

    python client.py FEDERATION.toml KEYS OUT.npz

In each round it publishes the mean of its models and downloads those of all other members, which it
writes to OUT.npz with the digests of their manifests. It reads version 1 with float32 models.
"""

import base64
import hashlib
import json
import secrets
import ssl
import struct
import sys
import threading
import time
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import requests
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

HEAD = struct.Struct("<7sBBB32sIIQQ32sQ32sI")


def sha256(content):
    return hashlib.sha256(content).digest()


def run_id(table):  # with 2 in place of 2.0
    content = {key: value for key, value in table.items() if key != "version"} | {"version": 1}
    content["members"] = sorted(table["members"], key=lambda entry: entry["id"])
    content = json.loads(json.dumps(content), parse_float=lambda x: int(float(x)) if float(x).is_integer() else float(x))  # fmt: skip
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def encode_manifest(content, run, agent, n, sign):
    """Return the signed manifest of a model in encoding 0, and its digest."""
    hashes = [sha256(content[k : k + 2**20]) for k in range(0, len(content), 2**20)]
    sizes = (len(content) // 4, 1, bytes(32), len(content), sha256(content), len(hashes))
    body = HEAD.pack(b"fedcb2o", 1, 1, 0, run, agent, n, *sizes) + b"".join(hashes)
    return body + sign(b"fedcb2o manifest v1\0" + body), sha256(body)


class Client:
    """One member: its server, its newest two models, and the models of its peers."""

    def __init__(self, federation, keys):
        self.table = tomllib.loads(Path(federation).read_text())
        self.run, self.keys, self.round = run_id(self.table), keys, 0
        self.key = load_pem_private_key((keys / "signing.key").read_bytes(), password=None)
        self.members = {entry["id"]: entry for entry in self.table["members"]}
        keys_by_id = {id: base64.b64decode(entry["key"]) for id, entry in self.members.items()}
        own = self.key.public_key().public_bytes_raw()
        (self.me,) = [id for id, key in keys_by_id.items() if key == own]
        self.publics = {i: Ed25519PublicKey.from_public_bytes(k) for i, k in keys_by_id.items()}
        self.offers, self.models = {}, {}  # by round; by agent and round
        self.sessions = {id: self.session(id) for id in self.members if id != self.me}
        host, port = self.members[self.me]["endpoint"].rsplit(":", 1)
        self.server = ThreadingHTTPServer((host, int(port)), type("", (Handler,), {"client": self}))
        roots = "".join(entry["root"] for entry in self.members.values())
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=roots)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(keys / "tls.pem", keys / "tls.key")
        self.server.socket = context.wrap_socket(self.server.socket, True, False)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def session(self, peer):
        session, root = requests.Session(), self.keys / f"root-{peer}.pem"
        root.write_text(self.members[peer]["root"])
        session.trust_env, session.verify = False, str(root)  # not REQUESTS_CA_BUNDLE
        session.cert = (self.keys / "tls.pem", self.keys / "tls.key")
        return session

    def answer(self, target, span, authorization):
        """Return the status and the content of the answer to a request; 500 for a wrong one."""
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        if path == "/v1/federation":
            return 200, json.dumps({"run": self.run.hex()}).encode()
        signed = f"fedcb2o request v2\0GET {target}" + (f"\nRange: {span}" if span else "")
        signature = base64.b64decode(authorization.removeprefix("Ed25519 "))
        self.publics[int(query["from"][0])].verify(signature, signed.encode())
        if (query["run"][0], query["to"][0]) != (self.run.hex(), str(self.me)):
            return 421, b""
        if path == "/v1/hello":
            text = json.dumps({"protocol": [1, 3], "round": self.round, "run": self.run.hex(), "federation": self.run.hex()})  # fmt: skip
            sign = self.key.sign(b"fedcb2o hello v1\0" + bytes.fromhex(query["nonce"][0]) + text.encode())  # fmt: skip
            return 200, text.encode() + sign
        if path == "/v1/manifest":
            offers = self.offers
            if max(offers, default=-1) < max(0, int(query["round"][0]) - self.table.get("lag", 5)):
                return 503, b""
            seen = [[*key, digest.hex()] for key, (digest, _) in [*self.models.items()][-64:]]
            signed = base64.b64encode(offers[max(offers)][0]).decode()
            return 200, json.dumps({"manifest": signed, "seen": seen}).encode()
        found = [c for _, digest, c in self.offers.values() if path == f"/v1/models/{digest.hex()}"]
        first, last = (span or "bytes=0-").removeprefix("bytes=").split("-")
        return (200, found[0][int(first) :][: int(last or 2**40) - int(first) + 1]) if found else (404, b"")  # fmt: skip

    def publish(self, n, theta):
        content = np.asarray(theta, "<f4").tobytes()
        self.offers[n] = *encode_manifest(content, self.run, self.me, n, self.key.sign), content
        self.offers = {one: self.offers[one] for one in sorted(self.offers)[-2:]}

    def ask(self, peer, resource):
        """Return the content of an answer with the status 200; empty without one."""
        ends = f"run={self.run.hex()}&from={self.me}&to={peer}&nonce={secrets.token_hex(16)}"
        target = f"/v1/{resource}{'&' if '?' in resource else '?'}{ends}"
        signature = self.key.sign(b"fedcb2o request v2\0GET " + target.encode())
        headers = {"Authorization": f"Ed25519 {base64.b64encode(signature).decode()}"}
        url = f"https://{self.members[peer]['endpoint']}{target}"
        try:
            answer = self.sessions[peer].get(url, headers=headers, timeout=5)
            return answer.content if answer.status_code == 200 else b""
        except requests.RequestException:
            return b""

    def download(self, peer, n):
        """Return a peer's round, the digest of its manifest and its model, or None."""
        if not (offer := self.ask(peer, f"manifest?round={n}")):
            return None
        signed = base64.b64decode(json.loads(offer)["manifest"])
        self.publics[peer].verify(signed[-64:], b"fedcb2o manifest v1\0" + signed[:-64])
        fields, digest = HEAD.unpack_from(signed), sha256(signed[:-64])
        assert fields[:6] == (b"fedcb2o", 1, 1, 0, self.run, peer)
        content = self.ask(peer, f"models/{digest.hex()}")
        theta = np.frombuffer(content, "<f4")
        is_valid = sha256(content) == fields[11] and np.abs(theta).max() <= 1e6
        return (fields[6], digest, theta) if is_valid else None

    def take_part(self):
        theta = None
        for n in range(self.table["rounds"]):
            self.round = n
            end = time.monotonic() + max(0.2, self.table.get("round_seconds", 0.0))
            if theta is not None:
                self.publish(n, theta)
            received, last = [], end + self.table.get("deadline_seconds", 60)
            while not received and time.monotonic() < last:
                for peer in self.sessions:
                    if (arrival := self.download(peer, n)) is not None:
                        self.models[peer, arrival[0]] = arrival[1:]
                        received.append(arrival[2])
                time.sleep(0.05)
            received += [] if theta is None else [theta]
            theta = np.mean(received, axis=0, dtype=np.float32) if received else None
            time.sleep(max(0.0, end - time.monotonic()))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        span, authorization = (self.headers.get(k, "") for k in ("Range", "Authorization"))
        code, content = self.client.answer(self.path, span, authorization)
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    log_message = lambda *_: None  # noqa: E731


if __name__ == "__main__":
    client = Client(sys.argv[1], Path(sys.argv[2]))
    client.take_part()
    time.sleep(3.0)  # peers may still need the last model
    arrays = {f"{i}-{n}": theta for (i, n), (_, theta) in client.models.items()}
    for (i, n), (digest, _) in client.models.items():
        arrays[f"{i}-{n}-digest"] = np.frombuffer(digest, np.uint8)
    np.savez(sys.argv[3], run=np.frombuffer(client.run, np.uint8), **arrays)
