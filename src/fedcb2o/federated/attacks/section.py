"""The section `attack` of a configuration, which an agent as an object takes, too.

>>> AttackSection(name="sign_flip", scale=2.0).build().is_crafting(0)
True
"""

import inspect
from typing import Annotated, Any

from pydantic import Field, field_validator

from fedcb2o import plugins
from fedcb2o.errors import ConfigError
from fedcb2o.federated import attacks
from fedcb2o.federated.adversary import THREAT, Attack, Threat
from fedcb2o.federated.sections import COMPONENT_VALUES, Component, as_component, key_field

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

    @property
    def data_attack(self) -> Component | None:
        """The attack on data: this one, or the one that an attack on models adds.

        None for an attack on models without `data`.
        """
        if _threat_of(self) is None:
            return self
        return self.data

    def build(self) -> Attack:
        """Return the attack, checked with its parameters and its attack on data."""
        threat = _threat_of(self)
        name = plugins.label(self.name)
        function = self.bind("attack", attacks)
        poison = None
        if self.data is not None:
            poison = self.data.bind("attack", attacks)
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
            # An attack on models is known by its declaration; its first argument shows that it
            # lacks one.
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


def _threat_of(attack: Component) -> Threat | None:
    return THREAT.get(plugins.resolve("attack", attack.name, attacks))
