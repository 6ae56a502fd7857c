"""Federation file: its content, its hash, and its versions signed by a majority of members."""

import base64
import contextlib
import copy
import hashlib
import json
import os
import resource
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.peer.members import experiment, federated, forget_signed_versions, identities
from tests.tiny import run_cli
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
from fedcb2o.peer.node._agent import agent_from_dataset, build_network


@pytest.fixture(scope="module")
def identity_folder(tmp_path_factory):
    """Return a folder for the identities of eight organisations."""
    return tmp_path_factory.mktemp("organisations")


@pytest.fixture(scope="module")
def organisations(identity_folder):
    return identities(identity_folder, 8)


@pytest.fixture(scope="module")
def federation_bytes(identity_folder, organisations):
    """Return the content of a federation file of the first four organisations."""
    federated(organisations[:4], path=identity_folder / "federation.toml")
    return (identity_folder / "federation.toml").read_bytes()


@pytest.fixture
def path(tmp_path, federation_bytes, organisations):
    """Return the federation file of the first four organisations, which signed no version."""
    forget_signed_versions(organisations)
    (tmp_path / "federation.toml").write_bytes(federation_bytes)
    return tmp_path / "federation.toml"


def assert_refused(path, match=None, **options):
    """Return the error message of a refused file, which has one line."""
    with pytest.raises(ConfigError, match=match) as raised:
        read_federation(path, **options)
    text = str(raised.value)
    assert "\n" not in text
    assert len(text) < 1500
    return text


def edit(path, change):
    """Apply a function to the table of the file and return its path."""
    table = tomllib.loads(path.read_text())
    change(table)
    path.write_text(tomli_w.dumps(table))
    return path


def test_a_federation_file_contains_all_agreed_settings(path, organisations):
    agreement = read_federation(path)
    assert agreement == federated(organisations[:4])
    assert agreement.run == agreement.digest
    assert len(agreement.run) == 32
    assert (
        agreement.version,
        agreement.num_agents,
        agreement.rounds,
        agreement.seed,
        agreement.shape,
    ) == (
        1,
        4,
        3,
        1000,
        (1, 8, 8),
    )
    assert agreement.class_names == tuple("0123456789")
    assert [agreement.id_of(identity.member) for identity in organisations[:4]] == [0, 1, 2, 3]
    assert {id: member.name for id, member in agreement.members.items()} == {
        j: f"org-{j}" for j in range(4)
    }
    assert (agreement.share, agreement.most_samples) == (
        0.25,
        30,
    )  # from the experiment: one attacker of four, 20 or 30 samples
    with pytest.raises(ConfigError, match="org-4 is no member of tiny, version 1"):
        agreement.id_of(organisations[4].member)
    assert "PRIVATE" not in path.read_text()


def test_the_experiment_equals_the_simulation_without_attackers(organisations):
    simulated = load(experiment(4, agents={"validation": 0.4, "split": "stratified"}, seeds=[7, 8]))
    agreement = make_federation(
        simulated,
        [organisation.member for organisation in organisations[:4]],
        dataset=digits(),
        rounds=9,
        encoding="int8",
    )
    agreed_experiment = agreement.experiment
    assert (agreed_experiment.rounds, agreed_experiment.seeds, agreement.encoding) == (
        9,
        (7,),
        "int8",
    )
    assert (
        agreed_experiment.agents.num_agents,
        agreed_experiment.agents.benign,
        agreed_experiment.attacked,
    ) == (4, 4, False)
    for key in ("budget", "validation", "split", "hold_out", "validation_loss", "initialisation"):
        assert getattr(agreed_experiment.agents, key) == getattr(simulated.agents, key)
    assert agreed_experiment.training == simulated.training
    settings = agreed_experiment.settings(), simulated.settings()
    for key in ("model", "algorithm"):
        assert settings[0][key] == settings[1][key]


def test_every_preset_can_be_a_federation(organisations, tmp_path):
    members, data = [organisation.member for organisation in organisations[:4]], digits()
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
            agreement = make_federation(simulated, members, dataset=data)
            write_federation(agreement, tmp_path / "f.toml")
            again = read_federation(tmp_path / "f.toml")
            assert again.digest == agreement.digest
            assert (
                build_algorithm(again.experiment).mixing_factor
                == build_algorithm(simulated).mixing_factor
            )


def test_the_hash_depends_on_the_content_not_on_the_format(path):
    agreement = read_federation(path)
    table = tomllib.loads(path.read_text())
    reordered = dict(reversed([(key, table[key]) for key in table]))
    reordered["experiment"] = {
        key: dict(reversed(table["experiment"][key].items())) for key in table["experiment"]
    }
    reordered["members"] = table["members"][::-1]
    reordered["experiment"]["algorithm"]["alpha"] = 2.0
    reordered["deadline_seconds"] = 60
    path.write_text("# otherwise\n" + tomli_w.dumps(reordered))
    assert read_federation(path).digest == agreement.digest
    assert read_federation(path).differing_keys(agreement.value_hashes()) == []
    # expected hash: of settings, version and members as JSON, with sorted keys and without 1.0
    content = {**table, "round_seconds": 0, "deadline_seconds": 60}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert agreement.digest == hashlib.sha256(text.encode()).digest()


def frozen_base_network(input_shape, num_classes, *, hidden: list[int]):
    base = nn.Linear(64, 2**17).requires_grad_(False)
    return nn.Sequential(nn.Flatten(), base, nn.AdaptiveAvgPool1d(2), nn.Linear(2, num_classes))


def test_the_limit_of_answers_follows_the_size_of_a_model(organisations):
    # rounds without a minimum duration
    assert federated(organisations[:2]).limits.answers_per_minute == 6000
    assert (
        federated(organisations[:2], round_seconds=0.2).limits.answers_per_minute == 3000
    )  # 5 rounds a second, 2 (1 + 4)
    assert federated(organisations[:2], round_seconds=30.0).limits.answers_per_minute == 300
    assert (
        federated(
            organisations[:2], round_seconds=30.0, limits={"answers_per_minute": 7}
        ).limits.answers_per_minute
        == 7
    )
    wide = {
        "model": {"hidden": [2**15]}
    }  # 2^15 (64 + 1 + 10) + 10 parameters: 9.4 MiB, 2.3 of int8
    for encoding, answers in (("float32", 12 * 2 * (9 + 5)), ("int8", 300)):
        agreement = federated(organisations[:2], changes=wide, round_seconds=5.0, encoding=encoding)
        assert agreement.limits.answers_per_minute == answers
    frozen = federated(
        organisations[:2],
        changes={"model": {"name": frozen_base_network, "hidden": []}},
        round_seconds=5.0,
    )
    assert frozen.limits.answers_per_minute == 300  # frozen parameters are not sent


def test_differing_keys_are_named(path, organisations, tmp_path):
    agreement = read_federation(path)
    other = federated(
        [*organisations[:3], organisations[4]],
        changes={"algorithm": {"alpha": 3.0}, "model": {"hidden": [9]}},
        lag=6,
    )
    assert agreement.differing_keys(other.value_hashes()) == sorted(
        ["experiment.algorithm.alpha", "experiment.model.hidden", "lag"]
        + [
            f"members.{name}.{key}"
            for name in ("org-3", "org-4")
            for key in ("endpoint", "id", "key", "name", "root")
        ]
    )
    assert agreement.differing_keys({}) == sorted(agreement.value_hashes())
    assert all(len(value) == 16 for value in agreement.value_hashes().values())


def test_the_hash_ignores_keys_that_the_file_does_not_have(path):
    agreement = read_federation(path)
    without_lag = read_federation(edit(path, lambda table: table.pop("lag")))
    assert without_lag.lag == agreement.lag == 5
    assert without_lag.differing_keys(agreement.value_hashes()) == ["lag"]
    # a later release with more keys computes the same hash of a file without them
    assert "lag" not in without_lag.fixed_content()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agents": {"benign": 4}}, "has 5 agents, and there are 4 members"),
        ({"agents": {"num_clusters": 2}}, "has 8 agents, and there are 4 members"),
        ({"agents": {"participation": 0.5}}, "`agents.participation` below 1 is for simulations"),
        ({"algorithm": {"name": "ifca", "models": 2}}, "`ifca` has a coordinator"),
    ],
)
def test_an_experiment_that_peers_cannot_run_is_refused(organisations, changes, message):
    with pytest.raises(ConfigError, match=message):
        federated(organisations[:4], changes=changes)


@pytest.mark.parametrize(
    ("option", "message"),
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
def test_an_invalid_option_is_refused(organisations, option, message):
    with pytest.raises(ConfigError, match=message) as raised:
        federated(organisations[:4], **option)
    assert "\n" not in str(raised.value)


def test_members_must_differ(organisations, tmp_path):
    a, b = (organisation.member for organisation in organisations[:2])
    same_name = Identity.make(tmp_path / "x", name=a.name, endpoint="127.0.0.1:1").member
    same_endpoint = Identity.make(tmp_path / "y", name="y", endpoint=a.endpoint).member
    for other, message in (
        (a, "`name`: 'org-0'"),
        (same_name, "`name`: 'org-0'"),
        (same_endpoint, "`endpoint`"),
    ):
        with pytest.raises(ConfigError, match=f"two members of the same {message}"):
            make_federation(experiment(3), [a, b, other], dataset=digits())
    z = Identity.make(tmp_path / "z", name="z", endpoint="127.0.0.1:1").member
    with pytest.raises(ConfigError, match="two members of the same `key`"):
        make_federation(
            experiment(3), [a, b, Member(z.name, z.endpoint, b.key, z.root)], dataset=digits()
        )


# --- versions


def sign_and_read(path, signers):
    for identity in signers:
        sign_federation(path, identity)
    return read_federation(path)


@pytest.mark.parametrize(("n", "majority"), [(2, 2), (3, 2), (4, 3), (5, 3), (8, 5)])
def test_a_version_is_valid_when_a_majority_signed_it(organisations, tmp_path, n, majority):
    first, path = federated(organisations[:n]), tmp_path / "2.toml"
    write_federation(
        amend_federation(
            first,
            add=[organisations[n].member] if n < 8 else [],
            remove=["org-0"] if n == 8 else [],
        ),
        path,
    )
    for count in range(majority):
        message = assert_refused(
            path, f"version 2 lacks {majority - count} of the {majority} signatures"
        )
        assert all((f"org-{j}" in message) == (count <= j < min(n, count + 5)) for j in range(8))
        assert read_federation(path, allow_unsigned=True).missing_signatures == majority - count
        sign_federation(path, organisations[count])
        sign_federation(path, organisations[count])  # a second signature of a member has no effect
    second = read_federation(path)
    assert (second.version, second.missing_signatures, second.run) == (2, 0, first.run)
    assert second.digest != first.digest
    assert second.is_successor_of(first)
    assert second.is_successor_of(second)
    assert not first.is_successor_of(second)


def test_ids_and_names_of_removed_members_are_not_reused(path, organisations, tmp_path):
    first, two, three = read_federation(path), tmp_path / "2.toml", tmp_path / "3.toml"
    write_federation(amend_federation(first, remove=["org-3"]), two)
    second = sign_and_read(two, organisations[1:4])  # a removed member may sign, too
    assert second.describe_changes() == ["removes org-3"]
    assert list(second.members) == [0, 1, 2]
    with pytest.raises(ConfigError, match="no member"):
        second.id_of(organisations[3].member)
    assert (second.num_agents, second.experiment.agents.num_agents) == (
        4,
        4,
    )  # random draws of the other members do not change
    write_federation(amend_federation(second, add=[organisations[4].member]), three)
    with pytest.raises(ConfigError, match="belongs to no member of the version before"):
        sign_federation(three, organisations[3])
    with pytest.raises(ConfigError, match="belongs to no member of the version before"):
        sign_federation(three, organisations[4])  # a new member cannot sign
    third = sign_and_read(three, organisations[:2])
    assert list(third.members) == [0, 1, 2, 4]
    new_member = organisations[4].member
    assert third.describe_changes() == [
        f"adds org-4 ({new_member.endpoint}, key {new_member.fingerprint})"
    ]
    assert third.is_successor_of(first)
    with pytest.raises(ConfigError, match=r"version 4 has org-3 again"):
        amend_federation(third, add=[organisations[3].member])
    table = copy.deepcopy(third.to_table())
    table["members"][3]["id"] = 3
    three.write_text(tomli_w.dumps(table))
    assert_refused(three, "ids out of order: those of new members follow all earlier ids, from 4")


def test_an_impossible_graph_is_refused_before_signing(organisations):
    agents = {
        "num_clusters": 1,
        "benign": 4,
        "malicious": 0,
        "budget": 2,
        "graph": {"name": "torus"},
    }
    agreement = federated(organisations[:4], changes={"agents": agents})
    with pytest.raises(ConfigError, match=r"a torus needs a number of agents .* got 5"):
        amend_federation(agreement, add=[organisations[4].member])
    with pytest.raises(ConfigError, match=r"a torus needs a number of agents .* got 5"):
        federated(organisations[:5], changes={"agents": {**agents, "benign": 5}})


def test_a_certificate_or_a_key_is_replaced_under_the_same_id(path, organisations, tmp_path):
    first, two = read_federation(path), tmp_path / "2.toml"
    moved = organisations[1].with_endpoint(tmp_path / "moved", endpoint="127.0.0.2:7447")
    replacement = Identity.make(
        tmp_path / "new", name="org-2", endpoint=organisations[2].member.endpoint
    )
    write_federation(amend_federation(first, replace=[moved.member, replacement.member]), two)
    # the old key signs its replacement
    second = sign_and_read(two, [organisations[0], moved, organisations[2]])
    assert second.describe_changes() == [
        f"gives org-1 another endpoint (127.0.0.2:7447, not {organisations[1].member.endpoint}) and root",
        f"gives org-2 another key ({replacement.member.fingerprint}, not "
        f"{organisations[2].member.fingerprint}) and root",
    ]
    assert [
        second.id_of(identity.member) for identity in (organisations[0], moved, replacement)
    ] == [
        0,
        1,
        2,
    ]
    with pytest.raises(ConfigError, match="org-1 is in tiny, version 2 with another `endpoint`"):
        second.id_of(organisations[1].member)
    with pytest.raises(
        ConfigError, match=f"with another key .{replacement.member.fingerprint}, not "
    ):
        second.id_of(organisations[2].member)


def test_an_expired_root_stops_a_federation_until_it_is_replaced(organisations, tmp_path):
    creation = datetime.now(UTC) - timedelta(days=certificates.ROOT_DAYS + 1)
    old = Identity.make(tmp_path / "old", name="old", endpoint="127.0.0.1:7000", now=creation)
    one, two = tmp_path / "1.toml", tmp_path / "2.toml"
    federated([*organisations[:2], old], path=one)
    assert_refused(one, "`root` of old expired at")
    new = old.with_endpoint(tmp_path / "new", endpoint="127.0.0.1:7000")
    write_federation(
        amend_federation(read_federation(one, allow_unsigned=True), replace=[new.member]), two
    )
    assert sign_and_read(two, [organisations[0], new]).members[2] == new.member


def test_signatures_of_separate_copies_are_merged(path, organisations, tmp_path):
    a, b, c = (tmp_path / f"{name}.toml" for name in "abc")
    write_federation(amend_federation(read_federation(path), remove=["org-3"]), a)
    b.write_bytes(a.read_bytes())
    sign_federation(a, organisations[0])
    sign_federation(b, organisations[1])
    sign_federation(b, organisations[2], merge=[a])
    assert read_federation(b).missing_signatures == 0
    write_federation(amend_federation(read_federation(path), remove=["org-2"]), c)
    with pytest.raises(
        ConfigError, match=r"is another version than .*, which differs in `members\.org-2"
    ):
        sign_federation(a, organisations[0], merge=[c])
    with pytest.raises(ConfigError, match="version 1, which needs no signature"):
        sign_federation(path, organisations[0])
    with pytest.raises(ConfigError, match="not signed by enough members: no other can follow"):
        amend_federation(read_federation(a, allow_unsigned=True), remove=["org-2"])


def test_members_that_signed_two_successors_are_identified(path, organisations, tmp_path):
    signers = []
    for name, group in (("org-3", organisations[:3]), ("org-0", organisations[1:4])):
        forget_signed_versions(organisations)
        fork = tmp_path / f"without-{name}.toml"
        write_federation(amend_federation(read_federation(path), remove=[name]), fork)
        signers.append(
            {signature.name for signature in sign_and_read(fork, group).versions[-1].signatures}
        )
    assert signers[0] & signers[1] == {"org-1", "org-2"}


def test_a_member_signs_one_successor_of_each_version(path, organisations, tmp_path):
    signer, others = organisations[0], organisations[1:4]
    two, fork = tmp_path / "2.toml", tmp_path / "fork.toml"
    first = read_federation(path)
    write_federation(amend_federation(first, remove=["org-3"]), two)
    write_federation(amend_federation(first, add=[organisations[4].member]), fork)
    second = sign_federation(two, signer)
    assert sign_federation(two, Identity.read(signer.folder)) == second
    journal = signer.folder / "signed-versions.toml"
    assert journal.stat().st_mode & 0o777 == 0o600
    content, signed = journal.read_bytes(), fork.read_bytes()
    message = (
        f"org-0 has signed another version 2 of this run, {second.digest[:8].hex(' ', 2)} "
        r"\(removes org-3\).* by version 3.*remove its entry from .*signed-versions.toml"
    )
    for _ in range(2):
        with pytest.raises(ConfigError, match=message):
            sign_federation(fork, signer)
        assert (journal.read_bytes(), fork.read_bytes()) == (content, signed)

    # the same member by other keys of the same organisation, made later
    moved = signer.with_endpoint(tmp_path / "moved", endpoint="127.0.0.1:9999")
    with pytest.raises(ConfigError, match=message):
        sign_federation(fork, moved)

    # the next version, and the same number in another run
    third = sign_and_read(two, others[:2])
    write_federation(amend_federation(third, add=[organisations[5].member]), two)
    sign_federation(two, signer)
    other_run = federated(organisations[:4], changes={"rounds": 9})
    write_federation(amend_federation(other_run, remove=["org-1"]), fork)
    sign_federation(fork, signer)


def test_a_version_is_in_the_journal_before_it_is_signed(
    path, organisations, tmp_path, monkeypatch
):
    """The process is killed between both; the same version can be signed afterwards."""
    two, fork = tmp_path / "2.toml", tmp_path / "fork.toml"
    write_federation(amend_federation(read_federation(path), remove=["org-3"]), two)
    write_federation(amend_federation(read_federation(path), remove=["org-2"]), fork)

    def kill(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Identity, "sign", kill)
        with pytest.raises(KeyboardInterrupt):
            sign_federation(two, organisations[0])
    with pytest.raises(ConfigError, match="has signed another version 2"):
        sign_federation(fork, organisations[0])
    assert sign_federation(two, organisations[0]).missing_signatures == 2


@pytest.mark.parametrize("content", [b"[", b"\xff", b"%s = 7", b"%s.2 = 7", b"%s.2.digest = 'x'"])
def test_a_damaged_journal_of_versions_signs_nothing(content, path, organisations, tmp_path):
    two = tmp_path / "2.toml"
    first = read_federation(path)
    write_federation(amend_federation(first, remove=["org-3"]), two)
    unsigned = two.read_bytes()
    journal = organisations[0].folder / "signed-versions.toml"
    journal.write_bytes(content.replace(b"%s", first.run.hex().encode()))
    with pytest.raises(ConfigError, match=r"signed-versions\.toml cannot be read .*: restore it"):
        sign_federation(two, organisations[0])
    assert two.read_bytes() == unsigned


def test_signed_versions_cannot_be_changed(path, organisations, tmp_path):
    first, two, three = read_federation(path), tmp_path / "2.toml", tmp_path / "3.toml"
    write_federation(amend_federation(first, remove=["org-3"]), two)
    second = sign_and_read(two, organisations[:3])
    write_federation(amend_federation(second, add=[organisations[4].member]), three)
    sign_and_read(three, organisations[:2])
    valid = three.read_bytes()

    def change_rounds(table):
        table["rounds"] = 4

    def keep_removed_member(table):
        table["history"][1]["members"].append(table["history"][0]["members"][3])

    def replace_first_member(table):
        table["history"][0]["members"][0].update(
            {key: organisations[5].member.to_table()[key] for key in ("key", "root", "name")}
        )

    def swap_signatures(table):
        table["signatures"][0]["signature"] = table["signatures"][1]["signature"]

    def reuse_signatures(table):
        table["signatures"] = table["history"][1]["signatures"]

    def drop_signatures(table):
        table["history"][1]["signatures"] = []

    def drop_history(table):
        table.update(version=1, history=[])

    def drop_first_version(table):
        table["history"] = table["history"][1:]

    changes = (
        change_rounds,
        keep_removed_member,
        replace_first_member,
        swap_signatures,
        reuse_signatures,
        drop_signatures,
        drop_history,
        drop_first_version,
    )
    for change in changes:
        three.write_bytes(valid)
        assert_refused(
            edit(three, change),
            "signature|lacks|`version`|ids out of order|no certificate|is that of another|"
            "names stay",
        )
    three.write_bytes(valid)
    assert read_federation(three).version == 3


def test_each_member_has_one_vote(path, organisations, tmp_path):
    two = tmp_path / "2.toml"
    write_federation(amend_federation(read_federation(path), remove=["org-3"]), two)
    sign_federation(two, organisations[1])
    ((name, original),) = (entry.values() for entry in tomllib.loads(two.read_text())["signatures"])
    # base64 has bits to spare: the same 64 bytes
    variant = original[:-3] + chr(ord(original[-3]) + 1) + "=="
    assert base64.b64decode(variant) == base64.b64decode(original)
    for other in (original, variant):
        votes = [
            {"name": name, "signature": signature} for signature in (original, other, original)
        ]
        edit(two, set_value("signatures", value=votes))
        assert_refused(two, "version 2 has two signatures of 'org-1', but a member has one vote")
        assert_refused(
            two,
            "version 2 has two signatures of 'org-1', but a member has one vote",
            allow_unsigned=True,
        )


def test_invalid_amendments_are_refused(path, organisations):
    agreement = read_federation(path)
    for options, message in (
        ({}, "each of them once"),
        ({"remove": ["org-9"]}, "there is no member `org-9`. Did you mean `org-"),
        ({"remove": ["org-1", "org-1"]}, "each of them once"),
        ({"remove": ["org-1"], "replace": [organisations[1].member]}, "each of them once"),
        ({"replace": [organisations[1].member]}, "the same as the last one"),
        ({"replace": [organisations[5].member]}, "there is no member `org-5`"),
        ({"add": [organisations[1].member]}, "org-1 is a member: --replace"),
        (
            {"remove": ["org-0", "org-1", "org-2"]},
            "the new version: a federation has at least 2 members",
        ),
    ):
        with pytest.raises(ConfigError, match=message) as raised:
            amend_federation(agreement, **options)
        assert "\n" not in str(raised.value)


# --- hostile files


def test_code_named_in_a_file_runs_only_if_allowed(path, organisations, tmp_path):
    trap = tmp_path / "trap"
    own = {"name": "os:system", "command": f"touch {trap}"}
    edit(path, lambda table: table["experiment"].update(algorithm=own))
    agreement = read_federation(path)  # the file can be read, hashed and signed
    with pytest.raises(
        ConfigError, match=r"names 'os:system', code that would run here: .*with --own"
    ):
        agreement.experiment  # noqa: B018
    criterion = {"name": "fedcb2o", "criterion": {"name": "os:system"}, "alpha": 2.0}
    edit(path, lambda table: table["experiment"].update(algorithm=criterion))
    assert read_federation(path).user_functions == ("os:system",)
    assert not trap.exists()


@pytest.mark.parametrize(
    "base", ["~/model", "/etc", "../model.gguf", "gpt2", "somebody/model", "http://x/y"]
)
def test_a_model_named_in_a_file_is_read_or_fetched_only_if_allowed(
    path, organisations, monkeypatch, base
):
    def fail(*_):
        raise AssertionError("a base is read")

    for name in ("base_folder", "base_model", "base_checksum", "base_bytes"):
        monkeypatch.setattr(f"fedcb2o.pretrained.{name}", fail)
    model = {"name": "language_model", "base": base, "answer": 4, "checksum": "0" * 64}

    def change(table):
        table["experiment"]["model"] = model
        table["data"]["shape"] = [12]

    edit(path, change)
    agreement = read_federation(path)
    assert agreement.user_functions == (base,)
    with pytest.raises(
        ConfigError, match=rf"names '{base}', a model that would be read or downloaded.*--own"
    ):
        agreement.experiment  # noqa: B018
    with pytest.raises(ConfigError, match="--own"):
        build_network(agreement)
    allowed = read_federation(path, allowed_functions=[base])
    with pytest.raises(AssertionError, match="a base is read"):
        build_network(allowed)


@pytest.mark.parametrize("base", ["tiny", "smollm2"])
def test_built_in_bases_need_no_permission(path, base):
    model = {"name": "language_model", "base": base, "answer": 4}
    edit(path, lambda table: table["experiment"].update(model=model))
    assert read_federation(path).experiment.model.parameters["base"] == base


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experiment.model.hidden": [200_000_000]}, "`experiment.model.hidden` is 200000000, and"),
        ({"experiment.model.hidden": [10**6] * 3}, "has 2,000,.* parameters, and at most"),
        ({"experiment.model.hidden": [1] * 1001}, "more than 1000 values"),
        ({"experiment.model": {"name": "resnet", "blocks": 10**6}}, "`blocks` must be .* at most"),
        ({"experiment.model": {"name": "resnet", "width": 10**9}}, "model.width` is 1000000000"),
        ({"experiment.training.local_epochs": 10**12}, "local_epochs` is 1000000000000, and at"),
        ({"experiment.algorithm.alpha": 10**12}, "algorithm.alpha` is"),
        (
            {
                "experiment.algorithm": {
                    "name": "by_rule",
                    "rule": {"name": "geometric_median", "iterations": 10**12},
                }
            },
            "rule.iterations` is 1000000000000, and at most 10000",
        ),
        ({"data.shape": [2**20, 2**20, 2**20]}, "`data.shape`.* more than 134217728 values"),
        ({"data.shape": [2**31 - 1] * 8}, "`data.shape`.* more than 134217728 values"),
    ],
)
def test_sizes_are_refused_before_anything_is_built(path, changes, message):
    def change(table):
        for key, value in changes.items():
            *sections, last = key.split(".")
            section = table
            for name in sections:
                section = section[name]
            section[last] = value

    edit(path, change)
    limit = 2**30
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with pytest.raises(ConfigError, match=message) as raised:
        read_federation(path).experiment  # noqa: B018
    assert "\n" not in str(raised.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < before + limit


def test_a_node_refuses_a_model_that_needs_more_than_the_free_memory(path, monkeypatch):
    edit(path, lambda table: table["experiment"].update(model={"name": "mlp", "hidden": [1000]}))
    agreement = read_federation(path)
    dim = 64 * 1000 + 1000 + 1000 * 10 + 10
    monkeypatch.setattr("fedcb2o.parallel._resources.free_memory", lambda: 5 * 4 * dim)
    build_network(agreement)  # one copy fits
    with pytest.raises(ConfigError, match=r"75,010 parameters and needs .* free memory"):
        agent_from_dataset(agreement, 0, digits())


def own_criterion(losses, local, *, by: float = 1.0):
    """Criterion of a user."""
    return losses.mean * by


def test_user_functions_are_stored_and_allowed_by_path(organisations, tmp_path):
    name = "tests.peer.test_federation:own_criterion"
    agreement = federated(
        organisations[:2], changes={"algorithm": {"criterion": {"name": name, "by": 2.0}}}
    )
    assert agreement.user_functions == (name,)
    assert agreement.experiment.settings()["algorithm"]["criterion"] == {"name": name, "by": 2}
    write_federation(agreement, tmp_path / "f.toml")
    with pytest.raises(ConfigError, match="allow it with --own"):
        read_federation(tmp_path / "f.toml").experiment  # noqa: B018
    allowed = read_federation(tmp_path / "f.toml", allowed_functions=[name])
    assert allowed.experiment == agreement.experiment
    assert allowed.digest == agreement.digest


def set_value(*keys, value):
    """Return a function that sets one value of a table."""

    def change(table):
        for key in keys[:-1]:
            table = table[key]
        table[keys[-1]] = value

    return change


HOSTILE = {
    "another protocol": set_value("protocol", value=2),
    "another version": set_value("version", value=2),
    "no whole version": set_value("version", value=1.5),
    "a version that is true": set_value("version", value=True),
    "a huge number": set_value("rounds", value=2**62),
    "rounds as text": set_value("rounds", value="3"),
    "NaN": set_value("deadline_seconds", value=float("nan")),
    "infinity": set_value("experiment", "algorithm", "alpha", value=float("inf")),
    "NaN deep inside": set_value("experiment", "model", "hidden", value=[float("nan")]),
    "a key more": set_value("own", value=["os:system"]),
    "versions": set_value("versions", value=[]),
    "settings": set_value("settings", value={}),
    "a key like a key": set_value("deadline_second", value=3.0),
    "a key of two lines": set_value("a\nb", value=1),
    "a megabyte": set_value("name", value="a" * 10**6),
    "a megabyte of a key": set_value("x" * 10**6, value=1),
    "a list for a table": set_value("data", value=[1]),
    "a table for a number": set_value("seed", value={"x": 1}),
    "a negative shape": set_value("data", "shape", value=[-1]),
    "shapes": set_value("data", "shape", value=[1] * 100),
    "one class": set_value("data", "class_names", value=["x"]),
    "a class that writes on the terminal": set_value("data", "class_names", value=["\x1b[2J", "b"]),
    "attackers": set_value("experiment", "agents", "malicious", value=1),
    "an attack": set_value(
        "experiment", "attack", value={"name": "label_flip", "source": 1, "target": 2}
    ),
    "a device": set_value("experiment", "device", value="cuda"),
    "a large budget": set_value("experiment", "agents", "budget", value=4),
    "no budget": set_value("experiment", "agents", value={}),
    "an unknown algorithm": set_value("experiment", "algorithm", "name", value="fedcb"),
    "an algorithm with a coordinator": set_value(
        "experiment", "algorithm", value={"name": "ifca", "models": 2}
    ),
    "an unknown parameter": set_value("experiment", "algorithm", "gamma", value=1),
    "a parameter of another type": set_value("experiment", "training", "gamma", value="0.1"),
    "one member": set_value("members", value=[]),
    "members as text": set_value("members", value="org-0"),
    "a number for a member": set_value("members", value=[1, 2]),
    "ids from 1": set_value("members", 0, "id", value=4),
    "an id twice": set_value("members", 0, "id", value=1),
    "a negative id": set_value("members", 0, "id", value=-1),
    "a huge id": set_value("members", 0, "id", value=2**40),
    "an id that is text": set_value("members", 0, "id", value="0"),
    "a member with more": set_value("members", 0, "admin", value=True),
    "a member's key that is no base64": set_value("members", 0, "key", value="!" * 44),
    "a member's name of two lines": set_value("members", 0, "name", value="a\nb"),
    "another endpoint": set_value("members", 0, "endpoint", value="127.0.0.9:1"),
    "signatures of version 1": set_value(
        "signatures", value=[{"name": "org-0", "signature": "AA=="}]
    ),
    "a signature that is no base64": set_value(
        "signatures", value=[{"name": "org-0", "signature": "!"}]
    ),
    "a long signature": set_value(
        "signatures", value=[{"name": "org-0", "signature": "A" * 10**6}]
    ),
    "agent 0 twice": lambda table: table["members"].insert(0, {**table["members"][1], "id": 0}),
    "seconds that are text": set_value("deadline_seconds", value="60"),
    "seconds that are true": set_value("round_seconds", value=True),
    "classes that are numbers": set_value("data", "class_names", value=[0, 1]),
    "history that is a number": set_value("history", value=3),
    "history of numbers": set_value("history", value=[3]),
    "an empty version before": set_value("history", value=[{}]),
    "limits": set_value("limits", "uploads", value=0),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(path, change):
    assert assert_refused(edit(path, change)).startswith(str(path))


def test_the_root_of_another_member_is_refused(path):
    def exchange(table):
        table["members"][0]["root"] = table["members"][1]["root"]

    assert "version 1, agent 0: `root` of org-0 is that of another" in assert_refused(
        edit(path, exchange)
    )


def test_a_file_that_is_not_toml_is_refused_in_one_line(path, tmp_path):
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
        assert_refused(path)
    assert_refused(tmp_path)
    assert_refused(tmp_path / "nowhere")


def test_a_file_of_another_kind_is_refused_with_its_kind(organisations, tmp_path):
    from tests.tiny import write as write_experiment

    (member,) = organisations[0].folder.glob("*.member.toml")
    assert_refused(member, "is a member's file, and no federation's")
    assert_refused(
        write_experiment(tmp_path / "t.toml"), "is an experiment, and no federation's file"
    )


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
def test_any_change_gives_a_valid_federation_or_a_one_line_error(path, data):
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
        agreement = None
        with contextlib.suppress(ConfigError):
            agreement = read_federation(path)
        if agreement is None:
            assert_refused(path)
        else:
            write_federation(agreement, path)
            assert read_federation(path).digest == agreement.digest
    finally:
        path.write_bytes(before)


# --- commands


def test_commands_from_keys_to_a_signed_version(tmp_path):
    from tests.tiny import write as write_experiment

    folders = [tmp_path / name for name in ("a", "b", "c")]
    files = []
    for number, folder in enumerate(folders):
        endpoint = f"127.0.0.1:{7001 + number}"
        run_cli(
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
    too_few = run_cli("peer", "federation", source, *members[:4], "--out", one)
    assert "has 3 agents, and there are 2 members" in too_few.one_line()
    created = run_cli(
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
    assert (created.status, created.err) == (0, "")
    first = read_federation(one)
    assert (first.rounds, first.lag, first.synchronous) == (8, 2, True)
    run = first.run.hex(" ", 2)
    assert f"tiny, run {run}, version 1, 3 members" in created.out
    key = hashlib.sha256(Member.read(files[0]).key).hexdigest()[:32]
    assert (
        f"adds hospital-a (127.0.0.1:7001, key {' '.join(key[k : k + 4] for k in range(0, 32, 4))})"
        in created.out
    )
    assert run_cli("peer", "sign", one).out in created.out
    assert (
        "choose another --out"
        in run_cli("peer", "federation", source, *members, "--out", one).one_line()
    )
    changed = run_cli("peer", "amend", one, "--remove", "hospital-c", "--out", two)
    assert "- removes hospital-c" in changed.out
    assert (
        "It counts when 2 more of hospital-a, hospital-b, hospital-c have signed it" in changed.out
    )
    inspected = run_cli("peer", "sign", two)
    assert (inspected.status, inspected.out) == (0, changed.out)
    assert "give --identity too" in run_cli("peer", "sign", two, "--merge", two).one_line()
    signed_once = run_cli("peer", "sign", two, "--identity", folders[0]).out
    assert "Signed by: hospital-a.\nIt counts when 1 more of hospital-b, hospital-c" in signed_once
    assert_refused(two, "lacks 1")
    assert (
        "It counts. Send it to all members of this version"
        in run_cli("peer", "sign", two, "--identity", folders[1]).out
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
    run_cli(
        "peer", "identity", "--name", "hospital-b", "--endpoint", "127.0.0.1:7002", "--out", new
    )
    run_cli("peer", "amend", one, "--replace", new / "hospital-b.member.toml", "--out", three)
    refused = run_cli("peer", "sign", three, "--identity", folders[0])
    assert "has signed another version 2 of this run" in refused.one_line()
    assert "(removes hospital-c)" in refused.one_line()
    (Path(folders[0]) / "signed-versions.toml").unlink()
    for folder in (folders[0], folders[2]):
        run_cli("peer", "sign", three, "--identity", folder)
    assert read_federation(three).id_of(Identity.read(new).member) == 1
    assert "needs no signature" in run_cli("peer", "sign", one, "--identity", folders[0]).one_line()
    assert Path(one).read_text().startswith("# What the members of tiny agree on.")


def test_hashes_ignore_the_order_of_keys():
    """The dictionaries are in a list, which is hashed as one value."""
    one, other = ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert (
        federation._short_hash([one])
        == federation._short_hash([other])
        != federation._short_hash([{"a": 2, "b": 1}])
    )


def test_only_a_later_signed_version_proves_a_removal_or_change(path, tmp_path, organisations):
    first = read_federation(path)
    two, three = tmp_path / "two.toml", tmp_path / "three.toml"
    write_federation(amend_federation(first, remove=["org-3"]), two)
    notice = federation.removal_notice
    for signer in (organisations[0], organisations[3]):
        sign_federation(two, signer)
        # three signatures are needed
        assert notice(first, organisations[3].member, two.read_bytes()) == ""
    sign_federation(two, organisations[1])
    assert notice(first, organisations[3].member, two.read_bytes()) == (
        "version 2 of the federation, signed by org-0, org-1, org-3, removes org-3: this node takes "
        "part no more"
    )
    assert notice(first, organisations[0].member, two.read_bytes()) == ""
    second = read_federation(two)
    assert second.former_members() == [(3, organisations[3].member)]
    assert notice(second, organisations[0].member, two.read_bytes()) == ""  # the same version
    assert notice(second, organisations[0].member, path.read_bytes()) == ""  # an earlier one

    moved = organisations[2].with_endpoint(tmp_path / "moved", endpoint="127.0.0.1:9999")
    write_federation(amend_federation(second, replace=[moved.member]), three)
    for signer in organisations[:2]:
        sign_federation(three, signer)
    content = three.read_bytes()
    for known in (first, second):
        message = notice(known, organisations[2].member, content)
        assert message.startswith(
            "version 3 of the federation, signed by org-0, org-1, gives org-2"
        )
    assert notice(first, organisations[3].member, content).startswith(
        "version 2 of the federation, signed"
    )
    assert notice(read_federation(three), moved.member, content) == ""

    other = federated(organisations[:4], changes={"rounds": 9}, path=tmp_path / "other.toml")
    assert notice(other, organisations[3].member, content) == ""  # of another run
    signature = second.versions[1].signatures[0].signature
    forged = two.read_text().replace(signature, signature[1:4] + signature[3:])
    for invalid in (b"", b"\xff", b"history = 7", b"[" * 10_000, bytes(2**21), forged.encode()):
        assert notice(first, organisations[3].member, invalid) == ""


def test_keys_of_malicious_agents_are_optional(tmp_path):
    """The hash of the federation is the same with and without these keys."""
    organisations = identities(tmp_path, 2)
    values = experiment(2, agents={"benign": 2, "malicious": 0, "malicious_samples": 1})
    explicit = federation.make_federation(
        values, [organisation.member for organisation in organisations], dataset=digits()
    )
    agents = values["agents"]
    del agents["malicious"], agents["malicious_samples"]
    agreement = federation.make_federation(
        values, [organisation.member for organisation in organisations], dataset=digits()
    )
    assert agreement.digest == explicit.digest
    assert agreement.most_samples == agents["benign_samples"]
