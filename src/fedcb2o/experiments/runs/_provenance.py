"""The files that are written once when a seed begins: participants, environment and samples."""

import functools
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from fedcb2o import records
from fedcb2o.data import features
from fedcb2o.experiments.config.datasets import shared_pool
from fedcb2o.experiments.config.prepared_seed import PreparedSeed
from fedcb2o.experiments.runs._kernel_config import ENVIRONMENT
from fedcb2o.experiments.runs._sources import source_digests
from fedcb2o.kernels import devices

_version = functools.cache(version)

_AGENTS_PER_VIEW = 64  # whose validation samples are transformed at once


def write_provenance(
    folder: Path,
    prepared: PreparedSeed,
    workers: int,
    kernels: Mapping[str, Any],
    device: torch.device,
) -> None:
    """Write environment.json, agents.json and, for images, samples.safetensors."""
    write_environment(folder, prepared, workers, kernels, device)
    records.atomic_write(folder / "agents.json", records.to_json(_participants(prepared)))
    # Reports draw how clusters see a sample; tables and texts have no picture.
    if prepared.dataset.pool.x.ndim == 4:
        content = save({"images": _sample_images(prepared)})
        records.atomic_write(folder / "samples.safetensors", content)


def _participants(prepared: PreparedSeed) -> dict[str, Any]:
    """Return classes, clusters, and the facts of each agent."""
    dataset = prepared.dataset
    population = prepared.population
    num_clusters = population.num_clusters
    participants = {
        "class_names": list(dataset.class_names),
        "num_classes": len(dataset.class_names),
        "clusters": num_clusters,
        **_angles(prepared),
        "dim": prepared.spec.dim,
        "cluster": population.cluster.tolist(),
        "malicious": population.malicious.tolist(),
        "num_samples": [len(samples) for samples in population.train],
        "source_in_validation": _source_counts(prepared),
    }
    if population.tests is not None:
        # Without owners agents have numbers only.
        participants["names"] = list(population.names)
        participants["num_tested"] = [len(samples) for samples in population.tests]
    return participants


def _angles(prepared: PreparedSeed) -> dict[str, list[float]]:
    """Return the angle of each cluster, where clusters differ by rotation."""
    transform = prepared.experiment.agents.cluster_transform
    # Without a key the transform is a rotation, the one of the paper.
    if transform is not None and transform.name != "rotation":
        return {}
    num_clusters = prepared.population.num_clusters
    angles = [k * 360 / num_clusters for k in range(num_clusters)]
    if prepared.population.tests is not None:
        angles = [0.0] * num_clusters
    elif transform is not None:
        angles = transform.parameters.get("angles", angles)
    # 90 in place of 90.0: a report has the number as a user writes it.
    return {"angles": [int(a) if a == int(a) else a for a in angles]}


def _source_counts(prepared: PreparedSeed) -> list[int | None]:
    """Return the number of source-class samples that each agent validates on."""
    experiment = prepared.experiment
    sources = torch.tensor(experiment.resolved.goal.sources, dtype=torch.int64)
    pool = shared_pool(experiment, prepared.dataset)
    population = prepared.population
    cluster = population.cluster.tolist()
    counts: list[int | None] = [None] * len(cluster)
    if not len(sources):
        return counts
    for k in range(population.num_clusters):
        members = [j for j, own in enumerate(cluster) if own == k and len(population.validation[j])]
        # All agents at once would need the memory of all transformed samples.
        for start in range(0, len(members), _AGENTS_PER_VIEW):
            some = members[start : start + _AGENTS_PER_VIEW]
            samples = [population.validation[j] for j in some]
            seen = prepared.view(pool.part(torch.cat(samples).numpy()), k)
            is_source = torch.isin(prepared.dataset.labels(seen), sources)
            agent = torch.arange(len(some)).repeat_interleave(torch.tensor([*map(len, samples)]))
            found = torch.zeros(len(some)).index_add_(0, agent, is_source.float())
            for j, count in zip(some, found.long().tolist(), strict=True):
                counts[j] = count
    return counts


def _sample_images(prepared: PreparedSeed) -> torch.Tensor:
    """Return images of up to ten classes as each cluster sees them, uint8 [K, 10, H, W]."""
    dataset = prepared.dataset
    num_clusters = prepared.population.num_clusters
    y = dataset.labels(dataset.pool)
    # Of many classes, ten that are spread over all.
    classes = torch.linspace(0, dataset.num_classes - 1, min(10, dataset.num_classes)).long()
    first = torch.stack([_first_of_class(y, label) for label in classes])
    low, high = dataset.value_range
    shown = dataset.pool.part(first.numpy())
    seen = []
    for k in range(num_clusters):
        images = (features(prepared.view(shown, k).x).mean(1) - low) / (high - low)
        seen.append((images * 255).clamp(0, 255).to(torch.uint8))
    return torch.stack(seen).contiguous()


def _first_of_class(y: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    matches = (y == label).nonzero()
    # A class may have no sample in a pool of the user.
    return matches[0, 0] if len(matches) else torch.tensor(0)


def write_environment(
    folder: Path,
    prepared: PreparedSeed,
    workers: int,
    kernels: Mapping[str, Any],
    device: torch.device,
) -> None:
    """Write environment.json: versions, machine, kernels and digests of users' functions."""
    environment = {
        "seed": prepared.seed,
        **_versions(device),
        "platform": platform.platform(),
        "workers": workers,
    }
    sources = source_digests(prepared.experiment.settings())
    if sources:
        environment["sources"] = sources
    records.write_json(folder / ENVIRONMENT, {**environment, **kernels})


def _versions(device: torch.device) -> dict[str, Any]:
    """Return the versions that a run's bits depend on, and the name of the device."""
    versions = {name: _version(name) for name in ("fedcb2o", "torch", "numpy")}
    found: dict[str, Any] = {"versions": versions, "python": platform.python_version()}
    if device.type != "cpu":
        found["device"] = devices.device_name(device)
    return found


def describe_changed_versions(folder: Path, device: torch.device) -> str:
    """Describe what changed since a seed began, such as "torch 2.5.0, now 2.6.0"."""
    path = folder / ENVIRONMENT
    if not path.exists():
        return ""
    current = records.flatten(_versions(device))
    recorded = records.flatten(records.read_json(path))
    # A version that differs may move bits: a resumed run says so in its log.
    changes = []
    for key, now in current.items():
        if recorded.get(key) != now:
            changes.append(f"{key.removeprefix('versions.')} {recorded.get(key)}, now {now}")
    return ", ".join(changes)
