"""Sections of a configuration that the rounds read: agents and training.

A section is defined here once, with the range, the default and the meaning of each key. The
settings of an experiment contain it, and the specification of a run holds the same object.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedcb2o import plugins

Precision = Literal["float32", "tf32", "bfloat16"]
LossAverage = Literal["samples", "batches"]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
_Counts = Annotated[tuple[int, ...], Field(strict=False)]
COMPONENT_VALUES = "a name or table"
"""Values of a key that names a function, as the documentation words them."""


def key_field(
    meaning: str, *, values: str | None = None, default: str | None = None, **limits: Any
) -> Any:
    """Describe a key: meaning in Markdown, limits, and texts that type and default do not say."""
    texts: dict[str, Any] = {"values": values, "default": default}
    return Field(description=meaning, json_schema_extra=texts, **limits)


class Section(BaseModel):
    """A section of an experiment. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _as_python(cls, table: Any) -> Any:
        """Replace numbers and arrays of NumPy and PyTorch; parameters of functions keep arrays."""
        if not isinstance(table, Mapping):
            return table
        return plugins.section_to_python(table)


@dataclass(frozen=True)
class Part:
    """A resolved function, `bound` to its given keywords, and settings with all defaults."""

    function: Callable[..., Any]
    bound: functools.partial[Any]
    settings: dict[str, Any]


class Component(BaseModel):
    """A function by name, and its keyword arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str | Callable[..., Any]

    @model_validator(mode="before")
    @classmethod
    def _to_python(cls, table: Any) -> Any:
        """Replace numbers and lists of other libraries by Python's."""
        if not isinstance(table, Mapping) or "name" not in table:
            return table
        table = plugins.to_python(table, arrays=False)
        for key in cls.model_fields.keys() & table.keys():
            table[key] = plugins.to_python(table[key], arrays=not isinstance(table[key], Mapping))
        return table

    @property
    def parameters(self) -> dict[str, Any]:
        """The keyword arguments that the configuration gives."""
        return dict(self.model_extra or {})

    def resolve(self, kind: str, namespace: ModuleType) -> Part:
        """Return the function, from `namespace` if built in, with its checked keywords bound."""
        function = plugins.resolve(kind, self.name, namespace)
        bound = functools.partial(function, **plugins.bind(kind, function, self.parameters))
        settings: dict[str, Any] = {"name": self.name}
        for name, parameter in plugins.parameters(function).items():
            # None has no form in TOML, and leaving a key out means the same.
            if parameter.default not in (None, parameter.empty):
                settings[name] = parameter.default
        variants = plugins.VARIANTS.get(function)
        if variants is not None:
            # A variant sets defaults, which parameters of the user overrule.
            settings.update(variants.get(self.parameters.get("variant", settings["variant"]), {}))
        settings.update(self.parameters)
        # The section's own keys that differ from their defaults.
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if not field.is_required() and value != field.default:
                settings[name] = value
        return Part(function, bound, settings)


def as_component(value: Any) -> Any:
    """Return {"name": value} for a name or a function, else the value."""
    # One form for all readers: a name is a table without parameters.
    return {"name": value} if isinstance(value, str) or callable(value) else value


class AgentsSection(Section):
    """The agents, their data, and their contacts (sec:experiments, Dataset & Attack Setup)."""

    num_clusters: Annotated[
        PositiveInt,
        key_field(
            "K, the number of clusters. Each deals out the same samples, changed by its transform",
            default="2, or the length of `benign` or `malicious`",
        ),
    ] = 2
    benign: Annotated[
        PositiveInt | _Counts,
        key_field(
            "benign agents per cluster: one number for all, or a list with one number per cluster",
            values="from 1, or a list",
        ),
    ]
    malicious: Annotated[
        NonNegativeInt | _Counts,
        key_field(
            "malicious agents per cluster: one number for all, or a list with one number per "
            "cluster",
            values="from 0, or a list",
        ),
    ] = 0
    cluster_transform: Annotated[
        Component | None,
        key_field(
            "the difference between the samples of clusters, [see below](#clusters)",
            values=COMPONENT_VALUES,
            default='"rotation"',
        ),
    ] = None
    owner_clusters: Annotated[
        tuple[Annotated[tuple[str, ...], Field(strict=False)], ...] | None,
        key_field(
            "the owners in each cluster, by name, where agents "
            "[bring their own data](#agents-that-bring-their-own-data). Reports and attackers know "
            "these clusters, benign agents do not",
            values="a list of lists",
            default="one cluster",
            strict=False,
        ),
    ] = None
    malicious_role: Annotated[
        Literal["attack", "clean", "benign", "removed"],
        key_field("the behaviour of the malicious agents, see below", values="see below"),
    ] = "attack"
    benign_samples: Annotated[
        PositiveInt | None,
        key_field(
            "training and validation samples of a benign agent. Where agents "
            "[bring their own data](#agents-that-bring-their-own-data), the largest number that "
            "one holds, by default all",
            values="from 2",
            default="needed where agents share out a pool",
        ),
    ] = None
    malicious_samples: Annotated[
        PositiveInt | None,
        key_field(
            "training samples of a malicious agent. All samples of a cluster together must not "
            "exceed the pool",
            default="as many as a benign agent",
        ),
    ] = None
    skew: Annotated[
        Component | None,
        key_field(
            "the difference in labels between the agents of a cluster, [see below](#label-skew). "
            "By default samples are dealt at random",
            values=COMPONENT_VALUES,
        ),
    ] = None
    validation: Annotated[
        float,
        key_field(
            "the fraction of a benign agent's samples for validation. 1, all samples, needs "
            "`hold_out` = false. Agents that bring validation samples validate on those alone",
            gt=0,
            le=1,
        ),
    ] = 0.2
    split: Annotated[
        Literal["random", "stratified", "released"],
        key_field("the choice of the validation samples, see below"),
    ] = "random"
    hold_out: Annotated[
        bool, key_field("false: benign agents train on their validation samples too")
    ] = True
    loss_groups: Annotated[
        Component | None,
        key_field(
            "groups of validation samples that stand for classes in criteria by class, "
            "[see below](#losses-and-numbers)",
            values=COMPONENT_VALUES,
            default="the classes; without classes one group, in FedAssay quantiles of the targets",
        ),
    ] = None
    validation_loss: Annotated[
        LossAverage, key_field("mean over samples, or unweighted mean of the means of mini-batches")
    ] = "samples"
    budget: Annotated[
        PositiveInt,
        key_field("M, the number of models that an agent asks for in a round", values="1 to N - 1"),
    ]
    participation: Annotated[
        float,
        key_field(
            "the probability that an agent is online in a round. An agent that is offline trains, "
            "but neither answers nor mixes",
            gt=0,
            le=1,
        ),
    ] = 1.0
    graph: Annotated[
        Component | None,
        key_field("the graph of contacts, [see below](#graphs)", values=COMPONENT_VALUES),
    ] = None
    encoding: Annotated[
        Literal["float32", "top_k"],
        key_field(
            "the published models: exact, or by [top-k differences](peers.md#encodings), which "
            "attackers who craft models do not keep to"
        ),
    ] = "float32"
    initialisation: Annotated[
        Literal["common", "independent"],
        key_field("one initial model for all agents, or one per agent"),
    ] = "common"
    colluders_own_model: Annotated[
        bool,
        key_field(
            "true: a malicious agent includes its own model in its average. The default follows "
            "the released code, not "
            "[the text](#where-the-papers-text-and-its-authors-released-code-differ)"
        ),
    ] = True
    assumed_share: Annotated[
        Annotated[float, Field(ge=0, lt=1)] | None,
        key_field(
            "the share of attackers among the received models that rules assume, rounded up to a "
            "number. A rule that tolerates fewer attackers assumes its largest number",
            default="the share among all agents",
        ),
    ] = None

    @property
    def benign_counts(self) -> tuple[int, ...]:
        """Number of benign agents in each cluster."""
        return (self.benign,) * self.num_clusters if isinstance(self.benign, int) else self.benign

    @property
    def malicious_counts(self) -> tuple[int, ...]:
        """Number of malicious agents in each cluster, removed or not."""
        if isinstance(self.malicious, int):
            return (self.malicious,) * self.num_clusters
        return self.malicious

    @property
    def num_benign(self) -> int:
        """Number of benign agents in the system."""
        return sum(self.benign_counts)

    @property
    def num_malicious(self) -> int:
        """Number of malicious agents in the system, removed or not."""
        return sum(self.malicious_counts)

    @property
    def num_agents(self) -> int:
        """N, the number of agents in the system."""
        # An oracle without attackers has their samples dealt out all the same.
        malicious = 0 if self.malicious_role == "removed" else self.num_malicious
        return self.num_benign + malicious

    @property
    def malicious_share(self) -> float:
        """The share of attackers that rules assume."""
        if self.malicious_role == "removed":
            return 0.0
        if self.assumed_share is not None:
            return self.assumed_share
        # A rule of the literature is given the true share, its best case.
        return self.num_malicious / (self.num_benign + self.num_malicious)

    @field_validator("graph", "skew", "cluster_transform", "loss_groups", mode="before")
    @classmethod
    def _as_component(cls, component: Any) -> Any:
        return as_component(component)

    @model_validator(mode="before")
    @classmethod
    def _check_counts(cls, table: Any) -> Any:
        """Check lists of numbers of agents; their length is the number of clusters."""
        if not isinstance(table, Mapping):
            return table
        # Before validation, because a list also sets the number of clusters.
        lists = {
            key: table[key]
            for key in ("benign", "malicious")
            if isinstance(table.get(key), list | tuple)
        }
        for key, counts in lists.items():
            least = int(key == "benign")
            if not counts or any(type(count) is not int or count < least for count in counts):
                raise ValueError(
                    f"`agents.{key}` must be a number, or a list of whole numbers from {least} on "
                    f"with one for each cluster, got {list(counts)}"
                )
        for key, counts in lists.items():
            table = {"num_clusters": len(counts), **table}
            if table["num_clusters"] != len(counts):
                raise ValueError(
                    f"`agents.{key}` has {len(counts)} numbers, and `agents.num_clusters` is "
                    f"{table['num_clusters']}: give one number for each cluster"
                )
        return table


class Privacy(Section):
    """Differential privacy of the training samples (`training.privacy`): DP-SGD."""

    clip: Annotated[
        float, key_field("the largest norm of a sample's gradient; longer ones are scaled", gt=0)
    ] = 1.0
    noise: Annotated[
        Annotated[float, Field(gt=0)] | None,
        key_field("the standard deviation of the noise, in units of `clip`", values="above 0"),
    ] = None
    epsilon: Annotated[
        Annotated[float, Field(gt=0)] | None,
        key_field(
            "in place of `noise`: the epsilon of each agent after the last round", values="above 0"
        ),
    ] = None
    delta: Annotated[
        float, key_field("the probability that epsilon does not cover", gt=0, lt=1)
    ] = 1e-5

    @model_validator(mode="after")
    def _check_noise(self) -> "Privacy":
        # Epsilon follows from the noise and the number of rounds, so that one decides the other.
        if (self.noise is None) == (self.epsilon is None):
            raise ValueError(
                "`training.privacy` needs `noise`, or a target `epsilon`, and not both"
            )
        return self


class LocalUpdateKeys(Section):
    """The keys of LocalUpdate that name no function (alg:FedCB2O)."""

    gamma: Annotated[float, key_field("the step size", gt=0)] = 0.05
    lambda2: Annotated[float, key_field("the factor on gamma in LocalUpdate", gt=0)] = 1.0
    momentum: Annotated[float, key_field("the momentum of SGD", ge=0, lt=1)] = 0.9
    batch_size: Annotated[
        PositiveInt,
        key_field(
            "samples per mini-batch. The last batch of an epoch may be shorter. Where the norms of "
            "a network refuse a single sample, that sample joins the batch before"
        ),
    ] = 64
    local_epochs: Annotated[PositiveInt, key_field("tau, passes over the agent's data")] = 5
    local_steps: Annotated[
        PositiveInt | None, key_field("the number of mini-batches, in place of `local_epochs`")
    ] = None
    privacy: Annotated[
        Privacy | None,
        key_field(
            "[differential privacy](privacy.md): per-sample gradients are clipped and perturbed",
            values="a table",
        ),
    ] = None
    precision: Annotated[
        Precision,
        key_field(
            "the type of products in training; parameters are float32. bfloat16 is about twice as "
            "fast on processors that have it (the presets `emnist-small-*` use it). On other "
            "processors it is far slower: a seed that begins on one, by a short timing, trains in "
            "float32 and logs a note. With `--blocks` the machine that starts the run is timed. "
            '"tf32" '
            "needs a CUDA device and rounds the factors of float32 products to 10 bits of "
            "mantissa. CUDA devices without it (compute capability below 8.0) compute in float32"
        ),
    ] = "float32"


class TrainingSection(LocalUpdateKeys):
    """LocalUpdate: SGD, or another optimiser, with learning rate lambda2 * gamma (alg:FedCB2O)."""

    optimiser: Annotated[
        Component | None,
        key_field(
            'the optimiser in place of SGD: "adamw", "sgd" with `weight_decay`, or '
            "[your own](extending.md#optimiser). `training.momentum` then has no effect",
            values=COMPONENT_VALUES,
        ),
    ] = None
    loss: Annotated[
        Component | None,
        key_field(
            "the loss that agents minimise and validate with: [another one](#losses-and-numbers), "
            "or your own",
            values=COMPONENT_VALUES,
            default="the cross-entropy",
        ),
    ] = None

    schedule: Annotated[
        Component | None,
        key_field(
            "the learning rate by round: a class of `torch.optim.lr_scheduler` with its "
            'parameters, such as { name = "CosineAnnealingLR", T_max = 50 }, stepped once a round; '
            "or [your own](extending.md#learning-rates-and-sample-weights)",
            values=COMPONENT_VALUES,
            default="constant",
        ),
    ] = None
    weights: Annotated[
        Component | None,
        key_field(
            'weights of training samples: "balanced", which gives the classes of an agent equal '
            'sums, "by_class", or [your own](extending.md#learning-rates-and-sample-weights)',
            values=COMPONENT_VALUES,
            default="equal",
        ),
    ] = None

    @field_validator("optimiser", "loss", "schedule", "weights", mode="before")
    @classmethod
    def _as_component(cls, component: Any) -> Any:
        return as_component(component)
