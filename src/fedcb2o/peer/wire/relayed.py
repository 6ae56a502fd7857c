"""Transport through a mailbox, and the choice between it and direct links.

A member that serves writes a new signed card twice a second. A member counts as connected while its
card changes. Requests and answers are sealed (`sealing`) for one session and put into its box. The
relay is not trusted.
"""

import hashlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

from fedcb2o.errors import ConfigError
from fedcb2o.peer._closeable import Closeable
from fedcb2o.peer.membership.federation import Federation, file_content, removal_notice
from fedcb2o.peer.membership.identity import Identity, Member
from fedcb2o.peer.wire.dialer import LEASE_SECONDS
from fedcb2o.peer.wire.folder_mailbox import FolderMailbox
from fedcb2o.peer.wire.listener import SEND_SECONDS
from fedcb2o.peer.wire.mailbox import FormerMemberError, RelayMailbox
from fedcb2o.peer.wire.pace import Pace
from fedcb2o.peer.wire.probe import describe_failure, is_refusal
from fedcb2o.peer.wire.protocol import (
    Answer,
    AnswerStatus,
    BytesLike,
    MalformedError,
    Question,
    Responder,
    decode_answer,
)
from fedcb2o.peer.wire.sealing import Card, Sealed, SealedKind, Session
from fedcb2o.peer.wire.transport import (
    ASK_SECONDS,
    CLOSE_SECONDS,
    Https,
    RequestHandler,
)

Mailbox: TypeAlias = RelayMailbox | FolderMailbox

_CARD_SECONDS = 0.5  # time between two cards of one member
_TAKE_SECONDS = 5.0
_RETRY_SECONDS = 0.5  # longest pause after a failure; the first one is a fifth of it
_FORMER_SECONDS = 5.0  # pause after a relay that says that this member is none any more
_OUTAGE_SECONDS = 2.0  # without a valid reply, before requests end and pauses grow
_CPU_SHARE = 0.1  # of one processor, which each thread spends on useless replies
_READING_SHARE = 0.01  # the same for versions that remove or change this member
_MAX_VERSIONS_BYTES = 2**16  # of such versions, unless this member's own file is long
_MAX_GROWTH = 8  # factor by which such a file may be longer than this member's own
_MESSAGE_COST = 2**14  # bytes that can be decrypted in the time that a message takes otherwise
_WARNINGS = 4  # lines of the log at once about a relay, then one in a minute
_WARNINGS_PER_SECOND = 1 / 60
_MAX_UNSENT = 32  # answers to one member that wait; further ones are lost
_LAST_SECONDS = 1.0  # time for the last answers
_REFUSALS, _REFUSALS_PER_SECOND = 64, 4.0  # empty answers to all members: at once, and later


class Relayed(Closeable):
    """Transport through a mailbox; safe in any thread.

    A process that only checks (`is_checking`) may run while a node of the same member does.
    `on_removal` is called with a notice if the relay shows a later version of the federation, with
    all signatures, that removes or changes this member.

    `error` says why the mailbox cannot be reached at present. `removal` is the notice of this
    member's removal or change. Both may be empty.
    """

    def __init__(
        self,
        federation: Federation,
        identity: Identity,
        mailbox: Mailbox,
        *,
        is_checking: bool = False,
        on_removal: Callable[[str], None] = lambda notice: None,
    ) -> None:
        self.mailbox = mailbox
        self._federation = federation
        self._member = identity.member
        self._agent_id = federation.id_of(identity.member)
        self._on_removal = on_removal
        entries = [*federation.former_members(), *federation.members.items()]
        self._names = {id: member.name for id, member in entries}
        self._session = Session(federation, identity)
        self._box = f"{identity.member.name}/{self._session.name}"
        self._card_name = f"{identity.member.name}.{'check' if is_checking else 'run'}"
        self._handler: RequestHandler | None = None
        self._card_names = {
            f"{member.name}.{kind}"
            for id, member in federation.members.items()
            if id != self._agent_id
            for kind in ("run", "check")
        }
        # Last cards, and the times at which they last changed, 0 for a card that did not change.
        self._presences: dict[str, tuple[Card, float]] = {}
        self._waiting: dict[int, tuple[Card, Question]] = {}  # by their number
        self._ids = itertools.count(1)
        self._closed = threading.Event()
        self._warnings = Pace(_WARNINGS, _WARNINGS_PER_SECOND)
        self._refusals = Pace(_REFUSALS, _REFUSALS_PER_SECOND)
        # By agent: a full box makes the answers to its own member wait.
        per_peer = federation.limits.per_peer
        self._senders = {id: ThreadPoolExecutor(per_peer, "fedcb2o-reply") for id in self._names}
        self._unsent = Counter(dict.fromkeys(self._names, 0))
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._next_reading = 0.0  # monotonic time
        self._refused_file = b""  # its hash
        own_bytes = len(file_content(federation))
        self._max_file_bytes = max(_MAX_VERSIONS_BYTES, _MAX_GROWTH * own_bytes)
        self.error = ""
        self.removal = ""
        if isinstance(mailbox, FolderMailbox):
            mailbox.sweep()
        # Two threads, because the reply of a box comes with the next message only.
        targets = (self._exchange_cards, self._receive)
        self._threads = [
            threading.Thread(target=self._repeat, args=(one,), name="fedcb2o-relay", daemon=True)
            for one in targets
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, peer: int, request: bytes, timeout: float) -> Question:
        card = self._cards_by_peer().get(peer)
        if card is None or timeout <= 0:
            return Question()
        id = next(self._ids)
        question = Question(time.monotonic() + timeout)
        self._waiting[id] = card, question
        try:
            self._put(card, SealedKind.REQUEST, id, request, min(timeout, ASK_SECONDS))
        except (OSError, MalformedError):
            self._end(id)
        return question

    def _end(self, id: int, answer: Answer | None = None) -> None:
        """Answer a question, and forget it."""
        _, question = self._waiting.pop(id, (None, Question()))
        question.put(answer)

    def serve(self, handler: RequestHandler) -> None:
        self._handler = handler

    def connected_peers(self) -> frozenset[int]:
        return frozenset(self._cards_by_peer())

    def close(self) -> None:
        if self._closed.is_set():
            return
        # A check ends as soon as it has answered all members.
        end = time.monotonic() + _LAST_SECONDS
        while self._unsent.total() and time.monotonic() < end:
            time.sleep(_LAST_SECONDS / 100)
        self._closed.set()
        end = time.monotonic() + CLOSE_SECONDS
        if self._handler is not None:
            with suppress(OSError):
                # Without its card the others know at once that this process ends.
                self.mailbox.publish_card(self._card_name, b"")
        self.mailbox.close()
        self._end_requests()
        for sender in self._senders.values():
            sender.shutdown(wait=False, cancel_futures=True)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if isinstance(self.mailbox, FolderMailbox):
            self.mailbox.remove_box(self._box)

    def _cards_by_peer(self) -> dict[int, Card]:
        """Return the cards that changed lately; that of a node precedes that of a check."""
        cards: dict[int, Card] = {}
        if self._closed.is_set():
            return cards
        oldest = time.monotonic() - LEASE_SECONDS
        # Sorted, because NAME.run comes after NAME.check and replaces it.
        for _, (card, changed) in sorted(self._presences.copy().items()):
            if changed > oldest:
                cards[card.agent] = card
        return cards

    def _put(
        self, card: Card, kind: SealedKind, id: int, content: BytesLike, seconds: float
    ) -> None:
        message = self._session.seal(card, kind, id, content)
        self.mailbox.put(f"{self._names[card.agent]}/{card.session}", message, seconds)

    def _repeat(self, step: Callable[[], None]) -> None:
        """Repeat a step until the end, whatever the mailbox does; one failure ends no request."""
        last_success = time.monotonic()
        pause = _RETRY_SECONDS / 5
        while not self._closed.is_set():
            error_before = self.error
            try:
                step()
                last_success = time.monotonic()
                pause = _RETRY_SECONDS / 5
                # Otherwise the other thread has failed meanwhile.
                if self.error == error_before:
                    self.error = ""
                continue
            except FormerMemberError as error:
                self._note_removal(error.file)
                if time.monotonic() > last_success + _OUTAGE_SECONDS:
                    self._closed.wait(_FORMER_SECONDS - pause)
            except OSError as error:
                if (not self.error or is_refusal(error)) and not self._closed.is_set():
                    self._note_failure(error)
            except Exception as error:
                # The thread must go on.
                self._warn("a message of the relay cannot be handled", error)
            if time.monotonic() > last_success + _OUTAGE_SECONDS:
                self._end_requests()
            self._closed.wait(pause)
            pause = min(2 * pause, _RETRY_SECONDS)

    def _note_failure(self, error: OSError) -> None:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        if isinstance(self.mailbox, RelayMailbox) and error.__cause__ is not None:
            reason = describe_failure(self.mailbox.relay, error, "`fedcb2o peer relay`")
        if reason != self.error:
            self.error = reason
            self._warn(f"the relay or folder is tried again: {reason}")

    def _warn(self, message: str, error: Exception | None = None) -> None:
        """Log a line, unless the relay caused too many before."""
        if self._warnings.take():
            logging.getLogger(__name__).warning("%s", message, exc_info=error)

    def _note_removal(self, file: bytes) -> None:
        """Note the versions that the relay shows; only signatures of members count."""
        notice = self._read_versions(file)
        if notice and not self.removal:
            self.removal = self.error = notice
            self._on_removal(notice)
        elif not notice and self.error != _UNPROVED:
            self.error = _UNPROVED
            self._warn(self.error)

    def _read_versions(self, file: bytes) -> str:
        """Return the notice in a file, unless it was refused, comes too soon or is too long."""
        with self._reading:
            is_long = len(file) > self._max_file_bytes
            if self.removal or is_long or time.monotonic() < self._next_reading:
                return self.removal
            digest = hashlib.sha256(file).digest()
            if digest == self._refused_file:
                return ""
            # The interpreter does little else while it parses TOML.
            began = time.thread_time()
            notice = removal_notice(self._federation, self._member, file)
            seconds = time.thread_time() - began
            self._next_reading = time.monotonic() + seconds / _READING_SHARE
            self._refused_file = digest
            return notice

    def _exchange_cards(self) -> None:
        """Read the cards of others, and write this member's card."""
        began = time.thread_time()
        cards = self.mailbox.cards()
        for name in self._presences.keys() - cards.keys():
            del self._presences[name]
        for name in self._card_names & cards.keys():
            with suppress(MalformedError):
                self._note_card(name, self._session.read_card(cards[name]))
        self._end_lost_requests()
        # The time of this thread alone, because waiting for the relay costs nothing.
        seconds = time.thread_time() - began
        # Last, so that others can be asked even if this fails.
        if self._handler is not None:
            card = self._session.card(time.monotonic_ns())
            self.mailbox.publish_card(self._card_name, card)
        self._closed.wait(max(_CARD_SECONDS, seconds / _CPU_SHARE))

    def _note_card(self, name: str, card: Card) -> None:
        """Note a valid card; only a change within one session is a sign of life."""
        if card.is_former or name.partition(".")[0] != self._names[card.agent]:
            return
        known, _ = self._presences.get(name, (None, 0.0))
        if known is None or known.key != card.key:
            self._session.introduce(card)
            # No sign of life yet: a relay may show an old card again.
            self._presences[name] = card, 0.0
        elif card.count > known.count:
            self._presences[name] = card, time.monotonic()

    def _receive(self) -> None:
        """Handle the messages of this session's box, and pause after useless ones."""
        began = time.thread_time()
        # A reply without messages is useless.
        cost = useless = 1
        for message in self.mailbox.take(self._box, _TAKE_SECONDS):
            cost += len(message) + _MESSAGE_COST
            if not self._handle(message):
                useless += len(message) + _MESSAGE_COST
        seconds = (time.thread_time() - began) * useless / cost
        self._closed.wait(seconds * (1 / _CPU_SHARE - 1))

    def _handle(self, message: bytes) -> bool:
        """Handle a message; return False if it was useless."""
        try:
            sealed = self._session.open(message)
        except MalformedError:
            return False
        if sealed.kind is SealedKind.REQUEST:
            return self._on_request(sealed)
        return not sealed.card.is_former and self._on_answer(sealed)

    def _on_request(self, sealed: Sealed) -> bool:
        if self._handler is None:
            return False
        # A request that is turned away is useless: a flood of them waits in the box.
        return not self._handler(sealed.content, Responder(partial(self._reply, sealed), None))

    def _reply(self, request: Sealed, answer: Answer | None) -> None:
        """Send an answer in a thread of its receiver, whose box may be full for a while."""
        # An empty answer costs more than a flooder's request, and saves honest members a wait.
        if self._closed.is_set() or (answer is None and not self._refusals.take()):
            return
        agent = request.card.agent
        with self._lock:
            is_accepted = self._unsent[agent] < _MAX_UNSENT
            self._unsent[agent] += is_accepted
        with suppress(RuntimeError):  # closed meanwhile
            if is_accepted:
                self._senders[agent].submit(self._send, request, answer)

    def _send(self, request: Sealed, answer: Answer | None) -> None:
        seconds = SEND_SECONDS if answer else ASK_SECONDS
        content = b"" if answer is None else answer.encode()
        # Otherwise the relay or the sender is gone.
        with suppress(OSError, MalformedError):
            self._put(request.card, SealedKind.ANSWER, request.id, content, seconds)
        with self._lock:
            self._unsent[request.card.agent] -= 1

    def _on_answer(self, sealed: Sealed) -> bool:
        card, _ = self._waiting.get(sealed.id, (None, None))
        if card is None or card.agent != sealed.card.agent:
            return False
        answer: Answer | None = Answer(AnswerStatus.MALFORMED)
        with suppress(MalformedError):
            answer = decode_answer(sealed.content) if sealed.content else None
        self._end(sealed.id, answer)
        return True

    def _end_requests(self) -> None:
        for id in list(self._waiting):
            self._end(id)

    def _end_lost_requests(self) -> None:
        """End requests to sessions without a sign of life, and those whose time is over."""
        now = time.monotonic()
        oldest = now - LEASE_SECONDS
        keys = {card.key for card, changed in self._presences.values() if changed > oldest}
        for id, (card, question) in list(self._waiting.items()):
            if card.key not in keys or question.end < now:
                self._end(id)


_UNPROVED = (
    "the relay no longer serves this member, and shows no later version of the federation with "
    "enough signatures that removes or changes it: ask its operator which file it has"
)


class Mixed:
    """Transport over direct links where they exist, and through a mailbox elsewhere."""

    def __init__(self, direct: Https, relayed: Relayed) -> None:
        self.direct = direct
        self.relayed = relayed
        self.is_listening = True

    def ask(self, peer: int, request: bytes, timeout: float) -> Question:
        if peer in self.direct.connected_peers():
            return self.direct.ask(peer, request, timeout)
        return self.relayed.ask(peer, request, timeout)

    def serve(self, handler: RequestHandler) -> None:
        if self.direct.is_listening:
            self.direct.serve(handler)
        self.relayed.serve(handler)

    def connected_peers(self) -> frozenset[int]:
        return self.direct.connected_peers() | self.relayed.connected_peers()

    def close(self) -> None:
        self.direct.close()
        self.relayed.close()


def open_transport(
    federation: Federation,
    identity: Identity,
    *,
    listen: bool | str = True,
    relay: Path | str | None = None,
    is_checking: bool = False,
    on_removal: Callable[[str], None] = lambda notice: None,
) -> Https | Mixed:
    """Open direct links, and a mailbox if one is given.

    `listen` is the member's own endpoint, or another "HOST:PORT". `relay` is a folder, or the
    member file of a relay. `on_removal` is called with a notice if a relay shows a signed later
    version of the federation that removes or changes this member.
    """
    if identity.member.is_outbound_only:
        listen = False
        if relay is None:
            raise ConfigError(
                f"{identity.member.name} has no endpoint, so that no other member can reach it: "
                "give --relay, a folder or the member file of a relay"
            )
    if relay is None:
        return Https(federation, identity, listen=listen)
    place, name = Path(relay), identity.member.name
    mailbox: Mailbox
    if place.is_dir():
        names = (member.name for member in federation.members.values())
        mailbox = FolderMailbox(place, names, owner=name)
    else:
        mailbox = RelayMailbox(Member.read(place), identity)
    direct = Https(federation, identity, listen=listen)
    relayed = Relayed(federation, identity, mailbox, is_checking=is_checking, on_removal=on_removal)
    return Mixed(direct, relayed)
