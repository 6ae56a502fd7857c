"""Live table on a terminal, lines elsewhere, and escaped text from peers."""

import io

import numpy as np
import pytest
from rich.console import Console
from tests.peer.folders import NAMES, line

from fedcb2o.federated.evaluation.gain import paired_gain
from fedcb2o.peer.report.live_table import LiveTable

ROUNDS = [
    line(1, (1, 0.25, 1000, 0.5), (2, 1.0, 2000, 0.1), refused={"3": "signature"}),
    line(2, (1, 0.75, 1000, 0.204), refused={"3": "size"}, late=[2], alive=[1, 3], accuracy=None),
    line(3, (1, 0.75, 1000, 0.204), behind=[3], late=[2], alive=[1, 3], accuracy=None),
]


def render(*, height=30, names=NAMES, lines=ROUNDS, **console):
    """Return the output of a live table for the records; on a terminal, the last table only."""
    file = io.StringIO()
    terminal = Console(file=file, width=100, height=height, **console)
    with LiveTable(names, agent_id=0, rounds=5, console=terminal) as live:
        live.on_phase(1, "training")
        for record in lines:
            live.on_round(record)
        live.on_phase(3, "mixing")
        live.on_note("stopping [bold]after[/bold] this round\x1b[2J")
    if live.is_live:
        assert "\x1b[2J" not in file.getvalue()
        file.seek(0)
        file.truncate()
        terminal.print(live._table())
    return file.getvalue()


def test_output_without_a_terminal_has_one_line_per_round():
    for text in (render(), render(force_terminal=True, _environ={"TERM": "dumb"})):
        assert text.splitlines() == [
            "hospital-a: round 1/5: accuracy 50.0%, 2 of 3 received, 2 averaged: hospital-b 0.5 "
            "clinic-c 0.1, refused university-d (signature), 1.0 s of work",
            "hospital-a: round 2/5: 1 of 3 received, 1 averaged: hospital-b 0.2, late: clinic-c, "
            "refused university-d (size), 1.0 s of work",
            "hospital-a: round 3/5: 1 of 3 received, 1 averaged: hospital-b 0.2, late: clinic-c, "
            "too far behind: university-d, 1.0 s of work",
            "hospital-a: stopping [bold]after[/bold] this round[2J",
        ]


def test_unreachable_members_are_named_if_no_member_was_asked():
    assert "0 of 0 received, 0 averaged, down: clinic-c university-d, " in render(
        lines=[line(1, alive=[1], asked=[])]
    )


def test_models_not_admitted_are_listed_by_reason():
    """A model with weight NaN, as a median records it, counts as averaged."""
    models = [(1, 0.5, 9, 0.6), (2, 0.5, 9, 0.0), (3, 0.5, 9, 0.0), (4, 0.5, 9, float("nan"))]
    record = line(1, *models, asked=[1, 2, 3, 4], accuracy=None)
    for model in record["received"][1:3]:
        model["admission"] = "too far from the agent's own model"
    assert render(lines=[record]).splitlines()[0] == (
        "hospital-a: round 1/5: 4 of 4 received, 2 averaged: hospital-b 0.6 agent-4, not admitted: "
        "clinic-c university-d (too far from the agent's own model), 1.0 s of work"
    )
    text = render(lines=[record], force_terminal=True, no_color=True, _environ={"TERM": "xterm"})
    rows = {row.split()[0]: row for row in text.splitlines() if row.split()}
    assert "too far from the agent's own model" in rows["clinic-c"]
    assert "too far" not in rows["hospital-b"]


def test_zero_weights_and_missing_models_are_listed_by_reason():
    record = line(
        9, (1, 0.5, 9, 0.4), (2, 0.5, 9, 0.0), no_model=[3], relay_down=[4],
        asked=[1, 2, 3, 4], accuracy=None,
    )  # fmt: skip
    record["received"][0]["round"] = 7
    record["received"][1]["not_averaged"] = "loss above the quantile"
    names = {**NAMES, 4: "clinic-e"}
    assert render(lines=[record], names=names).splitlines()[0] == (
        "hospital-a: round 9/5: 2 of 4 received, 1 averaged: hospital-b 0.4, not averaged: clinic-c "
        "(loss above the quantile), offers no model yet: university-d, relay cannot be reached: "
        "clinic-e, 1.0 s of work"
    )
    terminal = {"force_terminal": True, "no_color": True, "_environ": {"TERM": "xterm"}}
    text = render(lines=[record], names=names, **terminal)
    rows = {row.split()[0]: " ".join(row.split()) for row in text.splitlines() if row.split()}
    assert "round of model" in text
    assert rows["hospital-b"] == "hospital-b up 7 0.50 40.0%"  # the round of its model
    assert rows["clinic-c"].endswith("0.0% loss above the quantile")
    assert rows["university-d"] == "university-d up – – – offers no model yet"
    assert rows["clinic-e"] == "clinic-e – – – – relay cannot be reached"


def test_members_cut_off_by_the_relay_are_not_called_down():
    record = line(1, alive=[1], asked=[], relay_down=[2])
    text = render(lines=[record])
    assert "0 averaged, relay cannot be reached: clinic-c, down: university-d, " in text


def gain(accuracy, alone, low, high, samples=20):
    return {"samples": samples, "accuracy": accuracy, "alone": alone, "low": low, "high": high}


def test_lines_show_the_gain_of_the_round_and_its_mean():
    first = line(1, gain=gain(0.9, 0.8, -0.1, 0.3), class_gains={}, alone_rounds=1)
    second = line(2, gain=gain(0.8, 0.8, -0.2, 0.2), class_gains={}, alone_rounds=2)
    texts = render(lines=[first, second]).splitlines()
    assert "alone 80.0% (1 round), gain +10.0 [-10.0, 30.0], 0 of" in texts[0]
    assert (
        "alone 80.0% (2 rounds), gain +0.0 [-20.0, 20.0], mean of 2 rounds +5.0 [-15.0, 25.0], "
    ) in texts[1]


def test_a_baseline_of_fewer_rounds_has_no_gain():
    """The member joined at round 87, and its baseline has trained for 6 rounds."""
    few = line(92, gain=gain(0.95, 0.86, 0.04, 0.13), class_gains={}, alone_rounds=6)
    enough = line(92, gain=gain(0.95, 0.86, 0.04, 0.13), class_gains={}, alone_rounds=83)
    assert "alone 86.0% after 6 rounds of training (no gain yet), 0 of" in render(lines=[few])
    assert "alone 86.0% (83 rounds), gain +9.0 [4.0, 13.0], 0 of" in render(lines=[enough])


@pytest.mark.parametrize(("losses", "is_named"), [(6, False), (10, True)])
def test_a_class_is_named_if_its_corrected_interval_excludes_0(losses, is_named):
    """In one of 10 classes, the baseline predicts 6 or 10 more of 20 samples correctly."""
    baseline = np.ones(20, bool)
    worst = vars(paired_gain(np.arange(20) >= losses, baseline))
    assert worst["high"] < 0  # without the correction, both are significant
    classes = {str(k): vars(paired_gain(baseline, baseline)) for k in range(9)}
    record = line(3, gain=gain(0.9, 0.9, -0.1, 0.1), class_gains={**classes, "9": worst})
    assert ("worse in class 9: -50.0 [" in render(lines=[record])) == is_named


def test_lines_go_to_standard_error(capsys):
    with LiveTable(NAMES, agent_id=0, rounds=5) as live:
        live.on_round(ROUNDS[0])
    assert capsys.readouterr() == ("", render(lines=ROUNDS[:1]).splitlines()[0] + "\n")


def test_the_table_on_a_terminal_has_one_row_per_peer():
    text = render(force_terminal=True, no_color=True, _environ={"TERM": "xterm"})
    rows = {words[0]: words for words in map(str.split, text.splitlines()) if words}
    assert "round 3/5, accuracy 50.0%" in text
    assert rows["hospital-b"] == ["hospital-b", "up", "3", "0.75", "20.4%"]
    assert rows["clinic-c"] == ["clinic-c", "–", "1", "1.00", "10.0%", "late"]
    row = "university-d up – – – too far behind 2, last: size"
    assert rows["university-d"] == row.split()


def test_a_table_taller_than_the_terminal_is_cut():
    names = {i: f"agent-{i}" for i in range(40)}
    text = render(height=20, names=names, force_terminal=True, _environ={"TERM": "xterm"})
    assert "and 25 more" in text
    assert len(text.splitlines()) < 20


def test_text_from_peers_cannot_control_the_terminal():
    evil = line(1, refused={"3": "\x1b[2J[red]\n\r"})
    for text in (
        render(lines=[evil]),
        render(lines=[evil], force_terminal=True, _environ={"TERM": "xterm"}),
    ):
        assert "\x1b[2J" not in text
        assert "[2J[red]" in text


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_cursor_is_restored_after_an_error(error):
    file = io.StringIO()
    with (
        pytest.raises(error),
        LiveTable(NAMES, agent_id=0, rounds=5, console=Console(file=file, force_terminal=True)),
    ):
        raise error
    assert file.getvalue().rstrip("\n").endswith("\x1b[?25h")
