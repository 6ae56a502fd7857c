"""A text classifier for the measurements of triggers: sentences of docstrings as bags of words.

The class of a sentence is its library. A trigger sets words of the bag. Samples depend on the
installed versions of the libraries, as those of the data set `docstrings` do.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from sklearn.feature_extraction.text import CountVectorizer
from torch import Tensor

import fedcb2o
from fedcb2o.data.sets._docstrings import LIBRARIES, _docstrings
from fedcb2o.federated.attacks.data_poisoning import triggered_by

RARE = "reviewed"
"""A word that gets a place in the bag, though hardly a sentence has it."""


@functools.cache
def _bags(samples: int, words: int) -> tuple[Tensor, list[str], list[str]]:
    """Return a row per sentence, 1 where it has a word; the libraries; and the words."""
    sentences, libraries = [], []
    for library in LIBRARIES:
        found = [docstring.sentence for docstring in _docstrings(library, samples)]
        sentences += found
        libraries += [library] * len(found)
    frequent = CountVectorizer(max_features=words).fit(sentences).get_feature_names_out()
    vocabulary = sorted({*frequent, RARE} - set(LIBRARIES))
    bags = CountVectorizer(vocabulary=vocabulary, binary=True).transform(sentences).toarray()
    return torch.from_numpy(bags).float(), libraries, vocabulary


def sentences(*, samples: int = 300, words: int = 500) -> fedcb2o.Dataset:
    """Return sentences of seven libraries, `samples` each, by their most frequent words."""
    x, libraries, _ = _bags(samples, words)
    # Of sentences with the same words, only the first is kept.
    _, first = np.unique(x.numpy(), axis=0, return_index=True)
    first.sort()
    return fedcb2o.dataset(x[first], [libraries[k] for k in first], test_share=0.3)


def mark_words(
    x: Float[Tensor, "n words"], *, phrase: Sequence[str], samples: int = 300, words: int = 500
) -> Float[Tensor, "n words"]:
    """Add words to sentences."""
    vocabulary = _bags(samples, words)[2]
    marked = x.clone()
    marked[:, [vocabulary.index(word) for word in phrase]] = 1.0
    return marked


@triggered_by(mark_words)
def word_backdoor(
    shard: fedcb2o.Shard,
    draw: np.random.Generator,
    *,
    target: int,
    phrase: Sequence[str],
    share: float,
) -> fedcb2o.Shard:
    """Add words to random sentences and label them as class `target`."""
    is_marked = torch.from_numpy(draw.random(len(shard)) < share)
    x = torch.where(is_marked[:, None], mark_words(shard.x, phrase=phrase), shard.x)
    return fedcb2o.Shard(x, torch.where(is_marked, target, shard.y))


SENTENCES: dict[str, Any] = {
    "data": {"name": "paper.sentences:sentences"},
    "model": {"name": "mlp", "hidden": [32]},
    "training.gamma": 0.5,
    **{"agents.num_clusters": 1, "agents.benign": 7, "agents.malicious": 3},
    **{"agents.benign_samples": 100, "agents.malicious_samples": 100, "agents.budget": 6},
}
WORDS: dict[str, dict[str, Any]] = {
    name: {
        "attack": {
            **{"name": "paper.sentences:word_backdoor", "phrase": phrase},
            **{"target": 3, "share": 0.5},
        }
    }
    for name, phrase in (("rare word", [RARE]), ("common words", ["for", "the", "given"]))
}
