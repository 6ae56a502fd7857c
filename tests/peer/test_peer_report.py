"""Page of a node: exact numbers, escaped text, and one error for damaged folders."""

import json
import re
from html.parser import HTMLParser

import pytest
from tests.peer.folders import draw_node, line, write_node

from fedcb2o.errors import RunError
from fedcb2o.peer.report import figures
from fedcb2o.peer.report.node_page import (
    format_bytes,
    not_averaged_table,
    peers_table,
    refused_table,
    write_node_report,
)
from fedcb2o.peer.report.peer_records import MAX_LINE_BYTES, PeerRecords
from fedcb2o.report._html import SORT_SCRIPT

OWN = ("#", "data:image/png;base64,")  # allowed targets of links

ROUNDS = [
    line(
        1,
        (1, 0.25, 1000, 0.5),
        (2, 1.0, 2000, 0.1),
        refused={"3": "signature"},
        turned_away={"another run": 2},
    ),
    line(2, (1, 0.75, 1000, 0.2), refused={"3": "size"}, late=[2], alive=[1, 3], accuracy=None),
    line(3, (1, 0.5, 1000, 0.3), asked=[1, 2], alive=[1]),
]


def test_members_without_an_accepted_model_are_listed_with_a_reason(tmp_path):
    lines = [
        line(1, alive=[1, 2], asked=[1, 2], refused={"2": "another run"}),
        line(2, alive=[1], asked=[1]),
        line(3, alive=[1, 3], asked=[3], behind=[3]),
    ]
    read = PeerRecords.read(write_node(tmp_path, lines))
    assert read.missing_models([1, 2, 3]) == {
        "hospital-b": "no answer",
        "clinic-c": "another run",
        "university-d": "too far behind",
    }
    assert read.missing_models([4]) == {"agent-4": "never there"}
    assert peers_table(read).loc["university-d", "behind"] == "1"
    assert read.missing_models([1]) == {"hospital-b": "no answer"}  # only members of this version
    assert PeerRecords.read(write_node(tmp_path, [*ROUNDS, line(4, asked=[])])).missing_models(
        [1, 2, 3]
    ) == {"university-d": "size"}


def test_the_relay_and_members_without_a_model_have_their_own_outcome(tmp_path):
    lines = [
        line(1, alive=[], asked=[1, 2], relay_down=[1, 2, 3]),
        line(2, alive=[3], asked=[1, 3], relay_down=[1, 2], no_model=[3]),
    ]
    read = PeerRecords.read(write_node(tmp_path, lines))
    assert figures.outcomes(read.rounds[0]) == {1: "relay down", 2: "relay down"}
    assert figures.outcomes(read.rounds[1]) == {1: "relay down", 3: "no model"}
    table = peers_table(read)
    assert table.loc["hospital-b", ["relay down", "no model"]].tolist() == ["2", "0"]
    assert table.loc["university-d", ["relay down", "no model"]].tolist() == ["0", "1"]
    assert read.missing_models([1, 2, 3]) == {
        "hospital-b": "relay down",
        "clinic-c": "relay down",
        "university-d": "offers no model",
    }


@pytest.mark.usefixtures("no_figures")
def test_the_page_shows_a_gain_only_if_the_baseline_trained_as_many_rounds(tmp_path):
    gain = {"samples": 50, "accuracy": 0.9, "alone": 0.8, "low": 0.0, "high": 0.2}
    gains = {"gain": gain, "class_gains": {"benign": gain}}
    late = [line(n, **gains, alone_rounds=n - 86) for n in (91, 92)]
    page = Page(write_node_report(write_node(tmp_path / "late", late)))
    assert "no gain yet: 6 rounds of training alone in round 92" in page.text
    assert ["all", "50", "90.0%", "80.0%", "–"] in page.rows
    even = [line(n, **gains, alone_rounds=n) for n in (1, 2)]
    page = Page(write_node_report(write_node(tmp_path / "even", even)))
    assert ["all, mean of the last 2 rounds", "50", "90.0%", "80.0%", "+10.0 "] in page.rows
    assert ["benign", "50", "90.0%", "80.0%", "+10.0 "] in page.rows
    assert "points, mean of the last 2 rounds +10.0 [0.0, 20.0]." in page.text


@pytest.mark.usefixtures("no_figures")
def test_the_page_lists_models_not_admitted_and_a_removed_member(tmp_path):
    lines = [line(n, (1, 0.5, 9, 0.6), (2, 0.5, 9, 0.0), asked=[1, 2]) for n in (1, 2, 3)]
    for record in lines[:2]:
        record["received"][1]["admission"] = "too near to the agent's own model"
    lines[2]["received"][1]["not_averaged"] = "loss above the quantile"
    node = write_node(tmp_path, lines, removed=[2])
    read = PeerRecords.read(node)
    assert figures.outcomes(read.rounds[0]) == {1: "averaged", 2: "not averaged"}
    table = peers_table(read)
    assert table.loc["clinic-c (removed)", ["averaged", "not averaged"]].tolist() == ["0", "3"]
    assert table.loc["hospital-b", ["averaged", "not averaged"]].tolist() == ["3", "0"]
    assert not_averaged_table(read).to_dict() == {
        "too near to the agent's own model": {"clinic-c (removed)": "2"},
        "loss above the quantile": {"clinic-c (removed)": "1"},
    }
    page = Page(write_node_report(node))
    assert ["clinic-c (removed)", "2", "1"] in page.rows
    assert "Models not averaged" in page.text
    assert "hospital-b (1), clinic-c (removed) (2), university-d (3)." in page.text
    # a member whose models were never admitted
    read = PeerRecords.read(write_node(tmp_path, lines[:2]))
    assert read.missing_models([1, 2]) == {"clinic-c": "too near to the agent's own model"}


class Page(HTMLParser):
    """Parser of a page: its visible text, table rows, tags and links."""

    def __init__(self, path):
        super().__init__()
        self.words, self.rows, self.tags, self.links = [], [], set(), []
        self.feed(path.read_text(encoding="utf-8"))
        self.text = " ".join("".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.links += [
            value
            for name, value in attributes
            if name in ("src", "href", "xlink:href") or name.startswith("on")
        ]
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data):
        if self.lasttag in ("td", "th") and data.strip():
            self.rows[-1].append(data)
        if self.lasttag not in ("style", "title"):
            self.words.append(data)


@pytest.fixture
def node(tmp_path):
    return write_node(tmp_path / "node", ROUNDS, rounds=3)


def test_the_page_has_exact_numbers_and_needs_no_other_file(node):
    assert write_node_report(node) == node / "report.html"
    assert sorted(path.name for path in node.iterdir()) == [
        "agent.json",
        "report.html",
        "rounds.jsonl",
    ]
    page = Page(node / "report.html")
    assert page.links
    assert all(link.startswith(OWN) for link in page.links)
    assert "Agent 0 of run 9f9f9f9f9f9f9f9f, version 1" in page.text
    assert (
        "Last round: 3 of 3. Rounds trained: 3, skipped: 0. Overall accuracy 83.33%." in page.text
    )
    peers = {row[0]: row[1:] for row in page.rows if len(row) == 11}
    assert peers["hospital-b"] == [
        "3",
        "3",
        "0",
        "0",
        "0",
        "0.500",
        "0.750",
        "3.0 kB",
        "30.00%",
        "3",
    ]
    assert peers["clinic-c"] == ["3", "1", "0", "1", "1", "1.000", "1.000", "2.0 kB", "0.00%", "1"]
    assert peers["university-d"] == ["2", "0", "2", "0", "0", "–", "–", "0 B", "0.00%", "2"]
    assert ["university-d", "1", "1"] in page.rows
    assert ["another run", "2"] in page.rows
    assert "In total 5.0 kB were received, and 3.0 kB were sent in 9 answers." in page.text


@pytest.mark.usefixtures("no_figures")
def test_the_page_shows_the_number_of_skipped_rounds(tmp_path):
    lines = [line(3, (1, 0.25, 1000, 0.5)), line(9, (1, 0.25, 1000, 0.5))]
    page = Page(write_node_report(write_node(tmp_path, lines, rounds=20)))
    assert "Last round: 9 of 20. Rounds trained: 2, skipped: 7." in page.text


@pytest.mark.usefixtures("no_figures")
def test_the_page_is_written_to_the_requested_folder(node, tmp_path):
    assert write_node_report(node, tmp_path / "a" / "b") == tmp_path / "a" / "b" / "report.html"
    assert not (node / "report.html").exists()
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="name another with --out"):
        write_node_report(node, tmp_path / "file" / "inside")


def test_weights_by_round_mark_missing_models(node):
    records = PeerRecords.read(node)
    weights, marks = figures.weights_by_round(records.rounds, 0, records.peers)
    assert weights[0].tolist() == [0.4, 0.4, 0.4]
    assert weights[1].tolist() == [0.5, 0.2, 0.3]
    assert weights[2, 0] == 0.1
    assert marks.tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 1], [2, 2, 0]]


@pytest.mark.usefixtures("no_figures")
def test_proofs_are_listed_with_their_files(node):
    (node / "proofs").mkdir()
    (node / "proofs" / "clinic-c-2.proof.toml").write_text('name = "clinic-c"\nround = 2\n')
    (node / "proofs" / "torn.proof.toml").write_bytes(b"\xff\x00")
    page = Page(write_node_report(node))
    assert ["clinic-c-2.proof.toml", "clinic-c", "2"] in page.rows
    assert ["torn.proof.toml", "cannot be read"] in page.rows


def test_text_from_peers_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>$x^{"
    lines = [line(1, refused={"1": evil}, turned_away={evil: 1}, seconds={evil: 1.0, "round": 2.0})]
    node = write_node(tmp_path / "node", lines)
    (node / "proofs").mkdir()
    (node / "proofs" / "<img src=x onerror=alert(1)>.proof.toml").write_text(
        f"name = '{evil}'\nround = '{evil}'\n"
    )
    page = Page(write_node_report(node))
    assert not page.tags & {"iframe", "link", "x", "img"}
    assert all(link.startswith(OWN) for link in page.links)
    assert evil in page.text
    text = (node / "report.html").read_text()
    assert text.count("<script") == text.count(f"<script>{SORT_SCRIPT}</script>") == 1


@pytest.mark.usefixtures("no_figures")
def test_pages_of_one_round_and_of_a_node_without_peers(tmp_path):
    page = Page(write_node_report(write_node(tmp_path / "one", [ROUNDS[0]])))
    assert "Last round: 1. Rounds trained: 1, skipped: 0. Overall accuracy 50.00%." in page.text
    record = line(
        1,
        asked=[],
        alive=[],
        own_weight=None,
        accuracy=None,
        train_loss=None,
        own_loss=None,
        seconds={},
    )
    page = Page(
        write_node_report(write_node(tmp_path / "alone", [record], names={"0": "hospital-a"}))
    )
    assert "Last round: 1." in page.text


@pytest.mark.usefixtures("no_figures")
def test_the_page_of_an_incomplete_run_has_the_finished_rounds(node):
    whole = (node / "rounds.jsonl").read_bytes()
    (node / "rounds.jsonl").write_bytes(whole[:-20])
    assert "Last round: 2 of 3." in Page(write_node_report(node)).text
    (node / "rounds.jsonl").write_bytes(b"")
    with pytest.raises(RunError, match="no finished round yet"):
        write_node_report(node)
    (node / "rounds.jsonl").unlink()
    with pytest.raises(RunError, match="no finished round yet"):
        write_node_report(node)


def test_the_page_of_a_long_run_with_many_peers_stays_small(tmp_path):
    node = draw_node(tmp_path / "node", agents=50, rounds=300, budget=8)
    page = Page(write_node_report(node))
    assert len([row for row in page.rows if len(row) == 11]) == 1 + 49
    assert (node / "report.html").stat().st_size < 3e6


def damaged(field, value):
    return json.dumps({**ROUNDS[0], field: value})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("[]", "line 1: ", id="no-object"),
        pytest.param("not JSON", "line 1: ", id="no-json"),
        pytest.param("\x00" * 50, "line 1: ", id="zeros"),
        pytest.param("[" * 100_000, "line 1: ", id="deep"),
        pytest.param(damaged("round", 0), "`round`", id="round-0"),
        pytest.param(damaged("round", 10**30), "`round`", id="round-huge"),
        pytest.param(damaged("round", "1"), "`round`", id="round-text"),
        pytest.param(damaged("accuracy", 1.5), "`accuracy`", id="accuracy"),
        pytest.param('{"round": 1, "asked": [], "received": [], "own_weight": NaN}', "`own_weight`", id="nan"),
        pytest.param('{"round": 1, "asked": [], "received": [], "own_weight": 1e999}', "`own_weight`", id="infinite"),
        pytest.param(damaged("asked", [-1]), "`asked.0`", id="id"),
        pytest.param(damaged("asked", 3), "`asked`", id="asked"),
        pytest.param(damaged("received", [{"id": 1}]), "`received.0.seconds`", id="received"),
        pytest.param(damaged("received", ROUNDS[0]["received"][:1] * 2), "twice", id="received-twice"),
        pytest.param(damaged("refused", {"1": "x" * 10_000}), "`refused.1`", id="reason"),
        pytest.param(damaged("sent", 10**400), "`sent`", id="sent"),
        pytest.param(json.dumps(ROUNDS[1]) + "\n" + json.dumps(ROUNDS[0]), "comes after round 2", id="order"),
        pytest.param("x" * (MAX_LINE_BYTES + 1), "longer than", id="long"),
    ],
)  # fmt: skip
def test_a_damaged_line_is_one_clear_error(node, text, message):
    (node / "rounds.jsonl").write_text(text + "\n")
    with pytest.raises(RunError, match=r"rounds\.jsonl is damaged") as caught:
        write_node_report(node)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500
    assert not (node / "report.html").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"names": {"1": "<b>"}},
        {"run": "../.."},
        {"names": []},
        {"id": -1},
        {"version": 2**70},
        {"name": None},
    ],
)
def test_a_damaged_description_is_one_clear_error(tmp_path, changes):
    with pytest.raises(RunError, match=r"agent\.json is damaged"):
        write_node_report(write_node(tmp_path / "node", ROUNDS, **changes))


def test_a_folder_without_a_node_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunError, match=r"holds no agent\.json"):
            write_node_report(folder)


def test_tables_of_very_many_reasons_stay_small(tmp_path):
    lines = [line(n, refused={"1": f"reason {n}", "2": "size"}) for n in range(1, 31)]
    table = refused_table(PeerRecords.read(write_node(tmp_path / "node", lines)))
    assert table.shape == (2, 9)
    assert table.loc["hospital-b", "other reasons"] == "23"
    assert table.loc["clinic-c", "size"] == "30"
    assert peers_table(PeerRecords.read(tmp_path / "node")).loc["hospital-b", "refused"] == "30"


def test_bytes_are_formatted_with_units():
    assert [format_bytes(n) for n in (0, 999, 1000, 26_400_000, 10**13)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "26.4 MB",
        "10.0 TB",
    ]


def test_the_table_of_refusals_counts_rounds_by_reason(node):
    assert (
        re.sub(r"\s+", " ", refused_table(PeerRecords.read(node)).to_string())
        == " signature size peer university-d 1 1"
    )
