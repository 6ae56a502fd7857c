"""Simulation of all agents: the loop over rounds (Algorithm 1), the engine of one machine, and checkpoints."""

from fedcb2o.simulation.local_engine import Shared
from fedcb2o.simulation.rounds import Clock, Engine, LostError, Round, Tell, rounds

__all__ = ["Clock", "Engine", "LostError", "Round", "Shared", "Tell", "rounds"]
