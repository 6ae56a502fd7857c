"""One seed of an experiment: its data, its adversary and the specification of its rounds."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedcb2o.data import ClusterView, Dataset, DatasetNames, Population, Shard, features
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config.datasets import (
    build_population,
    build_view,
    dataset_from_tensors,
    dataset_tensors,
    max_samples,
    shared_pool,
)
from fedcb2o.experiments.config.network import build_module
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.federated import privacy, trigger_exchange
from fedcb2o.federated.adversary import Adversary
from fedcb2o.federated.agent_group import AgentData, AgentGroup, BufferLayout
from fedcb2o.federated.loss_groups import grouped
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.run_spec import (
    ConvolutionKernel,
    KernelConfig,
    LinearKernel,
    RunSpec,
    Training,
)
from fedcb2o.federated.sample_weights import relative_weights
from fedcb2o.federated.schedules import rates
from fedcb2o.federated.sections import Precision
from fedcb2o.kernels import devices
from fedcb2o.nn import memory_layout, network_checks, parameters

_CHECKED_SAMPLES = 64  # on which functions of samples are tried before a run


@dataclass(frozen=True)
class PreparedSeed:
    """One seed of an experiment: the specification of its rounds, its data and its adversary."""

    experiment: Experiment
    seed: int
    dataset: Dataset
    population: Population
    spec: RunSpec
    adversary: Adversary
    view: ClusterView

    @property
    def num_persistent_rows(self) -> int:
        """The rows of a model buffer that outlive a round: agents, then clusters or sent models."""
        return self.spec.num_agents + self.experiment.num_further_rows

    def scored_samples(self) -> Shard:
        """Return the samples that agents are scored on: the test set, or the seed's draw."""
        if self.experiment.evaluate_on == "test":
            return self.dataset.test
        # The choice has indices into the shared pool, which redrawn test samples are a part of.
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
        """Return the same seed with other kernels, and `together` agents in one program."""
        kernels = {
            "linear": linear,
            "layout": layout,
            "convolution": convolution,
            "together": together,
        }
        # Both hold the section: records read the experiment, rounds the specification.
        training = self.experiment.training.model_copy(update={"precision": precision})
        experiment = self.experiment.model_copy(update={**kernels, "training": training})
        module = self.spec.module
        if layout != self.experiment.layout:  # the layout that the module has
            module = memory_layout.with_memory_format(module, layout)
        spec = dataclasses.replace(
            self.spec,
            module=module,
            training=self.spec.training.model_copy(update={"precision": precision}),
            kernels=KernelConfig(linear, convolution, together),
        )
        return dataclasses.replace(self, experiment=experiment, spec=spec)

    def build_agent_data(self, agents: Sequence[int], device: torch.device) -> AgentData:
        """Return the data of agents with ascending ids."""
        population = self.population
        adversary = self.adversary
        ids = np.array(agents)
        return AgentData(
            agents=ids,
            samples=shared_pool(self.experiment, self.dataset).to(device),
            test=self.scored_samples().to(device),
            train=_select(population.train, agents),
            validation=_select(population.validation, agents),
            cluster=adversary.cluster[ids],
            view=self.view,
            num_classes=self.dataset.num_classes,
            malicious=adversary.malicious[ids],
            attack=adversary.attack,
            seed=self.seed,
            value_range=self.dataset.value_range,
            **_owner_tests(population, self.dataset, agents),
        )

    def build_layout(
        self, agents: Sequence[int], own_rows: Int[np.ndarray, " a"], num_persistent_rows: int
    ) -> BufferLayout:
        """Return the layout of a buffer whose first `num_persistent_rows` outlive a round."""
        # An attack may publish another model for each receiver, which needs a row of its own.
        crafted = self.adversary.attack.num_published(1, len(self.adversary.benign_ids))
        layout = BufferLayout.create(
            own_rows,
            num_persistent_rows,
            self.adversary.malicious[np.array(agents)],
            crafted,
            self.spec.algorithm.keeps_previous,
        )
        if self.experiment.agents.encoding == "top_k":
            layout = dataclasses.replace(layout, sent=own_rows + len(own_rows))
        return layout

    def build_agent_group(self, model_buffer: Float[Tensor, "rows d"]) -> AgentGroup:
        """Return all agents as one group, on the device of the buffer."""
        agents = range(self.spec.num_agents)
        agent_data = self.build_agent_data(agents, model_buffer.device)
        layout = self.build_layout(agents, np.array(agents), self.num_persistent_rows)
        self.spec.module.to(model_buffer.device)  # buffers of the module are in no row
        return AgentGroup(self.spec, agent_data, self.adversary, layout, model_buffer)


def _select(samples: Sequence[Int[Tensor, " _n"]], agents: Sequence[int]) -> Ragged:
    chosen = [samples[j] for j in agents]
    sizes = np.array([own.shape[0] for own in chosen], np.int64)
    # One array with offsets: thousands of small tensors would take longer to send and to read.
    return Ragged(torch.cat(chosen).numpy(), sizes)


def _owner_tests(population: Population, dataset: Dataset, agents: Sequence[int]) -> dict[str, Any]:
    """Return the agents' own test samples and the common ones, where agents bring their data."""
    if population.tests is None or dataset.owners is None:
        return {}
    # An owner of -1 marks a sample that all agents are tested on.
    common = np.flatnonzero(dataset.owners.test.numpy() < 0)
    return {"own_tests": _select(population.tests, agents), "common_test": common}


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
    """Build the specification that all agents share.

    `dataset` only has samples like those of the agents. Rules assume `malicious_share`;
    `neighbours` is None where agents may ask all others.
    """
    module = build_module(experiment, seed, dataset)
    x = features(dataset.pool.x[:2])
    # On a device, or with `together` set, several agents share one program.
    is_batched = experiment.together is not None or not devices.is_cpu(experiment.device)
    # The last batch of an epoch may have one sample, which batch norms refuse.
    accepts_single_sample = network_checks.accepts_single_sample(module, x[:1])
    # The check takes time, and only several agents in one program need it.
    is_independent = is_batched and network_checks.is_sample_independent(module, x)
    section = experiment.training
    resolved = experiment.resolved
    schedule = resolved.schedule
    learning_rate = section.lambda2 * section.gamma
    training = Training(
        **section.model_dump(exclude={"optimiser", "loss", "schedule", "weights"}),
        optimiser=resolved.optimiser,
        loss=resolved.loss,
        weights=resolved.weights,
        rates=None if schedule is None else rates(schedule, learning_rate, experiment.rounds),
        accepts_single_sample=accepts_single_sample,
        is_sample_independent=is_independent,
    )
    privacy.check_privacy(training, module)
    # A fault is found before the first training.
    if resolved.algorithm.guards.trigger_exchange is not False:
        trigger_exchange.check_samples(dataset.pool)
    first = dataset.pool.part(np.arange(min(len(dataset.pool), _CHECKED_SAMPLES)))
    if resolved.weights is not None:
        relative_weights(resolved.weights, first.x, first.y)
    if resolved.loss_groups is not None:
        grouped(resolved.loss_groups, first.x[None], first.y[None])
    kernels = KernelConfig(
        experiment.linear or "torch", experiment.convolution or "grouped", experiment.together
    )
    return RunSpec(
        seed=seed,
        num_agents=num_agents,
        num_classes=dataset.num_classes,
        rounds=experiment.rounds,
        agents=experiment.agents,
        model=resolved.model_name,
        module=module,
        training=training,
        algorithm=resolved.algorithm,
        malicious_share=malicious_share,
        max_samples=max_samples,
        neighbours=neighbours,
        kernels=kernels,
        user_functions=resolved.user_functions(),
        metrics=resolved.metrics,
        loss_groups=resolved.loss_groups,
        keep_best=experiment.keep_best,
    )


def prepare_seed(experiment: Experiment, seed: int, dataset: Dataset) -> PreparedSeed:
    """Build everything that a seed's rounds need, and check that it fits the data."""
    agents = experiment.agents
    resolved = experiment.resolved
    population = build_population(experiment, seed, dataset)
    has_clusters = resolved.algorithm.clusters is not None
    adversary = Adversary(
        attack=experiment.active_attack,
        malicious=population.malicious.numpy(),
        cluster=population.cluster.numpy(),
        num_clusters=population.num_clusters,
        colludes=agents.malicious_role in ("attack", "clean") and not has_clusters,
        averages_own_model=agents.colluders_own_model,
        trigger=resolved.trigger,
        wanted_answers=resolved.wanted_answers,
    )
    spec = build_run_spec(
        experiment,
        seed,
        dataset,
        num_agents=len(population.cluster),
        malicious_share=agents.malicious_share,
        max_samples=max_samples(experiment, dataset),
        neighbours=resolved.neighbours(seed, population.cluster),
    )
    # Delta is compared with the samples that were dealt, which no key of the section has.
    privacy.check_delta(spec.training, map(len, population.train))
    view = build_view(experiment, dataset)
    prepared = PreparedSeed(experiment, seed, dataset, population, spec, adversary, view)
    _check_scored_samples(experiment, prepared.scored_samples())
    _check_batches(prepared)
    return prepared


def _check_scored_samples(experiment: Experiment, test: Shard) -> None:
    """Raise ConfigError where there are no samples to score on."""
    if not len(test):
        raise ConfigError(
            '`evaluate_on` = "tuning" needs pool samples that no agent holds, and there are none'
        )
    for source in experiment.resolved.goal.sources:
        if not torch.eq(test.y, source).any():
            raise ConfigError(
                f"the {experiment.evaluate_on} samples hold none of class {source} "
                "(`attack.source`), so that the attack cannot be measured: take another class, or "
                "more samples"
            )


def _check_batches(prepared: PreparedSeed) -> None:
    """Raise ConfigError where the norms refuse a batch of one sample that an agent has."""
    training = prepared.spec.training
    if training.accepts_single_sample:
        return
    if training.batch_size == 1:
        raise ConfigError(
            "`training.batch_size` must be 2 or more, got 1: the model's batch norms refuse a "
            "single sample"
        )
    for j, train in enumerate(prepared.population.train):
        if len(train) == 1:
            raise ConfigError(
                f"agent {j} trains on a single sample, which the model's batch norms refuse: give "
                'it more, or take `buffers` = "dropped" or a group norm'
            )


def tensor_specs(
    dataset: Dataset, num_models: int, dim: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return types and shapes of the shared tensors: models in whole cache lines, and data."""
    specs: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "models": (torch.float32, (num_models, parameters.row_stride(dim)))
    }
    for name, tensor in dataset_tensors(dataset).items():
        specs[name] = (tensor.dtype, tuple(tensor.shape))
    return specs


def build_full_group(
    experiment: Experiment, seed: int, names: DatasetNames, dim: int, tensors: dict[str, Tensor]
) -> AgentGroup:
    """Build the group of all agents from shared tensors: "models", and the data set."""
    prepared = prepare_seed(experiment, seed, dataset_from_tensors(names, tensors))
    return prepared.build_agent_group(tensors["models"][:, :dim])


def build_group(
    experiment: Experiment,
    seed: int,
    names: DatasetNames,
    tensors: Mapping[str, Tensor],
    agents: Sequence[int],
) -> AgentGroup:
    """Build the group of agents with ascending ids; its buffer has no rows yet."""
    prepared = prepare_seed(experiment, seed, dataset_from_tensors(names, tensors))
    device = devices.resolve_device(experiment.device)
    rows = len(agents) * (2 if experiment.agents.encoding == "top_k" else 1)
    layout = prepared.build_layout(agents, np.arange(len(agents)), rows)
    model_buffer = torch.zeros(0, prepared.spec.dim, device=device)
    prepared.spec.module.to(device)
    agent_data = prepared.build_agent_data(agents, device)
    return AgentGroup(prepared.spec, agent_data, prepared.adversary, layout, model_buffer)
