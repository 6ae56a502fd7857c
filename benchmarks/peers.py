"""Real peers on loopback over mutual TLS: a download beside bare zenoh, training while serving, rounds, memory, int8.

    python benchmarks/peers.py [--only pull serving rounds] [--repeats 15] [--rounds 4] [--encoding int8]
    python benchmarks/peers.py --int8 [--seeds 5]

The paper's network, d = 6,572,975, 26 MB as float32.

- pull: another process offers a model; one download of it, from the manifest to the row that it is admitted into,
  beside zenoh alone between two more sessions of the same kind in the same two processes (a reply of the whole, and
  chunks of 1 MiB with four in flight), and beside what the machine takes to copy and to hash as much. They take turns.
- serving: a training step in a process whose model nobody downloads, or another process does all the time.
- rounds: 8 agents, M = 4, a process each: seconds of a round beside training, bytes, and the peak of each one's memory
  against 3 times the M + 2 models plus 500 MB.
- --int8: bytes and accuracy of both encodings on digits, in one process, by encoding.py.
"""

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import resource
import socket
import statistics
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import encoding
import torch
import zenoh
from memory import dimension, random_images

from fedcb2o import models
from fedcb2o.data.shard import Shard
from fedcb2o.federated.local_update import Training, local_update_
from fedcb2o.peer import federation, transport
from fedcb2o.peer.coding import Coding, Int8, Raw
from fedcb2o.peer.download import Downloads
from fedcb2o.peer.federation import Federation
from fedcb2o.peer.identity import Identity
from fedcb2o.peer.ledger import Journal, Ledger
from fedcb2o.peer.node import Node
from fedcb2o.peer.offers import Offers
from fedcb2o.peer.protocol import CHUNK
from fedcb2o.peer.serve import Server
from fedcb2o.streams import stream

SPAWN = multiprocessing.get_context("spawn")
OFFERS, TAKES, OFFERS_BARE, TAKES_BARE = range(4)  # the members of a federation of four
KEY = "bare/model"
IN_FLIGHT = 4
STEPS = 3  # training steps that are timed together
BUDGET = 4  # M
FEW = {"per_class": 2, "test_per_class": 1}
PHASES = ("train", "aggregate", "exchange", "mix", "evaluate")  # "aggregate" holds "exchange"
TARGET = 3.0  # times zenoh's bare time
MB = 1e6

Seconds = dict[str, list[float]]


# A federation on loopback


@dataclass(frozen=True)
class Founded:
    """Organisations on loopback, in folders of their names, and what they agree on."""

    folder: Path
    count: int

    @cached_property
    def agreed(self) -> Federation:
        """What they agree on."""
        return federation.read(self.folder / "federation.toml")

    def identity(self, j: int) -> Identity:
        """That of one of them."""
        return Identity.read(self.folder / f"org-{j}")


def founded(folder: Path, count: int, rounds: int, how: str) -> Founded:
    """So many organisations, which train the paper's network on random images for a few steps a round."""
    made = [
        Identity.make(folder / f"org-{j}", name=f"org-{j}", endpoint=f"127.0.0.1:{port}")
        for j, port in enumerate(free_ports(count))
    ]
    experiment = {
        "name": "peers",
        "seeds": [0],
        "rounds": rounds,
        "linear": "torch",
        "layout": "contiguous",
        "convolution": "grouped",
        "data": {"name": random_images, **FEW},
        "agents": {
            "num_clusters": 1,
            "benign": count,
            "malicious": 0,
            "benign_samples": 94,
            "malicious_samples": 1,
            "budget": min(BUDGET, count - 1),
        },
        "model": {"name": "cnn", "hidden": 2048},
        "training": {"gamma": 1e-4, "batch_size": 64, "local_epochs": 1, "local_steps": STEPS},
        "algorithm": {"name": "fedcb2o"},
    }
    agreed = federation.make(
        experiment,
        [identity.member for identity in made],
        dataset=random_images(**FEW),
        encoding=how,
        limits={"answers_per_minute": 10**9, "uploads": 8, "per_peer": 8},
    )
    federation.write(agreed, folder / "federation.toml")
    return Founded(folder, count)


def free_ports(count: int) -> list[int]:
    """So many ports of 127.0.0.1 that nobody listened on just now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def coding_of(agreed: Federation) -> Coding:
    """How models are sent."""
    return Raw(dimension()) if agreed.encoding == "float32" else Int8(theta(0))


def theta(seed: int) -> torch.Tensor:
    """A model that differs from model 0 as one does that was trained for a while."""
    found = torch.randn(dimension(), generator=torch.Generator().manual_seed(0)) * 0.02
    return found + torch.randn(dimension(), generator=torch.Generator().manual_seed(seed)) * 1e-3 if seed else found


@contextlib.contextmanager
def offering(made: Founded, j: int) -> Iterator[None]:
    """A member that offers a model to the others."""
    agreed, identity, folder = made.agreed, made.identity(j), made.folder / f"out-{j}"
    folder.mkdir()
    ledger, me = Ledger(folder, agreed), agreed.id_of(identity.member)
    link = transport.Zenoh(agreed, identity)
    server = Server(agreed, me, identity, ledger, about=dict)
    try:
        link.serve(server.hear)
        Offers(agreed, identity, coding_of(agreed), Journal(folder), server, print).publish(0, theta(1), 90)
        yield
    finally:
        server.close()
        link.close()


@contextlib.contextmanager
def taking(made: Founded, j: int, peer: int) -> Iterator[Downloads]:
    """A member that downloads from the others, once it sees `peer`."""
    agreed, identity, folder = made.agreed, made.identity(j), made.folder / f"out-{j}"
    folder.mkdir()
    link = transport.Zenoh(agreed, identity)
    try:
        wait_for(lambda: peer in link.alive())
        yield Downloads(agreed, identity, link, Ledger(folder, agreed), coding_of(agreed), dimension())
    finally:
        link.close()


def wait_for(there: Callable[[], bool], seconds: float = 30) -> None:
    """Until something is so."""
    end = time.monotonic() + seconds
    while not there():
        if time.monotonic() > end:
            raise SystemExit("the other process could not be reached on loopback")
        time.sleep(0.05)


@contextlib.contextmanager
def other(function: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A process that works until it is told to end, and the way to it."""
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=function, args=(there, *arguments), daemon=True)
    process.start()
    there.close()
    try:
        if here.recv() != "ready":
            raise SystemExit("the other process did not start")
        yield here
    finally:
        with contextlib.suppress(OSError):
            here.send("end")
        process.join(20)
        process.kill()


# One download


def bare(made: Founded, j: int, peer: int | None = None) -> zenoh.Session:
    """A session of zenoh with a member's settings, but for the size of messages and what may pass: one that
    listens, or one that is linked to a `peer` alone."""
    identity, members = made.identity(j), made.agreed.members
    most: dict[str, Any] = {"transport/link/rx/max_message_size": 2**26}
    if peer is None:
        roots = [member.root for member in members.values()]
        return transport._open(identity, roots, {**most, "listen/endpoints": [f"tls/{identity.member.endpoint}"]})
    return transport._open(
        identity, [members[peer].root], {**most, "connect/endpoints": [f"tls/{members[peer].endpoint}"]}
    )


def offering_both(told: Connection, made: Founded) -> None:
    """The process that offers a model, as a member and by zenoh alone."""
    content = coding_of(made.agreed).pack(theta(1))
    pool = ThreadPoolExecutor(IN_FLIGHT)

    def reply(query: zenoh.Query) -> None:
        asked = query.payload
        k = int(asked.to_bytes()) if asked is not None else -1
        with query:
            query.reply(KEY, content[k * CHUNK : (k + 1) * CHUNK] if k >= 0 else content)

    with offering(made, OFFERS), bare(made, OFFERS_BARE) as session:
        session.declare_queryable(KEY, lambda query: pool.submit(reply, query))
        told.send("ready")
        told.recv()
    pool.shutdown()


def pull(folder: Path, how: str, repeats: int) -> None:
    """Time a download, zenoh alone, and the machine, by turns; print medians and ratios."""
    made = founded(folder, 4, 1, how)
    content = coding_of(made.agreed).pack(theta(1))
    row = torch.zeros(dimension())
    with (
        other(offering_both, made),
        taking(made, TAKES, OFFERS) as downloads,
        bare(made, TAKES_BARE, OFFERS_BARE) as session,
    ):

        def got(*part: bytes) -> Any:
            return session.get(KEY, payload=part[0] if part else None, timeout=60)

        def read(handler: Any) -> int:
            return sum(len(reply.ok.payload.to_bytes()) for reply in handler if reply.ok is not None)

        def chunked() -> int:
            count, size = -(-len(content) // CHUNK), 0
            asked = deque(got(b"%d" % k) for k in range(min(IN_FLIGHT, count)))
            for k in range(count):
                size += read(asked.popleft())
                if k + IN_FLIGHT < count:
                    asked.append(got(b"%d" % (k + IN_FLIGHT)))
            return size

        def download() -> int:
            arrived, failed = downloads.fetch(0, {OFFERS: row}, 60.0)
            return len(content) if arrived else print(failed) or 0

        ways: dict[str, Callable[[], int]] = {
            "download": download,
            "zenoh, whole": lambda: read(got()),
            "zenoh, chunks": chunked,
            "copy": lambda: len(bytearray(content)),
            "SHA-256": lambda: len(content) * bool(hashlib.sha256(content).digest()),
        }
        wait_for(lambda: read(got()) == len(content))
        seconds = turns(ways, len(content), repeats)
    told = {name: statistics.median(each) for name, each in seconds.items()}
    print(f"pull, {how}: {len(content) / MB:.1f} MB, medians of {repeats}")
    for name, each in seconds.items():
        print(
            f"  {name:<14} {1e3 * told[name]:7.1f} ms, best {1e3 * min(each):7.1f},"
            f" {len(content) / told[name] / 1e9:.2f} GB/s"
        )
    for name in ("zenoh, whole", "zenoh, chunks"):
        ratio = told["download"] / told[name]
        verdict = f"{'PASS' if ratio < TARGET else 'FAIL'}: " if how == "float32" else ""
        print(f"  {verdict}a download takes {ratio:.2f} times as long as {name} (target for float32: under {TARGET:g})")


def turns(ways: dict[str, Callable[[], int]], size: int, repeats: int) -> Seconds:
    """Seconds of each way, which all give `size`, taking turns; the first turn does not count."""
    found: Seconds = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            if way() != size:
                raise SystemExit(f"{name} failed")
            found[name].append(time.perf_counter() - start)
    return {name: each[1:] for name, each in found.items()}


# Training while serving


def training(told: Connection, made: Founded) -> None:
    """The process that trains, while it offers a model: seconds of a step, whenever it is asked."""
    torch.set_num_threads(1)
    data = random_images(**FEW)
    module = models.cnn((1, 28, 28), 47, hidden=2048)
    row, shard = models.flatten(module), Shard(data.pool.x[:64], data.pool.y[:64])
    how = Training(gamma=1e-4, lambda2=1.0, momentum=0.9, batch_size=64, local_epochs=1, local_steps=STEPS)
    models.bind_(module, row)
    with offering(made, OFFERS):
        told.send("ready")
        while told.recv() == "train":
            start = time.perf_counter()
            local_update_(row, module, shard, how, stream(0, "step"))
            told.send((time.perf_counter() - start) / STEPS)


def serving(folder: Path, how: str, repeats: int) -> None:
    """Time training steps with and without a peer that downloads all the time, by turns."""
    made = founded(folder, 4, 1, how)
    seconds: Seconds = {"nobody downloads": [], "a peer downloads": []}
    row, count, busy = torch.zeros(dimension()), 0, 0.0
    with (
        other(training, made) as told,
        taking(made, TAKES, OFFERS) as downloads,
    ):
        for turn in range(repeats + 1):
            for name, found in seconds.items():
                told.send("train")
                start = time.perf_counter()
                while name == "a peer downloads" and not told.poll():
                    arrived, failed = downloads.fetch(0, {OFFERS: row}, 60.0)
                    if not arrived:
                        raise SystemExit(f"a download failed: {failed}")
                    count += turn > 0
                step = told.recv()
                if turn:
                    found.append(step)
                    busy += time.perf_counter() - start if name == "a peer downloads" else 0.0
    alone, meanwhile = (statistics.median(each) for each in seconds.values())
    print(f"serving, {how}: medians of {repeats} times {STEPS} training steps of 64 images")
    print(f"  nobody downloads {1e3 * alone:7.1f} ms a step")
    print(
        f"  a peer downloads {1e3 * meanwhile:7.1f} ms a step, {meanwhile / alone:.2f} times as long, at"
        f" {count / busy:.1f} models a second"
    )


# Rounds


def member(made: Founded, j: int) -> None:
    """One agent, from its first round to its last; what it took is written beside its records."""
    node, marks = Node(made.agreed, made.identity(j), random_images(**FEW), out=made.folder / f"out-{j}"), []
    for _ in node.rounds():
        marks.append(time.perf_counter())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (made.folder / f"{j}.json").write_text(json.dumps({"peak": peak, "marks": marks}))


def rounds(folder: Path, how: str, num_rounds: int, count: int = 8) -> None:
    """Run a federation; print what a round takes, what is sent, and the peak of memory."""
    made = founded(folder, count, num_rounds, how)
    processes = [SPAWN.Process(target=member, args=(made, j), daemon=True) for j in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise SystemExit(f"an agent ended with {process.exitcode}")
    lines: list[dict[str, Any]] = []
    walls, peaks = [], []
    for j in range(count):
        took = json.loads((folder / f"{j}.json").read_text())
        lines += [json.loads(line) for line in (folder / f"out-{j}" / "rounds.jsonl").read_text().splitlines()[1:]]
        walls += [end - start for start, end in zip(took["marks"], took["marks"][1:], strict=False)]
        peaks.append(took["peak"])
    phases = {name: statistics.median(line["seconds"][name] for line in lines) for name in PHASES}
    beside = statistics.median(walls) - phases["train"]
    answered = Counter(len(line["received"]) for line in lines)
    sent, got = (statistics.mean(line[name] for line in lines) / MB for name in ("sent", "got"))
    print(f"rounds, {how}: {count} agents, M = {BUDGET}, rounds 2 to {num_rounds}, medians over rounds and agents")
    print(f"  a round {statistics.median(walls):.2f} s, beside training {beside:.2f} s")
    print(
        "  "
        + ", ".join(f"{name} {value:.2f}" for name, value in phases.items())
        + " s (exchange is in aggregate; the rest is records)"
    )
    print(f"  {sent:.1f} MB sent and {got:.1f} MB received by an agent in a round; models received: {dict(answered)}")
    bound = 3 * (BUDGET + 2) * 4 * dimension() + 500 * MB
    ok = "PASS" if max(peaks) < bound else "FAIL"
    print(
        f"  {ok}: peak of memory {min(peaks) / MB:.0f} to {max(peaks) / MB:.0f} MB an agent, bound {bound / MB:.0f} MB"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("pull", "serving", "rounds")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, help="what to measure (default all)")
    parser.add_argument("--repeats", type=int, default=15, help="turns of each way (default 15)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds, of which the first does not count (default 4)")
    parser.add_argument("--encoding", choices=encoding.ENCODINGS, default="float32", help="how models are sent")
    parser.add_argument("--int8", action="store_true", help="compare the encodings on digits instead")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of that (default 5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.int8:
        return encoding.table(options.seeds, 25)
    for part in options.only:
        with tempfile.TemporaryDirectory(prefix="fedcb2o-peers-") as folder:
            if part == "rounds":
                rounds(Path(folder), options.encoding, options.rounds)
            else:
                {"pull": pull, "serving": serving}[part](Path(folder), options.encoding, options.repeats)


if __name__ == "__main__":
    main()
