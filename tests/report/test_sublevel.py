"""Counts of `paper/sublevel.py` by hand, and the figure of the page, from the committed values."""

import itertools
import re
from pathlib import Path

import pandas as pd
import pytest
from paper import sublevel, sublevel_page

import fedcb2o

DOCS = Path(__file__).parents[2] / "docs"
RUNS = pd.read_csv(DOCS / "benchmark" / "sublevel" / "runs.csv")


@pytest.mark.parametrize(
    ("f", "near", "k"), [(0, 4, 2), (1, 5, 2), (2, 5, 2), (4, 6, 3), (3, 3, 5), (2, 3, 5)]
)
def test_capture_probability_is_the_share_of_orders_with_attackers_first(f, near, k):
    orders = list(itertools.permutations(["attacker"] * f + ["benign"] * (near - f)))
    first = sum(set(order[:k]) == {"attacker"} for order in orders)
    assert sublevel.capture_probability(f, near, k) == pytest.approx(first / len(orders))


def test_a_line_has_the_counts_of_the_records(tmp_path):
    setting = sublevel.border("flip", 4, "excluded", 0.5)
    short = fedcb2o.load(setting.experiment([3000]), {"rounds": sublevel.FIRST_ROUND + 1})
    run = fedcb2o.run(short, out=tmp_path / "run", workers=1)
    line = sublevel.run_lines(setting, run).iloc[0]
    malicious, cluster = run.agents.malicious, run.agents.cluster
    cases = {f: [] for f in range(sublevel_page.BUDGET + 1)}
    received = []
    pairs = run.pairs[run.pairs["round"] >= sublevel.FIRST_ROUND]
    for (_, agent), peers_of_agent in pairs[pairs.agent != pairs.peer].groupby(["round", "agent"]):
        if malicious[agent] or len(peers_of_agent) != sublevel_page.BUDGET:
            continue
        received.append(sum(malicious[peer] for peer in peers_of_agent.peer))
        near = sum(
            malicious[peer] and cluster[peer] == cluster[agent] for peer in peers_of_agent.peer
        )
        cases[near].append(
            sum(
                weight
                for peer, weight in zip(peers_of_agent.peer, peers_of_agent.weight, strict=True)
                if malicious[peer]
            )
        )
    assert sum(map(len, cases.values())) > 0
    assert line.share == pytest.approx(sum(received) / len(received) / sublevel_page.BUDGET)
    for f, weights in cases.items():
        if weights:
            assert line[f"n{f}"] == len(weights)
            assert line[f"weight{f}"] == pytest.approx(sum(weights) / len(weights))


def test_the_mean_weight_is_over_all_cases():
    rows = pd.DataFrame(
        {
            "seed": [0, 1],
            **{f"n{f}": [0.0, 0.0] for f in range(7)},
            **{f"weight{f}": None for f in range(7)},
        }
    )
    rows["n1"], rows["weight1"] = [30.0, 10.0], [0.1, 0.5]
    rows["n4"], rows["weight4"] = [10.0, 0.0], [0.9, float("nan")]
    assert sublevel_page.mean_weight(rows).tolist() == pytest.approx([30.0, 50.0])
    assert set(sublevel_page.mean_by_count(rows, "weight")) == {1}  # ten cases are too few
    assert sublevel_page.mean_by_count(rows, "weight")[1].tolist() == pytest.approx([10.0, 50.0])


def test_all_settings_were_run_with_all_seeds():
    runs = {(setting.defence, setting.attack, setting.malicious) for setting in sublevel.settings()}
    assert set(RUNS.groupby(["defence", "attack", "malicious"]).groups) == runs
    assert all(
        sorted(seeds) == list(sublevel.SEEDS)
        for _, seeds in RUNS.groupby(["defence", "attack", "malicious"]).seed
    )


def test_the_figure_of_the_page_equals_the_committed_runs(tmp_path):
    sublevel.draw_figure(RUNS, tmp_path / "border.svg")
    drawn, published = (
        re.findall(r' d="([^"]+)"', path.read_text())
        for path in (tmp_path / "border.svg", DOCS / "figures" / "sublevel-border.svg")
    )
    assert drawn == published
