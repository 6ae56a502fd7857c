"""Titles of runs by the algorithm that they run.

>>> from fedcb2o.federated.algorithms.section import AlgorithmSection
>>> algorithm_title(AlgorithmSection(name="fedcb2o", variant="released", alpha=5.0))
'FedCB2O (released, alpha = 5)'
"""

from collections.abc import Iterator, Mapping
from typing import Any

from fedcb2o import plugins
from fedcb2o.federated import algorithms
from fedcb2o.federated.algorithms.section import AlgorithmSection

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


def algorithm_title(algorithm: AlgorithmSection) -> str:
    """Return the title of a run: its algorithm, and the parameters that differ from its defaults.

    Such as "FedCB2O (text, T_G = 20)".
    """
    given = dict(algorithm.parameters)
    name = plugins.label(algorithm.name)
    title = _NAMES.get(name, name)
    if "rule" in given:
        title = _text(given.pop("rule"))
    details = list(_details(algorithm, given))
    if details:
        return f"{title} ({', '.join(details)})"
    return title


def _details(algorithm: AlgorithmSection, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the variant, and the parameters and guards that differ from the defaults."""
    function = plugins.resolve("algorithm", algorithm.name, algorithms)
    values = {name: p.default for name, p in plugins.parameters(function).items()}
    variant = given.get("variant", values.get("variant"))
    if variant is not None:
        values |= (plugins.VARIANTS.get(function) or {}).get(variant, {})
        yield variant
    for key, value in given.items():
        if key != "variant" and value != values.get(key):
            yield f"{'T_G' if key == 'criterion_from_round' else key} = {_text(value)}"
    if isinstance(algorithm.guards, bool):
        yield "with guards" if algorithm.guards else "without guards"
        return
    usual = algorithm.model_copy(update={"guards": None}).build().guards
    for key, value in algorithm.build().guards.model_dump().items():
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
