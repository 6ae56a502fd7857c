"""The network of an experiment, checked on samples, and the initial models.

>>> from fedcb2o.experiments.config import build_module, load, load_dataset
>>> experiment = load("digits-fedcb2o")
>>> build_module(experiment, 0, load_dataset(experiment, None))(torch.zeros(2, 1, 8, 8)).shape
torch.Size([2, 10])
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fedcb2o import plugins
from fedcb2o.data import Dataset, DatasetNames, features
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config.build import build_algorithm
from fedcb2o.experiments.config.datasets import dataset_from_tensors
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.federated import inference, losses
from fedcb2o.nn import architectures, batch_norm, memory_layout, parameters
from fedcb2o.rng import stream


def build_module(experiment: Experiment, seed: int, dataset: Dataset, *key: int) -> nn.Module:
    """Build a freshly initialised network and check it on two samples.

    Args:
        experiment: The experiment.
        seed: The seed of the parameters.
        dataset: The data set.
        *key: Further key of the random stream: the id of an agent with a model of its own.

    Returns:
        The network.

    Raises:
        ConfigError: If the network cannot be built or does not fit the data.
    """
    module = _initialised_module(experiment, seed, dataset, key)
    outputs = _evaluate_on_samples(experiment, module, dataset)

    name = plugins.label(experiment.model.name)
    with plugins.attribute_errors("model", name):
        buffer = batch_norm.find_changed_buffer(module, features(dataset.pool.x[:2].clone()))
    if buffer:
        raise ConfigError(
            f"the model `{name}` changes its buffer `{buffer}` in training, which is neither a "
            "parameter nor the statistics of a norm, so that agents cannot exchange it: make it "
            "one of these, or leave it unchanged"
        )
    _check_output_shape(name, outputs, dataset)
    _check_loss(experiment, outputs, dataset.pool.y[:2])
    return module


def _initialised_module(
    experiment: Experiment, seed: int, dataset: Dataset, key: tuple[int, ...]
) -> nn.Module:
    """Build the network with parameters from the random stream of the seed."""
    shape = list(dataset.pool.x.shape[1:])
    name = plugins.label(experiment.model.name)
    if isinstance(experiment.model.name, nn.Module):
        raise ConfigError(
            "`model.name` must be a function (input_shape, num_classes) that builds the network, "
            "and is a network: let the function build it, since each process has its own"
        )
    make = experiment.model.bind("model", architectures)

    def build() -> nn.Module:
        module = make(shape, dataset.num_outputs)
        if not isinstance(module, nn.Module):
            kind = type(module).__name__
            raise ConfigError(f"the model `{name}` returned a {kind}, expected a torch.nn.Module")
        batch_norm.set_statistics_mode(module, experiment.model.buffers)
        return memory_layout.with_memory_format(module, experiment.layout or "contiguous")

    try:
        module = parameters.initialise(build, stream(seed, "model", *key))
    except (RuntimeError, MemoryError) as error:  # too large for this machine
        raise ConfigError(f"the model `{name}` cannot be built: {error}") from error
    parameters.dimension(module)
    return module


def _evaluate_on_samples(experiment: Experiment, module: nn.Module, dataset: Dataset) -> Any:
    """Return the outputs for two samples. Raise ConfigError if the network fails or writes."""
    name = plugins.label(experiment.model.name)
    x = dataset.pool.x[:2].clone()
    theta = parameters.flatten(module)
    original = x.clone()
    try:
        with torch.no_grad():
            outputs = module.eval()(features(x))
    except (Exception, SystemExit) as error:  # a user's network may fail in any way
        layout = ' with `layout` = "channels_last"' if experiment.layout == "channels_last" else ""
        shape = tuple(dataset.pool.x.shape[1:])
        raise ConfigError(
            f"the model `{name}` cannot read samples of shape {shape}{layout}: {error}"
        ) from error
    if not (torch.equal(x, original) and torch.equal(parameters.flatten(module), theta)):
        raise ConfigError(
            f"the model `{name}` writes into the samples that it reads, or into its parameters, in "
            "evaluation, where other code reads them after it: let it compute new tensors (no "
            "`inplace=True` in its first layer)"
        )
    return outputs


def _check_output_shape(name: str, outputs: Any, dataset: Dataset) -> None:
    """Raise ConfigError unless there is one row of outputs per sample, one column per class."""
    got: Any = type(outputs).__name__
    shape: tuple[int, ...] = ()
    if isinstance(outputs, Tensor):
        got = shape = tuple(outputs.shape)
    num_samples = len(dataset.pool.x[:2])
    if dataset.class_names:
        expected = f"{(num_samples, dataset.num_classes)}"
        is_valid = shape == (num_samples, dataset.num_classes)
    else:  # without classes the loss restricts the outputs
        expected = f"({num_samples}, ...)"
        is_valid = shape[:1] == (num_samples,)
    if not is_valid:
        raise ConfigError(
            f"the model `{name}` returned {got} for {num_samples} samples, expected shape "
            f"{expected}"
        )


def build_loss(experiment: Experiment) -> losses.Loss | None:
    """Return the loss, or None for the cross-entropy.

    Args:
        experiment: Experiment with the key `training.loss`, or without it.

    Returns:
        The loss function with its parameters bound.

    Raises:
        ConfigError: There is no such loss, or it does not take the parameters.
    """
    loss = experiment.training.loss
    if loss is None:
        return None
    return loss.bind("loss", losses)


def _check_loss(experiment: Experiment, outputs: Tensor, y: Tensor) -> None:
    """Raise ConfigError where the loss cannot compare outputs with targets."""
    section = experiment.training.loss
    loss = build_loss(experiment)
    if section is None or loss is None:
        return
    try:
        inference.per_sample_losses(loss, outputs, y, 1)
    except (RuntimeError, IndexError, ValueError) as error:
        raise ConfigError(
            f"the loss `{plugins.label(section.name)}` cannot compare outputs of shape "
            f"{tuple(outputs.shape)} and type {outputs.dtype} with targets of shape "
            f"{tuple(y.shape)} and type {y.dtype}: {error}"
        ) from error


def init_models_(
    theta: Float[Tensor, "a d"],
    experiment: Experiment,
    seed: int,
    dataset: Dataset,
    ids: Sequence[int],
) -> None:
    """Fill rows with the initial models theta_0^j of agents and clusters.

    All agents have one model, or one each with `agents.initialisation` = "independent". The ids of
    clusters follow those of the agents. Clusters have different models. Where each agent has the
    models of all clusters and the initialisation is common, all agents start with the same ones.

    Args:
        theta: Rows to fill, shape [a, d].
        experiment: The experiment.
        seed: The seed.
        dataset: The data set.
        ids: The id of each row.
    """
    is_independent = experiment.agents.initialisation == "independent"
    num_agents = experiment.agents.num_agents
    clusters = build_algorithm(experiment).clusters
    theta[:] = parameters.flatten(build_module(experiment, seed, dataset))
    for row, j in enumerate(ids):
        if j >= num_agents and clusters is not None and clusters.per_agent and not is_independent:
            j = num_agents + (j - num_agents) % clusters.num_models
        if is_independent or j >= num_agents:
            theta[row] = parameters.flatten(build_module(experiment, seed, dataset, j))


def init_models_from_tensors_(
    experiment: Experiment,
    seed: int,
    names: DatasetNames,
    tensors: Mapping[str, Tensor],
    theta: Float[Tensor, "a d"],
    ids: Sequence[int],
) -> None:
    """Fill rows with initial models, as `init_models_` does, from the tensors of the data set.

    Args:
        experiment: The experiment.
        seed: The seed.
        names: Names of classes and owners.
        tensors: The tensors of the data set.
        theta: Rows to fill, shape [a, d].
        ids: The id of each row.
    """
    init_models_(theta, experiment, seed, dataset_from_tensors(names, tensors), ids)
