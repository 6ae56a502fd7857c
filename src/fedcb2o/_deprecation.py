"""Former names of modules, functions and fields, kept for one minor version.

Every use of a former name gives a DeprecationWarning that names the new one. Renamed plug-ins
and parameters are in `fedcb2o._former_keys`.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

FORMER_MODULES: dict[str, tuple[str, dict[str, str]]] = {
    "fedcb2o.streams": ("fedcb2o.rng", {"streams": "agent_streams"}),
    "fedcb2o.models": ("fedcb2o.nn.architectures", {}),
    "fedcb2o.experiments.bench": (
        "fedcb2o.experiments.grid._grid_runner",
        {"Bench": "GridResult"},
    ),
    "fedcb2o.federated.aggregate": (
        "fedcb2o.federated.aggregation.base",
        {"Form": "RuleSignature", "form": "fedcb2o.federated.aggregation.base._form"},
    ),
    "fedcb2o.federated.data_poisoning": ("fedcb2o.federated.attacks.data_poisoning", {}),
    "fedcb2o.federated.model_poisoning": (
        "fedcb2o.federated.attacks.model_poisoning",
        {"trash": "random_model"},
    ),
    "fedcb2o.federated.gossip_attacks": ("fedcb2o.federated.attacks.per_receiver", {}),
    "fedcb2o.federated.graphs": ("fedcb2o.federated.topology", {}),
    "fedcb2o.federated.metrics": ("fedcb2o.federated.evaluation.metrics", {}),
    "fedcb2o.federated.pre_steps": ("fedcb2o.federated.aggregation.preaggregation", {}),
    "fedcb2o.federated.robust": (
        "fedcb2o.federated.aggregation.gram_rules",
        {
            "balance": "fedcb2o.federated.aggregation.own_model_rules.balance",
            "centred_clipping": "fedcb2o.federated.aggregation.own_model_rules.centred_clipping",
            "clipped_gossip": "fedcb2o.federated.aggregation.own_model_rules.clipped_gossip",
            "cs_plus": "fedcb2o.federated.aggregation.own_model_rules.cs_plus",
            "fltrust": "fedcb2o.federated.aggregation.own_model_rules.fltrust",
            "monna": "fedcb2o.federated.aggregation.own_model_rules.monna",
            "norm_clipping": "fedcb2o.federated.aggregation.own_model_rules.norm_clipping",
            "ubar": "fedcb2o.federated.aggregation.own_model_rules.ubar",
        },
    ),
    "fedcb2o.federated.robust_columns": ("fedcb2o.federated.aggregation.coordinatewise", {}),
    "fedcb2o.federated.rules": ("fedcb2o.federated.aggregation", {}),
    "fedcb2o.particles.capture": ("fedcb2o.particles.capture_risk", {"told": "explain"}),
    "fedcb2o.peer.agent": (
        "fedcb2o.peer.node._agent",
        {
            "Agent": "AgentSetup",
            "own": "agent_from_dataset",
            "simulated": "simulated_agent",
            "data_of": "load_member_dataset",
            "differing": "differing_keys",
            "network": "build_network",
        },
    ),
    "fedcb2o.peer.federation": (
        "fedcb2o.peer.membership.federation",
        {
            "make": "make_federation",
            "read": "read_federation",
            "write": "write_federation",
            "amended": "amend_federation",
            "sign": "sign_federation",
        },
    ),
    "fedcb2o.peer.identity": ("fedcb2o.peer.membership.identity", {}),
    "fedcb2o.report.grid": ("fedcb2o.report.grid_results", {}),
    "fedcb2o.runtime": ("fedcb2o.simulation", {}),
    "fedcb2o.runtime.engine": ("fedcb2o.simulation.rounds", {"rounds": "run_rounds"}),
}
"""Former module -> the module that replaces it, and the new names of what was renamed in it."""


def warn_renamed(former: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn that a name is deprecated.

    Args:
        former: Name that the caller used.
        new: Name that replaces it.
        stacklevel: Frame that the warning points at; 3 is the caller of the caller.
    """
    warnings.warn(
        f"`{former}` is now `{new}`; the former name goes with the next minor version",
        DeprecationWarning,
        stacklevel=stacklevel,
    )


def former_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that finds renamed functions and classes.

    Args:
        module: Name of the module, `__name__`.
        names: Former name -> new name; a dotted new name is in another module.

    Returns:
        A function from a former name to the object that replaces it. It raises AttributeError for
        every other name.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new = names[name].rpartition(".")
        home = home or module
        warn_renamed(f"{module}.{name}", f"{home}.{new}")
        return getattr(importlib.import_module(home), new)

    return find


def former_attributes(**names: str) -> Callable[[C], C]:
    """Return a class decorator that keeps former names of attributes and methods.

    Args:
        **names: Former name = new name.

    Returns:
        The decorator; it changes the class in place.
    """

    def find(self: Any, name: str) -> Any:
        if name not in names:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warn_renamed(f"{type(self).__name__}.{name}", names[name])
        return getattr(self, names[name])

    def decorate(cls: C) -> C:
        cls.__getattr__ = find  # type: ignore[attr-defined]
        return cls

    return decorate


def former_fields(**names: str) -> Callable[[C], C]:
    """Return a class decorator that keeps former field names.

    They are read as attributes and accepted as keywords of the constructor.

    Args:
        **names: Former name = new name.

    Returns:
        The decorator; it changes the class in place.
    """

    def decorate(cls: C) -> C:
        cls.__init__ = former_parameters(**names)(cls.__init__)  # type: ignore[misc]
        return former_attributes(**names)(cls)

    return decorate


def former_parameters(**names: str) -> Callable[[F], F]:
    """Return a function decorator that accepts former names of keyword arguments.

    Args:
        **names: Former name = new name.

    Returns:
        The decorator.
    """

    def decorate(function: F) -> F:
        title = function.__qualname__.removesuffix(".__init__").rpartition(".<locals>.")[2]

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            for name in names.keys() & keywords.keys():
                warn_renamed(f"{title}({name}=...)", f"{names[name]}=...")
                keywords[names[name]] = keywords.pop(name)
            return function(*arguments, **keywords)

        return cast(F, call)

    return decorate


class _FormerModuleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook for the modules of `FORMER_MODULES`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in FORMER_MODULES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        new_name, names = FORMER_MODULES[spec.name]
        warn_renamed(spec.name, new_name, stacklevel=2)
        former = types.ModuleType(spec.name, f"Former name of `{new_name}`.")
        module = importlib.import_module(new_name)

        def find(name: str) -> Any:
            if name in names:
                home, _, new = names[name].rpartition(".")
                return getattr(importlib.import_module(home) if home else module, new)
            return getattr(module, name)

        vars(former)["__getattr__"] = find
        return former

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module as `create_module` made it.

        Args:
            module: Module that `create_module` returned.
        """


def install() -> None:
    """Make former modules importable; a second call changes nothing."""
    if not any(isinstance(finder, _FormerModuleFinder) for finder in sys.meta_path):
        sys.meta_path.append(_FormerModuleFinder())
