"""Attacks on real nodes by strangers and by one member, without code of the package.

Each attack runs until `attacker.is_over()`. `ATTACKS` has the attacks in their order of execution.
"""

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
        self.corrupted = set()  # digests of manifests with wrong chunks
        self.size = dim
        self.end = 0.0
        self.keys = keys
        super().__init__(federation, keys)
        self.dim = dim
        self.places = []
        for id, entry in self.members.items():
            if id != self.me:
                host, port = entry["endpoint"].rsplit(":", 1)
                self.places.append((id, host, int(port)))
        self.victim, self.host, self.port = self.places[0]

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

    def session(self):
        config = {"connect/endpoints": [f"tls/{self.host}:{self.port}"]}
        session = external.open_session(self.keys, self.members[self.victim]["root"], config)
        end = time.monotonic() + 3
        while not session.info.links() and time.monotonic() < end:
            time.sleep(0.02)
        return session

    def request(self, kind, *, run=None, sender=None, n=0, index=0, digest=bytes(32), sign=None):
        head = (b"fedcb2o", 1, 2, kind, run or self.run, self.me if sender is None else sender)
        body = external.REQUEST.pack(*head, self.victim, n, index, digest, secrets.token_bytes(16))
        return body + (sign or self.key.sign)(b"fedcb2o request v1\0" + body)

    def flood(self, make):
        """Send requests as fast as the victim reads them."""
        while not self.is_over():
            for _ in range(50):
                self.links[self.victim].get(self.key_of(self.victim), payload=make(), timeout=0.5)
            time.sleep(0.01)

    def offer(self, nonce, theta, n, agent=None):
        content = np.asarray(theta, "<f4").tobytes()
        author = self.me if agent is None else agent
        signed, digest = external.encode_manifest(content, self.run, author, n, 1, self.key.sign)
        with self.lock:
            self.offers[secrets.randbits(60)] = signed, digest, content
            if self.mode == "other chunks":
                self.corrupted.add(digest)
            for stale in list(self.offers)[:-8]:
                del self.offers[stale]
        head = external.ANSWER.pack(b"fedcb2o", 1, 3, 0, nonce)
        return head + struct.pack("<I", len(signed)) + signed

    def on_query(self, query):
        with query:
            for answer in self.answers(query.payload.to_bytes()):
                if answer:
                    query.reply(self.key_of(self.me), answer)

    def answers(self, data):
        """Return the answers to a request, according to the mode."""
        values = external.REQUEST.unpack_from(data)
        kind, sender, n, nonce = values[3], values[5], values[7], values[10]
        self.asked += kind == external.MANIFEST
        if self.mode == "silent":
            return []
        if self.mode == "garbage":
            return [secrets.token_bytes(1000)]
        if self.mode == "many":
            return [external.ANSWER.pack(b"fedcb2o", 1, 3, 0, nonce)] * 500
        if kind == external.HELLO:
            claimed = self.table["rounds"] if self.mode == "last round" else n
            about = {"name": "x", "protocol": 1, "round": claimed, "run": self.run.hex()}
            text = json.dumps(about, sort_keys=True, separators=(",", ":")).encode()
            head = external.ANSWER.pack(b"fedcb2o", 1, 3, 0, nonce)
            return [head + text + self.key.sign(b"fedcb2o hello v1\0" + nonce + text)]
        if kind == external.MANIFEST:
            mode = self.modes.setdefault(n, self.mode)
            if self.mode == "equivocation":
                mode = self.mode
            if mode == "late":
                time.sleep(0.9 * self.table["deadline_seconds"])
            model = MODELS.get(mode, lambda dim, to: np.zeros(dim))(self.size, sender)
            round_of = {"last round": self.table["rounds"] - 1, "old round": max(0, n - 50)}
            agent = sender if mode == "another's name" else None
            offered = round_of.get(mode, n)
            self.offered.setdefault(offered, set()).add(mode)
            answer = self.offer(nonce, model, offered, agent)
            if mode == "digests":
                witnesses = [(i, n, secrets.token_bytes(32)) for i in range(4) for _ in range(16)]
                answer += b"".join(struct.pack("<II32s", *witness) for witness in witnesses)
            if mode == "unsigned":
                answer = answer[:-64] + bytes(64)
            return [answer]
        answer = self.answer(data)
        if values[9] in self.corrupted and kind == external.CHUNK_OF_MODEL:
            return [answer[:26] + secrets.token_bytes(len(answer) - 26)]
        return [answer]


MODELS = {
    "NaN": lambda dim, to: np.full(dim, np.nan),
    "1e38": lambda dim, to: np.full(dim, 1e38),
    "denormal": lambda dim, to: np.full(dim, 1e-40),
    "tiny": lambda dim, to: np.full(dim, 1e-20),
    "size": lambda dim, to: np.zeros(dim - 1),
    "equivocation": lambda dim, to: np.full(dim, 1e-3 * (1 + to)),
}
INVALID = ("NaN", "1e38", "size", "garbage", "many", "another's name", "old round", "unsigned",
           "other chunks", "silent")  # fmt: skip


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


def batches(attacker, *after_open, count=1):
    """Open a link by hand, then send batches until the attack is over."""
    context = attacker.tls()
    while not attacker.is_over():
        with (
            contextlib.suppress(OSError),
            attacker.connect() as plain,
            context.wrap_socket(plain) as link,
        ):
            link.settimeout(1.0)
            for batch in after_open:
                link.sendall(batch)
            for _ in range(count):
                if attacker.is_over():
                    return
                link.sendall(after_open[-1] * 100)
        time.sleep(0.02)


def batch(content):
    return len(content).to_bytes(2, "little") + content


INIT = batch(bytes.fromhex("4109f1") + bytes(16) + bytes.fromhex("0affff"))


@attack(LINK)
def raw_bytes_after_tls(attacker):
    batches(attacker, secrets.token_bytes(4096))


@attack(LINK)
def init_again_and_again(attacker):
    batches(attacker, INIT, count=1000)


@attack(LINK)
def empty_batches(attacker):
    batches(attacker, INIT, bytes(2), count=1000)


@attack(LINK)
def twenty_links(attacker):
    sessions = [attacker.session() for _ in range(20)]
    while not attacker.is_over():
        time.sleep(0.1)
    for session in sessions:
        session.close()


def declare(attacker, session, length):
    tokens = []
    while not attacker.is_over():
        for k in range(200):
            name = f"fedcb2o/{len(tokens)}/{k}" + "x" * length
            with contextlib.suppress(Exception):
                tokens.append(session.liveliness().declare_token(name))
        time.sleep(0.005)
        if len(tokens) > 20_000:
            tokens.clear()


@attack(LINK)
def declarations_on_a_link_in(attacker):
    session = attacker.session()
    declare(attacker, session, 8)
    session.close()


@attack(LINK)
def long_declarations_on_a_link_in(attacker):
    session = attacker.session()
    declare(attacker, session, 4000)
    session.close()


@attack(LINK)
def declarations_on_a_link_out(attacker):
    declare(attacker, attacker.incoming, 400)


@attack(LINK)
def publications(attacker):
    session = attacker.session()
    while not attacker.is_over():
        for _ in range(50):
            session.put(attacker.key_of(attacker.victim), bytes(4096))
        time.sleep(0.01)
    session.close()


@attack(REQUEST)
def huge_requests(attacker):
    attacker.flood(lambda: bytes(2**18))


@attack(REQUEST)
def random_requests(attacker):
    attacker.flood(lambda: secrets.token_bytes(170))


@attack(REQUEST)
def unsigned_requests(attacker):
    attacker.flood(lambda: attacker.request(2, sign=lambda body: bytes(64)))


@attack(REQUEST)
def requests_in_the_name_of_others(attacker):
    attacker.flood(lambda: attacker.request(2, sender=attacker.places[1][0]))


@attack(REQUEST)
def requests_of_another_run(attacker):
    attacker.flood(lambda: attacker.request(2, run=bytes(32)))


@attack(REQUEST)
def replayed_requests(attacker):
    data = attacker.request(2)
    attacker.flood(lambda: data)


@attack(REQUEST)
def signed_requests(attacker):
    attacker.flood(lambda: attacker.request(2))


@attack(REQUEST)
def witness_requests(attacker):
    attacker.flood(lambda: attacker.request(4, index=1))


@attack(REQUEST)
def hello_requests(attacker):
    attacker.flood(lambda: attacker.request(1))


def answering(mode):
    def run(attacker):
        attacker.mode = mode
        while not attacker.is_over():
            time.sleep(0.05)
        attacker.mode = "honest"

    run.mode = mode
    ATTACKS[f"answers: {mode}"] = (ANSWER, run)


for _mode in ("NaN", "1e38", "denormal", "tiny", "size", "unsigned", "another's name", "old round",
              "other chunks", "digests", "garbage", "many", "last round", "late", "silent",
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
        "declarations_on_a_link_out": 9,
    }
    return exceptions.get(name, {STRANGER: 0, REQUEST: 2, ANSWER: 3, LINK: 6}[kind])


ATTACKS = {name: ATTACKS[name] for name in sorted(ATTACKS, key=order)}
