"""Models and training data of an agent that attacks."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.agent._models import Model, ModelFormat
from fedcb2o.errors import ConfigError
from fedcb2o.federated import single_agent
from fedcb2o.federated.adversary import Adversary, Attack
from fedcb2o.federated.agent_group import AgentData
from fedcb2o.federated.attacks.section import AttackSection
from fedcb2o.federated.publishing import craft_models_
from fedcb2o.federated.run_spec import RunSpec
from fedcb2o.federated.sections import as_component


def build_attack(choice: Any) -> Attack | None:
    """Return the attack of an agent; None for no attack.

    `choice` is a name, a function or a table, as in the section `attack`. An attack that changes
    more than models and data is a ConfigError.
    """
    if choice is None:
        return None
    attack = AttackSection.model_validate(as_component(choice)).build()
    if attack.sybils or attack.claimed_samples is not None:
        raise ConfigError(
            "`sybils` and `claims` of an attack are settings of a run: to an agent as an object "
            "you pass the peers' names and numbers of samples yourself"
        )
    return attack


class Attacker(NamedTuple):
    """An agent that crafts the models which it publishes in one round."""

    # Specification of the round; the ids of all agents are below its number of agents.
    spec: RunSpec
    # Data of the attacker, with its attack.
    data: AgentData
    model_format: ModelFormat
    n: int
    own: Float[Tensor, " d"]
    # Its model before the round.
    previous: Float[Tensor, " d"]

    def publish(
        self, ids: Sequence[int], benign: Mapping[Any, Model], fellows: Mapping[Any, Model]
    ) -> Any:
        """Craft the models that the attacker publishes.

        `ids` has the benign agents first, then the other attackers. An attack that distinguishes
        its receivers returns one model per benign agent, by name. Missing or invalid models that
        the attack knows are a ConfigError.
        """
        threat = self.data.attack.threat
        if not benign and ("benign" in threat.knows or threat.each_receiver):
            raise ConfigError("the attack looks at the models of benign agents: pass `benign`")

        id_of = dict(zip([*benign, *fellows], ids, strict=True))
        rows: dict[int, Float[Tensor, " d"]] = {}
        for name, model in {**benign, **fellows}.items():
            row = torch.empty_like(self.own)
            reason = self.model_format.read_(model, row)
            if reason:
                raise ConfigError(f"the model of {name!r} cannot be used by the attack: {reason}")
            rows[id_of[name]] = row

        benign_ids = {id_of[name]: name for name in benign}
        models = self.model_format.to_user(self._craft(list(benign_ids), rows))
        if not threat.each_receiver:
            return models[0]
        # Crafted models are in the ascending order of their receivers' ids.
        ordered = [benign_ids[id] for id in sorted(benign_ids)]
        return dict(zip(ordered, models, strict=True))

    def _craft(
        self, benign: list[int], rows: dict[int, Float[Tensor, " d"]]
    ) -> Float[Tensor, "r d"]:
        """Return one crafted model, or one per benign agent."""
        known = {**rows, int(self.data.agents[0]): self.own}
        ids = np.arange(self.spec.num_agents)
        # Agents that the attacker does not know are those of another cluster.
        cluster = ~np.isin(ids, list(known)) * 1
        adversary = Adversary(
            attack=self.data.attack,
            malicious=~np.isin(ids, benign),
            cluster=cluster,
            num_clusters=2,
            colludes=False,
            averages_own_model=False,
        )

        group = single_agent.agent_group(self.spec, self.data, adversary)
        group.models[0] = self.own
        group.models[1] = self.previous

        def peek(ids: Sequence[int]) -> Float[Tensor, "m d"]:
            return torch.stack([known[j] for j in ids]) if ids else group.models[:0]

        craft_models_(group, np.zeros(1, np.int64), self.n, np.ones(len(ids), bool), peek)
        return group.models[group.layout.crafted_rows(0)]
