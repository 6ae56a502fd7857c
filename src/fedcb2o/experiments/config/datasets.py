"""What data an experiment is about: the data set, whole and checked, and which of its samples each agent holds."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.data import sets, skews
from fedcb2o.data._dataset import Dataset, DatasetNames, Owners, Shard
from fedcb2o.data._partition import Population, partition, rotate
from fedcb2o.data.natural_partition import partition_by_owner
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.federated import attacks
from fedcb2o.federated.attacks import data_poisoning
from fedcb2o.federated.metrics import AttackGoal
from fedcb2o.rng import stream
from fedcb2o.simulation.checkpoint import tensor_crc32

_OWNER_TENSORS = ("pool", "test", "validates")
"""The tensors of `Owners`."""


def load_dataset(experiment: Experiment, data_dir: Path | None) -> Dataset:
    """The data set that an experiment names; raises ConfigError where its function returns something else."""
    function = experiment.data.bind("data set", sets)
    dataset = (
        function(data_dir=data_dir) if "data_dir" in plugins.parameters(function) else function()
    )
    name = plugins.label(experiment.data.name)
    if not isinstance(dataset, Dataset):
        raise ConfigError(
            f"the data set `{name}` returned a {type(dataset).__name__}, expected a fedcb2o.Dataset"
        )
    if not (
        isinstance(dataset.class_names, tuple)
        and all(isinstance(c, str) for c in dataset.class_names)
    ):
        raise ConfigError(
            f"the data set `{name}` has class names that are no tuple of words: {dataset.class_names!r}"
        )
    if len(dataset.class_names) == 1:
        raise ConfigError(f"the data set `{name}` has 1 class names: there must be two or more")
    if not dataset.class_names and experiment.training.loss is None:
        raise ConfigError(
            f"the data set `{name}` has numbers to be told and no classes: say by which loss, such as "
            '`training.loss` = "squared_error"'
        )
    pool, test = (
        validate_shard(
            f"the data set `{name}`, in its {part},",
            getattr(dataset, part),
            len(dataset.class_names),
        )
        for part in ("pool", "test")
    )
    dataset = Dataset(pool, test, dataset.class_names, dataset.owners)
    _check_owners(f"the data set `{name}`", dataset)
    if dataset.pool.x.shape[1:] != dataset.test.x.shape[1:]:
        shapes = tuple(dataset.pool.x.shape[1:]), tuple(dataset.test.x.shape[1:])
        raise ConfigError(
            f"the data set `{name}` has samples of shape {shapes[0]} in its pool and {shapes[1]} in its test"
        )
    check_attack_goal(experiment, dataset)
    return dataset


def check_attack_goal(experiment: Experiment, dataset: Dataset) -> None:
    """Raises ConfigError where an attack is after classes that a data set has not."""
    aim = attack_goal(experiment)
    for key, labels in (("source", aim.sources), ("target", aim.targets)):
        for label in labels:
            if not dataset.class_names:
                raise ConfigError(
                    f"`attack.{key}` = {label} is a class, and the data have none: take another attack"
                )
            if not 0 <= label < dataset.num_classes:
                raise ConfigError(
                    f"`attack.{key}` must be between 0 and {dataset.num_classes - 1}, got {label}"
                )


def shared_pool(experiment: Experiment, dataset: Dataset) -> Shard:
    """The samples that agents share out: the pool, with the test set where each seed draws its own from both."""
    pool = dataset.pool
    test = dataset.test
    if experiment.evaluate_on != "redrawn":
        return pool
    if pool.x.dtype != test.x.dtype:
        raise ConfigError(
            f'`evaluate_on` = "redrawn" mixes the data set\'s pool with its test set, and they are {pool.x.dtype} and '
            f'{test.x.dtype}: make them one, or set `evaluate_on` to "test"'
        )
    return Shard(torch.cat([pool.x, test.x]), torch.cat([pool.y, test.y]))


def validate_shard(where: str, shard: Shard, num_classes: int) -> Shard:
    """A part of a data set, without a gradient's history; raises ConfigError for what is no samples."""
    if not isinstance(shard, Shard):
        raise ConfigError(f"{where} is a {type(shard).__name__}, expected a fedcb2o.Shard")
    x = shard.x
    y = shard.y
    dense = [
        isinstance(each, Tensor) and each.layout is torch.strided and each.device.type == "cpu"
        for each in (x, y)
    ]
    labelled = all(dense) and (
        y.ndim == 1 and y.dtype == torch.int64 if num_classes else y.ndim > 0
    )
    if not (labelled and x.ndim):
        told = (
            "its labels of type int64 and shape [n]" if num_classes else "with a sample in each row"
        )
        raise ConfigError(f"{where} must hold dense tensors on the CPU, {told}")
    if len(x) != len(y) or not len(y):
        raise ConfigError(f"{where} holds {len(x)} samples and {len(y)} labels")
    if not num_classes and y.is_floating_point() and not y.isfinite().all():
        raise ConfigError(f"{where} has numbers to be told that are not finite")
    if num_classes and (y.min() < 0 or y.max() >= num_classes):
        raise ConfigError(
            f"{where} has labels outside 0 to {num_classes - 1}: {int(y.min())} to {int(y.max())}"
        )
    if not (x.dtype == torch.uint8 or (x.is_floating_point() and x.isfinite().all())):
        raise ConfigError(
            f"{where} must hold samples of pixels (uint8) or finite floating-point features"
        )
    return Shard(x.detach(), y.detach())


def _check_owners(where: str, dataset: Dataset) -> None:
    """Raises ConfigError where the owners of a data set do not fit its samples."""
    owners = dataset.owners
    count = len(dataset.names.owners)
    if owners is None:
        return
    for name, part, least in (("pool", dataset.pool, 0), ("test", dataset.test, -1)):
        of = getattr(owners, name)
        if (
            of.shape != (len(part),)
            or of.dtype != torch.int64
            or not (least <= of.min() and of.max() < count)
        ):
            raise ConfigError(
                f"{where} must say of each sample of its {name} whose it is: int64, {least} to {count - 1}"
            )
    if owners.validates.shape != (len(dataset.pool),) or owners.validates.dtype != torch.bool:
        raise ConfigError(f"{where} must say of each sample of its pool whether it validates")


def attack_goal(experiment: Experiment) -> AttackGoal:
    """What the attack on data is after, by its parameters: `source` and `target`, or `pairs` of them; or nothing."""
    poison = None if experiment.attack is None else experiment.attack.data_attack
    given = {} if poison is None else poison.with_defaults("attack", attacks)
    pairs = given.get("pairs") or [(given.get("source"), given.get("target"))]
    sources, targets = (
        [label for label in side if isinstance(label, int)] for side in zip(*pairs, strict=True)
    )
    return AttackGoal(tuple(sources), tuple(targets))


def backdoor_trigger(experiment: Experiment) -> Callable[[Tensor], Tensor] | None:
    """What marks the test samples of a backdoor, with those of the attack's parameters that it has."""
    if experiment.attack is None or experiment.attack.data_attack is None:
        return None
    backdoor = experiment.attack.data_attack.bind("attack", attacks)
    trigger = data_poisoning.TRIGGER.get(backdoor)
    chosen = backdoor.keywords
    if trigger is None:
        return None
    trigger = (
        plugins.resolve("trigger", trigger, attacks)
        if plugins.USER_FUNCTION.get(backdoor)
        else trigger
    )
    return functools.partial(
        trigger, **{key: chosen[key] for key in plugins.parameters(trigger) if key in chosen}
    )


def build_population(experiment: Experiment, seed: int, dataset: Dataset) -> Population:
    """Who holds which samples; where a seed draws its own test samples, `tuning` are these."""
    agents = experiment.agents
    owners = dataset.owners
    if not dataset.class_names and (agents.split != "random" or agents.skew is not None):
        key = "skew" if agents.split == "random" else "split"
        raise ConfigError(f"`agents.{key}` goes by classes, and the data have none: leave it out")
    if owners is not None:
        for key, value, only in (
            ("agents.num_clusters", agents.num_clusters, 1),
            ("agents.skew", agents.skew, None),
            ("evaluate_on", experiment.evaluate_on, "test"),
        ):
            if value != only:
                cure = "leave it out" if only is None else f"set it to {only!r}"
                raise ConfigError(
                    f"`{key}` is for agents that share out a pool, and these data have owners: {cure}"
                )
        return partition_by_owner(
            dataset,
            owners,
            benign=agents.benign,
            malicious=agents.malicious,
            benign_samples=agents.benign_samples,
            malicious_samples=agents.malicious_samples,
            validation=agents.validation,
            split=agents.split,
            hold_out=agents.hold_out,
            remove_malicious=agents.malicious_role == "removed",
            seed=seed,
        )
    rotate(
        dataset.pool.x[:1], 0, agents.num_clusters
    )  # raises here, before a run begins, where samples cannot turn
    labels = dataset.labels(shared_pool(experiment, dataset))
    benign_samples, malicious_samples = samples_per_agent(experiment)
    given = torch.arange(len(labels))
    held = None
    if experiment.evaluate_on == "redrawn":
        held = _draw_test_samples(labels, dataset, seed)
        given = given[~torch.isin(given, held)]
    population = partition(
        labels[given],
        num_clusters=agents.num_clusters,
        benign=agents.benign,
        malicious=agents.malicious,
        benign_samples=benign_samples,
        malicious_samples=malicious_samples,
        validation=agents.validation,
        split=agents.split,
        skew=None if agents.skew is None else agents.skew.bind("skew", skews),
        hold_out=agents.hold_out,
        remove_malicious=agents.malicious_role == "removed",
        num_classes=dataset.num_classes,
        seed=seed,
        tuning_size=len(dataset.test),
    )
    train, validation = (
        tuple(given[each] for each in parts) for parts in (population.train, population.validation)
    )
    held = given[population.tuning] if held is None else held
    return dataclasses.replace(population, train=train, validation=validation, tuning=held)


def samples_per_agent(experiment: Experiment) -> tuple[int, int]:
    """How many samples of a pool a benign agent holds, and a malicious one; raises ConfigError where that is not
    said."""
    benign = experiment.agents.benign_samples
    malicious = experiment.agents.malicious_samples
    if benign is None or (malicious is None and experiment.agents.malicious):
        key = "benign" if benign is None else "malicious"
        raise ConfigError(
            f"the key `agents.{key}_samples` is missing: how many samples of the data set's pool such an agent holds "
            "(only data with owners go without)"
        )
    return benign, 1 if malicious is None else malicious


def max_samples(experiment: Experiment, dataset: Dataset) -> int:
    """The largest number of samples that any agent may hold."""
    if dataset.owners is None:
        return max(samples_per_agent(experiment))
    most = int(torch.bincount(dataset.owners.pool).max())
    return max(
        min(most, cap or most)
        for cap in (experiment.agents.benign_samples, experiment.agents.malicious_samples)
    )


def _draw_test_samples(labels: Int[Tensor, " n"], dataset: Dataset, seed: int) -> Int[Tensor, " u"]:
    """Which samples are a seed's test samples, of each class as many as the test set has."""
    order = torch.from_numpy(stream(seed, "test").permutation(len(labels)))
    y = labels[order]
    counts = torch.bincount(dataset.labels(dataset.test), minlength=dataset.num_classes)
    return torch.cat([order[y == c][:count] for c, count in enumerate(counts.tolist())])


def dataset_tensors(dataset: Dataset) -> dict[str, Tensor]:
    """The tensors of a data set by name."""
    pool = dataset.pool
    test = dataset.test
    owners = dataset.owners
    tensors = {"pool_x": pool.x, "pool_y": pool.y, "test_x": test.x, "test_y": test.y}
    whose = {} if owners is None else {name: getattr(owners, name) for name in _OWNER_TENSORS}
    return tensors | {f"owner_{name}": tensor for name, tensor in whose.items()}


def dataset_digest(dataset: Dataset) -> str:
    """What a data set's content adds up to."""
    return "-".join(f"{tensor_crc32(tensor):08x}" for tensor in dataset_tensors(dataset).values())


def dataset_from_tensors(names: DatasetNames, tensors: Mapping[str, Tensor]) -> Dataset:
    """The data set of these names and tensors by name."""
    pool = Shard(tensors["pool_x"], tensors["pool_y"])
    test = Shard(tensors["test_x"], tensors["test_y"])
    owners = (
        Owners(names.owners, *(tensors[f"owner_{name}"] for name in _OWNER_TENSORS))
        if names.owners
        else None
    )
    return Dataset(pool, test, names.classes, owners)
