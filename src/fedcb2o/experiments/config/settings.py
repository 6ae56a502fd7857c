"""The sections and keys of an experiment, validated once.

A configuration is a TOML file, a preset's name, a mapping, or an `Experiment` made in Python. A key
that names a function takes a built-in name, "package.module:function" or, in Python, the function
itself. The other keys of its table are the function's keyword arguments. The descriptions of the
keys are the source of the table in docs/configuration.md (`python -m
fedcb2o.experiments.key_table`).

>>> from fedcb2o.experiments.config.settings import load
>>> experiment = load("digits-fedcb2o", {"algorithm.alpha": 5.0})
>>> experiment.agents.num_agents
20
"""

import contextlib
import functools
import inspect
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedcb2o import plugins, renamed
from fedcb2o.data import sets, skews
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config.tables import (
    apply_changes,
    preset,
    read_table,
    resolve_extends,
    to_plain,
)
from fedcb2o.federated import (
    THREAT,
    Attack,
    ConvolutionKernel,
    LinearKernel,
    Precision,
    Threat,
    algorithms,
    attacks,
    losses,
    metrics,
    optimisers,
    topology,
)
from fedcb2o.nn import architectures
from fedcb2o.nn.batch_norm import StatisticsMode
from fedcb2o.nn.memory_layout import MemoryLayout
from fedcb2o.records import RESERVED_COLUMNS, metric_name, result_settings

_PRINTABLE_TYPES = (str, int, float, list, tuple, date, time, type(None))
_COMPONENT_VALUES = "a name or table"
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
_StrictPositiveInt = Annotated[int, Field(ge=1, strict=True)]
_Share = Annotated[float, Field(ge=0, lt=1)]
_BatchOfModels = Annotated[int, Field(ge=1, le=2**31)]


def _key(
    meaning: str, *, values: str | None = None, default: str | None = None, **limits: Any
) -> Any:
    """Describe a key: its meaning, its values and default as the documentation words them."""
    texts: dict[str, Any] = {"values": values, "default": default}
    return Field(description=meaning, json_schema_extra=texts, **limits)


class Section(BaseModel):
    """A section of an experiment. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class Component(BaseModel):
    """A function by name, and its keyword arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str | Callable[..., Any]

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, table: Any) -> Any:
        """Replace former names of the function and of its parameters."""
        if not isinstance(table, Mapping) or "name" not in table:
            return table
        name = renamed.current_name(table["name"])
        return {**renamed.current_parameters(name, table), "name": name}

    @property
    def parameters(self) -> dict[str, Any]:
        """The keyword arguments that the configuration gives."""
        return dict(self.model_extra or {})

    def with_defaults(self, kind: str, room: Any) -> dict[str, Any]:
        """Return the function's name and all of its keyword arguments, defaults included.

        Args:
            kind: Word for the function in error messages, such as "attack".
            room: Module of the built-in functions of this kind.

        Returns:
            The component as a table; defaults of None are left out.

        Raises:
            ConfigError: If there is no such function.
        """
        parameters = plugins.parameters(plugins.resolve(kind, self.name, room))
        defaults = {
            name: parameter.default
            for name, parameter in parameters.items()
            if parameter.default not in (None, parameter.empty)
        }
        return {"name": self.name, **defaults, **self.parameters}

    def bind(self, kind: str, room: Any, **fixed: Any) -> functools.partial[Any]:
        """Return the function with its keyword arguments bound.

        Args:
            kind: Word for the function in error messages, such as "attack".
            room: Module of the built-in functions of this kind.
            **fixed: Further keyword arguments, bound without a check.

        Returns:
            The function, its arguments checked against its signature.

        Raises:
            ConfigError: If there is no such function, or it does not take these arguments.
        """
        function = plugins.resolve(kind, self.name, room)
        arguments = plugins.bind(kind, function, self.parameters)
        return functools.partial(function, **arguments, **fixed)


_Metrics = Annotated[tuple[Component, ...], Field(min_length=1, strict=False)]


def as_component(value: Any) -> Any:
    """Return the table of a component that is given as a name or function.

    Args:
        value: A name, a function, or anything else.

    Returns:
        The table {"name": value} for a name or a function, else the value itself.
    """
    return {"name": value} if isinstance(value, str) or callable(value) else value


class AttackSection(Component):
    """The attack of the malicious agents, on their data or on their models."""

    data: Annotated[
        Component | None,
        _key(
            "an attack on the training data, which goes with an attack on models",
            values=_COMPONENT_VALUES,
        ),
    ] = None
    from_round: Annotated[
        int,
        _key(
            "the first round with an attack, counted from 0. Before it attackers train and publish "
            "as benign agents do, but they collude",
            ge=0,
            strict=True,
        ),
    ] = 0
    sybils: Annotated[
        bool,
        _key(
            "from `from_round` on attackers have new identities in every round. No agent has met "
            "them, and ProbSampling asks them first (Douceur 2002)",
            strict=True,
        ),
    ] = False
    claims: Annotated[
        _StrictPositiveInt | None,
        _key(
            "the number of training samples that attackers claim, from `from_round` on. Receivers "
            "believe at most the larger of `agents.benign_samples` and `agents.malicious_samples`. "
            "Where agents bring their own data, the limit is the largest number that an agent "
            "holds",
            default="the truth",
        ),
    ] = None

    @field_validator("data", mode="before")
    @classmethod
    def _as_component(cls, data: Any) -> Any:
        return as_component(data)

    @property
    def data_attack(self) -> Component | None:
        """The attack on data: this one, or the one that an attack on models adds."""
        return self if _threat_of(self) is None else self.data

    def build(self) -> Attack:
        """Return the attack with its parameters checked.

        Returns:
            The attack as the rounds use it.

        Raises:
            ConfigError: If the attack and its `data` do not fit together.
        """
        threat = _threat_of(self)
        name = plugins.label(self.name)
        function = self.bind("attack", attacks)
        poison = None if self.data is None else self.data.bind("attack", attacks)
        schedule: dict[str, Any] = {
            "from_round": self.from_round,
            "sybils": self.sybils,
            "claimed_samples": self.claims,
        }

        if threat is None:
            if self.data is not None:
                raise ConfigError(
                    f"`attack.data` needs an attack on models, and `{name}` is an attack on data"
                )
            if next(iter(inspect.signature(function).parameters), None) == "view":
                raise ConfigError(
                    f"the attack `{name}` does not declare what it knows: write @fedcb2o.knows(), "
                    'with "fellows" or "benign" in it for what it sees, above the function'
                )
            return Attack(poison=function, **schedule)

        if self.data is None and threat.on_poisoned_data:
            raise ConfigError(
                f"the attack `{name}` publishes a model trained on poisoned data: name an attack "
                'on data, such as data = { name = "label_flip", source = 9, target = 4 }'
            )
        if self.data is not None and _threat_of(self.data) is not None:
            inner = plugins.label(self.data.name)
            raise ConfigError(
                f"`attack.data` needs an attack on data, and `{inner}` is one on models"
            )
        return Attack(poison=poison, craft=function, threat=threat, **schedule)

    def with_defaults(self, kind: str, room: Any) -> dict[str, Any]:
        """Return the function's name, its arguments, and the keys that are set for any attack.

        Args:
            kind: Word for the function in error messages.
            room: Module of the built-in attacks.

        Returns:
            The section as a table.
        """
        table = super().with_defaults(kind, room)
        if self.data is not None:
            table["data"] = self.data.with_defaults(kind, room)
        for key in ("from_round", "sybils", "claims"):
            if value := getattr(self, key):
                table[key] = value
        return table


class ModelSection(Component):
    """The network of the agents."""

    buffers: Annotated[
        StatisticsMode,
        _key(
            "how agents treat [the statistics of norms](extending.md#model), where your own "
            "network has batch norms",
            default='"local"',
        ),
    ] = "local"

    def with_defaults(self, kind: str, room: Any) -> dict[str, Any]:
        """Return the function's name and arguments, and `buffers` where it is not "local".

        Args:
            kind: Word for the function in error messages.
            room: Module of the built-in models.

        Returns:
            The section as a table.
        """
        table = super().with_defaults(kind, room)
        if self.buffers != "local":
            table["buffers"] = self.buffers
        return table


def _threat_of(attack: Component) -> Threat | None:
    return THREAT.get(plugins.resolve("attack", attack.name, attacks))


_KEYS_OF_OTHER_LIBRARIES = {"lr": "training.gamma", "learning_rate": "training.gamma"}
"""Keys of other libraries, and the keys of the same meaning in an experiment."""

COMPONENT_SECTIONS = (
    ("data", "data set", sets),
    ("model", "model", architectures),
    ("algorithm", "algorithm", algorithms),
    ("attack", "attack", attacks),
)
"""The sections that name a function: key, word for it in messages, module of the built-in ones."""

_OPTIONAL_COMPONENTS = (
    ("agents", "graph", topology),
    ("agents", "skew", skews),
    ("training", "optimiser", optimisers),
    ("training", "loss", losses),
)
"""The optional keys that name a function: section, key, module of the built-in ones."""


class AgentsSection(Section):
    """The agents, their data, and their contacts (sec:experiments, Dataset & Attack Setup)."""

    num_clusters: Annotated[
        Literal[1, 2, 4],
        _key("the number of clusters. Each deals out the same images, turned by its own angle"),
    ] = 2
    benign: Annotated[PositiveInt, _key("benign agents per cluster")]
    malicious: Annotated[NonNegativeInt, _key("malicious agents per cluster")]
    malicious_role: Annotated[
        Literal["attack", "clean", "benign", "removed"],
        _key("the behaviour of the malicious agents, see below", values="see below"),
    ] = "attack"
    benign_samples: Annotated[
        PositiveInt | None,
        _key(
            "training and validation samples of a benign agent. Where agents "
            "[bring their own data](#agents-that-bring-their-own-data), the largest number that "
            "one holds, by default all",
            values="from 2",
            default="needed where agents share out a pool",
        ),
    ] = None
    malicious_samples: Annotated[
        PositiveInt | None,
        _key(
            "training samples of a malicious agent. All samples of a cluster together must not "
            "exceed the pool",
            default="needed where agents share out a pool",
        ),
    ] = None
    skew: Annotated[
        Component | None,
        _key(
            "the difference in labels between the agents of a cluster, [see below](#label-skew). "
            "By default samples are dealt at random",
            values=_COMPONENT_VALUES,
        ),
    ] = None
    validation: Annotated[
        float,
        _key(
            "the fraction of a benign agent's samples for validation. 1, all samples, needs "
            "`hold_out` = false. Agents that bring validation samples validate on those alone",
            gt=0,
            le=1,
        ),
    ] = 0.2
    split: Annotated[
        Literal["random", "stratified", "released"],
        _key("the choice of the validation samples, see below"),
    ] = "random"
    hold_out: Annotated[
        bool, _key("false: benign agents train on their validation samples too")
    ] = True
    validation_loss: Annotated[
        Literal["samples", "batches"],
        _key("mean over samples, or unweighted mean of the means of mini-batches"),
    ] = "samples"
    budget: Annotated[
        PositiveInt,
        _key("M, the number of models that an agent asks for in a round", values="1 to N - 1"),
    ]
    participation: Annotated[
        float,
        _key(
            "the probability that an agent is online in a round. An agent that is offline trains, "
            "but neither answers nor mixes",
            gt=0,
            le=1,
        ),
    ] = 1.0
    graph: Annotated[
        Component | None,
        _key("the graph of contacts, [see below](#graphs)", values=_COMPONENT_VALUES),
    ] = None
    initialisation: Annotated[
        Literal["common", "independent"],
        _key("one initial model for all agents, or one per agent"),
    ] = "common"
    colluders_own_model: Annotated[
        bool,
        _key(
            "true: a malicious agent includes its own model in its average. The default follows "
            "the released code, not "
            "[the text](#where-the-papers-text-and-its-authors-released-code-differ)"
        ),
    ] = True
    assumed_share: Annotated[
        _Share | None,
        _key(
            "the share of attackers among the received models that rules assume, rounded up to a "
            "number. A rule that tolerates fewer attackers assumes its largest number",
            default="the share among all agents",
        ),
    ] = None

    @property
    def num_agents(self) -> int:
        """N, the number of agents in the system."""
        malicious = 0 if self.malicious_role == "removed" else self.malicious
        return self.num_clusters * (self.benign + malicious)

    @property
    def malicious_share(self) -> float:
        """The share of attackers that rules assume."""
        if self.malicious_role == "removed":
            return 0.0
        if self.assumed_share is not None:
            return self.assumed_share
        return self.malicious / (self.benign + self.malicious)

    @field_validator("graph", "skew", mode="before")
    @classmethod
    def _as_component(cls, component: Any) -> Any:
        return as_component(component)


class TrainingSection(Section):
    """LocalUpdate: SGD, or another optimiser, with learning rate lambda2 * gamma (alg:FedCB2O)."""

    gamma: Annotated[float, _key("the step size", gt=0)] = 0.004
    lambda2: Annotated[float, _key("the factor on gamma in LocalUpdate", gt=0)] = 1.0
    momentum: Annotated[float, _key("the momentum of SGD", ge=0, lt=1)] = 0.9
    batch_size: Annotated[
        PositiveInt,
        _key(
            "samples per mini-batch. The last batch of an epoch may be shorter. Where the norms of "
            "a network refuse a single sample, that sample joins the batch before"
        ),
    ] = 64
    local_epochs: Annotated[PositiveInt, _key("tau, passes over the agent's data")] = 5
    local_steps: Annotated[
        PositiveInt | None, _key("the number of mini-batches, in place of `local_epochs`")
    ] = None
    precision: Annotated[
        Precision,
        _key(
            "the type of products in training; parameters are float32. bfloat16 is about twice as "
            "fast on processors that have it (the presets `emnist-small-*` use it). On other "
            "processors it is far slower: a seed that begins on one, by a short timing, trains in "
            "float32 and logs a note. With `--blocks` the machine that starts the run is timed. "
            '"tf32" '
            "needs a CUDA device and rounds the factors of float32 products to 10 bits of "
            "mantissa. CUDA devices without it (compute capability below 8.0) compute in float32"
        ),
    ] = "float32"
    optimiser: Annotated[
        Component | None,
        _key(
            'the optimiser in place of SGD: "adamw", or [your own](extending.md#optimiser). '
            "`training.momentum` then has no effect",
            values=_COMPONENT_VALUES,
        ),
    ] = None
    loss: Annotated[
        Component | None,
        _key(
            "the loss that agents minimise and validate with: [another one](#losses-and-numbers), "
            "or your own",
            values=_COMPONENT_VALUES,
            default="the cross-entropy",
        ),
    ] = None

    @field_validator("optimiser", "loss", mode="before")
    @classmethod
    def _as_component(cls, component: Any) -> Any:
        return as_component(component)


class Experiment(Section):
    """One experiment, run once for each of its seeds."""

    name: Annotated[
        str,
        _key(
            "the run's folder is `runs/NAME` without `--out`",
            values="letters, digits, `.`, `_`, `-`",
            default="the file's name",
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        ),
    ]
    title: Annotated[str, _key("the name of the run in tables and legends", default="the name")] = (
        ""
    )
    description: Annotated[
        str, _key("a sentence, which `fedcb2o presets` prints for a preset", default="none")
    ] = ""
    seeds: Annotated[  # a list is accepted
        tuple[NonNegativeInt, ...],
        _key(
            "each seed decides the partition, initial models, batches and choices of one run",
            values="different whole numbers from 0",
            min_length=1,
            strict=False,
        ),
    ] = (0, 1, 2)
    rounds: Annotated[PositiveInt, _key("T, the number of rounds")]
    evaluate_every: Annotated[PositiveInt, _key("rounds between two evaluations")] = 1
    checkpoint_every: Annotated[PositiveInt, _key("rounds between two checkpoints")] = 1
    evaluate_on: Annotated[
        Literal["test", "tuning", "redrawn"],
        _key(
            'the samples that scores are computed on. "tuning": samples that each seed draws from '
            "the part of the pool that no agent holds, at most as many as there are test samples. "
            '"redrawn": each seed draws its own test samples, per class as many, from pool and '
            "test set together, so that intervals over seeds include the variation of the samples. "
            "Drawn samples are in no cluster's data, turned or not"
        ),
    ] = "test"
    linear: Annotated[
        LinearKernel | None,
        _key(
            "the kernel of dense layers with at least 2^20 weights in float32: PyTorch or oneDNN. "
            "The default is timed once, in less than a second, and kept in "
            "[environment.json](runs.md), which is written before the first round. Results agree "
            "to rounding. `fedcb2o run --verbose` prints the choice",
            default="the faster one",
        ),
    ] = None
    layout: Annotated[
        MemoryLayout | None,
        _key(
            "the memory layout of images for a network with convolutions: channel after channel, "
            "or the channels of a pixel side by side. The default is timed on a batch of the data: "
            '"channels_last" where it is 1.3 times as fast, so that chance does not decide a '
            "run's bits. It is kept like `linear`. `resnet` on 32x32 images gains about 1.15 "
            "times, which is too little for the default: set it. `cnn` chooses its own layout. A "
            "network that reads no other layout (it calls `view` after a convolution) gets "
            "contiguous images",
            default='"contiguous", unless the other is far faster',
        ),
    ] = None
    convolution: Annotated[
        ConvolutionKernel | None,
        _key(
            "the kernel of convolutions without groups. For several agents in one program: "
            '"grouped", a group per agent; "unfolded", one batched product of unfolded images, '
            'which takes more memory; "mixed", unfolded only where a layer reads fewer than 8 '
            'channels. On the CPU, where agents train one by one in float32, "fourier" computes '
            "[by spectra](performance.md#milliseconds-per-step) those two-dimensional convolutions "
            "with `stride` and `dilation` of 1 that need less than half of the multiplications. "
            'Elsewhere "fourier" equals "grouped". The default is timed for each seed with two '
            'dozen steps on a batch, and kept like `linear`: "fourier" where a step is 1.3 times '
            "as fast, on a device another kernel where it is a tenth faster. Real peers time "
            'nothing: theirs is "grouped" unless the federation sets another',
            default='"grouped", unless another is clearly faster',
        ),
    ] = None
    device: Annotated[
        str | None,
        _key(
            "the device of the models and the data, [see there](performance.md#on-another-device), "
            "as in `fedcb2o run --device cuda`. A run is resumed on the device that it names",
            values='"cpu", or a device of PyTorch: "cuda", "cuda:1", "mps", ...',
            default='"cpu"',
        ),
    ] = None
    together: Annotated[
        _BatchOfModels | None,
        _key(
            "the number of agents that train, and of models that are evaluated, in one program; 1 "
            "means one by one. The default is small dense networks on the CPU, and on another "
            "device the number that half of its memory holds, kept in [environment.json](runs.md). "
            "Results agree to rounding, except where the network draws random numbers in training "
            "(dropout). A network that cannot be computed in this way (it branches on its numbers) "
            "is trained one by one; with the key set it is an error",
            default="by the device",
            values="from 1",
        ),
    ] = None
    data: Component
    agents: AgentsSection
    model: ModelSection
    training: TrainingSection = TrainingSection()
    algorithm: Component
    attack: AttackSection | None = None
    metrics: Annotated[
        _Metrics | None,
        _key(
            'further columns of the records: "balanced_accuracy", "worst_class_accuracy", or '
            "[your own](extending.md#metric)",
            values="a list of names or tables",
        ),
    ] = None

    @field_validator("metrics", mode="before")
    @classmethod
    def _as_components(cls, metrics: Any) -> Any:
        if isinstance(metrics, list | tuple):
            return [as_component(metric) for metric in metrics]
        return metrics

    @field_validator("device")
    @classmethod
    def _cpu_is_default(cls, device: str | None) -> str | None:
        return None if device == "cpu" else device

    @model_validator(mode="after")
    def _check_consistency(self) -> "Experiment":
        self._check_agents()
        self._check_precision()
        self.data.bind("data set", sets)
        self.model.bind("model", architectures)
        for _, key, room, component in self._optional_components():
            component.bind(key, room)
        self.user_metrics()
        self._check_algorithm()
        if self.attack is not None:
            self.attack.build()
        return self

    def _check_agents(self) -> None:
        """Raise ValueError if the numbers of agents, their budget or the seeds do not fit."""
        agents = self.agents
        largest = agents.num_agents - 1
        if not 1 <= agents.budget <= max(1, largest):
            raise ValueError(
                f"`agents.budget` must be between 1 and num_agents - 1 = {largest}, "
                f"got {agents.budget}"
            )
        if agents.validation == 1 and agents.hold_out:
            raise ValueError(
                "`agents.validation` = 1 leaves nothing to train on: take less, or set "
                "`agents.hold_out` = false to train on all samples"
            )
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"`seeds` must differ, got {list(self.seeds)}")
        if self.attacked and self.attack is None:
            raise ValueError(
                "malicious agents that attack need an [attack] section (or "
                'agents.malicious_role = "clean")'
            )

    def _check_precision(self) -> None:
        """Raise ValueError if the precision needs another device."""
        device = self.device or "cpu"
        if self.training.precision == "tf32" and device.split(":")[0] != "cuda":
            raise ValueError(
                f'`training.precision` = "tf32" needs a CUDA device, and `device` is "{device}": '
                'take "float32" or "bfloat16", or another `device`'
            )

    def _check_algorithm(self) -> None:
        """Raise ValueError if the algorithm does not fit the agents or the step size."""
        agents = self.agents
        algorithm = self.algorithm.bind("algorithm", algorithms)()
        if not isinstance(algorithm, algorithms.Algorithm):
            kind = type(algorithm).__name__
            raise ValueError(f"the algorithm returned a {kind}, expected an Algorithm")
        factor = algorithm.factor(self.training.gamma)
        if algorithm.needs_losses and agents.malicious and agents.malicious_role == "benign":
            raise ValueError(
                'malicious agents with `agents.malicious_role` = "benign" hold no validation data, '
                "so the algorithm must be one without validation, such as dfedavgm; "
                '"clean" and "removed" go with every algorithm'
            )
        if algorithm.validate_budget is not None:
            algorithm.validate_budget(agents.budget)
        if not 0 < factor <= 1:
            raise ValueError(
                f"lambda1 * gamma must be above 0 and at most 1, got {factor:g}: choose a smaller "
                "`algorithm.lambda1`, or set `algorithm.mixing_factor` itself"
            )

    def settings(self) -> dict[str, Any]:
        """Return the experiment as plain values: the content of a run's `config.toml`.

        Returns:
            A table of tables, defaults included, functions by their import path.
        """
        settings = self.model_dump(mode="python", exclude_none=True)
        for key, kind, room in COMPONENT_SECTIONS:
            component = getattr(self, key)
            if component is not None:
                settings[key] = component.with_defaults(kind, room)
        for section, key, room, component in self._optional_components():
            settings[section][key] = component.with_defaults(key, room)
        if self.metrics is not None:
            settings["metrics"] = [
                metric.with_defaults("metric", metrics) for metric in self.metrics
            ]
        return to_plain(settings)  # type: ignore[no-any-return]

    def _optional_components(self) -> Iterator[tuple[str, str, ModuleType, Component]]:
        """Yield section, key, built-in module and component of the optional keys that are set."""
        for section, key, room in _OPTIONAL_COMPONENTS:
            component = getattr(getattr(self, section), key)
            if component is not None:
                yield section, key, room, component

    def user_metrics(self) -> dict[str, Callable[..., Any]]:
        """Return the metrics of `metrics` by the names of their columns.

        Returns:
            Functions of a confusion matrix, by name.

        Raises:
            ConfigError: If a name is already a column of the records.
        """
        found: dict[str, Callable[..., Any]] = {}
        for component in self.metrics or ():
            name = metric_name(plugins.label(component.name))
            metric = component.bind("metric", metrics)
            if name in (*RESERVED_COLUMNS, *found):
                raise ConfigError(
                    f"`metrics` has one called `{name}`, as another column of the records: rename "
                    "it"
                )
            found[name] = metric
        return found

    def fingerprint(self, seed: int) -> str:
        """Return the text that identifies the checkpoints of a seed.

        Args:
            seed: The seed.

        Returns:
            JSON of all settings that the state of the seed depends on. Renamed parameters have
            their former names, so that the checkpoints of earlier versions are still read.
        """
        settings = result_settings(self.settings())
        return json.dumps({"seed": seed, **settings}, sort_keys=True, default=str)

    @property
    def attacked(self) -> bool:
        """True if malicious agents attack."""
        return self.agents.malicious > 0 and self.agents.malicious_role == "attack"

    @property
    def active_attack(self) -> Attack:
        """The attack of the malicious agents; one without effect where they do not attack."""
        if self.attacked and self.attack is not None:
            return self.attack.build()
        return Attack()

    @property
    def num_models(self) -> int:
        """The number of models that a run holds at once.

        That is N + P: a model per agent, and those that attackers craft. There are N more where the
        models before the round are kept, and those of clusters.
        """
        agents = self.agents
        malicious = agents.num_clusters * agents.malicious
        benign = agents.num_clusters * agents.benign
        algorithm: algorithms.Algorithm = self.algorithm.bind("algorithm", algorithms)()
        extra = 0
        if algorithm.clusters is not None:
            extra += algorithm.clusters.num_rows(agents.num_agents)
        if algorithm.keeps_previous:
            extra += agents.num_agents
        return agents.num_agents + self.active_attack.num_published(malicious, benign) + extra

    def clean_counterpart(self) -> "Experiment":
        """Return the same experiment with malicious agents that train on true labels.

        Returns:
            The counterpart, named NAME-clean.
        """
        agents = self.agents.model_copy(update={"malicious_role": "clean"})
        description = f"Malicious agents train on true labels: {self.description}"
        names = {
            "name": f"{self.name}-clean",
            "title": f"{self.title} (clean counterpart)",
            "description": description,
        }
        return self.model_copy(update={**names, "agents": agents})

    def clean_twin(self) -> "Experiment":
        """Return `clean_counterpart()`, under its former name."""
        warnings.warn(
            "Experiment.clean_twin is now called clean_counterpart",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.clean_counterpart()


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
    if not isinstance(source, str | Path | Mapping | Experiment):
        raise ConfigError(
            "an experiment is a preset's name, a file FILE.toml, a mapping or an Experiment, "
            f"got {_short_repr(source)}"
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
    except ValidationError as error:  # pydantic's own text has many lines
        raise ConfigError(f"{where}: {describe_error(error, table)}") from None


def describe_error(error: ValidationError, table: Mapping[str, Any]) -> str:
    """Describe the first problem of a configuration in one line.

    Args:
        error: The error of pydantic.
        table: The configuration.

    Returns:
        The key, the problem and the cure.
    """
    problem = error.errors()[0]
    path = [str(part) for part in problem["loc"]]
    if path[-2:-1] == ["name"]:  # pydantic adds the branch of a union
        path.pop()
    key = ".".join(path)
    kind = problem["type"]
    if kind == "extra_forbidden":
        return f"there is no key `{key}`.{_suggest_key(path, table)}"
    if kind == "missing":
        return f"the key `{key}` is missing"
    if kind == "value_error":
        return str(problem["ctx"]["error"])

    got = _short_repr(problem["input"])
    if kind == "model_type":
        hint = ""
        if key in ("data", "model", "algorithm", "attack"):
            hint = ' (a function of your own: {"name": function})'
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
    text = repr(value) if isinstance(value, _PRINTABLE_TYPES) else ""
    if 0 < len(text) <= 100 and "\n" not in text:
        return text
    return f"a {type(value).__name__}"


def _suggest_key(path: Sequence[str], table: Mapping[str, Any]) -> str:
    """Return ' Did you mean `algorithm.alpha`?' for an unknown key, by all sections."""
    if path[-1] in _KEYS_OF_OTHER_LIBRARIES:
        return f" It is `{_KEYS_OF_OTHER_LIBRARIES[path[-1]]}` here"
    keys = list(Experiment.model_fields)
    for section, model in (("agents", AgentsSection), ("training", TrainingSection)):
        keys += [f"{section}.{name}" for name in model.model_fields]
    for section, kind, room in COMPONENT_SECTIONS:
        # Another problem of the section is reported elsewhere.
        with contextlib.suppress(ConfigError, KeyError, TypeError):
            function = plugins.resolve(kind, table[section]["name"], room)
            keys += [f"{section}.{name}" for name in plugins.parameters(function)]
    return plugins.did_you_mean(path[-1], keys)
