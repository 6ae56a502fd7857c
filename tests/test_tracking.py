"""Trackers: the readers of TensorBoard and MLflow return the values of the records."""

import re
import sys

import pytest

import fedcb2o
from fedcb2o.cli import completion
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.records import read_lines
from fedcb2o.tracking import round_scalars, sync, trackers
from tests.tiny import StopError, run_cli, stop_after, tiny, write

LINE = {
    "round": 3,
    "train_loss": [1.0, 2.0, 9.0],
    "malicious_weight": [0.2, None, None],
    "accuracy": [0.5, 0.9, None],
    "attack_success_rate": [0.1, 0.3, None],
    "source_accuracy": [None, None, None],
}


def test_round_scalars_are_of_benign_agents():
    assert list(round_scalars(LINE, [False, False, True])) == [
        (3, "train_loss/mean", 1.5),
        (3, "malicious_weight/mean", 0.2),
        (3, "accuracy/mean", 0.7),
        (3, "accuracy/worst", 0.5),
        (3, "accuracy/worst_tenth", 0.5),
        (3, "attack_success_rate/mean", pytest.approx(0.2)),
        (3, "attack_success_rate/worst", 0.3),
        (3, "attack_success_rate/worst_tenth", 0.3),
    ]


def scalars(folder):
    """Return {(name, round): value} of a folder, as TensorBoard reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    points = [
        (tag, event.step, event.value)
        for tag in events.Tags()["scalars"]
        for event in events.Scalars(tag)
    ]
    assert len({(tag, step) for tag, step, _ in points}) == len(points)
    return {(tag, step): value for tag, step, value in points}


def metrics(uri):
    """Return {name of MLflow's run: ({(name, round): value}, params, status)} of a database."""
    from mlflow import MlflowClient

    client, results = MlflowClient(uri), {}
    for run in client.search_runs([item.experiment_id for item in client.search_experiments()]):
        histories = [
            m for key in run.data.metrics for m in client.get_metric_history(run.info.run_id, key)
        ]
        numbers = {(item.key, item.step): item.value for item in histories}
        assert len(numbers) == len(histories)
        assert run.info.run_name not in results
        results[run.info.run_name] = numbers, run.data.params, run.info.status
    return results


def expected(run, seed):
    """Return {(name, round): value} of a seed, from its records."""
    malicious = run.about(seed)["malicious"]
    lines = [line for _, line in read_lines(run.folder / f"seed-{seed}" / "metrics.jsonl")]
    return {(name, n): value for line in lines for n, name, value in round_scalars(line, malicious)}


def approx_float32(numbers):
    return pytest.approx(numbers, rel=1e-6)  # TensorBoard has float32


def test_tensorboard_has_all_rounds_after_a_stop_and_a_resume(tmp_path):
    out, experiment = tmp_path / "mine", tiny(seeds=[5, 7], rounds=4, checkpoint_every=3)
    with pytest.raises(StopError):
        fedcb2o.run(experiment, out=out, workers=1, track="tensorboard", watch=stop_after(2))
    assert set(scalars(out / "tensorboard/seed-5")) == set(expected(fedcb2o.Run(out), 5))
    run = fedcb2o.run(experiment, out=out, workers=1, track="tensorboard", resume=True)
    for seed in (5, 7):
        events = scalars(out / f"tensorboard/seed-{seed}")
        assert events == approx_float32(expected(run, seed))
        assert {n for _, n in events} == {1, 2, 3, 4}
    assert events["accuracy/mean", 4] == pytest.approx(run.summary_of(7)["accuracy"])
    run.check()
    extended = fedcb2o.run(
        {**experiment, "rounds": 5}, out=out, workers=1, track="tensorboard", resume=True
    )
    assert scalars(out / "tensorboard/seed-5") == approx_float32(expected(extended, 5))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow and its dependencies
def test_mlflow_has_every_round_once_after_a_stop_and_a_resume(tmp_path):
    out, experiment = tmp_path / "mine", tiny(seeds=[5, 7], rounds=3)
    with pytest.raises(StopError):
        fedcb2o.run(experiment, out=out, workers=1, track=["mlflow"], watch=stop_after(2))
    uri = f"sqlite:///{out / 'mlflow.db'}"
    assert [(name, status) for name, (_, _, status) in metrics(uri).items()] == [
        ("mine seed 5", "KILLED")
    ]
    run = fedcb2o.run(experiment, out=out, workers=1, track=["mlflow"], resume=True)
    fedcb2o.track(out, "mlflow")
    results = metrics(uri)
    assert set(results) == {"mine seed 5", "mine seed 7"}
    for seed in (5, 7):
        numbers, params, status = results[f"mine seed {seed}"]
        assert numbers == approx_float32(expected(run, seed))
        result = (params["agents.budget"], params["algorithm.name"], params["seed"])
        assert result == ("3", "fedcb2o", str(seed))
        assert status == "FINISHED"
    assert not list(tmp_path.glob("mlruns"))
    other = fedcb2o.run(tiny(rounds=1, training={"gamma": 0.06}), out=tmp_path / "other", workers=1)
    assert run_cli("track", other.folder, "--to", f"mlflow={uri}").status == 0
    assert metrics(uri)["other seed 1000"][0] == approx_float32(expected(other, 1000))
    assert not list(other.folder.glob("mlflow.db"))


def test_the_command_copies_a_finished_run_to_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "tiny.toml", rounds=2)
    for name, gamma in (("a", 0.05), ("b", 0.06)):
        assert (
            run_cli("run", path, "--out", f"{name}/mine", "--set", f"training.gamma={gamma}").status
            == 0
        )
    run = fedcb2o.Run("a/mine")
    assert run_cli("track", "a/mine", "--to", "tensorboard=logs").status == 0
    assert run_cli("track", "a/mine", "--to", "tensorboard=logs").status == 0
    assert scalars("logs/mine/seed-1000") == approx_float32(expected(run, 1000))
    assert len(list((tmp_path / "logs/mine/seed-1000").glob("*tfevents*"))) == 1
    line = run_cli("track", "b/mine", "--to", "tensorboard=logs").one_line()
    assert (
        line
        == "logs/mine/seed-1000 holds the events of another run: name another folder, tensorboard=DIR"
    )


def test_a_grid_tracks_each_cell_and_baseline(tmp_path):
    shared = {
        key: value
        for key, value in tiny(rounds=1).items()
        if key not in ("name", "attack", "algorithm")
    }
    grid = {
        **shared,
        "name": "small",
        "attacks": {"Flip": {"attack": {"name": "label_flip", "source": 9, "target": 4}}},
        "defences": {"Alone": {"algorithm": {"name": "local_training"}}},
    }
    done = fedcb2o.bench(grid, out=tmp_path / "grid", jobs=1, track="tensorboard")
    assert not done.failed
    folders = {path.parent.relative_to(done.folder) for path in done.folder.rglob("*tfevents*")}
    runs = {path.parent.relative_to(done.folder) for path in done.folder.rglob("agents.json")}
    assert folders == {"tensorboard" / path for path in runs}
    assert len(folders) == 3
    for path in runs:
        assert scalars(done.folder / "tensorboard" / path) == approx_float32(
            expected(fedcb2o.Run(done.folder / path.parent), 1000)
        )


@pytest.mark.parametrize(
    ("target", "line"),
    [
        (
            "tensorbord",
            "there is no tracker 'tensorbord'. Did you mean `tensorboard`? The trackers are",
        ),
        ("mlflow=", "'mlflow=' needs a location after the sign =, or neither"),
    ],
)
def test_a_wrong_tracker_is_refused_before_the_run(tmp_path, target, line):
    path, out = write(tmp_path / "tiny.toml"), tmp_path / "run"
    assert run_cli("run", path, "--out", out, "--track", target).one_line().startswith(line)
    assert not out.exists()


def test_completion_offers_every_tracker():
    assert completion.trackers("") == [*trackers.REQUIRED_MODULES]


def test_a_missing_target_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no tracker to copy to"):
        fedcb2o.track(fedcb2o.run(tiny(rounds=1), out=tmp_path).folder, [])


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == "alembic" else sys)
    assert (
        trackers.validate_targets("tensorboard")
        == trackers.validate_targets(["tensorboard"] * 2)
        == ("tensorboard",)
    )
    message = (
        "mlflow needs an extra, and its module alembic is missing: pip install 'fedcb2o[mlflow]'"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        trackers.validate_targets("mlflow")


def test_a_run_continues_without_a_failed_tracker(tmp_path, monkeypatch, caplog):
    class Broken:
        def begin(self, place):
            raise OSError("the server has gone")

    monkeypatch.setattr(sync, "open_writer", lambda target, root: Broken())
    run = fedcb2o.run(tiny(rounds=1), out=tmp_path / "run", workers=1, track="tensorboard")
    assert run.complete
    log = caplog.text
    assert "by tensorboard (OSError: the server has gone): make it reachable" in log
    assert f"The run goes on; `fedcb2o track {run.folder} --to tensorboard` copies the rest." in log
    with pytest.raises(RunError, match="the server has gone"):
        fedcb2o.track(run.folder, "tensorboard")
    with pytest.raises(RunError, match="there is no run in"):
        fedcb2o.track(tmp_path / "nowhere", "tensorboard")


def test_the_telemetry_of_mlflow_is_disabled():
    import mlflow.telemetry.utils

    import fedcb2o.tracking.mlflow  # noqa: F401

    assert mlflow.telemetry.utils.is_telemetry_disabled()
