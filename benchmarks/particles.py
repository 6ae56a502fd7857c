"""Consensus-based optimisation here and in `cbx`, side by side: seconds a step, and their ratios.

    .venv/bin/python -m pip install cbx==1.0.4
    .venv/bin/python benchmarks/particles.py [--repeats 7] [--threads 1]

Plain CBO of Rastrigin's function with anisotropic noise: the same objective, start, step, dtype and number of threads,
and as many normals a step. The contenders take turns in one process, so that the machine's other load hits them alike.
Each is a whole call, set-up included; the least of all rounds counts, since other load only adds. With one thread it
is the thread's processor time, else the time on the wall. `cbx` (Bailo, Barbaro, Gomes, Riedl, Roith, Totzeck and Vaes,
"CBX: Python and Julia packages for consensus-based interacting particle methods", 2024) runs by NumPy and by PyTorch:
the objective once a step, as here; normals of the ensemble's type; a constant alpha (by default it grows by 5% a
step); without printing and tracking. What else it does by default stays: it clips, and keeps the best particle. "noise
alone" is the time for a step's normals from this library's source, the floor of every method that needs them;
"objective" that of one call of the objective, which everybody pays.
"""

import argparse
import functools
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch

import fedcb2o
from fedcb2o.particles.noise import Normals

try:
    import cbx.dynamics
    from cbx.utils.torch_utils import to_torch_dynamic
except ImportError:
    raise SystemExit(
        "this benchmark compares with cbx: .venv/bin/python -m pip install cbx==1.0.4"
    ) from None

ALPHA = 30.0
SIGMA = 1.0
DT = 0.01
CASES = ((1, 100, 20, 2000, 2.5), (1, 10_000, 100, 100, 2.0), (100, 100, 20, 200, 3.0))


def rastrigin(x: torch.Tensor) -> torch.Tensor:
    """Rastrigin's function of every particle."""
    return (x * x - 10 * torch.cos(2 * torch.pi * x) + 10).sum(-1)


def rastrigin_numpy(x: np.ndarray) -> np.ndarray:
    """The same for NumPy."""
    return (x * x - 10 * np.cos(2 * np.pi * x) + 10).sum(-1)


def ours(start: torch.Tensor, steps: int) -> None:
    """This library."""
    runs = len(start)
    fedcb2o.minimize(
        rastrigin,
        initial=start,
        runs=runs,
        alpha=ALPHA,
        sigma1=SIGMA,
        dt=DT,
        maxiter=steps,
        xtol=0.0,
        dtype=start.dtype,
    )


def cbx_numpy(start: torch.Tensor, steps: int) -> None:
    """The other one by NumPy."""
    normal = functools.partial(
        np.random.Generator(np.random.SFC64(1)).standard_normal, dtype=start.numpy().dtype
    )
    dynamic = cbx.dynamics.CBO(
        rastrigin_numpy, f_dim="3D", check_f_dims=False, x=start.numpy(), noise="anisotropic", alpha=ALPHA, sigma=SIGMA,
        dt=DT, max_it=steps, verbosity=0, track_args={"names": []}, sampler=normal,
    )  # fmt: skip
    dynamic.optimize(sched=None)


def cbx_torch(start: torch.Tensor, steps: int) -> None:
    """The other one by PyTorch."""
    dynamic = to_torch_dynamic(cbx.dynamics.CBO)(
        rastrigin, f_dim="3D", check_f_dims=False, x=start, noise="anisotropic", alpha=ALPHA, sigma=SIGMA, dt=DT,
        max_it=steps, verbosity=0, track_args={"names": []},
        sampler=lambda size: torch.randn(size, dtype=start.dtype),
    )  # fmt: skip
    dynamic.optimize(sched=None)


def seconds(function: Callable[[], object], clock: Callable[[], float]) -> float:
    """What a call takes on that clock."""
    begun = clock()
    function()
    return clock() - begun


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    print(
        f"{arguments.threads} thread(s), the least of {arguments.repeats} rounds, milliseconds a step"
    )
    for dtype in (torch.float32, torch.float64):
        for runs, n, dim, steps, goal in CASES:
            start = (
                torch.rand(runs, n, dim, dtype=dtype, generator=torch.Generator().manual_seed(1))
                * 6
                - 3
            )
            normals = Normals(list(range(runs)), "noise", n, dim, dtype=dtype, device=start.device)
            contenders: dict[str, Callable[[], object]] = {
                "fedcb2o": lambda start=start, steps=steps: ours(start, steps),
                "cbx numpy": lambda start=start, steps=steps: cbx_numpy(start, steps),
                "cbx torch": lambda start=start, steps=steps: cbx_torch(start, steps),
                "noise alone": lambda normals=normals, steps=steps: [
                    normals.next() for _ in range(steps)
                ],
                "objective": lambda start=start, steps=steps: [
                    rastrigin(start) for _ in range(steps)
                ],
            }
            taken: dict[str, list[float]] = {name: [] for name in contenders}
            for _ in range(arguments.repeats):
                for name, contender in contenders.items():
                    taken[name].append(seconds(contender, clock) / steps * 1e3)
            least = {name: min(times) for name, times in taken.items()}
            mine = least["fedcb2o"]
            print(
                f"\n{str(dtype)[6:]}, {runs} x N = {n}, d = {dim}: "
                + ", ".join(f"{name} {time:.3g}" for name, time in least.items())
            )
            theirs = min(least["cbx numpy"], least["cbx torch"])
            rate = runs * n * dim / mine / 1e3
            floor = runs * n * dim / least["noise alone"] / 1e3
            print(
                f"  {theirs / mine:.2f} times as fast as the faster back end of cbx (goal {goal});"
                f" {rate:.1f} million particle-dimensions a second, of the noise alone {floor:.1f}:"
                f" {mine / least['noise alone']:.2f} times the floor,"
                f" {mine / (least['noise alone'] + least['objective']):.2f} times noise and objective"
            )


if __name__ == "__main__":
    main()
