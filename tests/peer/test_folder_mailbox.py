"""Shared folders: links, FIFOs and floods of other members, own parts only, order of users."""

import logging
import os
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.peer import members, relays, shared_folder
from tests.peer.nodes import Nodes
from tests.peer.relays import CARD_BYTES, FolderMailbox, behind_nat
from tests.peer.test_transport import ok
from tests.peer.waiting import wait_for

from fedcb2o.errors import ConfigError
from fedcb2o.peer.wire import folder_mailbox
from fedcb2o.peer.wire.relayed import open_transport

NAMES = ("org-0", "org-1", "org-2")
BOX = f"org-0/{'a' * 32}"
FIRST, SECOND = f"{1:020}-{1:08x}", f"{2:020}-{1:08x}"


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "shared"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def outside(tmp_path):
    return shared_folder.make_outside(tmp_path / "hospital")


def mailbox(folder: Path, owner: str | None = "org-0") -> FolderMailbox:
    return FolderMailbox(folder, NAMES, owner=owner, poll_seconds=0.002)


def make_old(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (0, 0), follow_symlinks=False)


@pytest.mark.parametrize("place", ["boxes/x", "boxes/org-9", "boxes/org-0/" + "b" * 32, "cards/x"])
def test_a_link_in_the_folder_removes_nothing_elsewhere(folder, outside, place):
    box = mailbox(folder)
    for target in (outside, outside / "keys", outside / "keys" / ("0" * 32)):
        before = shared_folder.snapshot(outside)
        (folder / place).symlink_to(target)
        make_old(folder / place)
        box.sweep()
        mailbox(folder, owner=None).sweep()
        box.remove_box(f"org-0/{'b' * 32}")
        assert shared_folder.snapshot(outside) == before
        (folder / place).unlink()


def test_a_folder_moved_into_a_box_keeps_its_files(folder, outside):
    box = mailbox(folder)
    (outside / "keys").rename(folder / "boxes" / "org-0" / ("b" * 32))
    make_old(folder / "boxes" / "org-0" / ("b" * 32))
    box.sweep()
    names = {path.name for path in (folder / "boxes" / "org-0" / ("b" * 32)).iterdir()}
    assert "signing.key" in names
    assert "0" * 32 in names


def test_only_own_stale_cards_and_boxes_are_removed(folder):
    other = mailbox(folder, "org-1")
    own = mailbox(folder)
    for box, name in ((own, "org-0"), (other, "org-1")):
        for session in ("a" * 32, "b" * 32):
            box.take(f"{name}/{session}", 0.0)
            box.put(f"{name}/{session}", b"text", 0.0)
        box.publish_card(f"{name}.run", b"card")
    make_old(*(folder / "boxes").glob("*/" + "b" * 32), *(folder / "cards").iterdir())
    own.sweep()
    left = sorted(str(path.relative_to(folder / "boxes")) for path in folder.glob("boxes/*/*"))
    assert left == [f"org-0/{'a' * 32}", f"org-1/{'a' * 32}", f"org-1/{'b' * 32}"]
    assert [path.name for path in (folder / "cards").iterdir()] == ["org-1.run"]
    make_old(*folder.glob("boxes/*/*"))
    mailbox(folder, owner=None).sweep()  # a relay's own folder
    assert list(folder.glob("boxes/*/*")) == []


@pytest.mark.parametrize("kind", ["link", "FIFO", "regular file", "socket"])
@pytest.mark.parametrize("place", ["cards", "boxes", "boxes/org-0", "cards/org-0.run"])
def test_an_own_part_of_another_kind_is_refused_by_name(folder, outside, monkeypatch, place, kind):
    if (place, kind) == ("cards/org-0.run", "regular file"):
        kind = "folder"
    make = {
        "link": shared_folder.link_to(outside),
        "FIFO": os.mkfifo,
        "regular file": Path.touch,
        "socket": shared_folder.make_socket,
        "folder": Path.mkdir,
    }
    monkeypatch.chdir(folder)
    (folder / place).parent.mkdir(exist_ok=True)
    make[kind](folder / place)
    with pytest.raises(ConfigError, match=f"{place}: it is a {kind}"):
        mailbox(folder)


@pytest.mark.parametrize("place", ["boxes/org-0", "cards/org-0.run"])
@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_an_own_part_of_another_user_is_refused_by_name(folder, place):
    mailbox(folder).publish_card("org-0.run", b"card")
    os.chown(folder / place, 12345, -1)
    with pytest.raises(ConfigError, match=f"{place}: it belongs to another user .number 12345"):
        mailbox(folder)
    mailbox(folder, "org-1")  # another member's part is its own affair


def test_the_folder_itself_may_be_a_link(folder, tmp_path):
    (tmp_path / "mount").symlink_to(folder)
    box = mailbox(tmp_path / "mount")
    box.take(BOX, 0.0)
    box.put(BOX, b"text", 0.0)
    assert box.take(BOX, 0.0) == [b"text"]


def test_entries_that_are_no_messages_neither_stop_nor_hide_messages(folder, outside, monkeypatch):
    monkeypatch.chdir(folder)
    box = mailbox(folder)
    assert box.take(BOX, 0.0) == []
    place = folder / "boxes" / BOX
    count = 0
    for number, make in enumerate(shared_folder.entries(outside)):
        for name in (f"{number:020}-{number:08x}-org-1", f"junk-{number}"):
            try:
                make(place / name)
            except PermissionError:
                continue  # a device or another user needs root
            count += 1
    assert count >= 20
    before = shared_folder.snapshot(outside)
    box.put(BOX, b"text", 0.0)
    messages = box.take(BOX, 0.0)
    assert messages[-1] == b"text"
    assert shared_folder.snapshot(outside) == before
    left = [path.name for path in place.iterdir() if not path.name.startswith("junk")]
    assert len(left) <= 1  # a folder with content is not the receiver's to remove
    assert box.take(BOX, 0.0) == []


def test_a_card_that_is_no_file_is_named_once_and_others_are_read(folder, caplog):
    box = mailbox(folder)
    mailbox(folder, "org-1").publish_card("org-1.run", b"card")
    os.mkfifo(folder / "cards" / "org-2.run")
    with caplog.at_level(logging.WARNING, "fedcb2o"):
        assert box.cards() == {"org-1.run": b"card"}
        assert box.cards() == {"org-1.run": b"card"}
    (line,) = (record.message for record in caplog.records)
    assert line.endswith("cards/org-2.run: it is a FIFO, not a regular file: it is ignored")


def test_a_card_replaces_the_entry_in_its_place(folder, outside):
    box = mailbox(folder)
    card = folder / "cards" / "org-0.run"
    key = outside / "keys" / "signing.key"
    before = key.read_bytes()
    for make in (shared_folder.link_to(key), os.mkfifo, lambda path: os.link(key, path)):
        card.unlink(missing_ok=True)
        make(card)
        box.publish_card("org-0.run", b"card")
        assert card.read_bytes() == b"card"
        assert not card.is_symlink()
        assert key.read_bytes() == before


def test_a_million_other_cards_hide_none(folder, monkeypatch):
    monkeypatch.setattr(folder_mailbox, "_MAX_ENTRIES", 4)
    box = mailbox(folder)
    for number in range(100):
        (folder / "cards" / f"a-{number}.run").write_bytes(b"junk")
    mailbox(folder, "org-1").publish_card("org-1.run", b"card")
    assert box.cards() == {"org-1.run": b"card"}


def test_a_box_full_of_other_entries_is_put_aside(folder, monkeypatch, caplog):
    monkeypatch.setattr(folder_mailbox, "_MAX_ENTRIES", 8)
    box = mailbox(folder)
    box.take(BOX, 0.0)
    for number in range(20):
        shared_folder.make_tree(folder / "boxes" / BOX / f"junk-{number}")
    with caplog.at_level(logging.WARNING, "fedcb2o"):
        assert box.take(BOX, 0.0) == []
    assert "it has 8 entries or more" in caplog.text
    box.put(BOX, b"text", 0.0)
    assert box.take(BOX, 0.0) == [b"text"]


def test_users_have_their_turn(folder, monkeypatch):
    """One user's hundred old messages do not delay another's."""
    users = {f"{n:020}-{n:08x}": 1 for n in range(100)} | {f"{200:020}-{0:08x}": 2}

    class Status:
        def __init__(self, user: int) -> None:
            self.st_uid = user

    order = folder_mailbox._in_turn({name: Status(user) for name, user in users.items()})
    assert order[0] == f"{0:020}-{0:08x}"
    assert order[1] == f"{200:020}-{0:08x}"
    assert sorted(order) == sorted(users)


def test_a_message_larger_than_allowed_is_dropped(folder):
    box = mailbox(folder)
    box.take(BOX, 0.0)
    shared_folder.make_huge(folder / "boxes" / BOX / FIRST)
    (folder / "boxes" / BOX / SECOND).write_bytes(b"text")
    assert box.take(BOX, 0.0) == [b"text"]
    assert list((folder / "boxes" / BOX).iterdir()) == []


def test_a_box_that_is_a_link_gets_no_message(folder, outside):
    box = mailbox(folder, "org-1")
    (folder / "boxes" / "org-0").mkdir()
    (folder / "boxes" / BOX).symlink_to(outside)
    before = shared_folder.snapshot(outside)
    with pytest.raises(OSError, match="a link, not a folder"):
        box.put(BOX, b"text", 0.0)
    with pytest.raises(FileNotFoundError):
        box.put(f"org-2/{'c' * 32}", b"text", 0.0)
    assert shared_folder.snapshot(outside) == before


def test_mailbox_files_have_the_access_rights_of_the_folder(tmp_path):
    for mode in (0o777, 0o1777, 0o2770, 0o700):
        folder = tmp_path / oct(mode)
        folder.mkdir()
        folder.chmod(mode)
        box = mailbox(folder)
        box.take(BOX, 0.0)
        box.put(BOX, b"text", 0.0)
        modes = {
            str(path.relative_to(folder)): path.stat().st_mode & 0o7777
            for path in folder.rglob("*")
            if path.is_dir()
        }
        own = mode & ~0o022  # only its owner makes boxes
        assert modes == {"cards": mode, "boxes": mode, "boxes/org-0": own, f"boxes/{BOX}": mode}
        (file,) = (path for path in folder.rglob("*") if path.is_file())
        assert file.stat().st_mode & 0o777 == mode & 0o666


def test_a_folder_without_the_right_to_write_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot use the folder"):
        mailbox(Path("/proc"))


def test_invalid_files_in_a_mailbox_folder_are_ignored(federation_of_three, tmp_path):
    orgs, federation = federation_of_three
    with ExitStack() as exit_stack:
        transports = relays.relayed("folder", orgs[:2], federation, tmp_path, exit_stack)
        transports[1].serve(lambda request, reply: reply(ok(b"heard " + request)))
        (tmp_path / "mailbox" / "cards" / "org-1.check").write_bytes(os.urandom(CARD_BYTES))
        box = mailbox(tmp_path / "mailbox", "org-2")
        box.put(transports[0]._box, os.urandom(2**22), 0.0)
        box.put(transports[0]._box, os.urandom(300), 0.0)
        wait_for(lambda: transports[0].connected_peers() == {1})
        assert transports[0].ask(1, b"hello", 5.0).answer() == ok(b"heard hello")


def test_a_link_to_a_folder_is_refused_when_a_node_starts(federation_of_three, folder, outside):
    orgs, federation = federation_of_three
    (folder / "boxes").symlink_to(outside)
    before = shared_folder.snapshot(outside)
    with pytest.raises(ConfigError, match="boxes: it is a link, not a folder"):
        open_transport(federation, orgs[0], relay=folder)
    assert shared_folder.snapshot(outside) == before


@given(seed=st.integers(0, 2**32))
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_a_member_writes_messages_arrive_and_nothing_else_changes(
    federation_of_three, tmp_path_factory, monkeypatch, seed
):
    orgs, federation = federation_of_three
    place = tmp_path_factory.mktemp("hostile")
    outside = shared_folder.make_outside(place / "hospital")
    before = shared_folder.snapshot(outside)
    monkeypatch.chdir(place)  # for sockets, whose paths are short
    with ExitStack() as exit_stack:
        transports = relays.relayed("folder", orgs, federation, place, exit_stack)
        for j, one in enumerate(transports):
            one.serve(lambda request, reply, j=j: reply(ok(b"%d heard " % j + request)))
        for j, one in enumerate(transports):
            wait_for(lambda: one.connected_peers() == {0, 1, 2} - {j})  # noqa: B023
        rng = random.Random(seed)
        for turn in range(6):
            for _ in range(40):
                shared_folder.write_anything(place / "mailbox", outside, rng)
            sender, receiver = rng.sample(range(3), 2)
            request = b"question %d" % turn
            answer = transports[sender].ask(receiver, request, 120.0).answer()
            assert answer == ok(b"%d heard " % receiver + request)
            transports[receiver].mailbox.sweep()
    assert shared_folder.snapshot(outside) == before


@pytest.mark.slow
def test_three_nodes_train_while_a_member_writes_anything(tmp_path, monkeypatch):
    orgs = behind_nat(tmp_path, 3)
    changes = {"rounds": 20, "agents": {"benign": 3, "malicious": 0, "budget": 2}}
    path = tmp_path / "federation.toml"
    members.federated(orgs, changes=changes, path=path, round_seconds=0.5)
    settings = {"together": 1, **members.experiment(3, **changes)}
    folder = tmp_path / "shared"
    folder.mkdir()
    outside = shared_folder.make_outside(tmp_path / "hospital")
    before = shared_folder.snapshot(outside)
    monkeypatch.chdir(tmp_path)
    peers = Nodes(tmp_path, path, [org.folder for org in orgs], settings)
    try:
        peers.start(relay=folder)
        peers.until(0, 1)
        with shared_folder.HostileWriter(folder, outside, seed=1) as writer:
            assert peers.wait() == [0, 0, 0]
        assert writer.count > 100
        lines = [line for j in range(3) for line in peers.lines(j)[1:]]
        received, asked = (sum(len(line[key]) for line in lines) for key in ("received", "asked"))
        assert received >= 0.95 * asked
        assert shared_folder.snapshot(outside) == before
    finally:
        peers.close()


@pytest.mark.slow
def test_a_node_ends_at_once_beside_fifos(tmp_path):
    orgs = behind_nat(tmp_path, 2)
    changes = {"rounds": 1000}
    path = tmp_path / "federation.toml"
    members.federated(orgs, changes=changes, path=path, round_seconds=0.2)
    settings = {"together": 1, **members.experiment(2, **changes)}
    folder = tmp_path / "shared"
    folder.mkdir()
    peers = Nodes(tmp_path, path, [org.folder for org in orgs], settings)
    try:
        peers.start(relay=folder)
        peers.until(0, 2)
        for box in folder.glob("boxes/*/*"):
            os.mkfifo(box / FIRST)
        time.sleep(0.5)
        peers.until(0, len(peers.lines(0)) + 2)
        start = time.monotonic()
        peers.send(0, signal.SIGINT)
        assert peers.wait(0, seconds=30) == [130]
        assert time.monotonic() - start < 20
        assert "an entry: it is a FIFO, not a regular file: it is ignored" in peers.log(0)
    finally:
        peers.close()
