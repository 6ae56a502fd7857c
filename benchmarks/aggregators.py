"""Time of each aggregator next to ByzFL's, in one interleaved run.

    python -m pip install --no-deps --target FOLDER byzfl==0.0.11
    PYTHONPATH=FOLDER python benchmarks/aggregators.py [--models 21] [--size 6600000] [--repeats 3]

Each line has the least time of `fedcb2o.aggregators`, of ByzFL's faster back end (NumPy or PyTorch,
on the same float32 numbers), and the ratio. MDA and SMEA assume f = 1, because ByzFL tries all
subsets.
"""

import argparse
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


def byzfl() -> Any:
    """Import ByzFL; its rules do not need its other requirements."""
    for name in ("torchvision", "seaborn"):
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = mock.MagicMock()
    return importlib.import_module("byzfl")


def seconds(function: Callable[[], Any]) -> float:
    """Return the time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    """Print one line per rule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=21)
    parser.add_argument("--size", type=int, default=6_600_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=list(RULES), choices=list(RULES))
    args = parser.parse_args()

    theirs = byzfl()
    shape = (args.models, args.size)
    array = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    tensor = torch.from_numpy(array)
    print(f"{args.models} models of {args.size} numbers, {torch.get_num_threads()} threads")
    print(f"{'rule':18} {'fedcb2o':>9} {'byzfl':>9} {'back end':>8} {'ratio':>6}")
    for name in args.only:
        ours = getattr(aggregators, name)(*RULES[name])
        other = getattr(theirs, name)
        # Clipping and ARC of ByzFL write into their input: later repeats find it clipped.
        contestants: dict[str, Callable[[], Any]] = {
            "fedcb2o": lambda ours=ours: ours(tensor),
            "numpy": lambda other=other, name=name: other(*RULES[name])(array),
            "torch": lambda other=other, name=name: other(*RULES[name])(tensor),
        }
        if name == "Average":
            contestants["torch.mean"] = lambda: tensor.mean(0)
        best = dict.fromkeys(contestants, float("inf"))
        for _ in range(args.repeats):
            for key, function in contestants.items():
                best[key] = min(best[key], seconds(function))
        mine = best.pop("fedcb2o")
        fastest = min(best, key=lambda key: best[key])
        ratio = best[fastest] / mine
        print(f"{name:18} {mine:9.3f} {best[fastest]:9.3f} {fastest:>8} {ratio:6.2f}", flush=True)


if __name__ == "__main__":
    main()
