"""A hundred thousand agents, 30% of them sybils, with a clock: the table of docs/performance.md.

    python benchmarks/many_agents.py --rounds 12 --values benchmarks/many_agents.csv
    python benchmarks/many_agents.py --agents 10000 --values benchmarks/many_agents.csv
    python benchmarks/many_agents.py --agents 1000   # some seconds
    python benchmarks/many_agents.py --sampling      # the sampling of peers alone; many_sybils.csv
    python benchmarks/many_agents.py --table         # writes the tables from both files

The agents have a logistic regression on 20 features, 20 samples each, and M = 20. Three of ten flip
labels of class 9 to 4, and have a new identity in every round. Rounds have a deadline of a minute.
Of the agents online, 10% leave in a round and are back after 2.4 rounds in the mean; the time of a
sample, and the bandwidth, are log-normal. Rows are by arm and round; the share of hostile peers is
that among the peers that benign agents asked. Its bound is the mean over agents of
max(ceil(nu M), M - known peers) / M. Twelve rounds of all arms with 100,000 agents take 20 minutes
of processor time on a loaded machine.

`--sampling` has no learning: agents that know no peer sample from 70,000 benign ones, equally
likely, and from identities that are new in every round.
"""

import argparse
import csv
import math
import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from page_table import replace_table

import fedcb2o
from fedcb2o.federated.contacts import CandidatePeers, ContactTable
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.selection import BATCHED_SELECTION, prob_sampling
from fedcb2o.records import log_path, read_lines
from fedcb2o.rng import agent_streams

VALUES = Path(__file__).with_suffix(".csv")
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
MARKS = ("<!-- many_agents -->", "<!-- /many_agents -->")
FEATURES, CLASSES, SAMPLES, BUDGET, VIEW = 20, 10, 20, 20, 200
MINUTE = 60.0
CHURN = 0.1  # of the agents online, in a round
NEWCOMERS = 0.33
ONLINE = -MINUTE / math.log(1 - CHURN)
CLOCK = {
    **{"deadline": MINUTE, "seconds_per_sample": 1.0, "speed_spread": 0.8},
    **{"network_spread": 0.8, "model_bytes": 100_000},
    **{"online": ONLINE, "offline": ONLINE / 4},
}
Arm = tuple[dict[str, Any], bool]
Report = Callable[[Sequence[list[Any]]], None]
# The guards by distance take half of the time, and are against attacks that these are not.
GUARDS = {"newcomer_share": NEWCOMERS, "max_distance": False, "min_distance": False}
FEDASSAY = {"name": "fedassay", "guards": GUARDS}
UNGUARDED = {"name": "fedassay", "guards": {**GUARDS, "newcomer_share": False}}
ARMS: dict[str, Arm] = {
    "all": (FEDASSAY, False),
    "200": (FEDASSAY, True),
    "200, without the guard": (UNGUARDED, True),
    "none, each trains alone": ({"name": "local_training"}, False),
}
SAMPLED = Path(__file__).with_name("many_sybils.csv")
SAMPLED_MARKS = ("<!-- many_sybils -->", "<!-- /many_sybils -->")
# Benign peers that an agent may ask, and hostile identities for each of them.
POPULATIONS = ((70_000, 3 / 7), (70_000, 1.0), (70_000, 10.0), (70_000, 100.0), (140, 3 / 7))
COLUMNS = ("agents", "arm", "round", "hours", "gigabytes", "trained", "hostile", "bound", "weight")
SCORES = ("accuracy", "source_accuracy", "attack_success_rate")


def points(*, samples: int) -> fedcb2o.Dataset:
    """Return random points around one centre per class, and 500 to test on."""
    draw = np.random.default_rng(0)
    y = draw.integers(CLASSES, size=samples + 500)
    x = draw.normal(size=(CLASSES, FEATURES))[y] + 1.5 * draw.normal(size=(len(y), FEATURES))
    return fedcb2o.dataset(x[500:], y[500:], x_test=x[:500], y_test=y[:500])


def experiment(arm: str, agents: int, rounds: int, evaluate_every: int) -> Any:
    """Return the experiment of an arm."""
    algorithm, is_partial = ARMS[arm]
    malicious = 3 * agents // 10
    view = {"graph": {"name": "random_view", "size": min(VIEW, agents // 5)}}
    return fedcb2o.load(
        {
            **{"name": "many-agents", "seeds": [0], "rounds": rounds, "checkpoint_every": rounds},
            "evaluate_every": evaluate_every,
            "data": {"name": points, "samples": SAMPLES * agents},
            "agents": {
                **{"num_clusters": 1, "benign": agents - malicious, "malicious": malicious},
                **{"benign_samples": SAMPLES, "budget": BUDGET, **(view if is_partial else {})},
            },
            "model": {"name": "logistic"},
            "training": {"gamma": 0.05, "batch_size": 8, "local_epochs": 1},
            "algorithm": algorithm,
            "attack": {"name": "label_flip", "source": 9, "target": 4, "sybils": True},
            "clock": {**CLOCK, "period": MINUTE * (rounds + 1)},
        }
    )


def measure(arm: str, agents: int, rounds: int, evaluate_every: int, report: Report) -> None:
    """Run an arm; report a row for each round, after each."""
    algorithm, _ = ARMS[arm]
    share = algorithm.get("guards", {}).get("newcomer_share")
    places = math.ceil(share * BUDGET) if share else BUDGET
    setting = experiment(arm, agents, rounds, evaluate_every)
    num_benign = setting.agents.num_benign
    known: dict[int, set[int]] = {}  # benign peers that each agent has asked
    rows: list[list[Any]] = []

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "seed-0"

        def watch(run: Any, seed: int, line: Mapping[str, Any]) -> None:
            hostile, most = [], []
            _, asked = next(read_lines(log_path(place, "pairs"), skip=line["round"] - 1))
            ids = asked.get("agents", range(agents))
            for j, peers in zip(ids, asked["asked"], strict=True):
                if j < num_benign and peers:
                    met = known.setdefault(j, set())
                    most.append(max(places, BUDGET - len(met)) / BUDGET)
                    hostile.append(sum(i >= num_benign for i in peers) / len(peers))
                    met.update(i for i in peers if i < num_benign)
            gigabytes = round(line["bytes"] / 1e9, 3)
            hours = round(line["hours"], 4)
            row = [agents, arm, line["round"], hours, gigabytes, line["trained"]]
            shares = [_mean(hostile), _mean(most), _mean(line["malicious_weight"])]
            rows.append([*row, *shares, *(_mean(line.get(name)) for name in SCORES)])
            report(rows)

        fedcb2o.run(setting, out=folder, workers=1, watch=watch)


def write_values(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Write the rows of an arm; those of others stay."""
    kept: list[list[str]] = []
    if path.exists():
        with path.open(encoding="utf-8") as file:
            kept = [row for row in csv.reader(file) if row[:2] != [str(x) for x in rows[0][:2]]]
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([*(kept or [header]), *rows])


def sample(
    benign: int, identities: float, guard: float | None, agents: int, rounds: int
) -> list[list[Any]]:
    """Sample peers without learning; return a row for each round."""
    select = BATCHED_SELECTION.get(prob_sampling)
    assert select is not None
    ids = np.arange(benign + round(identities * benign))
    candidates = CandidatePeers.from_lists([ids], np.zeros(agents, np.int64))
    contacts = ContactTable.empty(agents)
    places = 1.0 if guard is None else math.ceil(guard * BUDGET) / BUDGET
    rows: list[list[Any]] = []
    for n in range(rounds):
        draws = agent_streams(0, "select", n, agents=range(agents))
        asked = select(contacts, candidates, BUDGET, draws, newcomer_share=guard)
        hostile = asked.values >= benign
        bound = float(np.maximum(places, 1 - contacts.ids.sizes / BUDGET).mean())
        share = float(hostile.mean())
        label = [benign, round(identities, 2), guard or "none", n + 1]
        rows.append([*label, round(share, 4), round(bound, 4)])
        # Identities of this round are gone in the next one.
        met = asked.filter(~hostile)
        both = zip(contacts.ids, met, strict=True)
        known = Ragged.from_arrays([np.union1d(old, new) for old, new in both])
        contacts = ContactTable(known, np.ones(len(known.values)))
    return rows


def _mean(values: Any) -> Any:
    """Return the mean of the values that are there, rounded; an empty text without one."""
    known = [value for value in values or () if value is not None]
    return round(float(np.mean(known)), 4) if known else ""


def write_table() -> None:
    """Write the first and the last evaluated round of each arm, and the sampling, into the page."""
    with VALUES.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = ["hostile", "bound", "weight", "accuracy", "attack_success_rate"]
    heads = ["hostile among the asked", "bound", "hostile weight", "accuracy", "attack success"]
    lines = [["agents", "peers known", "round", *heads]]
    for case in dict.fromkeys((row["agents"], row["arm"]) for row in rows):
        own = [row for row in rows if (row["agents"], row["arm"]) == case]
        evaluated = [row for row in own if row["accuracy"]]
        for row in [*(row for row in own[:1] if row["hostile"]), *evaluated[-1:]]:
            cells = [_percent(row[name]) for name in names]
            lines.append([f"{int(case[0]):,}", case[1], row["round"], *cells])
    replace_table(PAGE, MARKS, lines, 2)
    with SAMPLED.open(encoding="utf-8") as file:
        sampled = list(csv.DictReader(file))
    shown = ("1", "10", "30", "100")
    head = ["benign peers", "identities for each", "guard"]
    lines = [[*head, *(f"round {n}" for n in shown), "bound, last round"]]
    for case in dict.fromkeys(tuple(list(row.values())[:3]) for row in sampled):
        own = {row["round"]: row for row in sampled if tuple(list(row.values())[:3]) == case}
        shares = [_percent(own[n]["hostile"]) for n in shown]
        lines.append([f"{int(case[0]):,}", *case[1:], *shares, _percent(own[shown[-1]]["bound"])])
    replace_table(PAGE, SAMPLED_MARKS, lines, 3)


def _percent(text: str) -> str:
    return f"{100 * float(text):.1f}" if text else ""


def main() -> None:
    """Run all arms."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=100_000, help="N (default 100,000)")
    parser.add_argument("--rounds", type=int, default=30, help="rounds (default 30)")
    parser.add_argument("--every", type=int, default=5, help="rounds between evaluations")
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--values", type=Path, help="the file of the values (default none)")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--sampling", action="store_true", help="only sample peers")
    options = parser.parse_args()
    if options.sampling:
        sampled: list[list[Any]] = []
        for benign, identities in POPULATIONS:
            for guard in (None, NEWCOMERS):
                sampled += sample(benign, identities, guard, agents=300, rounds=100)
                print(*sampled[-1], flush=True)
        with SAMPLED.open("w", encoding="utf-8", newline="") as file:
            names = ["benign", "identities", "guard", "round", "hostile", "bound"]
            csv.writer(file, lineterminator="\n").writerows([names, *sampled])
        return
    if options.table:
        write_table()
        return
    header = [*COLUMNS, *SCORES]

    def report(new: Sequence[list[Any]]) -> None:
        print(*(f"{name}={value}" for name, value in zip(header, new[-1], strict=True)), flush=True)
        if options.values is not None:
            write_values(options.values, header, new)

    for arm in options.arms:
        start = time.process_time()
        measure(arm, options.agents, options.rounds, options.every, report)
        seconds = time.process_time() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{arm}: {seconds:.0f} s of processor time, at most {peak:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
