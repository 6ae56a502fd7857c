"""The sections of federation.toml, as plain values: whoever sends the file may have put anything into it."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from fedcb2o.experiments.config.settings import Section

AGREED_AGENT_KEYS = (
    "budget",
    "validation",
    "split",
    "hold_out",
    "validation_loss",
    "initialisation",
    "graph",
)
"""The keys of an experiment's [agents] that peers agree on: the others make up who is there, which is known here."""
KERNEL_KEYS = ("linear", "layout", "convolution")


class Limits(Section):
    """What one peer may ask of another: answers a minute, models sent at once to all, and to one."""

    answers_per_minute: Annotated[int, Field(ge=1, le=10**9)] = 6000
    uploads: Annotated[int, Field(ge=1, le=1000)] = 8
    per_peer: Annotated[int, Field(ge=1, le=1000)] = 4

    @classmethod
    def for_model(cls, size: int, round_seconds: float) -> "Limits":
        """Enough for a peer that downloads a model of so many bytes twice a round; a few hundred answers always, since
        who is behind does not wait for its rounds' time."""
        a_round = 2 * (size // 2**20 + 5)  # chunks, and what is asked beside them
        most = cls.model_fields["answers_per_minute"].default
        wanted = (
            math.ceil(60 * a_round / round_seconds) if round_seconds > 60 * a_round / most else most
        )
        return cls(answers_per_minute=max(wanted, 300))


class SampleSchema(Section):
    """What the samples of every member look like: their classes, or the shape of the numbers that are to be told."""

    shape: Annotated[
        tuple[Annotated[int, Field(ge=1, lt=2**31)], ...], Field(strict=False, max_length=8)
    ]
    class_names: Annotated[tuple[str, ...], Field(strict=False, max_length=100_000)] = ()
    target: (
        Annotated[
            tuple[Annotated[int, Field(ge=1, lt=2**31)], ...], Field(strict=False, max_length=8)
        ]
        | None
    ) = None

    @field_validator("class_names")
    @classmethod
    def _check_class_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not (name.isprintable() and 0 < len(name) <= 100):
                raise ValueError("class names must be of 1 to 100 characters that can be printed")
        return names

    @model_validator(mode="after")
    def _check_target(self) -> "SampleSchema":
        fits = len(self.class_names) >= 2 if self.target is None else not self.class_names
        if not fits:
            raise ValueError(
                "`data` has two or more `class_names`, or none and the shape of numbers to be told, `target`"
            )
        return self


class AgreedSettings(Section):
    """The sections of an experiment that all agree on; `Federation.experiment` is what checks them."""

    linear: str | None = None
    layout: str | None = None
    convolution: str | None = None
    agents: dict[str, Any]
    model: dict[str, Any]
    training: Annotated[dict[str, Any], Field(default_factory=dict)]
    algorithm: dict[str, Any]


def validate_plain(value: Any, key: str = "", depth: int = 0) -> None:
    """Raises ValueError for what no federation holds, and what would be a trap where it is hashed or shown."""
    if depth > 20:
        raise ValueError("its tables or lists are nested too deeply")
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if len(name) > 100 or not name.isprintable():
                raise ValueError(f"it has a key that is no word: {name[:100]!r}")
            validate_plain(inner, name, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            validate_plain(inner, key, depth + 1)
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"`{key}` is a number beyond 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"`{key}` is not finite: {value}")
    elif not isinstance(value, str):
        raise ValueError(f"`{key}` is a {type(value).__name__}")
    elif key != "root" and (len(value) > 1000 or not value.isprintable()):
        raise ValueError(f"`{key}` is too long, or no text of one line: {value[:100]!r}")


def user_functions_in(value: Any) -> Iterator[str]:
    """The import paths in the tables of an experiment, with whatever else may be taken for one."""
    if isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from user_functions_in(inner)
    elif isinstance(value, str) and ":" in value:
        yield value
