"""Attacks on models that publish another model for every receiver, which only a network without a server admits.

As in `model_poisoning`, an attack is a function (view, draw) -> models, here [r, d], and declares what it knows.
"""

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from fedcb2o.federated.aggregation.gram_matrix import gram
from fedcb2o.federated.types import AttackView, knows

__all__ = ["dissensus", "echo", "equivocation", "spectral"]


@knows("benign", each_receiver=True)
def dissensus(
    view: AttackView, draw: np.random.Generator, *, eps: float = 1.0
) -> Float[Tensor, "r d"]:
    """To each receiver its own model, pushed away from the mean of the benign agents: with `eps` = 1 plain averaging
    brings the agents no nearer to each other.

    He, Karimireddy and Jaggi, "Byzantine-Robust Decentralized Learning via ClippedGossip" (2022), with equal weights.
    """
    mean = view.benign().mean(0)
    push = eps * view.num_benign / view.num_colluders
    return torch.stack(
        [torch.lerp(mean, view.model_of(i), 1 + push) for i in view.receivers.tolist()]
    )


@knows("benign", each_receiver=True, on_poisoned_data=True)
def echo(
    view: AttackView, draw: np.random.Generator, *, scale: float = 1.0
) -> Float[Tensor, "r d"]:
    """To each receiver its own model, moved by `scale` times what its poisoned model differs by from the mean of the
    benign ones of its cluster. No paper's: for receivers that judge by samples which their model was trained on, and
    so knows by heart."""
    poison = scale * (view.own - view.benign().mean(0))
    return torch.stack([view.model_of(i) + poison for i in view.receivers.tolist()])


@knows("benign", each_receiver=True)
def equivocation(
    view: AttackView, draw: np.random.Generator, *, z: float = 1.5
) -> Float[Tensor, "r d"]:
    """The mean of the benign models and `z` standard deviations, up for every second receiver, else down: each is
    plausible, and they drive the receivers apart. No paper's: ALIE, told in two ways."""
    models = view.benign()
    mean = models.mean(0)
    step = z * models.std(0, correction=0)
    return torch.stack([mean + step if k % 2 else mean - step for k in range(len(view.receivers))])


@knows("benign", each_receiver=True)
def spectral(
    view: AttackView, draw: np.random.Generator, *, eps: float = 1.0
) -> Float[Tensor, "r d"]:
    """To each receiver its own model, pushed farther to where it lies in the direction in which gossip among the benign
    agents of its cluster is slowest to agree: "spectral heterogeneity".

    With f the Fiedler vector of their graph, an eigenvector of its Laplacian's second smallest eigenvalue, and X their
    models, receiver i gets x_i + s f_i (f^T X). Where several vectors belong to that eigenvalue, as in a complete
    graph, f is the one of them along which models differ most, the largest f^T X. s is `eps` times the benign agents
    for each attacker, so that with `eps` = 1 plain averaging of a complete graph leaves them as far apart along f.
    Parts of the graph that are not connected have a vector each.

    Gaucher, Dieuleveut and Hendrikx, "Unified Breakdown Analysis for Byzantine Robust Gossip" (ICML 2025, arXiv
    2410.10418), after their code, which searches for the s that moves the receiver's rule, which it knows, farthest:
    that is left to a sweep over `eps`. Their code takes any vector of several, and no graph that is not connected.
    """
    models = torch.stack([view.model_of(i) for i in view.receivers.tolist()])
    finite = models.isfinite().all(1)
    links = (view.links() & finite.cpu() & finite.cpu()[:, None]).numpy()
    push = eps * view.num_benign / view.num_colluders
    count, part = connected_components(links, directed=False)
    found = models.clone()
    for k in range(count):
        some = torch.from_numpy(np.flatnonzero(part == k)).to(models.device)
        if len(some) > 1:
            near = torch.from_numpy(links[np.ix_(part == k, part == k)]).double()
            f = _fiedler_vector(near, models[some]).to(models)
            found[some] += push * torch.outer(f, f @ models[some])
    return found


def _fiedler_vector(
    links: Float[Tensor, "m m"], models: Float[Tensor, "m d"]
) -> Float[Tensor, " m"]:
    """The Fiedler vector of a connected graph; of several, that along which the models differ most."""
    values, vectors = torch.linalg.eigh(links.sum(1).diag() - links)
    basis = vectors[:, 1:][:, values[1:] <= values[1] + 1e-9 * values[-1]]
    centred = gram(models - models.mean(0))
    found: Tensor = basis @ torch.linalg.eigh(basis.T @ centred @ basis).eigenvectors[:, -1]
    return found
