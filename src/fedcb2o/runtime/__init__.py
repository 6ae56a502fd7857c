"""Who runs the agents and who answers `exchange`: here a simulation of all of them on one machine."""
