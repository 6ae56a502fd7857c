"""Models as rows of numbers, metrics and their medians, without Flower's types."""

import statistics
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.federated.evaluation import metrics as metric_functions
from fedcb2o.federated.plugin_outputs import metric_value
from fedcb2o.federated.sections import Component, as_component
from fedcb2o.plugins import PluginChoice
from fedcb2o.records import chosen_metrics

TensorsByName = dict[str, Tensor]
Metric = float | list[float] | list[int]


def floats(state: TensorsByName) -> TensorsByName:
    return {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}


def row_type(state: TensorsByName) -> torch.dtype:
    """Return the type of a model's row: float64 if an array has it, or float32."""
    types = {tensor.dtype for tensor in state.values()}
    return torch.float64 if torch.float64 in types else torch.float32


def to_row(state: TensorsByName) -> Float[Tensor, " d"]:
    """Return the floating-point numbers of a model."""
    dtype = row_type(state)
    return torch.cat([tensor.reshape(-1).to(dtype) for tensor in floats(state).values()])


def from_row(theta: Float[Tensor, " d"], like: TensorsByName) -> TensorsByName:
    """Return a model by names; arrays of whole numbers are those of `like`."""
    tensors = dict(like)
    start = 0
    for name, tensor in floats(like).items():
        values = theta[start : start + tensor.numel()]
        tensors[name] = values.reshape(tensor.shape).to(tensor.dtype).clone()
        start += tensor.numel()
    return tensors


def median_metrics(records: Sequence[Mapping[str, Metric]]) -> dict[str, float | list[float]]:
    """Return the median of each metric that more than half of the clients have a value of.

    Of lists it is the median of each item. NaN, a missing metric and a list of another length are
    no value; `NAME-without-value` is the number of clients without a number, if there are any.
    """
    names = dict.fromkeys(name for record in records for name in record)
    medians: dict[str, float | list[float]] = {}
    for name in names:
        values = [record[name] for record in records if name in record]
        # A number has no length, and a list of one item stays a list.
        sizes = [len(value) if isinstance(value, list) else None for value in values]
        size = statistics.mode(sizes)
        if 2 * sizes.count(size) <= len(records):
            continue
        usable = [v for v, s in zip(values, sizes, strict=True) if s == size]
        width = 1 if size is None else size
        table = torch.tensor(usable, dtype=torch.float64).view(len(usable), width)
        counts = (~table.isnan()).sum(0, keepdim=True)
        ordered = table.sort(dim=0).values  # NaN is last
        low = ordered.gather(0, (counts - 1).clamp(min=0) // 2)
        high = ordered.gather(0, (counts // 2).clamp(max=len(usable) - 1))
        middle = ((low + high) / 2).where(2 * counts > len(records), torch.nan).squeeze(0)
        medians[name] = middle.item() if size is None else middle.tolist()
        if size is None and counts < len(records):
            medians[f"{name}-without-value"] = len(records) - int(counts)
    return medians


def output_metrics(
    outputs: Float[Tensor, "n *C"],
    targets: Shaped[Tensor, "n *target"],
    metrics: Sequence[PluginChoice],
) -> dict[str, float]:
    """Compute metrics of a network's outputs, for a client's `MetricRecord`.

    Args:
        outputs: Outputs of the network, before the softmax.
        targets: Class of each sample, or the numbers to predict.
        metrics: Metrics as in the key `metrics` of a configuration: names, tables or functions.

    Returns:
        Values by name; NaN stands for a metric without a value, such as the AUC of one class.

    Raises:
        ConfigError: A metric, or a parameter of it, is unknown, or is for other targets.

    Example:
        record = MetricRecord({"num-examples": len(y), **output_metrics(network(x), y, ["auc"])})
    """
    values = {}
    for entry in metrics:
        table = dict(as_component(entry))
        column = {"name": plugins.label(table["name"]), "column": table.pop("column", None)}
        table.pop("better", None)
        metric = Component.model_validate(table).resolve("metric", metric_functions).bound
        value = metric_value(metric, outputs.detach().cpu(), targets.cpu())
        (name,) = chosen_metrics([column])
        values[name] = torch.nan if value is None else value
    return values
