"""Rounds over Ray on this machine beside those of one machine's engine; and what many nodes would take, by a model.

    python benchmarks/cluster.py [--agents n] [--budget n] [--blocks n] [--nodes n] [--epochs n] [--samples n]
    python benchmarks/cluster.py --many [--pairs n]

Without `--many` the paper's network (d = 6.6 million) on random images: N = 20, M = 5, by default one epoch of 64
samples, so that what is not training weighs more than in the paper; `--epochs 5 --samples 500` are the preset's. With
it 10,000 agents of d = 210. Both engines do the same rounds, one after the other in turns, since a machine that others
use drifts; each has as many processes as there are blocks. With `--nodes` the cluster has several nodes, all of them
on this machine: models then go from store to store through its network.

What was asked for is counted from what the agents of each block received, in the same rounds whose bytes it is held
against. The table of many nodes is a model and no measurement; it prints what it assumes.
"""

import argparse
import contextlib
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from on_paper import Costs, on_paper
from round import random_images
from scale import experiment_of as small_experiment

from fedcb2o.experiments import assemble
from fedcb2o.experiments.cluster import Spread
from fedcb2o.experiments.config import Experiment, load
from fedcb2o.experiments.primitives import primitives_of
from fedcb2o.experiments.run import OneMachine
from fedcb2o.experiments.samples import dataset_of
from fedcb2o.federated.peers import Memory
from fedcb2o.runtime.cluster.holder import Holder
from fedcb2o.runtime.cluster.start import LOCAL, QUIET
from fedcb2o.runtime.engine import Round, rounds
from fedcb2o.runtime.workers import one_thread

PARTS = ("train", "ask and fetch", "decide", "mix")
STORE = 2**30


def large_experiment(agents: int, budget: int, epochs: int, samples: int) -> Experiment:
    """The paper's network."""
    fixed = {
        "data": {"name": random_images, "per_class": 250, "test_per_class": 2},
        "seeds": [0], "training.local_epochs": epochs,
        "agents.benign": agents // 2 - 1, "agents.malicious": 1, "agents.budget": budget,
        "agents.benign_samples": samples, "agents.malicious_samples": samples * 4 // 5,
    }  # fmt: skip
    return load("emnist-fedcb2o-trusted", fixed)


@dataclass
class Side:
    """An engine that is asked for one round after the other, with the seconds of each one's parts."""

    engine: Any
    made: Iterator[Round]
    seconds: list[dict[str, float]] = field(default_factory=list)
    _deciding: float = 0.0

    @classmethod
    def of(cls, engine: Any) -> "Side":
        """Before its first round."""
        blank = Memory.blank(engine.terms.num_agents)
        side = cls(engine, rounds(engine, blank, 0, 10**6, lambda n: False))
        engine.exchange = functools.partial(side._exchange, engine.exchange)
        return side

    def _exchange(self, exchange: Any, *args: Any) -> Any:
        found = exchange(*args)
        self._deciding = time.perf_counter()  # from here on
        return found

    def round(self) -> Round:
        """Its next round."""
        began = time.perf_counter()
        done = next(self.made)
        train, aggregate, mix = (done.seconds[name] for name in ("train", "aggregate", "mix"))
        decide = began + sum(done.seconds.values()) - mix - self._deciding
        self.seconds.append(dict(zip(PARTS, (train, aggregate - decide, decide, mix), strict=True)))
        return done

    @property
    def whole(self) -> list[float]:
        """The seconds of each round."""
        return [sum(each.values()) for each in self.seconds]

    def median(self, part: str) -> float:
        """The seconds of a part of a round."""
        return statistics.median(each[part] for each in self.seconds)


@contextlib.contextmanager
def sides(experiment: Experiment, blocks: int, address: str) -> Iterator[tuple[Side, Side]]:
    """Both engines of a run, at its start: one machine's, and a cluster's."""
    dataset = dataset_of(experiment, None)
    prepared = assemble.prepare(experiment, 0, dataset)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prepared = prepared.by(**primitives_of(folder, prepared))
        found = []
        for where in (OneMachine(blocks, None), Spread(address, blocks)):
            stack.enter_context(where.joined([prepared]))
            engine = stack.enter_context(where.entered(prepared, where.place(prepared, folder)))
            where.begin_models(engine, prepared)
            found.append(Side.of(engine))
        stack.enter_context(one_thread())
        yield found[0], found[1]


@contextlib.contextmanager
def nodes_here(count: int, blocks: int) -> Iterator[str]:
    """The address of a cluster of so many nodes, all on this machine, with a store of `STORE` bytes each."""
    if count < 2:
        yield LOCAL
        return
    from ray.cluster_utils import Cluster

    os.environ.update(QUIET)
    known = {"num_cpus": -(-blocks // count), "object_store_memory": STORE}
    made = Cluster(initialize_head=True, head_node_args={**known, "include_dashboard": False})
    for _ in range(count - 1):
        made.add_node(**known)
    try:
        yield made.address
    finally:
        made.shutdown()


@dataclass
class Bytes:
    """What went between blocks, and of that between nodes, in some rounds: the rows asked for, and the bytes."""

    asked: Int[np.ndarray, "2"] = field(default_factory=lambda: np.zeros(2, np.int64))
    went: Int[np.ndarray, "2"] = field(default_factory=lambda: np.zeros(2, np.int64))

    def add(self, engine: Any, done: Round) -> None:
        """Those of a round: who asked is told by what the agents received."""
        homes, nodes = engine.shares.owner[engine.block.layout.own], engine.actors.nodes
        to, sender = homes[done.choices.received.owners], done.choices.received.values
        pairs = ((to, homes[sender]), (nodes[to], nodes[homes[sender]]))
        self.asked += [len(set(zip(to[to != of], sender[to != of], strict=True))) for to, of in pairs]
        self.went += [engine.actors.lent, engine.actors.moved]

    def told(self, size: int, rounds: int) -> str:
        """In words, of a round; a row has so many bytes."""
        found = []
        for what, asked, went in zip(("blocks", "nodes"), self.asked / rounds, self.went / rounds, strict=True):
            ratio = f", {went / (asked * size):.3f} times their size" if asked else ""
            found.append(f"between {what} {asked:.0f} rows were asked for and {went / 2**20:.1f} MiB went{ratio}")
        return "; ".join(found)


def called(engine: Any) -> float:
    """The seconds of a call to an actor, of those to all."""
    start = time.perf_counter()
    for _ in range(20):
        engine.actors.everybody(Holder.kept)
    return (time.perf_counter() - start) / (20 * len(engine.actors.actors))


def copied_per_second(size: int) -> float:
    """The bytes that this core copies in a second, of so many at a time: the machine's own limit."""
    source, target, best = np.ones(size, np.uint8), np.ones(size, np.uint8), float("inf")
    for _ in range(max(5, 2**28 // size)):
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    return size / best


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, help="N (default 20, or 10,000 with --many)")
    parser.add_argument("--budget", type=int, help="M (default 5, or 4 with --many)")
    parser.add_argument("--blocks", type=int, help="blocks (default 2, or 4 with --many)")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the cluster on this machine (default 1)")
    parser.add_argument("--epochs", type=int, default=1, help="tau (default 1)")
    parser.add_argument("--samples", type=int, default=80, help="of an agent, a fifth to judge by (default 80)")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of rounds that count (default 5)")
    parser.add_argument("--many", action="store_true", help="many small agents")
    options = parser.parse_args()
    agents, blocks = options.agents or (10_000 if options.many else 20), options.blocks or (4 if options.many else 2)
    if options.many:
        experiment = small_experiment(agents, options.budget or 4, None)
    else:
        experiment = large_experiment(agents, options.budget or 5, options.epochs, options.samples)
    with nodes_here(options.nodes, blocks) as address, sides(experiment, blocks, address) as (one, many):
        size, bytes_ = 4 * one.engine.terms.dim, Bytes()
        for pair in range(-1, options.pairs):
            for side in (one, many) if pair % 2 else (many, one):
                done = side.round()
            if pair >= 0:  # the first counts for nothing
                bytes_.add(many.engine, done)
            many.engine.actors.moved = many.engine.actors.lent = 0
        call = called(many.engine)
    del one.seconds[0], many.seconds[0]
    print(
        f"N = {agents:,}, M = {experiment.agents.budget}, d = {size // 4:,}; seconds, medians of {options.pairs} rounds"
    )
    print(f"| | {' | '.join(PARTS)} | a round |\n|---|{'---:|' * (1 + len(PARTS))}")
    for name, side in ((f"one machine, {blocks} processes", one), (f"cluster, {blocks} blocks", many)):
        seconds = [*map(side.median, PARTS), statistics.median(side.whole)]
        print(f"| {name} | {' | '.join(f'{each:.3f}' for each in seconds)} |")
    ratios = [theirs / mine for mine, theirs in zip(one.whole, many.whole, strict=True)]
    print(f"ratio of a pair's rounds: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")
    rows, limit = bytes_.asked[0] / options.pairs, size / copied_per_second(size)
    fetch = max(0.0, many.median(PARTS[1]) - one.median(PARTS[1])) * blocks / max(rows, 1)
    print(bytes_.told(size, options.pairs))
    print(
        f"a row fetched, into the store and out of it: {1e3 * fetch:.3f} ms of a core; a row copied by NumPy: "
        f"{1e3 * limit:.3f} ms"
    )
    print(f"a call to an actor: {1e3 * call:.2f} ms")
    if not options.many:
        samples, held = options.epochs * (options.samples * 4 // 5), options.samples // 5
        print(
            on_paper(
                Costs(
                    size=size,
                    trained=many.median("train") * blocks / (agents * samples),
                    judged=one.median("decide") * blocks / (agents * (experiment.agents.budget + 1) * held),
                    mixed=many.median("mix") * blocks / (agents * (experiment.agents.budget + 1)),
                    copied=fetch / 2,
                    call=call,
                )
            )
        )


if __name__ == "__main__":
    main()
