"""Access rights of files that contain models, keys or records of data."""

import os
import stat
from pathlib import Path

import pytest
from tests.peer.nodes import nodes
from tests.tiny import tiny

from fedcb2o import records
from fedcb2o.errors import RunError
from fedcb2o.experiments import run
from fedcb2o.parallel._shared_memory import _create


def modes(folder: Path) -> dict[str, int]:
    """Return the modes of all paths in a folder that other users may access."""
    return {
        str(path): stat.S_IMODE(path.stat().st_mode)
        for path in (folder, *folder.rglob("*"))
        if path.stat().st_mode & 0o077
    }


def test_a_run_makes_an_existing_folder_private(tmp_path):
    out = tmp_path / "run"
    out.mkdir(mode=0o755)
    out.chmod(0o755)
    run(tiny(rounds=2), out=out)
    assert not {
        path: mode for path, mode in modes(out).items() if not path.startswith(f"{out}/seed-")
    }
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*") if path.is_file()} == {
        0o600
    }


def test_a_node_makes_an_existing_folder_private(tmp_path):
    changes = {"rounds": 2, "agents": {"benign": 2, "malicious": 0, "budget": 1}}
    with nodes(tmp_path, 2, changes=changes, deadline_seconds=3.0) as peers:
        for j in range(2):
            peers.out(j).mkdir(mode=0o755)
            peers.out(j).chmod(0o755)
        peers.start()
        assert peers.wait() == [0, 0], [peers.log(j) for j in range(2)]
        assert not modes(peers.out(0))
        assert not modes(peers.out(1))
        assert (peers.out(0) / "checkpoint.safetensors").exists()


def test_shared_memory_is_private(tmp_path):
    with _create(4096, tmp_path) as file:
        assert stat.S_IMODE(Path(file.name).stat().st_mode) == 0o600


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    def refuse(self, mode):
        raise PermissionError(1, "Operation not permitted")

    tmp_path.chmod(0o755)
    monkeypatch.setattr(os, "fchmod", refuse)
    with pytest.raises(RunError, match="cannot keep others out"):
        records.make_private(tmp_path)


def test_a_node_ends_if_runs_toml_cannot_be_written(tmp_path):
    """A folder takes the place of the file, since root may write to read-only folders."""
    changes = {"rounds": 1, "agents": {"benign": 2, "malicious": 0, "budget": 1}}
    with nodes(tmp_path, 2, changes=changes, deadline_seconds=3.0) as peers:
        (peers.identities[0] / "runs.toml.tmp").mkdir()
        peers.start(0, gather=0.0)
        assert peers.wait(0) == [2]
        assert "keeps two folders from signing two models" in peers.log(0)
