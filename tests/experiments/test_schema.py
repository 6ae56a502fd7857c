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
    defence = {"algorithm": {"alpha": 2}, "tune": [{"rounds": 3}]}
    assert errors(grids, {**entry, "defences": {"A": defence}}) == []
    assert errors(grids, {**entry, "defences": ["A"]})
    assert errors(grids, {**entry, "defence": {"A": defence}})
    assert errors(grids, {**entry, "rounds": 0})


def test_the_experiments_of_the_documentation_are_valid(experiments):
    examples = [
        tomllib.loads(text) for _, text in blocks(ROOT / "docs" / "configuration.md", "toml")
    ]
    complete = [table for table in examples if "rounds" in table]
    assert len(complete) >= 2
    for table in complete:
        assert errors(experiments, table) == []


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"roundz": 3}, ""),
        ({"agents": {"buget": 3}}, "agents"),
        ({"algorithm": {"name": "fedcb20"}}, "algorithm"),
        ({"algorithm": {"name": "fedcbo", "guards": {"max_distance": 0}}}, "algorithm"),
        ({"agents": {"skew": {"name": "dirichlets"}}}, "agents.skew"),
        ({"rounds": 0}, "rounds"),
        ({"seeds": []}, "seeds"),
        ({"training": {"momentum": 1.0}}, "training.momentum"),
        ({"model": {"name": "mlp", "buffers": "mixed"}}, "model"),
        ({"metrics": ["accuracy"]}, "metrics"),
    ],
)
def test_a_mistake_is_reported_with_its_key(experiments, changes, key):
    assert errors(experiments, {"extends": "digits-fedassay"}) == []
    messages = errors(experiments, {"extends": "digits-fedassay", **changes})
    assert [line.split(":")[0] for line in messages] == [key]


def test_user_functions_may_have_any_parameters(experiments):
    table = tiny()
    table["algorithm"] = {"name": "fedcb2o", "criterion": {"name": "mine.parts:gap", "power": 2}}
    table["attack"] = {"name": "mine:attack", "strength": 1, "from_round": 2}
    table["model"] = {"name": "mine:Network.small", "width": 3}
    assert errors(experiments, table) == []
    assert errors(experiments, {**table, "model": {"name": "mine", "width": 3}})


def test_every_key_has_a_description(experiments):
    budget = experiments.schema["definitions"]["AgentsSection"]["properties"]["budget"]
    assert budget["description"] == "M, the number of models that an agent asks for in a round"
    properties = experiments.schema["properties"].items()
    sections = {"data", "agents", "model", "training", "algorithm", "attack"}
    assert {name for name, key in properties if "description" not in key} == sections


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
