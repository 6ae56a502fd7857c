"""User functions: recognised forms, numeric types, failures at single points."""

import concurrent.futures
import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch.testing import assert_close

import fedcb2o
from fedcb2o import Paper, minimize
from fedcb2o.errors import ConfigError
from fedcb2o.particles import objectives
from fedcb2o.particles.functions import UserFunction, takes_tensors


def numpy_circle(x):
    return ((x**2).sum(-1) - 1) ** 2


def test_from_numpy():
    wrapped = fedcb2o.from_numpy(numpy_circle)
    assert wrapped.__name__ == "numpy_circle"
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 4, 3)))
    assert_close(wrapped(x), objectives.circle(x))
    settings = {"num_particles": 20, "maxiter": 15, "seed": 3, "dynamics": "paper"}
    expected = minimize(objectives.circle, objectives.last_coordinate, 2, **settings)
    result = minimize(wrapped, fedcb2o.from_numpy(lambda x: x[..., -1]), 2, **settings)
    assert_close(result.x, expected.x)
    with pytest.raises(ConfigError, match="`lower` has no gradient by autograd"):
        minimize(wrapped, dim=2, dynamics=Paper(lambda2=1.0))
    gradient = fedcb2o.from_numpy(lambda x: 2 * x)
    descent = minimize(wrapped, dim=2, dynamics=Paper(lambda2=1.0), gradient=gradient, maxiter=3)
    assert descent.nit == 3
    single = minimize(
        fedcb2o.from_numpy(lambda x: x[..., 0]), dim=2, maxiter=3, dtype=torch.float32
    )
    assert single.x.dtype == torch.float32


def test_from_point():
    shapes = []

    def one_point(x):
        shapes.append(x.shape)
        return float(numpy_circle(x))

    wrapped = fedcb2o.from_point(one_point)
    assert wrapped.__name__ == "one_point"
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 4, 3)))
    assert_close(wrapped(x), objectives.circle(x))
    assert shapes == [(3,)] * 8
    assert wrapped(x.float()).dtype == torch.float32
    assert wrapped(x[0, 0]).shape == ()
    integers = fedcb2o.from_point(lambda x: int(x[0] > 0))
    assert integers(x).dtype == torch.float64
    runs = minimize(
        wrapped, fedcb2o.from_point(lambda x: x[-1]), 2, runs=2, num_particles=10, maxiter=4
    )
    expected = minimize(
        objectives.circle, objectives.last_coordinate, 2, runs=2, num_particles=10, maxiter=4
    )
    assert_close(runs.x, expected.x)


def test_from_point_uses_a_thread_pool():
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        wrapped = fedcb2o.from_point(numpy_circle, workers=pool.map)
        x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 4, 3)))
        assert_close(wrapped(x), objectives.circle(x))
    # an array of one number, as SciPy users often return
    arrays = fedcb2o.from_point(lambda x: x[:1])
    assert_close(arrays(x), x[..., 0])


def number_forms(values):
    """Return the same values in several array types."""
    strided = np.repeat(values, 2)[::2]
    strided.setflags(write=False)
    return {
        "big-endian": values.astype(">f8"),
        "long double": values.astype(np.longdouble),
        "negative stride": values[::-1].copy()[::-1],
        "strided, read-only": strided,
        "object": values.astype(object),
        "list": values.tolist(),
        "series": pd.Series(values, index=np.arange(len(values))[::-1]),
        "nullable": pd.Series(values, dtype="Float64"),
        "list of scalars": [np.float64(value) for value in values],
        "list of tensors": list(torch.from_numpy(values)),
        "masked nowhere": np.ma.array(values, mask=False),
        "tensor": torch.from_numpy(values),
    }


@pytest.mark.parametrize("form", number_forms(np.zeros(1)))
def test_from_numpy_accepts_numbers_of_any_type(form):
    x = torch.tensor([[0.1], [2.0], [-3.25]], dtype=torch.float64)
    wrapped = fedcb2o.from_numpy(lambda x: number_forms(x[:, 0])[form])
    assert torch.equal(wrapped(x), x[:, 0])


def test_from_numpy_copies_the_returned_array():
    buffer = np.zeros(3)
    wrapped = fedcb2o.from_numpy(lambda x: np.copyto(buffer, x[:, 0]) or buffer)
    x = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    first = wrapped(x)
    wrapped(x + 5)
    assert first.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "values",
    [
        np.ma.array([7.0, -5.0, 2.0], mask=[0, 1, 0]),
        np.ma.array([7, -5, 2], mask=[0, 1, 0]),
        np.ma.array([7.0, "?", 2], mask=[0, 1, 0], dtype=object),
        pd.Series([7, None, 2], dtype="Int64"),
        np.array([7, None, 2], dtype=object),
        [7.0, np.ma.masked, 2.0],
        [np.float32(7), np.nan, 2],
    ],
    ids=["masked", "integers", "objects", "nullable", "None", "list", "NaN"],
)
def test_masked_and_missing_values_are_excluded(values):
    x = torch.zeros(3, 1, dtype=torch.float64)
    assert_close(
        fedcb2o.from_numpy(lambda x: values)(x),
        torch.tensor([7.0, torch.nan, 2.0], dtype=torch.float64),
        equal_nan=True, check_dtype=False,
    )  # fmt: skip
    items = iter([np.nan if value is None else value for value in values])
    by_point = fedcb2o.from_point(lambda point: next(items))(x)
    assert by_point.isnan().tolist() == [False, True, False]
    assert by_point[[0, 2]].tolist() == [7.0, 2.0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1j, "complex numbers: take the real part or the absolute value"),
        ("0.5", "words"),
        (np.datetime64("2020-01-01"), "dates: take numbers"),
        ({"loss": 1.0}, "a dict, expected an array of numbers"),
        (None, "None, expected numbers: is a `return` missing"),
        (object(), "a object, expected an array of numbers"),
        (torch.eye(2).to_sparse(), "a sparse tensor"),
    ],
    ids=["complex", "word", "date", "dict", "None", "object", "sparse"],
)
def test_values_that_are_not_numbers_are_refused(value, message):
    x = torch.zeros(1, 1)
    for wrap in (fedcb2o.from_numpy, fedcb2o.from_point):
        with pytest.raises(ConfigError, match=f"function .*<lambda>.* returned {message}"):
            wrap(lambda x: value)(x)


@pytest.mark.parametrize("value", [np.zeros(2), [], torch.zeros(3)], ids=str)
def test_an_objective_of_a_point_returns_one_number(value):
    """A constraint may return several."""
    function = fedcb2o.from_point(lambda x: value)
    assert function(torch.zeros(4, 1)).tolist() == [[0.0] * len(value)] * 4
    with pytest.raises(ConfigError, match="`lower` must return one value a particle"):
        fedcb2o.minimize(function, dim=1)
    with pytest.raises(ConfigError, match="of a point must return a number or a list, got the"):
        fedcb2o.from_point(lambda x: [value, value])(torch.zeros(1, 1))


def log_squared(point):
    return math.log(point[0]) ** 2


def test_errors_name_the_point_at_which_a_function_fails():
    x = torch.tensor([[1.0], [-2.0], [math.e], [-1.0]], dtype=torch.float64)
    with pytest.raises(ValueError, match="math domain error") as caught:
        fedcb2o.from_point(log_squared)(x)
    (note,) = caught.value.__notes__
    assert "log_squared failed at the point [-2.]: ValueError('math domain error')" in note
    assert "return NaN where it is not defined" in note
    replay = iter([1.0])
    with pytest.raises(ConfigError, match=r"at the point \[-2.\]: StopIteration.*return NaN"):
        fedcb2o.from_point(lambda point: next(replay))(x)
    with pytest.raises(ConfigError, match="`workers` returned 2 values for 4 points"):
        fedcb2o.from_point(log_squared, workers=lambda f, points: [1.0, 2.0])(x)


def test_errors_may_exclude_points(caplog):
    x = torch.tensor([[1.0], [-2.0], [math.e], [-1.0]], dtype=torch.float64)
    wrapped = fedcb2o.from_point(log_squared, errors="exclude")
    assert_close(wrapped(x), torch.tensor([0, math.nan, 1, math.nan]).double(), equal_nan=True)
    wrapped(x)
    assert caplog.text.count("failed at the point [-2.]: ValueError") == 1
    result = minimize(wrapped, dim=1, bounds=(-3, 3), num_particles=30, seed=2, maxiter=400)
    assert result.x.item() == pytest.approx(1.0, abs=0.03)
    assert result.excluded > 0
    with pytest.raises(ConfigError, match="`errors` must be 'raise' or 'exclude', got 'ignore'"):
        fedcb2o.from_point(log_squared, errors="ignore")
    with pytest.raises(ConfigError, match="returned words"):
        fedcb2o.from_point(lambda point: "x", errors="exclude")(x)


# ---- recognised forms ----

FORMS = {
    "tensor [..., d]": lambda x: x.square().sum(-1),
    "tensor [n, d]": lambda x: x.square().sum(1),
    "array [..., d]": lambda x: np.sum(np.asarray(x) ** 2, axis=-1),
    "array [n, d]": lambda x: np.sum(x**2, axis=1),
    "column": lambda x: np.sum(x**2, axis=-1, keepdims=True),
    "big-endian": lambda x: np.sum(x**2, axis=-1).astype(">f8"),
    "strided": lambda x: np.repeat(np.sum(x**2, axis=-1), 2)[::2],
    "masked": lambda x: np.ma.array(np.sum(x**2, axis=-1), mask=False),
    "one array, float": lambda x: float(x @ x),
    "one array, coordinates": lambda x: x[0] ** 2 + x[1] ** 2 + x[2] ** 2,
    "one array, Python": lambda x: sum(value * value for value in x),
    "one tensor": lambda x: x.square().sum(),
    "one tensor, shape": lambda x: x.square().sum().reshape(1),
}
POINTS = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 7, 3)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "x",
    [POINTS[0], POINTS, POINTS[:1], POINTS[0, :3], POINTS[:, :3]],
    ids=lambda x: str([*x.shape]),
)
def test_the_form_of_a_function_is_recognised(form, x):
    """Ensembles with as many particles as coordinates (n = d = 3) are recognised too."""
    function = UserFunction("`lower`", FORMS[form])
    for points in (x, x + 1, x[..., :1, :]):
        assert_close(function(points), points.square().sum(-1))


def test_integer_values_are_accepted():
    result = minimize(lambda x: np.abs(x).astype(int).sum(axis=-1), dim=2, maxiter=5)
    assert result.fun == int(result.x.abs().int().sum())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: np.stack([x[..., 0] - 1, x[..., 1] * x[..., 2]], -1),
        lambda x: [x[0] - 1, x[1] * x[2]],
        lambda x: torch.stack([x[0] - 1, x[1] * x[2]]),
    ],
    ids=["many", "one", "tensor"],
)
def test_functions_may_return_several_values(function):
    converted = UserFunction("c", function, vector=True)
    for points in (POINTS, POINTS[0], POINTS[0, :3], POINTS[0, :2]):
        expected = torch.stack([points[..., 0] - 1, points[..., 1] * points[..., 2]], -1)
        assert_close(converted(points), expected)
    assert_close(UserFunction("c", lambda x: x[0], vector=True)(POINTS), POINTS[..., :1])


def test_a_gradient_of_one_point_is_not_mistaken_for_a_batched_one():
    """SciPy's rosen_der accepts [n, d] but reads the first axis as coordinates."""
    from scipy import optimize

    converted = UserFunction("`gradient`", optimize.rosen_der, vector=True)
    expected = np.stack([optimize.rosen_der(point) for point in POINTS[0].numpy()])
    assert_close(converted(POINTS[0]), torch.from_numpy(expected))


def test_a_function_is_probed_only_before_the_first_step():
    """The probing calls take many points at once; all later calls take one point."""
    shapes = []

    def one_point(x):
        shapes.append(x.shape)
        return x[0] ** 2 + x[1] ** 2

    minimize(one_point, dim=2, num_particles=10, maxiter=2, finish=False)
    points = [shape for shape in shapes if shape == (2,)]
    assert len(shapes) - len(points) == 2  # as a tensor and as an array of many points
    assert len(points) == 3 * 10 + 1


def test_a_function_that_fails_in_every_form_is_refused():
    with pytest.raises(ConfigError, match=r"1 / 0|ZeroDivisionError") as caught:
        minimize(lambda x: 1 / 0, dim=2)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "\n" not in str(caught.value)


def fails_left(x):
    """Raise an exception left of 0, for one point or many."""
    if np.any(np.asarray(x)[..., 0] < 0):
        raise FloatingPointError("left of 0")
    return ((np.asarray(x) - 1) ** 2).sum(-1)


@pytest.mark.parametrize(
    "function",
    [fails_left, lambda x: fails_left(x[:, :]), lambda x: float(fails_left(x))],
    ids=["either", "many", "one"],
)
def test_errors_exclude_single_points(function, caplog):
    result = minimize(
        function, dim=2, errors="exclude", num_particles=40, maxiter=100, dynamics=Paper(dt=0.1)
    )
    assert_close(result.x, torch.ones(2).double(), atol=0.1, rtol=0)
    assert result.excluded > 0
    assert caplog.text.count("such points are excluded") == 1
    with pytest.raises((ConfigError, FloatingPointError), match="left of 0"):
        minimize(function, dim=2, num_particles=50, maxiter=600)


# ---- functions of one point that accept many ----

TARGET = np.array([0.5, 0.3, 0.2])


def shares(x):
    return np.abs(x / np.sum(x) - TARGET) @ np.ones(3)


ONE_POINT = {
    "divides by the sum": shares,
    "divides by the sum, tensor": lambda x: (x / torch.sum(x)).square().sum(-1),
    "subtracts the mean": lambda x: ((x - x.mean()) ** 2).sum(-1),
    "subtracts the first": lambda x: ((x - x[0]) ** 2).sum(-1),
    "divides by the largest": lambda x: (x / abs(x).max()).sum(-1),
    "divides by the length": lambda x: (x**2).sum(-1) / len(x),
    "first axis": lambda x: np.gradient(np.asarray(x), axis=0).sum(-1),
    "infinite": lambda x: np.where(np.sum(np.asarray(x)) > 3, np.inf, np.sum(x, axis=-1)),
}


@pytest.mark.parametrize("form", ONE_POINT)
@pytest.mark.parametrize(
    "x", [POINTS[0], POINTS, POINTS[0, :2], POINTS[:, :3]], ids=lambda x: str([*x.shape])
)
def test_a_function_of_one_point_that_accepts_many_is_called_for_each(form, x):
    x = x.abs() + 0.1
    one = ONE_POINT[form]
    each = fedcb2o.from_point(one if "tensor" not in form else lambda p: one(torch.from_numpy(p)))
    converted = UserFunction("`lower`", one)
    for points in (x, x + 1, x[..., :1, :]):
        assert_close(converted(points), each(points))
    converted = UserFunction("`lower`", one)
    for points in (x[..., :1, :], x):
        assert_close(converted(points), each(points))
    vector = UserFunction("constraint 1", one, vector=True)
    assert_close(vector(x), each(x).unsqueeze(-1))


def test_exceptions_do_not_hide_the_form():
    def positive_shares(x):
        if np.any(np.asarray(x) < 0):
            raise FloatingPointError("below 0")
        return shares(x)

    converted = UserFunction("`lower`", positive_shares, errors="exclude")
    each = fedcb2o.from_point(positive_shares, errors="exclude")
    for points in (POINTS, POINTS.abs()):
        assert_close(converted(points), each(points), equal_nan=True)


def test_a_function_that_mixes_points_is_refused():
    for function in (
        lambda x: (x - x.mean(0)).sum(1),
        lambda x: (x / x.sum(0, keepdims=True))[:, 0],
    ):
        with pytest.raises(ConfigError, match=r"depends on the other points.*fedcb2o.from_point"):
            minimize(function, dim=3, maxiter=2)


@pytest.mark.parametrize("draw", [np.random.standard_normal, torch.randn])
def test_random_functions_keep_their_form_and_their_numbers(draw):
    def noisy(x):
        return (x**2).sum(-1) + torch.as_tensor(draw(len(x)))

    results = []
    for function in (noisy, takes_tensors(noisy)):
        np.random.seed(3)  # noqa: NPY002
        torch.manual_seed(3)
        results.append(minimize(function, dim=3, maxiter=5, seed=2))
    assert torch.equal(results[0].theta, results[1].theta)
    assert results[0].nfev == results[1].nfev
