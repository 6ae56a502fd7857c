"""Eight organisations on this machine, a process each, over TLS: two flip labels, one sends garbage, five do neither.

It shows all that real ones would do: keys, a federation, eight nodes without a server, and what became of the attacks.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fedcb2o.errors import RunError
from fedcb2o.experiments.config.datasets import build_population, load_dataset
from fedcb2o.experiments.config.settings import Experiment, load
from fedcb2o.peer.membership.federation import make_federation, write_federation
from fedcb2o.peer.membership.identity import Identity
from fedcb2o.peer.report.peer_records import PeerRecords
from fedcb2o.records import write_toml

ORGANISATIONS = tuple(f"hospital-{letter}" for letter in "abcdefgh")
BENIGN = "benign"
FLIPPER = "flips 9 to 4"
GARBAGE = "sends garbage"
EXPERIMENT = {
    "name": "peers-demo",
    "title": "FedCB2O",
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
    "Weight it got: from benign agents, mean over the last fifth of the rounds. Proofs: how many benign agents hold "
    "one that it signed two models for one round."
)
ROUND_SECONDS = 0.8  # all agents keep about this pace, on whatever machine
DEADLINE_SECONDS = 5.0
LINGER_SECONDS = 10  # after its last round: who sends garbage never says that it is done
STOP_SECONDS = 5.0  # seconds that a process has to end by itself when it is told to
RUN_COMMAND = (sys.executable, "-c", "from fedcb2o.cli import main; main()", "peer", "run")


@dataclass(frozen=True)
class DemoAgent:
    """One of the organisations: its `kind`, where its keys are and where it writes to."""

    name: str
    kind: str
    keys: Path
    out: Path
    log: Path


def run_demo(
    out: Path, *, rounds: int = 30, console: Console | None = None
) -> dict[str, pd.DataFrame]:
    """Run eight organisations in a folder that holds nothing yet: what became of them, as tables by their titles.

    Raises RunError where a process fails. No process is left, however it ends.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} is not empty: remove it, or choose another --out")
    experiment = load("digits-fedcb2o", {**EXPERIMENT, "rounds": rounds})
    agents, federation = prepare_demo(out, experiment)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for agent in agents:
            processes[agent.name] = _start_agent(agent, federation, out)
        _show_progress(agents, processes, rounds, console or Console(stderr=True))
    finally:
        _terminate(processes.values())
    return result_tables(agents)


def prepare_demo(out: Path, experiment: Experiment) -> tuple[list[DemoAgent], Path]:
    """Make keys for everybody, and the federation that they agree on: who is who, and its file."""
    dataset = load_dataset(experiment, None)
    malicious = build_population(experiment, experiment.seeds[0], dataset).malicious.tolist()
    last = max(i for i, bad in enumerate(malicious) if not bad)
    kinds = [
        FLIPPER if bad else GARBAGE if i == last else BENIGN for i, bad in enumerate(malicious)
    ]
    agents = []
    members = []
    (out / "logs").mkdir(parents=True)
    for name, kind, port in zip(ORGANISATIONS, kinds, free_ports(len(kinds)), strict=True):
        agent = DemoAgent(name, kind, out / "keys" / name, out / name, out / "logs" / f"{name}.log")
        members.append(
            Identity.make(agent.keys, name=name, endpoint=f"127.0.0.1:{port}", days=1).member
        )
        agents.append(agent)
    federation = make_federation(
        experiment,
        members,
        dataset=dataset,
        round_seconds=ROUND_SECONDS,
        deadline_seconds=DEADLINE_SECONDS,
    )
    write_federation(federation, out / "federation.toml")
    write_toml(out / "experiment.toml", experiment.settings())
    return agents, out / "federation.toml"


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _start_agent(agent: DemoAgent, federation: Path, out: Path) -> "subprocess.Popen[bytes]":
    """The process of an agent, in a group of its own: what the terminal sends is for this process alone."""
    words: Sequence[object] = (
        *RUN_COMMAND,
        federation,
        "--identity",
        agent.keys,
        "--simulate",
        out / "experiment.toml",
    )
    words = [*words, "--out", agent.out, "--linger", LINGER_SECONDS]
    if agent.kind == GARBAGE:
        words = [sys.executable, "-m", "fedcb2o.peer.node.byzantine_peer", federation, agent.keys]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with agent.log.open("wb") as log:
        return subprocess.Popen(
            [*map(str, words)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )


def _terminate(processes: "Iterable[subprocess.Popen[bytes]]") -> None:
    """End processes and what they started: they are asked to, and killed where they do not."""
    left = [*processes]
    until = time.monotonic() + STOP_SECONDS
    try:
        for process in left:
            _send_signal(process, signal.SIGTERM)
        for process in left:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
    finally:  # at the second Ctrl-C too
        for process in left:
            _send_signal(process, signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _send_signal(process: "subprocess.Popen[bytes]", wanted: signal.Signals) -> None:
    if process.poll() is None:  # else its number may be another's by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, wanted)


def _show_progress(
    agents: Sequence[DemoAgent],
    processes: "dict[str, subprocess.Popen[bytes]]",
    rounds: int,
    console: Console,
) -> None:
    """Show how far the nodes are, until all have ended; raises RunError where one fails."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
    bars = Progress(
        *columns,
        TextColumn("{task.fields[told]}"),
        console=console,
        disable=not console.is_terminal,
    )
    nodes = [agent for agent in agents if agent.kind != GARBAGE]
    tasks = {
        agent.name: bars.add_task(f"{agent.name}  {agent.kind}", total=rounds, told="")
        for agent in nodes
    }
    told = time.monotonic()
    with bars:
        while True:
            running = [processes[agent.name].poll() is None for agent in nodes]
            done = {agent.name: _progress_of(agent) for agent in nodes}
            for name, (n, accuracy) in done.items():
                bars.update(tasks[name], completed=n, told=accuracy)
            if not console.is_terminal and time.monotonic() - told > 10:
                told = time.monotonic()
                far = [n for n, _ in done.values()]
                print(
                    f"peers-demo: rounds {min(far)} to {max(far)} of {rounds}",
                    file=sys.stderr,
                    flush=True,
                )
            for agent in agents:
                if status := processes[agent.name].poll():
                    raise RunError(
                        f"{agent.name} failed with status {status}: {_last_line(agent.log)} ({agent.log})"
                    )
            if not any(running):
                return
            time.sleep(0.3)


def _progress_of(agent: DemoAgent) -> tuple[int, str]:
    """How many rounds an agent has done, and its accuracy."""
    with contextlib.suppress(RunError):  # it has not begun, or writes at this moment
        if lines := PeerRecords.read(agent.out).rounds:
            accuracy = lines[-1].accuracy
            return lines[-1].round, "" if accuracy is None else f"accuracy {100 * accuracy:.1f}%"
    return 0, ""


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def result_tables(agents: Sequence[DemoAgent]) -> dict[str, pd.DataFrame]:
    """By title: how good each agent's model is, with the weight that benign agents gave it, and what they refused."""
    ids = {agent.name: i for i, agent in enumerate(agents)}
    found = {agent.name: PeerRecords.read(agent.out) for agent in agents if agent.kind != GARBAGE}
    benign = [agent.name for agent in agents if agent.kind == BENIGN]
    results = {}
    refused = {}
    for agent in agents:
        receivers = [found[name] for name in benign if name != agent.name]
        weights = [
            sum(each.weight or 0.0 for each in line.received if each.id == ids[agent.name])
            for recorded in receivers
            for line in recorded.last_fifth
        ]
        lines = found[agent.name].rounds if agent.name in found else ()
        results[agent.name] = {
            "kind": agent.kind,
            "rounds": str(len(lines)) if agent.name in found else "–",
            "accuracy": _format_percent(lines[-1].accuracy if lines else None),
            "source accuracy": _format_percent(lines[-1].source_accuracy if lines else None),
            "attack success": _format_percent(lines[-1].attack_success_rate if lines else None),
            "weight it got": _format_percent(float(np.mean(weights)) if weights else None),
            "proofs": str(
                sum(any(proof.agent == agent.name for proof in each.proofs) for each in receivers)
            ),
        }
        reasons = (
            line.refused.get(ids[agent.name]) for recorded in receivers for line in recorded.rounds
        )
        refused[agent.name] = Counter(reason for reason in reasons if reason is not None)
    columns = [reason for reason, _ in sum(refused.values(), Counter[str]()).most_common()]
    counts = {
        name: {key: str(count[key]) for key in columns} for name, count in refused.items() if count
    }
    return {
        "Agents": pd.DataFrame.from_dict(results, orient="index").rename_axis("agent"),
        "Refused by benign agents, by reason": pd.DataFrame.from_dict(
            counts, orient="index"
        ).rename_axis("agent"),
    }


def _format_percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"
