"""Files of a run and their readers.

Records do not depend on how a round is computed. A record is lost only with its round: lines of
logs are appended as a whole, other files are replaced as a whole, and a failed write keeps the old
content. `docs/runs.md` describes every file and every name in it.
"""

import importlib
from typing import TYPE_CHECKING

from fedcb2o.printable import one_line
from fedcb2o.records._checksums import (
    BEST_FILE,
    CHECKPOINT_FILE,
    INITIAL_FILES,
    NON_RESULT_SETTINGS,
    Manifest,
    canonical_settings,
    checksum_file,
    flatten,
    is_inside,
    log_checksums,
    read_cells,
    read_json_with_checksum,
    result_settings,
    settings_digest,
    write_json_with_checksum,
)
from fedcb2o.records._files import (
    FILE_SUFFIXES,
    PRIVATE_FILE,
    PRIVATE_FOLDER,
    DamagedError,
    atomic_write,
    check_parts,
    damaged_error,
    exclusive_lock,
    fsync,
    make_folder,
    make_private,
    open_private,
    read_json,
    remove_temporaries,
    rerun_advice,
    to_json,
    to_toml,
    write_json,
    write_toml,
)
from fedcb2o.records._former_settings import current_settings, original_changes
from fedcb2o.records._jsonl import REPRODUCIBLE_LOGS, RoundLog, log_path, read_lines
from fedcb2o.records._parquet import has_pyarrow, require_pyarrow, sampled_agents
from fedcb2o.records.metrics import (
    MATRIX_METRICS,
    METRICS,
    OPTIONAL_METRICS,
    SOURCE_METRICS,
    STANDARD_METRICS,
    Metric,
    chosen_metrics,
)
from fedcb2o.records.names import slug
from fedcb2o.records.toml import parse_toml, read_toml

if TYPE_CHECKING:
    from fedcb2o.records._summary import (
        agent_statistics,
        last_fifth,
        last_round,
        left_out,
        summary,
    )
    from fedcb2o.records.run import (
        RESERVED_COLUMNS,
        Run,
        find_seeds,
        read_config,
        refuse_models,
        set_model_reader,
    )

_READERS = {
    "_summary": ("agent_statistics", "last_fifth", "last_round", "left_out", "summary"),
    "run": (
        "RESERVED_COLUMNS",
        "Run",
        "find_seeds",
        "read_config",
        "refuse_models",
        "set_model_reader",
    ),
}


def __getattr__(name: str) -> object:  # lazy: a relay reads no records, and pandas takes 40 MB
    for module, names in _READERS.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
