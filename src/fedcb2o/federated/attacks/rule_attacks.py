"""Attacks on models that are optimised against one aggregation rule.

As in `model_poisoning`, an attack is a function `(view, draw) -> model [d]` and declares its
knowledge. Each attacker assumes that all attackers of its cluster send a model like its own to a
receiver that also gets all benign models.

Example:
    >>> line_search(lambda t: -(t - 3) ** 2, evaluations=20, start=0.0, step=1.0, ratio=0.8) > 2.8
    True
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.errors import ConfigError, require
from fedcb2o.federated import aggregation
from fedcb2o.federated.adversary import AttackView, knows
from fedcb2o.federated.aggregation import base, gram_rules, preaggregation, robust_rule
from fedcb2o.federated.aggregation.gram_matrix import gram
from fedcb2o.federated.guards.acceptance import is_acceptable, max_abs
from fedcb2o.plugins import PluginChoice

__all__ = ["fang_krum", "fang_trimmed_mean", "optimal_alie", "optimal_ipm"]


@knows("benign")
def optimal_alie(
    view: AttackView,
    draw: np.random.Generator,
    *,
    rule: PluginChoice = "mean",
    pre_step: PluginChoice | None = None,
    evaluations: int = 20,
    start: float = 0.0,
    step: float = 10.0,
    ratio: float = 0.8,
    correction: Literal[0, 1] | None = None,
) -> Float[Tensor, " d"]:
    """Publish the benign mean plus the number of deviations that harms a rule most.

    ALIE with a line search: the number z of standard deviations is that at which the rule's
    aggregate is farthest from the benign mean. Baruch, Baruch and Goldberg (NeurIPS 2019);
    Shejwalkar and Houmansadr (NDSS 2021); the search is that of ByzFL (`line_search`).

    Args:
        draw: Source of randomness, for a pre-step that needs it.
        rule: Rule to harm; "server" for that of the run's server.
        start: First number of deviations.
        step: First step of the search; not 0.
        ratio: Factor of a step that brings no progress, above 0.5 and below 1.
        correction: Subtracted from the number of models in the deviation, 0 by default; 1 in ByzFL.

    Raises:
        ConfigError: A parameter is invalid, or the rule reads more than models.
    """
    models = _finite_models(view)
    defence = _defence(view, draw, len(models), rule, pre_step)
    search = {"evaluations": evaluations, "start": start, "step": step, "ratio": ratio}
    deviation = models.std(0, correction=min(correction or 0, len(models) - 1))
    return _most_harmful(models, models.mean(0), deviation, defence, search)


@knows("benign")
def optimal_ipm(
    view: AttackView,
    draw: np.random.Generator,
    *,
    rule: PluginChoice = "mean",
    pre_step: PluginChoice | None = None,
    evaluations: int = 20,
    start: float = 0.0,
    step: float = 10.0,
    ratio: float = 0.8,
) -> Float[Tensor, " d"]:
    """Reverse the benign mean update by the factor that harms a rule most.

    Inner-product manipulation with a line search over its factor. Xie, Koyejo and Gupta (UAI 2020);
    the search is that of ByzFL (`line_search`).

    Args:
        draw: Source of randomness, for a pre-step that needs it.
        rule: Rule to harm; "server" for that of the run's server.
        start: First factor.
        step: First step of the search; not 0.
        ratio: Factor of a step that brings no progress, above 0.5 and below 1.

    Raises:
        ConfigError: A parameter is invalid, or the rule reads more than models.
    """
    models = _finite_models(view)
    defence = _defence(view, draw, len(models), rule, pre_step)
    search = {"evaluations": evaluations, "start": start, "step": step, "ratio": ratio}
    direction = view.previous - models.mean(0)
    return _most_harmful(models, view.previous, direction, defence, search)


def line_search(
    harm: Callable[[float], float], *, evaluations: int, start: float, step: float, ratio: float
) -> float:
    """Search for the factor of the largest harm: steps that double, then shrink by `ratio`."""
    require("evaluations", evaluations, evaluations >= 1, "1 or more")
    if step == 0:
        raise ConfigError("`step` must not be 0")
    require("ratio", ratio, 0.5 < ratio < 1, "above 0.5 and below 1")
    best = start
    largest = harm(start)
    is_expanding = True
    for _ in range(evaluations - 1):
        value = harm(best + step)
        is_better = value > largest
        if is_better:
            best += step
            largest = value
        # Steps double until one brings no progress; later ones shrink whatever they bring.
        is_expanding = is_expanding and is_better
        step *= 2 if is_expanding else ratio
    return best


@knows("benign")
def fang_krum(
    view: AttackView, draw: np.random.Generator, *, threshold: float = 1e-5
) -> Float[Tensor, " d"]:
    """Deviate from the benign direction as far as Krum still selects the model.

    The model is b - lambda s. b is the attacker's model before the round and s the signs of the
    benign mean update. lambda begins at the bound of the paper's Theorem 1 and is halved until Krum
    selects the model. Fang, Cao, Jia and Gong, "Local Model Poisoning Attacks to Byzantine-Robust
    Federated Learning" (USENIX Security 2020), full knowledge; "OPT" in Flower's baseline FLANDERS.
    All attackers send the same model.

    Args:
        threshold: The search ends at a lambda below this, above 0.
    """
    require("threshold", threshold, threshold > 0, "above 0")
    models = _finite_models(view)
    num_benign = len(models)
    num_malicious = view.num_colluders
    m = num_benign + num_malicious
    f = base.clip_byzantine_count(gram_rules.krum, num_malicious, m)
    signs = (models.mean(0) - view.previous).sign()
    # Inner products of the benign models, the model before the round, and the direction.
    products = gram(models, extra=torch.stack([view.previous, signs]))

    # 1. The upper bound of lambda.
    squared = gram_rules.squared_distances(products)[: num_benign + 1, : num_benign + 1]
    nearest = squared[:num_benign, :num_benign].sort(1).values[:, 1 : max(2, num_benign - 1)]
    score = float(nearest.sum(1).min())
    farthest = float(squared[:num_benign, num_benign].max())
    d = len(signs)
    step = math.sqrt(score / (max(1, m - 2 * num_malicious - 1) * d)) + math.sqrt(farthest / d)

    # 2. Halve it until Krum selects one of the crafted models, which come first.
    mixing = torch.zeros(m, num_benign + 2, dtype=torch.float64)
    mixing[num_malicious:, :num_benign] = torch.eye(num_benign)
    mixing[:num_malicious, num_benign] = 1.0
    while step > threshold:
        mixing[:num_malicious, num_benign + 1] = -step
        selected = gram_rules.krum(mixing @ products @ mixing.T, f=f)
        if selected[:num_malicious].sum() > 0:
            break
        step /= 2
    return view.previous - step * signs


@knows("benign")
def fang_trimmed_mean(
    view: AttackView, draw: np.random.Generator, *, spread: float = 2.0
) -> Float[Tensor, " d"]:
    """Draw each coordinate just beyond the benign values, against the benign direction.

    Where the benign mean update is positive, the value is below the smallest benign one, from
    there to `spread` times (or 1 / `spread` of) it; elsewhere it is above the largest one. Each
    attacker draws its own. Fang et al. (USENIX Security 2020), full knowledge, against the trimmed
    mean and the median.

    Args:
        spread: Factor b in the paper, above 1.
    """
    require("spread", spread, spread > 1, "above 1")
    models = _finite_models(view)
    is_rising = models.mean(0) > view.previous
    near = models.amax(0).where(~is_rising, models.amin(0))
    # Away from the benign values: down where they rise, so that a positive bound is divided.
    factor = torch.where((near > 0) == is_rising, 1 / spread, spread)
    share = torch.from_numpy(draw.random(len(near), dtype=np.float32)).to(near)
    return near + share * (factor - 1) * near


def _finite_models(view: AttackView) -> Float[Tensor, "b d"]:
    """Return the benign models that are finite; without one, the attacker's model before."""
    # Benign agents may diverge, too, and one infinite number would spoil each aggregate.
    models = view.benign()
    finite = models[models.isfinite().all(1)]
    return finite if len(finite) else view.previous.unsqueeze(0)


def _most_harmful(
    models: Float[Tensor, "b d"],
    origin: Float[Tensor, " d"],
    direction: Float[Tensor, " d"],
    defence: Callable[[Float[Tensor, " d"], Float[Tensor, "b d"]], Float[Tensor, " d"]],
    search: Mapping[str, Any],
) -> Float[Tensor, " d"]:
    """Return origin + t direction with the t at which the aggregate is farthest from the mean."""
    mean = models.mean(0)

    def harm(factor: float) -> float:
        crafted = origin + factor * direction
        # Receivers refuse such a model, so it does no harm.
        if not is_acceptable(max_abs(crafted.unsqueeze(0), [0])).all():
            return 0.0
        return float((defence(crafted, models) - mean).norm())

    return origin + line_search(harm, **search) * direction


def _defence(
    view: AttackView,
    draw: np.random.Generator,
    num_benign: int,
    rule: PluginChoice,
    pre_step: PluginChoice | None,
) -> Callable[[Float[Tensor, " d"], Float[Tensor, "b d"]], Float[Tensor, " d"]]:
    """Return the aggregation of a crafted and benign models, of which the last is the receiver."""
    if rule == "server":
        step = view.server
        if step is None:
            raise ConfigError(
                '`rule` = "server" is for an algorithm with a server: name the rule that agents use'
            )
        return lambda crafted, models: step(
            torch.cat([models, crafted.expand(view.num_colluders, -1)])
        )
    bound = plugins.resolve_and_bind("rule", rule, aggregation, deferred=("f",))
    signature = base.RULE_SIGNATURE.get(bound)
    if signature is None or "before" in signature.own_rows or robust_rule.extra_inputs(bound):
        raise ConfigError(
            f"the attack searches against a rule that reads models only, and "
            f"`{base.rule_name(bound)}` reads more"
        )
    f = view.num_colluders
    m = f + num_benign
    mixing: Any = None
    if pre_step is not None:
        pre = plugins.resolve_and_bind("pre-step", pre_step, preaggregation, deferred=("f",))
        num_mixed = base.num_mixed_rows(bound, pre, m)
        mixing = robust_rule.with_byzantine_count(pre, f, num_mixed)
        if "gram" not in plugins.positional_inputs(pre.func):
            mixing = mixing(num_mixed, draw)
            # A step such as bucketing leaves other numbers of rows to the rule.
            m += len(mixing) - num_mixed
    bound = robust_rule.with_byzantine_count(bound, f, m)

    def aggregate(
        crafted: Float[Tensor, " d"], models: Float[Tensor, "b d"]
    ) -> Float[Tensor, " d"]:
        everyone = torch.cat([crafted.expand(f, -1), models])
        return base.apply(bound, everyone, mixing=mixing)

    return aggregate
