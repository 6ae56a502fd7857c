"""Models sent as float32 and as int8 differences: bytes, and accuracy under label flip and without, on digits.

    python benchmarks/encoding.py [--seeds 5] [--rounds 25]

8 agents in one cluster, 2 of them flip labels (9 to 4) or, without attack, do not; M = 4. It is the
same round and the same coding as between real peers, in one process: what agents receive was packed by its sender and
unpacked by each receiver. "no feedback" is int8 whose rounding is not made good in the next round.
"""

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float

from fedcb2o.experiments import assemble
from fedcb2o.experiments.config import Experiment, load
from fedcb2o.experiments.lines import metrics_line
from fedcb2o.experiments.samples import aim_of, dataset_of
from fedcb2o.federated.choices import Inbox
from fedcb2o.federated.lists import Lists
from fedcb2o.federated.peers import Memory
from fedcb2o.models import flatten
from fedcb2o.peer.coding import Coding, Int8, Raw
from fedcb2o.report.matrix import half_width, interval
from fedcb2o.runtime.engine import rounds
from fedcb2o.runtime.shared import Shared
from fedcb2o.runtime.workers import Here


class Forgetful(Int8):
    """Int8 that owes nothing."""

    def pack(self, theta: torch.Tensor) -> bytes:
        """As if it were the first model."""
        self.state()["owed"].zero_()
        return super().pack(theta)


ENCODINGS = ("float32", "int8")
"""What a federation may agree on."""
CODINGS: dict[str, Callable[[torch.Tensor], Coding]] = {
    "float32": lambda origin: Raw(len(origin)),
    "int8": Int8,
    "int8, no feedback": Forgetful,
}


class Sent(Shared):
    """All agents on one machine, of whom others receive what went through a coding: rows behind the pool's own."""

    def __init__(self, prepared: assemble.Prepared, coding: Callable[[torch.Tensor], Coding]) -> None:
        agents, theta = prepared.terms.num_agents, flatten(prepared.terms.module)
        layout = prepared.block(torch.zeros(0, prepared.terms.dim)).layout
        block = prepared.block(torch.zeros(layout.inbox + agents, prepared.terms.dim))
        super().__init__(block, Here(block))
        self.theirs = np.arange(layout.inbox, layout.inbox + agents)
        self.codings = [coding(theta) for _ in range(agents)]
        self.sizes = np.zeros(agents)
        self.bytes = self.seconds = 0.0

    def publish_(self, n: int, online: Bool[np.ndarray, " N"], sizes: Float[np.ndarray, " N"]) -> None:
        """What all publish goes through their codings."""
        super().publish_(n, online, sizes)
        own, pool, began = self.block.layout.own, self.block.pool, time.process_time()
        for j, coding in enumerate(self.codings):
            content = coding.pack(pool[own[j]])
            self.good[self.theirs[j]] = self.good[own[j]] and not coding.unpack_(content, pool[self.theirs[j]])
            self.sizes[j] = len(content)
        self.seconds += time.process_time() - began
        self.outbox = dataclasses.replace(self.outbox, own=self.theirs)

    def exchange(self, n: int, asked: Sequence[Lists], deadline: float | None) -> list[Inbox]:
        """Count what is sent."""
        found = super().exchange(n, asked, deadline)
        self.bytes += sum(self.sizes[inbox.ids.values].sum() for inbox in found)
        return found


def federation(attacked: bool, num_rounds: int) -> Experiment:
    """8 agents, 2 of whom attack or train on true labels."""
    role = {"agents.malicious_role": "attack" if attacked else "clean"}
    size = {"agents.num_clusters": 1, "agents.benign": 6, "agents.malicious": 2, "agents.budget": 4}
    return load("digits-fedcb2o-trusted", {**role, **size, "rounds": num_rounds, "evaluate_every": num_rounds})


def played(experiment: Experiment, seed: int, coding: Callable[[torch.Tensor], Coding]) -> dict[str, float]:
    """What benign agents score after the last round, and what was sent."""
    prepared = assemble.prepare(experiment, seed, dataset_of(experiment, None))
    engine = Sent(prepared, coding)
    assemble.first_models_(
        engine.block.pool[: prepared.kept], prepared.experiment, prepared.seed, prepared.dataset, range(prepared.kept)
    )
    last, memory = experiment.rounds - 1, Memory.blank(prepared.terms.num_agents)
    *_, done = rounds(engine, memory, 0, experiment.rounds, lambda n: n == last)
    line, attackers = metrics_line(aim_of(experiment), engine.attackers.malicious, done), engine.attackers
    names = ("accuracy", "source_accuracy", "attack_success_rate")
    scores = {name: statistics.mean(line[name][j] for j in attackers.benign.tolist()) for name in names}
    return {**scores, "bytes": engine.bytes, "seconds": engine.seconds}


def main() -> None:
    """Play and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="seeds of each (default 5)")
    parser.add_argument("--rounds", type=int, default=25, help="rounds (default 25)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table(options.seeds, options.rounds)


def table(seeds: int, num_rounds: int) -> None:
    """Print a line for each federation and coding: means over seeds, with Student's intervals at 95%."""
    for attacked, (name, coding) in itertools.product((False, True), CODINGS.items()):
        experiment = federation(attacked, num_rounds)
        found = [played(experiment, seed, coding) for seed in range(seeds)]
        told = {key: [each[key] for each in found] for key in found[0]}
        scores = ", ".join(
            f"{key.replace('_', ' ')} {mean_told(told[key])}"
            for key in ("accuracy", "source_accuracy", "attack_success_rate")
        )
        size = statistics.mean(told["bytes"]) / 1e6
        print(f"{'label flip' if attacked else 'no attack':<10} {name:<18} {size:6.2f} MB sent, {scores}", flush=True)


def mean_told(each: Sequence[float]) -> str:
    """The mean of shares, in percent, with its interval if there are several."""
    mean, half = np.mean(each), half_width(len(each), np.std(each, ddof=1)) if len(each) > 1 else np.nan
    return interval(*(100 * float(end) for end in (mean, mean - half, mean + half)))


if __name__ == "__main__":
    main()
