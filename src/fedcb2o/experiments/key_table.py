"""The keys of a configuration, with range, default and meaning."""

from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedcb2o.experiments.config.settings import Experiment, ModelSection
from fedcb2o.federated.algorithms.section import AlgorithmSection
from fedcb2o.federated.attacks.section import AttackSection
from fedcb2o.federated.guards.checks import Guards
from fedcb2o.federated.sections import AgentsSection, Privacy, TrainingSection

_SECTIONS: dict[str, type[BaseModel]] = {
    "": Experiment,
    "agents.": AgentsSection,
    "training.": TrainingSection,
    "training.privacy.": Privacy,
    "model.": ModelSection,
    "algorithm.": AlgorithmSection,
    "algorithm.guards.": Guards,
    "attack.": AttackSection,
}


def key_rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield key, range, default and meaning in Markdown, in the order of a file."""
    for prefix, section in _SECTIONS.items():
        for name, field in section.model_fields.items():
            if field.description:
                yield f"{prefix}{name}", value_range(field), default_text(field), field.description


def value_range(field: FieldInfo) -> str:
    """Describe the values of a key, such as "from 1" or '"random", "stratified"'."""
    text = _texts(field).get("values")
    if text:
        return str(text)
    annotation = field.annotation
    choices = list(_choices(annotation))
    if choices:
        return ", ".join(_literal(choice) for choice in choices)
    limits = dict(_limits([*field.metadata, *_metadata(annotation)]))
    if annotation is bool:
        return "true, false"
    return ", ".join(f"{word} {value:g}" for word, value in limits.items()) or "text"


def _texts(field: FieldInfo) -> dict[str, Any]:
    extra = field.json_schema_extra
    return dict(extra) if isinstance(extra, dict) else {}


def default_text(field: FieldInfo) -> str:
    """Describe the default of a key: "needed", "none", or the value as TOML has it."""
    text = _texts(field).get("default")
    if text:
        return str(text)
    if field.is_required():
        return "needed"
    if field.default is None:
        return "none"
    return _literal(field.default)


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return str(list(value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _choices(annotation: Any) -> Iterator[Any]:
    """Yield the values of a Literal, or of those in a union."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
        return
    for inner in get_args(annotation):
        if inner is not NoneType:
            yield from _choices(inner)


def _metadata(annotation: Any) -> Iterator[Any]:
    """Yield the constraints inside an annotation."""
    yield from getattr(annotation, "__metadata__", ())
    for inner in get_args(annotation):
        yield from _metadata(inner)


def _limits(metadata: list[Any]) -> Iterator[tuple[str, float]]:
    """Yield the words and numbers of the constraints, lower limits first."""
    flat = []
    for constraint in metadata:
        flat += constraint.metadata if isinstance(constraint, FieldInfo) else [constraint]
    for kind, name, word in (
        (annotated_types.Ge, "ge", "from"),
        (annotated_types.Gt, "gt", "above"),
        (annotated_types.Le, "le", "to"),
        (annotated_types.Lt, "lt", "below"),
    ):
        for constraint in flat:
            if isinstance(constraint, kind):
                yield word, getattr(constraint, name)
