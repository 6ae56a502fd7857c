"""Rounds with a coordinator, as IFCA has them (`federated.ifca`): a loop of its own, on one machine."""

from collections.abc import Callable, Iterator

import numpy as np

from fedcb2o.federated.ifca import adopt_, averages, seen_by_agents
from fedcb2o.federated.lists import Lists
from fedcb2o.federated.mixing import mixture
from fedcb2o.federated.peers import Memory
from fedcb2o.runtime.engine import Clock, Round, Tell, evaluated_in, trained_and_published_
from fedcb2o.runtime.shared import Shared


def rounds(
    engine: Shared, memory: Memory, start: int, stop: int, evaluated: Callable[[int], bool], tell: Tell
) -> Iterator[Round]:
    """As `engine.rounds`: each agent trains the model that fits it best, and the coordinator, to whom attackers publish
    what they do for the first benign agent, averages what it receives for each of its models, whose rows follow the
    agents'."""
    coordinator, everybody = engine.terms.algorithm.coordinator, list(range(engine.terms.num_agents))
    assert coordinator is not None
    held = np.arange(len(everybody), len(everybody) + coordinator.models)
    receiver = np.full(len(held), engine.attackers.benign[0])

    def adopted() -> np.ndarray:
        found = engine.each_agent(adopt_, everybody, held.tolist())
        return np.array([found[j] for j in everybody])

    chosen = adopted()
    for n in range(start, stop):
        clock = Clock()
        losses, _ = trained_and_published_(engine, n, tell, clock)
        tell(n, "mixing")
        asked = Lists.of([np.flatnonzero(chosen == k) for k in range(len(held))])
        made = averages(held, engine.arrived(n, asked, receiver), coordinator.by_samples)
        clock.lap("aggregate")
        engine.mix_rows_(mixture(made, held))
        clock.lap("mix")
        chosen = adopted()
        clock.lap("choose")
        measures = evaluated_in(engine, n, evaluated, tell, clock)
        seen = seen_by_agents(made, chosen)
        yield Round(n, losses, [seen], [memory], [np.array(everybody)], *measures, clock.seconds)
