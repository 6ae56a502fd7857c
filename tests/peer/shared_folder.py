"""Hostile writer of a shared folder: every kind of entry, at every place, without the package."""

import os
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

WEIRD_NAMES = ("new\nline", "\u202emd.txt", "\x1b[31mred", "..", " ", "-rf", "a" * 255)


def link_to(target: Path) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def make_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)  # sparse


def make_device(path: Path) -> None:
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero, where this user may


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))


def make_tree(path: Path) -> None:
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "file").write_bytes(b"content")


def make_other_user(path: Path) -> None:
    path.write_bytes(b"of another user")
    os.chown(path, 12345, 12345)


def make_stale(path: Path) -> None:
    path.write_bytes(b"old")
    os.utime(path, (0, 0))


def entries(outside: Path) -> list[Callable[[Path], None]]:
    """Return the makers of all kinds of entries; links lead to files outside."""
    targets = (outside, outside / "keys", outside / "keys" / "signing.key", Path("/dev/zero"))
    return [
        *map(link_to, (*targets, Path("nowhere"), Path())),
        lambda path: os.link(outside / "keys" / "signing.key", path),
        os.mkfifo,
        make_socket,
        make_device,
        make_huge,
        make_tree,
        make_other_user,
        make_stale,
        lambda path: path.write_bytes(os.urandom(300)),
        Path.mkdir,
    ]


def names(folder: Path, rng: random.Random) -> Path:
    """Return a place for an entry: names of the protocol, and others."""
    boxes = [path for path in folder.glob("boxes/*") if not path.is_symlink()]
    sessions = [path for box in boxes for path in box.glob("*") if is_real_folder(path)]
    message = f"{rng.choice([0, time.time_ns(), 10**20 - 1]):020}-{rng.getrandbits(32):08x}"
    member = rng.choice(["org-0", "org-1", "org-2", "org-9"])
    places = [
        folder / "cards" / f"{member}.{rng.choice(['run', 'check', 'run-00000000.tmp'])}",
        folder / "cards" / rng.choice(WEIRD_NAMES),
        folder / "boxes" / member / f"{rng.getrandbits(128):032x}",
        folder / "boxes" / rng.choice([member, *WEIRD_NAMES]),
        folder / rng.choice(["cards", "boxes", "x", *WEIRD_NAMES]),
    ]
    for session in sessions:
        for name in (message, f"{message}-{member}", f"{message}-0.tmp", rng.choice(WEIRD_NAMES)):
            places.append(session / name)
    return rng.choice(places)


def is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def write_anything(folder: Path, outside: Path, rng: random.Random) -> None:
    """Put one entry of a random kind at a random free place of the folder itself."""
    place = names(folder, rng)
    if not os.path.lexists(place) and is_real_folder(place.parent):
        with suppress(OSError):
            rng.choice(entries(outside))(place)


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return mode and content of everything in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (status.st_mode, content)
    return found


def make_outside(folder: Path) -> Path:
    """Return a folder of keys and data, all older than an hour."""
    (folder / "keys" / ("0" * 32)).mkdir(parents=True)
    message = f"{0:020}-{0:08x}"
    for name in ("keys/signing.key", "data.csv", f"keys/{message}", f"keys/{'0' * 32}/{message}"):
        (folder / name).write_bytes(name.encode())
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (0, 0))
    return folder


class HostileWriter:
    """Thread that writes entries until the end of its context."""

    def __init__(self, folder: Path, outside: Path, seed: int, pause: float = 0.001) -> None:
        self._rng = random.Random(seed)
        self._work = (folder, outside)
        self._pause = pause
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.count = 0

    def _run(self) -> None:
        while not self._stop.wait(self._pause):
            write_anything(*self._work, self._rng)
            self.count += 1

    def __enter__(self) -> "HostileWriter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)
