"""Mailboxes between members that cannot reach each other: a folder, or a relay that serves one.

A mailbox stores sealed messages for sessions of members, and a card for each member. Its owner is
not trusted: it can delay or drop messages, and sees senders, receivers and sizes.
"""

import base64
import binascii
import json
import os
import re
import secrets
import ssl
import threading
import time
from collections.abc import Iterable
from datetime import datetime
from itertools import chain
from typing import Any

from urllib3.exceptions import EmptyPoolError, HTTPError

from fedcb2o.errors import ConfigError
from fedcb2o.peer.membership.federation import MAX_FILE_BYTES
from fedcb2o.peer.membership.identity import Identity, Member
from fedcb2o.peer.wire.dialer import CONNECT_SECONDS, Pool
from fedcb2o.peer.wire.http_requests import HttpRequest
from fedcb2o.peer.wire.protocol import MalformedError
from fedcb2o.peer.wire.tls import client_context, remote_member

MAX_MESSAGE_BYTES = 2**21 + 2**12  # longest message: an answer, sealed
MAX_TAKEN_BYTES = 2**23  # size of the messages that one call returns, except the last one
MAX_REPLY_BYTES = MAX_TAKEN_BYTES + MAX_MESSAGE_BYTES  # longest reply of a relay
MIN_COUNTED_BYTES = 2**16  # size as which a shorter message counts in a box
MAX_TAKEN_MESSAGES = 2**10  # messages in one reply of a relay; further ones wait in the box
_MAX_CARDS = 2**13  # cards in one reply of a relay: two of each member
_MAX_CARDS_BYTES = 2**21
_MAX_STATUS_BYTES = 2**10
_MAX_FORMER_BYTES = MAX_FILE_BYTES + 2**8
_FULL_SECONDS = 0.05, 0.4  # first and longest pause before a message is sent to a full box again
_MAX_CONNECTIONS = 16
FORMER_MEMBER = 410  # status of a relay's reply to a former member, with the federation's file
PROXY_CA = "FEDCB2O_PROXY_CA"  # file with the authority of a proxy that ends TLS
_CONTEXT = b"fedcb2o relay request v1\0"
_SIGNED_TARGET = re.compile(r".*[?&]key=([0-9a-f]{64})&to=([0-9a-f]{64})&nonce=([0-9a-f]{32})")
BOX_NAME = re.compile(r"[a-z0-9-]{1,63}/[0-9a-f]{32}")
CARD_NAME = re.compile(r"[a-z0-9-]{1,63}\.(run|check)")


class FormerMemberError(PermissionError):
    """Refusal of a relay; `file` is what it shows as a later federation.toml, unchecked."""

    def __init__(self, file: bytes) -> None:
        super().__init__("the relay no longer serves this member")
        self.file = file


class RelayMailbox:
    """Mailbox of a relay, over HTTPS connections that this member opens.

    Methods raise OSError if it cannot be reached. `FolderMailbox` has the same ones. `expires` is
    the expiry of the relay's certificate, None before it was seen.
    """

    def __init__(self, relay: Member, identity: Identity) -> None:
        self.relay = relay
        self.expires: datetime | None = None
        self._identity = identity
        self._pool: Pool | None = None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def has_proxy(self) -> bool:
        """True if a proxy on the way to the relay ends TLS."""
        return bool(os.environ.get(PROXY_CA))

    def publish_card(self, name: str, card: bytes) -> None:
        """Store this member's card, which replaces an earlier one; an empty one removes it.

        The name is "MEMBER.run" of a node, "MEMBER.check" of a check.
        """
        self._call("PUT", f"cards/{name}", CONNECT_SECONDS, body=card)

    def cards(self) -> dict[str, bytes]:
        """Return all cards by name."""
        reply = self._call("GET", "cards", CONNECT_SECONDS, _MAX_CARDS_BYTES)
        entries = split_messages(reply, 2 * _MAX_CARDS)
        names = [entry.decode("ascii", "replace") for entry in entries[::2]]
        return dict(zip(names, entries[1::2], strict=False))

    def federation(self) -> dict[str, Any]:
        """Return the relay's `federation_state`, which nothing proves; empty if it does not say."""
        try:
            content = json.loads(self._call("GET", "federation", CONNECT_SECONDS))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def put(self, box: str, message: bytes, seconds: float) -> None:
        """Store a message for the session of a receiver, in its box "MEMBER/SESSION"."""
        end = time.monotonic() + seconds
        pause, longest = _FULL_SECONDS
        while True:
            try:
                self._call("PUT", f"boxes/{box}", max(0.0, end - time.monotonic()), body=message)
                return
            except BlockingIOError:
                # The receiver has not taken earlier messages yet.
                if time.monotonic() + pause > end:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, longest)

    def take(self, box: str, seconds: float) -> list[bytes]:
        """Return and remove the messages of an own session; wait up to `seconds` for the first."""
        resource = f"boxes/{box}?wait={seconds:.3f}"
        reply = self._call("GET", resource, seconds + CONNECT_SECONDS, MAX_REPLY_BYTES)
        return split_messages(reply, MAX_TAKEN_MESSAGES)

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        self._renew()

    def _call(
        self,
        method: str,
        resource: str,
        seconds: float,
        max_bytes: int = _MAX_STATUS_BYTES,
        body: bytes | None = None,
    ) -> bytes:
        """Send one signed request; return the content of the reply."""
        target, headers = self._signed(method, resource)
        try:
            code, content = self._connected_pool().exchange(
                method,
                target,
                end=time.monotonic() + seconds,
                # The reply to a former member may be longer.
                max_bytes=max(max_bytes, _MAX_FORMER_BYTES),
                headers=headers,
                body=body,
            )
        except EmptyPoolError:
            raise TimeoutError("all connections to the relay are busy") from None
        except HTTPError as error:
            # The certificate may have been renewed, or a proxy may have changed.
            self._renew()
            raise ConnectionError(str(error)) from error
        except MalformedError:
            raise ConnectionAbortedError("the reply is too long") from None
        if code == FORMER_MEMBER:
            raise FormerMemberError(content)
        if code == 429:
            raise BlockingIOError("the box is full")
        if code == 401:
            raise PermissionError(_UNKNOWN_SIGNATURE)
        if code != 200:
            raise FileNotFoundError(f"the relay refuses a request with the status {code}")
        if len(content) > max_bytes:
            raise ConnectionAbortedError("the reply is too long")
        return content

    def _signed(self, method: str, resource: str) -> tuple[str, dict[str, str]]:
        """Return the target of a signed request, and its signature."""
        # The relay's key is signed too, so that no other relay can use the request.
        sign = "&" if "?" in resource else "?"
        ends = f"key={self._identity.member.key.hex()}&to={self.relay.key.hex()}"
        target = f"/v1/{resource}{sign}{ends}&nonce={secrets.token_hex(16)}"
        signature = self._identity.sign(_CONTEXT + f"{method} {target}".encode())
        return target, {"Authorization": f"Ed25519 {base64.b64encode(signature).decode()}"}

    def _connected_pool(self) -> Pool:
        with self._lock:
            if self._closed:
                raise ConnectionError("the mailbox is closed")
            if self._pool is None:
                context = client_context(self._identity, self.relay)
                try:
                    # Messages stay sealed.
                    if self.has_proxy:
                        context.load_verify_locations(os.environ[PROXY_CA])
                except OSError as error:
                    raise ConfigError(
                        f"{PROXY_CA}={os.environ[PROXY_CA]} cannot be read as certificates in PEM: "
                        f"{error.strerror or error}"
                    ) from error
                self._pool = Pool(self.relay, context, _MAX_CONNECTIONS, self._check)
            return self._pool

    def _check(self, connection: ssl.SSLSocket) -> None:
        # A proxy that ends TLS shows a certificate of its own.
        if not self.has_proxy:
            _, self.expires = remote_member(connection, [self.relay])

    def _renew(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


_UNKNOWN_SIGNATURE = (
    "the relay accepts no signature of this member: it holds a federation.toml without this "
    "member or with another key: ask its operator which version it has"
)


def read_signed_target(
    request: HttpRequest, relay: bytes
) -> tuple[bytes, bytes, bytes, bytes] | None:
    """Return the key, the nonce, the signed bytes and the signature of a request to a relay."""
    match = _SIGNED_TARGET.fullmatch(request.target)
    scheme, _, text = request.headers.get("authorization", "").partition(" ")
    if match is None or scheme != "Ed25519" or match[2] != relay.hex():
        return None
    try:
        signature = base64.b64decode(text.encode(), validate=True)
    except (binascii.Error, ValueError):
        return None
    message = _CONTEXT + f"{request.method} {request.target}".encode()
    return bytes.fromhex(match[1]), bytes.fromhex(match[3]), message, signature


def join_messages(messages: Iterable[bytes]) -> bytes:
    """Join messages, each with its length before it."""
    pairs = ((len(message).to_bytes(4, "little"), message) for message in messages)
    return b"".join(chain.from_iterable(pairs))


def split_messages(content: bytes | memoryview, max_count: int) -> list[bytes]:
    """Split joined messages; leave out an incomplete end, and those beyond `max_count`."""
    messages = list[bytes]()
    position = 0
    while position + 4 <= len(content) and len(messages) < max_count:
        start = position + 4
        position = start + int.from_bytes(content[position:start], "little")
        if position <= len(content):
            messages.append(bytes(content[start:position]))
    return messages
