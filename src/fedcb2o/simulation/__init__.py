"""Simulation of all agents: the rounds of Algorithm 1, the engine of one machine, checkpoints."""

from fedcb2o.simulation.local_engine import LocalEngine
from fedcb2o.simulation.rounds import (
    Engine,
    OnPhase,
    PhaseTimer,
    Round,
    WorkerLostError,
    run_rounds,
)

__all__ = [
    "Engine",
    "LocalEngine",
    "OnPhase",
    "PhaseTimer",
    "Round",
    "WorkerLostError",
    "run_rounds",
]
