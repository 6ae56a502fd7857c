"""Requests of HTTP/1.1 as bytes: one at a time, within bounds, read by h11.

Whatever two programs could read differently is refused: chunks, repeated or encoded parts, several
requests at once.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

import h11

from fedcb2o.peer.membership.identity import Member
from fedcb2o.peer.wire.protocol import BytesLike

MAX_HEADER_BYTES = 2**14
# Absolute and encoded targets have several forms of one request, and only one is signed.
_TARGET = re.compile(rb"/v[0-9]{1,3}/[A-Za-z0-9/?&=._-]{1,500}")
_UNIQUE_HEADERS = (b"authorization", b"range", b"content-length", b"host")


@dataclass
class HttpRequest:
    """A request, with the names of headers in small letters, and the member that asks."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytearray = field(default_factory=bytearray)
    member: Member | None = None


class RefusedError(Exception):
    """A request that gets an error, after which the connection is closed."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail)
        self.code = code


def problem(code: int, detail: str) -> bytes:
    """Return the body of an error (RFC 9457, application/problem+json)."""
    title = HTTPStatus(code).phrase
    content = {"type": "about:blank", "status": code, "title": title, "detail": detail}
    return json.dumps(content).encode()


class RequestParser:
    """Parser of one connection's requests; `request` is that of the last head, or empty."""

    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self._connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        self.request = HttpRequest("", "", {})

    def receive(
        self,
        content: bytes,
        identify: Callable[[HttpRequest], Member | None] = lambda request: None,
    ) -> bool:
        """Parse received bytes; return True at the end of a request.

        `identify` finds the member of a request by its head, before the body is read, or raises. A
        request that no honest client sends is a RefusedError.
        """
        try:
            self._connection.receive_data(content)
            while True:
                event = self._connection.next_event()
                if isinstance(event, h11.Request):
                    self._check_head(event)
                    pairs = (
                        (name.decode(), text.decode("latin-1")) for name, text in event.headers
                    )
                    target = event.target.decode()
                    self.request = HttpRequest(event.method.decode(), target, dict(pairs))
                    self.request.member = identify(self.request)
                elif isinstance(event, h11.Data):
                    self.request.body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    # A proxy before this node could take such bytes for a request of another
                    # member.
                    if self._connection.trailing_data[0]:
                        raise RefusedError(400, "one request at a time")
                    return True
                else:
                    return False
        except h11.RemoteProtocolError as error:
            raise RefusedError(error.error_status_hint, "no request of HTTP/1.1") from None

    def _check_head(self, head: h11.Request) -> None:
        # h11 limits a header that is not whole, and reads on by records of TLS.
        if sum(len(name) + len(value) + 4 for name, value in head.headers) > MAX_HEADER_BYTES:
            raise RefusedError(431, "the header is too long")
        if head.http_version != b"1.1" or head.method not in (b"GET", b"PUT"):
            raise RefusedError(405, "GET or PUT in HTTP/1.1")
        if not _TARGET.fullmatch(head.target):
            raise RefusedError(404, "a target begins with /v1/, and has no encoded characters")
        names = Counter(name for name, _ in head.headers)
        if names[b"transfer-encoding"] or names[b"upgrade"]:
            raise RefusedError(501, "a body has a length, and nothing is upgraded")
        if any(names[name] > 1 for name in _UNIQUE_HEADERS):
            raise RefusedError(400, "a header is repeated")
        length = dict(head.headers).get(b"content-length", b"0")
        # `int` refuses texts of thousands of digits by an error of its own.
        if len(length) > 10 or int(length) > self._max_body:
            raise RefusedError(413, "the body is too long")

    def answer(
        self, code: int, headers: Sequence[tuple[str, str]], body: BytesLike
    ) -> tuple[bytes, bool]:
        """Return the head of an answer, and whether another request may follow its body."""
        kind = "application/problem+json" if code >= 400 else "application/octet-stream"
        common = {"content-length": str(len(body)), "cache-control": "no-store"}
        response = h11.Response(
            status_code=code,
            reason=HTTPStatus(code).phrase.encode(),
            headers=[*{**common, "content-type": kind, **dict(headers)}.items()],
        )
        head = self._connection.send(response) or b""
        if body:
            self._connection.send_with_data_passthrough(h11.Data(data=body))  # type: ignore[arg-type]
        self._connection.send(h11.EndOfMessage())
        may_follow = self._connection.our_state is h11.DONE
        if may_follow:
            self._connection.start_next_cycle()
        return head, may_follow
