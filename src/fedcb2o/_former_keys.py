"""Renamed plug-ins and parameters: old names in configurations keep working, with a warning.

Recorded digests and fingerprints use the old names, so that a run recorded before a renaming can
still be resumed and compared.

Example:
    >>> original_settings({"algorithm": {"name": "fedcb2o", "interpolation": 0.5}})
    {'algorithm': {'name': 'fedcb2o', 'judged_at': 0.5}}
"""

import warnings
from collections.abc import Container, Mapping
from typing import Any

PLUGINS: Mapping[str, str] = {"trash": "random_model"}
"""Old name of a plug-in to its new name."""

_FEDCB2O = {
    "tested": "loss_tolerance",
    "ball": "max_distance",
    "apart": "min_distance",
    "judged_at": "interpolation",
    "counts_from": "min_contacts",
}
PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "fedcb2o": _FEDCB2O,
    "fedcbo": _FEDCB2O,
    "by_rule": {"judges": "needs_losses"},
    "ifca": {"trial": "trial_rounds"},
    "mimic": {"whom": "agent", "clusters_on": "cluster_offset"},
    "hybrid_sparse": {"kept": "kept_share"},
}
"""Old names of a plug-in's parameters to their new names, by the new name of the plug-in."""

VALUES: Mapping[str, Mapping[Any, Any]] = {"counts_from": {"first": 1, "second": 2}}
"""Old values of a renamed parameter to their new values, by the old name of the parameter."""


def current_name(name: Any) -> Any:
    """Return the current name of a plug-in, and warn about an old one.

    Args:
        name: Name in a configuration; anything but a renamed plug-in is returned as it is.

    Returns:
        The current name.
    """
    if not isinstance(name, str) or name not in PLUGINS:
        return name
    _warn(f"`{name}` is now called `{PLUGINS[name]}`")
    return PLUGINS[name]


def current_parameters(
    name: Any, values: Mapping[str, Any], known: Container[str] = ()
) -> dict[str, Any]:
    """Return a plug-in's parameters under their current names; warn about old ones.

    Args:
        name: Current name of the plug-in.
        values: Parameters from a configuration. If both names of one parameter occur, the later
        wins.
        known: Parameters of the function, which are never renamed.

    Returns:
        The parameters under their current names.
    """
    table = PARAMETERS.get(name, {}) if isinstance(name, str) else {}
    current: dict[str, Any] = {}
    for key, value in values.items():
        if key not in table or key in known:
            current[key] = value
            continue
        _warn(f"`{key}` of `{name}` is now called `{table[key]}`")
        current[table[key]] = VALUES.get(key, {}).get(value, value)
    return current


def original_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under the old names, for digests and fingerprints of runs.

    Args:
        settings: Settings of an experiment, under old or current names.

    Returns:
        The settings with the old name of every renamed plug-in and parameter.
    """
    return {key: _original(value, {}) for key, value in settings.items()}


def original_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes of settings under the old names, to compare them with other changes.

    Args:
        changes: Tables of an experiment. One without a name may change any plug-in.

    Returns:
        The changes with the old name of every renamed plug-in and parameter.
    """
    unnamed: dict[str, str] = {}
    for table in PARAMETERS.values():
        unnamed |= table
    return {key: _original(value, unnamed) for key, value in changes.items()}


def _original(value: Any, unnamed: Mapping[str, str]) -> Any:
    """Return a value under the old names; `unnamed` is for tables without a name."""
    if isinstance(value, list | tuple):
        return [_original(item, unnamed) for item in value]
    if not isinstance(value, Mapping):
        return value

    name = value.get("name")
    table = PARAMETERS.get(name, {}) if isinstance(name, str) else unnamed
    old_keys: dict[str, str] = {new: old for old, new in table.items()}
    old_names = {new: old for old, new in PLUGINS.items()}
    original: dict[str, Any] = {}
    for key, item in value.items():
        old_key: Any = old_keys.get(key, key)
        old_values = {new: old for old, new in VALUES.get(old_key, {}).items()}
        original[old_key] = _original(item, unnamed)
        if old_values and not isinstance(item, Mapping | list | tuple):
            original[old_key] = old_values.get(item, item)
    if isinstance(name, str) and name in old_names:
        original["name"] = old_names[name]
    return original


def _warn(text: str) -> None:
    message = f"{text}; the old name will be removed in the next minor version"
    warnings.warn(message, DeprecationWarning, stacklevel=4)
