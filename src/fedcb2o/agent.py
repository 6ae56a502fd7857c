"""One agent of Algorithm 2 as an object, for your own training loop.

The network is trained elsewhere, and models come and go by any way. `Agent` does lines 1 and 3 to 7
of Algorithm 2 with the code of `fedcb2o run` and of a real peer, and remembers its contacts.

Example:
    >>> x, y = torch.eye(2), [0, 1]
    >>> network = nn.Linear(2, 2)
    >>> agent = Agent(network, validation=(x, y), method="fedcbo")
    >>> agent.select(["clinic", "lab", "ward"], budget=2)
    ['clinic', 'ward']
    >>> good = {"weight": torch.eye(2) * 9, "bias": torch.zeros(2)}
    >>> bad = {"weight": torch.full((2, 2), torch.nan), "bias": torch.zeros(2)}
    >>> decision = agent.aggregate({"clinic": good, "ward": bad})
    >>> decision.weights, decision.refused
    ({'clinic': 1.0}, {'ward': 'its model holds numbers that are not finite, or beyond 1e+06'})
"""

import copy
import dataclasses
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedcb2o import records
from fedcb2o.data import Shard, features, input_validation, match_samples, value_range
from fedcb2o.errors import ConfigError, DataError, RunError
from fedcb2o.federated import (
    Adversary,
    AgentData,
    AgentGroup,
    AgentState,
    Attack,
    BufferLayout,
    Inbox,
    Ragged,
    RunSpec,
    algorithm2,
    algorithms,
    losses,
    part_checks,
)
from fedcb2o.federated.admission import Message, rejection_reason
from fedcb2o.federated.algorithms.parameter_checks import require
from fedcb2o.federated.contacts import ContactTable
from fedcb2o.federated.decisions import Decisions
from fedcb2o.federated.inference import losses_from_samples
from fedcb2o.federated.run_spec import Algorithm, Training
from fedcb2o.federated.sections import AgentsSection, Component, as_component
from fedcb2o.federated.shortfall import Shortfall
from fedcb2o.federated.types import (
    Contacts,
    CriterionInput,
    CriterionValues,
    Losses,
    Received,
)
from fedcb2o.federated.validation import ValidationOracle
from fedcb2o.nn import network_checks, parameters
from fedcb2o.nn.network_checks import perturbed_constants
from fedcb2o.nn.random_evaluation import seed_if_random_
from fedcb2o.plugins import USER_FUNCTION, PluginChoice, attribute_errors, to_python
from fedcb2o.user_values import to_tensor

Peer = Hashable
"""Name of a peer: a text or a whole number."""
Model = Mapping[str, Tensor] | Tensor | np.ndarray
"""A `state_dict`, or theta as a flat array [d]."""
Judge = Callable[[list[dict[str, Tensor]]], Any]
"""m models -> losses [m, n] on n samples, or these and the class of each sample, [n]."""

_Observation = tuple[CriterionInput, CriterionValues]
_SELF = 0  # the agent's own id; peers are numbered from 1 in the order in which they appear


@dataclass(frozen=True)
class Decision:
    """Decision of an agent about the models of one round.

    Attributes:
        weights: Weight mu of each received model in the consensus point, by peer. They sum to 1
            with `own_weight`, or to 0 where no model is trusted: the agent then keeps its own.
            NaN for a rule without weights, such as a median.
        own_weight: Weight of the agent's own model.
        mixing_factor: Share of the consensus point in the new model, lambda1 * gamma by default.
        losses: Validation loss of each received model; empty for a rule that needs none.
        own_loss: Validation loss of the agent's own model; NaN if it is not needed.
        criterion: Value of the criterion G of each received model, low is trusted; empty for a
            method without a criterion.
        outside: Peers whose models are outside the sub-level set Q_beta.
        refused: Peers whose models were not evaluated, with the reason.
    """

    weights: dict[Any, float]
    own_weight: float
    mixing_factor: float
    losses: dict[Any, float]
    own_loss: float
    criterion: dict[Any, float]
    outside: tuple[Any, ...]
    refused: dict[Any, str]


class Agent:
    """Agent that selects peers, evaluates their models and moves its own towards consensus.

    Nothing is written to files and no global state is changed. An agent can be pickled and used in
    any thread, by one thread at a time.

    Args:
        network: The agent's network; `aggregate` changes its trained parameters in place. All
            trained parameters and shared batch-norm statistics are the model theta; frozen
            parameters are not exchanged.
        validation: Samples [n, ...] and labels [n] from 0 on, or targets of a regression, as arrays
            or tensors. They never leave the agent.
        judge: A function that evaluates models, in place of `validation`.
        method: Name of an algorithm, such as "fedcb2o" or "fedcbo", or a table with its name and
            parameters, as in the section `algorithm` of a configuration.
        seed: Seed of the choice of peers.
        loss: Name or function of the loss of a sample; by default the cross-entropy.
        gamma: Step size of the local training, for methods that mix by lambda1 * gamma.
        rounds: Number of rounds planned, for methods that depend on the progress.
        num_samples: Number of the agent's training samples, for rules that weigh by them; by
            default the number of validation samples.
        malicious_share: Share of attackers that rules assume, in [0, 1).

    Raises:
        ConfigError: The network, the method or another argument is invalid.
        DataError: The validation data are invalid.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        validation: tuple[Any, Any] | None = None,
        judge: Judge | None = None,
        method: PluginChoice = "fedcb2o",
        seed: int = 0,
        loss: PluginChoice | None = None,
        gamma: float = 0.004,
        rounds: int = 100,
        num_samples: int | None = None,
        malicious_share: float = 0.0,
    ) -> None:
        if (validation is None) == (judge is None):
            raise ConfigError("an agent needs `validation` samples or a `judge`, and not both")
        require("seed", seed, _is_whole(seed, 0), "a whole number from 0")
        require("rounds", rounds, _is_whole(rounds, 1), "a whole number from 1")
        has_samples = num_samples is None or _is_whole(num_samples, 1)
        require("num_samples", num_samples, has_samples, "a whole number from 1")
        require("gamma", gamma, gamma > 0, "above 0")
        is_share = 0 <= malicious_share < 1
        require("malicious_share", malicious_share, is_share, "from 0 and below 1")
        parameters.dimension(network)
        self.network = network
        self.round = 0
        self._judge = judge
        self._peers: list[Peer] = []  # the peer with id k is at index k - 1
        self._state = AgentState.initial(1)
        self._previous = parameters.flatten(network)
        self._selected: tuple[tuple[int, ...], int] | None = None

        component = Component.model_validate(as_component(method))
        algorithm: Algorithm = component.bind("algorithm", algorithms)()
        if algorithm.clusters is not None:
            raise ConfigError(f"the algorithm `{component.name}` has models of clusters")
        loss_function = None
        if loss is not None:
            loss_function = Component.model_validate(as_component(loss)).bind("loss", losses)
        self._validation = _validation_shard(network, validation, loss_function is not None)
        self._value_range = value_range(self._validation.x)
        self._spec = RunSpec(
            seed=seed,
            num_agents=2,
            num_classes=_num_classes(network, self._validation),
            rounds=rounds,
            agents=AgentsSection(benign=2, malicious=0, budget=1, num_clusters=1),
            model=type(network).__name__,
            module=_evaluation_copy(network),
            training=Training(gamma=gamma, loss=loss_function),
            algorithm=algorithm,
            malicious_share=malicious_share,
            max_samples=2**53,
        )
        if judge is None:
            _check_parts(self._spec, self._validation)
        self._shortfall = Shortfall(algorithm, malicious_share)
        self._num_samples = num_samples or len(self._validation)

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
        require("budget", budget, _is_whole(budget, 1), "a whole number from 1")
        ids = self._ids(candidates)
        self._selected = (tuple(sorted(ids)), int(budget))
        group = self._group([])
        ids_asked = algorithm2.sample_peers(group, self._state.contacts[0], self.round)
        return [self._peers[id - 1] for id in ids_asked.values.tolist() if id != _SELF]

    def aggregate(
        self,
        models: Mapping[Any, Model],
        samples: Mapping[Any, float] | None = None,
    ) -> Decision:
        """Evaluate models, and move the network towards their consensus point (lines 3 to 7).

        Args:
            models: Models by peer: state dicts, or flat arrays in the order of theta. Models that
                are invalid are refused, and nothing of them is used.
            samples: Number of training samples that each peer claims; by default equal numbers.

        Returns:
            The decision. The network has the new model.

        Raises:
            ConfigError: A name is invalid, or the method cannot use what arrived.
        """
        names = {id: name for name, id in zip(models, self._ids(models), strict=True)}
        refused: dict[Any, str] = {}
        rows: dict[int, Float[Tensor, " d"]] = {}
        claims: dict[int, float] = {}
        for id in sorted(names):
            claim = to_python((samples or {}).get(names[id], self._num_samples))
            theta, reason = self._theta(models[names[id]], claim)
            if reason:
                refused[names[id]] = reason
            else:
                rows[id] = theta
                claims[id] = float(claim)
        if self._selected is None:
            self._selected = (tuple(sorted(names)), max(1, len(names)))

        observed: list[_Observation] = []
        group = self._group([*rows.values()], observed)
        oracle = None if self._judge is None else _JudgeOracle(group, self._judge)
        self._state, decisions = algorithm2.local_aggregation_(
            group,
            self.round,
            self._state,
            lambda asked: self._inbox(group, claims, _SELF in asked.values),
            oracle=oracle,
        )
        self._load(group.models[0])
        self._previous = group.models[0].clone()
        self._selected = None
        self.round += 1
        if not self._shortfall.messages():
            self._shortfall.add([decisions], np.ones(decisions.agents.max() + 1, dtype=bool))
            self._shortfall.log()
        return _decision(decisions, observed, names, refused)

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the agent remembers; its network's parameters are not part of it.

        Returns:
            Tensors by name, for `load_state_dict`.
        """
        contacts = self._state.contacts[0]
        content = json.dumps({"round": self.round, "peers": self._peers}).encode()
        state = {
            "memory": torch.frombuffer(bytearray(content), dtype=torch.uint8),
            "contacts.ids": contacts.ids,
            "contacts.likelihood": contacts.likelihood,
            "previous": self._previous.cpu().clone(),
        }
        return state | {f"rule.{key}": t for key, t in self._state.rule_states[0].items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what an agent with the same network and method remembered.

        Args:
            state: The result of `state_dict`.

        Raises:
            RunError: It is no such state, or that of another network.
        """
        try:
            memory = json.loads(bytes(state["memory"].numpy()))
            round = int(memory["round"])
            peers = list(memory["peers"])
            contacts = Contacts(state["contacts.ids"], state["contacts.likelihood"])
            previous = state["previous"]
        except (KeyError, ValueError, TypeError) as error:
            raise RunError(f"it is not the memory of an agent: {error!r}") from error
        if previous.shape != self._previous.shape:
            raise RunError("it is the memory of an agent with another network")
        self.round = round
        self._peers = peers
        self._previous = previous.to(self._previous)
        prefix = "rule."
        rule = {k.removeprefix(prefix): t for k, t in state.items() if k.startswith(prefix)}
        self._state = AgentState(ContactTable.from_contacts([contacts]), (rule,))

    def save(self, path: Path | str) -> None:
        """Write what the agent remembers to a file, readable for its owner only.

        Args:
            path: A file, such as "agent.safetensors"; it is replaced as a whole.
        """
        state = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        records.atomic_write(Path(path), lambda temporary: save_file(state, temporary))

    def load(self, path: Path | str) -> None:
        """Restore what an agent with the same network and method wrote with `save`.

        Args:
            path: The file.

        Raises:
            RunError: The file is missing or damaged, or of another network.
        """
        try:
            state = load_file(path)
        except (OSError, SafetensorError) as error:
            raise RunError(f"the memory of an agent in {path} cannot be read: {error}") from error
        self.load_state_dict(state)

    def _ids(self, peers: Iterable[Peer]) -> list[int]:
        """Return the ids of peers; new ones get the next ids."""
        peers = list(peers)
        for peer in peers:
            if isinstance(peer, bool) or not isinstance(peer, str | int):
                raise ConfigError(f"a peer has a name, a text or a whole number, got {peer!r}")
        if len(set(peers)) < len(peers):
            raise ConfigError(f"each peer has a name of its own, got {peers}")
        known = {peer: id for id, peer in enumerate(self._peers, 1)}
        new = set(peers) - known.keys()
        for peer in sorted(new, key=lambda peer: (isinstance(peer, str), peer)):
            self._peers.append(peer)
            known[peer] = len(self._peers)
        return [known[peer] for peer in peers]

    def _theta(self, model: Model, claim: Any) -> tuple[Float[Tensor, " d"], str]:
        """Return a received model as theta, and the reason to refuse it or an empty text."""
        own = parameters.shared_tensors(self.network)
        nothing = torch.zeros(0)
        if isinstance(model, Mapping):
            missing = [name for name in own if name not in model]
            if missing:
                return nothing, f"it lacks `{missing[0]}`"
            parts = []
            for name, tensor in own.items():
                value = model[name]
                if not isinstance(value, Tensor) or value.shape != tensor.shape:
                    return nothing, f"`{name}` is no tensor of shape {tuple(tensor.shape)}"
                if not value.is_floating_point():
                    return nothing, f"`{name}` has type {value.dtype}"
                parts.append(value.detach().to(tensor.device, torch.float32).reshape(-1))
            theta = torch.cat(parts)
        else:
            try:
                theta = to_tensor("it holds", model)
            except ConfigError as error:
                return nothing, str(error)
            if theta.shape != self._previous.shape or not theta.is_floating_point():
                return nothing, (
                    f"it has shape {tuple(theta.shape)} and type {theta.dtype}, expected "
                    f"({len(self._previous)},) and floating point"
                )
            theta = theta.detach().to(self._previous)
        return theta, rejection_reason(
            Message(theta, claim, self.round), dim=len(self._previous), n=self.round
        )

    def _group(
        self,
        received: Sequence[Float[Tensor, " d"]],
        observed: list[_Observation] | None = None,
    ) -> AgentGroup:
        """Return a group of one with a buffer [own | before the round | received]."""
        assert self._selected is not None
        candidates, budget = self._selected
        num_agents = len(self._peers) + 1
        neighbours = [torch.zeros(0, dtype=torch.int64)] * num_agents
        neighbours[_SELF] = torch.tensor(candidates, dtype=torch.int64)
        algorithm = self._spec.algorithm
        if observed is not None and algorithm.criterion is not None:
            algorithm = dataclasses.replace(algorithm, criterion=_observer(algorithm, observed))
        spec = dataclasses.replace(
            self._spec,
            num_agents=num_agents,
            agents=self._spec.agents.model_copy(update={"budget": budget}),
            neighbours=tuple(neighbours),
            algorithm=algorithm,
        )
        nobody = np.zeros(1, bool)
        layout = BufferLayout.create(
            np.zeros(1, np.int64), 1, nobody, 0, spec.algorithm.keeps_previous
        )
        own = parameters.flatten(self.network)
        first = [own, self._previous] if spec.algorithm.keeps_previous else [own]
        models = torch.stack([*first, *received])
        size = len(self._validation)
        if self._judge is not None:
            size = 0  # the only sample stands for none
        data = AgentData(
            agents=np.array([_SELF]),
            samples=self._validation,
            test=self._validation,
            train=Ragged.from_arrays([np.resize(np.arange(max(1, size)), self._num_samples)]),
            validation=Ragged.from_arrays([np.arange(size)]),
            cluster=np.zeros(1, np.int64),
            num_clusters=1,
            num_classes=spec.num_classes,
            malicious=nobody,
            attack=Attack(),
            seed=spec.seed,
            value_range=self._value_range,
        )
        adversary = Adversary(
            attack=Attack(),
            malicious=np.zeros(num_agents, bool),
            cluster=np.zeros(num_agents, np.int64),
            num_clusters=1,
            colludes=False,
            averages_own_model=False,
        )
        return AgentGroup(spec, data, adversary, layout, models)

    def _inbox(self, group: AgentGroup, claims: Mapping[int, float], has_own: bool) -> Inbox:
        """Return the received models; the agent's own is one of them if it sampled itself."""
        rows = np.arange(group.layout.first_received, len(group.models))
        ids = [*claims]
        samples = [*claims.values()]
        if has_own:
            ids = [_SELF, *ids]
            samples = [float(self._num_samples), *samples]
            rows = np.concatenate([group.layout.own, rows])
        senders = Ragged.from_arrays([np.array(ids, np.int64)])
        return Inbox(senders, rows, np.array(samples, float), np.full(len(rows), self.round))

    def _load(self, theta: Float[Tensor, " d"]) -> None:
        """Copy a model into the network."""
        views = parameters.tensor_views(self.network, theta)
        with torch.no_grad():
            for name, tensor in parameters.shared_tensors(self.network).items():
                tensor.copy_(views[name])


class _JudgeOracle(ValidationOracle):
    """Losses from a user's function, where an agent has no validation data here."""

    def __init__(self, group: AgentGroup, judge: Judge) -> None:
        super().__init__(group, 0)
        self.judge = judge

    def losses(self, models: Received, transform: Any = None) -> Losses:
        if transform is not None:
            raise ConfigError("a criterion that changes samples needs `validation` samples")
        group = self.group
        own = group.models[0]
        states = []
        for row in models.rows.tolist():
            theta = own.lerp(group.models[row], group.spec.algorithm.interpolation)
            states.append(parameters.tensor_views(group.spec.module, theta))
        with attribute_errors("judge", "judge"):
            result = self.judge(states)
        labels: Any = None
        if isinstance(result, tuple):
            result, labels = result
        per_sample = to_tensor("the judge returned", result).double()
        if per_sample.ndim != 2 or len(per_sample) != len(states):
            raise ConfigError(
                f"the judge returned losses of shape {tuple(per_sample.shape)} for {len(states)} "
                "models, expected [m, n]: one row per model, one column per sample"
            )
        n = per_sample.shape[1]
        classes = torch.zeros(n, dtype=torch.int64)
        if labels is not None:
            given = to_tensor("the judge returned", labels)
            classes = given.long()
        is_whole = labels is None or bool(classes.eq(given).all())
        if classes.shape != (n,) or not is_whole or (n and classes.min() < 0):
            raise ConfigError(f"the judge must return the class of each of {n} samples, from 0")
        return losses_from_samples(per_sample, classes)


def _observer(
    algorithm: Algorithm, observed: list[_Observation]
) -> Callable[[CriterionInput], CriterionValues]:
    """Return the algorithm's criterion, which also stores its input and its values."""

    def observe(inputs: CriterionInput) -> CriterionValues:
        values = algorithm.criterion_values(inputs)
        assert values is not None
        observed.append((inputs, values))
        return values

    return observe


def _decision(
    decisions: Decisions,
    observed: Sequence[_Observation],
    names: Mapping[int, Any],
    refused: dict[Any, str],
) -> Decision:
    own_names = {_SELF: "itself"}
    received = [{**own_names, **names}[id] for id in decisions.received.values.tolist()]
    mean_losses: dict[Any, float] = {}
    criterion: dict[Any, float] = {}
    outside: tuple[Any, ...] = ()
    for inputs, values in observed:
        if inputs.losses is not None:
            mean_losses = dict(zip(received, inputs.losses.mean.tolist(), strict=True))
        criterion = dict(zip(received, values.values.tolist(), strict=True))
        members = values.in_sublevel_set.tolist()[: len(received)]
        pairs = zip(received, members, strict=True)
        outside = tuple(name for name, is_member in pairs if not is_member)
    return Decision(
        weights=dict(zip(received, decisions.weights.tolist(), strict=True)),
        own_weight=float(decisions.own_weight[0]),
        mixing_factor=float(decisions.factor[0]),
        losses=mean_losses,
        own_loss=float(decisions.own_loss[0]),
        criterion=criterion,
        outside=outside,
        refused=refused,
    )


def _is_whole(value: Any, least: int) -> bool:
    is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_number and bool(value >= least)


def _evaluation_copy(network: nn.Module) -> nn.Module:
    """Copy a network for evaluation; its frozen parameters stay shared."""
    frozen = {id(p): p for p in network.parameters() if not p.requires_grad}
    return copy.deepcopy(network, dict(frozen)).eval()


def _check_parts(spec: RunSpec, validation: Shard) -> None:
    """Check that the network and the loss are functions of one sample."""
    module = spec.module
    twin = _evaluation_copy(module)
    rows = part_checks.different_samples(validation)
    x = features(validation.x[rows])
    with attribute_errors("model", spec.model):
        network_checks.check_construction(spec.model, module, twin)
        is_random = seed_if_random_(spec.model, [module, twin], x, spec.seed)
        with perturbed_constants(module, twin), torch.no_grad():
            outputs = module(x)
            network_checks.check_network(spec.model, module, twin, x, random_evaluation=is_random)
    loss = spec.training.loss
    if loss is not None:
        name = USER_FUNCTION.get(loss) or getattr(loss, "func", loss).__name__
        part_checks.check_loss(name, loss, outputs, validation.y[rows])


def _validation_shard(network: nn.Module, validation: Any, has_loss: bool) -> Shard:
    """Return checked validation samples; none where a judge evaluates models."""
    device = next(network.parameters()).device
    if validation is None:
        return Shard(torch.zeros(1, 1, device=device), torch.zeros(1))
    if not isinstance(validation, tuple | list) or len(validation) != 2:
        raise DataError("`validation` must be a pair of samples and labels, (x, y)")
    targets = validation[1]
    numbers = has_loss and to_tensor("`y` holds", targets).is_floating_point()
    x, y = input_validation.check_samples_and_labels(
        "x", validation[0], "y", targets, numbers=numbers
    )
    if not numbers and y.dtype.kind not in "iub":
        raise DataError("`y` must hold the classes as whole numbers from 0, as the network does")
    match_samples(["the validation samples"], [x])
    return Shard(x.to(device), torch.from_numpy(y if numbers else y.astype(np.int64)).to(device))


def _num_classes(network: nn.Module, validation: Shard) -> int:
    """Return the number of the network's outputs for labels, or 1 without classes."""
    if validation.y.is_floating_point():
        return 1
    was_training = network.training
    try:
        with torch.no_grad(), attribute_errors("model", type(network).__name__):
            outputs = network.eval()(features(validation.x[:2]))
    finally:
        network.train(was_training)
    labels = validation.y
    if outputs.ndim != 2 or labels.min() < 0 or labels.max() >= outputs.shape[1]:
        raise DataError(
            f"`y` holds the classes {int(labels.min())} to {int(labels.max())}, and the network "
            f"has outputs of shape {tuple(outputs.shape)}"
        )
    return int(outputs.shape[1])
