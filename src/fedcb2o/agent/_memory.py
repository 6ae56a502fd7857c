"""Memory of an agent: names of peers, contacts and the state of its rule, as tensors by name."""

import json
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcb2o.agent._models import Model
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.federated.contacts import AgentState, ContactTable
from fedcb2o.federated.types import Contacts

Peer = Hashable
"""Name of a peer: a text or a whole number."""

UNKNOWN_ID = -1

_MAX_ID = 999_999


class Memory(NamedTuple):
    """Memory of an agent."""

    round: int
    # Names of peers by their ids.
    peers: list[Any]
    # Contacts with their likelihoods, and the state of the rule.
    state: AgentState
    # The model after the last round: tensors by name; in files of 0.2, flat.
    previous: Model
    # Name of the method, and of its rule; empty in files of 0.2.
    method: str
    # Number of the agent; None where peers have names, and UNKNOWN_ID in older files.
    id: int | None

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the memory as tensors by name."""
        contacts = self.state.contacts[0]
        # Names are texts and numbers, and a safetensors file holds tensors only.
        entries: dict[str, Any] = {"round": self.round, "peers": self.peers, "method": self.method}
        entries["id"] = self.id
        content = json.dumps(entries).encode()
        assert isinstance(self.previous, Mapping)
        tensors = {
            "memory": torch.frombuffer(bytearray(content), dtype=torch.uint8),
            "contacts.ids": contacts.ids,
            "contacts.likelihood": contacts.likelihood,
            **with_prefix("previous.", self.previous),
        }
        return tensors | with_prefix("rule.", self.state.rule_states[0])

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Memory":
        """Return the memory that tensors hold.

        Tensors of anything else are a RunError.
        """
        try:
            memory = json.loads(bytes(tensors["memory"].numpy()))
            contacts = Contacts(tensors["contacts.ids"], tensors["contacts.likelihood"])
            rule = without_prefix("rule.", tensors)
            state = AgentState(ContactTable.from_contacts([contacts]), (rule,))
            previous: Model = without_prefix("previous.", tensors)
            previous = tensors.get("previous", previous)
            method = str(memory.get("method", ""))
            number = memory.get("id", UNKNOWN_ID)
            return cls(int(memory["round"]), list(memory["peers"]), state, previous, method, number)
        except (KeyError, ValueError, TypeError) as error:
            raise RunError(f"it is not the memory of an agent: {error!r}") from error


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under longer names."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names have a prefix, under the rest of their names."""
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}


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
    def number(self) -> int | None:
        """Number of the agent, or None where peers have names."""
        return self.own if self._are_numbers else None

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
