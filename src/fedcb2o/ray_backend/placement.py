"""The nodes of a cluster: what they are and have, which blocks they take, and actors placed on them."""

import contextlib
import dataclasses
import hashlib
import importlib
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fedcb2o.errors import RunError
from fedcb2o.kernels.devices import is_cpu
from fedcb2o.parallel import resources
from fedcb2o.parallel.executors import one_thread
from fedcb2o.ray_backend.actors import POLL_SECONDS, translate_ray_errors
from fedcb2o.ray_backend.code_shipping import extend_sys_path, runtime_environment, user_modules
from fedcb2o.ray_backend.worker import AgentWorker
from fedcb2o.simulation.rounds import WorkerLostError

ANSWER_SECONDS = 60.0  # seconds that nodes may take for saying what they have
_EQUAL_SPEED = 0.85  # of the fastest node's speed, from which on another's counts as the same
_TRIALS, _STEPS = 6, 5  # of the work by which the speed of nodes is found: 250 ms
PLACEMENT_SECONDS = 60.0  # seconds in which of some actors one more must have been placed


@dataclass(frozen=True)
class Node:
    """A machine of the cluster: how many blocks it takes at once, one on each of its `processors` or of its GPUs; the
    bytes of memory that are free there, and of Ray's store; the model of its processors; how fast it is, of the
    fastest."""

    id: str
    name: str
    processors: int
    memory: int
    store: int
    model: str = ""
    speed: float = 1.0


def list_nodes(user_functions: Sequence[str] = (), device: str | None = None) -> list[Node]:
    """The nodes of the cluster that answer, and have what a `device` is for.

    Raises RunError where one has other versions than this machine, or cannot import the modules of `own` functions, and
    where none answers that has what is needed.
    """
    look = ray.remote(_describe_node)
    options = runtime_environment(user_functions)
    there = list[Node]()
    asked = []
    took = list[float]()
    kinds = ("CPU",) if is_cpu(device) else ("CPU", "GPU")
    for known in ray.nodes():
        if known["Alive"] and (
            places := int(min(known["Resources"].get(kind, 0) for kind in kinds))
        ):
            on = look.options(num_cpus=0, scheduling_strategy=_pin_to(known["NodeID"]), **options)
            asked.append((known, places, on.remote(sys.path, user_modules(user_functions))))
    mine = _versions()
    silent = list[str]()
    end = time.monotonic() + ANSWER_SECONDS
    for known, places, ref in asked:
        name = known["NodeManagerHostname"]
        try:
            answer: Any = ray.get(ref, timeout=max(0, end - time.monotonic()))
        except (ray.exceptions.RayTaskError, ray.exceptions.RuntimeEnvSetupError) as error:
            last = str(error).strip().splitlines()[-1]
            raise RunError(
                f"node {name} of the cluster cannot run this fedcb2o ({last}): it must be the same"
            ) from error
        except ray.exceptions.GetTimeoutError:
            silent.append(name)
            continue
        except ray.exceptions.RayError:  # it went, and the cluster has not noticed yet
            continue
        if (versions := answer[0]) != mine:
            pairs = [
                f"{what} {versions[what]}, here {mine[what]}"
                for what in mine
                if versions[what] != mine[what]
            ]
            raise RunError(
                f"node {name} of the cluster has {', '.join(pairs)}: they must be the same"
            )
        _, memory, model, seconds, lacking = answer
        for module, why in lacking.items():
            raise RunError(
                f"node {name} of the cluster cannot import your `{module}` ({why}): install what it needs on each "
                "node, or let it lie beside that module"
            )
        store = int(known["Resources"].get("object_store_memory", 0))
        there.append(Node(known["NodeID"], name, places, memory, store, model))
        took.append(seconds)
    if silent:
        told = f"did not answer within {ANSWER_SECONDS:.0f} seconds: {', '.join(silent)}"
        if not there:
            raise RunError(
                f"the nodes of the cluster that have what is needed {told}; see `ray status` there"
            )
        print(f"Note: nodes of the cluster are left out that {told}.", file=sys.stderr)
    if not is_cpu(device):  # nothing is known of how fast GPUs are
        return there
    return [
        dataclasses.replace(node, speed=speed)
        for node, speed in zip(there, relative_speeds(took), strict=True)
    ]


def relative_speeds(seconds: Sequence[float]) -> list[float]:
    """How fast nodes are, of the fastest, that take so many seconds for the same work. Small differences are chance."""
    return [1.0 if min(seconds) > _EQUAL_SPEED * each else min(seconds) / each for each in seconds]


def _describe_node(
    path: Sequence[str], modules: Sequence[str]
) -> tuple[dict[str, str], int, str, float, dict[str, str]]:
    """What a node tells of itself: its versions, its free memory, its model, the seconds that a piece of work takes it,
    and why it cannot import which modules."""
    extend_sys_path(path)
    lacking = {}
    for module in modules:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # a user's module may fail in any way
            lacking[module] = f"{type(error).__name__}: {error}"
    return (
        _versions(),
        resources.free_memory(),
        resources.processor_model(),
        min(_benchmark_seconds() for _ in range(_TRIALS)),
        lacking,
    )


def _versions() -> dict[str, str]:
    """The versions that bits depend on, on this machine; of a clone that is worked on, by its content."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        code.update(path.read_bytes())
    found = {name: version(name) for name in ("fedcb2o", "torch", "numpy")}
    found["fedcb2o"] += f" ({code.hexdigest()[:8]})"
    return {"python": platform.python_version(), **found}


def _benchmark_seconds() -> float:
    """How long one thread takes for some steps of a network, which are always the same."""
    weights = torch.full((512, 512), 1e-3, requires_grad=True)
    x = torch.ones(64, 512)
    with one_thread():
        began = time.perf_counter()
        for _ in range(_STEPS):
            torch.autograd.grad(((x @ weights).relu() @ weights).sum(), weights)
        return time.perf_counter() - began


def place_groups(count: int, nodes: Sequence[Node]) -> list[Node]:
    """A node for each of so many blocks, in proportion to what nodes do in the same time; the first of them are as for
    fewer blocks. All find a processor if there are as many."""
    taken = dict.fromkeys(nodes, 0)
    on = list[Node]()
    for _ in range(count):
        free = [node for node in nodes if taken[node] < node.processors]
        on.append(min(free, key=lambda node: (taken[node] + 1) / (node.processors * node.speed)))
        taken[on[-1]] += 1
    return on


@contextlib.contextmanager
def start_workers(
    on: Sequence[Node], device: str | None = None, user_functions: Sequence[str] = ()
) -> Iterator[list[Any]]:
    """Actors on these nodes, who know `own` functions, gone in the end with all that they hold.

    Raises RunError where the nodes have no processor free for them, and LostError where they cannot start, or are gone.
    """
    made: list[Any] = []
    kind = ray.remote(AgentWorker)
    gpus = 0 if is_cpu(device) else 1
    try:
        with translate_ray_errors():
            options = {
                "num_cpus": 1,
                "num_gpus": gpus,
                "max_restarts": 0,
                **runtime_environment(user_functions),
            }
            for node in on:
                made.append(
                    kind.options(scheduling_strategy=_pin_to(node.id), **options).remote(sys.path)
                )
            waiting = [actor.__ray_ready__.remote() for actor in made]
            last = time.monotonic()
            while waiting and time.monotonic() < last + PLACEMENT_SECONDS:
                there, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_SECONDS)
                if there:  # many that start at once take long, and one after the other
                    ray.get(there)
                    last = time.monotonic()
        if waiting:
            if gone := {node.id for node in on} - {n["NodeID"] for n in ray.nodes() if n["Alive"]}:
                raise WorkerLostError(
                    f"{len(gone)} nodes of the cluster are lost, which blocks were to be placed on"
                )
            raise RunError(
                f"{len(waiting)} of {len(made)} blocks found no free processor{' or GPU' * gpus} on the cluster in "
                f"{PLACEMENT_SECONDS:.0f} seconds: let fewer work (--blocks), or wait until others have ended"
            )
        yield made
    finally:
        for actor in made:
            with contextlib.suppress(Exception):
                ray.kill(actor)


def _pin_to(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node, soft=False)
