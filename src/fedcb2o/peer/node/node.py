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
from fedcb2o.experiments.runs.run_directory import exclusive_lock
from fedcb2o.federated import metrics
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.validation import agent_network
from fedcb2o.nn import parameters
from fedcb2o.parallel.executors import one_thread
from fedcb2o.peer.membership.federation import Federation, read_federation
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.node import agent as agents
from fedcb2o.peer.node.engine import PeerEngine
from fedcb2o.peer.node.observer import NodeObserver, NullObserver
from fedcb2o.peer.node.peer_monitor import PeerMonitor
from fedcb2o.peer.node.preflight import hello_content
from fedcb2o.peer.node.publisher import ModelPublisher
from fedcb2o.peer.node.run_directory import open_run
from fedcb2o.peer.wire.client import (
    BLAMELESS_REASONS,
    HELLO_SECONDS,
    NOT_YET,
    PeerClient,
    StoppedError,
)
from fedcb2o.peer.wire.compression import Codec, Int8Codec, RawCodec
from fedcb2o.peer.wire.equivocation import JOURNAL_FILE, Ledger, SigningJournal
from fedcb2o.peer.wire.protocol import Manifest
from fedcb2o.peer.wire.server import Server
from fedcb2o.peer.wire.transport import Transport, Zenoh
from fedcb2o.records.checksums import read_checkpoint_header
from fedcb2o.simulation import checkpoint
from fedcb2o.simulation.rounds import Round, run_rounds

_MODEL_FILE = "model.safetensors"
_ALREADY_RUNNING = "this identity is running already (never run it twice): stop that one first"


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
        observer: NodeObserver | None = None,
        connect: Callable[[Federation, Identity], Transport] | None = None,
    ) -> None:
        self.federation = (
            federation if isinstance(federation, Federation) else read_federation(federation)
        )
        self.identity = identity if isinstance(identity, Identity) else Identity.read(identity)
        self.agent_id = self.federation.id_of(self.identity.member)
        self.out = Path(out)
        self.resume = resume
        self.gather = gather
        self.linger = linger
        self.observer = NullObserver() if observer is None else observer
        self.connect = connect or (
            lambda federation, identity: Zenoh(federation, identity, listen=listen)
        )
        if (data is None) == (simulate is None):
            raise ConfigError("a node needs `data`, or an experiment to `simulate`, and not both")
        if simulate is not None:
            self.agent = agents.simulated_agent(self.federation, self.agent_id, simulate, data_dir)
        else:
            assert data is not None
            self.agent = agents.agent_from_dataset(self.federation, self.agent_id, data)
        self.rounds_done = 0
        self._stop = threading.Event()
        self._expires = datetime.max.replace(
            tzinfo=UTC
        )  # the TLS certificate that the links are made with
        self._reported_equivocators = frozenset[
            int
        ]()  # of whom the operator was told that they equivocated

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
        own = ThreadPoolExecutor(
            1, thread_name_prefix="fedcb2o-node"
        )  # asyncio's own may have none free for days
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
            stack.enter_context(exclusive_lock(self.out, _ALREADY_RUNNING))
            if new:
                self.out.chmod(0o700)  # for its owner's eyes: models tell of data
            stack.enter_context(one_thread())
            stack.callback(
                self._stop.clear
            )  # and not here: it may have been told to stop before it began
            open_run(self.out, self.federation, self.identity, self.agent, resume=self.resume)
            block = self.agent.build_group()
            log = records.RoundLog(self.out, ("rounds",), ("rounds",))
            coding = self._build_codec()
            memory = self._restore(log, block.models[:1], coding)
            ledger = Ledger(self.out, self.federation)
            journal = SigningJournal(self.out)
            if (
                self.rounds_done > journal.last_round + 1
                and not self.agent.adversary.malicious[self.agent_id]
            ):
                raise RunError(
                    f"{self.out / JOURNAL_FILE} lacks rounds that this agent signed, and is gone or an old copy: restore it, "
                    "since without it the agent could sign two models for one round, which the others take for fraud"
                )
            self._expires = self.identity.expires
            server = Server(
                self.federation,
                self.agent_id,
                self.identity,
                ledger,
                hello_content=self._hello_content,
            )
            stack.callback(
                server.close
            )  # again, when slow readers hold none of its threads any more
            transport = self.connect(self.federation, self.identity)
            stack.callback(transport.close)
            stack.callback(server.close)
            transport.serve(server.on_request)
            downloads = PeerClient(
                self.federation,
                self.identity,
                transport,
                ledger,
                coding,
                self.agent.spec.dim,
                self._stop,
            )
            downloads.last_rounds.update(self._last_received_rounds())
            offers = ModelPublisher(
                self.federation, self.identity, coding, journal, server, self.observer.on_note
            )
            first = self.agent.initial_model
            company = PeerMonitor(transport, downloads, self._stop, self.observer)
            engine = PeerEngine(block, offers, downloads, company.candidates, first)
            with contextlib.suppress(StoppedError):
                left = self.rounds_done < self.federation.rounds
                if left:
                    company.wait_for_members(self.gather, self.rounds_done)
                    company.report_disagreements()
                    self._guard_signed_rounds(
                        journal,
                        downloads.newest_own_manifest(transport.connected_peers(), HELLO_SECONDS),
                    )
                    yield from self._run_rounds(
                        engine, memory, log, coding, company, TrafficCounter(server, downloads)
                    )
                self._save_model(block)
                if (
                    left
                ):  # else it came back when all was done, and has no model of a round to offer
                    self.observer.on_phase(self.rounds_done, "serving the others")
                    company.linger(self.rounds_done, self.linger)

    def _run_rounds(
        self,
        engine: PeerEngine,
        memory: AgentState,
        log: records.RoundLog,
        coding: Codec,
        company: PeerMonitor,
        tally: "TrafficCounter",
    ) -> Iterator[dict[str, Any]]:
        """Every round that is left: its line is written, its checkpoint, and the next round waits for its time."""
        federation = self.federation
        model = engine.group.models[:1]
        made = run_rounds(
            engine,
            memory,
            self.rounds_done,
            federation.rounds,
            lambda n: True,
            self._on_phase,
            federation.deadline_seconds,
        )
        began = time.monotonic()
        for done in made:
            line = self._round_record(done, engine, tally, company)
            log.append("rounds", line)
            log.sync()
            rows = [model, *(each.unsqueeze(0) for each in coding.state().values())]
            checkpoint.save(
                self.out, done.n + 1, rows, done.memory, self._fingerprint(), log.checksums()
            )
            self.rounds_done = done.n + 1
            self.observer.on_round(line)
            self._report_equivocation(tally.client.ledger.equivocators)
            yield line
            if self.rounds_done < federation.rounds:  # after the last one, who is done may be gone
                ahead = not engine.arrivals and NOT_YET in engine.failures.values()
                company.throttle(self.rounds_done, began + federation.round_seconds, ahead)
            self._check_running()
            began = time.monotonic()

    def _build_codec(self) -> Codec:
        """How models are sent, as the federation agreed on."""
        return (
            RawCodec(self.agent.spec.dim)
            if self.federation.encoding == "float32"
            else Int8Codec(self.agent.shared_initial_model)
        )

    def _fingerprint(self) -> str:
        """What a checkpoint belongs to; the federation's versions differ in members alone."""
        return (
            json.dumps({"run": self.federation.run.hex(), "agent": self.agent_id})
            + f" data {self.agent.data_digest}"
        )

    def _restore(self, log: records.RoundLog, model: Tensor, coding: Codec) -> AgentState:
        """What the agent remembers after its last checkpoint, whose model is put into `model`; blank at the start."""
        state = coding.state()
        path = self.out / checkpoint.FILE
        kept = torch.cat([model, *(each.unsqueeze(0) for each in state.values())])
        try:
            if (
                path.exists()
                and _data_digest(read_checkpoint_header(path).get("fingerprint", ""))
                != self.agent.data_digest
            ):
                raise RunError(
                    f"the data are others than when {path} was written: give those that the run was begun with, as a "
                    "file.npz where they grow; never another --out, where this agent would sign rounds again"
                )
            saved = checkpoint.load_models_(self.out, kept, self._fingerprint())
        except records.DamagedError as error:
            raise RunError(
                f"{path} is damaged: restore it, or remove this file alone: --resume then begins again with round 1, "
                f"and offers no model of a round that {JOURNAL_FILE} holds"
            ) from error
        if saved is None:
            log.truncate(0)
            model.copy_(self.agent.initial_model)
            return AgentState.initial(1)
        self.rounds_done, memory = saved
        log.truncate(self.rounds_done)
        for name, known in records.log_checksums(self.out).items():
            if log.checksums().get(name) != known:
                what = f"it does not hold what it did when {checkpoint.FILE} was written"
                raise records.damaged_error(self.out / name, what)
        model.copy_(kept[:1])
        coding.load_state(dict(zip(state, kept[1:], strict=True)))
        return memory

    def _last_received_rounds(self) -> dict[int, int]:
        """Of which round the last model was that this agent had from each peer."""
        found: dict[int, int] = {}
        for _, line in records.read_lines(self.out / "rounds.jsonl"):
            for each in line["received"]:
                found[each["id"]] = max(each["round"] - 1, found.get(each["id"], 0))
        return found

    def _hello_content(self) -> dict[str, Any]:
        """What this node says of itself to members that ask."""
        return hello_content(
            self.federation, self.identity, round=self.rounds_done, rounds=self.federation.rounds
        )

    def _guard_signed_rounds(self, journal: SigningJournal, shown: Manifest | None) -> None:
        """Never sign a round again that was signed elsewhere, as another peer has `shown`: a folder may be lost, or be
        an old copy. Raises RunError where this may be a mistake."""
        if shown is None or shown.round <= journal.last_round:
            return
        what = f"a model that {self.identity.member.name} signed for round {shown.round + 1}"
        if not self.resume:
            raise RunError(
                f"another peer holds {what}, of which {self.out} knows nothing: go on in the folder where it was "
                "begun; if that is lost, and nothing else signs with this key, --resume goes on here"
            )
        journal.reserve(shown.round, shown.digest)
        self.observer.on_note(f"another peer holds {what}: none up to that round is offered again")

    def _report_equivocation(self, guilty: frozenset[int]) -> None:
        """Tell the operator, once, of those who signed two models for one round; it may be done in its own name."""
        for i in sorted(guilty - self._reported_equivocators):
            name = self.federation.members[i].name
            proof = f"the proof is in {self.out / 'proofs'}"
            if i != self.agent_id:
                self.observer.on_note(
                    f"{name} signed two models for one round, and is asked no more: {proof}"
                )
            elif not self.agent.adversary.malicious[i]:
                self.observer.on_note(
                    f"somebody else signed a model with the key of {name}, and the others ask it no more: is it run "
                    f"twice, or was the key stolen? {proof[0].upper()}{proof[1:]}"
                )
        self._reported_equivocators = guilty

    def _on_phase(self, n: int, phase: str) -> None:
        self._check_running()
        self.observer.on_phase(n + 1, phase)

    def _check_running(self) -> None:
        if self._stop.is_set():
            raise StoppedError
        if (
            datetime.now(UTC) >= self._expires
        ):  # nobody talks to this node any more: it would train on alone
            raise RunError(
                f"the TLS certificate of {self.identity.member.name} expired at {self._expires:%F %T} UTC: make a new "
                f"one (fedcb2o peer renew --identity {self.identity.folder}), and go on with --resume"
            )

    def _save_model(self, block: AgentGroup) -> None:
        """Write the final model, by the names of what agents have of their own in the network."""
        tensors = {
            name: tensor.detach()
            for name, tensor in parameters.agent_state(agent_network(block, 0)).items()
        }
        records.atomic_write(self.out / _MODEL_FILE, lambda path: save_file(tensors, path))

    def _round_record(
        self, done: Round, engine: PeerEngine, tally: "TrafficCounter", company: PeerMonitor
    ) -> dict[str, Any]:
        """The line of a round in rounds.jsonl."""
        choices = done.decisions
        me = self.agent_id
        weights = dict(zip(choices.received.values.tolist(), choices.weights.tolist(), strict=True))
        line: dict[str, Any] = {
            "round": done.n + 1,
            "train_loss": float(done.train_loss[me]),
            "own_loss": float(choices.own_loss[0]),
            "asked": choices.asked.values.tolist(),
            "received": [
                {
                    "id": i,
                    "round": each.round + 1,
                    "seconds": each.seconds,
                    "bytes": each.size,
                    "weight": weights[i],
                }
                for i, each in engine.arrivals.items()
            ],
            "own_weight": float(choices.own_weight[0]),
            "refused": {
                str(i): reason
                for i, reason in engine.failures.items()
                if reason not in BLAMELESS_REASONS
            },
            "late": [i for i, reason in engine.failures.items() if reason in BLAMELESS_REASONS],
            "alive": sorted(company.transport.connected_peers()),
            **tally.delta(),
            "seconds": {
                **done.seconds,
                "exchange": engine.exchange_seconds,
                "round": sum(done.seconds.values()),
            },
        }
        if (tested := (done.test_results or {}).get(me)) is not None:
            aim = self.agent.goal
            asked = {
                "source_accuracy": aim.sources,
                "attack_success_rate": aim.sources or aim.targets,
            }
            found = metrics.compute_metrics(tested, aim)
            line |= {
                name: value
                for name, value in found.items()
                if value is not None and asked.get(name, True)
            }
        return line


def _data_digest(fingerprint: str) -> str:
    """What the data added up to of which a checkpoint is."""
    return fingerprint.partition(" data ")[2]


class TrafficCounter:
    """What a server and the downloads have counted since the last look, or since they began."""

    def __init__(self, server: Server, downloads: PeerClient) -> None:
        self.server = server
        self.client = downloads
        self.last: dict[str, Any] = {"sent": 0, "got": 0, "served": 0, "turned_away": {}}

    def delta(self) -> dict[str, Any]:
        """Bytes sent and got, requests answered, and those turned away by reason."""
        now = self._totals()
        before = self.last
        self.last = now
        away = {
            reason: count - before["turned_away"].get(reason, 0)
            for reason, count in now["turned_away"].items()
        }
        return {
            **{name: now[name] - before[name] for name in ("sent", "got", "served")},
            "turned_away": {reason: count for reason, count in away.items() if count},
        }

    def _totals(self) -> dict[str, Any]:
        counts = self.server.counts
        return {
            "sent": sum(counts.sent.values()),
            "got": self.client.received_bytes,
            "served": counts.answered,
            "turned_away": dict(counts.refused),
        }
