"""Peers with owner data sets, provided validation samples, and regression."""

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
)
from tests.peer.wire import Wire

import fedcb2o
from fedcb2o.errors import ConfigError, DataError
from fedcb2o.experiments.config.loading import load
from fedcb2o.kernels import _autotune
from fedcb2o.peer.membership import federation
from fedcb2o.peer.node import Node, _agent, open_run

SLOPES = torch.tensor([[1.0], [-2.0], [0.5]])
LINES = natural(
    **{
        "name": "lines",
        "rounds": 6,
        "data": {"name": "digits"},  # each member brings its own
        "agents": {"num_clusters": 1, "benign": 3, "malicious": 0, "budget": 2, "validation": 0.3},
        "model": {"name": "logistic"},
        "training": {"gamma": 0.05, "loss": "squared_error"},
        "attack": None,
    }
)


PIXELS = np.arange(0, 256, 4, dtype=np.uint8).reshape(16, 4)


def line(j: int, **more: object) -> fedcb2o.Dataset:
    """Return the data of organisation j: three features and common slopes."""
    draw = np.random.default_rng(j)

    def some(count: int) -> tuple[np.ndarray, np.ndarray]:
        x = draw.normal(loc=j, size=(count, 3)).astype(np.float32)
        return x, x @ SLOPES.numpy()

    return fedcb2o.datasets(
        {"mine": {"train": some(30 + 5 * j), "validation": some(9), "test": some(8)}}, numbers=True
    )


def agreed(who):
    experiment = {key: value for key, value in LINES.items() if value is not None}
    return federation.make_federation(
        experiment, [each.member for each in who], dataset=line(0), most_samples=100
    )


def test_with_nothing_held_out_an_organisation_trains_on_all_and_judges_by_all(tmp_path):
    settings = {**{key: value for key, value in LINES.items() if value is not None}}
    settings["agents"] = {**settings["agents"], "hold_out": False, "validation": 1.0}
    who, brought = members.identities(tmp_path, 3), line(0)
    train, test = ((part.x.numpy(), part.y.numpy()) for part in (brought.pool, brought.test))
    plain = fedcb2o.datasets(
        {"mine": {"train": train, "test": test}}, numbers=True
    )  # nothing brought for validation
    made = federation.make_federation(
        settings, [each.member for each in who], dataset=plain, most_samples=100
    )
    holdings = _agent.agent_from_dataset(made, 1, plain).data
    assert (
        sorted(holdings.train[0].tolist())
        == sorted(holdings.validation[0].tolist())
        == [*range(len(plain.pool))]
    )


def test_a_peer_without_bfloat16_trains_in_float32_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(_autotune, "_bfloat16_speedup", lambda _: 0.02)
    settings = load({**EXPERIMENT, "training": {**EXPERIMENT["training"], "precision": "bfloat16"}})
    who = members.identities(tmp_path, 4)
    made = federation.make_federation(
        settings, [each.member for each in who], dataset=with_global()
    )
    node = Node(
        made, who[0], out=tmp_path / "out", simulate=settings, connect=joining(Wire(), 0), **QUIET
    )
    assert node.agent.spec.training.precision == "float32"
    (tmp_path / "out").mkdir()
    open_run(tmp_path / "out", made, who[0], node.agent, resume=False)
    assert "trains in float32: bfloat16 is far slower here" in caplog.text
    assert json.loads((tmp_path / "out" / "agent.json").read_text())["precision"] == "float32"


def test_peers_do_what_a_simulation_of_owners_does(tmp_path):
    """Sizes differ, one flips labels; each is evaluated on its own and common samples."""
    who, settings, wire = (
        members.identities(tmp_path, 4),
        load({**EXPERIMENT, "together": 1}),
        Wire(),
    )
    terms = {"synchronous": True, "deadline_seconds": 60.0}
    made = federation.make_federation(
        settings, [each.member for each in who], dataset=with_global(), **terms
    )
    assert made.most_samples == 22
    run_all(
        [
            Node(
                made,
                each,
                out=tmp_path / f"out-{j}",
                simulate=settings,
                connect=joining(wire, j),
                **QUIET,
            )
            for j, each in enumerate(who)
        ]
    )
    theirs, _ = simulation_of(tmp_path / "simulation", EXPERIMENT)
    run = fedcb2o.Run(tmp_path / "simulation").records
    for j in range(4):
        assert_same(model_of(tmp_path / f"out-{j}"), theirs[j])
        last, mine = (
            lines_of(tmp_path / f"out-{j}")[-1],
            run[(run.agent == j) & (run["round"] == 2)].iloc[0],
        )
        if not mine.malicious:
            assert last["accuracy"] == mine.accuracy
            assert last["global_accuracy"] == mine.global_accuracy


def test_organisations_tell_numbers(tmp_path):
    """Three organisations find the common slopes with their own validation samples."""
    who, wire = members.identities(tmp_path, 3), Wire()
    made = agreed(who)
    federation.write_federation(made, tmp_path / "f.toml")
    again = federation.read_federation(tmp_path / "f.toml")
    assert (again.digest, again.data.target, again.class_names) == (made.digest, (1,), ())

    async def together():
        ran = [
            Node(
                again, each, line(j), out=tmp_path / f"out-{j}", connect=joining(wire, j), **QUIET
            ).train()
            for j, each in enumerate(who)
        ]
        return await asyncio.gather(*ran)

    for j, folder in enumerate(asyncio.run(together())):
        lines, test = lines_of(folder), line(j).test
        assert "accuracy" not in lines[-1]
        assert lines[-1]["test_loss"] < lines[0]["test_loss"]
        with torch.no_grad():
            loss = (_agent.load_model(folder)(test.x) - test.y).square().mean()
        assert loss.item() == pytest.approx(lines[-1]["test_loss"], rel=1e-4)
        assert _agent.agent_from_dataset(again, j, line(j)).data.validation.sizes.tolist() == [9]
        assert _agent.agent_from_dataset(again, j, line(j)).data.train.sizes.tolist() == [
            30 + 5 * j
        ]


def test_data_that_do_not_fit(tmp_path):
    who = members.identities(tmp_path, 3)
    made = agreed(who)
    x, y = np.zeros((20, 3), np.float32), np.zeros((20, 2), np.float32)
    for data, told in (
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
        with pytest.raises(DataError, match=told):
            _agent.agent_from_dataset(made, 0, data)


@pytest.mark.parametrize(
    ("agreed_x", "x", "message"),
    [
        (PIXELS, PIXELS.astype(int), "float32 from 0 to 236 in their pool, .* bytes .*uint8"),
        (PIXELS, PIXELS / 255, "float32 from 0 to 0.9.* in their pool, .* agreed on bytes"),
        (
            PIXELS / 255,
            PIXELS,
            "uint8 from 0 to 236 in their pool, .* agreed on numbers from 0 to 1",
        ),
        (PIXELS / 255, PIXELS * 1.0, "from 0 to 236 .* numbers from 0 to 1: divide pixels by 255"),
        (PIXELS * 1.0, PIXELS, "uint8 from 0 to 236 .* agreed on numbers, which are not divided"),
        (PIXELS, PIXELS, ""),
        (PIXELS / 255, 2.0 * PIXELS / 255, ""),
        (PIXELS * 1.0, PIXELS / 255 - 1, ""),
    ],
)
def test_members_have_samples_of_one_type_and_scale(tmp_path, agreed_x, x, message):
    y = np.arange(16) % 2
    who = members.identities(tmp_path, 3)
    settings = {key: value for key, value in LINES.items() if value is not None}
    made = federation.make_federation(
        {**settings, "training": {"gamma": 0.05}},
        [each.member for each in who],
        dataset=fedcb2o.dataset(agreed_x, y),
        most_samples=100,
    )
    federation.write_federation(made, tmp_path / "f.toml")
    made = federation.read_federation(tmp_path / "f.toml")
    data = fedcb2o.dataset(x, y)
    if not message:
        _agent.agent_from_dataset(made, 0, data)
        return
    with pytest.raises(DataError, match=message):
        _agent.agent_from_dataset(made, 0, data)

    text = (tmp_path / "f.toml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("values = "))
    (tmp_path / "former.toml").write_text(text.replace(line + "\n", ""))
    former = federation.read_federation(tmp_path / "former.toml")
    _agent.agent_from_dataset(former, 0, data)  # the file of a former release says nothing


def test_classes_or_numbers(tmp_path):
    text = federation.make_federation(
        {key: value for key, value in LINES.items() if value is not None},
        [each.member for each in members.identities(tmp_path, 3)],
        dataset=line(0),
    )
    federation.write_federation(text, tmp_path / "f.toml")
    both = (tmp_path / "f.toml").read_text().replace("class_names = []", 'class_names = ["a", "b"]')
    (tmp_path / "both.toml").write_text(both)
    with pytest.raises(
        ConfigError, match="`data` has two or more `class_names`, or none and `target`"
    ):
        federation.read_federation(tmp_path / "both.toml")


def test_classes_of_a_member_are_compared_in_one_spelling(tmp_path):
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

    agreed = federation.make_federation(
        experiment,
        [identity.member for identity in members.identities(tmp_path, 2)],
        dataset=data(composed),
        seed=np.int64(3),
        share=np.float32(0.25),
    )
    assert (agreed.seed, agreed.share) == (3, 0.25)
    decomposed = unicodedata.normalize("NFD", composed)
    assert _agent.agent_from_dataset(agreed, 1, data(decomposed)).spec.num_classes == 2
    with pytest.raises(DataError, match=r"class 1 is 'B.sartig', and must be 'b.sartig'"):
        _agent.agent_from_dataset(agreed, 1, data(composed.capitalize()))
