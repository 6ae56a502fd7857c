"""Transports: common behaviour, and TLS over real links on loopback."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import zenoh
from tests.peer import raw, relays
from tests.peer.members import federated, free_ports, identities
from tests.peer.proxy import Proxy
from tests.peer.waiting import wait_for
from tests.peer.wire import Wire
from tests.tiny import ENVIRONMENT

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.peer.membership import Federation, Identity
from fedcb2o.peer.membership import federation as federations
from fedcb2o.peer.wire import Reply, RequestHandler, Transport, Zenoh, _transport
from fedcb2o.peer.wire._transport import MAX_ANSWER_BYTES, MAX_ANSWERS, MAX_REQUEST_BYTES


@pytest.fixture(scope="module")
def organisations(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Identity], Federation]:
    """Four organisations, whose addresses are used by one test at a time."""
    orgs = identities(tmp_path_factory.mktemp("organisations"), 4)
    return orgs, federated(orgs)


@pytest.fixture
def exit_stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture(params=["zenoh", "wire", "folder", "relay"])
def transports(
    request: Any, organisations: Any, exit_stack: contextlib.ExitStack, tmp_path: Path
) -> list[Transport]:
    """Three linked agents on each kind of transport."""
    if request.param == "wire":
        wire = Wire()
        return [wire.agent(id) for id in range(3)]
    orgs, federation = organisations
    if request.param == "zenoh":
        linked_transports = [
            exit_stack.enter_context(Zenoh(federation, identity)) for identity in orgs[:3]
        ]
    else:
        linked_transports = relays.relayed(
            request.param, orgs[:3], federation, tmp_path, exit_stack
        )
    for id, transport in enumerate(linked_transports):
        wait_for(lambda transport=transport, id=id: transport.connected_peers() == {0, 1, 2} - {id})
    return linked_transports


FOREVER = 3600.0  # seconds, longer than a test may take


def answering(text: bytes = b"heard ") -> RequestHandler:
    def handle(request: bytes, reply: Reply) -> None:
        threading.Thread(target=reply, args=(text + request,), daemon=True).start()

    return handle


def test_a_request_is_answered_by_the_asked_agent(transports: list[Transport]) -> None:
    for id, transport in enumerate(transports):
        transport.serve(answering(b"agent %d heard " % id))
    wait_for(lambda: list(transports[0].ask(1, b"?", 5.0)))
    wait_for(lambda: list(transports[0].ask(2, b"?", 5.0)))
    assert list(transports[0].ask(1, b"hello", FOREVER)) == [b"agent 1 heard hello"]
    assert list(transports[0].ask(2, b"", FOREVER)) == [b"agent 2 heard "]
    assert list(transports[0].ask(0, b"myself", FOREVER)) == []
    assert list(transports[0].ask(99, b"nobody", FOREVER)) == []


def test_answers_to_concurrent_requests_do_not_mix(
    transports: list[Transport], pool: ThreadPoolExecutor
) -> None:
    large = os.urandom(2**20)
    transports[1].serve(lambda request, reply: pool.submit(reply, request + large))
    wait_for(lambda: list(transports[0].ask(1, b"?", 5.0)))
    answers_by_request = {
        k: transports[k % 2 * 2].ask(1, b"%d " % k, 20.0) for k in range(24)
    }  # all are sent before an answer is read
    assert {k: list(answers) for k, answers in answers_by_request.items()} == {
        k: [b"%d " % k + large] for k in answers_by_request
    }


def test_a_wait_ends_by_timeout_or_an_empty_answer(transports: list[Transport]) -> None:
    replies = []
    transports[1].serve(lambda request, reply: replies.append(reply))
    wait_for(lambda: list(transports[0].ask(1, b"?", 0.1)) or replies)
    start = time.monotonic()
    pending = transports[0].ask(1, b"never", 0.3)
    time.sleep(0.2)
    assert list(pending) == []  # the timeout starts with the request
    assert time.monotonic() - start > 0.25
    for reply in replies:
        reply(b"too late, and to nobody")
    replies.clear()
    answers = transports[0].ask(1, b"empty", FOREVER)
    wait_for(lambda: replies)[0](b"")
    assert list(answers) == []


def test_a_closed_transport_is_not_connected(transports: list[Transport]) -> None:
    transports[1].serve(answering())
    wait_for(lambda: list(transports[0].ask(1, b"?", 5.0)))
    transports[1].close()
    transports[1].close()
    wait_for(lambda: 1 not in transports[0].connected_peers())
    assert list(transports[0].ask(1, b"hello", FOREVER)) == []
    assert list(transports[1].ask(0, b"hello", FOREVER)) == []
    assert transports[1].connected_peers() == frozenset()


def test_a_wire_loses_a_share_of_messages() -> None:
    wire = Wire(lost=0.5, seed=1)
    assert 10 < sum(wire.passes() for _ in range(40)) < 30


def linked_agents(exit_stack: contextlib.ExitStack, organisations: Any, *ids: int) -> list[Zenoh]:
    """Return agents that answer and are linked to each other."""
    orgs, federation = organisations
    agents = {id: exit_stack.enter_context(Zenoh(federation, orgs[id])) for id in ids}
    for id, agent in agents.items():
        agent.serve(answering(b"agent %d heard " % id))
    for id, agent in agents.items():
        for other in set(ids) - {id}:
            wait_for(lambda agent=agent, other=other: list(agent.ask(other, b"?", 5.0)))
    return list(agents.values())


def test_no_member_answers_for_another(
    organisations: Any, exit_stack: contextlib.ExitStack
) -> None:
    orgs, federation = organisations
    first, second = linked_agents(exit_stack, organisations, 0, 1)
    endpoints = [f"tls/{orgs[id].member.endpoint}" for id in (0, 1)]
    liar = exit_stack.enter_context(raw.member(orgs[2], federation, connect__endpoints=endpoints))
    wait_for(lambda: len(liar.info.links()) == 2)

    def lie(query: zenoh.Query) -> None:
        with query, contextlib.suppress(zenoh.ZError):
            query.reply(query.key_expr, b"a lie")

    for key in ("fedcb2o/agents/1", "fedcb2o/agents/3", "fedcb2o/agents/*", "**"):
        liar.declare_queryable(key, zenoh.handlers.Callback(lie, indirect=False), complete=True)
        liar.liveliness().declare_token(key.replace("*", "x"))
    time.sleep(0.2)
    assert list(first.ask(1, b"hello", FOREVER)) == [b"agent 1 heard hello"]
    assert list(first.ask(3, b"hello", FOREVER)) == list(second.ask(3, b"hello", 5.0)) == []
    assert first.connected_peers() == {1}
    assert second.connected_peers() == {0}


def test_a_member_cannot_take_the_endpoint_of_another(
    organisations: Any, exit_stack: contextlib.ExitStack
) -> None:
    orgs, federation = organisations
    first, _ = linked_agents(exit_stack, organisations, 0, 1)
    thief = exit_stack.enter_context(
        raw.member(orgs[2], federation, listen__endpoints=[f"tls/{orgs[3].member.endpoint}"])
    )
    thief.declare_queryable("fedcb2o/agents/3", lambda query: query.drop())
    time.sleep(1)  # enough for links to the others
    assert first.connected_peers() == {1}


def test_a_member_cannot_reach_others_through_another(
    organisations: Any, exit_stack: contextlib.ExitStack
) -> None:
    orgs, federation = organisations
    linked_agents(exit_stack, organisations, 0, 1)
    nosy = exit_stack.enter_context(
        raw.member(orgs[2], federation, connect__endpoints=[f"tls/{orgs[0].member.endpoint}"])
    )
    messages = []
    remote = zenoh.Locality.REMOTE
    nosy.declare_subscriber(
        "**", zenoh.handlers.Callback(messages.append, indirect=False), allowed_origin=remote
    )
    wait_for(lambda: nosy.info.links())
    wait_for(
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
    assert messages == []


@pytest.mark.parametrize("kind", ["another root", "no certificate", "no TLS", "silence"])
def test_unauthenticated_connections_are_refused(
    kind: str, organisations: Any, exit_stack: contextlib.ExitStack, tmp_path: Path
) -> None:
    orgs, federation = organisations
    server, client = linked_agents(exit_stack, organisations, 0, 1)
    host, _, port = orgs[0].member.endpoint.partition(":")
    if kind == "silence":
        for _ in range(100):
            exit_stack.enter_context(socket.create_connection((host, int(port))))
    elif kind == "no TLS":
        with socket.create_connection((host, int(port)), timeout=5) as stranger:
            stranger.sendall(bytes(1000))
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(100)[:1] in (b"", b"\x15")  # closed, or a TLS alert
    else:
        outsider = Identity.make(
            tmp_path / "out", name=orgs[1].member.name, endpoint=orgs[1].member.endpoint
        )
        extra = {"transport__link__tls__enable_mtls": False} if kind == "no certificate" else {}
        endpoints = [f"tls/{orgs[0].member.endpoint}"]
        stranger = exit_stack.enter_context(
            raw.member(outsider, federation, connect__endpoints=endpoints, **extra)
        )
        time.sleep(0.5)
        assert not [
            reply for reply in stranger.get("fedcb2o/agents/0", payload=b"?", timeout=1) if reply.ok
        ]
    assert list(client.ask(0, b"hello", FOREVER)) == [b"agent 0 heard hello"]
    client.close()
    (restarted,) = linked_agents(exit_stack, organisations, 1)
    assert wait_for(lambda: list(restarted.ask(0, b"again", 5.0))) == [b"agent 0 heard again"]
    assert wait_for(lambda: list(server.ask(1, b"again", 5.0))) == [b"agent 1 heard again"]


def test_oversized_messages_and_too_many_answers_close_the_link(
    organisations: Any, exit_stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link is opened again after a pause."""
    monkeypatch.setattr(_transport, "_ABUSE_PAUSE", 0.1)
    orgs, federation = organisations
    (client,) = linked_agents(exit_stack, organisations, 0)
    answers_by_request = {
        b"large": [bytes(MAX_ANSWER_BYTES + 2**17)],
        b"largest": [bytes(2**20 + 2**19)],
        b"many": [b"x"] * 2000,
    }
    flooder = exit_stack.enter_context(
        raw.member(orgs[1], federation, listen__endpoints=[f"tls/{orgs[1].member.endpoint}"])
    )

    def flood(query: zenoh.Query) -> None:
        with query:
            for answer in answers_by_request.get(query.payload.to_bytes(), [b"fine"]):
                query.reply("fedcb2o/agents/1", answer)

    flooder.declare_queryable("fedcb2o/agents/1", flood)
    wait_for(lambda: list(client.ask(1, b"?", 5.0)))
    assert [len(answer) for answer in client.ask(1, b"largest", FOREVER)] == [2**20 + 2**19]
    assert list(client.ask(1, b"large", FOREVER)) == []
    wait_for(lambda: list(client.ask(1, b"then", 5.0)) == [b"fine"])
    assert list(client.ask(1, b"many", FOREVER)) == [b"x"] * MAX_ANSWERS
    wait_for(lambda: not client.connected_peers())
    wait_for(lambda: list(client.ask(1, b"then", 5.0)) == [b"fine"])

    sender = exit_stack.enter_context(
        raw.member(orgs[2], federation, connect__endpoints=[f"tls/{orgs[0].member.endpoint}"])
    )
    wait_for(
        lambda: [
            reply for reply in sender.get("fedcb2o/agents/0", payload=b"?", timeout=5) if reply.ok
        ]
    )
    replies = sender.get("fedcb2o/agents/0", payload=bytes(2**24 + MAX_REQUEST_BYTES), timeout=0.5)
    assert [reply for reply in replies if reply.ok] == []
    wait_for(  # its link was closed
        lambda: [
            reply for reply in sender.get("fedcb2o/agents/0", payload=b"?", timeout=5) if reply.ok
        ]
    )


def test_an_exception_in_the_request_handler_is_logged(
    organisations: Any, exit_stack: contextlib.ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    orgs, federation = organisations
    client, server = (
        exit_stack.enter_context(Zenoh(federation, identity)) for identity in orgs[:2]
    )

    def handle(request: bytes, reply: Reply) -> None:
        reply(b"%d" % (1 // len(request)))

    server.serve(handle)
    assert wait_for(lambda: list(client.ask(1, b"1", 5.0))) == [b"1"]
    assert list(client.ask(1, b"", FOREVER)) == []
    assert list(client.ask(1, b"22", FOREVER)) == [b"0"]
    assert "a request could not be handled" in caplog.text


def proxied_pair(
    proxy: Proxy, port: int, folder: Path, exit_stack: contextlib.ExitStack, handler: RequestHandler
) -> tuple[Zenoh, Zenoh]:
    """Return an agent that asks, and an agent behind a proxy that answers."""
    served = Identity.make(folder / "served", name="served", endpoint=f"127.0.0.1:{proxy.port}")
    (asking,) = identities(folder, 1)
    federation = federated([asking, served])
    server = exit_stack.enter_context(Zenoh(federation, served, listen=f"127.0.0.1:{port}"))
    server.serve(handler)
    client = exit_stack.enter_context(Zenoh(federation, asking, listen=False))
    wait_for(lambda: list(client.ask(1, b"?", 5.0)))
    return client, server


def test_agents_recover_from_a_slow_or_interrupted_connection(
    tmp_path: Path, exit_stack: contextlib.ExitStack, pool: ThreadPoolExecutor
) -> None:
    (port,) = free_ports(1)
    proxy = exit_stack.enter_context(Proxy(port, rate=4e6))
    chunk = os.urandom(2**20)
    client, _ = proxied_pair(
        proxy,
        port,
        tmp_path,
        exit_stack,
        lambda request, reply: pool.submit(reply, request + chunk),
    )
    start = time.monotonic()
    pending = [client.ask(1, b"%d" % k, 30.0) for k in range(4)]
    assert [list(answers) for answers in pending] == [[b"%d" % k + chunk] for k in range(4)]
    assert time.monotonic() - start > 0.7  # 4 MiB at 4 MB a second
    proxy.rate = None

    proxy.pause()
    assert list(client.ask(1, b"?", 0.3)) == []
    proxy.resume()
    assert wait_for(lambda: list(client.ask(1, b"?", 5.0)))

    before = proxy.connections
    proxy.cut()
    wait_for(lambda: proxy.connections > before and list(client.ask(1, b"?", 5.0)))
    proxy.pause()
    client.close()
    proxy.resume()


def test_a_slow_reader_delays_no_other_member(
    organisations: Any, exit_stack: contextlib.ExitStack
) -> None:
    """One agent asks for 32 MiB and reads nothing; each waiting answer holds one thread."""
    orgs, federation = organisations
    server, client = (
        exit_stack.enter_context(Zenoh(federation, identity)) for identity in orgs[:2]
    )
    sent = []

    def handle(request: bytes, reply: Reply) -> None:
        def answer() -> None:
            reply(bytes(2**20))
            sent.append(request)

        threading.Thread(target=answer, daemon=True).start()

    server.serve(handle)
    proxy = exit_stack.enter_context(Proxy(int(orgs[0].member.endpoint.partition(":")[2])))
    slow = exit_stack.enter_context(
        raw.member(orgs[2], federation, connect__endpoints=[f"tls/127.0.0.1:{proxy.port}"])
    )
    wait_for(lambda: list(client.ask(0, b"quick", 5.0)))
    wait_for(
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
    assert [len(answer) for answer in client.ask(0, b"quick", FOREVER)] == [2**20]
    assert sent.count(b"slow") < 32
    server.close()


def test_an_endpoint_that_cannot_be_used_is_an_error(
    organisations: Any, exit_stack: contextlib.ExitStack
) -> None:
    orgs, federation = organisations
    exit_stack.enter_context(Zenoh(federation, orgs[0]))
    for listen, error, message in (
        (True, RunError, "the port is in use; is another peer running"),
        ("192.0.2.1:7447", RunError, "no address of this machine"),
        ("nonsense", ConfigError, "must be HOST:PORT"),
        ("127.0.0.1:80000", ConfigError, "must be HOST:PORT"),
    ):
        with pytest.raises(error, match=message) as caught:
            Zenoh(federation, orgs[0], listen=listen)
        assert "\n" not in str(caught.value)
    with (
        exit_stack.enter_context(Zenoh(federation, orgs[0], listen=False)) as asking,
        pytest.raises(RunError, match="listen"),
    ):
        asking.serve(answering())


def test_strangers_and_expired_certificates_are_refused(organisations: Any, tmp_path: Path) -> None:
    _, federation = organisations
    (stranger,) = identities(tmp_path, 1)
    with pytest.raises(ConfigError):
        Zenoh(federation, stranger)
    now = datetime.now(UTC)
    stranger.renew(now=now - timedelta(days=3), until=now - timedelta(days=1))
    with pytest.raises(ConfigError, match="expired"):
        Zenoh(federation, stranger)


def test_links_use_ipv4_and_ipv6_addresses(
    tmp_path: Path, exit_stack: contextlib.ExitStack
) -> None:
    (ipv4,) = identities(tmp_path, 1)
    (port,) = free_ports(1)
    ipv6 = Identity.make(tmp_path / "there", name="there", endpoint=f"[::1]:{port}")
    federation = federated([ipv4, ipv6])
    client = exit_stack.enter_context(Zenoh(federation, ipv4))
    server = exit_stack.enter_context(Zenoh(federation, ipv6))
    server.serve(answering())
    assert wait_for(lambda: list(client.ask(1, b"?", 5.0))) == [b"heard ?"]


def test_closing_waits_for_all_callbacks(
    organisations: Any, exit_stack: contextlib.ExitStack
) -> None:
    """A callback while Python shuts down would abort the process."""
    orgs, federation = organisations
    client, server = (
        exit_stack.enter_context(Zenoh(federation, identity)) for identity in orgs[:2]
    )
    replies: list[Reply] = []
    server.serve(lambda request, reply: replies.append(reply))
    wait_for(lambda: list(client.ask(1, b"?", 0.1)) or replies)
    pending = [client.ask(1, b"?", 60.0) for _ in range(20)]
    client.close()
    server.close()
    assert "fedcb2o-hear" not in [thread.name for thread in threading.enumerate()]
    assert [list(answers) for answers in pending] == [[]] * 20


@pytest.mark.slow
def test_a_program_without_close_ends_without_further_output(
    organisations: Any, tmp_path: Path
) -> None:
    """The program dials an unreachable member and a member that never answers."""
    orgs, federation = organisations
    federations.write_federation(federation, tmp_path / "federation.toml")
    program = (
        "import sys, time; from fedcb2o.peer import Identity, read_federation;"
        "from fedcb2o.peer.wire import Zenoh;"
        "one = Zenoh(read_federation(sys.argv[1]), Identity.read(sys.argv[2]));"
        "one.serve(lambda request, reply: None);"
        "two = one.ask(1, b'?', 60.0); time.sleep(0.3); raise KeyboardInterrupt"
    )
    host, _, port = orgs[1].member.endpoint.partition(":")
    with socket.create_server((host, int(port))):
        process = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "federation.toml"), str(orgs[0].folder)],
            env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert process.stderr.strip().splitlines()[-1] == "KeyboardInterrupt"
    assert process.returncode in (-2, 130)
    assert process.stdout == ""


@pytest.mark.slow
def test_links_end_when_their_certificate_expires(
    organisations: Any, exit_stack: contextlib.ExitStack
) -> None:
    orgs, _ = organisations
    now = datetime.now(UTC)
    orgs[1].renew(now=now - timedelta(days=2), until=now + timedelta(seconds=5))
    first, second, third = linked_agents(exit_stack, organisations, 0, 1, 2)
    wait_for(lambda: first.connected_peers() == {2} and not second.connected_peers())
    assert list(third.ask(0, b"hello", FOREVER)) == [b"agent 0 heard hello"]
    orgs[1].renew()
    wait_for(
        lambda: list(second.ask(0, b"again", 5.0))
    )  # it asks with the new certificate at once, and is asked after its restart
    second.close()
    linked_agents(exit_stack, organisations, 1)
    wait_for(lambda: list(first.ask(1, b"again", 5.0)))
