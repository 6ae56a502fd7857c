"""Tables compared with values by hand."""

import io
import math
import re

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from safetensors.numpy import save_file
from tests.report.synthetic import draw_run, write_run

from fedcb2o.records import METRICS, STANDARD_METRICS, Run, last_fifth, write_toml
from fedcb2o.report import (
    by_agent,
    by_source_count,
    comparability_notes,
    compare,
    curves,
    incomplete_note,
    net_attack_success,
    pair_statistics,
    report,
    seed_caption,
    summary,
    to_html,
    to_latex,
    to_markdown,
    to_readable,
    to_rich,
)
from fedcb2o.report.tables import find_clean_counterpart, format_mean_interval, local_gains

# Two clusters; agents 0, 1 and 3 are benign, 2 and 4 malicious.
AGENTS = {
    "cluster": [0, 0, 0, 1, 1],
    "malicious": [False, False, True, False, True],
    "num_samples": [50, 50, 120, 50, 120],
    "source_in_validation": [0, 2, None, 5, None],
}


def scores(accuracy, source, attack, *, n=1, malicious_weight=(0.5, 0.25, 0.0)):
    def of_all_agents(values):
        return None if values is None else [values[0], values[1], None, values[2], None]

    line = {"round": n, "malicious_weight": of_all_agents(malicious_weight)}
    return line | {
        "accuracy": of_all_agents(accuracy),
        "source_accuracy": of_all_agents(source),
        "attack_success_rate": of_all_agents(attack),
    }


def run_of(folder, metrics, pairs=None, **config):
    return write_run(folder, config, agents=AGENTS, metrics=metrics, pairs=pairs)


@pytest.fixture
def attacked(tmp_path):
    best = scores([1, 1, 1], [1, 1, 1], [0, 0, 0], n=1)
    first = scores(
        [0.5, 0.75, 0.25],
        [0.5, 0.5, 0.2],
        [0.125, 0.5, 0.125],
        n=2,
        malicious_weight=(0.3, 0.0, 0.0),
    )
    second = scores(
        [0.5, 0.5, 0.5], [0.2, 0.2, 0.2], [0.75, 0.75, 0.75], n=2, malicious_weight=(0.0, 0.0, 0.3)
    )
    return run_of(
        tmp_path / "attacked", {0: [best, first], 1: [best, second]}, title="FedCBO", rounds=2
    )


def test_the_summary_is_of_the_last_round_and_benign_agents(attacked):
    first = summary(attacked.records).iloc[0]
    assert (first.seed, first["round"], first.rounds) == (0, 2, 2)
    assert first.accuracy == pytest.approx(0.5)
    assert first.accuracy_worst == first.accuracy_worst_tenth == 0.25
    assert first.source_accuracy == pytest.approx(0.4)
    assert first.attack_success_rate == pytest.approx(0.25)
    assert first.attack_success_rate_worst == 0.5
    assert first.malicious_weight == pytest.approx(0.1)


def test_the_worst_tenth_is_of_ceil_n_over_10_agents(tmp_path):
    run = draw_run(tmp_path / "run", clusters=1, benign=11, malicious=0, rounds=1, seeds=(0,))
    values = run.records.accuracy.sort_values()
    assert summary(run.records).accuracy_worst_tenth[0] == pytest.approx(values.iloc[:2].mean())
    highest = run.records.attack_success_rate.sort_values().iloc[-2:].mean()
    assert summary(run.records).attack_success_rate_worst_tenth[0] == pytest.approx(highest)


def test_the_last_fifth_of_the_rounds_is_rounded_up():
    table = pd.DataFrame({"seed": [0] * 11 + [1], "round": [*range(1, 12), 1]})
    assert last_fifth(table)["round"].tolist() == [9, 10, 11, 1]


def test_the_interval_of_a_rate_is_on_the_logit_scale_and_needs_five_seeds():
    five = pd.Series([0.25, 0.75, 0.5, 0.5, 0.5])
    # Mean 0.5, deviation 0.1768; 2.7764 * 0.1768 / sqrt(5) / 0.25 = 0.878 on the logit scale.
    assert format_mean_interval(five) == "50.0 [29.4, 70.6]"
    assert format_mean_interval(five, percent=False) == "0.500 [0.281, 0.719]"
    assert format_mean_interval(five, is_difference=True) == "50.0 [28.1, 71.9]"
    assert format_mean_interval(five[:4]) == "50.0"
    assert format_mean_interval(pd.Series([0.25, 0.75, math.nan])) == "50.0"
    assert format_mean_interval(pd.Series([math.nan])) == "–"


@pytest.mark.parametrize("values", [[0, 0, 0, 0, 0.9], [1, 1, 1, 0.99, 1], [0, 0, 1, 1, 1]])
def test_the_interval_of_a_rate_stays_between_0_and_100(values):
    text = format_mean_interval(pd.Series(values, dtype=float))
    mean, low, high = (float(number) for number in re.findall(r"[\d.]+", text))
    assert 0 <= low < mean < high <= 100
    assert format_mean_interval(pd.Series([1.0] * 5)) == "100.0 [100.0, 100.0]"


def test_the_caption_has_the_seeds_or_their_numbers(attacked, tmp_path):
    assert seed_caption([attacked]).endswith(
        "mean over seeds (0, 1): too few seeds for an interval, which needs 5."
    )
    lines = [scores([0.5] * 3, None, None)]
    five = run_of(tmp_path / "five", dict.fromkeys(range(3, 8), lines), title="Five")
    assert seed_caption([five]).endswith("mean and 95% interval over seeds (3, 4, 5, 6, 7).")
    assert seed_caption([attacked, five]).endswith(
        "seeds per run: FedCBO 2, Five 5; too few seeds for an interval where there are fewer than 5."
    )
    other = run_of(tmp_path / "other", {7: [scores([0.5] * 3, None, None)]}, title="Oracle")
    assert seed_caption([other]) == "Percent, at the last round of seed 7."
    # As many seeds, and other ones.
    again = run_of(tmp_path / "again", {3: lines, 4: lines}, title="Again")
    assert seed_caption([attacked, again]) == (
        "Percent, at the last round; mean over seeds, 2 per run, which are not the same: too few "
        "seeds for an interval, which needs 5."
    )


def _with_data(run, **checksums):
    """Write checkpoints whose headers name the data of each seed."""
    for seed, data in checksums.items():
        path = run.folder / seed.replace("_", "-") / "checkpoint.safetensors"
        header = {"rounds": "1", "fingerprint": f'{{"seed": 0}} data {data}', "sums": "{}"}
        save_file({"models": np.zeros((1, 1), np.float32)}, path, metadata=header)
    return Run(run.folder)


def test_data_of_one_name_are_compared_by_their_checksums(tmp_path):
    lines = [scores([0.5] * 3, None, None)]

    def make(name, **checksums):
        run = run_of(tmp_path / name, {0: lines, 1: lines}, title=name)
        return _with_data(run, **checksums)

    one = make("one", seed_0="0000000a-0000000b", seed_1="0000000a-0000000b")
    same = make("same", seed_0="0000000a-0000000b", seed_1="0000000a-0000000b")
    unknown = make("unknown")
    other = make("other", seed_0="0000000a-0000000c", seed_1="0000000a-0000000c")
    mixed = make("mixed", seed_0="0000000a-0000000b", seed_1="0000000a-0000000c")
    assert one.data_checksums == {0: "0000000a-0000000b", 1: "0000000a-0000000b"}
    assert unknown.data_checksums == {}
    assert comparability_notes([one, same, unknown]) == []
    assert comparability_notes([one, other, same]) == [
        "These runs differ in their data, though all are named digits, by their checksums: "
        "0000000a-0000000b (one, same); 0000000a-0000000c (other)"
    ]
    assert comparability_notes([mixed]) == [
        "The seeds of mixed have different data of one name, by their checksums: "
        "0000000a-0000000b (seed 0); 0000000a-0000000c (seed 1)"
    ]


def test_a_clean_run_with_other_data_is_no_counterpart(tmp_path):
    lines = {0: [scores([0.5] * 3, None, None)]}
    clean = {"num_clusters": 1, "malicious_role": "clean", "budget": 6}
    run = _with_data(run_of(tmp_path / "run", lines), seed_0="0000000a")
    same = _with_data(run_of(tmp_path / "same", lines, agents=clean), seed_0="0000000a")
    other = _with_data(run_of(tmp_path / "other", lines, agents=clean), seed_0="0000000b")
    assert find_clean_counterpart(run, [other, same]) is same
    assert find_clean_counterpart(run, [other]) is None


def test_different_conditions_of_runs_are_named(attacked, tmp_path):
    lines = [scores([0.5] * 3, None, None)]
    same = run_of(tmp_path / "same", {0: lines * 2, 1: lines * 2}, title="Same", rounds=2)
    assert comparability_notes([attacked, same]) == []
    other = run_of(
        tmp_path / "other", {0: lines}, title="Other", rounds=1, evaluate_on="redrawn",
        data={"name": "emnist"},
        agents={"num_clusters": 2, "malicious_role": "attack", "validation": 0.3},
    )  # fmt: skip
    assert comparability_notes([attacked, other]) == [
        "These runs differ in data: digits (FedCBO); emnist (Other)",
        "These runs differ in test set: test (FedCBO); redrawn (Other)",
        "These runs differ in rounds: 2 (FedCBO); 1 (Other)",
        "These runs differ in agents: num_clusters 1 (FedCBO); num_clusters 2 (Other)",
        "These runs differ in training samples: all samples of an agent (FedCBO); "
        "70% of an agent's samples, the rest only validates (Other)",
        "These runs differ in seeds: 0, 1 (FedCBO); 0 (Other)",
    ]


def test_a_printed_table_hides_no_column(attacked, tmp_path):
    lines = [scores([0.5] * 3, None, None)]
    runs = [run_of(tmp_path / f"run-{i}", {0: lines}, title="Long title " * 5) for i in range(9)]
    text = str(compare([attacked, *runs]))
    assert all(f"(run-{i})" in text for i in range(9))
    assert "..." not in text


def test_compare_gives_the_table_of_the_paper(attacked, tmp_path):
    other = run_of(tmp_path / "other", {0: [scores([0.5] * 3, None, None)]}, title="Oracle")
    table = compare([attacked, other])
    assert table.columns.tolist() == ["FedCBO", "Oracle"]
    assert table.loc["Overall accuracy"].tolist() == ["50.0", "50.0"]
    assert table.loc["Source class accuracy"].tolist() == ["30.0", "–"]
    assert table.loc["Attack success rate"].tolist() == ["50.0", "–"]
    assert "Net attack success" not in table.index
    worst = compare([attacked], over="worst")
    assert worst.loc["Overall accuracy", "FedCBO"] == "37.5"
    assert worst.loc["Attack success rate", "FedCBO"] == "62.5"


def test_runs_with_equal_titles_are_distinguished(attacked, tmp_path):
    other = run_of(tmp_path / "again", {0: [scores([0.5] * 3, None, None)]}, title="FedCBO")
    assert compare([attacked, other]).columns.tolist() == ["FedCBO (attacked)", "FedCBO (again)"]


def clean_twin(folder, seeds=(1, 2), **config):
    lines = [scores([1] * 3, [1] * 3, [0] * 3), scores([0.5] * 3, [0.5] * 3, [0.25] * 3, n=2)]
    role = {"num_clusters": 1, "malicious_role": "clean", "budget": 6}
    return run_of(folder, dict.fromkeys(seeds, lines), agents=role, rounds=2, **config)


def test_net_attack_success_is_paired_by_seed(attacked, tmp_path):
    twin = clean_twin(tmp_path / "elsewhere", title="FedCBO clean")
    assert net_attack_success(attacked, [twin]).to_dict() == {1: 0.5}
    table = compare([twin, attacked])
    assert table.columns.tolist() == ["FedCBO"]
    assert table.loc["Net attack success", "FedCBO"] == "50.0"
    result = compare([attacked, twin], with_counterparts=True).columns.tolist()
    assert result == ["FedCBO", "FedCBO clean"]
    assert compare([twin]).columns.tolist() == ["FedCBO clean"]


def test_the_clean_twin_is_found_next_to_the_run_if_its_settings_match(attacked, tmp_path):
    assert find_clean_counterpart(attacked) is None
    twin = clean_twin(tmp_path / "attacked-clean")
    assert compare([attacked]).loc["Net attack success", "FedCBO"] == "50.0"
    assert find_clean_counterpart(attacked) == twin
    write_toml(twin.folder / "config.toml", {**twin.config, "rounds": 3})
    assert find_clean_counterpart(attacked) is None
    (twin.folder / "config.toml").unlink()
    assert find_clean_counterpart(attacked) is None


def test_the_gain_over_training_alone_is_paired_by_agent(attacked, tmp_path):
    assert local_gains(attacked).empty
    baseline = [scores([0.25, 0.5, 0.5], None, None, n=2)]
    changes = {"algorithm": {"name": "local_training"}, "training": {"gamma": 1.0}, "rounds": 2}
    agents = attacked.config["agents"]
    other = run_of(
        tmp_path / "attacked-local", {0: baseline, 1: baseline}, agents=agents, **changes
    )
    assert local_gains(attacked).empty  # another step size
    config = {**other.config, "training": attacked.config.get("training", {})}
    write_toml(other.folder / "config.toml", {**config, "name": "attacked-local"})
    gains = local_gains(attacked)
    assert gains.accuracy.tolist() == [0.5, 0.75, 0.25, 0.5, 0.5, 0.5]
    assert gains.accuracy_local.tolist() == [0.25, 0.5, 0.5] * 2
    column = compare([attacked])["FedCBO"]
    assert column["Local baseline"] == "41.7"
    assert column["Gain over training alone"] == "8.3"
    # The worst agent loses 25 points in the first seed, and nothing in the second one.
    assert column["Gain over training alone, worst agent"] == "-12.5"


def test_a_run_without_attack_has_no_malicious_weight(attacked, tmp_path):
    without_attack = run_of(
        tmp_path / "calm",
        {0: [scores([1] * 3, [1] * 3, [0] * 3)]},
        agents={"malicious_role": "benign"},
    )
    assert by_source_count(without_attack).malicious_weight.isna().all()
    assert compare([attacked, without_attack]).loc["Malicious weight", "calm"] == "–"


def test_scores_by_source_count_by_hand(attacked):
    table = by_source_count(attacked).set_index("samples")
    assert table.index.tolist() == ["0", "2", "3 or more"]
    assert table.agents.tolist() == [2, 2, 2]
    assert table.source_accuracy.tolist() == pytest.approx([0.35, 0.35, 0.2])
    assert table.malicious_weight.tolist() == pytest.approx([0.15, 0.0, 0.15])


def test_pair_statistics_by_hand(tmp_path):
    pairs = [
        {
            "round": 1,
            "ids": [[1, 2], [2, 3], [0], [4], [3]],
            "weights": [[0.5, 0.25], [0.5, 0.1], [1], [0], [1]],
        },
        {
            "round": 2,
            "ids": [[2], [0, 4], [0], [], []],
            "weights": [[0.75], [0.25, 0.3], [1], [], []],
        },
    ]
    pairs[0]["own"] = [0.25, 0.4, 0.0, 1.0, 0.0]
    pairs[1]["own"] = [0.25, 0.45, 0.0, 1.0, 1.0]
    run = run_of(tmp_path / "run", {0: [scores([1] * 3, None, None)]}, pairs={0: pairs})
    table = pair_statistics(run).set_index(["cluster", "relation", "peer"])
    # Cluster 1 (index 0) has two benign agents in two rounds, so each peer may be asked four times.
    first = table.loc[0]
    order = [("same", "benign"), ("same", "malicious"), ("other", "benign"), ("other", "malicious")]
    assert first.loc[order].available.tolist() == [1, 1, 1, 1]
    assert first.loc[order].frequency.tolist() == [2 / 4, 3 / 4, 1 / 4, 1 / 4]
    assert first.loc[order].mean_weight.tolist() == pytest.approx([0.375, 0.5, 0.1, 0.3])
    total = 0.75 + 1.5 + 0.1 + 0.3
    assert first.loc[order].share.tolist() == pytest.approx(
        [0.75 / total, 1.5 / total, 0.1 / total, 0.3 / total]
    )
    # Cluster 2 has one benign agent, so that it has no benign peer in its own cluster. It received
    # one model, with weight 0.
    second = table.loc[1]
    result = second.index.tolist()
    assert result == [("same", "malicious"), ("other", "benign"), ("other", "malicious")]
    assert second.available.tolist() == [1, 2, 1]
    assert second.frequency.tolist() == [0.5, 0.0, 0.0]
    assert second.mean_weight.isna().tolist() == [False, True, True]
    assert second.share.isna().all()


def test_pair_statistics_of_a_sample_of_agents_by_hand(tmp_path):
    line = {"round": 1, "agents": [0, 3], "ids": [[1, 2], [4]], "weights": [[0.5, 0.25], [0]]}
    line["own"] = [0.25, 1.0]
    run = run_of(tmp_path / "run", {0: [scores([1] * 3, None, None)]}, pairs={0: [line]})
    assert run.pairs.agent.tolist() == [0, 0, 0, 3, 3]
    table = pair_statistics(run).set_index(["cluster", "relation", "peer"])
    # Only one of the two benign agents of cluster 1 has a record.
    assert table.loc[0].frequency.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert table.loc[0].share.tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert table.loc[1].frequency.tolist() == [1.0, 0.0, 0.0]


def test_the_frequency_of_uniform_selection_is_budget_over_peers(tmp_path):
    pairs = {
        0: [
            {
                "round": 1,
                "ids": [[1, 2, 3, 4], [0, 2, 3, 4], [], [0, 1, 2, 4], []],
                "weights": [[0.25] * 4] * 5,
            }
        ]
    }
    pairs[0][0]["weights"] = [[0.25] * len(ids) for ids in pairs[0][0]["ids"]]
    pairs[0][0]["own"] = [0, 0, 1, 0, 1]
    table = pair_statistics(
        run_of(tmp_path / "run", {0: [scores([1] * 3, None, None)]}, pairs=pairs)
    )
    assert table.frequency.eq(1).all()
    assert table[table.cluster == 0].share.tolist() == pytest.approx([0.25] * 4)


def test_an_incomplete_run_has_a_note(tmp_path):
    metrics = {0: [scores([1] * 3, None, None)]}
    config = {"seeds": [0, 1], "rounds": 9, "title": "FedCBO"}
    run = write_run(tmp_path / "half", config, agents=AGENTS, metrics=metrics, complete=False)
    expected = "FedCBO (half) is incomplete: 1 of 2 seeds begun, read from seed 0 at round 1 of 9"
    assert incomplete_note(run) == expected
    assert compare([run]).loc["Overall accuracy", "FedCBO"] == "100.0"


TABLE = pd.DataFrame(
    {"A & B": ["1.0 [0.9, 1.1]", "–"], "FedCB2O (T_G = 30)": ["2.00", "x|y"]}, index=["50%", "b"]
)


def test_tables_are_written_as_markdown_latex_and_html():
    assert to_markdown(TABLE).splitlines() == [
        "|  | A & B | FedCB2O (T_G = 30) |",
        "| --- | ---: | ---: |",
        "| 50% | 1.0 [0.9, 1.1] | 2.00 |",
        "| b | – | x\\|y |",
    ]
    latex = to_latex(TABLE)
    assert r"& A \& B & FedCB2O ($T_G$ = 30) \\" in latex
    assert r"50\% & 1.0 [0.9, 1.1] & 2.00 \\" in latex
    page = to_html(TABLE)
    assert (
        '<th scope="col">A &amp; B</th><th scope="col">FedCB2O (<i>T</i><sub>G</sub> = 30)</th>'
        in page
    )
    assert '<th scope="row">50%</th><td>1.0 <small>[0.9, 1.1]</small></td>' in page


def test_a_cell_of_html_has_a_line_for_each_part():
    table = pd.DataFrame({"A": ["17.5 [-7.8, 11.8] (Trash) †", "best"]}, index=["a", "b"])
    page = to_html(table)
    parts = "17.5 † <small>[-7.8, 11.8]</small> <small>(Trash)</small>"
    assert f"<td>{parts}</td>" in page


@pytest.mark.parametrize("runs", [1, 4, 5, 9])
def test_no_number_is_cut_off_on_a_narrow_terminal(runs):
    rows = [
        "Overall accuracy",
        "Source class accuracy",
        "Attack success rate",
        "Net attack success",
        "Malicious weight",
    ]
    table = pd.DataFrame(
        {f"FedCB2O (T_G = {i})": ["84.3 [74.1, 94.4]"] * 5 for i in range(runs)}, index=rows
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(to_rich(table))
    text = console.export_text()
    assert text.count("84.3") == text.count("[74.1, 94.4]") == 5 * runs


def test_a_readable_table_is_in_percent_and_counts_clusters_from_one():
    table = pd.DataFrame(
        {"cluster": [0], "frequency": [0.125], "share": [math.nan], "accuracy": [math.nan]}
    )
    readable = to_readable(table, empty=["accuracy"])
    assert readable.index.name == "Selecting cluster"
    assert readable.reset_index().to_numpy().tolist() == [["1", "12.50", "–"]]


@pytest.mark.usefixtures("no_figures")
def test_metrics_of_the_configuration_are_in_compare_and_report(tmp_path):
    line = scores([0.5, 0.75, 0.25], None, None)
    line["worst_class_accuracy"] = [0.25, 0.75, None, 0.5, None]
    line["mine"] = [1.0, 3.0, None, 2.0, None]
    line["auc"] = [None, None, None, None, None]
    mine = {"name": "my.parts:mine", "better": "low"}
    config = {"metrics": [{"name": "worst_class_accuracy"}, mine, {"name": "auc"}]}
    run = write_run(tmp_path / "run", config, agents=AGENTS, metrics={3: [line]})
    other = run_of(tmp_path / "other", {3: [scores([0.5, 0.75, 0.25], None, None)]})

    assert compare([run, other]).loc["worst_class_accuracy"].tolist() == ["0.500", "–"]
    worst = compare([run], over="worst")["run"]
    assert worst[["worst_class_accuracy", "mine"]].tolist() == ["0.250", "3.000"]
    assert compare([run])["run"]["auc: agents without a value"] == "3 of 3"
    assert "worst_class_accuracy" not in summary(run.records)
    scored = run.summary().iloc[0]
    assert (scored.mine, scored.mine_worst, scored.mine_missing, scored.auc_missing) == (2, 3, 0, 3)
    agents = by_agent(run)
    assert agents.index.tolist() == ["agent 0", "agent 1", "agent 3"]
    assert agents.loc["agent 1", ["Overall accuracy", "mine", "auc"]].tolist() == [
        "75.0",
        "3.000",
        "no value",
    ]
    unit = "Percent, except worst_class_accuracy, mine, auc, at the last round of seed 3."
    assert seed_caption([run, other]) == unit
    assert len(curves([run, other]).axes) == 3
    report([run, other], str(tmp_path / "report"))
    page = (tmp_path / "report" / "report.html").read_text()
    assert unit in page
    assert "By agent" in page
    seeds = pd.read_csv(tmp_path / "report" / "seeds.csv")
    assert seeds.worst_class_accuracy[0] == 0.5


def test_standard_metrics_are_in_percent():
    # The page of a run states "In percent" for all of them.
    assert all(METRICS[name].is_percent for name in STANDARD_METRICS)
