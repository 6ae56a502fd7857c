"""An algorithm of any aggregation rule."""

import functools
from typing import Any, Literal

from fedcb2o import plugins
from fedcb2o.errors import ConfigError
from fedcb2o.federated import aggregation
from fedcb2o.federated import selection as _selections
from fedcb2o.federated.aggregation import base, preaggregation, robust_rule
from fedcb2o.federated.algorithm_spec import Algorithm
from fedcb2o.federated.algorithms.base import require_mixing_factor
from fedcb2o.federated.types import BATCHED, STATEFUL
from fedcb2o.plugins import PluginChoice


def by_rule(
    *,
    rule: PluginChoice,
    selection: PluginChoice = "uniform",
    own_model: Literal["excluded", "judged"] | None = None,
    pre_step: PluginChoice | None = None,
    needs_losses: bool | None = None,
    mixing_factor: float = 1.0,
) -> Algorithm:
    """Any rule over the received models, with any selection.

    A robust rule works on the received models and, unless `own_model` is "excluded", on the agent's own, after a
    `pre_step` such as "nnm"; any other rule does what it says. `judges=False` saves the evaluation of the received
    models where neither rule nor selection looks at losses; of a robust rule it is known.
    """
    select = _selections.resolve_selection(selection)
    weigh = plugins.resolve_and_bind("rule", rule, aggregation, deferred=("f",))
    made = functools.partial(
        Algorithm, select=select, lambda1=1.0, mixing_factor=require_mixing_factor(mixing_factor)
    )
    if (form := base.RULE_SIGNATURE.get(weigh)) is None:
        if own_model is not None or pre_step is not None:
            raise ConfigError(
                "`own_model` and `pre_step` go with robust rules, and this one weighs by itself"
            )
        plugins.bind("rule", weigh.func, weigh.keywords)
        memory = STATEFUL.get(weigh)
        if memory is not None and BATCHED.get(weigh):
            raise ConfigError(
                "a rule with a memory is asked for one agent at a time: declare `remembers` or `together`"
            )
        before = memory is not None and memory.uses_previous
        return made(
            rule=weigh,
            needs_losses=needs_losses is not False,
            keeps_previous=before,
            is_stateful=memory is not None,
        )
    prepared = (
        None
        if pre_step is None
        else plugins.resolve_and_bind("pre-step", pre_step, preaggregation, deferred=("f",))
    )
    seen = set(robust_rule.extra_inputs(weigh))
    if prepared is not None and seen - {"progress", "n", "draw"}:
        raise ConfigError(
            f"a `pre_step` mixes models, and the rule looks at {min(seen)} of each single one"
        )
    if needs_losses is None:
        by_chance = getattr(select, "func", select) in (_selections.uniform, _selections.everyone)
        needs_losses = not by_chance or bool({"losses", "entropies"} & seen)
    return made(
        rule=functools.partial(
            robust_rule.apply_robust_rule,
            rule=weigh,
            own_model=own_model or "judged",
            pre_step=prepared,
        ),
        needs_losses=needs_losses,
        keeps_previous="before" in form.own_rows,
        validate_budget=functools.partial(_validate_budget, weigh, own_model, prepared),
    )


def _validate_budget(
    rule: functools.partial[Any],
    own_model: str | None,
    pre_step: functools.partial[Any] | None,
    budget: int,
) -> None:
    """Raises ConfigError where a rule does not admit the f that it was given, even if everybody answers."""
    own = int(own_model != "excluded" or "own" in base.signature_of(rule).own_rows)
    for function in (rule, pre_step):
        if function is not None and "f" in function.keywords:
            base.validate_byzantine_count(function, function.keywords["f"], budget + own)
