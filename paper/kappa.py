"""The robustness coefficient of the rules, from below: how far an adversary can push what comes out.

    .venv/bin/python paper/kappa.py [--sizes 11,2 11,4] [--only RULE ...] [--steps 500] [--seed 0] [--markdown]

A rule R of n models is (f, kappa)-robust if for all x_1, ..., x_n and every set S of n - f of them
||R(x) - mean_S||^2 <= kappa 1/|S| sum_{i in S} ||x_i - mean_S||^2 (Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and
Stephan, "Fixing by mixing", AISTATS 2023); none is with less than f/(n - 2 f). The search looks for the x that need the
largest kappa: random models in a few places first, then the best of these, changed one or some at a time as long as
that helps. All S are tried at each x, so that attackers may be anywhere and the benign ones are as bad as they can be;
for a rule about the agent's own model, S holds that. What is found is a lower bound.

Beside it stand the upper bounds of the literature and, of the rules by columns that are monotone, kappa itself.
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

from fedcb2o.federated.aggregation import coordinatewise, gram_rules, preaggregation
from fedcb2o.federated.aggregation.base import evaluate_rule, signature_of
from fedcb2o.federated.types import Reduction
from fedcb2o.rng import stream

UNBOUNDED = 1e6  # what is beyond grows on: the search stops there
LEAST_SPREAD = 1e-8  # of the models in S: what is nearer to each other counts as equal
STARTS = 800
BEST = 8

Rule = functools.partial[Any]


def rules(f: int) -> dict[str, Rule]:
    """The rules that look at nothing but differences of models, told of f attackers; so without BALANCE."""
    told: list[Callable[..., Any]] = [
        *(
            coordinatewise.trimmed_mean,
            coordinatewise.meamed,
            gram_rules.krum,
            gram_rules.multi_krum,
            gram_rules.bulyan,
        ),
        *(gram_rules.monna, gram_rules.clipped_gossip),
    ]
    plain: list[Callable[..., Any]] = [
        *(
            gram_rules.mean,
            coordinatewise.coordinate_median,
            gram_rules.geometric_median,
            gram_rules.centred_clipping,
        )
    ]
    made = [functools.partial(rule) for rule in plain] + [
        functools.partial(rule, f=f) for rule in told
    ]
    return {
        rule.func.__name__: rule
        for rule in sorted(made, key=lambda rule: bool(signature_of(rule).own_rows))
    }


def admits(rule: Rule, n: int, f: int) -> bool:
    """Whether so many models admit f attackers."""
    largest = signature_of(rule).max_byzantine
    return largest is None or f <= largest(n)


def least(n: int, f: int) -> float:
    """What no rule is below (Allouah et al. 2023)."""
    return f / (n - 2 * f)


def upper(name: str, n: int, f: int, mixed: bool = False) -> float | None:
    """The bounds of Allouah et al. 2023, infinite where there cannot be one; after nearest-neighbour mixing a rule that
    has kappa has 8 f / (n - f) (kappa + 1) at most. Krum's is for n - f - 1 neighbours."""
    ratio = f / (n - 2 * f)
    bounds = {
        "mean": torch.inf if f else 0.0,
        "trimmed_mean": 6 * ratio * (1 + ratio),
        "coordinate_median": 4 * (1 + ratio) ** 2,
        "geometric_median": 4 * (1 + ratio) ** 2,
        "krum": 6 * (1 + ratio),
    }
    own = exact(name, n, f) if exact(name, n, f) is not None else bounds.get(name)
    return bounds.get(name) if not mixed else None if own is None else 8 * f / (n - f) * (own + 1)


def exact(name: str, n: int, f: int) -> float | None:
    """Kappa itself, where a rule works by columns and is monotone.

    Then the worst attackers lie beyond all others, and what comes out is c . s for the values s of S in order. The most
    that c . s - mean(s) can be for values in order of variance 1 is the norm of c - 1/q, made monotone by averaging,
    times the root of q = n - f. Trimmed mean: c is 1/(n - 2 f) for the largest n - 2 f. Median: it is in the middle.
    """
    h = n // 2
    if name == "trimmed_mean":
        return least(n, f)
    if name == "coordinate_median":
        return (h if n % 2 else h - 1) / (h + 1 - f)
    return None


# The search


@dataclass(frozen=True)
class Found:
    """The largest kappa that some models need, these, and which of them S holds."""

    kappa: float
    x: Tensor
    members: Tensor


def outcome(rule: Rule, x: Tensor, mixing: Rule | None) -> Tensor:
    """What `aggregate.apply` gives, without its care for models that are large."""
    gram = x @ x.T
    own = len(signature_of(rule).own_rows)
    p = (
        None
        if mixing is None
        else torch.block_diag(mixing(gram[: len(x) - own, : len(x) - own]), torch.eye(own))
    )
    made = evaluate_rule(rule, gram, p=p)
    return made.apply_to_buffer(x, 0) if isinstance(made, Reduction) else made @ x


def subsets(n: int, f: int, own: bool) -> Tensor:
    """All S, a row each with 1 for a member; with `own`, those that hold the last model."""
    without = list(itertools.combinations(range(n - own), f))
    members = torch.ones(len(without), n, dtype=torch.float64)
    return members.scatter_(1, torch.tensor(without, dtype=torch.int64).view(len(without), f), 0.0)


def needed(rule: Rule, x: Tensor, sets: Tensor, mixing: Rule | None = None) -> Found:
    """The kappa that the models need: the largest over all S of squared error over spread."""
    q = sets[0].sum()
    y = x - outcome(rule, x, mixing)
    errors = (sets @ y / q).square().sum(1)
    spreads = sets @ y.square().sum(1) / q - errors
    ratios = torch.where(spreads > LEAST_SPREAD * (1 + errors), errors / spreads, 0.0)
    worst = int(ratios.argmax())
    return Found(float(ratios[worst]), x, sets[worst])


def places(n: int, draw: np.random.Generator) -> Tensor:
    """Models in a few places, some of them far, in a space of 1, 2 or n - 1 dimensions."""
    d = int(draw.choice([1, 1, 2, n - 1]))
    count = int(draw.integers(2, 5))
    there = draw.standard_normal((count, d)) * 10 ** draw.uniform(-0.5, 1.5, (count, 1))
    return torch.from_numpy(
        there[draw.integers(count, size=n)] + 10 ** draw.uniform(-4, 0) * draw.normal(size=(n, d))
    )


def changed(x: Tensor, draw: np.random.Generator) -> Tensor:
    """One model, or all in its place, moved a little, onto another, or along the line to another."""
    n, d = x.shape
    i, k = draw.integers(n, size=2).tolist()
    which = (x == x[i]).all(1) if draw.random() < 0.5 else torch.arange(n) == i
    way = draw.integers(3)
    if way == 0:
        to = x[i] + torch.from_numpy(10 ** draw.uniform(-4, 1) * draw.standard_normal(d))
    else:
        to = x[k] + (0.0 if way == 1 else float(2 ** draw.uniform(-1, 2))) * (x[i] - x[k])
    return torch.where(which.unsqueeze(1), to, x)


def search(
    rule: Rule, n: int, f: int, *, mixing: Rule | None = None, steps: int = 500, seed: int = 0
) -> Found:
    """The largest kappa that was found to be needed by n models of which f may attack."""
    draw = stream(seed, "kappa", n, f)
    sets = subsets(n, f, own=bool(signature_of(rule).own_rows))
    tried = [needed(rule, places(n, draw), sets, mixing) for _ in range(STARTS)]
    climbed = []
    for best in sorted(tried, key=lambda found: -found.kappa)[:BEST]:
        for _ in range(steps):
            centre = best.members @ best.x / best.members.sum()
            there = needed(rule, changed(best.x - centre, draw), sets, mixing)
            best = there if there.kappa > best.kappa else best
            if best.kappa > UNBOUNDED:
                return best
        climbed.append(best)
    return max(climbed, key=lambda found: found.kappa)


def shown(value: float | None) -> str:
    """A number of the table."""
    return "" if value is None else "unbounded" if value > UNBOUNDED else f"{value:.3f}"


def main() -> None:
    """Search for each rule, without and with nearest-neighbour mixing, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["11,2", "11,4"], metavar="n,f")
    parser.add_argument("--only", nargs="+", metavar="RULE")
    parser.add_argument(
        "--steps", type=int, default=500, help="changes tried from each of the best starts"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.process_time()
    header = [
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
    widths = [3, 3, 18, 10, 10, 12, 11, 17, 11]

    def line(cells: list[str]) -> str:
        if arguments.markdown:
            return f"| {' | '.join(cells)} |"
        return " ".join(
            cell.ljust(width) for cell, width in zip(cells, widths, strict=True)
        ).rstrip()

    print(line(header))
    if arguments.markdown:
        print("|---" * len(header) + "|")
    for size in arguments.sizes:
        n, f = map(int, size.split(","))
        for name, rule in rules(f).items():
            if (arguments.only and name not in arguments.only) or not admits(rule, n, f):
                continue
            nnm = functools.partial(preaggregation.nnm, f=f)
            plain, mixed = (
                search(rule, n, f, mixing=mixing, steps=arguments.steps, seed=arguments.seed).kappa
                for mixing in (None, nnm)
            )
            bounds = [
                plain,
                exact(name, n, f),
                upper(name, n, f),
                mixed,
                upper(name, n, f, mixed=True),
                least(n, f),
            ]
            print(line([str(n), str(f), name, *map(shown, bounds)]), flush=True)
    if not arguments.markdown:
        print(f"{time.process_time() - begun:.0f} s of one core")


if __name__ == "__main__":
    main()
