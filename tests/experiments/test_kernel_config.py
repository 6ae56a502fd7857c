"""Kernels of a run: as configured, or chosen to fit in memory, and shown by --verbose."""

import pytest
import torch
from tests.tiny import run_cli, tiny, write

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments import run
from fedcb2o.experiments.config import datasets, loading, prepared_seed
from fedcb2o.experiments.runs._kernel_config import choose_kernels
from fedcb2o.kernels import _autotune, _onednn, devices

IMAGES = {"name": "cnn", "hidden": 4}


def test_unfolded_convolution_is_chosen_only_if_its_patches_fit_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "resolve_device", lambda _: torch.device("meta"))
    monkeypatch.setattr(_autotune, "fastest_batched_convolution", lambda *_: "unfolded")
    monkeypatch.setattr(
        devices, "max_batched_agents", lambda *arguments: 2 if arguments[-1] == "unfolded" else 5
    )
    for together, expected in ((None, ("unfolded", 2)), (2, ("unfolded", 2)), (4, ("grouped", 4))):
        changes = {} if together is None else {"together": together}
        experiment = loading.load(tiny(model=IMAGES, device="meta", **changes))
        prepared = prepared_seed.prepare_seed(
            experiment, 1000, datasets.load_dataset(experiment, None)
        )
        chosen = choose_kernels(tmp_path, prepared)
        assert (chosen["convolution"], chosen["together"]) == expected


def test_onednn_is_an_error_if_pytorch_lacks_it(tmp_path, monkeypatch):
    monkeypatch.setattr(_onednn, "is_available", lambda: False)
    with pytest.raises(RunError, match="needs oneDNN, which this PyTorch lacks"):
        run(tiny(linear="onednn"), out=tmp_path / "run", workers=1)


def test_an_unknown_convolution_is_an_error():
    with pytest.raises(
        ConfigError,
        match=(
            "`convolution`: input should be 'grouped', 'unfolded', 'mixed' or 'fourier', got "
            "'winograd'"
        ),
    ):
        run(tiny(convolution="winograd"))


def test_verbose_shows_the_chosen_kernels(tmp_path):
    path = write(tmp_path / "tiny.toml", rounds=1)
    done = run_cli("run", path, "--out", tmp_path / "run", "--workers", 1, "--verbose")
    assert "tiny seed 1000: processes 1, large dense layers by torch" in done.err
    path = write(path, rounds=1, model=IMAGES, together=3, convolution="unfolded")
    done = run_cli("run", path, "--out", tmp_path / "more", "--workers", 1, "--verbose")
    message = "tiny seed 1000: processes 1, 3 agents at once, convolutions unfolded, large dense layers by torch"
    assert message in done.err
    path = write(path, rounds=1, model=IMAGES, convolution="fourier")
    done = run_cli("run", path, "--out", tmp_path / "spectra", "--workers", 1, "--verbose")
    assert (
        "tiny seed 1000: processes 1, convolutions fourier, large dense layers by torch" in done.err
    )
