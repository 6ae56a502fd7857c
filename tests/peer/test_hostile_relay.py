"""Hostile relays cost a node little, and hostile members cost a relay little."""

import logging
import secrets
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress

import pytest
from tests.peer import members, relays
from tests.peer.relays import (
    CARD_BYTES,
    FolderMailbox,
    FormerMemberError,
    Relayed,
    RelayMailbox,
    SealedKind,
    Session,
)
from tests.peer.waiting import wait_for

from fedcb2o.peer import Identity, Member
from fedcb2o.peer.wire import relay as relay_module
from fedcb2o.peer.wire import relayed
from fedcb2o.peer.wire.protocol import Answer, AnswerStatus, MalformedError
from fedcb2o.peer.wire.relay import Relay

BOX = f"org-0/{'0' * 32}"
NAMES = ("org-0", "org-1", "org-2")
ANSWER = Answer(AnswerStatus.OK, b"answer")


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Return three organisations without endpoints, and their federation."""
    folder = tmp_path_factory.mktemp("three")
    orgs = [
        Identity.make(folder / f"org-{j}", name=f"org-{j}", endpoint=f"org-{j}.invalid:1")
        for j in range(3)
    ]
    return orgs, members.federated(orgs)


@pytest.fixture
def relay(three, tmp_path):
    """Return a relay and the identity of its operator."""
    identity = relays.relay_identity(tmp_path)
    with Relay(three[1], identity, folder=tmp_path / "relay") as one:
        yield one, identity.member


class Hostile:
    """Mailbox of a relay that does what a test says, without a network."""

    def __init__(self, cards=dict, take=list):
        self._cards, self._take = cards, take
        self.calls = Counter()
        self.times = []  # processor time and time of the thread that takes messages

    def publish_card(self, name, card):
        pass

    def cards(self):
        self.calls["cards"] += 1
        return self._cards()

    def put(self, box, message, seconds):
        pass

    def take(self, box, seconds):
        self.calls["take"] += 1
        self.times.append((time.thread_time(), time.monotonic()))
        return self._take()

    def close(self):
        pass


def raise_former(content):
    raise FormerMemberError(content)


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_versions_that_a_relay_shows_again_and_again_are_read_once(three, monkeypatch, seconds):
    """The relay shows the same bytes, or other bytes that take long to read."""
    readings = []

    def read(federation, member, content):
        readings.append(content)
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass
        return ""

    monkeypatch.setattr(relayed, "removal_notice", read)
    monkeypatch.setattr(relayed, "_FORMER_SECONDS", 0.01)
    monkeypatch.setattr(relayed, "_RETRY_SECONDS", 0.01)
    mailbox = Hostile(
        cards=lambda: raise_former(secrets.token_bytes(100) if seconds else b"same"),
        take=lambda: raise_former(secrets.token_bytes(100) if seconds else b"same"),
    )
    with Relayed(three[1], three[0][0], mailbox):
        wait_for(lambda: mailbox.calls.total() > 100)
    assert len(readings) == 1


def test_only_cards_of_other_members_are_verified(three, monkeypatch):
    cards = {f"org-9{k}.run": secrets.token_bytes(CARD_BYTES) for k in range(20_000)}
    cards |= {f"{name}.{kind}": secrets.token_bytes(CARD_BYTES) for name in NAMES for kind in
              ("run", "check", "other")}  # fmt: skip
    verified = []
    read_card = Session.read_card

    def read(session, data):
        verified.append(data)
        return read_card(session, data)

    monkeypatch.setattr(Session, "read_card", read)
    mailbox = Hostile(cards=lambda: cards, take=lambda: time.sleep(0.1) or [])
    with Relayed(three[1], three[0][0], mailbox):
        wait_for(lambda: mailbox.calls["cards"] >= 3)
    assert len(verified) <= 4 * mailbox.calls["cards"]


def forged(session, receiver, card):
    """Return a message of a session with another card."""
    message = bytearray(
        session.seal(session.read_card(receiver.card(1)), SealedKind.REQUEST, 1, b"x")
    )
    message[34 : 34 + CARD_BYTES] = card
    return bytes(message)


@pytest.mark.parametrize("kind", ["forged", "recorded"])
def test_forged_messages_cause_few_verifications_and_delay_no_known_session(
    three, monkeypatch, kind
):
    """A relay repeats cards of former sessions, or makes some up."""
    orgs, federation = three
    first, second = (Session(federation, one) for one in orgs[:2])
    second.introduce(second.read_card(first.card(1)))
    honest = first.seal(first.read_card(second.card(1)), SealedKind.REQUEST, 7, b"question")
    cards = [Session(federation, orgs[0]).card(0) for _ in range(300)]
    if kind == "forged":
        cards = [card[:-64] + secrets.token_bytes(64) for card in cards]
    messages = [forged(first, second, card) for card in cards]
    work = Counter()
    verify, derive = Member.verify, Session._new_channel
    monkeypatch.setattr(Member, "verify", lambda *args: work.update(["verify"]) or verify(*args))
    monkeypatch.setattr(
        Session, "_new_channel", lambda *args: work.update(["derive"]) or derive(*args)
    )
    for message in messages:
        with pytest.raises(MalformedError):
            second.open(message)
    assert 0 < work["verify"] < 100
    assert work["derive"] < 100
    assert second.open(honest).content == b"question"


@pytest.mark.parametrize("messages", [[], [b""] * 1024, [bytes(2**21)]])
def test_useless_replies_at_full_speed_use_a_small_share_of_a_processor(three, messages):
    mailbox = Hostile(take=lambda: messages)
    with Relayed(three[1], three[0][0], mailbox):
        wait_for(lambda: mailbox.times and mailbox.times[-1][1] - mailbox.times[0][1] > 1.0)
    (cpu_0, time_0), (cpu_1, time_1) = mailbox.times[0], mailbox.times[-1]
    assert (cpu_1 - cpu_0) / (time_1 - time_0) < 0.5


def test_requests_that_are_turned_away_wait_and_get_few_answers(three):
    """Otherwise a member's flood costs its receiver an encrypted answer for each request."""
    orgs, federation = three
    first, answers = Session(federation, orgs[0]), []
    messages = []
    mailbox = Hostile(take=lambda: [messages.pop() for _ in messages[-100:]])
    mailbox.put = lambda box, message, seconds: answers.append(box)
    with Relayed(federation, orgs[1], mailbox) as second:
        card = first.read_card(second._session.card(1))
        for _ in range(2000):
            messages.append(first.seal(card, SealedKind.REQUEST, 1, b"question"))
        mailbox.times.clear()
        second.serve(lambda request, reply: "rate")
        wait_for(lambda: not messages)
        (cpu_0, time_0), (cpu_1, time_1) = mailbox.times[0], mailbox.times[-1]
    assert (cpu_1 - cpu_0) / (time_1 - time_0) < 0.5
    assert len(answers) <= 64 + 4 * (time_1 - time_0 + 1)


def test_a_relay_that_fails_now_and_then_causes_few_log_lines(three, monkeypatch, caplog):
    monkeypatch.setattr(relayed, "_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(relayed, "_CARD_SECONDS", 0.001)

    def fail():
        if mailbox.calls["cards"] % 2:
            raise OSError(f"reason {mailbox.calls['cards']}")
        return {}

    mailbox = Hostile(cards=fail, take=lambda: time.sleep(0.1) or [])
    with caplog.at_level(logging.INFO), Relayed(three[1], three[0][0], mailbox):
        wait_for(lambda: mailbox.calls["cards"] > 200)
    assert 1 <= len(caplog.records) < 10


def test_a_single_failure_of_the_relay_ends_no_request(three, tmp_path, monkeypatch):
    monkeypatch.setattr(relayed, "_OUTAGE_SECONDS", 3600.0)
    orgs, federation = three
    with ExitStack() as stack:
        first, second, _ = relays.relayed("folder", orgs, federation, tmp_path, stack)
        asked, may_answer = threading.Event(), threading.Event()

        def answer(request, reply):
            asked.set()
            threading.Thread(target=lambda: may_answer.wait(120) and reply(ANSWER)).start()

        second.serve(answer)
        wait_for(lambda: 1 in first.connected_peers())
        answers = []
        pending = first.ask(1, b"question", 3600.0)
        thread = threading.Thread(target=lambda: answers.append(pending.answer()))
        thread.start()
        assert asked.wait(120)
        failures = []
        cards = first.mailbox.cards

        def fail_once():
            if not failures:
                failures.append(1)
                raise FormerMemberError(b"")
            return cards()

        monkeypatch.setattr(first.mailbox, "cards", fail_once)
        wait_for(lambda: bool(failures))
        time.sleep(0.1)
        may_answer.set()
        thread.join(120)
        assert [bytes(one.body) for one in answers] == [b"answer"]


def test_requests_whose_answers_are_never_read_are_forgotten(three, tmp_path):
    orgs, federation = three
    with ExitStack() as stack:
        first, second, _ = relays.relayed("folder", orgs, federation, tmp_path, stack)
        second.serve(lambda request, reply: None)
        wait_for(lambda: 1 in first.connected_peers())
        for _ in range(10):
            first.ask(1, b"question", 0.5)
        wait_for(lambda: not first._waiting)


def test_long_replies_of_a_relay_are_bounded(three, relay, monkeypatch):
    one, member = relay
    mailbox = RelayMailbox(member, three[0][0])
    monkeypatch.setattr(one, "_all_cards", lambda: bytes(2**23))
    with pytest.raises(OSError, match="too long"):
        mailbox.cards()
    monkeypatch.setattr(one, "_all_cards", lambda: bytes(2**14))
    assert len(mailbox.cards()) <= 1  # empty names
    monkeypatch.setattr(one, "_take", lambda *args: [b""] * 2**13)
    assert len(mailbox.take(BOX, 0.0)) == 1024
    mailbox.close()


def test_empty_messages_fill_a_box(three, relay):
    first, second, third = (RelayMailbox(relay[1], one) for one in three[0])
    first.take(BOX, 0.0)
    for _ in range(128):
        second.put(BOX, b"", 60.0)
    with pytest.raises(OSError, match=r"."):  # full, or too late on a busy machine
        second.put(BOX, b"", 0.04)
    third.put(BOX, b"third", 60.0)
    assert len(first.take(BOX, 1.0)) == 129
    second.put(BOX, b"", 60.0)  # there is room again
    for one in (first, second, third):
        one.close()


def test_the_folder_is_read_once_between_two_takes(three, relay, monkeypatch):
    readings = []
    stored_bytes = FolderMailbox.stored_bytes

    def read(mailbox, box, sender):
        readings.append((box, sender))
        return stored_bytes(mailbox, box, sender)

    monkeypatch.setattr(FolderMailbox, "stored_bytes", read)
    first, second = (RelayMailbox(relay[1], one) for one in three[0][:2])
    first.take(BOX, 0.0)
    for _ in range(50):
        second.put(BOX, b"message", 60.0)
    assert readings == [(BOX, "org-1")]
    first.take(BOX, 1.0)
    second.put(BOX, b"message", 60.0)
    assert readings == [(BOX, "org-1")] * 2
    first.close()
    second.close()


def test_sums_are_right_after_a_restart_and_a_take(three, tmp_path, monkeypatch):
    monkeypatch.setattr(relay_module, "_MAX_STORED_BYTES", 2**20)
    content = bytes(2**19)
    names = ["org-1", "org-1", "org-1", "org-2"]
    store = tmp_path / "store"
    with Relay(three[1], relays.relay_identity(tmp_path / "a"), folder=store) as one:
        one._take("org-0", BOX, 0.0)
        one._keep_box("org-0", BOX)
        assert [one._store(name, BOX, content)[0] for name in names] == [200, 200, 429, 200]
    with Relay(three[1], relays.relay_identity(tmp_path / "b"), folder=store) as restarted:
        restarted._keep_box("org-0", BOX)
        assert [restarted._store(name, BOX, content)[0] for name in names[2:]] == [429, 200]
        assert len(restarted._take("org-0", BOX, 0.0)) == 4
        codes = [restarted._store(name, BOX, content)[0] for name in names]
        assert codes == [200, 200, 429, 200]
        assert restarted.counts()["full"] == 2


def test_a_member_that_asks_the_relay_at_full_speed_waits(three, tmp_path, monkeypatch):
    monkeypatch.setattr(relay_module, "_BURST", 5)
    monkeypatch.setattr(relay_module, "_PER_SECOND", 20)
    identity = relays.relay_identity(tmp_path)
    with Relay(three[1], identity):
        mailbox = RelayMailbox(identity.member, three[0][0])
        start = time.monotonic()
        for _ in range(10):
            mailbox.federation()
            mailbox.publish_card("org-0.run", bytes(CARD_BYTES))
            mailbox.cards()
        assert time.monotonic() - start > 1.0
        mailbox.close()


def test_few_requests_of_a_member_wait_for_messages(three, relay):
    mailbox = RelayMailbox(relay[1], three[0][0])
    ended = []

    def take():
        with suppress(OSError):  # the relay may close its connections first
            ended.append(mailbox.take(BOX, 30.0))

    threads = [threading.Thread(target=take) for _ in range(10)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(ended) == 6)
    time.sleep(0.2)
    assert len(ended) == 6
    relay[0].close()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    mailbox.close()
