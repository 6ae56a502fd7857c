"""Memory of an agent: its contacts and the state of its rule, as tensors by name."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcb2o.errors import RunError
from fedcb2o.federated import AgentState
from fedcb2o.federated.contacts import ContactTable
from fedcb2o.federated.types import Contacts

_RULE = "rule."


class Memory(NamedTuple):
    """Memory of an agent.

    Attributes:
        round: Number of finished rounds.
        peers: Names of peers by their ids.
        state: Contacts with their likelihoods, and the state of the rule.
        previous: The model after the last round.
    """

    round: int
    peers: list[Any]
    state: AgentState
    previous: Tensor

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the memory as tensors by name.

        Returns:
            Tensors for a safetensors file.
        """
        contacts = self.state.contacts[0]
        content = json.dumps({"round": self.round, "peers": self.peers}).encode()
        tensors = {
            "memory": torch.frombuffer(bytearray(content), dtype=torch.uint8),
            "contacts.ids": contacts.ids,
            "contacts.likelihood": contacts.likelihood,
            "previous": self.previous.cpu().clone(),
        }
        return tensors | {_RULE + key: t for key, t in self.state.rule_states[0].items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Memory":
        """Return the memory that tensors hold.

        Args:
            tensors: The result of `to_tensors`.

        Returns:
            The memory.

        Raises:
            RunError: They hold no memory.
        """
        try:
            memory = json.loads(bytes(tensors["memory"].numpy()))
            contacts = Contacts(tensors["contacts.ids"], tensors["contacts.likelihood"])
            rule = {k.removeprefix(_RULE): t for k, t in tensors.items() if k.startswith(_RULE)}
            state = AgentState(ContactTable.from_contacts([contacts]), (rule,))
            return cls(int(memory["round"]), list(memory["peers"]), state, tensors["previous"])
        except (KeyError, ValueError, TypeError) as error:
            raise RunError(f"it is not the memory of an agent: {error!r}") from error
