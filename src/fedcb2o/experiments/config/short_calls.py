"""Settings of `fedcb2o.run(data=..., rounds=...)`: keywords, and defaults by the data."""

import copy
import inspect
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fedcb2o import plugins
from fedcb2o.data import Dataset, dataset, datasets, sets
from fedcb2o.errors import ConfigError, DataError
from fedcb2o.experiments.config import arguments
from fedcb2o.experiments.config.datasets import dataset_digest
from fedcb2o.experiments.config.loading import KEYS_OF_OTHER_LIBRARIES
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.federated.sections import AgentsSection, TrainingSection, as_component
from fedcb2o.nn import parameters

_ROUNDS = 20
_AGENTS = 10  # that share out data without owners
_MALICIOUS_SHARE = 0.2  # of the agents, where an attack is given
_BUDGET = 10
_DATA_KEYS = {
    {"owner": "owners"}.get(name, name): name
    for name in inspect.signature(dataset).parameters
    if name not in ("x", "y")
}
"""Keywords of data as objects, with those of `fedcb2o.dataset`."""
_SETTING_KEYS = {
    **{name: f"agents.{name}" for name in AgentsSection.model_fields},
    **{name: f"training.{name}" for name in TrainingSection.model_fields},
    **{name: name for name in Experiment.model_fields},
}
"""Keywords of settings, with their dotted keys."""
GIVEN = f"{__name__}:given."
"""Beginning of the names of parts that were given as objects."""
_RUN_KEYS = ("seed", "seeds", "out", "data_dir", "workers", "memory", "resume", "watch", "track")


class _GivenParts:
    """Data and networks that `run` got as objects, under the names that records have of them."""

    def __init__(self) -> None:
        self._parts: dict[str, Any] = {}

    def add(self, name: str, part: Any) -> Any:
        """Keep a part for this process, and return it under its name."""
        part.__module__ = __name__
        part.__name__ = name
        part.__qualname__ = f"given.{name}"
        self._parts[name] = part
        return part

    def __getattr__(self, name: str) -> Any:
        parts = vars(self).get("_parts", {})
        if name in parts:
            return parts[name]
        raise AttributeError(
            "it was an object that `fedcb2o.run` got in another process, and a run's folder has no"
            " copy of it: call `fedcb2o.run` again with the same arguments, `out` and resume=True"
        )


given = _GivenParts()


class _GivenData:
    """Function that returns data which were given as an object."""

    def __init__(self, data: Dataset) -> None:
        self.data: Dataset | None = data

    def __call__(self) -> Dataset:
        """Return the data set."""
        if self.data is None:
            raise ConfigError("the data are an object of another process: name a function of data")
        return self.data

    def __getstate__(self) -> dict[str, Any]:
        # Workers get the samples in shared memory, and never call this function.
        return {**vars(self), "data": None}


class _GivenNetwork:
    """Function that returns copies of a network; the agents begin with its parameters."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def __call__(self, input_shape: Any, num_classes: int) -> nn.Module:
        """Return a copy of the network."""
        return copy.deepcopy(self.network)


def settings_of(
    source: Any, keywords: Mapping[str, Any], data_dir: Path | None = None
) -> tuple[Any, dict[str, Any]]:
    """Return the experiment of a call, and its changes by dotted key.

    Without a `source`, keywords and defaults are a whole experiment. An unknown keyword is a
    ConfigError.
    """
    changes: dict[str, Any] = {}
    options: dict[str, Any] = {}
    sections = {name: keywords[name] for name in ("agents", "training") if name in keywords}
    for name, value in keywords.items():
        if isinstance(sections.get(name), Mapping):
            changes |= {f"{name}.{key}": inner for key, inner in value.items()}
        # None of a keyword stands for its default here, but a preset may need None as a change.
        elif value is None and source is None:
            continue
        elif name in _DATA_KEYS:
            options[_DATA_KEYS[name]] = value
        elif name == "seed":
            changes["seeds"] = arguments.parse_seeds([value])
        elif name in _SETTING_KEYS:
            changes[_SETTING_KEYS[name]] = value
        else:
            hint = plugins.did_you_mean(name, [*_DATA_KEYS, *_SETTING_KEYS, *_RUN_KEYS])
            if name in KEYS_OF_OTHER_LIBRARIES:
                hint = f" It is `{KEYS_OF_OTHER_LIBRARIES[name].rpartition('.')[2]}` here."
            raise ConfigError(
                f"`run` has no argument `{name}`.{hint} A key of another section goes into a table,"
                ' such as algorithm={"name": "fedcb2o", "alpha": 10}'
            )
    data = changes.pop("data", None)
    if data is None and (options or source is None):
        what = "an experiment needs `data`"
        if options:
            what = f"`{_keyword(options)}` describes `data`"
        raise ConfigError(
            f"{what}: give samples and labels, data=(x, y), or the name of a data set"
        )
    found = None
    if data is not None:
        component = _data_component(data, options)
        changes["data"] = component
        if source is None:
            found = _load(component, data_dir)
    if "model" in changes:
        changes["model"] = _model_component(changes["model"])
    if found is None:
        return source, changes
    named = {} if "name" in changes else {"title": ""}  # that of the algorithm
    return {"name": "run", **named}, {**_defaults(found, changes), **changes}


def _data_component(data: Any, options: Mapping[str, Any]) -> Any:
    """Return the section `data`; objects become a function that returns them."""
    if isinstance(data, str | Path) and str(data).endswith(".csv"):
        import pandas as pd

        path = str(data)
        data = pd.read_csv(path)
        # pandas reads such a file without an error, as one column of text.
        if len(data.columns) == 1 and ";" in data.columns[0]:
            raise DataError(
                f"{path} separates its columns by semicolons: give the table in place of the file,"
                f' `data=pandas.read_csv("{path}", sep=";")`'
            )
    is_named = isinstance(data, str) or callable(data)
    if is_named or (isinstance(data, Mapping) and "name" in data):
        if options:
            raise ConfigError(
                f"`{_keyword(options)}` is for data as objects, and `data` names a function:"
                ' give its parameters in a table, such as {"name": "digits", "test_share": 0.5}'
            )
        return as_component(data)
    if isinstance(data, Mapping):
        if "owner" in options:
            raise ConfigError("`owners` name the owner of each sample, and `data` has owners")
        data = datasets(data, **options)
    elif isinstance(data, tuple) and len(data) == 2:
        data = dataset(*data, **options)
    elif not isinstance(data, Dataset):
        data = dataset(data, **options)
    elif options:
        raise DataError(f"`{_keyword(options)}` goes into `fedcb2o.dataset`, which made `data`")
    # The name has the content, so that equal samples resume a run and others do not.
    name = f"data_{dataset_digest(data).replace('-', '_')}"
    return {"name": given.add(name, _GivenData(data))}


def _keyword(options: Mapping[str, Any]) -> str:
    """Return the keyword of the first option."""
    return next(name for name, option in _DATA_KEYS.items() if option in options)


def _model_component(model: Any) -> Any:
    """Return the section `model`; a network becomes a function that copies it."""
    if not isinstance(model, nn.Module):
        return as_component(model)
    theta = parameters.flatten(model).detach().cpu()
    # Two networks of one class differ by their layers, and by their weights.
    checksum = zlib.crc32(theta.numpy().tobytes(), zlib.crc32(repr(model).encode()))
    return {"name": given.add(f"network_{checksum:08x}", _GivenNetwork(model))}


def _load(component: Mapping[str, Any], data_dir: Path | None) -> Dataset:
    function = plugins.resolve_and_bind("data set", component, sets)
    options = {"data_dir": data_dir} if "data_dir" in plugins.parameters(function) else {}
    data = function(**options)
    if not isinstance(data, Dataset):
        raise ConfigError(f"`data` returned a {type(data).__name__}, expected a fedcb2o.Dataset")
    return data


def _defaults(data: Dataset, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that fit the data, where the changes have none."""
    owners = data.names.owners
    count = len(owners) or _AGENTS
    malicious = changes.get("agents.malicious")
    if malicious is None:
        malicious = max(1, round(_MALICIOUS_SHARE * count)) if changes.get("attack") else 0
    # Of owners, the attackers are taken off; without owners the share is of a usual number.
    benign = changes.get("agents.benign", max(1, count - sum(_counts(malicious))))
    total = sum(_counts(benign)) + sum(_counts(malicious))
    found: dict[str, Any] = {
        "seeds": (0,),
        "rounds": _ROUNDS,
        "agents.num_clusters": max(len(_counts(benign)), len(_counts(malicious))),
        "agents.benign": benign,
        "agents.malicious": malicious,
        "agents.budget": max(1, min(_BUDGET, total - 1)),
    }
    if not owners:
        found["agents.benign_samples"] = max(2, len(data.pool) // max(1, total))
    x = data.pool.x
    if "model" not in changes:
        if not (x.is_floating_point() or x.ndim == 4):
            raise ConfigError("`model` is missing: these samples are no images and no numbers")
        found["model"] = {"name": "cnn" if x.ndim == 4 else "mlp"}
    if not data.class_names:
        # Numbers have no cross-entropy.
        found["training.loss"] = "squared_error"
    return found


def _counts(number: Any) -> tuple[int, ...]:
    """Return numbers of agents by cluster."""
    return tuple(number) if isinstance(number, list | tuple) else (number,)
