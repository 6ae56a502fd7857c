"""Rounds in which every agent holds a model for each cluster, as DFCA has them (`federated.dfca`): a loop of its own,
on one machine."""

from collections.abc import Callable, Iterator

import numpy as np

from fedcb2o.federated.admission import max_abs
from fedcb2o.federated.algorithms._dfca import as_decisions, running_averages
from fedcb2o.federated.collusion import sample_peers
from fedcb2o.federated.contacts import AgentState, ContactTable
from fedcb2o.federated.ragged import Ragged
from fedcb2o.simulation.ifca import assign_clusters
from fedcb2o.simulation.local_engine import LocalEngine
from fedcb2o.simulation.rounds import (
    OnPhase,
    PhaseTimer,
    Round,
    evaluate_if_due,
    train_and_publish_,
)


def run_rounds(
    engine: LocalEngine,
    memory: AgentState,
    start: int,
    stop: int,
    is_evaluated: Callable[[int], bool],
    on_phase: OnPhase,
) -> Iterator[Round]:
    """As `engine.rounds`: each agent trains the one of its models that fits it best, and averages each with what those
    whom it asks made of theirs. The models follow those of the agents, K for each; malicious agents hold and average
    like all others, and say truly which cluster they chose."""
    clusters = engine.spec.algorithm.clusters
    everybody = np.arange(engine.spec.num_agents)
    assert clusters is not None
    held = len(everybody) + np.arange(clusters.num_rows(len(everybody))).reshape(len(everybody), -1)
    chosen, _ = assign_clusters(engine, held)
    for n in range(start, stop):
        clock = PhaseTimer()
        losses, active = train_and_publish_(engine, n, on_phase, clock)
        on_phase(n, "mixing")
        met = [ContactTable.empty(len(part)) for part in engine.groups]  # nobody is remembered
        parts = Ragged.concatenate(engine.map_groups(sample_peers, n, active, arguments=[met]))
        asked = parts.take(np.concatenate(engine.groups).argsort())
        inbox = engine.receive(n, asked, everybody)
        clock.stop("aggregate")
        own = engine.group.layout.own
        whole = np.isfinite(max_abs(engine.group.models, own.tolist()))
        engine.mix_rows_(running_averages(held, own, whole, chosen, inbox))
        clock.stop("mix")
        before = chosen
        chosen, _ = assign_clusters(engine, held)
        clock.stop("choose")
        tested = evaluate_if_due(engine, n, is_evaluated, on_phase, clock)
        seen = as_decisions(asked, inbox, before, chosen)
        yield Round(n, losses, [seen], [memory], [everybody], tested, clock.seconds)
