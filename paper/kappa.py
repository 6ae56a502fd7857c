"""Lower bounds of the robustness coefficient of aggregation rules, by a search over attacks.

    .venv/bin/python paper/kappa.py [--sizes 11,2 11,4] [--only RULE ...] [--steps 500] [--markdown]

A rule R of n models is (f, kappa)-robust if for all x_1, ..., x_n and every set S of n - f models

    ||R(x) - mean_S||^2 <= kappa 1/|S| sum_{i in S} ||x_i - mean_S||^2

(Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan, "Fixing by mixing", AISTATS 2023). Every
rule has kappa >= f/(n - 2 f). The search looks for x with the largest required kappa: random models
in a few places, then the best of these with one or several models changed, as long as kappa grows.
All sets S are tried for each x, so attackers have any position and the benign models are as bad as
possible. For a rule about the agent's own model, S contains that model. The result is a lower
bound.

The table also has the upper bounds of the literature and, for monotone rules by columns, kappa
itself.
"""

import argparse
import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcb2o.federated.aggregation import (
    coordinatewise,
    gram_rules,
    own_model_rules,
    preaggregation,
)
from fedcb2o.federated.aggregation.base import evaluate_rule, signature_of
from fedcb2o.federated.types import Reduction
from fedcb2o.rng import stream

UNBOUNDED = 1e6  # the search stops at this kappa
MIN_SPREAD = 1e-8  # models in S that are closer count as equal
NUM_STARTS = 800
NUM_CLIMBS = 8
HEADER = [
    "n",
    "f",
    "rule",
    "found",
    "exact",
    "upper bound",
    "found, nnm",
    "upper bound, nnm",
    "f/(n - 2f)",
]
WIDTHS = [3, 3, 18, 10, 10, 12, 11, 17, 11]

Rule = functools.partial[Any]


def rules(f: int) -> dict[str, Rule]:
    """Return the rules that depend on differences of models only, for f attackers."""
    with_count: list[Callable[..., Any]] = [
        *(coordinatewise.trimmed_mean, coordinatewise.meamed),
        *(gram_rules.krum, gram_rules.multi_krum, gram_rules.bulyan),
        *(own_model_rules.monna, own_model_rules.clipped_gossip),
    ]
    without_count: list[Callable[..., Any]] = [
        *(gram_rules.mean, coordinatewise.coordinate_median),
        *(gram_rules.geometric_median, own_model_rules.centred_clipping),
    ]
    partials = [functools.partial(rule) for rule in without_count]
    partials += [functools.partial(rule, f=f) for rule in with_count]
    partials.sort(key=lambda rule: bool(signature_of(rule).own_rows))
    return {rule.func.__name__: rule for rule in partials}


def allows(rule: Rule, n: int, f: int) -> bool:
    """Return whether the rule allows f attackers among n models."""
    max_byzantine = signature_of(rule).max_byzantine
    return max_byzantine is None or f <= max_byzantine(n)


def minimal_kappa(n: int, f: int) -> float:
    """Return the lower bound of kappa for all rules (Allouah et al. 2023)."""
    return f / (n - 2 * f)


def upper_bound(name: str, n: int, f: int, mixed: bool = False) -> float | None:
    """Return the upper bound of kappa (Allouah et al. 2023).

    Args:
        name: Name of the rule.
        n: Number of models.
        f: Number of attackers.
        mixed: Whether nearest-neighbour mixing precedes the rule. The bound of a rule with kappa is
            then 8 f / (n - f) (kappa + 1).

    Returns:
        The bound, infinite if none exists, or None if the literature has none. Krum's bound is for
        n - f - 1 neighbours.
    """
    ratio = f / (n - 2 * f)
    bounds = {
        "mean": torch.inf if f else 0.0,
        "trimmed_mean": 6 * ratio * (1 + ratio),
        "coordinate_median": 4 * (1 + ratio) ** 2,
        "geometric_median": 4 * (1 + ratio) ** 2,
        "krum": 6 * (1 + ratio),
    }
    if not mixed:
        return bounds.get(name)
    kappa = exact_kappa(name, n, f)
    if kappa is None:
        kappa = bounds.get(name)
    return None if kappa is None else 8 * f / (n - f) * (kappa + 1)


def exact_kappa(name: str, n: int, f: int) -> float | None:
    """Return kappa of a monotone rule by columns, or None for other rules.

    The worst attackers are beyond all other models, and the result is c . s for the sorted values s
    of S. The largest c . s - mean(s) for sorted values of variance 1 is the norm of c - 1/q, made
    monotone by averaging, times the root of q = n - f. For the trimmed mean, c is 1/(n - 2 f) for
    the largest n - 2 f values. For the median it is in the middle.
    """
    h = n // 2
    if name == "trimmed_mean":
        return minimal_kappa(n, f)
    if name == "coordinate_median":
        return (h if n % 2 else h - 1) / (h + 1 - f)
    return None


# The search


@dataclass(frozen=True)
class WorstCase:
    """Models, the required kappa, and the members of the set S that requires it."""

    kappa: float
    x: Tensor
    members: Tensor


def outcome(rule: Rule, x: Tensor, mixing: Rule | None) -> Tensor:
    """Apply a rule like `aggregation.apply`, but in one block."""
    gram = x @ x.T
    own_rows = len(signature_of(rule).own_rows)
    p = None
    if mixing is not None:
        others = len(x) - own_rows
        p = torch.block_diag(mixing(gram[:others, :others]), torch.eye(own_rows))
    result = evaluate_rule(rule, gram, p=p)
    return result.apply_to_buffer(x, 0) if isinstance(result, Reduction) else result @ x


def subsets(n: int, f: int, own: bool) -> Tensor:
    """Return all sets S as rows with 1 for members, with `own` those with the last model."""
    left_out = list(itertools.combinations(range(n - own), f))
    members = torch.ones(len(left_out), n, dtype=torch.float64)
    index = torch.tensor(left_out, dtype=torch.int64).view(len(left_out), f)
    return members.scatter_(1, index, 0.0)


def required_kappa(rule: Rule, x: Tensor, sets: Tensor, mixing: Rule | None = None) -> WorstCase:
    """Return the kappa that the models require: the largest ratio of squared error to spread."""
    q = sets[0].sum()
    y = x - outcome(rule, x, mixing)
    errors = (sets @ y / q).square().sum(1)
    spreads = sets @ y.square().sum(1) / q - errors
    ratios = torch.where(spreads > MIN_SPREAD * (1 + errors), errors / spreads, 0.0)
    worst = int(ratios.argmax())
    return WorstCase(float(ratios[worst]), x, sets[worst])


def random_models(n: int, draw: np.random.Generator) -> Tensor:
    """Draw models in a few places, some far away, in 1, 2 or n - 1 dimensions."""
    d = int(draw.choice([1, 1, 2, n - 1]))
    count = int(draw.integers(2, 5))
    places = draw.standard_normal((count, d)) * 10 ** draw.uniform(-0.5, 1.5, (count, 1))
    models = places[draw.integers(count, size=n)]
    return torch.from_numpy(models + 10 ** draw.uniform(-4, 0) * draw.normal(size=(n, d)))


def changed(x: Tensor, draw: np.random.Generator) -> Tensor:
    """Move one model, or all at its place: a little, onto another, or along the line to it."""
    n, d = x.shape
    i, k = draw.integers(n, size=2).tolist()
    moved = (x == x[i]).all(1) if draw.random() < 0.5 else torch.arange(n) == i
    kind = draw.integers(3)
    if kind == 0:
        target = x[i] + torch.from_numpy(10 ** draw.uniform(-4, 1) * draw.standard_normal(d))
    elif kind == 1:
        target = x[k] + 0.0 * (x[i] - x[k])
    else:
        target = x[k] + float(2 ** draw.uniform(-1, 2)) * (x[i] - x[k])
    return torch.where(moved.unsqueeze(1), target, x)


def search(
    rule: Rule, n: int, f: int, *, mixing: Rule | None = None, steps: int = 500, seed: int = 0
) -> WorstCase:
    """Search for the n models, f of them attackers, with the largest required kappa."""
    draw = stream(seed, "kappa", n, f)
    sets = subsets(n, f, own=bool(signature_of(rule).own_rows))
    starts = [required_kappa(rule, random_models(n, draw), sets, mixing) for _ in range(NUM_STARTS)]
    ends = []
    for best in sorted(starts, key=lambda case: -case.kappa)[:NUM_CLIMBS]:
        for _ in range(steps):
            centre = best.members @ best.x / best.members.sum()
            candidate = required_kappa(rule, changed(best.x - centre, draw), sets, mixing)
            if candidate.kappa > best.kappa:
                best = candidate
            if best.kappa > UNBOUNDED:
                return best
        ends.append(best)
    return max(ends, key=lambda case: case.kappa)


def format_kappa(value: float | None) -> str:
    """Format a number of the table."""
    if value is None:
        return ""
    return "unbounded" if value > UNBOUNDED else f"{value:.3f}"


def main() -> None:
    """Search for each rule, with and without mixing, and print one line per rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["11,2"], metavar="n,f")
    parser.add_argument("--only", nargs="+", metavar="RULE")
    parser.add_argument(
        "--steps", type=int, default=500, help="changes tried from each of the best starts"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.process_time()

    def line(cells: list[str]) -> str:
        if arguments.markdown:
            return f"| {' | '.join(cells)} |"
        padded = [cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)]
        return " ".join(padded).rstrip()

    print(line(HEADER))
    if arguments.markdown:
        print("|---" * len(HEADER) + "|")
    for n, f in (map(int, size.split(",")) for size in arguments.sizes):
        nnm = functools.partial(preaggregation.nnm, f=f)
        options = {"steps": arguments.steps, "seed": arguments.seed}
        for name, rule in rules(f).items():
            if (arguments.only and name not in arguments.only) or not allows(rule, n, f):
                continue
            values = [
                search(rule, n, f, **options).kappa,
                exact_kappa(name, n, f),
                upper_bound(name, n, f),
                search(rule, n, f, mixing=nnm, **options).kappa,
                upper_bound(name, n, f, mixed=True),
                minimal_kappa(n, f),
            ]
            print(line([str(n), str(f), name, *map(format_kappa, values)]), flush=True)
    if not arguments.markdown:
        print(f"{time.process_time() - start:.0f} s of one core")


if __name__ == "__main__":
    main()
