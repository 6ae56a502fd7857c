"""Attacks on real nodes by strangers and by one member, without code of the package.

Each attack runs until `attacker.is_over()`. `ATTACKS` has the attacks in their order of execution.
"""

import base64
import contextlib
import json
import secrets
import socket
import ssl
import struct
import time

import numpy as np
from tests.external import client as external

ATTACKS = {}
STRANGER, LINK, REQUEST, ANSWER = "stranger", "link", "request", "answer"


def attack(kind):
    def add(function):
        ATTACKS[function.__name__.strip("_")] = (kind, function)
        return function

    return add


class Attacker(external.Client):
    """Hostile member: its answers follow `mode`, and it opens connections to its victim."""

    def __init__(self, federation, keys, dim):
        self.mode = "honest"  # except for a model of zeros
        self.asked = 0
        self.modes = {}  # by round, so that a round has one model
        self.offered = {}  # modes by round of the manifests
        self.contents = {}  # by the digest of the manifest, the newest last
        self.corrupted = set()  # digests of manifests with wrong chunks
        self.size = dim
        self.end = 0.0
        super().__init__(federation, keys)
        self.server.RequestHandlerClass = type("", (HostileHandler,), {"client": self})
        self.places = []
        for id, entry in self.members.items():
            if id != self.me:
                host, port = entry["endpoint"].rsplit(":", 1)
                self.places.append((id, host, int(port)))
        self.victim, self.host, self.port = self.places[0]

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def is_over(self):
        return time.monotonic() >= self.end

    def connect(self, timeout=1.0):
        return socket.create_connection((self.host, self.port), timeout=timeout)

    def tls(self, *, is_member=True):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        if is_member:
            context.load_cert_chain(self.keys / "tls.pem", self.keys / "tls.key")
        return context

    def link(self):
        """Open a connection with the certificate of this member."""
        return self.tls().wrap_socket(self.connect())

    def request(self, resource, *, run=None, sender=None, sign=None, span="", nonce=None):
        """Return the bytes of a request, signed unless `sign` does something else."""
        ends = f"run={(run or self.run).hex()}&from={self.me if sender is None else sender}"
        ends += f"&to={self.victim}&nonce={nonce or secrets.token_hex(16)}"
        target = f"/v1/{resource}{'&' if '?' in resource else '?'}{ends}"
        signed = f"fedcb2o request v2\0GET {target}" + (f"\nRange: {span}" if span else "")
        signature = base64.b64encode((sign or self.key.sign)(signed.encode())).decode()
        headers = f"Range: {span}\r\n" if span else ""
        headers += f"Authorization: Ed25519 {signature}\r\n"
        return f"GET {target} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode()

    def newest_digest(self):
        """Return the digest of the victim's newest manifest; of zeros without one."""
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            offer = self.ask(self.victim, "manifest?round=0")
            if offer:
                signed = base64.b64decode(json.loads(offer)["manifest"])
                return external.sha256(signed[:-64]).hex()
            time.sleep(0.1)
        return "0" * 64

    def flood(self, make):
        """Send requests as fast as the victim answers them, on four connections."""
        while not self.is_over():
            with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                links = [stack.enter_context(self.link()) for _ in range(4)]
                while not self.is_over():
                    for link in links:
                        link.sendall(make())
                    for link in links:
                        if not link.recv(2**16):
                            raise ConnectionError
            time.sleep(0.01)

    def answers(self, target, span, authorization):
        """Return the bytes of the answer to a request in pieces, according to the mode."""
        path = target.partition("?")[0]
        query = dict(pair.split("=", 1) for pair in target.partition("?")[2].split("&") if pair)
        self.asked += path == "/v1/manifest"
        if path == "/v1/federation":
            return [plain(b"{}")]
        n = int(query.get("round", 0))
        if self.mode in RAW:
            return RAW[self.mode](self)
        if path == "/v1/hello":
            claimed = self.table["rounds"] if self.mode == "last round" else self.round
            about = {"name": "x", "protocol": [1, 3], "round": claimed, "run": self.run.hex()}
            text = json.dumps(about, sort_keys=True, separators=(",", ":")).encode()
            nonce = bytes.fromhex(query["nonce"])
            return [plain(text + self.key.sign(b"fedcb2o hello v1\0" + nonce + text))]
        if path == "/v1/manifest":
            return [plain(self.offer(n, int(query["from"])))]
        digest = path.rpartition("/")[2]
        content = self.contents.get(digest, b"")
        first, _, last = span.removeprefix("bytes=").partition("-")
        part = content[int(first or 0) : int(last or 2**40) + 1]
        if digest in self.corrupted:
            part = secrets.token_bytes(len(part))
        return [plain(part) if content else plain(b"", 404)]

    def offer(self, n, sender):
        """Return an offer for a round, according to the mode."""
        mode = self.modes.setdefault(n, self.mode)
        if self.mode == "equivocation":
            mode = self.mode
        if mode == "late":
            time.sleep(0.9 * self.table["deadline_seconds"])
        model = MODELS.get(mode, lambda dim, to: np.zeros(dim))(self.size, sender)
        offered = {"last round": self.table["rounds"] - 1, "old round": max(0, n - 50)}.get(mode, n)
        self.offered.setdefault(offered, set()).add(mode)
        content = np.asarray(model, "<f4").tobytes()
        author = sender if mode == "another's name" else self.me
        sign = self.key.sign if mode != "unsigned" else lambda body: bytes(64)
        signed, digest = external.encode_manifest(content, self.run, author, offered, sign)
        self.contents[digest.hex()] = content
        if self.mode == "other chunks":
            self.corrupted.add(digest.hex())
        for stale in list(self.contents)[:-8]:
            del self.contents[stale]
        seen = []
        if mode == "digests":
            seen = [[i, n, secrets.token_hex(32)] for i in range(4) for _ in range(16)]
        offer = {"manifest": base64.b64encode(signed).decode(), "seen": seen}
        return json.dumps(offer).encode()


def plain(body, status=200):
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


class HostileHandler(external.Handler):
    def do_GET(self):  # noqa: N802
        span, authorization = (self.headers.get(k, "") for k in ("Range", "Authorization"))
        with contextlib.suppress(OSError):
            for piece in self.client.answers(self.path, span, authorization):
                self.wfile.write(piece)


def dripping(attacker):
    yield b"HTTP/1.1 200 X\r\n"
    while not attacker.is_over():
        yield b"a: b\r\n"
        time.sleep(0.2)


def endless(attacker):
    yield b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n"
    while not attacker.is_over():
        yield b"10000\r\n" + bytes(2**16) + b"\r\n"


def silent(attacker):
    while not attacker.is_over():
        time.sleep(0.1)
    yield b""


RAW = {
    "silent": silent,
    "garbage": lambda attacker: [secrets.token_bytes(1000) + b"\r\n\r\n"],
    "many": lambda attacker: [plain(b"")] * 500,
    "endless": endless,
    "dripping": dripping,
    "many headers": lambda attacker: [b"HTTP/1.1 200 X\r\n" + b"a: b\r\n" * 10**5],
    "redirections": lambda attacker: [
        b"HTTP/1.1 302 X\r\nLocation: /v1/x\r\nContent-Length: 0\r\n\r\n"
    ],
    "compressed": lambda attacker: [
        b"HTTP/1.1 200 X\r\nContent-Encoding: gzip\r\nContent-Length: 20\r\n\r\n" + bytes(20)
    ],
}
MODELS = {
    "NaN": lambda dim, to: np.full(dim, np.nan),
    "1e38": lambda dim, to: np.full(dim, 1e38),
    "denormal": lambda dim, to: np.full(dim, 1e-40),
    "tiny": lambda dim, to: np.full(dim, 1e-20),
    "size": lambda dim, to: np.zeros(dim - 1),
    "equivocation": lambda dim, to: np.full(dim, 1e-3 * (1 + to)),
}
INVALID = ("NaN", "1e38", "size", "garbage", "many", "another's name", "old round", "unsigned",
           "other chunks", *RAW)  # fmt: skip


@attack(STRANGER)
def silent_connections(attacker):
    with contextlib.ExitStack() as stack:
        while not attacker.is_over():
            for _ in range(100):
                with contextlib.suppress(OSError):
                    stack.enter_context(attacker.connect())
            if len(stack._exit_callbacks) > 600:
                stack.close()
            time.sleep(0.1)


@attack(STRANGER)
def connections_that_end(attacker):
    start, count = time.monotonic(), 0
    while not attacker.is_over():
        with contextlib.suppress(OSError):
            attacker.connect().close()
        count += 1
        time.sleep(max(0.0, start + count / 1000 - time.monotonic()))


@attack(STRANGER)
def connections_that_reset(attacker):
    """End each connection by a reset, which the victim sees as it begins TLS."""
    reset, start, count = struct.pack("ii", 1, 0), time.monotonic(), 0
    while not attacker.is_over():
        with contextlib.suppress(OSError), attacker.connect() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        count += 1
        time.sleep(max(0.0, start + count / 1000 - time.monotonic()))


def hello_bytes():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


@attack(STRANGER)
def hellos_that_end(attacker):
    hello, start, count = hello_bytes(), time.monotonic(), 0
    while not attacker.is_over():
        with contextlib.suppress(OSError), attacker.connect() as link:
            link.sendall(hello)
        count += 1
        time.sleep(max(0.0, start + count / 1000 - time.monotonic()))


@attack(STRANGER)
def hellos_in_pieces(attacker):
    hello = hello_bytes()
    links = []
    for _ in range(100):
        with contextlib.suppress(OSError):
            links.append(attacker.connect())
    position = 0
    while not attacker.is_over():
        for link in links:
            with contextlib.suppress(OSError):
                link.sendall(hello[position : position + 1])
        position += 1
        time.sleep(0.05)
    for link in links:
        link.close()


@attack(STRANGER)
def garbage_in_place_of_tls(attacker):
    while not attacker.is_over():
        with contextlib.suppress(OSError), attacker.connect() as link:
            link.sendall(secrets.token_bytes(4096))
            link.recv(100)


@attack(STRANGER)
def http(attacker):
    while not attacker.is_over():
        with contextlib.suppress(OSError), attacker.connect() as link:
            link.sendall(b"GET / HTTP/1.1\r\n\r\n")
            link.recv(100)


@attack(STRANGER)
def no_certificate(attacker):
    context = attacker.tls(is_member=False)
    while not attacker.is_over():
        with contextlib.suppress(OSError), attacker.connect() as link:
            context.wrap_socket(link).recv(1)


def repeat(attacker, data, pause=0.0):
    """Send bytes on new connections, and read what comes back."""
    while not attacker.is_over():
        with contextlib.suppress(OSError), attacker.link() as link:
            link.sendall(data)
            while link.recv(2**16):
                pass
        time.sleep(pause)


def head(target="/v1/x", *lines, version="HTTP/1.1"):
    return "\r\n".join([f"GET {target} {version}", "Host: x", *lines, "", ""]).encode()


@attack(LINK)
def raw_bytes_after_tls(attacker):
    repeat(attacker, secrets.token_bytes(4096))


@attack(LINK)
def the_protocol_of_the_former_release(attacker):
    repeat(attacker, bytes.fromhex("1d004109f1") + bytes(28))


@attack(LINK)
def prefaces_of_http_2(attacker):
    repeat(attacker, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))


@attack(LINK)
def requests_of_http_0_9(attacker):
    repeat(attacker, b"GET /v1/federation\r\n\r\n")


@attack(LINK)
def absolute_targets(attacker):
    repeat(attacker, head("https://127.0.0.1/v1/federation"))


@attack(LINK)
def encoded_targets(attacker):
    repeat(attacker, head("/v1/%2e%2e/%2e%2e/keys"))


@attack(LINK)
def smuggled_requests(attacker):
    inner = head("/v1/federation")
    lines = [f"Content-Length: {len(inner) + 5}", "Transfer-Encoding: chunked"]
    repeat(attacker, head("/v1/x", *lines) + b"0\r\n\r\n" + inner)


@attack(LINK)
def pipelined_requests(attacker):
    repeat(attacker, head("/v1/federation") * 1000)


@attack(LINK)
def many_headers(attacker):
    repeat(attacker, head("/v1/x", *(f"a{k}: b" for k in range(10**4))))


@attack(LINK)
def one_long_header(attacker):
    repeat(attacker, head("/v1/x", "a: " + "b" * 2**20))


@attack(LINK)
def bodies(attacker):
    repeat(attacker, head("/v1/x", "Content-Length: 1000000000") + bytes(2**18))


def slowly(attacker, data):
    """Send one byte after another on many connections."""
    with contextlib.ExitStack() as stack:
        while not attacker.is_over():
            links = []
            for _ in range(40):
                with contextlib.suppress(OSError):
                    links.append(stack.enter_context(attacker.link()))
            for byte in data:
                for link in links:
                    with contextlib.suppress(OSError):
                        link.sendall(bytes([byte]))
                if attacker.is_over():
                    return
                time.sleep(0.1)


@attack(LINK)
def slow_headers(attacker):
    slowly(attacker, head("/v1/x", *(f"a{k}: b" for k in range(100))))


@attack(LINK)
def slow_bodies(attacker):
    slowly(attacker, head("/v1/x", "Content-Length: 1000") + bytes(1000))


@attack(LINK)
def refusals_that_are_not_read(attacker):
    while not attacker.is_over():
        with contextlib.suppress(OSError), attacker.link() as link:
            link.settimeout(0.2)
            while not attacker.is_over():
                link.sendall(head("/v1/x"))


@attack(LINK)
def models_that_are_not_read(attacker):
    """Ask for the newest model again and again, on connections that are never read."""
    digest = attacker.newest_digest()
    while not attacker.is_over():
        with contextlib.ExitStack() as stack:
            for _ in range(16):
                with contextlib.suppress(OSError):
                    link = stack.enter_context(attacker.link())
                    link.sendall(attacker.request(f"models/{digest}"))
            time.sleep(0.5)


@attack(LINK)
def renegotiations(attacker):
    """Versions of TLS with renegotiation are refused, again and again."""
    context = attacker.tls()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    while not attacker.is_over():
        with contextlib.suppress(OSError), attacker.connect() as plain_link:
            context.wrap_socket(plain_link).recv(1)


@attack(STRANGER)
def early_data(attacker):
    """Send requests before the handshake is complete."""
    while not attacker.is_over():
        with contextlib.suppress(OSError), attacker.connect() as link:
            link.sendall(hello_bytes() + b"\x17\x03\x03\x00\x40" + bytes(64))
            link.recv(2**12)


@attack(LINK)
def twenty_links(attacker):
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            with contextlib.suppress(OSError):
                link = stack.enter_context(attacker.link())
                link.sendall(head("/v1/federation"))
        while not attacker.is_over():
            time.sleep(0.1)


@attack(REQUEST)
def random_requests(attacker):
    attacker.flood(lambda: head("/v1/" + secrets.token_hex(100)))


@attack(REQUEST)
def unsigned_requests(attacker):
    attacker.flood(lambda: attacker.request("manifest?round=0", sign=lambda body: bytes(64)))


@attack(REQUEST)
def requests_in_the_name_of_others(attacker):
    attacker.flood(lambda: attacker.request("manifest?round=0", sender=attacker.places[1][0]))


@attack(REQUEST)
def requests_of_another_run(attacker):
    attacker.flood(lambda: attacker.request("manifest?round=0", run=bytes(32)))


@attack(REQUEST)
def replayed_requests(attacker):
    data = attacker.request("manifest?round=0")
    attacker.flood(lambda: data)


@attack(REQUEST)
def signed_requests(attacker):
    attacker.flood(lambda: attacker.request("manifest?round=0"))


@attack(REQUEST)
def witness_requests(attacker):
    zeros = "0" * 64
    attacker.flood(lambda: attacker.request(f"witness?agent=1&round=0&digest={zeros}"))


@attack(REQUEST)
def hello_requests(attacker):
    key = attacker.key.public_key().public_bytes_raw().hex()
    attacker.flood(lambda: attacker.request(f"hello?key={key}"))


@attack(REQUEST)
def many_ranges(attacker):
    """Ask for overlapping parts in one request, and for single bytes in many."""
    digest = attacker.newest_digest()
    spans = ["bytes=" + "0-," * 100, "bytes=0-9,5-14", "bytes=-1", "bytes=0-0"]
    attacker.flood(lambda: attacker.request(f"models/{digest}", span=secrets.choice(spans)))


@attack(REQUEST)
def whole_models(attacker):
    """Ask for whole models at once, each of which counts by its size."""
    digest = attacker.newest_digest()
    attacker.flood(lambda: attacker.request(f"models/{digest}"))


def answering(mode):
    def run(attacker):
        attacker.mode = mode
        while not attacker.is_over():
            time.sleep(0.05)
        attacker.mode = "honest"

    run.mode = mode
    ATTACKS[f"answers: {mode}"] = (ANSWER, run)


for _mode in ("NaN", "1e38", "denormal", "tiny", "size", "unsigned", "another's name", "old round",
              "other chunks", "digests", *RAW, "last round", "late",
              "equivocation"):  # fmt: skip
    answering(_mode)


def order(name):
    """Return the sort key of an attack; attacks that make nodes avoid the member come last."""
    kind = ATTACKS[name][0]
    exceptions = {
        "answers: many": 1,
        "answers: late": 4,
        "answers: silent": 5,
        "answers: equivocation": 8,
        "answers: dripping": 6,
        "answers: endless": 6,
    }
    return exceptions.get(name, {STRANGER: 0, REQUEST: 2, ANSWER: 3, LINK: 6}[kind])


ATTACKS = {name: ATTACKS[name] for name in sorted(ATTACKS, key=order)}
