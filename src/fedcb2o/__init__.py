"""Robust federated learning without a server: consensus-based bi-level optimisation (CB2O, FedCB2O)."""
