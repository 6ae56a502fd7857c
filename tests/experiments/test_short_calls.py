"""`fedcb2o.run` with data, owners and a network as objects, and other settings as keywords."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from tests.tiny import run_cli
from torch import nn

import fedcb2o
from fedcb2o.errors import ConfigError, DataError

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(80, 4))
Y = (X[:, 0] + 0.3 * DRAW.normal(size=80) > 0).astype(int)
WARD = np.array(["a", "b", "c", "d"])[np.arange(80) % 4]


def call(*arguments, **settings):
    return fedcb2o.run(*arguments, **{"watch": lambda *_: None, "workers": 1, **settings})


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_call_equals_the_experiment_that_it_stands_for():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    flip = {"name": "label_flip", "source": 0, "target": 1}
    short = call(data=(X, Y), owners=WARD, model=network, rounds=2, attack=flip, seed=3, gamma=0.1)

    def wards():
        return fedcb2o.dataset(X, Y, owner=WARD)

    def copy_of(input_shape, num_classes):
        module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        module.load_state_dict(network.state_dict())
        return module

    whole = call(
        {
            "name": "whole",
            "seeds": [3],
            "rounds": 2,
            "data": {"name": wards},
            "model": {"name": copy_of},
            "agents": {"num_clusters": 1, "benign": 3, "malicious": 1, "budget": 3},
            "training": {"gamma": 0.1},
            "attack": flip,
        }
    )
    pd.testing.assert_frame_equal(short.records, whole.records)
    assert short.about(3)["names"] == ["a", "b", "c", "d"]
    assert short.config["algorithm"]["name"] == "fedassay"
    # The network itself stays as it was.
    start = torch.cat([p.detach().ravel() for p in network.parameters()])
    assert not torch.cat([p.detach().ravel() for p in short.model(1).parameters()]).equal(start)


def test_defaults_share_samples_among_ten_agents_and_recognise_numbers(caplog):
    first, second = (call(data=(X, Y), rounds=1) for _ in range(2))
    assert (first.folder.name, second.folder.name) == ("run", "run-2")
    assert len(first.agents) == 10
    assert first.config["agents"]["benign_samples"] == 6
    assert first.seeds == (0,)
    assert call(data=(X, Y), rounds=1, attack="random_labels").agents.malicious.sum() == 2
    assert call(data="digits", rounds=1, benign=[2, 1], benign_samples=9).about(0)["clusters"] == 2
    caplog.clear()
    numbers = call(data=(X, X @ [1.0, 2.0, 3.0, 4.0]), rounds=2, metrics=["r2"], gamma=0.01)
    assert numbers.config["training"]["loss"]["name"] == "squared_error"
    assert numbers.summary().r2.notna().all()
    assert "`y` has 80 different numbers with fractions: they are the targets of" in caplog.text


def test_attackers_that_were_not_asked_for_are_named(caplog):
    three = {"data": (X[:60], Y[:60]), "owners": np.array([*"abc"])[np.arange(60) % 3], "rounds": 1}
    done = call(**three, attack="random_labels", seeds=[0, 1])
    names = [
        done.about(seed)["names"][done.agents[done.agents.seed == seed].malicious.argmax()]
        for seed in (0, 1)
    ]
    chosen = "; ".join(f"{name} (seed {seed})" for seed, name in enumerate(names))
    if names[0] == names[1]:
        chosen = f"{names[0]} (seed 0, 1)"
    assert (
        f"1 of 3 owners act maliciously, because `malicious` is not given: {chosen}. malicious=0 "
        "is a run without attack." in caplog.text
    )
    caplog.clear()
    assert not call(**three, attack="random_labels", malicious=0).agents.malicious.any()
    call(**three, attack="random_labels", malicious=1)
    call(**three)
    assert "maliciously" not in caplog.text
    call(data=(X, Y), rounds=1, attack="random_labels")
    assert "2 of 10 agents act maliciously" in caplog.text


def test_another_folder_of_a_call_is_named_with_the_difference(caplog):
    call(data=(X, Y), rounds=1)
    assert "earlier run" not in caplog.text
    call(data=(X, Y), rounds=1)
    assert (
        "runs/run holds an earlier run (with the same settings): this one is written to runs/run-2."
        in caplog.text
    )
    call(data=(X, Y), rounds=2, gamma=0.125)
    difference = "`training.gamma` is 0.05 there and 0.125 here"
    assert f"runs/run-2 holds an earlier run (`rounds` is 1 there and 2 here; {difference}" in (
        caplog.text
    )
    assert "this one is written to runs/run-3." in caplog.text
    caplog.clear()
    other = {"name": "fedcbo", "alpha": 3.0}
    assert (
        call(data=(X, Y), rounds=2, gamma=0.125, algorithm=other).title
        == "FedCBO (text, alpha = 3)"
    )
    (line,) = [line for line in caplog.messages if "earlier run" in line]
    assert "`algorithm.name` is 'fedassay' there and 'fedcbo' here" in line
    assert "alpha" not in line
    assert "more" not in line
    caplog.clear()
    call(data=(X + 1, Y), rounds=2, gamma=0.125, algorithm=other)
    assert "runs/run-4 holds an earlier run (`data` is another object): this" in caplog.text


def test_the_title_of_a_call_is_that_of_its_algorithm_or_its_name():
    assert call(data=(X, Y), rounds=1).title == "FedAssay"
    assert call(data=(X, Y), rounds=1, name="mine").title == "mine"
    assert call(data=(X, Y), rounds=1, title="Mine").title == "Mine"


def test_a_table_or_a_csv_file_has_its_owners_in_a_column():
    table = pd.DataFrame(X, columns=[*"pqrs"]).assign(ill=Y, ward=WARD)
    table.to_csv("patients.csv", index=False)
    columns = (["p", "q"], "ill")
    options = {"columns": columns, "owners": "ward", "rounds": 1, "standardise": True}
    runs = [call(data=data, **options) for data in (table, "patients.csv")]
    assert runs[0].records.equals(runs[1].records)
    by_owner = {ward: (X[ward == WARD], Y[ward == WARD]) for ward in "abcd"}
    assert call(data=by_owner, rounds=1).about(0)["names"] == ["a", "b", "c", "d"]
    table.to_csv("patients.csv", index=False, sep=";")
    with pytest.raises(DataError, match=r'pandas.read_csv\("patients.csv", sep=";"\)'):
        call(data="patients.csv", **options)


def test_keywords_change_an_experiment():
    done = call("digits-fedassay", rounds=1, seed=4, training={"gamma": 0.2}, out="mine")
    assert (done.config["rounds"], done.seeds, done.folder.name) == (1, (4,), "mine")
    assert done.config["training"]["gamma"] == 0.2
    assert done.config["training"]["batch_size"] != 64  # the others stay


def test_workers_do_not_get_the_samples_and_give_the_same_bits():
    one, two = (call(data=(X, Y), model="logistic", rounds=2, workers=k) for k in (1, 2))
    pd.testing.assert_frame_equal(one.records, two.records)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"roundz": 1}, ConfigError, "`run` has no argument `roundz`. Did you mean `rounds`?"),
        ({"lr": 0.1}, ConfigError, "no argument `lr`. It is `gamma` here."),
        ({"alpha": 3}, ConfigError, r"A key of another section .* algorithm=\{"),
        ({"data": None}, ConfigError, r"an experiment needs `data`: give .* data=\(x, y\)"),
        ({"data": None, "owners": WARD}, ConfigError, "`owners` describes `data`"),
        ({"data": "digits", "owners": WARD}, ConfigError, "`owners` is for data as objects"),
        ({"data": {"a": (X, Y)}, "owners": WARD}, ConfigError, "and `data` has owners"),
        ({"owners": WARD[:3]}, DataError, "owner"),
        ({"gamma": -1.0}, ConfigError, "`training.gamma`"),
        ({"seed": "x"}, ConfigError, "`seeds` must be whole numbers"),
    ],
)
def test_faults_are_named(settings, error, message):
    with pytest.raises(error, match=message):
        call(**{"data": (X, Y), "rounds": 1, **settings})


@pytest.mark.usefixtures("no_figures")
def test_records_of_given_objects_name_the_cure_in_another_process():
    first = call(data=(X, Y), rounds=2, out="there").records
    script = "import fedcb2o\nfedcb2o.Run('there').model(0)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "an object that `fedcb2o.run` got in another process" in found.stderr
    assert run_cli("report", "there", "--out", "report").status == 0
    again = call(data=(X, Y), rounds=3, out="there", resume=True)
    assert again.records["round"].max() == 3
    before = again.records[again.records["round"] < 3]
    pd.testing.assert_frame_equal(before, first)
