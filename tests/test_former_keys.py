"""Old names of plug-ins and parameters: they keep working, and runs keep their fingerprints."""

import re

import pytest

from fedcb2o import _former_keys, load
from fedcb2o.federated import algorithms, attacks, criteria
from fedcb2o.plugins import bind, parameters, resolve
from fedcb2o.records._checksums import settings_digest
from tests.tiny import tiny


def test_every_new_name_exists_and_no_old_one_does():
    for old, new in _former_keys.PLUGINS.items():
        assert new in attacks.__all__
        assert old not in attacks.__all__
    for name, table in _former_keys.PARAMETERS.items():
        room = algorithms if name in algorithms.__all__ else attacks
        known = parameters(getattr(room, name))
        assert set(table.values()) <= set(known)
        assert not set(table) & set(known)


def test_an_old_name_warns_and_means_the_new_function():
    with pytest.warns(DeprecationWarning, match="`trash` is now called `random_model`"):
        assert resolve("attack", "trash", attacks) is attacks.random_model


OLD = {"judged_at": 0.5, "tested": 2.0, "ball": 1.3, "apart": 0.75, "counts_from": "second"}
NEW = {
    "interpolation": 0.5,
    "loss_tolerance": 2.0,
    "max_distance": 1.3,
    "min_distance": 0.75,
    "min_contacts": 2,
}


def test_old_keys_warn_and_give_the_same_run():
    with pytest.warns(DeprecationWarning, match="is now called") as caught:
        old = load(tiny(algorithm={"name": "fedcb2o", **OLD}, attack={"name": "trash"}))
    texts = [str(warning.message) for warning in caught]
    for key in OLD:
        assert any(re.match(rf"`{key}` of `fedcb2o` is now called", text) for text in texts)
    new = load(tiny(algorithm={"name": "fedcb2o", **NEW}, attack={"name": "random_model"}))
    assert old.settings() == new.settings()
    assert old.fingerprint(0) == new.fingerprint(0)
    assert '"judged_at": 0.5' in new.fingerprint(0)
    assert '"counts_from": "second"' in new.fingerprint(0)


def test_settings_recorded_under_old_names_have_the_same_digest():
    settings = load(tiny(algorithm={"name": "fedcb2o", **NEW})).settings()
    recorded = {**settings, "algorithm": {**settings["algorithm"], **OLD}}
    for key in NEW:
        del recorded["algorithm"][key]
    assert settings_digest(recorded) == settings_digest(settings)


def test_a_users_function_keeps_its_own_keys():
    def mimic(view, draw, *, whom: int = 0):
        return view.own

    assert bind("attack", mimic, {"whom": 3}) == {"whom": 3}


def test_of_both_names_the_later_one_counts():
    with pytest.warns(DeprecationWarning, match="is now called"):
        found = _former_keys.current_parameters("fedcb2o", {"interpolation": 1.0, "judged_at": 0.5})
    assert found == {"interpolation": 0.5}


def test_other_tables_stay_as_they_are():
    table = {"name": "largest", "of": [{"name": "class_loss_gap", "z": 2.0}, "distance"]}
    assert _former_keys.original_settings({"name": "fedcb2o", "criterion": table}) == {
        "name": "fedcb2o",
        "criterion": table,
    }
    assert set(table["of"][1:]) <= set(criteria.__all__)
