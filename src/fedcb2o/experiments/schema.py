"""The JSON Schema of experiments and grids, by which an editor completes, explains and checks.

It is pydantic's, with the names of built-in functions. What needs all settings at once (a budget
below the number of agents) and the parameters of functions are left to the run.
"""

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from fedcb2o import plugins
from fedcb2o.data import sets, skews, transforms
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.grid._definition import (
    Grid,
)
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
from fedcb2o.federated.evaluation import metrics
from fedcb2o.nn import architectures

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

_DRAFT = "http://json-schema.org/draft-07/schema#"  # the latest that editors of TOML know
_REFERENCE = "#/definitions/{model}"
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_USER_FUNCTION = {
    "type": "string",
    "pattern": "^[^:]+:[^:]+$",
    "description": "A function of your own, package.module:function.",
}


def schema(section: type[BaseModel] = Experiment) -> _Schema:
    """Return the JSON Schema of an experiment's file, draft 7: pydantic's, with built-in names.

    It requires no key, since `extends` may give each, and checks no parameter of a function.
    """
    found: _Schema = _without_texts(section.model_json_schema(ref_template=_REFERENCE))
    definitions = found.pop("$defs")
    for table in (found, *definitions.values()):
        table.pop("required", None)
        for key, value in table.get("properties", {}).items():
            kind = "metric" if key == "metrics" else key
            if kind in _CATALOGUES:
                table["properties"][key] = _with_names(value, kind)
    found["properties"]["extends"] = {
        "type": "string",
        "description": "The preset, or the file beside this one, that this file changes.",
    }
    return {"$schema": _DRAFT, **found, "definitions": definitions}


def grid_schema() -> _Schema:
    """Return the JSON Schema of a grid's file: its keys, and those of its experiment."""
    found = schema(Grid)
    experiment = schema()
    for part in ("properties", "definitions"):
        found[part] = {**experiment[part], **found[part]}
    return found


def _without_texts(node: Any) -> Any:
    """Remove titles, and texts in place of defaults and values, from a schema."""
    if isinstance(node, list):
        return [_without_texts(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: {name: _without_texts(item) for name, item in value.items()}
        if key in ("properties", "$defs")
        else _without_texts(value)
        for key, value in node.items()
        if key not in ("title", "default", "values")
    }


def _with_names(node: Any, kind: str) -> Any:
    """Let each reference to a function be a name of its kind, or a table with one."""
    if isinstance(node, list):
        return [_with_names(item, kind) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" not in node:
        return {key: _with_names(item, kind) for key, item in node.items()}
    names = {"anyOf": [{"enum": list(_catalogue(kind))}, _USER_FUNCTION]}
    table = {"allOf": [{"$ref": node["$ref"]}, {"properties": {"name": names}}]}
    rest = {key: item for key, item in node.items() if key != "$ref"}
    return {**rest, "anyOf": [*names["anyOf"], table]}


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


def plain_text(markdown: str) -> str:
    """Replace the links in a text by their words."""
    return _LINK.sub(r"\1", markdown)


def _catalogue(key: str) -> dict[str, Callable[..., Any]]:
    module = _CATALOGUES[key]
    names = [name for name in sorted(module.__all__) if callable(getattr(module, name))]
    return {name: getattr(module, name) for name in names}


def _summary_line(function: Callable[..., Any]) -> str:
    """Return the first paragraph of a docstring."""
    return " ".join(_docstring(function).split("\n\n")[0].split())


def _docstring(function: Callable[..., Any]) -> str:
    whole = function.func if isinstance(function, functools.partial) else function
    return inspect.getdoc(whole) or ""
