"""Grids: cells and baselines, errors, tuning, and the same bits after interruptions."""

import json
import os
import re
import shutil
import signal
import sys
import time
import tomllib
from pathlib import Path

import pytest
import tomli_w
import torch
from tests.processes import assert_gone, needs_proc, start
from tests.tiny import bits, cells_in_this_process, run_cli, tiny

import fedcb2o
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments.config.loading import load
from fedcb2o.experiments.grid import _grid_runner, _tuning, grids, load_grid
from fedcb2o.experiments.grid._eta import TimeEstimate, format_duration
from fedcb2o.experiments.grid._loading import _parse_grid, _read_built_in

FLIP = {"attack": {"name": "label_flip", "source": 9, "target": 4}}
ALIE = {"attack": {"name": "alie"}}
GAP = {
    "attack": {
        "name": "gap_aware",
        "data": {"name": "label_flip", "source": 9, "target": 4},
        "from_round": 1,
    }
}
BACKDOOR = {"attack": {"name": "backdoor", "target": 7, "share": 0.3, "size": 3}}
MEAN = {"algorithm": {"name": "dfedavgm"}}


def grid(**changes):
    """Return a tiny grid with some keys changed."""
    base = {key: value for key, value in tiny(rounds=2).items() if key != "attack"}
    axes = {
        "defences": {"FedCB2O": {}, "DFedAvgM": MEAN},
        "attacks": {"Label flip": FLIP, "ALIE": ALIE},
    }
    return {**base, "name": "grid", **axes, **changes}


def tuned(**changes):
    """Return a grid with two candidates of one defence."""
    candidates = [{"algorithm": {"alpha": 1.0}}, {"algorithm": {"alpha": 5.0}}]
    defences = {"FedCB2O": {"tune": candidates}, "DFedAvgM": MEAN}
    return grid(
        **{"defences": defences, "tuning": {"seeds": [1001], "attacks": ["ALIE"]}, **changes}
    )


# Cells and baselines


def test_cells_pair_every_defence_with_every_attack_on_the_same_seeds():
    cells = [cell for cell in load_grid(grid(seeds=[3, 4])).cells() if cell.kind == "cell"]
    assert [(cell.key.defence, cell.key.attack) for cell in cells] == [
        (defence, attack)
        for defence in ("FedCB2O", "DFedAvgM")
        for attack in ("Label flip", "ALIE")
    ]
    assert {cell.experiment.seeds for cell in cells} == {(3, 4)}
    assert cells[3].folder == "cells/dfedavgm/alie"
    assert cells[3].experiment.algorithm.name == "dfedavgm"
    assert cells[3].experiment.attack.name == "alie"
    assert cells[3].experiment.name == "dfedavgm--alie"


def test_a_defence_with_fewer_seeds_has_baselines_with_fewer_seeds():
    defences = {"FedCB2O": {}, "DFedAvgM": {**MEAN, "seeds": [4]}}
    plan = load_grid(grid(seeds=[3, 4], defences=defences))
    result = {(cell.key.defence, cell.experiment.seeds) for cell in plan.cells()}
    assert result == {("FedCB2O", (3, 4)), ("DFedAvgM", (4,))}
    assert {cell.folder for cell in plan.cells()} == {
        cell.folder for cell in load_grid(grid(seeds=[3, 4])).cells()
    }
    assert load_grid(plan.to_table()).cells() == plan.cells()


def test_attacks_with_the_same_goal_share_a_baseline():
    attacks = {
        "Label flip": FLIP,
        "Late": {"attack": {**FLIP["attack"], "from_round": 1}},
        "Gap": GAP,
        "ALIE": ALIE,
    }
    others = {"Shift": {"attack": {"name": "shifted_labels"}}, "Back": BACKDOOR}
    others |= {
        name: {"attack": {"name": f"{name}_flip", "target": 2}} for name in ("spread", "rarest")
    }
    weaker = {
        "Weak": {"attack": {**BACKDOOR["attack"], "share": 0.1}},
        "Small": {"attack": {"name": "backdoor", "target": 7}},
    }
    cells = load_grid(grid(attacks={**attacks, **others, **weaker}, defences={"One": {}})).cells()
    baseline_of = {cell.key.attack: cell.baseline for cell in cells if cell.kind == "cell"}
    assert baseline_of["Label flip"] == baseline_of["Late"] == baseline_of["Gap"]
    assert baseline_of["ALIE"] == baseline_of["Shift"] == baseline_of["Gap"]  # they have no goal
    assert baseline_of["Back"] == baseline_of["Weak"] != baseline_of["Small"]
    assert baseline_of["spread"] == baseline_of["rarest"]
    assert len(set(baseline_of.values())) == 4
    clean = {
        cell.folder.rpartition("/")[2]: cell.experiment for cell in cells if cell.kind == "clean"
    }
    removed = {
        cell.folder.rpartition("/")[2]: cell.experiment for cell in cells if cell.kind == "removed"
    }
    assert clean.keys() == removed.keys() == set(baseline_of.values())
    assert {experiment.agents.malicious_role for experiment in clean.values()} == {"clean"}
    assert {experiment.agents.malicious_role for experiment in removed.values()} == {"removed"}
    assert removed[baseline_of["Gap"]].settings()["attack"] == FLIP["attack"]
    assert clean[baseline_of["Gap"]].settings()["attack"] == FLIP["attack"]
    trigger = clean[baseline_of["Back"]].settings()["attack"]
    assert (trigger["name"], trigger["size"], trigger["target"]) == ("backdoor", 3, 7)
    folders = [cell.folder for cell in cells]
    for cell in cells:
        for role in ("clean", "removed") if cell.baseline else ():
            assert folders.index(f"{role}/one/{cell.baseline}") < folders.index(cell.folder)


def test_a_clean_baseline_is_the_clean_counterpart():
    plan = load_grid(grid(defences={"FedCB2O": {}}, attacks={"Label flip": FLIP}))
    counterpart = plan.experiment("", "FedCB2O", "Label flip").clean_counterpart().settings()
    (clean,) = (cell.experiment.settings() for cell in plan.cells() if cell.kind == "clean")
    result = {key for key in counterpart if counterpart[key] != clean.get(key)}
    assert result == {"name", "title", "description"}


def test_the_budget_of_a_baseline_without_attackers_is_at_most_the_number_of_peers():
    agents = {**tiny()["agents"], "budget": 5}
    cells = load_grid(grid(agents=agents, defences={"Mean": MEAN}, attacks={"ALIE": ALIE})).cells()
    by_kind = {cell.kind: cell.experiment.agents for cell in cells}
    attacked = by_kind["cell"]
    assert (attacked.benign, attacked.malicious, attacked.num_clusters) == (2, 1, 2)
    assert by_kind["clean"].budget == 5
    assert by_kind["removed"].budget == 3


def test_other_changes_of_an_attack_apply_to_its_baseline():
    attacks = {"Label flip": FLIP, "Alone": {**FLIP, "agents": {"colluders_own_model": False}}}
    cells = load_grid(grid(attacks=attacks, defences={"One": {}})).cells()
    assert [
        cell.experiment.agents.colluders_own_model for cell in cells if cell.kind == "clean"
    ] == [True, False]


def test_an_entry_without_attackers_has_no_baseline():
    calm = {"agents": {"malicious_role": "clean"}, **FLIP}
    cells = load_grid(
        grid(attacks={"Label flip": FLIP, "Calm": calm}, defences={"One": {}})
    ).cells()
    assert [cell.baseline is None for cell in cells if cell.key.attack == "Calm"] == [True]


def test_a_defence_has_the_algorithm_of_the_preset_that_it_extends():
    entry = {"extends": "digits-fedcb2o-released", "algorithm": {"alpha": 3.0}}
    plan = load_grid(grid(defences={"Released": entry}))
    released = load("digits-fedcb2o-released", {"algorithm.alpha": 3.0})
    experiment = plan.experiment("", "Released", next(iter(plan.attacks)))
    assert str(experiment.algorithm.build()) == str(released.algorithm.build())
    assert experiment.agents.hold_out == plan.shared["agents"].get("hold_out", True)
    message = "defence `A`: there is no preset `digits-fedcboo`. Did you mean `digits-fedcbo`"
    with pytest.raises(ConfigError, match=message):
        load_grid(grid(defences={"A": {"extends": "digits-fedcboo"}}))


def test_settings_multiply_the_cells():
    settings = {"Few": {"agents": {"malicious": 1}}, "Many": {"agents": {"malicious": 2}}}
    cells = [cell for cell in load_grid(grid(settings=settings)).cells() if cell.kind == "cell"]
    assert len(cells) == 8
    assert [cell.experiment.agents.malicious for cell in cells] == [1] * 4 + [2] * 4
    assert cells[0].folder == "cells/few/fedcb2o/label-flip"


def test_a_grid_may_extend_a_preset():
    plan = load_grid(
        {
            "extends": "digits-fedassay",
            "rounds": 3,
            "defences": {"A": {}},
            "attacks": {"ALIE": ALIE},
        }
    )
    experiment = plan.experiment("", "A", "ALIE")
    assert (experiment.rounds, experiment.agents.benign, experiment.seeds) == (3, 5, (0, 1, 2))
    assert plan.to_table()["agents"]["benign"] == 5
    assert "extends" not in plan.to_table()
    assert load_grid(plan.to_table()).to_table() == plan.to_table()


@pytest.mark.parametrize("name", list(grids()))
def test_every_entry_of_the_built_in_grids_is_valid(name):
    plan = _parse_grid(_read_built_in(name))
    assert plan.description
    assert plan.reference in plan.defences
    first = next(iter(plan.settings), ""), next(iter(plan.defences)), next(iter(plan.attacks))
    for axis, names in enumerate((plan.settings, plan.defences, plan.attacks)):
        for entry in names:
            plan.experiment(*first[:axis], entry, *first[axis + 1 :])


@pytest.mark.parametrize(
    "name", [name for name in grids() if "FedAssay" in _read_built_in(name)["defences"]]
)
def test_fedassay_in_grids_equals_its_preset(name):
    plan = _parse_grid(_read_built_in(name))
    first = next(iter(plan.settings), ""), "FedAssay", next(iter(plan.attacks))
    settings = plan.experiment(*first).settings()
    preset = fedcb2o.load("digits-fedassay").settings()
    assert settings["algorithm"] == preset["algorithm"]
    assert settings["agents"]["hold_out"] == preset["agents"]["hold_out"]
    assert settings["agents"]["validation"] == preset["agents"]["validation"]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(grids()))
def test_every_cell_of_the_built_in_grids_is_valid(name):
    load_grid(name)


def test_the_chosen_candidate_is_in_every_cell_of_its_defence_and_changes_no_folder():
    plan = load_grid(tuned())
    first, second = plan.cells({"FedCB2O": 0}), plan.cells({"FedCB2O": 1})
    assert [cell.folder for cell in first] == [cell.folder for cell in second]
    alphas = [cell.experiment.algorithm.parameters.get("alpha") for cell in second]
    assert alphas == [5.0] * 4 + [None] * 4
    trials = plan.trials()
    assert [(t.folder, t.experiment.evaluate_on, t.experiment.seeds) for t in trials] == [
        ("tuning/fedcb2o/1/alie", "tuning", (1001,)),
        ("tuning/fedcb2o/2/alie", "tuning", (1001,)),
    ]


# Errors

ODD = {
    "defences": {"FedCB2O": {"tune": [{}]}, "B": {"tune": [{}, {}]}},
    "tuning": {"seeds": [1], "attacks": ["ALIE"]},
}
WRONG = {
    "shared": ({"roundz": 3}, "the grid: there is no key `roundz` here. Did you mean `rounds`?"),
    "axis": ({"atacks": {}}, "the grid: there is no key `atacks` here. Did you mean `attacks`?"),
    "deep": (
        {"agents": {**tiny()["agents"], "buget": 3}},
        ("the keys that all cells share: there is no key `agents.buget`. Did"),
    ),
    "attack": (
        {"attacks": {"A": {"atack": {}}}},
        ("attack `A`: there is no key `atack` here. Did you mean `attack`?"),
    ),
    "parameter": (
        {"attacks": {"Label flip": FLIP, "A": {"attack": {"name": "alie", "zz": 1}}}},
        "the grid: attack `A`: attack `alie` has no parameter `zz`. Did you mean `z`?",
    ),
    "function": (
        {"attacks": {"A": {"attack": {"name": "ali"}}}},
        ("attack `A`: there is no attack `ali`. Did you mean"),
    ),
    "defence": (
        {"defences": {"A": {}, "B": {"algorithm": {"alfa": 1}}}},
        "the grid: defence `B`: algorithm `fedcb2o` has no parameter `alfa`. Did you mean `alpha`?",
    ),
    "both": (
        {"defences": {"A": {"agents": {"malicious_role": "benign"}}, "B": MEAN}},
        'the grid: defence `A`: malicious agents with `agents.malicious_role` = "benign"',
    ),
    "setting": (
        {"settings": {"S": {"agents": {"budget": 99}}}},
        "the grid: setting `S`: `agents.budget` must be between 1 and num_agents - 1 = 5, got 99",
    ),
    "aside": (
        {"set_aside": ["ALIEN"]},
        ("`set_aside` names `ALIEN`. Did you mean `ALIE`? The grid has: "),
    ),
    "reference": (
        {"reference": "FedCBO"},
        ("`reference` names `FedCBO`. Did you mean `FedCB2O`? The grid has: "),
    ),
    "none": ({"attacks": {}}, "the grid: `attacks`: table should have at least 1 item"),
    "kind": ({"attacks": {"A": 3}}, "the grid: `attacks.A`: input should be a valid table, got 3"),
    "names": (
        {"defences": {"Multi Krum": {}, "multi-krum": {}}},
        "defences `Multi Krum` and `multi-krum` would share the folder multi-krum: rename one",
    ),
    "signs": ({"defences": {"***": {}}}, "defence `***` needs a letter or a digit in its name"),
    "tune": (
        {"defences": {"A": {"tune": []}}},
        ("defence `A`: `tune` must be a list of tables of changes, got"),
    ),
    "few": (
        {"defences": {"A": {"seeds": [9]}}},
        ("defence `A`: `seeds` must be a list of some of the grid's, got [9]"),
    ),
    "untuned": (
        {"defences": {"A": {"tune": [{}]}}},
        ("`tune` of defence `A` needs a section [tuning]"),
    ),
    "unequal": (ODD, "must have the same number of candidates in `tune`, got `FedCB2O` 1, `B` 2"),
    "nothing to tune": (
        {"tuning": {"seeds": [1], "attacks": ["ALIE"]}},
        ("[tuning] is for defences with candidates"),
    ),
}
WRONG_TUNING = {
    "key": (
        {"tuning": {"sedes": [1]}},
        ("the grid: tuning: there is no key `sedes` here. Did you mean `seeds`?"),
    ),
    "missing": ({"tuning": {"seeds": [1]}}, "the grid: the key `tuning.attacks` is missing"),
    "same seeds": (
        {"tuning": {"seeds": [1000], "attacks": ["ALIE"]}},
        "`tuning.seeds` must differ from `seeds`, and both hold 1000",
    ),
    "attack": (
        {"tuning": {"seeds": [1], "attacks": ["ALIEN"]}},
        "`tuning.attacks` names `ALIEN`. Did you mean `ALIE`? The grid has: `Label flip`, `ALIE`",
    ),
    "names": (
        {"tuning": {"seeds": [1], "attacks": [{"name": "ALIE"}, "ALIE"]}},
        "two of `tuning.attacks` have one name: rename one",
    ),
    "own attack": (
        {"tuning": {"seeds": [1], "attacks": [{"attack": {"name": "ipm", "epz": 1}}]}},
        "the grid: attack `tuning attack 1`: attack `ipm` has no parameter `epz`. Did you mean `eps`?",
    ),
    "setting": (
        {"tuning": {"seeds": [1], "attacks": ["ALIE"], "setting": "S"}},
        "`tuning.setting` names `S`.",
    ),
    "candidate": (
        {"defences": {"A": {"tune": [{}, {"algorithm": {"alpha": -1}}]}}},
        "the grid: candidate 2 of `A`: `alpha` must be 0 or more, got -1",
    ),
    "candidate's key": (
        {"defences": {"A": {"tune": [{"algorthm": {}}]}}},
        "candidate 1 of `A`: there is no key `algorthm` here. Did you mean `algorithm`?",
    ),
}


CASES = {name: (grid(**changes), message) for name, (changes, message) in WRONG.items()}
for name, (changes, message) in WRONG_TUNING.items():
    CASES[f"tuning, {name}"] = (tuned(**changes), message)


@pytest.mark.parametrize(("table", "message"), CASES.values(), ids=CASES)
def test_an_error_names_the_entry_at_fault(table, message):
    with pytest.raises(ConfigError) as error:
        load_grid(table)
    assert message in str(error.value)


def test_an_unknown_grid_name_gives_a_one_line_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = "there is no grid `quik`. Did you mean `quick`? Built in: "
    assert message in run_cli("bench", "quik").one_line()
    assert run_cli("bench").one_line().startswith("which grid? Name its file")
    listed = run_cli("bench", "--list")
    assert [line.split()[0] for line in listed.out.splitlines()] == list(grids())
    assert "cannot read no.toml" in run_cli("bench", "no.toml").one_line()
    Path("mine").mkdir()
    Path("mine/grid.toml").write_text("")
    message = "mine is a grid's folder: `fedcb2o bench mine/grid.toml --out mine --resume` continues the grid"
    assert message in run_cli("bench", "mine").one_line()


def test_a_folder_with_other_files_gives_a_one_line_error(tmp_path):
    path, full = tmp_path / "grid.toml", tmp_path / "full"
    path.write_text(tomli_w.dumps(grid()))
    full.mkdir()
    (full / "file").write_text("")
    message = "full is not empty and holds no grid: choose another --out"
    assert message in run_cli("bench", path, "--out", full).one_line()


# Tuning


def write_trial(folder, number, attack, scores, defence="fedcb2o"):
    for seed, (accuracy, rate) in scores.items():
        seed_folder = folder / "tuning" / defence / str(number) / attack / f"seed-{seed}"
        seed_folder.mkdir(parents=True)
        (seed_folder.parent / "config.toml").write_text("")
        (seed_folder / "summary.json").write_text(
            json.dumps({"rounds": 1, "accuracy": accuracy, "attack_success_rate": rate})
        )


def test_tuning_by_worst_regret_compares_all_defences(tmp_path):
    candidates = [{"algorithm": {"alpha": 1.0}}, {"algorithm": {"alpha": 5.0}}]
    rival = {**MEAN, "tune": [{}, {"algorithm": {"selection": "prob_sampling"}}]}
    plan = load_grid(
        tuned(
            defences={"FedCB2O": {"tune": candidates}, "Mean": rival},
            tuning={"seeds": [7], "attacks": ["Label flip", "ALIE"], "score": "worst_regret"},
        )
    )
    write_trial(tmp_path, 1, "label-flip", {7: (0.9, 0.0)})
    write_trial(tmp_path, 1, "alie", {7: (0.5, None)})  # 0.3 behind the mean, on average 0.7
    write_trial(tmp_path, 2, "label-flip", {7: (0.7, 0.0)})  # 0.2 behind the first candidate
    write_trial(tmp_path, 2, "alie", {7: (0.6, None)})  # 0.2 behind the mean, on average 0.65
    write_trial(tmp_path, 1, "label-flip", {7: (0.6, 0.2)}, defence="mean")  # 0.5 behind
    write_trial(tmp_path, 1, "alie", {7: (0.8, None)}, defence="mean")
    write_trial(tmp_path, 2, "label-flip", {7: (0.3, 0.0)}, defence="mean")
    write_trial(tmp_path, 2, "alie", {7: (0.7, None)}, defence="mean")
    choices = {}
    assert _tuning.choose(tmp_path, plan, choices, {}) == {}
    assert choices["FedCB2O"]["scores"] == pytest.approx([-0.3, -0.2])
    assert choices["Mean"]["scores"] == pytest.approx([-0.5, -0.6])
    assert _tuning.best_candidates(choices) == {"FedCB2O": 1, "Mean": 0}


def test_the_candidate_with_the_best_mean_score_is_chosen_and_kept(tmp_path):
    attacks = {"tuning": {"seeds": [7, 8], "attacks": ["Label flip", "ALIE"]}}
    plan = load_grid(tuned(**attacks))
    write_trial(tmp_path, 1, "label-flip", {7: (0.9, 0.5), 8: (0.9, 0.3)})  # 0.4, 0.6
    # the mean of the four is 0.6
    write_trial(tmp_path, 1, "alie", {7: (0.8, None), 8: (0.6, None)})
    write_trial(tmp_path, 2, "label-flip", {7: (0.8, 0.0), 8: (0.8, 0.1)})  # 0.8, 0.7
    write_trial(tmp_path, 2, "alie", {7: (0.5, None), 8: (0.6, None)})  # 0.65, with less accuracy
    choices = _tuning.read_choices(tmp_path, plan)
    assert _tuning.choose(tmp_path, plan, choices, {}) == {}
    assert _tuning.best_candidates(choices) == {"FedCB2O": 1}
    written = json.loads((tmp_path / "tuning.json").read_text())["FedCB2O"]
    assert written["scores"] == pytest.approx([0.6, 0.65])
    result = written["by_attack"][0]
    assert result == {"Label flip": pytest.approx([0.4, 0.6]), "ALIE": pytest.approx([0.8, 0.6])}
    assert _tuning.read_choices(tmp_path, plan) == choices
    defences = {"FedCB2O": {"tune": [{"algorithm": {"alpha": 1.0}}, {"algorithm": {"alpha": 3.0}}]}}
    other = tuned(**attacks, defences=defences)
    message = "holds the choice for `FedCB2O` over other candidates, attacks or seeds"
    with pytest.raises(RunError, match=message):
        _tuning.read_choices(tmp_path, load_grid(other))


def test_failed_candidates_are_not_chosen_and_a_defence_with_only_failed_ones_fails(tmp_path):
    plan = load_grid(tuned())
    write_trial(tmp_path, 1, "alie", {1001: (0.2, None)})
    choices = {}
    assert _tuning.choose(tmp_path, plan, choices, {"tuning/fedcb2o/2/alie": "too much"}) == {}
    assert choices["FedCB2O"]["scores"] == [0.2, None]
    failures = _tuning.choose(
        tmp_path, plan, no_choices := {}, {f"tuning/fedcb2o/{k}/alie": "too much" for k in (1, 2)}
    )
    assert failures["FedCB2O"].startswith("none of its candidates could run; FedCB2O, candidate")
    assert no_choices == {}


def alphas(*values):
    return [{"algorithm": {"alpha": value}} for value in values]


@pytest.mark.parametrize(
    ("candidates", "scores", "expected"),
    [
        (alphas(1.0, 2.0, 5.0), [0.1, 0.3, 0.2], None),  # the best has two neighbours
        (alphas(1.0, 2.0, 5.0), [0.1, 0.2, 0.3], {"algorithm": {"alpha": 12.5}}),
        (alphas(2, 5, 1), [0.1, 0.2, 0.3], None),  # no whole number above 0 is below 1
        (alphas(4, 8, 2), [0.1, 0.2, 0.3], {"algorithm": {"alpha": 1}}),
        (alphas(0.0, 0.5), [0.3, 0.2], {"algorithm": {"alpha": -0.5}}),
        (alphas(1.0, 2.0, 5.0), [0.2, 0.1, None], {"algorithm": {"alpha": 0.5}}),
        (alphas(1.0, 2.0), [None, None], None),
        ([{"algorithm": {"alpha": 1.0}}, {}], [0.1, 0.2], None),
        (
            [{}, *alphas(1.0, 4.0)],
            [0.1, 0.2, 0.3],
            {"algorithm": {"alpha": 16.0}},
        ),  # the default is not a number
        (
            [{"algorithm": {"own_model": "judged"}}, {"algorithm": {"own_model": "trusted"}}],
            [0.1, 0.2],
            None,
        ),
    ],
)
def test_a_candidate_beyond_the_best_end_is_extrapolated(candidates, scores, expected):
    assert _tuning.extrapolate(candidates, scores) == expected


def test_candidates_are_added_until_the_best_has_two_neighbours_or_a_limit_is_reached(tmp_path):
    plan = load_grid(tuned(tuning={"seeds": [7], "attacks": ["ALIE"], "widen": 3}))
    for number, accuracy in ((1, 0.2), (2, 0.3)):
        write_trial(tmp_path, number, "alie", {7: (accuracy, None)})
    extended = _tuning.extend(tmp_path, plan, {}, {})
    assert extended.candidates["FedCB2O"] == alphas(1.0, 5.0, 25.0)
    assert extended.to_table() == plan.to_table()  # the table of the file does not change
    write_trial(tmp_path, 3, "alie", {7: (0.25, None)})
    assert _tuning.extend(tmp_path, extended, {}, {}) is extended
    assert _tuning.choose(tmp_path, extended, choices := {}, {}) == {}
    assert _tuning.best_candidates(choices) == {"FedCB2O": 1}
    reread = _tuning.read_choices(tmp_path, plan)
    assert _tuning.with_added_candidates(plan, reread).candidates == extended.candidates
    at_limit = load_grid(
        tuned(
            defences={"A": {"tune": alphas(0.0, 5.0)}},
            tuning={"seeds": [7], "attacks": ["ALIE"], "widen": 3},
        )
    )
    for number, accuracy in ((1, 0.3), (2, 0.2)):
        write_trial(tmp_path, number, "alie", {7: (accuracy, None)}, defence="a")
    assert _tuning.extend(tmp_path, at_limit, {}, {}) is at_limit  # alpha cannot be below 0


# Time estimates


def test_the_time_estimate_is_by_defence_and_none_before_the_first_result():
    estimate, cells = TimeEstimate(jobs=2), load_grid(grid(seeds=[0, 1])).cells()
    by_key = {(cell.kind, cell.key.defence, cell.key.attack): cell for cell in cells}
    fast = [by_key["cell", "DFedAvgM", attack] for attack in ("Label flip", "ALIE")]
    slow = [by_key["cell", "FedCB2O", attack] for attack in ("Label flip", "ALIE")]
    for cell in (*fast, *slow):
        estimate.add(cell, seeds=2)
    assert estimate.remaining() is None
    assert estimate.weight(fast[0]) == float("inf")
    assert estimate.finish(fast[0], 4.0) == 2.0
    # the other defence, still unknown, counts as the mean of all
    assert estimate.remaining() == pytest.approx(3 * 4 / 2)
    assert estimate.finish(slow[0], 20.0) == 10.0
    assert estimate.weight(slow[1]) == 20.0 > estimate.weight(fast[1]) == 4.0
    assert estimate.remaining() == pytest.approx(20.0)  # the longest cell alone
    assert estimate.finish(fast[1], None) is None  # a failed cell has no time
    assert estimate.remaining() == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.2, "8 s"), (99.0, "99 s"), (720.0, "12 min"), (12600.0, "3.5 h")]
)
def test_durations_are_formatted_in_a_suitable_unit(seconds, text):
    assert format_duration(seconds) == text


# Complete runs


# the better of two candidates is always at an end
WIDENED = {"seeds": [1001], "attacks": ["ALIE"], "widen": 1}


def bench_here(*arguments):
    """Run `fedcb2o bench ARGUMENTS` with all cells in this process."""
    with cells_in_this_process():
        return run_cli("bench", *arguments, "--jobs", 1)


@pytest.fixture(scope="module")
def reference_grid(tmp_path_factory):
    """Return the file of a grid and the folder of an uninterrupted run of it."""
    folder = tmp_path_factory.mktemp("grid")
    path = folder / "mine.toml"
    path.write_text(tomli_w.dumps(tuned(name="mine", rounds=6, tuning=WIDENED)))
    done = bench_here(path, "--out", folder / "undisturbed")
    assert done.status == 0, done.err
    assert f"For the matrices: fedcb2o report {folder / 'undisturbed'}" in done.err
    return path, folder / "undisturbed"


def grid_bits(folder):
    """Return the bits of a grid that its file determines, without times."""
    cells = json.loads((folder / "cells.json").read_text())["cells"]
    seeds = {"tuning": 1001}
    run_bits = {
        cell["folder"]: bits(folder / cell["folder"], seeds.get(cell["kind"], 1000))
        for cell in cells
    }
    untimed = [{**cell, "seconds": None} for cell in cells]
    return {
        **run_bits,
        "cells": untimed,
        **{n: (folder / n).read_bytes() for n in ("grid.toml", "tuning.json")},
    }


@pytest.mark.usefixtures("no_figures")
def test_a_grid_has_the_same_bits_as_separate_runs_of_its_cells(reference_grid, tmp_path):
    path, folder = reference_grid
    chosen = _tuning.best_candidates(_tuning.read_choices(folder, load_grid(path)))
    plan = _tuning.with_added_candidates(
        load_grid(path), _tuning.read_choices(folder, load_grid(path))
    )
    assert len(plan.candidates["FedCB2O"]) == 3
    cells = plan.cells(chosen)
    assert {cell.folder for cell in cells} == {
        str(p.parent.relative_to(folder)) for p in folder.glob("[cr]*/*/*/config.toml")
    }
    for cell in (cells[0], cells[-1]):
        fedcb2o.run(cell.experiment, out=tmp_path / cell.kind, workers=1)
        assert bits(tmp_path / cell.kind) == bits(folder / cell.folder)
    assert run_cli("report", folder, "--out", tmp_path / "report").status == 0
    page = (tmp_path / "report" / "report.html").read_text()
    assert "partial" not in page


def test_the_command_line_changes_the_settings_that_cells_share(tmp_path):
    path, out = tmp_path / "mine.toml", tmp_path / "grid"
    longer = {"rounds": 3, "training": {**tiny()["training"], "batch_size": 4}}
    defences = {
        "FedCB2O": {"seeds": [4, 5]},
        "DFedAvgM": {**MEAN, "seeds": [6]},
        "FedCBO": {**longer},
    }
    path.write_text(tomli_w.dumps(grid(seeds=[4, 5, 6], defences=defences, attacks={"ALIE": ALIE})))
    changes = ("--set", "rounds=1", "--set", "training.batch_size=16", "--seeds", "4,7")
    assert bench_here(path, "--out", out, *changes).status == 0
    table = tomllib.loads((out / "grid.toml").read_text())
    assert (table["seeds"], table["rounds"], table["training"]["batch_size"]) == ([4, 7], 1, 16)
    paths = {path.parent.parent.name: path for path in out.glob("cells/*/alie/config.toml")}
    configs = {name: tomllib.loads(path.read_text()) for name, path in paths.items()}
    values = {
        name: (config["seeds"], config["rounds"], config["training"]["batch_size"])
        for name, config in configs.items()
    }
    expected = {"fedcb2o": ([4], 1, 16), "dfedavgm": ([4, 7], 1, 16), "fedcbo": ([4, 7], 3, 4)}
    assert values == expected
    with pytest.raises(ConfigError, match="grid `quick` with changes: there is no key `tau`"):
        load_grid("quick", {"tau": 1})
    for wrong in ({"defences": 3}, {"defences": {"FedCB2O": {"seeds": 3}}}):
        with pytest.raises(ConfigError, match=r"^the grid with changes: "):
            load_grid(grid(**wrong), {"seeds": [4]})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device")
def test_a_missing_device_gives_a_one_line_error_before_the_grid_starts(tmp_path):
    message = run_cli("bench", "quick", "--device", "cuda", "--out", tmp_path / "grid").one_line()
    assert message.startswith("`device` = 'cuda' is not a device that PyTorch")
    assert not list(tmp_path.glob("grid/*"))


def test_a_folder_with_runs_needs_resume_and_the_same_grid(reference_grid, tmp_path):
    path, folder = reference_grid
    text = "already holds runs of this grid: --resume continues it"
    assert text in run_cli("bench", path, "--out", folder).one_line()
    with pytest.raises(RunError, match="resume=True continues it, or choose another `out`"):
        fedcb2o.bench(path, out=folder)
    other = tmp_path / "other.toml"
    changes = {
        "FedCB2O, Label flip: `attack.source` is 9 there and 8 here": {
            "attacks": {
                "Label flip": {"attack": {"name": "label_flip", "source": 8, "target": 4}},
                "ALIE": ALIE,
            }
        },
        "with `rounds` = 6 and the grid says 2": {"rounds": 2},
        "holds another grid, without a cell of this one": {
            "attacks": {"IPM": {"attack": {"name": "ipm"}}},
            "tuning": {"seeds": [1001], "attacks": ["IPM"]},
            "defences": {"FedCBO": {"tune": [{}]}},
        },
        "holds the choice for `FedCB2O` over other candidates": {
            "tuning": {"seeds": [1002], "attacks": ["ALIE"]}
        },
    }
    for message, change in changes.items():
        other.write_text(tomli_w.dumps(tuned(**{"name": "mine", "rounds": 6, **change})))
        assert message in run_cli("bench", other, "--out", folder, "--resume").one_line()
    plan = load_grid(
        tuned(name="mine", rounds=6, attacks={"Label flip": FLIP, "ALIE": ALIE, "Gap": GAP})
    )
    choices = _tuning.read_choices(folder, plan)
    before = (folder / "grid.toml").read_bytes()
    _grid_runner._open_grid(
        folder,
        plan,
        choices,
        {},
        [*plan.trials(), *plan.cells(_tuning.best_candidates(choices))],
        True,
    )  # cells may be added
    (folder / "grid.toml").write_bytes(before)


def test_a_damaged_file_in_a_grid_fails_only_its_cell(reference_grid, tmp_path):
    path, folder = reference_grid
    shutil.copytree(folder, tmp_path / "grid")
    out, before = tmp_path / "grid", grid_bits(folder)
    lost, empty, changed = (path.parent for path in sorted(out.glob("cells/*/*/config.toml"))[:3])
    (lost / "config.toml").write_text("rounds = = 3")
    (empty / "seed-1000" / "summary.json").write_text("")
    metrics = changed / "seed-1000" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("0.1", "0.2", 1))
    (out / "cells.json").write_text("[]")
    assert "cells.json is damaged" in run_cli("report", out, "--out", tmp_path / "page").one_line()
    done = bench_here(path, "--out", out, "--resume")
    assert done.status == 1
    assert "3 of 11 cells failed" in done.err
    assert f"{empty / 'seed-1000' / 'summary.json'} is damaged" in done.err
    assert f"{metrics} is damaged: it does not hold what was written" in done.err
    assert f"{out / 'cells.json'} was damaged" in done.err
    assert f"{lost / 'config.toml'} cannot be read" in done.err
    for cell in (changed, empty):
        shutil.rmtree(cell / "seed-1000")
    shutil.rmtree(lost)
    assert bench_here(path, "--out", out, "--resume").status == 0
    assert grid_bits(out) == before
    chosen = out / "tuning.json"
    chosen.write_text(
        chosen.read_text().replace('"best": 0', '"best": 1').replace('"best": 2', '"best": 1')
    )
    for arguments in (
        ("report", out, "--out", tmp_path / "page"),
        ("bench", path, "--out", out, "--resume"),
    ):
        assert "tuning.json is damaged" in run_cli(*arguments).one_line()


def start_bench(path, out, jobs=2):
    return start("bench", path, "--out", out, "--jobs", jobs, "--resume", cwd=path.parent)


def wait_for_runs(out, count):
    """Wait until `count` runs have ended and another one has started a round."""
    deadline = time.monotonic() + 90
    while len(list(out.rglob("summary.json"))) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.15)


@needs_proc
@pytest.mark.slow
def test_a_grid_resumed_after_a_kill_and_an_interrupt_has_the_same_bits(reference_grid, tmp_path):
    path, folder = reference_grid
    out = tmp_path / "disturbed"
    process = start_bench(path, out, jobs=1)
    wait_for_runs(out, 1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert_gone(process.pid)
    process = start_bench(path, out)
    wait_for_runs(out, 4)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C on a terminal: every process gets it
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, ""), errors
    assert errors.splitlines()[-1].startswith("Interrupted. What is written stays"), errors
    assert "Traceback" not in errors
    assert_gone(process.pid)
    assert_resumed_bits(folder, path, out)


def assert_resumed_bits(folder, path, out):
    """Resume the grid that was stopped in `out`; assert that it has the bits of `folder`."""
    done = len(list(out.rglob("summary.json")))
    assert done < 15
    (out / "tuning.json.tmp").write_text("half")  # as a kill may leave it
    last = bench_here(path, "--out", out, "--resume")
    assert last.status == 0, last.err
    before = re.search(r"(\d+) of 1[45] cells were done before", last.err)
    assert done <= (int(before[1]) if before else 0) < 15
    assert grid_bits(out) == grid_bits(folder)
    assert not list(out.rglob("*.tmp"))


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 2, 6])
def test_workers_of_a_killed_grid_end_by_themselves(reference_grid, tmp_path, count):
    path, folder = reference_grid
    out = tmp_path / "disturbed"
    process = start_bench(path, out)
    wait_for_runs(out, count)
    time.sleep(3 * (not count))
    process.kill()  # only the main process
    process.communicate(timeout=60)
    # at once: it waits for the workers of the killed process
    assert_resumed_bits(folder, path, out)
    assert_gone(process.pid)


USER_MODULE = """
from pathlib import Path

from fedcb2o import Shard
from fedcb2o.errors import ConfigError


def attack(shard, draw):
    if not Path("ready").exists():
        raise ConfigError("the tide is out")
    return Shard(shard.x, shard.y.flip(0))
"""


@pytest.mark.usefixtures("no_figures")
@pytest.mark.usefixtures("no_figures")
def test_a_failed_cell_is_reported_does_not_stop_others_and_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "parts.py").write_text(USER_MODULE)
    attacks = {"Mine": {"attack": {"name": "parts:attack"}}, "ALIE": ALIE}
    (tmp_path / "mine.toml").write_text(
        tomli_w.dumps(grid(attacks=attacks, defences={"DFedAvgM": MEAN}))
    )
    done = run_cli("bench", "mine.toml", "--out", "out", "--jobs", 1)
    assert (done.status, done.out) == (1, "")
    assert "Failed: DFedAvgM, Mine: the tide is out" in done.err
    assert done.err.splitlines()[-1].startswith("1 of 4 cells failed; --resume tries them again.")
    assert fedcb2o.Run(tmp_path / "out/cells/dfedavgm/alie").complete
    report = run_cli("report", tmp_path / "out", "--out", tmp_path / "report")
    assert "Note: DFedAvgM, Mine failed: the tide is out." in report.err
    assert "failed" in (tmp_path / "report/matrices/accuracy.md").read_text()
    (tmp_path / "ready").write_text("")
    again = bench_here("mine.toml", "--out", "out", "--resume")
    assert again.status == 0, again.err
    assert "3 of 4 cells were done before" in again.err
    assert [
        cell["error"] for cell in json.loads((tmp_path / "out/cells.json").read_text())["cells"]
    ] == [None] * 4
