"""Messages of zenoh's wire protocol, version 9, as far as questions and replies need them.

A link carries batches: a length (u16, little-endian), then one transport message. Numbers are
variable-length integers of seven bits per byte. Received bytes are hostile: only `ZenohError` is
raised, nothing that a remote declares is kept, and a partial message never exceeds a bound.

Example:
    >>> encode_number(300).hex()
    'ac02'
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from fedcb2o.peer.wire._protocol import BytesLike

PROTOCOL_VERSION = 9
BATCH_BYTES = 2**16 - 1
_PEER = 1  # the role of both ends of a link
_RESOLUTION = 0x0A  # sequence numbers and request ids of 32 bits
_SEQUENCE_MASK = 2**28 - 1
_ZID_BYTES = 16
_COOKIE_BYTES = 16
_OWN_KEY = 1  # number under which a server declares its key

_INIT, _OPEN, _CLOSE, _KEEP_ALIVE, _FRAME, _FRAGMENT = 1, 2, 3, 4, 5, 6
_INTEREST, _RESPONSE_FINAL, _RESPONSE, _REQUEST = 0x19, 0x1A, 0x1B, 0x1C
_DECLARE, _OAM = 0x1E, 0x1F
_DECLARE_FINAL = 0x1A
_ID_MASK = 0x1F
_EXTENSIONS = 0x80  # flag of most messages

KEEP_ALIVE = bytes([_KEEP_ALIVE])
CLOSE = bytes([_CLOSE, 0])


class ZenohError(ValueError):
    """Bytes that are no message, or one that no honest member sends."""


@dataclass(frozen=True)
class Query:
    """Question of a remote, which chose its number; it may be for another key."""

    id: int
    is_own_key: bool
    payload: bytes


@dataclass(frozen=True)
class Reply:
    """Reply to a question; without content (None) it is an error."""

    id: int
    payload: BytesLike | None


@dataclass(frozen=True)
class Final:
    """End of the replies to a question."""

    id: int


@dataclass(frozen=True)
class Interest:
    """Question for the declarations of this agent."""

    id: int


@dataclass(frozen=True)
class Ignored:
    """Declaration or other message of which nothing is kept."""

    size: int


Message = Query | Reply | Final | Interest | Ignored


def encode_number(number: int) -> bytes:
    """Encode a number from 0 to 64 bits in one to nine bytes."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _sized(content: bytes) -> bytes:
    return encode_number(len(content)) + content


def with_length(message: bytes) -> bytes:
    """Return a batch with one transport message: its length, then the message."""
    return len(message).to_bytes(2, "little") + message


class _Reader:
    """Cursor over received bytes that raises `ZenohError` at their end."""

    def __init__(self, data: BytesLike) -> None:
        self.data = data
        self.position = 0

    @property
    def is_at_end(self) -> bool:
        return self.position >= len(self.data)

    def byte(self) -> int:
        if self.position >= len(self.data):
            raise ZenohError("a message ends too early")
        self.position += 1
        return self.data[self.position - 1]

    def take(self, count: int) -> BytesLike:
        end = self.position + count
        if end > len(self.data):
            raise ZenohError("a message ends too early")
        content = self.data[self.position : end]
        self.position = end
        return content

    def number(self) -> int:
        value = 0
        for shift in range(0, 64, 7):
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ZenohError("a number is too long")

    def sized(self) -> BytesLike:
        return self.take(self.number())

    def extensions(self) -> dict[int, BytesLike]:
        """Read extensions; return the content of those with bytes by their number."""
        found = {}
        while True:
            header = self.byte()
            form = header & 0x60
            if form == 0x20:
                self.number()
            elif form == 0x40:
                found[header & 0x0F] = self.sized()
            elif form == 0x60:
                raise ZenohError("an extension has an unknown form")
            if not header & 0x80:
                return found

    def key(self, flags: int) -> tuple[int, BytesLike]:
        """Read a key expression: the number of its start, and the rest."""
        scope = self.number()
        return scope, self.sized() if flags & 0x20 else b""


@dataclass(frozen=True)
class Init:
    """First message of each end.

    `batch_bytes` is the longest message that the remote accepts. The answer must contain the
    cookie, which is empty in the first message.
    """

    batch_bytes: int
    cookie: bytes


def encode_init(cookie: bytes = b"") -> bytes:
    """Encode the first message; the cookie is empty at the dialling end."""
    header = _INIT | 0x40 | (0x20 if cookie else 0)
    zid = bytes([(_ZID_BYTES - 1) << 4 | _PEER]) + secrets.token_bytes(_ZID_BYTES)
    limits = bytes([_RESOLUTION]) + BATCH_BYTES.to_bytes(2, "little")
    return bytes([header, PROTOCOL_VERSION]) + zid + limits + (_sized(cookie) if cookie else b"")


def decode_init(message: bytes, *, is_answer: bool) -> Init:
    """Decode the first message of a remote; one of another version is a ZenohError."""
    reader = _Reader(message)
    header = reader.byte()
    if header & _ID_MASK != _INIT or bool(header & 0x20) != is_answer:
        raise ZenohError("a link does not begin with INIT")
    version = reader.byte()
    if version != PROTOCOL_VERSION:
        raise ZenohError(f"the remote speaks version {version} of zenoh's protocol")
    reader.take((reader.byte() >> 4) + 1)
    resolution = _RESOLUTION
    batch_bytes = BATCH_BYTES
    if header & 0x40:
        resolution = reader.byte()
        batch_bytes = int.from_bytes(reader.take(2), "little")
    if resolution != _RESOLUTION or batch_bytes < 1024:
        raise ZenohError("the remote has another resolution, or batches below 1024 bytes")
    cookie = reader.sized() if is_answer else b""
    return Init(min(batch_bytes, BATCH_BYTES), bytes(cookie))


def encode_open(sequence: int, lease_seconds: int, cookie: bytes = b"") -> bytes:
    """Encode the second message; the cookie is empty at the listening end.

    The link is down after `lease_seconds` without a message. Its messages count from `sequence`.
    """
    header = bytes([_OPEN | 0x40 | (0 if cookie else 0x20)])
    body = header + encode_number(lease_seconds) + encode_number(sequence)
    return body + (_sized(cookie) if cookie else b"")


def decode_open(message: bytes, cookie: bytes = b"") -> None:
    """Check the second message of a remote.

    It must contain the cookie, which is empty for the message of a listening end.
    """
    reader = _Reader(message)
    header = reader.byte()
    if header & _ID_MASK != _OPEN or bool(header & 0x20) == bool(cookie):
        raise ZenohError("INIT is not followed by OPEN")
    reader.number()
    reader.number()
    if cookie and reader.sized() != cookie:
        raise ZenohError("OPEN has another cookie")


def new_cookie() -> bytes:
    """Return random bytes, the cookie of a listening end."""
    return secrets.token_bytes(_COOKIE_BYTES)


class BatchEncoder:
    """Encoder of network messages into batches of one link, in order.

    `batch_bytes` is the longest message that the remote accepts.
    """

    def __init__(self, batch_bytes: int = BATCH_BYTES) -> None:
        self.batch_bytes = batch_bytes
        self.sequence = secrets.randbelow(_SEQUENCE_MASK)

    def encode(self, message: bytes) -> list[BytesLike]:
        """Return the batches of network messages in a row, in pieces to be joined.

        They are one frame, or the fragments of a long message.
        """
        head = self._head(_FRAME | 0x20)
        if len(head) + len(message) <= self.batch_bytes:
            return [with_length(head + message)]

        # The rest is for the header and the sequence number.
        size = self.batch_bytes - 16
        content = memoryview(message)
        pieces: list[BytesLike] = []
        for start in range(0, len(message), size):
            has_more = start + size < len(message)
            # The first fragment has the sequence number of the frame that was too long.
            if start:
                head = self._head(_FRAGMENT | 0x20)
            flags = _FRAGMENT | 0x20 | (0x40 if has_more else 0)
            part = content[start : start + size]
            total = len(head) + len(part)
            pieces += [total.to_bytes(2, "little"), bytes([flags]), head[1:], part]
        return pieces

    def _head(self, header: int) -> bytes:
        head = bytes([header]) + encode_number(self.sequence)
        self.sequence = (self.sequence + 1) & _SEQUENCE_MASK
        return head


class BatchDecoder:
    """Decoder of the batches of one link.

    A message of more than `max_bytes` is skipped. `own_key` is the key of this agent, in ASCII.
    """

    def __init__(self, max_bytes: int, own_key: bytes = b"") -> None:
        self._max_bytes = max_bytes
        self._own_key = own_key
        self._partial = bytearray()
        self._is_skipping = False

    def decode(self, batch: BytesLike) -> Iterator[Message]:
        """Decode one transport message without its length.

        No result keeps a view of it. A ConnectionError says that the remote closes the link.
        """
        reader = _Reader(batch)
        header = reader.byte()
        kind = header & _ID_MASK
        if kind == _KEEP_ALIVE:
            return
        if kind == _CLOSE:
            raise ConnectionError("the remote closes the link")
        if kind not in (_FRAME, _FRAGMENT):
            raise ZenohError("a transport message of an unknown kind")
        reader.number()
        if header & _EXTENSIONS:
            reader.extensions()
        if kind == _FRAME:
            # A copy, because results must not keep a view of all that was received.
            frame = _Reader(bytes(batch[reader.position :]))
            while not frame.is_at_end:
                yield self._message(frame)
            return

        part = batch[reader.position :]
        if self._is_skipping or len(self._partial) + len(part) > self._max_bytes:
            self._is_skipping = True
            self._partial.clear()
            yield Ignored(len(part))
        else:
            self._partial += part
        if header & 0x40:
            return
        if not self._is_skipping:
            whole = self._partial
            self._partial = bytearray()
            yield self._message(_Reader(memoryview(whole)))
        self._is_skipping = False

    def _message(self, reader: _Reader) -> Message:
        """Read one network message."""
        start = reader.position
        header = reader.byte()
        kind = header & _ID_MASK
        if kind == _REQUEST:
            return self._query(reader, header)
        if kind == _RESPONSE:
            return _reply(reader, header)
        if kind == _RESPONSE_FINAL:
            id = reader.number()
            _skip_extensions(reader, header)
            return Final(id)
        if kind == _INTEREST:
            return _interest(reader, header, start)
        if kind == _DECLARE:
            if header & 0x20:
                reader.number()
            _skip_extensions(reader, header)
            _skip_declaration(reader)
        elif kind == _OAM:
            reader.number()
            _skip_extensions(reader, header)
            if header & 0x60 == 0x20:
                reader.number()
            elif header & 0x60 == 0x40:
                reader.sized()
        else:  # a publication, which no member sends
            reader.position = len(reader.data)
        return Ignored(reader.position - start)

    def _query(self, reader: _Reader, header: int) -> Query:
        id = reader.number()
        scope, suffix = reader.key(header)
        _skip_extensions(reader, header)
        body = reader.byte()
        if body & _ID_MASK != 3:
            raise ZenohError("a request is no query")
        if body & 0x20:
            reader.byte()
        if body & 0x40:
            reader.sized()
        extensions = reader.extensions() if body & _EXTENSIONS else {}
        payload = b""
        if 3 in extensions:
            content = _Reader(extensions[3])
            _skip_encoding(content)
            payload = bytes(content.data[content.position :])
        is_declared = scope == _OWN_KEY and not header & 0x40 and not suffix
        is_own_key = is_declared or (scope == 0 and suffix == self._own_key)
        return Query(id, is_own_key, payload)


def _skip_extensions(reader: _Reader, header: int) -> None:
    if header & _EXTENSIONS:
        reader.extensions()


def _skip_encoding(reader: _Reader) -> None:
    if reader.number() & 1:
        reader.sized()


def _skip_declaration(reader: _Reader) -> None:
    header = reader.byte()
    kind = header & _ID_MASK
    if kind <= 7:
        reader.number()
        if kind % 2 == 0:  # a declaration; odd numbers end one
            reader.key(header)
    elif kind != _DECLARE_FINAL:
        raise ZenohError("a declaration of an unknown kind")
    _skip_extensions(reader, header)


def _interest(reader: _Reader, header: int, start: int) -> Message:
    id = reader.number()
    mode = header & 0x60
    if mode:
        options = reader.byte()
        if options & 0x10:
            reader.key(options)
    _skip_extensions(reader, header)
    return Interest(id) if mode & 0x20 else Ignored(reader.position - start)


def _reply(reader: _Reader, header: int) -> Reply:
    id = reader.number()
    reader.key(header)
    _skip_extensions(reader, header)
    body = reader.byte()
    kind = body & _ID_MASK
    if kind == 4:  # a reply, with a publication in it
        if body & 0x20:
            reader.byte()
        _skip_extensions(reader, body)
        body = reader.byte()
        if body & _ID_MASK != 1:
            raise ZenohError("a reply without content")
        if body & 0x20:  # a time
            reader.number()
            reader.sized()
    elif kind != 5:
        raise ZenohError("a response is no reply")
    if body & 0x40:
        _skip_encoding(reader)
    _skip_extensions(reader, body)
    payload = reader.sized()
    return Reply(id, payload if kind == 4 else None)


def encode_query(id: int, key: bytes, payload: bytes, timeout: float) -> bytes:
    """Encode a question; no other open question has its number.

    The receiver need not reply after `timeout` seconds.
    """
    milliseconds = encode_number(max(1, round(1000 * timeout)))
    head = bytes([_REQUEST | 0x20 | 0x80]) + encode_number(id) + b"\0" + _sized(key)
    # The importance of data, blocking; all matching receivers; the timeout.
    extensions = b"\xa1\x0d\xb4\x01\x26" + milliseconds
    return head + extensions + b"\xa3\x01\x43" + _sized(b"\0" + payload)


def encode_reply(id: int, key: bytes, payload: bytes) -> bytes:
    """Encode a reply and the end of replies."""
    head = bytes([_RESPONSE | 0x20 | 0x40 | 0x80]) + encode_number(id) + b"\0" + _sized(key)
    return b"".join((head, b"\x21\x0d\x04\x01", encode_number(len(payload)), payload))


def encode_final(id: int) -> bytes:
    """Encode the end of replies."""
    return bytes([_RESPONSE_FINAL | 0x80]) + encode_number(id) + b"\x21\x0d"


def encode_declarations(key: bytes = b"", interest: int = 0) -> bytes:
    """Encode that this agent answers for a key, and that it declares nothing else.

    The key is empty at an end that only asks. `interest` is the number of the question for
    declarations, 0 at the start of a link.
    """
    final = bytes([_DECLARE | 0x20 | 0x80]) + encode_number(interest) + b"\x21\x08\x1a"
    if not key:
        return final
    head = bytes([_DECLARE | 0x80]) + b"\x21\x08"
    if interest:
        head = bytes([_DECLARE | 0x20 | 0x80]) + encode_number(interest) + b"\x21\x08"
        return head + b"\xc4\x01\x01\x21\x01" + final
    number = bytes([_OWN_KEY])
    return head + b"\x20" + number + b"\0" + _sized(key) + head + b"\xc4\x01\x01\x21\x01" + final
