"""The check of a connection through a relay."""

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from tests.peer import members, relays
from tests.peer.relays import RelayMailbox, behind_nat, next_version

from fedcb2o.peer import Federation, Identity, write_federation
from fedcb2o.peer.node.preflight import CheckResult, check_members
from fedcb2o.peer.wire.relay import Relay


def test_check_reports_a_refusal_by_the_relay_in_plain_words(federation_of_three, tmp_path):
    orgs, federation = federation_of_three
    keys = relays.relay_identity(tmp_path)
    relay_file = keys.folder / "relay.member.toml"

    def check() -> dict[str, str]:
        results = check_members(federation, orgs[0], seconds=1, relay=relay_file)
        return {result.name: result.error for result in results}

    with Relay(members.federated(orgs[1:]), keys):  # without the first member
        errors = check()
    assert "refuses our certificate" in errors["relay"]
    for name in ("org-1", "org-2"):
        assert errors[name] == "it is asked through the relay only: see the line of relay"
    with Relay(federation, keys):
        errors = check()
    assert errors["relay"] == ""
    assert "is not connected to relay: start `fedcb2o peer run`" in errors["org-1"]
    errors = check()
    assert "refuses connections" in errors["relay"]


def test_check_compares_the_federation_version_of_the_relay(federation_of_three, tmp_path):
    orgs, first = federation_of_three
    path = tmp_path / "federation.toml"
    write_federation(first, path)
    new = Identity.make(tmp_path / "org-9", name="org-9", endpoint="org-9.invalid:1")
    second = next_version(path, orgs[1:], add=[new.member])
    keys = relays.relay_identity(tmp_path)
    relay_file = keys.folder / "relay.member.toml"

    def error_of_relay(federation: Federation) -> str:
        results = check_members(federation, orgs[0], seconds=1, relay=relay_file)
        return {result.name: result.error for result in results}["relay"]

    with Relay(first, keys):
        assert error_of_relay(first) == ""
        assert error_of_relay(second) == (
            "the relay holds version 1 of the federation, and we 2: send it ours"
        )
    with Relay(second, keys):
        assert error_of_relay(second) == ""
        assert error_of_relay(first) == (
            "the relay holds version 2 of the federation, and we 1: get the newer file"
        )
    with Relay(second, keys) as relay, mock.patch.object(relay, "_reply", side_effect=ValueError):
        assert (
            RelayMailbox(keys.member, orgs[0]).federation() == {}
        )  # as from a relay of an earlier release


def test_check_of_a_removed_member_reports_only_the_removal(removal):
    """Members with the later version are asked through a relay with the former version."""
    orgs, first, second, keys = removal
    relay_file = keys.folder / "relay.member.toml"
    with Relay(first, keys), ThreadPoolExecutor(2) as pool:
        others = [
            pool.submit(check_members, second, org, seconds=3, relay=relay_file) for org in orgs[1:]
        ]
        results = check_members(first, orgs[0], seconds=2, relay=relay_file)
        for other in others:
            other.result()
    errors = {result.name: result.error for result in results}
    assert errors["org-0"] == (
        "version 2 of the federation, signed by org-1, org-2, removes org-0: this node takes part "
        "no more"
    )
    for name in ("org-1", "org-2"):
        assert errors[name] == "it holds a later version: see the line of org-0"


@pytest.mark.slow
def test_check_reports_the_route_of_each_link(tmp_path):
    orgs = behind_nat(tmp_path, 3, listening=1)
    federation = members.federated(orgs)
    keys = relays.relay_identity(tmp_path)
    relay_file = keys.folder / "relay.member.toml"
    results: dict[int, list[CheckResult]] = {}

    def check(j: int) -> None:
        results[j] = check_members(federation, orgs[j], seconds=15, relay=relay_file)

    with Relay(federation, keys):
        threads = [threading.Thread(target=check, args=(j,)) for j in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
    assert {r.error for j in range(3) for r in results[j]} == {""}
    routes = {
        (j, r.name): r.notes[0] for j in range(3) for r in results[j] if "asked" in r.notes[0]
    }
    assert routes == {
        (0, "org-1"): "asked through the relay",
        (0, "org-2"): "asked through the relay",
        (1, "org-0"): "asked directly",
        (1, "org-2"): "asked through the relay",
        (2, "org-0"): "asked directly",
        (2, "org-1"): "asked through the relay",
    }
