"""Former names of plug-ins and parameters work, and runs keep their fingerprints."""

import re

import pytest

from fedcb2o import _former_keys, load
from fedcb2o.experiments.config import tables
from fedcb2o.federated import algorithms, attacks, criteria
from fedcb2o.plugins import bind, parameters, resolve
from fedcb2o.records import settings_digest
from tests.tiny import tiny


def test_new_names_exist_and_former_ones_do_not():
    for old, new in _former_keys.PLUGINS.items():
        assert new in attacks.__all__
        assert old not in attacks.__all__
    for name, table in _former_keys.PARAMETERS.items():
        module = algorithms if name in algorithms.__all__ else attacks
        current = parameters(getattr(module, name))
        assert set(table.values()) <= set(current)
        assert not set(table) & set(current)


def test_a_former_name_warns_and_gives_the_new_function():
    with pytest.warns(DeprecationWarning, match="`trash` is now called `random_model`"):
        assert resolve("attack", "trash", attacks) is attacks.random_model


FORMER = {
    "judged_at": 0.5,
    "tested": 2.0,
    "ball": 1.3,
    "min_distance": 0.75,
    "selection": {"name": "prob_sampling", "newcomers": 0.5},
    "criterion": {"name": "class_loss_gap", "z": 2.0, "against": "majority"},
    "min_contacts": 2,
    "point": "mean",
}
GUARDS = {
    "interpolation": 0.5,
    "loss_tolerance": 2.0,
    "max_distance": 1.3,
    "min_distance": 0.75,
    "newcomer_share": 0.5,
}


def test_former_keys_warn_and_set_guards():
    with pytest.warns(DeprecationWarning, match="is now|is gone") as caught:
        old = load(tiny(algorithm={"name": "fedcb2o", **FORMER}, attack={"name": "trash"}))
    texts = [str(warning.message) for warning in caught]
    for key in ("judged_at", "tested", "ball", "min_distance"):
        assert any(text.startswith(f"`{key}` of `fedcb2o` is now `guards.") for text in texts)
    for key in ("min_contacts", "z", "against"):
        assert any(re.match(f"`{key}` of .* is gone and has no effect", text) for text in texts)
    new = load(
        tiny(
            algorithm={"name": "fedcb2o", "guards": GUARDS},
            attack={"name": "random_model"},
        )
    )
    assert old.algorithm.build().guards == new.algorithm.build().guards
    assert old.algorithm.guards == new.algorithm.guards


@pytest.mark.parametrize(
    "former",
    [
        {"judged_at": 1.0, "counts_from": "first", "point": "mean", "likelihood": "loss"},
        {"interpolation": 1.0, "min_contacts": 1, "point": "mean", "likelihood": "loss"},
    ],
)
@pytest.mark.parametrize("variant", ["text", "released"])
def test_settings_recorded_before_the_guards_have_the_same_digest(former, variant):
    settings = load(tiny(algorithm={"name": "fedcb2o", "variant": variant})).settings()
    recorded = {**settings, "algorithm": {**settings["algorithm"], **former}}
    del recorded["algorithm"]["variant"]
    assert settings_digest(recorded) == settings_digest(settings)
    assert load(recorded).fingerprint(0) == load(settings).fingerprint(0)


@pytest.mark.parametrize(
    ("former", "present"),
    [
        ("digits-fedcb2o", "digits-fedcb2o-paper"),
        ("digits-fedcb2o-paper-tg5", "digits-fedcb2o-paper"),
        ("emnist-small-fedcb2o-trusted-tg10", "emnist-small-fedcb2o-paper"),
        ("emnist-fedcb2o-perturbations", "emnist-fedassay-backdoors"),
        ("digits-oracle-min-70", "digits-oracle-min"),
    ],
)
def test_a_former_preset_warns_and_changes_a_present_one(former, present):
    with pytest.warns(DeprecationWarning, match=f"preset `{former}` is now `{present}`"):
        experiment = load(former)
    assert experiment.name == former
    assert experiment.data == load(present).data
    algorithm = experiment.settings()["algorithm"]
    assert algorithm.get("criterion_from_round", 0) == int(former.partition("-tg")[2] or 0)


@pytest.mark.parametrize("name", tables._former_presets())
def test_every_former_preset_loads(name):
    with pytest.warns(DeprecationWarning, match="the preset"):
        experiment = load(name)
    assert experiment.title


def test_a_users_function_keeps_its_own_keys():
    def mimic(view, draw, *, whom: int = 0):
        return view.own

    assert bind("attack", mimic, {"whom": 3}) == {"whom": 3}


def test_other_tables_are_not_changed():
    table = {"name": "largest", "of": [{"name": "class_loss_gap", "scale": 2.0}, "distance"]}
    assert _former_keys.original_settings({"name": "fedcb2o", "criterion": table}) == {
        "name": "fedcb2o",
        "criterion": table,
    }
    assert set(table["of"][1:]) <= set(criteria.__all__)
