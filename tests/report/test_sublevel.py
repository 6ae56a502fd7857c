"""The counts of `paper/sublevel.py` by hand, and its page from the values that are kept."""

import itertools
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
def test_capture_by_chance_is_the_share_of_orders_in_which_attackers_come_first(f, near, k):
    orders = list(itertools.permutations(["attacker"] * f + ["benign"] * (near - f)))
    first = sum(set(order[:k]) == {"attacker"} for order in orders)
    assert sublevel.capture_probability(f, near, k) == pytest.approx(first / len(orders))


def test_a_line_counts_what_the_run_recorded(tmp_path):
    setting = sublevel.border("flip", 4, "excluded", 0.5)
    short = fedcb2o.load(setting.experiment([3000]), {"rounds": sublevel.FIRST_ROUND + 1})
    run = fedcb2o.run(short, out=tmp_path / "run", workers=1)
    line = sublevel.run_lines(setting, run).iloc[0]
    malicious, cluster = run.agents.malicious, run.agents.cluster
    cases = {f: [] for f in range(sublevel_page.BUDGET + 1)}
    received = []
    pairs = run.pairs[run.pairs["round"] >= sublevel.FIRST_ROUND]
    for (_, agent), mine in pairs[pairs.agent != pairs.peer].groupby(["round", "agent"]):
        if malicious[agent] or len(mine) != sublevel_page.BUDGET:
            continue
        received.append(sum(malicious[peer] for peer in mine.peer))
        near = sum(malicious[peer] and cluster[peer] == cluster[agent] for peer in mine.peer)
        cases[near].append(
            sum(
                weight
                for peer, weight in zip(mine.peer, mine.weight, strict=True)
                if malicious[peer]
            )
        )
    assert sum(map(len, cases.values())) > 0
    assert line.share == pytest.approx(sum(received) / len(received) / sublevel_page.BUDGET)
    for f, weights in cases.items():
        if weights:
            assert line[f"n{f}"] == len(weights)
            assert line[f"weight{f}"] == pytest.approx(sum(weights) / len(weights))


def test_the_mean_weight_is_that_of_all_cases():
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
    runs = {(each.defence, each.attack, each.malicious) for each in sublevel.settings()}
    assert set(RUNS.groupby(["defence", "attack", "malicious"]).groups) == runs
    assert all(
        sorted(seeds) == list(sublevel.SEEDS)
        for _, seeds in RUNS.groupby(["defence", "attack", "malicious"]).seed
    )


def test_the_pages_tables_are_those_of_the_runs():
    page = DOCS / "sublevel.md"
    assert sublevel_page.rewrite_page(page, RUNS) == page.read_text()
    assert {found["name"] for found in sublevel_page.TABLE.finditer(page.read_text())} == set(
        sublevel_page.TABLES
    )
    assert f"from {len(RUNS)} runs" in page.read_text()


def less(defence, other, attack, value, malicious=3):
    """Return the interval of the difference of two defences, paired by seed."""

    def of(name, attack):
        mine = (RUNS.defence == name) & (RUNS.attack == attack) & (RUNS.malicious == malicious)
        return RUNS[mine].set_index("seed")[value]

    return sublevel_page.format_percent(of(defence, attack) - of(other, attack))


def test_the_pages_sentences_quote_the_runs():
    page = " ".join((DOCS / "sublevel.md").read_text().split())
    own = less("with the own model", "Algorithm 2", "flip", "attack_success_rate")
    assert f"is told from Algorithm 2 in success, by {own}" in page
    cost = less("without the own model", "with all four", "flip", "accuracy")
    assert f"{cost} of what the other three have" in page
    plain = sublevel_page.border_name("excluded", 0.25)
    cost = less(
        plain,
        sublevel_page.border_name("excluded", 0.25, delta_q=0.1),
        "trash",
        "accuracy",
        malicious=2,
    )
    assert f"costs here: {cost} points with two attackers" in page
    assert (
        f"all four together cost {less('Algorithm 2', 'with all four', 'none', 'accuracy')} points"
        in page
    )
    assert (
        f"the set by itself {less('Algorithm 2', 'with the sub-level set', 'none', 'accuracy')}"
        in page
    )


def test_no_beta_is_told_from_1_by_the_success_of_flips():
    for own, beta, malicious in itertools.product(
        ("excluded", "judged"), (0.25, 0.5, 0.75), (2, 4, 6)
    ):
        told = less(
            sublevel_page.border_name(own, beta),
            sublevel_page.border_name(own, 1.0),
            "flip",
            "attack_success_rate",
            malicious,
        )
        low, high = told.partition("[")[2].strip("]").split(", ")
        assert float(low) <= 0 <= float(high)
