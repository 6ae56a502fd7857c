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
    """Memory of an agent."""

    round: int
    # Names of peers by their ids.
    peers: list[Any]
    # Contacts with their likelihoods, and the state of the rule.
    state: AgentState
    # The model after the last round.
    previous: Tensor

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the memory as tensors by name."""
        contacts = self.state.contacts[0]
        # Names are texts and numbers, and a safetensors file holds tensors only.
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

        Tensors of anything else are a RunError.
        """
        try:
            memory = json.loads(bytes(tensors["memory"].numpy()))
            contacts = Contacts(tensors["contacts.ids"], tensors["contacts.likelihood"])
            rule = {k.removeprefix(_RULE): t for k, t in tensors.items() if k.startswith(_RULE)}
            state = AgentState(ContactTable.from_contacts([contacts]), (rule,))
            return cls(int(memory["round"]), list(memory["peers"]), state, tensors["previous"])
        except (KeyError, ValueError, TypeError) as error:
            raise RunError(f"it is not the memory of an agent: {error!r}") from error
