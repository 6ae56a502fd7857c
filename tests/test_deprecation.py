"""Former names of modules, functions and fields work, with a warning that names the new ones."""

import importlib
import subprocess
import sys

import pytest

from fedcb2o._deprecation import FORMER_MODULES, former_fields, former_names
from tests.peer import members


@pytest.mark.parametrize("former", FORMER_MODULES)
def test_a_former_module_has_the_objects_of_the_new_one(former):
    new, names = FORMER_MODULES[former]
    sys.modules.pop(former, None)
    with pytest.warns(DeprecationWarning, match=new.replace(".", r"\.")):
        module = importlib.import_module(former)
    replacement = importlib.import_module(new)
    for name, new_name in names.items():
        home, _, last = new_name.rpartition(".")
        home_module = importlib.import_module(home) if home else replacement
        assert getattr(module, name) is getattr(home_module, last)
    for name in getattr(replacement, "__all__", ()):
        assert getattr(module, name) is getattr(replacement, name)


def test_a_former_module_warns_a_script():
    code = "from fedcb2o.streams import streams; print(streams.__name__)"
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "agent_streams\n"
    assert "`fedcb2o.streams` is now `fedcb2o.rng`" in done.stderr


def test_a_module_finds_its_former_functions():
    getattr_former = former_names(
        "fedcb2o.errors", {"Wrong": "ConfigError", "Gen": "fedcb2o.rng.stream"}
    )
    errors = importlib.import_module("fedcb2o.errors")
    rng = importlib.import_module("fedcb2o.rng")
    with pytest.warns(DeprecationWarning, match=r"fedcb2o\.errors\.ConfigError"):
        assert getattr_former("Wrong") is errors.ConfigError
    with pytest.warns(DeprecationWarning, match=r"fedcb2o\.rng\.stream"):
        assert getattr_former("Gen") is rng.stream
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        getattr_former("other")


def test_former_fields_can_be_read_and_passed():
    @former_fields(own="own_losses")
    class Input:
        def __init__(self, own_losses: int) -> None:
            self.own_losses = own_losses

    with pytest.warns(DeprecationWarning, match="own_losses"):
        inputs = Input(own=3)
    with pytest.warns(DeprecationWarning, match="own_losses"):
        assert inputs.own == 3
    with pytest.raises(AttributeError, match="other"):
        _ = inputs.other


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
