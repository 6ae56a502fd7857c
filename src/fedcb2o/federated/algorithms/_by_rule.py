"""An algorithm that consists of any aggregation rule and any peer selection."""

import functools
from collections.abc import Callable
from typing import Any, Literal

from fedcb2o import plugins
from fedcb2o.errors import ConfigError, require
from fedcb2o.federated import aggregation
from fedcb2o.federated import selection as _selections
from fedcb2o.federated.aggregation import base, preaggregation, robust_rule
from fedcb2o.federated.algorithm2 import RuleWeighing
from fedcb2o.federated.run_spec import Algorithm
from fedcb2o.federated.types import BATCHED, STATEFUL
from fedcb2o.plugins import PluginChoice

_PER_AGENT_INPUTS = {"progress", "n", "draw"}  # inputs that a pre-aggregation step does not mix


def by_rule(
    *,
    rule: PluginChoice,
    selection: PluginChoice = "uniform",
    own_model: Literal["excluded", "judged"] | None = None,
    pre_step: PluginChoice | None = None,
    space: Literal["parameters", "products"] = "parameters",
    needs_losses: bool | None = None,
    mixing_factor: float = 1.0,
) -> Algorithm:
    """Combine any aggregation rule with any peer selection.

    Args:
        rule: Aggregation rule.
        own_model: "excluded" leaves the agent's own model out of a robust rule.
        pre_step: Pre-aggregation step before a robust rule, such as "nnm".
        space: "products" applies a robust rule to the products B A of low-rank adapters in place of
            their factors, and takes the nearest adapters of the same rank. A product of m x n
            numbers is computed for each received model and adapter, and one singular value
            decomposition per adapter.
        needs_losses: False saves the evaluation of the received models, if neither rule nor
            selection reads losses. By default, a robust rule decides it, and other rules get
            losses.
        mixing_factor: Share of the aggregate in the new model, above 0 and at most 1.

    Raises:
        ConfigError: The rule does not go with the other parameters.
    """
    select = _selections.resolve_selection(selection)
    resolved = plugins.resolve_and_bind("rule", rule, aggregation, deferred=("f",))
    require("mixing_factor", mixing_factor, 0 < mixing_factor <= 1, "above 0 and at most 1")
    make = functools.partial(Algorithm, select=select, lambda1=1.0, mixing_factor=mixing_factor)
    if base.RULE_SIGNATURE.get(resolved) is None:
        if own_model is not None or pre_step is not None or space != "parameters":
            raise ConfigError(
                "`own_model`, `pre_step` and `space` go with robust rules, and this rule "
                "computes weights itself"
            )
        return _by_general_rule(make, resolved, needs_losses is not False)

    mixing = None
    if pre_step is not None:
        mixing = plugins.resolve_and_bind("pre-step", pre_step, preaggregation, deferred=("f",))
    inputs = set(robust_rule.extra_inputs(resolved))
    if mixing is not None and inputs - _PER_AGENT_INPUTS:
        raise ConfigError(
            f"a `pre_step` mixes models, and the rule reads {min(inputs)} of each single model"
        )
    has_own = own_model != "excluded" or "own" in base.signature_of(resolved).own_rows
    if mixing is not None and "own" in base.signature_of(mixing).own_rows and not has_own:
        raise ConfigError(
            f"the pre-step `{base.rule_name(mixing)}` clips about the agent's own model, which "
            '`own_model` = "excluded" leaves out'
        )
    # A robust rule declares whether it reads losses; a selection of a user may read them.
    if needs_losses is None:
        reads_losses = bool({"losses", "entropies"} & inputs)
        ignores_losses = (_selections.uniform, _selections.everyone)
        needs_losses = getattr(select, "func", select) not in ignores_losses or reads_losses
    apply_rule = functools.partial(
        robust_rule.apply_robust_rule,
        rule=resolved,
        own_model=own_model or "judged",
        pre_step=mixing,
        space=space,
    )
    return make(
        weigh=RuleWeighing(apply_rule),
        needs_losses=needs_losses,
        reads_previous="before" in base.signature_of(resolved).own_rows,
        validate_budget=functools.partial(_validate_budget, resolved, own_model, mixing),
    )


def _by_general_rule(
    make: Callable[..., Algorithm], rule: functools.partial[Any], needs_losses: bool
) -> Algorithm:
    """Make the algorithm of a rule that computes weights itself."""
    plugins.bind("rule", rule.func, rule.keywords)
    memory = STATEFUL.get(rule)
    if memory is not None and BATCHED.get(rule):
        raise ConfigError(
            "a rule with memory is evaluated for one agent at a time: "
            "declare `stateful` or `batched`"
        )
    return make(
        weigh=RuleWeighing(rule),
        needs_losses=needs_losses,
        reads_previous=memory is not None and memory.uses_previous,
    )


def _validate_budget(
    rule: functools.partial[Any],
    own_model: str | None,
    pre_step: functools.partial[Any] | None,
    budget: int,
) -> None:
    """Check that the rule admits its `f` if every peer answers; raises ConfigError."""
    # The models that the rule gets if every peer answers.
    num_own = int(own_model != "excluded" or "own" in base.signature_of(rule).own_rows)
    for function in (rule, pre_step):
        if function is not None and "f" in function.keywords:
            base.validate_byzantine_count(function, function.keywords["f"], budget + num_own)
