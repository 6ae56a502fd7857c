"""What each thing that Algorithm 2 leaves out is worth to attackers, and where they capture the consensus point.

    .venv/bin/python -m paper.sublevel --out docs/benchmark/sublevel    # runs what is not there yet, 40 minutes
    .venv/bin/python -m paper.sublevel --out docs/benchmark/sublevel --page docs/sublevel.md --figures docs/figures

Digits, two unknown clusters of 10, 25 rounds, seeds 3000 to 3004 on tuning images. `runs.csv` has a line a run: what it
reached, and of the rounds in which the attack is on and everybody has been asked once, of agents that received a full
budget: `share`, that of attackers among the models received; `n3`, in how many cases three of these were attackers;
`weight3`, the mean weight of attackers in m_j then; `chance3`, how often Q_beta would hold no benign model of the own
cluster by chance. Flips count only where they come from the own cluster, since L sees the others. Tables of the page
stand below a comment, `<!-- sublevel: NAME -->`.
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
from paper import sublevel_page as shown
from paper.sublevel_page import BUDGET

import fedcb2o

ROUNDS = 25
SEEDS = (3000, 3001, 3002, 3003, 3004)
MET = 5  # from this round on everybody has been asked once
FLIP = {"name": "label_flip", "source": 3, "target": 8}
ATTACKS: dict[str, dict[str, Any]] = {
    "none": {},
    "removed": {},
    "flip": FLIP,
    "trash": {"name": "trash"},
    "sybils": {**FLIP, "from_round": 12, "sybils": True},
}
BACK: dict[str, dict[str, Any]] = {  # what Algorithm 2 leaves out, put back
    "the sub-level set": {"beta": 0.5},
    "the ball": {"ball": 1.3},
    "the own model": {"own_model": "judged"},
    "newcomers at most a third": {"selection": {"name": "prob_sampling", "newcomers": 1 / 3}},
}


@dataclass(frozen=True)
class Setting:
    """One line of the figure or of a table, at one number of attackers: `changes` are the defence."""

    defence: str
    attack: str
    malicious: int
    changes: Mapping[str, Any]

    def experiment(self, seeds: list[int]) -> fedcb2o.Experiment:
        """The runs of these seeds."""
        agents: dict[str, Any] = {"benign": 10 - self.malicious, "malicious": self.malicious}
        if role := {"none": "clean", "removed": "removed"}.get(self.attack):
            agents |= {"malicious_role": role}
        table = {
            "name": "sublevel",
            "extends": self.changes.get("extends", "digits-fedcb2o-trusted"),
            "seeds": seeds,
            "rounds": ROUNDS,
            "evaluate_on": "tuning",
            "evaluate_every": ROUNDS,
            "checkpoint_every": ROUNDS,
            "agents": {"budget": BUDGET} | agents | self.changes.get("agents", {}),
            "algorithm": self.changes.get("algorithm", {}),
        }
        return fedcb2o.load(
            table | ({"attack": attack} if (attack := ATTACKS[self.attack]) else {})
        )


def settings() -> Iterator[Setting]:
    """All that is run: the ablation, then the border by the attackers' number and, of sybils, the newcomers' share."""
    ablation = {"Algorithm 2": {}, **{f"with {name}": each for name, each in BACK.items()}}
    ablation["with weight from the second meeting"] = {"counts_from": "second"}
    ablation["with all four"] = {
        key: value for each in BACK.values() for key, value in each.items()
    }
    for left in BACK:
        ablation[f"without {left}"] = {
            k: v for name, each in BACK.items() if name != left for k, v in each.items()
        }
    for attack in shown.COLUMNS:
        for name, algorithm in ablation.items():
            yield Setting(name, attack, 3, {"algorithm": {"own_model": "excluded"} | algorithm})
        yield Setting("the default, held out", attack, 3, {"extends": "digits-fedcb2o-held-out"})
        yield Setting("the default", attack, 3, {"extends": "digits-fedcb2o"})
    for malicious in (2, 4, 6):
        for own in ("excluded", "judged"):
            for beta in shown.BETAS:
                yield border("removed", malicious, own, beta)
    for attack in ("flip", "trash"):
        for malicious in range(1, 7):
            for beta in shown.BETAS:
                yield border(attack, malicious, "judged", beta)
                if malicious % 2 == 0:
                    yield border(attack, malicious, "excluded", beta)
        for malicious in (2, 4, 6):
            yield border(attack, malicious, "judged", 0.5, places=2)
            yield border(attack, malicious, "excluded", 0.25, delta_q=0.1)
    for beta in shown.BETAS:
        for places in range(1, BUDGET + 1):
            yield border("sybils", 6, "excluded", beta, places=places)
            if places % 2 == 0 and beta in (0.5, 1.0):
                yield border("sybils", 6, "judged", beta, places=places)


def border(
    attack: str, malicious: int, own: str, beta: float, *, places: int = 0, delta_q: float = 0.0
) -> Setting:
    """A setting of the border, with at most so many places for newcomers where any are given; sybils in one cluster, so
    that they take just these."""
    algorithm: dict[str, Any] = {"own_model": own, "beta": beta}
    if places:
        algorithm["selection"] = {"name": "prob_sampling", "newcomers": places / BUDGET}
    if delta_q:
        algorithm["delta_q"] = delta_q
    agents = (
        {"num_clusters": 1, "benign": 7, "malicious_samples": 100} if attack == "sybils" else {}
    )
    changes = {"agents": agents, "algorithm": algorithm}
    return Setting(shown.named(own, beta, places, delta_q), attack, malicious, changes)


def lines(setting: Setting, run: fedcb2o.Run) -> pd.DataFrame:
    """A line for each seed of a run."""
    last = run.records[
        ~run.records.malicious & (run.records["round"] == run.records["round"].max())
    ].groupby("seed")
    found = last[["accuracy", "source_accuracy", "attack_success_rate"]].mean() * 100
    who = run.agents.set_index(["seed", "agent"])[["malicious", "cluster"]]
    pairs = run.pairs.join(who, on=["seed", "agent"]).join(
        who.add_suffix("_peer"), on=["seed", "peer"]
    )
    start = max(MET, 1 + ATTACKS[setting.attack].get("from_round", 0))
    pairs = pairs[~pairs.malicious & (pairs["round"] >= start)]
    own = pairs.agent == pairs.peer
    same = pairs.cluster == pairs.cluster_peer
    counted = pairs.malicious_peer & (same if setting.attack != "trash" else True)
    each = (
        pairs.assign(
            m=~own,
            f=counted,
            near=same & ~own,
            mass=pairs.weight * pairs.malicious_peer,
            any=pairs.malicious_peer,
        )
        .groupby(["seed", "round", "agent"])[["m", "f", "near", "mass", "any"]]
        .sum()
        .query(f"m == {BUDGET}")
    )
    algorithm = setting.changes.get("algorithm", {})
    itself = int(algorithm.get("own_model", "excluded") != "excluded")
    k = math.ceil(algorithm.get("beta", 1.0) * (BUDGET + itself) - 1e-9)
    each["chance"] = [
        captured(f, near + itself, k) for f, near in zip(each.f, each.near, strict=True)
    ]
    found["share"] = each["any"].groupby("seed").mean() / BUDGET
    for f in range(BUDGET + 1):
        some = each[each.f == f].groupby("seed")
        found[f"n{f}"], found[f"weight{f}"], found[f"chance{f}"] = (
            some.size(),
            some.mass.mean(),
            some.chance.mean(),
        )
    found = found.reset_index()
    for name in ("malicious", "attack", "defence"):
        found.insert(0, name, getattr(setting, name))
    return found


def captured(f: int, near: int, k: int) -> float:
    """The probability that f attackers have the k lowest losses of `near` models, those of the own cluster, where every
    order is as likely; where there are fewer than k, all of them count."""
    k = min(k, near)
    return math.comb(f, k) / math.comb(near, k) if f else 0.0


def measure(path: Path) -> None:
    """Run what `path` has no line of, and add it there."""
    for setting in settings():
        done = set()
        if path.exists():
            known = pd.read_csv(path)
            mine = (known.defence == setting.defence) & (known.attack == setting.attack)
            done = set(known[mine & (known.malicious == setting.malicious)].seed)
        if seeds := [seed for seed in SEEDS if seed not in done]:
            with tempfile.TemporaryDirectory() as folder:
                found = lines(
                    setting,
                    fedcb2o.run(setting.experiment(seeds), out=Path(folder) / "run", workers=1),
                )
            found.round(4).to_csv(path, mode="a", index=False, header=not path.exists())
            print(
                setting.attack,
                setting.malicious,
                setting.defence,
                f"{found.accuracy.mean():.1f}",
                flush=True,
            )


def main() -> None:
    """Run what is missing; write the page's tables and the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder of runs.csv")
    parser.add_argument("--page", type=Path, help="the page whose tables to write anew")
    parser.add_argument("--figures", type=Path, help="the folder of its figures")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    measure(arguments.out / "runs.csv")
    known = pd.read_csv(arguments.out / "runs.csv")
    if arguments.page:
        arguments.page.write_text(shown.rewritten(arguments.page, known), encoding="utf-8")
    if arguments.figures:
        for name, draw in {"omissions": shown.draw_omissions, "border": shown.draw_border}.items():
            with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
                draw(known).savefig(
                    arguments.figures / f"sublevel-{name}.svg", metadata={"Date": None}
                )


if __name__ == "__main__":
    main()
