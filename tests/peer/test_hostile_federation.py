"""Federation files of others: permission for code, sizes, and one line per fault."""

import contextlib
import os
import resource
import tomllib

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.peer.federation_files import assert_refused, edit, set_value
from tests.peer.members import federated

from fedcb2o.data import digits
from fedcb2o.errors import ConfigError
from fedcb2o.peer import read_federation, write_federation
from fedcb2o.peer.membership import federation
from fedcb2o.peer.node.agent import agent_from_dataset, build_network


def test_code_named_in_a_file_runs_only_if_allowed(federation_file, organisations, tmp_path):
    trap = tmp_path / "trap"
    own = {"name": "os:system", "command": f"touch {trap}"}
    edit(federation_file, lambda table: table["experiment"].update(algorithm=own))
    agreement = read_federation(federation_file)  # the file can be read, hashed and signed
    with pytest.raises(
        ConfigError, match=r"names 'os:system', code that would run here: .*with --own"
    ):
        agreement.experiment  # noqa: B018
    criterion = {"name": "fedcb2o", "criterion": {"name": "os:system"}, "alpha": 2.0}
    edit(federation_file, lambda table: table["experiment"].update(algorithm=criterion))
    assert read_federation(federation_file).user_functions == ("os:system",)
    assert not trap.exists()


@pytest.mark.parametrize(
    "base", ["~/model", "/etc", "../model.gguf", "gpt2", "somebody/model", "http://x/y"]
)
def test_a_model_named_in_a_file_is_read_or_fetched_only_if_allowed(
    federation_file, organisations, monkeypatch, base
):
    def fail(*_):
        raise AssertionError("a base is read")

    for name in ("base_folder", "base_model", "base_checksum", "base_bytes"):
        monkeypatch.setattr(f"fedcb2o.pretrained.{name}", fail)
    model = {"name": "language_model", "base": base, "answer": 4, "checksum": "0" * 64}

    def change(table):
        table["experiment"]["model"] = model
        table["data"]["shape"] = [12]

    edit(federation_file, change)
    agreement = read_federation(federation_file)
    assert agreement.user_functions == (base,)
    with pytest.raises(
        ConfigError, match=rf"names '{base}', a model that would be read or downloaded.*--own"
    ):
        agreement.experiment  # noqa: B018
    with pytest.raises(ConfigError, match="--own"):
        build_network(agreement)
    allowed = read_federation(federation_file, allowed_functions=[base])
    with pytest.raises(AssertionError, match="a base is read"):
        build_network(allowed)


@pytest.mark.parametrize("base", ["tiny", "smollm2"])
def test_built_in_bases_need_no_permission(federation_file, base):
    model = {"name": "language_model", "base": base, "answer": 4}
    edit(federation_file, lambda table: table["experiment"].update(model=model))
    assert read_federation(federation_file).experiment.model.parameters["base"] == base


def test_user_functions_are_stored_and_allowed_by_path(organisations, tmp_path):
    name = "tests.peer.members:own_criterion"
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
def test_sizes_are_refused_before_anything_is_built(federation_file, changes, message):
    def change(table):
        for key, value in changes.items():
            *sections, last = key.split(".")
            section = table
            for name in sections:
                section = section[name]
            section[last] = value

    edit(federation_file, change)
    limit = 2**30
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with pytest.raises(ConfigError, match=message) as raised:
        read_federation(federation_file).experiment  # noqa: B018
    assert "\n" not in str(raised.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < before + limit


def test_a_node_refuses_a_model_that_needs_more_than_the_free_memory(federation_file, monkeypatch):
    edit(
        federation_file,
        lambda table: table["experiment"].update(model={"name": "mlp", "hidden": [1000]}),
    )
    agreement = read_federation(federation_file)
    dim = 64 * 1000 + 1000 + 1000 * 10 + 10
    monkeypatch.setattr("fedcb2o.parallel._resources.free_memory", lambda: 5 * 4 * dim)
    build_network(agreement)  # one copy fits
    with pytest.raises(ConfigError, match=r"75,010 parameters and needs .* free memory"):
        agent_from_dataset(agreement, 0, digits())


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
def test_a_hostile_file_is_refused_in_one_line(federation_file, change):
    assert assert_refused(edit(federation_file, change)).startswith(str(federation_file))


def test_the_root_of_another_member_is_refused(federation_file):
    def exchange(table):
        table["members"][0]["root"] = table["members"][1]["root"]

    assert "version 1, agent 0: `root` of org-0 is that of another" in assert_refused(
        edit(federation_file, exchange)
    )


def test_a_file_that_is_not_toml_is_refused_in_one_line(federation_file, tmp_path):
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
        federation_file.write_bytes(content)
        assert_refused(federation_file)
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
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_change_gives_a_valid_federation_or_a_one_line_error(federation_file, data):
    table = tomllib.loads(federation_file.read_text())
    before = federation_file.read_bytes()
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
        federation_file.write_text(tomli_w.dumps(table))
        agreement = None
        with contextlib.suppress(ConfigError):
            agreement = read_federation(federation_file)
        if agreement is None:
            assert_refused(federation_file)
        else:
            write_federation(agreement, federation_file)
            assert read_federation(federation_file).digest == agreement.digest
    finally:
        federation_file.write_bytes(before)
