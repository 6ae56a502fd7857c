"""Operation of a node: encrypted keys, backups, metrics, log lines, versions of the protocol."""

import contextlib
import gzip
import http.client
import json
import logging
import shutil
import subprocess
import tarfile
import urllib.error
import urllib.request

import pytest
from tests.peer import members
from tests.peer.nodes import nodes
from tests.peer.waiting import wait_for
from typer.testing import CliRunner

from fedcb2o.cli import app, main
from fedcb2o.cli.log_output import (
    LogFormat,
    configure_logs,
    has_log_file,
    has_log_settings,
    stderr_logging,
)
from fedcb2o.errors import ConfigError, RemovedError, RunError
from fedcb2o.peer import Identity, amend_federation, sign_federation, write_federation
from fedcb2o.peer._backup import back_up, restore
from fedcb2o.peer.membership import passphrase
from fedcb2o.peer.node.metrics import NodeMetrics
from fedcb2o.peer.node.observer import NullObserver
from fedcb2o.peer.report.round_log import RoundLog
from fedcb2o.peer.wire.equivocation import SigningJournal
from fedcb2o.peer.wire.protocol import Answer, AnswerStatus
from fedcb2o.peer.wire.transport import Https

RECORD = {
    "round": 3, "accuracy": 0.75, "train_loss": 0.5, "own_weight": 0.25, "alive": [1], "asked": [1, 2],
    "received": [{"id": 1, "round": 2, "seconds": 0.1, "weight": 0.75}], "late": [], "behind": [2],
    "no_model": [], "relay_down": [3], "alone_rounds": 3, "class_gains": {},
    "gain": {"samples": 99, "accuracy": 0.75, "alone": 0.5, "low": 0.125, "high": 0.375},
    "metrics": {"auc": 0.5, "f1": None}, "refused": {"2": "hash"}, "sent": 10, "got": 20, "seconds": {"round": 1.5},
}  # fmt: skip


@pytest.fixture
def secret(tmp_path, monkeypatch):
    path = tmp_path / "passphrase"
    path.write_text("a secret of this test\n")
    monkeypatch.setenv(passphrase.FILE_VARIABLE, str(path))
    return path


def test_encrypted_keys_open_links_and_stay_encrypted_after_renewal(secret, tmp_path, monkeypatch):
    first, second = members.free_ports(2)
    words = ["peer", "identity", "--name", "org-0", "--endpoint", f"127.0.0.1:{first}", "--encrypt"]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "org-0")])
    assert result.exit_code == 0, result.output
    plain = Identity.make(tmp_path / "org-1", name="org-1", endpoint=f"127.0.0.1:{second}")
    encrypted = Identity.read(tmp_path / "org-0")
    encrypted.renew()
    moved = encrypted.with_endpoint(tmp_path / "moved", endpoint="127.0.0.1:9999")
    for folder in (encrypted.folder, moved.folder):
        for name in ("signing.key", "root.key", "tls.key"):
            assert b"ENCRYPTED" in (folder / name).read_bytes()

    federation = members.federated([encrypted, plain])
    with Https(federation, encrypted) as client, Https(federation, plain) as server:
        server.serve(lambda request, reply: reply(Answer(AnswerStatus.OK, b"heard")))
        wait_until_linked(client, server)

    secret.write_text("another one")
    with pytest.raises(ConfigError, match="with this passphrase"):
        Identity.read(encrypted.folder)
    secret.write_text("")
    with pytest.raises(ConfigError, match="empty"):
        Identity.read(encrypted.folder)
    monkeypatch.delenv(passphrase.FILE_VARIABLE)
    with pytest.raises(ConfigError, match=passphrase.FILE_VARIABLE):
        Identity.read(encrypted.folder)
    monkeypatch.setenv(passphrase.VARIABLE, "a secret of this test")
    assert Identity.read(encrypted.folder).member == encrypted.member


def wait_until_linked(client: Https, server: Https) -> None:

    wait_for(lambda: client.connected_peers() == {1} and server.connected_peers() == {0})
    wait_for(lambda: client.ask(1, b"GET /v1/x", 5.0).answer() == Answer(AnswerStatus.OK, b"heard"))


def test_renew_encrypts_the_keys_of_an_identity(secret, tmp_path):
    identity = Identity.make(tmp_path / "keys", name="org-0", endpoint="127.0.0.1:9998")
    result = CliRunner().invoke(
        app, ["peer", "renew", "--identity", str(identity.folder), "--encrypt"]
    )
    assert result.exit_code == 0, result.output
    read = Identity.read(identity.folder)
    read.check_certificate()
    assert b"ENCRYPTED" in read.tls_key.read_bytes()
    assert read.sign(b"text") == identity.sign(b"text")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="without OpenSSL's program")
def test_an_existing_authority_signs_a_member_file_as_documented(tmp_path):
    identity = Identity.make(tmp_path / "keys", name="org-0", endpoint="127.0.0.1:9998")
    file = identity.folder / "org-0.member.toml"

    def openssl(words: str) -> int:
        return subprocess.run(
            ["openssl", *words.split()], cwd=tmp_path, capture_output=True, check=False
        ).returncode

    new = "-newkey rsa:2048 -nodes"
    subject = f"-subj /CN=authority {new} -days 1"
    assert openssl(f"req -x509 {subject} -keyout ca.key -out ca.pem") == 0
    assert openssl(f"req -subj /CN=hospital {new} -keyout host.key -out host.csr") == 0
    assert openssl("x509 -req -in host.csr -CA ca.pem -CAkey ca.key -days 1 -out host.pem") == 0
    assert openssl(f"req -x509 {subject} -keyout other.key -out other.pem") == 0
    sign = "cms -sign -binary -nodetach -signer host.pem -inkey host.key -outform PEM"
    assert openssl(f"{sign} -in {file} -out org-0.cms") == 0
    verify = "cms -verify -binary -inform PEM -purpose any -in org-0.cms -out read.toml -CAfile"
    assert openssl(f"{verify} other.pem") != 0
    assert openssl(f"{verify} ca.pem") == 0
    assert (tmp_path / "read.toml").read_bytes() == file.read_bytes()


def test_health_and_metrics_follow_the_rounds(monkeypatch, tmp_path):
    identity = Identity.make(tmp_path / "keys", name="org-0", endpoint="127.0.0.1:9998")
    with NodeMetrics(
        NullObserver(), 0, name="org-0", rounds=9, round_seconds=1.0, expires=identity.expires
    ) as metrics:
        url = f"http://127.0.0.1:{metrics.port}"
        metrics.on_phase(4, "training")
        metrics.on_round(RECORD)
        metrics.on_note("careful")
        lines = urllib.request.urlopen(f"{url}/metrics").read().decode().splitlines()
        for line in (
            "fedcb2o_round 3.0",
            "fedcb2o_rounds 9.0",
            "fedcb2o_accuracy 0.75",
            "fedcb2o_peers_connected 1.0",
            "fedcb2o_models_received_total 1.0",
            'fedcb2o_models_missing_total{reason="behind"} 1.0',
            'fedcb2o_models_missing_total{reason="late"} 0.0',
            'fedcb2o_models_missing_total{reason="no_model"} 0.0',
            'fedcb2o_models_missing_total{reason="relay_down"} 0.0',  # not asked
            "fedcb2o_models_averaged_total 1.0",
            "fedcb2o_gain 0.25",
            "fedcb2o_gain_low 0.125",
            "fedcb2o_gain_high 0.375",
            "fedcb2o_accuracy_alone 0.5",
            'fedcb2o_metric{name="auc"} 0.5',
            'fedcb2o_metric{name="f1"} NaN',
            'fedcb2o_models_refused_total{reason="hash"} 1.0',
            'fedcb2o_traffic_bytes_total{direction="received"} 20.0',
            "fedcb2o_notes_total 1.0",
        ):
            assert line in lines
        metrics.on_round({**RECORD, "round": 9})  # the baseline has trained for 3 rounds
        lines = urllib.request.urlopen(f"{url}/metrics").read().decode().splitlines()
        assert {"fedcb2o_gain NaN", "fedcb2o_gain_low NaN", "fedcb2o_accuracy_alone 0.5"} <= {
            *lines
        }
        metrics.on_round(RECORD)
        health = json.load(urllib.request.urlopen(f"{url}/health"))
        assert (health["healthy"], health["round"], health["phase"]) == (True, 3, "training")
        monkeypatch.setattr(metrics, "_stale_seconds", -1.0)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{url}/health")
        with pytest.raises(RunError, match="in use"):
            NodeMetrics(
                NullObserver(), metrics.port, name="b", rounds=1, round_seconds=1.0,
                expires=identity.expires,
            )  # fmt: skip


def status_of(port: int, path: str, *hosts: str) -> int:
    """Return the status of a request with these headers `Host`."""
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    ) as connection:
        connection.putrequest("GET", path, skip_host=True)
        for host in hosts:
            connection.putheader("Host", host)
        connection.endheaders()
        return connection.getresponse().status


@pytest.mark.parametrize("path", ["/metrics", "/health", "/nothing"])
def test_metrics_are_served_to_a_host_of_loopback_only(path, tmp_path):
    """The name of an attacker's web page leads to 127.0.0.1 in the browser of the operator."""
    identity = Identity.make(tmp_path / "keys", name="org-0", endpoint="127.0.0.1:9998")
    with NodeMetrics(
        NullObserver(), 0, name="org-0", rounds=9, round_seconds=1.0, expires=identity.expires
    ) as metrics:
        port = metrics.port
        for host in ("127.0.0.1", "localhost", "LocalHost", "[::1]"):
            for text in (host, f"{host}:{port}", f"{host}:80"):
                assert status_of(port, path, text) == (404 if path == "/nothing" else 200), text
        for host in (
            "evil.example", f"evil.example:{port}", "localhost.evil.example", "127.0.0.1.evil.example",
            "evil.example#localhost", "127.0.0.11", "[::11]", "localhost:", "localhost:x", "",
        ):  # fmt: skip
            assert status_of(port, path, host) == 421, host
        assert status_of(port, path) == 421
        assert status_of(port, path, "localhost", "evil.example") == 421


def test_log_lines_are_objects_with_the_records_of_rounds(tmp_path):
    file = tmp_path / "node.log"
    with stderr_logging():
        assert not has_log_settings()
        configure_logs(LogFormat.json, file)
        assert has_log_settings()
        with RoundLog({0: "org-0", 1: "org-1", 2: "org-2"}, agent_id=0, rounds=9) as log:
            log.on_round(RECORD)
            log.on_note("org-1 is late")
        logging.getLogger("fedcb2o.peer").error("broken", exc_info=ValueError("why"))
    first, second, third = map(json.loads, file.read_text().splitlines())
    assert (first["level"], first["member"], first["record"]) == ("info", "org-0", RECORD)
    assert first["message"].startswith("org-0: round 3/9")
    assert (second["level"], second["message"]) == ("warning", "org-0: org-1 is late")
    assert "ValueError: why" in third["error"]


@pytest.mark.parametrize("has_file", [True, False])
def test_a_terminal_shows_the_live_table_in_addition_to_a_log_file(
    has_file, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal for rich
    monkeypatch.setenv("TERM", "xterm")
    file = tmp_path / "node.log"
    with stderr_logging():
        configure_logs(LogFormat.json, file if has_file else None)
        names = {0: "org-0", 1: "org-1", 2: "org-2"}
        with RoundLog(names, agent_id=0, rounds=9, has_table=has_log_file()) as log:
            log.on_round(RECORD)
            log.on_note("org-1 is late")
    output = capsys.readouterr().err
    lines = (file.read_text() if has_file else output).splitlines()
    assert [json.loads(line)["level"] for line in lines] == ["info", "warning"]
    assert ("round of model" in output) == has_file


ENDS = [
    (ConfigError("no such member"), 2, "error", "no such member"),
    (RemovedError("version 2 removes org-0"), 3, "error", "version 2 removes org-0"),
    (KeyboardInterrupt(), 130, "info", "Interrupted. What is written stays"),
    (OSError(28, "No space left", "rounds.jsonl"), 2, "error", "rounds.jsonl: No space left"),
    (ValueError("why"), 1, "error", "unexpected ValueError: why"),
]


@pytest.mark.parametrize("has_file", [True, False])
@pytest.mark.parametrize(("error", "status", "level", "text"), ENDS)
def test_the_end_of_a_command_is_logged(
    error, status, level, text, has_file, tmp_path, monkeypatch, capsys
):
    """With a log file, standard error has the message as text; otherwise it has the JSON line."""

    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("fedcb2o.peer.membership.federation.read_federation", fail)
    log = tmp_path / "node.log"
    options = ["--log-format", "json", *(["--log-file", str(log)] if has_file else [])]
    words = ["peer", "run", "federation.toml", "--identity", "keys", "--data", "a.npz"]
    monkeypatch.setattr("sys.argv", ["fedcb2o", *options, *words, "--out", "run"])
    is_unexpected = isinstance(error, ValueError) and not isinstance(error, ConfigError)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == status
    output = capsys.readouterr().err
    (line,) = (log.read_text() if has_file else output).splitlines()
    content = json.loads(line)
    assert content["level"] == level
    assert content["message"].startswith(text)
    assert ("error" in content) == is_unexpected
    if has_file and is_unexpected:
        assert output.startswith("Traceback")
        assert output.endswith("ValueError: why\n")
    elif has_file:
        assert text in output
        assert output.startswith("Error: ") == (level == "error")


def test_an_invalid_option_is_logged(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["fedcb2o", "--log-format", "json", "peer", "relay", "--nothing"]
    )
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    content = json.loads(capsys.readouterr().err)
    assert content["level"] == "error"
    assert content["message"].endswith("See `fedcb2o peer relay --help`.")


def test_log_files_are_rotated(tmp_path, monkeypatch):
    monkeypatch.setattr("fedcb2o.cli.log_output._MAX_LOG_BYTES", 200)
    with stderr_logging():
        configure_logs(LogFormat.text, tmp_path / "node.log")
        for k in range(40):
            logging.getLogger("fedcb2o.peer").info("line %d", k)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["node.log", *(f"node.log.{k}" for k in range(1, 6))]
    assert (tmp_path / "node.log").read_text().endswith("INFO line 39\n")


def test_backup_and_restore_errors_name_the_problem(tmp_path):
    keys, run = tmp_path / "keys", tmp_path / "run"
    Identity.make(keys, name="org-0", endpoint="127.0.0.1:9998")
    run.mkdir()
    out = tmp_path / "backup.tar.gz"
    with pytest.raises(ConfigError, match="must hold keys"):
        back_up(keys, run, out)
    (run / "federation.toml").write_text("")
    (run / "signed.jsonl").write_text("")
    back_up(keys, run, out)
    assert out.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="never overwritten"):
        back_up(keys, run, out)
    with pytest.raises(ConfigError, match="not empty"):
        restore(out, keys, run)
    whole = out.read_bytes()
    damaged = [b"rubbish", b"", whole[:8], whole[: len(whole) // 2]]
    damaged += [
        gzip.compress(gzip.decompress(whole)[:1000]),
        whole[:10] + b"\xff" * 20 + whole[30:],
    ]
    for number, content in enumerate(damaged):
        out.write_bytes(content)
        with pytest.raises(ConfigError, match="no backup") as raised:
            restore(out, tmp_path / f"a{number}", tmp_path / f"b{number}")
        assert "\n" not in str(raised.value)
    assert SigningJournal(run).is_complete is False


def test_restore_prints_the_federation_version_of_the_backup(tmp_path):
    orgs = members.identities(tmp_path, 3)
    run = tmp_path / "run"
    run.mkdir()
    (run / "signed.jsonl").write_text("")
    path = run / "federation.toml"
    first = members.federated(orgs, path=path)
    for version in (1, 2):
        if version == 2:
            write_federation(amend_federation(first, remove=["org-2"]), path)
            for signer in orgs[:2]:
                sign_federation(path, signer)
        backup = tmp_path / f"backup-{version}.tar.gz"
        (orgs[0].folder / "runs.toml").write_text("")
        back_up(orgs[0].folder, run, backup)
        with tarfile.open(backup) as tar:
            assert not any("runs.toml" in name for name in tar.getnames())
        new = [str(tmp_path / f"{name}-{version}") for name in ("keys", "run")]
        words = ["peer", "restore", str(backup), "--identity", new[0], "--run", new[1]]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        assert f"from version {version} of the federation" in result.output
        assert Identity.read(new[0]).member == orgs[0].member
    journal = tmp_path / "keys-2" / "signed-versions.toml"
    assert journal.read_bytes() == (orgs[0].folder / "signed-versions.toml").read_bytes()
    assert journal.stat().st_mode & 0o777 == 0o600
    write_federation(amend_federation(first, remove=["org-1"]), path)
    with pytest.raises(ConfigError, match="has signed another version 2"):
        sign_federation(path, Identity.read(tmp_path / "keys-2"))


@pytest.mark.slow
def test_a_node_restored_from_a_running_nodes_backup_signs_no_round_twice(tmp_path):
    with nodes(tmp_path, 3, changes={"rounds": 90}, round_seconds=0.4, lag=2) as peers:
        peers.start()
        peers.until(0, 6)
        peers.back_up(0, tmp_path / "backup.tar.gz")
        peers.until(0, 14)
        peers.processes[0].kill()
        peers.processes[0].join()
        shutil.rmtree(peers.out(0))
        shutil.rmtree(peers.identities[0])
        peers.restore(0, tmp_path / "backup.tar.gz")
        peers.start(0, resume=True)
        assert peers.wait() == [0] * 3, [peers.log(j) for j in range(3)]
        assert not list(tmp_path.glob("out-*/proofs/*"))
        assert peers.lines(0)[-1]["round"] == 90
        assert not (peers.out(0) / "restored").exists()
        last = peers.lines(1)[-10:]
        assert any(model["id"] == 0 for line in last for model in line["received"])
