"""The robust rules against an independent library, byzfl 0.0.11: equal to float rounding.

It is not among the test requirements, since it asks for torchvision, of which the registry has no
build for a CPU-only torch: `.venv/bin/python -m pip install --no-deps byzfl==0.0.11`. What it
imports and no rule needs is a stub here."""

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from fedcb2o.federated.aggregation import (
    coordinatewise,
    gram_rules,
    own_model_rules,
    preaggregation,
)
from fedcb2o.federated.aggregation.base import apply
from fedcb2o.federated.aggregation.gram_matrix import gram
from fedcb2o.rng import stream

if importlib.util.find_spec("byzfl") is None:
    pytest.skip(
        "byzfl is not installed: pip install --no-deps byzfl==0.0.11", allow_module_level=True
    )


@pytest.fixture(scope="module")
def byzfl() -> Any:
    absent = [name for name in ("torchvision", "seaborn") if importlib.util.find_spec(name) is None]
    sys.modules.update({name: mock.MagicMock() for name in absent})
    try:
        import byzfl
    finally:
        for name in absent:  # and no other: what byzfl imports cannot be loaded twice
            del sys.modules[name]
    return byzfl


def origin(x: Tensor) -> Tensor:
    """A row of zeros, where byzfl's clipping and Weiszfeld begin."""
    return x.new_zeros(1, x.shape[1])


def from_the_origin(rule: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda x, f: apply(rule, torch.cat([x, origin(x)]))


def weiszfeld(x: Tensor, f: int) -> Tensor:
    """byzfl's iterations begin at the origin, ours at an average of models: so the first of three
    is made here."""
    whole = torch.cat([x, origin(x)])
    first = gram_rules.squared_distances_to(
        gram(whole), torch.eye(len(whole), dtype=torch.float64)[-1]
    ).sqrt()[:-1]
    start = 1 / first.clamp(min=0.1)
    rule = functools.partial(
        gram_rules.geometric_median, smoothing=0.1, iterations=2, start=start / start.sum()
    )
    return apply(rule, x)


def with_f(rule: Callable[..., Any], **parameters: Any) -> Callable[..., Tensor]:
    return lambda x, f: apply(functools.partial(rule, f=f, **parameters), x)


def krum_like(rule: Callable[..., Any]) -> Callable[..., Tensor]:
    """byzfl sums over the m - f - 1 nearest others, the paper and we over m - f - 2."""
    return lambda x, f: apply(functools.partial(rule, f=f, neighbours=len(x) - f - 1), x)


PAIRS: dict[str, tuple[Callable[[Any, int], Any], Callable[[Tensor, int], Tensor]]] = {
    "Average": (lambda b, f: b.Average(), lambda x, f: apply(gram_rules.mean, x)),
    "Median": (lambda b, f: b.Median(), lambda x, f: apply(coordinatewise.coordinate_median, x)),
    "TrMean": (lambda b, f: b.TrMean(f), with_f(coordinatewise.trimmed_mean)),
    "Meamed": (lambda b, f: b.Meamed(f), with_f(coordinatewise.meamed)),
    "Krum": (lambda b, f: b.Krum(f), krum_like(gram_rules.krum)),
    "MultiKrum": (lambda b, f: b.MultiKrum(f), krum_like(gram_rules.multi_krum)),
    "GeometricMedian": (lambda b, f: b.GeometricMedian(), weiszfeld),
    "CenteredClipping": (
        lambda b, f: b.CenteredClipping(L=1, tau=2.0),
        from_the_origin(functools.partial(own_model_rules.centred_clipping, radius=2.0)),
    ),
    "CenteredClipping, 3 iterations": (
        lambda b, f: b.CenteredClipping(L=3, tau=2.0),
        from_the_origin(
            functools.partial(own_model_rules.centred_clipping, radius=2.0, iterations=3)
        ),
    ),
    "MoNNA": (
        lambda b, f: b.MoNNA(f, 0),
        lambda x, f: apply(functools.partial(own_model_rules.monna, f=f), x.flip(0)),
    ),
    "NNM": (lambda b, f: b.NNM(f), lambda x, f: preaggregation.nnm(gram(x), f=f).to(x.dtype) @ x),
}
SHAPES = (
    (7, 5, 1),
    (7, 5, 2),
    (8, 1, 2),
    (20, 100, 0),
    (21, 100, 5),
    (21, 3000, 9),
    (100, 300, 30),
)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(("m", "d", "f"), SHAPES)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_equal_to_byzfl(byzfl, name, m, d, f, kind):
    theirs, ours = PAIRS[name]
    x = torch.from_numpy(stream(1, "models", m, d).standard_normal((m, d)))
    x[:f] += 5.0
    if name == "MoNNA":
        x = x.flip(0)  # its first one is benign
    if kind == "torch":
        x = x.float()
    expected = theirs(byzfl, f)(x.clone() if kind == "torch" else x.numpy().copy())
    expected = torch.as_tensor(np.asarray(expected))
    torch.testing.assert_close(ours(x, f), expected.to(x.dtype))


@pytest.mark.parametrize("name", ["Median", "TrMean", "GeometricMedian", "Meamed", "Krum"])
def test_equal_to_byzfl_after_nearest_neighbour_mixing(byzfl, name):
    theirs, _ = PAIRS[name]
    x = torch.from_numpy(stream(2, "models").standard_normal((21, 200)))
    rules: dict[str, Callable[..., Any]] = {
        "Median": coordinatewise.coordinate_median,
        "TrMean": functools.partial(coordinatewise.trimmed_mean, f=5),
        "Meamed": functools.partial(coordinatewise.meamed, f=5),
        "Krum": functools.partial(gram_rules.krum, f=5, neighbours=15),
    }
    expected = torch.from_numpy(theirs(byzfl, 5)(byzfl.NNM(5)(x.numpy())))
    if name == "GeometricMedian":
        found = weiszfeld(preaggregation.nnm(gram(x), f=5) @ x, 5)
    else:
        found = apply(rules[name], x, mixing=functools.partial(preaggregation.nnm, f=5))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_as_many_buckets_as_byzfl(byzfl, size):
    """Its draw is another, so that the shape, and the sum over the buckets, are compared."""
    x = torch.from_numpy(stream(3, "models").standard_normal((9, 20)))
    theirs = byzfl.Bucketing(size)(x.numpy())
    ours = preaggregation.bucketing(9, stream(3, "buckets"), size=size) @ x
    assert ours.shape == theirs.shape
    counts = torch.tensor([min(size, 9 - size * j) for j in range(len(ours))], dtype=torch.float64)
    torch.testing.assert_close(counts @ ours, counts @ torch.from_numpy(theirs))
