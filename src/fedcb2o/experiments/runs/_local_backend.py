"""The backend of a run on one machine: the place of the models and the engine of a seed."""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedcb2o.experiments.config.datasets import dataset_tensors
from fedcb2o.experiments.config.network import init_models_
from fedcb2o.experiments.config.prepared_seed import PreparedSeed, build_full_group, tensor_specs
from fedcb2o.experiments.runs._memory_plan import MemoryPlan, plan_memory
from fedcb2o.kernels import _onednn, devices
from fedcb2o.parallel import _executors, _resources, _shared_memory
from fedcb2o.simulation.local_engine import LocalEngine


@dataclass(frozen=True)
class LocalBackend:
    """The place of a run on one machine."""

    # Number of processes; None for a choice by the work and the memory.
    workers: int | None
    # Bytes that the run may take; None for the free memory.
    memory: int | None

    def connect(self, prepared: Sequence[PreparedSeed]) -> contextlib.AbstractContextManager[None]:
        """Return a context without effect, as no cluster is needed."""
        return contextlib.nullcontext()

    def place(self, prepared: PreparedSeed, folder: Path) -> MemoryPlan:
        """Plan the memory of a seed."""
        dim = prepared.spec.dim
        return plan_memory(
            prepared.experiment, prepared.dataset, dim, self.workers, self.memory, folder
        )

    @contextlib.contextmanager
    def open_engine(self, prepared: PreparedSeed, plan: MemoryPlan) -> Iterator[LocalEngine]:
        """Open the engine of a seed."""
        with contextlib.ExitStack() as stack:
            yield open_local_engine(stack, prepared, plan)

    def init_models(self, engine: LocalEngine, prepared: PreparedSeed) -> None:
        """Fill the rows of all agents and clusters with their initial models."""
        rows = engine.group.models[: prepared.num_persistent_rows]
        init_models_(rows, prepared.experiment, prepared.seed, prepared.dataset, range(len(rows)))

    def status(self, plan: MemoryPlan, measured: Mapping[str, Any]) -> str:
        """Return an empty text, as there is no traffic to show."""
        return ""

    def traffic(self, engine: LocalEngine) -> dict[str, Any]:
        """Return an empty table, as there is no traffic to record."""
        return {}


def open_local_engine(
    stack: contextlib.ExitStack, prepared: PreparedSeed, plan: MemoryPlan
) -> LocalEngine:
    """Open the engine of a seed; `stack` receives its shared memory or mapped file."""
    experiment = prepared.experiment
    dataset = prepared.dataset
    dim = prepared.spec.dim
    specs = tensor_specs(dataset, experiment.num_models, dim)
    if plan.processes == 1 and dim >= _onednn.MIN_WEIGHTS:
        _resources.retain_freed_memory()
    if plan.processes == 1 and plan.folder is None:
        device = devices.resolve_device(experiment.device)
        theta = torch.zeros(specs["models"][1], device=device)
        group = prepared.build_agent_group(theta[:, :dim])
        return LocalEngine(group, _executors.SerialExecutor(group))

    shared = stack.enter_context(_shared_memory.allocate_shared(specs, plan.folder))
    tensors = shared.tensors()
    for name, tensor in dataset_tensors(dataset).items():
        tensors[name].copy_(tensor)
    group = prepared.build_agent_group(tensors["models"][:, :dim])
    executor: Any = _executors.SerialExecutor(group)
    if plan.processes == 1:
        shared.path.unlink()  # the mapping outlives the file, and a kill then leaves nothing
    else:
        make = functools.partial(build_full_group, experiment, prepared.seed, dataset.names, dim)
        executor = _executors.PoolExecutor(plan.processes, shared, make)
    return LocalEngine(group, executor, plan.columns_per_mix)
