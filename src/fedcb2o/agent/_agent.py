"""One agent of Algorithm 2, as an object."""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fedcb2o import records
from fedcb2o.agent._attack import Attacker, build_attack
from fedcb2o.agent._decision import SELF, Decision, Observer, decision_of
from fedcb2o.agent._judge import Judge, JudgeOracle
from fedcb2o.agent._memory import UNKNOWN_ID, Memory, Peer, PeerIds, with_prefix, without_prefix
from fedcb2o.agent._models import Model, ModelFormat, as_network
from fedcb2o.agent._settings import (
    Settings,
    check_parts,
    is_whole,
    num_classes,
    validation_shard,
)
from fedcb2o.data import Shard, features, inputs, sources, transforms, value_range
from fedcb2o.errors import ConfigError, DataError, RunError, describe_type, require
from fedcb2o.federated import algorithm2, single_agent, trigger_exchange
from fedcb2o.federated.adversary import Attack
from fedcb2o.federated.agent_group import AgentData
from fedcb2o.federated.aggregation.base import is_finite
from fedcb2o.federated.algorithms.section import RECOMMENDED
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.guards.acceptance import (
    MAX_VALUE,
    Message,
    is_acceptable,
    max_abs,
    rejection_reason,
)
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.run_spec import RunSpec
from fedcb2o.federated.shortfall import Shortfall
from fedcb2o.federated.single_agent import ReceivedModel
from fedcb2o.federated.trigger_exchange import Triggers
from fedcb2o.nn import batch_norm, parameters
from fedcb2o.nn.random_evaluation import seed_evaluation_
from fedcb2o.plugins import PluginChoice, to_python
from fedcb2o.rng import stream
from fedcb2o.safe_files import check_regular

_REBUILT = (
    "_spec",
    "_data",
    "_shortfall",
    "_format",
    "_buffer",
)  # users' functions in them have no names


class Agent:
    """Agent that selects peers, evaluates their models and moves its own towards consensus.

    Nothing is written to files and no global state is changed. An agent can be used in any thread,
    by one thread at a time. It can be pickled where its functions can, with its network and its
    validation samples.

    Args:
        network: A network, or theta as a flat array [d] for an agent with a `judge`. `aggregate`
            changes its trained parameters in place. All trained parameters are the model theta;
            frozen parameters are not exchanged. Statistics of norms follow `buffers`.
        validation: Samples [n, ...] and labels [n] from 0 on, or targets of a regression, as a pair
            of arrays or a data set; see `fedcb2o.dataset`. They never leave the agent.
        columns: Names of the columns of samples and of labels, where `validation` has columns.
        judge: A function that evaluates models, in place of `validation`: m models -> losses
            [m, n], or these and the classes [n] of its n samples. It receives a list of state
            dicts or, without a network, an array [m, d].
        method: Name of an algorithm, such as "fedassay" or "fedcb2o", or a table with its name,
            parameters and guards, as in the section `algorithm` of a configuration.
        attack: An attack of this agent, as in the section `attack`; see `publish` and
            `training_data`.
        seed: Seed of all random numbers.
        id: Number of the agent, where peers are numbers from 0, too. It then draws the random
            numbers of the agent of that number in a simulation with the same seed.
        loss: Name or function of the loss of a sample; by default the cross-entropy.
        loss_groups: Name, table or function of groups of validation samples that stand for classes
            in criteria, as `agents.loss_groups` of a run.
        gamma: Step size of the local training, for methods that mix by lambda1 * gamma.
        rounds: Number of rounds planned, for methods that depend on the progress.
        num_samples: Number of the agent's training samples, for rules that weigh by them; by
            default the number of validation samples.
        malicious_share: Share of attackers that rules assume, in [0, 1).
        buffers: Statistics of batch norms: "local" ones, estimated on the validation samples for
            each model, "shared" ones in theta, or "dropped" ones, which stay. The default is that
            of a run, "local", and "shared" with a `judge`, which brings no samples.

    Attributes:
        network: The network; a stand-in for an agent without one.
        round: Number of finished rounds.

    Raises:
        ConfigError: The network, the method or another argument is invalid.
        DataError: The validation data are invalid.
    """

    def __init__(
        self,
        network: nn.Module | Tensor | np.ndarray,
        *,
        validation: Any = None,
        columns: Any = None,
        judge: Judge | None = None,
        method: PluginChoice = RECOMMENDED,
        attack: PluginChoice | None = None,
        seed: int = 0,
        id: int | None = None,
        loss: PluginChoice | None = None,
        loss_groups: PluginChoice | None = None,
        gamma: float = 0.05,
        rounds: int = 100,
        num_samples: int | None = None,
        malicious_share: float = 0.0,
        buffers: batch_norm.StatisticsMode | None = None,
    ) -> None:
        if (validation is None) == (judge is None):
            raise ConfigError("an agent needs `validation` samples or a `judge`, and not both")
        if judge is not None and loss_groups is not None:
            raise ConfigError("a `judge` returns the group of each sample, in place of its class")
        is_network = isinstance(network, nn.Module)
        if judge is None and not is_network:
            raise ConfigError("an agent without a network needs a `judge` in place of `validation`")
        self.network, self._is_numpy = as_network(network)
        _set_statistics_mode(self.network, buffers, has_samples=judge is None)
        # Raises for a network that cannot be a model.
        parameters.dimension(self.network)
        self.round = 0
        self._judge = judge
        self._peers = PeerIds(id)
        self._state = AgentState.initial(1)
        # Rules compare with the model from before the training, which the caller overwrites.
        self._previous = parameters.flatten(self.network)
        self._selected: tuple[tuple[int, ...], int] | None = None
        self._asked: set[int] = set()  # ids that any `select` of the round named
        self._validation = validation_shard(self.network, validation, columns, loss is not None)
        settings = Settings(
            method=method,
            attack=attack,
            loss=loss,
            loss_groups=loss_groups,
            seed=seed,
            gamma=gamma,
            rounds=rounds,
            num_samples=len(self._validation) if num_samples is None else num_samples,
            malicious_share=malicious_share,
        )
        count = num_classes(self.network, self._validation, loss)
        self._settings = dataclasses.replace(settings, num_classes=count)
        self._build()
        self._sound_theta()
        if self._spec.algorithm.guards.trigger_exchange is not False:
            trigger_exchange.check_samples(self._validation)
        self._is_random = judge is None and check_parts(self._spec, self._validation)

    def _build(self) -> None:
        """Build everything that follows from the settings."""
        settings = self._settings
        self._spec = settings.spec(type(self.network).__name__, self.network)
        attack = build_attack(settings.attack)
        self._data = self._agent_data(self._validation, attack)
        self._shortfall = Shortfall(self._spec.algorithm, settings.malicious_share)
        self._format = ModelFormat(self.network, self._is_numpy)
        self._buffer = self._previous.new_empty(0, 0)

    @property
    def theta(self) -> Any:
        """The agent's model theta as a flat array [d], a copy.

        Assigning an array writes it into the network.
        """
        theta = self._own_theta()
        return theta.numpy() if self._format.is_numpy else theta

    @theta.setter
    def theta(self, theta: Any) -> None:
        row = torch.empty_like(self._previous)
        # Into a row first: a model that does not fit changes nothing.
        reason = self._format.read_(theta, row)
        if reason:
            raise ConfigError(f"the model cannot be set: {reason}")
        self._format.require_same()
        self._load(row)

    def training_data(self, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        """Return training data as the agent's attack on data changes them.

        Args:
            x: Samples [n, ...].
            y: Labels [n], whole numbers from 0.

        Returns:
            Samples and labels; those of the arguments without an attack on data.

        Raises:
            DataError: The samples or labels are invalid.
        """
        part = sources.read("`x`", ("x", "y"), x, y)
        shard = Shard(*map(torch.from_numpy, inputs.check_part(part)))
        attack = self._data.attack if self._data.malicious[0] else None
        data = self._agent_data(shard, attack)
        poisoned, changed = data.training_data(np.zeros(1, np.int64), self.round)
        return poisoned[0], changed[0]

    def publish(
        self,
        benign: Mapping[Any, Model] | None = None,
        fellows: Mapping[Any, Model] | None = None,
    ) -> Any:
        """Return a copy of the model, as the agent sends it to peers.

        An agent with an attack on models returns the model that it crafts.

        Args:
            benign: Models of benign agents by name, for attacks that know them.
            fellows: Models of other attackers by name, for attacks that know them.

        Returns:
            A state dict of theta or, for an agent without a network, a flat array. An attack that
            publishes one model per receiver returns a table of these, by the names in `benign`.

        Raises:
            ConfigError: The attack fails, or knows models that are missing or invalid.
        """
        theta = self._own_theta()
        if not is_acceptable(max_abs(theta.unsqueeze(0), [0])).all():
            warnings.warn(
                f"peers refuse this model: it holds numbers that are not finite, or beyond "
                f"{MAX_VALUE:g}. Take a smaller step size, or scale samples and targets",
                stacklevel=2,
            )
        if not self._data.attack.is_crafting(self.round):
            return self._format.to_user(theta.unsqueeze(0))[0]

        ids = self._peers.ids([*(benign or {}), *(fellows or {})])
        spec = dataclasses.replace(self._spec, num_agents=self._peers.num_agents)
        attacker = Attacker(spec, self._data, self._format, self.round, theta, self._previous)
        with self._evaluation():
            return attacker.publish(ids, benign or {}, fellows or {})

    def select(self, candidates: Iterable[Peer], budget: int) -> list[Any]:
        """Select the peers to ask in this round (alg:localAggregation, line 1).

        Peers that were never asked come first; then peers are drawn with probability proportional
        to their likelihood. The same call gives the same peers until `aggregate` ends the round.

        Args:
            candidates: Names of the peers that can be asked, each a text or a whole number.
            budget: M, the largest number of peers to ask.

        Returns:
            Names of at most `budget` peers.

        Raises:
            ConfigError: The budget is below 1, or a name is invalid.
        """
        require("budget", budget, is_whole(budget, 1), "a whole number from 1")
        # Sorted, so that the order of the caller's table changes no bit.
        self._selected = (tuple(sorted(self._peers.ids(candidates))), int(budget))
        models = self._previous.unsqueeze(0)
        group = single_agent.agent_group(self._round_spec(), self._data, models=models)
        asked = algorithm2.sample_peers(group, self._state.contacts[0], self.round)
        # An agent that sampled itself has that model already.
        ids = [id for id in asked.values.tolist() if id != self._peers.own]
        self._asked.update(ids)
        return [self._peers.name(id) for id in ids]

    def aggregate(
        self,
        models: Mapping[Any, Model],
        samples: Mapping[Any, float] | None = None,
        triggers: Mapping[Any, bytes] | None = None,
    ) -> Decision:
        """Evaluate models, and move the agent's model towards their consensus (lines 3 to 7).

        Args:
            models: Models by peer: state dicts, or flat arrays in the order of theta. Models that
                are invalid are refused, and nothing of them is used. Without any model, the agent
                keeps its own.
            samples: Number of training samples that each peer claims; by default equal numbers. A
                table of more peers is possible.
            triggers: Triggers that each peer published, the bytes of its `triggers`, for the guard
                `trigger_exchange`. The model of a peer whose bytes are invalid is refused.

        Returns:
            The decision. The network has the new model.

        Raises:
            ConfigError: A name is invalid, or the method cannot use what arrived.
        """
        tables = (("models", models), ("samples", samples or {}), ("triggers", triggers or {}))
        for argument, table in tables:
            if not isinstance(table, Mapping):
                raise ConfigError(
                    f"`{argument}` must be a table by the names of peers, got "
                    f"{describe_type(table)}"
                )
        strangers = [name for name in samples or {} if name not in models]
        missing = [name for name in models if samples and name not in samples]
        if strangers and missing:
            raise ConfigError(
                f"`samples` has a number for {strangers[0]!r} and none for the model of "
                f"{missing[0]!r}: take the names in `models`"
            )
        names = dict(zip(self._peers.ids(models), models, strict=True))
        # The buffer is [own | previous | received], as that of a real peer.
        first_row = 1 + self._spec.algorithm.keeps_previous
        buffer = self._model_buffer(first_row + len(names))
        self._sound_theta(out=buffer[0])
        buffer[1:first_row] = self._previous

        refused: dict[Any, str] = {}
        received: dict[int, ReceivedModel] = {}
        # The sums of the aggregation depend on the order of the models.
        ids = sorted(names)
        by_id = [models[names[id]] for id in ids]
        rows = range(first_row, len(buffer))
        reasons = [
            self._format.read_(model, buffer[row]) for model, row in zip(by_id, rows, strict=True)
        ]
        found, malformed = self._read_triggers(
            {id: (triggers or {}).get(names[id], b"") for id in ids}
        )
        reasons = [first or second for first, second in zip(reasons, malformed, strict=True)]
        largest = max_abs(buffer, list(rows)).tolist()
        for id, row, unreadable, size in zip(ids, rows, reasons, largest, strict=True):
            name = names[id]
            claim = to_python((samples or {}).get(name, self._settings.num_samples))
            message = Message(buffer[row], claim, self.round)
            reason = unreadable or rejection_reason(
                message, dim=self._format.dim, n=self.round, largest=size
            )
            # Otherwise a peer could enter every round, whatever its likelihood is.
            if self._selected is not None and id not in self._asked:
                reason = "it was not asked: `select` did not name it in this round"
            if reason:
                refused[name] = reason
            else:
                received[id] = (row, float(claim), self.round)
        # Without `select` the models that arrived are those that were asked for.
        if self._selected is None:
            self._selected = (tuple(ids), max(1, len(names)))

        # The algorithm returns weights only, and the caller gets the values of the criterion, too.
        observer = Observer(self._spec.algorithm)
        spec = dataclasses.replace(self._round_spec(), algorithm=observer.algorithm)
        group = single_agent.agent_group(spec, self._data, models=buffer)
        oracle = None
        if self._judge is not None:
            oracle = JudgeOracle(group, self._judge, self._format)
        with self._evaluation():
            state, decisions = algorithm2.local_aggregation_(
                group,
                self.round,
                self._state,
                lambda asked: single_agent.inbox_of_one(
                    group, self.round, asked.values.tolist(), received, found
                ),
                oracle=oracle,
            )
        if not is_finite(buffer[0]):
            raise RunError(
                "the agent's model is not finite after mixing finite models, and stays as it was: "
                "check your rule"
            )
        self._load(buffer[0])
        self._previous.copy_(buffer[0])
        self._state = state
        self._selected = None
        self._asked = set()
        self.round += 1
        # One warning is enough for all rounds.
        if not self._shortfall.messages():
            self._shortfall.add([decisions], np.ones(decisions.agents.max() + 1, dtype=bool))
            self._shortfall.log()
        return decision_of(decisions, observer, {self._peers.own: SELF, **names}, refused)

    def triggers(self) -> bytes:
        """Return the triggers that the agent tells its peers, with the guard `trigger_exchange`.

        Returns:
            At most two triggers, those that moved received models most in the last rounds; empty
            without any.
        """
        return trigger_exchange.published_bytes(self._state.rule_states[0])

    def _read_triggers(self, messages: Mapping[int, Any]) -> tuple[dict[int, Triggers], list[str]]:
        """Return the valid triggers by id, and the reason to refuse each message, or ""."""
        if not any(messages.values()):
            return {}, [""] * len(messages)
        if self._judge is not None or self._spec.algorithm.guards.trigger_exchange is False:
            raise ConfigError(
                "`triggers` are for agents with samples and the guard `trigger_exchange`"
            )
        found, reasons = {}, []
        for id, data in messages.items():
            reason = ""
            try:
                shape = self._validation.x.shape[1:]
                found[id] = trigger_exchange.from_bytes(data, shape, self._spec.num_classes)
            except DataError as error:
                reason = str(error)
            reasons.append(reason)
        return found, reasons

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the agent remembers of its peers, without its network's parameters.

        Returns:
            Tensors by name, for `load_state_dict`.
        """
        previous = self._format.views(self._previous.cpu().clone())
        method = self._settings.method_name()
        peers = self._peers
        memory = Memory(self.round, peers.names, self._state, previous, method, peers.number)
        return memory.to_tensors()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what an agent with the same network and method remembered.

        The network stays as it is: load its own state dict, too.

        Args:
            state: The result of `state_dict`.

        Raises:
            RunError: It is no such state, or that of another network or method.
        """
        memory = Memory.from_tensors(state)
        method = self._settings.method_name()
        if memory.method not in ("", method):
            raise RunError(
                f"it is the memory of an agent with the method {memory.method}, and this one has "
                f"{method}"
            )
        if memory.id not in (UNKNOWN_ID, self._peers.number):
            raise RunError(
                f"it is the memory of an agent with `id` = {memory.id}, and this one has"
                f" {self._peers.number}: their peers are not the same"
            )
        self._previous.copy_(self._read_saved(memory.previous))
        self.round = memory.round
        self._peers.names = memory.peers
        self._state = memory.state

    def _read_saved(self, model: Model) -> Float[Tensor, " d"]:
        """Return a model that was saved; RunError if it is that of another network."""
        row = torch.empty_like(self._previous)
        reason = self._format.read_(model, row)
        if reason:
            raise RunError(f"it is the memory of an agent with another network: {reason}")
        return row

    def save(self, path: Path | str) -> None:
        """Write the agent's model and what it remembers to a file, readable for its owner only.

        Frozen parameters and buffers are not written.

        Args:
            path: A file, such as "agent.safetensors"; it is replaced as a whole.
        """
        model = with_prefix("model.", self._format.views(self._own_theta()))
        state = {**self.state_dict(), **model, "frozen": self._format.frozen_checksum()}
        # safetensors takes contiguous tensors only.
        records.atomic_write(Path(path), save({k: t.contiguous() for k, t in state.items()}))

    def load(self, path: Path | str) -> None:
        """Restore an agent with the same network and method from a file that `save` wrote.

        The network gets the model that it had at that time. In a file of 0.2 there is none.

        Args:
            path: The file.

        Raises:
            RunError: The file is missing or damaged, or of another network or method.
        """
        try:
            check_regular(path, follow_links=True)
            state = load_file(path)
        except (OSError, SafetensorError) as error:
            raise RunError(f"the memory of an agent in {path} cannot be read: {error}") from error
        model = without_prefix("model.", state)
        if not model:
            warnings.warn(
                f"{path} was written by fedcb2o 0.2 and holds no model: load the network's own "
                "state dict",
                stacklevel=2,
            )
            self.load_state_dict(state)
            return
        if not state["frozen"].equal(self._format.frozen_checksum()):
            raise RunError(
                f"{path} is of an agent whose network has other frozen parameters: load these first"
            )
        self._format.require_same()
        theta = self._read_saved(model)
        self.load_state_dict(state)
        self._load(theta)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in _REBUILT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # What follows from the settings is built again, since some functions have no names.
        self.__dict__.update(state)
        self._build()

    @contextlib.contextmanager
    def _evaluation(self) -> Iterator[None]:
        """Let models be evaluated on the user's network itself, which is as before afterwards."""
        if self._judge is not None:
            yield
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(parameters.borrowed(self.network))
            if self._is_random:
                # Random layers draw the same numbers for every model, so that losses compare.
                for handle in seed_evaluation_(self.network, stream(self._spec.seed, "evaluation")):
                    stack.callback(handle.remove)
            self.network.eval()
            # A network may merge its adapters in evaluation.
            self._format.require_same()
            yield

    def _own_theta(self, out: Float[Tensor, " d"] | None = None) -> Float[Tensor, " d"]:
        """Return a copy of theta, in the memory of `out` where it is given."""
        self._format.require_same()
        shared = parameters.shared_tensors(self.network).values()
        return torch.cat([tensor.detach().reshape(-1) for tensor in shared], out=out)

    def _sound_theta(self, out: Float[Tensor, " d"] | None = None) -> Float[Tensor, " d"]:
        """Return `_own_theta`; ConfigError if it is not finite."""
        theta = self._own_theta(out)
        if not is_finite(theta):
            raise ConfigError(
                "the agent's own model holds numbers that are not finite: its training diverged. "
                "Take a smaller step size, and assign a finite model to `agent.theta`"
            )
        return theta

    def _model_buffer(self, num_rows: int) -> Float[Tensor, "rows d"]:
        """Return `num_rows` rows for models; new memory in every round takes longer."""
        stride = parameters.row_stride(self._format.dim)
        if len(self._buffer) < num_rows:
            self._buffer = self._previous.new_empty(num_rows, stride)
        return self._buffer[:num_rows, : self._format.dim]

    def _round_spec(self) -> RunSpec:
        """Return the specification of the round, with the candidates of `select`."""
        assert self._selected is not None
        candidates, budget = self._selected
        return single_agent.with_candidates(
            self._spec,
            self._peers.own,
            candidates,
            num_agents=self._peers.num_agents,
            agents=self._spec.agents.model_copy(update={"budget": budget}),
        )

    def _agent_data(self, samples: Shard, attack: Attack | None) -> AgentData:
        """Return the agent's data: samples to validate on, which stand for training samples."""
        indices = np.arange(len(samples))
        return AgentData(
            agents=np.array([self._peers.own]),
            samples=samples,
            test=samples,
            train=Ragged.from_arrays([indices]),
            validation=Ragged.from_arrays([indices]),
            cluster=np.zeros(1, np.int64),
            view=transforms.unchanged,
            num_classes=self._spec.num_classes,
            malicious=np.array([attack is not None]),
            attack=attack or Attack(),
            seed=self._spec.seed,
            value_range=value_range(samples.x),
            claims=np.array([self._settings.num_samples], dtype=float),
        )

    def _load(self, theta: Float[Tensor, " d"]) -> None:
        """Copy a model into the network, which `require_same` has found unchanged."""
        views = self._format.views(theta)
        with torch.no_grad():
            for name, tensor in parameters.shared_tensors(self.network).items():
                tensor.copy_(views[name])
        if self._spec.has_local_statistics:
            modes = [(part, part.training) for part in self.network.modules()]
            group = single_agent.agent_group(self._spec, self._data, models=theta.unsqueeze(0))
            for reference in group.references(np.zeros(1, np.int64)) or ():
                batch_norm.estimate_statistics_(self.network, features(reference))
            for part, mode in modes:
                part.training = mode


def _set_statistics_mode(
    network: nn.Module, buffers: batch_norm.StatisticsMode | None, *, has_samples: bool
) -> None:
    """Set the mode of the network's statistics; ConfigError for an unknown or impossible one."""
    modes = get_args(batch_norm.StatisticsMode)
    if buffers is None:
        buffers = "local" if has_samples else "shared"
    require("buffers", buffers, buffers in modes, " or ".join(f'"{mode}"' for mode in modes))
    if buffers == "local" and not has_samples:
        raise ConfigError(
            '`buffers` = "local" needs `validation` samples, on which statistics are estimated: '
            'take "shared" or "dropped" with a `judge`'
        )
    # In a user's loop a norm with frozen parameters may change its statistics: they are shared too.
    batch_norm.set_statistics_mode(network, None if buffers == "shared" else buffers)
