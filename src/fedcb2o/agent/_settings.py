"""Settings of an agent, as its user gave them, and the specification that follows from them."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from fedcb2o.errors import ConfigError, require
from fedcb2o.federated import RunSpec, losses
from fedcb2o.federated.algorithms.section import AlgorithmSection
from fedcb2o.federated.run_spec import Training
from fedcb2o.federated.sections import AgentsSection, Component, as_component


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of an agent; see `Agent`.

    Numbers out of range are a ConfigError.
    """

    method: Any
    attack: Any
    loss: Any
    seed: int
    gamma: float
    rounds: int
    num_samples: int
    malicious_share: float
    num_classes: int = 1

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, least in (("seed", 0), ("rounds", 1), ("num_samples", 1)):
            value = getattr(self, name)
            require(name, value, is_whole(value, least), f"a whole number from {least}")
        require("gamma", self.gamma, self.gamma > 0, "above 0")
        is_share = 0 <= self.malicious_share < 1
        require("malicious_share", self.malicious_share, is_share, "from 0 and below 1")

    def spec(self, name: str, module: nn.Module) -> RunSpec:
        """Return the specification of a run of two agents.

        An unknown method or loss, or an invalid parameter, is a ConfigError.
        """
        section = AlgorithmSection.model_validate(as_component(self.method))
        algorithm = section.build()
        if algorithm.clusters is not None:
            raise ConfigError(f"the algorithm `{section.name}` has models of clusters")
        loss = None
        if self.loss is not None:
            loss = Component.model_validate(as_component(self.loss)).resolve("loss", losses).bound
        return RunSpec(
            seed=int(self.seed),
            num_agents=2,
            num_classes=self.num_classes,
            rounds=int(self.rounds),
            # Numbers of agents and budget are set anew in every round.
            agents=AgentsSection(benign=2, malicious=0, budget=1, num_clusters=1),
            model=name,
            module=module,
            training=Training(gamma=float(self.gamma), loss=loss),
            algorithm=algorithm,
            malicious_share=self.malicious_share,
            # Claims of peers are compared as float64, which is exact up to here.
            max_samples=2**53,
        )

    def with_classes(self, num_classes: int) -> "Settings":
        """Return the same settings for a number of classes.

        1 means no classes.
        """
        return dataclasses.replace(self, num_classes=num_classes)


def is_whole(value: Any, least: int) -> bool:
    """Return whether a value is a whole number of Python or NumPy, at least `least`."""
    is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_number and bool(value >= least)
