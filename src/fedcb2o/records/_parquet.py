"""Logs of a seed in columns: a folder with one Parquet file per round, one row per agent.

A file per round needs no footer of an unfinished file, so a kill loses the current round only, and
no more than one round is in memory.
"""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedcb2o.errors import ConfigError
from fedcb2o.records._files import damaged_error
from fedcb2o.records.metrics import CLOCK_COLUMNS
from fedcb2o.safe_files import read_regular

MAX_PAIR_AGENTS = 10_000
"""Agents in a line of pairs.jsonl, which for M = 20 is then shorter than 10 MiB."""
_CONSTANTS = ("round", *CLOCK_COLUMNS)  # values of the round, repeated in each row
MAX_FILE_BYTES = 2**30
_MAX_VALUES = 2**28  # of a round; a file of a few bytes may claim any number


def has_pyarrow() -> bool:
    """Return True if the extra `parquet` is installed."""
    return find_spec("pyarrow") is not None


def require_pyarrow() -> None:
    """Raise ConfigError without the extra `parquet`."""
    if not has_pyarrow():
        raise ConfigError(
            "records in Parquet need an extra, and its module pyarrow is missing: "
            "pip install 'fedcb2o[parquet]'"
        )


def sampled_agents(count: int) -> np.ndarray | None:
    """Return `MAX_PAIR_AGENTS` ids of `count` agents at equal distances; None for all."""
    if count <= MAX_PAIR_AGENTS:
        return None
    return np.arange(MAX_PAIR_AGENTS) * count // MAX_PAIR_AGENTS


def log_files(path: Path) -> list[Path]:
    """Return the files of a log in the order of its rounds."""
    if path.is_dir() and not path.is_symlink():
        return sorted(path.glob(f"{'[0-9]' * 8}.parquet"))
    return [path]


def round_file(path: Path, n: int) -> Path:
    """Return the file of a round, numbered from 1."""
    return path / f"{n:08d}.parquet"


def encode(record: Mapping[str, Any]) -> bytes:
    """Return a round as a Parquet file: its lists are columns, its numbers constant columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    lists = {name: _column(values) for name, values in record.items() if name not in _CONSTANTS}
    count = len(next(iter(lists.values())))
    constants = {name: record[name] for name in _CONSTANTS if name in record}
    columns = {name: pa.repeat(value, count) for name, value in constants.items()}
    columns["agent"] = pa.array(np.arange(count, dtype=np.int32))
    sink = pa.BufferOutputStream()
    # A dictionary of random ids or losses is as long as they are.
    pq.write_table(
        pa.table({**columns, **lists}), sink, compression="zstd", use_dictionary=[*constants]
    )
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _column(values: Any) -> Any:
    """Convert numbers, or ragged lists with `values` and `sizes`; what is not finite is null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if hasattr(values, "sizes"):
        is_float = np.issubdtype(values.values.dtype, np.floating)
        flat = _column(values.values.astype(np.float32 if is_float else np.int32))
        ends = np.cumsum(values.sizes, dtype=np.int32)
        return pa.ListArray.from_arrays(np.concatenate([[0], ends]).astype(np.int32), flat)
    column = pa.array(values, from_pandas=True)
    if pa.types.is_null(column.type):  # else the type would depend on the round
        column = column.cast(pa.float64())
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_finite(column), column, None)
    return column


def read_rounds(
    path: Path, *, skip: int = 0, stop_at_damage: bool = False
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Read the rounds of a log with their files; of pairs the agents that lines would have."""
    require_pyarrow()
    for file in log_files(path)[skip:]:
        try:
            content = read_regular(file, MAX_FILE_BYTES)
            record = _decode(content, path.stem == "pairs")
            if record["round"] != int(file.stem):
                raise ValueError(f"it holds round {record['round']}")
        except (OSError, ValueError, KeyError) as error:
            if stop_at_damage:
                return
            raise damaged_error(path, f"{file.name} is no record of a round ({error})") from error
        yield content, record


def _decode(content: bytes, is_sampled: bool) -> dict[str, Any]:
    """Return the record in a file, with lists as in JSON."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pq.ParquetFile(pa.BufferReader(content))
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    counts = [group.column(i).num_values for group in groups for i in range(group.num_columns)]
    if sum(counts) > _MAX_VALUES:
        raise ValueError(f"more than {_MAX_VALUES} values")
    # Threads of a reader would outlive it, and a later fork of workers could hang.
    table = file.read(use_threads=False)
    names = [name for name in _CONSTANTS if name in table.schema.names]
    record: dict[str, Any] = {name: table[name][0].as_py() for name in names}
    table = table.drop_columns(["agent", *names])
    agents = sampled_agents(len(table)) if is_sampled else None
    if agents is not None:
        table = table.take(agents)
        record["agents"] = agents.tolist()
    record.update(table.to_pydict())
    return record
