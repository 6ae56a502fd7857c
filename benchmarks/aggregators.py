"""Time of each aggregator next to ByzFL's, in one interleaved run.

    python -m pip install --no-deps --target FOLDER byzfl==0.0.11
    OMP_NUM_THREADS=1 PYTHONPATH=FOLDER python benchmarks/aggregators.py [--only NNM ...]

Each line has the least CPU time of `fedcb2o.aggregators`, of the fastest other contestant on the
same float32 numbers, and the ratio. Both sides get the numbers as an array and as a tensor, and the
faster counts. The others are ByzFL's back ends (NumPy and PyTorch) and, for the mean, PyTorch's
own. MDA and SMEA assume f = 1, because ByzFL tries all subsets. Clipping and ARC of ByzFL write
into their input, so that a caller who needs the vectors again copies them first; "in place"
compares without this copy.
"""

import argparse
import functools
import importlib.util
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch

from fedcb2o import aggregators

F = 5
RULES: dict[str, tuple[Any, ...]] = {
    "Average": (),
    "Median": (),
    "TrMean": (F,),
    "Meamed": (F,),
    "GeometricMedian": (),
    "Krum": (F,),
    "MultiKrum": (F,),
    "CenteredClipping": (),
    "MDA": (1,),
    "MoNNA": (F,),
    "CAF": (F,),
    "SMEA": (1,),
    "NNM": (F,),
    "Bucketing": (2,),
    "Clipping": (2.0,),
    "ARC": (F,),
}
WRITES_INPUT = ("Clipping", "ARC")
ARRAYS = ("fedcb2o, array", "numpy")


@functools.cache
def byzfl() -> Any:
    """Import ByzFL; its rules do not need its other requirements."""
    for name in ("torchvision", "seaborn"):
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = mock.MagicMock()
    return importlib.import_module("byzfl")


def seconds(function: Callable[..., Any], x: Any) -> float:
    """Return the CPU time of one call."""
    start = time.process_time()
    function(x)
    return time.process_time() - start


def contestants(name: str, *, in_place: bool) -> dict[str, Callable[..., Any]]:
    """Return our rule and the others by name, each a function of models [m, d].

    Args:
        name: A rule of `RULES`.
        in_place: Whether a rule of `WRITES_INPUT` may write into the models.

    Returns:
        Functions; those of `ARRAYS` take an array, and all others a tensor.
    """
    keywords = {"in_place": True} if in_place else {}
    other = getattr(byzfl(), name)

    def theirs(x: Any) -> Any:
        if name in WRITES_INPUT and not in_place:
            x = x.clone() if isinstance(x, torch.Tensor) else x.copy()
        return other(*RULES[name])(x)

    ours = getattr(aggregators, name)(*RULES[name], **keywords)
    rules = {
        "fedcb2o": ours,
        "fedcb2o, array": ours,
        "numpy": theirs,
        "torch": theirs,
    }
    if name == "Average":
        rules["mean(0)"] = lambda x: x.mean(0)
    return rules


def main() -> None:
    """Print one line per rule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=21)
    parser.add_argument("--size", type=int, default=6_600_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=list(RULES), choices=list(RULES))
    args = parser.parse_args()

    torch.set_num_threads(1)
    array = np.random.default_rng(0).standard_normal((args.models, args.size), dtype=np.float32)
    print(f"{args.models} models of {args.size} numbers, one thread")
    print(f"{'rule':18} {'fedcb2o':>9} {'other':>9} {'by':>8} {'ratio':>6}")
    lines = [(name, False) for name in args.only]
    lines += [(name, True) for name in args.only if name in WRITES_INPUT]
    for name, in_place in lines:
        rules = contestants(name, in_place=in_place)
        best = dict.fromkeys(rules, float("inf"))
        for _ in range(args.repeats):
            for key, rule in rules.items():
                for _ in range(2):  # the second call finds the memory that the first one freed
                    x = array.copy() if in_place else array
                    models = x if key in ARRAYS else torch.from_numpy(x)
                    best[key] = min(best[key], seconds(rule, models))
        mine = min(best.pop("fedcb2o"), best.pop("fedcb2o, array"))
        fastest = min(best, key=lambda key: best[key])
        ratio = best[fastest] / mine
        title = f"{name}, in place" if in_place else name
        print(f"{title:18} {mine:9.3f} {best[fastest]:9.3f} {fastest:>8} {ratio:6.2f}", flush=True)


if __name__ == "__main__":
    main()
