"""The vectors in vectors.json are those of the code and of the independent client."""

import hashlib
import json
from pathlib import Path

import numpy as np
from tests.external import client
from tests.peer import vectors

from fedcb2o.peer.wire._zenoh_messages import BatchDecoder, Final, Query, Reply

WRITTEN = json.loads(Path(__file__).with_name("vectors.json").read_text())


def test_they_are_what_the_command_writes():
    assert json.loads(json.dumps(vectors.all_vectors())) == WRITTEN


def test_the_independent_client_finds_the_run():
    assert client.run_id(WRITTEN["run"]["federation"]).hex() == WRITTEN["run"]["run"]


def test_the_random_stream_of_theta_0_is_as_the_page_says():
    """BLAKE2b of the name, as the key of Philox with its counter at 0, then one draw."""
    found = WRITTEN["theta_0"]
    digest = hashlib.blake2b(b"(7, 'model')", digest_size=16).digest()
    assert found["key"] == digest.hex()
    philox = np.random.Philox(key=int.from_bytes(digest, "little"), counter=0)
    assert int(np.random.Generator(philox).integers(2**63)) == found["manual_seed"]
    assert hashlib.sha256(bytes.fromhex(found["theta_0"])).hexdigest() == found["base"]


def test_the_batches_of_a_link_are_read_as_they_were_written():
    read = {
        name: list(BatchDecoder(2**10, b"fedcb2o/agents/1").decode(bytes.fromhex(text)[2:]))
        for name, text in WRITTEN["link"].items()
        if not name.startswith("sha256")
    }
    assert read["query"] == [Query(5, True, b"request")]
    assert read["reply"] == [Reply(5, b"answer")]
    assert read["final"] == [Final(5)]
    assert read["keep-alive"] == []
    assert len(read["declarations"]) == 3
