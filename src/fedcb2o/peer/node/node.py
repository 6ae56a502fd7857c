"""Node of one agent among real peers: Algorithm 1 (alg:FedCB2O).

Rounds have no barrier. An agent downloads the newest models within the lag, keeps its model if no
peer answers, and never waits beyond the deadline. Its own clock sets the pace; an agent that is too
far behind most of the others skips rounds.
"""

import asyncio
import contextlib
import functools
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from fedcb2o import records
from fedcb2o.data import Dataset
from fedcb2o.errors import ConfigError, RemovedError, RunError
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.federated import trigger_exchange
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.evaluation import metrics
from fedcb2o.federated.evaluation.models import agent_network
from fedcb2o.federated.guards.checks import ADMITTED, OUTCOMES
from fedcb2o.federated.shortfall import beta_note
from fedcb2o.nn import parameters
from fedcb2o.parallel._executors import one_thread
from fedcb2o.peer.membership.federation import Federation, read_federation
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.node import agent as agents
from fedcb2o.peer.node.assessment import SelfAssessment
from fedcb2o.peer.node.engine import PeerEngine
from fedcb2o.peer.node.observer import NodeObserver, NullObserver
from fedcb2o.peer.node.peer_monitor import PeerMonitor
from fedcb2o.peer.node.preflight import hello_content
from fedcb2o.peer.node.privacy_ledger import PrivacyLedger
from fedcb2o.peer.node.publisher import ModelPublisher
from fedcb2o.peer.node.reasons import (
    cut_off_members,
    missing_models,
    relay_error,
    zero_weight_reason,
)
from fedcb2o.peer.node.recovery import SigningRecovery
from fedcb2o.peer.node.run_directory import open_run
from fedcb2o.peer.wire.client import BLAMELESS_REASONS, PeerClient, StoppedError
from fedcb2o.peer.wire.compression import Codec, Int8Codec, RawCodec, TopKCodec
from fedcb2o.peer.wire.equivocation import JOURNAL_FILE, Ledger, SigningJournal
from fedcb2o.peer.wire.relayed import open_transport
from fedcb2o.peer.wire.server import Server
from fedcb2o.peer.wire.transport import Transport
from fedcb2o.records._checksums import read_checkpoint_header
from fedcb2o.simulation import checkpoint
from fedcb2o.simulation.rounds import Engine, Round, run_rounds

_MODEL_FILE = "model.safetensors"
_ALREADY_RUNNING = "this identity is running already (never run it twice): stop that one first"


class Node:
    """One agent of a federation, with the data of its organisation.

    Args:
        federation: The federation or its file.
        identity: This organisation or its folder.
        data: The organisation's data.
        out: The run directory.
        simulate: Experiment of which the node is one agent, in place of `data`.
        data_dir: Directory of data sets.
        resume: Continue the run in the directory.
        listen: Listen at the member's endpoint, or at another "HOST:PORT" of this machine.
        relay: A folder, or the member file of a relay, for members without a direct link.
        gather: Seconds to wait for other members at the start.
        linger: Seconds to serve the last model to members that are not done.
        assess_every: Rounds between two self-assessments (gain over training alone, contributions,
            leakage); 0 for none. Each trains the model of this agent alone up to its round.
        metrics: Metrics of the model on this agent's test samples, as the key `metrics` of an
            experiment has them. A simulation has its own.
        observer: Receiver of the node's progress.
        connect: Function that opens the transport; by default `open_transport`.

    Raises:
        ConfigError: Federation, identity, data or experiment do not fit together.
        DataError: The data are invalid.
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
        relay: Path | str | None = None,
        gather: float = 30.0,
        linger: float = 60.0,
        assess_every: int = 1,
        metrics: Sequence[Any] = (),
        observer: NodeObserver | None = None,
        connect: Callable[[Federation, Identity], Transport] | None = None,
    ) -> None:
        if not isinstance(federation, Federation):
            federation = read_federation(federation)
        if not isinstance(identity, Identity):
            identity = Identity.read(identity)
        self.federation = federation
        self.identity = identity
        self.agent_id = federation.id_of(identity.member)
        self.out = Path(out)
        self.resume = resume
        self.gather = gather
        self.linger = linger
        self.assess_every = assess_every
        self.observer = NullObserver() if observer is None else observer
        self.connect = connect or functools.partial(
            open_transport, listen=listen, relay=relay, on_removal=self._on_removal
        )

        if (data is None) == (simulate is None):
            raise ConfigError("a node needs `data`, or an experiment to `simulate`, and not both")
        if simulate is not None and metrics:
            raise ConfigError("`metrics` are for own data: a simulation has the key `metrics`")
        if data is not None:
            self.agent = agents.agent_from_dataset(federation, self.agent_id, data, metrics)
        if simulate is not None:
            self.agent = agents.simulated_agent(federation, self.agent_id, simulate, data_dir)

        self._read_triggers = self.agent.trigger_reader()
        self.rounds_done = 0
        self._stop = threading.Event()
        self._removal = ""  # notice of a later version that removes or changes this member
        # Expiry of the TLS certificate in use.
        self._expires = datetime.max.replace(tzinfo=UTC)
        self._reported_equivocators = frozenset[int]()
        self._relay_down_since: float | None = None  # monotonic time

    def stop(self) -> None:
        """End the node after its current phase; its checkpoint stays."""
        self._stop.set()

    def run(self) -> Path:
        """Run all rounds; return the run directory with the final model.

        A RemovedError says that the other members have removed or changed this member.
        """
        for _ in self.rounds():
            pass
        return self.out

    async def train(self) -> Path:
        """Run all rounds in a thread; a cancelled task stops it.

        Returns:
            The run directory with the final model.

        Raises:
            RunError: The run cannot start or continue.
        """
        # Not asyncio's own pool, whose threads may be busy for days.
        pool = ThreadPoolExecutor(1, thread_name_prefix="fedcb2o-node")
        running = asyncio.wrap_future(pool.submit(self.run))
        pool.shutdown(wait=False)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self.stop()
            await running
            raise

    def rounds(self) -> Iterator[dict[str, Any]]:
        """Run all rounds.

        Yields:
            The record of each round in rounds.jsonl.

        Raises:
            RunError: The run cannot start or continue.
        """
        federation = self.federation
        with contextlib.ExitStack() as stack:
            # 1. Lock and check the run directory.
            stack.enter_context(records.exclusive_lock(self.out, _ALREADY_RUNNING))
            # Bits depend on the number of threads, and simulations have one.
            stack.enter_context(one_thread())
            # At the end, because `stop` may come before the start.
            stack.callback(self._stop.clear)
            open_run(self.out, federation, self.identity, self.agent, resume=self.resume)

            # 2. Restore the agent's state.
            group = self.agent.build_group()
            log = records.RoundLog(self.out, ("rounds",))
            codec = self._build_codec()
            state = self._restore(log, group.models[:1], codec)
            ledger = Ledger(self.out, federation)
            journal = SigningJournal(self.out)
            self._check_journal(journal)

            # 3. Connect to the other members.
            self._expires = self.identity.expires
            server = Server(
                federation, self.agent_id, self.identity, ledger, hello_content=self._hello_content
            )
            transport = self.connect(federation, self.identity)
            self._transport = transport
            stack.callback(transport.close)
            transport.serve(server.on_request)
            dim = self.agent.spec.dim
            client = PeerClient(
                federation,
                self.identity,
                transport,
                ledger,
                codec,
                dim,
                self._stop,
                self._on_removal,
                self._read_triggers,
            )
            # After a restart too, a peer's older models are refused.
            client.last_rounds.update(self._last_received_rounds())
            publisher = ModelPublisher(
                federation, self.identity, codec, journal, server, self.observer.on_note
            )
            monitor = PeerMonitor(transport, client, self._stop, self.observer)
            self._privacy = PrivacyLedger(self.out, self.agent)
            initial = self.agent.initial_model
            self._assessment = SelfAssessment(
                self.out, group, federation.class_names, initial, self.assess_every
            )
            before_training = self._privacy.before_training
            engine, played = self._open_engine(
                group, publisher, client, monitor, initial, before_training
            )
            recovery = SigningRecovery(
                journal,
                monitor,
                self.identity.member.name,
                privacy=self._privacy,
                rounds_done=self.rounds_done,
                is_resumed=self.resume,
                notify=self.observer.on_note,
            )

            # 4. Run the remaining rounds.
            try:
                has_rounds_left = self.rounds_done < federation.rounds
                if has_rounds_left:
                    spec = self.agent.spec
                    note = beta_note(spec.algorithm, spec.malicious_share)
                    if note:
                        self.observer.on_note(note)
                    monitor.wait_for_members(self.gather, self.rounds_done)
                    monitor.report_disagreements()
                    recovery.start()
                    for _, record in records.read_lines(self.out / "rounds.jsonl"):
                        engine.catch_up.add_round(record)
                    self._skip_rounds(engine)
                    traffic = _TrafficCounter(server, client)
                    yield from self._run_rounds(
                        engine, played, state, log, codec, traffic, recovery
                    )
                # Before the wait for others, in which the node may be stopped.
                self._save_model(group)
                # Otherwise it has no model of a round to offer.
                if has_rounds_left:
                    self.observer.on_phase(self.rounds_done, "serving the others")
                    monitor.linger(self.rounds_done, self.linger)
                    self._report_equivocation(ledger.equivocators)
                    monitor.check_membership(self.identity)
            except (StoppedError, KeyboardInterrupt) as error:
                # The stopped round may have changed the model: that of the last finished one
                # counts.
                if (self.out / checkpoint.FILE).exists():
                    self._restore(log, group.models[:1], codec)
                    self._save_model(group)
                if isinstance(error, KeyboardInterrupt):
                    raise
            if self._removal:
                raise RemovedError(f"{self._removal}. {self._describe_end()}")

    def _open_engine(self, *parts: Any) -> tuple[PeerEngine, Engine]:
        """Return the engine of the agent, and the engine of the rounds, which plays an attacker."""
        if not self.agent.is_malicious:
            engine = PeerEngine(*parts)
            return engine, engine
        # A benign node imports nothing of attacks.
        from fedcb2o.peer.node.attacking_peer import AttackingPeer
        from fedcb2o.simulation.adversarial_engine import AdversarialEngine

        attacker = AttackingPeer(*parts)
        return attacker, AdversarialEngine(attacker)

    def _on_removal(self, notice: str) -> None:
        """End the node after its current phase, because the others have agreed on its removal."""
        self._removal = notice
        self._stop.set()

    def _describe_end(self) -> str:
        """Describe the end of a removed member: its last round and its model."""
        text = f"It ended after round {self.rounds_done}"
        path = self.out / _MODEL_FILE
        return f"{text}; its model is {path}" if path.exists() else f"{text}, without a model"

    def _check_journal(self, journal: SigningJournal) -> None:
        """Raise RunError if the journal lacks rounds of the checkpoint."""
        # A simulated attacker signs crafted models without a journal.
        if self.agent.is_malicious:
            return
        if self.rounds_done > journal.last_round + 1:
            raise RunError(
                f"{self.out / JOURNAL_FILE} lacks rounds that this agent signed, and is missing or "
                "an old copy: restore it, since without it the agent could sign two models for one "
                "round, which the others take for fraud"
            )

    def _run_rounds(
        self,
        engine: PeerEngine,
        played: Engine,
        state: AgentState,
        log: records.RoundLog,
        codec: Codec,
        traffic: "_TrafficCounter",
        recovery: SigningRecovery,
    ) -> Iterator[dict[str, Any]]:
        """Run the remaining rounds; write record and checkpoint of each, then throttle."""
        federation = self.federation
        monitor = engine.monitor
        model = engine.group.models[:1]
        engine.triggers = trigger_exchange.published_bytes(state.rule_states[0])
        start = time.monotonic()
        engine.free_until = start + federation.round_seconds
        while self.rounds_done < federation.rounds:
            # It counts up by one: after skipped rounds another loop begins.
            rounds = run_rounds(
                played,
                state,
                self.rounds_done,
                federation.rounds,
                1,
                self._on_phase,
                federation.deadline_seconds,
            )
            for result in rounds:
                state = result.state
                record = self._build_record(result, engine, traffic)
                # The log comes first, because the checkpoint contains its checksum.
                log.append("rounds", record)
                log.sync()
                rows = [model, *(tensor.unsqueeze(0) for tensor in codec.state().values())]
                rounds_done = result.n + 1
                fingerprint = self._fingerprint()
                checkpoint.save(self.out, rounds_done, rows, state, fingerprint, log.checksums())
                self.rounds_done = rounds_done
                self.observer.on_round(record)
                self._report_equivocation(engine.client.ledger.equivocators)
                yield record

                # After the last round, peers may have ended.
                if rounds_done < federation.rounds:
                    recovery.update()
                    monitor.probe_unreachable(self.identity)
                    monitor.throttle(rounds_done, start)
                self._check_running()
                start = time.monotonic()
                # The rest of the round, after its exchange, takes about as long as in this one.
                seconds = record["seconds"]
                rest = seconds["round"] - seconds["train"] - seconds["exchange"]
                engine.free_until = start + federation.round_seconds - rest
                if monitor.is_late(rounds_done):
                    engine.free_until = start
                # Without a minimum duration there is no common pace that an agent could miss.
                if federation.round_seconds and self._skip_rounds(engine):
                    break

    def _build_record(
        self, result: Round, engine: PeerEngine, traffic: "_TrafficCounter"
    ) -> dict[str, Any]:
        """Return the record of a round, with its self-assessment."""
        began = time.monotonic()
        assessed, contributions = self._assessment.assess(result.n, result.decisions)
        if assessed:
            result.seconds["assess"] = time.monotonic() - began
        record = {**self._round_record(result, engine, traffic), **assessed}
        for entry in record["received"]:
            if entry["id"] in contributions:
                entry["contribution"] = contributions[entry["id"]]
        is_late = engine.catch_up.rounds_left > 0
        engine.catch_up.add_round(record)
        if is_late:
            record["catch_up"] = engine.catch_up.rounds_left
        return record

    def _skip_rounds(self, engine: PeerEngine) -> bool:
        """Go on with the round of most other members, if this agent is too far behind."""
        chosen = engine.monitor.next_round(self.rounds_done)
        if chosen == self.rounds_done:
            return False
        engine.catch_up.start()
        self._assessment.skip_rounds(self.rounds_done, chosen)
        self.rounds_done = chosen
        return True

    def _build_codec(self) -> Codec:
        if self.federation.encoding == "float32":
            return RawCodec(self.agent.spec.dim)
        codec = Int8Codec if self.federation.encoding == "int8" else TopKCodec
        return codec(self.agent.shared_initial_model)

    def _fingerprint(self) -> str:
        """Return the identity of a checkpoint, the same for all versions."""
        # Not of the version: a run goes on with later versions of its federation.
        run = json.dumps({"run": self.federation.run.hex(), "agent": self.agent_id})
        return f"{run} data {self.agent.data_digest}"

    def _restore(self, log: records.RoundLog, model: Tensor, codec: Codec) -> AgentState:
        """Load the last checkpoint into `model` and `codec`, or the initial model."""
        codec_state = codec.state()
        path = self.out / checkpoint.FILE
        rows = torch.cat([model, *(tensor.unsqueeze(0) for tensor in codec_state.values())])
        try:
            self._check_data(path)
            saved = checkpoint.load_models_(self.out, rows, self._fingerprint())
        except records.DamagedError as error:
            raise RunError(
                f"{path} is damaged: restore it, or remove this file alone: --resume then begins "
                "again with round 1, and offers no model of a round that is in "
                f"{JOURNAL_FILE}"
            ) from error
        if saved is None:
            log.truncate(0)
            model.copy_(self.agent.initial_model)
            return AgentState.initial(1)

        self.rounds_done, state = saved
        log.truncate(self.rounds_done)
        for name, checksum in records.log_checksums(self.out).items():
            if log.checksums().get(name) != checksum:
                reason = f"it changed after {checkpoint.FILE} was written"
                raise records.damaged_error(self.out / name, reason)
        model.copy_(rows[:1])
        codec.load_state(dict(zip(codec_state, rows[1:], strict=True)))
        return state

    def _check_data(self, path: Path) -> None:
        """Raise RunError if a checkpoint belongs to other data."""
        if not path.exists():
            return
        fingerprint = read_checkpoint_header(path).get("fingerprint", "")
        data_digest = fingerprint.partition(" data ")[2]
        if data_digest != self.agent.data_digest:
            raise RunError(
                f"the data differ from those when {path} was written: give the data that the run "
                "began with, as a file.npz if they grow; never choose another --out, where this "
                "agent would sign rounds again"
            )

    def _last_received_rounds(self) -> dict[int, int]:
        """Return the round of the last model received from each peer."""
        last_rounds: dict[int, int] = {}
        for _, record in records.read_lines(self.out / "rounds.jsonl"):
            for model in record["received"]:
                peer = model["id"]
                last_rounds[peer] = max(model["round"] - 1, last_rounds.get(peer, 0))
        return last_rounds

    def _hello_content(self) -> dict[str, Any]:
        rounds = self.federation.rounds
        return hello_content(self.federation, self.identity, round=self.rounds_done, rounds=rounds)

    def _report_equivocation(self, equivocators: frozenset[int]) -> None:
        """Report each member that signed two models for one round, once."""
        proof = f"proof is in {self.out / 'proofs'}"
        for i in sorted(equivocators - self._reported_equivocators):
            name = self.federation.members[i].name
            if i != self.agent_id:
                self.observer.on_note(
                    f"{name} signed two models for one round, and is asked no more: the {proof}"
                )
            elif not self.agent.is_malicious:
                self.observer.on_note(
                    f"somebody else signed a model with the key of {name}, and the others ask it "
                    f"no more: is it run twice, or was the key stolen? The {proof}"
                )
        self._reported_equivocators = equivocators

    def _on_phase(self, n: int, phase: str) -> None:
        self._check_running()
        if phase == "aggregating":
            self._assessment.before_exchange(n)
        self._report_relay()
        self.observer.on_phase(n + 1, phase)

    def _report_relay(self) -> None:
        """Tell the operator when the relay can be reached again."""
        now = time.monotonic()
        if relay_error(self._transport):
            self._relay_down_since = self._relay_down_since or now
        elif self._relay_down_since is not None:
            seconds = now - self._relay_down_since
            self._relay_down_since = None
            self.observer.on_note(f"the relay can be reached again, after {seconds:.0f} s")

    def _check_running(self) -> None:
        if self._stop.is_set():
            raise StoppedError
        # Without links the agent would train on alone.
        if datetime.now(UTC) >= self._expires:
            raise RunError(
                f"the TLS certificate of {self.identity.member.name} expired at "
                f"{self._expires:%F %T} UTC: make a new one (fedcb2o peer renew --identity "
                f"{self.identity.folder}), and go on with --resume"
            )

    def _save_model(self, group: AgentGroup) -> None:
        """Write the final model: trained parameters and local statistics, by name."""
        state = parameters.agent_state(agent_network(group, 0))
        tensors = {name: tensor.detach() for name, tensor in state.items()}
        records.atomic_write(self.out / _MODEL_FILE, save(tensors))

    def _round_record(
        self, result: Round, engine: PeerEngine, traffic: "_TrafficCounter"
    ) -> dict[str, Any]:
        """Return the record of a round in rounds.jsonl."""
        decisions = result.decisions
        peers = decisions.received.values.tolist()
        weights = dict(zip(peers, decisions.weights.tolist(), strict=True))
        outcomes = dict(zip(peers, decisions.admission.tolist(), strict=True))
        received = [
            {
                "id": i,
                "round": arrival.round + 1,
                "seconds": arrival.seconds,
                "bytes": arrival.size,
                "weight": weights[i],
                **self._unused_reason(outcomes[i], weights[i]),
            }
            for i, arrival in engine.arrivals.items()
        ]
        client = engine.client
        others = engine.monitor.other_members - engine.arrivals.keys()
        missing = missing_models(
            engine.failures,
            client.announced_rounds,
            n=result.n,
            lag=self.federation.lag,
            cut_off=cut_off_members(client.transport, others),
        )
        seconds = {
            **result.seconds,
            "exchange": engine.exchange_seconds,
            "round": sum(result.seconds.values()),
        }
        return {
            "round": result.n + 1,
            "train_loss": float(result.train_loss[self.agent_id]),
            "own_loss": float(decisions.own_loss[0]),
            "asked": sorted({*decisions.asked.values.tolist(), *engine.arrivals}),
            "received": received,
            "own_weight": float(decisions.own_weight[0]),
            "refused": {
                str(i): reason
                for i, reason in engine.failures.items()
                if reason not in BLAMELESS_REASONS
            },
            **missing,
            "alive": sorted(engine.client.transport.connected_peers()),
            **traffic.delta(),
            "seconds": seconds,
            **self._privacy.record(),
            **self._metrics(result),
        }

    def _unused_reason(self, outcome: int, weight: float) -> dict[str, str]:
        """Return the entry of a received model with weight 0 in a record; empty for another one."""
        if outcome != ADMITTED:
            return {"admission": OUTCOMES[outcome]}
        if weight == 0:
            return {"not_averaged": zero_weight_reason(self.agent.spec.algorithm)}
        return {}

    def _metrics(self, result: Round) -> dict[str, Any]:
        """Return the metrics of a round, with an attack's only under attack.

        The chosen ones are in "metrics"; None stands for one without a value.
        """
        if result.test_results is None:
            return {}
        columns = metrics.compute_metrics(result.test_results, self.agent.goal)
        values = {name: float(column[0]) for name, column in columns.items()}
        chosen = {
            name: None if math.isnan(value := values.pop(name)) else value
            for name in result.test_results.own.chosen
        }
        known = {name: value for name, value in values.items() if not math.isnan(value)}
        return {**known, "metrics": chosen} if chosen else known


class _TrafficCounter:
    """Counter of a node's traffic since the last call."""

    def __init__(self, server: Server, client: PeerClient) -> None:
        self.server = server
        self.client = client
        self.totals = {"sent": 0, "got": 0, "served": 0}
        self.refused = Counter[str]()

    def delta(self) -> dict[str, Any]:
        """Return the difference from the last call.

        It has sent and received bytes, answered requests, and refused requests by reason.
        """
        counts = self.server.counts
        totals = {
            "sent": sum(counts.sent.values()),
            "got": self.client.received_bytes,
            "served": counts.answered,
        }
        refused = Counter(counts.refused)
        record: dict[str, Any] = {name: totals[name] - self.totals[name] for name in totals}
        record["turned_away"] = dict(refused - self.refused)
        self.totals, self.refused = totals, refused
        return record
