"""Equal results of fedcb2o, byzfl 0.0.11, krum 0.9.1 and byzpy 0.1.4 on random inputs.

`make external` installs them into separate folders; `make test` skips this file. Not compared:

- SMEA of byzfl: one step of the power method from a random vector in place of an eigenvector.
- CAF of byzfl and byzpy: the maximum that scales all weights includes models of weight 0. With two
  far outliers the weights stop changing, and the loop does not end.
- The median of byzpy for an even number of tensors: the lower of the middle two values.
- Bulyan of krum: it selects n - 2 f - 2 models by Multi-Krum and trims, the paper selects n - 2 f.
- Aksel and Medoid of krum, CGE of byzpy: fedcb2o has no such rules.
- Gaussian noise of all three: other random streams.
"""

import dataclasses
import importlib.util
import math
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from tests.views import view_of

from fedcb2o import aggregators
from fedcb2o.aggregators.server import server
from fedcb2o.experiments.foreign import byzfl
from fedcb2o.experiments.foreign.conversion import Conversion
from fedcb2o.federated import attacks
from fedcb2o.rng import stream

SHAPES = [(5, 4, 1), (7, 5, 2), (8, 1, 2), (9, 30, 0), (12, 100, 3), (21, 300, 5)]
SEEDS = range(3)


def library(name):
    """Import a library; mocks replace missing packages that its rules do not need."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: make external")
    if name in sys.modules:
        return sys.modules[name]
    absent = [name for name in ("torchvision", "seaborn") if importlib.util.find_spec(name) is None]
    sys.modules.update({name: mock.MagicMock() for name in absent})
    try:
        return importlib.import_module(name)
    finally:
        for name in absent:
            del sys.modules[name]


def vectors(m, d, f, seed):
    """Return m random vectors; the first f are far from the others."""
    x = stream(seed, "vectors", m, d).standard_normal((m, d))
    x[:f] += 5.0
    return x


def assert_close(result, expected, tolerance=1e-9):
    target = np.asarray(expected)
    np.testing.assert_allclose(np.asarray(result), target, rtol=tolerance, atol=tolerance)


all_shapes = pytest.mark.parametrize(("m", "d", "f"), SHAPES)

# byzfl

BYZFL = {
    "Average": lambda lib, f: (lib.Average(), aggregators.Average()),
    "Median": lambda lib, f: (lib.Median(), aggregators.Median()),
    "TrMean": lambda lib, f: (lib.TrMean(f), aggregators.TrMean(f)),
    "Meamed": lambda lib, f: (lib.Meamed(f), aggregators.Meamed(f)),
    "GeometricMedian": lambda lib, f: (lib.GeometricMedian(), aggregators.GeometricMedian()),
    "GeometricMedian, 20 steps": lambda lib, f: (
        lib.GeometricMedian(0.01, 20),
        aggregators.GeometricMedian(0.01, 20),
    ),
    "Krum": lambda lib, f: (lib.Krum(f), aggregators.Krum(f, "byzfl")),
    "MultiKrum": lambda lib, f: (lib.MultiKrum(f), aggregators.MultiKrum(f, definition="byzfl")),
    "CenteredClipping": lambda lib, f: (
        lib.CenteredClipping(L=1, tau=2.0),
        aggregators.CenteredClipping(L=1, tau=2.0),
    ),
    "CenteredClipping, 3 steps": lambda lib, f: (
        lib.CenteredClipping(L=3, tau=2.0),
        aggregators.CenteredClipping(L=3, tau=2.0),
    ),
    "MDA": lambda lib, f: (lib.MDA(f), aggregators.MDA(f)),
    "MoNNA": lambda lib, f: (lib.MoNNA(f, 3), aggregators.MoNNA(f, 3)),
    "NNM": lambda lib, f: (lib.NNM(f), aggregators.NNM(f)),
    "Clipping": lambda lib, f: (lib.Clipping(2.0), aggregators.Clipping(2.0)),
    "ARC": lambda lib, f: (lib.ARC(f), aggregators.ARC(f)),
    "NNM, TrMean": lambda lib, f: (
        lambda x: lib.TrMean(f)(lib.NNM(f)(x)),
        lambda x: aggregators.TrMean(f)(aggregators.NNM(f)(x)),
    ),
}


@all_shapes
@pytest.mark.parametrize("name", BYZFL)
def test_rules_equal_byzfl(name, m, d, f):
    lib = library("byzfl")
    if name == "MDA" and math.comb(m, f) > 1000:
        f = 2  # byzfl tries all subsets, slowly
    for seed in SEEDS:
        x = vectors(m, d, f, seed)
        byzfl_rule, own_rule = BYZFL[name](lib, f)
        assert_close(own_rule(x), byzfl_rule(x.copy()))
        low_precision = torch.from_numpy(x).float()
        byzfl_rule, own_rule = BYZFL[name](lib, f)
        assert_close(own_rule(low_precision), byzfl_rule(low_precision.clone()), 1e-4)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_bucketing_has_the_sum_of_byzfl(size):
    """Buckets are random, but their number and their weighted sum are equal."""
    lib = library("byzfl")
    x = vectors(9, 20, 0, 0)
    byzfl_buckets = lib.Bucketing(size)(x)
    own_buckets = aggregators.Bucketing(size)(x)
    assert own_buckets.shape == byzfl_buckets.shape
    counts = np.array([min(size, 9 - size * j) for j in range(len(own_buckets))])
    assert_close(counts @ own_buckets, counts @ byzfl_buckets)


ATTACKS = {
    "SignFlipping": {},
    "InnerProductManipulation": {"tau": 3.0},
    "Optimal_InnerProductManipulation": {"evals": 12},
    "ALittleIsEnough": {"tau": 1.2},
    "Optimal_ALittleIsEnough": {"evals": 12, "ratio": 0.7},
    "Mimic": {"epsilon": 2},
}
CHAINS = [
    ({"name": "TrMean"}, [{"name": "NNM"}]),
    (
        {"name": "GeometricMedian", "nu": 0.1, "T": 3},
        [{"name": "Clipping", "c": 2.0}, {"name": "NNM"}],
    ),
    ({"name": "MultiKrum", "definition": "byzfl"}, [{"name": "ARC"}]),
]


def round_of(aggregator, steps):
    """Return ByzFL's form of a chain, the server here, and its view of one round of gradients."""
    x = torch.from_numpy(stream(0, "x").standard_normal(30)).float()
    gradients = torch.from_numpy(vectors(4, 30, 0, 1)).float()
    models = torch.cat([x - 0.1 * gradients, x.expand(6, -1)])
    here = server(aggregator=aggregator, pre_aggregators=steps, f=3).server

    def step(sent):
        return here.step(sent, x, torch.zeros(30), 0.1, stream(0, "server"))

    view = dataclasses.replace(
        view_of(models=models), previous=x, server=lambda sent: step(sent)[0]
    )

    def theirs(table):
        own = {key: value for key, value in table.items() if key not in ("name", "definition")}
        is_given = table["name"] not in ("GeometricMedian", "Clipping")
        return {"name": table["name"], "parameters": {**own, **({"f": 3} if is_given else {})}}

    return theirs(aggregator), [theirs(table) for table in steps], step, view, x, gradients


@pytest.mark.parametrize(("aggregator", "steps"), CHAINS)
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_on_a_server_equal_byzfl(name, aggregator, steps):
    lib = library("byzfl")
    info, chain, step, view, x, gradients = round_of(aggregator, steps)
    config = {"benchmark_config": {}, "attack": {"name": name, "parameters": ATTACKS[name]}}
    table = dict(byzfl._attack(config, Conversion())[2]["attack"])
    crafted = getattr(attacks, table.pop("name"))(view, stream(0, "draw"), **table)
    given = {**ATTACKS[name], "aggregator_info": info, "pre_agg_list": chain, "f": 3}
    client = lib.ByzantineClient({"name": name, "f": 3, "parameters": given})
    expected = client.apply_attack([g.clone() for g in gradients])[0]
    if not name.startswith("Optimal"):
        assert_close((x - crafted) / 0.1, expected, 2e-4)
        return
    # Several factors may do equal harm, such as those beyond a clipping.
    harms = []
    for model in (crafted, x - 0.1 * expected):
        _, aggregate = step(torch.cat([x - 0.1 * gradients, model.expand(3, -1)]))
        harms.append(float((aggregate - gradients.mean(0)).norm()))
    assert_close(harms[0], harms[1], 2e-4)


@pytest.mark.parametrize(("aggregator", "steps"), CHAINS)
def test_the_server_equals_byzfl(aggregator, steps):
    lib = library("byzfl")
    info, chain, step, _, x, gradients = round_of(aggregator, steps)
    sent = torch.cat([gradients, 3 * gradients[:3]])
    expected = lib.RobustAggregator(info, chain).aggregate_vectors([g.clone() for g in sent])
    model, aggregate = step(x - 0.1 * sent)
    assert_close(aggregate, expected, 2e-4)
    assert_close(model, x - 0.1 * expected, 2e-4)


# krum


def by_krum(rule, **settings):
    return lambda x: rule.aggregate(list(torch.from_numpy(x)), **settings)


def krum_pair(name, m, f, x):
    """Return the aggregates by a rule of krum and by the rule of fedcb2o."""
    import krum.primitives.aggregators as rules

    def rule(module, kind):
        return getattr(importlib.import_module(f"{rules.__name__}.{module}"), kind)

    n = {"n": m, "f": f}
    pairs = {
        "Average": lambda: (by_krum(rule("average", "Average")), aggregators.Average()),
        "Median": lambda: (by_krum(rule("median", "Median")), aggregators.Median()),
        "TrimmedMean": lambda: (
            by_krum(rule("trimmed_mean", "TrimmedMean"), f=f),
            aggregators.TrMean(f),
        ),
        "Krum": lambda: (by_krum(rule("krum", "Krum"), **n), aggregators.Krum(f)),
        "MultiKrum": lambda: (
            by_krum(rule("multikrum", "MultiKrum"), m=m - f, **n),
            aggregators.MultiKrum(f),
        ),
        "Brute": lambda: (by_krum(rule("brute", "Brute"), **n), aggregators.MDA(f)),
        "GeometricMedian": lambda: (
            by_krum(
                rule("geometric_median", "GeometricMedian"),
                nu=1e-3,
                tol=1e-12,
                max_iter=10_000,
                **n,
            ),
            aggregators.GeometricMedian(nu=1e-3, T=10_000),
        ),
        "NearestNeighborAverage": lambda: (
            by_krum(
                rule("nearest_neighbor_average", "NearestNeighborAverage"),
                num_closest=m - f,
                pivot=torch.from_numpy(x[3]),
            ),
            aggregators.MoNNA(f, 3),
        ),
    }
    krum_rule, own_rule = pairs[name]()
    return krum_rule(x), own_rule(x)


KRUM = ["Average", "Median", "TrimmedMean", "Krum", "MultiKrum", "Brute", "GeometricMedian",
        "NearestNeighborAverage"]  # fmt: skip


@all_shapes
@pytest.mark.parametrize("name", KRUM)
def test_rules_equal_krum(name, m, d, f):
    library("krum")
    if name == "GeometricMedian" and d == 1:
        pytest.skip("the median of an even number of numbers is not unique")
    if name == "Brute" and math.comb(m, f) > 1000:
        f = 2
    for seed in SEEDS:
        krum_result, own_result = krum_pair(name, m, f, vectors(m, d, f, seed))
        assert_close(own_result, krum_result, 1e-6 if name == "GeometricMedian" else 1e-9)


@pytest.mark.parametrize("f", [1, 2])
def test_monna_of_agents_equals_krum(f):
    """In each round, n agents average the n - 2 f nearest of n - f models."""
    library("krum")
    module = importlib.import_module("krum.primitives.aggregators.nearest_neighbor_average")
    n = 9
    krum_models = torch.from_numpy(vectors(n, 20, f, 0))
    own_models = krum_models.clone()
    draw = stream(0, "peers")
    for _ in range(5):
        received = [
            draw.permutation([i for i in range(n) if i != j])[: n - f - 1] for j in range(n)
        ]
        krum_models = torch.stack(
            [
                module.NearestNeighborAverage.aggregate(
                    [krum_models[j], *krum_models[received[j]]],
                    num_closest=n - 2 * f,
                    pivot=krum_models[j],
                )
                for j in range(n)
            ]
        )
        own_models = torch.stack(
            [aggregators.MoNNA(f)([own_models[j], *own_models[received[j]]]) for j in range(n)]
        )
        assert_close(own_models, krum_models)


# byzpy

BYZPY = {
    "median": ("coordinate_wise.median", "CoordinateWiseMedian"),
    "trimmed mean": ("coordinate_wise.trimmed_mean", "CoordinateWiseTrimmedMean"),
    "mean of medians": ("coordinate_wise.mean_of_medians", "MeanOfMedians"),
    "Multi-Krum": ("geometric_wise.krum", "MultiKrum"),
    "MDA": ("geometric_wise.minimum_diameter_average", "MinimumDiameterAveraging"),
    "MoNNA": ("geometric_wise.monna", "MoNNA"),
    "SMEA": ("geometric_wise.smea", "SMEA"),
    "geometric median": ("geometric_wise.geometric_median", "GeometricMedian"),
    "centred clipping": ("norm_wise.center_clipping", "CenteredClipping"),
}


def byzpy_pair(name, m, f):
    module, kind = BYZPY[name]
    byzpy_rule = getattr(importlib.import_module(f"byzpy.aggregators.{module}"), kind)
    return {
        "median": lambda: (byzpy_rule(), aggregators.Median()),
        "trimmed mean": lambda: (byzpy_rule(f=f), aggregators.TrMean(f)),
        "mean of medians": lambda: (byzpy_rule(f=f), aggregators.Meamed(f)),
        "Multi-Krum": lambda: (
            byzpy_rule(f=f, q=m - f),
            aggregators.MultiKrum(f, definition="byzfl"),
        ),
        "MDA": lambda: (byzpy_rule(f=f), aggregators.MDA(f)),
        "MoNNA": lambda: (byzpy_rule(f=f, reference_index=3), aggregators.MoNNA(f, 3)),
        "SMEA": lambda: (byzpy_rule(f=f), aggregators.SMEA(f)),
        "geometric median": lambda: (
            byzpy_rule(tol=1e-12, max_iter=10_000, eps=1e-3),
            aggregators.GeometricMedian(nu=1e-3, T=10_000),
        ),
        "centred clipping": lambda: (
            byzpy_rule(c_tau=2.0, M=3, init="zero"),
            aggregators.CenteredClipping(L=3, tau=2.0),
        ),
    }[name]()


@all_shapes
@pytest.mark.parametrize("name", BYZPY)
def test_rules_equal_byzpy(name, m, d, f):
    library("byzpy")
    if m % 2 == 0 and name in ("median", "mean of medians"):
        pytest.skip("byzpy takes the lower of the middle two values")
    if d == 1 and name == "geometric median":
        pytest.skip("the median of an even number of numbers is not unique")
    if name in ("MDA", "SMEA") and math.comb(m, f) > 1000:
        f = 2
    for seed in SEEDS:
        x = vectors(m, d, f, seed)
        byzpy_rule, own_rule = byzpy_pair(name, m, f)
        assert_close(own_rule(x), byzpy_rule.aggregate(list(torch.from_numpy(x))), 1e-6)


BYZPY_PRE = {
    "nnm": ("NearestNeighborMixing", lambda kind, f: (kind(f=f), aggregators.NNM(f))),
    "clipping": ("Clipping", lambda kind, f: (kind(threshold=2.0), aggregators.Clipping(2.0))),
    "arc": ("ARC", lambda kind, f: (kind(f=f), aggregators.ARC(f))),
}


@all_shapes
@pytest.mark.parametrize("name", BYZPY_PRE)
def test_pre_aggregators_equal_byzpy(name, m, d, f):
    library("byzpy")
    kind, pair = BYZPY_PRE[name]
    byzpy_rule, own_rule = pair(
        getattr(importlib.import_module(f"byzpy.pre_aggregators.{name}"), kind), f
    )
    for seed in SEEDS:
        x = vectors(m, d, f, seed)
        mixed = byzpy_rule.pre_aggregate(list(torch.from_numpy(x)))
        assert_close(own_rule(x), torch.stack(mixed), 1e-9)
