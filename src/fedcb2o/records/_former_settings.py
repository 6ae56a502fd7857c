"""Renamed plug-ins and parameters in files that earlier versions wrote.

Recorded digests and fingerprints use the original names, so that a run recorded before a renaming
can still be resumed and compared.

Example:
    >>> original_settings({"attack": {"name": "hybrid_sparse", "kept_share": 0.5}})
    {'attack': {'name': 'hybrid_sparse', 'kept': 0.5}}
    >>> current_settings({"attack": {"name": "hybrid_sparse", "kept": 0.5}})
    {'attack': {'name': 'hybrid_sparse', 'kept_share': 0.5}}
"""

from collections.abc import Mapping
from typing import Any

# Original name of a plug-in to its current name.
_PLUGINS: Mapping[str, str] = {"trash": "random_model"}

# Original names of a plug-in's parameters to the current ones, by the name of the plug-in.
_PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "by_rule": {"judges": "needs_losses"},
    "ifca": {"trial": "trial_rounds"},
    "mimic": {"whom": "agent", "clusters_on": "cluster_offset"},
    "hybrid_sparse": {"kept": "kept_share"},
}
# The same for changes of a plug-in that do not name it.
_ANY_PARAMETER = {old: new for table in _PARAMETERS.values() for old, new in table.items()}

_ALGORITHM_2 = ("fedcb2o", "fedcbo")
# Original parameters of fedcb2o and fedcbo to the guards that replace them.
_GUARDS = {
    "tested": "loss_tolerance",
    "loss_tolerance": "loss_tolerance",
    "ball": "max_distance",
    "max_distance": "max_distance",
    "apart": "min_distance",
    "min_distance": "min_distance",
    "judged_at": "interpolation",
    "interpolation": "interpolation",
}

# Removed parameters of fedcb2o and fedcbo.
_REMOVED = ("point", "counts_from", "min_contacts", "likelihood")
_REMOVED_FROM_GAP = ("z", "against")  # removed parameters of class_loss_gap

# Original parameters of fedcb2o and fedcbo with the defaults that old digests contain.
_ORIGINAL = {"judged_at": 1.0, "counts_from": "first", "point": "mean", "likelihood": "loss"}


def current_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings under the current names, without removed parameters."""
    return {key: _current(value, key) for key, value in settings.items()}


def _current(value: Any, section: str) -> Any:
    """Return a value under the current names; `section` is the key that holds it."""
    if isinstance(value, list | tuple):
        return [_current(item, section) for item in value]
    if not isinstance(value, Mapping):
        return _PLUGINS.get(value, value) if section == "attack" else value

    name = value.get("name")
    renamed = _PARAMETERS.get(name, {}) if isinstance(name, str) else _ANY_PARAMETER
    removed: tuple[str, ...] = _REMOVED_FROM_GAP if name == "class_loss_gap" else ()
    guards: dict[str, Any] = {}
    if section == "algorithm" and name in (None, *_ALGORITHM_2):
        removed = (*_REMOVED, *_GUARDS)
        # The same models are weighed without these values, so they make no guard.
        unset = {("judged_at", 1), ("interpolation", 1)}
        for key in _GUARDS.keys() & value.keys():
            if value[key] is not None and (key, value[key]) not in unset:
                guards[_GUARDS[key]] = value[key]
        selection = value.get("selection")
        if isinstance(selection, Mapping) and "newcomers" in selection:
            guards["newcomer_share"] = selection["newcomers"]
    if section == "selection":
        removed = ("newcomers",)

    current = {
        renamed.get(key, key): _current(item, key)
        for key, item in value.items()
        if key not in removed
    }
    if isinstance(name, str) and name in _PLUGINS:
        current["name"] = _PLUGINS[name]
    if guards and current.get("guards") is not False:
        current["guards"] = {**guards, **(current.get("guards") or {})}
    return current


def original_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under the original names, for digests and fingerprints of runs."""
    return {key: _original(value, {}) for key, value in settings.items()}


def original_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes under the original names; those without a name may be of any plug-in."""
    return {key: _original(value, _ANY_PARAMETER) for key, value in changes.items()}


def _original(value: Any, unnamed: Mapping[str, str]) -> Any:
    """Return a value under the original names; `unnamed` is for tables without a name."""
    if isinstance(value, list | tuple):
        return [_original(item, unnamed) for item in value]
    if not isinstance(value, Mapping):
        return value

    name = value.get("name")
    table = _PARAMETERS.get(name, {}) if isinstance(name, str) else unnamed
    old_keys: dict[str, str] = {new: old for old, new in table.items()}
    old_names = {new: old for old, new in _PLUGINS.items()}
    original: dict[str, Any] = {}
    if isinstance(name, str) and name in _ALGORITHM_2:
        original |= _ORIGINAL
        value = {key: item for key, item in value.items() if key != "variant"}
        old_keys = {"interpolation": "judged_at", "min_contacts": "counts_from"}
    for key, item in value.items():
        old_key: Any = old_keys.get(key, key)
        original[old_key] = _original(item, unnamed)
    if original.get("counts_from") == 1:
        original["counts_from"] = "first"
    if isinstance(name, str) and name in old_names:
        original["name"] = old_names[name]
    return original
