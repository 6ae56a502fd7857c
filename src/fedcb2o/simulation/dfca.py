"""Rounds of DFCA, in which every agent holds K models, on one machine.

The algorithm is in `federated.algorithms._dfca`. The rows of the agents' cluster models follow the
agents' rows in the model buffer, K for each agent.
"""

from collections.abc import Iterator

import numpy as np

from fedcb2o.federated.algorithms._dfca import as_decisions, running_averages
from fedcb2o.federated.contacts import AgentState, ContactTable
from fedcb2o.federated.guards.acceptance import max_abs
from fedcb2o.federated.ragged import AgentIds, Ragged
from fedcb2o.simulation.adversarial_engine import AdversarialEngine
from fedcb2o.simulation.ifca import assign_clusters, cluster_models
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
    state: AgentState,
    start: int,
    stop: int,
    evaluate_every: int,
    on_phase: OnPhase,
) -> Iterator[Round]:
    """Run rounds of DFCA, as `simulation.run_rounds` does for Algorithm 1.

    Each agent trains the one of its models that fits it best, and averages each model with those of
    its sampled peers. Malicious agents hold and average models like benign ones, and report their
    cluster truthfully.
    """
    played = AdversarialEngine(engine)
    agents = AgentIds(np.arange(engine.spec.num_agents))
    num_rows = cluster_models(engine).num_rows(len(agents))
    rows = len(agents) + np.arange(num_rows).reshape(len(agents), -1)
    cluster_ids, _ = assign_clusters(engine, rows)
    for n in range(start, stop):
        timer = PhaseTimer()
        losses, is_active = train_and_publish_(played, n, on_phase, timer)
        on_phase(n, "aggregating")
        # Peers are sampled without likelihoods.
        contacts = [ContactTable.empty(len(batch)) for batch in engine.batches]
        sampled = played.sample_peers(n, contacts, is_active)
        # Batches are not in the order of ids, and the rows of the cluster models are.
        order = np.concatenate(engine.batches).argsort()
        peers = Ragged.concatenate(sampled).take(order)
        inbox = engine.receive(n, peers, agents)
        timer.stop("aggregate")

        own = engine.group.layout.own
        # A model that broke in training enters no average.
        is_finite = np.isfinite(max_abs(engine.group.models, own.tolist()))
        engine.mix_rows_(running_averages(rows, own, is_finite, cluster_ids, inbox))
        timer.stop("mix")

        previous = cluster_ids
        cluster_ids, _ = assign_clusters(engine, rows)
        timer.stop("choose")
        results = evaluate_if_due(played, n, stop, evaluate_every, on_phase, timer)
        decisions = as_decisions(peers, inbox, previous, cluster_ids)
        yield Round(n, losses, [decisions], [state], [agents], results, timer.seconds)
