"""Files of peers in places that others can write to, and files that others sent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.peer import members
from tests.peer.folders import line, write_node
from tests.test_foreign_files import no_waiting  # noqa: F401 (a fixture)
from tests.tiny import run_cli

from fedcb2o.errors import ConfigError, DataError, RunError
from fedcb2o.peer.membership.federation import (
    amend_federation,
    read_federation,
    sign_federation,
    write_federation,
)
from fedcb2o.peer.membership.identity import Identity, Member
from fedcb2o.peer.membership.passphrase import read_passphrase
from fedcb2o.peer.report.peer_records import PeerRecords
from fedcb2o.peer.wire.equivocation import Proof, SigningJournal

READERS = {
    "federation": (read_federation, ConfigError),
    "member": (Member.read, ConfigError),
    "proof": (Proof.read, DataError),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["FIFO", "device", "folder"])
def test_a_file_that_others_sent_is_regular(tmp_path, name, kind):
    read, error = READERS[name]
    path = tmp_path / "file.toml"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path = Path("/dev/zero")
    with pytest.raises(error, match=f"it is a {kind}, not a regular file"):
        read(path)


@pytest.mark.parametrize("name", READERS)
def test_a_huge_file_is_not_read(tmp_path, name):
    read, error = READERS[name]
    (tmp_path / "file.toml").touch()
    os.truncate(tmp_path / "file.toml", 2**40)
    with pytest.raises(error, match="longer than"):
        read(tmp_path / "file.toml")


def test_the_user_may_name_links(tmp_path):
    orgs = members.identities(tmp_path, 2)
    made = members.federated(orgs, path=tmp_path / "federation.toml")
    (tmp_path / "link.toml").symlink_to("federation.toml")
    assert read_federation(tmp_path / "link.toml").digest == made.digest


@pytest.mark.parametrize("name", ["signing.key", "org-0.member.toml", "root.pem"])
def test_keys_are_regular_files_or_links_to_them(tmp_path, name):
    identity = members.identities(tmp_path, 1)[0]
    path = identity.folder / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert Identity.read(identity.folder).member == identity.member
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match="it is a FIFO"):
        Identity.read(identity.folder)


def test_a_signature_is_not_written_through_links(tmp_path):
    """The shared folder of the members is the place of the file."""
    orgs = members.identities(tmp_path, 3)
    first = members.federated(orgs)
    path = tmp_path / "shared" / "federation.toml"
    path.parent.mkdir()
    write_federation(amend_federation(first, remove=["org-2"]), path)
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    secret.chmod(0o644)
    path.with_name("federation.toml.tmp").symlink_to(secret)
    signed = sign_federation(path, orgs[0])
    assert read_federation(path, allow_unsigned=True).versions == signed.versions
    assert (secret.read_bytes(), secret.stat().st_mode & 0o777) == (b"secret", 0o644)


@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_the_journal_of_signatures_is_its_own_file(tmp_path, kind):
    path = tmp_path / "signed.jsonl"
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        (tmp_path / "elsewhere").write_bytes(b"")
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=f"it is a {kind}"):
        SigningJournal(tmp_path)


def test_a_passphrase_is_read_from_a_pipe_and_bounded(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCB2O_PASSPHRASE_FILE", "/dev/zero")
    assert len(read_passphrase()) == 1024
    code = "from fedcb2o.peer.membership.passphrase import *; print(read_passphrase())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=b"words\n",
        env={**os.environ, "FEDCB2O_PASSPHRASE_FILE": "/dev/stdin"},
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == b"b'words'\n"


@pytest.mark.parametrize("name", ["agent.json", "rounds.jsonl"])
@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_a_node_report_reads_regular_files_of_its_folder(tmp_path, name, kind):
    folder = write_node(tmp_path / "node", [line(1)]) or tmp_path / "node"
    path = Path(folder) / name
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(path)
    with pytest.raises(RunError, match=rf"it is a {kind}|holds no agent\.json"):
        PeerRecords.read(Path(folder))


def test_a_proof_of_any_kind_is_listed(tmp_path):
    folder = Path(write_node(tmp_path / "node", [line(1)]) or tmp_path / "node")
    (folder / "proofs").mkdir()
    os.mkfifo(folder / "proofs" / "a.proof.toml")
    (folder / "proofs" / "b.proof.toml").symlink_to("/etc/passwd")
    assert [proof.agent for proof in PeerRecords.read(folder).proofs] == ["cannot be read"] * 2
    result = run_cli("peer", "report", folder, "--out", tmp_path / "page")
    assert result.status == 0, result.err
