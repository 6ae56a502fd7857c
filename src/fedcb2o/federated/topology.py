"""Sparse peer graphs, in which an agent asks its neighbours only.

A graph is a function (cluster, generator, *, ...) -> an undirected networkx graph on the agents 0
to N - 1; its keyword arguments are parameters of a configuration. `cluster` [N] holds the agents'
clusters, which only `same_cluster` uses.

>>> graph = ring(torch.zeros(5), np.random.default_rng(0))
>>> sorted(degree for _, degree in graph.degree)
[2, 2, 2, 2, 2]
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from fedcb2o.docstrings import share_entries
from fedcb2o.errors import ConfigError, require
from fedcb2o.federated.plugin_outputs import validated_graph

if TYPE_CHECKING:
    from networkx import Graph
else:
    Graph = Any  # networkx is slow to import, so each function imports it

__all__ = [
    "erdos_renyi",
    "random_regular",
    "random_view",
    "ring",
    "same_cluster",
    "small_world",
    "torus",
]

_Graph = Callable[[Int[Tensor, " N"], np.random.Generator], Any]


def neighbours(
    graph: _Graph, cluster: Int[Tensor, " N"], draw: np.random.Generator
) -> tuple[Int[Tensor, " _k"], ...]:
    """Make a graph on all agents and return the ascending ids that each agent may ask."""
    n = len(cluster)
    # A view is a list by agent already, and it is not symmetric.
    if getattr(graph, "func", graph) is random_view:
        return tuple(graph(cluster, draw))
    result = validated_graph(graph, graph(cluster.clone(), draw), n)
    # A loop is no link to a peer.
    ids = [sorted(set(result[j]) - {j}) for j in range(n)]
    return tuple(torch.tensor(peers, dtype=torch.int64) for peers in ids)


def ring(cluster: Int[Tensor, " N"], draw: np.random.Generator, *, near: int = 1) -> Graph:
    """Make a ring in random order.

    Raises:
        ConfigError: `near` is out of range.
    """
    import networkx as nx

    n = len(cluster)
    _require_between("near", near, 1, (n - 1) // 2, n)
    return _shuffled(nx.circulant_graph(n, range(1, near + 1)), draw)


def torus(cluster: Int[Tensor, " N"], draw: np.random.Generator) -> Graph:
    """Make a two-dimensional periodic grid in random order, as square as N allows.

    Raises:
        ConfigError: N is a prime number.
    """
    import networkx as nx

    n = len(cluster)
    # The largest divisor up to the root of N is the side of the squarest grid.
    rows = max(r for r in range(1, math.isqrt(n) + 1) if n % r == 0)
    if rows < 2:
        raise ConfigError(
            f"a torus needs a number of agents that is a product of two from 2 up, got {n}"
        )
    grid = nx.convert_node_labels_to_integers(nx.grid_2d_graph(rows, n // rows, periodic=True))
    return _shuffled(grid, draw)


def random_regular(
    cluster: Int[Tensor, " N"], draw: np.random.Generator, *, degree: int = 4
) -> Graph:
    """Make a random graph in which each agent has `degree` neighbours.

    Args:
        degree: Number of neighbours, from 1 to N - 1; even where N is odd.

    Raises:
        ConfigError: `degree` is out of range, or N and `degree` are odd.
    """
    import networkx as nx

    n = len(cluster)
    _require_between("degree", degree, 1, n - 1, n)
    if n * degree % 2:
        raise ConfigError(
            f"no graph on {n} agents gives each `degree` = {degree} neighbours: one of them must "
            "be even"
        )
    return nx.random_regular_graph(degree, n, seed=_seed(draw))


def random_view(
    cluster: Int[Tensor, " N"], draw: np.random.Generator, *, size: int = 4
) -> Int[Tensor, "N size"]:
    """Give each agent a random list of peers; these need not know the agent.

    It is a partial view, without a graph object, which would be too large for 100,000 agents.

    Args:
        size: Number of peers that an agent knows, from 1 to N - 1.

    Raises:
        ConfigError: `size` is out of range.
    """
    n = len(cluster)
    _require_between("size", size, 1, n - 1, n)
    ids = np.empty((n, size), np.int64)
    for j in range(n):
        # Ids from the agent on are shifted by one, which leaves the agent itself out.
        others = np.sort(draw.choice(n - 1, size, replace=False))
        ids[j] = others + (others >= j)
    return torch.from_numpy(ids)


def erdos_renyi(cluster: Int[Tensor, " N"], draw: np.random.Generator, *, p: float = 0.3) -> Graph:
    """Make a random graph with independent links (Erdős and Rényi 1959).

    Args:
        p: Probability of each link, in [0, 1].
    """
    import networkx as nx

    require("p", p, 0 <= p <= 1, "between 0 and 1")
    return nx.fast_gnp_random_graph(len(cluster), p, seed=_seed(draw))


def small_world(
    cluster: Int[Tensor, " N"], draw: np.random.Generator, *, near: int = 2, p: float = 0.1
) -> Graph:
    """Make a ring whose links are rewired at random.

    Watts and Strogatz, "Collective dynamics of small-world networks" (1998).

    Args:
        p: Probability to rewire a link, in [0, 1].
    """
    import networkx as nx

    n = len(cluster)
    _require_between("near", near, 1, (n - 1) // 2, n)
    require("p", p, 0 <= p <= 1, "between 0 and 1")
    return _shuffled(nx.watts_strogatz_graph(n, 2 * near, p, seed=_seed(draw)), draw)


def same_cluster(cluster: Int[Tensor, " N"], draw: np.random.Generator) -> Graph:
    """Link all agents of a cluster: an oracle that knows the clusters."""
    import networkx as nx

    graph = nx.Graph()
    # An agent alone in its cluster has no link, and is in the graph.
    graph.add_nodes_from(range(len(cluster)))
    for k in sorted(set(cluster.tolist())):
        members = (cluster == k).nonzero().flatten().tolist()
        graph.add_edges_from((i, j) for i in members for j in members if i < j)
    return graph


def _shuffled(graph: Graph, draw: np.random.Generator) -> Graph:
    """Permute the agents at random, so that neighbours are independent of clusters."""
    import networkx as nx

    return nx.relabel_nodes(graph, dict(enumerate(draw.permutation(len(graph)).tolist())))


def _seed(draw: np.random.Generator) -> int:
    return int(draw.integers(2**32))


def _require_between(name: str, value: int, lower: int, upper: int, n: int) -> None:
    if not lower <= value <= upper:
        raise ConfigError(
            f"`{name}` must be between {lower} and {upper} for {n} agents, got {value}"
        )


_ARGUMENTS = {
    "cluster": "Cluster of each agent.",
    "draw": "Source of randomness.",
    "near": "Neighbours on either side, from 1 to (N - 1) / 2.",
}
for _name in __all__:
    share_entries(globals()[_name], _ARGUMENTS, "The graph.")
