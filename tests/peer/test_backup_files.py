"""Files of a backup: what is read, what is refused, and what is left after an error."""

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.peer import members
from tests.test_foreign_files import no_waiting  # noqa: F401 (a fixture)

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.peer._backup import back_up, restore
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.wire.equivocation import RESTORED_FILE


@pytest.fixture
def node(tmp_path):
    """Return the folders of keys and run of a node."""
    orgs = members.identities(tmp_path, 2)
    run = tmp_path / "run"
    (run / "proofs").mkdir(parents=True)
    members.federated(orgs, path=run / "federation.toml")
    (run / "signed.jsonl").write_bytes(b"")
    (run / "proofs" / "org-1-3.proof.toml").write_bytes(b"proof")
    return orgs[0].folder, run


@pytest.fixture
def backup(node, tmp_path):
    back_up(*node, tmp_path / "backup.tar.gz")
    return tmp_path / "backup.tar.gz"


def entries(backup: Path) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(backup) as tar:
        for entry in tar:
            file = tar.extractfile(entry)
            yield entry, b"" if file is None else file.read()


def changed(backup: Path, *added: tarfile.TarInfo, content: bytes = b"") -> Path:
    """Return a backup with further entries of the same content."""
    path = backup.with_name("changed.tar.gz")
    with tarfile.open(path, "w:gz") as tar:
        for entry, data in entries(backup):
            tar.addfile(entry, io.BytesIO(data))
        for entry in added:
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info


@pytest.mark.parametrize("name", ["notes.txt", "rounds.jsonl", "proofs/org-2-1.proof.toml"])
@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_a_link_in_a_run_is_not_backed_up(node, tmp_path, name, kind):
    path = node[1] / name
    if kind == "link":
        (tmp_path / "secret").write_bytes(b"secret")
        path.symlink_to(tmp_path / "secret")
    else:
        os.mkfifo(path)
    with pytest.raises(RunError, match=rf"cannot back up {path}: it is a {kind}"):
        back_up(*node, tmp_path / "backup.tar.gz")
    assert not list(tmp_path.glob("backup*"))


def test_a_linked_folder_of_proofs_is_not_backed_up(node, tmp_path):
    (node[1] / "proofs").rename(tmp_path / "elsewhere")
    (node[1] / "proofs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="proofs is a link"):
        back_up(*node, tmp_path / "backup.tar.gz")


def test_a_backup_is_not_written_through_links(node, tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"target")
    out = tmp_path / "backup.tar.gz"
    out.with_name("backup.tar.gz.tmp").symlink_to(target)
    back_up(*node, out)
    assert target.read_bytes() == b"target"
    out.unlink()
    out.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="never overwritten"):
        back_up(*node, out)


def test_keys_of_a_container_are_links(node, tmp_path):
    keys, run = node
    data = keys / "..data"
    data.mkdir()
    for path in [path for path in keys.iterdir() if path.is_file()]:
        path.rename(data / path.name)
        path.symlink_to(data / path.name)
    back_up(keys, run, tmp_path / "backup.tar.gz")
    restore(tmp_path / "backup.tar.gz", tmp_path / "keys", tmp_path / "new")
    assert Identity.read(tmp_path / "keys").member == Identity.read(keys).member


def test_a_restored_node_has_private_files_and_the_mark(backup, tmp_path, node):
    keys, run = tmp_path / "keys", tmp_path / "new"
    run.mkdir()
    assert restore(backup, keys, run) == 1
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    expected = {"federation.toml", "signed.jsonl", "proofs/org-1-3.proof.toml", RESTORED_FILE}
    assert names == expected
    for path in (*keys.rglob("*"), *run.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    assert Identity.read(keys).member == Identity.read(node[0]).member


@pytest.mark.parametrize(
    "bad",
    [
        entry("run/link", tarfile.SYMTYPE, "/etc/passwd"),
        entry("run/hard", tarfile.LNKTYPE, "run/federation.toml"),
        entry("run/fifo", tarfile.FIFOTYPE),
        entry("run/device", tarfile.CHRTYPE),
        entry("run/folder", tarfile.DIRTYPE),
        entry("run/../x"),
        entry("run/proofs/../x"),
        entry("run/other/x"),
        entry("keys/proofs/x"),
        entry("/run/x"),
        entry("run/"),
        entry("run/a\nb"),
        entry("run/federation.toml"),
        entry("else/x"),
    ],
    ids=lambda bad: repr(bad.name),
)
def test_nothing_is_left_of_a_bad_backup(backup, tmp_path, bad):
    before = set(tmp_path.rglob("*"))
    path = changed(backup, bad)
    with pytest.raises(ConfigError, match="is no backup"):
        restore(path, tmp_path / "new-keys", tmp_path / "new-run")
    assert set(tmp_path.rglob("*")) - before == {path}


def test_a_cut_backup_leaves_nothing(backup, tmp_path):
    content = backup.read_bytes()
    (tmp_path / "new-run").mkdir()
    for size in (len(content) // 2, len(content) - 4):
        backup.write_bytes(content[:size])
        with pytest.raises(ConfigError, match="damaged"):
            restore(backup, tmp_path / "new-keys", tmp_path / "new-run")
        assert not (tmp_path / "new-keys").exists()
        assert not list((tmp_path / "new-run").iterdir())


def test_a_huge_header_is_not_read(backup, tmp_path):
    long = entry("run/x")
    long.pax_headers = {"comment": "x" * 2**20}
    with pytest.raises(ConfigError, match="header of"):
        restore(changed(backup, long), tmp_path / "new-keys", tmp_path / "new-run")


def test_a_huge_key_and_too_many_files_are_refused(backup, tmp_path, monkeypatch):
    bad = changed(backup, entry("keys/huge"), content=bytes(2**20 + 1))
    with pytest.raises(ConfigError, match="keys/huge"):
        restore(bad, tmp_path / "new-keys", tmp_path / "new-run")
    monkeypatch.setattr("fedcb2o.peer._backup._MAX_FILES", 3)
    with pytest.raises(ConfigError, match="more than 3 files"):
        restore(backup, tmp_path / "new-keys", tmp_path / "new-run")


def test_a_file_beyond_the_free_room_is_refused(backup, tmp_path, monkeypatch):
    usage = SimpleNamespace(free=10)
    monkeypatch.setattr("fedcb2o.peer._backup.shutil.disk_usage", lambda _: usage)
    with pytest.raises(RunError, match="10 are free: make room"):
        restore(backup, tmp_path / "new-keys", tmp_path / "new-run")
    assert not (tmp_path / "new-run").exists()


def test_a_fifo_is_no_backup(tmp_path):
    os.mkfifo(tmp_path / "backup.tar.gz")
    with pytest.raises(RunError, match="it is a FIFO"):
        restore(tmp_path / "backup.tar.gz", tmp_path / "keys", tmp_path / "run")
