"""Reasons of missing models, of models with weight 0, and of a relay that is down."""

from types import SimpleNamespace

import pytest
from tests.peer import members, pace

from fedcb2o.experiments.config.loading import load
from fedcb2o.federated.algorithms.section import AlgorithmSection
from fedcb2o.peer.node.node import Node
from fedcb2o.peer.node.reasons import cut_off_members, missing_models, zero_weight_reason
from fedcb2o.peer.wire.relayed import Mixed

LAG = 5


@pytest.mark.parametrize(
    ("n", "announced", "reason"),
    [
        (90, {}, "no_model"),  # it announced no round
        (90, {1: 90}, "no_model"),  # in the same round, as after a restore
        (90, {1: 86}, "no_model"),  # its model of round 85, from 0, would be accepted
        (90, {1: 85}, "behind"),  # its newest model may be of round 84
        (90, {1: 20}, "behind"),
        (5, {1: 0}, "no_model"),  # it may just have begun
    ],
)
def test_a_missing_model_is_behind_or_absent_by_the_announced_round(n, announced, reason):
    missing = missing_models({1: "not yet"}, announced, n=n, lag=LAG, cut_off=())
    assert [key for key, ids in missing.items() if ids] == [reason]
    assert missing[reason] == [1]


def test_members_cut_off_count_as_relay_down_unless_their_answer_was_faulty():
    failures = {1: "late", 2: "no answer", 3: "hash", 4: "busy"}
    missing = missing_models(failures, {}, n=9, lag=LAG, cut_off={2, 3, 7})
    assert missing == {"late": [1, 4], "behind": [], "no_model": [], "relay_down": [2, 7]}


def transport(error: str, direct: set[int]) -> Mixed:
    links = SimpleNamespace(connected_peers=lambda: frozenset(direct))
    return Mixed(links, SimpleNamespace(error=error))


def test_members_without_a_direct_link_are_cut_off_while_the_relay_is_down():
    assert cut_off_members(transport("refused", {2}), [1, 2, 3]) == {1, 3}
    assert cut_off_members(transport("", {2}), [1, 2, 3]) == set()
    assert cut_off_members(SimpleNamespace(), [1, 2, 3]) == set()  # without a relay


def test_the_recovery_of_the_relay_is_reported_once(tmp_path):
    orgs = members.identities(tmp_path, 3)
    node = Node(
        members.federated(orgs),
        orgs[0],
        simulate=load({"together": 1, **members.experiment(3)}),
        out=tmp_path / "out",
        observer=pace.Times(),
    )
    for error in ("", "refused", "refused", "", ""):
        node._transport = transport(error, set())
        node._report_relay()
    assert node.observer.notes == ["the relay can be reached again, after 0 s"]


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"name": "fedassay"}, "loss above the quantile"),
        ({"name": "fedcb2o", "beta": 0.5}, "loss above the quantile"),
        ({"name": "fedcb2o"}, "weight 0 by the rule"),
        ({"name": "dfedavgm"}, "weight 0 by the rule"),
        ({"name": "dfedavgm", "guards": {"loss_tolerance": 2.0}}, "loss above that of the agent's own model"),
    ],
)  # fmt: skip
def test_the_reason_for_weight_0_depends_on_the_method(section, reason):
    assert zero_weight_reason(AlgorithmSection(**section).build()) == reason
