"""The state that a callback of `minimize` receives before a step."""

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class State:
    """The state of all active runs before step n.

    Copy what you keep: `theta` changes in place.

    Attributes:
        n: Step.
        t: Time n dt.
        x: Consensus point, in the shape of the result.
        theta: Benign particles.
        theta_m: Malicious particles.
        lower: L of every particle in its own cluster; None in a step with a random batch.
        upper: G of every particle; None without G or in a step with a random batch.
        runs: Indices of the active runs.
    """

    n: int
    t: float
    x: Tensor
    theta: Tensor
    theta_m: Tensor
    lower: Tensor | None
    upper: Tensor | None
    runs: Tensor
