"""Models and training data of an agent that attacks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o.agent._group import adversary_of, group_of_one
from fedcb2o.errors import ConfigError
from fedcb2o.federated import AgentData, Attack, RunSpec, craft_models_
from fedcb2o.federated.attacks.section import AttackSection
from fedcb2o.federated.sections import as_component
from fedcb2o.nn import parameters


def build_attack(choice: Any) -> Attack | None:
    """Return the attack of an agent.

    Args:
        choice: A name, a function or a table, as in the section `attack`; None for no attack.

    Returns:
        The attack, or None.

    Raises:
        ConfigError: There is no such attack, or it changes more than models and data.
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


def craft(
    spec: RunSpec,
    data: AgentData,
    n: int,
    own: Float[Tensor, " d"],
    previous: Float[Tensor, " d"],
    benign: dict[int, Float[Tensor, " d"]],
    fellows: dict[int, Float[Tensor, " d"]],
) -> Float[Tensor, "r d"]:
    """Craft the models that an attacker publishes.

    Args:
        spec: Specification of the round; the ids of all agents are below its number of agents.
        data: Data of the attacker, with its attack.
        n: Round.
        own: Model of the attacker.
        previous: Its model before the round.
        benign: Models of benign agents by id.
        fellows: Models of other attackers by id.

    Returns:
        One model, or one per benign agent.

    Raises:
        ConfigError: The attack knows models that are missing.
    """
    attack = data.attack
    if not benign and ("benign" in attack.threat.knows or attack.threat.each_receiver):
        raise ConfigError("the attack looks at the models of benign agents: pass `benign`")

    # Agents that the attacker does not know are those of another cluster.
    id = int(data.agents[0])
    known = {**benign, **fellows, id: own}
    ids = np.arange(spec.num_agents)
    adversary = adversary_of(attack, ~np.isin(ids, [*benign]), ~np.isin(ids, [*known]) * 1)

    num_crafted = attack.num_published(1, len(benign))
    dim = len(own)
    models = own.new_zeros(1 + num_crafted, parameters.row_stride(dim))[:, :dim]
    models[0] = own
    models[1] = previous

    def peek(ids: Sequence[int]) -> Float[Tensor, "m d"]:
        return torch.stack([known[j] for j in ids]) if ids else own.new_zeros(0, dim)

    group = group_of_one(spec, data, models, adversary, num_crafted)
    craft_models_(group, np.zeros(1, np.int64), n, np.ones(spec.num_agents, bool), peek)
    return models[1:]
