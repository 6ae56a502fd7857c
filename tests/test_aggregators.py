"""Public aggregators: input and output types, errors, and comparison with plain loops."""

import dataclasses
import inspect
import itertools
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fedcb2o
from fedcb2o import aggregators
from fedcb2o.errors import ConfigError
from fedcb2o.federated import aggregation
from fedcb2o.federated.aggregation import base, preaggregation
from tests import reference
from tests.views import models

CLASSES = {
    name: getattr(aggregators, name)
    for name in aggregators.__all__
    if isinstance(getattr(aggregators, name), type) and name != "Aggregator"
}
FUNCTIONS = sorted(set(aggregators.__all__) - set(CLASSES) - {"Aggregator"})
# rules whose only input is the models
ALONE = sorted(
    name for name, kind in CLASSES.items() if len(inspect.signature(kind.__call__).parameters) == 2
)
PRE = ["ARC", "NNM", "Bucketing", "Clipping"]
WITH_F = sorted(name for name, kind in CLASSES.items() if hasattr(kind, "f"))

X = models(7, 6)
INPUTS = {
    "ClippedGossip": (X[-1],),
    "CSPlus": (X[-1],),
    "Balance": (X[-1], 0.0),
    "UBAR": (X[-1], np.arange(8.0)),
    "FLTrust": (X[-1], X[0]),
    "NormClipping": (X[-1],),
    "FLAME": (X[-1],),
    "LFighter": (X.view(7, 2, 3), X[0].view(2, 3)),
    "Sageflow": (np.ones(7), np.zeros(7)),
    "WeightedAverage": (np.arange(1.0, 8.0),),
    "LossClustering": (np.arange(7.0),),
    "LPETSR": (np.arange(7.0),),
}


def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def make(name, **parameters):
    if "rng" in CLASSES[name].__dataclass_fields__:
        parameters["rng"] = rng()
    if hasattr(CLASSES[name], "f"):
        parameters.setdefault("f", 1)
    return CLASSES[name](**parameters)


def as_lists(result):
    return [row.tolist() for row in result] if isinstance(result, list) else result.tolist()


@pytest.mark.parametrize("name", ALONE)
def test_every_type_of_models_gives_the_same_values(name):
    """Models may be a tensor, an array, or a list of tensors, arrays, numbers or matrices."""
    of_tensor = make(name)(X)
    assert isinstance(of_tensor, torch.Tensor)
    assert of_tensor.dtype == torch.float64
    expected = of_tensor.tolist()
    arrays = list(X.numpy())
    kinds = {
        "array": (X.numpy(), np.ndarray),
        "tensors": (list(X), torch.Tensor),
        "arrays": (arrays, np.ndarray),
        "numbers": (X.tolist(), list),
    }
    for inputs, kind in kinds.values():
        result = make(name)(inputs)
        if name in PRE:
            assert isinstance(result, np.ndarray if inputs is kinds["array"][0] else list)
            result = [row.tolist() if kind is not list else row for row in result]
            assert all(isinstance(row, list) for row in result)
        else:
            assert isinstance(result, kind)
            result = result if kind is list else result.tolist()
        assert result == expected
    matrices = make(name)(X.view(7, 2, 3))
    assert matrices.flatten(-2).tolist() == expected
    strided = make(name)(X.flip(1).numpy()[:, ::-1])
    np.testing.assert_allclose(strided, expected, rtol=1e-12)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        low_precision = make(name)(X.to(dtype))
        assert low_precision.dtype == dtype
        if name not in ("Krum", "NNM", "MDA", "SMEA", "MultiKrum") or dtype is torch.float32:
            actual = low_precision.double()
            torch.testing.assert_close(actual, of_tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CLASSES)
def test_inputs_are_not_changed_and_objects_can_be_pickled(name):
    x = X.clone()
    first = make(name)(x, *INPUTS.get(name, ()))
    restored = pickle.loads(pickle.dumps(make(name)))
    assert as_lists(restored(x, *INPUTS.get(name, ()))) == as_lists(first) or name == "FLAME"
    assert x.equal(X)
    with pytest.raises(AttributeError):
        restored.f = 2  # immutable


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_equal_their_classes(name):
    function = getattr(aggregators, name)
    kind = next(k for n, k in CLASSES.items() if k.__doc__ == function.__doc__)
    inputs = INPUTS.get(kind.__name__, ())
    settings = {"rng": rng()} if "rng" in kind.__dataclass_fields__ else {}
    result = function(X, *inputs, **settings)
    assert as_lists(result) == as_lists(
        make(kind.__name__, **({"f": 0} if hasattr(kind, "f") else {}))(X, *inputs)
    )
    if hasattr(kind, "f"):  # the parameters follow the inputs, by place or name
        assert as_lists(function(X, *inputs, 1)) == as_lists(function(X, *inputs, f=1))
    # A configuration has the same names.
    assert name in [*aggregation.__all__, *preaggregation.__all__]


def test_state_dicts_keep_names_shapes_and_types():
    """Integers have their lower median, and each tensor keeps its shape and type."""

    def state(w, b, count):
        return {
            "w": torch.tensor(w),
            "count": torch.tensor(count),
            "b": torch.tensor(b, dtype=torch.float64),
        }

    sent = [
        state([[0.0, 1.0]], [0.0], 3),
        state([[2.0, 3.0]], [9.0], 5),
        state([[9.0, 2.0]], [3.0], 4),
    ]
    result = aggregators.Median()(sent)
    assert list(result) == ["w", "count", "b"]
    assert result["w"].tolist() == [[2.0, 2.0]]
    assert result["w"].dtype == torch.float32
    assert result["b"].tolist() == [3.0]
    assert result["b"].dtype == torch.float64
    assert result["count"].equal(torch.tensor(4))
    arrays = [{name: value.numpy() for name, value in state_dict.items()} for state_dict in sent]
    result = aggregators.Average()(arrays)
    assert isinstance(result["w"], np.ndarray)
    np.testing.assert_allclose(result["w"], [[11 / 3, 2.0]], rtol=1e-6)
    clipped = aggregators.Clipping(c=1.0)(sent)
    assert clipped[0]["w"].tolist() == [[0.0, 1.0]]
    assert clipped[2]["w"].norm() < 1


# Errors


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        ([], "there is no model to aggregate"),
        (torch.zeros(0, 3), "there is no model to aggregate"),
        (torch.zeros(3), r"one model a row, got shape \[3\]"),
        ({"a": torch.zeros(3)}, "must be a list of models, got a dict"),
        (None, "must be a list of models, got None"),
        (["abc"], "model 0 is a str, expected numbers or a state dict"),
        ([1.0, 2.0], "model 0 is a float, expected"),
        ([torch.zeros(3), torch.zeros(4)], r"model 1 has shape \[4\] and type torch.float32, and"),
        ([np.zeros(3), np.zeros(3, np.float32)], r"model 1 has shape \[3\] and type float32"),
        ([np.zeros(3), torch.zeros(3)], "model 1 is a Tensor, and model 0 is a ndarray"),
        ([{"a": torch.zeros(3)}, {"b": torch.zeros(3)}], "model 1 and model 0 do not both have .* `a`"),
        ([{"a": torch.zeros(3)}, {"a": torch.zeros(2)}], r"model 1 has for `a` shape \[2\]"),
        ([{"a": torch.tensor(3)}], "no tensor of real numbers"),
        ([{"a": "b"}], "`a` of a model is not a tensor"),
        (np.array([["a"]]), "words"),
        (torch.zeros(2, 2, dtype=torch.complex64), "complex"),
    ],
)  # fmt: skip
def test_invalid_models_are_refused(invalid, message):
    with pytest.raises(ConfigError, match=message):
        aggregators.Average()(invalid)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", CLASSES)
def test_every_rule_refuses_a_model_that_is_not_finite(name, value):
    """The caller must leave it out, even if the rule would not use it."""
    x = X.clone()
    x[2, 3] = value
    with pytest.raises(ConfigError, match=r"models are not finite: leave out the rows \[2\]"):
        make(name)(x, *INPUTS.get(name, ()))


NEEDED = {
    "DnC": 2,
    "Bulyan": 7,
    "Krum": 5,
    "MultiKrum": 5,
    "ClippedGossip": 3,
    "CSPlus": 3,
    "UBAR": 3,
}


@pytest.mark.parametrize("name", WITH_F)
def test_too_few_models_are_an_error_or_a_warning(name, caplog):
    """f = 1 needs 2 f + 1 models, or the number in `NEEDED`; the agent's own model counts."""
    m = NEEDED.get(name, 3) - 1 - len(INPUTS.get(name, ())[:1])
    inputs = {"UBAR": (X[-1], np.arange(m + 1.0))}.get(name, INPUTS.get(name, ()))
    message = rf"`f` = 1 attackers are more .* needs {NEEDED.get(name, 3)} models"
    with pytest.raises(ConfigError, match=message):
        make(name)(X[:m], *inputs)
    base._warn_of_clipping.cache_clear()
    clipped = make(name, clip_f=True)(X[:m], *inputs)
    assert as_lists(clipped) == as_lists(make(name, f=0)(X[:m], *inputs))
    assert f"needs {NEEDED.get(name, 3)} models, and there are" in caplog.text
    assert "f = 0 is assumed" in caplog.text
    for f in (-1, 1.5, True):
        with pytest.raises(ConfigError, match="`f`, the number of attackers to assume"):
            make(name, f=f)


@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"LFighter", "FLTrust"}))
def test_the_aggregate_of_one_model_is_that_model(name):
    """The aggregate of one model is that model."""
    single = X[:1] / 100
    inputs = {
        "UBAR": (single[0], [1.0, 1.0]),
        "Sageflow": ([1.0], [0.0]),
        "WeightedAverage": ([2.0],),
        "LossClustering": ([2.0],),
        "LPETSR": ([2.0],),
        "Balance": (single[0], 0.0),
        "ClippedGossip": (single[0],),
        "CSPlus": (single[0],),
        "NormClipping": (single[0],),
        "FLAME": (single[0],),
    }.get(name, ())
    result = make(name, **({"f": 0} if name in WITH_F else {}))(single, *inputs)
    torch.testing.assert_close(result.flatten(), single[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: aggregators.GeometricMedian(nu=0.0)(X), "`nu` must be above 0"),
        (lambda: aggregators.Krum(definition="other")(X), "`definition` must be"),
        (lambda: aggregators.MoNNA(idx=7)(X), "`idx` must be from 0 to 6, got 7"),
        (lambda: aggregators.MultiKrum(selected=0)(X), "`selected` must be 1 or more"),
        (lambda: aggregators.Bucketing(s=0)(X), "`size`"),
        (lambda: aggregators.Clipping(c=0.0)(X), "`radius` must be above 0"),
        (lambda: aggregators.CSPlus()(X, X[0, :3]), "own model has 3 numbers, and the others have 6"),
        (lambda: aggregators.UBAR()(X, X[0], [1.0]), "`losses` must hold one number per model, 8"),
        (lambda: aggregators.WeightedAverage()(X, [-1.0] * 7), "`num_samples` must be 0 or more"),
        (lambda: aggregators.LFighter()(X, X, X), r"`heads` must be \[7, C, h \+ 1\]"),
        (lambda: aggregators.Sageflow()(X, np.ones(7), np.full(7, 9.0)), "trusts none of the models"),
        (lambda: aggregators.SMEA(f=40)(models(100, 2)), "subsets of 100 models"),
    ],
)  # fmt: skip
def test_invalid_parameters_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


# Right values


def brute_force(x, f, spread):
    """Return the mean of the first subset of m - f models with least spread."""
    subsets = itertools.combinations(range(len(x)), len(x) - f)
    return x[list(min(subsets, key=lambda s: round(spread(x[list(s)]), 9)))].mean(0)


def diameter(x):
    return float(torch.cdist(x, x).max())


def variance(x):
    return float(torch.linalg.svdvals(x - x.mean(0))[0])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("name", "spread"), [("MDA", diameter), ("SMEA", variance)])
def test_subsets_of_least_spread_equal_brute_force(name, spread, seed):
    m = 3 + seed % 6
    f = seed % ((m + 1) // 2)
    x = models(m, 3, seed)
    if name == "MDA" and seed % 2:
        x = x.round()  # many equal distances
    result = CLASSES[name](f=f)(x)
    torch.testing.assert_close(result, brute_force(x, f, spread))


@pytest.mark.parametrize("seed", range(10))
def test_caf_equals_the_plain_loop(seed):
    x = models(9, 4, seed)
    x[:2] += 10
    torch.testing.assert_close(aggregators.CAF(f=2)(x), reference.caf(x, 2))


def test_clipping_by_hand():
    # Norms 5, 1, 10 and 2; of four models with f = 1, floor(2 * 3 / 4) = 1 is clipped, to 5.
    x = [[3.0, 4.0], [1.0, 0.0], [6.0, 8.0], [0.0, 2.0]]
    assert aggregators.ARC(f=1)(x) == [[3.0, 4.0], [1.0, 0.0], [3.0, 4.0], [0.0, 2.0]]
    clipped = aggregators.Clipping(c=2.0)(x)
    assert clipped == [pytest.approx(row) for row in [[1.2, 1.6], [1, 0], [1.2, 1.6], [0, 2]]]


def test_geometric_median_of_the_first_steps_by_hand():
    """The first step, from 0, has weights 1/3 and 1/nu of models at distances 3 and 0."""
    assert aggregators.GeometricMedian(T=0)([[3.0], [0.0]]) == [0.0]
    assert aggregators.GeometricMedian(nu=1.0, T=1)([[3.0], [0.0]]) == pytest.approx([1 / (4 / 3)])
    z = 3 / 4
    a, b = 1 / (3 - z), 1 / 1.0
    expected = [3 * a / (a + b)]
    assert aggregators.GeometricMedian(nu=1.0, T=2)([[3.0], [0.0]]) == pytest.approx(expected)


def test_krum_by_two_definitions():
    # Scores with f = 1: 10, 5, 13, 52, 458 by the 2 nearest models; 59, 41, 29, 101, 819 by 3.
    x = [[0.0], [1.0], [3.0], [7.0], [20.0]]
    assert aggregators.Krum(f=1)(x) == [1.0]
    assert aggregators.Krum(f=1, definition="byzfl")(x) == [3.0]
    assert aggregators.MultiKrum(f=1, selected=2)(x) == [0.5]
    assert aggregators.MultiKrum(f=2, definition="byzfl")(x) == pytest.approx([4 / 3])


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
@pytest.mark.parametrize("rule", [aggregators.Clipping, aggregators.ARC])
def test_clipping_in_place(rule, kind):
    """The result is written into the caller's memory only with `in_place`, and equals the copy."""
    vectors = [[3.0, 4.0], [1.0, 0.0], [6.0, 8.0], [0.0, 2.0]]
    parameters = {} if rule is aggregators.Clipping else {"f": 1}
    x = kind(vectors)
    expected = rule(**parameters)(x)
    assert x.tolist() == vectors
    assert rule(in_place=True, **parameters)(x) is x
    assert x.tolist() == expected.tolist() != vectors


@pytest.mark.parametrize(
    "rule", [aggregators.Clipping(1.0, in_place=True), aggregators.ARC(f=1, in_place=True)]
)
def test_huge_vectors_are_clipped_in_place(rule):
    x = np.array([[1e308, 0.0], [0.0, 1e308], [1.0, 0.0]])
    expected = dataclasses.replace(rule, in_place=False)(x)
    assert rule(x) is x
    assert x.tolist() == expected.tolist()
    assert np.abs(x).max() < 1e61


@pytest.mark.parametrize("dim", [3000, 40_000])
def test_vectors_of_several_blocks_are_clipped_alike(dim):
    x = np.random.default_rng(0).standard_normal((60, dim))
    before = x.copy()
    radius = float(np.median(np.linalg.norm(x, axis=1)))
    factors = np.minimum(1, radius / np.linalg.norm(x, axis=1, keepdims=True))
    clipped = aggregators.Clipping(radius)(x)
    np.testing.assert_allclose(clipped, factors * x, rtol=1e-14)
    np.testing.assert_array_equal(x, before)


def test_means_of_all_forms_are_equal():
    """Matrices take a path of their own; a gradient, a list and a sum that overflows do not."""
    x = np.random.default_rng(0).standard_normal((21, 33), dtype=np.float32)
    mean = aggregators.Average()(x)
    np.testing.assert_allclose(mean, x.astype(np.float64).mean(0), rtol=1e-5, atol=1e-7)
    tensor = torch.from_numpy(x)
    for form in (tensor, tensor.clone().requires_grad_(), list(tensor), tensor.T.contiguous().T):
        assert aggregators.Average()(form).tolist() == mean.tolist()
    huge = np.full((3, 2), 3e38, np.float32)
    np.testing.assert_allclose(aggregators.Average()(huge), huge[0], rtol=1e-6)


@pytest.mark.parametrize(
    "vectors",
    [
        [[3.0, 4.0]],
        np.array([[3, 4]]),
        torch.ones(2, 2).half(),
        np.ones((2, 4))[:, ::-2],
        torch.ones(2).expand(3, 2),
    ],
)
def test_vectors_that_need_a_copy_are_not_clipped_in_place(vectors):
    with pytest.raises(ConfigError, match="`in_place` needs"):
        aggregators.Clipping(in_place=True)(vectors)


def test_centred_clipping_continues_from_its_start():
    rule = aggregators.CenteredClipping(m=[1.0, 0.0], tau=1.0)
    assert rule([[4.0, 4.0], [1.0, 0.5]]) == pytest.approx([1.3, 0.65])
    twice = aggregators.CenteredClipping(L=2, tau=1.0)
    first = aggregators.CenteredClipping(tau=1.0)([[3.0, 4.0], [0.0, 0.5]])
    expected = aggregators.CenteredClipping(m=first, tau=1.0)([[3.0, 4.0], [0.0, 0.5]])
    assert twice([[3.0, 4.0], [0.0, 0.5]]) == pytest.approx(expected)


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_describes_its_rule_and_all_parameters(name):
    """The formula and the source come from the rule, and so do the parameters."""
    kind = CLASSES[name]
    parts = inspect.getdoc(kind).split("\n\n")
    assert len(parts[1]) > 60
    assert parts[-1].startswith("Example:\n    >>> ")
    entries = {line.split(":")[0].strip() for part in parts for line in part.splitlines()[1:]}
    assert set(inspect.signature(kind).parameters) <= entries
    # The agent's inputs of a rule by the Gram matrix are not those of a class.
    assert not {"gram", "block", "losses"} & entries


def test_the_rules_are_a_lazy_part_of_the_package():
    assert fedcb2o.aggregators is aggregators


# Models of the rules' own rows, by name


NAMED = [{"w": torch.tensor([[1.0, 2.0]]) + k, "b": torch.tensor([9.0, 9.0]) + k} for k in range(5)]
START = {"w": torch.tensor([[1.0, 1.0]]), "b": torch.tensor([9.0, 8.0])}
WITH_OWN = {
    "ClippedGossip": lambda models, own: aggregators.ClippedGossip(f=1)(models, own),
    "CSPlus": lambda models, own: aggregators.CSPlus(f=1)(models, own),
    "Balance": lambda models, own: aggregators.Balance()(models, own, 0.0),
    "UBAR": lambda models, own: aggregators.UBAR(f=1)(models, own, np.arange(6.0)),
    "FLTrust": lambda models, own: aggregators.FLTrust()(models, own, turned(START)),
    "NormClipping": lambda models, own: aggregators.NormClipping()(models, own),
    "FLAME": lambda models, own: aggregators.FLAME(noise=0.0)(models, own),
    "CenteredClipping": lambda models, own: aggregators.CenteredClipping(m=own, tau=1.0)(models),
}


def turned(state):
    return dict(reversed(state.items()))


def test_all_rules_with_own_models_are_compared():
    names = {
        name
        for name, kind in CLASSES.items()
        if {"own", "previous"} & set(inspect.signature(kind.__call__).parameters)
    }
    assert names | {"CenteredClipping"} == set(WITH_OWN)


@pytest.mark.parametrize("name", WITH_OWN)
def test_own_models_are_read_by_names_and_shapes(name):
    rule = WITH_OWN[name]
    expected = rule(NAMED, NAMED[1])
    # Another order, arrays and another type of numbers are the same model.
    arrays = {k: t.double().numpy() for k, t in NAMED[1].items()}
    for own in (turned(NAMED[1]), arrays):
        result = rule(NAMED, own)
        assert all(result[k].equal(expected[k]) for k in expected)
    result = rule([turned(model) for model in NAMED], NAMED[1])
    assert all(torch.allclose(result[k], expected[k]) for k in expected)
    wrong = {
        "do not both have the tensor `b`": {"w": START["w"]},
        "do not both have the tensor `c`": {**START, "c": START["b"]},
        r"for `w` shape \[2, 1\], expected \[1, 2\]": {**START, "w": START["w"].T},
        "is a Tensor, and the others are state dicts": torch.zeros(4),
    }
    for message, own in wrong.items():
        with pytest.raises(ConfigError, match=message):
            rule(NAMED, own)
    with pytest.raises(ConfigError, match="is a state dict, and the others are not"):
        rule(torch.zeros(5, 4), START)


def test_models_of_safetensors_and_of_a_network(tmp_path):
    """The file sorts the names; `state_dict()` does not."""
    own = torch.nn.Linear(3, 2).state_dict()
    received = []
    for k in range(5):
        save_file({name: t + 0.01 * k for name, t in own.items()}, tmp_path / "m.safetensors")
        received.append(load_file(tmp_path / "m.safetensors"))
    assert list(received[0]) != list(own)
    result = aggregators.clipped_gossip(received, own, f=0)
    # Without attackers, the mean of the six models.
    for name in own:
        torch.testing.assert_close(result[name], own[name] + 0.01 * 10 / 6)


# Kinds of numbers


@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"LFighter"}))
def test_masked_numbers_are_no_numbers(name):
    rows = [np.ma.array(row, mask=row == X[2, 3].item()) for row in X.numpy()]
    with pytest.raises(ConfigError, match=r"models are not finite: leave out the rows \[2\]"):
        make(name)(rows, *INPUTS.get(name, ()))
    with pytest.raises(ConfigError, match=r"not finite: leave out the rows \[2\]"):
        aggregators.Average()([{"a": row} for row in rows])
    with pytest.raises(ConfigError, match="masked whole numbers"):
        aggregators.Average()([{"a": X[0], "n": np.ma.array([3], mask=[1])}])


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, torch.tensor, np.array])
@pytest.mark.parametrize("name", WITH_F)
def test_numbers_of_numpy_are_python_numbers(name, kind):
    """`f` of a class, and of a robust rule in the call `aggregation.apply`."""
    expected = make(name, f=1)(X, *INPUTS.get(name, ()))
    assert type(make(name, f=kind(1)).f) is int
    result = make(name, f=kind(1))(X, *INPUTS.get(name, ()))
    assert as_lists(result) == as_lists(expected)
    rule = CLASSES[name]._rule
    assert base.clip_byzantine_count(rule, kind(1), 7) == 1
    with pytest.raises(ConfigError, match="`f`, the number of attackers"):
        make(name, f=kind(-1) if kind is not np.uint8 else np.float32(0.5))


def test_other_parameters_may_be_numbers_of_numpy():
    result = aggregators.MultiKrum(f=1, selected=np.int64(2))(X)
    assert result.equal(aggregators.MultiKrum(f=1, selected=2)(X))
    assert aggregators.GeometricMedian(nu=np.float64(0.1), T=np.int8(3))(X).equal(
        aggregators.GeometricMedian()(X)
    )
    assert aggregators.MoNNA(idx=np.int64(1))(X).equal(aggregators.MoNNA(idx=1)(X))


# Large numbers, and models far from zero

ROBUST = ["Bulyan", "CAF", "DnC", "GeometricMedian", "Krum", "MDA", "Meamed", "Median", "MoNNA",
          "MultiKrum", "SMEA", "TrMean"]  # fmt: skip


@pytest.mark.parametrize("scale", [1e20, 1e62, 1e155, 1e200, 1e300])
@pytest.mark.parametrize("name", ROBUST)
def test_a_huge_finite_model_counts_as_a_far_one(name, scale):
    x = models(9, 4)
    if name == "MoNNA":
        x[:2] = x[:2].flip(0)  # the trusted model is a good one
    attacked = x.clone()
    attacked[8] = scale
    result = make(name)(attacked)
    assert result.abs().max() < 10
    far = x.clone()
    far[8] = 1e9
    torch.testing.assert_close(result, make(name)(far), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [1e80, 1e200])
@pytest.mark.parametrize("name", ["NNM", "Clipping", "ARC", "CenteredClipping", "ClippedGossip"])
def test_clippers_and_mixers_of_a_huge_model(name, scale):
    x = models(9, 4)
    x[8] = scale
    result = make(name)(x, *([x[0]] if name == "ClippedGossip" else []))
    result = result[:8] if name == "ARC" else result
    assert result[..., :8, :].isfinite().all() if name == "NNM" else result.abs().max() < 1e3
    if name == "Clipping":
        torch.testing.assert_close(result[8], torch.full((4,), 1.0, dtype=torch.float64))


def test_a_mean_of_huge_numbers_is_their_mean():
    assert aggregators.Average()([[1e200], [0.0]]) == [5e199]
    assert aggregators.TrMean(f=1)([[1e200], [3e200], [2e200]]) == [2e200]


@pytest.mark.parametrize("offset", [1e6, 1e7, 1e8])
@pytest.mark.parametrize(
    "name", sorted({*ROBUST, "NNM", "ClippedGossip", "CSPlus", "NormClipping", "UBAR", "FLTrust"})
)
def test_rules_by_distances_do_not_depend_on_where_zero_is(name, offset):
    # Whole numbers of a fine grid, which are exact far from zero.
    x = (models(9, 4) * 64).round() / 64
    x[:2] += 50
    inputs = {
        "FLTrust": (x[3] + 0.25, x[3]),
        "UBAR": (x[3], np.arange(10.0)),
        "ClippedGossip": (x[3],),
        "CSPlus": (x[3],),
        "NormClipping": (x[3],),
    }.get(name, ())
    moved = tuple(v + offset if isinstance(v, torch.Tensor) else v for v in inputs)
    parameters = {"T": 100} if name == "GeometricMedian" else {}
    rule = make(name, **parameters)
    torch.testing.assert_close(
        rule(x + offset, *moved) - offset, rule(x, *inputs), rtol=0, atol=1e-5
    )


def test_models_of_float32_far_from_zero():
    x = torch.arange(9.0).square().unsqueeze(1) * 8 + 2.0**27
    assert aggregators.Krum(f=2)(x).equal(aggregators.Krum(f=2)(x - 2.0**27) + 2.0**27)


def test_equal_scores_by_two_definitions():
    """ByzFL takes the first model, and the paper's definition here the one nearest to all."""
    x = [[0.0], [1.0], [2.0]]
    assert aggregators.Krum(definition="byzfl", f=1)(x) == [0.0]
    assert aggregators.Krum(f=0)([[0.0], [1.0], [2.0]]) == [1.0]
    assert aggregators.MultiKrum(f=1, definition="byzfl")(x) == [0.5]


def test_an_own_model_with_a_word_is_refused_by_name():
    models = [{"w": torch.zeros(())}] * 3
    with pytest.raises(ConfigError, match="`w` of the agent's own model is not a tensor"):
        aggregators.balance(models, {"w": "0.5"}, 0.5)


def test_complex_tensors_of_state_dicts_are_refused_by_name():
    models = [{"w": torch.zeros(2), "phase": torch.zeros(2, dtype=torch.complex64)}] * 3
    with pytest.raises(ConfigError, match="`phase` of a model is complex, expected real numbers"):
        aggregators.mean(models)
