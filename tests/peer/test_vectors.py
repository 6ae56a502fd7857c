"""Test vectors in vectors.json, compared with the code and with the independent client."""

import hashlib
import json
from pathlib import Path

import numpy as np
from tests.external import client
from tests.peer import vectors

WRITTEN = json.loads(Path(__file__).with_name("vectors.json").read_text())


def test_the_file_equals_the_output_of_the_command():
    assert json.loads(json.dumps(vectors.all_vectors())) == WRITTEN


def test_the_independent_client_computes_the_run_id():
    assert client.run_id(WRITTEN["run"]["federation"]).hex() == WRITTEN["run"]["run"]


def test_the_random_stream_of_theta_0_follows_the_documentation():
    """BLAKE2b of the name is the key of Philox with counter 0. The seed is its first draw."""
    vector = WRITTEN["theta_0"]
    digest = hashlib.blake2b(b"(7, 'model')", digest_size=16).digest()
    assert vector["key"] == digest.hex()
    philox = np.random.Philox(key=int.from_bytes(digest, "little"), counter=0)
    assert int(np.random.Generator(philox).integers(2**63)) == vector["manual_seed"]
    assert hashlib.sha256(bytes.fromhex(vector["theta_0"])).hexdigest() == vector["base"]
