"""Commands that make, amend and sign a federation."""

import hashlib
from pathlib import Path

from tests.peer.federation_files import assert_refused
from tests.tiny import run_cli

from fedcb2o.peer import Identity, Member, read_federation


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
