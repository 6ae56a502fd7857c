"""Reports on what a run cannot keep: too few models for a rule, a large beta, no trusted models.

A run clips the number f of assumed attackers to the largest that the received models admit, and
goes on. The guarantee of the rule does not hold there, and the log says so once.
"""

import dataclasses
import functools
import inspect
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from fedcb2o.federated.aggregation import base, robust_rule
from fedcb2o.federated.decisions import Decisions
from fedcb2o.federated.guards.checks import NO_GUARDS, TOO_NEAR
from fedcb2o.federated.run_spec import Algorithm

_LOGGER = logging.getLogger(__name__)

_ALONE_WEIGHT = 0.95  # of an agent's own model, from which it trains alone
_MIN_ALONE_SHARE = 0.5  # of receivers that train alone, from which it is reported
_MIN_NEAR_SHARE = 0.1  # of receivers whose models are all too near, from which it is reported


def beta_note(algorithm: Algorithm, malicious_share: float) -> str:
    """Describe a `beta` too large for the share of attackers, w_m (eq:beta); else ""."""
    level = getattr(algorithm.weigh.function, "level", None)
    largest = (1 - malicious_share) / 2
    # The theorem does not cover an algorithm with guards at all, as the pages on guards say.
    if level is None or malicious_share <= 0 or algorithm.guards != NO_GUARDS:
        return ""
    if level.keywords["beta"] < largest - 1e-12:
        return ""
    return (
        f"`beta` = {level.keywords['beta']:g} is not below w_b / 2 = {largest:.3g}, which bounds"
        f" beta_0 (eq:beta) for the share {malicious_share:.3g} of attackers: the convergence"
        " theorem (thm:main) does not cover this run"
    )


@dataclasses.dataclass
class _Shortage:
    """Rounds with a shortage, the largest f, and the least number of received models."""

    rounds: int = 0
    f: int = 0
    received: int = np.iinfo(np.int64).max


class Shortfall:
    """Counter of rounds in which a rule assumed fewer attackers, or an agent used no model."""

    def __init__(self, algorithm: Algorithm, malicious_share: float) -> None:
        """Start with no rounds; rules without an `f` assume the share `malicious_share`."""
        self._share = malicious_share
        self._rounds = 0
        self._num_without_trust = 0
        self._num_alone = 0
        self._num_receivers = 0
        self._num_all_near = 0
        self._rule: Any = None
        self._pre_step: Any = None
        self._num_own = 0
        self._shortages: dict[Any, _Shortage] = {}
        function = algorithm.weigh.function
        # Rules other than robust ones assume no number of attackers.
        if algorithm.clusters is not None:
            self._rule = algorithm.clusters.rule
        elif isinstance(function, functools.partial) and (
            inspect.unwrap(function.func) is inspect.unwrap(robust_rule.apply_robust_rule)
        ):
            keywords = function.keywords
            self._rule = keywords["rule"]
            self._pre_step = keywords["pre_step"]
            own_rows = base.signature_of(self._rule).own_rows
            adds_own = keywords["own_model"] == "judged" and "own" not in own_rows
            mixes_own = self._pre_step and "own" in base.signature_of(self._pre_step).own_rows
            self._num_own = int(adds_own or bool(mixes_own))

    def add(self, batches: Sequence[Decisions], is_counted: Bool[np.ndarray, " N"]) -> None:
        """Count one round; `is_counted` is True for benign receivers, by id."""
        self._rounds += 1
        received, assumed, counted, totals, own, near = [], [], [], [], [], []
        for decisions in batches:
            received.append(decisions.received.sizes)
            assumed.append(decisions.f)
            counted.append(is_counted[decisions.agents])
            weights = np.bincount(decisions.received.list_index, decisions.weights, len(decisions))
            totals.append(weights + decisions.own_weight + np.nan_to_num(decisions.previous_weight))
            own.append(decisions.own_weight)
            is_near = decisions.admission == TOO_NEAR
            near.append(np.bincount(decisions.received.list_index, is_near, len(decisions)))
        sizes = np.concatenate(received)
        is_receiver = np.concatenate(counted) & (sizes > 0)
        self._num_receivers += int(is_receiver.sum())
        self._num_all_near += int((is_receiver & (np.concatenate(near) == sizes)).sum())
        self._num_without_trust += int((is_receiver & (np.concatenate(totals) == 0)).sum())
        self._num_alone += int((is_receiver & (np.concatenate(own) > _ALONE_WEIGHT)).sum())
        if self._rule is None:
            return

        f = self._requested(self._rule, sizes)
        self._record(self._rule, f, sizes, is_receiver & (np.concatenate(assumed) < f))
        # Decisions do not record the number that a pre-step assumed, so that it is computed again.
        if self._pre_step and base.signature_of(self._pre_step).max_byzantine is not None:
            f = self._requested(self._pre_step, sizes)
            counts = (sizes + self._num_own).tolist()
            admitted = [
                base.clip_byzantine_count(self._pre_step, k, m)
                for k, m in zip(f.tolist(), counts, strict=True)
            ]
            self._record(self._pre_step, f, sizes, is_receiver & (np.array(admitted) < f))

    def messages(self) -> list[str]:
        """Describe the shortages of all rounds so far, one sentence per kind."""
        messages = []
        if self._num_without_trust:
            messages.append(
                f"in {self._num_without_trust} of {self._num_receivers} cases an agent trusted none"
                " of the models that it received in a round (an empty sub-level set, or no finite"
                " value of the criterion), and kept its own"
            )
        if self._num_alone > _MIN_ALONE_SHARE * self._num_receivers:
            messages.append(
                f"in {self._num_alone} of {self._num_receivers} cases an agent's own model had more"
                f" than {_ALONE_WEIGHT:.0%} of the weight in a round, which is training alone: a"
                " criterion in larger units needs a smaller `alpha`"
            )
        if self._num_all_near > _MIN_NEAR_SHARE * self._num_receivers:
            messages.append(
                f"the guard `min_distance` refused all models of a round in {self._num_all_near} of"
                f" {self._num_receivers} cases: where agents have much the same data, honest models"
                " can be so near, and `guards.min_distance = false` admits them"
            )
        messages += [
            f"{base.rule_name(function)} with f = {shortage.f} needs"
            f" {base.models_needed(function, shortage.f)} models, and in {shortage.rounds} of"
            f" {self._rounds} rounds too few arrived (as few as {shortage.received} at an agent): a"
            " smaller f was assumed there, and the guarantee did not hold"
            for function, shortage in self._shortages.items()
        ]
        return messages

    def log(self) -> None:
        """Log the messages as warnings."""
        for message in self.messages():
            _LOGGER.warning("%s.", message)

    def _requested(
        self, function: functools.partial[Any], sizes: Int[np.ndarray, " a"]
    ) -> Int[np.ndarray, " a"]:
        """Return the number of attackers that each agent should assume."""
        f = function.keywords.get("f")
        if f is not None:
            return np.full(len(sizes), f)
        return np.ceil(self._share * sizes - 1e-9).astype(np.int64)

    def _record(
        self,
        function: functools.partial[Any],
        f: Int[np.ndarray, " a"],
        sizes: Int[np.ndarray, " a"],
        is_short: Bool[np.ndarray, " a"],
    ) -> None:
        if not is_short.any():
            return
        shortage = self._shortages.setdefault(function, _Shortage())
        shortage.rounds += 1
        shortage.f = max(shortage.f, int(f[is_short].max()))
        shortage.received = min(shortage.received, int(sizes[is_short].min()))
