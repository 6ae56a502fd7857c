"""Former names of federations and members work, with a warning that names the new ones."""

import importlib

import pytest

from tests.peer import members

FORMER_FEDERATION = {
    "own": "allowed_functions",
    "told": "verification_phrase",
    "parts": "user_functions",
    "keys": "value_hashes",
    "differing": "differing_keys",
    "unsigned": "unsigned_members",
    "lacking": "missing_signatures",
    "changes": "describe_changes",
    "follows": "is_successor_of",
    "terms": "fixed_content",
    "table": "to_table",
}


def test_federations_and_members_have_their_former_names(tmp_path):
    peer = importlib.import_module("fedcb2o.peer")
    keys = members.identities(tmp_path, 3)
    path = tmp_path / "federation.toml"
    federation = members.federated(keys, path=path)
    for former, new in FORMER_FEDERATION.items():
        with pytest.warns(DeprecationWarning, match=f"`{new}`"):
            assert getattr(federation, former) == getattr(federation, new)
    with pytest.warns(DeprecationWarning, match="allow"):
        read = peer.read_federation(path, own=["x:y"], unsigned=True)
    assert read.allowed_functions == {"x:y"}

    member = keys[0].member
    with pytest.warns(DeprecationWarning, match="allow_expired"):
        assert peer.Member.read(keys[0].folder / "org-0.member.toml", expired=True) == member
    with pytest.warns(DeprecationWarning, match="to_table"):
        table = member.table()
    with pytest.warns(DeprecationWarning, match="from_table"):
        assert peer.Member.of_table(table) == member
