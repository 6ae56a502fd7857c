"""Alternative texts of figures describe the drawn values."""

import math

import pytest
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from tests.report.synthetic import draw_run

from fedcb2o.report import describe_figure, sample_images, source_counts, weight_matrix


def test_lines_are_described_by_their_ends():
    figure = Figure()
    left, right = figure.subplots(1, 2)
    left.plot([1, 2, 3, 4], [math.nan, 0.25, 0.1, 0.5], label="$T_G = 3$")
    left.plot([1, 2], [0, 1])
    left.axhline(0.5, label="at random")
    left.set(title="Accuracy", xlabel="round")
    left.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    right.plot([1, 2, 3], [0.001234, 2, 1234], label="loss")
    assert (
        describe_figure(figure)
        == "Accuracy: T_G = 3 25% to 50% (round 2 to 4); at random 50%. loss 0.00123 to 1.23e+03."
    )


def test_bars_are_described_by_group():
    figure = Figure()
    ax = figure.subplots()
    for name, heights in (("FedCBO", [0.5, math.nan]), ("FedCB2O", [0.25, 1.0])):
        ax.bar([0, 1], heights, label=name)
    ax.set_xticks([0, 1], ["none", "one"])
    ax.set_title("Rate")
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    assert describe_figure(figure) == "Rate: none: FedCBO 50%, FedCB2O 25%; one: FedCB2O 100%."


def test_many_bars_are_described_as_ranges():
    figure = Figure()
    ax = figure.subplots()
    ax.barh(range(40), range(40), label="taken")
    ax.set_xlabel("rounds")
    assert describe_figure(figure) == "rounds: taken 0 to 39."


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return draw_run(
        tmp_path_factory.mktemp("run") / "run",
        rounds=5,
        seeds=(0,),
        benign=3,
        malicious=1,
        pull=0.0,
    )


def test_weights_are_described_by_group_of_agents(run):
    text = describe_figure(weight_matrix(run))
    assert text.startswith("run, weights between agents. Benign agents of cluster 1 give ")
    assert "0% to malicious ones of it" in text
    assert "Benign agents of cluster 2" in text
    shares = [
        int(word.strip("%"))
        for word in text.split(" give ")[1].split(".")[0].split()
        if word.endswith("%")
    ]
    assert sum(shares) == pytest.approx(100, abs=2)


def test_samples_and_source_counts_have_a_description(run):
    assert (
        describe_figure(sample_images(run)) == "10 sample images, the same as 2 clusters see them."
    )
    assert describe_figure(source_counts([run])).startswith("Source class accuracy: 0: run ")
