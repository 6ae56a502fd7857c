"""One round of decentralised clustered federated learning (paper, Section 3); knows no files, sockets or processes."""
