"""Versions of a federation: signatures, amendments, removed members."""

import base64
import copy
import tomllib
from datetime import UTC, datetime, timedelta

import pytest
import tomli_w
from tests.peer.federation_files import assert_refused, edit, set_value, sign_and_read
from tests.peer.members import federated, forget_signed_versions

from fedcb2o.errors import ConfigError
from fedcb2o.peer import (
    Identity,
    amend_federation,
    read_federation,
    sign_federation,
    write_federation,
)
from fedcb2o.peer.membership import certificates, federation


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


def test_ids_and_names_of_removed_members_are_not_reused(federation_file, organisations, tmp_path):
    first, two, three = read_federation(federation_file), tmp_path / "2.toml", tmp_path / "3.toml"
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


def test_a_certificate_or_a_key_is_replaced_under_the_same_id(
    federation_file, organisations, tmp_path
):
    first, two = read_federation(federation_file), tmp_path / "2.toml"
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
    ] == [0, 1, 2]
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


def test_signatures_of_separate_copies_are_merged(federation_file, organisations, tmp_path):
    a, b, c = (tmp_path / f"{name}.toml" for name in "abc")
    write_federation(amend_federation(read_federation(federation_file), remove=["org-3"]), a)
    b.write_bytes(a.read_bytes())
    sign_federation(a, organisations[0])
    sign_federation(b, organisations[1])
    sign_federation(b, organisations[2], merge=[a])
    assert read_federation(b).missing_signatures == 0
    write_federation(amend_federation(read_federation(federation_file), remove=["org-2"]), c)
    with pytest.raises(
        ConfigError, match=r"is another version than .*, which differs in `members\.org-2"
    ):
        sign_federation(a, organisations[0], merge=[c])
    with pytest.raises(ConfigError, match="version 1, which needs no signature"):
        sign_federation(federation_file, organisations[0])
    with pytest.raises(ConfigError, match="not signed by enough members: no other can follow"):
        amend_federation(read_federation(a, allow_unsigned=True), remove=["org-2"])


def test_members_that_signed_two_successors_are_identified(
    federation_file, organisations, tmp_path
):
    signers = []
    for name, group in (("org-3", organisations[:3]), ("org-0", organisations[1:4])):
        forget_signed_versions(organisations)
        fork = tmp_path / f"without-{name}.toml"
        write_federation(amend_federation(read_federation(federation_file), remove=[name]), fork)
        signers.append(
            {signature.name for signature in sign_and_read(fork, group).versions[-1].signatures}
        )
    assert signers[0] & signers[1] == {"org-1", "org-2"}


def test_a_member_signs_one_successor_of_each_version(federation_file, organisations, tmp_path):
    signer, others = organisations[0], organisations[1:4]
    two, fork = tmp_path / "2.toml", tmp_path / "fork.toml"
    first = read_federation(federation_file)
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
    federation_file, organisations, tmp_path, monkeypatch
):
    """The process is killed between both; the same version can be signed afterwards."""
    two, fork = tmp_path / "2.toml", tmp_path / "fork.toml"
    write_federation(amend_federation(read_federation(federation_file), remove=["org-3"]), two)
    write_federation(amend_federation(read_federation(federation_file), remove=["org-2"]), fork)

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
def test_a_damaged_journal_of_versions_signs_nothing(
    content, federation_file, organisations, tmp_path
):
    two = tmp_path / "2.toml"
    first = read_federation(federation_file)
    write_federation(amend_federation(first, remove=["org-3"]), two)
    unsigned = two.read_bytes()
    journal = organisations[0].folder / "signed-versions.toml"
    journal.write_bytes(content.replace(b"%s", first.run.hex().encode()))
    with pytest.raises(ConfigError, match=r"signed-versions\.toml cannot be read .*: restore it"):
        sign_federation(two, organisations[0])
    assert two.read_bytes() == unsigned


def test_signed_versions_cannot_be_changed(federation_file, organisations, tmp_path):
    first, two, three = read_federation(federation_file), tmp_path / "2.toml", tmp_path / "3.toml"
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


def test_each_member_has_one_vote(federation_file, organisations, tmp_path):
    two = tmp_path / "2.toml"
    write_federation(amend_federation(read_federation(federation_file), remove=["org-3"]), two)
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


def test_invalid_amendments_are_refused(federation_file, organisations):
    agreement = read_federation(federation_file)
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


def test_only_a_later_signed_version_proves_a_removal_or_change(
    federation_file, tmp_path, organisations
):
    first = read_federation(federation_file)
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
    assert (
        notice(second, organisations[0].member, federation_file.read_bytes()) == ""
    )  # an earlier one

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
