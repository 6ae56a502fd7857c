"""`minimize`: reference loops, batches and single runs, form of the result, invalid input."""

import dataclasses
import itertools
import math
import os
import time
import warnings

import numpy as np
import pytest
import torch
from scipy import optimize
from tests import reference
from tests.names import steady
from tests.particles.problems import G, double, minimize, minimize_on_circle, with_dynamics
from tests.type_checks import VARIABLE
from torch.testing import assert_close

import fedcb2o
from fedcb2o import Adaptive, Adversary, CaptureWarning, ConfigError, Paper, RunError
from fedcb2o.particles import adversaries
from fedcb2o.particles.noise import Normals
from fedcb2o.particles.objectives import circle, circle_about, last_coordinate, problem

# Settings of the stopping test and of records do not change the dynamics.
STEADY = {"xtol": 0.0, "record_every": 1}


# ---- the reference loops of tests/reference.py ----


def plain_circle(cx=0.0, cy=0.0, upper=lambda x: (x[0] - 2) ** 2 + x[1] ** 2):
    """Return circle_about(cx, cy), its gradient and a G."""

    def excess(x):
        return (x[0] - cx) ** 2 + (x[1] - cy) ** 2 - 1

    return reference.Cluster(
        lambda x: excess(x) ** 2,
        lambda x: [4 * excess(x) * (x[0] - cx), 4 * excess(x) * (x[1] - cy)],
        upper,
    )


def spiral(view):
    """Return (a_t, A_t) that depend on theta and m, with a matrix A_t."""
    matrix = torch.tensor([[0.5, 0.2], [-0.1, 0.3]], dtype=view.theta_m.dtype)
    drift = 2 * (view.m[:, :1] - view.theta_m) + view.theta_m.flip(-1)
    return drift, matrix.expand(*view.theta_m.shape, 2)


def plain_spiral(theta, m):
    return [2 * (m[0][k] - theta[k]) + theta[1 - k] for k in (0, 1)], [[0.5, 0.2], [-0.1, 0.3]]


def plain_static(theta, m):
    return [0.0, 0.0], [[0.0, 0.0], [0.0, 0.0]]


@dataclasses.dataclass
class Groups:
    """Adversaries of both implementations: (move, plain move, n_m, initial, mass)."""

    entries: list

    @property
    def for_minimize(self):
        return [Adversary(move, n, initial, mass) for move, _, n, initial, mass in self.entries]


SPIRAL = (spiral, plain_spiral, 4, [0.5, 1.0])
STATIC = (adversaries.static(1, (0.0, 0.0)).move, plain_static, 3, [-1.0, 0.0])
CENTRES = ((0.0, 0.0), (1.5, 0.5), (-1.0, 1.0))


def run_reference(settings, sizes, groups, steps, with_g, seed):
    """Run the reference; return its particles and the consensus points at every step."""
    schedules = {
        name: settings.get(name, default)
        for name, default in (("alpha", 30.0), ("beta", 0.3), ("sigma1", 1.0))
    }
    n, d = sum(sizes), 2
    n_m = sum(group[2] for group in groups.entries)
    upper = (lambda x: (x[0] - 2) ** 2 + x[1] ** 2) if with_g else None
    clusters = [plain_circle(*centre, upper=upper) for centre in CENTRES[: len(sizes)]]
    total_mass = sum(mass for *_, mass in groups.entries if mass is not None)
    equal_mass = (1 - total_mass) / (
        n + sum(count for _, _, count, _, mass in groups.entries if mass is None)
    )
    low, high = settings.get("bounds", (-3.0, 3.0))
    start = fedcb2o.stream(seed, "particles", "initial").uniform(low, high, (n, d)).tolist()
    cluster_of = [k for k, size in enumerate(sizes) for _ in range(size)]
    particles = [
        reference.Particle(theta, equal_mass, k) for theta, k in zip(start, cluster_of, strict=True)
    ]
    for _, move, count, position, mass in groups.entries:
        particles += [
            reference.Particle(
                list(position), equal_mass if mass is None else mass / count, attack=move
            )
            for _ in range(count)
        ]
    like = torch.empty(d, dtype=torch.float64)
    noise = Normals([seed], "particles noise", n, like)
    gradient_noise = Normals([seed], "particles gradient noise", n, like)
    ends = list(itertools.accumulate((group[2] for group in groups.entries), initial=n))
    attack_noise = [
        Normals([seed], f"particles adversary {first}", end - first, like)
        for first, end in itertools.pairwise(ends)
    ]
    order, orders = [], fedcb2o.stream(seed, "particles", "batches")
    records = []
    for step in range(steps + 1):
        values = {
            name: value(step) if callable(value) else value for name, value in schedules.items()
        }
        sde = reference.SDE(
            lambda1=settings.get("lambda1", 1.0),
            lambda2=settings.get("lambda2", 0.0),
            sigma2=settings.get("sigma2", 0.0),
            dt=settings.get("dt", 0.01),
            D=settings.get("noise", "anisotropic"),
            delta_q=settings.get("delta_q", 0.0),
            R=settings.get("radius", math.inf),
            averaged=settings.get("quantile") == "averaged",
            box=([low] * d, [high] * d) if "bounds" in settings else None,
            **values,
        )
        records.append([reference.consensus_point(particles, cluster, sde) for cluster in clusters])
        if step == steps:
            return particles, records
        batch = None
        if (size := settings.get("batch")) is not None:
            if len(order) < size:
                order = orders.permutation(n + n_m).tolist()
            batch, order = order[:size], order[size:]
        moved = None if settings.get("update", "batch") == "all" else batch
        B = noise.next()[0].tolist()
        for normals in attack_noise:
            B += normals.next()[0].tolist()
        reference.particle_step(
            particles,
            clusters,
            sde,
            B,
            gradient_noise.next()[0].tolist() + [[0.0] * d] * n_m,
            batch,
            moved,
        )
    raise AssertionError


NO_ADVERSARIES = Groups([])
CASES = {
    "as it comes": {},
    "isotropic": {"noise": "isotropic"},
    "averaged": {"quantile": "averaged"},
    "delta_q": {"delta_q": 0.3},
    "radius": {"radius": 2.0, "delta_q": 0.1},
    "averaged, delta_q, radius, isotropic": {
        "quantile": "averaged", "delta_q": 0.2, "radius": 2.5, "noise": "isotropic",
    },
    "long steps": {"dt": 0.1, "lambda1": 2.0, "sigma1": 0.3},
    "schedules": {"alpha": lambda n: 10.0 * 2**n, "beta": lambda n: 0.5 - 0.1 * n, "sigma1": lambda n: (n + 1) / 3},
    "no noise": {"sigma1": 0.0},
    "gradient": {"lambda2": 0.1, "sigma2": 0.05},
    "gradient, no noise of it": {"lambda2": 0.1},
    "its noise, no gradient": {"sigma2": 0.05, "noise": "isotropic"},
    "bounds": {"bounds": (-1.2, 1.2), "sigma1": 5.0},
    "batch": {"batch": 9},
    "batch, all move": {"batch": 9, "update": "all"},
    "batch, gradient": {"batch": 9, "lambda2": 0.1, "sigma2": 0.05},
    "batch, gradient, all move": {"batch": 5, "lambda2": 0.1, "update": "all", "noise": "isotropic"},
    "batch of all": {"batch": 20, "delta_q": 0.1},
}  # fmt: skip
ATTACKS = {
    "nobody": NO_ADVERSARIES,
    "alike": Groups([(*STATIC, None)]),
    "with mass": Groups([(*STATIC, 0.35), (*SPIRAL, 0.2)]),
    "both": Groups([(*SPIRAL, None), (*STATIC, 0.3)]),
}


WITH_G = [("nobody", 1), ("alike", 1), ("with mass", 1), ("both", 1), ("with mass", 2), ("both", 3)]
WITHOUT_G = [("nobody", 1), ("with mass", 1), ("nobody", 2), ("with mass", 2)]


@pytest.mark.parametrize(
    ("upper", "case", "attack", "clusters"),
    [
        *((G, case, *place) for case in CASES for place in WITH_G),
        # CBO and FedCBO (eq:fedcbo_dynamic)
        *(
            (None, case, *place)
            for case in ("as it comes", "radius", "gradient", "batch")
            for place in WITHOUT_G
        ),
    ],
    ids=steady,
)
def test_minimize_equals_the_reference_loops(upper, case, attack, clusters):
    settings, groups, steps = CASES[case], ATTACKS[attack], 3
    sizes = {1: [20], 2: [12, 8], 3: [7, 7, 6]}[clusters]
    seed = 3 + clusters
    plain, m = run_reference(settings, sizes, groups, steps, upper is not None, seed)
    lowers = [circle_about(*centre) for centre in CENTRES[:clusters]]
    states = []
    result = minimize(
        lowers if clusters > 1 else lowers[0],
        upper,
        2,
        **with_dynamics({"alpha": 30.0, "beta": 0.3, **STEADY, **settings}),
        num_particles=sizes if clusters > 1 else 20,
        adversaries=groups.for_minimize,
        maxiter=steps,
        seed=seed,
        callback=lambda state: states.append(state.theta.clone()),
    )
    assert_equals_reference(result, plain, m, clusters)
    assert len(states) >= steps
    assert (result.upper is None) == (upper is None)


def assert_equals_reference(result, plain, m, clusters):
    n = len(result.theta)
    tolerances = {"rtol": 1e-9, "atol": 1e-10}
    assert_close(result.theta, double([p.theta for p in plain[:n]]), **tolerances)
    malicious = double([p.theta for p in plain[n:]]).reshape(-1, 2)
    assert_close(result.theta_m, malicious, **tolerances)
    m = double(m)
    m = m if clusters > 1 else m[:, 0]
    assert_close(result.history.x, m, **tolerances)
    assert_close(result.x, m[-1], **tolerances)
    x = result.x.reshape(-1, 2)
    lower = torch.stack(
        [circle_about(*centre)(x[k]) for k, centre in enumerate(CENTRES[:clusters])]
    )
    assert_close(result.lower.reshape(-1), lower)
    if result.upper is not None:
        assert_close(result.upper.reshape(-1), G(x))
    cluster_of = torch.tensor([p.cluster for p in plain[:n]])
    squares = (result.theta - x[cluster_of]).square().sum(-1)
    spread = torch.stack([squares[cluster_of == k].mean() for k in range(clusters)]).sqrt()
    assert_close(result.spread.reshape(-1), spread)


def test_an_explicit_gradient_equals_autograd():
    def slope(x):
        return 4 * (x.square().sum(-1, keepdim=True) - 1) * x

    settings = {
        "lambda2": 0.2,
        "sigma2": 0.1,
        "num_particles": 20,
        "maxiter": 20,
        "runs": 2,
        "bounds": (-1.5, 1.5),
    }
    expected = minimize_on_circle(**settings)
    assert_close(minimize_on_circle(gradient=slope, **settings).theta, expected.theta)
    expected_clusters = minimize([circle, circle_about(1.0, 0.0)], G, 2, **with_dynamics(settings))
    slopes = [slope, lambda x: slope(x - x.new_tensor([1.0, 0.0]))]
    result = minimize(
        [circle, circle_about(1.0, 0.0)], G, 2, gradient=slopes, **with_dynamics(settings)
    )
    assert_close(result.theta, expected_clusters.theta)


def test_each_cluster_may_have_its_own_g():
    uppers = (last_coordinate, lambda x: -last_coordinate(x))
    dynamics = Paper(alpha=100.0)
    result = minimize(
        [circle, circle], uppers, 2, num_particles=50, dynamics=dynamics, maxiter=600, runs=20
    )
    typical = result.x.median(0).values  # seven runs of ten find both
    assert_close(typical, double([[0.0, -1.0], [0.0, 1.0]]), rtol=0, atol=0.1)


# ---- a batch equals its runs one by one, bit by bit ----


def rastrigin(x):
    return x.square().sum(-1) - 10 * torch.cos(2 * math.pi * x).sum(-1) + 10 * x.shape[-1]


COMMON = {
    "num_particles": 30,
    "beta": 0.2,
    "alpha": 30.0,
    "maxiter": 25,
    "record_every": 5,
    "xtol": 0.0,
}
BATCHES = {
    "circle": (circle, G, 2, {}),
    "isotropic": (circle, G, 2, {"noise": "isotropic", "sigma1": 0.5}),
    "stops at different steps": (circle, G, 2, {"xtol": 0.3, "lambda1": 4.0, "maxiter": 200, "record_every": 1}),
    "stops, with batches and attackers": (
        circle, G, 2,
        {
            "xtol": 1.0, "lambda1": 4.0, "maxiter": 100, "record_every": 1, "batch": 16, "update": "all",
            "adversaries": [adversaries.random(4, sigma=0.5), adversaries.tracking(3, (1.0, 0.0))],
        },
    ),
    "high dimension, cbo": (rastrigin, None, 33, {}),
    "two particles": (circle, last_coordinate, 3, {"num_particles": 2}),
    "ackley": (problem("circle-ackley").lower, problem("circle-ackley").upper, 2, {"num_particles": 57}),
    "gradient, averaged": (
        circle, G, 2, {"lambda2": 0.1, "sigma2": 0.1, "quantile": "averaged", "delta_q": 0.01, "bounds": (-1.5, 1.5)},
    ),
    "batch": (circle, G, 2, {"batch": 13}),
    "batch, gradient": (circle, G, 2, {"batch": 13, "lambda2": 0.1, "update": "all"}),
    "attacked": (circle, G, 2, {"adversaries": [adversaries.static(3, (-1.0, 0.0), mass=0.1), Adversary(spiral, 5)]}),
    "clusters": ([circle, circle_about(1.0, 0.0)], G, 2, {"lambda2": 0.1, "xtol": 1.0, "maxiter": 60}),
    "clusters, attacked": (
        [circle, circle_about(1.0, 0.0)], G, 2,
        {"num_particles": [11, 20], "adversaries": adversaries.tracking(2, [0.5, 0.5]), "batch": 20, "sigma2": 0.01},
    ),
    "excluded": (lambda x: torch.where(x[..., 0] > 1, torch.nan, circle(x)), G, 2, {"sigma1": 3.0}),
    "bounds": (circle, G, 2, {"bounds": (-1.0, 2.0), "sigma1": 4.0, "radius": 2.5}),
}  # fmt: skip


# Cases in float32; the slow tests run all cases.
SINGLE = (
    "circle",
    "stops, with batches and attackers",
    "high dimension, cbo",
    "clusters, attacked",
)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float64) for case in BATCHES),
        *(
            pytest.param(case, torch.float32, marks=() if case in SINGLE else pytest.mark.slow)
            for case in BATCHES
        ),
    ],
)
def test_a_batch_equals_its_runs(case, dtype):
    lower, upper, dim, settings = BATCHES[case]
    settings = with_dynamics({**COMMON, **settings, "dtype": dtype})
    seeds = [5, 2, 9]
    batch = minimize(lower, upper, dim, seed=seeds, **settings)
    if "stops" in case:
        assert len(set(batch.nit.tolist())) > 1
    for run in (0, 2):
        single = minimize(lower, upper, dim, seed=seeds[run], **settings)
        assert_same_run(
            batch,
            single,
            run,
            assert_bits_equal if dtype == torch.float64 or WIDE else assert_nearly_equal,
        )


# With AVX2 PyTorch computes the last numbers of a tensor by functions that round differently in
# float32. The number of runs decides which numbers are last.
WIDE = torch.backends.cpu.get_cpu_capability() != "AVX2"


def assert_bits_equal(one, other):
    assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def assert_nearly_equal(one, other):
    assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def assert_same_run(batch, single_run, run, compare=assert_bits_equal):
    """Compare every number of one run of a batch with a single run."""
    for name in ("x", "lower", "upper", "spread", "theta", "theta_m"):
        of_batch, of_run = getattr(batch, name), getattr(single_run, name)
        assert (of_batch is None) == (of_run is None)
        if of_run is not None:
            compare(of_batch[run], of_run)
    for name in ("success", "nit", "nfev", "excluded", "seed"):
        assert getattr(batch, name)[run] == getattr(single_run, name), name
    assert batch.message[run] == single_run.message
    records = len(single_run.history.n)
    assert torch.equal(batch.history.n[:records], single_run.history.n)
    compare(batch.history.x[:records, run], single_run.history.x)
    compare(batch.history.spread[:records, run], single_run.history.spread)
    assert batch.history.x[records:, run].isnan().all()


@pytest.mark.parametrize("n", [3, 50, 1000])
@pytest.mark.parametrize("dim", [1, 7, 100])
def test_a_batch_equals_its_runs_at_any_size(n, dim):
    """The method of summation depends on the size, but not on the number of runs."""
    settings = with_dynamics({**COMMON, "num_particles": n, "maxiter": 3})
    batch = minimize(
        rastrigin, G if dim == 2 else last_coordinate, dim, runs=5, seed=10, **settings
    )
    for run in (0, 4):
        single = minimize(
            rastrigin, G if dim == 2 else last_coordinate, dim, seed=10 + run, **settings
        )
        assert_same_run(batch, single, run)


def test_the_seed_of_a_run_reproduces_it():
    settings = {"num_particles": 20, "maxiter": 10}
    result = minimize_on_circle(runs=5, seed=40, **settings)
    assert [int(seed) for seed in result.seed] == [40, 41, 42, 43, 44]
    repeated = minimize_on_circle(seed=result.seed[3], **settings)
    assert torch.equal(repeated.x, result.x[3])
    assert int(repeated.seed) == 43
    all_repeated = minimize_on_circle(seed=result.seed, **settings)
    assert torch.equal(all_repeated.x, result.x)
    other = minimize_on_circle(seed=44, **settings)
    assert not torch.equal(other.x, repeated.x)


def test_a_generator_draws_the_seed():
    settings = {"num_particles": 20, "maxiter": 5}
    for make in (
        np.random.default_rng,
        np.random.RandomState,
        lambda seed: torch.Generator().manual_seed(seed),
    ):
        generator = make(1)
        first, second = (minimize_on_circle(seed=generator, **settings) for _ in range(2))
        assert not torch.equal(first.x, second.x)
        assert torch.equal(minimize_on_circle(seed=make(1), **settings).x, first.x)
        assert torch.equal(minimize_on_circle(seed=second.seed, **settings).x, second.x)
    several = minimize_on_circle(seed=np.random.default_rng(1), runs=2, **settings)
    assert several.seed[1] == several.seed[0] + 1


def test_runs_without_a_seed_differ():
    settings = {"num_particles": 20, "maxiter": 5}
    first, second = (minimize_on_circle(seed=None, **settings) for _ in range(2))
    assert first.seed != second.seed
    assert torch.equal(minimize_on_circle(seed=first.seed, **settings).x, first.x)


# ---- conventions of the result ----


def test_shapes_of_one_run():
    result = minimize_on_circle(
        num_particles=12,
        maxiter=25,
        record_every=10,
        xtol=0.0,
        beta=0.3,
        adversaries=adversaries.random(3),
    )
    assert result.x.shape == (2,)
    assert result.lower.shape == result.upper.shape == result.spread.shape == ()
    assert result.theta.shape == (12, 2)
    assert result.theta_m.shape == (3, 2)
    assert (result.success, result.nit, result.excluded) == (False, 25, 0)
    assert (type(result.success), type(result.nit), type(result.nfev)) == (bool, int, int)
    assert result.nfev == 26 * 15 + 1  # before each step, the last ensemble, and x
    assert result.message == "maxiter = 25 steps were taken"
    assert result.history.n.tolist() == [0, 10, 20, 25]
    assert result.history.t.tolist() == pytest.approx([0, 0.1, 0.2, 0.25])
    assert result.history.x.shape == (4, 2)
    assert result.history.spread.shape == (4,)
    assert torch.equal(result.history.x[-1], result.x)
    assert result.notes == ()
    assert result.seconds > 0
    assert int(result.seed) == 0
    assert_close(result.lower, circle(result.x))
    assert_close(result.upper, G(result.x))


def test_shapes_of_runs_and_clusters():
    lowers = [circle, circle_about(1.0, 0.0), circle_about(-1.0, 0.0)]
    settings = {"num_particles": [5, 6, 7], "maxiter": 4, "record_every": 2}
    settings["dynamics"] = Paper(xtol=0.0)
    batch = minimize(lowers, G, 2, runs=2, **settings)
    assert batch.x.shape == (2, 3, 2)
    assert batch.lower.shape == batch.upper.shape == batch.spread.shape == (2, 3)
    assert batch.theta.shape == (2, 18, 2)
    assert batch.theta_m.shape == (2, 0, 2)
    assert batch.success.tolist() == [False, False]
    assert batch.nit.tolist() == [4, 4]
    # 18 particles before 4 steps and at the end, and x, by every cluster's L.
    assert batch.nfev.tolist() == [3 * 91, 3 * 91]
    assert batch.excluded.tolist() == [0, 0]
    assert batch.message == ["maxiter = 4 steps were taken"] * 2
    assert batch.history.x.shape == (3, 2, 3, 2)
    assert batch.history.spread.shape == (3, 2, 3)
    one_run = minimize(lowers, G, 2, **settings)
    assert one_run.x.shape == (3, 2)
    assert one_run.lower.shape == one_run.spread.shape == (3,)
    assert one_run.history.x.shape == (3, 3, 2)
    assert one_run.history.spread.shape == (3, 3)
    # A list of one function keeps the axis of clusters, and runs=1 the axis of runs.
    single = minimize([lambda x: x[..., 0]], None, 1, runs=1, num_particles=2, maxiter=2)
    assert single.x.shape == (1, 1, 1)
    assert single.theta.shape == (1, 2, 1)
    assert single.upper is None
    flat = minimize(lambda x: x[..., 0], None, 1, num_particles=2, maxiter=2)
    assert flat.x.shape == (1,)
    assert flat.theta.shape == (2, 1)
    assert flat.history.x.shape[1:] == (1,)


@pytest.mark.parametrize("clusters", [1, 2, 3])
@pytest.mark.parametrize(
    "settings", [{}, {"batch": 7}, {"batch": 7, "lambda2": 0.1, "update": "all"}], ids=steady
)
def test_nfev_counts_the_evaluations(clusters, settings):
    counts = {"lower": 0, "upper": 0}

    def counted(name, objective):
        def counting(x):
            counts[name] += x.shape[:-1].numel()
            return objective(x)

        return counting

    lowers = [counted("lower", circle_about(float(k), 0.0)) for k in range(clusters)]
    result = minimize(
        lowers,
        counted("upper", G),
        2,
        num_particles=9,
        maxiter=12,
        record_every=5,
        dynamics=Paper(xtol=0.0, **settings),
    )
    # The first call of each function also tries three points alone.
    assert (counts["lower"] - 3 * clusters, counts["upper"] - 3) == (result.nfev, result.nfev)


def test_excluded_values_are_counted_per_cluster():
    result = minimize(
        [lambda x: torch.where(x[..., 0] > 0, torch.nan, circle(x)), circle], G, 2, initial=[[1.0, 0.0], [-1.0, 0.5]],
        maxiter=0,
    )  # fmt: skip
    # Both clusters evaluate both particles and their own x; one value is NaN.
    assert (result.nfev, result.excluded) == (6, 1)


def test_objectives_receive_the_ensemble_and_the_answer():
    shapes = []

    def lower(x):
        shapes.append(tuple(x.shape))
        return circle(x)

    minimize(lower, dim=2, num_particles=7, maxiter=0)
    assert set(shapes) == {(7, 2), (1, 2)}  # the ensemble, and the answer
    shapes.clear()
    minimize(lower, dim=2, num_particles=7, maxiter=0, runs=3)
    # Single points are tried with the same number of axes.
    assert set(shapes) == {(3, 7, 2), (3, 1, 2), (1, 1, 2)}


def test_a_run_succeeds_when_the_spread_reaches_xtol():
    settings = {
        "num_particles": 50,
        "alpha": 30.0,
        "beta": 0.2,
        "sigma1": 0.3,
        "lambda1": 3.0,
        "maxiter": 2000,
    }
    result = minimize_on_circle(xtol=0.01, record_every=7, **settings)
    assert result.success is True
    assert result.message == "consensus: spread at most xtol = 0.01"
    assert result.spread <= 0.01
    assert result.nit % 7 == 0
    assert (result.history.spread[:-1] > 0.01).all()
    assert_close(result.x, double([1.0, 0.0]), rtol=0, atol=0.2)
    # A wider xtol stops earlier, on the same path.
    early_run = minimize_on_circle(xtol=0.1, record_every=7, **settings)
    assert early_run.nit < result.nit
    assert torch.equal(early_run.history.x, result.history.x[: len(early_run.history.n)])
    distance = (early_run.theta - early_run.x).square().sum(-1).mean().sqrt()
    assert_close(early_run.spread, distance)


def test_all_clusters_must_agree():
    dynamics = Paper(sigma1=0.1, lambda1=5.0, xtol=0.01)
    quick = minimize([circle, circle_about(9.0, 0.0)], G, 2, num_particles=20, dynamics=dynamics)
    assert quick.nit < 2000
    assert (quick.spread <= 0.01).all()


def test_maxiter_0_evaluates_the_first_ensemble():
    """The answer is the consensus point, not the best particle."""
    start = [[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [9.0, 9.0]]
    result = minimize(
        circle, last_coordinate, initial=start, dynamics=Paper(alpha=0.0, beta=0.75), maxiter=0
    )
    # L is 1, 9, 9, large: three of four are in the sub-level set.
    assert result.x.tolist() == pytest.approx([2 / 3, 2 / 3])
    assert (result.nit, result.nfev) == (0, 5)
    assert result.history.n.tolist() == [0]
    assert result.theta.tolist() == start
    dynamics = Paper(alpha=math.log(2), beta=0.75)
    best = minimize(circle, last_coordinate, initial=start, dynamics=dynamics, maxiter=0)
    # weights 1, 1, 1/4
    assert best.x.tolist() == pytest.approx([2 / 2.25, 0.5 / 2.25])
    assert best.lower.item() == pytest.approx(circle(best.x).item())


def test_a_result_is_a_mapping():
    result = minimize_on_circle(maxiter=3)
    assert result["x"] is result.x
    assert result.fun is result["fun"] is result.lower
    assert list(dict(result)) == [field.name for field in dataclasses.fields(result)]
    assert "nit" in result
    assert "clone" not in result
    with pytest.raises(KeyError):
        result["keys"]


@pytest.mark.parametrize(
    "settings", [{}, {"batch": 7}, {"batch": 7, "record_every": 3}, {"batch": 7, "lambda2": 0.1}]
)
def test_maxfev_limits_the_evaluations(settings):
    common = {"num_particles": 20, "xtol": 0.0, "runs": 2, "dynamics": "paper", **settings}
    for maxfev in range(81, 200, 7):
        result = minimize_on_circle(maxfev=maxfev, **common)
        assert max(result.nfev) <= maxfev
        value = result.message[0]
        assert value == f"another step would evaluate more than maxfev = {maxfev} particles"
        longer_run = minimize_on_circle(maxiter=int(result.nit[0]) + 1, **common)
        assert max(longer_run.nfev) > maxfev
    short_run = minimize_on_circle(maxfev=61, maxiter=2, num_particles=20, dynamics="paper")
    assert short_run.message.startswith("maxiter")


def test_args_are_passed_to_the_functions():
    def about(x, centre, scale=1.0):
        return scale * (x - centre).square().sum(-1)

    result = minimize(about, dim=2, args=(torch.tensor([1.0, 2.0]), 3.0))
    assert_close(result.x, double([1.0, 2.0]), rtol=0, atol=0.01)
    assert torch.equal(minimize(about, None, 2, args=1.0, maxiter=5).x,
                       minimize(lambda x: about(x, 1.0), None, 2, maxiter=5).x)  # fmt: skip
    result_of_clusters = minimize([circle_of, circle_of], G_of, 2, args=(0.5,), maxiter=5)
    expected = minimize([lambda x: circle_of(x, 0.5)] * 2, lambda x: G_of(x, 0.5), 2, maxiter=5)
    assert torch.equal(result_of_clusters.theta, expected.theta)
    for adapter, function in (
        (fedcb2o.from_numpy, lambda x, a: ((x - a) ** 2).sum(-1)),
        (fedcb2o.from_point, lambda x, a: ((x - a) ** 2).sum()),
    ):
        adapted = minimize(adapter(function), dim=2, args=(0.5,), maxiter=5)
        assert_close(adapted.x, minimize(about, dim=2, args=(0.5,), maxiter=5).x)
    with pytest.raises(ConfigError, match="writes_into_it, writes into"):
        minimize(writes_into_it, dim=2, args=(2.0,))


def writes_into_it(x, a):
    return x.mul_(a).sum(-1)


def circle_of(x, a):
    return circle(x * a)


def G_of(x, a):  # noqa: N802
    return G(x + a)


def test_repr_of_one_run():
    text = repr(minimize_on_circle(num_particles=50, sigma1=0.3, maxiter=5))
    lines = text.splitlines()
    assert lines[0].startswith("message: maxiter = 5 steps were taken")
    for name in (
        "success: False",
        "x: [",
        "lower: ",
        "upper: ",
        "spread: ",
        "nit: 5",
        "nfev: 301",
        "seconds: ",
    ):
        assert any(line.lstrip().startswith(name) for line in lines), name
    assert "tensor(" not in text
    assert "excluded" not in text
    assert max(map(len, lines)) < 120
    assert len({line.index(":") for line in lines}) == 1  # aligned
    assert "upper" not in repr(minimize(circle, dim=2, maxiter=1))
    lowers = [circle, circle_about(1.0, 0.0)]
    assert "note" in repr(
        minimize(lowers, G, 2, dynamics=Paper(noise="isotropic", sigma1=2.0), maxiter=1)
    )
    assert "excluded: " in repr(minimize(lambda x: circle(x) / (x[..., 0] > 0), dim=2, maxiter=1))


def test_repr_of_many_runs():
    text = repr(minimize_on_circle(runs=30, num_particles=20, sigma1=0.3, xtol=0.1, maxiter=150))
    assert "30, of which " in text
    assert "reached a consensus" in text
    assert "x: tensor of shape [30, 2]" in text
    assert len(text.splitlines()) < 12


@pytest.mark.parametrize("way", ["True", "StopIteration"])
def test_a_callback_stops_the_run(way):
    steps = []

    def record(state):
        steps.append(state.n)
        if state.n == 4:
            if way == "True":
                return True
            raise StopIteration
        return None

    result = minimize_on_circle(num_particles=10, callback=record, xtol=0.0, record_every=3)
    assert steps == [0, 1, 2, 3, 4]
    assert result.nit == 4
    assert result.message.startswith("the callback stopped the run")
    assert result.success is False
    assert result.history.n.tolist() == [0, 3, 4]


@pytest.mark.parametrize(
    "answer",
    [np.zeros(2), np.array([True]), torch.zeros(2), torch.tensor(0.5), "go on", [], {"x": 1}, 0.25, 1],
    ids=str,
)  # fmt: skip
def test_callback_results_that_are_not_truth_values_are_refused(answer):
    with pytest.raises(ConfigError, match="`callback` must return True to stop, False or None"):
        minimize_on_circle(callback=lambda state: answer)


def test_callback_errors_propagate():
    def fail(state):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        minimize_on_circle(callback=fail)


def test_a_callback_receives_the_state():
    states = []

    def record(state):
        states.append(dataclasses.replace(state, theta=state.theta.clone()))

    settings = {
        "num_particles": 8,
        "maxiter": 3,
        "xtol": 0.0,
        "adversaries": adversaries.random(2),
        "beta": 0.5,
    }
    result = minimize_on_circle(callback=record, **settings)
    first = states[0]
    assert (first.n, first.t, states[2].n, states[2].t) == (0, 0.0, 2, 0.02)
    assert first.x.shape == (2,)
    assert first.theta.shape == (8, 2)
    assert first.theta_m.shape == (2, 2)
    assert first.lower.shape == first.upper.shape == (8,)
    assert_close(first.lower, circle(first.theta))
    assert_close(first.upper, G(first.theta))
    assert first.runs.tolist() == [0]
    assert_close(first.x, result.history.x[0])
    states.clear()
    lowers = [circle, circle_about(1.0, 0.0)]
    minimize(lowers, None, 2, runs=3, callback=record, **with_dynamics(settings))
    assert states[0].x.shape == (3, 2, 2)
    assert states[0].theta.shape == (3, 16, 2)
    assert states[0].theta_m.shape == (3, 2, 2)
    assert states[0].lower.shape == (3, 16)
    assert states[0].upper is None
    own_values = torch.cat(
        [circle(states[0].theta[:, :8]), circle_about(1.0, 0.0)(states[0].theta[:, 8:])], 1
    )
    assert_close(states[0].lower, own_values)
    states.clear()
    minimize_on_circle(batch=4, callback=record, **settings)
    assert states[0].lower is states[0].upper is None


def test_a_callback_receives_only_active_runs():
    states = []
    settings = {"num_particles": 20, "sigma1": 0.3, "lambda1": 5.0, "xtol": 0.05, "maxiter": 500}
    result = minimize_on_circle(
        runs=6,
        callback=lambda state: states.append((state.n, state.runs.tolist(), len(state.x))),
        **settings,
    )
    for n, runs, count in states:
        assert count == len(runs)
        # A run appears for the last time at the step where it stops.
        assert runs == [run for run, nit in enumerate(result.nit.tolist()) if nit >= n]


def test_a_time_limit_stops_the_run():
    def slow(x):
        time.sleep(0.005)
        return circle(x)

    result = minimize(slow, dim=2, time_limit=0.05, runs=2, dynamics=Adaptive(xtol=0.0))
    assert [message[:31] for message in result.message] == ["the time limit of 0.05 s passed"] * 2
    assert 0 < result.nit[0] < 100
    assert result.history.n[-1] == result.nit[0]
    assert not result.success.any()


def test_dtype_samplers_and_initial_arrays():
    result = minimize_on_circle(dtype=torch.float32, maxiter=3)
    assert (
        result.x.dtype
        == result.theta.dtype
        == result.lower.dtype
        == result.history.x.dtype
        == torch.float32
    )

    def ring(generator, n, d):
        angle = generator.uniform(0, 2 * math.pi, n)
        return np.stack([np.cos(angle), np.sin(angle)], -1)

    result = minimize_on_circle(initial=ring, num_particles=40, maxiter=0, runs=2)
    assert_close(result.theta.norm(dim=-1), torch.ones(2, 40).double())
    assert not torch.equal(result.theta[0], result.theta[1])
    start = np.random.default_rng(0).standard_normal((3, 10, 2))
    for initial in (
        start,
        torch.from_numpy(start),
        start.tolist(),
        torch.from_numpy(start).float(),
    ):
        result = minimize(circle, G, initial=initial, runs=3, maxiter=0)
        assert_close(result.theta, torch.from_numpy(start), rtol=1e-6, atol=1e-6)
    shared = minimize(circle, G, initial=start[0], runs=2, maxiter=0).theta
    assert torch.equal(shared[0], shared[1])
    split = minimize([circle, circle], G, initial=start[0], maxiter=0, num_particles=[3, 7])
    assert split.theta.shape == (10, 2)
    assert minimize([circle, circle], G, initial=start[0], maxiter=0).theta.shape == (10, 2)


def test_initial_is_not_changed():
    start = torch.from_numpy(np.random.default_rng(0).standard_normal((10, 2)))
    before = start.clone()
    minimize(circle, G, initial=start, maxiter=5)
    minimize(circle, G, initial=start.numpy(), maxiter=5)
    assert torch.equal(start, before)


# ---- bounds ----


@pytest.mark.parametrize(
    ("bounds", "dim", "low", "high"),
    [
        ((-1.0, 2.0), 2, [-1, -1], [2, 2]),
        ([(-1.0, 0.5), (0.25, 2.0)], None, [-1, 0.25], [0.5, 2]),
        (np.array([[-1.0, 0.5], [0.25, 2.0]]), 2, [-1, 0.25], [0.5, 2]),
        (torch.tensor([[-1.0, 0.5], [0.25, 2.0]]), None, [-1, 0.25], [0.5, 2]),
        (optimize.Bounds([-1, 0.25], [0.5, 2]), None, [-1, 0.25], [0.5, 2]),
        (optimize.Bounds([-1, 0.25], [0.5, 2]), 2, [-1, 0.25], [0.5, 2]),
        (optimize.Bounds(-1, 2), 2, [-1, -1], [2, 2]),
        (optimize.Bounds([-1, 0], 2), 2, [-1, 0], [2, 2]),
    ],
    ids=steady,
)
def test_particles_stay_inside_the_bounds(bounds, dim, low, high):
    low, high = double(low), double(high)
    states = []
    minimize(circle, G, dim, bounds=bounds, dynamics=Paper(sigma1=5.0), num_particles=30, maxiter=30, callback=lambda state: states.append(torch.cat([state.theta, state.x[None]])))  # fmt: skip
    positions = torch.stack(states)
    assert ((positions >= low - 1e-12) & (positions <= high + 1e-12)).all()
    # The initial particles cover the box, and noise moves particles to its walls.
    assert (positions[0].amin(0) < low + (high - low) / 5).all()
    assert (positions == high).any()


@pytest.mark.parametrize("initial", ["array", "sampler"])
def test_initial_particles_are_inside_the_bounds(initial):
    start = np.random.default_rng(0).normal(size=(20, 2)) * 3
    ensemble = (
        start if initial == "array" else lambda generator, n, d: generator.normal(size=(n, d)) * 3
    )
    result = minimize_on_circle(bounds=(-1.0, 1.0), initial=ensemble, num_particles=20, maxiter=0)
    assert (result.theta.abs() <= 1).all()
    assert (result.x.abs() <= 1).all()


@pytest.mark.parametrize(
    ("settings", "low", "high"),
    [
        ({"dim": 2}, [-3, -3], [3, 3]),
        ({"x0": [1.0, -2.0]}, [-2, -5], [4, 1]),
        ({"x0": 5, "dim": 2, "spread": 0.5}, [4.5, 4.5], [5.5, 5.5]),
        ({"x0": np.array([1.0, 2.0]), "spread": [0.5, 1.0]}, [0.5, 1], [1.5, 3]),
        ({"dim": 2, "spread": 10.0}, [-10, -10], [10, 10]),
        # Everywhere between two bounds, or within half their distance of x0.
        ({"bounds": [(-1.0, 0.5), (10.0, 30.0)]}, [-1, 10], [0.5, 30]),
        ({"bounds": [(-1.0, 0.5), (10.0, 30.0)], "x0": [-1.0, 25.0]}, [-1, 15], [-0.25, 30]),
        ({"bounds": [(-1.0, 0.5), (10.0, 30.0)], "spread": 0.25}, [-0.5, 19.75], [0, 20.25]),
        # One bound: as close to [-3, 3] as it allows.
        ({"bounds": (0, None), "dim": 2}, [0, 0], [6, 6]),
        ({"bounds": [(10.0, math.inf), (-math.inf, 1.0)]}, [10, -5], [16, 1]),
        ({"bounds": [(-50, None), (None, None)]}, [-3, -3], [3, 3]),
        ({"bounds": (-1e308, 1e308), "dim": 2}, [-3, -3], [3, 3]),
        ({"bounds": [(None, -50), (-50, None)], "spread": 1.0}, [-52, -1], [-50, 1]),
        ({"bounds": [(0, None), (None, 5)], "x0": [1.0, 4.0]}, [0, 1], [4, 5]),
        ({"bounds": optimize.Bounds([0, -np.inf], [np.inf, np.inf])}, [0, -3], [6, 3]),
        ({"bounds": optimize.Bounds(lb=0), "x0": [1.0, 1.0]}, [0, 0], [4, 4]),
    ],
    ids=steady,
)
def test_initial_region_from_bounds_x0_and_spread(settings, low, high):
    low, high = double(low), double(high)
    start = minimize(circle, G, num_particles=2000, maxiter=0, **settings).theta
    assert ((start >= low) & (start <= high)).all()
    near = 0.01 * (high - low)
    assert (start.amin(0) < low + near).all()
    assert (start.amax(0) > high - near).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"x0": [-1.0, 0.0], "bounds": (0, None)}, r"`x0` = \[-1.0, 0.0\] is not within the `bounds`"),
        ({"x0": [1.0, 0.0, 0.0], "dim": 2}, "`x0` has 3 coordinates, `dim` is 2"),
        ({"x0": [[1.0, 0.0]]}, r"`x0` must be a point \[d\] .* and an ensemble is `initial`"),
        ({"x0": [math.nan, 0.0]}, "`x0` must be a point"),
        ({"x0": [0.0, 0.0], "initial": [[0.0, 1.0], [1.0, 0.0]]}, "`initial` says where particles start: leave out"),
        ({"spread": 0.0, "dim": 2}, "`spread` must be one number or d, above 0"),
        ({"spread": [1.0, 1.0, 1.0], "dim": 2}, "`spread` must be one number or d, above 0"),
        ({"spread": -1.0, "x0": [0.0, 0.0]}, "`spread` must be one number or d, above 0"),
        ({"maxfev": 0, "dim": 2}, "`maxfev` must be a whole number, at least 1"),
    ],
)  # fmt: skip
def test_invalid_starts_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        minimize(circle, G, **settings)


def test_half_open_bounds_hold():
    start = np.random.default_rng(0).uniform(1, 2, (20, 2))
    bounds = [(0.0, math.inf), (-math.inf, 1.5)]
    result = minimize(
        circle, G, initial=start, bounds=bounds, dynamics=Paper(sigma1=9.0), maxiter=40
    )
    assert (result.theta[:, 0] >= 0).all()
    assert (result.theta[:, 1] <= 1.5).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"alpha": lambda n: next(iter([]))},
        {"initial": lambda generator, n, d: next(iter([]))},
        {"adversaries": Adversary(lambda view: next(iter([])), 3)},
    ],
    ids=["schedule", "sampler", "adversary"],
)
def test_stop_iteration_in_a_user_function_is_an_error(settings):
    with pytest.raises(ConfigError, match="raised StopIteration, as an exhausted iterator does"):
        minimize(circle, G, 2, **with_dynamics(settings))


def test_a_complex_drift_is_refused():
    group = Adversary(lambda view: (view.theta_m * 1j, 0.0), 3)
    message = r"an adversary's drift a_t must be real numbers, got torch\.complex"
    with pytest.raises(ConfigError, match=message):
        minimize(circle, G, 2, adversaries=group)


@pytest.mark.parametrize("noise", ["isotropic", "anisotropic"])
def test_equal_bounds_fix_a_coordinate(noise):
    """The free coordinate is at the minimum along the line x1 = 0.1, as in SciPy."""

    def lower(x):
        assert (x[..., 1] == 0.1).all()
        return (x[..., 0] - 1 - x[..., 1]).square()

    fixed_values = []
    result = minimize(lower, bounds=[(-2, 2), (0.1, 0.1)], dynamics=Paper(noise=noise), seed=1, callback=lambda state: fixed_values.append(state.x[1].item()))  # fmt: skip
    assert result.success
    assert result.x[1].item() == 0.1
    assert set(fixed_values) == {0.1}
    assert result.x[0].item() == pytest.approx(1.1, abs=0.03)
    with pytest.raises(ConfigError, match=r"`x0` = .* is not within the `bounds`"):
        minimize(lower, bounds=[(-2, 2), (0.1, 0.1)], x0=[0.0, 0.2])
    near_x0 = minimize(lower, bounds=[(-2, 2), (0.1, 0.1)], x0=[0, 0.1], spread=[1, 0], maxiter=1)
    assert (near_x0.theta[:, 0].abs() <= 1.5).all()


@pytest.mark.parametrize("xtol", [0.0, 1e-4])
def test_bounds_that_fix_all_coordinates_give_the_answer(xtol, caplog):
    result = minimize(
        circle, G, bounds=[(0.1, 0.1), (0.7, 0.7)], dynamics=Adaptive(xtol=xtol), num_particles=7
    )
    assert (result.x.tolist(), result.success, result.nit) == ([0.1, 0.7], True, 0)
    assert "`bounds` fix all coordinates" in caplog.text
    scipy_result = optimize.minimize(
        lambda x: float(x.sum()), [1, 2], bounds=[(1, 1), (2, 2)], method=fedcb2o.cb2o
    )
    assert (scipy_result.x.tolist(), scipy_result.fun) == ([1.0, 2.0], 3.0)


def test_bounds_and_points_may_have_any_type():
    """Big-endian, strided, integer and object arrays define the same box."""
    expected = minimize(circle, G, bounds=[(0, 2), (-1, 3)], x0=[1, 0], maxiter=2)
    forms = [
        np.array([[0, 2], [-1, 3]], ">i4"),
        np.array([[0, -1], [2, 3]], ">f8").T,
        np.array([[0, 2], [-1, 3]], dtype=object),
        [torch.tensor([0, 2]), np.array([-1, 3])],
    ]
    for bounds in forms:
        result = minimize(circle, G, bounds=bounds, x0=np.array([0, 1], ">f4")[::-1], maxiter=2)
        assert torch.equal(result.theta, expected.theta)
    with pytest.raises(ConfigError, match=r"`spread` = 1e.308 is too large"):
        minimize(circle, G, 2, spread=1e308)
    with pytest.raises(ConfigError, match=r"`x0` must be a point .* finite numbers"):
        minimize(circle, G, x0=np.ma.array([0.0, 1.0], mask=[0, 1]))


def test_bounds_hold_exactly():
    """The mean of particles at a bound may round to a number beyond it."""
    dynamics = Paper(dt=0.1, sigma1=5.0)
    result = minimize(lambda x: x.sum(-1), bounds=[(0.1, 1.0)] * 3, dynamics=dynamics, maxiter=400)
    assert (result.x >= 0.1).all()


@pytest.mark.parametrize(
    ("lower", "upper", "message"),
    [
        (lambda x: 0 * x[..., 0] + 2, None, "`lower` is 2 at every particle"),
        (circle, lambda x: x[..., 0] > 9, "`upper` is 0 at every particle"),
        (lambda x: x[..., 0] > 9, G, ""),
        (circle, None, ""),
    ],
)
def test_an_objective_that_is_constant_warns(lower, upper, message, caplog):
    minimize(lower, upper, 2, maxiter=2)
    assert message in caplog.text
    assert bool(caplog.text) == bool(message)


@pytest.mark.parametrize("beta", [1e-7, 1e-9, 1e-12, 1e-300])
@pytest.mark.parametrize("quantile", ["plain", "averaged"])
def test_a_tiny_beta_selects_the_best_particle(quantile, beta):
    start = torch.tensor([[2.0, 0.0], [1.1, 0.0], [0.0, 0.0], [3.0, 0.0]], dtype=torch.float64)
    result = minimize(
        circle, G, initial=start, dynamics=Paper(quantile=quantile, beta=beta), maxiter=0
    )
    assert result.x.tolist() == [1.1, 0.0]


@pytest.mark.parametrize(
    ("bounds", "dim"),
    [
        ((0.0, 1.0), None),
        ((1.0, 0.0), 2),
        ([(0.0, 1.0), (1.5, 1.0)], 2),
        ((math.inf, math.inf), 2),
        ((None, -math.inf), 2),
        (np.ma.array([[0, 1], [0, 1]], mask=[[0, 0], [1, 0]]), 2),
        ([("0", "1"), ("0", "1")], 2),
        ([(0.0, 1.0)] * 3, 2),
        ([(0.0, 1.0), (0.0,)], 2),
        ([0.0, 1.0, 2.0], 2),
        ((0.0, math.nan), 2),
        ([[(0.0, 1.0)]], 1),
        (optimize.Bounds([0, 0], [1, 1]), 3),
    ],
    ids=steady,
)
def test_invalid_bounds_are_refused(bounds, dim):
    with pytest.raises(ConfigError, match="`bounds`"):
        minimize(circle, G, dim, bounds=bounds, maxiter=1)


# ---- NaN and infinite values ----


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("lower", "upper"), [(circle, G), (G, circle)])
def test_bad_values_are_excluded_and_counted(lower, upper, bad):
    start = np.random.default_rng(0).standard_normal((40, 2))
    is_bad = start[:, 0] > 0.5
    settings = {"dynamics": Paper(beta=0.2, alpha=5.0), "maxiter": 0}

    def run(value, of_lower=True, initial=start):
        def broken(x):
            return torch.where(x[..., 0] > 0.5, value, (lower if of_lower else upper)(x))

        return minimize(
            *((broken, upper) if of_lower else (lower, broken)), initial=initial, **settings
        )

    result = run(bad)
    assert result.excluded == is_bad.sum()
    # The positions of excluded particles do not matter: they have the largest L and no weight.
    assert torch.equal(run(bad, initial=np.where(is_bad[:, None], start + 7.0, start)).x, result.x)
    assert_close(run(1e9).x, result.x)
    # The result is the same if the other objective is bad.
    other = run(bad, of_lower=False)
    assert other.excluded == is_bad.sum()
    assert torch.equal(other.x, result.x)


def test_a_run_continues_with_the_finite_particles():
    def broken(x):
        return torch.where(x[..., 1] > 0.5, torch.nan, circle(x))

    settings = {"num_particles": 100, "maxiter": 500}
    settings["dynamics"] = Paper(beta=0.2, alpha=100.0, sigma1=0.5)
    result = minimize(broken, G, 2, **settings)
    assert_close(result.x, double([1.0, 0.0]), rtol=0, atol=0.1)
    assert result.excluded > 0
    assert result.theta.isfinite().all()
    batch = minimize(broken, G, 2, runs=2, **settings)
    assert torch.equal(batch.x[0], result.x)
    assert batch.excluded.shape == (2,)


def test_beta_1_includes_all_finite_particles():
    """The level is infinite: all finite particles are in the sub-level set."""
    start = [[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]]
    for quantile in ("plain", "averaged"):
        result = minimize(lambda x: torch.where(x[..., 0] > 1.5, torch.nan, x[..., 0]), last_coordinate, initial=start, dynamics=Paper(alpha=0.0, beta=1.0, quantile=quantile), maxiter=0)  # fmt: skip
        assert result.x.tolist() == [0.5, 0.0]


def test_a_bad_gradient_affects_only_its_particle():
    """sqrt has no gradient at 0; only the particle there may be lost."""
    start = np.random.default_rng(0).uniform(0.5, 1.5, (30, 1))
    start[0] = 0.0
    dynamics = Paper(lambda2=0.1, sigma1=0.3)
    result = minimize(
        lambda x: (x[..., 0].square()).sqrt(), None, initial=start, dynamics=dynamics, maxiter=20
    )
    assert result.x.isfinite().all()
    assert result.theta[1:].isfinite().all()


@pytest.mark.parametrize("runs", [None, 3])
def test_only_bad_values_are_a_run_error(runs):
    with pytest.raises(RunError, match=r"all \d+ particles have NaN or infinite objectives"):
        minimize(lambda x: x[..., 0] * torch.nan, G, 2, num_particles=20, runs=runs)
    with pytest.raises(RunError, match=r"all \d+ particles have NaN or infinite objectives"):
        minimize(circle, lambda x: x[..., 0] / 0, 2, num_particles=20, runs=runs)


def test_a_diverging_run_excludes_its_particles():
    """A far too large step excludes all particles except the one at the consensus point."""
    result = minimize_on_circle(dt=1e6, sigma1=10.0, maxiter=300)
    assert result.x.isfinite().all()
    assert not result.success
    assert result.excluded > 0.9 * result.nfev


def test_an_empty_radius_is_a_run_error():
    start = [[3.0, 0.0], [0.0, 4.0], [0.5, 0.0]]
    for upper in (G, None):
        with pytest.raises(RunError, match=r"`radius` = 0\.1"):
            minimize(circle, upper, initial=start, dynamics=Paper(radius=0.1), maxiter=1)


# ---- invalid settings ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, "`beta` must be above 0 and at most 1, got 0"),
        ({"beta": math.nan}, "`beta` must be above 0 and at most 1, got nan"),
        ({"alpha": -1.0}, "`alpha`"),
        ({"alpha": math.nan}, "`alpha`"),
        ({"lambda1": 0.0}, "`lambda1` must be above 0 and finite, got 0"),
        ({"sigma1": -1.0}, "`sigma1`"),
        ({"lambda2": -1.0}, "`lambda2` must be at least 0"),
        ({"sigma2": -1.0}, "`sigma2` must be at least 0"),
        ({"dt": 0.0}, "`dt` must be above 0"),
        ({"delta_q": -0.1}, "`delta_q` must be at least 0"),
        ({"radius": 0.0}, "`radius` must be above 0"),
        ({"xtol": -1e-3}, "`xtol` must be at least 0"),
        ({"time_limit": 0.0}, "`time_limit` must be above 0"),
        ({"maxiter": -1}, "`maxiter` must be a whole number, at least 0"),
        ({"record_every": 0}, "`record_every` must be a whole number, at least 1"),
        ({"num_particles": 0}, "`num_particles` must be a whole number, at least 1"),
        ({"num_particles": [10, 20]}, "`num_particles` must be one for all or one for each of the 1"),
        ({"runs": 0}, "`runs` must be a whole number, at least 1"),
        ({"batch": 0}, "`batch` must be a whole number, at least 1"),
        ({"batch": 21, "num_particles": 20}, "`batch` must be at most the number of particles, 20, got 21"),
        ({"dim": 0}, "`dim` must be a whole number, at least 1"),
        ({"noise": "isotopic"}, "`noise` must be 'anisotropic' or 'isotropic', got 'isotopic'"),
        ({"quantile": "mean"}, "`quantile` must be 'plain' or 'averaged', got 'mean'"),
        ({"update": "none"}, "`update` must be 'batch' or 'all', got 'none'"),
        ({"dtype": torch.float16}, "`dtype` must be torch.float64 or torch.float32, got torch.float16"),
        ({"seed": [1, 2], "runs": 3}, "`seed` names 2 seeds for 3 runs"),
        ({"seed": []}, "`seed` names 0 seeds"),
        ({"dim": None}, "`dim` is not known"),
        ({"initial": np.zeros((5, 3))}, "`initial` has points of 3 coordinates, `dim` is 2"),
        ({"initial": np.zeros((5, 2)), "num_particles": 6}, "`initial` has 5 particles, `num_particles` asks for 6"),
        (
            {"initial": np.zeros((3, 5, 2)), "runs": 2},
            r"must be \[n, d\] or \[2 runs, n, d\] or a sampler, got the shape \[3, ",
        ),
        ({"initial": np.zeros((3, 5, 2))}, r"or \[1 runs, n, d\] or a sampler, got the shape \[3, 5, 2\]"),
        ({"initial": np.zeros((1, 1, 5, 2))}, "`initial` must be"),
        ({"initial": [[0.0, math.nan], [0.0, 0.0]]}, "`initial` ensemble has NaN or infinite"),
        ({"initial": [[0.0, 1.0], [2.0]]}, "`initial`"),
        (
            {"initial": lambda generator, n, d: generator.random((d, n))},
            "the sampler `initial` must return the shape",
        ),
        ({"initial": lambda generator, n, d: np.full((n, d), np.inf)}, "`initial` ensemble has NaN or infinite"),
        ({"gradient": [circle, circle], "lambda2": 1.0}, "`gradient` must be one for all or one for each of the 1"),
        ({"gradient": circle, "lambda2": 1.0}, "`gradient` must return a tensor of shape"),
    ],
    ids=steady,
)  # fmt: skip
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        minimize(circle, G, **with_dynamics({"dim": 2, "maxiter": 2, **settings}))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"beta": lambda n: 0.5 - 0.1 * n}, "`beta` must be above 0 and at most 1"),
        ({"alpha": lambda n: -1.0 if n == 3 else 1.0}, "`alpha`"),
        ({"sigma1": lambda n: 1.0 - n}, "`sigma1`"),
        ({"sigma1": lambda n: None}, "`sigma1`"),
        ({"alpha": lambda n: "high"}, "`alpha`"),
        ({"beta": lambda n: torch.ones(3)}, "`beta`"),
    ],
)
def test_invalid_schedule_values_are_refused(schedule, message):
    with pytest.raises(ConfigError, match=message):
        minimize_on_circle(maxiter=10, num_particles=10, **schedule)


def test_schedules_may_return_any_numeric_type():
    expected = minimize_on_circle(maxiter=3, alpha=20.0, sigma1=1.0)
    result = minimize_on_circle(
        maxiter=3, alpha=lambda n: np.int64(20), sigma1=lambda n: torch.tensor(1.0)
    )
    assert torch.equal(expected.x, result.x)


@pytest.mark.parametrize(
    ("lower", "upper", "message"),
    [
        ([], G, "`lower`"),
        ([circle] * 2, [G, None], "`upper` must be there for all clusters or for none"),
        ([circle] * 2, [G, G, G], "`upper` must be one for all or one for each of the 2"),
        (lambda x: x, G, r"`lower`, .*neither many .* it returned the shape \[24, 2\] for"),
        (circle, lambda x: None, "`upper`, .*accepts neither many points nor one: it returned None"),
        pytest.param(
            circle,
            [0.0, 0.0],
            "`upper` must be a function, .* a point to start about is `x0`",
            marks=pytest.mark.skipif(VARIABLE in os.environ, reason="type checks refuse it first"),
        ),
    ],
)  # fmt: skip
def test_invalid_objectives_are_refused(lower, upper, message):
    with pytest.raises(ConfigError, match=message):
        minimize(lower, upper, 2)


def test_a_wrong_dimension_is_refused():
    with pytest.raises(ConfigError, match=r"`upper`.*size of tensor") as caught:
        minimize(circle, G, 3, maxiter=1)
    assert isinstance(caught.value.__cause__, RuntimeError)


# ---- notes ----


def test_isotropic_noise_outside_the_theorem_is_noted():
    for dim, sigma1, noise, is_noted in (
        (2, 1.0, "isotropic", True),
        (2, 0.99, "isotropic", False),
        (3, 0.9, "isotropic", True),
        (2, 5.0, "anisotropic", False),
    ):
        result = minimize(
            circle, last_coordinate, dim, dynamics=Paper(sigma1=sigma1, noise=noise), maxiter=0
        )
        assert any("2 lambda1" in note for note in result.notes) == is_noted
    assert (
        "(thm:main)"
        in minimize(circle, last_coordinate, 9, dynamics=Paper(noise="isotropic"), maxiter=0).notes[
            0
        ]
    )


def test_capture_warnings_are_issued_and_noted():
    attack = adversaries.static(1000, (-1.0, 0.0))
    dynamics = Paper(noise="isotropic", sigma1=9.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fedcb2o.minimize(circle, G, 2, maxiter=0, adversaries=attack, dynamics=dynamics)
    assert [warning.category for warning in caught] == [CaptureWarning, CaptureWarning]
    assert issubclass(CaptureWarning, UserWarning)
    assert any("take delta_q > 0" in note for note in result.notes)
    if VARIABLE not in os.environ:  # type checks call in between
        assert {warning.filename for warning in caught} == {__file__}
    assert len(result.notes) == 3


def square(x):
    return x.square().sum(-1)
