"""The backend of a run on one machine: where the models are, and the engine of one seed."""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedcb2o.experiments.config.build import (
    PreparedSeed,
    build_full_group,
    init_models_,
    tensor_specs,
    user_functions,
)
from fedcb2o.experiments.config.datasets import dataset_tensors
from fedcb2o.experiments.runs.memory_plan import MemoryPlan, plan_memory
from fedcb2o.kernels import devices, onednn
from fedcb2o.parallel import executors, resources, shared_memory
from fedcb2o.simulation.local_engine import LocalEngine


@dataclass(frozen=True)
class LocalBackend:
    """That a run works on this machine, by so many `workers`, in so much `memory`."""

    workers: int | None
    memory: int | None

    def connect(self, prepared: Sequence[PreparedSeed]) -> contextlib.AbstractContextManager[None]:
        """There is nothing to join."""
        return contextlib.nullcontext()

    def place(self, prepared: PreparedSeed, folder: Path) -> MemoryPlan:
        """Where the models of a seed go; raises RunError where there is no room for them."""
        return plan_memory(
            prepared.experiment,
            prepared.dataset,
            prepared.spec.dim,
            self.workers,
            self.memory,
            folder,
        )

    @contextlib.contextmanager
    def open_engine(self, prepared: PreparedSeed, plan: MemoryPlan) -> Iterator[LocalEngine]:
        """The engine of one seed."""
        with contextlib.ExitStack() as stack:
            yield open_local_engine(stack, prepared, plan)

    def init_models(self, engine: LocalEngine, prepared: PreparedSeed) -> None:
        """Fill the rows of all agents, and of clusters, with their first models."""
        kept = engine.group.models[: prepared.num_persistent_rows]
        init_models_(kept, prepared.experiment, prepared.seed, prepared.dataset, range(len(kept)))

    def status(self, plan: MemoryPlan, measured: Mapping[str, Any]) -> str:
        """There is nothing more to tell."""
        return ""

    def traffic(self, engine: LocalEngine) -> dict[str, Any]:
        """There is nothing more to note of a round."""
        return {}


def open_local_engine(
    stack: contextlib.ExitStack, prepared: PreparedSeed, plan: MemoryPlan
) -> LocalEngine:
    """The engine of one seed; the models lie in memory, or in a file."""
    experiment = prepared.experiment
    seed = prepared.seed
    dataset = prepared.dataset
    dim = prepared.spec.dim
    specs = tensor_specs(dataset, experiment.num_models, dim)
    count = plan.processes
    if count == 1 and dim >= onednn.MIN_WEIGHTS:
        resources.retain_freed_memory()
    if count == 1 and plan.folder is None:
        theta = torch.zeros(specs["models"][1], device=devices.resolve_device(experiment.device))
        block = prepared.build_agent_group(theta[:, :dim])
        return LocalEngine(
            block, executors.SerialExecutor(block), user_functions=user_functions(experiment)
        )
    shared = stack.enter_context(shared_memory.allocate_shared(specs, plan.folder))
    tensors = shared.tensors()
    for name, tensor in dataset_tensors(dataset).items():
        tensors[name].copy_(tensor)
    make = functools.partial(build_full_group, experiment, seed, dataset.names, dim)
    block = prepared.build_agent_group(tensors["models"][:, :dim])
    if count == 1:
        shared.path.unlink()  # a mapping outlives it, and a kill then leaves nothing
    who = (
        executors.SerialExecutor(block)
        if count == 1
        else executors.PoolExecutor(count, shared, make)
    )
    return LocalEngine(block, who, plan.columns_per_mix, user_functions(experiment))
