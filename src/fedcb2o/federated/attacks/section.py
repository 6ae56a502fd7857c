"""The section `attack` of a configuration, which an agent as an object takes, too."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field, field_validator

from fedcb2o import plugins
from fedcb2o.errors import ConfigError
from fedcb2o.federated import attacks
from fedcb2o.federated.adversary import THREAT, Attack, Threat
from fedcb2o.federated.sections import COMPONENT_VALUES, Component, Part, as_component, key_field

_StrictPositiveInt = Annotated[int, Field(ge=1, strict=True)]


class AttackSection(Component):
    """The attack of the malicious agents, on their data or on their models."""

    data: Annotated[
        Component | None,
        key_field(
            "an attack on the training data, which goes with an attack on models",
            values=COMPONENT_VALUES,
        ),
    ] = None
    from_round: Annotated[
        int,
        key_field(
            "the first round with an attack, counted from 0. Before it attackers train and publish "
            "as benign agents do, but they collude",
            ge=0,
            strict=True,
        ),
    ] = 0
    sybils: Annotated[
        bool,
        key_field(
            "from `from_round` on attackers have new identities in every round. No agent has met "
            "them, and ProbSampling asks them first (Douceur 2002)",
            strict=True,
        ),
    ] = False
    claims: Annotated[
        _StrictPositiveInt | None,
        key_field(
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

    def build(self) -> Attack:
        """Return the attack, checked with its parameters and its attack on data."""
        return self.resolve_attack()[1]

    def resolve_attack(self) -> tuple[Part, Attack, Part | None]:
        """Return the function of the attack, the attack, and the function that poisons data."""
        part = self.resolve("attack", attacks)
        threat = THREAT.get(part.function)
        data = None
        if self.data is not None:
            data = self.data.resolve("attack", attacks)
            part = dataclasses.replace(part, settings={**part.settings, "data": data.settings})
        poison = part if threat is None else data
        self._check_kinds(part.function, threat, None if data is None else data.function)
        attack = Attack(
            poison=None if poison is None else poison.bound,
            craft=None if threat is None else part.bound,
            threat=threat or Threat(),
            from_round=self.from_round,
            sybils=self.sybils,
            claimed_samples=self.claims,
        )
        return part, attack, poison

    def _check_kinds(
        self, function: Callable[..., Any], threat: Threat | None, data: Callable[..., Any] | None
    ) -> None:
        """Raise ConfigError unless `data` is an attack on data, next to one on models."""
        name = plugins.label(self.name)
        if threat is None:
            if data is not None:
                raise ConfigError(
                    f"`attack.data` needs an attack on models, and `{name}` is an attack on data"
                )
            # An attack on models is known by its declaration; its first argument shows that it
            # lacks one.
            if next(iter(inspect.signature(function).parameters), None) == "view":
                raise ConfigError(
                    f"the attack `{name}` does not declare what it knows: write @fedcb2o.knows(), "
                    'with "fellows" or "benign" in it for what it sees, above the function'
                )
            return
        if data is None and threat.on_poisoned_data:
            raise ConfigError(
                f"the attack `{name}` publishes a model trained on poisoned data: name an attack "
                'on data, such as data = { name = "label_flip", source = 9, target = 4 }'
            )
        if self.data is not None and data is not None and THREAT.get(data) is not None:
            inner = plugins.label(self.data.name)
            raise ConfigError(
                f"`attack.data` needs an attack on data, and `{inner}` is one on models"
            )
