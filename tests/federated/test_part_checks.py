"""Checks of custom losses and optimisers: errors name the part and its fault."""

import copy
import functools
import importlib
import re

import pytest
import torch
from tests.tiny import tiny
from torch import nn
from torch.nn import functional as F

from fedcb2o.data import Shard
from fedcb2o.errors import ConfigError
from fedcb2o.experiments import run
from fedcb2o.federated import losses, optimisers, part_checks, plugin_outputs
from fedcb2o.federated.local_update import local_update_
from fedcb2o.federated.part_checks import check_loss, check_optimiser
from fedcb2o.federated.run_spec import Training
from fedcb2o.nn import parameters
from fedcb2o.rng import stream

OUTPUTS = torch.tensor([[0.3, -1.0, 0.5], [1.2, 0.4, -0.7]])
LABELS = torch.tensor([2, 0])
NUMBERS = torch.tensor([1.5, -2.0])


def first_output(outputs):
    return outputs[:, :1]


GOOD_LOSSES = {
    "cross-entropy": (lambda o, y: F.cross_entropy(o, y, reduction="none"), OUTPUTS, LABELS),
    "module": (nn.CrossEntropyLoss(reduction="none"), OUTPUTS, LABELS),
    "squared": (lambda o, y: (o.squeeze(1) - y).square(), first_output(OUTPUTS), NUMBERS),
    "built in": (losses.huber, first_output(OUTPUTS), NUMBERS),
    "in place": (lambda o, y: o.squeeze(1).sub_(y).square(), first_output(OUTPUTS), NUMBERS),
    "probabilities": (
        lambda o, y: F.binary_cross_entropy(o, y.float(), reduction="none").mean(1),
        OUTPUTS.sigmoid(),
        torch.tensor([[1, 0, 1], [0, 0, 1]]),
    ),
    "margin": (lambda o, y: (3.0 - o.squeeze(1) * y.sign()).relu(), first_output(OUTPUTS), NUMBERS),
    "tolerance": (
        lambda o, y: ((o.squeeze(1) - y).abs() - 9.0).relu(),
        first_output(OUTPUTS),
        NUMBERS,
    ),  # the gradient is 0 for these outputs and not for others
    "infinite": (lambda o, y: -o.softmax(1)[:, 0].sub(0.9).relu().log(), OUTPUTS, LABELS),
}


@pytest.mark.parametrize("name", GOOD_LOSSES)
def test_valid_losses_pass(name):
    loss, outputs, targets = GOOD_LOSSES[name]
    check_loss("own", loss, outputs, targets)


def writes_into_targets(outputs, targets):
    return targets.sub_(outputs.squeeze(1)).square()


BAD_LOSSES = {
    "broadcasts": (
        lambda o, y: (first_output(o) - y).square().mean(1),
        NUMBERS,
        r"depends on other samples.* two samples have the losses 3\.365, .* together and 1\.44, ",
    ),
    "mean": (lambda o, y: F.cross_entropy(o, y).expand(len(o)), LABELS, "depends on other samples"),
    "standardises": (
        lambda o, y: F.cross_entropy(o - o.mean(0), y, reduction="none"),
        LABELS,
        "depends on other samples",
    ),
    "reduced": (F.cross_entropy, LABELS, r'returned shape \(\) for 2 samples, .*reduction="none"'),
    "summed": (
        lambda o, y: F.cross_entropy(o, y, reduction="sum"),
        LABELS,
        r"returned shape \(\) for 2 samples",
    ),
    "of each number": (lambda o, y: o.square(), LABELS, r"returned shape \(2, 3\) for 2 samples"),
    "integers": (
        lambda o, y: (o.argmax(1) != y).long(),
        LABELS,
        r"returned numbers of type torch\.int64 for 2 samples",
    ),
    "counts": (lambda o, y: (o.argmax(1) != y).float(), LABELS, "`own` has no gradient"),
    "detached": (
        lambda o, y: F.cross_entropy(o.detach(), y, reduction="none").requires_grad_(),
        LABELS,
        "`own` has no gradient",
    ),
    "rounds": (
        lambda o, y: (o.round().sum(1) - y).square(),
        NUMBERS,
        "`own` has gradient 0, so that nothing trains",
    ),
    "random": (
        lambda o, y: F.cross_entropy(o + torch.randn_like(o), y, reduction="none"),
        LABELS,
        "draws random numbers or keeps state",
    ),
    "not a number": (
        lambda o, y: first_output(o).squeeze(1).log() - y,
        -NUMBERS,
        "`own` is NaN for outputs",
    ),
    "writes": (writes_into_targets, NUMBERS, "`own` writes into the targets"),
    "other shapes": (
        lambda o, y: F.mse_loss(o, y, reduction="none"),
        NUMBERS,
        r"cannot compare outputs of shape \(2, 3\) .* with targets of shape \(2,\)",
    ),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", BAD_LOSSES)
def test_invalid_losses_are_refused_or_reported(name):
    loss, targets, message = BAD_LOSSES[name]
    outputs = OUTPUTS
    if name in ("not a number", "writes"):
        outputs = first_output(OUTPUTS) - 1.0
    expected = pytest.raises(ConfigError, match=message)
    if message.startswith("depends"):
        expected = pytest.warns(UserWarning, match=message)
    with expected:
        check_loss("own", loss, outputs, targets.clone())


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_label_smoothing_must_be_between_0_and_1(tmp_path, share):
    table = tiny(training={"loss": {"name": "cross_entropy", "label_smoothing": share}})
    message = rf"^`label_smoothing` of the loss cross_entropy must be between 0 and 1, got {share}$"
    with pytest.raises(ConfigError, match=message):
        run(table, out=tmp_path / "run")


def step_scheduler(parameters, lr):
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(parameters, lr=lr), 1)


def plateau_scheduler(parameters, lr):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(parameters, lr=lr))


class Idle:
    def __init__(self, parameters, lr):
        self.parameters = parameters

    def step(self):
        pass


class Plain(Idle):
    """Gradient descent without PyTorch's classes."""

    def step(self):
        with torch.no_grad():
            for p in self.parameters:
                p -= 0.1 * p.grad


NETWORK = parameters.initialise(lambda: nn.Linear(3, 2), stream(0, "model"))


@pytest.mark.parametrize(
    "optimiser",
    [
        optimisers.adamw,
        Plain,
        lambda p, lr: torch.optim.Adam(p, lr=lr, fused=True),
        lambda p, lr: torch.optim.SGD([{"params": p[:1], "lr": 0.1}, {"params": p[1:]}], lr=lr),
    ],
    ids=["adamw", "plain", "fused", "groups"],
)
def test_optimisers_that_train_pass(optimiser):
    before = parameters.flatten(NETWORK)
    check_optimiser(optimiser, NETWORK, 0.1)
    assert parameters.flatten(NETWORK).equal(before)


@functools.cache
def shared_optimiser() -> torch.optim.Optimizer:
    """Return one optimiser for all calls; a function, because the first optimiser is slow."""
    return torch.optim.SGD(NETWORK.parameters(), lr=0.1)


BAD_OPTIMISERS = {
    "scheduler": (
        step_scheduler,
        "returned a StepLR, whose step changes no parameter: .* scheduler",
    ),
    "plateau": (
        plateau_scheduler,
        "returned a ReduceLROnPlateau, whose step needs the argument `metrics`",
    ),
    "closure": (
        lambda p, lr: torch.optim.LBFGS(p, lr=lr),
        "returned a LBFGS, whose step needs the argument `closure`",
    ),
    "copies": (
        lambda p, lr: torch.optim.SGD(copy.deepcopy(p), lr=lr),
        "returned a SGD over other tensors than the parameters",
    ),
    "part": (
        lambda p, lr: torch.optim.SGD(p[1:], lr=lr),
        r"returned a SGD without 1 of 2 parameters, such as one of shape \(2, 3\): .* requires_grad_",
    ),
    "of another call": (
        lambda p, lr: shared_optimiser(),
        "returned a SGD over other tensors .* make a new one over `parameters`",
    ),
    "idle": (Idle, "returned a Idle, whose step changes no parameter"),
    "sparse": (lambda p, lr: torch.optim.SparseAdam(p, lr=lr), "failed: RuntimeError: SparseAdam"),
    "function": (lambda p, lr: torch.optim.SGD, "returned a type, whose step needs the argument"),
}


@pytest.mark.parametrize("name", BAD_OPTIMISERS)
def test_optimisers_that_train_nothing_are_refused(name):
    optimiser, message = BAD_OPTIMISERS[name]
    with pytest.raises(ConfigError, match=message):
        check_optimiser(optimiser, NETWORK, 0.1)


def zero_rate(parameters, lr):
    return torch.optim.SGD(parameters, lr=0.0)


@pytest.mark.parametrize(
    ("training", "messages"),
    [
        ({"optimiser": zero_rate}, ["has learning rate 0", "training changed no model in round 1"]),
        ({"gamma": 1e-30}, ["training changed no model in round 1"]),
        ({}, []),
    ],
    ids=["rate", "tiny", "usual"],
)
def test_training_that_changes_no_model_is_logged(tmp_path, caplog, training, messages):
    result = run(tiny(training=training, rounds=2), out=tmp_path / "run", workers=1)
    assert len(result.records)
    logged = [record.message for record in caplog.records if record.name.startswith("fedcb2o")]
    assert len(logged) == len(messages)
    for text, message in zip(logged, messages, strict=True):
        assert message in text


@pytest.mark.parametrize("optimiser", [None, optimisers.adamw])
@pytest.mark.parametrize("functional", [False, True])
def test_sparse_gradients_of_an_embedding_train_like_dense_ones(functional, optimiser):
    class Tokens(nn.Module):
        def __init__(self, sparse):
            super().__init__()
            self.embed = nn.Embedding(5, 3, sparse=sparse and not functional)
            self.head = nn.Linear(3, 2)
            self.sparse = sparse

        def forward(self, x):
            h = F.embedding(x.long(), self.embed.weight, sparse=self.sparse)
            return self.head((h if functional else self.embed(x.long())).mean(1))

    shard = Shard(torch.tensor([[0.0, 1.0], [2.0, 1.0], [4.0, 4.0]]), torch.tensor([0, 1, 1]))
    training = Training(gamma=0.1, momentum=0.9, batch_size=2, local_epochs=3, optimiser=optimiser)
    models = []
    for sparse in (True, False):
        module = parameters.initialise(lambda s=sparse: Tokens(s), stream(0, "model"))
        theta = parameters.flatten(module)
        before = theta.clone()
        local_update_(theta, module, shard, training, stream(0, "batches"))
        models.append(theta)
    torch.testing.assert_close(*models)
    assert not models[0].equal(before)


def _checks_in_the_table():
    rows = re.findall(r"^\| [\w ,-]+ \| [\w ]+ \| `([\w.]+)` \|", part_checks.__doc__, re.MULTILINE)
    return [name.removeprefix("plugin_outputs.") for name in rows]


def test_the_table_of_checks_names_each_check_of_users_functions():
    checks = [
        name
        for module in (part_checks, plugin_outputs)
        for name, function in vars(module).items()
        if getattr(function, "__module__", "") == module.__name__
        and name.startswith(("check_", "validated_", "metric_value", "apply_"))
    ]
    assert sorted(checks) == sorted(name for name in _checks_in_the_table() if "." not in name)


@pytest.mark.parametrize("name", [name for name in _checks_in_the_table() if "." in name])
def test_the_table_of_checks_names_existing_functions_of_other_modules(name):
    module, function = name.split(".")
    packages = {"datasets": "experiments.config", "changed_samples": "data"}
    path = f"fedcb2o.{packages.get(module, 'federated')}.{module}"
    assert callable(getattr(importlib.import_module(path), function))
