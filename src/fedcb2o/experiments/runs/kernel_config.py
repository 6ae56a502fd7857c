"""The primitives of a run: as the experiment says, as its seed began, or the best ones here.

A choice may depend on a timing or on a device's memory. So it is recorded when a seed begins, and kept to.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedcb2o import records
from fedcb2o.errors import RunError
from fedcb2o.experiments.config.build import PreparedSeed
from fedcb2o.federated.run_spec import ConvolutionKernel, LinearKernel
from fedcb2o.kernels import autotune, devices, onednn
from fedcb2o.nn import memory_layout, parameters

ENVIRONMENT = "environment.json"
# Where a record does not say.
_DEFAULTS = {"linear": "torch", "layout": "contiguous", "convolution": "grouped", "together": None}


def choose_kernels(folder: Path, prepared: PreparedSeed) -> dict[str, Any]:
    """The experiment's `linear`, `layout`, `convolution`, `together` and `training.precision` for a seed, whose folder
    may tell what it began with.

    Raises RunError where this PyTorch lacks one.
    """
    experiment = prepared.experiment
    module = prepared.spec.module
    dim = prepared.spec.dim
    x = prepared.dataset.pool.x[: experiment.training.batch_size]
    device = devices.resolve_device(experiment.device)
    path = folder / ENVIRONMENT
    began = records.read_json(path) if path.exists() else None

    def kept(name: str, best: Callable[[], Any]) -> Any:
        asked = getattr(experiment, name)
        if asked is not None:
            return asked
        return best() if began is None else began.get(name, _DEFAULTS[name])

    def linear() -> LinearKernel:
        large = dim >= onednn.MIN_WEIGHTS and device.type == "cpu"
        return autotune.fastest_linear() if large else "torch"

    def layout() -> memory_layout.MemoryLayout:
        if (
            device.type != "cpu" or experiment.together is not None
        ):  # vmap knows no other for some layers
            return "contiguous"
        return autotune.fastest_layout(module, x, precision)

    def room(convolution: ConvolutionKernel) -> int:
        pool = 4 * experiment.num_models * parameters.row_stride(dim)
        return min(
            experiment.agents.num_agents,
            devices.max_batched_agents(device, pool, module, x, convolution),
        )

    def convolution() -> ConvolutionKernel:
        if device.type == "cpu":  # several at once are about twice as fast by groups
            laid_out = memory_layout.with_memory_format(module, layout_here)
            return (
                "grouped"
                if experiment.together
                else autotune.fastest_single_convolution(laid_out, x, precision)
            )
        most = room("unfolded")
        if (experiment.together or 1) > most:
            return "grouped"
        return autotune.fastest_batched_convolution(
            module, x, precision, device, experiment.together or most
        )

    asked = experiment.training.precision
    precision = (
        autotune.supported_precision(asked, device)
        if began is None
        else began.get("precision", asked)
    )
    layout_here = kept("layout", layout)
    chosen = {
        "precision": precision,
        "linear": kept("linear", linear),
        "layout": layout_here,
        "convolution": kept("convolution", convolution),
    }
    # On the CPU small dense networks alone.
    chosen["together"] = kept(
        "together", lambda: None if device.type == "cpu" else room(chosen["convolution"])
    )
    if chosen["linear"] == "onednn" and not onednn.is_available():
        raise RunError(
            f"{folder} needs oneDNN, which this PyTorch lacks: choose another --out and --set linear=torch"
        )
    return chosen
