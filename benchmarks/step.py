"""Milliseconds per training step of the paper's network on one core: by parts, beside a plain step and the limit.

    python benchmarks/step.py [--hidden 2048] [--repeats 15]

A step is 64 images of EMNIST's shapes forward and backward, and SGD with momentum. All take turns in one process with
one thread, and the least processor time of each counts, which other programs disturb little. The limit is the step's
floating-point operations at the best rate of this core in the same minutes. Precisions that are far slower here than
float32 are left out.
"""

import argparse
import time
from collections.abc import Callable

import plain
import torch
from limits import NUM_CLASSES, multiplications, products
from torch import nn, optim
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from fedcb2o import models
from fedcb2o.data.shard import Shard, features
from fedcb2o.federated.local_update import Training, local_update_
from fedcb2o.runtime import machine, onednn, primitives, timed
from fedcb2o.streams import stream

BATCH = 64
PLAIN = "torch", "grouped"
STEPS = 5  # of one LocalUpdate that is timed
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PARTS = {
    "convolutions forward": ("mkldnn_convolution",),
    "convolutions backward": ("convolution_backward",),
    "dense layers": ("aten::mm", "addmm", "_linear_pointwise"),
    "pooling": ("max_pool2d",),
    "ReLU": ("clamp_min", "threshold_backward"),
    "SGD": ("_fused_sgd_",),
    "copies, casts, zeros": ("copy_", "fill_"),
}


def library(
    shard: Shard, module: nn.Module, precision: str, linear: primitives.Linear, convolution: primitives.Convolution
) -> Callable[[], None]:
    """Some steps of LocalUpdate."""
    theta = models.flatten(module)
    training = Training(
        gamma=1e-4, lambda2=1.0, momentum=0.9, batch_size=BATCH, local_epochs=1, local_steps=STEPS, precision=precision
    )

    def steps() -> None:
        with primitives.by(linear, convolution):
            local_update_(theta, module, shard, training, stream(0, "step"))

    return steps


def loop(shard: Shard, hidden: int, precision: str) -> Callable[[], None]:
    """As many steps as a PyTorch user writes them, on float images."""
    net, x = plain.Net(NUM_CLASSES, hidden), features(shard.x)
    optimiser = optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)

    def steps() -> None:
        for some in torch.split(torch.arange(STEPS * BATCH) % len(x), BATCH):
            optimiser.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
                loss = F.cross_entropy(net(x[some]), shard.y[some])
            loss.backward()
            optimiser.step()
            loss.item()

    return steps


def parts(steps: Callable[[], None], repeats: int) -> dict[str, float]:
    """The seconds of a step in each kind of operation: the least of some repeats (by the clock, on a quiet machine)."""
    least = dict.fromkeys([*PARTS, "the rest"], torch.inf)
    for _ in range(repeats):
        with profile(activities=[ProfilerActivity.CPU]) as found:
            steps()
        seconds = dict.fromkeys(least, 0.0)
        for event in found.key_averages():
            part = next((part for part, names in PARTS.items() if any(n in event.key for n in names)), "the rest")
            seconds[part] += event.self_cpu_time_total / 1e6 / STEPS
        least = {part: min(least[part], seconds[part]) for part in least}
    return least


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=2048, help="units of the dense layer (default 2048)")
    parser.add_argument("--repeats", type=int, default=15, help="repeats of each (default 15)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randint(0, 256, (STEPS * BATCH, 1, 28, 28), dtype=torch.uint8)
    shard = Shard(x, torch.randint(0, NUM_CLASSES, (len(x),)))
    module = models.cnn((1, 28, 28), NUM_CLASSES, hidden=options.hidden)
    flop = 2.0 * BATCH * sum(multiplications(options.hidden))
    machine.keep_memory()
    here = torch.device("cpu")
    precisions = {name: dtype for name, dtype in PRECISIONS.items() if timed.precision_of(name, here) == name}
    sides = {
        (precision, linear, convolution): library(shard, module, precision, linear, convolution)
        for precision in precisions
        for linear in ("torch", "onednn")
        for convolution in ("grouped", "fourier")
        if (linear == "torch" or onednn.available()) and (precision == "float32" or (linear, convolution) == PLAIN)
    }
    loops = {precision: loop(shard, options.hidden, precision) for precision in precisions}
    rates = {precision: products(dtype) for precision, dtype in precisions.items()}
    seconds: dict[object, float] = {}

    def clock(key: object, work: Callable[[], object]) -> None:
        start = time.process_time()
        work()
        seconds[key] = min(seconds.get(key, torch.inf), time.process_time() - start)

    for _ in range(options.repeats + 1):
        for key, steps in (*sides.items(), *((("plain", precision), steps) for precision, steps in loops.items())):
            clock(key, steps)
        for precision, found in rates.items():
            for name, (_, product) in found.items():
                clock((precision, name), product)
    print(f"torch {torch.__version__}, one thread, dense layer of {options.hidden}, {flop / 1e9:.2f} GFLOP a step")
    convolution = timed.fastest_convolution_of_one(module, x[:BATCH], "float32")
    print(f"fastest by the probe, in float32: linear {timed.fastest_linear()}, convolution {convolution}")
    for precision, found in rates.items():
        best, name = max((count / seconds[precision, name], name) for name, (count, _) in found.items())
        limit, usual = flop / best, seconds["plain", precision] / STEPS
        print(f"\n{precision}: limit {1e3 * limit:.1f} ms, at {best / 1e9:.0f} GFLOP/s ({name})")
        lines = {
            f"library, {linear}, {way}": seconds[p, linear, way] / STEPS for p, linear, way in sides if p == precision
        }
        for told, value in {"plain PyTorch": usual, **lines}.items():
            print(
                f"  {told:<24} {1e3 * value:6.1f} ms, {value / limit:.2f} times the limit,"
                f" {usual / value:.2f} times as fast as plain"
            )
        for (p, linear, way), steps in sides.items():
            if p == precision and way == "grouped":  # spectra are products like those of dense layers
                shares = parts(steps, max(3, options.repeats // 3))
                print(f"  {linear}: " + ", ".join(f"{part} {1e3 * value:.1f}" for part, value in shares.items()))


if __name__ == "__main__":
    main()
