"""The backend of a run whose agents are spread over a cluster: placement, needs and engine."""

import contextlib
import dataclasses
import functools
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments.config.datasets import dataset_tensors
from fedcb2o.experiments.config.network import init_models_from_tensors_
from fedcb2o.experiments.config.prepared_seed import PreparedSeed, build_group
from fedcb2o.experiments.runs._memory_plan import PROCESS_BYTES
from fedcb2o.kernels.devices import is_cpu
from fedcb2o.nn import parameters
from fedcb2o.parallel import _resources
from fedcb2o.parallel._resources import format_bytes

if TYPE_CHECKING:
    from fedcb2o.ray_backend._engine import RayEngine
    from fedcb2o.ray_backend._placement import Node

_LOG = logging.getLogger(__name__)

LOCAL = "local"  # the address of a cluster on this machine alone
MIN_STORE_BYTES = 2**28  # of Ray's object store


@dataclass(frozen=True)
class ClusterBackend:
    """A Ray cluster as the place of a run."""

    address: str
    # Number of groups of agents; None for one per processor.
    blocks: int | None = None
    # Bytes that each node gives; None for its free memory.
    memory: int | None = None

    @contextlib.contextmanager
    def connect(self, prepared: Sequence[PreparedSeed]) -> Iterator[None]:
        """Connect to the cluster if there are seeds to run; raise before anything is written."""
        if not prepared:
            yield
            return
        require_ray()
        from fedcb2o.ray_backend import _connect

        for seed in prepared:
            if seed.spec.algorithm.clusters is not None:
                raise ConfigError(
                    "ifca and dfca, which have models of clusters, run on one machine: no --cluster"
                )
            check_device(seed.experiment.device)
        # Ray's store has one size for its life, so it must fit the largest seed.
        needed = max(2 * _model_bytes(seed) + _data_bytes(seed) for seed in prepared)
        store = min(MIN_STORE_BYTES + needed, _resources.free_memory() // 2)
        processors = max(_resources.available_processors(), self.blocks or 1)
        with _connect.connected(self.address, store, processors):
            # Raises before anything is written. The other seeds need the same.
            log_other_processors(self.place(prepared[0], Path()).nodes)
            yield

    def place(self, prepared: PreparedSeed, folder: Path) -> "Placement":
        """Distribute the agents over the nodes; RunError if one lacks memory or the device."""
        from fedcb2o.ray_backend._placement import list_nodes, place_groups, shard_agents

        device = prepared.experiment.device
        nodes = list_nodes(prepared.experiment.resolved.imported_names(), device)
        processors = sum(node.processors for node in nodes)
        if not processors:
            raise RunError(
                f"no node of the cluster has {processor_unit(device)}s, which `device` = "
                f"{device!r} needs: see `ray status` there"
            )
        targets = place_groups(min(self.blocks or processors, processors), nodes)
        costs = [len(samples) for samples in prepared.population.train]
        shares = shard_agents(prepared.spec, costs, len(targets))
        placement = Placement(shares, targets[: len(shares)])
        if placement.processes < (self.blocks or 0):
            reason = _explain_fewer(placement.processes, processors, prepared)
            placement = dataclasses.replace(placement, fewer_note=f", not {self.blocks}: {reason}")
        for node in dict.fromkeys(placement.nodes):
            memory = self.memory or node.memory
            placement.check(prepared, node, memory, local=self.address == LOCAL)
        return placement

    @contextlib.contextmanager
    def open_engine(self, prepared: PreparedSeed, placement: "Placement") -> Iterator["RayEngine"]:
        """Open the engine of a seed."""
        from fedcb2o.ray_backend._engine import RayEngine
        from fedcb2o.ray_backend._placement import start_workers

        experiment = prepared.experiment
        dataset = prepared.dataset
        group = prepared.build_agent_group(torch.zeros(0, prepared.spec.dim))
        node_ids = [node.id for node in placement.nodes]
        print(f"{experiment.name} seed {prepared.seed}: {placement}", file=sys.stderr)
        names = experiment.resolved.imported_names()
        with start_workers(placement.nodes, experiment.device, names) as workers:
            engine = RayEngine(group, placement.shares, workers, node_ids)
            make = functools.partial(build_group, experiment, prepared.seed, dataset.names)
            engine.build_groups(make, dataset_tensors(dataset))
            yield engine

    def init_models(self, engine: "RayEngine", prepared: PreparedSeed) -> None:
        """Set the initial models of all agents."""
        names = prepared.dataset.names
        fill = functools.partial(
            init_models_from_tensors_, prepared.experiment, prepared.seed, names
        )
        engine.init_models(fill)

    def status(self, placement: "Placement", measured: Mapping[str, Any]) -> str:
        """Describe the last round's traffic and slowest group; nothing before the first."""
        if not measured:
            return ""
        slowest = int(np.argmax(measured["blocks"]))
        moved = measured["moved"] or measured["lent"]
        traffic = f", {format_bytes(moved)} a round" if moved else ""
        return f"{traffic}, slowest {slowest} on {placement.nodes[slowest].name}"

    def traffic(self, engine: "RayEngine") -> dict[str, Any]:
        """Return the bytes and seconds of the last round, and reset their counters."""
        measured = {
            "lent": engine.loaned_bytes,
            "moved": engine.moved_bytes,
            "blocks": engine.seconds.tolist(),
        }
        engine.reset_traffic()
        return measured


def log_other_processors(nodes: "Iterable[Node]") -> None:
    """Log the nodes with other processors than this machine, which may round differently."""
    here = _resources.processor_model()
    others = {node.id: node.model for node in nodes if node.model != here}
    if others:
        models = ", ".join(sorted(set(others.values())))
        _LOG.warning(
            "%s of the cluster with other processors than this machine's (%s; here %s): bits may "
            "differ from those of one machine.",
            pluralize(len(others), "node"),
            models,
            here,
        )


@dataclass(frozen=True)
class Placement:
    """The agents of each group, and its node."""

    shares: list[list[int]]
    nodes: "list[Node]"
    # Why there are fewer groups than requested, or "".
    fewer_note: str = ""
    # None, since the models are in memory.
    folder: None = None

    @property
    def processes(self) -> int:
        """The number of processes, one per group."""
        return len(self.shares)

    def check(self, prepared: PreparedSeed, node: "Node", memory: int, *, local: bool) -> None:
        """Check that a node has the memory for its groups, of which a `local` store is part."""
        rows, stored = self.required_bytes(prepared, node)
        groups = pluralize(self.nodes.count(node), "block")
        if rows + stored > memory:
            raise RunError(
                f"node {node.name} needs {format_bytes(rows + stored)} for {groups}, and has "
                f"{format_bytes(memory)}: take more nodes, fewer agents or a smaller model"
            )
        if stored > node.store and not local:
            raise RunError(
                f"node {node.name} needs {format_bytes(stored)} of Ray's store for {groups}, and "
                f"has {format_bytes(node.store)}: start it by `ray start --object-store-memory "
                f"{stored} "
                "...`"
            )

    def required_bytes(self, prepared: PreparedSeed, node: "Node") -> tuple[int, int]:
        """Return the bytes that a node needs: for processes and models, and in the store."""
        from fedcb2o.ray_backend._transfers import OBJECT_OVERHEAD_BYTES
        from fedcb2o.ray_backend._worker import MAX_PINNED_BYTES, max_received

        spec = prepared.spec
        adversary = prepared.adversary
        layout = prepared.build_layout([0], np.zeros(1, np.int64), 1)
        crafted_per_attacker = layout.crafted_per_attacker
        row = 4 * parameters.row_stride(spec.dim)
        num_nodes = len(set(self.nodes))
        # The store holds a large row once, and a small one once for each node.
        copies_per_loan = 1 if row >= OBJECT_OVERHEAD_BYTES else num_nodes
        rows = 0
        stored = _data_bytes(prepared)
        for share, target in zip(self.shares, self.nodes, strict=True):
            if target != node:
                continue
            own = len(share)
            crafted = crafted_per_attacker * int(adversary.malicious[share].sum())
            received = max_received(spec, adversary, share, crafted_per_attacker)
            loaned = min(own + crafted, (spec.num_agents - own) * spec.max_asked)
            buffer = own * (2 if layout.previous is not None else 1) + crafted + received
            on_cpu = is_cpu(prepared.experiment.device)
            rows += PROCESS_BYTES + 12 * spec.dim + row * buffer * on_cpu
            pinned = min(MAX_PINNED_BYTES, row * received) * (num_nodes > 1)
            stored += row * loaned * copies_per_loan + pinned
        return rows, stored

    def __str__(self) -> str:
        groups = pluralize(self.processes, "block")
        nodes = pluralize(len(set(self.nodes)), "node")
        return f"{groups} on {nodes}{self.fewer_note}"


def _explain_fewer(groups: int, processors: int, prepared: PreparedSeed) -> str:
    """Return the reason why there are not more groups."""
    spec = prepared.spec
    if groups == processors:
        verb = "is" if processors == 1 else "are"
        return f"there {verb} {pluralize(processors, processor_unit(prepared.experiment.device))}"
    if groups == spec.num_agents:
        return f"there are {pluralize(groups, 'agent')}"
    return "agents who train in one program stay together (--set together=1 has each train alone)"


def check_device(device: str | None) -> None:
    """Check that a device is not one of several of a machine, such as "cuda:1"."""
    if device is not None and ":" in device:
        kind = device.split(":")[0]
        raise ConfigError(f"on a cluster each process has a GPU of its own: `device` is {kind!r}")


def check_process_memory(memory: int | None, prepared: PreparedSeed) -> None:
    """Check that a limit of memory is large enough for one process."""
    least = PROCESS_BYTES + 12 * prepared.spec.dim
    if memory is not None and memory < least:
        raise RunError(
            f"each process needs {format_bytes(least)} or more, and `memory` is "
            f"{format_bytes(memory)}: give more"
        )


def require_ray() -> None:
    """Check that Ray is installed, in a version that works."""
    if find_spec("ray") is None:
        raise ConfigError(
            "a cluster needs the extra, of which ray is missing: pip install 'fedcb2o[cluster]'"
        )
    try:
        from fedcb2o.ray_backend import _connect, _engine, _tasks  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"Ray {version('ray')} lacks what a cluster needs of it ({error}): pip install "
            "'fedcb2o[cluster]', or another version"
        ) from error


def pluralize(count: int, word: str) -> str:
    """Return a count with its noun, such as "1 node" or "2 nodes"."""
    return f"{count} {word}{'s' * (count != 1)}"


def processor_unit(device: str | None) -> str:
    """Return "processor" for the CPU, else "GPU", for messages."""
    return "processor" if is_cpu(device) else "GPU"


def _data_bytes(prepared: PreparedSeed) -> int:
    return sum(tensor.nbytes for tensor in dataset_tensors(prepared.dataset).values())


def _model_bytes(prepared: PreparedSeed) -> int:
    row = 4 * parameters.row_stride(prepared.spec.dim)
    return row * prepared.experiment.num_models
