"""Rounds with a server that aggregates the vectors of agents, on one machine (`run_spec.Server`).

The rows of the server's model, of its last aggregate and of the agents' momenta follow the agents'
rows in the model buffer.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Int

from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.decisions import Decisions, Inbox
from fedcb2o.federated.evaluation.metrics import EvaluationResult
from fedcb2o.federated.evaluation.models import evaluate_models
from fedcb2o.federated.ragged import AgentIds, Indices, Ragged, Rows
from fedcb2o.rng import stream
from fedcb2o.simulation.adversarial_engine import AdversarialEngine
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
    """Run rounds with a server, as `simulation.run_rounds` does for Algorithm 1.

    Every agent starts each round at the server's model, and is evaluated with it. The records have
    no received models, because agents receive none of each other.
    """
    spec, models = engine.spec, engine.group.models
    num_agents = spec.num_agents
    agents = AgentIds(np.arange(num_agents))
    if start == 0:
        # All agents start at one model; the last aggregate and the momenta start at 0.
        models[num_agents] = models[0]
        models[num_agents + 1 : 2 * num_agents + 2] = 0.0

    played = AdversarialEngine(engine)
    benign = np.flatnonzero(~engine.group.data.malicious)
    # The server receives the models that attackers craft for the first benign agent.
    receiver = AgentIds(benign[:1])
    if spec.agents.num_clusters == 1 and engine.group.data.own_tests is None:
        # One model on one test set: one evaluation serves all agents.
        played.evaluate = lambda: _evaluate_once(engine, benign)
    nothing = Ragged.empty(num_agents)
    inbox = Inbox(nothing, Rows(np.zeros(0, np.int64)), np.zeros(0), np.zeros(0, np.int64))
    decisions = Decisions.empty(agents, nothing, inbox)
    for n in range(start, stop):
        timer = PhaseTimer()
        models[:num_agents] = models[num_agents]
        losses, is_active = train_and_publish_(played, n, on_phase, timer)
        on_phase(n, "aggregating")
        senders = Ragged.from_arrays([np.flatnonzero(is_active)])
        _step_(engine, n, engine.receive(n, senders, receiver).rows)
        timer.stop("aggregate")
        models[:num_agents] = models[num_agents]
        timer.stop("mix")
        results = evaluate_if_due(played, n, stop, evaluate_every, on_phase, timer)
        yield Round(n, losses, [decisions], [state], [agents], results, timer.seconds)


def _step_(engine: LocalEngine, n: int, rows: Rows) -> None:
    """Aggregate the models that arrived; without any, the server's model stays."""
    server = engine.spec.algorithm.server
    assert server is not None
    if not len(rows):
        return
    x, last = engine.group.models[engine.spec.num_agents :][:2]
    training = engine.spec.training.in_round(n)
    lr = training.lambda2 * training.gamma
    received = engine.group.models[torch.from_numpy(rows)]
    model, aggregate = server.step(received, x, last, lr, stream(engine.spec.seed, "server", n))
    last.copy_(aggregate)
    x.copy_(model - lr * server.weight_decay * x)


def _evaluate_once(engine: LocalEngine, benign: Int[np.ndarray, " b"]) -> EvaluationResult:
    """Evaluate the model that all benign agents have."""
    (result,) = engine.map_agents(_evaluate, benign[:1].tolist()).values()
    ids = engine.group.agents[benign]
    alone = [dataclasses.replace(result, agents=AgentIds(ids[[k]])) for k in range(len(ids))]
    return EvaluationResult.concatenate(alone)


def _evaluate(group: AgentGroup, members: Indices) -> list[EvaluationResult]:
    return [evaluate_models(group, members)]
