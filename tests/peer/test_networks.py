"""Proxies between members and relays, and a node asked by curl and openssl alone."""

import base64
import contextlib
import http.server
import json
import os
import re
import select
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.peer import members, raw, relays
from tests.peer.test_transport import answering, ask
from tests.peer.waiting import wait_for

from fedcb2o.errors import ConfigError
from fedcb2o.peer import Identity
from fedcb2o.peer.wire.equivocation import Ledger
from fedcb2o.peer.wire.probe import probe_member
from fedcb2o.peer.wire.protocol import Manifest
from fedcb2o.peer.wire.relay import Relay
from fedcb2o.peer.wire.relayed import open_transport
from fedcb2o.peer.wire.server import Server, Snapshot
from fedcb2o.peer.wire.tls import close_wrapped
from fedcb2o.peer.wire.transport import Https

ROOT = Path(__file__).parents[2]
# Python does not close an SSL socket that is reset before its handshake, here in a proxy.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Tunnel(http.server.BaseHTTPRequestHandler):
    """Proxy that passes TLS on for those with a password; `ends` replaces the other end of TLS."""

    password = "name:password"
    allowed = True
    ends: "ssl.SSLContext | None" = None
    seen: list[bytes]

    def do_CONNECT(self) -> None:
        given = self.headers.get("Proxy-Authorization", "Basic ").removeprefix("Basic ")
        if base64.b64decode(given).decode() != self.password:
            self.send_error(407)
            return
        if not self.allowed:
            self.send_error(403)
            return
        host, _, port = self.path.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port))) as target:
            self.send_response(200)
            self.end_headers()
            try:
                self.pass_on(target)
            except OSError as error:
                close_wrapped(error)
        self.close_connection = True

    def pass_on(self, target: socket.socket) -> None:
        client: socket.socket = self.connection
        with contextlib.ExitStack() as stack:
            if self.ends is not None:
                client = stack.enter_context(self.ends.wrap_socket(client, server_side=True))
                context = ssl.create_default_context()
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
                target = stack.enter_context(context.wrap_socket(target))
            ends = {client: target, target: client}
            while True:
                waiting = [one for one in ends if isinstance(one, ssl.SSLSocket) and one.pending()]
                for one in waiting or select.select([*ends], [], [], 60.0)[0]:
                    data = one.recv(2**16)
                    if not data:
                        return
                    self.seen.append(data)
                    ends[one].sendall(data)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def tunnel(**settings: object) -> Iterator[type[Tunnel]]:
    """Run a proxy, and yield its handler with the attribute `url`."""
    handler = type("Handler", (Tunnel,), {"seen": [], **settings})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    handler.url = f"http://{{}}127.0.0.1:{server.server_address[1]}"  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield handler
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def pair(tmp_path):
    orgs = members.identities(tmp_path, 2)
    return orgs, members.federated(orgs)


def test_direct_links_use_the_proxy_with_a_name_and_a_password(pair, monkeypatch):
    orgs, federation = pair
    with tunnel() as proxy, Https(federation, orgs[0]) as server:
        server.serve(answering())
        monkeypatch.setenv("HTTPS_PROXY", proxy.url.format("name:password@"))
        with Https(federation, orgs[1], listen=False) as client:
            assert wait_for(lambda: ask(client, 0, "hello", 5.0)) == [b"heard hello"]
        assert proxy.seen
        assert not any(b"hello" in data for data in proxy.seen)
        proxy.seen.clear()
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with Https(federation, orgs[1], listen=False) as client:
            assert wait_for(lambda: ask(client, 0, "hello", 5.0)) == [b"heard hello"]
        assert not proxy.seen


@pytest.mark.parametrize(
    ("settings", "name", "text"),
    [({}, "", "407"), ({}, "name:wrong@", "407"), ({"allowed": False}, "name:password@", "403")],
)
def test_a_check_names_the_refusal_of_a_proxy(settings, name, text, pair, monkeypatch):
    orgs, federation = pair
    with tunnel(**settings) as proxy, Https(federation, orgs[0]):
        monkeypatch.setenv("HTTPS_PROXY", proxy.url.format(name))
        error = probe_member(orgs[0].member, orgs[1]).error
    assert f"lets no connection to {orgs[0].member.endpoint} through" in error
    assert text in error
    assert "NO_PROXY" in error
    assert "wrong" not in error  # no password in a message


def test_a_proxy_that_is_not_there_and_one_of_another_kind_are_named(pair, monkeypatch):
    orgs, _ = pair
    (port,) = members.free_ports(1)
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
    assert (
        f"the proxy http://127.0.0.1:{port} lets no" in probe_member(orgs[0].member, orgs[1]).error
    )
    monkeypatch.setenv("HTTPS_PROXY", "socks5://127.0.0.1:1080")
    error = probe_member(orgs[0].member, orgs[1]).error
    assert "a proxy of the kind socks5" in error


@pytest.fixture
def inspection(tmp_path):
    """Return the certificates of a proxy that ends TLS: its authority is in proxy.pem."""
    authority = Identity.make(tmp_path / "proxy", name="inspector", endpoint="127.0.0.1:1")
    (tmp_path / "proxy.pem").write_text(authority.member.root)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.tls_certificate, authority.tls_key)
    return context


def test_a_check_names_the_authority_of_a_proxy_that_ends_tls(pair, inspection, monkeypatch):
    orgs, federation = pair
    with tunnel(ends=inspection) as proxy, Https(federation, orgs[0]):
        monkeypatch.setenv("HTTPS_PROXY", proxy.url.format("name:password@"))
        error = probe_member(orgs[0].member, orgs[1]).error
    assert "a program with a certificate by 'inspector' answers in place of org-0" in error
    assert "--signatures-only" in error


def test_members_behind_inspection_take_part_through_a_relay_for_signatures_only(
    tmp_path, inspection, monkeypatch
):
    """The proxy sees names and sizes, and no content."""
    orgs = relays.behind_nat(tmp_path, 2)
    federation = members.federated(orgs)
    keys = relays.relay_identity(tmp_path)
    place = keys.folder / "relay.member.toml"
    with (
        tunnel(ends=inspection) as proxy,
        Relay(federation, keys, signatures_only=True),
        contextlib.ExitStack() as stack,
    ):
        monkeypatch.setenv("HTTPS_PROXY", proxy.url.format("name:password@"))
        monkeypatch.setenv("FEDCB2O_PROXY_CA", str(tmp_path / "proxy.pem"))
        transports = [
            stack.enter_context(contextlib.closing(open_transport(federation, one, relay=place)))
            for one in orgs
        ]
        for transport in transports:
            transport.serve(answering(b"secret content of "))
        found = wait_for(lambda: ask(transports[0], 1, "hello", 5.0))
        assert found == [b"secret content of hello"]
        traffic = b"".join(proxy.seen)
        assert b"/v1/boxes/org-1/" in traffic
        assert b"secret content" not in traffic
        assert b"/v1/hello" not in traffic


def test_a_relay_for_signatures_only_refuses_requests_without_a_signature(pair, tmp_path):
    orgs, federation = pair
    keys = relays.relay_identity(tmp_path)
    stranger = Identity.make(tmp_path / "stranger", name="org-0", endpoint="127.0.0.1:1")
    with Relay(federation, keys, signatures_only=True):
        context = ssl.create_default_context(cadata=keys.member.root)
        host, _, port = keys.member.endpoint.rpartition(":")
        requests = [raw.get("/v1/cards"), raw.get("/v1/cards", Authorization="Ed25519 AA==")]
        # A long body is not read before its signature.
        requests.append(raw.get("/v1/boxes/org-0/" + "0" * 32, Content_Length="2000000"))
        for data in requests:
            plain = socket.create_connection((host, int(port)), timeout=10)
            with context.wrap_socket(plain, server_hostname=host) as link:
                assert raw.exchange(link, data.replace(b"GET", b"PUT"))[0] == 401
        with pytest.raises(PermissionError, match="no signature of this member"):
            relays.RelayMailbox(keys.member, stranger).cards()
        # The same request is answered once.
        mailbox = relays.RelayMailbox(keys.member, orgs[0])
        target, headers = mailbox._signed("GET", "cards")
        for status in (200, 401):
            plain = socket.create_connection((host, int(port)), timeout=10)
            with context.wrap_socket(plain, server_hostname=host) as link:
                assert raw.exchange(link, raw.get(target, **headers))[0] == status


def test_the_file_of_a_proxys_authority_must_be_readable(pair, tmp_path, monkeypatch):
    orgs, _ = pair
    keys = relays.relay_identity(tmp_path)
    monkeypatch.setenv("FEDCB2O_PROXY_CA", str(tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match=r"FEDCB2O_PROXY_CA=.*missing\.pem cannot be read"):
        relays.RelayMailbox(keys.member, orgs[0]).cards()


needs_programs = pytest.mark.skipif(
    not all(map(shutil.which, ("curl", "openssl", "base64", "sha256sum"))), reason="without curl"
)


@needs_programs
def test_the_documented_commands_get_a_manifest_and_a_model(pair, tmp_path):
    """The commands of docs/networks.md, with the names and the port of this test."""
    orgs, federation = pair
    content = os.urandom(2**20 + 400)
    manifest = Manifest.from_content(
        content, run=federation.run, agent=1, round=0, dim=2**18 + 100, num_samples=1
    )
    server = Server(federation, 1, orgs[1], Ledger(tmp_path, federation), hello_content=dict)
    server.publish(Snapshot(manifest.to_signed_bytes(orgs[1].sign), content))
    page = (ROOT / "docs" / "networks.md").read_text()
    section = page.partition("## Ask a node with curl")[2]
    documented = "\n".join(re.findall(r"```sh\n(.*?)```", section, re.DOTALL))
    (tmp_path / "hospital-b.pem").write_text(orgs[1].member.root)
    key = b"\x30\x2a\x30\x05\x06\x03\x2b\x65\x70\x03\x21\x00" + orgs[1].member.key
    pem = (
        f"-----BEGIN PUBLIC KEY-----\n{base64.b64encode(key).decode()}\n-----END PUBLIC KEY-----\n"
    )
    (tmp_path / "hospital-b-key.pem").write_text(pem)
    (tmp_path / "keys").symlink_to(orgs[0].folder)
    place = orgs[1].member.endpoint
    script = documented.replace("peer.hospital-b.example:7447", place)
    script = (
        f"set -eu\nRUN={federation.run.hex()}\n{script}"
        + """
get() {
    target="/v1/models/$digest?run=$RUN&from=0&to=1&nonce=$(openssl rand -hex 16)"
    printf 'fedcb2o request v2\\0GET %s' "$target" > request
    [ -z "$1" ] || printf '\\nRange: %s' "$1" >> request
    signature=$(openssl pkeyutl -sign -rawin -inkey keys/signing.key -in request | base64 -w0)
    curl $tls -i ${1:+-H "Range: $1"} -H "Authorization: Ed25519 $signature" \\
        "https://PLACE$target" > "$2"
}
get "" whole
get "bytes=1048576-" rest
""".replace("PLACE", place)
    )
    with Https(federation, orgs[1]) as node:
        node.serve(server.on_request)
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 0, done.stderr
    assert "Signature Verified Successfully" in done.stdout
    state = json.loads(done.stdout[: done.stdout.index("}") + 1])
    assert state["run"] == federation.run.hex()
    head, _, body = (tmp_path / "whole").read_bytes().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert f'etag: "{manifest.digest.hex()}"'.encode() in head.lower()
    assert body == content
    head, _, body = (tmp_path / "rest").read_bytes().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 206")
    assert b"content-range: bytes 1048576-1048975/1048976" in head.lower()
    assert body == content[2**20 :]


@pytest.mark.parametrize("name", ["kubernetes.yaml"])
def test_the_manifests_of_kubernetes_have_few_rights_and_limits(name):
    documents = [*yaml.safe_load_all((ROOT / "deploy" / name).read_text())]
    assert [one["kind"] for one in documents] == ["Service", "StatefulSet", "Service", "Deployment"]
    for one in documents[1::2]:
        assert one["spec"]["replicas"] == 1
        pod = one["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        for container in (*pod["initContainers"], *pod["containers"]):
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= pod["containers"][0]["resources"]["limits"].keys()
        mounted = {m["name"] for c in pod["containers"] for m in c["volumeMounts"]}
        declared = {v["name"] for v in pod["volumes"]}
        declared |= {v["metadata"]["name"] for v in one["spec"].get("volumeClaimTemplates", [])}
        assert mounted <= declared


def test_the_job_of_slurm_is_valid_shell_and_ends_its_node_in_order(tmp_path):
    """The scheduler sends SIGTERM; the node gets it, and the job is put into the queue again."""
    script = ROOT / "deploy" / "fedcb2o.sbatch"
    for name, text in (
        (
            "fedcb2o",
            'echo "$@" > called; trap "touch ended; exit 0" TERM; while :; do sleep 0.1; done',
        ),
        ("scontrol", 'echo "$@" > requeued'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "signed.jsonl").touch()
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment |= {"SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["sh", script], cwd=tmp_path, env=environment) as job:
        wait_for((tmp_path / "called").exists)
        time.sleep(0.3)
        job.terminate()
        assert job.wait(30) == 0
    assert (tmp_path / "ended").exists()
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert (tmp_path / "called").read_text().endswith("--relay relay.member.toml --resume\n")
