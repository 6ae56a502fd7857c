"""`peer check` over real links on loopback."""

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.peer.members import federated, identities
from tests.tiny import here
from typer.testing import CliRunner

from fedcb2o.cli import app
from fedcb2o.peer.membership import Federation, Identity
from fedcb2o.peer.node import CheckResult, check_members, format_results, hello_content
from fedcb2o.peer.node import _preflight as checking
from fedcb2o.peer.wire import Answer, AnswerStatus, Reply, Zenoh, decode_request, encode_hello


@pytest.fixture(scope="module")
def organisations(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[Identity], Federation, Path]:
    """Three of them, and their federation in a file."""
    folder = tmp_path_factory.mktemp("organisations")
    who = identities(folder, 3)
    return who, federated(who, path=folder / "federation.toml"), folder


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def says(
    opened: ExitStack,
    federation: Federation,
    identity: Identity,
    said: Mapping[str, Any],
    *,
    signer: Identity,
) -> None:
    """Somebody who answers HELLO with what is `said`, beside or in place of the usual."""
    one = opened.enter_context(Zenoh(federation, identity))

    def hear(data: bytes, reply: Reply) -> None:
        nonce = decode_request(data)[0].nonce
        body = encode_hello(
            {**hello_content(federation, identity), "checking": False, **said}, nonce, signer.sign
        )
        threading.Thread(
            target=reply, args=(Answer(nonce, AnswerStatus.OK, body).encode(),), daemon=True
        ).start()

    one.serve(hear)


def one(organisations: Any, **options: Any) -> dict[str, CheckResult]:
    """What the first of them finds, by name."""
    who, federation, _ = organisations
    return {
        each.name: each for each in check_members(federation, who[0], **{"seconds": 2.0, **options})
    }


def test_all_check_at_once(organisations: Any) -> None:
    who, federation, _ = organisations
    start = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        late = [
            pool.submit(
                lambda who=who, j=j: time.sleep(0.3 * j) or check_members(federation, who[j])
            )
            for j in range(3)
        ]
        found = [each.result() for each in late]
    assert time.monotonic() - start < 15  # of 20: it ends when all answered
    for j, each in enumerate(found):
        assert each[0].name == who[j].member.name
        assert [one.error for one in each] == ["", "", ""]
        assert each[0].notes == (f"the certificate in {who[j].folder} lasts 396 days",)
        assert all("checking too" in one.notes[0] for one in each[1:])


def test_who_is_not_there(organisations: Any, opened: ExitStack) -> None:
    who, federation, _ = organisations
    says(opened, federation, who[1], {"round": 3, "rounds": 10}, signer=who[1])
    found = one(organisations, seconds=1.0)
    assert found["org-1"].error == ""
    assert "3 of 10 rounds done" in found["org-1"].notes[0]
    assert "refuses connections" in found["org-2"].error
    assert who[2].member.endpoint in found["org-2"].error


def test_where_our_node_runs_it_only_asks(organisations: Any, opened: ExitStack) -> None:
    who, federation, _ = organisations
    opened.enter_context(Zenoh(federation, who[0]))
    for each in who[1:]:
        says(opened, federation, each, {}, signer=each)
    found = one(organisations)
    assert [each.error for each in found.values()] == ["", "", ""]
    assert "our own node (or another program) has the port" in found["org-0"].notes[0]


def test_the_certificate_of_our_running_node_is_that_of_its_start(
    tmp_path: Path, opened: ExitStack
) -> None:
    who = identities(tmp_path, 2)
    federation = federated(who)
    who[0].renew(days=10)
    opened.enter_context(Zenoh(federation, who[0]))
    assert own_notes(federation, who[0]) == ["its certificate lasts 9 days: " + RENEW]
    who[0].renew(days=99)
    stored = f"the certificate in {who[0].folder} lasts"
    assert own_notes(federation, who[0]) == [
        "our running node uses a certificate that lasts 9 days, another one than that in the "
        "folder: stop the node, and start it again with --resume",
        f"{stored} 98 days",
    ]
    opened.close()
    assert own_notes(federation, who[0]) == [f"{stored} 98 days"]
    who[0].renew(days=10)
    assert own_notes(federation, who[0]) == [f"{stored} 9 days: {RENEW}"]
    command = ["peer", "renew", "--identity", str(who[0].folder)]
    assert "uses the former certificate until" in CliRunner().invoke(app, command).output


RENEW = "`fedcb2o peer renew` there, soon"


def own_notes(federation: Federation, identity: Identity) -> list[str]:
    """What a check says of our own certificate."""
    first, *_ = check_members(federation, identity, seconds=0.2)
    return [note for note in first.notes if "certificate" in note]


@pytest.mark.parametrize(
    ("claim", "error"),
    [
        ({}, ""),
        ({"version": 1, "federation": "00"}, "another version 1: compare its file with ours"),
        ({"version": 0, "federation": "00"}, "version 0 of the federation, and we 1: its operator"),
        ({"version": 10**99, "federation": "00"}, f"version 1{'0' * 59} of the federation, and"),
        ({"version": "\x1b[2J", "federation": "00"}, "another version 1"),
        ({"run": "00", "federation": "00"}, "holds another federation"),
    ],
)
def test_the_version_that_a_relay_claims(organisations: Any, claim, error) -> None:
    _, federation, _ = organisations
    content = {
        "run": federation.run.hex(),
        "version": federation.version,
        "federation": federation.digest.hex(),
        **claim,
    }
    found = checking.describe_relay_version(federation, content)
    assert error in found
    assert bool(found) == bool(error)
    assert found.isprintable()
    assert checking.describe_relay_version(federation, {}) == ""


def test_what_a_member_says(tmp_path: Path, opened: ExitStack) -> None:
    who = identities(tmp_path, 2)
    federation = federated(who)
    said: dict[str, Any] = {}
    says(opened, federation, who[1], said, signer=who[1])
    now = time.time
    for changes, wrong, note in (
        (lambda: {"time": now() + 3600}, "", "clock is 3600 s ahead of ours"),
        (lambda: {"time": now() - 90}, "", "clock is 90 s behind ours"),
        (lambda: {"time": "noon"}, "", "fedcb2o"),
        (lambda: {"software": "9.9\x1b[2J" + "x" * 1000}, "", "fedcb2o 9.9?[2Jxxx"),
        (
            lambda: {"federation": "00", "version": 2},
            "it holds version 2 of the federation, and we 1: get its file",
            "",
        ),
        (
            lambda: {"federation": "00", "version": 0},
            "it holds version 0 of the federation, and we 1: send it ours",
            "",
        ),
        (
            lambda: {"federation": "00", "version": 2, "file": "rubbish"},
            "it holds version 2 of the federation, in which we are removed or changed",
            "",
        ),
        (lambda: {"federation": "00"}, "another version 1", ""),
        (
            lambda: {"federation": "00", "run": "00", "keys": 7},
            "another federation, differing in",
            "",
        ),
    ):
        said.clear()
        said.update(changes())
        mine, found = check_members(federation, who[0], seconds=5.0)
        assert wrong in found.error
        assert bool(wrong) == bool(found.error)
        assert note in "; ".join(found.notes)
        text = "\n".join(format_results([mine, found]))
        assert text.replace("\n", "").isprintable()
        assert len(text.splitlines()) == 2


def test_the_differing_keys_are_named(organisations: Any, opened: ExitStack) -> None:
    who, federation, _ = organisations
    other = federated(who, rounds=federation.rounds + 1, round_seconds=7.0)
    says(opened, other, who[1], {}, signer=who[1])
    found = one(organisations)
    assert found["org-1"].error.startswith("it holds another federation, differing in ")
    assert "round_seconds" in found["org-1"].error
    assert "rounds" in found["org-1"].error


def test_an_answer_of_another_key_proves_nothing(organisations: Any, opened: ExitStack) -> None:
    who, federation, _ = organisations
    says(opened, federation, who[1], {}, signer=who[2])
    assert "is not signed by org-1's key" in one(organisations, seconds=0.7)["org-1"].error


def test_what_listens_in_place_of_a_member(
    organisations: Any, opened: ExitStack, tmp_path: Path
) -> None:
    """An identity made anew, and another program."""
    who, _, _ = organisations
    anew = Identity.make(tmp_path / "anew", name="org-1", endpoint=who[1].member.endpoint)
    opened.enter_context(Zenoh(federated([anew, who[0]]), anew))
    host, _, port = who[2].member.endpoint.partition(":")
    other = opened.enter_context(socket.create_server((host, int(port))))

    def greet() -> None:
        while True:
            try:
                taken, _ = other.accept()
            except OSError:
                return
            with taken:
                taken.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

    threading.Thread(target=greet, daemon=True).start()
    found = one(organisations, seconds=0.5)
    assert "has no certificate of org-1" in found["org-1"].error
    assert "speaks no TLS" in found["org-2"].error
    other.shutdown(socket.SHUT_RDWR)


def test_a_certificate_that_ends_soon(tmp_path: Path, opened: ExitStack) -> None:
    who = identities(tmp_path, 2)
    now = datetime.now(UTC)
    who[1].renew(until=now + timedelta(days=10))
    federation = federated(who)
    says(opened, federation, who[1], {}, signer=who[1])
    _, found = check_members(federation, who[0], seconds=2.0)
    assert found.error == ""
    assert "lasts 9 days: `fedcb2o peer renew`" in "; ".join(found.notes)


def test_the_command(organisations: Any, opened: ExitStack) -> None:
    who, federation, folder = organisations
    for each in who[1:]:
        says(opened, federation, each, {}, signer=each)
    command = [
        "peer",
        "check",
        str(folder / "federation.toml"),
        "--identity",
        str(who[0].folder),
        "--seconds",
        "3",
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0
    head, *each = done.stdout.splitlines()
    run = federation.run.hex(" ", 2)
    assert head == f"tiny, run {run}, version 1, 3 members: compare the whole line by telephone"
    assert len(each) == 3
    opened.close()
    command[-1] = "0.3"
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert done.stdout.count("WRONG") == 2
    assert who[1].member.endpoint in done.stdout


def test_the_command_tells_of_own_functions_and_whether_the_data_fit(tmp_path: Path) -> None:
    who = identities(tmp_path, 2)
    name = "tests.peer.test_federation:own_criterion"
    named = {"algorithm": {"criterion": {"name": name, "by": 2.0}}}
    federated(who, changes=named, path=tmp_path / "f.toml")
    command = [
        *(
            "peer",
            "check",
            str(tmp_path / "f.toml"),
            "--identity",
            str(who[0].folder),
            "--seconds",
            "0",
        )
    ]
    assert f"names {name}, code that would run here: read it, then --own {name}" in invoked(command)
    assert "names" not in invoked([*command, "--own", name])
    x, y = torch.rand(80, 1, 8, 8).numpy(), torch.arange(80).numpy() % 10
    np.savez(tmp_path / "good.npz", x=x, y=y)
    np.savez(tmp_path / "bad.npz", x=x[:, :, 1:], y=y)
    good = [*command, "--own", name, "--data", str(tmp_path / "good.npz")]
    assert "the data fit: " in invoked(good)
    assert "allow it with --own" in here(*command, "--data", tmp_path / "good.npz").one_line()
    assert "the federation agreed on (1, 8, 8)" in here(*good[:-1], tmp_path / "bad.npz").one_line()
    assert "--data: there is no file nowhere.npz" in here(*good[:-1], "nowhere.npz").one_line()


def invoked(command: list[str]) -> str:
    """What a command that found somebody missing says."""
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    return done.stdout


def test_nothing_of_a_stranger_reaches_a_terminal() -> None:
    assert checking._printable_ascii("a\x1b]0;evil\x07\n" + "é" * 100) == "a?]0;evil??" + "?" * 49
