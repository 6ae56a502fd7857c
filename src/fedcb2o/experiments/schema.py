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
from fedcb2o.experiments.config.settings import KINDS, AgentsPart, Component, Experiment, TrainingPart
from fedcb2o.experiments.config.tables import presets
from fedcb2o.experiments.grid.definition import OWN_KEYS, VARIED, AdversaryPart, Grid, TuningPart
from fedcb2o.federated import aggregation, algorithms, attacks, criteria, losses, metrics, optimisers, selection, topology
from fedcb2o.federated.aggregation import preaggregation
from fedcb2o.federated.criteria import combinations
from fedcb2o.nn import architectures

Schema = dict[str, Any]

ROOMS: Mapping[str, ModuleType] = {
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

SECTIONS = tuple(key for key, _, _ in KINDS)
DRAFT = "http://json-schema.org/draft-07/schema#"  # the latest that TOML's editors know
OWN = {"type": "string", "pattern": "^[^:]+:[^:]+$", "description": "a function of your own, package.module:function"}


def schema() -> Schema:
    """The JSON Schema of an experiment's file."""
    table = _table({"extends": _extends(), **_fields(Experiment)})
    own: Schema = {key: {"$ref": f"#/definitions/{key}.needs"} for key in SECTIONS}
    own["agents"] = {"required": _required(AgentsPart)}
    return {
        "$schema": DRAFT,
        "title": "An experiment of fedcb2o",
        **table,
        "if": {"not": {"required": ["extends"]}},
        "then": {"required": _required(Experiment, "name"), "properties": own},
        "definitions": {**_definitions(), **{f"{key}.needs": _needs(key) for key in SECTIONS}},
    }


def grid_schema() -> Schema:
    """The JSON Schema of a grid's file. What its cells lack is known when all changes of a cell are together."""
    every = _fields(Experiment)
    varied = {key: every[key] for key in VARIED}
    changes: Schema = {"$ref": "#/definitions/changes"}
    several = {"type": "array", "items": changes, "minItems": 1}
    lists = {"tune": several, "strengths": several, "seeds": every["seeds"]}
    own = {key: value for key, value in _fields(Grid).items() if key not in ("shared", "widened")}
    tuning = _fields(TuningPart)
    tuning["attacks"]["items"] = {"anyOf": [{"type": "string"}, _table({"name": {"type": "string"}, **varied})]}
    axes = {
        axis: {
            "type": "object",
            "additionalProperties": _table({**varied, **{key: lists[key] for key in OWN_KEYS.get(axis, ())}}),
        }
        for axis in ("settings", "defences", "attacks")
    }
    parts = {
        "tuning": _table(tuning, _required(TuningPart)),
        "adversary": _table(_fields(AdversaryPart), _required(AdversaryPart)),
    }
    return {
        "$schema": DRAFT,
        "title": "A grid of fedcb2o",
        **_table({"extends": _extends(), **varied, "seeds": every["seeds"], **own, **axes, **parts}),
        "required": _required(Grid, "name", "shared"),
        "definitions": {**_definitions(), "changes": _table(varied)},
    }


def _extends() -> Schema:
    return {"enum": list(presets()), "description": "The preset that this file changes, section by section."}


def _table(properties: Schema, required: Sequence[str] = ()) -> Schema:
    """A table with these keys and no others."""
    found = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**found, "required": list(required)} if required else found


def _fields(part: type[BaseModel], section: str = "") -> dict[str, Schema]:
    """The keys of a section, or of the whole file."""
    return {
        name: _explained(_field(name, field.rebuild_annotation(), field.get_default(), section), f"{section}{name}")
        for name, field in part.model_fields.items()
    }


def _required(part: type[BaseModel], *given: str) -> list[str]:
    """The keys of a section that it has to hold, but for those that are given otherwise."""
    return [name for name, field in part.model_fields.items() if field.is_required() and name not in given]


def _field(name: str, annotation: Any, default: Any, section: str) -> Schema:
    inner = {each for each in _within(annotation) if inspect.isclass(each)}
    if part := next((each for each in (AgentsPart, TrainingPart) if each in inner), None):
        return {**_table(_fields(part, f"{name}.")), "description": _told(part)}
    if not any(issubclass(each, Component) for each in inner):
        return _value(annotation, default)
    if name in SECTIONS and not section:
        kind = next(kind for key, kind, _ in KINDS if key == name)
        told = f"The {kind}: its name, and its parameters beside it."
        return {"allOf": [{"$ref": f"#/definitions/{name}"}], "description": told}
    if name == "metrics":
        return {"type": "array", "items": _choice("metric"), "minItems": 1}
    return _choice("attack" if name == "data" else name)


def _within(annotation: Any) -> Iterator[Any]:
    """An annotation, and those that it is made of."""
    yield annotation
    for each in get_args(annotation):
        yield from _within(each)


def _value(annotation: Any, default: Any) -> Schema:
    """What a value may be, by its annotation; anything, where TOML cannot say it."""
    try:
        found = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True)).json_schema()
    except (PydanticInvalidForJsonSchema, PydanticSchemaGenerationError):
        return {}
    if "$ref" in str(found):
        return {}
    choices = [each for each in found.get("anyOf", ()) if each != {"type": "null"}]  # TOML has no null
    found = choices[0] if len(choices) == 1 else {**found, "anyOf": choices} if choices else found
    found = {key: value for key, value in found.items() if key not in ("default", "format", "prefixItems")}
    plain = isinstance(default, bool | int | float | str | tuple)
    return {**found, "default": list(default) if isinstance(default, tuple) else default} if plain else found


def _explained(found: Schema, key: str) -> Schema:
    """With what the documentation says of a key."""
    told = described().get(key)
    return found if told is None else {**found, "description": told}


# Functions by name


def _definitions() -> dict[str, Schema]:
    """What a key may hold that names a function of each room."""
    more: dict[str, Schema] = {key: {} for key in ROOMS}
    for name, field in Experiment.model_fields.items():
        for part in _within(field.annotation):
            if name in SECTIONS and inspect.isclass(part) and issubclass(part, Component):
                more[name] = {key: each for key, each in _fields(part, f"{name}.").items() if key != "name"}
    scale = {"scale": {"type": "number", "exclusiveMinimum": 0, "default": 1.0}}
    return {**{key: _named(key, more[key]) for key in ROOMS}, "part": _named("criterion", scale)}


def _choice(key: str, table: str | None = None) -> Schema:
    """A name, or a table with a name; of a key whose room is not among ROOMS no more is known."""
    if key not in ROOMS:
        return {"type": ["string", "object"]}
    return {"anyOf": [{"enum": list(_functions(key))}, OWN, {"$ref": f"#/definitions/{table or key}"}]}


def _named(key: str, more: Schema) -> Schema:
    """A table of a function's name, its parameters, and what goes with any function. Without a name, which a file has
    from what it extends, the parameters may be those of any; with the name of a user's own there is no saying."""
    functions = _functions(key)
    typed = {name: _parameters(function) for name, function in functions.items()}
    every: dict[str, list[Schema]] = {}
    for known in typed.values():
        for parameter, each in known.items():
            if each not in every.setdefault(parameter, []):
                every[parameter].append(each)
    names = [{"const": name, "description": _told(functions[name])} for name in functions]
    return {
        "type": "object",
        "properties": {
            "name": {"anyOf": [*names, OWN], "description": f"Which {key.replace('_', '-')}."},
            **{
                p: _explained(each[0] if len(each) == 1 else {"anyOf": each}, f"{key}.{p}") for p, each in every.items()
            },
            **more,
        },
        "allOf": [
            _if(
                name,
                _table(
                    {p: True if p not in known or len(every[p]) == 1 else known[p] for p in ["name", *known, *more]}
                ),
            )
            for name, known in typed.items()
        ],
        "if": {"not": {"required": ["name"]}},
        "then": {"propertyNames": {"enum": [*every, *more]}},
    }


def _needs(key: str) -> Schema:
    """What a section needs that extends nothing: a name, and the function's parameters without default."""
    found = []
    for name, function in _functions(key).items():
        needed = [p for p, each in plugins.parameters(function).items() if each.default is inspect.Parameter.empty]
        found += [_if(name, {"required": needed})] if needed else []
    return {"required": ["name"], **({"allOf": found} if found else {})}


def _if(name: str, then: Schema) -> Schema:
    return {"if": {"properties": {"name": {"const": name}}, "required": ["name"]}, "then": then}


def _functions(key: str) -> dict[str, Callable[..., Any]]:
    room = ROOMS[key]
    return {name: getattr(room, name) for name in sorted(room.__all__) if callable(getattr(room, name))}


def _parameters(function: Callable[..., Any]) -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for name, parameter in plugins.parameters(function).items():
        if parameter.annotation is combinations.Parts:
            found[name] = {"type": "array", "items": _choice("criterion", "part"), "minItems": 1}
        elif name in ROOMS and parameter.annotation in (plugins.Named, plugins.Named | None):
            found[name] = _choice(name)
        else:
            found[name] = _value(parameter.annotation, parameter.default)
    return found


def _told(function: Callable[..., Any]) -> str:
    """The first paragraph of the docstring of a function or a section."""
    whole = function.func if isinstance(function, functools.partial) else function
    return " ".join((inspect.getdoc(whole) or "").split("\n\n")[0].split())
