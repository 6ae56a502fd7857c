"""The baselines of an attacked experiment: the same run without the attack.

In one, "clean", the malicious agents train on true labels and share their models. In the other,
"removed", they and their knowledge are absent.
"""

from typing import Any, Literal, get_args

from fedcb2o import plugins
from fedcb2o.experiments.config.settings import Experiment

Changes = dict[str, Any]
"""Keys of an experiment and their values, as in its file."""

BaselineRole = Literal["clean", "removed"]
BASELINE_ROLES: tuple[BaselineRole, ...] = get_args(BaselineRole)
"""The roles of malicious agents in the baselines of a cell."""


def baseline_table(experiment: Experiment, role: BaselineRole) -> Changes:
    """Return the baseline of an attacked experiment, in which the same effect is measured."""
    table = experiment.model_dump(exclude_unset=True, exclude={"title", "description", "attack"})
    agents = experiment.agents.model_copy(update={"malicious_role": role})
    budget = min(agents.budget, max(1, agents.num_agents - 1))
    table["agents"] = {**table["agents"], "malicious_role": role, "budget": budget}
    table["name"] = "floor"
    attack = goal_of_attack(experiment)
    if attack:
        table["attack"] = attack
    return table


def goal_of_attack(experiment: Experiment) -> Changes | None:
    """Return the attack on data with an attack's sources, targets and trigger, and nothing else.

    It is equal for equal goals; None for an attack that reduces the accuracy alone.
    """
    resolved = experiment.resolved
    poison = resolved.poison
    if poison is None:
        return None
    if resolved.wanted_answers is not None:
        return poison.settings
    goal = resolved.goal
    trigger = resolved.trigger
    pairs = [list(pair) for pair in zip(goal.sources, goal.targets, strict=False)]
    if trigger is None and len(pairs) == 1:
        return {"name": "label_flip", "source": pairs[0][0], "target": pairs[0][1]}
    if trigger is None and pairs:
        return {"name": "label_flips", "pairs": pairs}
    if trigger is None and not goal.sources:
        return {"name": "spread_flip", "target": goal.targets[0]} if goal.targets else None

    parameters = plugins.parameters(poison.function)
    kept = {"name", "source", "target"}
    kept |= {name for name, p in parameters.items() if p.default is p.empty}
    if trigger is not None:
        kept |= set(plugins.parameters(trigger))
    return {key: value for key, value in poison.settings.items() if key in kept}
