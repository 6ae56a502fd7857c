"""What is written once when a seed begins: who takes part, in what surroundings, and a few samples."""

import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from fedcb2o import records
from fedcb2o.data._dataset import features
from fedcb2o.data._partition import rotate
from fedcb2o.experiments.config.build import PreparedSeed
from fedcb2o.experiments.config.datasets import attack_goal, shared_pool
from fedcb2o.experiments.runs.kernel_config import ENVIRONMENT
from fedcb2o.kernels import devices


def write_provenance(
    folder: Path,
    prepared: PreparedSeed,
    workers: int,
    kernels: Mapping[str, Any],
    device: torch.device,
) -> None:
    """Write who takes part, in what surroundings, and a few samples as each cluster sees them."""
    write_environment(folder, prepared.seed, workers, kernels, device)
    for name, content in participant_files(prepared).items():
        records.atomic_write(folder / name, content)


def participant_files(prepared: PreparedSeed) -> dict[str, bytes]:
    """The files that say who takes part and show a few samples as each cluster sees them: a seed gives them whole."""
    experiment = prepared.experiment
    dataset = prepared.dataset
    population = prepared.population
    sources = torch.tensor(attack_goal(experiment).sources, dtype=torch.int64)
    labels = dataset.labels(shared_pool(experiment, dataset))
    held = [
        int(torch.isin(labels[v], sources).sum()) if len(v) and len(sources) else None
        for v in population.validation
    ]
    who = {
        "class_names": list(dataset.class_names),
        "num_classes": len(dataset.class_names),
        "clusters": population.num_clusters,
        "angles": [k * 360 // population.num_clusters for k in range(population.num_clusters)],
        "dim": prepared.spec.dim,
        "cluster": population.cluster.tolist(),
        "malicious": population.malicious.tolist(),
        "num_samples": [len(chosen) for chosen in population.train],
        "source_in_validation": held,
    }
    if population.tests is not None:
        who |= {
            "names": list(population.names),
            "num_tested": [len(chosen) for chosen in population.tests],
        }
    found = {"agents.json": records.to_json(who)}
    if dataset.pool.x.ndim == 4:
        y = dataset.labels(dataset.pool)
        labels = torch.linspace(0, dataset.num_classes - 1, min(10, dataset.num_classes)).long()
        first = torch.stack(
            [(y == c).nonzero()[0, 0] if (y == c).any() else torch.tensor(0) for c in labels]
        )
        images = (features(dataset.pool.x[first]).mean(1) * 255).clamp(0, 255).to(torch.uint8)
        seen = torch.stack(
            [rotate(images, k, population.num_clusters) for k in range(population.num_clusters)]
        )
        found["samples.safetensors"] = save({"images": seen.contiguous()})
    return found


def write_environment(
    folder: Path, seed: int, workers: int, kernels: Mapping[str, Any], device: torch.device
) -> None:
    """Write in what surroundings a seed begins, and the primitives that were chosen for it."""
    environment = {
        "seed": seed,
        **_versions(device),
        "platform": platform.platform(),
        "workers": workers,
    }
    records.write_json(folder / ENVIRONMENT, {**environment, **kernels})


def _versions(device: torch.device) -> dict[str, Any]:
    """The versions that the bits of a run depend on, and the device by its name."""
    packages = ("fedcb2o", "torch", "numpy")
    versions = {
        "versions": {name: version(name) for name in packages},
        "python": platform.python_version(),
    }
    return versions if device.type == "cpu" else {**versions, "device": devices.device_name(device)}


def describe_changed_versions(folder: Path, device: torch.device) -> str:
    """What a seed began with, where it now is another: "torch 2.5.0, now 2.6.0"."""
    path = folder / ENVIRONMENT
    now = records.flatten(_versions(device))
    there = records.flatten(records.read_json(path)) if path.exists() else now
    changed = {
        key.removeprefix("versions."): (there.get(key), new)
        for key, new in now.items()
        if there.get(key) != new
    }
    return ", ".join(f"{name} {old}, now {new}" for name, (old, new) in changed.items())
