"""A round of the paper's full size on an accelerator, by parts, beside what the device can do.

It also says whether the numbers agree with the CPU's.

    python benchmarks/device.py [--device cuda] [--rounds n] [--together k] [--convolution unfolded] [--small]

N = 100, M = 20, tau = 5, the paper's network, random images of EMNIST's shapes, a test evaluation in every round. With
`--small --device cpu` it takes under a minute anywhere: four agents in one program on the CPU.
"""

import argparse
import functools
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from limits import multiplications
from round import Others, operations, processor, random_images
from safetensors.torch import load_file
from torch.func import vmap
from torch.nn import functional as F

import fedcb2o
from fedcb2o.experiments import assemble
from fedcb2o.experiments.config import Experiment, load
from fedcb2o.experiments.samples import dataset_of
from fedcb2o.federated.local_update import float32_products
from fedcb2o.federated.terms import Convolution
from fedcb2o.runtime import devices
from fedcb2o.runtime.convolution import conv2d

SMALL = {
    "model.hidden": 64, "training.local_epochs": 1, "agents.benign": 3, "agents.malicious": 1, "agents.budget": 4,
    "agents.benign_samples": 80, "agents.malicious_samples": 64,
}  # fmt: skip


def experiment_of(small: bool, **changes: Any) -> Experiment:
    """The paper's full size on random images, or a small one."""
    data = {"name": random_images, "per_class": 20 if small else 900, "test_per_class": 2 if small else 296}
    fixed = {"data": data, "seeds": [0], "evaluate_every": 1, "checkpoint_every": 10**6}
    return load("emnist-fedcb2o-trusted", {**fixed, **(SMALL if small else {}), **changes})


def rates(device: torch.device, precision: str, small: bool) -> dict[str, float]:
    """Floating-point operations per second in products like a round's, the networks of `k` agents at once."""
    k, n, width = (4, 8, 512) if small else (32, 64, 8192)
    draw = {"device": device, "dtype": torch.bfloat16 if precision == "bfloat16" else torch.float32}
    a, b = torch.randn(width, width, **draw), torch.randn(width, width, **draw)
    x, w = (torch.randn(k, *s, **draw, requires_grad=True) for s in ((n, 32, 14, 14), (64, 32, 5, 5)))
    alone = torch.randn(n * k, 32, 14, 14, **draw), torch.randn(64, 32, 5, 5, **draw)
    grouped, unfolded = (vmap(functools.partial(way, padding=2)) for way in (F.conv2d, conv2d))
    h, v = torch.randn(k, n, 3136, **draw), torch.randn(k, 512 if small else 2048, 3136, **draw)
    convolution = 2.0 * k * n * 14 * 14 * 64 * 25 * 32

    def trained(convolve: Callable[..., torch.Tensor]) -> torch.Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(convolve(x, w).sum(), (x, w))[0]

    made: dict[str, tuple[float, Callable[[], torch.Tensor]]] = {
        f"product of {width}x{width} matrices": (2.0 * width**3, lambda: a @ b),
        "5x5 convolution of one network": (convolution, lambda: F.conv2d(*alone, padding=2)),
        f"the same of {k} networks, grouped": (convolution, lambda: grouped(x, w)),
        f"the same of {k} networks, unfolded": (convolution, lambda: unfolded(x, w)),
        "with both derivatives, grouped": (3 * convolution, lambda: trained(grouped)),
        "with both derivatives, unfolded": (3 * convolution, lambda: trained(unfolded)),
        f"dense layer of {k} networks": (2.0 * h.numel() * v.shape[1], lambda: h @ v.mT),
    }
    found = {}
    with torch.no_grad(), float32_products(precision == "tf32", device.type):
        for name, (count, product) in made.items():
            seconds = []
            for _ in range(3 if small else 20):
                start = time.perf_counter()
                float(product().flatten()[0])  # waits for the device
                seconds.append(time.perf_counter() - start)
            found[name] = count / min(seconds)
    return found


def measured(experiment: Experiment, rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    """The seconds of a round by parts, each the least of some rounds after the first, and the run's environment."""
    with tempfile.TemporaryDirectory() as folder:
        longer = load(experiment, {"rounds": rounds + 1})
        run = fedcb2o.run(longer, out=folder, watch=lambda *_: None)
        timing = run.timing[run.timing["round"] > 1].drop(columns=["seed", "round", "checkpoint"], errors="ignore")
        environment = fedcb2o.records.read_json(Path(folder) / "seed-0/environment.json")
    return dict(timing.min()), environment


def agreement(changes: Mapping[str, Any]) -> tuple[float, float]:
    """The largest differences between the CPU, one by one, and the device after two small rounds in float32: of any
    number of the models, and of the benign agents' mean accuracies."""
    found = []
    for chosen in ({}, changes):
        with tempfile.TemporaryDirectory() as folder:
            run = fedcb2o.run(experiment_of(True, rounds=2, **chosen), out=folder, workers=1, watch=lambda *_: None)
            models = load_file(Path(folder) / "seed-0/checkpoint.safetensors")["models"]
            found.append((models, run.records[~run.records.malicious].accuracy.mean()))
    (ours, accuracy), (theirs, other) = found
    return float((ours - theirs).abs().max()), abs(accuracy - other)


def work_of(experiment: Experiment) -> dict[str, float]:
    """Floating-point operations of a round, by its parts."""
    prepared = assemble.prepare(experiment, 0, dataset_of(experiment, None))
    hidden, population = experiment.model.parameters["hidden"], prepared.population
    trained, validated = (sum(map(len, each)) for each in (population.train, population.validation))
    benign = int((~population.malicious).sum())
    forward, _ = multiplications(hidden)
    rounds = operations(prepared.terms, trained, validated, hidden)
    return {**rounds, "evaluate": 2.0 * benign * len(prepared.test()) * forward}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, mps, ... or cpu (default cuda)")
    parser.add_argument("--rounds", type=int, help="rounds to time after the first (default 3, small 1)")
    parser.add_argument("--together", type=int, help="agents in one program (default: what the memory takes; CPU: 4)")
    parser.add_argument("--convolution", choices=get_args(Convolution), help="(default: the fastest; CPU: grouped)")
    parser.add_argument("--small", action="store_true", help="a quick check with few agents and a small network")
    options = parser.parse_args()
    try:
        device = devices.device_of(options.device)
    except fedcb2o.errors.ConfigError as error:
        parser.error(str(error))
    together = options.together or (4 if device.type == "cpu" else None)
    if device.type == "cpu":
        torch.set_num_threads(1)  # as a run has
        name = f"{processor()}, one thread"
    else:
        name = f"{devices.name_of(device)}, {devices.memory_of(device) / 2**30:.0f} GiB"
    print(f"{device}: {name}; torch {torch.__version__}", flush=True)
    key = None if device.type == "cpu" else options.device
    asked = {"device": key, "together": together, "convolution": options.convolution}
    fixed = {key: value for key, value in asked.items() if value is not None}
    models, accuracy = agreement(fixed)
    print(f"CPU one by one and this, two small rounds: models differ by {models:.1e}, accuracies by {accuracy:.1e}")
    for precision in ("float32", "tf32", "bfloat16"):
        if precision == "tf32" and device.type != "cuda":
            continue
        with devices.repeatable(device):
            limits = rates(device, precision, options.small)
        print(f"{precision}:")
        for what, rate in limits.items():
            print(f"  {rate / 1e12:9.3f} TFLOP/s  {what}")
        experiment = experiment_of(options.small, **fixed, **{"training.precision": precision})
        others = Others()
        seconds, chosen = measured(experiment, options.rounds or (1 if options.small else 3))
        work, best = work_of(experiment), max(limits.values())
        print(f"  a round, {chosen['together']} agents at once, convolutions {chosen['convolution']}{others.told()}:")
        for part, took in seconds.items():
            count = work.get(part, 0.0)
            at_best = count / best if part == "train" or precision == "float32" else 0.0  # the rest is in float32
            share = f", {at_best / took:6.1%} of the limit" if at_best else ""
            print(f"    {part:<10} {took:8.3f} s, {count / 1e12:8.3f} TFLOP{share}", flush=True)
        print(f"    {'all':<10} {sum(seconds.values()):8.3f} s", flush=True)


if __name__ == "__main__":
    main()
