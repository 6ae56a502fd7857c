"""Figures and the page of runs of all shapes, with the values of the records."""

import re
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from tests.report.synthetic import draw_run, write_run

from fedcb2o.errors import RunError
from fedcb2o.report import (
    Curve,
    curve_panels,
    curves,
    draw_panels,
    figure6,
    pair_statistics,
    report,
    sample_images,
    source_counts,
    weight_matrix,
)

SMALL = {"rounds": 10, "seeds": (0, 1), "benign": 3, "malicious": 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    late = {
        "title": "FedCB2O (T_G = 30)",
        "algorithm": {"name": "fedcb2o", "criterion_from_round": 5},
    }
    return [
        draw_run(folder / "fedcbo", {"title": "FedCBO"}, **SMALL),
        draw_run(folder / "fedcb2o", late, **SMALL, pull=0.1, hit=0.1),
    ]


def test_a_report_writes_all_files_and_a_page_that_needs_no_other_file(runs, tmp_path):
    before = dict(mpl.rcParams)
    paths = report(runs, tmp_path / "out")
    assert dict(mpl.rcParams) == before
    assert sorted(path.name for path in paths) == sorted(
        path.name for path in (tmp_path / "out").iterdir()
    )
    names = {path.name for path in paths}
    assert {
        "results.csv",
        "results.md",
        "results.tex",
        "curves.png",
        "figure6.png",
        "samples.png",
    } <= names
    result = {"source-count.png", "weights-1-fedcbo.png", "seeds.csv", "pairs.csv", "report.html"}
    assert result <= names
    assert all(path.stat().st_size > 100 for path in paths)
    page = (tmp_path / "out" / "report.html").read_text()
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)
    assert {*re.findall(r'xlink:href="(.)', page)} <= {"#", "d"}  # targets in the page
    assert "://" not in page
    assert "incomplete" not in page
    assert "<title>fedcb2o: FedCBO, FedCB2O (T_G = 30)</title>" in page
    assert "agents.budget" in page
    curves_key, _, bars_key = re.findall(r'aria-label="(Legend: [^"]+)"', page)
    assert curves_key == bars_key  # each figure has its own


def test_figure6_shows_the_statistics(runs):
    figure = figure6(*runs)
    assert len(figure.axes) == 4
    assert [ax.get_title(loc="left")[:3] for ax in figure.axes] == ["(a)", "(b)", "(c)", "(d)"]
    statistics = pair_statistics(runs[1])
    for ax, value in zip(figure.axes[2:], ("frequency", "share"), strict=True):
        heights = [bar.get_height() for bar in ax.patches]
        expected = statistics.groupby(["relation", "peer", "cluster"])[value].mean()
        order = [(r, p) for r in ("same", "other") for p in ("benign", "malicious")]
        assert heights == pytest.approx(
            [expected[relation, peer, c] for relation, peer in order for c in (0, 1)]
        )
    at_random = figure.axes[0].lines[-1].get_ydata()[0]
    assert at_random == pytest.approx(6 / 7)


def test_curves_are_the_mean_over_benign_agents_and_mark_the_switch(runs):
    figure = curves(runs)
    ax = figure.axes[0]
    labels = [line.get_label() for line in ax.lines[:2]]
    assert labels == ["FedCBO", "FedCB2O ($T_G = 30$)"]
    benign = runs[0].records[~runs[0].records.malicious]
    expected = benign.dropna(subset="accuracy").groupby("round").accuracy.mean()
    assert ax.lines[0].get_xdata().tolist() == [5, 10]
    assert ax.lines[0].get_ydata() == pytest.approx(expected.to_numpy())
    assert ax.lines[2].get_xdata() == [5, 5]
    assert [text.get_text() for text in ax.texts] == ["$T_G = 5$"]


def test_rows_of_the_weight_matrix_sum_to_one_with_own_weights_on_the_diagonal(runs):
    figure = weight_matrix(runs[0])
    matrix = np.asarray(figure.axes[0].images[0].get_array())
    assert matrix.shape == (8, 8)
    assert matrix.sum(axis=1) == pytest.approx(1)
    pairs = runs[0].pairs
    own = pairs[(pairs.agent == 0) & (pairs.peer == 0) & (pairs["round"] > 8)].weight.mean()
    assert matrix[0, 0] == pytest.approx(own)
    labels = [label.get_text().replace("\n", " ") for label in figure.axes[0].get_yticklabels()]
    assert labels == [
        "cluster 1 benign",
        "cluster 1 malicious",
        "cluster 2 benign",
        "cluster 2 malicious",
    ]


def test_the_weight_matrix_names_owners_and_marks_malicious_ones(tmp_path):
    names = {"names": ["ward a", "ward $b$", "ward c"]}
    agents = {**names, "cluster": [0] * 3, "malicious": [True, False, False]}
    agents |= {"num_samples": [1] * 3, "source_in_validation": [None, 1, 1]}
    pairs = [{"round": 1, "ids": [[1], [0], [1]], "weights": [[0.5]] * 3, "own": [0.5] * 3}]
    metrics = {0: [{"round": 1}]}
    run = write_run(tmp_path / "run", {}, agents=agents, metrics=metrics, pairs={0: pairs})
    ax = weight_matrix(run).axes[0]
    for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
        assert [label.get_text() for label in labels] == [r"ward \$b\$", "ward c", "ward a *"]


def test_the_weight_matrix_omits_seeds_with_other_attackers(tmp_path):
    def seed(folder, malicious):
        agents = {
            "cluster": [0, 0],
            "malicious": malicious,
            "num_samples": [1, 1],
            "source_in_validation": [1, 1],
        }
        pairs = [{"round": 1, "ids": [[1], [0]], "weights": [[0.5], [0.5]], "own": [0.5, 0.5]}]
        return write_run(folder, {}, agents=agents, metrics={0: [{"round": 1}]}, pairs={0: pairs})

    run = seed(tmp_path / "run", [False, True])
    other = seed(tmp_path / "other", [True, False])
    (other.folder / "seed-0").rename(run.folder / "seed-1")
    matrix = np.asarray(weight_matrix(type(run)(run.folder)).axes[0].images[0].get_array())
    assert matrix.sum(axis=1) == pytest.approx(1)


def test_only_existing_bars_have_a_number(tmp_path):
    agents = {
        "cluster": [0, 0],
        "malicious": [False] * 2,
        "num_samples": [1, 1],
        "source_in_validation": [0, 2],
    }
    line = {
        "round": 1,
        "accuracy": [0.5, 0.5],
        "source_accuracy": [0.0, 0.25],
        "attack_success_rate": [0.0, 0.0],
    }
    run = write_run(tmp_path / "run", {}, agents=agents, metrics={0: [line]})
    other = write_run(
        tmp_path / "other",
        {},
        agents={**agents, "source_in_validation": [0, 0]},
        metrics={0: [line]},
    )
    figure = source_counts([run, other])
    numbers = [[text.get_text() for text in ax.texts] for ax in figure.axes]
    assert numbers == [["0", "25", "12"], ["0", "0", "0"]]
    assert figure.axes[1].get_ylim()[0] == 0


@pytest.mark.usefixtures("no_figures")
def test_the_worst_tenth_is_shown_if_it_has_more_than_one_agent(tmp_path):
    few, many = (
        draw_run(tmp_path / str(n), rounds=5, seeds=(0,), clusters=1, benign=n) for n in (10, 11)
    )
    assert "worst-tenth.csv" not in {path.name for path in report([few], tmp_path / "few")}
    assert "worst-tenth.csv" in {path.name for path in report([many], tmp_path / "many")}


def test_samples_have_one_row_per_cluster(runs):
    figure = sample_images(runs[0])
    assert len(figure.axes) == 20
    labels = [ax.get_ylabel() for ax in figure.axes if ax.get_ylabel()]
    assert labels == ["cluster 1\n0°", "cluster 2\n180°"]


def test_one_cluster_without_attackers_and_four_clusters_are_drawn(tmp_path):
    title = {"title": "$ _ & <b>"}
    one = draw_run(
        tmp_path / "one", title, **{**SMALL, "clusters": 1, "malicious": 0, "seeds": [0]}
    )
    assert len(report([one], tmp_path / "out")) > 10
    assert "<b> " not in (tmp_path / "out" / "report.html").read_text().replace("<b>$", "")
    four = draw_run(tmp_path / "four", title, **{**SMALL, "clusters": 4, "seeds": [3]})
    assert len(sample_images(four).axes) == 40
    assert np.asarray(weight_matrix(four).axes[0].images[0].get_array()).shape == (16, 16)
    assert len(figure6(four).axes) == len(figure6(one).axes)
    assert isinstance(source_counts([one, four]), Figure)


def write_bare_run(folder, *, rounds=1, complete=False, **config):
    agents = {
        "cluster": [0, 0],
        "malicious": [False] * 2,
        "num_samples": [1, 1],
        "source_in_validation": [None, None],
    }
    metrics = [{"round": n, "accuracy": [0.5, 0.75]} for n in range(1, rounds + 1)]
    return write_run(
        folder, {"rounds": 5, **config}, agents=agents, metrics={0: metrics}, complete=complete
    )


@pytest.mark.usefixtures("no_figures")
def test_an_incomplete_run_without_source_pairs_and_images_is_reported(tmp_path):
    run = write_bare_run(tmp_path / "bare", evaluate_on="tuning")
    names = {path.name for path in report([run], tmp_path / "out")}
    assert "samples.png" not in names
    assert "source-count.png" not in names
    page = (tmp_path / "out" / "report.html").read_text()
    assert "bare (bare) is incomplete: 1 of 1 seeds begun, read from seed 0 at round 1 of 5" in page
    assert "bare was measured on tuning data, not on the test set" in page
    assert source_counts([run]) is None
    assert weight_matrix(run) is None
    assert sample_images(run) is None
    assert isinstance(figure6(run), Figure)


@pytest.mark.usefixtures("no_figures")
def test_runs_without_results_are_named_and_omitted(tmp_path):
    empty = write_bare_run(tmp_path / "empty", rounds=0)
    with pytest.raises(RunError, match="no run here has an evaluated round yet"):
        report([empty], tmp_path / "out")
    with pytest.raises(RunError, match="no round was evaluated yet"):
        curves([empty])
    report([empty, write_bare_run(tmp_path / "full")], tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "empty (empty) is incomplete: 1 of 1 seeds begun, no round was evaluated yet" in page


def test_a_report_into_a_file_is_refused(runs, tmp_path):
    (tmp_path / "file").write_text("")
    message = r"cannot make the folder .*file: |cannot make the folder .*File exists"
    with pytest.raises(RunError, match=message):
        report(runs, tmp_path / "file")
    with pytest.raises(RunError, match=r"name another with `out`$"):
        report(runs, tmp_path / "file")


@pytest.mark.usefixtures("no_figures")
def test_a_page_of_many_runs_has_a_short_title(tmp_path):
    bare = [write_bare_run(tmp_path / f"{i}", title=f"A long method, {i}") for i in range(9)]
    report(bare, tmp_path / "out")
    assert "<title>fedcb2o: 9 runs</title>" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("count", [1, 5, 7, 40])
def test_panels_fill_rows_and_methods_have_different_colours(runs, count):
    drawn_axes = []
    curve_list = [Curve(str(i), runs[0].records, 0, ()) for i in range(count)]
    panels = curve_panels(curve_list)
    colours = {line.get_color() for line in draw_panels(panels).axes[0].lines}
    assert len(colours) == count
    panels = replace(panels, draw_functions=[drawn_axes.append] * count, columns=3)
    figure = draw_panels(panels)
    assert figure.axes == drawn_axes
    assert len(drawn_axes) == count
    assert figure.get_figwidth() == pytest.approx(min(count, 3) * panels.size[0])
