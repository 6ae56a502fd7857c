"""Simulation of all agents: the rounds of Algorithm 1, the engine of one machine, checkpoints."""
