"""Join a cluster, or start Ray on this machine, and have actors placed there."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import ray
from ray.util import placement_group, remove_placement_group

from fedcb2o.errors import RunError
from fedcb2o.runtime.cluster.actors import lost
from fedcb2o.runtime.cluster.holder import Holder

LOCAL = "local"  # the address of a cluster that is this machine alone
PATIENCE = 60.0  # seconds that actors may take for being placed
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else it warns of what a later version will do
}


@contextlib.contextmanager
def joined(address: str, store: int | None = None, processors: int | None = None) -> Iterator[None]:
    """Within it, this process is in the cluster at an address, "auto" for the one that runs here; "local" starts Ray on
    this machine, with a `store` of so many bytes for objects. What another has joined already is used, and stays.

    Raises RunError where there is no cluster to be reached, or one of other versions.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.update(QUIET)
    known: dict[str, Any] = {"address": address}
    if address == LOCAL:
        known |= {"include_dashboard": False, "object_store_memory": store, "num_cpus": processors}
    try:
        ray.init(**known, log_to_driver=False, logging_level=logging.ERROR, configure_logging=True)
    except (ConnectionError, TimeoutError, RuntimeError, ValueError, OSError) as error:
        ray.shutdown()
        told = " ".join(str(error).split())[:300]
        raise RunError(f"cannot join the cluster at {address!r} ({told}): see `ray status` there") from error
    try:
        yield
    finally:
        ray.shutdown()


def free_processors() -> int:
    """How many blocks may work at once on the cluster now."""
    return int(ray.available_resources().get("CPU", 0))


@contextlib.contextmanager
def actors(count: int, device: str | None = None) -> Iterator[list[Any]]:
    """So many actors, spread over the nodes of the cluster, gone in the end with all that they hold."""
    need = {"CPU": 1.0} if device is None else {"CPU": 1.0, "GPU": 1.0}
    with lost():
        group = placement_group([need] * count, strategy="SPREAD")
    made: list[Any] = []
    try:
        if not group.wait(PATIENCE):
            there = ray.available_resources()
            free = ", ".join(f"{there.get(kind, 0):g} {kind}s" for kind in need)
            raise RunError(f"{count} blocks need a processor each, and the cluster has {free} free: fewer --blocks")
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        kind = ray.remote(Holder)
        for b in range(count):
            where = strategy(group, placement_group_bundle_index=b)
            options = {"num_cpus": 1, "num_gpus": need.get("GPU", 0), "max_restarts": 0, "scheduling_strategy": where}
            made.append(kind.options(**options).remote(sys.path))
        yield made
    finally:
        for actor in made:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        with contextlib.suppress(Exception):
            remove_placement_group(group)
