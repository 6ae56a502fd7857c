"""The network of an experiment, checked on samples, and the initial models."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fedcb2o import plugins, pretrained
from fedcb2o.data import Dataset, DatasetNames, channels_last_hint
from fedcb2o.errors import ConfigError, describe_type
from fedcb2o.experiments.config.datasets import dataset_from_tensors
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.federated import part_checks
from fedcb2o.nn import architectures, batch_norm, memory_layout, parameters
from fedcb2o.nn.random_evaluation import seed_evaluation_
from fedcb2o.parallel import _resources
from fedcb2o.rng import stream


@torch.inference_mode(False)
def build_module(experiment: Experiment, seed: int, dataset: Dataset, *key: int) -> nn.Module:
    """Build a network, and check the functions that the first round calls.

    `key` continues the key of the random stream: the id of an agent with a model of its own.
    """
    resolved = experiment.resolved
    check_model_memory(experiment, dataset.pool.x.shape[1:], dataset.num_outputs)
    # A second network of a user from the same stream must be equal, or processes would differ.
    count = 1 if plugins.USER_FUNCTION.get(resolved.model) is None else 2
    networks = [_initialised_module(experiment, seed, dataset, key) for _ in range(count)]
    part_checks.check_model(
        resolved.model_name,
        networks,
        dataset.pool,
        seed,
        num_classes=dataset.num_classes,
        loss=resolved.loss,
        layout=experiment.layout,
        random_evaluation=experiment.model.random_evaluation,
    )
    part_checks.check_metrics(resolved.metrics, networks[0], dataset.test)
    part_checks.check_trigger(resolved.trigger, dataset.test, dataset.value_range)
    if resolved.optimiser is not None:
        lr = experiment.training.lambda2 * experiment.training.gamma
        part_checks.check_optimiser(resolved.optimiser, networks[0], lr)
    return networks[0]


def count_parameters(experiment: Experiment, shape: Sequence[int], num_outputs: int) -> int | None:
    """Return d without memory for it; None for a user's network or a language model."""
    name = experiment.model.name
    if name not in architectures.__all__ or name == architectures.language_model.__name__:
        return None
    make = experiment.resolved.model
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            module: nn.Module = make(list(shape), num_outputs)
    except (RuntimeError, OverflowError, TypeError, MemoryError) as error:
        raise ConfigError(f"the model `{name}` cannot be built: {error}") from error
    return sum(parameter.numel() for parameter in module.parameters())


def check_model_memory(
    experiment: Experiment, shape: Sequence[int], num_outputs: int, *, copies: int = 1
) -> None:
    """Raise ConfigError if a number of copies of the model need more than the free memory."""
    dim = count_parameters(experiment, shape, num_outputs)
    if dim is None:
        return
    needed = 4 * dim * copies
    free = _resources.free_memory()
    if needed > free:
        raise ConfigError(
            f"the model `{experiment.model.name}` has {dim:,} parameters and needs at least "
            f"{_resources.format_bytes(needed)}, of {_resources.format_bytes(free)} of free "
            "memory: take a smaller model"
        )


def _initialised_module(
    experiment: Experiment, seed: int, dataset: Dataset, key: tuple[int, ...]
) -> nn.Module:
    """Build the network with parameters from the random stream of the seed."""
    shape = list(dataset.pool.x.shape[1:])
    make = experiment.resolved.model
    name = experiment.resolved.model_name
    if isinstance(experiment.model.name, nn.Module):
        raise ConfigError(
            "`model.name` must be a function (input_shape, num_classes) that builds the network, "
            "and is a network: let the function build it, since each process has its own"
        )
    # Without the hint the network would be built with the height for the channels.
    hint = channels_last_hint(shape)
    if hint and name in ("cnn", "resnet"):
        raise ConfigError(f"the model `{name}` has convolutions: {hint}")

    def build() -> nn.Module:
        module = make(shape, dataset.num_outputs)
        if not isinstance(module, nn.Module):
            kind = describe_type(module)
            raise ConfigError(f"the model `{name}` returned {kind}, expected a torch.nn.Module")
        batch_norm.set_statistics_mode(module, experiment.model.buffers)
        if experiment.model.random_evaluation:
            seed_evaluation_(module, stream(seed, "evaluation"))
        return memory_layout.with_memory_format(module, experiment.layout or "contiguous")

    try:
        module = parameters.initialise(build, stream(seed, "model", *key))
    except (RuntimeError, OverflowError, MemoryError) as error:  # too large for this machine
        raise ConfigError(f"the model `{name}` cannot be built: {error}") from error
    parameters.dimension(module)
    return module


def frozen_bytes(experiment: Experiment) -> int:
    """Return the bytes of a language model's frozen base, which all processes share; else 0."""
    base = _base(experiment)
    return 0 if base is None else pretrained.base_bytes(base)


def frozen_checksum(experiment: Experiment) -> str:
    """Return the SHA-256 of a language model's frozen base; empty without a file."""
    base = _base(experiment)
    return "" if base is None else pretrained.base_checksum(base)


def _base(experiment: Experiment) -> str | None:
    """Return the name of a language model's base; None for other models."""
    if experiment.model.name != architectures.language_model.__name__:
        return None
    base: str = experiment.resolved.settings["model"]["base"]
    return base


def initial_model(
    experiment: Experiment, seed: int, dataset: Dataset, *key: int
) -> Float[Tensor, " d"]:
    """Return the initial model of a checked network; `key` is that of `build_module`."""
    return parameters.flatten(_initialised_module(experiment, seed, dataset, key))


def init_models_(
    theta: Float[Tensor, "a d"],
    experiment: Experiment,
    seed: int,
    dataset: Dataset,
    ids: Sequence[int],
) -> None:
    """Fill rows with the initial models theta_0^j of agents, and of clusters after them."""
    # One start for all keeps the differences between models those of their training.
    is_independent = experiment.agents.initialisation == "independent"
    num_agents = experiment.agents.num_agents
    clusters = experiment.resolved.algorithm.clusters
    theta[:] = initial_model(experiment, seed, dataset)
    for row, j in enumerate(ids):
        if j >= num_agents and clusters is not None and clusters.per_agent and not is_independent:
            # The k-th cluster model of every agent is the same at the start.
            j = num_agents + (j - num_agents) % clusters.num_models
        # Published models begin with the common one, which their receivers know.
        if is_independent or (j >= num_agents and clusters is not None):
            theta[row] = initial_model(experiment, seed, dataset, j)


def init_models_from_tensors_(
    experiment: Experiment,
    seed: int,
    names: DatasetNames,
    tensors: Mapping[str, Tensor],
    theta: Float[Tensor, "a d"],
    ids: Sequence[int],
) -> None:
    """Fill rows with initial models, as `init_models_` does, from the tensors of the data set."""
    init_models_(theta, experiment, seed, dataset_from_tensors(names, tensors), ids)
