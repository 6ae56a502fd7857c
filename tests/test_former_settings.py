"""Files of earlier versions have original names: they are read, resumed and have the same digest."""

import pytest

from fedcb2o import ConfigError, Run, load, peer, records, run
from fedcb2o.federated import algorithms, attacks, criteria
from fedcb2o.plugins import parameters
from fedcb2o.records import _former_settings, current_settings, settings_digest
from tests.peer import members
from tests.tiny import tiny


def test_new_names_exist_and_original_ones_do_not():
    for old, new in _former_settings._PLUGINS.items():
        assert new in attacks.__all__
        assert old not in attacks.__all__
    for name, table in _former_settings._PARAMETERS.items():
        module = algorithms if name in algorithms.__all__ else attacks
        current = parameters(getattr(module, name))
        assert set(table.values()) <= set(current)
        assert not set(table) & set(current)


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


def test_recorded_settings_get_the_current_names():
    recorded = tiny(algorithm={"name": "fedcb2o", **FORMER}, attack={"name": "trash"})
    experiment = load(current_settings(recorded))
    selection, criterion = {"name": "prob_sampling"}, {"name": "class_loss_gap"}
    algorithm = {"name": "fedcb2o", "selection": selection, "criterion": criterion}
    expected = tiny(algorithm={**algorithm, "guards": GUARDS}, attack={"name": "random_model"})
    assert experiment.settings() == load(expected).settings()


def test_the_name_of_a_run_is_no_name_of_a_plug_in():
    assert current_settings({"name": "trash", "title": "trash"})["name"] == "trash"


def test_a_recorded_grid_gets_the_current_names():
    grid = {
        "algorithm": {"name": "fedcb2o"},
        "attacks": {"Random": {"attack": "trash"}, "Sparse": {"attack": {"kept": 0.5}}},
        "defences": {
            "A": {"tune": [{"algorithm": {"ball": 1.3}}, {"algorithm": {"judged_at": 1}}]}
        },
    }
    current = current_settings(grid)
    expected = {"Random": {"attack": "random_model"}, "Sparse": {"attack": {"kept_share": 0.5}}}
    assert current["attacks"] == expected
    tune = [{"algorithm": {"guards": {"max_distance": 1.3}}}, {"algorithm": {}}]
    assert current["defences"] == {"A": {"tune": tune}}
    assert current_settings(current) == current


def test_a_run_with_original_names_is_read_and_resumed(tmp_path):
    table = tiny(rounds=1, algorithm={"name": "fedcb2o"}, attack={"name": "random_model"})
    path = tmp_path / "config.toml"
    run(table, out=tmp_path, workers=1)
    models = Run(tmp_path).model(0).state_dict()
    recorded = _former_settings.original_settings(records.read_config(path))
    assert recorded["attack"]["name"] == "trash"
    assert recorded["algorithm"]["judged_at"] == 1.0
    records.write_toml(path, recorded)

    read = Run(tmp_path).model(0).state_dict()
    assert all(bool((read[key] == models[key]).all()) for key in models)
    run(load(path, {"rounds": 2}), out=tmp_path, resume=True, workers=1)
    assert Run(tmp_path).records["round"].max() == 2


def test_a_federation_with_original_names_is_read(tmp_path):
    path = tmp_path / "federation.toml"
    changes = {"algorithm": {"name": "fedcb2o"}}
    members.federated(members.identities(tmp_path, 3), changes=changes, path=path)
    table = records.read_toml(path)
    table["experiment"]["algorithm"] |= {"judged_at": 0.5, "counts_from": "first"}
    records.write_toml(path, table)
    federation = peer.read_federation(path, allow_unsigned=True)
    assert federation.experiment.algorithm.build().guards.interpolation == 0.5


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"attack": {"name": "trash"}}, "attack.*trash"),
        ({"algorithm": {"name": "fedcb2o", "judged_at": 0.5}}, "no parameter `judged_at`"),
        ({"algorithm": {"name": "fedcb2o", "max_distance": 1}}, r"write `algorithm\.guards\.max"),
    ],
)
def test_original_names_are_refused_in_new_settings(section, message):
    with pytest.raises(ConfigError, match=message):
        load(tiny(**section))


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
    assert load(current_settings(recorded)).fingerprint(0) == load(settings).fingerprint(0)


def test_a_fingerprint_has_original_names():
    assert '"trash"' in load(tiny(attack={"name": "random_model"})).fingerprint(0)


def test_other_tables_are_not_changed():
    table = {"name": "largest", "of": [{"name": "class_loss_gap", "scale": 2.0}, "distance"]}
    settings = {"name": "fedcb2o", "criterion": table}
    assert _former_settings.original_settings(settings) == settings
    assert current_settings(settings) == settings
    assert set(table["of"][1:]) <= set(criteria.__all__)
