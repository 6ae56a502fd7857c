"""Who may ask whom: sparse peer graphs, in which an agent asks its neighbours only.

A graph is a function (cluster, draw) -> an undirected networkx graph on the agents 0 to N - 1; its further arguments
are keywords. `cluster` [N] are the agents' clusters, which only `same_cluster` uses.
"""

import math
from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from fedcb2o.errors import ConfigError
from fedcb2o.plugins import display_name

__all__ = ["erdos_renyi", "random_regular", "ring", "same_cluster", "small_world", "torus"]

_Graph = Callable[[Int[Tensor, " N"], np.random.Generator], Any]


def neighbours(
    graph: _Graph, cluster: Int[Tensor, " N"], draw: np.random.Generator
) -> tuple[Int[Tensor, " _k"], ...]:
    """The agents that each agent may ask, ascending; raises ConfigError where a graph is not one on these agents."""
    n = len(cluster)
    made = graph(cluster.clone(), draw)
    if not isinstance(made, nx.Graph) or set(made.nodes) != set(range(n)):
        raise ConfigError(
            f"the {display_name('graph', graph)} must be a networkx graph whose nodes are the agents 0 to {n - 1}, got {made}"
        )
    return tuple(torch.tensor(sorted(set(made[j]) - {j}), dtype=torch.int64) for j in range(n))


def ring(cluster: Int[Tensor, " N"], draw: np.random.Generator, *, near: int = 1) -> nx.Graph:
    """A ring in random order, each agent linked to the `near` next on either side."""
    n = len(cluster)
    _require_between("near", near, 1, (n - 1) // 2, n)
    return _shuffled(nx.circulant_graph(n, range(1, near + 1)), draw)


def torus(cluster: Int[Tensor, " N"], draw: np.random.Generator) -> nx.Graph:
    """A two-dimensional grid without borders, as square as the number of agents admits, in random order."""
    n = len(cluster)
    rows = max(r for r in range(1, math.isqrt(n) + 1) if n % r == 0)
    if rows < 2:
        raise ConfigError(
            f"a torus needs a number of agents that is a product of two from 2 up, got {n}"
        )
    grid = nx.convert_node_labels_to_integers(nx.grid_2d_graph(rows, n // rows, periodic=True))
    return _shuffled(grid, draw)


def random_regular(
    cluster: Int[Tensor, " N"], draw: np.random.Generator, *, degree: int = 4
) -> nx.Graph:
    """A random graph in which each agent has `degree` neighbours."""
    n = len(cluster)
    _require_between("degree", degree, 1, n - 1, n)
    if n * degree % 2:
        raise ConfigError(
            f"no graph on {n} agents gives each `degree` = {degree} neighbours: one of them must be even"
        )
    return nx.random_regular_graph(degree, n, seed=_seed(draw))


def erdos_renyi(
    cluster: Int[Tensor, " N"], draw: np.random.Generator, *, p: float = 0.3
) -> nx.Graph:
    """Each pair of agents is linked with probability `p` (Erdős and Rényi 1959)."""
    if not 0 <= p <= 1:
        raise ConfigError(f"`p` must be between 0 and 1, got {p}")
    return nx.fast_gnp_random_graph(len(cluster), p, seed=_seed(draw))


def small_world(
    cluster: Int[Tensor, " N"], draw: np.random.Generator, *, near: int = 2, p: float = 0.1
) -> nx.Graph:
    """A ring with the `near` next on either side, each link moved elsewhere with probability `p` (Watts and Strogatz,
    "Collective dynamics of small-world networks", 1998)."""
    n = len(cluster)
    _require_between("near", near, 1, (n - 1) // 2, n)
    if not 0 <= p <= 1:
        raise ConfigError(f"`p` must be between 0 and 1, got {p}")
    return _shuffled(nx.watts_strogatz_graph(n, 2 * near, p, seed=_seed(draw)), draw)


def same_cluster(cluster: Int[Tensor, " N"], draw: np.random.Generator) -> nx.Graph:
    """All agents of the same cluster, as if clusters were known: an oracle for the peers."""
    graph = nx.Graph()
    graph.add_nodes_from(range(len(cluster)))
    for k in sorted(set(cluster.tolist())):
        members = (cluster == k).nonzero().flatten().tolist()
        graph.add_edges_from((i, j) for i in members for j in members if i < j)
    return graph


def _shuffled(graph: nx.Graph, draw: np.random.Generator) -> nx.Graph:
    """The same graph on the agents in random order: its neighbours know nothing of clusters."""
    return nx.relabel_nodes(graph, dict(enumerate(draw.permutation(len(graph)).tolist())))


def _seed(draw: np.random.Generator) -> int:
    return int(draw.integers(2**32))


def _require_between(name: str, value: int, lower: int, upper: int, n: int) -> None:
    if not lower <= value <= upper:
        raise ConfigError(
            f"`{name}` must be between {lower} and {upper} for {n} agents, got {value}"
        )
