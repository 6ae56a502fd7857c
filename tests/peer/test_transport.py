"""Transports: common behaviour, and TLS over real links on loopback."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import zenoh
from tests.peer import raw, relays
from tests.peer.members import federated, free_ports, identities
from tests.peer.proxy import Proxy
from tests.peer.wire import Wire
from tests.tiny import ENVIRONMENT

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.peer.membership import Federation, Identity
from fedcb2o.peer.membership import federation as federations
from fedcb2o.peer.wire import Reply, RequestHandler, Transport, Zenoh, _transport
from fedcb2o.peer.wire._transport import MAX_ANSWER_BYTES, MAX_ANSWERS, MAX_REQUEST_BYTES


@pytest.fixture(scope="module")
def organisations(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Identity], Federation]:
    """Four of them, whose addresses are used by one test at a time."""
    who = identities(tmp_path_factory.mktemp("organisations"), 4)
    return who, federated(who)


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture(params=["zenoh", "wire", "folder", "relay"])
def three(
    request: Any, organisations: Any, opened: contextlib.ExitStack, tmp_path: Path
) -> list[Transport]:
    """Three agents that are linked, on every transport."""
    if request.param == "wire":
        wire = Wire()
        return [wire.agent(id) for id in range(3)]
    who, federation = organisations
    if request.param == "zenoh":
        made = [opened.enter_context(Zenoh(federation, identity)) for identity in who[:3]]
    else:
        made = relays.relayed(request.param, who[:3], federation, tmp_path, opened)
    for id, one in enumerate(made):
        until(lambda one=one, id=id: one.connected_peers() == {0, 1, 2} - {id})
    return made


def until(what: Callable[[], Any], seconds: float = 10) -> Any:
    """The first result of `what()` that is true; fails where there is none in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if result := what():
            return result
        time.sleep(0.005)
    raise AssertionError(f"not within {seconds} seconds")


def answering(text: bytes = b"heard ") -> RequestHandler:
    def hear(request: bytes, reply: Reply) -> None:
        threading.Thread(target=reply, args=(text + request,), daemon=True).start()

    return hear


def test_a_request_is_answered_by_the_one_that_was_asked(three: list[Transport]) -> None:
    for id, one in enumerate(three):
        one.serve(answering(b"agent %d heard " % id))
    until(lambda: list(three[0].ask(1, b"?", 5.0)))
    until(lambda: list(three[0].ask(2, b"?", 5.0)))
    assert list(three[0].ask(1, b"hello", 5.0)) == [b"agent 1 heard hello"]
    assert list(three[0].ask(2, b"", 5.0)) == [b"agent 2 heard "]
    assert list(three[0].ask(0, b"myself", 5.0)) == []
    assert list(three[0].ask(99, b"nobody", 5.0)) == []


def test_requests_of_many_threads_do_not_mix(
    three: list[Transport], pool: ThreadPoolExecutor
) -> None:
    large = os.urandom(2**20)
    three[1].serve(lambda request, reply: pool.submit(reply, request + large))
    until(lambda: list(three[0].ask(1, b"?", 5.0)))
    asked = {
        k: three[k % 2 * 2].ask(1, b"%d " % k, 20.0) for k in range(24)
    }  # all sent before one is answered
    assert {k: list(answers) for k, answers in asked.items()} == {
        k: [b"%d " % k + large] for k in asked
    }


def test_no_answer_ends_the_wait(three: list[Transport]) -> None:
    kept = []
    three[1].serve(lambda request, reply: kept.append(reply))
    until(lambda: list(three[0].ask(1, b"?", 0.1)) or kept)
    start = time.monotonic()
    waiting = three[0].ask(1, b"never", 0.3)
    time.sleep(0.2)
    assert list(waiting) == []  # the time counts from when it was sent
    assert 0.25 < time.monotonic() - start < 3
    for reply in kept:
        reply(b"too late, and to nobody")
    kept.clear()
    asked = three[0].ask(1, b"empty", 20.0)
    until(lambda: kept)[0](b"")
    start = time.monotonic()
    assert list(asked) == []
    assert time.monotonic() - start < 5


def test_a_closed_one_is_no_longer_there(three: list[Transport]) -> None:
    three[1].serve(answering())
    until(lambda: list(three[0].ask(1, b"?", 5.0)))
    three[1].close()
    three[1].close()
    until(lambda: 1 not in three[0].connected_peers())
    start = time.monotonic()
    assert list(three[0].ask(1, b"hello", 20.0)) == []
    assert list(three[1].ask(0, b"hello", 20.0)) == []
    assert three[1].connected_peers() == frozenset()
    assert time.monotonic() - start < 5


def test_a_wire_loses_what_it_is_told_to() -> None:
    wire = Wire(lost=0.5, seed=1)
    one, other = wire.agent(0), wire.agent(1)
    other.serve(answering())
    asked = [one.ask(1, b"?", 0.3) for _ in range(40)]
    assert 4 < sum(len(list(each)) for each in asked) < 20  # both ways of each


def linked(opened: contextlib.ExitStack, organisations: Any, *ids: int) -> list[Zenoh]:
    """Agents that answer, and have links to each other."""
    who, federation = organisations
    made = {id: opened.enter_context(Zenoh(federation, who[id])) for id in ids}
    for id, one in made.items():
        one.serve(answering(b"agent %d heard " % id))
    for id, one in made.items():
        for other in set(ids) - {id}:
            until(lambda one=one, other=other: list(one.ask(other, b"?", 5.0)))
    return list(made.values())


def test_no_member_answers_for_another(organisations: Any, opened: contextlib.ExitStack) -> None:
    who, federation = organisations
    one, other = linked(opened, organisations, 0, 1)
    places = [f"tls/{who[id].member.endpoint}" for id in (0, 1)]
    liar = opened.enter_context(raw.member(who[2], federation, connect__endpoints=places))
    until(lambda: len(liar.info.links()) == 2)

    def lie(query: zenoh.Query) -> None:
        with query, contextlib.suppress(zenoh.ZError):
            query.reply(query.key_expr, b"a lie")

    for key in ("fedcb2o/agents/1", "fedcb2o/agents/3", "fedcb2o/agents/*", "**"):
        liar.declare_queryable(key, zenoh.handlers.Callback(lie, indirect=False), complete=True)
        liar.liveliness().declare_token(key.replace("*", "x"))
    time.sleep(0.2)
    assert list(one.ask(1, b"hello", 5.0)) == [b"agent 1 heard hello"]
    assert list(one.ask(3, b"hello", 5.0)) == list(other.ask(3, b"hello", 5.0)) == []
    assert one.connected_peers() == {1}
    assert other.connected_peers() == {0}


def test_no_member_takes_the_place_of_another(
    organisations: Any, opened: contextlib.ExitStack
) -> None:
    who, federation = organisations
    one, _ = linked(opened, organisations, 0, 1)
    thief = opened.enter_context(
        raw.member(who[2], federation, listen__endpoints=[f"tls/{who[3].member.endpoint}"])
    )
    thief.declare_queryable("fedcb2o/agents/3", lambda query: query.drop())
    time.sleep(1)  # enough for links to the others
    assert one.connected_peers() == {1}


def test_a_member_asks_nobody_through_another(
    organisations: Any, opened: contextlib.ExitStack
) -> None:
    who, federation = organisations
    linked(opened, organisations, 0, 1)
    nosy = opened.enter_context(
        raw.member(who[2], federation, connect__endpoints=[f"tls/{who[0].member.endpoint}"])
    )
    heard = []
    remote = zenoh.Locality.REMOTE
    nosy.declare_subscriber(
        "**", zenoh.handlers.Callback(heard.append, indirect=False), allowed_origin=remote
    )
    until(lambda: nosy.info.links())
    until(
        lambda: [
            reply for reply in nosy.get("fedcb2o/agents/0", payload=b"?", timeout=5) if reply.ok
        ]
    )
    assert [
        reply for reply in nosy.get("fedcb2o/agents/1", payload=b"?", timeout=5) if reply.ok
    ] == []
    assert [
        reply.ok.payload.to_bytes()
        for reply in nosy.get("fedcb2o/**", payload=b"?", timeout=5)
        if reply.ok
    ] == []
    assert heard == []


@pytest.mark.parametrize("kind", ["another root", "no certificate", "no TLS", "silence"])
def test_strangers_are_kept_out(
    kind: str, organisations: Any, opened: contextlib.ExitStack, tmp_path: Path
) -> None:
    who, federation = organisations
    one, other = linked(opened, organisations, 0, 1)
    host, _, port = who[0].member.endpoint.partition(":")
    if kind == "silence":
        for _ in range(100):
            opened.enter_context(socket.create_connection((host, int(port))))
    elif kind == "no TLS":
        with socket.create_connection((host, int(port)), timeout=5) as stranger:
            stranger.sendall(bytes(1000))
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(100)[:1] in (b"", b"\x15")  # closed, or a TLS alert
    else:
        outsider = Identity.make(
            tmp_path / "out", name=who[1].member.name, endpoint=who[1].member.endpoint
        )
        extra = {"transport__link__tls__enable_mtls": False} if kind == "no certificate" else {}
        place = [f"tls/{who[0].member.endpoint}"]
        stranger = opened.enter_context(
            raw.member(outsider, federation, connect__endpoints=place, **extra)
        )
        time.sleep(0.5)
        assert not [
            reply for reply in stranger.get("fedcb2o/agents/0", payload=b"?", timeout=1) if reply.ok
        ]
    assert list(other.ask(0, b"hello", 5.0)) == [b"agent 0 heard hello"]
    other.close()
    (again,) = linked(opened, organisations, 1)
    assert until(lambda: list(again.ask(0, b"again", 5.0))) == [b"agent 0 heard again"]
    assert until(lambda: list(one.ask(1, b"again", 5.0))) == [b"agent 1 heard again"]


def test_what_is_too_large_or_too_much_is_dropped(
    organisations: Any, opened: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its link with it, which is opened again after a pause."""
    monkeypatch.setattr(_transport, "_ABUSE_PAUSE", 0.1)
    who, federation = organisations
    (one,) = linked(opened, organisations, 0)
    many = {
        b"large": [bytes(MAX_ANSWER_BYTES + 2**17)],
        b"largest": [bytes(2**20 + 2**19)],
        b"many": [b"x"] * 2000,
    }
    wild = opened.enter_context(
        raw.member(who[1], federation, listen__endpoints=[f"tls/{who[1].member.endpoint}"])
    )

    def flood(query: zenoh.Query) -> None:
        with query:
            for answer in many.get(query.payload.to_bytes(), [b"fine"]):
                query.reply("fedcb2o/agents/1", answer)

    wild.declare_queryable("fedcb2o/agents/1", flood)
    until(lambda: list(one.ask(1, b"?", 5.0)))
    assert [len(answer) for answer in one.ask(1, b"largest", 5.0)] == [2**20 + 2**19]
    assert list(one.ask(1, b"large", 5.0)) == []
    until(lambda: list(one.ask(1, b"then", 5.0)) == [b"fine"])
    assert list(one.ask(1, b"many", 5.0)) == [b"x"] * MAX_ANSWERS
    until(lambda: not one.connected_peers())
    until(lambda: list(one.ask(1, b"then", 5.0)) == [b"fine"])

    asking = opened.enter_context(
        raw.member(who[2], federation, connect__endpoints=[f"tls/{who[0].member.endpoint}"])
    )
    until(
        lambda: [
            reply for reply in asking.get("fedcb2o/agents/0", payload=b"?", timeout=5) if reply.ok
        ]
    )
    got = asking.get("fedcb2o/agents/0", payload=bytes(2**24 + MAX_REQUEST_BYTES), timeout=0.5)
    assert [reply for reply in got if reply.ok] == []
    until(  # its link was closed
        lambda: [
            reply for reply in asking.get("fedcb2o/agents/0", payload=b"?", timeout=5) if reply.ok
        ]
    )


def test_what_cannot_be_heard_is_not_the_end(
    organisations: Any, opened: contextlib.ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    who, federation = organisations
    one, other = (opened.enter_context(Zenoh(federation, identity)) for identity in who[:2])

    def hear(request: bytes, reply: Reply) -> None:
        reply(b"%d" % (1 // len(request)))

    other.serve(hear)
    assert until(lambda: list(one.ask(1, b"1", 5.0))) == [b"1"]
    assert list(one.ask(1, b"", 5.0)) == []
    assert list(one.ask(1, b"22", 5.0)) == [b"0"]
    assert "a request could not be handled" in caplog.text


def through(
    proxy: Proxy, port: int, folder: Path, opened: contextlib.ExitStack, hear: RequestHandler
) -> tuple[Zenoh, Zenoh]:
    """An agent that answers behind a proxy, and one that asks it."""
    served = Identity.make(folder / "served", name="served", endpoint=f"127.0.0.1:{proxy.port}")
    (asking,) = identities(folder, 1)
    federation = federated([asking, served])
    other = opened.enter_context(Zenoh(federation, served, listen=f"127.0.0.1:{port}"))
    other.serve(hear)
    one = opened.enter_context(Zenoh(federation, asking, listen=False))
    until(lambda: list(one.ask(1, b"?", 5.0)))
    return one, other


def test_a_bad_line(tmp_path: Path, opened: contextlib.ExitStack, pool: ThreadPoolExecutor) -> None:
    (port,) = free_ports(1)
    proxy = opened.enter_context(Proxy(port, rate=4e6))
    chunk = os.urandom(2**20)
    one, _ = through(
        proxy, port, tmp_path, opened, lambda request, reply: pool.submit(reply, request + chunk)
    )
    start = time.monotonic()
    asked = [one.ask(1, b"%d" % k, 30.0) for k in range(4)]
    assert [list(answers) for answers in asked] == [[b"%d" % k + chunk] for k in range(4)]
    assert time.monotonic() - start > 0.7  # 4 MiB at 4 MB a second
    proxy.rate = None

    proxy.pause()
    start = time.monotonic()
    assert list(one.ask(1, b"?", 0.3)) == []
    assert time.monotonic() - start < 3
    proxy.resume()
    assert until(lambda: list(one.ask(1, b"?", 5.0)))

    before = proxy.connections
    proxy.cut()
    until(lambda: proxy.connections > before and list(one.ask(1, b"?", 5.0)))
    proxy.pause()
    start = time.monotonic()
    one.close()
    assert time.monotonic() - start < 5
    proxy.resume()


def test_a_slow_reader_delays_nobody_else(organisations: Any, opened: contextlib.ExitStack) -> None:
    """One agent asks for 32 MiB and reads nothing; each waiting answer holds one thread."""
    who, federation = organisations
    one, other = (opened.enter_context(Zenoh(federation, identity)) for identity in who[:2])
    left = []

    def hear(request: bytes, reply: Reply) -> None:
        def answer() -> None:
            reply(bytes(2**20))
            left.append(request)

        threading.Thread(target=answer, daemon=True).start()

    one.serve(hear)
    proxy = opened.enter_context(Proxy(int(who[0].member.endpoint.partition(":")[2])))
    slow = opened.enter_context(
        raw.member(who[2], federation, connect__endpoints=[f"tls/127.0.0.1:{proxy.port}"])
    )
    until(lambda: list(other.ask(0, b"quick", 5.0)))
    until(
        lambda: [
            reply for reply in slow.get("fedcb2o/agents/0", payload=b"?", timeout=5) if reply.ok
        ]
    )
    proxy.rate = 1
    for _ in range(32):
        slow.get(
            "fedcb2o/agents/0",
            payload=b"slow",
            congestion_control=zenoh.CongestionControl.BLOCK,
            timeout=60,
        )
    time.sleep(0.5)
    start = time.monotonic()
    assert [len(answer) for answer in other.ask(0, b"quick", 20.0)] == [2**20]
    assert time.monotonic() - start < 5
    assert left.count(b"slow") < 32
    start = time.monotonic()
    one.close()
    assert time.monotonic() - start < _transport.CLOSE_SECONDS + 2


def test_where_it_cannot_listen(organisations: Any, opened: contextlib.ExitStack) -> None:
    who, federation = organisations
    opened.enter_context(Zenoh(federation, who[0]))
    for listen, error, told in (
        (True, RunError, "the port is in use; is another peer running"),
        ("192.0.2.1:7447", RunError, "no address of this machine"),
        ("nonsense", ConfigError, "must be HOST:PORT"),
        ("127.0.0.1:80000", ConfigError, "must be HOST:PORT"),
    ):
        with pytest.raises(error, match=told) as caught:
            Zenoh(federation, who[0], listen=listen)
        assert "\n" not in str(caught.value)
    with (
        opened.enter_context(Zenoh(federation, who[0], listen=False)) as asking,
        pytest.raises(RunError, match="listen"),
    ):
        asking.serve(answering())


def test_one_that_is_no_member_or_has_expired(organisations: Any, tmp_path: Path) -> None:
    _, federation = organisations
    (stranger,) = identities(tmp_path, 1)
    with pytest.raises(ConfigError):
        Zenoh(federation, stranger)
    now = datetime.now(UTC)
    stranger.renew(now=now - timedelta(days=3), until=now - timedelta(days=1))
    with pytest.raises(ConfigError, match="expired"):
        Zenoh(federation, stranger)


def test_links_take_addresses_of_both_versions(
    tmp_path: Path, opened: contextlib.ExitStack
) -> None:
    (here,) = identities(tmp_path, 1)
    (port,) = free_ports(1)
    there = Identity.make(tmp_path / "there", name="there", endpoint=f"[::1]:{port}")
    federation = federated([here, there])
    one = opened.enter_context(Zenoh(federation, here))
    other = opened.enter_context(Zenoh(federation, there))
    other.serve(answering())
    assert until(lambda: list(one.ask(1, b"?", 5.0))) == [b"heard ?"]


def test_closing_waits_for_all_that_would_come_back_into_python(
    organisations: Any, opened: contextlib.ExitStack
) -> None:
    """A thread that does so while Python ends aborts the process."""
    who, federation = organisations
    one, other = (opened.enter_context(Zenoh(federation, identity)) for identity in who[:2])
    kept: list[Reply] = []
    other.serve(lambda request, reply: kept.append(reply))
    until(lambda: list(one.ask(1, b"?", 0.1)) or kept)
    waiting = [one.ask(1, b"?", 60.0) for _ in range(20)]
    one.close()
    other.close()
    assert "fedcb2o-hear" not in [thread.name for thread in threading.enumerate()]
    assert [list(answers) for answers in waiting] == [[]] * 20


@pytest.mark.slow
def test_a_program_that_forgets_to_close_ends_in_silence(
    organisations: Any, tmp_path: Path
) -> None:
    """While it dials one that is not there and one that never answers."""
    who, federation = organisations
    federations.write_federation(federation, tmp_path / "federation.toml")
    program = (
        "import sys, time; from fedcb2o.peer import Identity, read_federation;"
        "from fedcb2o.peer.wire import Zenoh;"
        "one = Zenoh(read_federation(sys.argv[1]), Identity.read(sys.argv[2]));"
        "one.serve(lambda request, reply: None);"
        "two = one.ask(1, b'?', 60.0); time.sleep(0.3); raise KeyboardInterrupt"
    )
    host, _, port = who[1].member.endpoint.partition(":")
    with socket.create_server((host, int(port))):
        ended = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "federation.toml"), str(who[0].folder)],
            env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert ended.stderr.strip().splitlines()[-1] == "KeyboardInterrupt"
    assert ended.returncode in (-2, 130)
    assert ended.stdout == ""


@pytest.mark.slow
def test_a_certificate_that_ends_ends_its_links(
    organisations: Any, opened: contextlib.ExitStack
) -> None:
    who, _ = organisations
    now = datetime.now(UTC)
    who[1].renew(now=now - timedelta(days=2), until=now + timedelta(seconds=5))
    one, other, third = linked(opened, organisations, 0, 1, 2)
    until(lambda: one.connected_peers() == {2} and not other.connected_peers(), 15)
    assert list(third.ask(0, b"hello", 5.0)) == [b"agent 0 heard hello"]
    who[1].renew()
    until(
        lambda: list(other.ask(0, b"again", 5.0))
    )  # it asks at once with the new one, and is asked when it starts again
    other.close()
    linked(opened, organisations, 1)
    until(lambda: list(one.ask(1, b"again", 5.0)))
