"""Measure how hostile members affect the round times and received models of honest members.

`python -m tests.peer.pace` prints the table of notes/pace.md in about ten minutes. All nodes
of a federation run in one process without a network; hostile members have valid identities.
"""

import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from tests.peer import members
from tests.peer.wire import Wire

import fedcb2o
from fedcb2o.data import digits
from fedcb2o.nn import parameters
from fedcb2o.peer import Federation, Identity
from fedcb2o.peer.node.agent import build_network
from fedcb2o.peer.node.node import Node
from fedcb2o.peer.wire.protocol import (
    Answer,
    AnswerStatus,
    Manifest,
    Request,
    RequestKind,
    decode_request,
    encode_hello,
    encode_offer,
)
from fedcb2o.peer.wire.transport import Reply

ROUND_SECONDS = 0.6
DEADLINE_SECONDS = 6.0
SIZES = {3: (1,), 4: (2,), 8: (1, 3)}


class Hostile:
    """Member with a valid model of zeros that answers as its strategy says."""

    def __init__(self, federation: Federation, identity: Identity, strategy: str) -> None:
        self.federation = federation
        self.identity = identity
        self.agent_id = federation.id_of(identity.member)
        self.strategy = strategy
        self.content = bytes(4 * len(parameters.flatten(build_network(federation))))

    def on_request(self, data: bytes, reply: Reply) -> None:
        request, *_ = decode_request(data)
        if self.strategy == "silent":
            time.sleep(DEADLINE_SECONDS)
        reply(self.answer(request))

    def answer(self, request: Request) -> Answer:
        last = self.federation.rounds
        if request.kind is RequestKind.HELLO:
            content = encode_hello({"round": last}, request.nonce, self.identity.sign)
            return Answer(AnswerStatus.OK, content)
        if self.strategy == "silent":
            return Answer(AnswerStatus.NOT_YET)
        if request.kind is RequestKind.MODEL:
            delays = {"just before the deadline": DEADLINE_SECONDS - 0.5, "after 0.9 s": 0.9}
            time.sleep(delays.get(self.strategy, 0.0))
            return Answer(AnswerStatus.OK, self.content)
        n = last - 1 if self.strategy == "claims the last round" else request.round
        manifest = Manifest.from_content(
            self.content,
            run=self.federation.run,
            agent=self.agent_id,
            round=n,
            dim=len(self.content) // 4,
            num_samples=100,
        )
        content = encode_offer(manifest.to_signed_bytes(self.identity.sign))
        return Answer(AnswerStatus.OK, content)


STRATEGIES = ("claims the last round", "just before the deadline", "after 0.9 s", "silent")


class Times:
    """Observer that notes when rounds end."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.notes: list[str] = []

    def on_phase(self, n, name):
        pass

    def on_round(self, line):
        self.ends.append(time.monotonic())

    def on_note(self, text):
        self.notes.append(text)


def measure(n: int, f: int, strategy: str, rounds: int = 20) -> tuple[float, float, list[str]]:
    """Run a federation of `n` members.

    Args:
        n: Members.
        f: Hostile members among them.
        strategy: Strategy of the hostile members, one of `STRATEGIES`.
        rounds: Number of rounds.

    Returns:
        Mean seconds per round of honest members; received models per round and honest peer; and
        all messages to operators.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        organisations = members.identities(folder, n)
        federation = members.federated(
            organisations,
            changes={"rounds": rounds, "agents": {"benign": n, "malicious": 0}},
            round_seconds=ROUND_SECONDS,
            deadline_seconds=DEADLINE_SECONDS,
        )
        wire = Wire()
        for j in range(n - f, n):
            wire.agent(j).serve(Hostile(federation, organisations[j], strategy).on_request)
        data = digits()
        honest = range(n - f)
        nodes = []
        for j in honest:
            share = fedcb2o.Dataset(
                fedcb2o.Shard(data.pool.x[j::n], data.pool.y[j::n]), data.test, data.class_names
            )
            nodes.append(
                Node(
                    federation,
                    organisations[j],
                    share,
                    out=folder / f"out-{j}",
                    connect=lambda federation, identity, j=j: wire.agent(j),
                    observer=Times(),
                    gather=5.0,
                    linger=5.0,
                )
            )
        records: dict[int, list] = {}
        threads = [
            threading.Thread(
                target=lambda j=j, node=node: records.update({j: [*node.rounds()]}), daemon=True
            )
            for j, node in zip(honest, nodes, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20 * rounds * ROUND_SECONDS + 5 * DEADLINE_SECONDS)

        ends = [node.observer.ends for node in nodes]
        seconds = np.mean([(times[-1] - times[0]) / (len(times) - 1) for times in ends])
        received = [
            sum(model["id"] in honest for line in lines for model in line["received"])
            for lines in records.values()
        ]
        rate = np.mean(received) / rounds / max(1, len(honest) - 1)
        notes = [note for node in nodes for note in node.observer.notes]
        return float(seconds), float(rate), notes


def main() -> None:
    """Print the table, relative to federations without hostile members."""
    print("| members | hostile | | round time | honest models heard |", flush=True)
    print("|--:|--:|---|--:|--:|", flush=True)
    for n, hostile in SIZES.items():
        base_seconds, base_rate, _ = measure(n, 0, "")
        for f in hostile:
            for strategy in STRATEGIES:
                seconds, rate, _ = measure(n, f, strategy)
                time_ratio, rate_ratio = seconds / base_seconds, rate / base_rate
                print(
                    f"| {n} | {f} | {strategy} | {time_ratio:.2f} | {rate_ratio:.0%} |", flush=True
                )


if __name__ == "__main__":
    sys.exit(main())
