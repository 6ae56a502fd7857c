"""`fedcb2o minimize`: output, file, agreement with Python, errors of one line, and the example."""

import json
import runpy
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

import fedcb2o
from fedcb2o.particles import problem, problems
from tests.tiny import run_cli

CIRCLE = problem("circle")
SMALL = ("--num-particles", 40, "--maxiter", 60)
EXAMPLE = Path(__file__).parents[1] / "examples" / "landscape.py"

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

    def one_point(x):
        return (x[0] - 1) ** 2 + abs(x[1])

    def total(x):
        return abs(x[0]) + abs(x[1])
""")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minimise_mine.py").write_text(USER_MODULE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "minimise_mine", raising=False)
    return tmp_path


def run_to_table(*words):
    """Run the command; return its standard output and its JSON file."""
    done = run_cli("minimize", *words, "--out", "results/one.json")
    assert (done.status, done.err) == (0, "")
    text = Path("results/one.json").read_text(encoding="utf-8")
    table = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    return done.out, table


def test_a_run_has_the_results_of_python():
    out, table = run_to_table("circle", *SMALL, "--seed", 3, "--set", "delta_q=0.001")
    dynamics = fedcb2o.Adaptive(delta_q=0.001)
    expected = fedcb2o.minimize(
        CIRCLE.lower, CIRCLE.upper, 2, num_particles=40, maxiter=60, seed=3, dynamics=dynamics
    )
    assert table["x"] == expected.x.tolist()
    assert (table["lower"], table["upper"]) == (expected.lower.item(), expected.upper.item())
    for name in ("nit", "nfev", "message", "success", "seed"):
        assert table[name] == getattr(expected, name)
    assert table["dynamics"] == {
        "name": "Adaptive", "delta_q": 0.001, "xtol": 0.0, "agree": "x",
    }  # fmt: skip
    error = (expected.x - torch.tensor(CIRCLE.target)).abs().max().item()
    assert table["error"] == pytest.approx(error)
    assert f"error {error:.3g} (largest coordinate) from the target (1, 0)" in out
    assert "message: maxiter = 60 steps were taken" in out


def test_without_out_no_file_is_written(folder):
    before = sorted(folder.iterdir())
    done = run_cli("minimize", "circle", *SMALL)
    assert (done.status, done.err) == (0, "")
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "dynamics"),
    [
        ((), fedcb2o.Adaptive()),
        (("--set", "xtol=1e-3"), fedcb2o.Adaptive(xtol=1e-3)),
        (("--dynamics", "paper"), fedcb2o.Paper()),
        (("--dynamics", "paper", "--set", "xtol=1e-3"), fedcb2o.Paper(xtol=1e-3)),
        (
            ("--set", "beta=0.3", "--set", "noise=isotropic", "--set", "radius=inf"),
            fedcb2o.Paper(beta=0.3, noise="isotropic"),
        ),
        (("--set", "batch=10", "--set", "update=all"), fedcb2o.Paper(batch=10, update="all")),
    ],
)
def test_parameters_choose_the_dynamics(words, dynamics):
    _, table = run_to_table("circle", *SMALL, *words)
    expected = fedcb2o.minimize(
        CIRCLE.lower, CIRCLE.upper, 2, num_particles=40, maxiter=60, dynamics=dynamics
    )
    assert table["x"] == expected.x.tolist()
    assert table["dynamics"]["name"] == type(dynamics).__name__


def test_a_problem_has_its_published_parameters():
    case = problem("circle-ackley")
    _, table = run_to_table("circle-ackley", "--maxiter", 20, "--set", "beta=0.3")
    published = table["dynamics"]
    assert (published["alpha"], published["beta"], published["xtol"]) == (30.0, 0.3, 0.0)
    _, table = run_to_table("circle-ackley", "--dynamics", "adaptive", "--maxfev", 2500)
    expected = fedcb2o.minimize(case.lower, case.upper, 2, maxfev=2500)
    assert table["x"] == expected.x.tolist()


def test_a_users_functions_have_no_target():
    words = ("--lower", "minimise_mine:lower", "--upper", "minimise_mine:upper", "--dim", 2)
    out, table = run_to_table(*words, *SMALL, "--bounds", "-2,2", "--set", "beta=0.3")
    assert table["error"] is None
    assert "target" not in out
    assert abs(table["x"][0]) <= 2
    _, table = run_to_table("--lower", "minimise_mine:counted", "--dim", 3, *SMALL)
    assert table["upper"] is None


def test_the_objective_may_be_a_function_of_one_point():
    _, table = run_to_table("--lower", "minimise_mine:one_point", "--dim", 2, "--maxfev", 3000)
    assert table["x"] == pytest.approx([1, 0], abs=1e-3)


def test_a_constraint_has_an_import_path_and_a_bound():
    """The function |x1 - 1|^2 + |x2|, where |x1| + |x2| is at most 1/2."""
    words = ["--lower", "minimise_mine:one_point", "--dim", 2, "--maxfev", 3000]
    _, table = run_to_table(*words, "--constraint", "minimise_mine:total<=0.5")
    assert table["x"] == pytest.approx([0.5, 0], abs=1e-3)
    assert table["status"] in ("success", "maxfev")
    for text in ("minimise_mine:total", "minimise_mine:total<=x", "minimise_mine:total<1"):
        done = run_cli("minimize", *words, "--constraint", text)
        assert done.status == 2
        assert "--constraint needs MODULE:FUNCTION<=NUMBER, or with >= or =, got" in done.err


def test_the_success_rate_counts_runs_near_the_target():
    out, table = run_to_table("waves-1d", "--runs", 4, "--maxiter", 40, "--tol", 0.5)
    assert len(table["x"]) == len(table["error"]) == 4
    count = int(np.sum([error <= 0.5 for error in table["error"]]))
    assert f"{count} of 4 runs ({count / 4:.0%}) came within 0.5 of the target (-2.57)" in out


@pytest.mark.parametrize("name", problems())
def test_each_problem_runs(name):
    out, table = run_to_table(name, "--maxiter", 3)
    assert (table["problem"], table["nit"]) == (name, 3)
    assert "from the target (" in out


def test_values_that_are_not_finite_are_null():
    settings = ("--set", "dt=1e6", "--set", "sigma1=10", "--maxiter", 300, "--num-particles", 30)
    _, table = run_to_table("circle", *settings)
    assert table["excluded"] > 0


def test_a_note_of_the_theory_is_printed():
    out, table = run_to_table("circle", *SMALL, "--set", "noise=isotropic", "--set", "sigma1=2")
    assert "outside the convergence theorem" in " ".join(out.split())
    assert len(table["notes"]) == 1


def test_the_list_has_one_line_per_problem():
    done = run_cli("minimize", "--list")
    assert (done.status, done.err) == (0, "")
    assert [line.split()[0] for line in done.out.splitlines()] == list(problems())
    assert all(len(line.split()) > 3 for line in done.out.splitlines())


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
        (["circle", "--set", "beta=0"], "`beta` must be"),
        (["circle", "--set", "beta"], "--set needs KEY=VALUE"),
        (["circle", "--set", "bta=0.1"], "Paper dynamics have no such parameter. Did you mean `beta`?"),
        (["circle", "--dynamics", "adaptive", "--set", "beta=0.1"], "Adaptive dynamics have no such parameter"),
        (["circle", "--set", "noise=loud"], "`noise` must be 'anisotropic' or 'isotropic'"),
        (["two-circles", "--dynamics", "adaptive"], "several clusters need `dynamics` = 'paper'"),
        (["circle", "--bounds", "1"], "--bounds needs LOW,HIGH, such as -3,3, got '1'"),
        (["circle", "--x0", "1,x"], "--x0 needs numbers with commas, such as -1,0, got '1,x'"),
        (["circle", "--x0", "1,inf"], "--x0 needs finite numbers"),
        (["circle", "--dynamics", "papper"], "See `fedcb2o minimize --help`."),
        (["circle", "--maxiter", 1, "--out", "minimise_mine.py/one.json"], "minimise_mine.py"),
        (["circle", "--num-particles", 10**9], "1,000,000,000 particles of 2 coordinates need about"),
        (["circle", "--runs", 10**20], "100,000,000,000,000,000,000 runs of 1 particles of 2 coordinates need about"),
        (["circle", "--tol", "inf"], "--tol must be at least 0 and finite, got inf"),
        (["--lower", "minimise_mine:lower", "--dim", 0], "--dim must be at least 1, got 0"),
        (["--lower", "minimise_mine:lower", "--dim", 10**8], "of 100,000,000 coordinates need about"),
        (["circle", "--set", "dt=1e300", "--set", "sigma1=1e200", "--maxiter", 20], "NaN or infinite objectives"),
    ],
)  # fmt: skip
def test_the_error_of_bad_input_is_one_line(words, line):
    assert line in run_cli("minimize", *words).one_line()


@pytest.mark.parametrize(
    "words",
    [["--set", "radius=1e308"], ["--set", "sigma1=1e200"], ["--set", "xtol=1e308"], ["--seed", 10**30]],
)  # fmt: skip
def test_huge_numbers_are_accepted(words):
    run_to_table("circle", "--maxiter", 1, "--num-particles", 20, *words)


def test_start_and_number_of_evaluations_are_options():
    _, table = run_to_table("circle", *SMALL, "--x0=-1,0.5", "--spread", 0.5, "--maxfev", 1000)
    place = {"x0": [-1.0, 0.5], "spread": 0.5, "num_particles": 40}
    expected = fedcb2o.minimize(CIRCLE.lower, CIRCLE.upper, 2, maxiter=60, maxfev=1000, **place)
    assert (table["x"], table["nfev"]) == (expected.x.tolist(), expected.nfev)


# ---- examples/landscape.py ----


@pytest.mark.filterwarnings("ignore::fedcb2o.CaptureWarning")
@pytest.mark.parametrize(
    ("words", "film"),
    [
        ("circle --attack tracking --delta-q 0", None),
        ("waves-1d --attack none", "film.gif"),
        ("two-circles --attack static", "film.html"),
        ("waves-2d --attack random --mass 0.3", None),
    ],
)
def test_the_example_draws_each_kind_of_problem(folder, monkeypatch, capsys, words, film):
    small = ["--malicious", "4", "--benign", "30", "--maxiter", "3"]
    animate = [] if film is None else ["--animate", film]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *words.split(), *small, *animate])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "message: maxiter = 3 steps were taken" in capsys.readouterr().out
    assert (folder / "landscape.png").read_bytes().startswith(b"\x89PNG")
    if film is not None:
        assert (folder / film).stat().st_size > 10_000
