"""ByzFL's classes, implemented by fedcb2o: a replacement for `import byzfl` in ByzFL's tests.

Aggregators and pre-aggregators come from `fedcb2o.aggregators`; Krum and Multi-Krum follow ByzFL's
definition. For an attack, the honest vectors are models of benign agents, and its own model before
the round is 0.
"""

import functools
import math

import numpy as np
import torch

from fedcb2o import Shard, aggregators
from fedcb2o.aggregators import (  # noqa: F401  # names that ByzFL's tests use
    CAF,
    MDA,
    SMEA,
    Average,
    CenteredClipping,
    GeometricMedian,
    Meamed,
    Median,
    MoNNA,
    TrMean,
)
from fedcb2o.federated import attacks
from fedcb2o.federated.adversary import AttackView, Threat
from fedcb2o.federated.attacks.rule_attacks import line_search
from fedcb2o.rng import stream

Krum = functools.partial(aggregators.Krum, definition="byzfl")
MultiKrum = functools.partial(aggregators.MultiKrum, definition="byzfl")


class _Stacked:
    """A pre-aggregator that returns one tensor or array, like ByzFL; fedcb2o returns a list."""

    kind = aggregators.NNM

    def __init__(self, *arguments):
        self.step = self.kind(*arguments)

    def __call__(self, vectors):
        mixed = self.step(vectors)
        if not isinstance(mixed, list):
            return mixed
        return torch.stack(mixed) if isinstance(mixed[0], torch.Tensor) else np.stack(mixed)


class NNM(_Stacked):
    def __init__(self, f=0):
        super().__init__(f)


class ARC(NNM):
    kind = aggregators.ARC


class Clipping(_Stacked):
    kind = aggregators.Clipping


class Bucketing(_Stacked):
    kind = aggregators.Bucketing


def rows_of(vectors):
    """Return the vectors as a tensor [m, d], and a function that restores the caller's type."""
    first = vectors[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(list(vectors)), lambda row: row
    return torch.from_numpy(np.stack(list(vectors))), lambda row: row.numpy()


def view_of(models):
    """Return the view of an attacker among m benign agents."""
    m = len(models)
    return AttackView(
        n=0,
        agent=m,
        cluster=0,
        num_clusters=1,
        num_colluders=1,
        num_benign=m,
        receivers=torch.arange(m),
        own=torch.ones_like(models[0]),
        previous=torch.zeros_like(models[0]),
        data=Shard(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64)),
        losses=lambda thetas: None,
        sample_losses=lambda thetas, labels=None: None,
        threat=Threat(frozenset(["benign"])),
        _ids_of=lambda role, cluster: range(m),
        _peek=lambda ids: models[ids],
        _links=lambda: ~np.eye(m, dtype=bool),
    )


def craft(attack, vectors, **parameters):
    models, restore = rows_of(vectors)
    return restore(attack(view_of(models), stream(0, "draw"), **parameters))


class SignFlipping:
    """Minus the mean, the reversed update from 0 to the mean."""

    def __call__(self, vectors):
        return craft(attacks.ipm, vectors, eps=1.0)


class InnerProductManipulation:
    def __init__(self, tau=2.0):
        self.tau = tau

    def __call__(self, vectors):
        return craft(attacks.ipm, vectors, eps=self.tau)


class ALittleIsEnough:
    """ByzFL divides the variance by m - 1, the paper's formula and fedcb2o by m."""

    def __init__(self, tau=1.5):
        self.tau = tau

    def __call__(self, vectors):
        m = len(vectors)
        z = self.tau * math.sqrt(m / (m - 1))
        return craft(attacks.alie, vectors, z=z, estimated_from="benign")


class _Optimal:
    """The attack with the factor that moves the pre-aggregated aggregate farthest from the mean."""

    attack = None

    def __init__(
        self, agg=None, pre_agg_list=None, f=1, evals=20, start=0.0, delta=10.0, ratio=0.8
    ):
        self.agg = agg or Average()
        self.pre_agg_list = [Clipping()] if pre_agg_list is None else pre_agg_list
        self.f = f
        self.search = {"evaluations": evals, "start": start, "step": delta, "ratio": ratio}

    def __call__(self, vectors):
        models, restore = rows_of(vectors)

        def harm(factor):
            crafted = self.attack(factor)(models)
            mixed = torch.cat([models, crafted.expand(self.f, -1)])
            for step in self.pre_agg_list:
                mixed = step(mixed)
            return float((self.agg(mixed) - models.mean(0)).norm())

        return restore(self.attack(line_search(harm, **self.search))(models))


class Optimal_ALittleIsEnough(_Optimal):  # noqa: N801  # ByzFL's name
    attack = ALittleIsEnough


class Optimal_InnerProductManipulation(_Optimal):  # noqa: N801  # ByzFL's name
    attack = InnerProductManipulation


class Mimic:
    def __init__(self, epsilon=0):
        self.epsilon = epsilon

    def __call__(self, vectors):
        return craft(attacks.mimic, vectors, agent=self.epsilon)


class Inf:
    def __call__(self, vectors):
        return craft(attacks.not_finite, vectors, value="inf")


class Gaussian:
    def __init__(self, mu=0.0, sigma=1.0):
        self.mu = mu
        self.sigma = sigma

    def __call__(self, vectors):
        return self.mu + craft(attacks.random_model, vectors, scale=self.sigma)
