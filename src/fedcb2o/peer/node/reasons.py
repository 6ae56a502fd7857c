"""Reasons of models that are missing in a round, or that have weight 0.

Example:
    >>> failures = {1: "late", 2: "not yet", 3: "not yet", 4: "late", 5: "hash"}
    >>> missing_models(failures, {2: 90, 3: 20}, n=90, lag=5, cut_off={4})
    {'late': [1], 'behind': [3], 'no_model': [2], 'relay_down': [4]}
"""

from collections.abc import Collection, Mapping

from fedcb2o.federated.run_spec import Algorithm
from fedcb2o.peer.wire.client import BLAMELESS_REASONS, NOT_YET
from fedcb2o.peer.wire.relayed import Mixed
from fedcb2o.peer.wire.transport import Transport


def missing_models(
    failures: Mapping[int, str],
    announced: Mapping[int, int],
    *,
    n: int,
    lag: int,
    cut_off: Collection[int],
) -> dict[str, list[int]]:
    """Sort members without a model, and without a fault, by reason.

    `failures` has the reason of each missing model, and `announced` the number of rounds that a
    member announced as finished. Round `n` counts from 0. A member is "behind" if it announced a
    round that is too old. It has "no_model" if it answered that it has none, and is not behind.
    "relay_down" has all members that are cut off, asked or not, except those with a fault.
    """
    faults = {i for i, reason in failures.items() if reason not in BLAMELESS_REASONS}
    reasons: dict[str, list[int]] = {
        "late": [],
        "behind": [],
        "no_model": [],
        "relay_down": sorted(set(cut_off) - faults),
    }
    for i in failures.keys() - faults - set(cut_off):
        if failures[i] != NOT_YET:
            reasons["late"].append(i)
        elif n > lag and i in announced and announced[i] <= n - lag:
            reasons["behind"].append(i)
        else:
            reasons["no_model"].append(i)
    return {reason: sorted(ids) for reason, ids in reasons.items()}


def relay_error(transport: Transport) -> str:
    """Return why the relay cannot be reached; empty if it can, or without a relay."""
    return transport.relayed.error if isinstance(transport, Mixed) else ""


def cut_off_members(transport: Transport, members: Collection[int]) -> set[int]:
    """Return the members without a direct link while the relay is down, else none."""
    if not isinstance(transport, Mixed) or not transport.relayed.error:
        return set()
    return set(members) - transport.direct.connected_peers()


def zero_weight_reason(algorithm: Algorithm) -> str:
    """Return why an admitted model has weight 0.

    It is the condition of the sub-level set Q, where the algorithm has one.
    """
    if getattr(algorithm.weigh.function, "level", None) is not None:
        return "loss above the quantile"
    if algorithm.guards.loss_tolerance is not False:
        return "loss above that of the agent's own model"
    return "weight 0 by the rule"
