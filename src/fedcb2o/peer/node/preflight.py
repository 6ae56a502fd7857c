"""Check of a federation before a run: all members exchange a HELLO.

Descriptions of other members are untrusted text: they are cut short, and only their printable ASCII
characters reach a terminal.
"""

import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedcb2o.errors import RunError
from fedcb2o.peer.membership.federation import Federation, removal_notice
from fedcb2o.peer.membership.identity import Identity, Member
from fedcb2o.peer.wire.equivocation import Ledger
from fedcb2o.peer.wire.mailbox import RelayMailbox
from fedcb2o.peer.wire.probe import ProbeResult, probe_member
from fedcb2o.peer.wire.protocol import (
    MINOR_VERSION,
    Answer,
    AnswerStatus,
    MalformedError,
    Request,
    RequestKind,
    decode_hello,
)
from fedcb2o.peer.wire.relayed import Mixed, Relayed, open_transport
from fedcb2o.peer.wire.server import Server
from fedcb2o.peer.wire.transport import Https, Transport

_SOFTWARE = version("fedcb2o")
_MAX_CLOCK_OFFSET_SECONDS = 60.0
"""Difference of two clocks from which it is reported."""
_EXPIRY_WARNING_DAYS = 30
"""Remaining validity of a certificate below which its renewal is recommended."""
_MAX_SHOWN_KEYS = 5
"""Number of differing keys that are named."""


@dataclass(frozen=True)
class CheckResult:
    """Result of the check of one member.

    `error` is the problem with its repair, or an empty text. `is_absent` says that no program runs
    there yet, which is no fault of its settings.
    """

    name: str
    error: str
    notes: tuple[str, ...] = ()
    is_absent: bool = False

    @property
    def verdict(self) -> str:
        """The state of the member in a few words."""
        if self.is_absent:
            return "not running yet"
        return "WRONG" if self.error else "ok"


@dataclass(frozen=True)
class _HelloReply:
    """A member's description of itself, its clock minus ours, and how it was asked."""

    content: Mapping[str, Any] | None
    reason: str = ""
    clock_offset: float = 0.0
    way: str = ""


def check_members(
    federation: Federation,
    identity: Identity,
    *,
    seconds: float = 20.0,
    listen: bool | str = True,
    relay: Path | str | None = None,
) -> list[CheckResult]:
    """Check that every member can be reached and holds the same federation.

    If the port is in use, for example by the running node, this program asks but is not asked.
    After `seconds`, missing answers are given up. `listen` is this node's endpoint, or another
    "HOST:PORT". `relay` is a folder, or the member file of a relay. The results have one entry per
    member, this organisation first, then the relay.
    """
    agent_id = federation.id_of(identity.member)
    end = time.monotonic() + seconds
    transport, notes, is_running = _open_transport(federation, identity, listen, relay)
    try:
        with _serve_hello(federation, identity, agent_id, transport) as server:
            replies = _ask_all(federation, identity, agent_id, transport, end)
            _wait_for_checkers(replies, server, end)
            linked = transport.connected_peers()
            relay_results = []
            removal = _shown_removal(federation, identity, replies.values())
            if isinstance(transport, Mixed):
                relay_results = [_relay_result(federation, transport.relayed, identity)]
                removal = transport.relayed.removal or removal
    finally:
        transport.close()

    others = {id: member for id, member in federation.members.items() if id != agent_id}
    # A probe of a silent host takes seconds.
    with ThreadPoolExecutor(16) as pool:
        probes = {id: pool.submit(probe_member, member, identity) for id, member in others.items()}
    own_notes = (*notes, *_describe_own_expiry(identity, is_running=is_running))
    results = [CheckResult(identity.member.name, removal, own_notes), *relay_results]
    for id, member in others.items():
        probe = probes[id].result()
        if member.is_outbound_only and relay_results:
            is_missing = not relay_results[0].error
            probe = ProbeResult(_describe_unrelayed(relay_results[0]), is_closed=is_missing)
        result = _member_result(federation, member, replies.get(id), id in linked, probe)
        # The signed notice explains why this member is refused.
        if removal and _holds_later_version(federation, replies.get(id), probe):
            error = f"it holds a later version: see the line of {identity.member.name}"
            result = replace(result, error=error)
        results.append(result)
    return results


def _holds_later_version(
    federation: Federation, reply: _HelloReply | None, probe: ProbeResult
) -> bool:
    """Say whether a member has the version that removed or changed this one."""
    content = (reply.content if reply else None) or {}
    version = content.get("version")
    is_later = isinstance(version, int) and version > federation.version
    return probe.is_refused or (is_later and content.get("run") == federation.run.hex())


def _shown_removal(
    federation: Federation, identity: Identity, replies: Iterable[_HelloReply]
) -> str:
    """Return the notice of a signed later version that a member sent, if it concerns this one."""
    for reply in replies:
        file = (reply.content or {}).get("file")
        if isinstance(file, str):
            content = file.encode("utf-8", "replace")
            if notice := removal_notice(federation, identity.member, content):
                return notice
    return ""


def _describe_unrelayed(relay: CheckResult) -> str:
    """Say why a member without an endpoint cannot be asked through the relay."""
    if relay.error:
        return f"it is asked through the relay only: see the line of {relay.name}"
    return (
        f"it is asked through the relay only, and is not connected to {relay.name}: start `fedcb2o "
        "peer run` or `peer check` there with the same one"
    )


def _relay_result(federation: Federation, relayed: Relayed, identity: Identity) -> CheckResult:
    """Return the result of the relay, or of the folder in its place."""
    mailbox = relayed.mailbox
    if isinstance(mailbox, RelayMailbox):
        notes: tuple[str, ...] = ("a proxy ends TLS on the way",)
        if not mailbox.has_proxy:
            notes = _describe_expiry(mailbox.expires) if mailbox.expires else ()
        if relayed.removal:
            return CheckResult(mailbox.relay.name, f"it refuses {identity.member.name}", notes)
        error = relayed.error or describe_disagreement(
            federation, mailbox.federation(), "the relay"
        )
        return CheckResult(mailbox.relay.name, error, notes)
    return CheckResult("relay", relayed.error, ("a folder",))


def format_results(results: list[CheckResult]) -> list[str]:
    """Format the results of a check, one line per member."""
    width = max(len(result.name) for result in results)
    verdict_width = max(len(result.verdict) for result in results)
    lines = []
    for result in results:
        text = "; ".join(filter(None, (result.error, *result.notes)))
        lines.append(f"{result.name:{width}}  {result.verdict:{verdict_width}}  {text}")
    return lines


def hello_content(federation: Federation, identity: Identity, **more: object) -> dict[str, Any]:
    """Return this organisation's description of itself in the answer to HELLO.

    `more` has further keys of a node or a check.
    """
    return {
        "software": _SOFTWARE,
        "protocol": [federation.protocol, MINOR_VERSION],
        "version": federation.version,
        "run": federation.run.hex(),
        "federation": federation.digest.hex(),
        "keys": federation.value_hashes(),
        "name": identity.member.name,
        "time": time.time(),
        **more,
    }


def _open_transport(
    federation: Federation, identity: Identity, listen: bool | str, relay: Path | str | None
) -> tuple[Https | Mixed, tuple[str, ...], bool]:
    """Open the links; return notes, and whether our own node seems to have the port."""
    open_links = partial(open_transport, federation, identity, relay=relay, is_checking=True)
    notes: tuple[str, ...] = ()
    if identity.member.is_outbound_only:
        notes = ("other members ask it through the relay only",)
    try:
        return open_links(listen=listen), notes, False
    except RunError as error:
        # Most often our own node has the port, and a check need not stop it.
        if "in use" not in str(error):
            raise
        address = "" if listen is True else f" ({listen})"
        note = f"our own node (or another program) has the port{address}: asked the others only"
        return open_links(listen=False), (note,), True


@contextmanager
def _serve_hello(
    federation: Federation, identity: Identity, agent_id: int, transport: Https | Mixed
) -> Iterator[Server | None]:
    """Answer other members that check at the same time."""
    if not transport.is_listening:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        server = Server(
            federation,
            agent_id,
            identity,
            Ledger(Path(folder), federation),
            hello_content=lambda: hello_content(federation, identity, checking=True),
        )
        transport.serve(server.on_request)
        yield server


def _ask_all(
    federation: Federation, identity: Identity, agent_id: int, transport: Transport, end: float
) -> dict[int, _HelloReply]:
    """Ask all members for their HELLO, repeatedly until the end."""
    replies: dict[int, _HelloReply] = {}
    missing = set(federation.members) - {agent_id}
    while missing and time.monotonic() < end:
        pending = {}
        for id in missing & transport.connected_peers():
            request = Request(
                kind=RequestKind.HELLO,
                run=federation.run,
                sender=agent_id,
                receiver=id,
                digest=identity.member.key,
            )
            sent = time.time()
            timeout = min(2.0, end - time.monotonic())
            way = _describe_way(transport, id)
            question = transport.ask(id, request.encode(identity.sign), timeout)
            pending[id] = request.nonce, sent, question, way
        for id, (nonce, sent, question, way) in pending.items():
            answer = question.answer()
            if answer is not None:
                reply = _decode_reply(answer, nonce, federation.members[id], sent)
                replies[id] = replace(reply, way=way)
                if reply.content is not None:
                    missing.discard(id)
        # New links come up meanwhile.
        time.sleep(0.1)
    return replies


def _describe_way(transport: Transport, id: int) -> str:
    """Say how a member is asked, if there is a relay."""
    if not isinstance(transport, Mixed):
        return ""
    is_direct = id in transport.direct.connected_peers()
    return "asked directly" if is_direct else "asked through the relay"


def _wait_for_checkers(
    replies: Mapping[int, _HelloReply], server: Server | None, end: float
) -> None:
    """Wait until every member that checks too got an answer."""
    checking = {
        id
        for id, reply in replies.items()
        if reply.content is not None and reply.content.get("checking") is True
    }
    # Their checks would miss this member, which stops to answer now.
    while server is not None and checking - server.counts.sent.keys() and time.monotonic() < end:
        time.sleep(0.1)


def _decode_reply(answer: Answer, nonce: bytes, member: Member, sent: float) -> _HelloReply:
    try:
        if answer.status is AnswerStatus.ANOTHER_VERSION:
            return _HelloReply(None, "version")
        if answer.status is not AnswerStatus.OK:
            return _HelloReply(None, answer.status.label)
        content = decode_hello(answer.body, nonce, member)
    except MalformedError as error:
        return _HelloReply(None, error.reason)

    clock_offset = 0.0
    remote_time = content.get("time")
    # JSON has numbers of any size.
    if isinstance(remote_time, int | float) and abs(remote_time) < 1e11:
        # The peer wrote its time about halfway between request and answer.
        clock_offset = remote_time - (sent + time.time()) / 2
    return _HelloReply(content, clock_offset=clock_offset)


def _member_result(
    federation: Federation,
    member: Member,
    reply: _HelloReply | None,
    is_linked: bool,
    probe: ProbeResult,
) -> CheckResult:
    notes = _describe_expiry(probe.expires) if probe.expires else ()
    if reply is None and not is_linked:
        waiting = "there is no link to it yet, though it lets us connect: check again"
        return CheckResult(member.name, probe.error or waiting, notes, probe.is_closed)
    if reply is None:
        error = (
            "there is a link, and no answer: it is busy, starting or ending, or it holds a newer "
            "version of the federation that removed or changed this member: check again, and ask "
            "for its file"
        )
        return CheckResult(member.name, error, notes)
    if reply.content is None:
        return CheckResult(member.name, _describe_unreadable(member, reply.reason), notes)

    notes = tuple(filter(None, (reply.way, _describe_software(reply.content), *notes)))
    offset = reply.clock_offset
    if abs(offset) > _MAX_CLOCK_OFFSET_SECONDS:
        direction = "ahead of" if offset > 0 else "behind"
        clock = f"its clock is {abs(offset):.0f} s {direction} ours: set the one that is wrong"
        notes = (clock, *notes)
    return CheckResult(member.name, describe_disagreement(federation, reply.content), notes)


def _describe_unreadable(member: Member, reason: str) -> str:
    if reason == "version":
        return (
            "it speaks another version of the protocol: install the same release of fedcb2o on "
            "both machines"
        )
    if reason == "signature":
        return (
            f"its answer is not signed by {member.name}'s key in this federation: a new identity "
            "needs a new version of the federation (`fedcb2o peer amend`)"
        )
    return (
        f"its answer cannot be read ({_printable_ascii(reason)}): check again, and compare its "
        "release of fedcb2o"
    )


def describe_disagreement(
    federation: Federation, content: Mapping[str, Any], holder: str = "it"
) -> str:
    """Compare the federation that a member or a relay claims to hold with ours.

    The difference is returned with its repair; an empty text if there is none, or no claim.
    """
    if not content or content.get("federation") == federation.digest.hex():
        return ""
    if content.get("run") != federation.run.hex():
        return f"{holder} holds another federation, {_describe_keys(federation, content)}"

    theirs = content.get("version")
    own = federation.version
    held = f"{holder} holds version {_printable_ascii(theirs)} of the federation"
    if isinstance(theirs, int) and theirs < own:
        return f"{held}, and we {own}: send it ours"
    # The file is sent to former members only.
    if isinstance(theirs, int) and theirs > own and "file" in content:
        return f"{held}, in which we are removed or changed"
    if isinstance(theirs, int) and theirs > own:
        return f"{held}, and we {own}: get the newer file"
    return f"{holder} holds another version {own}: compare the two files and their signatures"


def _describe_keys(federation: Federation, content: Mapping[str, Any]) -> str:
    """Name the first keys that differ in the file of another federation."""
    keys = content.get("keys")
    hashes = keys if isinstance(keys, dict) else {}
    hashes = {key: text for key, text in hashes.items() if isinstance(text, str)}
    differing = federation.differing_keys(hashes)
    names = ", ".join(_printable_ascii(key) for key in differing[:_MAX_SHOWN_KEYS])
    num_more = len(differing) - _MAX_SHOWN_KEYS
    more = f" and {num_more} more" if num_more > 0 else ""
    return f"differing in {names or 'no key that it reports'}{more}: send one file to all"


def _describe_software(content: Mapping[str, Any]) -> str:
    software = f"fedcb2o {_printable_ascii(content.get('software', '?'))}"
    if content.get("checking") is True:
        return f"{software}, checking too"
    done = content.get("round")
    if not isinstance(done, int):
        return software
    rounds = _printable_ascii(content.get("rounds"))
    return f"{software}, {_printable_ascii(done)} of {rounds} rounds done"


def _describe_own_expiry(identity: Identity, *, is_running: bool) -> tuple[str, ...]:
    """Describe the certificate of our running node, or else that in the folder of keys."""
    in_use = probe_member(identity.member, identity).expires if is_running else None
    if in_use == identity.expires:
        return _describe_expiry(in_use)
    stored = _describe_expiry(identity.expires, f"the certificate in {identity.folder}")
    if in_use is not None:
        running = (
            f"our running node uses a certificate that lasts {_days_until(in_use)} days, another "
            "one than that in the folder: stop the node, and start it again with --resume"
        )
        return (running, *stored)
    if is_running or identity.member.is_outbound_only:
        return (*stored, "a running node uses the certificate of its start")
    return stored


def _describe_expiry(expires: datetime, subject: str = "its certificate") -> tuple[str, ...]:
    days = _days_until(expires)
    remedy = ": `fedcb2o peer renew` there, soon" if days < _EXPIRY_WARNING_DAYS else ""
    return (f"{subject} lasts {days} days{remedy}",)


def _days_until(expires: datetime) -> int:
    return (expires - datetime.now(UTC)).days


def _printable_ascii(value: object) -> str:
    """Return at most 60 characters of untrusted text, safe for a terminal."""
    text = str(value)[:60]
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in text)
