"""Attack strengths: probes, the choice of the worst strength, and a grid with several strengths."""

import json
import shutil

import pytest
import tomli_w
from tests.experiments.test_grid import ALIE, FLIP, MEAN, grid
from tests.tiny import cells_in_this_process, run_cli

from fedcb2o import bench, records
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments.grid import _attack_strength, load_grid
from fedcb2o.records import Run, _former_settings

Z = [{"attack": {"z": z}} for z in (0.5, 2.0)]
LATE = {**FLIP, "strengths": [{}, {"attack": {"from_round": 1}}]}


@pytest.fixture(autouse=True)
def one_process():
    with cells_in_this_process():
        yield


def grid_with_strengths(**changes):
    """Return a grid with two strengths of two attacks; one defence has two candidates."""
    candidates = [{"algorithm": {"alpha": 1.0}}, {"algorithm": {"alpha": 5.0}}]
    table = {
        "attacks": {"Label flip": LATE, "ALIE": {**ALIE, "strengths": Z}},
        "defences": {"FedCB2O": {"tune": candidates}, "DFedAvgM": MEAN},
        "tuning": {"seeds": [1001], "attacks": ["ALIE"]},
        "adversary": {"seeds": [1002, 1003]},
    }
    return grid(**{**table, **changes})


def test_probes_run_every_strength_against_every_tuned_defence():
    plan = load_grid(grid_with_strengths())
    probes = plan.probes({"FedCB2O": 1})
    assert [probe.folder for probe in probes] == [
        f"strengths/{defence}/{attack}/{number}"
        for defence in ("fedcb2o", "dfedavgm")
        for attack in ("label-flip", "alie")
        for number in (1, 2)
    ]
    assert {(probe.experiment.seeds, probe.experiment.evaluate_on) for probe in probes} == {
        ((1002, 1003), "tuning")
    }
    assert [probe.experiment.attack.from_round for probe in probes[:2]] == [0, 1]
    assert [probe.experiment.attack.parameters["z"] for probe in probes[2:4]] == [0.5, 2.0]
    assert probes[3].experiment.algorithm.parameters["alpha"] == 5.0
    assert probes[3].key.title == "FedCB2O, ALIE, strength 2"
    assert load_grid(grid()).probes() == []


def test_the_worst_strength_changes_only_the_cell_of_its_defence():
    plan = load_grid(grid_with_strengths())
    before, after = plan.cells(), plan.cells({}, {("", "DFedAvgM", "ALIE"): 1})
    assert [cell.folder for cell in before] == [cell.folder for cell in after]
    attacks = {cell.folder: cell.experiment.attack for cell in after}
    assert attacks["cells/dfedavgm/alie"].parameters == {"z": 2.0}
    assert attacks["cells/fedcb2o/alie"].parameters == {}


def test_each_setting_has_its_own_probes_unless_one_setting_is_named():
    settings = {"One": {}, "Two": {"agents": {"budget": 2}}}
    separate = load_grid(grid_with_strengths(settings=settings))
    assert {probe.key.setting for probe in separate.probes()} == {"One", "Two"}
    named = load_grid(
        grid_with_strengths(settings=settings, adversary={"seeds": [7], "setting": "Two"})
    )
    assert {probe.key.setting for probe in named.probes()} == {"Two"}
    cells = named.cells({}, {("Two", "DFedAvgM", "ALIE"): 1})
    z_values = [
        cell.experiment.attack.parameters.get("z")
        for cell in cells
        if cell.folder.endswith("dfedavgm/alie")
    ]
    assert z_values == [2.0, 2.0]


WRONG = {
    "no section": (
        {"adversary": None},
        ("`strengths` of attack `ALIE` need a section [adversary] with `seeds`"),
    ),
    "nothing": (
        {"attacks": {"ALIE": ALIE}},
        ("[adversary] is for attacks with several strengths, and none has"),
    ),
    "seeds": (
        {"adversary": {"seeds": [1000]}},
        ("`adversary.seeds` must differ from `seeds`, and both hold 1000"),
    ),
    "key": (
        {"adversary": {"sedes": [1]}},
        ("adversary: there is no key `sedes` here. Did you mean `seeds`?"),
    ),
    "setting": ({"adversary": {"seeds": [1], "setting": "S"}}, "`adversary.setting` names `S`."),
    "list": (
        {"attacks": {"ALIE": {**ALIE, "strengths": []}}},
        ("attack `ALIE`: `strengths` must be a list of tables"),
    ),
    "entry": (
        {"attacks": {"ALIE": {**ALIE, "strengths": [{"atack": {}}]}}},
        "strength 1 of `ALIE`: there is no key `atack` here. Did you mean `attack`?",
    ),
    "parameter": (
        {"attacks": {"ALIE": {**ALIE, "strengths": [{}, {"attack": {"zz": 1}}]}}},
        "strength 2 of `ALIE`: attack `alie` has no parameter `zz`. Did you mean `z`?",
    ),
    "aim": (
        {
            "attacks": {
                "Label flip": {**FLIP, "strengths": [{}, {"attack": {"target": 5}}]},
                "ALIE": ALIE,
            }
        },
        "strength 2 of `Label flip` changes its baseline, so that strengths cannot be compared",
    ),
    "population": (
        {"attacks": {"ALIE": {**ALIE, "strengths": [{"agents": {"malicious": 2}}]}}},
        "strength 1 of `ALIE` changes its baseline",
    ),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_an_error_names_the_entry_at_fault(case):
    table = {
        key: value for key, value in grid_with_strengths(**case[0]).items() if value is not None
    }
    with pytest.raises(ConfigError) as error:
        load_grid(table)
    assert case[1] in str(error.value)


def write_probe(folder, defence, attack, number, scores):
    for seed, (accuracy, rate) in zip((1002, 1003), scores, strict=True):
        seed_folder = folder / "strengths" / defence / attack / str(number) / f"seed-{seed}"
        seed_folder.mkdir(parents=True)
        (seed_folder.parent / "config.toml").write_text("")
        summary = {"rounds": 1, "accuracy": accuracy, "attack_success_rate": rate}
        (seed_folder / "summary.json").write_text(json.dumps(summary))


def test_the_most_harmful_strength_is_chosen_and_all_results_are_kept(tmp_path):
    plan = load_grid(grid_with_strengths())
    for defence in ("fedcb2o", "dfedavgm"):
        # harm is the success rate, not the accuracy
        write_probe(tmp_path, defence, "label-flip", 1, [(0.5, 0.25), (0.5, 0.25)])
        write_probe(tmp_path, defence, "label-flip", 2, [(0.9, 0.5), (0.9, 0.125)])
        write_probe(tmp_path, defence, "alie", 1, [(0.75, None), (0.5, None)])
        write_probe(tmp_path, defence, "alie", 2, [(0.75, None), (0.75, None)])
    errors = {f"strengths/dfedavgm/alie/{k}": "too much" for k in (1, 2)} | {
        "strengths/fedcb2o/alie/1": "too much"
    }
    chosen = _attack_strength.read_choices(tmp_path, plan)
    assert _attack_strength.choose(tmp_path, plan, chosen, errors) == {
        (
            "",
            "DFedAvgM",
            "ALIE",
        ): "it could be run at no strength; DFedAvgM, ALIE, strength 2: too much"
    }
    assert _attack_strength.worst_strengths(chosen) == {
        ("", "FedCB2O", "Label flip"): 1,
        ("", "FedCB2O", "ALIE"): 1,
        ("", "DFedAvgM", "Label flip"): 1,
    }
    assert _attack_strength.read_choices(tmp_path, plan) == chosen
    flip, alie = (chosen["", "FedCB2O", attack]["tried"] for attack in ("Label flip", "ALIE"))
    assert flip[1] == {"harm": 0.3125, "accuracy": [0.9, 0.9], "attack_success_rate": [0.5, 0.125]}
    assert alie == [
        {"harm": None},
        {"harm": 0.25, "accuracy": [0.75, 0.75], "attack_success_rate": None},
    ]
    other = grid_with_strengths(attacks={"Label flip": LATE, "ALIE": {**ALIE, "strengths": Z[:1]}})
    message = "the choice for `ALIE` against `FedCB2O` over other strengths or seeds"
    with pytest.raises(RunError, match=message):
        _attack_strength.read_choices(tmp_path, load_grid(other))


def test_a_grid_runs_each_defence_under_its_worst_strength(tmp_path):
    path, out = tmp_path / "mine.toml", tmp_path / "out"
    attacks = {"ALIE": {"attack": {"name": "alie", "estimated_from": "benign", "z": 0.0}}}
    attacks["ALIE"]["strengths"] = [{}, {"attack": {"z": 500.0}}]
    path.write_text(
        tomli_w.dumps(
            grid_with_strengths(name="mine", attacks=attacks, adversary={"seeds": [1002]})
        )
    )
    assert run_cli("bench", path, "--out", out, "--jobs", 1).status == 0
    choices = json.loads((out / "strengths.json").read_text())["choices"]
    assert {choice["defence"] for choice in choices} == {"FedCB2O", "DFedAvgM"}
    for choice in choices:
        attack = Run(out / "cells" / choice["defence"].lower() / "alie").config["attack"]
        assert attack["z"] == (0.0, 500.0)[choice["worst"]]
        assert choice["tried"][choice["worst"]]["harm"] == max(
            result["harm"] for result in choice["tried"]
        )
        for number, result in enumerate(choice["tried"], start=1):
            probed = Run(out / "strengths" / choice["defence"].lower() / "alie" / str(number))
            assert result["accuracy"] == [probed.summary_of(1002)["accuracy"]]
    before = {p: p.read_bytes() for p in out.rglob("summary.json")}
    assert run_cli("bench", path, "--out", out, "--jobs", 1, "--resume").status == 0
    (out / "strengths.json").unlink()  # a lost file is written again from the runs
    assert run_cli("bench", path, "--out", out, "--jobs", 1, "--resume").status == 0
    assert json.loads((out / "strengths.json").read_text())["choices"] == choices
    assert {p: p.read_bytes() for p in out.rglob("summary.json")} == before


@pytest.mark.slow
def test_a_grid_with_former_names_is_resumed_with_current_names(tmp_path):
    attacks = {
        "Random": {"attack": {"name": "random_model"}},
        "Sparse": {
            "attack": {"name": "hybrid_sparse"},
            "strengths": [{"attack": {"kept_share": share}} for share in (0.1, 0.5)],
        },
    }
    candidates = [{"algorithm": {"guards": {"max_distance": distance}}} for distance in (1.0, 2.0)]
    table = grid(
        rounds=1,
        attacks=attacks,
        defences={"FedCB2O": {"tune": candidates}},
        tuning={"seeds": [1001], "attacks": ["Random"]},
        adversary={"seeds": [1002]},
    )
    assert not bench(table, out=tmp_path, jobs=1).failed
    finished = {path: path.read_bytes() for path in tmp_path.rglob("summary.json")}

    # Write the files with the former names, and remove one cell.
    shutil.rmtree(tmp_path / "cells/fedcb2o/sparse")
    for name in ("tuning.json", "strengths.json"):
        content = records.read_json_with_checksum(tmp_path / name)
        former = _former_settings.original_changes(content)
        assert former != content
        records.write_json_with_checksum(tmp_path / name, former)
    for path in tmp_path.rglob("config.toml"):
        former = _former_settings.original_settings(records.read_config(path))
        assert former.get("attack", {}).get("name") != "random_model"
        records.write_toml(path, former)

    assert not bench(table, out=tmp_path, jobs=1, resume=True).failed
    assert {path: path.read_bytes() for path in tmp_path.rglob("summary.json")} == finished
