"""The JSON Schema of experiments and grids, by which an editor completes, explains and checks.

It is derived from the models in `config` and `grid`, the names of built-in functions and their
signatures. Checks that need all settings at once (a budget below the number of agents) and the
parameters of users' functions are left to the run.

>>> from fedcb2o.experiments.schema import schema
>>> schema()["properties"]["rounds"]["minimum"]
1
"""

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, get_args

from pydantic import BaseModel

from fedcb2o import plugins
from fedcb2o.data import sets, skews, transforms
from fedcb2o.experiments.config.resolved import COMPONENT_SECTIONS
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.config.tables import presets
from fedcb2o.experiments.grid._definition import (
    AXIS_KEYS,
    CELL_KEYS,
    AdversarySection,
    Grid,
    TuningSection,
)
from fedcb2o.experiments.key_table import default_text, value_range, value_schema
from fedcb2o.federated import (
    aggregation,
    algorithms,
    attacks,
    criteria,
    loss_groups,
    losses,
    optimisers,
    sample_weights,
    selection,
    topology,
)
from fedcb2o.federated.aggregation import preaggregation
from fedcb2o.federated.criteria import combinations
from fedcb2o.federated.evaluation import metrics
from fedcb2o.federated.guards.checks import Guards
from fedcb2o.federated.sections import AgentsSection, Component, Privacy, TrainingSection
from fedcb2o.nn import architectures
from fedcb2o.simulation.traces import ClockSection

_Schema = dict[str, Any]

# The built-in functions that a key may name.
_CATALOGUES: Mapping[str, ModuleType] = {
    "data": sets,
    "model": architectures,
    "algorithm": algorithms,
    "attack": attacks,
    "skew": skews,
    "cluster_transform": transforms,
    "graph": topology,
    "optimiser": optimisers,
    "loss": losses,
    "loss_groups": loss_groups,
    "weights": sample_weights,
    "metric": metrics,
    "criterion": criteria,
    "rule": aggregation,
    "selection": selection,
    "pre_step": preaggregation,
}
KINDS = tuple(_CATALOGUES)
"""Kinds of built-in functions."""

_SECTION_NAMES = tuple(key for key, _, _ in COMPONENT_SECTIONS)
_DRAFT = "http://json-schema.org/draft-07/schema#"  # the latest that editors of TOML know
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_USER_FUNCTION = {
    "type": "string",
    "pattern": "^[^:]+:[^:]+$",
    "description": "A function of your own, package.module:function.",
}


def schema() -> _Schema:
    """Return the JSON Schema of an experiment's file, draft 7."""
    properties = {"extends": _extends(), **_section_properties(Experiment)}
    needs: _Schema = {key: {"$ref": f"#/definitions/{key}.needs"} for key in _SECTION_NAMES}
    needs["agents"] = {"required": _required_keys(AgentsSection)}
    definitions = _definitions()
    for key in _SECTION_NAMES:
        definitions[f"{key}.needs"] = _required_parameters(key)
    return {
        "$schema": _DRAFT,
        "title": "An experiment of fedcb2o",
        **_object(properties),
        "if": {"not": {"required": ["extends"]}},
        "then": {"required": _required_keys(Experiment, "name"), "properties": needs},
        "definitions": definitions,
    }


def grid_schema() -> _Schema:
    """Return the JSON Schema of a grid's file, draft 7; the run finds missing keys."""
    keys = _section_properties(Experiment)
    varied = {key: keys[key] for key in CELL_KEYS}
    changes = {"type": "array", "items": {"$ref": "#/definitions/changes"}, "minItems": 1}
    lists = {"tune": changes, "strengths": changes, "seeds": keys["seeds"]}
    own = _section_properties(Grid)
    for name in ("shared", "added_candidates"):
        del own[name]
    tuning = _section_properties(TuningSection)
    named_changes = _object({"name": {"type": "string"}, **varied})
    tuning["attacks"]["items"] = {"anyOf": [{"type": "string"}, named_changes]}
    sections = {
        "tuning": _object(tuning, _required_keys(TuningSection)),
        "adversary": _object(
            _section_properties(AdversarySection), _required_keys(AdversarySection)
        ),
    }
    axes = {}
    for axis in ("settings", "defences", "attacks"):
        entry = {**varied, **{key: lists[key] for key in AXIS_KEYS.get(axis, ())}}
        if axis == "defences":
            text = "The preset whose algorithm the defence has."
            entry["extends"] = {"enum": list(presets()), "description": text}
        axes[axis] = {"type": "object", "additionalProperties": _object(entry)}
    properties = {
        "extends": _extends(),
        **varied,
        "seeds": keys["seeds"],
        **own,
        **axes,
        **sections,
    }
    return {
        "$schema": _DRAFT,
        "title": "A grid of fedcb2o",
        **_object(properties),
        "required": _required_keys(Grid, "name", "shared"),
        "definitions": {**_definitions(), "changes": _object(varied)},
    }


def part_rows(kind: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, parameters with defaults, and first sentences of the functions of a kind."""
    for name, function in _catalogue(kind).items():
        texts = [_parameter_text(*item) for item in _defaults(function)]
        yield name, ", ".join(texts), _summary_line(function)


def _defaults(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Return the parameters of a configuration with their defaults."""
    parameters = plugins.parameters(function).items()
    # `data_dir` is an option of the command.
    return [(key, parameter.default) for key, parameter in parameters if key != "data_dir"]


def parts_with(parameter: str, kind: str) -> list[str]:
    """Return the names of the functions of a kind, or of all kinds, with a parameter."""
    return [
        name
        for kind in ([kind] if kind in KINDS else KINDS)
        for name, function in _catalogue(kind).items()
        if parameter in plugins.parameters(function)
    ]


def part_names() -> list[str]:
    """Return the names of all built-in functions, after those of their kinds."""
    return [*KINDS, *(name for kind in KINDS for name in _catalogue(kind))]


def describe_part(name: str) -> str:
    """Return the docstrings of the built-in functions with a name, after their kinds.

    Of a user's function, "package.module:function", parameters and docstring are returned.
    """
    if ":" in name:
        function = plugins.resolve("function", name, sets)
        texts = [_parameter_text(*item) for item in _defaults(function)]
        head = f"{name}: {', '.join(texts) or 'no parameters'}"
        return "\n\n".join(filter(None, [head, _docstring(function)]))
    texts = [
        f"{kind} {name}\n\n{_docstring(_catalogue(kind)[name])}"
        for kind in KINDS
        if name in _catalogue(kind)
    ]
    return "\n\n".join(texts)


def _parameter_text(name: str, default: Any) -> str:
    """Return a parameter as in a file; one without a value has no default in TOML."""
    if default is inspect.Parameter.empty or default is None:
        return name
    return f"{name} = {json.dumps(default, default=str)}"


def _extends() -> _Schema:
    description = "The preset, or the file beside this one, that this file changes by section."
    file = {"type": "string", "pattern": r"\.toml$"}
    return {"anyOf": [{"enum": list(presets())}, file], "description": description}


def _object(properties: _Schema, required: Sequence[str] = ()) -> _Schema:
    """Return a table with these keys and no others."""
    found = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        found["required"] = list(required)
    return found


def _section_properties(section: type[BaseModel], name: str = "") -> dict[str, _Schema]:
    """Return the keys of a section, or of the whole file."""
    properties = {}
    for key, field in section.model_fields.items():
        found = _property(key, field.rebuild_annotation(), field.get_default(), name)
        if field.description:
            values = f"{value_range(field)}; default: {default_text(field)}"
            text = f"{plain_text(field.description)} ({plain_text(values)})"
            found = {**found, "description": text[:1].upper() + text[1:]}
        properties[key] = found
    return properties


def plain_text(markdown: str) -> str:
    """Replace the links in a text by their words."""
    return _LINK.sub(r"\1", markdown)


def _required_keys(section: type[BaseModel], *given: str) -> list[str]:
    """Return the required keys of a section, except those that are given elsewhere."""
    fields = section.model_fields.items()
    return [name for name, field in fields if field.is_required() and name not in given]


def _property(name: str, annotation: Any, default: Any, section: str) -> _Schema:
    """Return the schema of a key."""
    classes = {part for part in _nested_annotations(annotation) if inspect.isclass(part)}
    for inner in (AgentsSection, TrainingSection, Privacy, ClockSection):
        if inner in classes:
            table = _object(_section_properties(inner, name))
            return {**table, "description": _summary_line(inner)}
    if Guards in classes:
        return {"anyOf": [_object(_section_properties(Guards, name)), {"type": "boolean"}]}
    if not any(issubclass(part, Component) for part in classes):
        return _schema_with_default(annotation, default)
    if name in _SECTION_NAMES and not section:
        word = next(word for key, word, _ in COMPONENT_SECTIONS if key == name)
        description = f"The {word}: its name, and its parameters as further keys."
        return {"allOf": [{"$ref": f"#/definitions/{name}"}], "description": description}
    if name == "metrics":
        return {"type": "array", "items": _function_choice("metric"), "minItems": 1}
    return _function_choice("attack" if name == "data" else name)


def _nested_annotations(annotation: Any) -> Iterator[Any]:
    """Yield an annotation and those that it contains."""
    yield annotation
    for inner in get_args(annotation):
        yield from _nested_annotations(inner)


def _schema_with_default(annotation: Any, default: Any) -> _Schema:
    """Return the schema of an annotation, with a default that TOML can express."""
    found = value_schema(annotation)
    if found and isinstance(default, tuple):
        found["default"] = list(default)
    elif found and isinstance(default, bool | int | float | str):
        found["default"] = default
    return found


# Functions by name


def _definitions() -> dict[str, _Schema]:
    """Return the tables that name a function of each catalogue."""
    extra: dict[str, _Schema] = {key: {} for key in _CATALOGUES}
    for name in _SECTION_NAMES:
        for part in _nested_annotations(Experiment.model_fields[name].annotation):
            if inspect.isclass(part) and issubclass(part, Component):
                extra[name] = _section_properties(part, name)
                del extra[name]["name"]
    scale = {"scale": {"type": "number", "exclusiveMinimum": 0, "default": 1.0}}
    definitions = {key: _function_table(key, extra[key]) for key in _CATALOGUES}
    definitions["part"] = _function_table("criterion", scale)
    return definitions


def _function_choice(key: str, table: str | None = None) -> _Schema:
    """Return a name, or a table with a name. A key without a catalogue may hold either."""
    if key not in _CATALOGUES:
        return {"type": ["string", "object"]}
    reference = {"$ref": f"#/definitions/{table or key}"}
    return {"anyOf": [{"enum": list(_catalogue(key))}, _USER_FUNCTION, reference]}


def _function_table(key: str, extra: _Schema) -> _Schema:
    """Return a table of a function's name, its parameters and extra keys.

    Without a name, which `extends` may give, the parameters may be those of any function. Those of
    a user's function are not checked.
    """
    functions = _catalogue(key)
    known = {name: _parameter_schemas(function) for name, function in functions.items()}
    variants: dict[str, list[_Schema]] = {}
    for parameters in known.values():
        for parameter, found in parameters.items():
            if found not in variants.setdefault(parameter, []):
                variants[parameter].append(found)

    names: list[_Schema] = []
    for name, function in functions.items():
        names.append({"const": name, "description": _summary_line(function)})
    properties: _Schema = {
        "name": {
            "anyOf": [*names, _USER_FUNCTION],
            "description": f"The name of the {key.replace('_', '-')}.",
        }
    }
    for parameter, schemas in variants.items():
        properties[parameter] = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    properties.update(extra)

    rules = []
    for name, parameters in known.items():
        allowed: _Schema = {}
        for parameter in ["name", *parameters, *extra]:
            is_unique = parameter not in parameters or len(variants[parameter]) == 1
            allowed[parameter] = True if is_unique else parameters[parameter]
        rules.append(_if_named(name, _object(allowed)))
    return {
        "type": "object",
        "properties": properties,
        "allOf": rules,
        "if": {"not": {"required": ["name"]}},
        "then": {"propertyNames": {"enum": [*variants, *extra]}},
    }


def _required_parameters(key: str) -> _Schema:
    """Return the keys that a section without `extends` needs."""
    rules = []
    for name, function in _catalogue(key).items():
        parameters = plugins.parameters(function).items()
        needed = [p for p, parameter in parameters if parameter.default is parameter.empty]
        if needed:
            rules.append(_if_named(name, {"required": needed}))
    found: _Schema = {"required": ["name"]}
    if rules:
        found["allOf"] = rules
    return found


def _if_named(name: str, then: _Schema) -> _Schema:
    condition = {"properties": {"name": {"const": name}}, "required": ["name"]}
    return {"if": condition, "then": then}


def _catalogue(key: str) -> dict[str, Callable[..., Any]]:
    module = _CATALOGUES[key]
    names = [name for name in sorted(module.__all__) if callable(getattr(module, name))]
    return {name: getattr(module, name) for name in names}


def _parameter_schemas(function: Callable[..., Any]) -> dict[str, _Schema]:
    """Return the schemas of a function's parameters, described by its docstring."""
    descriptions = plugins.argument_descriptions(function)
    found: dict[str, _Schema] = {}
    for name, parameter in plugins.parameters(function).items():
        choices = (plugins.PluginChoice, plugins.PluginChoice | None)
        if parameter.annotation is combinations.Criteria:
            items = _function_choice("criterion", "part")
            found[name] = {"type": "array", "items": items, "minItems": 1}
        elif name in _CATALOGUES and parameter.annotation in choices:
            found[name] = _function_choice(name)
        else:
            found[name] = _schema_with_default(parameter.annotation, parameter.default)
        if name in descriptions:
            found[name] = {**found[name], "description": descriptions[name]}
    return found


def _summary_line(function: Callable[..., Any]) -> str:
    """Return the first paragraph of a docstring."""
    return " ".join(_docstring(function).split("\n\n")[0].split())


def _docstring(function: Callable[..., Any]) -> str:
    whole = function.func if isinstance(function, functools.partial) else function
    return inspect.getdoc(whole) or ""
