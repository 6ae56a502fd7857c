"""Tables and figures for articles: values by hand, and LaTeX that compiles.

The compilation needs pdflatex with booktabs (Debian: apt-get install texlive-latex-recommended).
"""

import json
import re
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest
from tests.report.test_matrix import FLIP, MEAN, MEDIAN, NOISE, make_grid

from fedcb2o.errors import ConfigError
from fedcb2o.records import read_toml, write_toml
from fedcb2o.report import (
    ArticleForm,
    SettingResults,
    _article,
    create_page,
    draw_panels,
    read_grid,
    report_grid,
)
from fedcb2o.report._article import write_article
from fedcb2o.report._figures import attack_panels


def rows(text):
    """Return the cells of each row of a table's body, by defence."""
    body = text.partition("\\midrule\n")[2].partition("\\bottomrule")[0]
    lines = [line.removesuffix(r" \\").split(" & ") for line in body.splitlines()]
    return {name: cells for name, *cells in lines}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A grid by hand."""
    return read_grid(make_grid(tmp_path_factory.mktemp("article") / "grid", title="100% by_hand"))


@pytest.fixture
def written(results, tmp_path, no_figures):
    """Return a function that writes the article of the grid and reads a file of it."""

    def write(name, **form):
        page = create_page(tmp_path / "report")
        write_article(page, SettingResults(results, ""), "", ArticleForm(**form))
        return (tmp_path / "report/article" / name).read_text(encoding="utf-8")

    return write


def test_means_have_standard_deviations_and_the_best_is_bold(written):
    # The seeds of the median have 70 and 80 under the flip: 75 with deviation 10 / sqrt 2.
    text = written("accuracy.tex")
    assert rows(text) == {
        MEDIAN: [r"\textbf{75.0} $\pm$ 7.1", r"\textbf{60.0} $\pm$ 14.1"],
        MEAN: [r"\textbf{75.0} $\pm$ 21.2", r"15.0 $\pm$ 7.1"],
    }
    assert rf"Defence & {FLIP} & {NOISE} \\" in text
    assert r"\caption{100\% by\_hand: accuracy, percent; mean $\pm$ standard deviation" in text
    assert r"\label{tab:accuracy}" in text


def test_the_least_attack_success_and_regret_are_bold(written):
    assert rows(written("attack-success-rate.tex", intervals="none")) == {
        MEDIAN: [r"\textbf{22.5}"],
        MEAN: ["65.0"],
    }
    assert rows(written("accuracy-regret.tex", intervals="none", precision=0)) == {
        MEDIAN: [r"\textbf{0}", r"\textbf{0}"],
        MEAN: [r"\textbf{0}", "45"],
    }


@pytest.mark.usefixtures("no_figures")
def test_the_form_sets_decimals_intervals_and_baselines(results, tmp_path):
    form = ArticleForm(intervals="none", precision=2, baselines=True)
    report_grid(results, tmp_path, form)
    text = (tmp_path / "article" / "accuracy.tex").read_text(encoding="utf-8")
    assert r"Defence & Attackers clean & Attackers removed & Label flip & Noise \\" in text
    assert rows(text)[MEDIAN] == ["87.50", "80.00", r"\textbf{75.00}", r"\textbf{60.00}"]
    with pytest.raises(ConfigError, match="precision must be from 0 to 6, got 7"):
        ArticleForm(precision=7)


@pytest.mark.usefixtures("intervals_of_two_seeds")
def test_confidence_intervals_follow_means(written):
    text = written("accuracy.tex", intervals="ci")
    assert re.fullmatch(r"\\textbf\{75\.0\} \[\d+\.\d, \d+\.\d\]", rows(text)[MEDIAN][0])
    assert r"95\% confidence intervals" in text


def test_a_caption_names_no_intervals_of_too_few_seeds(written, set_min_seeds):
    set_min_seeds(5)
    text = written("accuracy.tex", intervals="ci")
    assert rows(text)[MEDIAN][0] == r"\textbf{75.0}"
    assert "accuracy, percent; mean, 2 seeds." in text


def add_earlier_round(folder):
    """Evaluate round 0 of all runs, with half the values of round 1."""
    for path in folder.glob("**/metrics.jsonl"):
        last = json.loads(path.read_text())
        first = {**last, "round": 0}
        for name in ("accuracy", "attack_success_rate"):
            first[name] = last[name] and [value and value / 2 for value in last[name]]
        path.write_text(f"{json.dumps(first)}\n{json.dumps(last)}\n")


@pytest.mark.usefixtures("no_figures")
def test_curves_have_a_panel_per_attack_and_a_line_per_defence(tmp_path, monkeypatch, caplog):
    folder = make_grid(tmp_path / "grid")
    add_earlier_round(folder)
    for path in folder.glob(f"cells/{MEDIAN}/*/config.toml"):
        config = read_toml(path)
        config["algorithm"]["criterion_from_round"] = 1
        write_toml(path, config)
    panels = {}

    def record(curves, metric):
        panels[metric] = attack_panels(curves, metric)
        return panels[metric]

    monkeypatch.setattr(_article, "attack_panels", record)
    paths = report_grid(read_grid(folder), tmp_path / "out")
    names = {path.name for path in paths if "-curves" in path.name}
    stems = ("accuracy", "attack-success-rate")
    assert names == {f"{stem}-curves.{suffix}" for stem in stems for suffix in ("pdf", "png")}
    assert "no curves" not in caplog.text

    figure = draw_panels(panels["accuracy"])
    assert [ax.get_title(loc="left") for ax in figure.axes] == [FLIP, NOISE]
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    # The mean of 0.7 and 0.8, and half of it in round 0; the other defence has 0.6 and 0.9.
    assert lines[MEDIAN].get_xydata().tolist() == pytest.approx(np.array([[0, 0.375], [1, 0.75]]))
    assert lines[MEAN].get_ydata() == pytest.approx([0.375, 0.75])
    assert [text.get_text() for text in figure.axes[0].texts] == ["$T_G = 1$"]
    figure = draw_panels(panels["attack_success_rate"])
    assert [ax.get_title(loc="left") for ax in figure.axes] == [FLIP]  # the only one with a goal

    report_grid(read_grid(folder), tmp_path / "out", ArticleForm(baselines=True))
    assert len(panels["accuracy"].draw_functions) == 4
    assert len(panels["attack_success_rate"].draw_functions) == 1


@pytest.mark.usefixtures("no_figures")
def test_a_line_names_the_key_that_gives_curves(results, tmp_path, caplog):
    caplog.set_level("INFO")
    paths = report_grid(results, tmp_path / "out")
    assert not [path for path in paths if "-curves" in path.name]
    assert "run the grid with `evaluate_every` smaller than `rounds`." in caplog.text
    report_grid(read_grid(tmp_path / "out"), tmp_path / "again")
    assert "summary.csv has the last round only." in caplog.text


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is missing")
@pytest.mark.parametrize("intervals", ["none", "std", "ci"])
def test_the_tables_compile(intervals, written, tmp_path):
    written("accuracy.tex", intervals=intervals, baselines=True)
    names = [path.name for path in (tmp_path / "report/article").glob("*.tex")]
    assert len(names) == 4
    inputs = "".join(rf"\input{{report/article/{name}}}" for name in names)
    document = r"\documentclass[twocolumn]{article}\usepackage{booktabs}\begin{document}" + inputs
    (tmp_path / "all.tex").write_text(document + r"\end{document}", encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "Overfull" not in done.stdout


def test_columns_that_do_not_fit_are_in_a_further_block():
    # A value has 10 letters and a gap of 3: 6 + 2 * 13 = 32 fit in 43, 45 do not.
    value = r"\textbf{95} $\pm$ 12.3"
    table = pd.DataFrame({f"A{i}": [value] for i in range(5)}, index=["Median"])
    blocks = _article._blocks(table, 43)
    assert [block.shape[1] for block in blocks] == [2, 2, 1]
    assert pd.concat(blocks, axis=1).equals(table)


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(("f", "exceeded"), [(0, True), (1, False)])
def test_cells_with_more_malicious_models_than_a_rule_assumes_are_marked(tmp_path, f, exceeded):
    results = read_grid(make_grid(tmp_path / "grid", f=f))
    report_grid(results, tmp_path, ArticleForm(intervals="none"))
    text = (tmp_path / "article" / "accuracy.tex").read_text(encoding="utf-8")
    mark = r"$^\dagger$" if exceeded else ""
    assert rows(text)[MEAN] == [rf"\textbf{{75.0}}{mark}", f"15.0{mark}"]
    assert (r"$^\dagger$: an agent received more malicious models" in text) is exceeded
