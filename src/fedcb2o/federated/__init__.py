"""One round of decentralised clustered federated learning (paper, Section 3).

Nothing in this package knows files, sockets or processes. `algorithm2` is Algorithm 2 for one
agent; `batched_aggregation` has the same lines for many. The catalogues are `algorithms`,
`criteria`, `aggregation` and `attacks`; `selection`, `losses`, `optimisers`, `topology` and
`evaluation.metrics` are small ones. `guards` has the checks of received models.

Words:

- agent: a participant; peer: another agent, from the view of one.
- malicious agents are attackers. They collude, if the configuration says so. Fellows of an attacker
  are the other attackers of its cluster.
- group: the agents of one process (`AgentGroup`), with a model buffer.
- model buffer: one tensor; a row is a model. `BufferLayout` assigns the rows.
- members: agents as indices into a group; batch: members that one call computes.
- positions: agents as indices into a batch.
- n: the round, from 0.
- contacts: peers that an agent has asked, with their likelihoods P_n^j.
- inbox, outbox: models received and models published in a round.
- criterion: G, one value per received model; rule: weights of models, or a reduction of their
  coordinates.
- decisions: weights and mixing factors of a round, before they are applied.
"""
