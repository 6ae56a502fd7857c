"""What a run writes and how it is read: one folder a run, in it one a seed; it knows nothing of how a round is made.

A record is lost only with the round it belongs to: `lines` are appended whole, other `files` replaced whole, and a
failed write leaves what was there. `docs/runs.md` describes every file and every name in it.
"""

from fedcb2o.records.files import atomic_write, read_json, write_json, write_toml
from fedcb2o.records.lines import Records
from fedcb2o.records.run import EVALUATED, FREE, Run
from fedcb2o.records.scores import last_fifth, last_round, summary
from fedcb2o.records.toml import parse_toml, read_toml

__all__ = [
    "EVALUATED",
    "FREE",
    "Records",
    "Run",
    "atomic_write",
    "last_fifth",
    "last_round",
    "parse_toml",
    "read_json",
    "read_toml",
    "summary",
    "write_json",
    "write_toml",
]
