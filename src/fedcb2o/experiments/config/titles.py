"""Titles of runs by the algorithm that they run."""

from collections.abc import Iterator, Mapping
from typing import Any

from fedcb2o import plugins
from fedcb2o.federated.algorithms.section import AlgorithmSection
from fedcb2o.federated.run_spec import Algorithm
from fedcb2o.federated.sections import Part

_NAMES = {
    "fedassay": "FedAssay",
    "fedcb2o": "FedCB2O",
    "fedcbo": "FedCBO",
    "dfedavgm": "DFedAvgM",
    "dec_lora": "Dec-LoRA",
    "tad_lora": "TAD-LoRA",
    "ifca": "IFCA",
    "dfca": "DFCA",
    "local_training": "Local training",
}


def algorithm_title(section: AlgorithmSection, method: Part, algorithm: Algorithm) -> str:
    """Return the algorithm, and what differs from its defaults: "FedCB2O (text, T_G = 20)"."""
    given = dict(section.parameters)
    name = plugins.label(section.name)
    title = _NAMES.get(name, name)
    if "rule" in given:
        title = _text(given.pop("rule"))
    details = list(_details(section, method, algorithm, given))
    return f"{title} ({', '.join(details)})" if details else title


def _details(
    section: AlgorithmSection, method: Part, algorithm: Algorithm, given: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the variant, and the parameters and guards that differ from the defaults."""
    function = method.function
    values = {name: p.default for name, p in plugins.parameters(function).items()}
    variant = given.get("variant", values.get("variant"))
    if variant is not None:
        values |= (plugins.VARIANTS.get(function) or {}).get(variant, {})
        yield variant
    for key, value in given.items():
        if key != "variant" and value != values.get(key):
            yield f"{'T_G' if key == 'criterion_from_round' else key} = {_text(value)}"
    if isinstance(section.guards, bool):
        yield "with guards" if section.guards else "without guards"
        return
    usual = method.bound().guards
    for key, value in algorithm.guards.model_dump().items():
        if value != getattr(usual, key):
            yield f"{key} = {_text(value)}"


def _text(value: Any) -> str:
    """Return a value of a configuration in a word."""
    if isinstance(value, Mapping):
        name = plugins.label(value.get("name", "..."))
        parameters = [f"{key} = {_text(item)}" for key, item in value.items() if key != "name"]
        return f"{name} with {', '.join(parameters)}" if parameters else name
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return plugins.label(value) if callable(value) else str(value)
