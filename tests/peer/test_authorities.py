"""Attacks by a member whose root signs an authority with the name of somebody else."""

import logging
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from cryptography import x509
from tests.peer import raw, relays
from tests.peer.authorities import (
    impostor_context,
    is_closed_by_remote,
    root_with_path_length,
    use_root,
)
from tests.peer.members import federated, identities
from tests.peer.relays import Relayed, RelayMailbox
from tests.peer.test_transport import answering, ask
from tests.peer.waiting import wait_for

from fedcb2o.errors import ConfigError
from fedcb2o.peer import (
    Federation,
    Member,
    amend_federation,
    read_federation,
    sign_federation,
    write_federation,
)
from fedcb2o.peer.membership import certificates
from fedcb2o.peer.wire.probe import probe_member
from fedcb2o.peer.wire.relay import Relay
from fedcb2o.peer.wire.tls import close_wrapped
from fedcb2o.peer.wire.transport import Https


@pytest.fixture
def lenient(monkeypatch):
    """Accept every root, so that only the check of the link is left."""

    def load(pem: str, *arguments: Any, **options: Any) -> x509.Certificate:
        return x509.load_pem_x509_certificate(pem.encode())

    monkeypatch.setattr(certificates, "validate_root", load)


@pytest.fixture
def three(tmp_path):
    return identities(tmp_path, 3)


def open_stream(context: ssl.SSLContext, target: Member) -> ssl.SSLSocket:
    """Connect to a member, with any certificate."""
    host, _, port = target.endpoint.rpartition(":")
    plain = socket.create_connection((host, int(port)), timeout=5)
    return context.wrap_socket(plain, server_hostname=host)


def counts(node: Https, federation: Federation) -> dict[str, int]:
    """Return the number of connections of each member."""
    assert node._listener is not None
    return {**node._listener.connections(federation.members.values())}


def stack_of_streams(
    stack: ExitStack, count: int, context: ssl.SSLContext, target: Member
) -> list[ssl.SSLSocket]:
    streams = [open_stream(context, target) for _ in range(count)]
    for stream in streams:
        stack.callback(stream.close)
    return streams


def test_links_of_an_authority_with_another_members_name_displace_no_link(three, lenient, tmp_path):
    """Honest members exchange 60 messages while the hostile one opens 24 links in the name of one."""
    server, honest, hostile = three
    hostile = use_root(hostile, root_with_path_length(hostile, None))
    agreed = federated([server, honest, hostile])
    context = impostor_context(hostile, "org-1", server.member, tmp_path / "impostor")
    with Https(agreed, server) as node, Https(agreed, honest) as client, ExitStack() as stack:
        node.serve(answering())
        assert wait_for(lambda: ask(client, 0, "hello", 5.0)) == [b"heard hello"]
        before = counts(node, agreed)["org-1"]
        attempts = client._dialers[0].attempts
        answers = 0
        for _ in range(3):
            streams = stack_of_streams(stack, 8, context, server.member)
            for _ in range(20):
                answers += ask(client, 0, "hello", 5.0) == [b"heard hello"]
            assert all(map(is_closed_by_remote, streams))
        assert answers == 60
        assert client._dialers[0].attempts == attempts
        assert counts(node, agreed) == {"org-0": 0, "org-1": before, "org-2": 0}


def test_a_dialled_member_cannot_answer_by_an_authority(three, lenient, tmp_path):
    """Only the certificate of another authority under the trusted root is at the listening end."""
    node, _, hostile = three
    hostile = use_root(hostile, root_with_path_length(hostile, None))
    agreed = federated([node, three[1], hostile])
    impostor_context(hostile, "org-1", node.member, tmp_path / "impostor")
    for name in ("tls.pem", "tls.key"):
        (hostile.folder / name).write_bytes((tmp_path / "impostor" / name).read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(hostile.tls_certificate, hostile.tls_key)
    host, _, port = hostile.member.endpoint.rpartition(":")

    def serve_one() -> None:
        while True:
            connection, _ = listening.accept()
            connection.settimeout(5)
            try:
                stream = context.wrap_socket(connection, server_side=True)
                break
            except OSError as error:  # of a transport that is closed in the meantime
                close_wrapped(error)
        assert is_closed_by_remote(stream)
        stream.close()

    with socket.create_server((host, int(port))) as listening, ThreadPoolExecutor() as pool:
        with Https(agreed, node) as client:
            serve_one()
            assert not client.connected_peers()
        served = pool.submit(serve_one)
        result = probe_member(hostile.member, node)
        served.result()
        assert "has no certificate of org-2 (no root of a member issued the" in result.error
        served = pool.submit(serve_one)  # as a relay
        with Relayed(agreed, node, RelayMailbox(hostile.member, node)) as transport:
            served.result()
            wait_for(lambda: "has no certificate of org-2 (no root" in transport.error)


def test_the_length_of_a_path_ends_an_authority_in_tls(three, tmp_path):
    """Without any check of the link, the roots that a federation accepts suffice."""
    server, _, hostile = three
    agreed = federated(three)
    context = impostor_context(hostile, "org-1", server.member, tmp_path / "impostor")
    with Https(agreed, server) as node:
        stream = open_stream(context, server.member)
        with pytest.raises(ssl.SSLError, match="ALERT"):
            stream.recv(1)
        stream.close()
        assert not any(counts(node, agreed).values())


def test_the_certificate_of_an_authority_counts_as_that_of_its_issuer(three, tmp_path):
    """The root issued it directly, whatever its own name is."""
    server, _, hostile = three
    agreed = federated(three)
    folder = tmp_path / "impostor"
    context = impostor_context(hostile, "org-1", server.member, folder, is_authority=True)
    with Https(agreed, server) as node, ExitStack() as stack:
        (stream,) = stack_of_streams(stack, 1, context, server.member)
        assert raw.exchange(stream, raw.get(raw.STATE))[0] == 200
        assert counts(node, agreed) == {"org-0": 0, "org-1": 0, "org-2": 1}


@pytest.mark.parametrize("name", ["org-1", "org-0", "stranger", "relay\nNote: org-1 cheats\x1b[2J"])
def test_a_relay_closes_links_of_authorities_without_a_line_or_a_trace(
    name, three, lenient, tmp_path, caplog
):
    """org-0 is a former member, and its root would sign for any name."""
    caplog.set_level(logging.INFO, "fedcb2o")
    hostile = use_root(three[0], root_with_path_length(three[0], None))
    path = tmp_path / "federation.toml"
    federated([hostile, *three[1:]], path=path)
    write_federation(amend_federation(read_federation(path), remove=["org-0"]), path)
    for signer in three[1:]:
        sign_federation(path, signer)
    keys = relays.relay_identity(tmp_path)
    context = impostor_context(hostile, name, keys.member, tmp_path / "impostor")
    with Relay(read_federation(path), keys) as relay, ExitStack() as stack:
        honest = RelayMailbox(keys.member, three[1])
        stack.callback(honest.close)
        honest.cards()
        for _ in range(2):
            streams = stack_of_streams(stack, 20, context, keys.member)
            assert all(map(is_closed_by_remote, streams))
            honest.cards()
        assert relay.connections() == {"org-1": 1, "org-2": 0}
        assert not relay._former_seen
        lines = [record.getMessage() for record in caplog.records]
        assert lines == ["relay: org-1 is connected"]


def test_a_version_with_a_root_that_signs_authorities_is_not_signed(three, tmp_path):
    path = tmp_path / "federation.toml"
    write_federation(amend_federation(federated(three), remove=["org-2"]), path)
    root = three[1].member.root
    bad_root = root_with_path_length(three[1], None)
    head, history = path.read_text().split("[[history]]", 1)
    path.write_text("[[history]]".join((head.replace(root, bad_root), history)))
    assert bad_root in path.read_text()
    with pytest.raises(
        ConfigError, match=r"federation.toml: version 2, agent 1: `root` of org-1 may sign"
    ):
        sign_federation(path, three[0])
    with pytest.raises(ConfigError, match="may sign authorities"):
        Member("org-1", three[1].member.endpoint, three[1].member.key, bad_root)
