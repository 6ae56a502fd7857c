"""Nodes of a cluster, and the placement of agent groups on them."""

import contextlib
import hashlib
import importlib
import itertools
import logging
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fedcb2o.errors import RunError
from fedcb2o.federated.local_update import plan_training_batches
from fedcb2o.federated.run_spec import RunSpec
from fedcb2o.kernels.devices import is_cpu
from fedcb2o.parallel import _resources
from fedcb2o.parallel._executors import balance_load
from fedcb2o.ray_backend._errors import translate_ray_errors
from fedcb2o.ray_backend._user_code import (
    extend_sys_path,
    import_path,
    runtime_environment,
    user_modules,
)
from fedcb2o.ray_backend._worker import AgentWorker
from fedcb2o.simulation.rounds import WorkerLostError

ANSWER_SECONDS = 60.0  # granted to nodes for reporting what they have
PLACEMENT_SECONDS = 120.0  # without a new placed worker, after which placement has failed

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Node:
    """A machine of the cluster.

    `processors` is the number of agent groups at once, one for each processor or GPU. Its free
    memory, and the size of Ray's store, are in bytes. `model` is that of its processors.
    """

    id: str
    name: str
    processors: int
    memory: int
    store: int
    model: str = ""


@dataclass(frozen=True)
class _NodeReport:
    """The answer of a node; `import_errors` by module."""

    versions: dict[str, str]
    import_errors: dict[str, str]
    memory: int
    model: str


def list_nodes(user_functions: Sequence[str] = (), device: str | None = None) -> list[Node]:
    """Return the nodes that answer and have what a device needs.

    User functions are given as "module:function", and the device by PyTorch's name; the CPU by
    default. RunError is raised if a node has other versions, or cannot import the modules of user
    functions; or if no node answers that has what is needed.
    """
    nodes: list[Node] = []
    silent: list[str] = []
    asked = _ask_nodes(user_functions, device)
    deadline = time.monotonic() + ANSWER_SECONDS
    for known, processors, ref in asked:
        name = known["NodeManagerHostname"]
        try:
            report = ray.get(ref, timeout=max(0, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            silent.append(name)
            continue
        except (ray.exceptions.RayTaskError, ray.exceptions.RuntimeEnvSetupError) as error:
            last_line = str(error).strip().splitlines()[-1]
            raise RunError(
                f"node {name} of the cluster cannot run this fedcb2o ({last_line}): it must be the "
                "same"
            ) from error
        except ray.exceptions.RayError:
            continue  # it left, and the cluster has not noticed yet
        _check_report(name, report)
        store = int(known["Resources"].get("object_store_memory", 0))
        nodes.append(Node(known["NodeID"], name, processors, report.memory, store, report.model))

    if silent:
        text = f"did not answer within {ANSWER_SECONDS:.0f} seconds: {', '.join(silent)}"
        if not nodes:
            raise RunError(
                f"the nodes of the cluster that have what is needed {text}; see `ray status` there"
            )
        _log.warning("Nodes of the cluster are left out that %s.", text)
    return nodes


def place_groups(count: int, nodes: Sequence[Node]) -> list[Node]:
    """Place `count` agent groups in proportion to the processors of nodes.

    There are at most as many groups as processors of all nodes. The first entries are the placement
    of fewer groups.
    """
    used = dict.fromkeys(nodes, 0)
    placement: list[Node] = []
    for _ in range(count):
        # The next group goes to the node that would then be the least busy.
        free = [node for node in nodes if used[node] < node.processors]
        node = min(free, key=lambda n: (used[n] + 1) / n.processors)
        placement.append(node)
        used[node] += 1
    return placement


def shard_agents(spec: RunSpec, costs: Sequence[int], count: int) -> list[list[int]]:
    """Distribute agents over at most `count` workers so that all workers take about as long.

    Agents that train together stay together. The ids of a worker's agents ascend.
    """
    batches = plan_training_batches(spec, costs)
    batch_costs = [sum(costs[agent] for agent in batch) for batch in batches]
    shares = balance_load(range(len(batches)), batch_costs, count)
    return [sorted(itertools.chain(*(batches[k] for k in share))) for share in shares]


@contextlib.contextmanager
def start_workers(
    nodes: Sequence[Node], device: str | None = None, user_functions: Sequence[str] = ()
) -> Iterator[list[Any]]:
    """Start one worker actor per entry of `nodes`; kill the actors at the end.

    Yields the handles of the actors. RunError is raised if the nodes have no free processor for the
    actors, and WorkerLostError if actors cannot start, or are gone.
    """
    handles: list[Any] = []
    gpus = 0 if is_cpu(device) else 1
    environment = runtime_environment(user_functions)
    options = {"num_cpus": 1, "num_gpus": gpus, **environment}
    actor = ray.remote(AgentWorker)
    try:
        with translate_ray_errors():
            for node in nodes:
                # A lost actor is not started again: its models are gone, so that the run continues
                # from its checkpoint.
                strategy = _pin_to(node.id)
                pinned = actor.options(scheduling_strategy=strategy, max_restarts=0, **options)
                handles.append(pinned.remote(import_path()))
            waiting = [handle.__ray_ready__.remote() for handle in handles]
            while waiting:
                # Each actor that starts renews the time of the others.
                ready, waiting = ray.wait(waiting, timeout=PLACEMENT_SECONDS)
                ray.get(ready)
                if not ready:
                    raise _placement_error(nodes, len(waiting), gpus)
        yield handles
    finally:
        for handle in handles:
            # The cluster itself may be gone.
            with contextlib.suppress(Exception):
                ray.kill(handle)


def _placement_error(nodes: Sequence[Node], waiting: int, gpus: int) -> RunError:
    alive = {known["NodeID"] for known in ray.nodes() if known["Alive"]}
    if lost := {node.id for node in nodes} - alive:
        return WorkerLostError(f"{len(lost)} nodes of the cluster are lost before they began")
    kind = "processor or GPU" if gpus else "processor"
    return RunError(
        f"{waiting} of {len(nodes)} blocks found no free {kind} on the cluster in "
        f"{PLACEMENT_SECONDS:.0f} seconds: let fewer work (--blocks), or wait until other programs "
        "have ended"
    )


def _ask_nodes(
    user_functions: Sequence[str], device: str | None
) -> list[tuple[dict[str, Any], int, Any]]:
    """Ask every suitable node for a report; return (Ray's record, processors, reference)."""
    # Without a processor, so that nodes answer that are busy.
    options = {"num_cpus": 0, **runtime_environment(user_functions)}
    describe = ray.remote(_describe_node)
    kinds = ("CPU",) if is_cpu(device) else ("CPU", "GPU")
    asked = []
    for known in ray.nodes():
        processors = int(min(known["Resources"].get(kind, 0) for kind in kinds))
        if known["Alive"] and processors:
            pinned = describe.options(scheduling_strategy=_pin_to(known["NodeID"]), **options)
            ref = pinned.remote(import_path(), user_modules(user_functions))
            asked.append((known, processors, ref))
    return asked


def _check_report(name: str, report: _NodeReport) -> None:
    """Raise RunError if a node has other versions or cannot import a module."""
    pairs = [
        f"{package} {report.versions[package]}, here {own}"
        for package, own in _versions().items()
        if report.versions[package] != own
    ]
    if pairs:
        raise RunError(f"node {name} of the cluster has {', '.join(pairs)}: they must be the same")
    for module, error in report.import_errors.items():
        raise RunError(
            f"node {name} of the cluster cannot import your `{module}` ({error}): install it "
            "and what it needs on each node, or put it into a folder that all nodes share"
        )


def _describe_node(path: Sequence[str], modules: Sequence[str]) -> _NodeReport:
    extend_sys_path(path)
    import_errors = {}
    for module in modules:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # a user's module may fail in any way
            import_errors[module] = f"{type(error).__name__}: {error}"
    memory = _resources.free_memory()
    return _NodeReport(_versions(), import_errors, memory, _resources.processor_model())


def _versions() -> dict[str, str]:
    """Return the versions on which bits depend; of fedcb2o, a checksum of its files too."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    versions = {"python": platform.python_version()}
    versions |= {name: version(name) for name in ("fedcb2o", "torch", "numpy")}
    versions["fedcb2o"] += f" ({digest.hexdigest()[:8]})"
    return versions


def _pin_to(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)
