"""Models and numbers of samples in Flower's messages, which may be hostile."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from jaxtyping import Float
from torch import Tensor

from fedcb2o.flower._numbers import TensorsByName, floats, median_metrics, row_type

_LOG = logging.getLogger(__name__)

REQUEST = "fedcb2o.request"
DECISION = "fedcb2o.decision"
OWN_MODEL = "fedcb2o.model"
PEER_MODEL = "fedcb2o.peer."

UNREADABLE = (ValueError, TypeError, KeyError, OSError, EOFError, SyntaxError)
"""Errors of an array that another node wrote."""


def usable_updates(replies: Iterable[Message], key: str) -> Iterator[tuple[str, RecordDict]]:
    """Yield sender and content of each reply with one model and a number of samples.

    `key` is the metric of a reply that holds its number of samples. Yields the sender's id and its
    content.
    """
    for reply in replies:
        sender = str(reply.metadata.src_node_id)
        if reply.has_error():
            _LOG.warning("Client %s: %s", sender, reply.error.reason)
        elif len(reply.content.array_records) == 1 and has_sample_count(reply.content, key):
            yield sender, reply.content
        else:
            _LOG.warning(
                "The reply of client %s is refused: it needs a model and `%s`", sender, key
            )


def usable_metrics(replies: Iterable[Message], key: str) -> dict[str, RecordDict]:
    """Return the content of each reply with a number of samples, by its sender's id."""
    contents = {}
    for reply in replies:
        sender = str(reply.metadata.src_node_id)
        if reply.has_error():
            _LOG.warning("Client %s: %s", sender, reply.error.reason)
        elif has_sample_count(reply.content, key):
            contents[sender] = reply.content
    return contents


def by_median(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `FedAvg` with medians of metrics as the default.

    Flower's default is a mean weighted by the numbers of samples that clients claim.
    """
    names = ("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn")
    return {**keywords, **{name: keywords.get(name) or _median_metrics for name in names}}


def _median_metrics(contents: list[RecordDict], samples_key: str) -> MetricRecord:
    """Return medians of the clients' metrics, without their numbers of samples."""
    records = [dict(next(iter(content.metric_records.values()))) for content in contents]
    medians = median_metrics(records)
    medians.pop(samples_key, None)
    return MetricRecord(medians)


def has_sample_count(content: RecordDict, key: str) -> bool:
    """Test if a reply has one record of metrics with a finite, positive sample count."""
    metrics = list(content.metric_records.values())
    if len(metrics) != 1:
        return False
    count = metrics[0].get(key)
    return isinstance(count, int | float) and 0 < count < float("inf")


def first_arrays(content: RecordDict) -> ArrayRecord:
    return next(iter(content.array_records.values()))


def as_row(record: ArrayRecord, like: TensorsByName) -> tuple[str, Float[Tensor, " d"]]:
    """Return the reason to refuse a model, or an empty text, and its floating-point numbers.

    The expected names, shapes and types are those of `like`. The row is undefined for a refused
    model.
    """
    nothing = torch.zeros(0)
    try:
        state = record.to_torch_state_dict()
    except UNREADABLE as error:
        return f"it cannot be read: {error}", nothing
    names = floats(like)
    for name, tensor in names.items():
        if name not in state or state[name].shape != tensor.shape:
            return f"`{name}` is missing, or has another shape", nothing
    dtype = row_type(like)
    theta = torch.cat([state[name].reshape(-1).to(dtype) for name in names])
    reason = "" if theta.isfinite().all() else "it holds numbers that are not finite"
    return reason, theta
