"""The model of the round with the lowest validation loss, by the key `keep_best`."""

import numpy as np
import pandas as pd
import pytest
import torch
from tests.tiny import tiny
from torch.nn import functional as F

import fedcb2o
from fedcb2o.data import features
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments import load
from fedcb2o.experiments.config.datasets import load_dataset
from fedcb2o.experiments.config.prepared_seed import prepare_seed
from fedcb2o.report import compare

# From round 2 on, steps are so large that models become worse.
WORSE = {"schedule": {"name": "StepLR", "step_size": 1, "gamma": 30.0}, "gamma": 0.02}


def settings(rounds, **changes):
    return tiny(rounds=rounds, keep_best=True, training=WORSE, **changes)


def run(table, out, **options):
    return fedcb2o.run(table, out=out, watch=lambda *_: None, workers=1, **options)


def validation_loss(module, done, agent):
    """Compute the loss of a model on the agent's validation samples."""
    experiment = load(done.config)
    dataset = load_dataset(experiment, None)
    prepared = prepare_seed(experiment, done.seeds[0], dataset)
    data = prepared.build_agent_data([agent], torch.device("cpu"))
    x, y = data.gather(np.zeros(1, np.int64), data.validation)
    with torch.no_grad():
        return float(F.cross_entropy(module(features(x[0])), y[0]))


def test_the_kept_model_is_that_of_the_round_with_the_lowest_validation_loss(tmp_path):
    done = run(settings(3), tmp_path / "three")
    best = done.best_rounds()
    benign = np.flatnonzero(~done.agents.malicious)
    assert best.agent.tolist() == benign.tolist()
    assert best["round"].min() < 3
    # A run of as many rounds ends with the same model.
    for agent, n in zip(best.agent[:3], best["round"][:3], strict=True):
        short = run(tiny(rounds=int(n), training=WORSE), tmp_path / f"{agent}")
        kept = done.model(agent, best=True)
        for mine, other in zip(kept.parameters(), short.model(agent).parameters(), strict=True):
            assert mine.equal(other)
        expected = best.validation_loss[best.agent == agent].item()
        assert validation_loss(kept, done, agent) == pytest.approx(expected, rel=1e-5)
        assert validation_loss(done.model(agent), done, agent) >= expected
    attacker = int(np.flatnonzero(done.agents.malicious)[0])
    with pytest.raises(RunError, match="has no validation samples, and no best model"):
        done.model(attacker, best=True)


def test_a_comparison_has_the_accuracy_of_the_best_round_beside_the_last(tmp_path):
    training = {**WORSE, "gamma": 0.2}
    done = run(tiny(rounds=3, keep_best=True, training=training), tmp_path)
    label = "Accuracy, round of the lowest validation loss"
    benign = np.flatnonzero(~done.agents.malicious)
    best = [
        done.records.query("agent == @row.agent and round == @row.round").accuracy.item()
        for row in done.best_rounds().itertuples()
    ]
    assert len(best) == len(benign)
    table = compare([done])
    assert table.loc[label].item() == f"{100 * np.mean(best):.1f}"
    assert table.loc[label].item() != table.loc["Overall accuracy"].item()


def test_a_resumed_run_keeps_the_same_models(tmp_path):
    whole = run(settings(3), tmp_path / "whole")
    run(settings(1), tmp_path / "parts")
    parts = run(settings(3), tmp_path / "parts", resume=True)
    pd.testing.assert_frame_equal(whole.best_rounds(), parts.best_rounds())
    seed = whole.seeds[0]
    mine, other = whole.best_models(seed)["models"], parts.best_models(seed)["models"]
    assert np.array_equal(mine, other)
    pd.testing.assert_frame_equal(whole.records, run(tiny(rounds=3, training=WORSE), tmp_path / "plain").records)  # fmt: skip


def test_samples_that_train_cannot_choose_a_round(tmp_path):
    agents = {**tiny()["agents"], "hold_out": False}
    with pytest.raises(ConfigError, match="leave `hold_out` out"):
        run(settings(1, agents=agents), tmp_path / "run")
    recommended = fedcb2o.load("digits-fedassay").model_dump(exclude_unset=True)
    del recommended["agents"]["hold_out"], recommended["agents"]["validation"]
    assert not load(recommended).agents.hold_out
    assert load({**recommended, "keep_best": True}).agents.hold_out
    with pytest.raises(RunError, match="run it with `keep_best` = true"):
        run(tiny(rounds=1), tmp_path / "plain").best_rounds()
