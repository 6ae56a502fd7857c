"""The JSON Schema of an experiment's file and of a grid's: what an editor completes, explains and checks meanwhile.

It is made of what checks the file when it runs: the fields of the models in `config` and `grid`, the names of built-in
functions, and their signatures. What only all of it together decides (a budget that has to be below the number of
agents, a parameter of a function of one's own) it leaves to the run.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError

from fedcb2o import plugins
from fedcb2o.data import sets, skews
from fedcb2o.experiments.config.descriptions import described
from fedcb2o.experiments.config.settings import (
    COMPONENT_SECTIONS,
    AgentsSection,
    Component,
    Experiment,
    TrainingSection,
)
from fedcb2o.experiments.config.tables import presets
from fedcb2o.experiments.grid.definition import (
    AXIS_KEYS,
    CELL_KEYS,
    AdversarySection,
    Grid,
    TuningSection,
)
from fedcb2o.federated import (
    aggregation,
    algorithms,
    attacks,
    criteria,
    losses,
    metrics,
    optimisers,
    selection,
    topology,
)
from fedcb2o.federated.aggregation import preaggregation
from fedcb2o.federated.criteria import combinations
from fedcb2o.nn import architectures

_Schema = dict[str, Any]

_CATALOGUES: Mapping[str, ModuleType] = {
    "data": sets,
    "model": architectures,
    "algorithm": algorithms,
    "attack": attacks,
    "skew": skews,
    "graph": topology,
    "optimiser": optimisers,
    "loss": losses,
    "metric": metrics,
    "criterion": criteria,
    "rule": aggregation,
    "selection": selection,
    "pre_step": preaggregation,
}
"""Where the functions are that a key names."""

_SECTION_NAMES = tuple(key for key, _, _ in COMPONENT_SECTIONS)
_DRAFT = "http://json-schema.org/draft-07/schema#"  # the latest that TOML's editors know
_USER_FUNCTION = {
    "type": "string",
    "pattern": "^[^:]+:[^:]+$",
    "description": "a function of your own, package.module:function",
}


def schema() -> _Schema:
    """The JSON Schema of an experiment's file."""
    table = _object({"extends": _extends(), **_section_properties(Experiment)})
    own: _Schema = {key: {"$ref": f"#/definitions/{key}.needs"} for key in _SECTION_NAMES}
    own["agents"] = {"required": _required_keys(AgentsSection)}
    return {
        "$schema": _DRAFT,
        "title": "An experiment of fedcb2o",
        **table,
        "if": {"not": {"required": ["extends"]}},
        "then": {"required": _required_keys(Experiment, "name"), "properties": own},
        "definitions": {
            **_definitions(),
            **{f"{key}.needs": _required_parameters(key) for key in _SECTION_NAMES},
        },
    }


def grid_schema() -> _Schema:
    """The JSON Schema of a grid's file. What its cells lack is known when all changes of a cell are together."""
    every = _section_properties(Experiment)
    varied = {key: every[key] for key in CELL_KEYS}
    changes: _Schema = {"$ref": "#/definitions/changes"}
    several = {"type": "array", "items": changes, "minItems": 1}
    lists = {"tune": several, "strengths": several, "seeds": every["seeds"]}
    own = {
        key: value
        for key, value in _section_properties(Grid).items()
        if key not in ("shared", "widened")
    }
    tuning = _section_properties(TuningSection)
    tuning["attacks"]["items"] = {
        "anyOf": [{"type": "string"}, _object({"name": {"type": "string"}, **varied})]
    }
    axes = {
        axis: {
            "type": "object",
            "additionalProperties": _object(
                {**varied, **{key: lists[key] for key in AXIS_KEYS.get(axis, ())}}
            ),
        }
        for axis in ("settings", "defences", "attacks")
    }
    parts = {
        "tuning": _object(tuning, _required_keys(TuningSection)),
        "adversary": _object(
            _section_properties(AdversarySection), _required_keys(AdversarySection)
        ),
    }
    return {
        "$schema": _DRAFT,
        "title": "A grid of fedcb2o",
        **_object(
            {"extends": _extends(), **varied, "seeds": every["seeds"], **own, **axes, **parts}
        ),
        "required": _required_keys(Grid, "name", "shared"),
        "definitions": {**_definitions(), "changes": _object(varied)},
    }


def _extends() -> _Schema:
    return {
        "enum": list(presets()),
        "description": "The preset that this file changes, section by section.",
    }


def _object(properties: _Schema, required: Sequence[str] = ()) -> _Schema:
    """A table with these keys and no others."""
    found = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**found, "required": list(required)} if required else found


def _section_properties(part: type[BaseModel], section: str = "") -> dict[str, _Schema]:
    """The keys of a section, or of the whole file."""
    return {
        name: _with_description(
            _property(name, field.rebuild_annotation(), field.get_default(), section),
            f"{section}{name}",
        )
        for name, field in part.model_fields.items()
    }


def _required_keys(part: type[BaseModel], *given: str) -> list[str]:
    """The keys of a section that it has to hold, but for those that are given otherwise."""
    return [
        name
        for name, field in part.model_fields.items()
        if field.is_required() and name not in given
    ]


def _property(name: str, annotation: Any, default: Any, section: str) -> _Schema:
    inner = {each for each in _nested_annotations(annotation) if inspect.isclass(each)}
    if part := next((each for each in (AgentsSection, TrainingSection) if each in inner), None):
        return {
            **_object(_section_properties(part, f"{name}.")),
            "description": _summary_line(part),
        }
    if not any(issubclass(each, Component) for each in inner):
        return _value_schema(annotation, default)
    if name in _SECTION_NAMES and not section:
        kind = next(kind for key, kind, _ in COMPONENT_SECTIONS if key == name)
        told = f"The {kind}: its name, and its parameters beside it."
        return {"allOf": [{"$ref": f"#/definitions/{name}"}], "description": told}
    if name == "metrics":
        return {"type": "array", "items": _function_choice("metric"), "minItems": 1}
    return _function_choice("attack" if name == "data" else name)


def _nested_annotations(annotation: Any) -> Iterator[Any]:
    """An annotation, and those that it is made of."""
    yield annotation
    for each in get_args(annotation):
        yield from _nested_annotations(each)


def _value_schema(annotation: Any, default: Any) -> _Schema:
    """What a value may be, by its annotation; anything, where TOML cannot say it."""
    try:
        found = TypeAdapter(
            annotation, config=ConfigDict(arbitrary_types_allowed=True)
        ).json_schema()
    except (PydanticInvalidForJsonSchema, PydanticSchemaGenerationError):
        return {}
    if "$ref" in str(found):
        return {}
    choices = [
        each for each in found.get("anyOf", ()) if each != {"type": "null"}
    ]  # TOML has no null
    found = choices[0] if len(choices) == 1 else {**found, "anyOf": choices} if choices else found
    found = {
        key: value
        for key, value in found.items()
        if key not in ("default", "format", "prefixItems")
    }
    plain = isinstance(default, bool | int | float | str | tuple)
    return (
        {**found, "default": list(default) if isinstance(default, tuple) else default}
        if plain
        else found
    )


def _with_description(found: _Schema, key: str) -> _Schema:
    """With what the documentation says of a key."""
    told = described().get(key)
    return found if told is None else {**found, "description": told}


# Functions by name


def _definitions() -> dict[str, _Schema]:
    """What a key may hold that names a function of each room."""
    more: dict[str, _Schema] = {key: {} for key in _CATALOGUES}
    for name, field in Experiment.model_fields.items():
        for part in _nested_annotations(field.annotation):
            if name in _SECTION_NAMES and inspect.isclass(part) and issubclass(part, Component):
                more[name] = {
                    key: each
                    for key, each in _section_properties(part, f"{name}.").items()
                    if key != "name"
                }
    scale = {"scale": {"type": "number", "exclusiveMinimum": 0, "default": 1.0}}
    return {
        **{key: _function_table(key, more[key]) for key in _CATALOGUES},
        "part": _function_table("criterion", scale),
    }


def _function_choice(key: str, table: str | None = None) -> _Schema:
    """A name, or a table with a name; of a key whose room is not among ROOMS no more is known."""
    if key not in _CATALOGUES:
        return {"type": ["string", "object"]}
    return {
        "anyOf": [
            {"enum": list(_catalogue(key))},
            _USER_FUNCTION,
            {"$ref": f"#/definitions/{table or key}"},
        ]
    }


def _function_table(key: str, more: _Schema) -> _Schema:
    """A table of a function's name, its parameters, and what goes with any function. Without a name, which a file has
    from what it extends, the parameters may be those of any; with the name of a user's own there is no saying."""
    functions = _catalogue(key)
    typed = {name: _parameter_schemas(function) for name, function in functions.items()}
    every: dict[str, list[_Schema]] = {}
    for known in typed.values():
        for parameter, each in known.items():
            if each not in every.setdefault(parameter, []):
                every[parameter].append(each)
    names = [{"const": name, "description": _summary_line(functions[name])} for name in functions]
    return {
        "type": "object",
        "properties": {
            "name": {
                "anyOf": [*names, _USER_FUNCTION],
                "description": f"Which {key.replace('_', '-')}.",
            },
            **{
                p: _with_description(each[0] if len(each) == 1 else {"anyOf": each}, f"{key}.{p}")
                for p, each in every.items()
            },
            **more,
        },
        "allOf": [
            _if_named(
                name,
                _object(
                    {
                        p: True if p not in known or len(every[p]) == 1 else known[p]
                        for p in ["name", *known, *more]
                    }
                ),
            )
            for name, known in typed.items()
        ],
        "if": {"not": {"required": ["name"]}},
        "then": {"propertyNames": {"enum": [*every, *more]}},
    }


def _required_parameters(key: str) -> _Schema:
    """What a section needs that extends nothing: a name, and the function's parameters without default."""
    found = []
    for name, function in _catalogue(key).items():
        needed = [
            p
            for p, each in plugins.parameters(function).items()
            if each.default is inspect.Parameter.empty
        ]
        found += [_if_named(name, {"required": needed})] if needed else []
    return {"required": ["name"], **({"allOf": found} if found else {})}


def _if_named(name: str, then: _Schema) -> _Schema:
    return {"if": {"properties": {"name": {"const": name}}, "required": ["name"]}, "then": then}


def _catalogue(key: str) -> dict[str, Callable[..., Any]]:
    room = _CATALOGUES[key]
    return {
        name: getattr(room, name) for name in sorted(room.__all__) if callable(getattr(room, name))
    }


def _parameter_schemas(function: Callable[..., Any]) -> dict[str, _Schema]:
    found: dict[str, _Schema] = {}
    for name, parameter in plugins.parameters(function).items():
        if parameter.annotation is combinations.Criteria:
            found[name] = {
                "type": "array",
                "items": _function_choice("criterion", "part"),
                "minItems": 1,
            }
        elif name in _CATALOGUES and parameter.annotation in (
            plugins.PluginChoice,
            plugins.PluginChoice | None,
        ):
            found[name] = _function_choice(name)
        else:
            found[name] = _value_schema(parameter.annotation, parameter.default)
    return found


def _summary_line(function: Callable[..., Any]) -> str:
    """The first paragraph of the docstring of a function or a section."""
    whole = function.func if isinstance(function, functools.partial) else function
    return " ".join((inspect.getdoc(whole) or "").split("\n\n")[0].split())
