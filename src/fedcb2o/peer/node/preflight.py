"""Can I reach everybody, and do we agree? Each member is asked for its HELLO, and ours is given to those who check too.

What others say of themselves is text of strangers: it is cut short, and only printable ASCII of it reaches a terminal.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedcb2o.errors import RunError
from fedcb2o.peer.membership.federation import Federation
from fedcb2o.peer.membership.identity import Identity, Member
from fedcb2o.peer.wire.equivocation import Ledger
from fedcb2o.peer.wire.protocol import (
    AnswerStatus,
    MalformedError,
    Request,
    RequestKind,
    decode_answer,
    decode_hello,
)
from fedcb2o.peer.wire.server import Server
from fedcb2o.peer.wire.tls_probe import ProbeResult, probe_member
from fedcb2o.peer.wire.transport import Transport, Zenoh

_MAX_CLOCK_OFFSET_SECONDS = 60.0
"""Seconds by which clocks may differ before it is told."""
_EXPIRY_WARNING_DAYS = 30
"""Days before its end from which a certificate is told of."""
_MAX_SHOWN_KEYS = 5
"""Differing keys that are named."""


@dataclass(frozen=True)
class CheckResult:
    """What there is to say of a member: what is wrong, and its cure, or ""; and what is good to know."""

    name: str
    error: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _HelloReply:
    """What came back from a member: what it says of itself, or why that could not be read; and its clock less ours."""

    content: Mapping[str, Any] | None
    reason: str = ""
    clock_offset: float = 0.0


def check_members(
    federation: Federation, identity: Identity, *, seconds: float = 20.0, listen: bool | str = True
) -> list[CheckResult]:
    """What there is to say of each member, ourselves first; ends when all answered, or after so many seconds.

    Where our own address is taken, as it is while our node runs, it asks and is not asked. Raises ConfigError or
    RunError where nobody can be asked.
    """
    me = federation.id_of(identity.member)
    end = time.monotonic() + seconds
    transport, notes = _open_transport(federation, identity, listen)
    try:
        with _serve_hello(federation, identity, me, transport) as server:
            heard = _ask_all(federation, identity, me, transport, end)
            _wait_for_checkers(heard, server, end)
            linked = transport.connected_peers()
    finally:
        transport.close()
    others = {id: member for id, member in federation.members.items() if id != me}
    with ThreadPoolExecutor(16) as pool:
        probing = {
            id: pool.submit(probe_member, member, identity, is_linked=id in linked)
            for id, member in others.items()
        }
    return [
        CheckResult(identity.member.name, "", (*notes, *_describe_expiry(identity.expires))),
        *(
            _member_result(
                federation, others[id], heard.get(id), id in linked, probing[id].result()
            )
            for id in others
        ),
    ]


def format_results(found: list[CheckResult]) -> list[str]:
    """One line a member."""
    width = max(len(each.name) for each in found)
    told = ["; ".join(filter(None, (each.error, *each.notes))) for each in found]
    return [
        f"{each.name:{width}}  {'WRONG' if each.error else 'ok':5}  {text}"
        for each, text in zip(found, told, strict=True)
    ]


def hello_content(federation: Federation, identity: Identity, **more: object) -> dict[str, Any]:
    """What one says of oneself in the answer to HELLO, with what a node or a check says beside."""
    return {
        "software": version("fedcb2o"),
        "version": federation.version,
        "run": federation.run.hex(),
        "federation": federation.digest.hex(),
        "keys": federation.value_hashes(),
        "name": identity.member.name,
        "time": time.time(),
        **more,
    }


def _open_transport(
    federation: Federation, identity: Identity, listen: bool | str
) -> tuple[Zenoh, tuple[str, ...]]:
    try:
        return Zenoh(federation, identity, listen=listen), ()
    except RunError as error:
        if "in use" not in str(error):
            raise
        taken = f"our own node (or another program) has the port{'' if listen is True else f' ({listen})'}"
        return Zenoh(federation, identity, listen=False), (f"{taken}: asked the others only",)


@contextmanager
def _serve_hello(
    federation: Federation, identity: Identity, me: int, transport: Zenoh
) -> Iterator[Server | None]:
    """Answer while the others check too."""
    if not transport.is_listening:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        server = Server(
            federation,
            me,
            identity,
            Ledger(Path(folder), federation),
            hello_content=lambda: hello_content(federation, identity, checking=True),
        )
        try:
            transport.serve(server.on_request)
            yield server
        finally:
            server.close()


def _ask_all(
    federation: Federation, identity: Identity, me: int, transport: Transport, end: float
) -> dict[int, _HelloReply]:
    """What each member says of itself, of those that said anything in time."""
    heard: dict[int, _HelloReply] = {}
    left = set(federation.members) - {me}
    while left and time.monotonic() < end:
        nonces = {id: os.urandom(16) for id in left & transport.connected_peers()}
        asked = {}
        for id, nonce in nonces.items():
            request = Request(
                kind=RequestKind.HELLO,
                run=federation.run,
                sender=me,
                receiver=id,
                nonce=nonce,
                digest=identity.member.key,
            )
            asked[id] = (
                time.time(),
                transport.ask(id, request.encode(identity.sign), min(2.0, end - time.monotonic())),
            )
        for id, (sent, answers) in asked.items():
            for answer in answers:
                heard[id] = _decode_reply(answer, nonces[id], federation.members[id], sent)
                if heard[id].content is not None:
                    left.discard(id)
                    break
        time.sleep(0.1)
    return heard


def _wait_for_checkers(heard: Mapping[int, _HelloReply], server: Server | None, end: float) -> None:
    """Wait for those who check too, until each was answered."""
    checking = {
        id
        for id, each in heard.items()
        if each.content is not None and each.content.get("checking") is True
    }
    while server is not None and checking - server.counts.sent.keys() and time.monotonic() < end:
        time.sleep(0.1)


def _decode_reply(answer: bytes, nonce: bytes, member: Member, sent: float) -> _HelloReply:
    try:
        read = decode_answer(answer)
        if read.status is AnswerStatus.ANOTHER_VERSION:
            return _HelloReply(None, "version")
        if read.nonce != nonce or read.status is not AnswerStatus.OK:
            return _HelloReply(None, read.status.label)
        said = decode_hello(read.body, nonce, member)
    except MalformedError as error:
        return _HelloReply(None, error.reason)
    told = said.get("time")
    clock = (
        told - (sent + time.time()) / 2
        if isinstance(told, int | float) and abs(told) < 1e11
        else 0.0
    )
    return _HelloReply(said, clock_offset=clock)


def _member_result(
    federation: Federation,
    member: Member,
    heard: _HelloReply | None,
    linked: bool,
    probed: ProbeResult,
) -> CheckResult:
    """What there is to say of one member."""
    notes = _describe_expiry(probed.expires) if probed.expires else ()
    if heard is None and not linked:
        waits = "there is no link to it yet, though it lets us connect: check again"
        return CheckResult(member.name, probed.error or waits, notes)
    if heard is None:
        return CheckResult(
            member.name,
            "there is a link, and no answer: it is busy, or begins or ends just now",
            notes,
        )
    if heard.content is None:
        return CheckResult(member.name, _describe_unreadable(member, heard.reason), notes)
    said = heard.content
    notes = (_describe_software(said), *notes)
    if abs(heard.clock_offset) > _MAX_CLOCK_OFFSET_SECONDS:
        way = "ahead of" if heard.clock_offset > 0 else "behind"
        notes = (
            f"its clock is {abs(heard.clock_offset):.0f} s {way} ours: set the one that is wrong",
            *notes,
        )
    return CheckResult(member.name, describe_disagreement(federation, said), notes)


def _describe_unreadable(member: Member, reason: str) -> str:
    """Why what it answered is of no use."""
    if reason == "version":
        return "it speaks another version of the protocol: install the same release of fedcb2o on both machines"
    if reason == "signature":
        return (
            f"its answer is not signed by {member.name}'s key in this federation: if its identity was made anew, "
            "that needs a new version of the federation (`fedcb2o peer amend`)"
        )
    return f"its answer cannot be read ({_printable_ascii(reason)}): check again, and which release of fedcb2o it runs"


def describe_disagreement(federation: Federation, said: Mapping[str, Any]) -> str:
    """In what its federation is another than ours, and who has to do what."""
    if said.get("federation") == federation.digest.hex():
        return ""
    keys = said.get("keys")
    other = (
        {key: text for key, text in keys.items() if isinstance(text, str)}
        if isinstance(keys, dict)
        else {}
    )
    differing = federation.differing_keys(other)
    if said.get("run") != federation.run.hex():
        named = ", ".join(_printable_ascii(key) for key in differing[:_MAX_SHOWN_KEYS])
        more = (
            f" and {len(differing) - _MAX_SHOWN_KEYS} more"
            if len(differing) > _MAX_SHOWN_KEYS
            else ""
        )
        return f"it holds another federation, differing in {named or 'nothing it tells'}{more}: send one file to all"
    theirs = said.get("version")
    if isinstance(theirs, int) and theirs < federation.version:
        return f"it holds version {theirs} of the federation, and we {federation.version}: send it ours"
    if isinstance(theirs, int) and theirs > federation.version:
        return f"it holds version {theirs} of the federation, and we {federation.version}: get its file"
    return (
        f"it holds another version {federation.version}: compare the two files and their signatures"
    )


def _describe_software(said: Mapping[str, Any]) -> str:
    """What it runs, in a few words."""
    software = f"fedcb2o {_printable_ascii(said.get('software', '?'))}"
    done = said.get("round")
    rounds = said.get("rounds")
    if said.get("checking") is True:
        return f"{software}, checking too"
    return (
        f"{software}, {_printable_ascii(done)} of {_printable_ascii(rounds)} rounds done"
        if isinstance(done, int)
        else software
    )


def _describe_expiry(expires: datetime) -> tuple[str, ...]:
    days = (expires - datetime.now(UTC)).days
    cure = ": `fedcb2o peer renew` there, soon" if days < _EXPIRY_WARNING_DAYS else ""
    return (f"its certificate lasts {days} days{cure}",)


def _printable_ascii(value: object) -> str:
    """At most 60 characters of what a stranger says, and none that does anything to a terminal."""
    text = str(value)[:60]
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in text)
