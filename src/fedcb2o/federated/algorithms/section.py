"""The section `algorithm` of a configuration: an algorithm by name, its parameters and guards."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import StrictBool, model_validator

from fedcb2o import plugins
from fedcb2o.errors import ConfigError, describe_type
from fedcb2o.federated import algorithms, selection
from fedcb2o.federated.algorithms._fedassay import DEFAULT_GUARDS
from fedcb2o.federated.guards.checks import NO_GUARDS, Guards
from fedcb2o.federated.run_spec import Algorithm
from fedcb2o.federated.sections import Component, Part, key_field
from fedcb2o.federated.trigger_exchange import ExchangeWeighing

RECOMMENDED = "fedassay"
"""Algorithm of a user who names none."""


class AlgorithmSection(Component):
    """The algorithm of the agents, and its guards."""

    name: str | Callable[..., Any] = RECOMMENDED
    guards: Annotated[
        Guards | StrictBool | None,
        key_field(
            "[guards](#guards), which go with every algorithm; true gives those of FedAssay, false "
            "turns all of them off",
            values="a table, true, false",
            default="those of the algorithm",
        ),
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _current(cls, table: Any) -> Any:
        """Return the section with a name."""
        if not isinstance(table, Mapping):
            return table
        table = {"name": RECOMMENDED, **table}
        for key in table.keys() & Guards.model_fields:
            if str(table["name"]) in algorithms.__all__:
                raise ConfigError(f"`algorithm.{key}` is a guard: write `algorithm.guards.{key}`")
        return table

    def build(self) -> Algorithm:
        """Return the algorithm with its parameters checked, and its guards."""
        return self.resolve_algorithm()[1]

    def resolve_algorithm(self) -> tuple[Part, Algorithm]:
        """Return the function of the algorithm, and its result with the guards.

        The settings of the function give the same algorithm for any default guards.
        """
        part = self.resolve("algorithm", algorithms)
        algorithm = part.bound()
        if not isinstance(algorithm, Algorithm):
            kind = describe_type(algorithm)
            raise ConfigError(f"the algorithm returned {kind}, expected an Algorithm")
        guards = algorithm.guards
        if self.guards is False:
            guards = NO_GUARDS
        elif self.guards is True:
            guards = DEFAULT_GUARDS
        elif self.guards is not None:
            # Keys that the user gives replace those of the algorithm, and no other ones.
            guards = guards.model_copy(update=self.guards.model_dump(exclude_unset=True))

        settings = {**part.settings}
        if guards != NO_GUARDS:
            settings["guards"] = guards.model_dump()
        # Without the key, the algorithm's own guards would be on.
        elif self.guards is not None:
            settings["guards"] = False
        algorithm = _with_named_errors(_with_guards(algorithm, guards), part.function)
        if guards.trigger_exchange is not False:
            weigh = ExchangeWeighing(algorithm.weigh, guards.trigger_exchange)
            algorithm = dataclasses.replace(algorithm, weigh=weigh)
        return dataclasses.replace(part, settings=settings), algorithm


def _with_named_errors(algorithm: Algorithm, function: Callable[..., Any]) -> Algorithm:
    """Return an algorithm whose functions name the user's algorithm in their errors."""
    name = plugins.USER_FUNCTION.get(function)
    if name is None:
        return algorithm
    wrap = functools.partial(plugins.wrap_user_function, "algorithm", name)
    weigh: Any = algorithm.weigh
    weigh = dataclasses.replace(weigh, function=wrap(weigh.function))
    return dataclasses.replace(algorithm, select=wrap(algorithm.select), weigh=weigh)


def _with_guards(algorithm: Algorithm, guards: Guards) -> Algorithm:
    """Return an algorithm with guards; raise ConfigError where they do not go with it."""
    if algorithm.clusters is not None and guards != NO_GUARDS:
        raise ConfigError(
            "`guards` check models that an agent receives for its own; they do not go with models "
            "of clusters (ifca, dfca)"
        )
    select = getattr(algorithm.select, "func", algorithm.select)
    if guards.newcomer_share and select not in (selection.prob_sampling, selection.uniform):
        raise ConfigError(
            "`guards.newcomer_share` goes with the selections prob_sampling and uniform"
        )
    if guards.exit_test is not False and algorithm.weigh.is_stateful:
        raise ConfigError("`guards.exit_test` does not go with a rule that keeps a state")
    return algorithm.with_guards(guards)
