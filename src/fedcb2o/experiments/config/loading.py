"""Loading of an experiment, with errors of one line."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedcb2o import plugins
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config.resolved import COMPONENT_SECTIONS
from fedcb2o.experiments.config.settings import Experiment, with_recommended_agents
from fedcb2o.experiments.config.tables import (
    apply_changes,
    preset,
    read_origin,
    read_table,
    resolve_extends,
)
from fedcb2o.experiments.config.titles import Title, algorithm_title, changed_title, format_title
from fedcb2o.federated.guards.checks import Guards
from fedcb2o.federated.sections import AgentsSection, Privacy, TrainingSection
from fedcb2o.simulation.traces import ClockSection

_LOGGER = logging.getLogger(__name__)
_PRINTABLE_TYPES = (str, int, float, list, tuple, date, time, type(None))
_TITLED_SECTIONS = ("algorithm", "agents", "data")  # whose changes a title names
KEYS_OF_OTHER_LIBRARIES = {"lr": "training.gamma", "learning_rate": "training.gamma"}
"""Keys of other libraries, and the keys of the same meaning in an experiment."""


def load(
    source: str | Path | Mapping[str, Any] | Experiment, changes: Mapping[str, Any] | None = None
) -> Experiment:
    """Load and validate an experiment.

    Args:
        source: A preset's name, a TOML file, a mapping, or an `Experiment`.
        changes: New values by dotted key, such as {"algorithm.alpha": 2}.

    Returns:
        The experiment with its changes.

    Raises:
        ConfigError: With one line that names the key, the value and the cure.
    """
    table, where = read_settings(source, changes)
    try:
        experiment = Experiment.model_validate(table)
    except ValidationError as error:  # pydantic's own text has many lines
        raise ConfigError(f"{where}: {describe_error(error, table)}") from None
    if experiment.title:
        return experiment
    after = _algorithm_title(experiment)
    title = format_title(after)
    if isinstance(source, str) and changes and not source.endswith(".toml"):
        original = preset(source)
        former = {**table, "algorithm": original.get("algorithm", {})}
        before = _algorithm_title(Experiment.model_validate(former))
        title = changed_title(original, table, before, after)
    return experiment.model_copy(update={"title": title})


def warn_of_training_share(
    source: str | Path | Mapping[str, Any] | Experiment, changes: Mapping[str, Any]
) -> None:
    """Warn where the algorithm's default changes the share of samples that train.

    The share is compared with that of the preset or file from which the experiment comes.
    """
    if isinstance(source, Experiment):
        return
    name, original, own = read_origin(source)
    keys = {*own, *(key.removeprefix("agents.") for key in changes)}
    if keys & {"hold_out", "validation", "agents"}:
        return
    others = {key: value for key, value in changes.items() if key.split(".")[0] != "algorithm"}
    table, where = read_settings(source, changes)
    before = _held_out(apply_changes(original, others, where))
    shares = [100 * (1 - is_out * part) for is_out, part in (before, _held_out(table))]
    if shares[0] != shares[1]:
        _LOGGER.warning(
            "%s: with this algorithm %.0f%% of an agent's samples train, with %s %.0f%%. To keep "
            "those, set `agents.hold_out` = %s and `agents.validation` = %g.",
            *(table["title"] or table["name"], shares[1]),
            *(f"that of {name}" if "algorithm" in original else "the default one", shares[0]),
            *(str(before[0]).lower(), before[1]),
        )


def _held_out(settings: Mapping[str, Any]) -> tuple[bool, float]:
    """Return whether validation samples do not train, and their share of an agent's samples."""
    agents = with_recommended_agents(settings).get("agents", {})
    hold_out, validation = (
        agents.get(key, AgentsSection.model_fields[key].default)
        for key in ("hold_out", "validation")
    )
    return hold_out, validation


def _algorithm_title(experiment: Experiment) -> Title:
    resolved = experiment.resolved
    return algorithm_title(experiment.algorithm, resolved.method, resolved.algorithm)


def read_settings(
    source: str | Path | Mapping[str, Any] | Experiment, changes: Mapping[str, Any] | None
) -> tuple[dict[str, Any], str]:
    """Return the settings of an experiment with its changes, not validated, and their origin."""
    if not isinstance(source, str | Path | Mapping | Experiment):
        raise ConfigError(
            "an experiment is a preset's name, a file FILE.toml, a mapping or an Experiment, "
            f"got {_short_repr(source)}"
        )
    if isinstance(source, Experiment):
        # Only what was set: a default may depend on what the changes set, as those of [agents] do.
        table = source.model_dump(exclude_unset=True)
        where = f"experiment `{source.name}`"
    elif isinstance(source, Mapping):
        table = resolve_extends(dict(source))
        where = "the experiment"
    elif str(source).endswith(".toml"):
        table = read_table(Path(source))
        where = str(source)
    else:
        table = preset(str(source))
        where = f"preset `{source}`"
        if any(key.split(".")[0] in _TITLED_SECTIONS for key in changes or {}):
            table["title"] = ""  # `load` makes one that names the changes

    if "defences" in table and "attacks" in table:
        raise ConfigError(f"{where} is a grid: `fedcb2o bench` runs it")
    table = apply_changes(table, changes or {}, where)
    if changes:
        where += " with changes"
    table.setdefault("title", table.get("name", ""))
    return table, where


# Parts that pydantic adds to the path of a key with values of several types.
_UNION_BRANCHES = ("constrained-int", "constrained-float", "Guards")


def describe_error(error: ValidationError, table: Mapping[str, Any]) -> str:
    """Describe the first problem of a configuration in one line: key, problem and cure."""
    problem = error.errors()[0]
    # Users know the keys of a file, and not the branches of pydantic's unions.
    path = [str(part) for part in problem["loc"] if part not in _UNION_BRANCHES]
    if path[-2:-1] == ["name"]:  # another branch of a union
        path.pop()
    key = ".".join(path)
    kind = problem["type"]
    if kind == "extra_forbidden":
        return f"there is no key `{key}`.{_suggest_key(path, table)}"
    if kind == "missing":
        return f"the key `{key}` is missing"
    if kind == "value_error":
        return str(problem["ctx"]["error"])

    # A message is one line, however large the value is.
    got = _short_repr(problem["input"])
    if kind == "string_pattern_mismatch":
        return (
            f"`{key}` must have letters, digits, `.`, `_` and `-`, and begin with a letter or a "
            f"digit, got {got}"
        )
    if kind == "model_type":
        hint = ' (a function of your own: {"name": function})' if key in ("data", "model") else ""
        if key == "algorithm.guards":
            hint = ", or true or false"
        return f"`{key}` must be a section, with keys of its own{hint}, got {got}"
    if path[-1:] == ["name"] and len(path) > 1:
        return (
            f'`{key}` must be the name of a function, "package.module:function", or in Python a '
            f"function, got {got}"
        )
    message = problem["msg"][0].lower() + problem["msg"][1:]
    message = message.replace("tuple", "list").replace("dictionary", "table")
    if isinstance(problem["input"], Mapping):
        return f"`{key}`: {message}"
    return f"`{key}`: {message}, got {got}"


def _short_repr(value: Any) -> str:
    """Return the value as text where that is a short line, else its type."""
    if isinstance(value, _PRINTABLE_TYPES):
        text = repr(value)
        if len(text) <= 100 and "\n" not in text:
            return text
    return f"a {type(value).__name__}"


def _suggest_key(path: Sequence[str], table: Mapping[str, Any]) -> str:
    """Return ' Did you mean `algorithm.alpha`?' for an unknown key, by all sections."""
    if path[-1] in KEYS_OF_OTHER_LIBRARIES:
        return f" It is `{KEYS_OF_OTHER_LIBRARIES[path[-1]]}` here"
    keys = list(Experiment.model_fields)
    for section, model in (("agents", AgentsSection), ("training", TrainingSection)):
        keys += [f"{section}.{name}" for name in model.model_fields]
    keys += [f"algorithm.guards.{name}" for name in Guards.model_fields]
    keys += [f"training.privacy.{name}" for name in Privacy.model_fields]
    keys += [f"clock.{name}" for name in ClockSection.model_fields]
    for section, kind, namespace in COMPONENT_SECTIONS:
        # Another problem of the section is reported elsewhere.
        with contextlib.suppress(ConfigError, KeyError, TypeError):
            function = plugins.resolve(kind, table[section]["name"], namespace)
            keys += [f"{section}.{name}" for name in plugins.parameters(function)]
    return plugins.did_you_mean(path[-1], keys)
