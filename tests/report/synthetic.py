"""Run folders with numbers at will: by hand for exact tests, or drawn to look like a real experiment."""

import numpy as np
from safetensors.numpy import save_file

from fedcb2o.records import Records, Run, write_json, write_toml

CONFIG = {
    "seeds": [0],
    "rounds": 1,
    "evaluate_every": 1,
    "evaluate_on": "test",
    "data": {"name": "digits"},
    "agents": {"num_clusters": 1, "malicious_role": "attack", "budget": 6},
    "algorithm": {"name": "fedcbo", "alpha": 10.0},
}


def write_run(folder, config, *, agents, metrics, pairs=None, complete=True, samples=None, angles=(0,)):
    """A run whose `metrics` and `pairs` are lists of lines by seed; `config` is laid over a small default."""
    config = {"name": folder.name, **CONFIG, "seeds": list(metrics), **config}
    folder.mkdir(parents=True)
    write_toml(folder / "config.toml", config)
    for seed, lines in metrics.items():
        inside = folder / f"seed-{seed}"
        inside.mkdir()
        about = {"class_names": [str(c) for c in range(10)], "num_classes": 10, "clusters": len(angles)}
        write_json(inside / "agents.json", {**about, "angles": angles, "dim": 1000, **agents})
        records = Records(inside)
        for line in lines:
            records.append("metrics", line)
            records.append("timing", {"round": line["round"], "train": 1.5, "aggregate": 0.5, "mix": 0.1})
        for line in (pairs or {}).get(seed, []):
            records.append("pairs", line)
        if samples is not None:
            save_file({"images": samples}, inside / "samples.safetensors")
        if complete:
            write_json(inside / "summary.json", {"rounds": len(lines)})
    return Run(folder)
