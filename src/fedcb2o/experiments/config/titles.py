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


Title = tuple[str, list[str]]
"""A name, and details for the parentheses after it."""
_MAX_DETAILS = 3  # of the set-up
_SETUP_SECTIONS = ("data", "agents")
_COUNTS = ("benign", "num_clusters")  # which data with owners decide, where a preset has none


def format_title(title: Title) -> str:
    """Return a title on one line: "FedCB2O (text, T_G = 20)"."""
    name, details = title
    return f"{name} ({', '.join(details)})" if details else name


def algorithm_title(section: AlgorithmSection, method: Part, algorithm: Algorithm) -> Title:
    """Return the algorithm, and what differs from its defaults."""
    given = dict(section.parameters)
    name = plugins.label(section.name)
    title = _NAMES.get(name, name)
    if "rule" in given:
        title = _text(given.pop("rule"))
    return title, list(_details(section, method, algorithm, given))


def changed_title(
    preset: Mapping[str, Any], table: Mapping[str, Any], before: Title, after: Title
) -> str:
    """Return the title of a preset, with what its changes to `table` changed.

    `before` and `after` are the titles of the algorithms. Another algorithm, and attackers where an
    oracle had none, make the preset's own title wrong.
    """
    # An oracle is a preset without attackers, so that attackers make another experiment of it.
    roles = [settings.get("agents", {}).get("malicious_role") for settings in (preset, table)]
    own, _, detail = str(preset.get("title", "")).partition(" (")
    name, details = after
    if own and roles[0] == roles[1] and name == before[0] and {*before[1]} <= {*details}:
        name = own
        details = [item for item in details if item not in before[1]]
        details = [detail.removesuffix(")"), *details] if detail else details
    setup = list(_setup_changes(preset, table))
    if len(setup) > _MAX_DETAILS:
        setup[_MAX_DETAILS - 1 :] = ["..."]
    return format_title((name, [*details, *setup]))


def _setup_changes(preset: Mapping[str, Any], table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of data and agents that differ from a preset.

    Samples that all train and validate are not named: they are the recommended method's default.
    """
    for section in _SETUP_SECTIONS:
        old, new = (dict(settings.get(section, {})) for settings in (preset, table))
        # The parameters of another function have other meanings: naming them would not help.
        if new.get("name") != old.get("name"):
            yield f"{section} = {_text(new.get('name'))}"
            continue
        known = {"malicious_role"}
        if (new.get("hold_out"), new.get("validation")) == (False, 1.0):
            known |= {"hold_out", "validation"}
        known |= {key for key in _COUNTS if key not in old}
        for key in {**old, **new}:
            if key not in known and old.get(key) != new.get(key):
                yield f"{key} = {_text(new.get(key))}"


def _details(
    section: AlgorithmSection, method: Part, algorithm: Algorithm, given: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the variant, and the parameters and guards that differ from the defaults."""
    function = method.function
    values = {name: p.default for name, p in plugins.parameters(function).items()}
    variant = given.get("variant", values.get("variant"))
    if variant is not None:
        # A variant sets several defaults; its name stands for them.
        values |= (plugins.VARIANTS.get(function) or {}).get(variant, {})
        yield variant
    for key, value in given.items():
        if key != "variant" and value != values.get(key):
            yield f"{'T_G' if key == 'criterion_from_round' else key} = {_text(value)}"
    if isinstance(section.guards, bool):
        yield "with guards" if section.guards else "without guards"
        return
    # A title names what the user changed, and not the guards of the method itself.
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
