"""Mailbox in a folder that all members reach, such as a network drive or a mounted store.

    FOLDER/cards/MEMBER.run              card of a node; MEMBER.check of a check
    FOLDER/boxes/MEMBER/SESSION/MESSAGE  messages for a process of that member

Each message is a file, written under another name first. The receiver removes it. Members may be
different users, and any of them may be hostile: it can put links, FIFOs, huge files and millions of
entries everywhere. All paths are therefore opened part by part from the folder, without following
links. Only regular files within a size are read. A process removes only files with the names of
messages and cards, in its own member's part.
"""

import contextlib
import errno
import itertools
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from fedcb2o.errors import ConfigError
from fedcb2o.peer.wire.mailbox import MAX_MESSAGE_BYTES, MAX_TAKEN_BYTES, MIN_COUNTED_BYTES
from fedcb2o.peer.wire.protocol import BytesLike
from fedcb2o.safe_files import create_exclusive, describe_kind, open_folder, read_regular

_LOGGER = logging.getLogger(__name__)
_CARD_KINDS = ("run", "check")
_MAX_CARD_BYTES = 2**9
_MAX_ENTRIES = 2**12  # of a folder that are looked at; a box with more is put aside
_MAX_NOTES = 20  # log lines of one process about entries that are ignored
_STALE_SECONDS = 600.0  # age from which cards and boxes of ended sessions are removed
_POLL_SECONDS = 0.02
_OTHERS_WRITE = 0o022
_TEMPORARY_SUFFIX = ".tmp"
_SESSION_NAME = re.compile(r"[0-9a-f]{32}")
_MESSAGE_NAME = re.compile(r"[0-9]{20}-[0-9a-f]{8}(-[a-z0-9-]{1,63})?")


class FolderMailbox:
    """Mailbox in a folder.

    Files and folders get the rights of the folder, because members may be different users.

    `owner` is the member of this process: only its cards and boxes are removed. Without it, those
    of all members are, because a relay is the only user of its folder. ConfigError names a folder
    that cannot be used, and a part of the owner that is a link or belongs to another user. At most
    `max_messages` are taken at once.
    """

    def __init__(
        self,
        folder: Path,
        members: Iterable[str],
        *,
        owner: str | None = None,
        poll_seconds: float = _POLL_SECONDS,
        max_messages: int = _MAX_ENTRIES + 1,
    ) -> None:
        self._folder = folder
        self._members = tuple(members)
        self._owned = self._members if owner is None else (owner,)
        self._poll_seconds = poll_seconds
        self._max_messages = max_messages
        self._stored = threading.Condition()
        self._num_stored = 0
        self._closed = False
        self._noted = set[str]()
        try:
            self._mode = stat.S_IMODE(folder.stat().st_mode)
            self._prepare()
        except OSError as error:
            place = error.filename or folder
            raise ConfigError(
                f"cannot use the folder {folder} for messages: {place}: {error.strerror or error}; "
                "its operator removes what is in the way, or gives this user the right to write"
            ) from error

    def _prepare(self) -> None:
        """Create missing folders, and refuse an own part that somebody else put there."""
        with self._open() as folder:
            for name in ("cards", "boxes"):
                self._make(folder, name, self._mode)
        with self._open("cards") as cards:
            self._user = _user_of_new_files(cards)
            for name in self._own_cards():
                self._own_card_age(cards, name)
        with self._open("boxes") as boxes:
            for name in self._owned:
                self._make(boxes, name, self._mode & ~_OTHERS_WRITE)
                with self._open("boxes", name) as box:
                    self._check_user(os.fstat(box), self._folder / "boxes" / name)
                    # Others must not put a link or a folder of their own in place of a session.
                    os.fchmod(box, self._mode & ~_OTHERS_WRITE)

    def _own_cards(self) -> list[str]:
        return [f"{name}.{kind}" for name in self._owned for kind in _CARD_KINDS]

    def _own_card_age(self, cards: int, name: str) -> float | None:
        """Return the age of an own card in seconds, None without one; refuse anything else."""
        try:
            status = os.stat(name, dir_fd=cards, follow_symlinks=False)
        except FileNotFoundError:
            return None
        place = self._folder / "cards" / name
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EEXIST, f"it is {describe_kind(status.st_mode)}", str(place))
        self._check_user(status, place)
        return time.time() - status.st_mtime

    def _check_user(self, status: os.stat_result, place: Path) -> None:
        if status.st_uid != self._user:
            text = f"it belongs to another user (number {status.st_uid})"
            raise OSError(errno.EPERM, text, str(place))

    def publish_card(self, name: str, card: BytesLike) -> None:
        with self._open("cards") as cards:
            if card:
                self._write(cards, name, card)
            elif self._own_card_age(cards, name) is not None:
                os.unlink(name, dir_fd=cards)

    def cards(self) -> dict[str, bytes]:
        found = {}
        with self._open("cards") as cards:
            # By name, because a list of the folder may have millions of other entries.
            for member, kind in itertools.product(self._members, _CARD_KINDS):
                name = f"{member}.{kind}"
                try:
                    found[name] = read_regular(name, _MAX_CARD_BYTES, folder=cards)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self._note_ignored(self._folder / "cards" / name, error.strerror)
        return found

    def put(self, box: str, message: BytesLike, seconds: float, sender: str = "") -> None:
        # Names in the order of time: a receiver reads the oldest messages first.
        name = f"{time.time_ns():020}-{secrets.token_hex(4)}-{sender}".rstrip("-")
        try:
            with self._open("boxes", *box.split("/")) as session:
                self._write(session, name, message)
        except OSError as error:
            # Without its folder the session has ended, which is no fault.
            if not isinstance(error, FileNotFoundError):
                self._note_ignored(self._folder / "boxes" / box, error.strerror)
            raise
        with self._stored:
            self._num_stored += 1
            self._stored.notify_all()

    def take(self, box: str, seconds: float) -> list[bytes]:
        self._keep(box)
        end = time.monotonic() + seconds
        while True:
            num_stored = self._num_stored
            messages = self._take_now(box)
            left = end - time.monotonic()
            if messages or left <= 0 or self._closed:
                return messages
            with self._stored:
                # Otherwise a message arrived since the folder was read.
                if self._num_stored == num_stored:
                    self._stored.wait(min(self._poll_seconds, left))

    def _keep(self, box: str) -> None:
        """Create a box, or mark it as in use."""
        member, session = box.split("/")
        with self._open("boxes", member) as parent:
            self._make(parent, session, self._mode)
        with self._open("boxes", member, session) as folder:
            self._check_user(os.fstat(folder), self._folder / "boxes" / box)
            # `sweep` takes a box that is not touched for some time as that of an ended session.
            os.utime(folder)

    def _take_now(self, box: str) -> list[bytes]:
        """Return and remove the messages that are there, of all users in turn."""
        messages: list[bytes] = []
        size = 0
        with self._open("boxes", *box.split("/")) as folder:
            entries = _list(folder)
            for name in _in_turn(entries):
                try:
                    messages.append(read_regular(name, MAX_MESSAGE_BYTES, folder=folder))
                    size += len(messages[-1])
                except OSError as error:
                    # The name of a message is that of its time: only the box is named.
                    self._note_ignored(self._folder / "boxes" / box, f"an entry: {error.strerror}")
                # An entry that cannot be read goes too, because it would hide messages.
                _remove(folder, name)
                if size > MAX_TAKEN_BYTES or len(messages) == self._max_messages:
                    break
        # Entries that stay could hide all messages: an empty box begins under the same name.
        if len(entries) == _MAX_ENTRIES and len(messages) < self._max_messages:
            member, session = box.split("/")
            with self._open("boxes", member) as parent:
                os.rename(session, secrets.token_hex(16), src_dir_fd=parent, dst_dir_fd=parent)
            text = f"it has {_MAX_ENTRIES} entries or more"
            self._note_ignored(self._folder / "boxes" / box, text)
            self._keep(box)
        return messages

    def stored_bytes(self, box: str, sender: str) -> int:
        """Return the counted size of one sender's messages in a box; OSError without the box."""
        with self._open("boxes", *box.split("/")) as folder:
            entries = _list(folder)
        found = [one for name, one in entries.items() if name.endswith(f"-{sender}")]
        return sum(max(one.st_size, MIN_COUNTED_BYTES) for one in found)

    def sweep(self) -> None:
        """Remove own cards and boxes of sessions that ended without `close`."""
        with suppress(OSError), self._open("cards") as cards:
            for name in self._own_cards():
                with suppress(OSError):
                    age = self._own_card_age(cards, name)
                    if age is not None and age > _STALE_SECONDS:
                        os.unlink(name, dir_fd=cards)
        oldest = time.time() - _STALE_SECONDS
        for member in self._owned:
            with suppress(OSError), self._open("boxes", member) as parent:
                for session, status in _list(parent).items():
                    if _SESSION_NAME.fullmatch(session) and status.st_mtime < oldest:
                        self._remove_session(parent, session)

    def remove_box(self, box: str) -> None:
        """Remove a box and its messages."""
        member, session = box.split("/")
        with suppress(OSError), self._open("boxes", member) as parent:
            self._remove_session(parent, session)

    def _remove_session(self, parent: int, session: str) -> None:
        with suppress(OSError):
            folder = open_folder(session, folder=parent)
            try:
                self._check_user(os.fstat(folder), Path(session))
                for name in _list(folder):
                    if _MESSAGE_NAME.fullmatch(name.removesuffix(_TEMPORARY_SUFFIX)):
                        _remove(folder, name)
            finally:
                os.close(folder)
            os.rmdir(session, dir_fd=parent)

    def close(self) -> None:
        self._closed = True
        with self._stored:
            self._stored.notify_all()

    @contextlib.contextmanager
    def _open(self, *parts: str) -> Iterator[int]:
        """Open a folder inside the mailbox; only the mailbox itself may be a link."""
        place = self._folder
        with contextlib.ExitStack() as stack:
            try:
                folder = open_folder(place, follow_links=True)
                stack.callback(os.close, folder)
                for part in parts:
                    place = place / part
                    folder = open_folder(part, folder=folder)
                    stack.callback(os.close, folder)
            except OSError as error:
                error.filename = str(place)
                raise
            yield folder

    def _make(self, parent: int, name: str, mode: int) -> None:
        """Create a folder with exactly this mode, if there is no entry of this name."""
        try:
            os.mkdir(name, dir_fd=parent)
        except FileExistsError:
            return
        folder = open_folder(name, folder=parent)
        try:
            os.fchmod(folder, mode)
        finally:
            os.close(folder)

    def _write(self, folder: int, name: str, content: BytesLike) -> None:
        temporary = f"{name}-{secrets.token_hex(4)}{_TEMPORARY_SUFFIX}"
        with os.fdopen(create_exclusive(temporary, folder=folder), "wb") as file:
            try:
                os.fchmod(file.fileno(), self._mode & 0o666)
                file.write(content)
                file.flush()
                # Readers see whole messages only.
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise

    def _note_ignored(self, place: Path, reason: str | None) -> None:
        """Name an entry that is in the way, once."""
        if len(self._noted) < _MAX_NOTES and str(place) not in self._noted:
            self._noted.add(str(place))
            _LOGGER.warning("%s: %s: it is ignored", place, reason)


def _list(folder: int) -> dict[str, os.stat_result]:
    """Return the first entries of a folder, without following links."""
    found = {}
    with os.scandir(folder) as entries:
        for entry in itertools.islice(entries, _MAX_ENTRIES):
            with suppress(OSError):  # it is gone
                found[entry.name] = entry.stat(follow_symlinks=False)
    return found


def _in_turn(entries: Mapping[str, os.stat_result]) -> list[str]:
    """Return the names of messages, the oldest first, so that no user delays those of others."""
    by_user = defaultdict[int, list[str]](list)
    for name in sorted(filter(_MESSAGE_NAME.fullmatch, entries)):
        by_user[entries[name].st_uid].append(name)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*by_user.values()))
    return [name for name in in_turn if name is not None]


def _remove(folder: int, name: str) -> None:
    """Remove a file, a link or an empty folder, if this user may."""
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        with suppress(OSError):
            os.rmdir(name, dir_fd=folder)


def _user_of_new_files(folder: int) -> int:
    """Return the owner of new files: a network drive may choose a user for all."""
    name = f"probe-{secrets.token_hex(4)}{_TEMPORARY_SUFFIX}"
    descriptor = create_exclusive(name, folder=folder)
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        os.unlink(name, dir_fd=folder)
