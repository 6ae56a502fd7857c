"""What all members agree on: one file, its hash, and its versions, signed by the majority."""

import base64
import contextlib
import copy
import hashlib
import json
import os
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.peer.members import experiment, federated, identities
from tests.tiny import here
from torch import nn

from fedcb2o.data import digits
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config.build import build_algorithm
from fedcb2o.experiments.config.loading import load
from fedcb2o.experiments.config.tables import presets
from fedcb2o.peer.membership import (
    Identity,
    Member,
    amend_federation,
    certificates,
    federation,
    make_federation,
    read_federation,
    sign_federation,
    write_federation,
)


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    """A folder with the identities of eight organisations."""
    return tmp_path_factory.mktemp("organisations")


@pytest.fixture(scope="module")
def eight(room):
    return identities(room, 8)


@pytest.fixture(scope="module")
def four(room, eight):
    """The content of the file of a federation of the first four."""
    federated(eight[:4], path=room / "federation.toml")
    return (room / "federation.toml").read_bytes()


@pytest.fixture
def path(tmp_path, four):
    """The file of a federation of the first four."""
    (tmp_path / "federation.toml").write_bytes(four)
    return tmp_path / "federation.toml"


def refused(path, match=None, **options):
    """The one line in which a file is refused."""
    with pytest.raises(ConfigError, match=match) as raised:
        read_federation(path, **options)
    text = str(raised.value)
    assert "\n" not in text
    assert len(text) < 1500
    return text


def edited(path, change):
    """The file with a change, a function of its table."""
    table = tomllib.loads(path.read_text())
    change(table)
    path.write_text(tomli_w.dumps(table))
    return path


def test_a_file_holds_what_all_agree_on(path, eight):
    made = read_federation(path)
    assert made == federated(eight[:4])
    assert made.run == made.digest
    assert len(made.run) == 32
    assert (made.version, made.num_agents, made.rounds, made.seed, made.shape) == (
        1,
        4,
        3,
        1000,
        (1, 8, 8),
    )
    assert made.class_names == tuple("0123456789")
    assert [made.id_of(identity.member) for identity in eight[:4]] == [0, 1, 2, 3]
    assert {id: member.name for id, member in made.members.items()} == {
        j: f"org-{j}" for j in range(4)
    }
    assert (made.share, made.most_samples) == (
        0.25,
        30,
    )  # the experiment's: one of four attacks; 20 or 30 samples
    with pytest.raises(ConfigError, match="org-4 is no member of tiny, version 1"):
        made.id_of(eight[4].member)
    assert "PRIVATE" not in path.read_text()


def test_the_experiment_is_the_simulations_without_its_attackers(eight):
    simulated = load(experiment(4, agents={"validation": 0.4, "split": "stratified"}, seeds=[7, 8]))
    made = make_federation(
        simulated, [each.member for each in eight[:4]], dataset=digits(), rounds=9, encoding="int8"
    )
    agreed = made.experiment
    assert (agreed.rounds, agreed.seeds, made.encoding) == (9, (7,), "int8")
    assert (agreed.agents.num_agents, agreed.agents.benign, agreed.attacked) == (4, 4, False)
    for key in ("budget", "validation", "split", "hold_out", "validation_loss", "initialisation"):
        assert getattr(agreed.agents, key) == getattr(simulated.agents, key)
    assert agreed.training == simulated.training
    settings = agreed.settings(), simulated.settings()
    for key in ("model", "algorithm"):
        assert settings[0][key] == settings[1][key]


def test_every_preset_can_be_a_federation(eight, tmp_path):
    members, data = [each.member for each in eight[:4]], digits()
    agents = {
        "num_clusters": 1,
        "benign": 3,
        "malicious": 1,
        "malicious_role": "attack",
        "budget": 3,
    }
    changes = {f"agents.{key}": value for key, value in agents.items()}
    for name in presets():
        if name.startswith("digits-"):
            simulated = load(name, changes)
            made = make_federation(simulated, members, dataset=data)
            write_federation(made, tmp_path / "f.toml")
            again = read_federation(tmp_path / "f.toml")
            assert again.digest == made.digest
            assert (
                build_algorithm(again.experiment).mixing_factor
                == build_algorithm(simulated).mixing_factor
            )


def test_the_hash_is_of_the_content_and_not_of_how_it_is_written(path):
    made = read_federation(path)
    table = tomllib.loads(path.read_text())
    backwards = dict(reversed([(key, table[key]) for key in table]))
    backwards["experiment"] = {
        key: dict(reversed(table["experiment"][key].items())) for key in table["experiment"]
    }
    backwards["members"] = table["members"][::-1]
    backwards["experiment"]["algorithm"]["alpha"] = 2.0
    backwards["deadline_seconds"] = 60
    path.write_text("# otherwise\n" + tomli_w.dumps(backwards))
    assert read_federation(path).digest == made.digest
    assert read_federation(path).differing_keys(made.value_hashes()) == []
    # by hand: settings, version and members as JSON with sorted keys, integers without a point
    content = {**table, "round_seconds": 0, "deadline_seconds": 60}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert made.digest == hashlib.sha256(text.encode()).digest()


def on_a_frozen_base(input_shape, num_classes, *, hidden: list[int]):
    base = nn.Linear(64, 2**17).requires_grad_(False)
    return nn.Sequential(nn.Flatten(), base, nn.AdaptiveAvgPool1d(2), nn.Linear(2, num_classes))


def test_a_peer_may_ask_as_often_as_a_model_needs_and_not_much_more(eight):
    assert federated(eight[:2]).limits.answers_per_minute == 6000  # rounds as fast as they go
    assert (
        federated(eight[:2], round_seconds=0.2).limits.answers_per_minute == 3000
    )  # 5 rounds a second, 2 (1 + 4)
    assert federated(eight[:2], round_seconds=30.0).limits.answers_per_minute == 300
    assert (
        federated(
            eight[:2], round_seconds=30.0, limits={"answers_per_minute": 7}
        ).limits.answers_per_minute
        == 7
    )
    wide = {
        "model": {"hidden": [2**15]}
    }  # 2^15 (64 + 1 + 10) + 10 parameters: 9.4 MiB, 2.3 of int8
    for encoding, answers in (("float32", 12 * 2 * (9 + 5)), ("int8", 300)):
        made = federated(eight[:2], changes=wide, round_seconds=5.0, encoding=encoding)
        assert made.limits.answers_per_minute == answers
    frozen = federated(
        eight[:2], changes={"model": {"name": on_a_frozen_base, "hidden": []}}, round_seconds=5.0
    )
    assert frozen.limits.answers_per_minute == 300  # what is frozen is not sent


def test_differing_keys_are_named(path, eight, tmp_path):
    made = read_federation(path)
    other = federated(
        [*eight[:3], eight[4]],
        changes={"algorithm": {"alpha": 3.0}, "model": {"hidden": [9]}},
        lag=6,
    )
    assert made.differing_keys(other.value_hashes()) == sorted(
        ["experiment.algorithm.alpha", "experiment.model.hidden", "lag"]
        + [
            f"members.{name}.{key}"
            for name in ("org-3", "org-4")
            for key in ("endpoint", "id", "key", "name", "root")
        ]
    )
    assert made.differing_keys({}) == sorted(made.value_hashes())
    assert all(len(value) == 16 for value in made.value_hashes().values())


def test_a_key_that_the_file_does_not_have_is_no_part_of_its_hash(path):
    made = read_federation(path)
    del_lag = read_federation(edited(path, lambda table: table.pop("lag")))
    assert del_lag.lag == made.lag == 5
    assert del_lag.differing_keys(made.value_hashes()) == ["lag"]
    # so that a later release, which has more keys, finds the same hash of a file without them
    assert "lag" not in del_lag.fixed_content()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"agents": {"benign": 4}}, "has 5 agents, and there are 4 members"),
        ({"agents": {"num_clusters": 2}}, "has 8 agents, and there are 4 members"),
        ({"agents": {"participation": 0.5}}, "`agents.participation` below 1 is for simulations"),
        ({"algorithm": {"name": "ifca", "models": 2}}, "`ifca` has a coordinator"),
    ],
)
def test_an_experiment_that_peers_cannot_do_is_refused(eight, changes, told):
    with pytest.raises(ConfigError, match=told):
        federated(eight[:4], changes=changes)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"rounds": 0}, "`rounds`: input should be greater than or equal to 1, got 0"),
        ({"deadline_seconds": 0.0}, "deadline_seconds"),
        ({"deadline_seconds": float("nan")}, "deadline_seconds"),
        ({"round_seconds": -1.0}, "round_seconds"),
        ({"encoding": "int4"}, "encoding"),
        ({"share": 1.0}, "share"),
        ({"lagg": 1}, "there is no key `lagg`"),
        ({"name": "a b"}, "name"),
        ({"limits": {"answers": 3}}, "there is no key `limits.answers`"),
    ],
)
def test_an_option_out_of_range_is_refused(eight, option, told):
    with pytest.raises(ConfigError, match=told) as raised:
        federated(eight[:4], **option)
    assert "\n" not in str(raised.value)


def test_members_must_differ(eight, tmp_path):
    a, b = (each.member for each in eight[:2])
    same_name = Identity.make(tmp_path / "x", name=a.name, endpoint="127.0.0.1:1").member
    same_endpoint = Identity.make(tmp_path / "y", name="y", endpoint=a.endpoint).member
    for other, told in (
        (a, "`name`: 'org-0'"),
        (same_name, "`name`: 'org-0'"),
        (same_endpoint, "`endpoint`"),
    ):
        with pytest.raises(ConfigError, match=f"two members of the same {told}"):
            make_federation(experiment(3), [a, b, other], dataset=digits())
    z = Identity.make(tmp_path / "z", name="z", endpoint="127.0.0.1:1").member
    with pytest.raises(ConfigError, match="two members of the same `key`"):
        make_federation(
            experiment(3), [a, b, Member(z.name, z.endpoint, b.key, z.root)], dataset=digits()
        )


# --- versions


def signed_by(path, who):
    for identity in who:
        sign_federation(path, identity)
    return read_federation(path)


@pytest.mark.parametrize(("n", "enough"), [(2, 2), (3, 2), (4, 3), (5, 3), (8, 5)])
def test_a_version_counts_when_more_than_half_signed_it(eight, tmp_path, n, enough):
    first, path = federated(eight[:n]), tmp_path / "2.toml"
    write_federation(
        amend_federation(
            first, add=[eight[n].member] if n < 8 else [], remove=["org-0"] if n == 8 else []
        ),
        path,
    )
    for count in range(enough):
        told = refused(path, f"version 2 lacks {enough - count} of the {enough} signatures")
        assert all((f"org-{j}" in told) == (count <= j < min(n, count + 5)) for j in range(8))
        assert read_federation(path, allow_unsigned=True).missing_signatures == enough - count
        sign_federation(path, eight[count])
        sign_federation(path, eight[count])  # twice is once
    second = read_federation(path)
    assert (second.version, second.missing_signatures, second.run) == (2, 0, first.run)
    assert second.digest != first.digest
    assert second.is_successor_of(first)
    assert second.is_successor_of(second)
    assert not first.is_successor_of(second)


def test_who_was_removed_is_gone_with_its_id_and_name(path, eight, tmp_path):
    first, two, three = read_federation(path), tmp_path / "2.toml", tmp_path / "3.toml"
    write_federation(amend_federation(first, remove=["org-3"]), two)
    second = signed_by(two, eight[1:4])  # who is removed may agree to it
    assert second.describe_changes() == ["removes org-3"]
    assert list(second.members) == [0, 1, 2]
    with pytest.raises(ConfigError, match="no member"):
        second.id_of(eight[3].member)
    assert (second.num_agents, second.experiment.agents.num_agents) == (
        4,
        4,
    )  # the others' draws stay as they were
    write_federation(amend_federation(second, add=[eight[4].member]), three)
    with pytest.raises(ConfigError, match="belongs to no member of the version before"):
        sign_federation(three, eight[3])
    with pytest.raises(ConfigError, match="belongs to no member of the version before"):
        sign_federation(three, eight[4])  # who is added has no say
    third = signed_by(three, eight[:2])
    assert list(third.members) == [0, 1, 2, 4]
    new = eight[4].member
    assert third.describe_changes() == [f"adds org-4 ({new.endpoint}, key {new.fingerprint})"]
    assert third.is_successor_of(first)
    with pytest.raises(ConfigError, match=r"version 4 has org-3 again"):
        amend_federation(third, add=[eight[3].member])
    back = copy.deepcopy(third.to_table())
    back["members"][3]["id"] = 3
    three.write_text(tomli_w.dumps(back))
    refused(three, "ids out of order: those of new members follow all earlier ids, from 4")


def test_a_graph_that_cannot_be_made_is_told_before_anybody_signs(eight):
    agents = {
        "num_clusters": 1,
        "benign": 4,
        "malicious": 0,
        "budget": 2,
        "graph": {"name": "torus"},
    }
    made = federated(eight[:4], changes={"agents": agents})
    with pytest.raises(ConfigError, match=r"a torus needs a number of agents .* got 5"):
        amend_federation(made, add=[eight[4].member])
    with pytest.raises(ConfigError, match=r"a torus needs a number of agents .* got 5"):
        federated(eight[:5], changes={"agents": {**agents, "benign": 5}})


def test_a_certificate_or_a_key_is_replaced_under_the_same_id(path, eight, tmp_path):
    first, two = read_federation(path), tmp_path / "2.toml"
    moved = eight[1].with_endpoint(tmp_path / "moved", endpoint="127.0.0.2:7447")
    stolen = Identity.make(tmp_path / "new", name="org-2", endpoint=eight[2].member.endpoint)
    write_federation(amend_federation(first, replace=[moved.member, stolen.member]), two)
    second = signed_by(two, [eight[0], moved, eight[2]])  # the old key signs for a new one
    assert second.describe_changes() == [
        f"gives org-1 another endpoint (127.0.0.2:7447, not {eight[1].member.endpoint}) and root",
        f"gives org-2 another key ({stolen.member.fingerprint}, not "
        f"{eight[2].member.fingerprint}) and root",
    ]
    assert [second.id_of(each.member) for each in (eight[0], moved, stolen)] == [0, 1, 2]
    with pytest.raises(ConfigError, match="org-1 is in tiny, version 2 with another `endpoint`"):
        second.id_of(eight[1].member)
    with pytest.raises(ConfigError, match=f"with another key .{stolen.member.fingerprint}, not "):
        second.id_of(eight[2].member)


def test_a_root_that_has_ended_stops_a_federation_until_it_is_replaced(eight, tmp_path):
    then = datetime.now(UTC) - timedelta(days=certificates.ROOT_DAYS + 1)
    old = Identity.make(tmp_path / "old", name="old", endpoint="127.0.0.1:7000", now=then)
    one, two = tmp_path / "1.toml", tmp_path / "2.toml"
    federated([*eight[:2], old], path=one)
    refused(one, "`root` of old expired at")
    new = old.with_endpoint(tmp_path / "new", endpoint="127.0.0.1:7000")
    write_federation(
        amend_federation(read_federation(one, allow_unsigned=True), replace=[new.member]), two
    )
    assert signed_by(two, [eight[0], new]).members[2] == new.member


def test_copies_that_were_signed_apart_are_merged(path, eight, tmp_path):
    a, b, c = (tmp_path / f"{name}.toml" for name in "abc")
    write_federation(amend_federation(read_federation(path), remove=["org-3"]), a)
    b.write_bytes(a.read_bytes())
    sign_federation(a, eight[0])
    sign_federation(b, eight[1])
    sign_federation(b, eight[2], merge=[a])
    assert read_federation(b).missing_signatures == 0
    write_federation(amend_federation(read_federation(path), remove=["org-2"]), c)
    with pytest.raises(
        ConfigError, match=r"is another version than .*, which differs in `members\.org-2"
    ):
        sign_federation(a, eight[0], merge=[c])
    with pytest.raises(ConfigError, match="version 1, which needs no signature"):
        sign_federation(path, eight[0])
    with pytest.raises(ConfigError, match="not signed by enough members: no other can follow"):
        amend_federation(read_federation(a, allow_unsigned=True), remove=["org-2"])


def test_two_valid_successors_show_who_signed_both(path, eight, tmp_path):
    signers = []
    for name, who in (("org-3", eight[:3]), ("org-0", eight[1:4])):
        fork = tmp_path / f"without-{name}.toml"
        write_federation(amend_federation(read_federation(path), remove=[name]), fork)
        signers.append({each.name for each in signed_by(fork, who).versions[-1].signatures})
    assert signers[0] & signers[1] == {"org-1", "org-2"}


def test_what_was_signed_cannot_be_changed(path, eight, tmp_path):
    first, two, three = read_federation(path), tmp_path / "2.toml", tmp_path / "3.toml"
    write_federation(amend_federation(first, remove=["org-3"]), two)
    second = signed_by(two, eight[:3])
    write_federation(amend_federation(second, add=[eight[4].member]), three)
    signed_by(three, eight[:2])
    good = three.read_bytes()

    def other_rounds(table):
        table["rounds"] = 4

    def kept_member(table):
        table["history"][1]["members"].append(table["history"][0]["members"][3])

    def another_first(table):
        table["history"][0]["members"][0].update(
            {key: eight[5].member.to_table()[key] for key in ("key", "root", "name")}
        )

    def swapped(table):
        table["signatures"][0]["signature"] = table["signatures"][1]["signature"]

    def of_before(table):
        table["signatures"] = table["history"][1]["signatures"]

    def cut(table):
        table["history"][1]["signatures"] = []

    def no_history(table):
        table.update(version=1, history=[])

    def forgotten(table):
        table["history"] = table["history"][1:]

    changes = (
        other_rounds,
        kept_member,
        another_first,
        swapped,
        of_before,
        cut,
        no_history,
        forgotten,
    )
    for change in changes:
        three.write_bytes(good)
        refused(
            edited(three, change),
            "signature|lacks|`version`|ids out of order|no certificate|is that of another|"
            "names stay",
        )
    three.write_bytes(good)
    assert read_federation(three).version == 3


def test_nobody_has_two_votes(path, eight, tmp_path):
    two = tmp_path / "2.toml"
    write_federation(amend_federation(read_federation(path), remove=["org-3"]), two)
    sign_federation(two, eight[1])
    ((name, once),) = (each.values() for each in tomllib.loads(two.read_text())["signatures"])
    again = once[:-3] + chr(ord(once[-3]) + 1) + "=="  # base64 has bits to spare: the same 64 bytes
    assert base64.b64decode(again) == base64.b64decode(once)
    for other in (once, again):
        votes = [{"name": name, "signature": signature} for signature in (once, other, once)]
        edited(two, at("signatures", value=votes))
        refused(two, "version 2 has two signatures of 'org-1', but a member has one vote")
        refused(
            two,
            "version 2 has two signatures of 'org-1', but a member has one vote",
            allow_unsigned=True,
        )


def test_an_amendment_must_change_something_once(path, eight):
    made = read_federation(path)
    for how, told in (
        ({}, "each of them once"),
        ({"remove": ["org-9"]}, "there is no member `org-9`. Did you mean `org-"),
        ({"remove": ["org-1", "org-1"]}, "each of them once"),
        ({"remove": ["org-1"], "replace": [eight[1].member]}, "each of them once"),
        ({"replace": [eight[1].member]}, "the same as the last one"),
        ({"replace": [eight[5].member]}, "there is no member `org-5`"),
        ({"add": [eight[1].member]}, "org-1 is a member: --replace"),
        (
            {"remove": ["org-0", "org-1", "org-2"]},
            "the new version: a federation has at least 2 members",
        ),
    ):
        with pytest.raises(ConfigError, match=told) as raised:
            amend_federation(made, **how)
        assert "\n" not in str(raised.value)


# --- hostile files


def test_a_file_cannot_run_code_that_this_organisation_has_not_allowed(path, eight, tmp_path):
    trap = tmp_path / "trap"
    own = {"name": "os:system", "command": f"touch {trap}"}
    edited(path, lambda table: table["experiment"].update(algorithm=own))
    made = read_federation(path)  # it can be read, hashed and signed
    with pytest.raises(
        ConfigError, match="names 'os:system', which is no part of fedcb2o and would run here"
    ):
        made.experiment  # noqa: B018
    criterion = {"name": "fedcb2o", "criterion": {"name": "os:system"}, "alpha": 2.0}
    edited(path, lambda table: table["experiment"].update(algorithm=criterion))
    assert read_federation(path).user_functions == ("os:system",)
    assert not trap.exists()


def own_criterion(losses, local, *, by: float = 1.0):
    """A criterion of a user's own."""
    return losses.mean * by


def test_own_functions_stay_by_their_path_and_are_allowed_by_it(eight, tmp_path):
    name = "tests.peer.test_federation:own_criterion"
    made = federated(eight[:2], changes={"algorithm": {"criterion": {"name": name, "by": 2.0}}})
    assert made.user_functions == (name,)
    assert made.experiment.settings()["algorithm"]["criterion"] == {"name": name, "by": 2}
    write_federation(made, tmp_path / "f.toml")
    with pytest.raises(ConfigError, match="allow it with --own"):
        read_federation(tmp_path / "f.toml").experiment  # noqa: B018
    allowed = read_federation(tmp_path / "f.toml", allowed_functions=[name])
    assert allowed.experiment == made.experiment
    assert allowed.digest == made.digest


def at(*keys, value):
    """A change that sets one place of a table."""

    def change(table):
        for key in keys[:-1]:
            table = table[key]
        table[keys[-1]] = value

    return change


HOSTILE = {
    "another protocol": at("protocol", value=2),
    "another version": at("version", value=2),
    "no whole version": at("version", value=1.5),
    "a version that is true": at("version", value=True),
    "a huge number": at("rounds", value=2**62),
    "rounds as text": at("rounds", value="3"),
    "NaN": at("deadline_seconds", value=float("nan")),
    "infinity": at("experiment", "algorithm", "alpha", value=float("inf")),
    "NaN deep inside": at("experiment", "model", "hidden", value=[float("nan")]),
    "a key more": at("own", value=["os:system"]),
    "versions": at("versions", value=[]),
    "settings": at("settings", value={}),
    "a key like a key": at("deadline_second", value=3.0),
    "a key of two lines": at("a\nb", value=1),
    "a megabyte": at("name", value="a" * 10**6),
    "a megabyte of a key": at("x" * 10**6, value=1),
    "a list for a table": at("data", value=[1]),
    "a table for a number": at("seed", value={"x": 1}),
    "a negative shape": at("data", "shape", value=[-1]),
    "shapes": at("data", "shape", value=[1] * 100),
    "one class": at("data", "class_names", value=["x"]),
    "a class that writes on the terminal": at("data", "class_names", value=["\x1b[2J", "b"]),
    "attackers": at("experiment", "agents", "malicious", value=1),
    "an attack": at("experiment", "attack", value={"name": "label_flip", "source": 1, "target": 2}),
    "a device": at("experiment", "device", value="cuda"),
    "a large budget": at("experiment", "agents", "budget", value=4),
    "no budget": at("experiment", "agents", value={}),
    "an unknown algorithm": at("experiment", "algorithm", "name", value="fedcb"),
    "an algorithm with a coordinator": at(
        "experiment", "algorithm", value={"name": "ifca", "models": 2}
    ),
    "an unknown parameter": at("experiment", "algorithm", "gamma", value=1),
    "a parameter of another type": at("experiment", "training", "gamma", value="0.1"),
    "one member": at("members", value=[]),
    "members as text": at("members", value="org-0"),
    "a number for a member": at("members", value=[1, 2]),
    "ids from 1": at("members", 0, "id", value=4),
    "an id twice": at("members", 0, "id", value=1),
    "a negative id": at("members", 0, "id", value=-1),
    "a huge id": at("members", 0, "id", value=2**40),
    "an id that is text": at("members", 0, "id", value="0"),
    "a member with more": at("members", 0, "admin", value=True),
    "a member's key that is no base64": at("members", 0, "key", value="!" * 44),
    "a member's name of two lines": at("members", 0, "name", value="a\nb"),
    "another endpoint": at("members", 0, "endpoint", value="127.0.0.9:1"),
    "signatures of version 1": at("signatures", value=[{"name": "org-0", "signature": "AA=="}]),
    "a signature that is no base64": at("signatures", value=[{"name": "org-0", "signature": "!"}]),
    "a long signature": at("signatures", value=[{"name": "org-0", "signature": "A" * 10**6}]),
    "agent 0 twice": lambda table: table["members"].insert(0, {**table["members"][1], "id": 0}),
    "seconds that are text": at("deadline_seconds", value="60"),
    "seconds that are true": at("round_seconds", value=True),
    "classes that are numbers": at("data", "class_names", value=[0, 1]),
    "history that is a number": at("history", value=3),
    "history of numbers": at("history", value=[3]),
    "an empty version before": at("history", value=[{}]),
    "limits": at("limits", "uploads", value=0),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(path, change):
    assert refused(edited(path, change)).startswith(str(path))


def test_another_members_root_is_refused(path):
    def exchange(table):
        table["members"][0]["root"] = table["members"][1]["root"]

    assert "version 1, agent 0: `root` of org-0 is that of another" in refused(
        edited(path, exchange)
    )


def test_what_is_no_toml_is_refused_in_one_line(path, tmp_path):
    for content in (
        b"\xff\xfe",
        b"",
        b"=",
        b"x = " + b"[" * 100_000,
        b"x = " + b"[" * 90 + b"]" * 90,
        b"rounds = 0x" + b"f" * 100_000,
        b"rounds = " + b"9" * 100_000,
        b"rounds = 1979-05-27",
        b"a" + b".a" * 400_000 + b" = 1",
        os.urandom(1000),
        b"# " + b"x" * federation.MAX_FILE_BYTES,
    ):
        path.write_bytes(content)
        refused(path)
    refused(tmp_path)
    refused(tmp_path / "nowhere")


def test_another_file_is_called_what_it_is(eight, tmp_path):
    from tests.tiny import write as write_experiment

    (member,) = eight[0].folder.glob("*.member.toml")
    refused(member, "is a member's file, and no federation's")
    refused(write_experiment(tmp_path / "t.toml"), "is an experiment, and no federation's file")


SCALARS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.booleans(),
    st.text(max_size=20),
    st.just("os:system"),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_change_gives_a_federation_or_one_line(path, data):
    table = tomllib.loads(path.read_text())
    before = path.read_bytes()
    place = table
    while True:
        key = data.draw(
            st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place)))
        )
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    if data.draw(st.integers(0, 4)):
        place[key] = data.draw(VALUES)
    else:
        del place[key]
    try:
        path.write_text(tomli_w.dumps(table))
        made = None
        with contextlib.suppress(ConfigError):
            made = read_federation(path)
        if made is None:
            refused(path)
        else:
            write_federation(made, path)
            assert read_federation(path).digest == made.digest
    finally:
        path.write_bytes(before)


# --- commands


def test_from_keys_to_a_signed_version_by_commands(tmp_path):
    from tests.tiny import write as write_experiment

    folders = [tmp_path / name for name in ("a", "b", "c")]
    files = []
    for number, folder in enumerate(folders):
        endpoint = f"127.0.0.1:{7001 + number}"
        here(
            "peer",
            "identity",
            "--name",
            f"hospital-{folder.name}",
            "--endpoint",
            endpoint,
            "--out",
            folder,
        )
        files.append(folder / f"hospital-{folder.name}.member.toml")
    agents = {"num_clusters": 1, "benign": 3, "malicious": 0, "budget": 2}
    source = write_experiment(tmp_path / "tiny.toml", agents=agents)
    one, two = tmp_path / "federation.toml", tmp_path / "federation-2.toml"
    members = [word for file in files for word in ("--member", file)]
    few = here("peer", "federation", source, *members[:4], "--out", one)
    assert "has 3 agents, and there are 2 members" in few.one_line()
    made = here(
        "peer",
        "federation",
        source,
        *members,
        "--out",
        one,
        "--set",
        "rounds=8",
        "--lag",
        2,
        "--synchronous",
    )
    assert (made.status, made.err) == (0, "")
    first = read_federation(one)
    assert (first.rounds, first.lag, first.synchronous) == (8, 2, True)
    run = first.run.hex(" ", 2)
    assert f"tiny, run {run}, version 1, 3 members" in made.out
    key = hashlib.sha256(Member.read(files[0]).key).hexdigest()[:32]
    assert (
        f"adds hospital-a (127.0.0.1:7001, key {' '.join(key[k : k + 4] for k in range(0, 32, 4))})"
        in made.out
    )
    assert here("peer", "sign", one).out in made.out
    assert (
        "choose another --out"
        in here("peer", "federation", source, *members, "--out", one).one_line()
    )
    changed = here("peer", "amend", one, "--remove", "hospital-c", "--out", two)
    assert "- removes hospital-c" in changed.out
    assert (
        "It counts when 2 more of hospital-a, hospital-b, hospital-c have signed it" in changed.out
    )
    looked = here("peer", "sign", two)
    assert (looked.status, looked.out) == (0, changed.out)
    assert "give --identity too" in here("peer", "sign", two, "--merge", two).one_line()
    once = here("peer", "sign", two, "--identity", folders[0]).out
    assert "Signed by: hospital-a.\nIt counts when 1 more of hospital-b, hospital-c" in once
    refused(two, "lacks 1")
    assert (
        "It counts. Send it to all members of this version"
        in here("peer", "sign", two, "--identity", folders[1]).out
    )
    assert list(read_federation(two).members) == [0, 1]
    second = read_federation(two)
    assert (
        second.verification_phrase
        == f"tiny, version 2 {second.digest.hex(' ', 2)}, 2 members, of run {run[:19]}"
    )
    new, three = (
        tmp_path / "b-new",
        tmp_path / "federation-3.toml",
    )  # the key of hospital-b was stolen
    here("peer", "identity", "--name", "hospital-b", "--endpoint", "127.0.0.1:7002", "--out", new)
    here("peer", "amend", one, "--replace", new / "hospital-b.member.toml", "--out", three)
    for folder in (folders[0], folders[2]):
        here("peer", "sign", three, "--identity", folder)
    assert read_federation(three).id_of(Identity.read(new).member) == 1
    assert "needs no signature" in here("peer", "sign", one, "--identity", folders[0]).one_line()
    assert Path(one).read_text().startswith("# What the members of tiny agree on.")


def test_the_order_of_keys_makes_no_difference():
    """Inside a list too, where it is no key of its own."""
    one, other = ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert (
        federation._short_hash([one])
        == federation._short_hash([other])
        != federation._short_hash([{"a": 2, "b": 1}])
    )


def test_only_a_signed_later_version_says_that_a_member_was_removed_or_changed(
    path, tmp_path, eight
):
    first = read_federation(path)
    two, three = tmp_path / "two.toml", tmp_path / "three.toml"
    write_federation(amend_federation(first, remove=["org-3"]), two)
    notice = federation.removal_notice
    for signer in (eight[0], eight[3]):
        sign_federation(two, signer)
        assert notice(first, eight[3].member, two.read_bytes()) == ""  # of three that it needs
    sign_federation(two, eight[1])
    assert notice(first, eight[3].member, two.read_bytes()) == (
        "version 2 of the federation, signed by org-0, org-1, org-3, removes org-3: this node takes "
        "part no more"
    )
    assert notice(first, eight[0].member, two.read_bytes()) == ""
    second = read_federation(two)
    assert second.former_members() == [(3, eight[3].member)]
    assert notice(second, eight[0].member, two.read_bytes()) == ""  # the same version
    assert notice(second, eight[0].member, path.read_bytes()) == ""  # an earlier one

    moved = eight[2].with_endpoint(tmp_path / "moved", endpoint="127.0.0.1:9999")
    write_federation(amend_federation(second, replace=[moved.member]), three)
    for signer in eight[:2]:
        sign_federation(three, signer)
    content = three.read_bytes()
    for known in (first, second):
        said = notice(known, eight[2].member, content)
        assert said.startswith("version 3 of the federation, signed by org-0, org-1, gives org-2")
    assert notice(first, eight[3].member, content).startswith("version 2 of the federation, signed")
    assert notice(read_federation(three), moved.member, content) == ""

    other = federated(eight[:4], changes={"rounds": 9}, path=tmp_path / "other.toml")
    assert notice(other, eight[3].member, content) == ""  # of another run
    signature = second.versions[1].signatures[0].signature
    forged = two.read_text().replace(signature, signature[1:4] + signature[3:])
    for wrong in (b"", b"\xff", b"history = 7", b"[" * 10_000, bytes(2**21), forged.encode()):
        assert notice(first, eight[3].member, wrong) == ""


def test_an_experiment_of_members_names_no_malicious_agents(tmp_path):
    """Without these keys it is the same federation, to the bit."""
    who = identities(tmp_path, 2)
    values = experiment(2, agents={"benign": 2, "malicious": 0, "malicious_samples": 1})
    explicit = federation.make_federation(values, [one.member for one in who], dataset=digits())
    agents = values["agents"]
    del agents["malicious"], agents["malicious_samples"]
    made = federation.make_federation(values, [one.member for one in who], dataset=digits())
    assert made.digest == explicit.digest
    assert made.most_samples == agents["benign_samples"]
