"""The assessment by the fixed adversary, entries, and the board."""

import dataclasses
import tomllib

import numpy as np
import pytest
import torch
from paper import board
from tests.tiny import cells_in_this_process, run_cli, tiny

from fedcb2o import knows, records
from fedcb2o.errors import RunError
from fedcb2o.experiments import run
from fedcb2o.experiments.grid import _assessment, load_grid
from fedcb2o.experiments.grid._assessment import (
    FixedAdversary,
    assess,
    assessment_grid,
    fixed_adversary,
)
from fedcb2o.report.board import (
    Entry,
    board_figure,
    board_table,
    entry_toml,
    make_entry,
    ranked,
    read_entry,
)

DEFINITIONS = {"1": "ea578ab91126a399d42eb1a9b4a9c59935d080708c679744a980e3499a8da3f9"}
"""Checksums of the frozen files by version. A changed definition is a new version."""


@pytest.fixture(autouse=True)
def one_process():
    with cells_in_this_process():
        yield


def small_adversary(**changes):
    """Return an adversary of two shares, two attacks and two rounds on few digits."""
    table = {
        "title": "Small",
        "shared": {
            "rounds": 2,
            "baselines": ["clean"],
            "agents": {"num_clusters": 1, "budget": 2, "hold_out": False, "validation": 1.0},
            "adversary": {"seeds": [2000], "setting": "Digits, 40%, full, even"},
        },
        "quick": {"seeds": [0]},
        "full": {"seeds": [0, 1]},
        "centre": {"share": "40%", "graph": "full", "skew": "even"},
        "data": {
            "Digits": {
                "data": {"name": "digits"},
                "model": {"name": "mlp", "hidden": [4]},
                "training": {"gamma": 0.2, "batch_size": 10, "local_epochs": 1},
                "agents": {"benign_samples": 20},
            }
        },
        "shares": {
            "20%": {"agents": {"benign": 4, "malicious": 1}},
            "40%": {"agents": {"benign": 3, "malicious": 2}},
        },
        "graphs": {"full": {}},
        "skews": {"even": {}},
        "attacks": {
            "Flip": {"attack": {"name": "label_flip", "source": 1, "target": 0}},
            "Noise": {
                "attack": {"name": "random_model"},
                "strengths": [{"attack": {"scale": s}} for s in (1.0, 10.0)],
            },
        },
        **changes,
    }
    return FixedAdversary("1", table, "0" * 64)


@pytest.fixture
def method(tmp_path):
    """Return the file of a stranger's rule, by which agents keep their own models."""
    (tmp_path / "strange.py").write_text(
        "import torch\n\n\ndef own(inputs):\n"
        "    return torch.zeros(len(inputs.received.ids), dtype=torch.float64)\n",
        encoding="utf-8",
    )
    path = tmp_path / "mine.toml"
    path.write_text(
        'title = "Mine"\nrounds = 99\n[algorithm]\nname = "by_rule"\nrule = "strange:own"\n',
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize("version", DEFINITIONS)
def test_a_version_of_the_adversary_is_frozen(version):
    assert fixed_adversary(version).sha256 == DEFINITIONS[version]


def test_the_newest_version_is_among_the_frozen_ones():
    assert list(DEFINITIONS)[-1] == _assessment.VERSION


def test_the_quick_form_varies_one_axis_and_the_full_one_all():
    adversary = fixed_adversary()
    quick, full = (adversary.settings(full=full) for full in (False, True))
    # Per data set 5 shares, and 2 other graphs and 2 other skews at the central one.
    assert len(quick) == 2 * (5 + 2 + 2)
    assert len(full) == 2 * 5 * 3 * 3
    assert set(quick) < set(full)
    assert adversary.central_setting in quick
    for name, changes in full.items():
        share = name.split(", ")[1]
        benign, malicious = (changes["agents"][key] for key in ("benign", "malicious"))
        assert (benign + malicious, f"{malicious / 25:.0%}") == (25, share)


def test_a_method_keeps_its_algorithm_and_its_validation_alone():
    grid = assessment_grid("digits-fedcb2o-released", adversary=small_adversary())
    (defence,) = grid["defences"].values()
    assert defence["algorithm"] == {"name": "fedcb2o", "variant": "released"}
    assert defence["agents"] == {
        "hold_out": True,
        "validation": 0.5,
        "split": "released",
        "validation_loss": "batches",
    }
    plan = load_grid(grid)
    assert plan.experiment("Digits, 20%, full, even", "FedCB2O (released)", "Flip").rounds == 2


def test_a_file_without_a_method_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("rounds = 3\n", encoding="utf-8")
    message = run_cli("assess", path).one_line()
    assert message.endswith("has no section [algorithm], which is what is assessed: add it")


def test_an_assessment_runs_once_and_its_entry_has_the_worst_values(tmp_path, method, monkeypatch):
    adversary = small_adversary()
    result = assess(method, adversary=adversary, out=tmp_path / "out")
    assert (result.failed, result.folder) == ({}, tmp_path / "out")
    entry = make_entry(result.folder)
    assert (entry.title, entry.form, entry.seeds) == ("Mine", "quick", 1)
    assert entry.algorithm == {"name": "by_rule", "rule": "strange:own"}
    assert 0.05 < entry.cost < 20
    assert [row.share for row in entry.settings] == ["20%", "40%"]
    assert entry.curve("Digits") == entry.settings

    # By hand, from the records of single runs.
    def summary(attack):
        folder = next(result.folder.glob(f"cells/*20-full-even/mine/{attack}"))
        return records.read_json(folder / "seed-0" / "summary.json")

    flip, noise = summary("flip"), summary("noise")
    row = entry.settings[0]
    assert row.mean == round(100 * min(flip["accuracy"], noise["accuracy"]), 1)
    assert row.worst == round(100 * min(flip["accuracy_worst"], noise["accuracy_worst"]), 1)
    assert row.success_attack == "Flip"
    # Agents that train alone are not harmed.
    assert (row.mean, row.success) == (row.no_attack, 0.0)

    monkeypatch.setattr(_assessment, "run_loaded", lambda *_, **__: pytest.fail("a run"))
    assess(method, adversary=adversary, out=tmp_path / "out")
    path = tmp_path / "entry.toml"
    path.write_text(entry_toml(entry), encoding="utf-8")
    assert read_entry(path) == entry
    # An entry is a configuration of its method.
    again = assessment_grid(path, adversary=adversary)
    assert again["defences"] == assessment_grid(method, adversary=adversary)["defences"]


def test_a_wrong_entry_is_refused_with_the_place(tmp_path):
    path = tmp_path / "entry.toml"
    text = entry_toml(board.entries()[0])
    path.write_text(text.replace("mean = ", "mean = 1", 1), encoding="utf-8")
    with pytest.raises(RunError, match=r"entry.toml: `settings.0.mean`: Input should be less than"):
        read_entry(path)
    with pytest.raises(RunError, match="cannot read"):
        read_entry(tmp_path / "none.toml")


def test_entries_follow_the_schema_and_name_a_frozen_adversary():
    entries = board.entries()
    assert entries
    assert len({entry.title for entry in entries}) == len(entries)
    for entry in entries:
        assert entry.definition == DEFINITIONS[entry.adversary]
        names = [", ".join([r.data, r.share, r.graph, r.skew]) for r in entry.settings]
        adversary = fixed_adversary(entry.adversary)
        assert names == list(adversary.settings(full=entry.form == "full"))
        for row in entry.settings:
            assert {row.mean_attack, row.worst_attack, row.success_attack} <= {
                *adversary.table["attacks"]
            }
            assert row.worst <= row.mean


def test_the_board_ranks_by_the_mean_owner():
    table = tomllib.loads(entry_toml(board.entries()[0]))
    low, high = (Entry(**{**table, "title": title}) for title in ("Low", "High"))
    settings = [row.model_copy(update={"mean": 0.0}) for row in low.settings]
    low = low.model_copy(update={"settings": settings, "link": "https://example.org"})
    assert [entry.title for entry in ranked([low, high])] == ["High", "Low"]
    shown = board_table([low, high])
    assert list(shown.index) == ["High", "[Low](https://example.org)"]
    assert shown.loc["[Low](https://example.org)", "Digits: mean owner"] == "0.0"
    figure = board_figure([low, high], "Digits")
    assert [axes.get_title(loc="left") for axes in figure.axes][:2] == ["High", "Low"]


def test_sample_losses_of_an_attacker_equal_its_losses_and_have_a_gradient(tmp_path):
    seen = []

    @knows("benign")
    def watching(view, draw):
        models = view.benign()
        torch.testing.assert_close(
            view.sample_losses(models), view.losses(models).per_sample, check_dtype=False
        )
        # The derivative along the gradient, by central differences.
        point = models[0].clone().requires_grad_()
        with torch.enable_grad():
            loss = view.sample_losses(point.unsqueeze(0)).mean()
            (gradient,) = torch.autograd.grad(loss, point)
        step = 1e-2 * gradient / gradient.norm()
        high, low = view.sample_losses(torch.stack([models[0] + step, models[0] - step])).mean(1)
        assert float(high - low) / 2e-2 == pytest.approx(float(gradient.norm()), rel=0.05)
        # Other labels, and a model at a time.
        wanted = torch.zeros_like(view.data.y).expand(1, -1)
        changed = view.sample_losses(models[:1], wanted)[0]
        same = view.data.y == 0
        assert torch.equal(changed[same], view.sample_losses(models[:1])[0, same])
        seen.append(view.n)
        return models.mean(0)

    run(tiny(attack={"name": watching}, rounds=1), out=tmp_path, workers=1)
    assert seen


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedassay", "averaging"])
def test_a_run_of_an_entry_gives_the_committed_values(tmp_path, name):
    """One setting of the entry, and the central one, in which strengths are chosen."""
    adversary = fixed_adversary()
    path = board.ENTRIES / f"{name}.toml"
    entry = read_entry(path)
    kept = [adversary.central_setting, "Tumours, 48%, random, even"]

    class Excerpt(FixedAdversary):
        def settings(self, *, full):
            every = super().settings(full=full)
            return {name: every[name] for name in kept}

    excerpt = Excerpt(**{f.name: getattr(adversary, f.name) for f in dataclasses.fields(adversary)})
    result = assess(path, adversary=excerpt, out=tmp_path / "out", jobs=1)
    measured = make_entry(result.folder).settings
    committed = [
        row
        for row in entry.settings
        if ", ".join([row.data, row.share, row.graph, row.skew]) in kept
    ]
    numbers = ("no_attack", "mean", "worst", "success")
    for new, old in zip(measured, committed, strict=True):
        found, expected = ([getattr(row, key) for key in numbers] for row in (new, old))
        # Half a point, on another kind of processor.
        assert np.allclose(found, expected, atol=0.51), (new, old)
