"""Work in several processes of one machine: executors, shared memory and resources.

Submodules are imported when first used, because the command line needs `resources` before PyTorch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedcb2o.parallel._executors import (
        Executor,
        PoolExecutor,
        SerialExecutor,
        balance_load,
        one_thread,
    )
    from fedcb2o.parallel._process_pool import ProcessPool, current_pool
    from fedcb2o.parallel._serialization import execute, serialize, unwrap_result
    from fedcb2o.parallel._shared_memory import SharedTensors, allocate_shared

__all__ = [
    "Executor",
    "PoolExecutor",
    "ProcessPool",
    "SerialExecutor",
    "SharedTensors",
    "allocate_shared",
    "balance_load",
    "current_pool",
    "execute",
    "one_thread",
    "serialize",
    "unwrap_result",
]

_MODULES = {
    "_executors": ("Executor", "PoolExecutor", "SerialExecutor", "balance_load", "one_thread"),
    "_process_pool": ("ProcessPool", "current_pool"),
    "_serialization": ("execute", "serialize", "unwrap_result"),
    "_shared_memory": ("SharedTensors", "allocate_shared"),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
