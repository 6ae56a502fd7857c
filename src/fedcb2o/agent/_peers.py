"""Ids of peers, which their users name by texts or numbers.

>>> peers = PeerIds(None)
>>> peers.ids(["lab", "clinic"]), peers.own
([2, 1], 0)
"""

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from fedcb2o.errors import ConfigError

Peer = Hashable
"""Name of a peer: a text or a whole number."""

_MAX_ID = 999_999


class PeerIds:
    """Ids of the peers of an agent.

    The agent has id 0, and peers get the next ids in the order in which they appear. Where the
    agent has a number of its own, the numbers of all peers are their ids. `names` has the peers by
    id without the agent, and is empty where numbers are ids.
    """

    def __init__(self, own: int | None) -> None:
        self.names: list[Any] = []
        self._are_numbers = own is not None
        self._largest = 0
        self.own = 0
        if own is not None:
            self.own = self._number(own)

    @property
    def num_agents(self) -> int:
        """Number of ids, those of all peers so far and the agent's own."""
        return 1 + max(self.own, self._largest, len(self.names))

    def ids(self, peers: Iterable[Peer]) -> list[int]:
        """Return the ids of peers, in their order.

        An invalid or repeated name is a ConfigError.
        """
        peers = list(peers)
        if len(set(peers)) < len(peers):
            raise ConfigError(f"each peer has a name of its own, got {peers}")
        if self._are_numbers:
            numbers = [self._number(peer) for peer in peers]
            if self.own in numbers:
                raise ConfigError(f"the agent itself has the number {self.own}: leave it out")
            self._largest = max([self._largest, *numbers])
            return numbers

        for peer in peers:
            if isinstance(peer, bool) or not isinstance(peer, str | int):
                raise ConfigError(f"a peer has a name, a text or a whole number, got {peer!r}")
        known = {peer: id for id, peer in enumerate(self.names, 1)}
        # Sorted, so that ids do not depend on the order in which a transport lists its peers.
        new = set(peers) - known.keys()
        for peer in sorted(new, key=lambda peer: (isinstance(peer, str), peer)):
            self.names.append(peer)
            known[peer] = len(self.names)
        return [known[peer] for peer in peers]

    def name(self, id: int) -> Any:
        """Return the name of a peer."""
        return id if self._are_numbers else self.names[id - 1]

    def _number(self, peer: Any) -> int:
        is_whole = isinstance(peer, int | np.integer) and not isinstance(peer, bool)
        if not is_whole or not 0 <= peer <= _MAX_ID:
            raise ConfigError(
                f"an agent with an `id` has peers that are whole numbers from 0 to {_MAX_ID}, got "
                f"{peer!r}"
            )
        return int(peer)
