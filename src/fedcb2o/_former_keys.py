"""Renamed plug-ins and parameters: old names in configurations keep working, with a warning.

Recorded digests and fingerprints use the old names, so that a run recorded before a renaming can
still be resumed and compared.

Example:
    >>> original_settings({"attack": {"name": "hybrid_sparse", "kept_share": 0.5}})
    {'attack': {'name': 'hybrid_sparse', 'kept': 0.5}}
"""

import sys
import warnings
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

PLUGINS: Mapping[str, str] = {"trash": "random_model"}
"""Old name of a plug-in to its new name."""

PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "by_rule": {"judges": "needs_losses"},
    "ifca": {"trial": "trial_rounds"},
    "mimic": {"whom": "agent", "clusters_on": "cluster_offset"},
    "hybrid_sparse": {"kept": "kept_share"},
}
"""Old names of a plug-in's parameters to their new names, by the new name of the plug-in."""

_ALGORITHM_2 = ("fedcb2o", "fedcbo")
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
"""Former parameters of fedcb2o and fedcbo to the guards that replace them."""

_REMOVED: dict[str, Any] = {
    "point": "mean",
    "counts_from": "first",
    "min_contacts": 1,
    "likelihood": "loss",
}
"""Removed parameters of fedcb2o and fedcbo, with the values that are the same without them."""

_REMOVED_FROM_GAP = ("z", "against")
"""Removed parameters of class_loss_gap."""

_REASON = "it gained nothing that the guards do not gain"

_ORIGINAL = {"judged_at": 1.0, "counts_from": "first", "point": "mean", "likelihood": "loss"}
"""Former parameters of fedcb2o and fedcbo with the defaults that old digests contain."""


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
        if name == "class_loss_gap" and key in _REMOVED_FROM_GAP and key not in known:
            _warn_removed(key, name)
            continue
        if key not in table or key in known:
            current[key] = value
            continue
        _warn(f"`{key}` of `{name}` is now called `{table[key]}`")
        current[table[key]] = value
    return current


def current_algorithm(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `algorithm` with guards in place of former parameters; warn about these.

    Args:
        table: The section.

    Returns:
        The section with the key `guards`, if it has any, and without removed parameters.
    """
    name = table.get("name")
    guards: dict[str, Any] = {}
    current: dict[str, Any] = {}
    for key, value in table.items():
        if name not in _ALGORITHM_2 or key not in (*_GUARDS, *_REMOVED):
            current[key] = value
        elif key in _REMOVED:
            if value not in (None, _REMOVED[key]):
                _warn_removed(key, name)
        elif value is not None and not (_GUARDS[key] == "interpolation" and value == 1):
            _warn(f"`{key}` of `{name}` is now `guards.{_GUARDS[key]}`")
            guards[_GUARDS[key]] = value

    if "criterion" in current:
        current["criterion"] = _current_criterion(current["criterion"])
    selection = table.get("selection")
    if isinstance(selection, Mapping) and "newcomers" in selection:
        _warn("`newcomers` of a selection is now `guards.newcomer_share`")
        guards["newcomer_share"] = selection["newcomers"]
        current["selection"] = {k: v for k, v in selection.items() if k != "newcomers"}
    if guards and current.get("guards") is not False:
        current["guards"] = {**guards, **(current.get("guards") or {})}
    return current


def _current_criterion(criterion: Any) -> Any:
    """Return a criterion, and the parts of a combination, without removed parameters."""
    if not isinstance(criterion, Mapping):
        return criterion
    current = current_parameters(criterion.get("name"), criterion)
    if isinstance(current.get("of"), list | tuple):
        current["of"] = [_current_criterion(part) for part in current["of"]]
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


def warn_former_preset(name: str, present: str) -> None:
    """Warn that a preset has another name, or is now a change of another one.

    Args:
        name: The former preset.
        present: The preset that it changes.
    """
    hint = ""
    if name.endswith("-fedcb2o") and present.endswith("-paper"):
        recommended = name.replace("-fedcb2o", "-fedassay")
        hint = f"; the recommended method, formerly of this name, is `{recommended}`"
    _warn(f"the preset `{name}` is now `{present}`, with changes where they differ{hint}")


def _warn_removed(key: str, name: str) -> None:
    message = f"`{key}` of `{name}` is gone and has no effect: {_REASON}"
    warnings.warn(message, DeprecationWarning, stacklevel=_levels_to_caller())


def _warn(text: str) -> None:
    message = f"{text}; the old name will be removed in the next minor version"
    warnings.warn(message, DeprecationWarning, stacklevel=_levels_to_caller())


def _levels_to_caller() -> int:
    """Return the `stacklevel` of the innermost frame outside of this package."""
    package = str(Path(__file__).parent)
    level = 1
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(package) and frame.f_back is not None:
        frame = frame.f_back
        level += 1
    return level
