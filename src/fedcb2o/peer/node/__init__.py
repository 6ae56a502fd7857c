"""Node of a federation: one agent, its data, rounds and checks."""
