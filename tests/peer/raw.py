"""HTTPS with a member's certificate by `ssl` alone, without the rules of this library."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from fedcb2o.peer import Federation, Identity
from fedcb2o.peer.wire.tls import close_wrapped

Respond = Callable[[str, Mapping[str, str]], Iterable[bytes]]
STATE = "/v1/federation"


def context(identity: Identity | None, roots: Iterable[str], *, serves: bool) -> ssl.SSLContext:
    """Return a context that trusts some roots, and names no host."""
    kind = ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT
    made = ssl.SSLContext(kind)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata="".join(roots))
    if identity is not None:
        made.load_cert_chain(identity.tls_certificate, identity.tls_key)
    return made


def roots_of(federation: Federation) -> list[str]:
    return [member.root for member in federation.members.values()]


def connect(
    identity: Identity | None, federation: Federation, target: int, endpoint: str = ""
) -> ssl.SSLSocket:
    """Open a connection to one agent, or to another endpoint in its place."""
    host, _, port = (endpoint or federation.members[target].endpoint).rpartition(":")
    made = context(identity, roots_of(federation), serves=False)
    return made.wrap_socket(socket.create_connection((host, int(port)), timeout=10))


def exchange(link: ssl.SSLSocket, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes, and read one answer; its status is 0 if the connection ends before."""
    with contextlib.suppress(OSError):
        link.sendall(data)
    return read_answer(link)


def read_answer(link: ssl.SSLSocket) -> tuple[int, dict[str, str], bytes]:
    received = b""
    with contextlib.suppress(OSError):
        while b"\r\n\r\n" not in received:
            piece = link.recv(2**16)
            if not piece:
                return 0, {}, received
            received += piece
        head, _, body = received.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        while len(body) < int(headers.get("content-length", 0)):
            piece = link.recv(2**16)
            if not piece:
                break
            body += piece
        return int(first.split()[1]), headers, body
    return 0, {}, received


def get(target: str, **headers: str) -> bytes:
    lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()]
    return f"GET {target} HTTP/1.1\r\nHost: x\r\n{''.join(lines)}\r\n".encode()


def answer(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


@contextlib.contextmanager
def listening(
    identity: Identity, federation: Federation, respond: Respond, endpoint: str = ""
) -> Iterator[None]:
    """Serve at a member's endpoint: `respond` returns the bytes to send for a request.

    Signs of life are answered.
    """
    host, _, port = (endpoint or identity.member.endpoint).rpartition(":")
    made = context(identity, roots_of(federation), serves=True)
    links = list[socket.socket]()
    is_over = threading.Event()

    def serve(raw: socket.socket) -> None:
        try:
            link = made.wrap_socket(raw, server_side=True)
        except OSError as error:
            close_wrapped(error)
            return
        with contextlib.suppress(OSError), link:
            links.append(link)
            received = b""
            while piece := link.recv(2**16):
                received += piece
                while b"\r\n\r\n" in received:
                    head, _, received = received.partition(b"\r\n\r\n")
                    first, *lines = head.decode().split("\r\n")
                    pairs = (line.split(": ", 1) for line in lines)
                    headers = {name.lower(): value for name, value in pairs}
                    target = first.split()[1]
                    parts = [answer(b"{}")] if target == STATE else respond(target, headers)
                    for part in parts:
                        link.sendall(part)

    def accept() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                raw, _ = server.accept()
                threading.Thread(target=serve, args=(raw,), daemon=True).start()

    with socket.create_server((host, int(port))) as server:
        server.settimeout(0.2)
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            for link in links:
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
