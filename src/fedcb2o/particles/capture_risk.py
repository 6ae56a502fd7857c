"""Benign particles that attackers can leave in the sub-level set Q_beta (eq:Q_beta).

García Trillos et al., "Defending Against Diverse Attacks in Federated Learning Through
Consensus-Based Bi-Level Optimization" (arXiv 2412.02535). Malicious particles on a minimiser of L
have the smallest L. With delta_q = 0 they are in Q_beta before all benign particles, and G chooses
among the benign particles for which the remaining room suffices. Measured in `paper/capture.py`.
"""

import torch

from fedcb2o import consensus
from fedcb2o.particles.dynamics import ConsensusParams

_MIN_BENIGN = 2  # benign particles that G needs in Q_beta to choose among


class CaptureWarning(UserWarning):
    """A warning that malicious particles may capture the consensus point."""


def benign_left(
    *, beta: float, w_m: float, num_benign: int, dim: int, averaged: bool = False
) -> int:
    """Count the benign particles in Q_beta with attackers at a minimiser of L.

    The count is for delta_q = 0.

    With the plain quantile (eq:q_beta) the count is a rank, about (beta - w_m) N, for every L. In
    the averaged one (eq:Q_beta) the attackers' q_a = min L fills the integral up to a = w_m, so the
    level depends on the benign values of L. They are taken as those of a smooth density of
    particles about an isolated minimiser, where the i-th smallest L - min L is proportional to
    i^(2/dim). Where the minimisers are a curve or a surface, at least as many particles stay.

    Args:
        beta: Share of the ensemble in Q_beta, in (0, 1].
        w_m: Share of the malicious particles, in [0, 1).
        num_benign: Number of benign particles.
        dim: d.
        averaged: Whether the level is the averaged quantile.

    Returns:
        The number of benign particles.

    Example:
        >>> benign_left(beta=0.3, w_m=0.1, num_benign=90, dim=2)
        20
    """
    ranks = torch.arange(num_benign + 1, dtype=torch.float64)  # the attackers have rank 0
    mass = torch.full_like(ranks, (1 - w_m) / num_benign)
    mass[0] = w_m
    level = ranks ** (2 / dim)
    # A small delta_q absorbs rounding.
    mask = consensus.sublevel_mask(level, beta, delta_q=1e-9, averaged=averaged, mass=mass)
    return int(mask[1:].sum())


def explain(params: ConsensusParams, w_m: float, num_benign: int, dim: int) -> str:
    """Describe the risk of capture, with its cure; empty where enough benign particles are left."""
    left = benign_left(
        beta=params.beta, w_m=w_m, num_benign=num_benign, dim=dim, averaged=params.averaged
    )
    if left >= _MIN_BENIGN:
        return ""
    room = f"{'about ' if params.averaged and left else ''}{left or 'no'} benign particle"
    return (
        f"delta_q = 0 and malicious particles have the share w_m = {w_m:.3g}: on a minimiser of L"
        f" they leave room for {room} in the sub-level set of beta = {params.beta:g}, and G needs"
        f" at least {_MIN_BENIGN} to choose among; they can capture the consensus point, however"
        " bad their G is: take delta_q > 0 (eq:Q_beta), which costs accuracy, or a larger beta, or"
        " more particles"
    )
