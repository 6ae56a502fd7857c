"""Test vectors in vectors.json, compared with the code and with the independent client."""

import hashlib
import json
from pathlib import Path

import numpy as np
from tests.external import client
from tests.peer import vectors

from fedcb2o.peer.wire._zenoh_messages import BatchDecoder, Final, Query, Reply

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


def test_the_decoder_reads_the_batches_of_a_link():
    decoded = {
        name: list(BatchDecoder(2**10, b"fedcb2o/agents/1").decode(bytes.fromhex(text)[2:]))
        for name, text in WRITTEN["link"].items()
        if not name.startswith("sha256")
    }
    assert decoded["query"] == [Query(5, True, b"request")]
    assert decoded["reply"] == [Reply(5, b"answer")]
    assert decoded["final"] == [Final(5)]
    assert decoded["keep-alive"] == []
    assert len(decoded["declarations"]) == 3
