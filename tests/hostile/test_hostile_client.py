"""Short attacks of the independent hostile client on four nodes."""

import pytest
from tests.hostile import relay, run
from tests.hostile.attacks import ATTACKS


# Python does not close an SSL socket that is reset before its handshake.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_attack_ends_a_node_or_slows_the_rounds(tmp_path):
    assert len(ATTACKS) >= 30
    assert run.run_all(tmp_path, 2.0) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hostile_relay_and_a_member_behind_one_slow_no_round(tmp_path):
    assert relay.run_all(tmp_path, 15.0) == []
