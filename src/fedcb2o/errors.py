"""Exceptions that the user can correct, each with a cure.

The command line prints their text in one line and exits with their status: 3 for RemovedError, 2
for all others.

    FedCB2OError
    ├── ConfigError (ValueError)      settings
    ├── DataError (ValueError)        data sets
    └── RunError (RuntimeError)       runs
        ├── records._files.DamagedError                  a file that fails its checksum
        ├── simulation.rounds.WorkerLostError            a lost part of an engine
        ├── parallel._process_pool.WorkerProcessError    a worker process that died
        └── RemovedError                                 a peer that is no member any more

Two exceptions do not reach the user: `peer.wire.protocol.MalformedError` (bytes that are no valid
message) and `peer.wire.client.StoppedError` (the agent was asked to stop).

Example:
    >>> try:
    ...     raise ConfigError("`budget` must be between 1 and num_agents - 1 = 29, got 40")
    ... except FedCB2OError as error:
    ...     print(error)
    `budget` must be between 1 and num_agents - 1 = 29, got 40
"""

from typing import TypeVar

T = TypeVar("T")


class FedCB2OError(Exception):
    """An error that the user can correct.

    Its text names the fault, the place and the cure.

    Attributes:
        exit_status: Exit status of the command line.
    """

    exit_status = 2


class ConfigError(FedCB2OError, ValueError):
    """An invalid setting, such as an unknown key or an unsuitable plug-in."""


class DataError(FedCB2OError, ValueError):
    """A missing, truncated, too small or unreadable data set."""


class RunError(FedCB2OError, RuntimeError):
    """A run that cannot start, continue or be read."""


class RemovedError(RunError):
    """A peer that the other members removed or changed: to start it again is useless."""

    exit_status = 3


def describe_type(value: object) -> str:
    """Return "a list" or "None": a function without `return` returns None."""
    return "None" if value is None else f"a {type(value).__name__}"


def require(name: str, value: T, is_valid: bool, requirement: str) -> T:
    """Return a valid value; raise ConfigError for one that is not as `requirement` says."""
    if not is_valid:
        raise ConfigError(f"`{name}` must be {requirement}, got {value}")
    return value
