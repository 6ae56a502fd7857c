"""The choice of kernels for a seed: set by the experiment, recorded, or the fastest here.

A choice may depend on a timing or on a device's memory. It is recorded when a seed begins, and
kept.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedcb2o import records
from fedcb2o.errors import RunError
from fedcb2o.experiments.config.prepared_seed import PreparedSeed
from fedcb2o.federated.run_spec import ConvolutionKernel, LinearKernel
from fedcb2o.kernels import _autotune, _onednn, devices
from fedcb2o.nn import memory_layout, parameters

ENVIRONMENT = "environment.json"

# The kernels of records from before a key existed.
_DEFAULTS = {"linear": "torch", "layout": "contiguous", "convolution": "grouped", "together": None}


def choose_kernels(folder: Path, prepared: PreparedSeed) -> dict[str, Any]:
    """Return precision and kernels of a seed; one that has begun keeps those recorded."""
    choice = _KernelChoice(folder, prepared)
    precision = choice.precision()
    linear = choice.resolve("linear", choice.fastest_linear)
    layout = choice.resolve("layout", lambda: "contiguous")
    convolution = choice.resolve(
        "convolution", lambda: choice.fastest_convolution(precision, layout)
    )
    together = choice.resolve("together", lambda: choice.largest_batch(convolution))
    if linear == "onednn" and not _onednn.is_available():
        raise RunError(
            f"{folder} needs oneDNN, which this PyTorch lacks: choose another --out and "
            "--set linear=torch"
        )
    return {
        "precision": precision,
        "linear": linear,
        "layout": layout,
        "convolution": convolution,
        "together": together,
    }


class _KernelChoice:
    """The candidates and timings for one seed."""

    def __init__(self, folder: Path, prepared: PreparedSeed) -> None:
        self.experiment = prepared.experiment
        self.module = prepared.spec.module
        self.dim = prepared.spec.dim
        self.x = prepared.dataset.pool.x[: self.experiment.training.batch_size]
        self.device = devices.resolve_device(self.experiment.device)
        path = folder / ENVIRONMENT
        self.recorded = records.read_json(path) if path.exists() else None

    def resolve(self, name: str, fastest: Callable[[], Any]) -> Any:
        """Return the experiment's value, else the recorded one, else the fastest."""
        requested = getattr(self.experiment, name)
        if requested is not None:
            return requested
        if self.recorded is None:
            return fastest()
        # A record without the key is of an earlier version, which had this kernel only.
        return self.recorded.get(name, _DEFAULTS[name])

    def precision(self) -> Any:
        """Return the recorded precision, else the one that this machine supports."""
        requested = self.experiment.training.precision
        if self.recorded is None:
            return _autotune.supported_precision(requested, self.device)
        return self.recorded.get("precision", requested)

    def fastest_linear(self) -> LinearKernel:
        """Return the fastest kernel of dense layers; "onednn" for large layers on the CPU only."""
        if self.experiment.training.privacy is not None:
            return "torch"
        if self.device.type != "cpu":
            return "batched"
        return _autotune.fastest_linear() if self.dim >= _onednn.MIN_WEIGHTS else "torch"

    def fastest_convolution(self, precision: Any, layout: Any) -> ConvolutionKernel:
        """Return the fastest convolution; `layout` is that of images in the timing on a CPU."""
        together = self.experiment.together
        if self.experiment.training.privacy is not None:
            return "grouped"
        if self.device.type == "cpu":
            # Batched models are about twice as fast with groups.
            module = memory_layout.with_memory_format(self.module, layout)
            if together:
                return "grouped"
            return _autotune.fastest_single_convolution(module, self.x, precision)
        # Unfolded images take the most memory, so they bound the number of agents.
        largest = self._max_agents("unfolded")
        if (together or 1) > largest:
            return "grouped"
        return _autotune.fastest_batched_convolution(
            self.module, self.x, precision, self.device, together or largest
        )

    def largest_batch(self, convolution: ConvolutionKernel) -> int | None:
        """Return the number of agents that a device holds in one program; None on the CPU."""
        return None if self.device.type == "cpu" else self._max_agents(convolution)

    def _max_agents(self, convolution: ConvolutionKernel) -> int:
        """Return the number of agents that the device's memory allows in one program."""
        model_bytes = 4 * self.experiment.num_models * parameters.row_stride(self.dim)
        largest = devices.max_batched_agents(
            self.device, model_bytes, self.module, self.x, convolution
        )
        return min(self.experiment.agents.num_agents, largest)
