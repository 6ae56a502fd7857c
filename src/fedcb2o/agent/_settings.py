"""Settings and validation samples of an agent, and the specification that follows from them."""

import copy
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from fedcb2o.data import Shard, features, inputs, match_samples, sources
from fedcb2o.errors import ConfigError, DataError, require
from fedcb2o.federated import loss_groups as group_functions
from fedcb2o.federated import losses, part_checks
from fedcb2o.federated.algorithms.section import AlgorithmSection
from fedcb2o.federated.loss_groups import grouped
from fedcb2o.federated.run_spec import RunSpec, Training
from fedcb2o.federated.sections import AgentsSection, Component, as_component
from fedcb2o.nn import parameters
from fedcb2o.plugins import PluginChoice, attribute_errors, function_name
from fedcb2o.user_values import to_tensor


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of an agent; see `Agent`.

    Numbers out of range are a ConfigError.
    """

    method: Any
    attack: Any
    loss: Any
    loss_groups: Any
    seed: int
    gamma: float
    rounds: int
    num_samples: int
    malicious_share: float
    num_classes: int = 1  # without classes

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, least in (("seed", 0), ("rounds", 1), ("num_samples", 1)):
            value = getattr(self, name)
            require(name, value, is_whole(value, least), f"a whole number from {least}")
        for name in ("gamma", "malicious_share"):
            value = getattr(self, name)
            is_number = isinstance(value, Real) and math.isfinite(value)
            require(name, value, is_number, "a finite number")
        require("gamma", self.gamma, self.gamma > 0, "above 0")
        is_share = 0 <= self.malicious_share < 1
        require("malicious_share", self.malicious_share, is_share, "from 0 and below 1")

    def spec(self, name: str, module: nn.Module) -> RunSpec:
        """Return the specification of a run of two agents.

        An unknown method or loss, or an invalid parameter, is a ConfigError.
        """
        section = AlgorithmSection.model_validate(as_component(self.method))
        algorithm = section.build()
        if algorithm.clusters is not None:
            raise ConfigError(f"the algorithm `{section.name}` has models of clusters")
        if algorithm.guards.exit_test is not False:
            raise ConfigError("`guards.exit_test` trains a second model: this loop is your own")
        loss = _bound("loss", self.loss, losses)
        return RunSpec(
            seed=int(self.seed),
            num_agents=2,
            num_classes=self.num_classes,
            rounds=int(self.rounds),
            # Numbers of agents and budget are set anew in every round.
            agents=AgentsSection(benign=2, malicious=0, budget=1, num_clusters=1),
            model=name,
            module=module,
            training=Training(gamma=float(self.gamma), loss=loss),
            algorithm=algorithm,
            malicious_share=self.malicious_share,
            loss_groups=_bound("loss groups", self.loss_groups, group_functions),
            # Claims of peers are compared as float64, which is exact up to here.
            max_samples=2**53,
        )

    def method_name(self) -> str:
        """Return the name of the method, and of its rule where it has one."""
        section = AlgorithmSection.model_validate(as_component(self.method))
        rule = as_component(section.parameters.get("rule", ""))
        names = [section.name, rule["name"] if isinstance(rule, Mapping) else ""]
        return " with ".join(n if isinstance(n, str) else function_name(n) for n in names if n)


def _bound(kind: str, choice: Any, module: ModuleType) -> Any:
    """Return a chosen function with its checked parameters; None without a choice."""
    if choice is None:
        return None
    return Component.model_validate(as_component(choice)).resolve(kind, module).bound


def is_whole(value: Any, least: int) -> bool:
    """Return whether a value is a whole number of Python or NumPy, at least `least`."""
    is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_number and bool(value >= least)


def evaluation_copy(network: nn.Module) -> nn.Module:
    """Copy a network for evaluation; its frozen parameters stay shared."""
    frozen = {id(p): p for p in network.parameters() if not p.requires_grad}
    return copy.deepcopy(network, dict(frozen)).eval()


def check_parts(spec: RunSpec, validation: Shard) -> bool:
    """Check that the network and the loss are functions of one sample, and the loss groups.

    A network or loss that mixes samples is a ConfigError. Returns whether the network draws random
    numbers in evaluation.
    """
    if spec.loss_groups is not None:
        grouped(spec.loss_groups, validation.x[None], validation.y[None])
    networks = [evaluation_copy(spec.module), evaluation_copy(spec.module)]
    part_checks.check_model(
        spec.model,
        networks,
        validation,
        spec.seed,
        num_classes=spec.num_classes,
        loss=spec.training.loss,
    )
    # The check seeds such a network by hooks.
    return len(networks[0]._forward_hooks) > len(spec.module._forward_hooks)


def validation_shard(network: nn.Module, validation: Any, columns: Any, has_loss: bool) -> Shard:
    """Return checked validation samples.

    They are on the network's device. Where a judge evaluates models there is no validation data,
    and a single sample of zeros takes its place. `has_loss` admits labels that are the targets of a
    regression.
    """
    device = next(network.parameters()).device
    if validation is None:
        return Shard(torch.zeros(1, 1, device=device), torch.zeros(1))
    part = sources.read("`validation`", ("x", "y"), validation, columns=columns)
    numbers = has_loss and to_tensor("`y` holds", part.y).is_floating_point()
    samples, y = inputs.check_part(part, numbers=numbers)
    if not numbers and y.dtype.kind not in "iub":
        raise DataError("`y` must hold the classes as whole numbers from 0, as the network does")
    (x,) = match_samples(["the validation samples"], [torch.from_numpy(samples)])
    if x.dtype == torch.uint8:
        warnings.warn(
            "the validation samples are bytes (uint8), which the agent divides by 255, as "
            "`fedcb2o.run` does: train on x / 255, too, or pass the numbers on which you train",
            stacklevel=3,
        )
    return Shard(x.to(device), torch.from_numpy(y if numbers else y.astype(np.int64)).to(device))


def num_classes(network: nn.Module, validation: Shard, loss: PluginChoice | None) -> int:
    """Return the number of the network's outputs for labels, or 1 without classes.

    With `answer_loss` labels are groups, which nothing predicts. A label without an output is a
    DataError.
    """
    if validation.y.is_floating_point():
        return 1
    name = loss["name"] if isinstance(loss, Mapping) else loss
    if name in (losses.answer_loss, losses.answer_loss.__name__):
        return 1 + int(validation.y.max())
    with (
        parameters.borrowed(network),
        torch.no_grad(),
        attribute_errors("model", type(network).__name__),
    ):
        outputs = network.eval()(features(validation.x[:2]))
    labels = validation.y
    if outputs.ndim != 2 or labels.min() < 0 or labels.max() >= outputs.shape[1]:
        raise DataError(
            f"`y` holds the classes {int(labels.min())} to {int(labels.max())}, and the network "
            f"has outputs of shape {tuple(outputs.shape)}"
        )
    return int(outputs.shape[1])
