"""A run whose agents are spread over a cluster: what it needs of each node, decided first, and its engine."""

import contextlib
import dataclasses
import functools
import importlib
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
from fedcb2o.experiments.config.build import (
    PreparedSeed,
    build_group,
    imported_names,
    init_models_from_tensors_,
    user_functions,
)
from fedcb2o.experiments.config.datasets import dataset_tensors
from fedcb2o.experiments.runs.memory_plan import PROCESS_BYTES
from fedcb2o.federated.batched_training import plan_training_batches
from fedcb2o.kernels.devices import is_cpu
from fedcb2o.nn import parameters
from fedcb2o.parallel import resources
from fedcb2o.parallel.resources import format_bytes

if TYPE_CHECKING:
    from fedcb2o.ray_backend.engine import RayEngine
    from fedcb2o.ray_backend.placement import Node

LOCAL = "local"  # the address of a cluster that is this machine
MIN_STORE_BYTES = 2**28  # bytes of its store


@dataclass(frozen=True)
class ClusterBackend:
    """That a run is spread over the cluster at an `address`, in so many `blocks`, by default one for each processor;
    each node gives it so much `memory`, by default what is free there."""

    address: str
    blocks: int | None = None
    memory: int | None = None

    @contextlib.contextmanager
    def connect(self, prepared: Sequence[PreparedSeed]) -> Iterator[None]:
        """Within it, this process is in the cluster, if there is anything to run."""
        if not prepared:
            yield
            return
        require_ray()
        from fedcb2o.ray_backend import connect

        for each in prepared:
            if each.spec.algorithm.clusters is not None:
                raise ConfigError(
                    "ifca and dfca, which have models of clusters, run on one machine: no --cluster"
                )
            check_device(each.experiment.device)
        store = MIN_STORE_BYTES + max(
            2 * _model_bytes(each) + _data_bytes(each) for each in prepared
        )
        store = min(store, resources.free_memory() // 2)
        with connect.connected(
            self.address, store, max(resources.available_processors(), self.blocks or 1)
        ):
            log_other_processors(
                self.place(prepared[0], Path()).nodes
            )  # before anything is written; the others are alike
            yield

    def place(self, prepared: PreparedSeed, folder: Path) -> "Placement":
        """Which agents go to which node of the cluster as it is now.

        Raises RunError where a node has not the memory for its own.
        """
        from fedcb2o.ray_backend import placement
        from fedcb2o.ray_backend.sharding import shard_agents

        device = prepared.experiment.device
        nodes = placement.list_nodes(imported_names(prepared.experiment), device)
        most = sum(node.processors for node in nodes)
        if not most:
            raise RunError(
                f"no node of the cluster has {processor_unit(device)}s, which `device` = {device!r} needs: see `ray status` there"
            )
        on = placement.place_groups(min(self.blocks or most, most), nodes)
        costs = [len(samples) for samples in prepared.population.train]
        shares = shard_agents(prepared.spec, costs, [node.speed for node in on])
        placed = Placement.from_shares(shares, on)
        if placed.processes < (self.blocks or 0):
            why = _explain_fewer(placed.processes, most, prepared, costs)
            placed = dataclasses.replace(placed, fewer_note=f", not {self.blocks}: {why}")
        for node in dict.fromkeys(placed.nodes):
            placed.check(prepared, node, self.memory or node.memory, local=self.address == LOCAL)
        return placed

    @contextlib.contextmanager
    def open_engine(self, prepared: PreparedSeed, placement: "Placement") -> Iterator["RayEngine"]:
        """The engine of one seed."""
        from fedcb2o.ray_backend import placement as ray_placement
        from fedcb2o.ray_backend.engine import RayEngine

        experiment = prepared.experiment
        dataset = prepared.dataset
        whole = prepared.build_agent_group(torch.zeros(0, prepared.spec.dim))
        on = [node.id for node in placement.nodes]
        print(f"{experiment.name} seed {prepared.seed}: {placement}", file=sys.stderr)
        with ray_placement.start_workers(
            placement.nodes, experiment.device, imported_names(experiment)
        ) as actors:
            engine = RayEngine(whole, placement.shares, actors, on)
            make = functools.partial(build_group, experiment, prepared.seed, dataset.names)
            engine.build_groups(make, dataset_tensors(dataset), user_functions(experiment))
            yield engine

    def init_models(self, engine: "RayEngine", prepared: PreparedSeed) -> None:
        """Have all agents begin with their first models."""
        names = prepared.dataset.names
        engine.init_models(
            functools.partial(init_models_from_tensors_, prepared.experiment, prepared.seed, names)
        )

    def status(self, placement: "Placement", measured: Mapping[str, Any]) -> str:
        """What of the last round, if there was one, is worth seeing: bytes that went from node to node, or on one node
        from block to block, and which block was slowest, and where."""
        if not measured:
            return ""
        slowest = int(np.argmax(measured["blocks"]))
        went = measured["moved"] or measured["lent"]
        moved = f", {format_bytes(went)} a round" if went else ""
        return f"{moved}, slowest {slowest} on {placement.nodes[slowest].name}"

    def traffic(self, engine: "RayEngine") -> dict[str, Any]:
        """The same of a round that is done, for the record."""
        actors = engine.actors
        found = {
            "lent": actors.loaned_bytes,
            "moved": actors.moved_bytes,
            "blocks": actors.seconds.tolist(),
        }
        actors.loaned_bytes, actors.moved_bytes, actors.seconds = (
            0,
            0,
            np.zeros_like(actors.seconds),
        )
        return found


def log_other_processors(nodes: "Iterable[Node]") -> None:
    """Say which nodes have processors of another kind than this machine: those may round otherwise."""
    here = resources.processor_model()
    others = {node.id: node.model for node in nodes if node.model != here}
    if others:
        print(
            f"Note: {pluralize(len(others), 'node')} of the cluster with other processors than this machine's "
            f"({', '.join(sorted({*others.values()}))}; here {here}): bits may differ from those of one machine.",
            file=sys.stderr,
        )


@dataclass(frozen=True)
class Placement:
    """The agents of each block, and the node that it is `on`; in words why there are `fewer` than were asked for."""

    shares: list[list[int]]
    nodes: "list[Node]"
    fewer_note: str = ""
    folder: None = None  # the models lie in memory

    @classmethod
    def from_shares(cls, shares: "Sequence[list[int]]", nodes: "Sequence[Node]") -> "Placement":
        """The blocks that have agents, each on its node."""
        placed = [(share, node) for share, node in zip(shares, nodes, strict=False) if share]
        return cls([share for share, _ in placed], [node for _, node in placed])

    @property
    def processes(self) -> int:
        """How many work."""
        return len(self.shares)

    def check(self, prepared: PreparedSeed, node: "Node", memory: int, *, local: bool) -> None:
        """Raises RunError where a node that gives so much memory, or Ray's store there, cannot hold what is its own;
        the store of a cluster that is `local` is part of that memory."""
        (rows, stored), blocks = (
            self.required_bytes(prepared, node),
            pluralize(self.nodes.count(node), "block"),
        )
        if rows + stored > memory:
            raise RunError(
                f"node {node.name} needs {format_bytes(rows + stored)} for {blocks}, and has {format_bytes(memory)}: take more "
                "nodes, fewer agents or a smaller model"
            )
        if stored > node.store and not local:
            raise RunError(
                f"node {node.name} needs {format_bytes(stored)} of Ray's store for {blocks}, and has "
                f"{format_bytes(node.store)}: start it by `ray start --object-store-memory {stored} ...`"
            )

    def required_bytes(self, prepared: PreparedSeed, node: "Node") -> tuple[int, int]:
        """The bytes that a node gives: to processes, with their rows of models; and to the store, for the data, for the
        rows that others are lent and, at once, for those that are copied from there."""
        from fedcb2o.ray_backend.sharding import max_received
        from fedcb2o.ray_backend.transfers import OBJECT_OVERHEAD_BYTES
        from fedcb2o.ray_backend.worker import MAX_PINNED_BYTES

        attackers = prepared.adversary
        layout = prepared.build_layout([0], np.zeros(1, np.int64), 1)
        terms = prepared.spec
        row = 4 * parameters.row_stride(prepared.spec.dim)
        nodes = len({*self.nodes})
        rows = 0
        stored = _data_bytes(prepared)
        for share in (
            share for share, there in zip(self.shares, self.nodes, strict=True) if there == node
        ):
            own = len(share)
            bad = layout.crafted_per_attacker * int(attackers.malicious[share].sum())
            inbox = max_received(terms, attackers, share, layout.crafted_per_attacker)
            lent = min(own + bad, (terms.num_agents - own) * terms.max_asked)
            pool = own * (2 if layout.previous is not None else 1) + bad + inbox
            rows += PROCESS_BYTES + 12 * terms.dim + row * pool * is_cpu(prepared.experiment.device)
            stored += row * lent * (1 if row >= OBJECT_OVERHEAD_BYTES else nodes) + min(
                MAX_PINNED_BYTES, row * inbox
            ) * (nodes > 1)
        return rows, stored

    def __str__(self) -> str:
        return f"{pluralize(self.processes, 'block')} on {pluralize(len({*self.nodes}), 'node')}{self.fewer_note}"


def _explain_fewer(blocks: int, most: int, prepared: PreparedSeed, costs: Sequence[int]) -> str:
    """Why no more blocks than these work, of which nodes take the `most`."""
    terms = prepared.spec
    if blocks == most:
        return f"there {'is' if most == 1 else 'are'} {pluralize(most, processor_unit(prepared.experiment.device))}"
    if blocks == terms.num_agents:
        return f"there are {pluralize(blocks, 'agent')}"
    if blocks == len(plan_training_batches(terms, costs)):
        return (
            "agents who train in one program stay together (--set together=1 has each train alone)"
        )
    return "more would not end sooner"


def check_device(device: str | None) -> None:
    """Raises ConfigError where a device is one of several of a machine."""
    if ":" in (device or ""):
        raise ConfigError(
            f"on a cluster each process has a GPU of its own: `device` is {str(device).split(':')[0]!r}"
        )


def check_process_memory(memory: int | None, prepared: PreparedSeed) -> None:
    """Raises RunError where not even one process has room in some memory."""
    if memory is not None and memory < (least := PROCESS_BYTES + 12 * prepared.spec.dim):
        raise RunError(
            f"each process needs {format_bytes(least)} or more, and `memory` is {format_bytes(memory)}: give more"
        )


def require_ray() -> None:
    """Raises ConfigError that names the extra where it is missing, or is not what it was: some of it is private."""
    if find_spec("ray") is None:
        raise ConfigError(
            "a cluster needs the extra, of which ray is missing: pip install 'fedcb2o[cluster]'"
        )
    try:
        for part in ("engine", "connect", "tasks"):
            importlib.import_module(f"fedcb2o.ray_backend.{part}")
    except ImportError as error:
        raise ConfigError(
            f"Ray {version('ray')} lacks what a cluster needs of it ({error}): pip install 'fedcb2o[cluster]', or "
            "another version"
        ) from error


def pluralize(count: int, word: str) -> str:
    """A number of things: "1 node", "2 nodes"."""
    return f"{count} {word}{'s' * (count != 1)}"


def processor_unit(device: str | None) -> str:
    """What of a node works on one thing at a time."""
    return "processor" if is_cpu(device) else "GPU"


def _data_bytes(prepared: PreparedSeed) -> int:
    return sum(tensor.nbytes for tensor in dataset_tensors(prepared.dataset).values())


def _model_bytes(prepared: PreparedSeed) -> int:
    return 4 * parameters.row_stride(prepared.spec.dim) * prepared.experiment.num_models
