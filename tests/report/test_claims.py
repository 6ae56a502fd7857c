"""Verdicts of `paper/claims.py`, by hand, and the published matrix, from the committed values."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from paper import claims
from tests.report.synthetic import draw_run

from fedcb2o.records import Run
from fedcb2o.report import curve_panels, draw_panels
from fedcb2o.report.tables import pair_statistics

pytestmark = pytest.mark.usefixtures("intervals_of_two_seeds")


def claim(low, high):
    return claims.Claim("", "", "", (), lambda known: pd.Series(dtype=float), low, high)


def claim_with_text(wording, *, statistic=""):
    """Return the claim with a text."""
    (match,) = (
        candidate
        for candidate in claims.all_claims()
        if candidate.text == wording and statistic in candidate.statistic
    )
    return match


def table(**columns):
    return pd.DataFrame(columns, index=range(len(next(iter(columns.values())))))


def test_two_seeds_are_undecided(set_min_seeds):
    set_min_seeds(3)
    mean, low, high = claims.mean_interval(pd.Series([1.0, 2.0, math.nan]))
    assert (mean, low, high) == (1.5, -math.inf, math.inf)
    assert claims.verdict(claim(0.0, math.inf), low, high) == "undecided"


def test_the_interval_is_students_t_interval():
    mean, low, high = claims.mean_interval(pd.Series([1.0, 2.0, 3.0, math.nan]))
    assert mean == pytest.approx(2.0)
    # t at 97.5%, two degrees of freedom
    assert high - 2.0 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert mean - low == pytest.approx(high - mean)


def test_a_claim_is_held_if_the_interval_is_inside_its_range():
    positive, similar = claim(0.0, math.inf), claim(-8.0, 8.0)
    assert claims.verdict(positive, 0.5, 9.0) == "held"
    assert claims.verdict(positive, -0.5, 9.0) == "undecided"
    assert claims.verdict(positive, -9.0, -0.5) == "opposite"
    assert claims.verdict(similar, -7.0, 3.0) == "held"
    assert claims.verdict(similar, -9.0, 3.0) == "undecided"
    assert claims.verdict(similar, 8.5, 20.0) == "opposite"


def test_a_metric_that_does_not_degrade_may_improve():
    source = claim_with_text("the source class does not degrade")
    success = claim_with_text("nor does ASR")
    assert claims.verdict(source, 9.0, 12.0) == claims.verdict(success, -12.0, -9.0) == "held"
    assert claims.verdict(source, -12.0, -9.0) == claims.verdict(success, 9.0, 12.0) == "opposite"


def test_margins_contain_the_differences_that_the_paper_calls_similar():
    """A margin contains the differences that the paper calls similar, and no other one.

    It exceeds the largest of them by less than half a point.
    """
    for metric, margin in claims.MARGIN.items():
        comparisons = [
            c
            for c in claims.all_claims()
            if c.statistic.startswith(claims.METRIC_NAMES[metric]) and not math.isnan(c.paper)
        ]
        similar = [abs(c.paper) for c in comparisons if (c.low, c.high) == (-margin, margin)]
        different = [
            abs(c.paper)
            for c in comparisons
            if 0.0 in (c.low, c.high) and c.section in ("(ii)", "(iii)")
        ]
        assert margin - 0.5 < max(similar) <= margin < min(different, default=math.inf)


def test_the_paper_meets_its_own_claims():
    for claimed in claims.all_claims():
        assert (
            math.isnan(claimed.paper)
            or claims.verdict(claimed, claimed.paper, claimed.paper) == "held"
        ), claimed.says


def test_differences_are_between_runs_of_one_seed():
    values = {
        "FedCBO": pd.DataFrame({"source_accuracy": [40.0, 20.0, 7.0]}, index=[0, 1, 2]),
        "FedCB2O": pd.DataFrame({"source_accuracy": [30.0, 50.0]}, index=[1, 0]),
    }
    better = claim_with_text("FedCB2O is significantly higher on the source class")
    assert better.compute(values).dropna().to_dict() == {0: 10.0, 1: 10.0}
    assert better.paper == pytest.approx(55.73 - 40.23)


def test_second_best_is_compared_with_the_second_best_of_the_others():
    values = {
        "Oracle Max": table(attack_success_rate=[4.0, 4.0]),
        "Oracle Min": table(attack_success_rate=[1.0, 3.0]),
        "FedCB2O": table(attack_success_rate=[9.0, 2.0]),
        "FedCBO": table(attack_success_rate=[30.0, 40.0]),
    }
    success = claim_with_text("and in ASR", statistic="second best")
    # second best of the others minus Oracle Max: 9 - 4 and 3 - 4
    assert success.compute(values).tolist() == [5.0, -1.0]
    assert success.paper == pytest.approx(38.73 - 32.19)


def test_roles_are_assigned_to_existing_runs():
    switched = [f"fedcb2o-released-tg{start}" for start in (3, 10, 5)]
    names = ["fedcbo", "fedcbo-alpha10", "fedcbo-paper", "oracle-max", *claims.FEDCB2O, *switched]
    values = dict.fromkeys(names, pd.DataFrame())
    assert claims.runs_by_role(values) == {
        "FedCBO": "fedcbo-alpha10",
        "FedCB2O": "fedcb2o-released",
        "Oracle Max": "oracle-max",
        "FedCB2O with T_G": "fedcb2o-released-tg5",
        "with an earlier T_G": "fedcb2o-released-tg3",
        "with a later T_G": "fedcb2o-released-tg10",
        "FedCB2O of Fig. 6": "fedcb2o-released-tg5",
    }
    text = claims.runs_by_role(values, "fedcb2o-paper")
    assert (text["FedCBO"], text["FedCB2O of Fig. 6"]) == ("fedcbo-paper", "fedcb2o-paper")


@pytest.mark.parametrize(("seeds", "expected"), [(2, "fedcbo"), (3, "fedcbo-released")])
def test_a_fedcbo_with_fewer_seeds_does_not_hide_the_other(seeds, expected):
    values = {name: table(loss=[0.0] * 3) for name in ("fedcbo", "fedcb2o-released")}
    values["fedcbo-released"] = table(loss=[0.0] * seeds)
    assert claims.runs_by_role(values)["FedCBO"] == expected


def test_the_weight_of_other_clusters_is_of_the_last_fifth():
    # Agents 0 and 1 of cluster 0, agent 2 of cluster 1; agent 1 is malicious. The last two of ten
    # rounds count.
    rows = [(0, n, 0, 2, 1.0) for n in range(1, 9)] + [(0, n, 0, 1, 0.6) for n in (9, 10)]
    rows += [(0, 10, 0, 2, 0.3), (0, 10, 0, 0, 5.0), (0, 10, 1, 2, 9.0)]
    run = SimpleNamespace(
        pairs=pd.DataFrame(rows, columns=["seed", "round", "agent", "peer", "weight"]),
        agents=pd.DataFrame(
            {"seed": 0, "agent": [0, 1, 2], "cluster": [0, 0, 1], "malicious": [False, True, False]}
        ),
    )
    assert claims._other_cluster_share(run).to_dict() == pytest.approx({0: 0.3 / 1.5})


def test_differences_of_losses_follow_from_the_weights_of_fedcbo():
    # Agents 0 and 1 (benign) and 2 (malicious) of cluster 0, agent 3 of cluster 1. The weights of
    # each agent have a common factor.
    losses = [(1, 0, 1, 0.5, 3.0), (1, 0, 2, 0.7, 3.0), (1, 0, 3, 0.1, 3.0), (2, 0, 2, 9.0, 1.0)]
    losses += [(2, 1, 0, 0.4, 0.2), (2, 1, 2, 0.3, 0.2), (2, 2, 0, 0.1, 1.0), (2, 2, 1, 0.2, 1.0)]
    pairs = pd.DataFrame(losses, columns=["round", "agent", "peer", "loss", "factor"]).assign(
        seed=0
    )
    malicious = [False, False, True, False]
    run = SimpleNamespace(
        pairs=pairs.assign(weight=pairs.factor * np.exp(-10 * pairs.loss)),
        agents=pd.DataFrame(
            {"seed": 0, "agent": range(4), "cluster": [0, 0, 0, 1], "malicious": malicious}
        ),
        config={"algorithm": {"name": "fedcbo", "alpha": 10.0}},
    )
    assert claims._malicious_loss(run).to_dict() == pytest.approx({0: (0.2 - 0.1) / 2})


def test_the_published_matrix_equals_the_committed_values(set_min_seeds):
    set_min_seeds(5)
    text = claims.PAGE.read_text(encoding="utf-8")
    assert claims.MARKER.search(text)
    assert claims.rewrite_page(claims.PAGE) == text


def test_a_cell_has_a_verdict_and_its_statistic():
    values = {
        "FedCB2O": table(source_accuracy=[40.0, 41.0, 42.0]),
        "FedCBO": table(source_accuracy=[30.0, 31.0, 32.0]),
    }
    comparison = claim_with_text("FedCB2O is significantly higher on the source class")
    assert claims._cell(comparison, values) == {
        "verdict": "held", "statistic": "+10.00 [+10.00,+10.00]", "seeds": 3,
    }  # fmt: skip
    first_seed = {role: rows.iloc[:1] for role, rows in values.items()}
    assert claims._cell(comparison, first_seed) == {
        "verdict": "agrees", "statistic": "+10.00", "seeds": 1,
    }  # fmt: skip
    assert claims._cell(claim_with_text("and in ASR", statistic="second best"), values) is None


def test_bars_are_by_cluster_and_seed(tmp_path):
    run = draw_run(tmp_path / "fedcbo", benign=3, malicious=1, rounds=10)
    values = claims.seed_values(run)
    bars = pair_statistics(run).set_index(["seed", "cluster", "relation", "peer"])
    for seed in run.seeds:
        for cluster in (0, 1):
            benign, malicious = (
                bars.loc[seed, cluster, "same", peer] for peer in ("benign", "malicious")
            )
            own = values.loc[seed].filter(like=f"_{cluster + 1}")
            assert own[f"benign_picked_{cluster + 1}"] == benign.frequency
            assert own[f"malicious_picked_{cluster + 1}"] == pytest.approx(
                malicious.frequency / benign.frequency
            )
            assert own[f"malicious_share_{cluster + 1}"] == pytest.approx(
                malicious.share / benign.share
            )


def test_seeds_of_one_run_may_be_in_several_folders(tmp_path):
    for seed, rounds, changes in (
        (0, 10, {}),
        (3, 10, {}),
        (4, 8, {}),
        (5, 10, {"device": "cuda"}),
    ):
        settings = {"rounds": 10, **changes}
        draw_run(
            tmp_path / f"by-{seed}" / "x-fedcb2o-released",
            settings,
            benign=3,
            malicious=1,
            rounds=rounds,
            seeds=[seed],
        )
    target = tmp_path / "into"
    target.mkdir()
    runs = claims.gather_runs(sorted(tmp_path.glob("by-*")), target)
    assert {
        name: [run.seeds for run in runs_of_method] for name, runs_of_method in runs.items()
    } == {"fedcb2o-released": [(0, 3), (5,)]}
    single = Run(tmp_path / "by-3" / "x-fedcb2o-released")
    result = claims.seed_values(runs["fedcb2o-released"][0]).loc[[3]]
    pd.testing.assert_frame_equal(result, claims.seed_values(single))


def test_the_figure_has_all_methods_or_the_main_ones_and_marks_the_switch():
    index = pd.MultiIndex.from_product([(0, 1), (5, 10)], names=["seed", "round"])
    table_of_curve = pd.DataFrame({"accuracy": [50.0, 60.0, 70.0, 80.0]}, index=index)
    eight = [*claims.MAIN_METHODS[:6], "fedcb2o-released-tg10", "fedcbo-clean"]
    selected = claims.select_curves(dict.fromkeys(eight, table_of_curve))
    assert [curve.name for curve in selected] == eight
    assert {
        curve.name: curve.criterion_from_round for curve in selected if curve.criterion_from_round
    } == {"fedcb2o-released-tg10": 10}
    ax = draw_panels(curve_panels(selected)).axes[0]
    assert ax.lines[0].get_ydata() == pytest.approx([0.6, 0.7])
    nine = claims.select_curves(dict.fromkeys([*eight, "fedcb2o-held-out"], table_of_curve))
    assert [curve.name for curve in nine] == [*claims.MAIN_METHODS[:6]]


def test_the_figure_is_drawn_without_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["claims.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        claims.main()
    lines = [
        "method,seed,round,accuracy,source_accuracy,attack_success_rate",
        "fedcbo,0,5,1,2,3",
        "fedcbo,0,10,4,5,6",
    ]
    (tmp_path / "curves.csv").write_text("\n".join(lines) + "\n")
    claims.main()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["curves.csv", "curves.png"]
