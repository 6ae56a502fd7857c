"""`scipy.optimize.minimize(f, x0, method=fedcb2o.cb2o)`: what SciPy gives a method, and what it
expects of one."""

import numpy as np
import pytest
from scipy import optimize

import fedcb2o
from fedcb2o.errors import ConfigError

QUICK = {"num_particles": 40, "maxiter": 60, "dynamics": "paper"}


def quartic(x, a=1.0):
    assert x.shape == (2,)
    return float(((x - a) ** 4).sum())


def circle(x):
    return float((x @ x - 1) ** 2)


def test_it_is_minimize_with_names_of_scipy():
    found = optimize.minimize(
        quartic,
        [0.0, 0.5],
        (0.5,),
        fedcb2o.cb2o,
        bounds=[(0, None), (-1, 1)],
        tol=1e-9,
        options={"seed": 4, **QUICK},
    )
    same = fedcb2o.minimize(
        fedcb2o.from_point(quartic),
        x0=[0.0, 0.5],
        args=(0.5,),
        bounds=[(0, None), (-1, 1)],
        xtol=1e-9,
        seed=4,
        **QUICK,
    )
    assert isinstance(found, optimize.OptimizeResult)
    assert isinstance(found.x, np.ndarray)
    assert np.array_equal(found.x, same.x.numpy())
    assert found.fun == quartic(found.x, 0.5) == float(same.fun)
    assert type(found.fun) is float
    assert (found.nit, found.nfev, found.seed) == (60, 61 * 40 + 1, 4)
    assert (found.success, found.status, found.message) == (
        False,
        1,
        "maxiter = 60 steps were taken",
    )
    assert "upper" not in found


def test_two_levels():
    """What is allowed as the minimisers of `fun`."""
    options = {"upper": lambda x: float(x[0]), "num_particles": 100, "dt": 0.03}
    found = optimize.minimize(circle, [0.0, 0.0], method=fedcb2o.cb2o, options=options)
    assert found.x == pytest.approx([-1, 0], abs=0.2)
    assert found.success
    assert found.status == 0
    assert found.upper == found.x[0]


def test_callbacks_of_both_kinds():
    seen = []

    def by_x(x):
        seen.append(x)
        return len(seen) == 3

    def by_result(*, intermediate_result):
        seen.append(intermediate_result)
        if len(seen) == 3:
            raise StopIteration

    for callback in (by_x, by_result):
        seen.clear()
        found = optimize.minimize(
            quartic, [0.0, 0.0], method=fedcb2o.cb2o, callback=callback, options=QUICK
        )
        assert (found.nit, found.message) == (2, "the callback stopped the run")
    assert seen[2].x == pytest.approx(found.x)
    assert seen[2].fun == found.fun


def test_a_gradient_is_for_lambda2():
    def slope(x, a):
        return 4 * (x - a) ** 3

    options = {"lambda2": 0.5, **QUICK}
    found = optimize.minimize(quartic, [0.0, 0.0], 0.5, fedcb2o.cb2o, jac=slope, options=options)
    plain = fedcb2o.minimize(
        lambda x: (x - 0.5).pow(4).sum(-1),
        x0=[0.0, 0.0],
        gradient=lambda x: slope(x, 0.5),
        **options,
    )
    assert found.x == pytest.approx(plain.x.numpy())
    both = optimize.minimize(lambda x: (quartic(x), slope(x, 1.0)), [0.0, 0.0], method=fedcb2o.cb2o, jac=True,
                             options=options)  # fmt: skip
    assert both.nit == 60


def test_masked_values_of_scipy_functions_are_excluded():
    """The function is masked left of 1; a callback sees the same values as the particles."""
    seen = []

    def masked(x):
        return np.ma.masked if x[0] < 1 else (x[0] - 2) ** 2

    def note(intermediate_result):
        seen.append(intermediate_result.fun)

    found = optimize.minimize(masked, np.ma.array([2.0]), method=fedcb2o.cb2o, callback=note,
                              bounds=[(0, 4)], options={"maxiter": 300})  # fmt: skip
    assert found.x == pytest.approx([2.0], abs=0.01)
    assert all(isinstance(value, float) for value in seen)
    replay = iter([1.0] * 200)
    with pytest.raises(ConfigError, match="StopIteration"):
        optimize.minimize(lambda x: next(replay), [0.0], method=fedcb2o.cb2o, callback=note)


def test_as_the_local_method_of_basinhopping():
    kwargs = {"method": fedcb2o.cb2o, "options": {**QUICK, "maxfev": 1000}}
    found = optimize.basinhopping(quartic, [0.0, 0.0], niter=2, minimizer_kwargs=kwargs, rng=0)
    assert found.fun < 0.1


def test_disp_prints(capsys):
    optimize.minimize(quartic, [0.0, 0.0], method=fedcb2o.cb2o, options={"disp": True, **QUICK})
    assert "message: maxiter = 60 steps were taken" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": {"maxitr": 3}}, "cb2o has no option `maxitr`. Did you mean `maxiter`?"),
        ({"options": {"runs": 3}}, "cb2o has no option `runs`"),
        ({"options": {"seed": [1, 2]}}, "cb2o takes one seed"),
        ({"constraints": [{"type": "eq"}]}, "constraint 1 needs the keys"),
        ({"bounds": [(1, 2), (1, 2)]}, "`x0` = .* is not within the `bounds`"),
        ({"options": {"lambda2": 1.0}}, "`lower` has no gradient by autograd"),
        (
            {"options": {"lambda2": 1.0}, "jac": np.sum},
            r"`gradient` must return a tensor of shape \[200, 2\], got a tensor of shape \[200, 1\]",
        ),
    ],
)
def test_what_it_has_not_is_told(arguments, message):
    with pytest.raises(ConfigError, match=message):
        optimize.minimize(quartic, [0.0, 0.0], method=fedcb2o.cb2o, **arguments)
