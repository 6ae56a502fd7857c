"""The functions that an experiment names, each resolved and checked once."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor

from fedcb2o import plugins
from fedcb2o.data import Shard, sets, skews, transforms
from fedcb2o.errors import ConfigError
from fedcb2o.federated import (
    algorithms,
    attacks,
    losses,
    optimisers,
    sample_weights,
    schedules,
    topology,
)
from fedcb2o.federated import loss_groups as group_functions
from fedcb2o.federated.adversary import Attack
from fedcb2o.federated.algorithms.section import AlgorithmSection
from fedcb2o.federated.attacks import data_poisoning
from fedcb2o.federated.attacks.section import AttackSection
from fedcb2o.federated.evaluation import metrics
from fedcb2o.federated.evaluation.metrics import AttackGoal
from fedcb2o.federated.run_spec import Algorithm
from fedcb2o.federated.sections import Component, Part
from fedcb2o.nn import architectures
from fedcb2o.records import METRICS, RESERVED_COLUMNS, chosen_metrics
from fedcb2o.rng import stream

# Keys that name one function: its word in messages, and the module of the built-in ones.
_FUNCTIONS = {
    "data": ("data set", sets),
    "model": ("model", architectures),
    "agents.graph": ("graph", topology),
    "agents.skew": ("skew", skews),
    "agents.cluster_transform": ("cluster transform", transforms),
    "agents.loss_groups": ("loss groups", group_functions),
    "training.optimiser": ("optimiser", optimisers),
    "training.loss": ("loss", losses),
    "training.schedule": ("schedule", schedules),
    "training.weights": ("weights", sample_weights),
}

COMPONENT_KEYS = (*_FUNCTIONS, "metrics", "algorithm", "attack")
"""Dotted keys of an experiment that name functions."""

COMPONENT_SECTIONS = (
    ("data", *_FUNCTIONS["data"]),
    ("model", *_FUNCTIONS["model"]),
    ("algorithm", "algorithm", algorithms),
    ("attack", "attack", attacks),
)
"""The sections that name a function: key, word for it in messages, module of the built-in ones."""

# The keys of an algorithm whose functions read models, with their words in messages.
_MODEL_READING_KEYS = {"criterion": "criterion", "rule": "rule", "pre_step": "pre-step"}

_Function = functools.partial[Any]
_DEFAULT_TRANSFORM = functools.partial(transforms.rotation)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The functions of an experiment with checked parameters, and what they declare.

    `method` is the function that returns `algorithm`, and `poison` the attack on data: the attack
    itself, or the one that an attack on models adds. `goal` has the classes that it is about.
    `trigger` marks the test samples of a backdoor, and `wanted_answers` gives test samples the
    answers that an attack on text wants. `settings` has the tables of a run's `config.toml` by
    dotted key, defaults included.
    """

    data: _Function
    model: _Function
    model_name: str
    graph: _Function | None
    skew: _Function | None
    cluster_transform: _Function
    loss_groups: _Function | None
    optimiser: _Function | None
    loss: _Function | None
    schedule: _Function | None
    weights: _Function | None
    metrics: Mapping[str, _Function]
    method: Part
    algorithm: Algorithm
    attack: Attack | None
    poison: Part | None
    goal: AttackGoal
    trigger: Callable[[Tensor], Tensor] | None
    wanted_answers: Callable[[Shard], Shard] | None
    settings: Mapping[str, Any]

    def neighbours(self, seed: int, cluster: Int[Tensor, " N"]) -> tuple[Tensor, ...] | None:
        """Make the graph of contacts; None where every agent may ask all others."""
        # A complete graph would take memory for N^2 pairs.
        if self.graph is None:
            return None
        return topology.neighbours(self.graph, cluster, stream(seed, "graph"))

    def user_functions(self) -> dict[str, list[str]]:
        """List the import paths of users' functions that read models, by kind."""
        found: dict[str, list[str]] = {}

        def collect(kind: str, value: Any) -> None:
            if isinstance(value, str):
                if ":" in value and value not in found.setdefault(kind, []):
                    found[kind].append(value)
            elif isinstance(value, Mapping):
                collect(kind, value.get("name"))
                for key, inner in value.items():
                    # "of": the parts of a combination
                    if key in _MODEL_READING_KEYS or key == "of":
                        collect(_MODEL_READING_KEYS.get(key, kind), inner)
            elif isinstance(value, list):
                for inner in value:
                    collect(kind, inner)

        # Functions of data run before the rounds, and read no model.
        for kind in ("attack", "algorithm", "model"):
            collect(kind, self.settings.get(kind))
        return found

    def imported_names(self) -> list[str]:
        """List all settings of the form "module:function", sorted; some only look alike."""
        return sorted({name for name in plugins.foreign_names_in(self.settings) if ":" in name})


def resolve(components: Mapping[str, Any]) -> Resolved:
    """Resolve the functions that an experiment names by `COMPONENT_KEYS`; check parameters."""
    functions: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for key, (kind, namespace) in _FUNCTIONS.items():
        name = key.rpartition(".")[2]
        component: Component | None = components[key]
        functions[name] = None
        if component is not None:
            part = component.resolve(kind, namespace)
            functions[name] = part.bound
            settings[key] = part.settings
    # The transform has a default with parameters by the data, which no key can hold.
    functions["cluster_transform"] = functions["cluster_transform"] or _DEFAULT_TRANSFORM
    measured = _resolve_metrics(components["metrics"] or ())
    if components["metrics"] is not None:
        settings["metrics"] = [metric.settings for metric in measured.values()]
    section: AlgorithmSection = components["algorithm"]
    method, built = section.resolve_algorithm()
    settings["algorithm"] = method.settings
    assault = poison = None
    adversary: AttackSection | None = components["attack"]
    if adversary is not None:
        attacking, assault, poison = adversary.resolve_attack()
        settings["attack"] = attacking.settings
    wanted_answers = None
    # On text, success is the share of wanted answers, and not a class.
    if poison is not None and attacks.ON_ANSWERS.get(poison.bound):
        wanted_answers = functools.partial(attacks.wanted_answers, attack=poison.bound)
    return Resolved(
        **functions,
        metrics={name: metric.bound for name, metric in measured.items()},
        model_name=plugins.label(components["model"].name),
        method=method,
        algorithm=built,
        attack=assault,
        poison=poison,
        goal=_attack_goal({} if poison is None else poison.settings),
        trigger=None if poison is None else _backdoor_trigger(poison.bound),
        wanted_answers=wanted_answers,
        settings=plugins.to_plain(settings),
    )


def _resolve_metrics(components: Sequence[Component]) -> dict[str, Part]:
    """Return the metrics by the names of their columns, which no other column may have."""
    found: dict[str, Part] = {}
    for component in components:
        label = plugins.label(component.name)
        table = {"name": label, "column": getattr(component, "column", None)}
        # Records derive the names of columns from settings, so that both agree.
        ((name, _),) = chosen_metrics([table]).items()
        if component.name in METRICS:
            raise ConfigError(f"`metrics` names `{name}`, which every run records: leave it out")
        metric = component.resolve("metric", metrics)
        if name in found:
            raise ConfigError(
                f"`metrics` names `{name}` twice: leave one out, or give it another `column`"
            )
        if name in RESERVED_COLUMNS:
            raise ConfigError(
                f"`metrics` has one called `{name}`, as another column of the records: rename it"
            )
        found[name] = metric
    return found


def _attack_goal(parameters: Mapping[str, Any]) -> AttackGoal:
    """Return the classes of an attack: its parameters `source` and `target`, or `pairs`."""
    # An attack of one flip is one of several with one pair.
    pairs = parameters.get("pairs") or [(parameters.get("source"), parameters.get("target"))]
    sources, targets = zip(*pairs, strict=True)
    return AttackGoal(_class_labels(sources), _class_labels(targets))


def _class_labels(values: tuple[object, ...]) -> tuple[int, ...]:
    return tuple(value for value in values if isinstance(value, int))


def _backdoor_trigger(backdoor: _Function) -> Callable[[Tensor], Tensor] | None:
    """Return the trigger of an attack with its parameters; None without a backdoor."""
    trigger = data_poisoning.TRIGGER.get(backdoor)
    if trigger is None:
        return None
    # A user's attack names its trigger as text, which may be a user's function too.
    if plugins.USER_FUNCTION.get(backdoor):
        trigger = plugins.resolve("trigger", trigger, attacks)
    arguments = {
        name: backdoor.keywords[name]
        for name in plugins.parameters(trigger)
        if name in backdoor.keywords
    }
    # Test samples get the trigger that poisoned the training samples.
    return functools.partial(trigger, **arguments)
