"""Rounds of IFCA with its coordinator, on one machine (`federated.algorithms._ifca`).

The rows of the coordinator's K models follow the agents' rows in the model buffer.
"""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int

from fedcb2o.federated.algorithms._ifca import as_decisions, assign_clusters_, cluster_means
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.decisions import Decisions
from fedcb2o.federated.mixing import mixing_matrix
from fedcb2o.federated.ragged import AgentIds, Ragged
from fedcb2o.federated.run_spec import ClusterModels
from fedcb2o.federated.shortfall import Shortfall
from fedcb2o.simulation.adversarial_engine import AdversarialEngine
from fedcb2o.simulation.local_engine import LocalEngine
from fedcb2o.simulation.rounds import (
    OnPhase,
    PhaseTimer,
    Round,
    evaluate_if_due,
    train_and_publish_,
)

_ClusterIds = Int[np.ndarray, " N"]
"""The cluster that each agent has chosen, from 0 to K - 1."""


def run_rounds(
    engine: LocalEngine,
    state: AgentState,
    start: int,
    stop: int,
    evaluate_every: int,
    on_phase: OnPhase,
) -> Iterator[Round]:
    """Run rounds of IFCA, as `simulation.run_rounds` does for Algorithm 1.

    Each agent trains the model that fits it best. The coordinator averages what it receives for
    each of its models. The state of the agents does not change.
    """
    clusters = cluster_models(engine)
    agents = AgentIds(np.arange(engine.spec.num_agents))
    # A run that continues has its models in the checkpoint.
    if start == 0 and clusters.restarts > 1:
        _select_initialisation_(engine, on_phase)

    rows = len(agents) + np.arange(clusters.num_models)
    # All agents choose among the K models of the coordinator.
    candidates = np.tile(rows, (len(agents), 1))
    cluster_ids, _ = assign_clusters(engine, candidates)
    shortfall = Shortfall(engine.spec.algorithm, engine.spec.malicious_share)
    for n in range(start, stop):
        timer = PhaseTimer()
        losses, means = _run_round(engine, n, rows, cluster_ids, on_phase, timer)
        # The receivers are the averages, whose ids follow those of the agents.
        shortfall.add([means], np.ones(rows[-1] + 1, dtype=bool))
        cluster_ids, _ = assign_clusters(engine, candidates)
        timer.stop("choose")
        results = evaluate_if_due(
            AdversarialEngine(engine), n, stop, evaluate_every, on_phase, timer
        )
        decisions = as_decisions(means, cluster_ids)
        yield Round(n, losses, [decisions], [state], [agents], results, timer.seconds)
    shortfall.log()


def cluster_models(engine: LocalEngine) -> ClusterModels:
    """Return the cluster models of an engine's algorithm."""
    clusters = engine.spec.algorithm.clusters
    assert clusters is not None
    return clusters


def assign_clusters(
    engine: LocalEngine, candidates: Int[np.ndarray, "N K"]
) -> tuple[_ClusterIds, float]:
    """Assign to each agent the candidate of least loss, and copy that model to the agent.

    `candidates` has rows of the model buffer. Returns the cluster of each agent, and the mean of
    their losses.
    """
    agents = range(engine.spec.num_agents)
    results = engine.map_agents(assign_clusters_, agents, candidates)
    cluster_ids, losses = zip(*(results[agent] for agent in agents), strict=True)
    return np.array(cluster_ids), float(np.mean(losses))


def _run_round(
    engine: LocalEngine,
    n: int,
    rows: Int[np.ndarray, " K"],
    cluster_ids: _ClusterIds,
    on_phase: OnPhase,
    timer: PhaseTimer,
) -> tuple[Float[np.ndarray, " N"], Decisions]:
    """Run one round for the models in `rows`; return training losses and the new averages."""
    losses, _ = train_and_publish_(AdversarialEngine(engine), n, on_phase, timer)
    on_phase(n, "aggregating")
    members = Ragged.from_arrays([np.flatnonzero(cluster_ids == k) for k in range(len(rows))])
    # Attackers publish to the coordinator what they craft for the first benign agent.
    receiver = AgentIds(np.full(len(rows), np.flatnonzero(~engine.group.data.malicious)[0]))
    means = cluster_means(
        rows,
        engine.receive(n, members, receiver),
        cluster_models(engine),
        engine.group.models,
        engine.spec.malicious_share,
    )
    timer.stop("aggregate")

    engine.mix_rows_(mixing_matrix(means, rows))
    timer.stop("mix")
    return losses, means


def _select_initialisation_(engine: LocalEngine, on_phase: OnPhase) -> None:
    """Start from the set of K models, of several, that fits all agents best after trial rounds."""
    clusters = cluster_models(engine)
    first = engine.spec.num_agents
    num_rows = clusters.num_rows(first)
    stop = first + num_rows
    sets = first + np.arange(num_rows).reshape(clusters.restarts, clusters.num_models)
    initial = engine.group.models[first:stop].clone()
    losses = []
    for rows in sets:
        candidates = np.tile(rows, (first, 1))
        cluster_ids, loss = assign_clusters(engine, candidates)
        for n in range(clusters.trial_rounds):
            _run_round(engine, n, rows, cluster_ids, on_phase, PhaseTimer())
            cluster_ids, loss = assign_clusters(engine, candidates)
        losses.append(loss)

    # The loss of a set whose training diverged is NaN.
    best = sets[int(np.nanargmin(losses))] - first
    # The run starts anew: the trial rounds have changed the models.
    engine.group.models[first:stop] = initial
    engine.group.models[first : first + clusters.num_models] = initial[best.tolist()]
