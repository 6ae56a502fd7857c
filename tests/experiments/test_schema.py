"""The JSON Schema of configurations: valid ones pass, and mistakes are found."""

import json
import tomllib

import pytest
from jsonschema import Draft7Validator
from tests.test_docs import ROOT, blocks
from tests.tiny import run_cli, tiny

import fedcb2o
from fedcb2o.experiments import schema
from fedcb2o.experiments.config import tables
from fedcb2o.experiments.grid import grids as built_in_grids
from fedcb2o.experiments.key_table import key_rows

PACKAGE = ROOT / "src" / "fedcb2o" / "experiments"


@pytest.fixture(scope="module")
def experiments():
    return Draft7Validator(schema.schema())


@pytest.fixture(scope="module")
def grids():
    return Draft7Validator(schema.grid_schema())


def errors(validator, table):
    """List the errors of a table, one line per error with its key."""
    return [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in validator.iter_errors(table)
    ]


def test_the_command_prints_the_schema(experiments, grids):
    for options, validator in (([], experiments), (["--grid"], grids)):
        Draft7Validator.check_schema(validator.schema)
        assert json.loads(run_cli("schema", *options).out) == validator.schema


def test_every_preset_is_valid_as_written_and_as_resolved(experiments):
    for name in tables.presets():
        assert (
            errors(experiments, tomllib.loads((PACKAGE / "presets" / f"{name}.toml").read_text()))
            == []
        ), name
        assert errors(experiments, fedcb2o.load(name).settings()) == [], name


def test_every_grid_is_valid_and_a_mistake_in_an_entry_is_found(grids):
    for name in built_in_grids():
        assert (
            errors(grids, tomllib.loads((PACKAGE / "grids" / f"{name}.toml").read_text())) == []
        ), name
    entry = {"extends": "digits-fedassay", "attacks": {"Flip": {"attack": {"name": "label_flip"}}}}
    result = errors(
        grids, {**entry, "defences": {"A": {"algorithm": {"alpha": 2}, "tune": [{"rounds": 3}]}}}
    )
    assert result == []
    assert errors(grids, {**entry, "defences": {"A": {"algorithm": {"alpah": 2}}}})
    assert errors(grids, {**entry, "defences": {"A": {"tune": [{"round": 3}]}}})
    assert errors(grids, entry) == [": 'defences' is a required property"]


def test_the_experiments_of_the_documentation_are_valid(experiments):
    examples = [
        tomllib.loads(text) for _, text in blocks(ROOT / "docs" / "configuration.md", "toml")
    ]
    complete = [table for table in examples if "rounds" in table]
    assert len(complete) >= 2
    for table in complete:
        assert errors(experiments, table) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"roundz": 3}, ": Additional properties are not allowed ('roundz' was unexpected)"),
        (
            {"agents": {"buget": 3}},
            "agents: Additional properties are not allowed ('buget' was unexpected)",
        ),
        (
            {"algorithm": {"name": "fedcb2o", "alpah": 2}},
            "algorithm: Additional properties are not allowed ('alpah' was unexpected)",
        ),
        ({"algorithm": {"name": "fedcb20"}}, "algorithm.name: 'fedcb20' is not valid"),
        ({"algorithm": "fedcb2o"}, "algorithm: 'fedcb2o' is not of type 'object'"),
        ({"algorithm": {"name": "by_rule"}}, "algorithm: 'rule' is a required property"),
        (
            {"algorithm": {"name": "fedcb2o", "criterion": "class_gap"}},
            "algorithm.criterion: 'class_gap' is not valid",
        ),
        (
            {"algorithm": {"name": "fedcb2o", "own_model": "own"}},
            "algorithm.own_model: 'own' is not",
        ),
        (
            {"algorithm": {"name": "dfedavgm", "own_model": "trusted"}},
            "algorithm.own_model: 'trusted' is not one of",
        ),
        ({"algorithm": {"name": "by_rule", "rule": {"name": "krum", "g": 1}}}, "algorithm.rule: "),
        ({"algorithm": {"name": "fedcbo", "guards": {"max_distance": 0}}}, "algorithm.guards: "),
        (
            {"attack": {"name": "label_flip", "source": 9}},
            "attack: 'target' is a required property",
        ),
        (
            {"attack": {"name": "label_flip", "source": 9, "target": "4"}},
            "attack.target: '4' is not of type 'integer'",
        ),
        ({"attack": {"name": "ipm", "data": {"name": "label_flp"}}}, "attack.data: "),
        ({"agents": {"skew": {"name": "dirichlet", "concentrate": 1.0}}}, "agents.skew: "),
        ({"rounds": 0}, "rounds: 0 is less than the minimum of 1"),
        ({"seeds": []}, "seeds: [] should be non-empty"),
        (
            {"training": {"momentum": 1.0}},
            "training.momentum: 1.0 is greater than or equal to the maximum of 1",
        ),
    ],
)
def test_a_mistake_is_reported_with_its_key(experiments, changes, message):
    table = tiny(**{key: value for key, value in changes.items() if key in tiny()})
    table |= {key: value for key, value in changes.items() if key not in table}
    if "algorithm" in changes or "attack" in changes:
        table |= changes
    assert errors(experiments, tiny()) == []
    messages = errors(experiments, table)
    assert any(line.startswith(message) for line in messages), messages


def test_an_experiment_with_extends_may_leave_out_required_keys(experiments):
    result = errors(
        experiments,
        {"extends": "digits-fedassay", "algorithm": {"alpha": 5}, "agents": {"budget": 3}},
    )
    assert result == []
    assert errors(experiments, {"extends": "digits-fedassay", "algorithm": {"alpah": 5}})
    assert errors(experiments, {"extends": "digit-fedcb2o"})
    assert errors(experiments, {"algorithm": {"alpha": 5}})


def test_user_functions_may_have_any_parameters(experiments):
    table = tiny()
    table["algorithm"] = {"name": "fedcb2o", "criterion": {"name": "mine.parts:gap", "power": 2}}
    table["attack"] = {"name": "mine:attack", "strength": 1, "from_round": 2}
    table["model"] = {"name": "mine:Network.small", "width": 3}
    assert errors(experiments, table) == []
    assert errors(experiments, {**table, "model": {"name": "mine", "width": 3}})


def test_optimisers_metrics_and_buffers_are_validated(experiments):
    table = {
        **tiny(training={"optimiser": {"name": "adamw", "beta1": 0.8}}),
        "metrics": ["balanced_accuracy", "my:own"],
    }
    assert errors(experiments, {**table, "model": {"name": "mlp", "buffers": "shared"}}) == []
    assert errors(experiments, {**table, "model": {"name": "mlp", "buffers": "mixed"}})
    assert errors(experiments, {**table, "metrics": ["accuracy"]})
    assert errors(experiments, {**table, "training": {"optimiser": {"name": "adamw", "beta": 0.8}}})


def test_criteria_of_a_combination_may_have_positive_scales(experiments):
    of = ["class_loss_gap", {"name": "trigger_sensitivity", "scale": 2.0, "tiles": 3}]
    for value, is_valid in (
        (of, True),
        ([*of, {"name": "distance", "scale": 0}], False),
        ([], False),
    ):
        table = {
            **tiny(),
            "algorithm": {"name": "fedcb2o", "criterion": {"name": "largest", "of": value}},
        }
        assert (errors(experiments, table) == []) == is_valid


def test_every_key_has_a_description(experiments):
    properties = experiments.schema["properties"]
    assert all(key.get("description") for key in properties.values())
    for section in ("agents", "training"):
        assert all(key.get("description") for key in properties[section]["properties"].values())
    budget = properties["agents"]["properties"]["budget"]
    expected = (
        "M, the number of models that an agent asks for in a round (1 to N - 1; default: needed)"
    )
    assert budget["description"] == expected
    names = experiments.schema["definitions"]["algorithm"]["properties"]["name"]["anyOf"]
    assert all(name["description"] for name in names)


def test_parameters_have_descriptions_from_docstrings(experiments):
    parameters = experiments.schema["definitions"]["algorithm"]["properties"]
    assert all(schema["description"] for schema in parameters["alpha"]["anyOf"])
    assert parameters["guards"]["description"]


def test_every_key_has_a_range_and_a_meaning():
    rows = {name: cells for name, *cells in key_rows()}
    assert {"rounds", "agents.budget", "algorithm.guards.loss_tolerance"} <= set(rows)
    assert rows["agents.validation"][:2] == ["above 0, to 1", "0.2"]
    assert all(all(cells) for cells in rows.values())


@pytest.mark.parametrize("kind", schema.KINDS)
def test_every_part_has_a_purpose(kind):
    parts = list(schema.part_rows(kind))
    assert parts
    assert all(name and purpose for name, _, purpose in parts)


@pytest.mark.parametrize("kind", ["criterion", "attack", "rule", "graph", "data"])
def test_the_configuration_page_names_every_part(kind):
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert [name for name, *_ in schema.part_rows(kind) if f"`{name}`" not in page] == []
