"""The baselines of an attacked experiment: the same run without the attack."""

from typing import Any, Literal, get_args

from fedcb2o import plugins
from fedcb2o.experiments.config.datasets import attack_goal, backdoor_trigger
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.federated import attacks

Changes = dict[str, Any]
"""Keys of an experiment and their values, as in its file."""

BaselineRole = Literal["clean", "removed"]


BASELINE_ROLES: tuple[BaselineRole, ...] = get_args(BaselineRole)
"""What malicious agents do in the floors of a cell."""


def baseline_table(experiment: Experiment, role: BaselineRole) -> Changes:
    """A floor of an attacked experiment, as a table: malicious agents train on true labels or are not there, and what
    the attack aims at is measured all the same. Who would ask more peers than are left asks all of them."""
    table = experiment.model_dump(exclude_unset=True, exclude={"title", "description", "attack"})
    agents = experiment.agents.model_copy(update={"malicious_role": role})
    left = {"malicious_role": role, "budget": min(agents.budget, max(1, agents.num_agents - 1))}
    aim = {"attack": goal_of_attack(experiment)}
    return {
        **table,
        "name": "floor",
        "agents": {**table["agents"], **left},
        **(aim if aim["attack"] else {}),
    }


def goal_of_attack(experiment: Experiment) -> Changes | None:
    """The attack on data that has the aim of an experiment's attack, and nothing else: equal for equal aims.

    That is its sources and targets, and a backdoor's trigger; None where the attack is after the accuracy alone.
    """
    poison = None if experiment.attack is None else experiment.attack.data_attack
    if poison is None:
        return None
    aim = attack_goal(experiment)
    trigger = backdoor_trigger(experiment)
    pairs = [list(pair) for pair in zip(aim.sources, aim.targets, strict=False)]
    if trigger is None and pairs:
        one = {"name": "label_flip", "source": pairs[0][0], "target": pairs[0][1]}
        return one if len(pairs) == 1 else {"name": "label_flips", "pairs": pairs}
    if trigger is None and not aim.sources:
        return {"name": "spread_flip", "target": aim.targets[0]} if aim.targets else None
    known = plugins.parameters(plugins.resolve("attack", poison.name, attacks))
    shown = {key for key, parameter in known.items() if parameter.default is parameter.empty}
    shown |= {"name", "source", "target", *(plugins.parameters(trigger) if trigger else ())}
    return {
        key: value for key, value in poison.with_defaults("attack", attacks).items() if key in shown
    }
