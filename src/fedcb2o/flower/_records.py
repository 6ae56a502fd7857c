"""Models and numbers of samples in Flower's messages, which may be hostile."""

import logging
from collections.abc import Iterable, Iterator

import torch
from flwr.app import ArrayRecord, Message, RecordDict
from jaxtyping import Float
from torch import Tensor

_LOG = logging.getLogger(__name__)

TensorsByName = dict[str, Tensor]

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


def has_sample_count(content: RecordDict, key: str) -> bool:
    """Test if a reply has one record of metrics with a finite, positive sample count."""
    metrics = list(content.metric_records.values())
    if len(metrics) != 1:
        return False
    count = metrics[0].get(key)
    return isinstance(count, int | float) and 0 < count < float("inf")


def first_arrays(content: RecordDict) -> ArrayRecord:
    return next(iter(content.array_records.values()))


def _floats(state: TensorsByName) -> TensorsByName:
    return {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}


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
    names = _floats(like)
    for name, tensor in names.items():
        if name not in state or state[name].shape != tensor.shape:
            return f"`{name}` is missing, or has another shape", nothing
    theta = torch.cat([state[name].reshape(-1).float() for name in names])
    reason = "" if theta.isfinite().all() else "it holds numbers that are not finite"
    return reason, theta


def to_row(state: TensorsByName) -> Float[Tensor, " d"]:
    """Return the floating-point numbers of a model."""
    return torch.cat([tensor.reshape(-1).float() for tensor in _floats(state).values()])


def from_row(theta: Float[Tensor, " d"], like: TensorsByName) -> TensorsByName:
    """Return a model by names; arrays of whole numbers are those of `like`."""
    tensors = dict(like)
    start = 0
    for name, tensor in _floats(like).items():
        values = theta[start : start + tensor.numel()]
        tensors[name] = values.reshape(tensor.shape).to(tensor.dtype).clone()
        start += tensor.numel()
    return tensors
