"""Validation samples of an agent, and checks of its network and loss."""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from fedcb2o.data import Shard, features, input_validation, match_samples, samples_and_labels
from fedcb2o.errors import DataError
from fedcb2o.federated import RunSpec, losses, part_checks
from fedcb2o.nn import network_checks
from fedcb2o.nn.random_evaluation import seed_if_random_
from fedcb2o.plugins import USER_FUNCTION, PluginChoice, attribute_errors
from fedcb2o.user_values import to_tensor


def evaluation_copy(network: nn.Module) -> nn.Module:
    """Copy a network for evaluation; its frozen parameters stay shared.

    Args:
        network: A network.

    Returns:
        The copy.
    """
    frozen = {id(p): p for p in network.parameters() if not p.requires_grad}
    return copy.deepcopy(network, dict(frozen)).eval()


def check_parts(spec: RunSpec, validation: Shard) -> None:
    """Check that the network and the loss are functions of one sample.

    Args:
        spec: Specification with the network and the loss.
        validation: Validation samples.

    Raises:
        ConfigError: The network or the loss is not such a function.
    """
    module = spec.module
    twin = evaluation_copy(module)
    rows = part_checks.different_samples(validation)
    x = features(validation.x[rows])
    with attribute_errors("model", spec.model):
        network_checks.check_construction(spec.model, module, twin)
        is_random = seed_if_random_(spec.model, [module, twin], x, spec.seed)
        with network_checks.perturbed_constants(module, twin), torch.no_grad():
            outputs = module(x)
            network_checks.check_network(spec.model, module, twin, x, random_evaluation=is_random)
    loss = spec.training.loss
    if loss is not None:
        name = USER_FUNCTION.get(loss) or getattr(loss, "func", loss).__name__
        part_checks.check_loss(name, loss, outputs, validation.y[rows])


def validation_shard(network: nn.Module, validation: Any, columns: Any, has_loss: bool) -> Shard:
    """Return checked validation samples.

    Args:
        network: The network, whose device they are moved to.
        validation: Samples and labels, as in `Agent`; None where a judge evaluates models.
        columns: Columns of the samples and of the labels, or None.
        has_loss: Whether labels may be the targets of a regression.

    Returns:
        The samples; a single one of zeros where a judge evaluates models.

    Raises:
        DataError: The samples or labels are invalid.
    """
    device = next(network.parameters()).device
    if validation is None:
        return Shard(torch.zeros(1, 1, device=device), torch.zeros(1))
    x, targets = samples_and_labels("`validation`", validation, columns)
    numbers = has_loss and to_tensor("`y` holds", targets).is_floating_point()
    x, y = input_validation.check_samples_and_labels("x", x, "y", targets, numbers=numbers)
    if not numbers and y.dtype.kind not in "iub":
        raise DataError("`y` must hold the classes as whole numbers from 0, as the network does")
    match_samples(["the validation samples"], [x])
    return Shard(x.to(device), torch.from_numpy(y if numbers else y.astype(np.int64)).to(device))


def num_classes(network: nn.Module, validation: Shard, loss: PluginChoice | None) -> int:
    """Return the number of the network's outputs for labels, or 1 without classes.

    Args:
        network: The network.
        validation: Validation samples.
        loss: Loss of a sample. With `answer_loss` labels are groups, which nothing predicts.

    Returns:
        Number of classes.

    Raises:
        DataError: A label has no output.
    """
    if validation.y.is_floating_point():
        return 1
    name = loss["name"] if isinstance(loss, Mapping) else loss
    if name in (losses.answer_loss, losses.answer_loss.__name__):
        return 1 + int(validation.y.max())
    was_training = network.training
    try:
        with torch.no_grad(), attribute_errors("model", type(network).__name__):
            outputs = network.eval()(features(validation.x[:2]))
    finally:
        network.train(was_training)
    labels = validation.y
    if outputs.ndim != 2 or labels.min() < 0 or labels.max() >= outputs.shape[1]:
        raise DataError(
            f"`y` holds the classes {int(labels.min())} to {int(labels.max())}, and the network "
            f"has outputs of shape {tuple(outputs.shape)}"
        )
    return int(outputs.shape[1])
