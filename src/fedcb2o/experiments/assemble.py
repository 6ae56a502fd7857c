"""From an experiment and a data set to the setting that its rounds run in."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from fedcb2o import data, models, plugins
from fedcb2o.data import skews
from fedcb2o.data.partition import Population, partition, rotate
from fedcb2o.data.shard import Dataset, Shard, features
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config import Experiment
from fedcb2o.federated import algorithms, attacks, graphs
from fedcb2o.federated.local_update import Training
from fedcb2o.federated.metrics import Aim
from fedcb2o.runtime.world import Setting, World
from fedcb2o.streams import stream


def dataset_of(experiment: Experiment, data_dir: Path | None) -> Dataset:
    """The data set that an experiment names; raises ConfigError where its function returns something else."""
    function = experiment.data.function("data set", data)
    dataset = function(data_dir=data_dir) if "data_dir" in plugins.parameters(function) else function()
    name = plugins.label(experiment.data.name)
    if not isinstance(dataset, Dataset):
        raise ConfigError(f"the data set `{name}` returned a {type(dataset).__name__}, expected a fedcb2o.Dataset")
    if not (isinstance(dataset.class_names, tuple) and all(isinstance(c, str) for c in dataset.class_names)):
        raise ConfigError(f"the data set `{name}` has class names that are no tuple of words: {dataset.class_names!r}")
    for part, shard in (("pool", dataset.pool), ("test", dataset.test)):
        _check_shard(f"the data set `{name}`, in its {part},", shard, dataset.num_classes)
    if dataset.pool.x.shape[1:] != dataset.test.x.shape[1:]:
        shapes = tuple(dataset.pool.x.shape[1:]), tuple(dataset.test.x.shape[1:])
        raise ConfigError(
            f"the data set `{name}` has samples of shape {shapes[0]} in its pool and {shapes[1]} in its test"
        )
    aim = aim_of(experiment)
    for key, labels in (("source", aim.sources), ("target", aim.targets)):
        for label in labels:
            if not 0 <= label < dataset.num_classes:
                raise ConfigError(f"`attack.{key}` must be between 0 and {dataset.num_classes - 1}, got {label}")
    return dataset


def _check_shard(where: str, shard: Shard, num_classes: int) -> None:
    if not isinstance(shard, Shard):
        raise ConfigError(f"{where} is a {type(shard).__name__}, expected a fedcb2o.Shard")
    x, y = shard.x, shard.y
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and y.ndim == 1 and y.dtype == torch.int64):
        raise ConfigError(f"{where} must hold tensors, its labels of type int64 and shape [n]")
    if len(x) != len(y) or not len(y):
        raise ConfigError(f"{where} holds {len(x)} samples and {len(y)} labels")
    if y.min() < 0 or y.max() >= num_classes:
        raise ConfigError(f"{where} has labels outside 0 to {num_classes - 1}: {int(y.min())} to {int(y.max())}")
    if not (x.dtype == torch.uint8 or (x.is_floating_point() and x.isfinite().all())):
        raise ConfigError(f"{where} must hold samples of pixels (uint8) or finite floating-point features")


def aim_of(experiment: Experiment) -> Aim:
    """What the attack on data is after, by its parameters: `source` and `target`, or `pairs` of them; or nothing."""
    poison = None if experiment.attack is None else experiment.attack.poison
    given = {} if poison is None else poison.resolved("attack", attacks)
    pairs = given.get("pairs") or [(given.get("source"), given.get("target"))]
    sources, targets = ([label for label in side if isinstance(label, int)] for side in zip(*pairs, strict=True))
    return Aim(tuple(sources), tuple(targets))


def trigger_of(experiment: Experiment) -> Callable[[Tensor], Tensor] | None:
    """What marks the test samples of a backdoor, with those of the attack's parameters that it has."""
    if experiment.attack is None or experiment.attack.poison is None:
        return None
    backdoor = experiment.attack.poison.function("attack", attacks)
    trigger, chosen = plugins.declared(backdoor, "trigger"), backdoor.keywords
    if trigger is None:
        return None
    return functools.partial(trigger, **{key: chosen[key] for key in plugins.parameters(trigger) if key in chosen})


def population_of(experiment: Experiment, seed: int, dataset: Dataset) -> Population:
    """Who holds which samples."""
    agents = experiment.agents
    rotate(dataset.pool.x[:1], 0, agents.num_clusters)  # raises here, before a run begins, where samples cannot turn
    return partition(
        dataset.pool.y,
        num_clusters=agents.num_clusters,
        benign=agents.benign,
        malicious=agents.malicious,
        benign_samples=agents.benign_samples,
        malicious_samples=agents.malicious_samples,
        validation=agents.validation,
        split=agents.split,
        skew=None if agents.skew is None else agents.skew.function("skew", skews),
        hold_out=agents.hold_out,
        remove_malicious=agents.malicious_role == "removed",
        num_classes=dataset.num_classes,
        seed=seed,
        tuning_size=len(dataset.test),
    )


def neighbours_of(experiment: Experiment, seed: int, population: Population) -> tuple[Tensor, ...] | None:
    """Whom each agent may ask, where not everybody."""
    if experiment.agents.graph is None:
        return None
    graph = experiment.agents.graph.function("graph", graphs)
    return graphs.neighbours(graph, population.cluster, stream(seed, "graph"))


def module_of(experiment: Experiment, seed: int, dataset: Dataset, *key: int) -> nn.Module:
    """A freshly initialised network for the data; raises ConfigError where it does not fit them."""
    shape, name = list(dataset.pool.x.shape[1:]), plugins.label(experiment.model.name)
    make = experiment.model.function("model", models)

    def made() -> nn.Module:
        module = make(shape, dataset.num_classes)
        if not isinstance(module, nn.Module):
            raise ConfigError(f"the model `{name}` returned a {type(module).__name__}, expected a torch.nn.Module")
        return nn.Sequential(models.ChannelsLast(), module) if experiment.layout == "channels_last" else module

    try:
        module = models.initialise(made, stream(seed, "model", *key))
    except (RuntimeError, MemoryError) as error:  # too large for this machine
        raise ConfigError(f"the model `{name}` cannot be made: {error}") from error
    models.dimension(module)
    try:
        with torch.no_grad():
            outputs = module.eval()(features(dataset.pool.x[:2]))
    except Exception as error:  # a user's network may fail in any way
        laid = ' with `layout` = "channels_last"' if experiment.layout == "channels_last" else ""
        raise ConfigError(f"the model `{name}` cannot read samples of shape {tuple(shape)}{laid}: {error}") from error
    expected = (len(dataset.pool.x[:2]), dataset.num_classes)
    if not isinstance(outputs, Tensor) or outputs.shape != expected:
        got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ConfigError(f"the model `{name}` returned {got} for {expected[0]} samples, expected shape {expected}")
    return module


def initial_models_(theta: Tensor, experiment: Experiment, seed: int, dataset: Dataset) -> None:
    """Fill the rows of `theta` with the initial models theta_0^j: one for all agents, or each its own. Those that a
    coordinator holds, after the agents', always differ."""
    theta[:] = models.flatten(module_of(experiment, seed, dataset))
    independent = experiment.agents.initialisation == "independent"
    for j in range(0 if independent else experiment.agents.num_agents, len(theta)):
        theta[j] = models.flatten(module_of(experiment, seed, dataset, j))


def setting_of(experiment: Experiment, seed: int, dataset: Dataset) -> Setting:
    """The setting of one seed's rounds."""
    agents, population = experiment.agents, population_of(experiment, seed, dataset)
    algorithm = experiment.algorithm.function("algorithm", algorithms)()
    pool = dataset.pool
    tuning = Shard(pool.x[population.tuning], pool.y[population.tuning])
    if experiment.evaluate_on == "tuning" and not len(tuning):
        raise ConfigError('`evaluate_on` = "tuning" needs pool samples that no agent holds, and there is none')
    test = dataset.test if experiment.evaluate_on == "test" else tuning
    for source in aim_of(experiment).sources:
        if not torch.eq(test.y, source).any():
            raise ConfigError(
                f"the {experiment.evaluate_on} samples hold none of class {source} (`attack.source`), so that no "
                "attack can be measured: take another class, or more samples"
            )
    return Setting(
        seed=seed,
        dataset=dataset,
        test=test,
        population=population,
        model=plugins.label(experiment.model.name),
        module=module_of(experiment, seed, dataset),
        training=Training(**experiment.training.model_dump()),
        algorithm=algorithm,
        attack=experiment.attack_made,
        trigger=trigger_of(experiment),
        colluding=agents.malicious_role in ("attack", "clean") and not algorithm.models,
        colluders_own_model=agents.colluders_own_model,
        budget=agents.budget,
        participation=agents.participation,
        average=agents.validation_loss,
        rounds=experiment.rounds,
        share=agents.share,
        neighbours=neighbours_of(experiment, seed, population),
        linear=experiment.linear or "torch",
        convolution=experiment.convolution or "grouped",
        together=experiment.together,
    )


def specs_of(dataset: Dataset, num_models: int, dim: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors that the processes of a run share: the models, in rows of whole cache lines, and the data."""
    tensors = {name: (t.dtype, tuple(t.shape)) for name, t in shared_data(dataset).items()}
    return {"models": (torch.float32, (num_models, models.row_stride(dim))), **tensors}


def shared_data(dataset: Dataset) -> dict[str, Tensor]:
    """The tensors of a data set by name."""
    pool, test = dataset.pool, dataset.test
    return {"pool_x": pool.x, "pool_y": pool.y, "test_x": test.x, "test_y": test.y}


def world_of(
    experiment: Experiment, seed: int, class_names: tuple[str, ...], dim: int, tensors: dict[str, Tensor]
) -> World:
    """The world of one seed, from the tensors that its processes share. Where the models lie on another device than the
    CPU, so do the samples."""
    pool, test = Shard(tensors["pool_x"], tensors["pool_y"]), Shard(tensors["test_x"], tensors["test_y"])
    setting = setting_of(experiment, seed, Dataset(pool, test, class_names))
    device = tensors["models"].device
    if device.type != "cpu":
        setting = dataclasses.replace(setting, dataset=setting.dataset.to(device), test=setting.test.to(device))
    return World(setting, tensors["models"][:, :dim])
