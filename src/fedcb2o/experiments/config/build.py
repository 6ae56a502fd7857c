"""From an experiment and a data set to the block that its rounds work on."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fedcb2o import plugins
from fedcb2o.data._dataset import Dataset, DatasetNames, Shard, features
from fedcb2o.data._partition import Population
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config.datasets import (
    attack_goal,
    backdoor_trigger,
    build_population,
    dataset_from_tensors,
    dataset_tensors,
    max_samples,
    shared_pool,
)
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.federated import algorithms, losses, optimisers, topology
from fedcb2o.federated.adversary import Adversary
from fedcb2o.federated.agent_data import AgentData
from fedcb2o.federated.agent_group import AgentGroup, BufferLayout
from fedcb2o.federated.local_update import Precision, Training
from fedcb2o.federated.plugin_outputs import apply_sample_transform
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.run_spec import ConvolutionKernel, KernelConfig, LinearKernel, RunSpec
from fedcb2o.kernels import devices
from fedcb2o.nn import architectures, batch_norm, memory_layout, parameters
from fedcb2o.rng import stream


def build_neighbours(
    experiment: Experiment, seed: int, cluster: Int[Tensor, " N"]
) -> tuple[Tensor, ...] | None:
    """Whom each agent may ask, where not everybody."""
    if experiment.agents.graph is None:
        return None
    graph = experiment.agents.graph.bind("graph", topology)
    return topology.neighbours(graph, cluster, stream(seed, "graph"))


def build_algorithm(experiment: Experiment) -> algorithms.Algorithm:
    """The algorithm that an experiment names. What a user's own makes of its parts fails under its name."""
    make = experiment.algorithm.bind("algorithm", algorithms)
    algorithm: algorithms.Algorithm = make()
    if (name := plugins.USER_FUNCTION.get(make)) is None:
        return algorithm
    select, weigh = (
        plugins.wrap_user_function("algorithm", name, each)
        for each in (algorithm.select, algorithm.rule)
    )
    return dataclasses.replace(algorithm, select=select, rule=weigh)


_MODEL_READING_KEYS = {"criterion": "criterion", "rule": "rule", "pre_step": "pre-step"}
"""The parts of an algorithm that are shown models, by their keys in a configuration."""


def user_functions(experiment: Experiment) -> dict[str, list[str]]:
    """The users' functions that an experiment names, of those that are shown models, by kind."""
    settings = experiment.settings()
    found: dict[str, list[str]] = {}

    def look(kind: str, part: Any) -> None:
        if isinstance(part, str):
            if ":" in part and part not in found.setdefault(kind, []):
                found[kind].append(part)
        elif isinstance(part, Mapping):
            look(kind, part.get("name"))
            for key, value in part.items():
                if key in _MODEL_READING_KEYS or key == "of":  # "of": the parts of a combination
                    look(_MODEL_READING_KEYS.get(key, kind), value)
        elif isinstance(part, Sequence):
            for each in part:
                look(kind, each)

    for kind in ("attack", "algorithm", "model"):
        look(kind, settings.get(kind))
    return found


def imported_names(experiment: Experiment) -> list[str]:
    """All that an experiment names as "module:function", and what merely looks so, such as the device "cuda:1"."""

    def names(part: Any) -> Iterator[str]:
        if isinstance(part, str):
            yield from [part] if ":" in part else []
        elif isinstance(part, Mapping | Sequence):
            for each in part.values() if isinstance(part, Mapping) else part:
                yield from names(each)

    return sorted(set(names(experiment.settings())))


def build_module(experiment: Experiment, seed: int, dataset: Dataset, *key: int) -> nn.Module:
    """A freshly initialised network for the data; raises ConfigError where it does not fit them."""
    shape = list(dataset.pool.x.shape[1:])
    name = plugins.label(experiment.model.name)
    if isinstance(experiment.model.name, nn.Module):
        raise ConfigError(
            "`model.name` must be a function (input_shape, num_classes) that makes the network, and is a network: "
            "let the function make it, since each process has its own"
        )
    make = experiment.model.bind("model", architectures)

    def made() -> nn.Module:
        module = make(shape, dataset.num_outputs)
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"the model `{name}` returned a {type(module).__name__}, expected a torch.nn.Module"
            )
        batch_norm.set_statistics_mode(module, experiment.model.buffers)
        return memory_layout.with_memory_format(module, experiment.layout or "contiguous")

    try:
        module = parameters.initialise(made, stream(seed, "model", *key))
    except (RuntimeError, MemoryError) as error:  # too large for this machine
        raise ConfigError(f"the model `{name}` cannot be made: {error}") from error
    parameters.dimension(module)
    x = dataset.pool.x[:2].clone()
    before = parameters.flatten(module), x.clone()
    try:
        with torch.no_grad():
            outputs = module.eval()(features(x))
    except (Exception, SystemExit) as error:  # a user's network may fail in any way
        laid = ' with `layout` = "channels_last"' if experiment.layout == "channels_last" else ""
        raise ConfigError(
            f"the model `{name}` cannot read samples of shape {tuple(shape)}{laid}: {error}"
        ) from error
    if not (torch.equal(x, before[1]) and torch.equal(parameters.flatten(module), before[0])):
        raise ConfigError(
            f"the model `{name}` writes into the samples that it reads, or into its parameters, when it is evaluated, "
            "where others look at them after it: let it compute new ones (no `inplace=True` in its first layer)"
        )
    with plugins.attribute_errors("model", name):
        state = batch_norm.find_changed_buffer(module, features(x))
    if state:
        raise ConfigError(
            f"the model `{name}` changes its buffer `{state}` while it trains, which is neither a parameter nor the "
            "statistics of a norm, so that agents could not exchange it: make it one of these, or leave it as it is"
        )
    axes = 2 if dataset.class_names else 1  # without classes the loss says what an output may be
    expected = (len(x), dataset.num_classes)[:axes]
    found = tuple(outputs.shape) if isinstance(outputs, Tensor) else ()
    if found[:axes] != expected or (dataset.class_names and len(found) != axes):
        got = found if isinstance(outputs, Tensor) else type(outputs).__name__
        told = f"{expected}" if dataset.class_names else f"({len(x)}, ...)"
        raise ConfigError(
            f"the model `{name}` returned {got} for {expected[0]} samples, expected shape {told}"
        )
    _check_loss(experiment, outputs, dataset.pool.y[:2])
    return module


def _build_loss(experiment: Experiment) -> losses.Loss | None:
    """The loss that an experiment names, if it is not the plain cross-entropy."""
    loss = experiment.training.loss
    return None if loss is None else loss.bind("loss", losses)


def _check_loss(experiment: Experiment, outputs: Tensor, y: Tensor) -> None:
    """Raises ConfigError where the loss cannot compare what a network says of samples with what is so."""
    part = experiment.training.loss
    loss = _build_loss(experiment)
    if part is None or loss is None:
        return
    try:
        losses.per_sample_losses(loss, outputs, y, 1)
    except (RuntimeError, IndexError, ValueError) as error:
        raise ConfigError(
            f"the loss `{plugins.label(part.name)}` cannot compare outputs of shape {tuple(outputs.shape)} and type "
            f"{outputs.dtype} with targets of shape {tuple(y.shape)} and type {y.dtype}: {error}"
        ) from error


def init_models_(
    theta: Float[Tensor, "a d"],
    experiment: Experiment,
    seed: int,
    dataset: Dataset,
    ids: Sequence[int],
) -> None:
    """Fill the rows of `theta` with the initial models theta_0^j of some agents: one for all agents, or each its own.
    Those of clusters, whose ids follow the agents', differ, but where each agent has them and all begin alike."""
    independent = experiment.agents.initialisation == "independent"
    first = experiment.agents.num_agents
    clusters = build_algorithm(experiment).clusters
    theta[:] = parameters.flatten(build_module(experiment, seed, dataset))
    for row, j in enumerate(ids):
        if j >= first and clusters is not None and clusters.per_agent and not independent:
            j = first + (j - first) % clusters.num_models
        if independent or j >= first:
            theta[row] = parameters.flatten(build_module(experiment, seed, dataset, j))


@dataclass(frozen=True)
class PreparedSeed:
    """One seed of an experiment, made once: the terms of its rounds, and who holds what of its data set."""

    experiment: Experiment
    seed: int
    dataset: Dataset
    population: Population
    spec: RunSpec
    adversary: Adversary

    @property
    def num_persistent_rows(self) -> int:
        """The rows of a pool that outlive a round: of the agents' models, then of those of clusters."""
        clusters = self.spec.algorithm.clusters
        agents = self.spec.num_agents
        return agents + (0 if clusters is None else clusters.num_rows(agents))

    def scored_samples(self) -> Shard:
        """The samples that agents are scored on."""
        if self.experiment.evaluate_on == "test":
            return self.dataset.test
        pool = shared_pool(self.experiment, self.dataset)
        chosen = self.population.tuning
        return Shard(pool.x[chosen], pool.y[chosen])

    def with_kernels(
        self,
        precision: Precision,
        linear: LinearKernel,
        layout: memory_layout.MemoryLayout,
        convolution: ConvolutionKernel,
        together: int | None,
    ) -> "PreparedSeed":
        """The same, computed by these primitives."""
        how = {"linear": linear, "layout": layout, "convolution": convolution, "together": together}
        training = self.experiment.training.model_copy(update={"precision": precision})
        experiment = self.experiment.model_copy(update={**how, "training": training})
        module = self.spec.module
        if layout != self.experiment.layout:  # which it is laid out in
            module = memory_layout.with_memory_format(module, layout)
        terms = dataclasses.replace(
            self.spec,
            module=module,
            training=dataclasses.replace(self.spec.training, precision=precision),
            kernels=KernelConfig(linear, convolution, together),
        )
        return dataclasses.replace(self, experiment=experiment, spec=terms)

    def build_agent_data(self, agents: Sequence[int], device: torch.device) -> AgentData:
        """What some agents, ascending, hold."""
        population = self.population
        attackers = self.adversary
        ids = np.array(agents)
        train, validation = (
            Ragged.from_arrays([each[j].numpy() for j in agents])
            for each in (population.train, population.validation)
        )
        return AgentData(
            agents=ids,
            samples=shared_pool(self.experiment, self.dataset).to(device),
            test=self.scored_samples().to(device),
            train=train,
            validation=validation,
            cluster=attackers.cluster[ids],
            num_clusters=attackers.num_clusters,
            num_classes=self.dataset.num_classes,
            malicious=attackers.malicious[ids],
            attack=attackers.attack,
            seed=self.seed,
            **_owner_tests(population, self.dataset, agents),
        )

    def build_layout(
        self, agents: Sequence[int], own_rows: Int[np.ndarray, " a"], num_persistent_rows: int
    ) -> BufferLayout:
        """Where in a pool the models of some agents lie, of which the first `kept` rows outlive a round."""
        attack = self.adversary.attack
        before = self.spec.algorithm.keeps_previous
        each = attack.num_published(1, len(self.adversary.benign_ids))
        return BufferLayout.create(
            own_rows, num_persistent_rows, self.adversary.malicious[np.array(agents)], each, before
        )

    def build_agent_group(self, model_buffer: Float[Tensor, "rows d"]) -> AgentGroup:
        """All agents as one block."""
        everybody = range(self.spec.num_agents)
        holdings = self.build_agent_data(everybody, model_buffer.device)
        layout = self.build_layout(everybody, np.array(everybody), self.num_persistent_rows)
        self.spec.module.to(model_buffer.device)  # what of it is in no row
        return AgentGroup(self.spec, holdings, self.adversary, layout, model_buffer)


def _owner_tests(population: Population, dataset: Dataset, agents: Sequence[int]) -> dict[str, Any]:
    """Which test samples are the agents' own, and which everybody's, where agents bring their own."""
    if population.tests is None or dataset.owners is None:
        return {}
    common = np.flatnonzero(dataset.owners.test.numpy() < 0)
    return {
        "tests": Ragged.from_arrays([population.tests[j].numpy() for j in agents]),
        "common": common,
    }


def build_run_spec(
    experiment: Experiment,
    seed: int,
    dataset: Dataset,
    *,
    num_agents: int,
    malicious_share: float,
    max_samples: int,
    neighbours: tuple[Tensor, ...] | None,
) -> RunSpec:
    """The terms of an experiment for so many agents, whose samples look like a data set's."""
    module = build_module(experiment, seed, dataset)
    training = _build_training(experiment)
    x = features(dataset.pool.x[:2])
    several = experiment.together is not None or not devices.is_cpu(
        experiment.device
    )  # one program for any network
    singles = not batch_norm.rejects_single_sample(module, x[:1])
    apart = several and batch_norm.is_sample_independent(module, x)
    return RunSpec(
        seed=seed,
        num_agents=num_agents,
        num_classes=dataset.num_classes,
        rounds=experiment.rounds,
        budget=experiment.agents.budget,
        model=plugins.label(experiment.model.name),
        module=module,
        training=dataclasses.replace(
            training, accepts_single_sample=singles, is_sample_independent=apart
        ),
        algorithm=build_algorithm(experiment),
        loss_average=experiment.agents.validation_loss,
        malicious_share=malicious_share,
        max_samples=max_samples,
        neighbours=neighbours,
        participation=experiment.agents.participation,
        kernels=KernelConfig(
            experiment.linear or "torch", experiment.convolution or "grouped", experiment.together
        ),
    )


def _build_training(experiment: Experiment) -> Training:
    """How agents train."""
    training = experiment.training
    own = None if training.optimiser is None else training.optimiser.bind("optimiser", optimisers)
    return Training(
        **training.model_dump(exclude={"optimiser", "loss"}),
        optimiser=own,
        loss=_build_loss(experiment),
    )


def prepare_seed(experiment: Experiment, seed: int, dataset: Dataset) -> PreparedSeed:
    """One seed of an experiment; raises ConfigError where it does not fit its data."""
    agents = experiment.agents
    population = build_population(experiment, seed, dataset)
    attackers = Adversary(
        attack=experiment.active_attack,
        malicious=population.malicious.numpy(),
        cluster=population.cluster.numpy(),
        num_clusters=population.num_clusters,
        colludes=agents.malicious_role in ("attack", "clean")
        and build_algorithm(experiment).clusters is None,
        averages_own_model=agents.colluders_own_model,
        trigger=backdoor_trigger(experiment),
    )
    terms = build_run_spec(
        experiment,
        seed,
        dataset,
        num_agents=len(population.cluster),
        malicious_share=agents.malicious_share,
        max_samples=max_samples(experiment, dataset),
        neighbours=build_neighbours(experiment, seed, population.cluster),
    )
    prepared = PreparedSeed(experiment, seed, dataset, population, terms, attackers)
    _check_scored_samples(experiment, prepared.scored_samples())
    _check_batches(prepared)
    if (
        trigger := attackers.trigger
    ) is not None:  # raises here, before a run begins, where samples cannot bear it
        apply_sample_transform(
            plugins.display_name("trigger", trigger),
            trigger,
            Shard(dataset.test.x[:1], dataset.test.y[:1]),
        )
    return prepared


def _check_scored_samples(experiment: Experiment, test: Shard) -> None:
    """Raises ConfigError where there is nothing to score on."""
    if not len(test):
        raise ConfigError(
            '`evaluate_on` = "tuning" needs pool samples that no agent holds, and there is none'
        )
    for source in attack_goal(experiment).sources:
        if not torch.eq(test.y, source).any():
            raise ConfigError(
                f"the {experiment.evaluate_on} samples hold none of class {source} (`attack.source`), so that no "
                "attack can be measured: take another class, or more samples"
            )


def _check_batches(prepared: PreparedSeed) -> None:
    """Raises ConfigError where an agent would train a network on a batch of one sample, which its norms refuse."""
    if prepared.spec.training.accepts_single_sample:
        return
    if prepared.spec.training.batch_size == 1:
        raise ConfigError(
            "`training.batch_size` must be 2 or more, got 1: the model's batch norms refuse a sample by itself"
        )
    for j, train in enumerate(prepared.population.train):
        if len(train) == 1:
            raise ConfigError(
                f"agent {j} trains on a single sample, which the model's batch norms refuse: give it more, or take "
                '`buffers` = "dropped" or a group norm'
            )


def tensor_specs(
    dataset: Dataset, num_models: int, dim: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors that the processes of a run share: the models, in rows of whole cache lines, and the data."""
    tensors = {name: (t.dtype, tuple(t.shape)) for name, t in dataset_tensors(dataset).items()}
    return {"models": (torch.float32, (num_models, parameters.row_stride(dim))), **tensors}


def build_full_group(
    experiment: Experiment, seed: int, names: DatasetNames, dim: int, tensors: dict[str, Tensor]
) -> AgentGroup:
    """The block of all agents of one seed, from the tensors that its processes share. Where the models lie on another
    device than the CPU, so do the samples."""
    return prepare_seed(experiment, seed, dataset_from_tensors(names, tensors)).build_agent_group(
        tensors["models"][:, :dim]
    )


def build_group(
    experiment: Experiment,
    seed: int,
    names: DatasetNames,
    tensors: Mapping[str, Tensor],
    agents: Sequence[int],
) -> AgentGroup:
    """The block of some agents of one seed, from the tensors of the data set, and a pool that has no rows yet."""
    prepared = prepare_seed(experiment, seed, dataset_from_tensors(names, tensors))
    device = devices.resolve_device(experiment.device)
    layout = prepared.build_layout(agents, np.arange(len(agents)), len(agents))
    pool = torch.zeros(0, prepared.spec.dim, device=device)
    prepared.spec.module.to(device)
    return AgentGroup(
        prepared.spec, prepared.build_agent_data(agents, device), prepared.adversary, layout, pool
    )


def init_models_from_tensors_(
    experiment: Experiment,
    seed: int,
    names: DatasetNames,
    tensors: Mapping[str, Tensor],
    theta: Float[Tensor, "a d"],
    ids: Sequence[int],
) -> None:
    """As `first_models_`, from the tensors of the data set."""
    init_models_(theta, experiment, seed, dataset_from_tensors(names, tensors), ids)
