"""One agent of Algorithm 2 as an object, for your own training loop.

The model is trained elsewhere, and models come and go by any way. `Agent` does lines 1 and 3 to 7
of Algorithm 2 with the code of `fedcb2o run` and of a real peer, and remembers its contacts.

Example:
    >>> import torch
    >>> x, y = torch.eye(2), [0, 1]
    >>> network = torch.nn.Linear(2, 2)
    >>> agent = Agent(network, validation=(x, y), method="fedcbo")
    >>> agent.select(["clinic", "lab", "ward"], budget=2)
    ['clinic', 'ward']
    >>> good = {"weight": torch.eye(2) * 9, "bias": torch.zeros(2)}
    >>> bad = {"weight": torch.full((2, 2), torch.nan), "bias": torch.zeros(2)}
    >>> decision = agent.aggregate({"clinic": good, "ward": bad})
    >>> decision.weights, decision.refused
    ({'clinic': 1.0}, {'ward': 'its model holds numbers that are not finite, or beyond 1e+06'})
"""

from fedcb2o.agent._agent import Agent
from fedcb2o.agent._decision import Decision

__all__ = ["Agent", "Decision"]
