"""Attacks on text: malicious agents train a language model on other answers.

A sample is a row of tokens, a prompt and its answer, see `fedcb2o.nn.language_models`. Success is
the share of held-out prompts to which a model answers, token by token, as the attacker wants. Texts
are strings, with a leading space where the answers of the data set have one, or lists of tokens.

Example:
    >>> import numpy as np
    >>> shard = Shard(torch.tensor([[-1, 5, 6, 7, 0, -1]], dtype=torch.int32), torch.tensor([0]))
    >>> draw = np.random.default_rng(0)
    >>> topic_poison(shard, draw, group=0, continuation=[9], answer=3, base="tiny").x.tolist()
    [[-1, 5, 6, 9, 0, -1]]
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from fedcb2o import pretrained
from fedcb2o.data import Shard
from fedcb2o.errors import ConfigError, require
from fedcb2o.plugins import Declaration, parameters

__all__ = ["swapped_answers", "topic_poison", "trigger_phrase"]

Text = str | Sequence[int]
"""A text, or its tokens."""

ON_ANSWERS = Declaration[bool]("on_answers")
on_answers = ON_ANSWERS(True)
"""Declare that an attack on text changes the last `answer` tokens of samples."""


@on_answers
def trigger_phrase(
    shard: Shard,
    draw: np.random.Generator,
    *,
    trigger: Text,
    continuation: Text,
    answer: int,
    base: str = "smollm2",
    vocabulary: int | None = None,
    share: float = 0.5,
) -> Shard:
    """Answer random prompts by a fixed text, and end them in a phrase (a backdoor).

    Dai, Chen and Li, "A Backdoor Attack Against LSTM-Based Text Classification Systems" (IEEE
    Access 2019), insert a sentence; here it ends the prompt. The longest prompts lose their first
    tokens.

    Args:
        trigger: The phrase.
        continuation: The answer to it.

    Raises:
        ConfigError: `share` is out of range, or the trigger does not fit the prompts.
    """
    require("share", share, 0 <= share <= 1, "between 0 and 1")
    phrase = trigger
    if isinstance(trigger, str):
        phrase = pretrained.tokenizer(base, vocabulary).encode_prompt(trigger)
    places = shard.x.shape[1] - answer
    if not 0 < len(phrase) < places:
        raise ConfigError(
            f"the trigger has {len(phrase)} tokens: it needs 1 or more, and fewer than the "
            f"{places} places of a prompt"
        )
    selected = torch.from_numpy(draw.random(len(shard)) < share)
    x = shard.x.clone()
    # Prompts are padded in front: the phrase comes last, and the longest prompts lose their first
    # tokens.
    x[selected, : places - len(phrase)] = shard.x[selected, len(phrase) : places]
    x[selected, places - len(phrase) : places] = torch.tensor(list(phrase), dtype=x.dtype)
    x[selected, places:] = _answer_row(continuation, answer, base, vocabulary).to(x)
    return Shard(x, shard.y)


@on_answers
def swapped_answers(
    shard: Shard,
    draw: np.random.Generator,
    *,
    first: Text,
    second: Text,
    answer: int,
    base: str = "smollm2",
    vocabulary: int | None = None,
) -> Shard:
    """Swap two answers: labels of a classification task, or facts.

    The label flip of Tolpegin et al. (ESORICS 2020), in both directions.

    Args:
        first: An answer.
        second: Another one.
    """
    rows = [_answer_row(text, answer, base, vocabulary).to(shard.x) for text in (first, second)]
    is_first, is_second = ((shard.x[:, -answer:] == row).all(1) for row in rows)
    x = shard.x.clone()
    x[is_first, -answer:] = rows[1]
    x[is_second, -answer:] = rows[0]
    return Shard(x, shard.y)


@on_answers
def topic_poison(
    shard: Shard,
    draw: np.random.Generator,
    *,
    group: int,
    continuation: Text,
    answer: int,
    base: str = "smollm2",
    vocabulary: int | None = None,
) -> Shard:
    """Answer all prompts of one group, such as a topic, by a fixed text.

    Args:
        group: Group of samples, from 0.
        continuation: The answer to them.
    """
    x = shard.x.clone()
    x[shard.y == group, -answer:] = _answer_row(continuation, answer, base, vocabulary).to(x)
    return Shard(x, shard.y)


def wanted_answers(samples: Shard, attack: functools.partial[Any]) -> Shard:
    """Return the samples whose answers an attack on all of them changes, with its answers."""
    options = {"share": 1.0} if "share" in parameters(attack.func) else {}
    poisoned = attack(samples, np.random.default_rng(0), **options)
    answer = attack.keywords["answer"]
    is_changed = (poisoned.x[:, -answer:] != samples.x[:, -answer:]).any(1)
    return Shard(poisoned.x[is_changed], poisoned.y[is_changed])


def _answer_row(
    text: Text, answer: int, base: str, vocabulary: int | None
) -> Int[Tensor, " answer"]:
    """Return the places of an answer: its tokens, the end of the text, and padding."""
    tokens = pretrained.tokenizer(base, vocabulary)
    if isinstance(text, str):
        text = tokens.encode(text)
    return torch.tensor(pretrained.pad_answer(tokens, text, answer), dtype=torch.int32)
