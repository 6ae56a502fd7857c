"""Synthetic run folders: values by hand for exact tests, or random values like an experiment's."""

import numpy as np
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

from fedcb2o.records import RoundLog, Run, write_json, write_toml

CONFIG = {
    "seeds": [0],
    "rounds": 1,
    "evaluate_every": 1,
    "evaluate_on": "test",
    "data": {"name": "digits"},
    "agents": {"num_clusters": 1, "malicious_role": "attack", "budget": 6},
    "algorithm": {"name": "fedcbo", "alpha": 10.0},
}


def write_run(
    folder, config, *, agents, metrics, pairs=None, complete=True, samples=None, angles=(0,)
):
    """Write a run whose `metrics` and `pairs` are lists of lines by seed.

    `config` changes a small default.
    """
    config = {"name": folder.name, **CONFIG, "seeds": list(metrics), **config}
    folder.mkdir(parents=True)
    write_toml(folder / "config.toml", config)
    for seed, lines in metrics.items():
        seed_folder = folder / f"seed-{seed}"
        seed_folder.mkdir()
        metadata = {
            "class_names": [str(c) for c in range(10)],
            "num_classes": 10,
            "clusters": len(angles),
        }
        write_json(
            seed_folder / "agents.json", {**metadata, "angles": angles, "dim": 1000, **agents}
        )
        records = RoundLog(seed_folder)
        for line in lines:
            records.append("metrics", line)
            records.append(
                "timing", {"round": line["round"], "train": 1.5, "aggregate": 0.5, "mix": 0.1}
            )
        for line in (pairs or {}).get(seed, []):
            records.append("pairs", line)
        if samples is not None:
            save_file({"images": samples}, seed_folder / "samples.safetensors")
        if complete:
            write_json(seed_folder / "summary.json", {"rounds": len(lines)})
    return Run(folder)


def draw_run(
    folder,
    config=None,
    *,
    clusters=2,
    benign=7,
    malicious=3,
    rounds=50,
    seeds=(0, 1, 2),
    pull=0.5,
    hit=0.4,
):
    """Write a run with random values like an experiment's.

    Malicious peers have `pull` times the weight of benign ones; the attack costs `hit` in accuracy.
    """
    rng = np.random.default_rng(len(folder.name))
    size = benign + malicious
    N = clusters * size
    M = min(6, N - 1)
    cluster = np.repeat(np.arange(clusters), size)
    is_malicious = np.tile(np.arange(size) >= benign, clusters)
    counts = np.where(is_malicious, 0, rng.poisson(2.0, N))
    agents = {
        "cluster": cluster,
        "malicious": is_malicious,
        "num_samples": np.where(is_malicious, 1200, 400),
        "source_in_validation": [
            None if b else int(c) for b, c in zip(is_malicious, counts, strict=True)
        ],
    }
    metrics, pairs = {}, {}
    for seed in seeds:
        metrics[seed], pairs[seed] = [], []
        for n in range(1, rounds + 1):
            ids, weights, own_weights, malicious_weight = [], [], [], []
            for j in range(N):
                peers = np.delete(np.arange(N), j)
                probability = np.where(cluster[peers] == cluster[j], 1.0, 0.03) * np.where(
                    is_malicious[peers], 1.4, 1.0
                )
                ids.append(
                    np.sort(rng.choice(peers, M, replace=False, p=probability / probability.sum()))
                )
                mu = (
                    rng.gamma(5, size=M)
                    * np.where(is_malicious[ids[-1]], pull, 1)
                    * np.where(cluster[ids[-1]] == cluster[j], 1.0, 0.02)
                )
                mu = np.append(mu, mu.max())
                mu = mu / mu.sum()
                weights.append(mu[:-1])
                own_weights.append(mu[-1])
                malicious_weight.append(
                    None if is_malicious[j] else mu[:-1][is_malicious[ids[-1]]].sum()
                )
            line = {
                "round": n,
                "train_loss": rng.random(N),
                "malicious_weight": malicious_weight,
                "answered": [M] * N,
            }
            if n % 5 == 0 or n == rounds:
                progress = 1 - np.exp(-n / 12)
                scores = {
                    "accuracy": 0.80 * progress - 0.02 * hit + 0.01 * rng.standard_normal(N),
                    "source_accuracy": (0.7 - hit) * progress
                    + 0.05 * rng.standard_normal(N)
                    + 0.02 * counts,
                    "attack_success_rate": 0.15
                    + hit * progress
                    + 0.05 * rng.standard_normal(N)
                    - 0.02 * counts,
                }
                for key, values in scores.items():
                    values = np.clip(values + 0.01 * rng.standard_normal(), 0, 1)
                    line[key] = [
                        None if b else float(v) for b, v in zip(is_malicious, values, strict=True)
                    ]
            metrics[seed].append(line)
            pairs[seed].append({"round": n, "ids": ids, "weights": weights, "own": own_weights})
    angles = [360 * c // clusters for c in range(clusters)]
    images = load_digits().images[10:20].astype(np.uint8)
    samples = np.stack([np.rot90(images, angle // 90, axes=(1, 2)) for angle in angles])
    role = {
        "num_clusters": clusters,
        "malicious_role": "attack",
        "budget": M,
        "benign": benign,
        "malicious": malicious,
    }
    config = {"rounds": rounds, "evaluate_every": 5, **(config or {})}
    config["agents"] = {**role, **config.get("agents", {})}
    return write_run(
        folder, config, agents=agents, metrics=metrics, pairs=pairs, samples=samples, angles=angles
    )
