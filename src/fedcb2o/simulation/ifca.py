"""Rounds with a coordinator, as IFCA has them (`federated.ifca`): a loop of its own, on one machine."""

from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Float, Int

from fedcb2o.federated.algorithms._ifca import as_decisions, assign_clusters_, cluster_means
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.decisions import Decisions
from fedcb2o.federated.mixing import mixing_matrix
from fedcb2o.federated.ragged import Ragged
from fedcb2o.simulation.local_engine import LocalEngine
from fedcb2o.simulation.rounds import (
    OnPhase,
    PhaseTimer,
    Round,
    evaluate_if_due,
    train_and_publish_,
)

_ClusterIds = Int[np.ndarray, " N"]
"""Which of the K models each agent has chosen."""


def run_rounds(
    engine: LocalEngine,
    memory: AgentState,
    start: int,
    stop: int,
    is_evaluated: Callable[[int], bool],
    on_phase: OnPhase,
) -> Iterator[Round]:
    """As `engine.rounds`: each agent trains the model that fits it best, and the coordinator, to whom attackers publish
    what they do for the first benign agent, averages what it receives for each of its models, whose rows follow the
    agents'."""
    clusters = engine.spec.algorithm.clusters
    everybody = np.arange(engine.spec.num_agents)
    assert clusters is not None
    if start == 0 and clusters.restarts > 1:
        _select_initialisation_(engine, on_phase)
    held = len(everybody) + np.arange(clusters.num_models)
    each = np.tile(held, (len(everybody), 1))
    chosen, _ = assign_clusters(engine, each)
    for n in range(start, stop):
        clock = PhaseTimer()
        losses, made = _run_round(engine, n, held, chosen, on_phase, clock)
        chosen, _ = assign_clusters(engine, each)
        clock.stop("choose")
        tested = evaluate_if_due(engine, n, is_evaluated, on_phase, clock)
        seen = as_decisions(made, chosen)
        yield Round(n, losses, [seen], [memory], [everybody], tested, clock.seconds)


def _run_round(
    engine: LocalEngine,
    n: int,
    held: Int[np.ndarray, " K"],
    chosen: _ClusterIds,
    tell: OnPhase,
    clock: PhaseTimer,
) -> tuple[Float[np.ndarray, " N"], Decisions]:
    """One round for the models in the rows `held`, of which agents have `chosen`: the training losses, and the averages
    that these models are then."""
    clusters = engine.spec.algorithm.clusters
    terms = engine.spec
    assert clusters is not None
    losses, _ = train_and_publish_(engine, n, tell, clock)
    tell(n, "mixing")
    asked = Ragged.from_arrays([np.flatnonzero(chosen == k) for k in range(len(held))])
    receiver = np.full(len(held), engine.adversary.benign_ids[0])
    made = cluster_means(
        held,
        engine.receive(n, asked, receiver),
        clusters,
        engine.group.models,
        terms.malicious_share,
    )
    clock.stop("aggregate")
    engine.mix_rows_(mixing_matrix(made, held))
    clock.stop("mix")
    return losses, made


def assign_clusters(engine: LocalEngine, held: Int[np.ndarray, "N K"]) -> tuple[_ClusterIds, float]:
    """What each agent chooses of the models in the rows `held`, and the mean of their losses."""
    everybody = range(engine.spec.num_agents)
    found = engine.map_agents(assign_clusters_, everybody, held)
    chosen, losses = zip(*(found[j] for j in everybody), strict=True)
    return np.array(chosen), float(np.mean(losses))


def _select_initialisation_(engine: LocalEngine, tell: OnPhase) -> None:
    """Have the coordinator's first K models be those, of several sets, that fit all agents best after some rounds."""
    clusters = engine.spec.algorithm.clusters
    first = engine.spec.num_agents
    assert clusters is not None
    sets = first + np.arange(clusters.num_rows(first)).reshape(
        clusters.restarts, clusters.num_models
    )
    begun = engine.group.models[first : first + sets.size].clone()
    losses = []
    for held in sets:
        each = np.tile(held, (first, 1))
        chosen, loss = assign_clusters(engine, each)
        for n in range(clusters.trial_rounds):
            _run_round(engine, n, held, chosen, tell, PhaseTimer())
            chosen, loss = assign_clusters(engine, each)
        losses.append(loss)
    best = sets[int(np.nanargmin(losses))] - first
    engine.group.models[first : first + sets.size] = begun
    engine.group.models[first : first + clusters.num_models] = begun[best.tolist()]
