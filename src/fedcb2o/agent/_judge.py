"""Losses from a user's function, for an agent without validation data of its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedcb2o.agent._models import ModelFormat
from fedcb2o.data import Shard
from fedcb2o.errors import ConfigError
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.inference import losses_from_samples
from fedcb2o.federated.types import Losses, Received
from fedcb2o.federated.validation import ValidationOracle
from fedcb2o.plugins import attribute_errors, label
from fedcb2o.user_values import to_tensor

Judge = Callable[[Any], Any]
"""m models -> losses [m, n] on n samples, or these and the class of each sample, [n].

The models are a list of state dicts or, for an agent without a network, an array [m, d].
"""


class JudgeOracle(ValidationOracle):
    """Losses from a user's function."""

    def __init__(self, group: AgentGroup, judge: Judge, model_format: ModelFormat) -> None:
        super().__init__(group, 0)
        self.judge = judge
        self.model_format = model_format

    def losses(self, models: Received, transform: Any = None) -> Losses:
        """Return the losses that the function returns; see `ValidationOracle.losses`.

        The function evaluates on samples of its own, so a criterion that transforms samples is a
        ConfigError.
        """
        if transform is not None:
            raise ConfigError("a criterion that changes samples needs `validation` samples")
        group = self.group
        own = group.models[:1]
        thetas = own.lerp(group.models[models.rows], group.spec.algorithm.guards.interpolation)
        with attribute_errors("judge", label(self.judge)):
            result = self.judge(self.model_format.to_user(thetas))
        labels: Any = None
        if isinstance(result, tuple):
            result, labels = result
        per_sample = to_tensor("the judge returned", result).double()
        if per_sample.ndim != 2 or len(per_sample) != len(thetas):
            raise ConfigError(
                f"the judge returned losses of shape {tuple(per_sample.shape)} for {len(thetas)} "
                "models, expected [m, n]: one row per model, one column per sample"
            )
        # A mean over no samples would be NaN, and every model untrusted.
        if not per_sample.shape[1]:
            raise ConfigError("the judge returned losses on 0 samples, expected 1 or more")
        return losses_from_samples(per_sample, _classes(labels, per_sample.shape[1]))

    def _data(self, count: int | None) -> Shard:
        raise ConfigError("a criterion that looks at samples needs `validation` samples")


def _classes(labels: Any, n: int) -> Tensor:
    """Return the class of each sample; 0 for all without labels."""
    if labels is None:
        return torch.zeros(n, dtype=torch.int64)
    given = to_tensor("the judge returned", labels)
    classes = given.long()
    if classes.shape != (n,) or not classes.eq(given).all() or classes.min() < 0:
        raise ConfigError(f"the judge must return the class of each of {n} samples, from 0")
    return classes
