"""`fedcb2o minimize`: output, files, agreement with Python, and errors of one line."""

import json
import math
import sys
import textwrap

import numpy as np
import pytest
import torch

import fedcb2o
from fedcb2o.cli.minimize import summary
from fedcb2o.cli.minimize.problem import resolve_problem
from fedcb2o.cli.minimize.recorder import run_recorded
from fedcb2o.particles import adversaries, problem, problems, theory
from tests.tiny import command, run_cli

CIRCLE = problem("circle")
SMALL = ("--num-particles", 40, "--maxiter", 60)

USER_MODULE = textwrap.dedent("""
    import numpy as np
    import fedcb2o

    def lower(x):
        return (x.square().sum(-1) - 1).square()

    def upper(x):
        return (x[..., 0] - 2).square()

    def wrong(x):
        return x.square()

    def fails(x):
        raise ZeroDivisionError("two\\nlines")

    counted = fedcb2o.from_numpy(lambda x: np.abs(x).sum(-1))
""")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minimise_mine.py").write_text(USER_MODULE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "minimise_mine", raising=False)
    return tmp_path


def read(path):
    return json.loads(
        path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
    )


def test_a_run_has_the_results_of_python(folder):
    done = run_cli("minimize", "circle", *SMALL, "--seed", 3, "--delta-q", 0.001)
    assert done.status == 0, done.err
    table = read(folder / "runs" / "minimize-circle" / "result.json")
    expected = fedcb2o.minimize(
        CIRCLE.lower, CIRCLE.upper, 2, num_particles=40, maxiter=60, seed=3, delta_q=0.001
    )
    assert table["x"] == expected.x.tolist()
    assert (table["lower"], table["upper"]) == (expected.lower.item(), expected.upper.item())
    assert (table["nit"], table["nfev"], table["message"]) == (
        expected.nit,
        expected.nfev,
        expected.message,
    )
    assert table["history"]["x"] == expected.history.x.tolist()
    assert (table["settings"]["delta_q"], table["settings"]["num_particles"]) == (0.001, 40)
    assert table["error"] == pytest.approx(
        (expected.x - torch.tensor(CIRCLE.target)).abs().max().item()
    )
    assert f"error {table['error']:.3g}" in done.out
    assert "message: maxiter = 60 steps were taken" in done.out
    assert (
        (folder / "runs" / "minimize-circle" / "landscape.png").read_bytes().startswith(b"\x89PNG")
    )
    assert done.err.startswith("Wrote runs/minimize-circle/result.json")


def test_the_panel_of_decay_holds_v_and_the_fitted_rate():
    settings = {
        "noise": "isotropic",
        "sigma1": 0.5,
        "num_particles": 500,
        "maxiter": 300,
        "xtol": 0.0,
        "beta": 0.05,
    }
    ensembles = []
    result, recorder, used_settings, lines = run_recorded(CIRCLE, [], settings, progress=False)
    assert lines == []
    fedcb2o.minimize(
        CIRCLE.lower,
        CIRCLE.upper,
        2,
        callback=lambda state: ensembles.append(state.theta.clone()),
        **settings,
    )
    decay = recorder.decay(CIRCLE, result, used_settings)
    V = theory.V(torch.stack(ensembles), torch.tensor(CIRCLE.target, dtype=torch.float64))
    assert decay.t == pytest.approx(0.01 * np.arange(301))
    assert decay.V[:, 0, 0] == pytest.approx(V.numpy())
    rows = slice(0, 1 + int((0.05 * V[0] >= V).nonzero()[0, 0]))
    assert decay.fitted_rates[0] == pytest.approx(
        theory.fit_decay_rate(torch.from_numpy(decay.t)[rows], V[rows]).item()
    )
    assert decay.fitted_rates[0] == pytest.approx(1.5, abs=0.3)
    assert decay.fit_windows[0] == (0.0, pytest.approx(decay.t[rows][-1]))
    low, high = theory.decay_bounds(torch.from_numpy(decay.t), V[0].item(), vartheta=0.25, rate=1.5)
    assert [side[:, 0] for side in decay.theory_bounds] == [
        pytest.approx(low.numpy()),
        pytest.approx(high.numpy()),
    ]
    assert "1.5" in decay.legend_label


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("circle", {"lambda2": 0.1}, "(λ₂ > 0)"),
        ("circle", {"sigma2": 0.1}, "(σ₂ > 0)"),
        ("circle", {"batch": 10}, "(random batches)"),
        ("circle", {"bounds": (-3, 3)}, "(bounds)"),
        ("rastrigin", {"sigma1": 0.1}, "(no G)"),
        ("two-circles", {}, "(several clusters, λ₂ > 0, σ₂ > 0)"),
        ("two-circles", {"lambda2": 0.0, "sigma2": 0.0}, "(several clusters)"),
    ],
)
@pytest.mark.parametrize("noise", ["isotropic", "anisotropic"])
def test_no_rate_is_stated_if_the_theorem_does_not_apply(name, settings, reason, noise):
    settings = {"num_particles": 40, "maxiter": 20, "sigma1": 0.5, "noise": noise, **settings}
    result, recorder, used_settings, _ = run_recorded(problem(name), [], settings, progress=False)
    decay = recorder.decay(problem(name), result, used_settings)
    assert decay.legend_label == f"theory: no rate is stated {reason}"
    assert decay.theory is decay.theory_bounds is None
    assert reason in summary.describe(problem(name), result, decay, 0.1)


def test_under_attack_the_rate_is_stated():
    group = [adversaries.random(6, mass=0.3)]
    for noise, rate in (
        ("isotropic", "2λ₁ − dσ₁² = 1.5 (band: ϑ = 0.25)"),
        ("anisotropic", "2λ₁ − σ₁² = 1.75"),
    ):
        settings = {
            "num_particles": 40,
            "maxiter": 20,
            "sigma1": 0.5,
            "noise": noise,
            "delta_q": 0.01,
            "beta": 0.05,
        }
        result, recorder, used_settings, _ = run_recorded(CIRCLE, group, settings, progress=False)
        decay = recorder.decay(CIRCLE, result, used_settings)
        assert decay.legend_label == f"theory: {rate}"
        assert decay.theory is not None
        assert (decay.theory_bounds is None) == (noise == "anisotropic")


def test_v_of_stopped_runs_is_constant_and_memory_is_bounded():
    settings = {"runs": 3, "num_particles": 20, "xtol": 0.05, "maxiter": 3000, "record_every": 1}
    settings["dynamics"] = "paper"
    result, recorder, used_settings, _ = run_recorded(CIRCLE, [], settings, progress=False)
    nit = result.nit.tolist()
    assert len(set(nit)) > 1
    decay = recorder.decay(CIRCLE, result, used_settings)
    target = torch.tensor(CIRCLE.target, dtype=torch.float64)
    for index, n in enumerate(nit):
        after = decay.V[decay.t >= n * 0.01 - 1e-9, index, 0]
        assert len(after)
        assert after == pytest.approx(theory.V(result.theta[index], target).item())
    assert np.isfinite(decay.V).all()
    long = {"num_particles": 5, "maxiter": 5000, "xtol": 0.0, "dynamics": "paper"}
    result, recorder, used_settings, _ = run_recorded(CIRCLE, [], long, progress=False)
    assert len(recorder.decay(CIRCLE, result, used_settings).t) <= 602
    scene = recorder.scene(CIRCLE, result, used_settings, "")
    assert len(scene.times) <= 130
    assert scene.times[-1] == pytest.approx(50.0)
    assert scene.m[-1, 0] == pytest.approx(result.x.numpy())


def test_an_unknown_target_is_the_last_consensus_point(folder):
    done = run_cli(
        "minimize", "--lower", "minimise_mine:counted", "--dim", 3, *SMALL, "--no-figure"
    )
    assert done.status == 0, done.err
    table = read(folder / "runs" / "minimize-own" / "result.json")
    assert (table["target"], table["error"], table["success_rate"], table["upper"]) == (None,) * 4
    assert table["decay"]["towards"] == "the last consensus point"
    user_problem = resolve_problem(None, "minimise_mine:counted", None, 3)
    result, *_ = run_recorded(
        user_problem, [], {"num_particles": 40, "maxiter": 60}, progress=False
    )
    assert table["decay"]["V"][-1] == pytest.approx(theory.V(result.theta, result.x).item())
    assert sorted(path.name for path in (folder / "runs" / "minimize-own").iterdir()) == [
        "result.json"
    ]


def test_a_users_functions_may_have_a_target(folder):
    words = (
        "--lower",
        "minimise_mine:lower",
        "--upper",
        "minimise_mine:upper",
        "--dim",
        2,
        "--target",
        "-1,0",
    )
    done = run_cli(
        "minimize", *words, *SMALL, "--bounds", "-2,2", "--out", "out", "--no-figure", "--beta", 0.3
    )
    assert done.status == 0, done.err
    table = read(folder / "out" / "result.json")
    assert table["target"] == [-1, 0]
    assert table["settings"]["bounds"] == [-2, 2]
    assert table["error"] == pytest.approx(abs(table["x"][0] + 1), abs=1)


def test_the_success_rate_counts_runs_near_the_target(folder):
    done = run_cli(
        "minimize", "waves-1d", "--runs", 4, "--maxiter", 40, "--tol", 0.5, "--out", "out"
    )
    assert done.status == 0, done.err
    table = read(folder / "out" / "result.json")
    assert len(table["x"]) == len(table["error"]) == 4
    assert table["success_rate"] == np.mean([error <= 0.5 for error in table["error"]])
    assert f"{round(4 * table['success_rate'])} of 4 runs" in done.out
    assert table["history"] is None


@pytest.mark.parametrize("name", ["waves-1d", "parabola-ackley", "rastrigin", "two-circles"])
def test_problems_of_each_shape_have_a_figure(folder, name):
    done = run_cli(
        "minimize", name, "--num-particles", 30, "--batch", 30, "--maxiter", 12, "--out", "out"
    )
    assert done.status == 0, done.err
    assert (folder / "out" / "landscape.png").stat().st_size > 20_000
    assert read(folder / "out" / "result.json")["problem"] == name


KINDS = {
    "static": (adversaries.static(6, (-1.0, 0.0)), ()),
    "lure": (adversaries.static(6, (2.0, 0.0)), ()),
    "tracking": (adversaries.tracking(6, (0.5, 0.5)), ()),
    "random": (adversaries.random(6, mass=0.3), ("--mass", 0.3)),
    "oscillating": (adversaries.oscillating(6, ((-1.0, 0.0), (2.0, 0.0)), period=2.0), ()),
    "greedy": (adversaries.greedy(6, initial=(0.5, -1.0)), ("--at", "0.5,-1")),
}


@pytest.mark.filterwarnings("ignore::fedcb2o.CaptureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_adversaries_equal_the_ones_of_python(folder, kind):
    adversary, options = KINDS[kind]
    done = run_cli(
        "minimize",
        "circle",
        *SMALL,
        "--adversary",
        kind,
        "--num-malicious",
        6,
        "--dynamics",
        "paper",
        *options,
        "--no-figure",
        "--out",
        "out",
    )
    assert done.status == 0, done.err
    table = read(folder / "out" / "result.json")
    expected = fedcb2o.minimize(
        CIRCLE.lower,
        CIRCLE.upper,
        2,
        num_particles=40,
        maxiter=60,
        adversaries=adversary,
        dynamics="paper",
    )
    assert table["x"] == expected.x.tolist()
    assert table["adversary"]["kind"] == kind
    notes = [line for line in done.err.splitlines() if line.startswith("Note: ")]
    assert len(notes) == len(expected.notes) > 0
    assert "capture" in notes[0]


def test_a_note_is_one_line_of_the_error_stream(folder):
    done = run_cli(
        "minimize", "circle", *SMALL, "--noise", "isotropic", "--sigma1", 2, "--no-figure"
    )
    assert [line.split(":")[0] for line in done.err.splitlines()] == [
        "Note",
        "Wrote runs/minimize-circle/result.json",
    ]
    assert "outside the convergence theorem" in done.err
    assert "note" not in done.out


@pytest.mark.parametrize("kind", ["gif", "html"])
def test_an_animation_is_written_on_request(folder, kind):
    done = run_cli(
        "minimize", "waves-1d", "--maxiter", 6, "--animate", kind, "--no-figure", "--out", "out"
    )
    assert done.status == 0, done.err
    assert sorted(path.name for path in (folder / "out").iterdir()) == [
        f"landscape.{kind}",
        "result.json",
    ]
    assert (folder / "out" / f"landscape.{kind}").stat().st_size > 10_000


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_without_steps_has_a_result(folder, steps):
    done = run_cli(
        "minimize", "circle", "--maxiter", steps, "--out", "out", "--adversary", "random"
    )
    assert done.status == 0, done.err
    assert read(folder / "out" / "result.json")["nit"] == steps


def test_diverging_particles_are_drawn_without_warnings(folder):
    done = run_cli(
        "minimize",
        "two-circles",
        "--lambda2",
        0.5,
        "--sigma2",
        0.1,
        "--maxiter",
        200,
        "--num-particles",
        30,
        "--out",
        "out",
    )
    assert done.status == 0, done.err
    table = read(folder / "out" / "result.json")
    assert table["excluded"] > 0
    assert all(value is None or math.isfinite(value) for value in np.ravel(table["decay"]["V"]))


def test_the_list_has_one_line_per_problem():
    done = run_cli("minimize", "--list")
    assert (done.status, done.err) == (0, "")
    assert [line.split()[0] for line in done.out.splitlines()] == list(problems())
    assert all(len(line.split()) > 3 for line in done.out.splitlines())


def test_help_contains_the_options():
    done = run_cli("minimize", "--help")
    assert done.status == 0
    for word in (
        "[PROBLEM]",
        "--list",
        "--num-particles",
        "--delta-q",
        "--adversary",
        "--mass",
        "--animate",
        "Example:",
    ):
        assert word in done.out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "name a problem, or give --lower for your own; `fedcb2o minimize --list` shows"),
        (["circel"], "there is no problem `circel`. Did you mean `circle`?"),
        (["circle", "--lower", "minimise_mine:lower"], "name a problem or give --lower, not both"),
        (["circle", "--dim", 3], "--dim is for a --lower of your own"),
        (["--lower", "minimise_mine:lower"], "--lower needs --dim"),
        (["--lower", "lower", "--dim", 2], 'must be an import path "package.module:function", got \'lower\''),
        (["--lower", "minimise_mine:low", "--dim", 2], "the objective L `minimise_mine:low` cannot be imported"),
        (["--lower", "minimise_mine:wrong", "--dim", 2], "expected ["),
        (["--lower", "minimise_mine:fails", "--dim", 2], "failed at line 15 of"),
        (["--lower", "minimise_mine:lower", "--dim", 2, "--target", "1"], "--target must have --dim = 2 coordinates"),
        (["circle", "--beta", 0], "`beta` must be"),
        (["circle", "--bounds", "1"], "--bounds needs LOW,HIGH, such as -3,3, got '1'"),
        (["circle", "--at", "0,0"], "--at needs --adversary"),
        (["circle", "--mass", 0.2], "--mass needs --adversary"),
        (["circle", "--adversary", "static", "--at", "1,x"], "--at needs numbers with commas, such as -1,0, got '1,x'"),
        (["circle", "--adversary", "static", "--at", "1,inf"], "--at needs finite numbers"),
        (["circle", "--adversary", "static", "--at", "1"], "--at must have 2 coordinates, got 1"),
        (["rastrigin", "--adversary", "static"], "--adversary static needs --at X,Y,...: no minimiser of L"),
        (["circle", "--adversary", "statik"], "See `fedcb2o minimize --help`."),
        (["circle", "--out", "minimise_mine.py"], "cannot make the folder minimise_mine.py"),
        (["circle", "--num-particles", 10**9, "--no-figure"], "1,000,000,000 particles of 2 coordinates need about"),
        (["circle", "--runs", 10**20], "100,000,000,000,000,000,000 runs of 1 particles of 2 coordinates need about"),
        (["circle", "--tol", "inf"], "--tol must be at least 0 and finite, got inf"),
        (["--lower", "minimise_mine:lower", "--dim", 0], "--dim must be at least 1, got 0"),
        (["--lower", "minimise_mine:lower", "--dim", 10**8], "of 100,000,000 coordinates need about"),
        (["circle", "--dt", "1e300", "--sigma1", "1e200", "--maxiter", 20], "NaN or infinite objectives"),
    ],
)  # fmt: skip
def test_the_error_of_bad_input_is_one_line(words, line):
    assert line in run_cli("minimize", *words).one_line()


@pytest.mark.parametrize(
    "words", [["--radius", "1e308"], ["--sigma1", "1e200"], ["--xtol", "1e308"], ["--seed", 10**30]]
)
def test_huge_numbers_are_accepted(words):
    done = run_cli(
        "minimize", "circle", "--maxiter", 1, "--num-particles", 20, "--no-figure", *words
    )
    assert (done.status, done.err.splitlines()[-1]) == (0, "Wrote runs/minimize-circle/result.json")


def test_start_and_number_of_evaluations_are_options(folder):
    done = run_cli("minimize", "circle", *SMALL, "--x0=-1,0.5", "--spread", 0.5, "--maxfev", 1000)
    assert done.status == 0, done.err
    table = read(folder / "runs" / "minimize-circle" / "result.json")
    expected = fedcb2o.minimize(
        CIRCLE.lower,
        CIRCLE.upper,
        2,
        num_particles=40,
        maxiter=60,
        x0=[-1.0, 0.5],
        spread=0.5,
        maxfev=1000,
    )
    assert (table["x"], table["nfev"]) == (expected.x.tolist(), expected.nfev)
    assert (table["settings"]["x0"], table["settings"]["spread"]) == ([-1.0, 0.5], 0.5)


@pytest.mark.slow
def test_the_command_runs_as_a_process(folder):
    done = command(
        "minimize",
        "circle",
        "--adversary",
        "static",
        "--num-malicious",
        20,
        "--delta-q",
        0.01,
        cwd=folder,
    )
    assert done.status == 0, done.err
    assert "independent ensembles ended at x" in done.out
    assert read(folder / "runs" / "minimize-circle" / "result.json")["error"] < 0.05


def test_the_error_of_delta_q_is_stated():
    """G is least at sqrt(1 + sqrt(delta_q)) if L <= delta_q: 0.0488 from the target."""
    words = ["minimize", "circle", "--adversary", "static", "--delta-q", 0.01, "--no-figure"]
    done = run_cli(*words, "--maxfev", 6000)
    assert "error 0.0488" in done.out
    assert (
        "G at x is 0.0952 less than at the target, and L 0.01 more: a smaller delta_q" in done.out
    )
    assert "adaptive dynamics" in done.out


def test_the_objective_may_be_a_function_of_one_point(folder):
    (folder / "one_point.py").write_text(
        "def lower(x):\n    return (x[0] - 1) ** 2 + abs(x[1])\n", encoding="utf-8"
    )
    done = run_cli("minimize", "--lower", "one_point:lower", "--dim", 2, "--maxfev", 3000)
    assert done.status == 0, done.err
    table = read(folder / "runs" / "minimize-own" / "result.json")
    assert table["x"] == pytest.approx([1, 0], abs=1e-3)
    assert table["settings"]["dynamics"] == "adaptive"
