"""Rounds in which every agent holds a model for each cluster, as DFCA has them (`federated.dfca`): a loop of its own,
on one machine."""

from collections.abc import Callable, Iterator

import numpy as np

from fedcb2o.federated.admission import extents
from fedcb2o.federated.algorithm2 import ask
from fedcb2o.federated.algorithms._dfca import running_averages, seen_by_agents
from fedcb2o.federated.contacts import Memory, Met
from fedcb2o.federated.ragged import Lists
from fedcb2o.simulation.ifca import adopted
from fedcb2o.simulation.local_engine import Shared
from fedcb2o.simulation.rounds import Clock, Round, Tell, evaluated_in, trained_and_published_


def rounds(
    engine: Shared, memory: Memory, start: int, stop: int, evaluated: Callable[[int], bool], tell: Tell
) -> Iterator[Round]:
    """As `engine.rounds`: each agent trains the one of its models that fits it best, and averages each with what those
    whom it asks made of theirs. The models follow those of the agents, K for each; malicious agents hold and average
    like all others, and say truly which cluster they chose."""
    clusters, everybody = engine.terms.algorithm.clusters, np.arange(engine.terms.num_agents)
    assert clusters is not None
    held = len(everybody) + np.arange(clusters.rows(len(everybody))).reshape(len(everybody), -1)
    chosen, _ = adopted(engine, held)
    for n in range(start, stop):
        clock = Clock()
        losses, active = trained_and_published_(engine, n, tell, clock)
        tell(n, "mixing")
        met = [Met.nobody(len(part)) for part in engine.parts]  # nobody is remembered
        parts = Lists.join(engine.each(ask, n, active, own=[met]))
        asked = parts.take(np.concatenate(engine.parts).argsort())
        inbox = engine.arrived(n, asked, everybody)
        clock.lap("aggregate")
        own = engine.block.layout.own
        whole = np.isfinite(extents(engine.block.pool, own.tolist()))
        engine.mix_rows_(running_averages(held, own, whole, chosen, inbox))
        clock.lap("mix")
        before = chosen
        chosen, _ = adopted(engine, held)
        clock.lap("choose")
        tested = evaluated_in(engine, n, evaluated, tell, clock)
        seen = seen_by_agents(asked, inbox, before, chosen)
        yield Round(n, losses, [seen], [memory], [everybody], tested, clock.seconds)
