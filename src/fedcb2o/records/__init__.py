"""What a run writes and how it is read: one folder a run, in it one a seed; it knows nothing of how a round is made.

A record is lost only with the round it belongs to: `lines` are appended whole, other `files` replaced whole, and a
failed write leaves what was there. `docs/runs.md` describes every file and every name in it.
"""

from fedcb2o.records.files import (
    KINDS,
    DamagedError,
    atomic_write,
    damaged,
    json_of,
    read_json,
    run_again,
    sweep,
    toml_of,
    write_json,
    write_toml,
)
from fedcb2o.records.lines import SEEDED, Records, read_lines
from fedcb2o.records.run import EVALUATED, RESERVED, Run, metric_name, read_config, seeds_in
from fedcb2o.records.scores import last_fifth, last_round, over_agents, summary
from fedcb2o.records.sums import (
    CHECKPOINT,
    DESCRIBED,
    FREE,
    LINES,
    Sums,
    canonical,
    digest,
    flat,
    identity,
    lines_of,
    read_cells,
    read_sealed,
    sum_of_bytes,
    write_sealed,
)
from fedcb2o.records.toml import parse_toml, read_toml

__all__ = [
    "CHECKPOINT",
    "DESCRIBED",
    "EVALUATED",
    "FREE",
    "KINDS",
    "LINES",
    "RESERVED",
    "SEEDED",
    "DamagedError",
    "Records",
    "Run",
    "Sums",
    "atomic_write",
    "canonical",
    "damaged",
    "digest",
    "flat",
    "identity",
    "json_of",
    "last_fifth",
    "last_round",
    "lines_of",
    "metric_name",
    "over_agents",
    "parse_toml",
    "read_cells",
    "read_config",
    "read_json",
    "read_lines",
    "read_sealed",
    "read_toml",
    "run_again",
    "seeds_in",
    "sum_of_bytes",
    "summary",
    "sweep",
    "toml_of",
    "write_json",
    "write_sealed",
    "write_toml",
]
