"""Runs on data with owners and with losses other than the cross-entropy.

Expected scores are computed from the models of the checkpoint.
"""

import filecmp
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from tests.tiny import run_cli
from torch import nn

import fedcb2o
from fedcb2o import Dataset
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments.config.loading import load
from fedcb2o.experiments.config.prepared_seed import prepare_seed
from fedcb2o.experiments.grid import load_grid
from fedcb2o.nn import architectures, parameters
from fedcb2o.report.tables import pair_statistics

SIZES = {"east": 30, "north": 17, "south": 24, "west": 12}
ME = "tests.experiments.test_natural"
EXPERIMENT: dict[str, Any] = {
    "name": "natural",
    "seeds": [1],
    "rounds": 2,
    "data": {"name": f"{ME}:with_global"},
    "agents": {"num_clusters": 1, "benign": 3, "malicious": 1, "budget": 3},
    "model": {"name": "mlp", "hidden": [4]},
    "training": {"gamma": 0.1, "batch_size": 8, "local_epochs": 1},
    "algorithm": {"name": "fedcb2o", "alpha": 2.0, "own_model": "trusted", "mixing_factor": 1.0},
    "attack": {"name": "label_flip", "source": 1, "target": 0},
}
NUMBERS = {
    "data": {"name": f"{ME}:numbers"},
    "training": {"gamma": 0.05, "loss": "squared_error"},
    "attack": {"name": "feature_noise"},
}


def owner_data(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return two features, the class by the larger one, and owners of different sizes and means."""
    draw, owner = np.random.default_rng(seed), np.repeat(list(SIZES), list(SIZES.values()))
    place = {name: draw.normal(size=2) for name in SIZES}
    x = np.stack([place[name] + draw.normal(size=2) for name in owner]).astype(np.float32)
    return x, (x[:, 0] > x[:, 1]).astype(int), owner


def with_global() -> Dataset:
    (x, y, owner), (x_test, y_test, _) = owner_data(), owner_data(1)
    return fedcb2o.dataset(x, y, owner=owner, x_test=x_test, y_test=y_test)


def numbers() -> Dataset:
    x, _, owner = owner_data()
    return fedcb2o.dataset(x, x[:, :1] - 2 * x[:, 1:], owner=owner, numbers=True)


def mean_of_squares(outputs, targets):
    return (outputs - targets).square().mean(1)


def normed(input_shape, num_outputs) -> nn.Module:
    return nn.Sequential(
        nn.Linear(input_shape[0], 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, num_outputs)
    )


def natural(**changes: Any) -> dict[str, Any]:
    """Return the experiment with changed sections."""
    return {
        **EXPERIMENT,
        **{k: {**EXPERIMENT[k], **v} if k == "training" else v for k, v in changes.items()},
    }


def run(out, workers=1, **changes):
    return fedcb2o.run(natural(**changes), out=out, workers=workers, watch=lambda *_: None)


def last_models(done):
    theta = load_file(done.folder / "seed-1" / "checkpoint.safetensors")["models"]
    return theta[:, : done.about(1)["dim"]]


def test_agents_are_scored_on_their_own_and_on_the_global_test_samples(tmp_path):
    done, data = run(tmp_path / "run"), with_global()
    about, last = done.about(1), done.records[done.records["round"] == 2]
    assert about["names"] == sorted(SIZES)
    assert about["cluster"] == [0] * 4
    assert sum(about["malicious"]) == 1
    assert about["num_tested"] == [round(0.25 * SIZES[name]) for name in sorted(SIZES)]
    module = architectures.mlp([2], 2, hidden=[4])
    for j, theta in enumerate(last_models(done)):
        row = last.iloc[j]
        num_held = SIZES[about["names"][j]] - about["num_tested"][j]
        assert row.num_samples == (num_held if row.malicious else num_held - round(0.2 * num_held))
        parameters.bind_(module, theta.clone())
        is_right = module(data.test.x).argmax(1) == data.test.y
        own, common = (data.owners.test == k for k in (j, -1))
        if row.malicious:
            assert np.isnan(row.accuracy)
            assert np.isnan(row.global_accuracy)
        else:
            assert row.accuracy == pytest.approx(float(is_right[own].float().mean()))
            assert row.global_accuracy == pytest.approx(float(is_right[common].float().mean()))
            assert row.source_accuracy == pytest.approx(
                float(is_right[own & (data.test.y == 1)].float().mean())
            )
    summary = done.summary_of(1)
    assert summary["global_accuracy"] == pytest.approx(last.global_accuracy.mean())


def test_regression_trains_with_the_configured_loss(tmp_path):
    done, data = run(tmp_path / "run", **NUMBERS, rounds=30, evaluate_every=5), numbers()
    rows = done.records[~done.records.malicious].dropna(subset="test_loss")
    assert rows.accuracy.isna().all()
    first, last = (rows[rows["round"] == n].test_loss.mean() for n in (5, 30))
    assert last < first / 2
    module = architectures.mlp([2], 1, hidden=[4])
    final = rows[rows["round"] == 30].set_index("agent")
    for j, theta in enumerate(last_models(done)):
        if j in final.index:
            parameters.bind_(module, theta.clone())
            own = data.owners.test == j
            loss = (module(data.test.x[own]) - data.test.y[own]).square().mean()
            assert final.test_loss[j] == pytest.approx(loss.item(), rel=1e-5)
    # The criterion works on regression: an attacker with noise gets less weight than a benign peer.
    weights = done.pairs[(done.pairs.agent != done.pairs.peer) & (done.pairs["round"] > 5)]
    attacker = done.agents[done.agents.malicious].agent.iloc[0]
    weights = weights[weights.agent != attacker]
    result = weights[weights.peer == attacker].weight.mean()
    assert result < weights[weights.peer != attacker].weight.mean()


@pytest.mark.parametrize("changes", [{}, NUMBERS], ids=["classes", "numbers"])
def test_two_processes_give_the_same_results(tmp_path, changes):
    one, two = run(tmp_path / "one", **changes), run(tmp_path / "two", workers=2, **changes)
    assert torch.equal(last_models(one), last_models(two))
    for name in ("metrics.jsonl", "pairs.jsonl", "agents.json", "summary.json"):
        assert filecmp.cmp(
            one.folder / "seed-1" / name, two.folder / "seed-1" / name, shallow=False
        )


def test_reports_use_the_known_clusters_of_owners(tmp_path):
    """Without attackers the known clusters change only the reports."""
    agents = {"num_clusters": 1, "benign": 4, "malicious": 0, "budget": 3}
    clusters = [["west", "east"], ["north"], ["south"]]
    plain = run(tmp_path / "plain", agents=agents, attack=None)
    known = run(tmp_path / "known", agents={**agents, "owner_clusters": clusters}, attack=None)
    assert torch.equal(last_models(plain), last_models(known))
    assert known.about(1)["cluster"] == [0, 1, 2, 0]
    table = pair_statistics(known).set_index(["cluster", "relation"])
    result = table.available.to_dict()
    assert result == {(0, "same"): 1, (0, "other"): 2, (1, "other"): 3, (2, "other"): 3}


def test_a_user_loss_gives_the_same_models_as_the_built_in_loss(tmp_path):
    changes = {**NUMBERS, "training": {"gamma": 0.05, "loss": mean_of_squares}}
    built_in = run(tmp_path / "built-in", **NUMBERS)
    user_defined = run(tmp_path / "mine", **changes)
    assert torch.equal(last_models(built_in), last_models(user_defined))
    assert user_defined.config["training"]["loss"] == {"name": f"{ME}:mean_of_squares"}


def test_regression_with_batch_norms_and_another_optimiser(tmp_path):
    """The statistics of an agent's batch norms are computed from its own samples."""
    network = {"name": normed, "buffers": "local"}
    training = {"gamma": 0.05, "loss": "absolute_error", "optimiser": "adamw", "batch_size": 10}
    done = run(tmp_path / "run", **{**NUMBERS, "model": network, "training": training}, rounds=3)
    data, last = numbers(), done.records[done.records["round"] == 3]
    for j in last.agent[~last.malicious]:
        own = data.owners.test == j
        with torch.no_grad():
            loss = (done.model(j)(data.test.x[own]) - data.test.y[own]).abs().mean()
        assert last.set_index("agent").test_loss[j] == pytest.approx(loss.item(), rel=1e-4)
    with pytest.raises(RunError, match="has data without classes: there is no confusion matrix"):
        done.confusion(0)


@pytest.mark.usefixtures("no_figures")
def test_the_command_line_runs_reports_and_resumes(tmp_path):
    x, y, owner = owner_data()
    np.savez(tmp_path / "mine.npz", x=x, y=y, owner=owner)
    settings = natural(data={"name": "arrays", "path": "mine.npz"})
    (tmp_path / "natural.toml").write_text(tomli_w.dumps(settings))
    out = tmp_path / "run"
    done = run_cli("run", tmp_path / "natural.toml", "--data-dir", tmp_path, "--out", out)
    assert done.status == 0, done.err
    assert fedcb2o.Run(out).about(1)["names"] == sorted(SIZES)
    assert "global_accuracy" not in fedcb2o.Run(out).records
    done = run_cli("report", out, "--out", tmp_path / "report")
    assert done.status == 0, done.err
    done = run_cli(
        "run",
        tmp_path / "natural.toml",
        "--data-dir",
        tmp_path,
        "--out",
        out,
        "--set",
        "rounds=3",
        "--resume",
    )
    assert done.status == 0, done.err


@pytest.mark.usefixtures("no_figures")
def test_a_report_of_regression_shows_the_test_loss(tmp_path):
    run(tmp_path / "run", **NUMBERS)
    assert run_cli("report", tmp_path / "run", "--out", tmp_path / "report").status == 0
    compared = run_cli("compare", tmp_path / "run")
    assert "Test loss" in compared.out
    assert "Overall accuracy" not in compared.out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"agents": {**EXPERIMENT["agents"], "num_clusters": 2}, "seeds": [1]},
            "`agents.num_clusters` is for agents",
        ),
        (
            {"evaluate_on": "redrawn"},
            ("`evaluate_on` is for agents that share out a pool, .* set it to 'test'"),
        ),
        (
            {"agents": {**EXPERIMENT["agents"], "skew": "dirichlet"}},
            ("`agents.skew` is for agents .* leave it out"),
        ),
        ({"agents": {**EXPERIMENT["agents"], "benign": 9}}, "= 10, and the data have 4 owners"),
        (
            {"agents": {**EXPERIMENT["agents"], "owner_clusters": [["east"], ["north", "south"]]}},
            "`owner_clusters` leaves out 1 of 4 owners, such as 'west'",
        ),
        (
            {"agents": {**EXPERIMENT["agents"], "owner_clusters": [["east", "west"], ["west"]]}},
            "`owner_clusters` names 'west' twice",
        ),
        (
            {"agents": {**EXPERIMENT["agents"], "owner_clusters": [["east", "wst"]]}},
            "`owner_clusters` names 'wst', which is no owner of the data. Did you mean `west`?",
        ),
        (
            {"data": {"name": "digits"}},
            ("the key `agents.benign_samples` is missing: the number of samples"),
        ),
        (
            {"data": {"name": f"{ME}:numbers"}},
            ('set a loss, such as `training.loss` = "squared_error"'),
        ),
        (
            {**NUMBERS, "attack": EXPERIMENT["attack"]},
            ("`attack.source` = 1 is a class, and the data have none"),
        ),
        (
            {"training": {"loss": "squared_error"}},
            (r"the loss `squared_error` cannot compare " r"outputs of shape \(2, 2\)"),
        ),
        (
            {"training": {"loss": "squared"}},
            ("there is no loss `squared`. Did you mean `squared_error`?"),
        ),
        (
            {**NUMBERS, "agents": {**EXPERIMENT["agents"], "split": "stratified"}},
            ("`agents.split` depends on classes"),
        ),
    ],
)
def test_invalid_settings_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        run(tmp_path / "run", **changes)
    assert "\n" not in str(caught.value)


def test_the_limit_of_claimed_samples_is_the_largest_possible_count():
    """The limit is the count of the largest owner, or the configured number of samples."""
    assert prepare_seed(load(natural()), 0, with_global()).spec.max_samples == 30 - 8
    capped = {**EXPERIMENT["agents"], "benign_samples": 9, "malicious_samples": 12}
    assert prepare_seed(load(natural(agents=capped)), 0, with_global()).spec.max_samples == 12


def test_the_owners_set_the_number_of_agents_of_a_grid():
    calls = []
    flip = {"attack": EXPERIMENT["attack"], "agents": {"malicious": 1}}
    table = natural(
        agents={"budget": 2}, data={"name": lambda: calls.append(1) or with_global()},
        defences={"FedCBO": {"algorithm": {"name": "fedcbo"}}}, attacks={"Flip": flip},
    )  # fmt: skip
    table = {key: value for key, value in table.items() if key not in ("name", "attack")}
    plan = load_grid(table)
    cells = {cell.kind: cell.experiment.agents for cell in plan.cells()}
    assert (cells["cell"].benign, cells["cell"].malicious) == (3, 1)
    assert calls == [1]
    assert [len(dataset.names.owners) for _, dataset in plan.take_datasets()] == [4]


def test_the_owners_set_the_number_of_agents(tmp_path):
    agents = {"malicious": 1, "budget": 3}
    calls = []
    table = natural(agents=agents, data={"name": lambda: calls.append(1) or with_global()})
    run = fedcb2o.run(table, out=tmp_path / "counted", workers=1)
    assert calls == [1]
    assert run.config["agents"]["benign"] == 3
    expected = fedcb2o.run(EXPERIMENT, out=tmp_path / "given", workers=1)
    assert run.records.equals(expected.records)
    with pytest.raises(ConfigError, match=r"`agents.malicious` = 4, and there are 4 agents"):
        fedcb2o.run(natural(agents={**agents, "malicious": 4}), out=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"`agents.budget` must be between 1 and .* = 3, got 9"):
        fedcb2o.run(natural(agents={**agents, "budget": 9}), out=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"`agents.benign` is missing: .* .only data with owners"):
        fedcb2o.run(natural(agents=agents, data={"name": "digits"}), out=tmp_path / "none")
