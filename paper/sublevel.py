"""The border of capture of the consensus point by attackers in the sub-level set.

    .venv/bin/python -m paper.sublevel --out docs/benchmark/sublevel  # runs what is missing
    .venv/bin/python -m paper.sublevel --out docs/benchmark/sublevel --figure border.svg

Digits, two unknown clusters of 10, 25 rounds, seeds 3000 to 3004 on tuning images. `runs.csv` has
one line per run with its results, and statistics of agents that received a full budget, in rounds
with an active attack after all first contacts:

- share: share of attackers among the received models;
- n3: number of cases with three attackers among them;
- weight3: mean weight of attackers in m_j in these cases;
- chance3: how often Q_beta would contain no benign model of the agent's cluster by chance.

Flips count only from the agent's own cluster, because L reveals the others. `--figure` draws the
figure of the page.
"""

import argparse
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context
from paper import sublevel_page
from paper.sublevel_page import BETAS, BUDGET

import fedcb2o

ROUNDS = 25
SEEDS = (3000, 3001, 3002, 3003, 3004)
FIRST_ROUND = 5  # all peers have been contacted once
METRICS = ["accuracy", "source_accuracy", "attack_success_rate"]
FLIP = {"name": "label_flip", "source": 3, "target": 8}
ATTACKS: dict[str, dict[str, Any]] = {
    "removed": {},
    "flip": FLIP,
    "trash": {"name": "random_model"},
    "sybils": {**FLIP, "from_round": 12, "sybils": True},
}
BASE = {"own_model": "trusted", "mixing_factor": 1.0, "alpha": 2.0}
"""Parameters of FedCB2O in all settings that do not change them."""


@dataclass(frozen=True)
class Setting:
    """A defence, described by `changes`, under an attack by a number of attackers per cluster."""

    defence: str
    attack: str
    malicious: int
    changes: Mapping[str, Any]

    def experiment(self, seeds: list[int]) -> fedcb2o.Experiment:
        """Return the experiment of these seeds."""
        agents: dict[str, Any] = {
            **{"budget": BUDGET, "benign": 10 - self.malicious, "malicious": self.malicious},
            **self.changes.get("agents", {}),
        }
        if self.attack == "removed":
            agents["malicious_role"] = "removed"
        table = {
            "name": "sublevel",
            "extends": "digits-fedcb2o-paper",
            "seeds": seeds,
            "rounds": ROUNDS,
            "evaluate_on": "tuning",
            "evaluate_every": ROUNDS,
            "checkpoint_every": ROUNDS,
            "agents": {"colluders_own_model": True, **agents},
            "algorithm": {**BASE, **self.changes.get("algorithm", {})},
        }
        if attack := ATTACKS[self.attack]:
            table["attack"] = attack
        return fedcb2o.load(table)


def settings() -> Iterator[Setting]:
    """Yield all settings by number of attackers or places for newcomers."""
    for malicious in (2, 4, 6):
        for own in ("excluded", "judged"):
            for beta in BETAS:
                yield border("removed", malicious, own, beta)
    for attack in ("flip", "trash"):
        for malicious in range(1, 7):
            for beta in BETAS:
                yield border(attack, malicious, "judged", beta)
                if malicious % 2 == 0:
                    yield border(attack, malicious, "excluded", beta)
        for malicious in (2, 4, 6):
            yield border(attack, malicious, "judged", 0.5, places=2)
            yield border(attack, malicious, "excluded", 0.25, delta_q=0.1)
    for beta in BETAS:
        for places in range(1, BUDGET + 1):
            yield border("sybils", 6, "excluded", beta, places=places)
            if places % 2 == 0 and beta in (0.5, 1.0):
                yield border("sybils", 6, "judged", beta, places=places)


def border(
    attack: str, malicious: int, own: str, beta: float, *, places: int = 0, delta_q: float = 0.0
) -> Setting:
    """Return a setting of the border.

    Args:
        attack: Name of the attack. Sybils are in one cluster, so that they take exactly the places
            of newcomers.
        malicious: Attackers per cluster of ten.
        own: Value of `own_model`.
        beta: Level of the sub-level set.
        places: Largest number of newcomers among the asked peers, or 0 for no limit.
        delta_q: Tolerance of the level.

    Returns:
        The setting.
    """
    algorithm: dict[str, Any] = {"own_model": own, "beta": beta}
    if places:
        algorithm["guards"] = {"newcomer_share": places / BUDGET}
    if delta_q:
        algorithm["delta_q"] = delta_q
    agents = {}
    if attack == "sybils":
        agents = {"num_clusters": 1, "benign": 7, "malicious_samples": 100}
    changes = {"agents": agents, "algorithm": algorithm}
    return Setting(
        sublevel_page.border_name(own, beta, places, delta_q), attack, malicious, changes
    )


def run_lines(setting: Setting, run: fedcb2o.Run) -> pd.DataFrame:
    """Return one line of `runs.csv` per seed of a run."""
    benign = run.records[~run.records.malicious]
    last = benign[benign["round"] == run.records["round"].max()].groupby("seed")
    lines = last[METRICS].mean() * 100

    cases = _cases(setting, run)
    lines["share"] = cases["any"].groupby("seed").mean() / BUDGET
    for f in range(BUDGET + 1):
        same = cases[cases.f == f].groupby("seed")
        lines[f"n{f}"] = same.size()
        lines[f"weight{f}"] = same.mass.mean()
        lines[f"chance{f}"] = same.chance.mean()
    lines = lines.reset_index()
    for name in ("malicious", "attack", "defence"):
        lines.insert(0, name, getattr(setting, name))
    return lines


def _cases(setting: Setting, run: fedcb2o.Run) -> pd.DataFrame:
    """Count attackers and weights for each benign agent and round with a full budget."""
    agents = run.agents.set_index(["seed", "agent"])[["malicious", "cluster"]]
    pairs = run.pairs.join(agents, on=["seed", "agent"])
    pairs = pairs.join(agents.add_suffix("_peer"), on=["seed", "peer"])
    start = max(FIRST_ROUND, 1 + ATTACKS[setting.attack].get("from_round", 0))
    pairs = pairs[~pairs.malicious & (pairs["round"] >= start)]

    is_own = pairs.agent == pairs.peer
    same_cluster = pairs.cluster == pairs.cluster_peer
    counts = pairs.malicious_peer
    if setting.attack != "trash":
        counts = counts & same_cluster
    table = pairs.assign(
        m=~is_own,
        f=counts,
        near=same_cluster & ~is_own,
        mass=pairs.weight * pairs.malicious_peer,
        any=pairs.malicious_peer,
    )
    sums = table.groupby(["seed", "round", "agent"])[["m", "f", "near", "mass", "any"]].sum()
    cases = sums.query(f"m == {BUDGET}")

    algorithm = setting.changes.get("algorithm", {})
    own_count = int(algorithm.get("own_model", "excluded") != "excluded")
    k = math.ceil(algorithm.get("beta", 1.0) * (BUDGET + own_count) - 1e-9)
    near = zip(cases.f, cases.near, strict=True)
    return cases.assign(chance=[capture_probability(f, count + own_count, k) for f, count in near])


def capture_probability(f: int, near: int, k: int) -> float:
    """Return the probability that attackers have the k lowest losses by chance.

    Args:
        f: Number of attackers.
        near: Number of models of the agent's cluster, attackers included; all orders are equally
            likely.
        k: Size of the sub-level set. If it exceeds `near`, all of these models count.

    Returns:
        The probability.
    """
    k = min(k, near)
    return math.comb(f, k) / math.comb(near, k) if f else 0.0


def measure(path: Path) -> None:
    """Run the settings and seeds without a line in a file, and append them."""
    for setting in settings():
        done = set()
        if path.exists():
            rows = pd.read_csv(path)
            same = (rows.defence == setting.defence) & (rows.attack == setting.attack)
            done = set(rows[same & (rows.malicious == setting.malicious)].seed)
        seeds = [seed for seed in SEEDS if seed not in done]
        if seeds:
            with tempfile.TemporaryDirectory() as folder:
                run = fedcb2o.run(setting.experiment(seeds), out=Path(folder) / "run", workers=1)
                lines = run_lines(setting, run)
            lines.round(4).to_csv(path, mode="a", index=False, header=not path.exists())
            accuracy = f"{lines.accuracy.mean():.1f}"
            print(setting.attack, setting.malicious, setting.defence, accuracy, flush=True)


def main() -> None:
    """Run missing settings; draw the page's figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of runs.csv")
    parser.add_argument("--figure", type=Path, help="SVG file of the page's figure")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    measure(arguments.out / "runs.csv")
    if arguments.figure:
        draw_figure(pd.read_csv(arguments.out / "runs.csv"), arguments.figure)


def draw_figure(runs: pd.DataFrame, path: Path) -> None:
    """Draw the border of capture into an SVG file."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "border"}):
        sublevel_page.draw_border(runs).savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
