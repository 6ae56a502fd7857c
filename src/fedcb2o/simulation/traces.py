"""Speeds, links and presence of agents: constant values, log-normal draws, or a file of traces.

A file of traces is a CSV table with one row per agent and any of the columns of `COLUMNS`. The
column `online` has the agent's sessions in seconds, such as `0-3600 7200-9000`.
"""

import csv
import functools
import io
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Bool, Float
from pydantic import Field, model_validator

from fedcb2o.errors import ConfigError
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.sections import Section, key_field
from fedcb2o.rng import stream
from fedcb2o.safe_files import open_regular

Positive = Annotated[float, Field(gt=0)]

_NUMBERS = ("seconds_per_sample", "latency", "upload", "download")
COLUMNS = (*_NUMBERS, "online")
"""Columns of a file of traces."""

_MAX_BYTES = 2**30
_MAX_CHANGES = 2**27  # of the presence of all agents: a GiB


class ClockSection(Section):
    """The simulated time of a run: computation, downloads and presence of each agent."""

    mode: Annotated[
        Literal["synchronous", "asynchronous"],
        key_field(
            '"synchronous": all agents begin a round together. "asynchronous": each agent begins '
            "its next round when it has finished one"
        ),
    ] = "synchronous"
    deadline: Annotated[
        Positive | None,
        key_field(
            "seconds after which a synchronous round ends; an asynchronous agent waits for models "
            "as long",
            values="above 0",
            default="no limit",
        ),
    ] = None
    interval: Annotated[
        Positive | None,
        key_field(
            'seconds that a "round" of an asynchronous run lasts, the resolution of its time',
            values="above 0",
            default="needed where asynchronous",
        ),
    ] = None
    seconds_per_sample: Annotated[
        float, key_field("the median time of a sample in LocalUpdate", gt=0)
    ] = 0.001
    speed_spread: Annotated[
        float,
        key_field("the standard deviation of its logarithm over the agents, log-normal", ge=0),
    ] = 0.0
    latency: Annotated[
        float, key_field("seconds that each of both agents adds to a download", ge=0)
    ] = 0.05
    upload: Annotated[float, key_field("the median bytes per second that agents send", gt=0)] = 1e6
    download: Annotated[
        float, key_field("the median bytes per second that agents receive", gt=0)
    ] = 5e6
    network_spread: Annotated[
        float,
        key_field("the standard deviation of the logarithm of both, one factor per agent", ge=0),
    ] = 0.0
    online: Annotated[
        Positive | None,
        key_field(
            "mean seconds that agents are online, exponential",
            values="above 0",
            default="always online",
        ),
    ] = None
    offline: Annotated[
        Positive | None,
        key_field(
            "mean seconds that they are offline, exponential",
            values="above 0",
            default="needed with `online`",
        ),
    ] = None
    period: Annotated[
        Positive | None,
        key_field(
            "seconds after which the sessions repeat",
            values="above 0",
            default="needed with `online`; the last end of a session of `traces`",
        ),
    ] = None
    model_bytes: Annotated[
        int | None,
        key_field("bytes of a model on the network", ge=1, values="from 1", default="4 d"),
    ] = None
    traces: Annotated[
        str | None,
        key_field(
            "a CSV file whose columns replace the keys of the same names, [see below](#the-clock)",
            values="a path",
        ),
    ] = None
    draw_traces: Annotated[
        bool, key_field("true: each agent draws a row of `traces`, of which there may be few")
    ] = False

    @model_validator(mode="after")
    def _check_keys(self) -> "ClockSection":
        if (self.interval is not None) != (self.mode == "asynchronous"):
            raise ValueError(
                '`clock.interval` goes with `clock.mode` = "asynchronous", and is needed there'
            )
        if (self.online is None) != (self.offline is None):
            raise ValueError("`clock.online` and `clock.offline` go together: give both or none")
        if self.online is not None and self.period is None:
            raise ValueError(
                "`clock.online` needs `clock.period`, after which the sessions repeat: take at "
                "least the length of the run"
            )
        if self.period is not None and self.online is None and self.traces is None:
            raise ValueError("`clock.period` goes with `clock.online` or `clock.traces`")
        if self.draw_traces and self.traces is None:
            raise ValueError("`clock.draw_traces` needs `clock.traces`")
        return self


@dataclass(frozen=True, kw_only=True)
class Traces:
    """The devices and links of all agents.

    `changes` are the ascending times at which an agent comes and goes, in seconds up to `period`,
    after which they repeat; None for agents that are always online.
    """

    seconds_per_sample: Float[np.ndarray, " N"]
    latency: Float[np.ndarray, " N"]
    upload: Float[np.ndarray, " N"]
    download: Float[np.ndarray, " N"]
    starts_online: Bool[np.ndarray, " N"]
    changes: Ragged | None = None
    period: float = math.inf

    def crc32(self) -> int:
        """Return a checksum of all values."""
        arrays = [self.seconds_per_sample, self.latency, self.upload, self.download]
        if self.changes is not None:
            arrays += [self.changes.values, self.changes.sizes.astype(float)]
        return functools.reduce(lambda crc, array: zlib.crc32(array.tobytes(), crc), arrays, 0)

    def presence(self, time: float) -> tuple[Bool[np.ndarray, " N"], Float[np.ndarray, " N"]]:
        """Return which agents are online at a time, and until when; infinity to the period's end.

        The time counts from 0, beyond a period too.
        """
        if self.changes is None:
            return self.starts_online, np.full(len(self.starts_online), np.inf)
        phase = time % self.period
        changes = self.changes
        is_past = changes.values <= phase
        count = np.bincount(changes.list_index[is_past], minlength=len(changes))
        until = np.full(len(changes), np.inf)
        has_next = count < changes.sizes
        until[has_next] = changes.values[(changes.offsets + count)[has_next]] - phase + time
        # Each change turns presence over: after an even number it is as at the start.
        return self.starts_online ^ (count % 2 == 1), until


def make_traces(section: ClockSection, seed: int, num_agents: int) -> Traces:
    """Return the traces of all agents: drawn by the section, with the columns of its file."""
    speed = _log_normal(section.speed_spread, seed, "speed", num_agents)
    bandwidth = _log_normal(section.network_spread, seed, "network", num_agents)
    columns = {
        "seconds_per_sample": section.seconds_per_sample * speed,
        "latency": np.full(num_agents, section.latency),
        "upload": section.upload * bandwidth,
        "download": section.download * bandwidth,
    }
    starts_online, changes, period = np.ones(num_agents, dtype=bool), None, math.inf
    if section.online is not None and section.offline is not None:
        period = section.period or math.inf
        starts_online, changes = _draw_sessions(
            section.online, section.offline, period, seed, num_agents
        )

    if section.traces is not None:
        path = Path(section.traces)
        numbers, sessions = read_traces(path)
        count = len(sessions or next(iter(numbers.values())))
        rows = np.arange(count)
        if section.draw_traces:
            rows = stream(seed, "clock", "rows").integers(count, size=num_agents)
        elif count != num_agents:
            raise ConfigError(
                f"{path} has {count} rows for {num_agents} agents: give one row per agent, or set "
                "`clock.draw_traces` = true"
            )
        # What the file has replaces what was drawn.
        columns |= {name: values[rows] for name, values in numbers.items()}
        if sessions is not None:
            starts_online = np.zeros(num_agents, dtype=bool)
            changes = Ragged.from_arrays([sessions[k] for k in rows.tolist()])
            last = float(changes.values.max(initial=0.0))
            period = section.period or last
            if not period >= last > 0:
                raise ConfigError(
                    f"{path} has sessions up to {last:g} seconds, beyond `clock.period` = "
                    f"{period:g}: no agent is online, or take a longer period"
                )
    return Traces(**columns, starts_online=starts_online, changes=changes, period=period)


def read_traces(
    path: Path,
) -> tuple[dict[str, Float[np.ndarray, " k"]], list[Float[np.ndarray, " _c"]] | None]:
    """Read a file of traces: its columns of numbers, and the times of coming and going per row.

    ConfigError names the line and column of a fault.
    """
    try:
        with open_regular(path, follow_links=True) as file:
            # One byte more shows that the file is too long, whatever its size says.
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ConfigError(f"{path} is longer than a GiB")
        lines = list(csv.reader(io.StringIO(content.decode(), newline=""), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"the traces {path} cannot be read: {error}") from error
    header, rows = (lines or [[]])[0], lines[1:]
    if not header or len(set(header)) < len(header) or not set(header) <= set(COLUMNS):
        raise ConfigError(
            f"the first line of {path} must name some of the columns {', '.join(COLUMNS)}, each "
            f"once, got {','.join(header)[:200]!r}"
        )
    if not rows:
        raise ConfigError(f"{path} has no row: give one per agent")
    for line, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise ConfigError(f"{path}, line {line}: {len(row)} cells for {len(header)} columns")
    cells = dict(zip(header, zip(*rows, strict=True), strict=True))
    sessions = None
    if "online" in cells:
        sessions = [np.array(list(_times(path, *cell))) for cell in enumerate(cells["online"], 2)]
    numbers = {name: _column(path, name, cells[name]) for name in header if name != "online"}
    return numbers, sessions


def _column(path: Path, name: str, cells: Sequence[str]) -> Float[np.ndarray, " k"]:
    """Return the numbers of a column."""
    # A rate of 0 would never end; a latency may be 0.
    least = 0.0 if name == "latency" else math.ulp(0.0)
    return np.array([_number(path, line, name, cell, least) for line, cell in enumerate(cells, 2)])


def _number(path: Path, line: int, name: str, cell: str, least: float) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not least <= value < math.inf:
        limit = "from 0" if least == 0 else "above 0"
        raise ConfigError(f"{path}, line {line}: `{name}` must be a number {limit}, got {cell!r}")
    return value


def _times(path: Path, line: int, cell: str) -> Iterator[float]:
    """Yield the times of a row's sessions, which ascend."""
    last = -1.0
    for session in cell.split():
        for part in session.split("-", 1):
            time = _number(path, line, "online", part, 0.0)
            if time <= last:
                raise ConfigError(
                    f"{path}, line {line}: the times of `online` must ascend, got {session!r}"
                )
            last = time
            yield time
        if "-" not in session:
            raise ConfigError(
                f"{path}, line {line}: a session of `online` is START-END, got {session!r}"
            )


def _log_normal(spread: float, seed: int, name: str, count: int) -> Float[np.ndarray, " N"]:
    """Return factors whose logarithms are normal, with median 1."""
    return np.exp(spread * stream(seed, "clock", name).standard_normal(count))


def _draw_sessions(
    online: float, offline: float, period: float, seed: int, count: int
) -> tuple[Bool[np.ndarray, " N"], Ragged]:
    """Draw who is online at the start, and the times of coming and going, of all agents."""
    if 2 * count * period / (online + offline) > _MAX_CHANGES:
        raise ConfigError(
            f"agents come and go more than {_MAX_CHANGES} times: take longer `clock.online` and "
            "`clock.offline`, or a shorter `clock.period`"
        )
    draw = stream(seed, "clock", "sessions")
    is_online = starts_online = draw.random(count) < online / (online + offline)
    times: list[np.ndarray] = []
    agents: list[np.ndarray] = []
    # Sessions have no memory: the rest of one at the start is as long as a whole one.
    time = np.zeros(count)
    while (time < period).any():
        time = time + draw.standard_exponential(count) * np.where(is_online, online, offline)
        is_online = ~is_online
        left = np.flatnonzero(time < period)
        agents.append(left)
        times.append(time[left])
    order = np.concatenate(agents).argsort(kind="stable")
    sizes = np.bincount(np.concatenate(agents), minlength=count)
    return starts_online, Ragged(np.concatenate(times)[order], sizes)
