"""Robust aggregation rules here and in `byzfl`, side by side: seconds a call, and memory beside the models.

    .venv/bin/python -m pip install --no-deps byzfl==0.0.11
    .venv/bin/python benchmarks/rules.py [--small] [--models 21 100] [--only RULE ...] [--repeats 3] [--threads 1]

m models of the paper's network (d = 6,572,975, float32, random), of which m // 5 are assumed to attack. The contenders
take turns in one process, so that the machine's other load hits them alike. Ours is a whole call, of models that are
finite, as all are that agents receive. byzfl runs by NumPy and by PyTorch, with its own defaults; what it asks more
memory for than is free is left out, and so is byzfl where it is not installed. Its geometric median makes 3 passes over
the models, ours one and then iterates on the Gram matrix to the end; its NNM makes all the mixed models, ours the mean
of them.

The floor is the time to read the models once at the bandwidth of a copy. Memory is the peak of the process during the
call over what it was before (Linux: VmHWM), in units of the models' own.
"""

import argparse
import functools
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fedcb2o.federated import pre_steps, robust, robust_columns
from fedcb2o.federated.aggregate import apply, gram

DIM, SMALL = 6_572_975, 100_000
SIZES = {
    "Meamed": 8.0,
    "Krum": 5.0,
    "MultiKrum": 6.0,
}  # about what byzfl takes, in units of the models, models included


def rules(m: int, f: int) -> dict[str, Callable[[Tensor], Any]]:
    """Our rules by their names, each a whole call on models [m, d]; the last ones are the agent's own."""

    def of(rule: Callable[..., Any], *given: Any, mixing: Any = None, **parameters: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: apply(functools.partial(rule, **parameters), x, None, *given, mixing=mixing)

    nnm = functools.partial(pre_steps.nnm, f=f)
    return {
        "mean": of(robust.mean),
        "coordinate_median": of(robust_columns.coordinate_median),
        "trimmed_mean": of(robust_columns.trimmed_mean, f=f),
        "meamed": of(robust_columns.meamed, f=f),
        "gram alone": gram,
        "krum": of(robust.krum, f=f),
        "multi_krum": of(robust.multi_krum, f=f),
        "geometric_median": of(robust.geometric_median),
        "bulyan": of(robust.bulyan, f=f),
        "nnm, mean": of(robust.mean, mixing=nnm),
        "nnm, trimmed_mean": of(robust_columns.trimmed_mean, mixing=nnm, f=f),
        "centred_clipping": of(robust.centred_clipping),
        "norm_clipping": of(robust.norm_clipping),
        "clipped_gossip": of(robust.clipped_gossip, f=f),
        "monna": of(robust.monna, f=f),
        "balance": of(robust.balance, 0.5),
        "ubar": of(robust.ubar, torch.rand(m), f=f),
        "fltrust": of(robust.fltrust),
    }


def theirs(byzfl: Any, f: int) -> dict[str, functools.partial[Any]]:
    """What byzfl has of them, made anew for every call: some keep what they found."""
    return {
        "mean": functools.partial(byzfl.Average),
        "coordinate_median": functools.partial(byzfl.Median),
        "trimmed_mean": functools.partial(byzfl.TrMean, f),
        "meamed": functools.partial(byzfl.Meamed, f),
        "krum": functools.partial(byzfl.Krum, f),
        "multi_krum": functools.partial(byzfl.MultiKrum, f),
        "geometric_median": functools.partial(byzfl.GeometricMedian),
        "nnm, mean": functools.partial(byzfl.NNM, f),
        "centred_clipping": functools.partial(byzfl.CenteredClipping),
        "monna": functools.partial(byzfl.MoNNA, f),
    }


def call(make: functools.partial[Any], x: Any) -> Any:
    """A whole call of one of byzfl's."""
    return make()(x)


def load() -> Any:
    """byzfl, or None where it is not installed; what it imports and no rule needs may be absent."""
    if importlib.util.find_spec("byzfl") is None:
        return None
    absent = [name for name in ("torchvision", "seaborn") if importlib.util.find_spec(name) is None]
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in absent}):
        import byzfl
    return byzfl


def kilobytes(file: str, key: str) -> int:
    """A number from a table of Linux' /proc; 0 elsewhere."""
    path = Path("/proc") / file
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), 0)


def measured(function: Callable[[], object]) -> tuple[float, int]:
    """The seconds that a call takes, and the bytes by which the process grew at most."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")  # the peak is what it is now
    before, begun = kilobytes("self/status", "VmRSS"), time.perf_counter()
    function()
    seconds = time.perf_counter() - begun
    return seconds, max(0, kilobytes("self/status", "VmHWM") - before) * 1024


def floor(x: Tensor) -> float:
    """The seconds to read the models once, at the bandwidth of a copy of a part of them."""
    part = x.flatten()[: 2**27]
    out = torch.empty_like(part)
    out.copy_(part)
    seconds = min(measured(lambda: out.copy_(part))[0] for _ in range(5))
    return x.nbytes / (2 * part.nbytes / seconds)


def needs(name: str, x: Tensor, f: int) -> float:
    """About the bytes that byzfl takes."""
    return x.nbytes * (len(x) - f if name == "NNM" else SIZES.get(name, 4.0))


def main() -> None:
    """Time them in turns and print a line for each rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help=f"a quick check: d = {SMALL:,}")
    parser.add_argument("--models", type=int, nargs="+", default=[21, 100], metavar="m")
    parser.add_argument("--only", nargs="+", metavar="RULE")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="without byzfl")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    byzfl = None if arguments.alone else load()
    if byzfl is None and not arguments.alone:
        print("byzfl is not installed, so there is nothing to compare with: pip install --no-deps byzfl==0.0.11")
    for m in arguments.models:
        torch.manual_seed(0)
        x, f = torch.randn(m, SMALL if arguments.small else DIM), m // 5
        ours, others = rules(m, f), {} if byzfl is None else theirs(byzfl, f)
        least = floor(x)
        print(
            f"\nm = {m}, f = {f}, d = {x.shape[1]:,}: {x.nbytes / 2**30:.2f} GiB, read once in {least:.3f} s;"
            f" {arguments.threads} thread(s), medians of {arguments.repeats}\n"
            f"{'':18}  seconds  / floor  memory  byzfl: numpy    torch  memory  ratio"
        )
        for name in arguments.only or ours:
            contenders: dict[str, Callable[[], object]] = {"ours": functools.partial(ours[name], x)}
            their = others.get(name)
            free = kilobytes("meminfo", "MemAvailable") * 1024 or 2**62
            fits = their is not None and needs(their.func.__name__, x, f) < 0.8 * free
            if fits:
                contenders |= {
                    "numpy": functools.partial(call, their, x.numpy()),
                    "torch": functools.partial(call, their, x),
                }
            taken: dict[str, list[tuple[float, int]]] = {each: [] for each in contenders}
            for _ in range(arguments.repeats):
                for each, contender in contenders.items():
                    taken[each].append(measured(contender))
            seconds = {each: statistics.median(s for s, _ in runs) for each, runs in taken.items()}
            memory = {each: max(b for _, b in runs) / x.nbytes for each, runs in taken.items()}
            mine = seconds["ours"]
            line = f"{name:18} {mine:8.3f} {mine / least:8.1f} {memory['ours']:7.2f}"
            if fits:
                both = [memory["numpy"], memory["torch"]]
                best = min(seconds["numpy"], seconds["torch"])
                line += f" {seconds['numpy']:13.3f} {seconds['torch']:8.3f} {max(both):7.2f} {best / mine:6.1f}"
            elif their is not None:
                line += f"   asks for about {needs(their.func.__name__, x, f) / 2**30:.0f} GiB: left out"
            print(line, flush=True)
        del x


if __name__ == "__main__":
    main()
