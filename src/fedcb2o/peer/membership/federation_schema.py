"""Sections of federation.toml as plain values; the file's sender is not trusted."""

import math
import unicodedata
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from fedcb2o.federated.sections import Section

AGREED_AGENT_KEYS = (
    "budget",
    "validation",
    "split",
    "hold_out",
    "validation_loss",
    "loss_groups",
    "initialisation",
    "graph",
)
"""Keys of an experiment's [agents] that peers agree on; the others describe simulated agents."""
KERNEL_KEYS = ("linear", "layout", "convolution")

_MAX_SAMPLE_VALUES = 2**27
_MAX_NUMBER = 10**6
_MAX_LAYERS = 1000
_LIMITS = {
    **dict.fromkeys(("bins", "iterations", "steps", "tiles", "window"), 10**4),
    **dict.fromkeys(("criterion_from_round", "checkpoint_every"), 2**31),
    **dict.fromkeys(("local_steps", "batch_size"), 2**31),
}
"""Largest whole numbers of parameters for which another limit than `_MAX_NUMBER` holds."""

_PositiveInt32 = Annotated[int, Field(ge=1, lt=2**31)]
_Shape = Annotated[tuple[_PositiveInt32, ...], Field(strict=False, max_length=8)]


class Limits(Section):
    """Limits of a node's answers per minute and simultaneous uploads."""

    answers_per_minute: Annotated[int, Field(ge=1, le=10**9)] = 6000
    uploads: Annotated[int, Field(ge=1, le=1000)] = 8
    per_peer: Annotated[int, Field(ge=1, le=1000)] = 4

    @classmethod
    def for_model(cls, size: int, round_seconds: float) -> "Limits":
        """Compute limits that allow to download a model twice a round.

        At least 300 answers a minute are allowed, because a peer that is behind does not wait for
        the end of a round. `size` is the number of bytes of the encoded model.
        """
        per_round = 2 * (size // 2**20 + 5)  # chunks and other requests
        maximum = cls.model_fields["answers_per_minute"].default
        if round_seconds > 60 * per_round / maximum:
            maximum = math.ceil(60 * per_round / round_seconds)
        return cls(answers_per_minute=max(maximum, 300))


class SampleSchema(Section):
    """Format of all samples: classes, or the shape of predicted numbers."""

    shape: _Shape
    # Type and scale as of `data.SampleValues`; None in the file of a former release.
    values: Literal["bytes", "unit", "numbers"] | None = None
    class_names: Annotated[tuple[str, ...], Field(strict=False, max_length=100_000)] = ()
    target: _Shape | None = None

    @field_validator("shape", "target")
    @classmethod
    def _check_size(cls, shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if shape is not None and math.prod(shape) > _MAX_SAMPLE_VALUES:
            raise ValueError(f"it has more than {_MAX_SAMPLE_VALUES} values")
        return shape

    @field_validator("class_names")
    @classmethod
    def _check_class_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not (name.isprintable() and 0 < len(name) <= 100):
                raise ValueError("class names must have 1 to 100 printable characters")
        if len({unicodedata.normalize("NFC", name) for name in names}) < len(names):
            raise ValueError("class names must be different words")
        return names

    @model_validator(mode="after")
    def _check_target(self) -> "SampleSchema":
        is_regression = self.target is not None
        is_valid = not self.class_names if is_regression else len(self.class_names) >= 2
        if not is_valid:
            raise ValueError(
                "`data` has two or more `class_names`, or none and `target`, the shape of the "
                "numbers to predict"
            )
        return self


class AgreedSettings(Section):
    """Sections of an experiment that all members agree on; `Federation.experiment` checks them."""

    linear: str | None = None
    layout: str | None = None
    convolution: str | None = None
    agents: dict[str, Any]
    model: dict[str, Any]
    training: Annotated[dict[str, Any], Field(default_factory=dict)]
    algorithm: dict[str, Any]

    @model_validator(mode="after")
    def _check_sizes(self) -> "AgreedSettings":
        for key in ("agents", "model", "training", "algorithm"):
            _check_numbers(getattr(self, key), f"experiment.{key}")
        return self


def _check_numbers(value: Any, key: str) -> None:
    """Refuse numbers and lists of built-in functions that would take all memory or never end.

    The parameters of a function that its member allows by --own are not limited.
    """
    if isinstance(value, Mapping):
        is_own = ":" in str(value.get("name"))
        for name, inner in value.items():
            if not is_own or isinstance(inner, Mapping):
                _check_numbers(inner, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        if len(value) > _MAX_LAYERS:
            raise ValueError(f"`{key}` has more than {_MAX_LAYERS} values")
        for inner in value:
            _check_numbers(inner, key)
    elif isinstance(value, int):
        limit = _LIMITS.get(key.rpartition(".")[2], _MAX_NUMBER)
        if abs(value) > limit:
            raise ValueError(f"`{key}` is {value}, and at most {limit} in a federation")


def validate_plain(value: Any, key: str = "", depth: int = 0) -> None:
    """Check that a value can be hashed and shown safely, else raise ValueError."""
    if depth > 20:
        raise ValueError("its tables or lists are nested too deeply")
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if len(name) > 100 or not name.isprintable():
                raise ValueError(f"it has a key that is too long or not printable: {name[:100]!r}")
            validate_plain(inner, name, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            validate_plain(inner, key, depth + 1)
    else:
        _validate_scalar(value, key)


def _validate_scalar(value: Any, key: str) -> None:
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"`{key}` is a number beyond 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"`{key}` is not finite: {value}")
    elif not isinstance(value, str):
        raise ValueError(f"`{key}` is a {type(value).__name__}")
    # A root is PEM, which has several lines; `Member` checks it.
    elif key != "root" and (len(value) > 1000 or not value.isprintable()):
        raise ValueError(f"`{key}` is too long, or no text of one line: {value[:100]!r}")
