"""A tiny experiment with a random byte-level Llama, for the tests of language models."""

from typing import Any

from tests.tiny import tiny

PLACES = (14, 8)

TALK: dict[str, Any] = tiny(
    rounds=2,
    data={
        "name": "docstrings",
        "task": "library",
        "base": "tiny",
        "samples": 24,
        "libraries": ["networkx", "numpy"],
        "prompt": PLACES[0],
        "answer": PLACES[1],
    },
    agents={"num_clusters": 1, "benign": 3, "malicious": 1, "benign_samples": 8, "budget": 2},
    model={"name": "language_model", "base": "tiny", "answer": PLACES[1], "rank": 2},
    training={"gamma": 0.02, "batch_size": 4, "local_epochs": 1, "loss": "answer_loss"},
    attack={"name": "ipm"},
)
TALK["agents"]["malicious_samples"] = 8
