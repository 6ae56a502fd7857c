"""Real peers: one agent a process, each of another organisation, over TLS and without mutual trust.

The round is that of every engine (alg:localAggregation); here it is answered by a network in which some lie.
"""

from fedcb2o.peer import extra

extra.need()
