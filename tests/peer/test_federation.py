"""Federation file: its content, its hash, and the members that agree on it."""

import hashlib
import json
import tomllib

import pytest
import tomli_w
from tests.peer.federation_files import edit
from tests.peer.members import experiment, federated, identities
from torch import nn

from fedcb2o.data import digits
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config.loading import load
from fedcb2o.experiments.config.tables import presets
from fedcb2o.peer import Identity, Member, make_federation, read_federation, write_federation
from fedcb2o.peer.membership import federation


def test_a_federation_file_contains_all_agreed_settings(federation_file, organisations):
    agreement = read_federation(federation_file)
    assert agreement == federated(organisations[:4])
    assert agreement.run == agreement.digest
    assert len(agreement.run) == 32
    assert (
        agreement.version,
        agreement.num_agents,
        agreement.rounds,
        agreement.seed,
        agreement.shape,
    ) == (1, 4, 3, 1000, (1, 8, 8))
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
    assert "PRIVATE" not in federation_file.read_text()


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


def test_a_warning_names_metrics_which_are_each_members_own(organisations):
    with pytest.warns(UserWarning, match="has no `metrics`: .* `fedcb2o peer run --measure auc`"):
        federated(organisations, changes={"metrics": ["auc"]})


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
                again.experiment.resolved.algorithm.mixing_factor
                == simulated.resolved.algorithm.mixing_factor
            )


def test_the_hash_depends_on_the_content_not_on_the_format(federation_file):
    agreement = read_federation(federation_file)
    table = tomllib.loads(federation_file.read_text())
    reordered = dict(reversed([(key, table[key]) for key in table]))
    reordered["experiment"] = {
        key: dict(reversed(table["experiment"][key].items())) for key in table["experiment"]
    }
    reordered["members"] = table["members"][::-1]
    reordered["experiment"]["algorithm"]["alpha"] = 2.0
    reordered["deadline_seconds"] = 60
    federation_file.write_text("# otherwise\n" + tomli_w.dumps(reordered))
    assert read_federation(federation_file).digest == agreement.digest
    assert read_federation(federation_file).differing_keys(agreement.value_hashes()) == []
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


def test_differing_keys_are_named(federation_file, organisations, tmp_path):
    agreement = read_federation(federation_file)
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


def test_the_hash_ignores_keys_that_the_file_does_not_have(federation_file):
    agreement = read_federation(federation_file)
    without_lag = read_federation(edit(federation_file, lambda table: table.pop("lag")))
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


def test_hashes_ignore_the_order_of_keys():
    """The dictionaries are in a list, which is hashed as one value."""
    one, other = ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert (
        federation._short_hash([one])
        == federation._short_hash([other])
        != federation._short_hash([{"a": 2, "b": 1}])
    )


def test_keys_of_malicious_agents_are_optional(tmp_path):
    """The hash of the federation is the same with and without these keys."""
    organisations = identities(tmp_path, 2)
    values = experiment(2, agents={"benign": 2, "malicious": 0, "malicious_samples": 1})
    explicit = make_federation(
        values, [organisation.member for organisation in organisations], dataset=digits()
    )
    agents = values["agents"]
    del agents["malicious"], agents["malicious_samples"]
    agreement = make_federation(
        values, [organisation.member for organisation in organisations], dataset=digits()
    )
    assert agreement.digest == explicit.digest
    assert agreement.most_samples == agents["benign_samples"]


def test_the_members_set_the_number_of_agents(tmp_path):
    members = [identity.member for identity in identities(tmp_path, 3)]
    table = experiment(3)
    expected = make_federation(table, members, dataset=digits())
    agents = {key: value for key, value in table["agents"].items() if key != "benign"}
    made = make_federation({**table, "agents": agents}, members, dataset=digits())
    assert made.to_table() == expected.to_table()
    counts = {**agents, "malicious": 3}
    with pytest.raises(ConfigError, match=r"`agents.malicious` = 3, and there are 3 agents"):
        make_federation({**table, "agents": counts}, members, dataset=digits())
