"""An experiment: everything that its numbers depend on, validated once.

A configuration is a TOML file, a preset's name, or an `Experiment` made in Python. Functions are named by their
built-in name, by "package.module:function", or in Python given themselves; the rest of their table are their
keyword arguments.
"""

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedcb2o import plugins
from fedcb2o.data import sets, skews
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config.tables import (
    apply_changes,
    preset,
    read_table,
    resolve_extends,
    to_plain,
)
from fedcb2o.federated import algorithms, attacks, losses, metrics, optimisers, topology
from fedcb2o.federated.local_update import Precision
from fedcb2o.federated.run_spec import ConvolutionKernel, LinearKernel
from fedcb2o.federated.types import THREAT, Attack, Threat
from fedcb2o.nn import architectures
from fedcb2o.nn.batch_norm import StatisticsMode
from fedcb2o.nn.memory_layout import MemoryLayout
from fedcb2o.records import RESERVED_COLUMNS, metric_name, result_settings

_PRINTABLE_TYPES = (str, int, float, list, tuple, date, time, type(None))
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """A section of an experiment; unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class Component(BaseModel):
    """A function by name and its keyword arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str | Callable[..., Any]

    @property
    def parameters(self) -> dict[str, Any]:
        """The keyword arguments."""
        return dict(self.model_extra or {})

    def with_defaults(self, kind: str, room: Any) -> dict[str, Any]:
        """The function's name and all of its keyword arguments, defaults among them."""
        known = plugins.parameters(plugins.resolve(kind, self.name, room))
        defaults = {key: p.default for key, p in known.items() if p.default not in (None, p.empty)}
        return {"name": self.name, **defaults, **self.parameters}

    def bind(self, kind: str, room: Any, **fixed: Any) -> functools.partial[Any]:
        """The function with its parameters, checked against its signature; raises ConfigError."""
        function = plugins.resolve(kind, self.name, room)
        return functools.partial(function, **plugins.bind(kind, function, self.parameters), **fixed)


def as_component(component: Any) -> Any:
    """A table for a component that is a mere name or function."""
    return {"name": component} if isinstance(component, str) or callable(component) else component


class AttackSection(Component):
    """An attack on data or on models; one on models may poison `data` too. Before `from_round` there is no attack, and
    `sybils` have a new identity in every round. `claims` is how many samples attackers say that they trained on."""

    data: Component | None = None
    from_round: Annotated[int, Field(ge=0, strict=True)] = 0
    sybils: Annotated[bool, Field(strict=True)] = False
    claims: Annotated[int, Field(ge=1, strict=True)] | None = None

    @field_validator("data", mode="before")
    @classmethod
    def _as_component(cls, data: Any) -> Any:
        return as_component(data)

    @property
    def data_attack(self) -> Component | None:
        """The attack on data: itself, or the one that an attack on models adds."""
        return self if _threat_of(self) is None else self.data

    def build(self) -> Attack:
        """The attack, its parameters checked; raises ConfigError where its parts do not fit together."""
        threat = _threat_of(self)
        name = plugins.label(self.name)
        data = self.data
        function = self.bind("attack", attacks)
        poison = None if data is None else data.bind("attack", attacks)
        since: dict[str, Any] = {
            "from_round": self.from_round,
            "sybils": self.sybils,
            "claimed_samples": self.claims,
        }
        if threat is None:
            if data is not None:
                raise ConfigError(
                    f"`attack.data` goes with an attack on models, and `{name}` is one on data itself"
                )
            if next(iter(inspect.signature(function).parameters), None) == "view":
                raise ConfigError(
                    f"the attack `{name}` does not declare what it knows: write @fedcb2o.knows(), with "
                    '"fellows" or "benign" in it for what it sees, above the function'
                )
            return Attack(poison=function, **since)
        if data is None and threat.on_poisoned_data:
            raise ConfigError(
                f"the attack `{name}` publishes what was learnt from poisoned data: name an attack on them, such as "
                'data = { name = "label_flip", source = 9, target = 4 }'
            )
        if data is not None and _threat_of(data) is not None:
            raise ConfigError(
                f"`attack.data` takes an attack on data, and `{plugins.label(data.name)}` is one on models"
            )
        return Attack(poison=poison, craft=function, threat=threat, **since)

    def with_defaults(self, kind: str, room: Any) -> dict[str, Any]:
        """The function's name and all of its keyword arguments, defaults among them, with `data` and `from_round`."""
        data = {} if self.data is None else {"data": self.data.with_defaults(kind, room)}
        start = {
            key: value
            for key in ("from_round", "sybils", "claims")
            if (value := getattr(self, key))
        }
        return {**super().with_defaults(kind, room), **data, **start}


class ModelSection(Component):
    """A network; `buffers` says what becomes of the statistics of its norms, which are no parameters."""

    buffers: StatisticsMode = "local"

    def with_defaults(self, kind: str, room: Any) -> dict[str, Any]:
        """The function's name and all of its keyword arguments, defaults among them, with `buffers`."""
        kept = {} if self.buffers == "local" else {"buffers": self.buffers}
        return {**super().with_defaults(kind, room), **kept}


def _threat_of(attack: Component) -> Threat | None:
    return THREAT.get(plugins.resolve("attack", attack.name, attacks))


_KEYS_OF_OTHER_LIBRARIES = {"lr": "training.gamma", "learning_rate": "training.gamma"}
"""Keys by what they are called elsewhere, where that is like nothing here."""

COMPONENT_SECTIONS = (
    ("data", "data set", sets),
    ("model", "model", architectures),
    ("algorithm", "algorithm", algorithms),
    ("attack", "attack", attacks),
)

_OPTIONAL_COMPONENTS = (
    ("agents", "graph", topology),
    ("agents", "skew", skews),
    ("training", "optimiser", optimisers),
    ("training", "loss", losses),
)
"""The keys of sections that name a function, if they are given, and where the built-in ones are."""


class AgentsSection(Section):
    """Who takes part, what each holds, and how they meet (Section "Experiments", Dataset & Attack Setup).

    `malicious_role` says what the malicious agents do: "attack"; "clean" (train on true labels, still collude: the
    clean twin of an attacked run); "benign" (no attack, and select peers like everybody); "removed". By default they
    count their own model when they mix, as in the authors' released code; the paper's text has
    `colluders_own_model` = false. `assumed_share` is the share of attackers among those received that rules are told
    to assume, by default that of all agents. Where agents bring their own data, so many of their owners are agents, and
    `benign_samples` and `malicious_samples` are the most that each holds, if they are given.
    """

    num_clusters: Literal[1, 2, 4] = 2
    benign: PositiveInt
    malicious: NonNegativeInt
    malicious_role: Literal["attack", "clean", "benign", "removed"] = "attack"
    benign_samples: PositiveInt | None = None
    malicious_samples: PositiveInt | None = None
    skew: Component | None = None
    validation: Annotated[float, Field(gt=0, le=1)] = 0.2
    split: Literal["random", "stratified", "released"] = "random"
    hold_out: bool = True
    validation_loss: Literal["samples", "batches"] = "samples"
    budget: PositiveInt
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0
    graph: Component | None = None
    initialisation: Literal["common", "independent"] = "common"
    colluders_own_model: bool = True
    assumed_share: Annotated[float, Field(ge=0, lt=1)] | None = None

    @property
    def num_agents(self) -> int:
        """N, the number of agents in the system."""
        malicious = 0 if self.malicious_role == "removed" else self.malicious
        return self.num_clusters * (self.benign + malicious)

    @property
    def malicious_share(self) -> float:
        """The attackers' share, which rules that assume one are told: that of those who might attack."""
        if self.malicious_role == "removed":
            return 0.0
        return (
            self.malicious / (self.benign + self.malicious)
            if self.assumed_share is None
            else self.assumed_share
        )

    @field_validator("graph", "skew", mode="before")
    @classmethod
    def _as_component(cls, component: Any) -> Any:
        return as_component(component)


class TrainingSection(Section):
    """LocalUpdate: SGD, or another `optimiser`, with learning rate lambda2 * gamma (alg:FedCB2O)."""

    gamma: Annotated[float, Field(gt=0)] = 0.004
    lambda2: Annotated[float, Field(gt=0)] = 1.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    batch_size: PositiveInt = 64
    local_epochs: PositiveInt = 5
    local_steps: PositiveInt | None = None
    precision: Precision = "float32"
    optimiser: Component | None = None
    loss: Component | None = None

    @field_validator("optimiser", "loss", mode="before")
    @classmethod
    def _as_component(cls, component: Any) -> Any:
        return as_component(component)


class Experiment(Section):
    """One experiment, run once for each of its seeds."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    title: str = ""
    description: str = ""
    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1, strict=False)] = (
        0,
        1,
        2,
    )  # a list will do
    rounds: PositiveInt
    evaluate_every: PositiveInt = 1
    checkpoint_every: PositiveInt = 1
    evaluate_on: Literal["test", "tuning", "redrawn"] = "test"
    linear: LinearKernel | None = None
    layout: MemoryLayout | None = None
    convolution: ConvolutionKernel | None = None
    device: str | None = None
    together: Annotated[int, Field(ge=1, le=2**31)] | None = None
    data: Component
    agents: AgentsSection
    model: ModelSection
    training: TrainingSection = TrainingSection()
    algorithm: Component
    attack: AttackSection | None = None
    metrics: Annotated[tuple[Component, ...], Field(min_length=1, strict=False)] | None = None

    @field_validator("metrics", mode="before")
    @classmethod
    def _as_components(cls, metrics: Any) -> Any:
        return (
            [as_component(each) for each in metrics]
            if isinstance(metrics, list | tuple)
            else metrics
        )

    @field_validator("device")
    @classmethod
    def _cpu_is_default(cls, device: str | None) -> str | None:
        return None if device == "cpu" else device

    @model_validator(mode="after")
    def _check_consistency(self) -> "Experiment":
        n = self.agents.num_agents
        if not 1 <= self.agents.budget <= max(1, n - 1):
            raise ValueError(
                f"`agents.budget` must be between 1 and num_agents - 1 = {n - 1}, got {self.agents.budget}"
            )
        if self.agents.validation == 1 and self.agents.hold_out:
            raise ValueError(
                "`agents.validation` = 1 leaves nothing to train on: take less, or set `agents.hold_out` = false to "
                "train on all of it, too"
            )
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"`seeds` must differ, got {list(self.seeds)}")
        if self.attacked and self.attack is None:
            raise ValueError(
                'malicious agents that attack need an [attack] section (or agents.malicious_role = "clean")'
            )
        if self.training.precision == "tf32" and (self.device or "cpu").split(":")[0] != "cuda":
            raise ValueError(
                f'`training.precision` = "tf32" needs a CUDA device, and `device` is "{self.device or "cpu"}": '
                'take "float32" or "bfloat16", or another `device`'
            )
        self.data.bind("data set", sets)
        self.model.bind("model", architectures)
        for _, key, room, component in self._optional_components():
            component.bind(key, room)
        self.user_metrics()
        algorithm = self.algorithm.bind("algorithm", algorithms)()
        if not isinstance(algorithm, algorithms.Algorithm):
            raise ValueError(
                f"the algorithm returned a {type(algorithm).__name__}, expected an Algorithm"
            )
        factor = algorithm.factor(self.training.gamma)
        if (
            algorithm.needs_losses
            and self.agents.malicious
            and self.agents.malicious_role == "benign"
        ):
            raise ValueError(
                'malicious agents with `agents.malicious_role` = "benign" hold no validation data, so the algorithm '
                'must be one that judges nothing, such as dfedavgm; "clean" and "removed" go with every algorithm'
            )
        if algorithm.validate_budget is not None:
            algorithm.validate_budget(self.agents.budget)
        if not 0 < factor <= 1:
            raise ValueError(
                f"lambda1 * gamma must be above 0 and at most 1, got {factor:g}: choose a smaller `algorithm.lambda1`, "
                "or give `algorithm.mixing_factor` itself"
            )
        if self.attack is not None:
            self.attack.build()
        return self

    def settings(self) -> dict[str, Any]:
        """The experiment as plain values, functions by their import path: what `config.toml` holds."""
        settings = self.model_dump(mode="python", exclude_none=True)
        for key, kind, room in COMPONENT_SECTIONS:
            if (component := getattr(self, key)) is not None:
                settings[key] = component.with_defaults(kind, room)
        for section, key, room, component in self._optional_components():
            settings[section][key] = component.with_defaults(key, room)
        if self.metrics is not None:
            settings["metrics"] = [each.with_defaults("metric", metrics) for each in self.metrics]
        return to_plain(settings)  # type: ignore[no-any-return]

    def _optional_components(self) -> Iterator[tuple[str, str, ModuleType, Component]]:
        """Those of `INNER` that are given, each with its component."""
        for section, key, room in _OPTIONAL_COMPONENTS:
            if (component := getattr(getattr(self, section), key)) is not None:
                yield section, key, room, component

    def user_metrics(self) -> dict[str, Callable[..., Any]]:
        """What is computed of each confusion matrix beside the paper's metrics, by the names of the functions."""
        found: dict[str, Callable[..., Any]] = {}
        for each in self.metrics or ():
            name = metric_name(plugins.label(each.name))
            metric = each.bind("metric", metrics)
            if name in (*RESERVED_COLUMNS, *found):
                raise ConfigError(
                    f"`metrics` has one called `{name}`, as another column of the records: rename it"
                )
            found[name] = metric
        return found

    def fingerprint(self, seed: int) -> str:
        """What a checkpoint of one seed belongs to: every setting that its state depends on."""
        return json.dumps(
            {"seed": seed, **result_settings(self.settings())}, sort_keys=True, default=str
        )

    @property
    def attacked(self) -> bool:
        """Whether malicious agents attack."""
        return self.agents.malicious > 0 and self.agents.malicious_role == "attack"

    @property
    def active_attack(self) -> Attack:
        """What malicious agents do: nothing, where they do not attack."""
        return self.attack.build() if self.attacked and self.attack is not None else Attack()

    @property
    def num_models(self) -> int:
        """N + P: a model for each agent, and those that attackers craft; N more where what each began with is kept, and
        those of clusters."""
        agents = self.agents
        malicious = agents.num_clusters * agents.malicious
        benign = agents.num_clusters * agents.benign
        algorithm: algorithms.Algorithm = self.algorithm.bind("algorithm", algorithms)()
        kept = (
            algorithm.clusters.num_rows(agents.num_agents) if algorithm.clusters is not None else 0
        )
        kept += agents.num_agents if algorithm.keeps_previous else 0
        return agents.num_agents + self.active_attack.num_published(malicious, benign) + kept

    def clean_counterpart(self) -> "Experiment":
        """The same experiment with malicious agents that train on true labels."""
        agents = self.agents.model_copy(update={"malicious_role": "clean"})
        names = {
            "name": f"{self.name}-clean",
            "title": f"{self.title} (clean twin)",
            "description": f"Clean twin, malicious agents train on true labels: {self.description}",
        }
        return self.model_copy(update={**names, "agents": agents})


def load(
    source: str | Path | Mapping[str, Any] | Experiment, changes: Mapping[str, Any] | None = None
) -> Experiment:
    """An experiment from a preset's name, a TOML file or a mapping, with some keys changed ("algorithm.alpha": 2).

    Raises ConfigError with one line that names what is wrong and the nearest right thing.
    """
    if not isinstance(source, str | Path | Mapping | Experiment):
        told = f"got {_short_repr(source)}"
        raise ConfigError(
            f"an experiment is a preset's name, a file FILE.toml, a mapping or an Experiment, {told}"
        )
    if isinstance(source, Experiment):
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
    table = apply_changes(table, changes or {}, where)
    if changes:
        where += " with changes"
    table.setdefault("title", table.get("name", ""))
    try:
        return Experiment.model_validate(table)
    except ValidationError as error:
        raise ConfigError(
            f"{where}: {describe_error(error, table)}"
        ) from None  # which says no more, at length


def describe_error(error: ValidationError, table: Mapping[str, Any]) -> str:
    """The first thing wrong with an experiment, as one line with its key and the cure."""
    problem = error.errors()[0]
    place = [str(part) for part in problem["loc"]]
    if place[-2:-1] == ["name"]:  # pydantic adds the branch of a union
        place.pop()
    key = ".".join(place)
    if problem["type"] == "extra_forbidden":
        return f"there is no key `{key}`.{_suggest_key(place, table)}"
    if problem["type"] == "missing":
        return f"the key `{key}` is missing"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    got = _short_repr(problem["input"])
    if problem["type"] == "model_type":
        own = (
            ' (a function of your own: {"name": function})'
            if key in ("data", "model", "algorithm", "attack")
            else ""
        )
        return f"`{key}` must be a section, with keys of its own{own}, got {got}"
    if place[-1:] == ["name"] and len(place) > 1:
        return f'`{key}` must be the name of a function, "package.module:function", or in Python a function, got {got}'
    told = (
        (problem["msg"][0].lower() + problem["msg"][1:])
        .replace("tuple", "list")
        .replace("dictionary", "table")
    )
    shown = f", got {got}" if not isinstance(problem["input"], Mapping) else ""
    return f"`{key}`: {told}{shown}"


def _short_repr(value: Any) -> str:
    """A value in a message: itself where that is a short line, else what it is."""
    text = repr(value) if isinstance(value, _PRINTABLE_TYPES) else ""
    return text if 0 < len(text) <= 100 and "\n" not in text else f"a {type(value).__name__}"


def _suggest_key(place: Sequence[str], table: Mapping[str, Any]) -> str:
    """' Did you mean `algorithm.alpha`?' for a key that is not there: the most like it of all sections."""
    if place[-1] in _KEYS_OF_OTHER_LIBRARIES:
        return f" It is `{_KEYS_OF_OTHER_LIBRARIES[place[-1]]}` here"
    keys = list(Experiment.model_fields)
    for section, part in (("agents", AgentsSection), ("training", TrainingSection)):
        keys += [f"{section}.{name}" for name in part.model_fields]
    for section, kind, room in COMPONENT_SECTIONS:
        with contextlib.suppress(
            ConfigError, KeyError, TypeError
        ):  # what is wrong with it is not asked here
            function = plugins.resolve(kind, table[section]["name"], room)
            keys += [f"{section}.{name}" for name in plugins.parameters(function)]
    return plugins.did_you_mean(place[-1], keys)
