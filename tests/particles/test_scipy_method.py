"""`scipy.optimize.minimize(f, x0, method=fedcb2o.cb2o)`: arguments and results in SciPy's form."""

import numpy as np
import pytest
from scipy import optimize

import fedcb2o
from fedcb2o import Paper
from fedcb2o.errors import ConfigError

QUICK = {"num_particles": 40, "maxiter": 60, "dynamics": "paper"}


def quartic(x, a=1.0):
    assert x.shape == (2,)
    return float(((x - a) ** 4).sum())


def circle(x):
    return float((x @ x - 1) ** 2)


def test_the_method_returns_the_result_of_minimize_in_scipys_form():
    result = optimize.minimize(
        quartic,
        [0.0, 0.5],
        (0.5,),
        fedcb2o.cb2o,
        bounds=[(0, None), (-1, 1)],
        tol=1e-9,
        options={"seed": 4, **QUICK},
    )
    expected = fedcb2o.minimize(
        fedcb2o.from_point(quartic),
        x0=[0.0, 0.5],
        args=(0.5,),
        bounds=[(0, None), (-1, 1)],
        seed=4,
        **{**QUICK, "dynamics": Paper(xtol=1e-9)},
    )
    assert isinstance(result, optimize.OptimizeResult)
    assert isinstance(result.x, np.ndarray)
    assert np.array_equal(result.x, expected.x.numpy())
    assert result.fun == quartic(result.x, 0.5) == float(expected.fun)
    assert type(result.fun) is float
    assert (result.nit, result.nfev, result.seed) == (60, 61 * 40 + 1, 4)
    value = (result.success, result.status, result.message)
    assert value == (False, 1, "maxiter = 60 steps were taken")
    assert "upper" not in result


def test_upper_is_minimised_among_the_minimisers_of_fun():
    options = {"upper": lambda x: float(x[0]), "num_particles": 100}
    options["dynamics"] = fedcb2o.Paper(dt=0.03)
    result = optimize.minimize(circle, [0.0, 0.0], method=fedcb2o.cb2o, options=options)
    assert result.x == pytest.approx([-1, 0], abs=0.2)
    assert result.success
    assert result.status == 0
    assert result.upper == result.x[0]


def test_callbacks_of_both_signatures_stop_the_run():
    states = []

    def by_x(x):
        states.append(x)
        return len(states) == 3

    def by_result(*, intermediate_result):
        states.append(intermediate_result)
        if len(states) == 3:
            raise StopIteration

    for callback in (by_x, by_result):
        states.clear()
        result = optimize.minimize(
            quartic, [0.0, 0.0], method=fedcb2o.cb2o, callback=callback, options=QUICK
        )
        assert (result.nit, result.message) == (2, "the callback stopped the run")
    assert states[2].x == pytest.approx(result.x)
    assert states[2].fun == result.fun


def test_jac_is_used_with_lambda2():
    def slope(x, a):
        return 4 * (x - a) ** 3

    options = {**QUICK, "dynamics": Paper(lambda2=0.5)}
    result = optimize.minimize(quartic, [0.0, 0.0], 0.5, fedcb2o.cb2o, jac=slope, options=options)
    expected = fedcb2o.minimize(
        lambda x: (x - 0.5).pow(4).sum(-1),
        x0=[0.0, 0.0],
        gradient=lambda x: slope(x, 0.5),
        **options,
    )
    assert result.x == pytest.approx(expected.x.numpy())
    combined = optimize.minimize(lambda x: (quartic(x), slope(x, 1.0)), [0.0, 0.0], method=fedcb2o.cb2o, jac=True,
                             options=options)  # fmt: skip
    assert combined.nit == 60


def test_masked_values_of_scipy_functions_are_excluded():
    """The function is masked left of 1; a callback receives floats."""
    values = []

    def masked(x):
        return np.ma.masked if x[0] < 1 else (x[0] - 2) ** 2

    def record(intermediate_result):
        values.append(intermediate_result.fun)

    result = optimize.minimize(masked, np.ma.array([2.0]), method=fedcb2o.cb2o, callback=record,
                              bounds=[(0, 4)], options={"maxiter": 300})  # fmt: skip
    assert result.x == pytest.approx([2.0], abs=0.01)
    assert all(isinstance(value, float) for value in values)
    replay = iter([1.0] * 200)
    with pytest.raises(ConfigError, match="StopIteration"):
        optimize.minimize(lambda x: next(replay), [0.0], method=fedcb2o.cb2o, callback=record)


def test_the_method_works_in_basinhopping():
    kwargs = {"method": fedcb2o.cb2o, "options": {**QUICK, "maxfev": 1000}}
    result = optimize.basinhopping(quartic, [0.0, 0.0], niter=2, minimizer_kwargs=kwargs, rng=0)
    assert result.fun < 0.1


def test_disp_prints_the_result(capsys):
    optimize.minimize(quartic, [0.0, 0.0], method=fedcb2o.cb2o, options={"disp": True, **QUICK})
    assert "message: maxiter = 60 steps were taken" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": {"maxitr": 3}}, "cb2o has no setting `maxitr`. Did you mean `maxiter`?"),
        ({"options": {"runs": 3}}, "cb2o has no setting `runs`"),
        ({"options": {"seed": [1, 2]}}, "cb2o takes one seed"),
        ({"constraints": [{"type": "eq"}]}, "constraint 1 needs the keys"),
        ({"bounds": [(1, 2), (1, 2)]}, "`x0` = .* is not within the `bounds`"),
        ({"options": {"alpha": 1.0}}, "cb2o has no setting `alpha`.*dynamics=fedcb2o.Paper"),
        ({"options": {"dynamics": Paper(lambda2=1.0)}}, "`lower` has no gradient by autograd"),
        (
            {"options": {"dynamics": Paper(lambda2=1.0)}, "jac": np.sum},
            r"`gradient` must return a tensor of shape \[200, 2\], got a tensor of shape \[200, 1\]",
        ),
    ],
)
def test_unsupported_options_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        optimize.minimize(quartic, [0.0, 0.0], method=fedcb2o.cb2o, **arguments)


def test_a_callback_receives_the_value_of_a_function_of_many_points():
    values = []

    def record(*, intermediate_result):
        values.append((intermediate_result.fun, intermediate_result.x @ intermediate_result.x))

    optimize.minimize(
        lambda x: np.sum(x[:, :] ** 2, axis=1),
        [1.0, 1.0], method=fedcb2o.cb2o, callback=record, options={"maxiter": 3},
    )  # fmt: skip
    assert values
    np.testing.assert_allclose(*np.transpose(values))
