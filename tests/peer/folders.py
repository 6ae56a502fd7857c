"""Run directories of nodes, with chosen or random values."""

import json

import numpy as np

NAMES = {0: "hospital-a", 1: "hospital-b", 2: "clinic-c", 3: "university-d"}


def write_node(folder, lines, **changes):
    """Write a run directory with the rounds `lines`; keywords change agent.json."""
    folder.mkdir(parents=True, exist_ok=True)
    agent = {
        "name": "hospital-a",
        "id": 0,
        "names": NAMES,
        "run": "9f" * 32,
        "version": 1,
        "dim": 4810,
        "class_names": ["benign", "malignant"],
        "num_samples": 400,
        "validation_samples": 80,
    }
    (folder / "agent.json").write_text(json.dumps(agent | changes), encoding="utf-8")
    (folder / "rounds.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in lines), encoding="utf-8"
    )
    return folder


def line(n, *received, **changes):
    """Return a line of rounds.jsonl; `received` are (id, seconds, bytes, weight)."""
    keys = ("id", "seconds", "bytes", "weight")
    record = {
        "round": n,
        "train_loss": 1 / n,
        "own_loss": 1.1 / n,
        "accuracy": 1 - 0.5 / n,
        "asked": [1, 2, 3],
        "received": [{"round": n, **dict(zip(keys, values, strict=True))} for values in received],
        "own_weight": 0.4,
        "refused": {},
        "late": [],
        "behind": [],
        "no_model": [],
        "relay_down": [],
        "alive": [1, 2, 3],
        "sent": 1000,
        "served": 3,
        "turned_away": {},
        "seconds": {
            "train": 0.5,
            "publish": 0.01,
            "exchange": 0.2,
            "aggregate": 0.1,
            "mix": 0.05,
            "round": 1.0,
        },
    }
    return record | changes


def draw_node(folder, *, agents=8, rounds=50, budget=4, seed=0):
    """Write a random run: a peer sends garbage, two get small weights, one is slow, one leaves."""
    rng = np.random.default_rng(seed)
    names = {i: f"organisation-{chr(97 + i % 26)}{'' if i < 26 else i}" for i in range(agents)}
    reasons = ["signature", "size", "not finite", "hash of a chunk", "round"]
    lines = []
    for n in range(1, rounds + 1):
        asked = sorted(
            int(i) for i in rng.choice(np.arange(1, agents), min(budget, agents - 1), replace=False)
        )
        received, refused, late = [], {}, []
        for i in asked:
            if i == agents - 1:
                refused[str(i)] = str(rng.choice(reasons))
            elif i == 2 and rng.random() < 0.3:
                late.append(i)
            elif not (i == 1 and n > 0.7 * rounds):
                mu = rng.gamma(5) * (0.02 if i >= agents - 3 else 1)
                received.append(
                    [i, float(rng.gamma(4, 0.03) * (4 if i == 2 else 1)), 26_400_000, mu]
                )
        own_mu = rng.gamma(6)
        total = own_mu + sum(model[3] for model in received)
        train, wait = float(rng.gamma(30, 0.02)), float(rng.gamma(4, 0.05))
        progress = 1 - np.exp(-n / 8)
        lines.append(
            line(
                n,
                *[[*model[:3], model[3] / total] for model in received],
                asked=asked,
                refused=refused,
                late=late,
                own_weight=own_mu / total,
                train_loss=2.3 * (1 - 0.9 * progress),
                own_loss=2.3 * (1 - 0.86 * progress),
                accuracy=0.93 * progress + 0.01 * float(rng.random()),
                source_accuracy=0.8 * progress,
                attack_success_rate=0.03 + 0.02 * float(rng.random()),
                alive=[i for i in range(1, agents) if not (i == 1 and n > 0.7 * rounds)],
                sent=int(26_400_000 * rng.integers(2, 6)),
                served=int(rng.integers(60, 160)),
                turned_away={"too many requests": 3} if n % 7 == 0 else {},
                seconds={
                    "train": train,
                    "publish": 0.03,
                    "exchange": wait,
                    "aggregate": 0.08,
                    "mix": 0.02,
                    "evaluate": 0.04,
                    "round": train + wait + 0.25,
                },
            )
        )
    return write_node(folder, lines, names=names, name=names[0], rounds=rounds)
