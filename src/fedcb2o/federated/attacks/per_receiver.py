"""Attacks on models that publish a different model for every receiver.

Only a network without a server admits them. As in `model_poisoning`, an attack is a function
`(view, draw) -> models`, here [r, d], and declares its knowledge.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.federated.adversary import AttackView, knows
from fedcb2o.federated.aggregation.gram_matrix import gram

__all__ = ["dissensus", "echo", "equivocation", "spectral", "user_isolation"]


@knows("benign", each_receiver=True)
def dissensus(
    view: AttackView, draw: np.random.Generator, *, eps: float = 1.0
) -> Float[Tensor, "r d"]:
    """Push each receiver's model away from the benign mean.

    With `eps` = 1, plain averaging brings the agents no nearer to each other. He, Karimireddy and
    Jaggi, "Byzantine-Robust Decentralized Learning via ClippedGossip" (2022), with equal weights.
    """
    mean = view.benign().mean(0)
    push = eps * view.num_benign / view.num_colluders
    pushed = [torch.lerp(mean, view.model_of(i), 1 + push) for i in view.receivers.tolist()]
    return torch.stack(pushed)


@knows("benign", each_receiver=True, on_poisoned_data=True)
def echo(
    view: AttackView, draw: np.random.Generator, *, scale: float = 1.0
) -> Float[Tensor, "r d"]:
    """Add the poisoned part of the attacker's model to each receiver's.

    The poisoned part is the difference of the attacker's model to the mean of the benign models of
    its cluster. The attack is not from a paper. It is directed at receivers that validate on
    samples their model was trained on, which their model therefore fits too well.

    Args:
        scale: Factor of the poisoned part.
    """
    poison = scale * (view.own - view.benign().mean(0))
    return torch.stack([view.model_of(i) + poison for i in view.receivers.tolist()])


@knows("benign", each_receiver=True)
def equivocation(
    view: AttackView, draw: np.random.Generator, *, z: float = 1.5
) -> Float[Tensor, "r d"]:
    """Send the benign mean plus or minus `z` standard deviations.

    Every second receiver gets plus, and the others minus. Each model is plausible, and together
    they drive the receivers apart. The attack is not from a paper; it is ALIE in two directions.

    Args:
        z: Number of standard deviations.
    """
    models = view.benign()
    mean = models.mean(0)
    step = z * models.std(0, correction=0)
    low = mean - step
    high = mean + step
    return torch.stack([high if k % 2 else low for k in range(len(view.receivers))])


@knows("benign", each_receiver=True)
def spectral(
    view: AttackView, draw: np.random.Generator, *, eps: float = 1.0
) -> Float[Tensor, "r d"]:
    """Push each receiver along the direction in which gossip agrees most slowly.

    Let f be the Fiedler vector of the benign agents' graph in the cluster (an eigenvector of the
    second smallest eigenvalue of its Laplacian), and X their models. Receiver i gets x_i + s f_i
    (f^T X). Where several vectors belong to that eigenvalue, as in a complete graph, f is the one
    with the largest f^T X. s is `eps` times the number of benign agents per attacker. With `eps` =
    1, plain averaging of a complete graph leaves the agents as far apart along f. Each connected
    component has its own f.

    Gaucher, Dieuleveut and Hendrikx, "Unified Breakdown Analysis for Byzantine Robust Gossip" (ICML
    2025, arXiv 2410.10418, "spectral heterogeneity"), after their code. Their code knows the
    receiver's rule and searches for the most harmful s; here a sweep over `eps` replaces the
    search. Their code takes any of several vectors, and no disconnected graph.
    """
    from scipy.sparse.csgraph import connected_components  # slow to import

    models = torch.stack([view.model_of(i) for i in view.receivers.tolist()])
    # A model that is not finite has no links, so that it spoils no other receiver's.
    is_finite = models.isfinite().all(1).cpu()
    links = (view.links() & is_finite & is_finite[:, None]).numpy()
    push = eps * view.num_benign / view.num_colluders

    # Each connected component has a Fiedler vector of its own.
    num_components, component = connected_components(links, directed=False)
    pushed = models.clone()
    for k in range(num_components):
        in_component = component == k
        members = torch.from_numpy(np.flatnonzero(in_component)).to(models.device)
        if len(members) > 1:
            subgraph = torch.from_numpy(links[np.ix_(in_component, in_component)]).double()
            f = _fiedler_vector(subgraph, models[members]).to(models)
            pushed[members] += push * torch.outer(f, f @ models[members])
    return pushed


@knows("benign", each_receiver=True)
def user_isolation(
    view: AttackView, draw: np.random.Generator, *, agent: int = 0, eps: float = 1.0
) -> Float[Tensor, "r d"]:
    """Cut one benign agent off: it learns nothing from others, nor others from it.

    Let b and f be the numbers of benign agents and attackers in the cluster, x the victim's model,
    o the mean of the other benign models and y the mean of all. The victim gets
    x + eps (b / f) (x - y), and all others o + (eps / f) (o - x). With `eps` = 1, the plain average
    of everyone's models is x at the victim, and o, without the victim's part, at the others.

    The idea is that of Li, Liang, Liò, Ni, Dressler, Crowcroft and Akan, "User Isolation Poisoning
    on Decentralized Federated Learning" (IEEE TNNLS 2025, 11271864), of which only the abstract was
    available. Their attackers train a graph neural network; this is a formula for equal weights.

    Args:
        agent: Number of the victim in the attacker's cluster.
    """
    models = view.benign()
    number = agent % len(models)
    victim = models[number]
    mean = models.mean(0)
    others = mean + (mean - victim) / max(1, len(models) - 1)
    to_victim = torch.lerp(mean, victim, 1 + eps * len(models) / view.num_colluders)
    to_others = torch.lerp(victim, others, 1 + eps / view.num_colluders)

    crafted = to_others.repeat(len(view.receivers), 1)
    crafted[view.receivers == view.benign_ids()[number]] = to_victim
    return crafted


def _fiedler_vector(
    links: Float[Tensor, "m m"], models: Float[Tensor, "m d"]
) -> Float[Tensor, " m"]:
    """Return the Fiedler vector along which the models differ most."""
    values, vectors = torch.linalg.eigh(links.sum(1).diag() - links)
    # Several vectors may belong to the second smallest eigenvalue, as in a complete graph.
    basis = vectors[:, 1:][:, values[1:] <= values[1] + 1e-9 * values[-1]]
    centred = gram(models - models.mean(0))
    vector: Tensor = basis @ torch.linalg.eigh(basis.T @ centred @ basis).eigenvectors[:, -1]
    return vector
