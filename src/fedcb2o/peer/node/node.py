"""One agent among real peers, from its first round to its last: Algorithm 1 (alg:FedCB2O) for itself.

Rounds have no barrier. An agent downloads what is newest within the lag, keeps its model where nobody answered, and
never waits beyond the deadline; it paces itself by its own clock, and does not while it is behind most of the others.
"""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fedcb2o import records
from fedcb2o.data._dataset import Dataset
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.runs.run_directory import alone
from fedcb2o.federated import metrics
from fedcb2o.federated.agent_group import Block
from fedcb2o.federated.contacts import Memory
from fedcb2o.federated.validation import network_of
from fedcb2o.nn import parameters
from fedcb2o.parallel.executors import one_thread
from fedcb2o.peer.membership.federation import Federation, read
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.node import agent as agents
from fedcb2o.peer.node.engine import Among
from fedcb2o.peer.node.observer import Silent, Watch
from fedcb2o.peer.node.peer_monitor import Company
from fedcb2o.peer.node.preflight import about
from fedcb2o.peer.node.publisher import Offers
from fedcb2o.peer.node.run_directory import begin
from fedcb2o.peer.wire.client import HELLO_SECONDS, MISSED, NOT_YET, Downloads, StoppedError
from fedcb2o.peer.wire.compression import Coding, Int8, Raw
from fedcb2o.peer.wire.equivocation import SIGNED, Journal, Ledger
from fedcb2o.peer.wire.protocol import Manifest
from fedcb2o.peer.wire.server import Server
from fedcb2o.peer.wire.transport import Transport, Zenoh
from fedcb2o.records.checksums import header_of
from fedcb2o.simulation import checkpoint
from fedcb2o.simulation.rounds import Round, rounds

MODEL = "model.safetensors"
TWICE = "this identity is running already (never run it twice): stop that one first"


class Node:
    """One agent of a federation, with the data of its organisation.

    `data` are its own; or `simulate` makes it an agent of a simulation, to try a federation out. It writes to the
    folder `out`, and with `resume` goes on with what is there. It `listen`s at its endpoint, or at another "HOST:PORT"
    of this machine; waits at its start up to `gather` seconds for the others, and serves its last model up to `linger`
    seconds to those that are not done.

    Raises ConfigError, DataError or RunError, each with one line that says what to do.
    """

    def __init__(
        self,
        federation: Federation | Path | str,
        identity: Identity | Path | str,
        data: Dataset | None = None,
        *,
        out: Path | str,
        simulate: Experiment | None = None,
        data_dir: Path | None = None,
        resume: bool = False,
        listen: bool | str = True,
        gather: float = 30.0,
        linger: float = 60.0,
        watch: Watch | None = None,
        connect: Callable[[Federation, Identity], Transport] | None = None,
    ) -> None:
        self.federation = federation if isinstance(federation, Federation) else read(federation)
        self.identity = identity if isinstance(identity, Identity) else Identity.read(identity)
        self.me = self.federation.id_of(self.identity.member)
        self.out, self.resume, self.gather, self.linger = Path(out), resume, gather, linger
        self.watch = Silent() if watch is None else watch
        self.connect = connect or (lambda federation, identity: Zenoh(federation, identity, listen=listen))
        if (data is None) == (simulate is None):
            raise ConfigError("a node needs `data`, or an experiment to `simulate`, and not both")
        if simulate is not None:
            self.agent = agents.simulated(self.federation, self.me, simulate, data_dir)
        else:
            assert data is not None
            self.agent = agents.own(self.federation, self.me, data)
        self.done = 0
        self._stop = threading.Event()
        self._expires = datetime.max.replace(tzinfo=UTC)  # the TLS certificate that the links are made with
        self._accused = frozenset[int]()  # of whom the operator was told that they equivocated

    def stop(self) -> None:
        """Let the node end after the phase that it is at, or before the first where it has not begun; its last
        checkpoint stays."""
        self._stop.set()

    def run(self) -> Path:
        """All rounds, and the folder with the final model."""
        for _ in self.rounds():
            pass
        return self.out

    async def train(self) -> Path:
        """All rounds, in a thread of their own; where the task is cancelled the node is stopped, which is soon."""
        own = ThreadPoolExecutor(1, thread_name_prefix="fedcb2o-node")  # asyncio's own may have none free for days
        running = asyncio.wrap_future(own.submit(self.run))
        own.shutdown(wait=False)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self.stop()
            await running
            raise

    def rounds(self) -> Iterator[dict[str, Any]]:
        """The line of each round in rounds.jsonl, as it is done."""
        with contextlib.ExitStack() as stack:
            new = not self.out.exists()
            stack.enter_context(alone(self.out, TWICE))
            if new:
                self.out.chmod(0o700)  # for its owner's eyes: models tell of data
            stack.enter_context(one_thread())
            stack.callback(self._stop.clear)  # and not here: it may have been told to stop before it began
            begin(self.out, self.federation, self.identity, self.agent, resume=self.resume)
            block, log = self.agent.block(), records.Records(self.out, ("rounds",), ("rounds",))
            coding = self._coding()
            memory = self._restored(log, block.pool[:1], coding)
            ledger, journal = Ledger(self.out, self.federation), Journal(self.out)
            if self.done > journal.last + 1 and not self.agent.attackers.malicious[self.me]:
                raise RunError(
                    f"{self.out / SIGNED} lacks rounds that this agent signed, and is gone or an old copy: restore it, "
                    "since without it the agent could sign two models for one round, which the others take for fraud"
                )
            self._expires = self.identity.expires
            server = Server(self.federation, self.me, self.identity, ledger, about=self._about)
            stack.callback(server.close)  # again, when slow readers hold none of its threads any more
            transport = self.connect(self.federation, self.identity)
            stack.callback(transport.close)
            stack.callback(server.close)
            transport.serve(server.hear)
            downloads = Downloads(
                self.federation, self.identity, transport, ledger, coding, self.agent.terms.dim, self._stop
            )
            downloads.least.update(self._last_rounds())
            offers = Offers(self.federation, self.identity, coding, journal, server, self.watch.note)
            first = self.agent.first
            company = Company(transport, downloads, self._stop, self.watch)
            engine = Among(block, offers, downloads, company.to_ask, first)
            with contextlib.suppress(StoppedError):
                left = self.done < self.federation.rounds
                if left:
                    company.gather(self.gather, self.done)
                    company.compare()
                    self._remind(journal, downloads.mine(transport.alive(), HELLO_SECONDS))
                    yield from self._lines(engine, memory, log, coding, company, Tally(server, downloads))
                self._keep(block)
                if left:  # else it came back when all was done, and has no model of a round to offer
                    self.watch.phase(self.done, "serving the others")
                    company.see_off(self.done, self.linger)

    def _lines(
        self,
        engine: Among,
        memory: Memory,
        log: records.Records,
        coding: Coding,
        company: Company,
        tally: "Tally",
    ) -> Iterator[dict[str, Any]]:
        """Every round that is left: its line is written, its checkpoint, and the next round waits for its time."""
        federation, model = self.federation, engine.block.pool[:1]
        made = rounds(
            engine, memory, self.done, federation.rounds, lambda n: True, self._tell, federation.deadline_seconds
        )
        began = time.monotonic()
        for done in made:
            line = self._line(done, engine, tally, company)
            log.append("rounds", line)
            log.sync()
            rows = [model, *(each.unsqueeze(0) for each in coding.state().values())]
            checkpoint.save(self.out, done.n + 1, rows, done.memory, self._fingerprint(), log.sums())
            self.done = done.n + 1
            self.watch.round(line)
            self._accuse(tally.downloads.ledger.guilty)
            yield line
            if self.done < federation.rounds:  # after the last one, who is done may be gone
                ahead = not engine.arrivals and NOT_YET in engine.failures.values()
                company.pace(self.done, began + federation.round_seconds, ahead)
            self._check()
            began = time.monotonic()

    def _coding(self) -> Coding:
        """How models are sent, as the federation agreed on."""
        return Raw(self.agent.terms.dim) if self.federation.encoding == "float32" else Int8(self.agent.common)

    def _fingerprint(self) -> str:
        """What a checkpoint belongs to; the federation's versions differ in members alone."""
        return json.dumps({"run": self.federation.run.hex(), "agent": self.me}) + f" data {self.agent.digest}"

    def _restored(self, log: records.Records, model: Tensor, coding: Coding) -> Memory:
        """What the agent remembers after its last checkpoint, whose model is put into `model`; blank at the start."""
        state, path = coding.state(), self.out / checkpoint.FILE
        kept = torch.cat([model, *(each.unsqueeze(0) for each in state.values())])
        try:
            if path.exists() and _data_of(header_of(path).get("fingerprint", "")) != self.agent.digest:
                raise RunError(
                    f"the data are others than when {path} was written: give those that the run was begun with, as a "
                    "file.npz where they grow; never another --out, where this agent would sign rounds again"
                )
            saved = checkpoint.load_(self.out, kept, self._fingerprint())
        except records.DamagedError as error:
            raise RunError(
                f"{path} is damaged: restore it, or remove this file alone: --resume then begins again with round 1, "
                f"and offers no model of a round that {SIGNED} holds"
            ) from error
        if saved is None:
            log.cut(0)
            model.copy_(self.agent.first)
            return Memory.blank(1)
        self.done, memory = saved
        log.cut(self.done)
        for name, known in records.lines_of(self.out).items():
            if log.sums().get(name) != known:
                what = f"it does not hold what it did when {checkpoint.FILE} was written"
                raise records.damaged(self.out / name, what)
        model.copy_(kept[:1])
        coding.restore(dict(zip(state, kept[1:], strict=True)))
        return memory

    def _last_rounds(self) -> dict[int, int]:
        """Of which round the last model was that this agent had from each peer."""
        found: dict[int, int] = {}
        for _, line in records.read_lines(self.out / "rounds.jsonl"):
            for each in line["received"]:
                found[each["id"]] = max(each["round"] - 1, found.get(each["id"], 0))
        return found

    def _about(self) -> dict[str, Any]:
        """What this node says of itself to members that ask."""
        return about(self.federation, self.identity, round=self.done, rounds=self.federation.rounds)

    def _remind(self, journal: Journal, shown: Manifest | None) -> None:
        """Never sign a round again that was signed elsewhere, as another peer has `shown`: a folder may be lost, or be
        an old copy. Raises RunError where this may be a mistake."""
        if shown is None or shown.round <= journal.last:
            return
        what = f"a model that {self.identity.member.name} signed for round {shown.round + 1}"
        if not self.resume:
            raise RunError(
                f"another peer holds {what}, of which {self.out} knows nothing: go on in the folder where it was "
                "begun; if that is lost, and nothing else signs with this key, --resume goes on here"
            )
        journal.may_sign(shown.round, shown.digest)
        self.watch.note(f"another peer holds {what}: none up to that round is offered again")

    def _accuse(self, guilty: frozenset[int]) -> None:
        """Tell the operator, once, of those who signed two models for one round; it may be done in its own name."""
        for i in sorted(guilty - self._accused):
            name, proof = self.federation.members[i].name, f"the proof is in {self.out / 'proofs'}"
            if i != self.me:
                self.watch.note(f"{name} signed two models for one round, and is asked no more: {proof}")
            elif not self.agent.attackers.malicious[i]:
                self.watch.note(
                    f"somebody else signed a model with the key of {name}, and the others ask it no more: is it run "
                    f"twice, or was the key stolen? {proof[0].upper()}{proof[1:]}"
                )
        self._accused = guilty

    def _tell(self, n: int, phase: str) -> None:
        self._check()
        self.watch.phase(n + 1, phase)

    def _check(self) -> None:
        if self._stop.is_set():
            raise StoppedError
        if datetime.now(UTC) >= self._expires:  # nobody talks to this node any more: it would train on alone
            raise RunError(
                f"the TLS certificate of {self.identity.member.name} expired at {self._expires:%F %T} UTC: make a new "
                f"one (fedcb2o peer renew --identity {self.identity.folder}), and go on with --resume"
            )

    def _keep(self, block: Block) -> None:
        """Write the final model, by the names of what agents have of their own in the network."""
        tensors = {name: tensor.detach() for name, tensor in parameters.state(network_of(block, 0)).items()}
        records.atomic_write(self.out / MODEL, lambda path: save_file(tensors, path))

    def _line(self, done: Round, engine: Among, tally: "Tally", company: Company) -> dict[str, Any]:
        """The line of a round in rounds.jsonl."""
        choices, me = done.choices, self.me
        weights = dict(zip(choices.received.values.tolist(), choices.weights.tolist(), strict=True))
        line: dict[str, Any] = {
            "round": done.n + 1,
            "train_loss": float(done.train_loss[me]),
            "own_loss": float(choices.own_loss[0]),
            "asked": choices.asked.values.tolist(),
            "received": [
                {"id": i, "round": each.round + 1, "seconds": each.seconds, "bytes": each.size, "weight": weights[i]}
                for i, each in engine.arrivals.items()
            ],
            "own_weight": float(choices.own_weight[0]),
            "refused": {str(i): reason for i, reason in engine.failures.items() if reason not in MISSED},
            "late": [i for i, reason in engine.failures.items() if reason in MISSED],
            "alive": sorted(company.transport.alive()),
            **tally.since(),
            "seconds": {**done.seconds, "exchange": engine.seconds, "round": sum(done.seconds.values())},
        }
        if (tested := (done.tested or {}).get(me)) is not None:
            aim = self.agent.aim
            asked = {"source_accuracy": aim.sources, "attack_success_rate": aim.sources or aim.targets}
            found = metrics.of(tested, aim)
            line |= {name: value for name, value in found.items() if value is not None and asked.get(name, True)}
        return line


def _data_of(fingerprint: str) -> str:
    """What the data added up to of which a checkpoint is."""
    return fingerprint.partition(" data ")[2]


class Tally:
    """What a server and the downloads have counted since the last look, or since they began."""

    def __init__(self, server: Server, downloads: Downloads) -> None:
        self.server, self.downloads = server, downloads
        self.last: dict[str, Any] = {"sent": 0, "got": 0, "served": 0, "turned_away": {}}

    def since(self) -> dict[str, Any]:
        """Bytes sent and got, requests answered, and those turned away by reason."""
        now, before = self._now(), self.last
        self.last = now
        away = {reason: count - before["turned_away"].get(reason, 0) for reason, count in now["turned_away"].items()}
        return {
            **{name: now[name] - before[name] for name in ("sent", "got", "served")},
            "turned_away": {reason: count for reason, count in away.items() if count},
        }

    def _now(self) -> dict[str, Any]:
        counts = self.server.counts
        return {
            "sent": sum(counts.sent.values()),
            "got": self.downloads.received,
            "served": counts.answered,
            "turned_away": dict(counts.refused),
        }
