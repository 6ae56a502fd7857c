"""Transports: common behaviour, and TLS over real links on loopback."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.peer import raw, relays
from tests.peer.members import federated, free_ports, identities
from tests.peer.proxy import Proxy
from tests.peer.waiting import wait_for
from tests.peer.wire import Wire
from tests.tiny import ENVIRONMENT

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.peer import Identity
from fedcb2o.peer.membership import federation as federations
from fedcb2o.peer.wire.dialer import MAX_ANSWER_BYTES
from fedcb2o.peer.wire.listener import MAX_CONNECTIONS
from fedcb2o.peer.wire.protocol import Answer, AnswerStatus
from fedcb2o.peer.wire.transport import Https, Reply, RequestHandler, Transport


@pytest.fixture(scope="module")
def organisations(tmp_path_factory):
    """Four organisations, whose addresses are used by one test at a time."""
    orgs = identities(tmp_path_factory.mktemp("organisations"), 4)
    return orgs, federated(orgs)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture(params=["https", "wire", "folder", "relay"])
def transports(request, organisations, exit_stack, tmp_path):
    """Three linked agents on each kind of transport."""
    if request.param == "wire":
        wire = Wire()
        return [wire.agent(id) for id in range(3)]
    orgs, federation = organisations
    if request.param == "https":
        linked_transports = [
            exit_stack.enter_context(Https(federation, identity)) for identity in orgs[:3]
        ]
    else:
        linked_transports = relays.relayed(
            request.param, orgs[:3], federation, tmp_path, exit_stack
        )
    for id, transport in enumerate(linked_transports):
        wait_for(lambda transport=transport, id=id: transport.connected_peers() == {0, 1, 2} - {id})
    return linked_transports


FOREVER = 3600.0  # seconds, longer than a test may take


def ok(text: bytes) -> Answer:
    return Answer(AnswerStatus.OK, text)


def question(text: str) -> bytes:
    return f"GET /v1/{text}".encode()


def ask(transport: Transport, peer: int, text: str, seconds: float) -> list[bytes]:
    """Return the body of the answer to a question, in a list that is empty without one."""
    answer = transport.ask(peer, question(text), seconds).answer()
    return [] if answer is None else [bytes(answer.body)]


def answering(text: bytes = b"heard ") -> RequestHandler:
    def handle(request: bytes, reply: Reply) -> None:
        answer = ok(text + request.removeprefix(b"GET /v1/"))
        threading.Thread(target=reply, args=(answer,), daemon=True).start()

    return handle


def test_a_request_is_answered_by_the_asked_agent(transports):
    for id, transport in enumerate(transports):
        transport.serve(answering(b"agent %d heard " % id))
    wait_for(lambda: ask(transports[0], 1, "x", 5.0))
    wait_for(lambda: ask(transports[0], 2, "x", 5.0))
    assert ask(transports[0], 1, "hello", FOREVER) == [b"agent 1 heard hello"]
    assert ask(transports[0], 2, "x", FOREVER) == [b"agent 2 heard x"]
    assert ask(transports[0], 0, "myself", FOREVER) == []
    assert ask(transports[0], 99, "nobody", FOREVER) == []


def test_each_status_of_an_answer_arrives(transports):
    def handle(request: bytes, reply: Reply) -> None:
        reply(Answer(AnswerStatus(int(request[-3:]))))

    transports[1].serve(handle)
    wait_for(lambda: transports[0].ask(1, question("404"), 5.0).answer())
    for status in [one for one in AnswerStatus if one.value >= 400]:
        answer = transports[0].ask(1, question(str(status.value)), FOREVER).answer()
        assert answer == Answer(status)


def test_answers_to_concurrent_requests_do_not_mix(transports, pool):
    large = os.urandom(2**20)
    transports[1].serve(lambda request, reply: pool.submit(reply, ok(request + large)))
    wait_for(lambda: ask(transports[0], 1, "x", 5.0))
    answers_by_request = {
        k: transports[k % 2 * 2].ask(1, question(str(k)), 20.0) for k in range(24)
    }  # all are sent before an answer is read
    assert {k: one.answer().body for k, one in answers_by_request.items()} == {
        k: question(str(k)) + large for k in answers_by_request
    }


def test_a_wait_ends_by_timeout_or_without_an_answer(transports):
    replies = []
    transports[1].serve(lambda request, reply: replies.append(reply))
    wait_for(lambda: ask(transports[0], 1, "x", 0.1) or replies)
    start = time.monotonic()
    pending = transports[0].ask(1, question("never"), 0.3)
    time.sleep(0.2)
    assert pending.answer() is None  # the timeout starts with the request
    assert time.monotonic() - start > 0.25
    for reply in replies:
        reply(ok(b"too late, and to nobody"))
    replies.clear()
    pending = transports[0].ask(1, question("empty"), FOREVER)
    wait_for(lambda: replies).pop()(None)
    replies.clear()  # with it goes the end of the request
    assert pending.answer() is None


def test_a_closed_transport_is_not_connected(transports):
    transports[1].serve(answering())
    wait_for(lambda: ask(transports[0], 1, "x", 5.0))
    transports[1].close()
    transports[1].close()
    wait_for(lambda: 1 not in transports[0].connected_peers())
    assert ask(transports[0], 1, "hello", FOREVER) == []
    assert ask(transports[1], 0, "hello", FOREVER) == []
    assert transports[1].connected_peers() == frozenset()


def test_a_wire_loses_a_share_of_messages():
    wire = Wire(lost=0.5, seed=1)
    assert 10 < sum(wire.passes() for _ in range(40)) < 30


def linked_agents(exit_stack: contextlib.ExitStack, organisations: Any, *ids: int) -> list[Https]:
    """Return agents that answer and are linked to each other."""
    orgs, federation = organisations
    agents = {id: exit_stack.enter_context(Https(federation, orgs[id])) for id in ids}
    for id, agent in agents.items():
        agent.serve(answering(b"agent %d heard " % id))
    for agent in agents.values():
        for other in set(agents) - {id for id, one in agents.items() if one is agent}:
            wait_for(lambda agent=agent, other=other: ask(agent, other, "x", 5.0))
    return list(agents.values())


@pytest.mark.parametrize("place", ["its own endpoint", "the endpoint of another"])
def test_a_member_cannot_answer_at_the_endpoint_of_another(place, organisations, exit_stack):
    orgs, federation = organisations
    (first,) = linked_agents(exit_stack, organisations, 0)
    endpoint = orgs[3].member.endpoint if place != "its own endpoint" else ""
    lie = lambda target, headers: [raw.answer(b"a lie")]  # noqa: E731
    exit_stack.enter_context(raw.listening(orgs[2], federation, lie, endpoint))
    time.sleep(1)  # enough for links
    assert first.connected_peers() == (set() if endpoint else {2})
    assert ask(first, 3, "hello", 5.0) == []
    assert ask(first, 2, "hello", 5.0) == ([] if endpoint else [b"a lie"])


@pytest.mark.parametrize("kind", ["another root", "no certificate", "no TLS", "silence"])
def test_unauthenticated_connections_are_refused(kind, organisations, exit_stack, tmp_path):
    orgs, federation = organisations
    server, client = linked_agents(exit_stack, organisations, 0, 1)
    host, _, port = orgs[0].member.endpoint.partition(":")
    if kind == "silence":
        for _ in range(100):
            exit_stack.enter_context(socket.create_connection((host, int(port))))
    elif kind == "no TLS":
        with socket.create_connection((host, int(port)), timeout=5) as stranger:
            stranger.sendall(b"GET /v1/federation HTTP/1.1\r\nHost: x\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(100)[:1] in (b"", b"\x15")  # closed, or a TLS alert
    else:
        outsider = Identity.make(
            tmp_path / "out", name=orgs[1].member.name, endpoint=orgs[1].member.endpoint
        )
        identity = outsider if kind == "another root" else None
        with raw.connect(identity, federation, 0) as link:
            assert raw.exchange(link, raw.get("/v1/federation")) == (0, {}, b"")
    assert ask(client, 0, "hello", FOREVER) == [b"agent 0 heard hello"]
    client.close()
    (restarted,) = linked_agents(exit_stack, organisations, 1)
    assert wait_for(lambda: ask(restarted, 0, "again", 5.0)) == [b"agent 0 heard again"]
    assert wait_for(lambda: ask(server, 1, "again", 5.0)) == [b"agent 1 heard again"]


def test_unreadable_answers_are_malformed_or_missing(organisations, exit_stack):
    """Each question gets another answer. The member stays connected, or is dialled again."""
    orgs, federation = organisations
    (client,) = linked_agents(exit_stack, organisations, 0)
    largest = bytes(MAX_ANSWER_BYTES)
    answers = {
        "fine": raw.answer(b"fine"),
        "largest": raw.answer(largest),
        "large": raw.answer(largest + b"x"),
        "endless": b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"100000\r\n%b\r\n" % bytes(2**20) * 9,
        "garbage": b"\x16\x03\x01" * 100 + b"\r\n\r\n",
        "status": raw.answer(b"", 299),
        "compressed": b"HTTP/1.1 200 X\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx",
        "redirect": b"HTTP/1.1 302 X\r\nLocation: /v1/fine\r\nContent-Length: 0\r\n\r\n",
        "headers": b"HTTP/1.1 200 X\r\n" + b"a: b\r\n" * 10**5 + b"\r\n",
        "negative": b"HTTP/1.1 200 X\r\nContent-Length: -9\r\n\r\n",
        "two": raw.answer(b"first") + raw.answer(b"second"),
        "refused": raw.answer(b"", 403),
    }
    exit_stack.enter_context(
        raw.listening(orgs[1], federation, lambda target, headers: [answers[target[4:]]])
    )
    fine = Answer(AnswerStatus.OK, b"fine")
    malformed = Answer(AnswerStatus.MALFORMED)
    expected = {
        "fine": fine,
        "largest": Answer(AnswerStatus.OK, largest),
        "refused": None,
        "negative": None,
        "two": Answer(AnswerStatus.OK, b"first"),
    }
    for name in answers:
        wait_for(lambda: client.ask(1, question("fine"), 5.0).answer() == fine)
        result = client.ask(1, question(name), 5.0 if name != "negative" else 0.3).answer()
        assert result == expected.get(name, malformed), name


def test_an_exception_in_the_request_handler_is_logged(organisations, exit_stack, caplog):
    orgs, federation = organisations
    client, server = (
        exit_stack.enter_context(Https(federation, identity)) for identity in orgs[:2]
    )

    def handle(request: bytes, reply: Reply) -> None:
        reply(ok(b"%d" % (1 // (len(request) - 9))))

    server.serve(handle)
    assert wait_for(lambda: ask(client, 1, "12", 5.0)) == [b"1"]
    assert client.ask(1, question("1"), FOREVER).answer() == Answer(AnswerStatus.MALFORMED)
    assert ask(client, 1, "123", FOREVER) == [b"0"]
    assert "a request could not be handled" in caplog.text


def proxied_pair(
    proxy: Proxy, port: int, folder: Path, exit_stack: contextlib.ExitStack, handler: RequestHandler
) -> tuple[Https, Https]:
    """Return an agent that asks, and an agent behind a proxy that answers."""
    served = Identity.make(folder / "served", name="served", endpoint=f"127.0.0.1:{proxy.port}")
    (asking,) = identities(folder, 1)
    federation = federated([asking, served])
    server = exit_stack.enter_context(Https(federation, served, listen=f"127.0.0.1:{port}"))
    server.serve(handler)
    client = exit_stack.enter_context(Https(federation, asking, listen=False))
    wait_for(lambda: ask(client, 1, "x", 5.0))
    return client, server


def test_agents_recover_from_a_slow_or_interrupted_connection(tmp_path, exit_stack, pool):
    (port,) = free_ports(1)
    proxy = exit_stack.enter_context(Proxy(port, rate=1e6))
    chunk = os.urandom(2**20)
    client, _ = proxied_pair(
        proxy,
        port,
        tmp_path,
        exit_stack,
        lambda request, reply: pool.submit(reply, ok(request + chunk)),
    )
    start = time.monotonic()
    pending = [client.ask(1, question(str(k)), 30.0) for k in range(4)]
    assert [one.answer().body for one in pending] == [question(str(k)) + chunk for k in range(4)]
    assert time.monotonic() - start > 0.7  # 1 MiB at 1 MB a second on each connection
    proxy.rate = None

    proxy.pause()
    assert ask(client, 1, "x", 0.3) == []
    proxy.resume()
    assert wait_for(lambda: ask(client, 1, "x", 5.0))

    before = proxy.connections
    proxy.cut()
    wait_for(lambda: proxy.connections > before and ask(client, 1, "x", 5.0))
    proxy.pause()
    client.close()
    proxy.resume()


def test_a_slow_reader_delays_no_other_member(organisations, exit_stack):
    """One agent asks again and again and reads nothing; each waiting answer holds one thread."""
    orgs, federation = organisations
    server, client = (
        exit_stack.enter_context(Https(federation, identity)) for identity in orgs[:2]
    )

    def handle(request: bytes, reply: Reply) -> None:
        answer = ok(bytes(2**23 if b"slow" in request else 2**20))
        threading.Thread(target=reply, args=(answer,), daemon=True).start()

    server.serve(handle)
    wait_for(lambda: ask(client, 0, "quick", 5.0))
    for _ in range(32):  # twice as many as stay open
        slow = exit_stack.enter_context(raw.connect(orgs[2], federation, 0))
        slow.sendall(raw.get("/v1/slow"))
    time.sleep(0.5)
    assert [len(one) for one in ask(client, 0, "quick", FOREVER)] == [2**20]
    assert server._listener is not None
    counts = server._listener.connections(federation.members.values())
    assert counts["org-2"] <= MAX_CONNECTIONS
    server.close()


def test_an_endpoint_that_cannot_be_used_is_an_error(organisations, exit_stack):
    orgs, federation = organisations
    exit_stack.enter_context(Https(federation, orgs[0]))
    for listen, error, message in (
        (True, RunError, "the port is in use; is another peer running"),
        ("192.0.2.1:7447", RunError, "no address of this machine"),
        ("nonsense", ConfigError, "must be HOST:PORT"),
        ("127.0.0.1:80000", ConfigError, "must be HOST:PORT"),
    ):
        with pytest.raises(error, match=message) as caught:
            Https(federation, orgs[0], listen=listen)
        assert "\n" not in str(caught.value)
    with (
        exit_stack.enter_context(Https(federation, orgs[0], listen=False)) as asking,
        pytest.raises(RunError, match="listen"),
    ):
        asking.serve(answering())


def test_strangers_and_expired_certificates_are_refused(organisations, tmp_path):
    _, federation = organisations
    (stranger,) = identities(tmp_path, 1)
    with pytest.raises(ConfigError):
        Https(federation, stranger)
    now = datetime.now(UTC)
    stranger.renew(now=now - timedelta(days=3), until=now - timedelta(days=1))
    with pytest.raises(ConfigError, match="expired"):
        Https(federation, stranger)


def test_links_use_ipv4_and_ipv6_addresses(tmp_path, exit_stack):
    (ipv4,) = identities(tmp_path, 1)
    (port,) = free_ports(1)
    ipv6 = Identity.make(tmp_path / "there", name="there", endpoint=f"[::1]:{port}")
    federation = federated([ipv4, ipv6])
    client = exit_stack.enter_context(Https(federation, ipv4))
    server = exit_stack.enter_context(Https(federation, ipv6))
    server.serve(answering())
    assert wait_for(lambda: ask(client, 1, "x", 5.0)) == [b"heard x"]


def test_closing_waits_for_all_callbacks(organisations, exit_stack):
    """A callback while Python shuts down would abort the process."""
    orgs, federation = organisations
    client, server = (
        exit_stack.enter_context(Https(federation, identity)) for identity in orgs[:2]
    )
    replies: list[Reply] = []
    server.serve(lambda request, reply: replies.append(reply))
    wait_for(lambda: ask(client, 1, "x", 0.1) or replies)
    pending = [client.ask(1, question("x"), 60.0) for _ in range(20)]
    client.close()
    server.close()
    replies.clear()  # each holds a connection
    wait_for(lambda: not {"fedcb2o-listen", "fedcb2o-dial", "fedcb2o-ask"} & thread_names())
    assert [one.answer() for one in pending] == [None] * 20


def thread_names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


@pytest.mark.slow
def test_a_program_without_close_ends_without_further_output(organisations, tmp_path):
    """The program dials an unreachable member and a member that never answers."""
    orgs, federation = organisations
    federations.write_federation(federation, tmp_path / "federation.toml")
    program = (
        "import sys, time; from fedcb2o.peer import Identity, read_federation;"
        "from fedcb2o.peer.wire.transport import Https;"
        "one = Https(read_federation(sys.argv[1]), Identity.read(sys.argv[2]));"
        "one.serve(lambda request, reply: None);"
        "two = one.ask(1, b'GET /v1/x', 60.0); time.sleep(0.3); raise KeyboardInterrupt"
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
def test_links_end_when_their_certificate_expires(organisations, exit_stack):
    orgs, _ = organisations
    now = datetime.now(UTC)
    orgs[1].renew(now=now - timedelta(days=2), until=now + timedelta(seconds=5))
    first, second, third = linked_agents(exit_stack, organisations, 0, 1, 2)
    wait_for(lambda: first.connected_peers() == {2} and not second.connected_peers())
    assert ask(third, 0, "hello", FOREVER) == [b"agent 0 heard hello"]
    orgs[1].renew()
    wait_for(
        lambda: ask(second, 0, "again", 5.0)
    )  # it asks with the new certificate at once, and is asked after its restart
    second.close()
    linked_agents(exit_stack, organisations, 1)
    wait_for(lambda: ask(first, 1, "again", 5.0))
