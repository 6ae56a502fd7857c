"""`peer check` over real links on loopback."""

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tests.peer.members import federated, identities
from tests.peer.waiting import Clock
from tests.tiny import run_cli
from typer.testing import CliRunner

from fedcb2o.cli import app
from fedcb2o.peer import Federation, Identity
from fedcb2o.peer.node import preflight as checking
from fedcb2o.peer.node.preflight import CheckResult, check_members, format_results, hello_content
from fedcb2o.peer.wire.protocol import Answer, AnswerStatus, decode_request, encode_hello
from fedcb2o.peer.wire.transport import Https, Reply


@pytest.fixture(scope="module")
def organisations(tmp_path_factory):
    """Return three identities, their federation, and the folder of its file."""
    folder = tmp_path_factory.mktemp("organisations")
    members = identities(folder, 3)
    return members, federated(members, path=folder / "federation.toml"), folder


def serve_hello(
    exit_stack: ExitStack,
    federation: Federation,
    identity: Identity,
    changes: Mapping[str, Any],
    *,
    signer: Identity,
) -> list[bytes]:
    """Answer HELLO requests as `identity`, with `changes` of the usual content; return them."""
    transport = exit_stack.enter_context(Https(federation, identity))

    requests: list[bytes] = []

    def on_request(data: bytes, reply: Reply) -> None:
        requests.append(data)
        nonce = decode_request(data)[0].nonce
        body = encode_hello(
            {**hello_content(federation, identity), "checking": False, **changes},
            nonce,
            signer.sign,
        )
        threading.Thread(target=reply, args=(Answer(AnswerStatus.OK, body),), daemon=True).start()

    transport.serve(on_request)
    return requests


class TimeOfRequests(Clock):
    """Time that begins with the first request to a member: a second for each further one."""

    def __init__(self, requests: Sequence[bytes]) -> None:
        super().__init__()
        self.requests, self.time = requests, time.time

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        super().sleep(1.0 if self.requests else 0.0)


def results_of_first(
    organisations: Any, requests: Sequence[bytes] | None = None, **options: Any
) -> dict[str, CheckResult]:
    """Return the results of a check by the first member, by name.

    It ends when all members have answered, or a while after the first of `requests`.
    """
    members, federation, _ = organisations
    clock = time if requests is None else TimeOfRequests(requests)
    with mock.patch.object(checking, "time", clock):
        results = check_members(federation, members[0], **{"seconds": 4.0, **options})
    return {result.name: result for result in results}


def test_members_check_each_other_at_the_same_time(organisations):
    members, federation, _ = organisations

    def check(j: int) -> list[CheckResult]:
        time.sleep(0.3 * j)
        return check_members(federation, members[j], seconds=3600.0)  # ends when all have answered

    with ThreadPoolExecutor(3) as pool:
        checks = list(pool.map(check, range(3)))
    for j, check in enumerate(checks):
        assert check[0].name == members[j].member.name
        assert [peer_result.error for peer_result in check] == ["", "", ""]
        assert check[0].notes == (f"the certificate in {members[j].folder} lasts 396 days",)
        assert all("checking too" in peer_result.notes[0] for peer_result in check[1:])


def test_an_unreachable_member_is_reported(organisations, exit_stack):
    members, federation, _ = organisations
    content = {"round": 3, "rounds": 10}
    requests = serve_hello(exit_stack, federation, members[1], content, signer=members[1])
    results = results_of_first(organisations, requests)
    assert results["org-1"].error == ""
    assert "3 of 10 rounds done" in results["org-1"].notes[0]
    assert "refuses connections" in results["org-2"].error
    assert [results[f"org-{j}"].verdict for j in range(3)] == ["ok", "ok", "not running yet"]
    assert members[2].member.endpoint in results["org-2"].error


def test_a_check_next_to_a_running_node_only_sends_requests(organisations, exit_stack):
    members, federation, _ = organisations
    exit_stack.enter_context(Https(federation, members[0]))
    for member in members[1:]:
        serve_hello(exit_stack, federation, member, {}, signer=member)
    results = results_of_first(organisations, seconds=60.0)
    assert [member.error for member in results.values()] == ["", "", ""]
    assert "our own node (or another program) has the port" in results["org-0"].notes[0]


def test_a_running_node_keeps_the_certificate_of_its_start(tmp_path, exit_stack):
    members = identities(tmp_path, 2)
    federation = federated(members)
    members[0].renew(days=10)
    exit_stack.enter_context(Https(federation, members[0]))
    assert certificate_notes(federation, members[0]) == ["its certificate lasts 9 days: " + RENEW]
    members[0].renew(days=99)
    stored = f"the certificate in {members[0].folder} lasts"
    assert certificate_notes(federation, members[0]) == [
        "our running node uses a certificate that lasts 9 days, another one than that in the "
        "folder: stop the node, and start it again with --resume",
        f"{stored} 98 days",
    ]
    exit_stack.close()
    assert certificate_notes(federation, members[0]) == [f"{stored} 98 days"]
    members[0].renew(days=10)
    assert certificate_notes(federation, members[0]) == [f"{stored} 9 days: {RENEW}"]
    command = ["peer", "renew", "--identity", str(members[0].folder)]
    assert "uses the former certificate until" in CliRunner().invoke(app, command).output


RENEW = "`fedcb2o peer renew` there, soon"


def certificate_notes(federation: Federation, identity: Identity) -> list[str]:
    """Return the notes of a check on our own certificate."""
    first, *_ = check_members(federation, identity, seconds=0.2)
    return [note for note in first.notes if "certificate" in note]


@pytest.mark.parametrize(
    ("claim", "error"),
    [
        ({}, ""),
        ({"version": 1, "federation": "00"}, "the relay holds another version 1: compare"),
        ({"version": 0, "federation": "00"}, "version 0 of the federation, and we 1: send"),
        ({"version": 10**99, "federation": "00"}, f"version 1{'0' * 59} of the federation, and"),
        ({"version": "\x1b[2J", "federation": "00"}, "another version 1"),
        ({"run": "00", "federation": "00"}, "holds another federation"),
    ],
)
def test_another_version_of_a_relay_is_reported(organisations, claim, error):
    _, federation, _ = organisations
    content = {
        "run": federation.run.hex(),
        "version": federation.version,
        "federation": federation.digest.hex(),
        **claim,
    }
    message = checking.describe_disagreement(federation, content, "the relay")
    assert error in message
    assert bool(message) == bool(error)
    assert message.isprintable()
    assert checking.describe_disagreement(federation, {}) == ""


def test_differences_in_a_hello_answer_are_reported(tmp_path, exit_stack, monkeypatch):
    members = identities(tmp_path, 2)
    federation = federated(members)
    content: dict[str, Any] = {}
    serve_hello(exit_stack, federation, members[1], content, signer=members[1])
    now = time.time()
    clock = SimpleNamespace(time=lambda: now, monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(checking, "time", clock)
    for changes, problem, note in (
        ({"time": now + 3600}, "", "clock is 3600 s ahead of ours"),
        ({"time": now - 90}, "", "clock is 90 s behind ours"),
        ({"time": "noon"}, "", "fedcb2o"),
        ({"software": "9.9\x1b[2J" + "x" * 1000}, "", "fedcb2o 9.9?[2Jxxx"),
        (
            {"federation": "00", "version": 2},
            "it holds version 2 of the federation, and we 1: get the newer file",
            "",
        ),
        (
            {"federation": "00", "version": 10**99},
            f"it holds version 1{'0' * 59} of the federation, and we 1: get the newer file",
            "",
        ),
        (
            {"federation": "00", "version": 0},
            "it holds version 0 of the federation, and we 1: send it ours",
            "",
        ),
        (
            {"federation": "00", "version": 2, "file": "rubbish"},
            "it holds version 2 of the federation, in which we are removed or changed",
            "",
        ),
        ({"federation": "00"}, "another version 1", ""),
        ({"federation": "00", "run": "00", "keys": 7}, "another federation, differing in", ""),
    ):
        content.clear()
        content.update(changes)
        own_result, result = check_members(federation, members[0], seconds=60.0)
        assert problem in result.error
        assert bool(problem) == bool(result.error)
        assert note in "; ".join(result.notes)
        text = "\n".join(format_results([own_result, result]))
        assert text.replace("\n", "").isprintable()
        assert len(text.splitlines()) == 2


def test_differing_keys_of_the_federation_are_named(organisations, exit_stack):
    members, federation, _ = organisations
    other = federated(members, rounds=federation.rounds + 1, round_seconds=7.0)
    requests = serve_hello(exit_stack, other, members[1], {}, signer=members[1])
    results = results_of_first(organisations, requests)
    assert results["org-1"].error.startswith("it holds another federation, differing in ")
    assert "round_seconds" in results["org-1"].error
    assert "rounds" in results["org-1"].error


def test_an_answer_signed_by_another_key_is_refused(organisations, exit_stack):
    members, federation, _ = organisations
    requests = serve_hello(exit_stack, federation, members[1], {}, signer=members[2])
    error = results_of_first(organisations, requests)["org-1"].error
    assert "is not signed by org-1's key" in error


def test_wrong_programs_at_the_endpoints_of_members_are_reported(
    organisations, exit_stack, tmp_path
):
    """One endpoint has a new identity of the same name, another one a server without TLS."""
    members, _, _ = organisations
    new_identity = Identity.make(
        tmp_path / "anew", name="org-1", endpoint=members[1].member.endpoint
    )
    exit_stack.enter_context(Https(federated([new_identity, members[0]]), new_identity))
    host, _, port = members[2].member.endpoint.partition(":")
    server = exit_stack.enter_context(socket.create_server((host, int(port))))

    def greet() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

    threading.Thread(target=greet, daemon=True).start()
    results = results_of_first(organisations, seconds=0.5)
    assert "has no certificate of org-1" in results["org-1"].error
    assert "speaks no TLS" in results["org-2"].error
    server.shutdown(socket.SHUT_RDWR)


def test_a_certificate_that_expires_soon_is_reported(tmp_path, exit_stack):
    members = identities(tmp_path, 2)
    now = datetime.now(UTC)
    members[1].renew(until=now + timedelta(days=10))
    federation = federated(members)
    serve_hello(exit_stack, federation, members[1], {}, signer=members[1])
    _, result = check_members(federation, members[0], seconds=60.0)
    assert result.error == ""
    assert "lasts 9 days: `fedcb2o peer renew`" in "; ".join(result.notes)


def test_the_check_command(organisations, exit_stack):
    members, federation, folder = organisations
    for other in members[1:]:
        serve_hello(exit_stack, federation, other, {}, signer=other)
    options = ["--identity", str(members[0].folder), "--seconds", "60"]
    command = ["peer", "check", str(folder / "federation.toml"), *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    head, *other = result.stdout.splitlines()
    run = federation.run.hex(" ", 2)
    assert head == f"tiny, run {run}, version 1, 3 members: compare the whole line by telephone"
    assert len(other) == 3
    exit_stack.close()
    command[-1] = "0.3"
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert result.stdout.count("not running yet") == 2
    assert "WRONG" not in result.stdout
    assert members[1].member.endpoint in result.stdout


def test_the_check_command_reports_user_functions_and_mismatched_data(tmp_path):
    members = identities(tmp_path, 2)
    name = "tests.peer.members:own_criterion"
    experiment_changes = {"algorithm": {"criterion": {"name": name, "by": 2.0}}}
    federated(members, changes=experiment_changes, path=tmp_path / "f.toml")
    options = ["--identity", str(members[0].folder), "--seconds", "0"]
    command = ["peer", "check", str(tmp_path / "f.toml"), *options]
    assert f"names {name}, code that would run here: read it, then --own {name}" in failed_output(
        command
    )
    assert "names" not in failed_output([*command, "--own", name])
    x, y = torch.rand(80, 1, 8, 8).numpy(), torch.arange(80).numpy() % 10
    np.savez(tmp_path / "good.npz", x=x, y=y)
    np.savez(tmp_path / "bad.npz", x=x[:, :, 1:], y=y)
    complete = [*command, "--own", name, "--data", str(tmp_path / "good.npz")]
    assert "the data fit: " in failed_output(complete)
    assert "allow it with --own" in run_cli(*command, "--data", tmp_path / "good.npz").one_line()
    assert (
        "the federation agreed on (1, 8, 8)"
        in run_cli(*complete[:-1], tmp_path / "bad.npz").one_line()
    )
    assert (
        "--data: there is no file nowhere.npz" in run_cli(*complete[:-1], "nowhere.npz").one_line()
    )


def failed_output(command: list[str]) -> str:
    """Return the output of a check that fails because a member is missing."""
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    return result.stdout


def test_text_of_peers_is_printed_as_short_printable_ascii():
    assert checking._printable_ascii("a\x1b]0;evil\x07\n" + "é" * 100) == "a?]0;evil??" + "?" * 49
