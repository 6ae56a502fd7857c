"""One round of decentralised clustered federated learning (paper, Section 3).

Nothing in this package knows files, sockets or processes.
"""
