"""Do a million hostile messages get past what reads them?

    python benchmarks/fuzz.py                          # 10^6 messages
    python benchmarks/fuzz.py --messages 20000 --seed 1

Good messages of three members are mutated at random (bits, numbers such as 2^63, pieces cut out, put in, put elsewhere,
or taken from other messages), and what reads them among peers is given each: `refusal` a manifest, `Server.hear` a
request, what asks the answer to it, a coding a model, `check_proof` a proof. One in a hundred is left as it is. Of the
manifests one in ten is signed again after its mutation, as a hostile member would. A line for each says

    messages    how many there were, and how many of them nobody had changed
    taken       how many of these unchanged ones passed: all of them must
    wrong       how many others passed: none may. A member may sign any model, and claim any number of samples: of
                what is signed again, what passes must have the run, agent, round, sizes and encoding that fit
    raised      how many ended in an exception: none may
    a second    messages, by one core
    slowest     milliseconds for one message

and the last line the memory of the process before and at its peak. The exit status is 1 where something was wrong, was
not taken or raised. Mutations are drawn from the seed; keys are new each time. A bad message is printed in hexadecimal.

Replays are left out: a server remembers the last 2048 nonces of a member, and what is older is heard again. 10^6 took 9
minutes on two cores that others kept busy (load 10 to 30).
"""

import argparse
import hashlib
import random
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path

import torch

from fedcb2o.data.digits import digits
from fedcb2o.errors import DataError
from fedcb2o.peer import download, federation
from fedcb2o.peer.coding import Coding, Int8, Raw
from fedcb2o.peer.federation import Federation
from fedcb2o.peer.identity import Identity
from fedcb2o.peer.ledger import SUFFIX, Ledger, check_proof
from fedcb2o.peer.protocol import (
    CHUNK,
    NONE,
    SIGNS_MANIFEST,
    Answer,
    Bytes,
    Kind,
    MalformedError,
    Manifest,
    Request,
    Status,
    hello,
    offer,
    read_answer,
    read_hello,
    read_manifest,
    read_offer,
    refusal,
)
from fedcb2o.peer.serve import Server, Snapshot

ROUND, ROUNDS, LAG = 50, 100, 3
DIM = 3 * CHUNK // 4 - 7  # three chunks, the last one shorter
SHARES = {"manifest": 0.4, "request": 0.3, "answer": 0.2, "int8": 0.078, "float32": 0.02, "proof": 0.002}
UNCHANGED, AGAIN = 0.01, 0.1  # shares of what is not changed, and of manifests that are signed again
NUMBERS = [0, 1, 2, 127, 255, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
FIELDS = (3, 9, 42, 46, 50, 54, 58, 66, 98, 106, 138)  # where numbers begin, more or less
Taken = Callable[[bytes], object]  # what a message is taken for; None where it is refused


def mutated(draw: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """A message changed in one to three places."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        place = draw.randrange(len(changed) + 1) if draw.random() < 0.5 else draw.randrange(min(len(changed), 160) + 1)
        size = draw.choice((1, 1, 2, 4, 8, 32, 64, 1000))
        match draw.randrange(10):
            case 0:
                if place < len(changed):
                    changed[place] ^= 1 << draw.randrange(8)
            case 1:
                number = struct.pack("<Q", draw.choice(NUMBERS))[: draw.choice((1, 4, 8))]
                changed[place : place + len(number)] = number
            case 2:
                changed[place : place + size] = draw.randbytes(min(size, len(changed) - place))
            case 3:
                del changed[place:]
            case 4:
                del changed[place : place + size]
            case 5:
                changed[place:place] = draw.randbytes(size)
            case 6:
                changed += draw.choice((b"\0", bytes(size), draw.randbytes(size)))
            case 7:
                other = draw.choice(others)
                changed[place : place + size] = other[place : place + size]
            case 8:
                place = draw.choice(FIELDS)
                number = int.from_bytes(changed[place : place + 8], "little") + draw.choice((-1, 1))
                number = draw.choice((number % 2**64, *NUMBERS))
                changed[place : place + 8] = number.to_bytes(8, "little")
            case 9:
                start = draw.randrange(len(changed) + 1)
                changed[place : place + size] = changed[start : start + size]
    return bytes(changed)


@dataclass
class Line:
    """What became of the messages of one kind."""

    messages: int = 0
    unchanged: int = 0
    taken: int = 0
    wrong: int = 0
    raised: int = 0
    again: int = 0  # signed again, and taken
    seconds: float = 0.0
    slowest: float = 0.0


@dataclass
class World:
    """Three members, and what the first of them, in round 50, takes for what."""

    folder: Path
    who: list[Identity] = field(init=False)
    federation: Federation = field(init=False)

    def __post_init__(self) -> None:
        self.who = [
            Identity.make(self.folder / f"org-{j}", name=f"org-{j}", endpoint=f"127.0.0.1:{9000 + j}") for j in range(3)
        ]
        agents = {"num_clusters": 1, "benign": 3, "malicious": 0, "budget": 2}
        experiment = {"extends": "digits-fedcb2o", "name": "fuzz", "agents": agents}
        limits = {"answers_per_minute": 10**9, "uploads": 1, "per_peer": 1}
        members = [identity.member for identity in self.who]
        self.federation = federation.make(
            experiment, members, dataset=digits(), rounds=ROUNDS, lag=LAG, limits=limits, seed=0
        )

    def manifest(self, agent: int, n: int, content: Bytes, dim: int = DIM) -> bytes:
        """A good one."""
        made = Manifest.of(
            content, run=self.federation.run, agent=agent, round=n, dim=dim, num_samples=9, encoding=0, base=NONE
        )
        return made.signed(self.who[agent].sign)

    def judged(self, data: Bytes) -> bytes | None:
        """What is taken for the second member's manifest."""
        reason, manifest = refusal(
            data, federation=self.federation, asked=1, n=ROUND, least=0, dim=DIM, most=4 * DIM, encoding=0, base=NONE
        )
        if (manifest is None) != bool(reason):
            raise AssertionError("neither taken nor refused")
        return None if manifest is None else bytes(data)

    def fits(self, data: bytes) -> bool:
        """Whether what a member signed again is what it may sign, by another reading of the page."""
        encoding, run, agent, n, dim, _, base, size, _, count = struct.unpack_from("<9xB32sIIQQ32sQ32sI", data)
        return (
            data[:9] == b"fedcb2o\1\1"
            and (encoding, run, agent, dim, base) == (0, self.federation.run, 1, DIM, NONE)
            and ROUND - LAG <= n < ROUNDS
            and 1 <= size <= 4 * DIM
            and (count - 1) * CHUNK < size <= count * CHUNK
            and len(data) == 142 + 32 * count + 64
        )

    def again(self, draw: random.Random, data: bytes) -> bytes:
        """A message as a member signs it: the first or the second, to be judged as the second's."""
        body = data[:-64]
        return body + self.who[draw.choice((1, 1, 1, 2))].sign(SIGNS_MANIFEST + body)


class Requests:
    """Requests as a server hears them, each good one with a nonce of its own."""

    def __init__(self, world: World) -> None:
        ledger = Ledger(world.folder, world.federation)
        self.world, self.clock = world, 0.0
        self.server = Server(world.federation, 0, world.who[0], ledger, about=dict, clock=self._now)
        content = bytes(100)
        self.snapshot = Snapshot(world.manifest(0, ROUND, content, 25), content)
        self.server.publish(self.snapshot)
        self.count = 0
        self.heard = [self.fresh() for _ in range(4)]
        for data in self.heard:
            assert self.taken(data) is not None

    def _now(self) -> float:
        self.clock += 1.0  # so that no limit a minute is met
        return self.clock

    def fresh(self) -> bytes:
        """A good request that was not heard."""
        self.count += 1
        kind = Kind(self.count % 4 + 1)
        nonce = hashlib.sha256(b"%d" % self.count).digest()[:16]
        key = self.world.who[1].member.key
        digest = {Kind.HELLO: key, Kind.MANIFEST: NONE}.get(kind, self.snapshot.digest)
        request = Request(
            kind=kind, run=self.world.federation.run, sender=1, receiver=0, nonce=nonce, round=ROUND, digest=digest
        )
        return request.encode(self.world.who[1].sign)

    def taken(self, data: bytes) -> bytes | None:
        """What is not turned away."""
        before = dict(self.server.counts.refused)
        self.server.hear(data, lambda answer: None)
        refused = self.server.counts.refused
        if refused.get("failed") != before.get("failed"):
            raise AssertionError("the server failed")
        while any(peer.queue for peer in self.server._peers.values()):
            time.sleep(0)
        return data if refused == before else None


class Answers:
    """Answers of each kind as the one who asked reads them, and takes what it can check."""

    def __init__(self, world: World, manifest: bytes) -> None:
        self.world, self.nonce = world, bytes(range(16))
        self.chunk, self.about = bytes(range(200)), {"name": "org-1", "keys": {"a": "b"}, "round": 3}
        self.witness = world.manifest(2, ROUND - 1, bytes(10))
        seen = [(2, n, hashlib.sha256(b"%d" % n).digest()) for n in range(5)]
        self.manifest = manifest
        bodies = [offer(manifest, seen), self.chunk, self.witness, hello(self.about, self.nonce, world.who[1].sign)]
        self.good = [Answer(self.nonce, Status.OK, body).encode() for body in bodies]
        self.ledger = Ledger(world.folder, world.federation)
        self.ledger.seen(self.witness)

    def taken(self, data: bytes) -> object:
        """What is taken of an answer, whatever was asked for: a manifest, a chunk, a witness or a hello."""
        try:
            answer = read_answer(data)
        except MalformedError:
            return None
        if answer.nonce != self.nonce or answer.status is not Status.OK:
            return None
        body = answer.body
        with suppress(MalformedError):
            signed, seen = read_offer(body)
            self.ledger.conflicts(seen)
            if self.world.judged(signed) is not None:
                return signed
        if hashlib.sha256(body).digest() == hashlib.sha256(self.chunk).digest():
            return bytes(body)
        self.ledger.seen(bytes(body))
        if self.ledger.guilty:
            raise AssertionError("a mutation made a member guilty")
        with suppress(MalformedError):
            return self.ledger.witness(2, ROUND - 1, read_manifest(body)[0].digest)
        with suppress(MalformedError):
            return read_hello(body, self.nonce, self.world.who[1].member)
        return None

    def right(self, taken: object) -> bool:
        """Whether this was in the good answers."""
        return taken in (self.manifest, self.chunk, self.witness, self.about)


def model_of(coding: Coding, dim: int) -> Taken:
    """What a coding takes for a model; raises where numbers pass that may not."""
    row = torch.empty(dim)

    def taken(data: bytes) -> object:
        row.fill_(0.5)
        reason = coding.unpack_(data, row)
        if reason:
            if not (row == 0.5).all():
                raise AssertionError("a refused model was written")
            return None
        return None if download.unfit(row) else data

    return taken


def main() -> int:
    """The exit status."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--messages", type=int, default=10**6)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        return fuzz(World(Path(name)), draw, args.messages)


def fuzz(world: World, draw: random.Random, count: int) -> int:
    """Try so many messages, and tell what became of them."""
    content = bytes(4 * DIM)
    manifests = [world.manifest(1, n, content) for n in (ROUND - LAG, ROUND, ROUNDS - 1)]
    requests, answers = Requests(world), Answers(world, manifests[1])
    dim = 5000
    models = torch.randn(4, dim, generator=torch.Generator().manual_seed(0))
    raw, int8 = Raw(dim), Int8(models[0])
    ledger = Ledger(world.folder / "proven", world.federation)
    ledger.seen(world.manifest(2, 5, b"to one"))
    proof = ledger.seen(world.manifest(2, 5, b"to another"))
    assert proof is not None
    path = world.folder / "proven" / "proofs" / proof.file
    changed = world.folder / f"changed{SUFFIX}"

    def proven(data: bytes) -> object:
        changed.write_bytes(data)
        try:
            return check_proof(changed, world.federation)
        except DataError:
            return None

    shown = check_proof(path, world.federation)
    good = {
        "manifest": manifests,
        "request": requests.heard,
        "answer": answers.good,
        "int8": [bytes(int8.pack(model)) for model in models],
        "float32": [bytes(raw.pack(model)) for model in models],
        "proof": [path.read_bytes()],
    }
    taken: dict[str, Taken] = {
        "manifest": world.judged,
        "request": requests.taken,
        "answer": answers.taken,
        "int8": model_of(int8, dim),
        "float32": model_of(raw, dim),
        "proof": proven,
    }
    others = [data for messages in good.values() for data in messages]
    lines = {name: Line() for name in SHARES}
    kinds, weights = list(SHARES), list(SHARES.values())
    bad: Counter[str] = Counter()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        (name,) = draw.choices(kinds, weights)
        line, original = lines[name], draw.choice(good[name])
        if name == "request" and draw.random() < 0.1:
            original = requests.fresh()
        data = original if draw.random() < UNCHANGED else mutated(draw, original, others)
        if name == "request" and (data == original or data in good[name]):  # a replay would be told from a mutation
            data = original = requests.fresh()
        again = name == "manifest" and data != original and draw.random() < AGAIN
        data = world.again(draw, data) if again else data
        started = time.perf_counter()
        found, error = None, ""
        try:
            found = taken[name](data)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        seconds = time.perf_counter() - started
        line.messages += 1
        line.seconds += seconds
        line.slowest = max(line.slowest, seconds)
        line.raised += bool(error)
        unchanged = data == original or (name != "request" and data in good[name])
        line.unchanged += unchanged
        line.taken += unchanged and found is not None
        right = found is None or unchanged
        if not right and again:
            right = world.fits(data)
            line.again += right
        elif not right:  # what nobody signs may have changed: the digests beside a manifest, a proof's spaces
            right = name in ("int8", "float32") or (name == "answer" and answers.right(found)) or found == shown
        line.wrong += not right
        if error or not right or (unchanged and found is None):
            bad[name] += 1
            if bad[name] <= 3:
                print(
                    f"{name}: {error or ('wrong' if not right else 'not taken')}: {data.hex()[:4000]}", file=sys.stderr
                )
    requests.server.close()
    return told(lines, memory)


def told(lines: dict[str, Line], memory: int) -> int:
    """Print what became of the messages; 1 where anything is as it must not be."""
    whole = Line(*(sum(values) for values in zip(*map(astuple, lines.values()), strict=True)))
    whole.slowest = max(line.slowest for line in lines.values())
    columns = ("messages", "unchanged", "taken", "wrong", "raised", "a second", "slowest")
    print(f"{'':<10}", *(f"{column:>9}" for column in columns))
    for name, line in (*lines.items(), ("all", whole)):
        counts = (line.messages, line.unchanged, line.taken, line.wrong, line.raised)
        rate, slowest = line.messages / max(line.seconds, 1e-9), f"{1000 * line.slowest:.1f}"
        print(f"{name:<10}", *(f"{count:>9}" for count in (*counts, round(rate), slowest)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{whole.again} manifests that were signed again passed, each as it had to be to pass")
    print(f"memory: {memory / 1024:.0f} MiB before, {peak / 1024:.0f} MiB at the peak")
    return int(bool(whole.wrong or whole.raised or whole.taken != whole.unchanged))


if __name__ == "__main__":
    sys.exit(main())
