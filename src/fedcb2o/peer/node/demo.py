"""Demonstration with organisations on one machine, some of them hostile.

By default they are eight with digits, three of them hostile. Another experiment has one
organisation per agent. It runs everything that real organisations would: keys, a federation, one
process per organisation without a server, and a summary of the attacks.
"""

import contextlib
import logging
import os
import signal
import socket
import string
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fedcb2o.errors import RunError
from fedcb2o.experiments.config.datasets import build_population, load_dataset, load_for_data
from fedcb2o.experiments.config.loading import load
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.peer.membership._agreement import make_federation
from fedcb2o.peer.membership.federation import read_federation, write_federation
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.report.peer_records import PeerRecords, RoundRecord
from fedcb2o.records import write_toml

_LOGGER = logging.getLogger(__name__)

_ORGANISATIONS = tuple(f"hospital-{letter}" for letter in string.ascii_lowercase)
BENIGN, FLIPPER, GARBAGE = "benign", "flips 9 to 4", "sends garbage"
ATTACKER = "attacks"
EXPERIMENT = {
    "name": "peers-demo",
    "title": "FedAssay",
    "description": "Eight organisations with digits, two of which label every 9 as 4",
    "seeds": [0],
    "agents.num_clusters": 1,
    "agents.benign": 6,
    "agents.malicious": 2,
    "agents.benign_samples": 130,
    "agents.malicious_samples": 205,
    "agents.budget": 4,
}
TABLE_NOTE = (
    "Weight: share of the model in the averages of benign agents, mean over the last fifth of the "
    "rounds. Proofs: number of benign agents with a proof that the agent signed two models for one "
    "round."
)
_ROUND_SECONDS = 0.8  # about the pace of all agents on any machine
_DEADLINE_SECONDS = 5.0
_LONG_DEADLINE_SECONDS = 60.0  # for any experiment
_LINGER_SECONDS = 10  # after the last round: the Byzantine peer never reports that it is done
STOP_SECONDS = 5.0  # time for a process to end by itself
RUN_COMMAND = (sys.executable, "-m", "fedcb2o", "peer", "run")
_REPORT_INTERVAL_SECONDS = 10  # between two progress lines without a terminal


@dataclass(frozen=True)
class DemoAgent:
    """One of the organisations.

    `kind` is its behaviour, `keys` the folder of its identity, `out` its run directory, and `log`
    the file of its output.
    """

    name: str
    kind: str
    keys: Path
    out: Path
    log: Path


def run_demo(
    out: Path,
    *,
    rounds: int | None = None,
    experiment: str | Path | None = None,
    console: Console | None = None,
) -> dict[str, pd.DataFrame]:
    """Run the organisations; no process is left at the end.

    The folder must be empty or missing. The experiment is a preset or a file with one cluster and
    at most 26 agents, each of which is an organisation; by default `EXPERIMENT`. Rounds are by
    default 30, or those of the experiment. Progress is on standard error by default. The result
    tables are returned by title.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} is not empty: remove it, or choose another --out")
    if experiment is None:
        chosen = load("digits-fedassay", {**EXPERIMENT, "rounds": rounds or 30})
    else:
        changes = {} if rounds is None else {"rounds": rounds}
        chosen, _ = load_for_data(experiment, changes, None)
    if chosen.agents.num_agents > len(_ORGANISATIONS):
        raise RunError(f"a demo has at most {len(_ORGANISATIONS)} agents")
    agents, federation = _prepare_demo(out, chosen, sends_garbage=experiment is None)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for agent in agents:
            processes[agent.name] = _start_agent(agent, federation, out)
        _show_progress(agents, processes, chosen.rounds, console or Console(stderr=True))
    finally:
        _terminate(processes.values())
    return result_tables(agents)


def _prepare_demo(
    out: Path, experiment: Experiment, *, sends_garbage: bool
) -> tuple[list[DemoAgent], Path]:
    """Create the keys and the federation of all organisations.

    With `sends_garbage`, the last benign agent sends garbage in place of models. The federation
    file is returned too.
    """
    dataset = load_dataset(experiment, None)
    population = build_population(experiment, experiment.seeds[0], dataset)
    is_malicious = population.malicious.tolist()
    hostile = FLIPPER if sends_garbage else ATTACKER
    kinds = [hostile if malicious else BENIGN for malicious in is_malicious]
    if sends_garbage:
        kinds[max(i for i, kind in enumerate(kinds) if kind == BENIGN)] = GARBAGE

    agents, members = [], []
    (out / "logs").mkdir(parents=True)
    for name, kind, port in zip(_ORGANISATIONS, kinds, free_ports(len(kinds)), strict=False):
        log = out / "logs" / f"{name}.log"
        agent = DemoAgent(name, kind, keys=out / "keys" / name, out=out / name, log=log)
        endpoint = f"127.0.0.1:{port}"
        members.append(Identity.make(agent.keys, name=name, endpoint=endpoint, days=1).member)
        agents.append(agent)

    federation = make_federation(
        experiment,
        members,
        dataset=dataset,
        round_seconds=_ROUND_SECONDS,
        deadline_seconds=_DEADLINE_SECONDS if sends_garbage else _LONG_DEADLINE_SECONDS,
    )
    write_federation(federation, out / "federation.toml")
    write_toml(out / "experiment.toml", experiment.settings())
    return agents, out / "federation.toml"


def free_ports(count: int) -> list[int]:
    """Return `count` different unused ports of this machine."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


def _start_agent(agent: DemoAgent, federation: Path, out: Path) -> "subprocess.Popen[bytes]":
    """Start an agent in a process group without the terminal's signals."""
    # The user chose the experiment, and with it these functions.
    allowed = read_federation(federation).user_functions
    command: Sequence[object] = (
        *RUN_COMMAND,
        federation,
        "--identity",
        agent.keys,
        "--simulate",
        out / "experiment.toml",
        "--out",
        agent.out,
        "--linger",
        _LINGER_SECONDS,
        *(f"--own={name}" for name in allowed),
    )
    if agent.kind == GARBAGE:
        module = "fedcb2o.peer.node.byzantine_peer"
        command = (sys.executable, "-m", module, federation, agent.keys, *allowed)
    with agent.log.open("wb") as log:
        return subprocess.Popen(
            [*map(str, command)],
            # The Byzantine peer ends with its standard input, also if this process is killed.
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            # Eight processes with all processors each would be slower. They read a copy of the
            # experiment's file, and its modules are in the folder of the original.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            # Ctrl-C reaches this process alone, which ends the others in order.
            start_new_session=True,
        )


def _terminate(processes: "Iterable[subprocess.Popen[bytes]]") -> None:
    """End processes and their children, by force after a while."""
    running = [*processes]
    end = time.monotonic() + STOP_SECONDS
    try:
        for process in running:
            _send_signal(process, signal.SIGTERM)
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
    finally:  # also at the second Ctrl-C
        for process in running:
            _send_signal(process, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _send_signal(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    # Otherwise another process may have its id by now.
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def _show_progress(
    agents: Sequence[DemoAgent],
    processes: "Mapping[str, subprocess.Popen[bytes]]",
    rounds: int,
    console: Console,
) -> None:
    """Show the progress to the end; raise RunError if a process fails."""
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        console=console,
        disable=not console.is_terminal,
    )
    nodes = [agent for agent in agents if agent.kind != GARBAGE]
    tasks = {
        agent.name: bars.add_task(f"{agent.name}  {agent.kind}", total=rounds, accuracy="")
        for agent in nodes
    }
    last_report = time.monotonic()
    with bars:
        while True:
            is_running = any(processes[agent.name].poll() is None for agent in nodes)
            progress = {agent.name: _progress_of(agent) for agent in nodes}
            for name, (n, accuracy) in progress.items():
                bars.update(tasks[name], completed=n, accuracy=accuracy)
            is_due = time.monotonic() - last_report > _REPORT_INTERVAL_SECONDS
            if is_due and not console.is_terminal:
                last_report = time.monotonic()
                done = [n for n, _ in progress.values()]
                _LOGGER.info("peers-demo: rounds %d to %d of %d", min(done), max(done), rounds)
            for agent in agents:
                if status := processes[agent.name].poll():
                    message = _last_line(agent.log)
                    raise RunError(
                        f"{agent.name} failed with status {status}: {message} ({agent.log})"
                    )
            if not is_running:
                return
            time.sleep(0.3)


def _progress_of(agent: DemoAgent) -> tuple[int, str]:
    """Return the finished rounds of an agent and its accuracy as text."""
    rounds: Sequence[RoundRecord] = ()
    # The agent has not begun, or is writing.
    with contextlib.suppress(RunError):
        rounds = PeerRecords.read(agent.out).rounds
    if not rounds:
        return 0, ""
    accuracy = rounds[-1].accuracy
    text = "" if accuracy is None else f"accuracy {100 * accuracy:.1f}%"
    return rounds[-1].round, text


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "without output"


def result_tables(agents: Sequence[DemoAgent]) -> dict[str, pd.DataFrame]:
    """Summarise a demo by title.

    The tables are each agent's metrics and weight, and the refused models by reason.
    """
    records = {agent.name: PeerRecords.read(agent.out) for agent in agents if agent.kind != GARBAGE}
    benign = [agent.name for agent in agents if agent.kind == BENIGN]
    results = {}
    refused = {}
    for i, agent in enumerate(agents):
        receivers = [records[name] for name in benign if name != agent.name]
        results[agent.name] = _agent_result(i, agent, records.get(agent.name), receivers)
        reasons = (record.refused.get(i) for peer in receivers for record in peer.rounds)
        refused[agent.name] = Counter(reason for reason in reasons if reason is not None)

    totals = sum(refused.values(), Counter[str]())
    columns = [reason for reason, _ in totals.most_common()]
    counts = {
        name: {reason: str(count[reason]) for reason in columns}
        for name, count in refused.items()
        if count
    }
    tables = {"Agents": results, "Refused by benign agents, by reason": counts}
    return {
        title: pd.DataFrame.from_dict(rows, orient="index").rename_axis("agent")
        for title, rows in tables.items()
    }


def _agent_result(
    i: int, agent: DemoAgent, records: PeerRecords | None, receivers: Sequence[PeerRecords]
) -> dict[str, str]:
    """Return one agent's last metrics, weight at benign agents, and proofs."""
    weights = [
        sum(model.weight or 0.0 for model in record.received if model.id == i)
        for peer in receivers
        for record in peer.last_fifth
    ]
    num_proofs = sum(any(proof.agent == agent.name for proof in peer.proofs) for peer in receivers)
    rounds = records.rounds if records is not None else ()
    return {
        "kind": agent.kind,
        "rounds": "–" if records is None else str(len(rounds)),
        "accuracy": _format_percent(_last_metric(rounds, "accuracy")),
        "source accuracy": _format_percent(_last_metric(rounds, "source_accuracy")),
        "attack success": _format_percent(_last_metric(rounds, "attack_success_rate")),
        "weight": _format_percent(float(np.mean(weights)) if weights else None),
        "proofs": str(num_proofs),
    }


def _last_metric(rounds: Sequence[RoundRecord], name: str) -> float | None:
    return getattr(rounds[-1], name) if rounds else None


def _format_percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"
