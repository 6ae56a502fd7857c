"""Models that agents received in a round, and what they decided, in arrays over the agents."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from fedcb2o.errors import ConfigError
from fedcb2o.federated.guards.checks import ADMITTED
from fedcb2o.federated.plugin_outputs import validated_reduction, validated_weights
from fedcb2o.federated.ragged import AgentIds, Entries, Indices, Positions, Ragged, Rows
from fedcb2o.federated.run_spec import RunSpec
from fedcb2o.federated.types import CriterionInput, Received, Reduction, RuleOutput

_PER_MODEL = ("rows", "admission", "weights")
_PER_AGENT = ("agents", "own_weight", "factor", "own_loss", "previous_weight", "f")


@dataclass(frozen=True)
class Inbox:
    """Senders, buffer rows and clipped claims of samples of models that agents received.

    `triggers` has what the senders published next to their models, for the guard
    `trigger_exchange`: None without any, and nothing in a simulation's batches.
    """

    ids: Ragged
    rows: Rows
    num_samples: Float[np.ndarray, " m"]
    round: Int[np.ndarray, " m"]
    triggers: Sequence[Any] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def filter(self, keep: Bool[np.ndarray, " m"]) -> "Inbox":
        """Return the inbox without the models whose `keep` is False."""
        if keep.all():
            return self
        rows = Rows(self.rows[keep])
        return Inbox(self.ids.filter(keep), rows, self.num_samples[keep], self.round[keep])

    def received(self) -> Received:
        """Return all models, in the order of the inbox; of one agent, what it received."""
        columns = (self.ids.values, self.rows, self.num_samples, self.round)
        return Received(*(torch.from_numpy(column.copy()) for column in columns))

    def group_by_size(
        self, positions: Positions, *keys: Int[np.ndarray, " a"]
    ) -> Iterator[tuple[Positions, Entries, Received]]:
        """Group agents with equally many models, and equal `keys`: positions, entries, models."""
        # One number per combination of size and keys.
        set_keys = np.zeros(len(positions), np.int64)
        for numbers in (self.ids.sizes, *keys):
            set_keys = set_keys * (1 + int(numbers.max(initial=0))) + numbers[positions]

        columns = (self.ids.values, self.rows, self.num_samples, self.round)
        # Equal sizes, so that the models of several agents are one tensor [a, m].
        for key in np.unique(set_keys).tolist():
            equal = Positions(positions[set_keys == key])
            entries = Entries(self.ids.flat_index(equal))
            shape = (len(equal), -1)
            yield (
                equal,
                entries,
                Received(*(torch.from_numpy(column[entries].reshape(shape)) for column in columns)),
            )


@dataclass(frozen=True)
class Decisions:
    """Decisions of several agents in a round.

    The weights of an agent sum to 1, or to 0 where it received or trusts no model: it then keeps
    its own.

    Attributes:
        rows: Row of the model buffer that holds each received model.
        admission: Whether the guards admitted each received model: an index into
            `guards.checks.OUTCOMES`.
        weights: Weights mu_j^i of the received models in m_j, before the mixing factor; NaN where a
            reduction has no weights.
        factor: Mixing factor, lambda1 * gamma unless it is given; 1 for colluders.
        own_loss: Validation loss of each agent's own model; NaN if not computed.
        previous_weight: Weight of the model before the round; NaN for a rule without one.
        f: Number of attackers that the rule assumed; NaN for a rule without one.
        reductions: By agent id, the reduction over coordinates that replaces the weights.
    """

    agents: AgentIds
    asked: Ragged
    received: Ragged
    rows: Rows
    admission: Int[np.ndarray, " m"]
    weights: Float[np.ndarray, " m"]
    own_weight: Float[np.ndarray, " a"]
    factor: Float[np.ndarray, " a"]
    own_loss: Float[np.ndarray, " a"]
    previous_weight: Float[np.ndarray, " a"]
    f: Float[np.ndarray, " a"]
    reductions: dict[int, Reduction] = field(default_factory=dict)

    @classmethod
    def empty(
        cls,
        agents: AgentIds,
        asked: Ragged,
        inbox: Inbox,
        admission: Int[np.ndarray, " m"] | None = None,
    ) -> "Decisions":
        """Return decisions of agents that keep their models, to be filled in."""
        if admission is None:
            admission = np.full(len(inbox.rows), ADMITTED)
        return cls(
            agents=agents,
            asked=asked,
            received=inbox.ids,
            rows=inbox.rows,
            admission=admission,
            weights=np.zeros(len(inbox.rows)),
            own_weight=np.zeros(len(agents)),
            factor=np.ones(len(agents)),
            own_loss=np.full(len(agents), np.nan),
            previous_weight=np.full(len(agents), np.nan),
            f=np.full(len(agents), np.nan),
        )

    @classmethod
    def concatenate(cls, batches: "Sequence[Decisions]") -> "Decisions":
        """Return the decisions of disjoint batches, by ascending agent id."""
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(batch, name) for batch in batches])
            for name in (*_PER_MODEL, *_PER_AGENT)
        }
        whole = cls(
            asked=Ragged.concatenate([batch.asked for batch in batches]),
            received=Ragged.concatenate([batch.received for batch in batches]),
            **columns,
            reductions={j: value for batch in batches for j, value in batch.reductions.items()},
        )
        # Without copies where they are in order.
        if (np.diff(whole.agents) > 0).all():
            return whole
        return whole.take(whole.agents.argsort())

    def take(self, indices: Indices) -> "Decisions":
        """Return the decisions of some agents, in the order of `indices`."""
        entries = self.received.flat_index(indices)
        columns = {name: getattr(self, name)[entries] for name in _PER_MODEL}
        columns |= {name: getattr(self, name)[indices] for name in _PER_AGENT}
        asked, received = self.asked.take(indices), self.received.take(indices)
        return dataclasses.replace(self, asked=asked, received=received, **columns)

    def __len__(self) -> int:
        return len(self.agents)

    def store_(
        self,
        positions: Positions,
        entries: Entries,
        inputs: CriterionInput,
        output: RuleOutput,
        spec: RunSpec,
    ) -> None:
        """Validate the output of a rule and store it for the agents at `positions`.

        `entries` are those of their models. A rule may weigh the model before the round if it
        declared that.
        """
        algorithm = spec.algorithm
        rule = algorithm.weigh.function
        self.factor[positions] = algorithm.factor(spec.training.gamma)
        if inputs.own_losses is not None:
            self.own_loss[positions] = inputs.own_losses.mean.flatten().numpy()
        if output.f is not None:
            self.f[positions] = output.f

        if isinstance(output.outcome, Reduction):
            self._store_reduction_(int(positions[0]), entries, output.outcome, inputs, rule)
            return

        if output.previous_weight is not None:
            if not algorithm.reads_previous:
                raise ConfigError(
                    "the rule gave weight to the model before the round, and did not declare to "
                    "use it: add @stateful(uses_previous=True)"
                )
            self.previous_weight[positions] = output.previous_weight
        shape = tuple(inputs.received.ids.shape)
        rest = output.previous_weight or 0.0
        mu, own = validated_weights(rule, output.outcome, shape, rest=rest)
        self.weights[entries] = mu.flatten().numpy()
        self.own_weight[positions] = own.numpy()

    def _store_reduction_(
        self,
        position: int,
        entries: Entries,
        reduction: Reduction,
        inputs: CriterionInput,
        rule: Any,
    ) -> None:
        reduce = validated_reduction(rule, reduction.reduce)
        self.reductions[int(self.agents[position])] = dataclasses.replace(reduction, reduce=reduce)
        # A median has no weights, which differs from weights of 0 in the records.
        if reduction.weights is None:
            self.weights[entries] = np.nan
            self.own_weight[position] = np.nan
            return
        weights = dict(zip(reduction.rows.tolist(), reduction.weights.tolist(), strict=True))
        rows = self.rows[entries].tolist()
        own_row = int(inputs.own_entry.rows)
        self.weights[entries] = [weights.get(row, 0.0) for row in rows]
        # An agent may sample itself; its model is then one of the received ones.
        self.own_weight[position] = 0.0 if own_row in rows else weights.get(own_row, 0.0)
