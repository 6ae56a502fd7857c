"""Prompt sensitivity: the loss increase where neighbouring tokens of prompts are exchanged."""

import functools
from typing import Annotated

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from fedcb2o.federated.criteria.class_losses import MAX_LOSS, required_losses
from fedcb2o.federated.types import CriterionInput, batched
from fedcb2o.pretrained import PAD


@batched
def prompt_sensitivity(
    inputs: CriterionInput,
    *,
    answer: Annotated[int, Field(ge=1)],
    every: Annotated[int, Field(ge=2)] = 4,
) -> Float[Tensor, "*a m"]:
    """Compare the loss increases of language models where tokens of prompts are exchanged.

    The value is relative to the increase of the agent's own model. A model that depends on single
    tokens, as one with a backdoor may, loses more. A phrase that no prompt of the agent contains is
    not found. The exchanged tokens are the same in every round. All models are evaluated once more.

    Args:
        answer: Number of places of an answer, which stays as it is.
        every: Distance between two exchanges; 2 exchanges all tokens of a prompt.

    Raises:
        ConfigError: No losses are evaluated.
    """
    losses, own = required_losses(inputs)
    everyone = inputs.received.with_own(inputs.own_entry)
    transform = functools.partial(_exchange_tokens, answer=answer, every=every)
    base = torch.cat([losses.mean, own.mean], -1)
    increase = inputs.losses_of(everyone, transform).mean - base
    gap = increase[..., :-1] - increase[..., -1:].clamp(max=MAX_LOSS)
    return gap.masked_fill(gap.isnan(), torch.inf)


def _exchange_tokens(x: Int[Tensor, "n t"], *, answer: int, every: int) -> Int[Tensor, "n t"]:
    """Exchange tokens of prompts with their left neighbours, counted from the end."""
    last = x.shape[1] - answer - 1
    right = torch.arange(last, 0, -every, device=x.device)
    left = right - 1
    # Padding stays where it is.
    is_exchanged = (x[:, left] != PAD) & (x[:, right] != PAD)
    changed = x.clone()
    changed[:, left] = torch.where(is_exchanged, x[:, right], x[:, left])
    changed[:, right] = torch.where(is_exchanged, x[:, left], x[:, right])
    return changed
