"""Test vectors of docs/protocol.md other than messages: run id and theta_0.

`python -m tests.peer.vectors > tests/peer/vectors.json` regenerates them.
"""

import hashlib
import json
from typing import Any

import torch

from fedcb2o.nn import architectures, parameters
from fedcb2o.peer.membership import versions
from fedcb2o.rng import stream

FIXED = {"protocol": 1, "name": "vectors", "seed": 7, "rounds": 3, "share": 0.0, "lag": 5}
MEMBERS = [
    {"id": 0, "name": "a", "endpoint": "192.0.2.1:7447", "key": "QQ==", "root": "root of a"},
    {"id": 1, "name": "b", "endpoint": "[2001:db8::1]:7447", "key": "Qg==", "root": "root of b"},
]


def run_vector() -> dict[str, Any]:
    """Return a placeholder federation and the hash of its first version."""
    version = versions.Version(members=MEMBERS)
    (digest,) = versions.version_digests(FIXED, [version])
    return {"federation": {**FIXED, "version": 1, "members": MEMBERS}, "run": digest.hex()}


def theta_vector() -> dict[str, Any]:
    """Return the initial model of a network with 2 hidden units on samples of 3 numbers."""
    build = lambda: architectures.mlp([3], 2, hidden=[2])  # noqa: E731
    theta = parameters.flatten(parameters.initialise(build, stream(7, "model")))
    name = repr((7, "model"))
    return {
        "seed": 7,
        "name": name,
        "key": hashlib.blake2b(name.encode(), digest_size=16).hexdigest(),
        "manual_seed": int(stream(7, "model").integers(2**63)),
        "theta_0": theta.to(torch.float32).numpy().astype("<f4").tobytes().hex(),
        "base": hashlib.sha256(theta.numpy().astype("<f4").tobytes()).hexdigest(),
    }


def all_vectors() -> dict[str, Any]:
    """Return all vectors by kind."""
    return {"run": run_vector(), "theta_0": theta_vector()}


if __name__ == "__main__":
    print(json.dumps(all_vectors(), indent=1))
