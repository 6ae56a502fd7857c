"""Consensus-based optimisation in this library and in `cbx`: seconds per step, and ratios.

    .venv/bin/python -m pip install cbx==1.0.4
    .venv/bin/python benchmarks/particles.py [--repeats 7] [--threads 1]

Plain CBO of Rastrigin's function with anisotropic noise: the same objective, start, step, dtype,
number of threads, and normals per step. The contenders take turns in one process, so that other
load affects all of them. Each measurement is a complete call with its set-up; the least of all
rounds counts, since other load only adds time. The clock is the thread's processor time for one
thread, otherwise wall-clock time.

`cbx` (Bailo, Barbaro, Gomes, Riedl, Roith, Totzeck and Vaes, "CBX: Python and Julia packages for
consensus-based interacting particle methods", 2024) runs with NumPy and with PyTorch: one call of
the objective per step; normals of the ensemble's type; a constant alpha (by default it grows by 5%
per step); without printing and tracking. Its other defaults stay: it clips, and keeps the best
particle. "noise alone" is the time for a step's normals from this library's source, a lower bound
of all such methods. "objective" is the time of one call of the objective.
"""

import argparse
import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import fedcb2o
from fedcb2o.particles.noise import Normals

try:
    import cbx.dynamics
    from cbx.utils.torch_utils import to_torch_dynamic
except ImportError:
    text = "this benchmark compares with cbx: .venv/bin/python -m pip install cbx==1.0.4"
    raise SystemExit(text) from None

ALPHA = 30.0
SIGMA = 1.0
DT = 0.01
CASES = (  # runs, particles, dimension, steps, goal of the ratio in float32
    (1, 100, 20, 2000, 2.5),
    (1, 10_000, 100, 100, 2.0),
    (100, 100, 20, 200, 3.0),
)


def rastrigin(x: torch.Tensor) -> torch.Tensor:
    """Evaluate Rastrigin's function for every particle."""
    return (x * x - 10 * torch.cos(2 * torch.pi * x) + 10).sum(-1)


def rastrigin_numpy(x: np.ndarray) -> np.ndarray:
    """Evaluate Rastrigin's function with NumPy."""
    return (x * x - 10 * np.cos(2 * np.pi * x) + 10).sum(-1)


def run_fedcb2o(start: torch.Tensor, steps: int) -> None:
    """Run this library."""
    dynamics = fedcb2o.Paper(alpha=ALPHA, sigma1=SIGMA, dt=DT, xtol=0.0)
    settings: dict[str, Any] = {"initial": start, "runs": len(start), "dtype": start.dtype}
    fedcb2o.minimize(rastrigin, maxiter=steps, dynamics=dynamics, **settings)


def _cbx_settings(steps: int) -> dict[str, Any]:
    return {
        **{"f_dim": "3D", "check_f_dims": False, "noise": "anisotropic"},
        **{"alpha": ALPHA, "sigma": SIGMA, "dt": DT, "max_it": steps},
        **{"verbosity": 0, "track_args": {"names": []}},
    }


def run_cbx_numpy(start: torch.Tensor, steps: int) -> None:
    """Run cbx with NumPy."""
    x = start.numpy()
    generator = np.random.Generator(np.random.SFC64(1))
    sampler = functools.partial(generator.standard_normal, dtype=x.dtype)
    dynamic = cbx.dynamics.CBO(rastrigin_numpy, x=x, sampler=sampler, **_cbx_settings(steps))
    dynamic.optimize(sched=None)


def run_cbx_torch(start: torch.Tensor, steps: int) -> None:
    """Run cbx with PyTorch."""
    sampler = functools.partial(torch.randn, dtype=start.dtype)
    make = to_torch_dynamic(cbx.dynamics.CBO)
    dynamic = make(rastrigin, x=start, sampler=sampler, **_cbx_settings(steps))
    dynamic.optimize(sched=None)


def seconds(function: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the duration of a call on a clock."""
    start = clock()
    function()
    return clock() - start


def measure(
    dtype: torch.dtype,
    runs: int,
    n: int,
    dim: int,
    steps: int,
    repeats: int,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Return the least milliseconds per step of each contender."""
    generator = torch.Generator().manual_seed(1)
    start = torch.rand(runs, n, dim, dtype=dtype, generator=generator) * 6 - 3
    normals = Normals(list(range(runs)), "noise", n, start)
    contenders: dict[str, Callable[[], object]] = {
        "fedcb2o": lambda: run_fedcb2o(start, steps),
        "cbx numpy": lambda: run_cbx_numpy(start, steps),
        "cbx torch": lambda: run_cbx_torch(start, steps),
        "noise alone": lambda: [normals.next() for _ in range(steps)],
        "objective": lambda: [rastrigin(start) for _ in range(steps)],
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, contender in contenders.items():
            times[name].append(seconds(contender, clock) / steps * 1e3)
    return {name: min(values) for name, values in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    rounds = f"the least of {options.repeats} rounds"
    print(f"{options.threads} thread(s), {rounds}, milliseconds a step")
    for dtype in (torch.float32, torch.float64):
        for runs, n, dim, steps, goal in CASES:
            least = measure(dtype, runs, n, dim, steps, options.repeats, clock)
            times = ", ".join(f"{name} {value:.3g}" for name, value in least.items())
            print(f"\n{str(dtype)[6:]}, {runs} x N = {n}, d = {dim}: {times}")

            ours = least["fedcb2o"]
            noise = least["noise alone"]
            ratio = min(least["cbx numpy"], least["cbx torch"]) / ours
            millions = runs * n * dim / 1e3
            print(
                f"  {ratio:.2f} times as fast as the faster back end of cbx (goal {goal});"
                f" {millions / ours:.1f} million particle-dimensions a second,"
                f" of the noise alone {millions / noise:.1f}:"
                f" {ours / noise:.2f} times the floor,"
                f" {ours / (noise + least['objective']):.2f} times noise and objective"
            )


if __name__ == "__main__":
    main()
