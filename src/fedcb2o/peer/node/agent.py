"""Setup of one agent from a federation and an organisation's data.

The agent has its organisation's own data; its test samples are used for reports only. To try a
federation out, the agent can be one of a simulation instead: it has its share of the simulated data
and attacks if it is malicious there.
"""

import dataclasses
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedcb2o import records
from fedcb2o.data import (
    OTHER_SCALE,
    Dataset,
    SampleValues,
    Shard,
    sample_values,
    sets,
    transforms,
    validation_mask,
)
from fedcb2o.data.names import to_nfc
from fedcb2o.errors import ConfigError, DataError, RunError
from fedcb2o.experiments.config import datasets
from fedcb2o.experiments.config.loading import load
from fedcb2o.experiments.config.network import build_module, check_model_memory, initial_model
from fedcb2o.experiments.config.prepared_seed import build_run_spec, prepare_seed
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.federated import single_agent, trigger_exchange
from fedcb2o.federated.adversary import Adversary
from fedcb2o.federated.agent_group import AgentData, AgentGroup
from fedcb2o.federated.evaluation.metrics import AttackGoal
from fedcb2o.federated.privacy import check_delta
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.run_spec import RunSpec
from fedcb2o.federated.sections import Component
from fedcb2o.kernels import _autotune
from fedcb2o.nn import parameters
from fedcb2o.peer.membership._agreement import make_federation
from fedcb2o.peer.membership.federation import Federation, read_federation
from fedcb2o.peer.wire.protocol import MAX_TRIGGERS_BYTES, SIGNATURE_BYTES
from fedcb2o.safe_files import check_regular

_MODEL_COPIES = 7
"""Initial, own, published and received models of a node, and three times as much to train."""


@dataclass(frozen=True)
class AgentSetup:
    """Parts of one agent.

    `adversary` is None outside of simulations. `goal` is that of the attack, for metrics. All
    agents know `shared_initial_model`, theta_0.
    """

    spec: RunSpec
    adversary: Adversary | None
    data: AgentData
    goal: AttackGoal
    initial_model: Float[Tensor, " d"]
    shared_initial_model: Float[Tensor, " d"]
    data_digest: str

    @property
    def is_malicious(self) -> bool:
        """True for an attacker of a simulation."""
        return bool(self.data.malicious[0])

    def build_group(self) -> AgentGroup:
        """Build a group of one, with memory for a round's models."""
        return single_agent.agent_group(
            self.spec, self.data, self.adversary, num_received=self.spec.max_asked
        )

    def trigger_reader(self) -> Callable[[bytes], Any] | None:
        """Return the reader of peers' triggers; None without the guard `trigger_exchange`."""
        spec, shape = self.spec, self.data.samples.x.shape[1:]
        if spec.algorithm.guards.trigger_exchange is False:
            return None
        if spec.training.privacy is not None:
            raise ConfigError(
                "`guards.trigger_exchange` publishes what it finds with the agent's samples, for "
                "which the epsilon of `training.privacy` does not hold: leave one out"
            )
        if trigger_exchange.max_bytes(shape) + SIGNATURE_BYTES > MAX_TRIGGERS_BYTES:
            raise ConfigError(
                f"`guards.trigger_exchange` has no room for triggers of shape {tuple(shape)}: take "
                "smaller images, or leave it out"
            )
        return partial(
            trigger_exchange.from_bytes, shape=tuple(shape), num_classes=spec.num_classes
        )


def agent_from_dataset(
    federation: Federation, agent_id: int, dataset: Dataset, metrics: Sequence[Any] = ()
) -> AgentSetup:
    """Set up an agent with its organisation's own data.

    Some or all of the training samples validate models. Data that do not fit the federation are a
    DataError. `metrics` are this agent's own choice, as in an experiment.
    """
    experiment = federation.experiment
    if metrics:
        experiment = load(experiment, {"metrics": list(metrics)})
    experiment = _with_single_process(experiment)
    seed = federation.seed
    dataset = _check_dataset(federation, dataset)
    owners = dataset.names.owners
    # Owners of samples are agents by themselves, and a node is one agent.
    if len(owners) > 1:
        raise DataError(
            f"the data have {len(owners)} owners, {_format_names(owners)}: an organisation brings "
            "only its own"
        )

    is_validation = _validation_samples(experiment, dataset, agent_id, seed)
    validation = np.flatnonzero(is_validation)
    # By default validation samples are trained on, too: small organisations can spare none.
    train = np.arange(len(is_validation))
    if experiment.agents.hold_out:
        train = np.flatnonzero(~is_validation)

    # Members know nothing of each other's data: all are one cluster.
    cluster = np.zeros(federation.num_agents, np.int64)
    _check_memory(experiment, dataset)
    spec = build_run_spec(
        experiment,
        seed,
        dataset,
        num_agents=federation.num_agents,
        malicious_share=federation.share,
        max_samples=federation.most_samples,
        neighbours=experiment.resolved.neighbours(seed, torch.from_numpy(cluster)),
    )
    # Noise that follows from the federation's public seed could be removed.
    if spec.training.privacy is not None:
        training_seed = secrets.randbits(128)
        spec = dataclasses.replace(spec, training_seed=training_seed, rounds=federation.rounds)
    check_delta(spec.training, [len(train)])
    data = AgentData(
        agents=np.array([agent_id]),
        samples=dataset.pool,
        test=dataset.test,
        train=Ragged.from_arrays([train]),
        validation=Ragged.from_arrays([validation]),
        cluster=cluster[:1],
        view=transforms.unchanged,
        num_classes=dataset.num_classes,
        malicious=np.zeros(1, dtype=bool),
        seed=seed,
        value_range=dataset.value_range,
    )
    goal = AttackGoal((), ())
    return _build_setup(experiment, federation, agent_id, dataset, spec, None, data, goal)


def _validation_samples(
    experiment: Experiment, dataset: Dataset, agent_id: int, seed: int
) -> np.ndarray:
    """Return a mask of the validation samples over the pool."""
    if dataset.owners is not None and dataset.owners.validates.any():
        return np.asarray(dataset.owners.validates.numpy())
    agents = experiment.agents
    return validation_mask(
        dataset.labels(dataset.pool).numpy(),
        agent_id,
        agents.validation,
        agents.split,
        seed,
        hold_out=agents.hold_out,
        groups=dataset.groups,
    )


def simulated_agent(
    federation: Federation, agent_id: int, experiment: Experiment, data_dir: Path | None = None
) -> AgentSetup:
    """Set up an agent of a simulation.

    A simulation that differs from the federation is a ConfigError.
    """
    seed = federation.seed
    dataset = datasets.load_dataset(experiment, data_dir)
    name = experiment.name
    if experiment.agents.num_agents != federation.num_agents:
        raise ConfigError(
            f"the simulation `{name}` has {experiment.agents.num_agents} agents, and the "
            f"federation {federation.num_agents} members"
        )
    # Its models would fail the checks of all others.
    if differing := differing_keys(federation, experiment, dataset):
        raise ConfigError(
            f"the simulation `{name}` differs from the federation in {', '.join(differing)}"
        )
    if experiment.attack is not None and experiment.attack.sybils:
        raise ConfigError(
            "real peers have the names that the federation gives them: `attack.sybils` is for "
            "simulations"
        )
    experiment = _with_single_process(experiment)
    _check_memory(experiment, dataset)
    prepared = prepare_seed(experiment, seed, _check_dataset(federation, dataset))
    spec = dataclasses.replace(prepared.spec, rounds=federation.rounds)
    data = prepared.build_agent_data([agent_id], torch.device("cpu"))
    goal = experiment.resolved.goal
    adversary = prepared.adversary
    return _build_setup(experiment, federation, agent_id, dataset, spec, adversary, data, goal)


def load_member_dataset(name: str, federation: Federation, data_dir: Path | None = None) -> Dataset:
    """Load an organisation's data.

    `name` is "module:function", a built-in data set, or a file.npz in `data_dir`.
    """
    if name.endswith(".npz"):
        path = Path(data_dir or ".").expanduser() / Path(name).expanduser()
        if not path.is_file():
            where = f" in {data_dir}" if data_dir else ""
            raise DataError(f"--data: there is no file {name}{where}")
        component: dict[str, Any] = {"name": "arrays", "path": name}
        if federation.data.target is not None:
            component["numbers"] = True
    elif ":" in name or name in sets.__all__:
        component = {"name": name}
    else:
        raise ConfigError(f"--data is MODULE:FUNCTION or FILE.npz, got {name}")
    experiment = federation.experiment.model_copy(update={"data": Component(**component)})
    return datasets.load_dataset(experiment, data_dir)


def differing_keys(federation: Federation, experiment: Experiment, dataset: Dataset) -> list[str]:
    """Return the keys of a simulation and its data that differ from a federation."""
    # A federation of the simulation, with the same members, has comparable hashes.
    members = list(federation.members.values())
    simulated = make_federation(experiment, members, dataset=dataset, seed=federation.seed)
    keys = federation.differing_keys(simulated.value_hashes())
    # A former release wrote the file.
    if federation.data.values is None:
        keys = [key for key in keys if key != "data.values"]
    return [key for key in keys if key.startswith(("experiment.", "data."))]


def _placeholder_dataset(federation: Federation) -> Dataset:
    """Return two empty samples of the federation's shape."""
    target = federation.data.target
    y = torch.zeros(2, dtype=torch.int64)
    if target is not None:
        y = torch.zeros(2, *target)
    shard = Shard(torch.zeros(2, *federation.shape), y)
    return Dataset(shard, shard, federation.class_names)


def build_network(federation: Federation) -> nn.Module:
    """Build the federation's network with its initial parameters, theta_0."""
    dataset = _placeholder_dataset(federation)
    return build_module(federation.experiment, federation.seed, dataset)


def load_model(folder: Path | str, *, allowed_functions: Collection[str] = ()) -> nn.Module:
    """Load the model of a peer's run that has ended or was stopped.

    Args:
        folder: The run directory.
        allowed_functions: Functions outside fedcb2o that the federation may name.

    Returns:
        The model in evaluation mode.

    Raises:
        ConfigError: The federation file is invalid.
        RunError: The model is missing or damaged.
    """
    path = Path(folder) / "model.safetensors"
    federation_path = Path(folder) / "federation.toml"
    module = build_network(read_federation(federation_path, allowed_functions=allowed_functions))
    if not path.exists():
        raise RunError(
            f"there is no {path}: it is written after the last round, and when a node "
            "is stopped in order"
        )
    try:
        check_regular(path)
        parameters.load_state_(module, load_file(path))
    except (SafetensorError, ValueError, OSError) as error:
        raise records.damaged_error(path, str(error)) from error
    return module.eval()


def _check_memory(experiment: Experiment, dataset: Dataset) -> None:
    """Raise ConfigError if the models of a node do not fit into memory, before they take it."""
    shape = dataset.pool.x.shape[1:]
    check_model_memory(experiment, shape, dataset.num_outputs, copies=_MODEL_COPIES)


def _with_single_process(experiment: Experiment) -> Experiment:
    """Return the experiment with one model per training batch."""
    return experiment.model_copy(update={"together": 1})


def _check_dataset(federation: Federation, dataset: Dataset) -> Dataset:
    """Return the data set, or raise DataError if it does not fit."""
    if not isinstance(dataset, Dataset):
        raise DataError(
            f"the data are a {type(dataset).__name__}, expected a fedcb2o.Dataset (see "
            "fedcb2o.dataset)"
        )
    agreed_names = tuple(map(to_nfc, federation.class_names))
    names = dataset.class_names
    if len(names) != len(agreed_names):
        raise DataError(
            f"the data have {len(names)} classes, {_format_names(names)}, and the federation "
            f"{len(agreed_names)}, {_format_names(agreed_names)}"
        )
    for part in ("pool", "test"):
        _check_shard(federation, part, getattr(dataset, part))
    _check_class_names(names, agreed_names)
    return datasets.match_dataset("the data", dataset)


def _check_class_names(names: tuple[str, ...], agreed: tuple[str, ...]) -> None:
    """Raise DataError where the classes of the data are not those of the federation, in order."""
    if names == agreed:
        return
    pairs = enumerate(zip(names, agreed, strict=True))
    number, (name, agreed_name) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    raise DataError(
        f"the data have the classes {_format_names(names)}, and the federation agreed on "
        f"{_format_names(agreed)}, in this order: order `class_names` alike, and number `y` as "
        f"they are (class {number} is {name!r}, and must be {agreed_name!r})"
    )


def _check_shard(federation: Federation, part: str, shard: Shard) -> None:
    label = f"the data, in their {part},"
    shard = datasets.validate_shard(label, shard, len(federation.class_names))
    shape = tuple(shard.x.shape[1:])
    if shape != federation.shape:
        raise DataError(
            f"the data have samples of shape {shape} in their {part}, and the federation agreed on "
            f"{federation.shape}: the same columns in the same order"
        )
    _check_values(federation.data.values, part, shard)
    target = federation.data.target
    target_shape = tuple(shard.y.shape[1:])
    if target is not None and target_shape != target:
        raise DataError(
            f"the data have numbers of shape {target_shape} to predict in their {part}, and the "
            f"federation agreed on {target}"
        )


_VALUE_NAMES = {
    "bytes": "bytes (uint8), which are divided by 255",
    "unit": "numbers from 0 to 1",
    "numbers": "numbers, which are not divided by 255",
}


def _check_values(agreed: SampleValues | None, part: str, shard: Shard) -> None:
    """Raise DataError where samples are of another type or scale than the federation's."""
    # A former release wrote no scale, and a missing test part has none.
    if agreed is None or not len(shard):
        return
    values = sample_values(shard.x)
    has_other_type = "bytes" in (values, agreed) and values != agreed
    has_other_scale = agreed == "unit" and float(shard.x.max()) >= OTHER_SCALE
    if not has_other_type and not has_other_scale:
        return

    cure = "bring numbers on its scale, x.astype('float32')"
    if agreed == "unit":
        cure = "divide pixels by 255"
    if agreed == "bytes":
        cure = "bring pixels from 0 to 255, x.astype('uint8')"
    raise DataError(
        f"the data have samples of type {shard.x.dtype} from {float(shard.x.min()):g} to "
        f"{float(shard.x.max()):g} in their {part}, and the federation agreed on "
        f"{_VALUE_NAMES[agreed]}: {cure}"
    )


def _format_names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(str, names[:5])) + more


def _build_setup(
    experiment: Experiment,
    federation: Federation,
    agent_id: int,
    dataset: Dataset,
    spec: RunSpec,
    adversary: Adversary | None,
    data: AgentData,
    goal: AttackGoal,
) -> AgentSetup:
    # Members agree on a precision, and some machines compute it very slowly.
    precision = _autotune.supported_precision(spec.training.precision, torch.device("cpu"))
    training = spec.training.model_copy(update={"precision": precision})
    spec = dataclasses.replace(spec, training=training)

    shared = initial_model(experiment, federation.seed, dataset)
    initial = shared
    if experiment.agents.initialisation == "independent":
        initial = initial_model(experiment, federation.seed, dataset, agent_id)
    digest = datasets.dataset_digest(dataset)
    return AgentSetup(spec, adversary, data, goal, initial, shared, digest)
