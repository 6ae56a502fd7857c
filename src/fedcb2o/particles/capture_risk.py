"""How many benign particles attackers can leave in the sub-level set Q_beta (eq:Q_beta), and when that is too few.

García Trillos et al., "Defending Against Diverse Attacks in Federated Learning Through Consensus-Based Bi-Level
Optimization" (arXiv 2412.02535). Malicious particles that stand on a minimiser of L have the least L there is. With
delta_q = 0 they are in Q_beta before all benign ones, and G chooses among those for whom there is room behind them.
Measured in `paper/capture.py`.
"""

import torch

from fedcb2o import consensus
from fedcb2o.particles.dynamics import ConsensusParams

_MIN_BENIGN = 2  # benign particles that G needs in Q_beta to choose among


def benign_left(
    *, beta: float, w_m: float, num_benign: int, dim: int, averaged: bool = False
) -> int:
    """How many of so many benign particles are in Q_beta with delta_q = 0 if attackers stand on a minimiser of L.

    By the plain quantile (eq:q_beta) it is a rank, about (beta - w_m) N, whatever L is. In the averaged one (eq:Q_beta)
    the attackers' q_a = min L fill the integral up to a = w_m and pull the level down among the benign particles: how
    many stay below it depends on their values of L. They are taken as those of a smooth density of particles about an
    isolated minimiser, where the i-th least L - min L is in proportion to i^(2/dim). Where the minimisers are a curve
    or a surface, as many stay or more.
    """
    ranks = torch.arange(num_benign + 1, dtype=torch.float64)  # the attackers are the first
    mass = torch.full_like(ranks, (1 - w_m) / num_benign)
    mass[0] = w_m
    level = ranks ** (2 / dim)
    mask = consensus.sublevel_mask(
        level, beta, delta_q=1e-9, averaged=averaged, mass=mass
    )  # delta_q: for rounding
    return int(mask[1:].sum())


def explain(params: ConsensusParams, w_m: float, num_benign: int, dim: int) -> str:
    """What to say where attackers leave fewer than `CHOICE` benign particles, with the cure; else nothing."""
    left = benign_left(
        beta=params.beta, w_m=w_m, num_benign=num_benign, dim=dim, averaged=params.averaged
    )
    if left >= _MIN_BENIGN:
        return ""
    room = f"{'about ' if params.averaged and left else ''}{left or 'no'} benign particle"
    return (
        f"delta_q = 0 and malicious particles have the share w_m = {w_m:.3g}: on a minimiser of L they leave room for"
        f" {room} in the sub-level set of beta = {params.beta:g}, and G needs at least {_MIN_BENIGN} to choose among; they can"
        " capture the consensus point, however bad their G is: take delta_q > 0 (eq:Q_beta), which costs accuracy, or"
        " a larger beta, or more particles"
    )
