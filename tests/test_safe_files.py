"""Files in places that others can write to: regular files only, bounded, without waiting."""

import os
import socket
from pathlib import Path

import pytest

from fedcb2o.safe_files import create_exclusive, open_folder, open_regular, read_regular


def entries(folder: Path) -> dict[str, Path]:
    """Return one entry of each kind that is no regular file."""
    (folder / "target").write_bytes(b"content")
    (folder / "link").symlink_to("target")
    (folder / "lost").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(folder / "socket"))
    names = ("link", "lost", "loop", "fifo", "folder", "socket")
    return {**{name: folder / name for name in names}, "device": Path("/dev/zero")}


@pytest.mark.parametrize("name", ["link", "lost", "loop", "fifo", "folder", "socket", "device"])
def test_only_regular_files_are_read(tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = entries(tmp_path)[name]
    kind = {"lost": "link", "loop": "link", "fifo": "FIFO"}.get(name, name)
    with pytest.raises(OSError, match=f"it is a {kind}, not a regular file"):
        read_regular(path, 100)


def test_a_link_of_the_user_is_followed_to_regular_files_only(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    entries(tmp_path)
    assert read_regular(tmp_path / "link", 100, follow_links=True) == b"content"
    (tmp_path / "to-fifo").symlink_to("fifo")
    with pytest.raises(OSError, match="it is a FIFO"):
        open_regular(tmp_path / "to-fifo", follow_links=True)


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    assert read_regular(path, 4) == b"1234"
    with pytest.raises(OSError, match="it is longer than 3 bytes"):
        read_regular(path, 3)
    os.truncate(path, 2**40)  # sparse
    with pytest.raises(OSError, match="longer"):
        read_regular(path, 2**20)


def test_a_new_file_takes_no_existing_name(tmp_path: Path) -> None:
    (tmp_path / "lost").symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        create_exclusive(tmp_path / "lost")
    os.close(create_exclusive(tmp_path / "new"))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_stays_the_same_if_its_name_is_exchanged(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"inside")
    folder = open_folder(tmp_path / "folder")
    (tmp_path / "folder").rename(tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(b"outside")
    (tmp_path / "folder").symlink_to("elsewhere")
    assert read_regular("file", 100, folder=folder) == b"inside"
    os.close(folder)
    with pytest.raises(OSError, match="it is a link, not a folder"):
        open_folder(tmp_path / "folder")
    os.close(open_folder(tmp_path / "folder", follow_links=True))
