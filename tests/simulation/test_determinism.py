"""Equal seeds and settings give equal bits, for any number of workers and interruptions."""

import functools

import numpy as np
import pytest
from safetensors.torch import load_file
from tests.agents import ALL_GUARDS
from tests.simulated_device import assume_fast_bfloat16
from tests.tiny import StopError, bits, lines_of, stop_after, tiny
from torch import nn

import fedcb2o
from fedcb2o.experiments import run


def with_dropout(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, classes))


VARIANTS = {
    "fedcb2o": tiny(agents={"participation": 0.7}),
    "convolutions": tiny(
        rounds=2, model={"name": "cnn", "hidden": 4}, algorithm={"criterion": "average_loss"}
    ),
    "all guards": tiny(algorithm={"own_model": "judged", "beta": 0.6, "guards": ALL_GUARDS}),
    "dropout": tiny(model={"name": with_dropout}, agents={"initialisation": "independent"}),
    # Large enough that each agent is one task and mixing has several tiles.
    "large": tiny(rounds=2, model={"hidden": [2000]}, training={"precision": "bfloat16"}),
    "onednn": tiny(rounds=2, linear="onednn", model={"hidden": [1100, 1000]}),
}


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory):
    """Run every variant with one worker and with two."""
    folder = tmp_path_factory.mktemp("workers")
    with pytest.MonkeyPatch.context() as patched:
        assume_fast_bfloat16(patched)
        for workers in (1, 2):
            for variant, experiment in VARIANTS.items():
                run(experiment, out=folder / f"{variant}-{workers}", workers=workers)
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_number_of_workers_changes_no_bit(runs_folder, variant):
    assert bits(runs_folder / f"{variant}-2") == bits(runs_folder / f"{variant}-1")


@functools.cache
def whole_bits(folder, checkpoint_every):
    """Return the bits of eight rounds without an interruption."""
    experiment = {**VARIANTS["fedcb2o"], "rounds": 8, "checkpoint_every": checkpoint_every}
    run(experiment, out=folder / f"whole-{checkpoint_every}", workers=1)
    return bits(folder / f"whole-{checkpoint_every}")


@pytest.mark.parametrize(
    ("checkpoint_every", "first", "second"), [(1, 1, 1), (3, 1, 1), (3, 1, 2), (3, 2, 1)]
)
def test_an_interruption_changes_no_bit(tmp_path, checkpoint_every, first, second):
    experiment = {**VARIANTS["fedcb2o"], "rounds": 8, "checkpoint_every": checkpoint_every}
    for rounds in (2, 4, 7):  # before the first three-round checkpoint, at one, and after one
        with pytest.raises(StopError):
            run(
                experiment,
                out=tmp_path / "parts",
                workers=first,
                resume=rounds > 2,
                watch=stop_after(rounds),
            )
    run(experiment, out=tmp_path / "parts", workers=second, resume=True)
    assert bits(tmp_path / "parts") == whole_bits(tmp_path.parent, checkpoint_every)


def test_other_seeds_of_the_run_change_no_bit(tmp_path):
    run(tiny(), out=tmp_path / "alone", seeds=[1001], workers=1)
    run(tiny(), out=tmp_path / "both", seeds=[1000, 1001], workers=1)
    single_seed, two_seeds = bits(tmp_path / "alone", 1001), bits(tmp_path / "both", 1001)
    del single_seed["config.toml"], two_seeds["config.toml"]
    assert two_seeds == single_seed
    assert bits(tmp_path / "both")["checkpoint models"] != two_seeds["checkpoint models"]


def test_intervals_of_evaluation_and_checkpoints_change_no_model(tmp_path):
    run(tiny(rounds=4), out=tmp_path / "often", workers=1)
    run(tiny(rounds=4, evaluate_every=3, checkpoint_every=3), out=tmp_path / "seldom", workers=1)
    often, seldom = bits(tmp_path / "often"), bits(tmp_path / "seldom")
    for name in ("checkpoint models", "checkpoint likelihood", "pairs.jsonl"):
        assert seldom[name] == often[name]
    lines = lines_of(tmp_path / "seldom", "metrics")
    assert [line["round"] for line in lines if "accuracy" in line] == [3, 4]


def test_a_finished_run_can_be_extended(tmp_path):
    run(tiny(rounds=2), out=tmp_path / "further", workers=1)
    run(tiny(rounds=4), out=tmp_path / "further", workers=1, resume=True)
    run(tiny(rounds=4), out=tmp_path / "at once", workers=1)
    assert bits(tmp_path / "further") == bits(tmp_path / "at once")


def test_the_clean_twin_has_the_same_samples_and_first_losses(tmp_path):
    attacked = run(tiny(rounds=1), out=tmp_path / "attacked", workers=1)
    clean = run(
        tiny(rounds=1, agents={"malicious_role": "clean"}), out=tmp_path / "clean", workers=1
    )
    assert clean.about(1000) == attacked.about(1000)
    first, second = (
        {"train": r.records["train_loss"][~r.agents["malicious"]].tolist()}
        for r in (attacked, clean)
    )
    assert first == second
    models = [
        load_file(tmp_path / name / "seed-1000/checkpoint.safetensors")["models"]
        for name in ("attacked", "clean")
    ]
    assert not models[0].equal(models[1])


# Many agents with the smallest model

MANY = 800


def points(*, samples: int) -> fedcb2o.Dataset:
    draw = np.random.default_rng(0)
    y = draw.integers(3, size=samples + 30)
    x = draw.normal(size=(3, 4))[y] + draw.normal(size=(len(y), 4))
    return fedcb2o.dataset(x[30:], y[30:], x_test=x[:30], y_test=y[:30])


def large_experiment(num: int, **changes):
    """Return an experiment of `num` agents with the smallest model, 30% malicious."""
    agents = {"num_clusters": 1, "benign": num * 7 // 10, "malicious": num * 3 // 10, "budget": 4}
    agents |= {"benign_samples": 5, "malicious_samples": 4}
    settings = {
        "data": {"name": points, "samples": 5 * num},
        "agents": agents,
        "rounds": 2,
        "evaluate_every": 9,
    }
    settings |= {
        "model": {"name": "logistic"},
        "attack": {"name": "label_flip", "source": 1, "target": 2},
    }
    return tiny(**{**settings, **changes})


@pytest.fixture(scope="module")
def large_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crowd")
    run(large_experiment(MANY), out=folder, workers=1)
    return folder


def test_two_processes_compute_the_bits_of_one(large_run, tmp_path):
    fedcb2o.run(large_experiment(MANY), out=tmp_path, workers=2)
    assert bits(tmp_path) == bits(large_run)


def test_a_large_run_continues_from_its_checkpoint(large_run, tmp_path):
    fedcb2o.run(large_experiment(MANY, rounds=1), out=tmp_path, workers=1)
    fedcb2o.run(large_experiment(MANY), out=tmp_path, workers=1, resume=True)
    resumed, expected = (
        load_file(folder / "seed-1000/checkpoint.safetensors") for folder in (tmp_path, large_run)
    )
    assert all(
        tensor.numpy().tobytes() == expected[name].numpy().tobytes()
        for name, tensor in resumed.items()
    )
