"""Attacks through a relay: by a relay that delivers all messages, and by a member behind an honest one.

`python -m tests.hostile.relay SECONDS` runs each attack for SECONDS. Rounds and exchanged models are
compared with undisturbed rounds at the start. `... processor` prints
the share of a processor that a node's transport uses under each attack of the relay.
"""

import contextlib
import dataclasses
import functools
import json
import multiprocessing
import random
import re
import secrets
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.peer import members, relays
from tests.peer.nodes import FORKED, Nodes
from tests.peer.relays import CARD_BYTES, Relayed, RelayMailbox, SealedKind, Session
from tests.peer.waiting import wait_for

from fedcb2o.peer import Identity, read_federation
from fedcb2o.peer.wire.mailbox import FORMER_MEMBER, join_messages, split_messages
from fedcb2o.peer.wire.protocol import Request, RequestKind
from fedcb2o.peer.wire.relay import Relay
from fedcb2o.peer.wire.sealing import _SEALED

COUNT = 5
TIMES = {"lag": 4, "deadline_seconds": 15.0, "round_seconds": 5.0}
CHANGES = {"rounds": 10**6, "agents": {"benign": COUNT, "malicious": 0, "budget": COUNT - 1}}
MAX_PACE = 1.3
MIN_SECONDS = 30.0  # of an attack that is judged by itself: a shorter one has few rounds
MIN_EXCHANGED = 0.95
BY_RELAY, BY_MEMBER = {}, {}


def attack(table):
    def add(function):
        table[function.__name__.replace("_", " ")] = function
        return function

    return add


class HostileRelay(Relay):
    """Relay that delivers all messages in time, and does what its attack adds."""

    attack = staticmethod(lambda relay, name, command, entries: entries)

    def _reply(self, name, request):
        is_fast = self.attack in FAST
        if "?wait=" in request.target and is_fast:  # do not wait for messages
            target = re.sub(r"wait=[0-9.]+", "wait=0.01", request.target)
            request = dataclasses.replace(request, target=target)
        code, content = super()._reply(name, request)
        commands = {"GET /v1/cards": "cards", "GET /v1/boxes": "take"}
        command = commands.get(f"{request.method} {request.target[:9]}")
        if command is None or code != 200:
            return code, content
        entries = split_messages(content, 2**20)
        result = self.attack(self, name, command, entries)
        return result if isinstance(result, tuple) else (code, join_messages(result))

    def junk(self, name, count):
        """Return messages that only the seal shows to be forged."""
        ids = {member.name: id for id, member in self.federation.members.items()}
        cards = [card for one, card in self._mailbox.cards().items() if not one.startswith(name)]
        messages = []
        for k in range(count if cards else 0):
            card = random.choice(cards)
            sender = int.from_bytes(card[41:45], "little")
            head = _SEALED.pack(b"fedcb2o", 1, 5, 0, sender, ids[name], k, secrets.randbits(60))
            messages.append(head + card + secrets.token_bytes(40))
        return messages


@attack(BY_RELAY)
def duplicates(relay, name, command, entries):
    old = relay.__dict__.setdefault("old", {}).setdefault(name, [])
    if command == "cards":
        return entries
    old.extend(entries)
    del old[:-50]
    return [*entries, *entries, *old]


@attack(BY_RELAY)
def reordered(relay, name, command, entries):
    if command == "take":
        random.shuffle(entries)
    return entries


@attack(BY_RELAY)
def late(relay, name, command, entries):
    time.sleep(random.uniform(0.0, 1.0))
    return entries


@attack(BY_RELAY)
def junk_cards(relay, name, command, entries):
    if command == "take":
        return entries
    names = [f"org-{j}.check" for j in range(COUNT)] + [f"x{k}.run" for k in range(5000)]
    for one in names:
        entries += [one.encode(), secrets.token_bytes(CARD_BYTES)]
    return entries


@attack(BY_RELAY)
def long_cards_every_second_time(relay, name, command, entries):
    is_long = command == "cards" and random.random() < 0.5
    return (200, EMPTY) if is_long else entries


@attack(BY_RELAY)
def forged_messages(relay, name, command, entries):
    return entries if command == "cards" else [*entries, *relay.junk(name, 900)]


@attack(BY_RELAY)
def large_messages(relay, name, command, entries):
    return entries if command == "cards" else [*entries, *[bytes(2**21)] * 4]


@attack(BY_RELAY)
def empty_messages(relay, name, command, entries):
    return entries if command == "cards" else (200, join_messages(entries) + EMPTY)


@attack(BY_RELAY)
def empty_replies(relay, name, command, entries):
    return entries


@attack(BY_RELAY)
def versions_of_another_federation(relay, name, command, entries):
    """Say every second time that the member is none any more."""
    if (command == "cards" or not entries) and random.random() < 0.5:
        size = random.choice([2**16, 2**20]) - 10
        lines = HEADERS[: size - 100] + b"\nx = %d\n" % random.randrange(10**9)
        return FORMER_MEMBER, lines
    return entries


@attack(BY_RELAY)
def lost_connections(relay, name, command, entries):
    if (command == "cards" or not entries) and random.random() < 0.5:
        return 500, b"end of the connection"
    return entries


EMPTY = bytes(2**23)  # two million empty messages
HEADERS = b"".join(b"[a%d%s]\n" % (k, b".b" * 100) for k in range(5000))  # slow to parse
FAST = (forged_messages, large_messages, empty_messages, empty_replies,
        versions_of_another_federation, lost_connections)  # fmt: skip


class HostileMember:
    """Member that floods the others through an honest relay."""

    def __init__(self, federation, identity, relay, is_over):
        self.federation, self.identity, self.is_over = federation, identity, is_over
        self.member = relay
        self.mailbox = RelayMailbox(relay, identity)
        self.transport = Relayed(federation, identity, RelayMailbox(relay, identity))
        self.transport.serve(lambda request, reply: None)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.transport.close()

    def boxes(self):
        cards = self.transport._cards_by_peer()
        return [(card, f"{self.transport._names[id]}/{card.session}") for id, card in cards.items()]

    def repeat(self, function, threads=8):
        def run():
            while not self.is_over():
                with contextlib.suppress(OSError):
                    function()

        workers = [threading.Thread(target=run, daemon=True) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


def put_to_all(member, message):
    def put():
        for _, box in member.boxes():
            with contextlib.suppress(OSError):
                member.mailbox.put(box, message, 0.5)

    member.repeat(put)


@attack(BY_MEMBER)
def no_answers(member):
    while not member.is_over():
        time.sleep(0.1)


@attack(BY_MEMBER)
def large_garbage(member):
    put_to_all(member, bytes(2**21))


@attack(BY_MEMBER)
def empty_garbage(member):
    put_to_all(member, b"")


@attack(BY_MEMBER)
def sealed_requests(member):
    def put():
        for card, box in member.boxes():
            request = Request(
                kind=RequestKind.MANIFEST,
                run=member.federation.run,
                sender=member.federation.id_of(member.identity.member),
                receiver=card.agent,
                nonce=secrets.token_bytes(16),
            ).encode(member.identity.sign)
            message = member.transport._session.seal(card, SealedKind.REQUEST, 1, request)
            with contextlib.suppress(OSError):
                member.mailbox.put(box, message, 0.5)

    member.repeat(put)


@attack(BY_MEMBER)
def cards_at_full_speed(member):
    card = member.transport._session.card(1)
    member.repeat(lambda: member.mailbox.publish_card(f"{member.identity.member.name}.check", card))


@attack(BY_MEMBER)
def questions_to_the_relay(member):
    member.repeat(lambda: (member.mailbox.cards(), member.mailbox.federation()))


@attack(BY_MEMBER)
def waiting_connections(member):
    other = RelayMailbox(member.member, member.identity)
    box = f"{member.identity.member.name}/{'0' * 32}"
    member.repeat(lambda: (member.mailbox.take(box, 5.0), other.take(box, 5.0)), threads=16)


def serve(federation, keys, place, number, ready):
    """Run a relay whose attack is that of a shared number, 0 for none."""
    relay = HostileRelay(read_federation(federation), Identity.read(keys), folder=place)
    relay.federation = read_federation(federation)
    attacks = [HostileRelay.attack, *BY_RELAY.values()]
    ready.touch()
    while True:
        relay.attack = attacks[number.value]
        relay._mailbox.sweep()
        time.sleep(0.05)


@contextlib.contextmanager
def running_relay(folder, federation):
    """Run a hostile relay in a process, and yield its identity and the number of its attack."""
    keys = relays.relay_identity(folder)
    # Without a lock, which a relay that ends while it holds it would keep forever.
    number = FORKED.RawValue("i", 0)
    work = (federation, keys.folder, folder / "relay", number, folder / "ready")
    process = FORKED.Process(target=serve, args=work, daemon=True)
    process.start()
    try:
        wait_for((folder / "ready").exists)
        yield keys, number
    finally:
        process.kill()
        process.join()


def federation_behind(folder):
    """Write a federation of members without endpoints."""
    orgs = [
        Identity.make(folder / f"org-{j}", name=f"org-{j}", endpoint=f"org-{j}.invalid:1")
        for j in range(COUNT)
    ]
    path = folder / "federation.toml"
    members.federated(orgs, changes=CHANGES, path=path, **TIMES)
    return path, orgs


def observe(peers, honest, work, seconds):
    """Return seconds per round, and the share of models that honest members got of each other."""
    before, start = [len(peers.lines(j)) for j in honest], time.monotonic()
    work(start + seconds)
    time.sleep(max(0.0, start + seconds - time.monotonic()))
    elapsed = time.monotonic() - start
    lines = [peers.lines(j)[count:] for j, count in zip(honest, before, strict=True)]
    received = sum(
        sum(model["id"] in honest for model in line["received"]) for one in lines for line in one
    )
    num_rounds = sum(map(len, lines))
    rounds = max(num_rounds, 1)
    return {
        "seconds_a_round": round(len(honest) * elapsed / rounds, 3),
        "exchanged": round(received / rounds / (len(honest) - 1), 3),
    }


def run_all(folder, seconds, out=sys.stdout):
    """Return the failures of all attacks."""
    return [
        *run(folder / "relay", seconds, range(COUNT), BY_RELAY, out),
        *run(folder / "member", seconds, range(COUNT - 1), BY_MEMBER, out),
    ]


def run(folder, seconds, honest, attacks, out):
    """Return the failures of some attacks on running nodes."""
    folder.mkdir()
    path, orgs = federation_behind(folder)
    federation = read_federation(path)
    simulate = {"together": 1, **members.experiment(COUNT, **CHANGES)}
    peers = Nodes(folder, path, [one.folder for one in orgs], simulate)
    records, messages = [], []

    def work(k, end):
        if attacks is BY_RELAY:
            number.value = k
        elif k:
            function = list(attacks.values())[k - 1]
            is_over = lambda: time.monotonic() > end  # noqa: E731
            with HostileMember(federation, orgs[-1], keys.member, is_over) as member:
                wait_for(lambda: len(member.transport.connected_peers()) == COUNT - 1)
                function(member)

    with running_relay(folder, path) as (keys, number), contextlib.closing(peers):
        location = keys.folder / "relay.member.toml"
        peers.start(*honest, relay=location, listen=False, assess_every=0, gather=5.0)
        for j in honest:
            peers.until(j, 5)
        if attacks is BY_MEMBER:  # a new member is asked alone, once: this is not its attack
            work(1, time.monotonic() + 3 * TIMES["round_seconds"])
        for k, name in enumerate(["none", *attacks]):
            record = {"attack": name}
            record |= observe(peers, honest, functools.partial(work, k), max(seconds, 6.0))
            record["running"] = sum(peers.processes[j].is_alive() for j in honest)
            records.append(record)
            print(json.dumps(record), file=out, flush=True)
        if any(not peers.processes[j].is_alive() for j in honest):
            messages.append(f"a node ended: {[peers.log(j)[-500:] for j in honest]}")
    undisturbed, *disturbed = records
    if seconds < MIN_SECONDS:
        keys = ("seconds_a_round", "exchanged")
        means = {key: sum(record[key] for record in disturbed) / len(disturbed) for key in keys}
        disturbed = [{"attack": "all attacks together", **means}]
    for record in disturbed:
        if record["seconds_a_round"] > MAX_PACE * undisturbed["seconds_a_round"]:
            messages.append(f"{record['attack']}: {record['seconds_a_round']} s a round")
        if record["exchanged"] < MIN_EXCHANGED * undisturbed["exchanged"]:
            messages.append(f"{record['attack']}: {record['exchanged']:.0%} of the models")
    return messages


def print_processor_shares(folder, seconds):
    """Print the share of a processor that the transport of a node uses, by attack."""
    folder.mkdir(parents=True, exist_ok=True)
    path, orgs = federation_behind(folder)
    federation = read_federation(path)
    with running_relay(folder, path) as (keys, number):
        other = RelayMailbox(keys.member, orgs[1])
        other.publish_card("org-1.run", Session(federation, orgs[1]).card(1))
        with Relayed(federation, orgs[0], RelayMailbox(keys.member, orgs[0])) as transport:
            transport.serve(lambda request, reply: None)
            for k, name in enumerate(["none", *BY_RELAY]):
                number.value = k
                time.sleep(1.0)
                start, used = time.monotonic(), time.process_time()
                time.sleep(seconds)
                share = (time.process_time() - used) / (time.monotonic() - start)
                print(f"{name}: {share:.1%}", flush=True)
        other.close()


if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver", force=True)
    with tempfile.TemporaryDirectory() as temporary:
        if sys.argv[2:] == ["processor"]:
            print_processor_shares(Path(temporary), float(sys.argv[1]))
            sys.exit()
        wrong = run_all(Path(temporary), float(sys.argv[1]))
    print("\n".join(wrong) or f"{len(BY_RELAY) + len(BY_MEMBER)} attacks: nothing went wrong")
    sys.exit(bool(wrong))
