"""Peers with owner data sets, their own validation samples, and regression."""

import asyncio
import json
import unicodedata

import numpy as np
import pytest
import torch
from tests.experiments.test_natural import EXPERIMENT, natural, with_global
from tests.peer import members
from tests.peer.test_node import (
    QUIET,
    assert_same,
    joining,
    lines_of,
    model_of,
    run_all,
    simulation_of,
    wired,
)
from tests.peer.wire import Wire

import fedcb2o
from fedcb2o.errors import ConfigError, DataError
from fedcb2o.experiments.config.loading import load
from fedcb2o.kernels import _autotune
from fedcb2o.peer import make_federation
from fedcb2o.peer.membership import federation
from fedcb2o.peer.node import agent as agent_module
from fedcb2o.peer.node.node import Node
from fedcb2o.peer.node.run_directory import open_run
from fedcb2o.peer.report.live_table import _format_scores
from fedcb2o.peer.report.node_page import write_node_report

SLOPES = torch.tensor([[1.0], [-2.0], [0.5]])
LINES = natural(
    **{
        "name": "lines",
        "rounds": 6,
        "data": {"name": "digits"},  # each member replaces it by its own data
        "agents": {"num_clusters": 1, "benign": 3, "malicious": 0, "budget": 2, "validation": 0.3},
        "model": {"name": "logistic"},
        "training": {"gamma": 0.05, "loss": "squared_error"},
        "attack": None,
    }
)


PIXELS = np.arange(0, 256, 4, dtype=np.uint8).reshape(16, 4)


def undefined(outputs, targets):
    return float("nan")


def line(j: int, **more: object) -> fedcb2o.Dataset:
    """Return the data of organisation j: three features and common slopes."""
    draw = np.random.default_rng(j)

    def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
        x = draw.normal(loc=j, size=(count, 3)).astype(np.float32)
        return x, x @ SLOPES.numpy()

    return fedcb2o.datasets(
        {"mine": {"train": samples(30 + 5 * j), "validation": samples(9), "test": samples(8)}},
        numbers=True,
    )


def regression_federation(orgs):
    experiment = {key: value for key, value in LINES.items() if value is not None}
    return make_federation(
        experiment, [org.member for org in orgs], dataset=line(0), most_samples=100
    )


def test_without_hold_out_training_and_validation_use_all_samples(tmp_path):
    settings = {**{key: value for key, value in LINES.items() if value is not None}}
    settings["agents"] = {**settings["agents"], "hold_out": False, "validation": 1.0}
    orgs, org_data = members.identities(tmp_path, 3), line(0)
    train, test = ((part.x.numpy(), part.y.numpy()) for part in (org_data.pool, org_data.test))
    plain = fedcb2o.datasets(
        {"mine": {"train": train, "test": test}}, numbers=True
    )  # without validation samples
    fed = make_federation(settings, [org.member for org in orgs], dataset=plain, most_samples=100)
    agent_data = agent_module.agent_from_dataset(fed, 1, plain).data
    assert (
        sorted(agent_data.train[0].tolist())
        == sorted(agent_data.validation[0].tolist())
        == [*range(len(plain.pool))]
    )


def test_a_peer_validates_on_whole_groups(tmp_path):
    settings = {key: value for key, value in LINES.items() if value is not None}
    orgs, shard = members.identities(tmp_path, 3), line(0).pool
    visits = np.arange(len(shard)) // 3
    data = fedcb2o.dataset(shard.x, shard.y, group=visits, numbers=True)
    fed = make_federation(settings, [org.member for org in orgs], dataset=data, most_samples=100)
    agent = agent_module.agent_from_dataset(fed, 1, data).data
    groups = [set(data.groups.pool[part[0]].tolist()) for part in (agent.train, agent.validation)]
    assert groups[0] | groups[1] == set(data.groups.pool.tolist())
    assert groups[1]
    assert not groups[0] & groups[1]


def test_a_peer_with_slow_bfloat16_trains_in_float32_and_logs_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(_autotune, "_bfloat16_speedup", lambda _: 0.02)
    settings = load({**EXPERIMENT, "training": {**EXPERIMENT["training"], "precision": "bfloat16"}})
    orgs = members.identities(tmp_path, 4)
    fed = make_federation(settings, [org.member for org in orgs], dataset=with_global())
    node = Node(
        fed, orgs[0], out=tmp_path / "out", simulate=settings, connect=joining(Wire(), 0), **QUIET
    )
    assert node.agent.spec.training.precision == "float32"
    (tmp_path / "out").mkdir()
    open_run(tmp_path / "out", fed, orgs[0], node.agent, resume=False)
    assert "trains in float32: bfloat16 is far slower here" in caplog.text
    assert json.loads((tmp_path / "out" / "agent.json").read_text())["precision"] == "float32"


def test_peers_with_owner_data_reproduce_the_simulation(tmp_path):
    """Sizes differ, and one agent flips labels.

    Agents are evaluated on their own and on common samples.
    """
    orgs, settings = members.identities(tmp_path, 4), load({**EXPERIMENT, "together": 1})
    terms = {"synchronous": True, "deadline_seconds": 60.0}
    fed = make_federation(
        settings, [identity.member for identity in orgs], dataset=with_global(), **terms
    )
    assert fed.most_samples == 22
    run_all(wired(fed, orgs, tmp_path, simulate=settings))
    simulated, _ = simulation_of(tmp_path / "simulation", EXPERIMENT)
    run = fedcb2o.Run(tmp_path / "simulation").records
    for j in range(4):
        assert_same(model_of(tmp_path / f"out-{j}"), simulated[j])
        last_line, simulated_row = (
            lines_of(tmp_path / f"out-{j}")[-1],
            run[(run.agent == j) & (run["round"] == 2)].iloc[0],
        )
        if not simulated_row.malicious:
            assert last_line["accuracy"] == simulated_row.accuracy
            assert last_line["global_accuracy"] == simulated_row.global_accuracy


def test_peers_solve_a_regression_with_their_own_validation_samples(tmp_path):
    """Three organisations find their common slopes."""
    orgs = members.identities(tmp_path, 3)
    fed = regression_federation(orgs)
    federation.write_federation(fed, tmp_path / "f.toml")
    reread = federation.read_federation(tmp_path / "f.toml")
    assert (reread.digest, reread.data.target, reread.class_names) == (fed.digest, (1,), ())

    nodes = wired(reread, orgs, tmp_path, line, metrics=["r2", {"name": "rmse"}, undefined])

    async def train_all():
        return await asyncio.gather(*(node.train() for node in nodes))

    for j, folder in enumerate(asyncio.run(train_all())):
        lines, test = lines_of(folder), line(j).test
        assert "accuracy" not in lines[-1]
        chosen = lines[-1]["metrics"]
        assert chosen["rmse"] ** 2 == pytest.approx(lines[-1]["test_loss"])
        share = chosen["rmse"] ** 2 / test.y.double().var(unbiased=False).item()
        assert chosen["r2"] == pytest.approx(1 - share)
        assert chosen["undefined"] is None
        page = write_node_report(folder).read_text()
        assert "undefined no value (6 rounds without a value)" in page.lower()
        assert f"rmse {chosen['rmse']:.4g}" in page.lower()
        assert "undefined without a value" in _format_scores(lines[-1])
        assert lines[-1]["test_loss"] < lines[0]["test_loss"]
        with torch.no_grad():
            loss = (agent_module.load_model(folder)(test.x) - test.y).square().mean()
        assert loss.item() == pytest.approx(lines[-1]["test_loss"], rel=1e-4)
        assert agent_module.agent_from_dataset(
            reread, j, line(j)
        ).data.validation.sizes.tolist() == [9]
        assert agent_module.agent_from_dataset(reread, j, line(j)).data.train.sizes.tolist() == [
            30 + 5 * j
        ]


def test_members_with_a_table_refuse_the_exchange_of_triggers(tmp_path):
    settings = {key: value for key, value in LINES.items() if value is not None}
    settings["algorithm"] = {"name": "fedassay", "guards": {"trigger_exchange": 2}}
    orgs = members.identities(tmp_path, 3)
    fed = make_federation(settings, [org.member for org in orgs], dataset=line(0), most_samples=100)
    with pytest.raises(ConfigError, match=r"the samples have shape \(3,\): leave it out"):
        agent_module.agent_from_dataset(fed, 1, line(1))


def test_data_of_another_kind_than_agreed_are_refused(tmp_path):
    orgs = members.identities(tmp_path, 3)
    fed = regression_federation(orgs)
    x, y = np.ones((20, 3), np.float32), np.zeros((20, 2), np.float32)
    for data, message in (
        (
            fedcb2o.datasets([(x, y[:, :1])] * 2, numbers=True),
            "the data have 2 owners, 0, 1: an organisation brings only",
        ),
        (
            fedcb2o.dataset(x, y, numbers=True),
            r"numbers of shape \(2,\) to predict in their pool, and the .* \(1,\)",
        ),
        (
            fedcb2o.dataset(x, np.arange(20) % 2),
            "the data have 2 classes, 0, 1, and the federation 0",
        ),
    ):
        with pytest.raises(DataError, match=message):
            agent_module.agent_from_dataset(fed, 0, data)


@pytest.mark.parametrize(
    ("agreed_x", "x", "message"),
    [
        (PIXELS, PIXELS.astype(int), "float32 from 0 to 236 in their pool, .* bytes .*uint8"),
        (PIXELS, PIXELS / 255, "float32 from 0 to 0.9.* in their pool, .* agreed on bytes"),
        (PIXELS / 255, PIXELS, "uint8 from 0 to 236 in their pool, .* agreed on numbers from 0 to 1"),
        (PIXELS / 255, PIXELS * 1.0, "from 0 to 236 .* numbers from 0 to 1: divide pixels by 255"),
        (PIXELS * 1.0, PIXELS, "uint8 from 0 to 236 .* agreed on numbers, which are not divided"),
        (PIXELS, PIXELS, ""),
        (PIXELS / 255, 2.0 * PIXELS / 255, ""),
        (PIXELS * 1.0, PIXELS / 255 - 1, ""),
    ],
)  # fmt: skip
def test_samples_of_another_type_or_scale_are_refused(tmp_path, agreed_x, x, message):
    y = np.arange(16) % 2
    orgs = members.identities(tmp_path, 3)
    settings = {key: value for key, value in LINES.items() if value is not None}
    fed = make_federation(
        {**settings, "training": {"gamma": 0.05}},
        [org.member for org in orgs],
        dataset=fedcb2o.dataset(agreed_x, y),
        most_samples=100,
    )
    federation.write_federation(fed, tmp_path / "f.toml")
    fed = federation.read_federation(tmp_path / "f.toml")
    data = fedcb2o.dataset(x, y)
    if not message:
        agent_module.agent_from_dataset(fed, 0, data)
        return
    with pytest.raises(DataError, match=message):
        agent_module.agent_from_dataset(fed, 0, data)

    text = (tmp_path / "f.toml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("values = "))
    (tmp_path / "former.toml").write_text(text.replace(line + "\n", ""))
    former = federation.read_federation(tmp_path / "former.toml")
    agent_module.agent_from_dataset(
        former, 0, data
    )  # files of former releases do not contain `values`


def test_a_federation_has_either_class_names_or_a_target(tmp_path):
    fed = make_federation(
        {key: value for key, value in LINES.items() if value is not None},
        [org.member for org in members.identities(tmp_path, 3)],
        dataset=line(0),
    )
    federation.write_federation(fed, tmp_path / "f.toml")
    both = (tmp_path / "f.toml").read_text().replace("class_names = []", 'class_names = ["a", "b"]')
    (tmp_path / "both.toml").write_text(both)
    with pytest.raises(
        ConfigError, match="`data` has two or more `class_names`, or none and `target`"
    ):
        federation.read_federation(tmp_path / "both.toml")


def test_class_names_are_compared_after_unicode_normalisation(tmp_path):
    composed = "b\u00f6sartig"
    x = np.random.default_rng(0).normal(size=(40, 3))
    experiment = load(
        "digits-fedassay",
        {
            "name": "t",
            "agents": {"num_clusters": 1, "benign": 2, "malicious": 0, "budget": 1},
            "agents.benign_samples": 20,
            "model": {"name": "logistic"},
        },
    )

    def data(second: str) -> fedcb2o.Dataset:
        return fedcb2o.dataset(x, np.arange(40) % 2, class_names=["gutartig", second])

    fed = make_federation(
        experiment,
        [identity.member for identity in members.identities(tmp_path, 2)],
        dataset=data(composed),
        seed=np.int64(3),
        share=np.float32(0.25),
    )
    assert (fed.seed, fed.share) == (3, 0.25)
    decomposed = unicodedata.normalize("NFD", composed)
    assert agent_module.agent_from_dataset(fed, 1, data(decomposed)).spec.num_classes == 2
    with pytest.raises(DataError, match=r"class 1 is 'B.sartig', and must be 'b.sartig'"):
        agent_module.agent_from_dataset(fed, 1, data(composed.capitalize()))
