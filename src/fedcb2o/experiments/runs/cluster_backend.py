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
from fedcb2o.experiments.config.build import Prepared, first_of, own_names, own_parts, share_of
from fedcb2o.experiments.config.datasets import shared_data
from fedcb2o.experiments.runs.memory_plan import PROCESS
from fedcb2o.federated.batched_training import teams_of
from fedcb2o.kernels.devices import on_cpu
from fedcb2o.nn import parameters
from fedcb2o.parallel import resources
from fedcb2o.parallel.resources import gib

if TYPE_CHECKING:
    from fedcb2o.ray_backend.engine import Cluster
    from fedcb2o.ray_backend.placement import Node

LOCAL = "local"  # the address of a cluster that is this machine
LEAST = 2**28  # bytes of its store


@dataclass(frozen=True)
class Spread:
    """That a run is spread over the cluster at an `address`, in so many `blocks`, by default one for each processor;
    each node gives it so much `memory`, by default what is free there."""

    address: str
    blocks: int | None = None
    memory: int | None = None

    @contextlib.contextmanager
    def joined(self, prepared: Sequence[Prepared]) -> Iterator[None]:
        """Within it, this process is in the cluster, if there is anything to run."""
        if not prepared:
            yield
            return
        need()
        from fedcb2o.ray_backend import connect

        for each in prepared:
            if each.terms.algorithm.clusters is not None:
                raise ConfigError("ifca and dfca, which have models of clusters, run on one machine: no --cluster")
            check_device(each.experiment.device)
        store = LEAST + max(2 * _pool(each) + _data(each) for each in prepared)
        store = min(store, resources.free_memory() // 2)
        with connect.joined(self.address, store, max(resources.processors(), self.blocks or 1)):
            note_others(self.place(prepared[0], Path()).on)  # before anything is written; the others are alike
            yield

    def place(self, prepared: Prepared, folder: Path) -> "Placed":
        """Which agents go to which node of the cluster as it is now.

        Raises RunError where a node has not the memory for its own.
        """
        from fedcb2o.ray_backend import placement
        from fedcb2o.ray_backend.sharding import shared_out

        device = prepared.experiment.device
        nodes = placement.nodes(own_names(prepared.experiment), device)
        most = sum(node.processors for node in nodes)
        if not most:
            raise RunError(
                f"no node of the cluster has {unit(device)}s, which `device` = {device!r} needs: see `ray status` there"
            )
        on = placement.spread(min(self.blocks or most, most), nodes)
        costs = [len(samples) for samples in prepared.population.train]
        shares = shared_out(prepared.terms, costs, [node.speed for node in on])
        placed = Placed.of(shares, on)
        if placed.processes < (self.blocks or 0):
            why = _why_fewer(placed.processes, most, prepared, costs)
            placed = dataclasses.replace(placed, fewer=f", not {self.blocks}: {why}")
        for node in dict.fromkeys(placed.on):
            placed.check(prepared, node, self.memory or node.memory, local=self.address == LOCAL)
        return placed

    @contextlib.contextmanager
    def entered(self, prepared: Prepared, placed: "Placed") -> Iterator["Cluster"]:
        """The engine of one seed."""
        from fedcb2o.ray_backend import placement
        from fedcb2o.ray_backend.engine import Cluster

        experiment, dataset = prepared.experiment, prepared.dataset
        whole, on = prepared.block(torch.zeros(0, prepared.terms.dim)), [node.id for node in placed.on]
        print(f"{experiment.name} seed {prepared.seed}: {placed}", file=sys.stderr)
        with placement.actors(placed.on, experiment.device, own_names(experiment)) as actors:
            engine = Cluster(whole, placed.shares, actors, on)
            make = functools.partial(share_of, experiment, prepared.seed, dataset.names)
            engine.begin(make, shared_data(dataset), own_parts(experiment))
            yield engine

    def begin_models(self, engine: "Cluster", prepared: Prepared) -> None:
        """Have all agents begin with their first models."""
        names = prepared.dataset.names
        engine.begin_models(functools.partial(first_of, prepared.experiment, prepared.seed, names))

    def told(self, place: "Placed", measured: Mapping[str, Any]) -> str:
        """What of the last round, if there was one, is worth seeing: bytes that went from node to node, or on one node
        from block to block, and which block was slowest, and where."""
        if not measured:
            return ""
        slowest = int(np.argmax(measured["blocks"]))
        went = measured["moved"] or measured["lent"]
        moved = f", {gib(went)} a round" if went else ""
        return f"{moved}, slowest {slowest} on {place.on[slowest].name}"

    def measured(self, engine: "Cluster") -> dict[str, Any]:
        """The same of a round that is done, for the record."""
        actors = engine.actors
        found = {"lent": actors.lent, "moved": actors.moved, "blocks": actors.took.tolist()}
        actors.lent, actors.moved, actors.took = 0, 0, np.zeros_like(actors.took)
        return found


def note_others(nodes: "Iterable[Node]") -> None:
    """Say which nodes have processors of another kind than this machine: those may round otherwise."""
    here = resources.model()
    others = {node.id: node.model for node in nodes if node.model != here}
    if others:
        print(
            f"Note: {several(len(others), 'node')} of the cluster with other processors than this machine's "
            f"({', '.join(sorted({*others.values()}))}; here {here}): bits may differ from those of one machine.",
            file=sys.stderr,
        )


@dataclass(frozen=True)
class Placed:
    """The agents of each block, and the node that it is `on`; in words why there are `fewer` than were asked for."""

    shares: list[list[int]]
    on: "list[Node]"
    fewer: str = ""
    folder: None = None  # the models lie in memory

    @classmethod
    def of(cls, shares: "Sequence[list[int]]", on: "Sequence[Node]") -> "Placed":
        """The blocks that have agents, each on its node."""
        placed = [(share, node) for share, node in zip(shares, on, strict=False) if share]
        return cls([share for share, _ in placed], [node for _, node in placed])

    @property
    def processes(self) -> int:
        """How many work."""
        return len(self.shares)

    def check(self, prepared: Prepared, node: "Node", memory: int, *, local: bool) -> None:
        """Raises RunError where a node that gives so much memory, or Ray's store there, cannot hold what is its own;
        the store of a cluster that is `local` is part of that memory."""
        (rows, stored), blocks = self.needed(prepared, node), several(self.on.count(node), "block")
        if rows + stored > memory:
            raise RunError(
                f"node {node.name} needs {gib(rows + stored)} for {blocks}, and has {gib(memory)}: take more "
                "nodes, fewer agents or a smaller model"
            )
        if stored > node.store and not local:
            raise RunError(
                f"node {node.name} needs {gib(stored)} of Ray's store for {blocks}, and has "
                f"{gib(node.store)}: start it by `ray start --object-store-memory {stored} ...`"
            )

    def needed(self, prepared: Prepared, node: "Node") -> tuple[int, int]:
        """The bytes that a node gives: to processes, with their rows of models; and to the store, for the data, for the
        rows that others are lent and, at once, for those that are copied from there."""
        from fedcb2o.ray_backend.sharding import most_received
        from fedcb2o.ray_backend.transfers import OBJECT
        from fedcb2o.ray_backend.worker import AT_ONCE

        attackers, layout = prepared.attackers, prepared.layout([0], np.zeros(1, np.int64), 1)
        terms, row, nodes = prepared.terms, 4 * parameters.row_stride(prepared.terms.dim), len({*self.on})
        rows, stored = 0, _data(prepared)
        for share in (share for share, there in zip(self.shares, self.on, strict=True) if there == node):
            own, bad = len(share), layout.each * int(attackers.malicious[share].sum())
            inbox = most_received(terms, attackers, share, layout.each)
            lent = min(own + bad, (terms.num_agents - own) * terms.asked)
            pool = own * (2 if layout.before is not None else 1) + bad + inbox
            rows += PROCESS + 12 * terms.dim + row * pool * on_cpu(prepared.experiment.device)
            stored += row * lent * (1 if row >= OBJECT else nodes) + min(AT_ONCE, row * inbox) * (nodes > 1)
        return rows, stored

    def __str__(self) -> str:
        return f"{several(self.processes, 'block')} on {several(len({*self.on}), 'node')}{self.fewer}"


def _why_fewer(blocks: int, most: int, prepared: Prepared, costs: Sequence[int]) -> str:
    """Why no more blocks than these work, of which nodes take the `most`."""
    terms = prepared.terms
    if blocks == most:
        return f"there {'is' if most == 1 else 'are'} {several(most, unit(prepared.experiment.device))}"
    if blocks == terms.num_agents:
        return f"there are {several(blocks, 'agent')}"
    if blocks == len(teams_of(terms, costs)):
        return "agents who train in one program stay together (--set together=1 has each train alone)"
    return "more would not end sooner"


def check_device(device: str | None) -> None:
    """Raises ConfigError where a device is one of several of a machine."""
    if ":" in (device or ""):
        raise ConfigError(f"on a cluster each process has a GPU of its own: `device` is {str(device).split(':')[0]!r}")


def check_memory(memory: int | None, prepared: Prepared) -> None:
    """Raises RunError where not even one process has room in some memory."""
    if memory is not None and memory < (least := PROCESS + 12 * prepared.terms.dim):
        raise RunError(f"each process needs {gib(least)} or more, and `memory` is {gib(memory)}: give more")


def need() -> None:
    """Raises ConfigError that names the extra where it is missing, or is not what it was: some of it is private."""
    if find_spec("ray") is None:
        raise ConfigError("a cluster needs the extra, of which ray is missing: pip install 'fedcb2o[cluster]'")
    try:
        for part in ("engine", "connect", "tasks"):
            importlib.import_module(f"fedcb2o.ray_backend.{part}")
    except ImportError as error:
        raise ConfigError(
            f"Ray {version('ray')} lacks what a cluster needs of it ({error}): pip install 'fedcb2o[cluster]', or "
            "another version"
        ) from error


def several(count: int, word: str) -> str:
    """A number of things: "1 node", "2 nodes"."""
    return f"{count} {word}{'s' * (count != 1)}"


def unit(device: str | None) -> str:
    """What of a node works on one thing at a time."""
    return "processor" if on_cpu(device) else "GPU"


def _data(prepared: Prepared) -> int:
    return sum(tensor.nbytes for tensor in shared_data(prepared.dataset).values())


def _pool(prepared: Prepared) -> int:
    return 4 * parameters.row_stride(prepared.terms.dim) * prepared.experiment.num_models
