"""Runs of networks with batch norms, and of adapters on a frozen base."""

import pytest
import torch
from safetensors.torch import load_file
from tests.networks import with_norms
from tests.tiny import bits_for_any_workers, tiny
from torch import nn

from fedcb2o.errors import ConfigError
from fedcb2o.experiments import load, run


class Adapter(nn.Module):
    """A frozen dense layer plus a trainable layer of low rank."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted(input_shape, num_classes, *, rank: int = 2):
    return nn.Sequential(
        nn.Flatten(), Adapter(nn.Linear(64, 32), rank), nn.ReLU(), Adapter(nn.Linear(32, 10), rank)
    )


def counting(input_shape, num_classes):
    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(64, 10)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            if self.training:
                self.calls += 1
            return super().forward(x.flatten(1))

    return Counting()


def failing(input_shape, num_classes):
    class Failing(nn.Linear):
        def forward(self, x):
            if self.training:
                raise IndexError("no such head")
            return super().forward(x.flatten(1)) * self.scale

    module = Failing(64, 10)
    module.register_buffer("scale", torch.ones(1))
    return module


SHARED = {"buffers": "shared"}


def experiment(model, **options):
    layout = "contiguous"  # fixed: a timing would choose it, and change the bits
    return tiny(model={"name": model, **options}, rounds=2, layout=layout)


@pytest.mark.parametrize("buffers", ["shared", "local", "dropped"])
def test_batch_norms_give_the_same_bits_in_one_and_two_processes(tmp_path, buffers):
    bits_for_any_workers(tmp_path, experiment(with_norms, buffers=buffers))
    models = load_file(tmp_path / "one" / "seed-1000" / "checkpoint.safetensors")["models"]
    parameters = sum(p.numel() for p in with_norms((1, 8, 8), 10).parameters())
    assert models[:, parameters + 24 * (buffers == "shared") :].eq(0).all()
    if buffers == "shared":  # the statistics differ from their initial values
        assert not models[:, :4].eq(0).any()
        assert not models[:, 4:8].eq(1).any()


def test_agents_do_not_exchange_a_frozen_base(tmp_path):
    bits_for_any_workers(tmp_path, experiment(adapted, rank=3))
    models = load_file(tmp_path / "one" / "seed-1000" / "checkpoint.safetensors")["models"]
    assert models.shape[1] == -(-3 * (64 + 32 + 32 + 10) // 16) * 16


def test_local_statistics_are_the_default():
    explicit, default, shared = (
        load(experiment(with_norms, **options)) for options in ({"buffers": "local"}, {}, SHARED)
    )
    assert explicit.fingerprint(0) == default.fingerprint(0) != shared.fingerprint(0)
    message = r"`model\.buffers`: input should be 'shared', 'local' or 'dropped'"
    with pytest.raises(ConfigError, match=message):
        load(experiment(with_norms, buffers="mixed"))


def test_a_buffer_that_changes_in_training_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="counting` changes its buffer `calls` in training"):
        run(experiment(counting), out=tmp_path)


def test_a_network_that_fails_in_training_is_refused_before_the_run(tmp_path):
    message = r"the model `.*failing` failed at line .*: IndexError: no such head"
    with pytest.raises(ConfigError, match=message):
        run(experiment(failing), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_batch_norm_never_trains_on_a_single_sample(tmp_path):
    settings = tiny(
        model={"name": with_norms},
        agents={"benign_samples": 21},
        training={"batch_size": 16},
        rounds=1,
    )
    # 17 training samples in one batch
    assert run(settings, out=tmp_path / "left").records.train_loss.notna().all()
    message = r"`training\.batch_size` must be 2 or more, got 1: the model's batch norms"
    with pytest.raises(ConfigError, match=message):
        run(
            {**settings, "training": {**settings["training"], "batch_size": 1}},
            out=tmp_path / "single",
        )


def test_a_network_instead_of_a_function_is_refused(tmp_path):
    message = r"`model\.name` must be a function .input_shape, num_classes. that builds"
    with pytest.raises(ConfigError, match=message):
        run(tiny(model={"name": with_norms((1, 8, 8), 10)}), out=tmp_path / "run")
