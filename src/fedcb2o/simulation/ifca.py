"""Rounds with a coordinator, as IFCA has them (`federated.ifca`): a loop of its own, on one machine."""

from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Float, Int

from fedcb2o.federated.algorithms._ifca import adopt_, averages, seen_by_agents
from fedcb2o.federated.contacts import Memory
from fedcb2o.federated.decisions import Choices
from fedcb2o.federated.mixing import mixture
from fedcb2o.federated.ragged import Lists
from fedcb2o.simulation.local_engine import Shared
from fedcb2o.simulation.rounds import Clock, Round, Tell, evaluated_in, trained_and_published_

Chosen = Int[np.ndarray, " N"]
"""Which of the K models each agent has chosen."""


def rounds(
    engine: Shared, memory: Memory, start: int, stop: int, evaluated: Callable[[int], bool], tell: Tell
) -> Iterator[Round]:
    """As `engine.rounds`: each agent trains the model that fits it best, and the coordinator, to whom attackers publish
    what they do for the first benign agent, averages what it receives for each of its models, whose rows follow the
    agents'."""
    clusters, everybody = engine.terms.algorithm.clusters, np.arange(engine.terms.num_agents)
    assert clusters is not None
    if start == 0 and clusters.restarts > 1:
        _begin_well_(engine, tell)
    held = len(everybody) + np.arange(clusters.models)
    each = np.tile(held, (len(everybody), 1))
    chosen, _ = adopted(engine, each)
    for n in range(start, stop):
        clock = Clock()
        losses, made = _round(engine, n, held, chosen, tell, clock)
        chosen, _ = adopted(engine, each)
        clock.lap("choose")
        tested = evaluated_in(engine, n, evaluated, tell, clock)
        seen = seen_by_agents(made, chosen)
        yield Round(n, losses, [seen], [memory], [everybody], tested, clock.seconds)


def _round(
    engine: Shared, n: int, held: Int[np.ndarray, " K"], chosen: Chosen, tell: Tell, clock: Clock
) -> tuple[Float[np.ndarray, " N"], Choices]:
    """One round for the models in the rows `held`, of which agents have `chosen`: the training losses, and the averages
    that these models are then."""
    clusters, terms = engine.terms.algorithm.clusters, engine.terms
    assert clusters is not None
    losses, _ = trained_and_published_(engine, n, tell, clock)
    tell(n, "mixing")
    asked = Lists.of([np.flatnonzero(chosen == k) for k in range(len(held))])
    receiver = np.full(len(held), engine.attackers.benign[0])
    made = averages(held, engine.arrived(n, asked, receiver), clusters, engine.block.pool, terms.share)
    clock.lap("aggregate")
    engine.mix_rows_(mixture(made, held))
    clock.lap("mix")
    return losses, made


def adopted(engine: Shared, held: Int[np.ndarray, "N K"]) -> tuple[Chosen, float]:
    """What each agent chooses of the models in the rows `held`, and the mean of their losses."""
    everybody = range(engine.terms.num_agents)
    found = engine.each_agent(adopt_, everybody, held)
    chosen, losses = zip(*(found[j] for j in everybody), strict=True)
    return np.array(chosen), float(np.mean(losses))


def _begin_well_(engine: Shared, tell: Tell) -> None:
    """Have the coordinator's first K models be those, of several sets, that fit all agents best after some rounds."""
    clusters, first = engine.terms.algorithm.clusters, engine.terms.num_agents
    assert clusters is not None
    sets = first + np.arange(clusters.rows(first)).reshape(clusters.restarts, clusters.models)
    begun, losses = engine.block.pool[first : first + sets.size].clone(), []
    for held in sets:
        each = np.tile(held, (first, 1))
        chosen, loss = adopted(engine, each)
        for n in range(clusters.trial):
            _round(engine, n, held, chosen, tell, Clock())
            chosen, loss = adopted(engine, each)
        losses.append(loss)
    best = sets[int(np.nanargmin(losses))] - first
    engine.block.pool[first : first + sets.size] = begun
    engine.block.pool[first : first + clusters.models] = begun[best.tolist()]
