"""The data of an experiment: the validated data set, and the samples of each agent."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.data import (
    ClusterTransform,
    ClusterView,
    Dataset,
    DatasetNames,
    Groups,
    Owners,
    Population,
    Shard,
    input_arrays,
    inputs,
    match_samples,
    partition,
    partition_by_owner,
    transforms,
)
from fedcb2o.data._sample_format import TOKEN_TYPES
from fedcb2o.data.names import number_in
from fedcb2o.errors import ConfigError, describe_type
from fedcb2o.experiments.config.loading import load, read_settings, warn_of_training_share
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.rng import stream
from fedcb2o.simulation.checkpoint import tensor_crc32

_LOGGER = logging.getLogger(__name__)
_LARGEST_COUNT = 10_000
_OWNER_TENSORS = ("pool", "test", "validates")
_GROUP_TENSORS = ("groups", "groups_by_time")


def load_for_data(
    source: str | Path | Mapping[str, Any] | Experiment,
    changes: Mapping[str, Any] | None,
    data_dir: Path | None,
    num_agents: int | None = None,
) -> tuple[Experiment, Dataset | None]:
    """Load an experiment; without `agents.benign`, each owner of its data is an agent.

    The agents that are not malicious are benign. Their number is that of the owners, for which the
    data set is read and returned, or `num_agents` where it is known. Data without owners are a
    ConfigError.
    """
    agents = read_settings(source, changes)[0].get("agents")
    warn_of_training_share(source, changes or {})
    if not isinstance(agents, Mapping) or "benign" in agents:
        return load(source, changes), None
    # Any number serves to name the functions of the experiment and to check their parameters.
    clusters = {"agents.num_clusters": agents.get("num_clusters", 1)}
    counted = {**(changes or {}), **clusters, "agents.benign": _LARGEST_COUNT}
    provisional = load(source, counted)
    dataset = None
    if num_agents is None:
        dataset = load_dataset(provisional, data_dir)
        num_agents = len(dataset.names.owners)
    if not num_agents:
        raise ConfigError(
            "the key `agents.benign` is missing: the number of benign agents in each cluster (only"
            " data with owners need none)"
        )
    # Counted by the sections, so that a list by cluster and one number mean the same here.
    malicious = provisional.agents.num_malicious
    if malicious >= num_agents:
        raise ConfigError(
            f"`agents.malicious` = {malicious}, and there are {num_agents} agents: take fewer"
        )
    return load(source, {**counted, "agents.benign": num_agents - malicious}), dataset


def load_dataset(experiment: Experiment, data_dir: Path | None) -> Dataset:
    """Load and validate the data set of an experiment, by default from the user's `data_dir`."""
    function = experiment.resolved.data
    options = {}
    if "data_dir" in plugins.parameters(function):
        options["data_dir"] = data_dir
    dataset = function(**options)
    where = f"the data set `{plugins.function_name(function)}`"
    if not isinstance(dataset, Dataset):
        kind = describe_type(dataset)
        raise ConfigError(f"{where} returned {kind}, expected a fedcb2o.Dataset")
    _check_class_names(where, dataset, experiment)

    num_classes = len(dataset.class_names)
    pool = validate_shard(f"{where}, in its pool,", dataset.pool, num_classes)
    test = validate_shard(f"{where}, in its test,", dataset.test, num_classes)
    _check_owners(where, dataset)
    # `fedcb2o.dataset` has compared its parts already; only functions of the user have not.
    if not dataset.is_checked:
        dataset = match_dataset(where, dataclasses.replace(dataset, pool=pool, test=test))
        # The parts of built-in data sets are known, and some overlap by the choice of their
        # authors.
        if plugins.USER_FUNCTION.get(function) is not None:
            dataset = inputs.check_overlap(dataset)
    check_attack_goal(experiment, dataset)
    return dataset


def match_dataset(where: str, dataset: Dataset) -> Dataset:
    """Return a data set with its test samples in the type of the pool, or raise DataError."""
    pool = dataset.pool
    names = [f"the pool of {where}", "its test set"]
    _, test_x = match_samples(names, [pool.x, dataset.test.x])
    if test_x is dataset.test.x:
        return dataset
    return dataclasses.replace(dataset, test=Shard(test_x, dataset.test.y))


def _check_class_names(where: str, dataset: Dataset, experiment: Experiment) -> None:
    """Raise ConfigError unless the names of the classes fit the loss."""
    names = dataset.class_names
    if not (isinstance(names, tuple) and all(isinstance(name, str) for name in names)):
        raise ConfigError(f"{where} has class names that are not a tuple of strings: {names!r}")
    if len(names) == 1:
        raise ConfigError(f"{where} has 1 class name: it needs two or more")
    if len(set(names)) < len(names):
        raise ConfigError(f"{where} has two classes of one name: {', '.join(names)}")
    if not names and experiment.training.loss is None:
        raise ConfigError(
            f"{where} has numbers as targets and no classes: set a loss, such as "
            '`training.loss` = "squared_error"'
        )


def check_attack_goal(experiment: Experiment, dataset: Dataset) -> None:
    """Check that the data set has the classes of the attack."""
    names = dataset.class_names
    goal = experiment.resolved.goal
    meanings: list[str] = []
    for key, labels in (("source", goal.sources), ("target", goal.targets)):
        for label in labels:
            if not names:
                raise ConfigError(
                    f"`attack.{key}` = {label} is a class, and the data have none: take another "
                    "attack"
                )
            if not 0 <= label < len(names):
                hint = ""
                if str(label) in names:
                    hint = f": the class called {label} is {names.index(str(label))}"
                raise ConfigError(
                    f"`attack.{key}` must be between 0 and {len(names) - 1}, got {label}{hint}"
                )
            # A class called "7" in place 6 is a trap for who writes `target = 7`.
            is_other_number = number_in(names[label]) not in (None, label)
            if is_other_number or str(label) in (*names[:label], *names[label + 1 :]):
                meanings.append(f"`attack.{key}` = {label} is the class called {names[label]!r}")
    if meanings:
        _LOGGER.warning(
            "%s: an attack names classes by their places, from 0, and not by their labels.",
            " and ".join(dict.fromkeys(meanings)),
        )


def shared_pool(experiment: Experiment, dataset: Dataset) -> Shard:
    """Return the samples that are dealt out; with `redrawn` test samples, those of both sets."""
    pool = dataset.pool
    test = dataset.test
    if experiment.evaluate_on != "redrawn":
        return pool
    return Shard(torch.cat([pool.x, test.x]), torch.cat([pool.y, test.y]))


def validate_shard(where: str, shard: Shard, num_classes: int) -> Shard:
    """Return samples without gradients. `num_classes` is 0 where targets are numbers."""
    if not isinstance(shard, Shard):
        raise ConfigError(f"{where} is a {type(shard).__name__}, expected a fedcb2o.Shard")
    x = shard.x
    y = shard.y
    if any(isinstance(values, torch.masked.MaskedTensor) for values in (x, y)):
        raise ConfigError(
            f"{where} has masked tensors: fill in what is masked, and give their `.get_data()`"
        )
    is_dense = all(_is_dense_on_cpu(values) for values in (x, y))
    if not is_dense or not x.ndim or not _has_valid_targets(y, num_classes):
        expected = "with one sample per row"
        if num_classes:
            expected = "its labels of type int64 and shape [n]"
        raise ConfigError(f"{where} must hold dense tensors on the CPU, {expected}")
    if len(x) != len(y) or not len(y):
        raise ConfigError(f"{where} holds {len(x)} samples and {len(y)} labels")
    if not num_classes and y.is_floating_point() and not y.isfinite().all():
        raise ConfigError(f"{where} has targets that are not finite")
    if num_classes and (y.min() < 0 or y.max() >= num_classes):
        got = f"{int(y.min())} to {int(y.max())}"
        raise ConfigError(f"{where} has labels outside 0 to {num_classes - 1}: {got}")
    # Bytes are pixels and tokens are looked up; other whole numbers mean neither.
    is_whole = x.dtype == torch.uint8 or x.dtype in TOKEN_TYPES
    if not (is_whole or (x.is_floating_point() and x.isfinite().all())):
        raise ConfigError(
            f"{where} must hold samples of pixels (uint8), tokens (int32 or int64) or finite "
            "floating-point features"
        )
    # Models compute in float32, where distinct large numbers may become equal.
    if x.dtype == torch.float64:
        cure = "shift or scale the samples in float64 first"
        input_arrays.warn_of_merged_values(f"{where} holds", input_arrays.to_array("x", x), cure)
    if not num_classes and y.dtype in (torch.float64, torch.int64):
        cure = "shift or scale the targets in float64 first"
        targets = input_arrays.to_array("y", y)
        input_arrays.warn_of_merged_values(f"{where} holds as targets", targets, cure)
    # Gradients of the user would keep a graph of all batches alive.
    return Shard(x.detach(), y.detach())


def _is_dense_on_cpu(values: object) -> bool:
    return (
        isinstance(values, Tensor)
        and values.layout is torch.strided
        and values.device.type == "cpu"
    )


def _has_valid_targets(y: Tensor, num_classes: int) -> bool:
    if num_classes:
        return y.ndim == 1 and y.dtype == torch.int64
    return y.ndim > 0


def _check_owners(where: str, dataset: Dataset) -> None:
    """Raise ConfigError where the owners of a data set do not fit its samples."""
    owners = dataset.owners
    count = len(dataset.names.owners)
    if owners is None:
        return
    for name, shard, lowest in (("pool", dataset.pool, 0), ("test", dataset.test, -1)):
        ids = getattr(owners, name)
        # The pool has no common samples: each sample to train on needs an owner, so -1 is for
        # tests.
        is_valid = ids.shape == (len(shard),) and ids.dtype == torch.int64
        if not is_valid or not (lowest <= ids.min() and ids.max() < count):
            raise ConfigError(
                f"{where} must name the owner of each sample of its {name}: int64, {lowest} to "
                f"{count - 1}"
            )
    mask = owners.validates
    if mask.shape != (len(dataset.pool),) or mask.dtype != torch.bool:
        raise ConfigError(f"{where} must mark the validation samples of its pool: bool, shape [n]")


def build_population(experiment: Experiment, seed: int, dataset: Dataset) -> Population:
    """Deal the samples out. `tuning` holds the test samples that a seed draws itself."""
    agents = experiment.agents
    if not dataset.class_names and (agents.split != "random" or agents.skew is not None):
        # A stratified split and a skew both count samples by class.
        key = "skew" if agents.split == "random" else "split"
        raise ConfigError(
            f"`agents.{key}` depends on classes, and the data have none: leave it out"
        )
    if dataset.owners is not None:
        return _population_of_owners(experiment, seed, dataset, dataset.owners)
    if dataset.groups is not None:
        raise ConfigError(
            "agents that share out a pool would divide its groups (`group`, `time`): name the owner"
            " of each sample (`owner`), such as its group"
        )

    # Samples that cannot be transformed raise here, before a run begins.
    view = build_view(experiment, dataset)
    for k in range(agents.num_clusters):
        view(dataset.pool.part(np.arange(1)), k)
    labels = dataset.labels(shared_pool(experiment, dataset))
    # The labels are those before the transform, so that all clusters deal out the same samples.
    benign_samples, malicious_samples = samples_per_agent(experiment)
    available = torch.arange(len(labels))
    test = None
    if experiment.evaluate_on == "redrawn":
        test = _draw_test_samples(labels, dataset, seed)
        # No agent may hold a sample that the seed is scored on.
        available = available[~torch.isin(available, test)]
    population = partition(
        labels[available],
        num_clusters=agents.num_clusters,
        benign=agents.benign_counts,
        malicious=agents.malicious_counts,
        benign_samples=benign_samples,
        malicious_samples=malicious_samples,
        validation=agents.validation,
        split=agents.split,
        skew=experiment.resolved.skew,
        hold_out=agents.hold_out,
        remove_malicious=agents.malicious_role == "removed",
        num_classes=dataset.num_classes,
        seed=seed,
        tuning_size=len(dataset.test),
    )
    if test is None:
        return population
    return dataclasses.replace(
        population,
        train=tuple(available[samples] for samples in population.train),
        validation=tuple(available[samples] for samples in population.validation),
        tuning=test,
    )


def build_view(experiment: Experiment, dataset: Dataset) -> ClusterView:
    """Return the view of each cluster on the samples; owners see theirs unchanged."""
    if dataset.owners is not None:
        return transforms.unchanged
    agents = experiment.agents
    transform = experiment.resolved.cluster_transform
    return ClusterTransform(
        transform, agents.num_clusters, dataset.num_classes, dataset.value_range
    )


def _population_of_owners(
    experiment: Experiment, seed: int, dataset: Dataset, owners: Owners
) -> Population:
    """Return the samples of agents that bring their own data."""
    agents = experiment.agents
    for key, value, allowed in (
        ("agents.num_clusters", agents.num_clusters, 1),
        ("agents.skew", agents.skew, None),
        ("agents.cluster_transform", agents.cluster_transform, None),
        ("evaluate_on", experiment.evaluate_on, "test"),
    ):
        if value != allowed:
            cure = f"set it to {allowed!r}" if allowed is not None else "leave it out"
            raise ConfigError(
                f"`{key}` is for agents that share out a pool, and these data have owners: {cure}"
            )
    return partition_by_owner(
        dataset,
        owners,
        benign=agents.num_benign,
        malicious=agents.num_malicious,
        benign_samples=agents.benign_samples,
        malicious_samples=agents.malicious_samples,
        validation=agents.validation,
        split=agents.split,
        hold_out=agents.hold_out,
        remove_malicious=agents.malicious_role == "removed",
        clusters=agents.owner_clusters,
        seed=seed,
    )


def samples_per_agent(experiment: Experiment) -> tuple[int, int]:
    """Return the pool samples of a benign agent, and of a malicious one."""
    benign = experiment.agents.benign_samples
    if benign is None:
        raise ConfigError(
            "the key `agents.benign_samples` is missing: the number of samples of the data set's "
            "pool that a benign agent holds (only data with owners need none)"
        )
    return benign, experiment.agents.malicious_samples or benign


def max_samples(experiment: Experiment, dataset: Dataset) -> int:
    """Return the largest number of samples that an agent may hold."""
    if dataset.owners is None:
        return max(samples_per_agent(experiment))
    largest = int(torch.bincount(dataset.owners.pool).max())
    limits = (experiment.agents.benign_samples, experiment.agents.malicious_samples)
    return max(min(largest, limit or largest) for limit in limits)


def _draw_test_samples(labels: Int[Tensor, " n"], dataset: Dataset, seed: int) -> Int[Tensor, " u"]:
    """Draw the test samples of a seed, with the class counts of the test set."""
    order = torch.from_numpy(stream(seed, "test").permutation(len(labels)))
    y = labels[order]
    counts = torch.bincount(dataset.labels(dataset.test), minlength=dataset.num_classes)
    return torch.cat([order[y == c][:count] for c, count in enumerate(counts.tolist())])


def dataset_tensors(dataset: Dataset) -> dict[str, Tensor]:
    """Return the tensors of a data set."""
    tensors = {
        "pool_x": dataset.pool.x,
        "pool_y": dataset.pool.y,
        "test_x": dataset.test.x,
        "test_y": dataset.test.y,
    }
    if dataset.owners is not None:
        for name in _OWNER_TENSORS:
            tensors[f"owner_{name}"] = getattr(dataset.owners, name)
    if dataset.groups is not None:
        tensors[_GROUP_TENSORS[dataset.groups.by_time]] = dataset.groups.pool
    return tensors


def dataset_digest(dataset: Dataset) -> str:
    """Return the CRC-32 of each tensor of a data set in hexadecimal digits, with hyphens."""
    return "-".join(f"{tensor_crc32(tensor):08x}" for tensor in dataset_tensors(dataset).values())


def dataset_from_tensors(names: DatasetNames, tensors: Mapping[str, Tensor]) -> Dataset:
    """Build a data set from its tensors, the inverse of `dataset_tensors`."""
    pool = Shard(tensors["pool_x"], tensors["pool_y"])
    test = Shard(tensors["test_x"], tensors["test_y"])
    owners = None
    if names.owners:
        owners = Owners(names.owners, *(tensors[f"owner_{name}"] for name in _OWNER_TENSORS))
    groups = None
    for by_time, name in enumerate(_GROUP_TENSORS):
        if name in tensors:
            groups = Groups(tensors[name], bool(by_time))
    return Dataset(pool, test, names.classes, owners, groups)
