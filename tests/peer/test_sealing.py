"""Sealed messages: who opens them, replays, forged cards."""

import pytest
from tests.peer import members
from tests.peer.relays import CARD_BYTES, SealedKind, Session, behind_nat

from fedcb2o.peer.wire import sealing
from fedcb2o.peer.wire.protocol import MalformedError
from fedcb2o.peer.wire.sealing import Replays


@pytest.fixture
def sessions(federation_of_three):
    orgs, federation = federation_of_three
    return [Session(federation, identity) for identity in orgs]


def seal_request(sender: Session, receiver: Session, content: bytes = b"question") -> bytes:
    card = sender.read_card(receiver.card(1))
    return sender.seal(card, SealedKind.REQUEST, 7, content)


def test_a_sealed_message_is_opened_once_and_by_its_receiver_only(sessions):
    first, second, third = sessions
    message = seal_request(first, second)
    assert b"question" not in message
    question = second.open(message)
    assert (question.content, question.id, question.card.agent) == (b"question", 7, 0)
    with pytest.raises(MalformedError, match="replay"):
        second.open(message)
    with pytest.raises(MalformedError, match="receiver"):
        third.open(message)
    answer = second.seal(question.card, SealedKind.ANSWER, 7, b"answer")
    assert first.open(answer).content == b"answer"
    with pytest.raises(MalformedError):  # sent back to its sender
        first.open(message)


def test_cards_without_a_valid_seal_displace_no_session(federation_of_three, sessions, monkeypatch):
    monkeypatch.setattr(sealing, "_MAX_SESSIONS", 2)
    first, second, _ = sessions
    message = seal_request(first, second)
    second.open(message)
    for _ in range(3):  # former sessions of the same member
        former = Session(federation_of_three[1], federation_of_three[0][0])
        broken = bytearray(seal_request(former, second))
        broken[-1] ^= 1
        with pytest.raises(MalformedError, match="seal"):
            second.open(bytes(broken))
    with pytest.raises(MalformedError, match="replay"):
        second.open(message)


def test_every_changed_byte_is_refused(sessions):
    first, second, _ = sessions
    second.introduce(second.read_card(first.card(1)))
    message = seal_request(first, second)
    for position in range(len(message)):
        changed = bytearray(message)
        changed[position] ^= 1
        with pytest.raises(MalformedError):
            second.open(changed)
    for cut in (0, 10, CARD_BYTES, len(message) - 1):
        with pytest.raises(MalformedError):
            second.open(message[:cut])
    assert second.open(message).content == b"question"


def test_messages_may_arrive_out_of_order_but_not_in_a_new_session(sessions, federation_of_three):
    first, second, _ = sessions
    messages = [seal_request(first, second, b"%d" % k) for k in range(5)]
    assert [second.open(message).content for message in reversed(messages)] == [
        b"%d" % k for k in (4, 3, 2, 1, 0)
    ]
    orgs, federation = federation_of_three
    restarted = Session(federation, orgs[1])
    with pytest.raises(MalformedError, match="seal"):
        restarted.open(seal_request(first, second))


def test_only_cards_of_members_of_this_run_are_accepted(sessions, tmp_path):
    first, second, _ = sessions
    strangers = behind_nat(tmp_path, 3)
    other = Session(members.federated(strangers), strangers[1])
    with pytest.raises(MalformedError):
        first.read_card(other.card(1))
    with pytest.raises(MalformedError, match="member"):
        first.read_card(first.card(1))
    forged = bytearray(second.card(1))
    forged[41] = 2  # the id of another member
    with pytest.raises(MalformedError, match="signature"):
        first.read_card(forged)


def test_a_window_of_1024_numbers_detects_replays():
    replays = Replays()
    assert all(replays.accept(2 * k) for k in range(2000))
    assert not replays.accept(3998)
    assert replays.accept(3997)
    assert not replays.accept(1)  # older than the window
