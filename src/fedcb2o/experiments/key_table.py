"""The keys of a configuration, with range, default and meaning."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError
from pydantic.fields import FieldInfo

from fedcb2o.experiments.config.settings import Experiment, ModelSection
from fedcb2o.federated.algorithms.section import AlgorithmSection
from fedcb2o.federated.attacks.section import AttackSection
from fedcb2o.federated.guards.checks import Guards
from fedcb2o.federated.sections import AgentsSection, Privacy, TrainingSection
from fedcb2o.simulation.traces import ClockSection

_SECTIONS: dict[str, type[BaseModel]] = {
    "": Experiment,
    "agents.": AgentsSection,
    "training.": TrainingSection,
    "training.privacy.": Privacy,
    "clock.": ClockSection,
    "model.": ModelSection,
    "algorithm.": AlgorithmSection,
    "algorithm.guards.": Guards,
    "attack.": AttackSection,
}

_LIMITS = {
    "minimum": "from",
    "exclusiveMinimum": "above",
    "maximum": "to",
    "exclusiveMaximum": "below",
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
    schemas = list(_parts(value_schema(field.rebuild_annotation())))
    choices = [choice for part in schemas for choice in part.get("enum", ())]
    choices += [part["const"] for part in schemas if "const" in part]
    if choices:
        return ", ".join(map(_literal, choices))
    if field.annotation is bool:
        return "true, false"
    limits = {word: part[key] for key, word in _LIMITS.items() for part in schemas if key in part}
    return ", ".join(f"{word} {value:g}" for word, value in limits.items()) or "text"


def value_schema(annotation: Any) -> dict[str, Any]:
    """Return the JSON Schema of values in TOML; an empty one where it cannot express them."""
    try:
        config = ConfigDict(arbitrary_types_allowed=True)
        found = TypeAdapter(annotation, config=config).json_schema()
    except (PydanticInvalidForJsonSchema, PydanticSchemaGenerationError):
        return {}
    if "$ref" in str(found):
        return {}
    # TOML has no null.
    choices = [choice for choice in found.get("anyOf", ()) if choice != {"type": "null"}]
    if len(choices) == 1:
        found = choices[0]
    elif choices:
        found = {**found, "anyOf": choices}
    dropped = ("default", "format", "prefixItems", "description", "values")
    return {key: value for key, value in found.items() if key not in dropped}


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a schema and those that it contains."""
    yield schema
    for inner in (*schema.get("anyOf", ()), *filter(None, [schema.get("items")])):
        yield from _parts(inner)


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
