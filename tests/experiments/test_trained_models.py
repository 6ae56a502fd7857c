"""Networks and confusion matrices of a finished run; user optimisers and metrics."""

import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score
from tests.networks import with_norms
from tests.tiny import empty_models, tiny
from torch import nn

import fedcb2o
from fedcb2o.data import Shard, digits, features, rotate
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments import load, run
from fedcb2o.federated.local_update import local_update_
from fedcb2o.federated.optimisers import adamw
from fedcb2o.federated.run_spec import Training
from fedcb2o.nn import architectures, parameters
from fedcb2o.rng import stream


def share_of_nines(outputs, targets, *, times: float = 1.0):
    targets[targets != 9] = 0  # a copy, which others do not see
    return times * (targets == 9).float().mean()


def undefined(outputs, targets):
    return float("nan")


def a_word(outputs, targets):
    return "good"


def of_one(confusion):
    return 1.0


def heavy(parameters, lr, *, momentum: float):
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=True)


def nothing(parameters, lr):
    return None


def failing(parameters, lr):
    return torch.optim.LBFGS(parameters, lr=lr)


class Replacing:
    """An SGD optimiser that replaces the tensors of the parameters."""

    def __init__(self, parameters, lr):
        self.parameters, self.lr = parameters, lr

    def step(self):
        for p in self.parameters:
            p.data = p.data - self.lr * p.grad


@pytest.mark.parametrize(
    "model", [{"name": "mlp"}, {"name": "cnn", "hidden": 8}, {"name": with_norms}]
)
@pytest.mark.parametrize("buffers", ["shared", "local"])
def test_a_loaded_model_has_the_recorded_scores(tmp_path, model, buffers):
    layout = "channels_last" if model["name"] == "cnn" else None
    done = run(
        tiny(model={**model, "buffers": buffers}, seeds=[3, 4], rounds=2, layout=layout),
        out=tmp_path,
    )
    dataset = digits()
    for seed in (3, 4):
        last = done.records[(done.records["round"] == 2) & (done.records.seed == seed)].set_index(
            "agent"
        )
        for j in (0, 1, 3, 4):  # the benign agents of two clusters
            network = done.model(j, seed=seed)
            assert isinstance(network, nn.Module)
            assert not network.training
            with torch.no_grad():
                predictions = network(
                    features(rotate(dataset.test.x, int(last.cluster[j]), 2))
                ).argmax(1)
            accuracy = float((predictions == dataset.test.y).float().mean())
            assert accuracy == pytest.approx(last.accuracy[j], abs=1e-6)
            confusion = done.confusion(j, seed=seed)
            assert list(confusion.columns) == list(confusion.index) == list(dataset.class_names)
            assert confusion.to_numpy().trace() / len(dataset.test) == pytest.approx(
                last.accuracy[j]
            )
            nines = confusion.loc["9"]
            assert nines["4"] / nines.sum() == pytest.approx(last.attack_success_rate[j])
    first, other = (
        parameters.flatten(done.model(0, **seed_option)) for seed_option in ({}, {"seed": 4})
    )
    assert first.equal(parameters.flatten(done.model(0, seed=3)))
    assert not first.equal(other)


def test_missing_agents_seeds_and_checkpoints_are_errors(tmp_path):
    done = run(tiny(rounds=1), out=tmp_path)
    for wrong in (6, -1):
        with pytest.raises(RunError, match=f"has the agents 0 to 5, and not {wrong}"):
            done.model(wrong)
    with pytest.raises(RunError, match=r"holds the seeds \[1000\], and not 7"):
        done.confusion(0, seed=7)
    (tmp_path / "seed-1000" / "checkpoint.safetensors").unlink()
    with pytest.raises(RunError, match=r"there is no .*checkpoint\.safetensors"):
        done.model(0)


@pytest.mark.parametrize(
    "make_optimiser", [adamw, lambda parameters, lr: heavy(parameters, lr, momentum=0.8)]
)
def test_an_optimiser_steps_as_in_a_plain_loop(make_optimiser):
    draw = stream(0, "data")
    x = torch.from_numpy(draw.normal(size=(30, 6))).float()
    y = torch.from_numpy(draw.integers(3, size=30))
    module, reference = (
        parameters.initialise(lambda: architectures.mlp([6], 3, hidden=[4]), stream(0, "model"))
        for _ in range(2)
    )
    rows = empty_models(2, parameters.dimension(module))
    rows[1] = parameters.flatten(module)
    training = Training(
        gamma=0.1,
        lambda2=0.5,
        momentum=0.9,
        batch_size=30,
        local_epochs=4,
        optimiser=make_optimiser,
    )
    local_update_(rows[1], module, Shard(x, y), training, stream(0, "batches"))
    optimiser = make_optimiser(list(reference.parameters()), 0.05)
    for _ in range(4):
        optimiser.zero_grad()
        nn.functional.cross_entropy(reference(x), y).backward()
        optimiser.step()
    torch.testing.assert_close(rows[1], parameters.flatten(reference))
    assert not rows[0].any()
    assert all(p.grad is None for p in module.parameters())


def test_a_user_optimiser_works_in_a_run_and_invalid_ones_are_refused(tmp_path):
    training = {"optimiser": {"name": heavy, "momentum": 0.9}}
    done = run(tiny(training=training, rounds=2), out=tmp_path, workers=1)
    assert done.config["training"]["optimiser"] == {"name": f"{__name__}:heavy", "momentum": 0.9}
    built_in = load(tiny(training={"optimiser": "adamw"})).settings()["training"]["optimiser"]
    assert built_in["weight_decay"] == 0.01
    for wrong, message in (
        ({"name": heavy}, "optimiser `heavy` needs the parameter `momentum`"),
        ({"name": "adam"}, "there is no optimiser `adam`. Did you mean `adamw`?"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(tiny(training={"optimiser": wrong}))
    for name, wrong, message in (
        (
            "before",
            nothing,
            "the optimiser `.*nothing` returned None, expected a torch.optim.Optimizer",
        ),
        (
            "before",
            {"name": "adamw", "beta1": 2.0},
            "the optimiser `adamw` failed: ValueError: .*beta",
        ),
        ("before", failing, "the optimiser `.*failing` returned a LBFGS, .* needs .* `closure`"),
        (
            "new",
            Replacing,
            "the optimiser `.*Replacing` puts new tensors in the place of parameters",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            run(tiny(training={"optimiser": wrong}, rounds=1), out=tmp_path / name, workers=1)
    assert not (tmp_path / "before").exists()


def test_user_metrics_are_columns_of_the_records(tmp_path):
    metrics = [
        {"name": share_of_nines, "times": 2.0},
        "worst_class_accuracy",
        "balanced_accuracy",
        undefined,
        "auc",
        {"name": "f1", "average": "weighted", "column": "f1_weighted"},
        {"name": "f1"},
    ]
    experiment = {**tiny(rounds=2), "evaluate_every": 2, "metrics": metrics}
    done = fedcb2o.Run(run(experiment, out=tmp_path).folder)
    test, benign = digits().test.y, ~done.records.malicious
    last = done.records[benign & (done.records["round"] == 2)]
    assert last.share_of_nines.to_numpy() == pytest.approx(2 * float((test == 9).float().mean()))
    assert done.records[~benign | (done.records["round"] == 1)].share_of_nines.isna().all()
    shares = done.confusion(0).to_numpy().diagonal() / done.confusion(0).to_numpy().sum(1)
    first = last[last.agent == 0]
    assert first.worst_class_accuracy.item() == pytest.approx(shares.min())
    assert first.balanced_accuracy.item() == pytest.approx(shares.mean(), abs=1e-6)
    assert done.records.undefined.isna().all()
    assert done.summary()[["undefined_missing", "auc_missing"]].to_numpy().tolist() == [[4, 0]]
    x, y = features(digits().test.x), digits().test.y.numpy()
    with torch.no_grad():
        p = done.model(0)(x).double().softmax(1).numpy()
    score = roc_auc_score(y, p, multi_class="ovr")
    assert first.auc.item() == pytest.approx(score)
    for column, average in (("f1", "macro"), ("f1_weighted", "weighted")):
        score = f1_score(y, p.argmax(1), average=average)
        assert first[column].item() == pytest.approx(score)
    assert "metrics" not in load(tiny()).settings()


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([a_word], "the metric `.*a_word` returned no number: 'good'"),
        ([of_one], "the metric `.*of_one` failed: TypeError: .*takes 1 positional argument"),
        (["r2"], "the metric needs numbers as targets, and as many outputs: .* Take one for class"),
        ([{"name": "auc", "label": 10}], "`label` must be between 0 and 9, got 10"),
        ([{"name": "auc", "column": "a b"}], "`metrics.0.column`"),
        ([{"name": "auc", "better": "up"}], "`metrics.0.better`"),
        (["acu"], "there is no metric `acu`. Did you mean `auc`?"),
        (
            ["balanced_accuracy", "balanced_accuracy"],
            "`metrics` names `balanced_accuracy` twice: leave one out, or give it another `column`",
        ),
        (["accuracy"], "`metrics` names `accuracy`, which every run records: leave it out"),
        ([], "`metrics`: .*at least 1 item"),
    ],
)
def test_invalid_metrics_are_refused(tmp_path, metrics, message):
    with pytest.raises(ConfigError, match=message):
        run({**tiny(rounds=1), "metrics": metrics}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
