"""The backend of a run on one machine: where the models are, and the engine of one seed."""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedcb2o.experiments.config.build import Prepared, block_of, first_models_, own_parts, specs_of
from fedcb2o.experiments.config.datasets import shared_data
from fedcb2o.experiments.runs.memory_plan import Plan, plan
from fedcb2o.kernels import devices, onednn
from fedcb2o.parallel import executors, resources, shared_memory
from fedcb2o.simulation.local_engine import Shared


@dataclass(frozen=True)
class OneMachine:
    """That a run works on this machine, by so many `workers`, in so much `memory`."""

    workers: int | None
    memory: int | None

    def joined(self, prepared: Sequence[Prepared]) -> contextlib.AbstractContextManager[None]:
        """There is nothing to join."""
        return contextlib.nullcontext()

    def place(self, prepared: Prepared, folder: Path) -> Plan:
        """Where the models of a seed go; raises RunError where there is no room for them."""
        return plan(prepared.experiment, prepared.dataset, prepared.terms.dim, self.workers, self.memory, folder)

    @contextlib.contextmanager
    def entered(self, prepared: Prepared, place: Plan) -> Iterator[Shared]:
        """The engine of one seed."""
        with contextlib.ExitStack() as stack:
            yield _enter(stack, prepared, place)

    def begin_models(self, engine: Shared, prepared: Prepared) -> None:
        """Fill the rows of all agents, and of clusters, with their first models."""
        kept = engine.block.pool[: prepared.kept]
        first_models_(kept, prepared.experiment, prepared.seed, prepared.dataset, range(len(kept)))

    def told(self, place: Plan, measured: Mapping[str, Any]) -> str:
        """There is nothing more to tell."""
        return ""

    def measured(self, engine: Shared) -> dict[str, Any]:
        """There is nothing more to note of a round."""
        return {}


def _enter(stack: contextlib.ExitStack, prepared: Prepared, place: Plan) -> Shared:
    """The engine of one seed; the models lie in memory, or in a file."""
    experiment, seed, dataset, dim = prepared.experiment, prepared.seed, prepared.dataset, prepared.terms.dim
    specs, count = specs_of(dataset, experiment.num_models, dim), place.processes
    if count == 1 and dim >= onednn.LARGE:
        resources.keep_memory()
    if count == 1 and place.folder is None:
        theta = torch.zeros(specs["models"][1], device=devices.device_of(experiment.device))
        block = prepared.block(theta[:, :dim])
        return Shared(block, executors.Here(block), own=own_parts(experiment))
    shared = stack.enter_context(shared_memory.shared(specs, place.folder))
    tensors = shared.tensors()
    for name, tensor in shared_data(dataset).items():
        tensors[name].copy_(tensor)
    make = functools.partial(block_of, experiment, seed, dataset.names, dim)
    block = prepared.block(tensors["models"][:, :dim])
    if count == 1:
        shared.path.unlink()  # a mapping outlives it, and a kill then leaves nothing
    who = executors.Here(block) if count == 1 else executors.Processes(count, shared, make)
    return Shared(block, who, place.columns, own_parts(experiment))
