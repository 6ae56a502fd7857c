"""From a federation and an organisation's data to a block of one agent.

The data are its own, and its test samples report alone. Or, to try a federation out, the agent is one of a simulation:
it has its share of the simulated data and, where it is malicious there, attacks.
"""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedcb2o import records
from fedcb2o.data import sets
from fedcb2o.data._dataset import Dataset, Shard
from fedcb2o.data._partition import validation_mask
from fedcb2o.errors import ConfigError, DataError, RunError
from fedcb2o.experiments.config.build import (
    build_module,
    build_neighbours,
    build_run_spec,
    prepare_seed,
)
from fedcb2o.experiments.config.datasets import (
    attack_goal,
    dataset_digest,
    load_dataset,
    validate_shard,
)
from fedcb2o.experiments.config.settings import Component, Experiment
from fedcb2o.federated.adversary import Adversary
from fedcb2o.federated.agent_data import AgentData
from fedcb2o.federated.agent_group import AgentGroup, BufferLayout
from fedcb2o.federated.metrics import AttackGoal
from fedcb2o.federated.ragged import Ragged
from fedcb2o.federated.run_spec import RunSpec
from fedcb2o.federated.types import Attack
from fedcb2o.kernels import autotune
from fedcb2o.nn import parameters
from fedcb2o.peer.membership.federation import Federation, make_federation, read_federation


@dataclass(frozen=True)
class AgentSetup:
    """What one agent is made of: its terms, who is malicious (in a simulation), what it holds, the model that it begins
    with, and the one that all know."""

    spec: RunSpec
    adversary: Adversary
    data: AgentData
    goal: AttackGoal
    initial_model: Float[Tensor, " d"]
    shared_initial_model: Float[Tensor, " d"]
    data_digest: str

    def build_group(self) -> AgentGroup:
        """The agent as a block of one, with rows for its models, and one for each that may arrive in a round."""
        attack = self.adversary.attack
        each = attack.num_published(1, len(self.adversary.benign_ids))
        layout = BufferLayout.create(
            np.zeros(1, np.int64), 1, self.data.malicious, each, self.spec.algorithm.keeps_previous
        )
        rows = layout.first_received + self.spec.max_asked
        # Not zeros: memory is taken for those rows alone that are written to, and none is read before.
        pool = torch.empty(rows, parameters.row_stride(self.spec.dim))[:, : self.spec.dim]
        return AgentGroup(self.spec, self.data, self.adversary, layout, pool)


def agent_from_dataset(federation: Federation, agent_id: int, dataset: Dataset) -> AgentSetup:
    """An agent with an organisation's own data, by a part of which, or all, it judges models; raises DataError or
    ConfigError where they do not fit the federation."""
    experiment = _with_single_process(federation.experiment)
    seed = federation.seed
    dataset = _check_dataset(federation, dataset)
    if len(owners := dataset.names.owners) > 1:
        raise DataError(
            f"the data have {len(owners)} owners, {_format_names(owners)}: an organisation brings its own alone"
        )
    agents = experiment.agents
    holds = validation_mask(
        dataset.labels(dataset.pool).numpy(),
        agent_id,
        agents.validation,
        agents.split,
        seed,
        hold_out=agents.hold_out,
    )
    if dataset.owners is not None and dataset.owners.validates.any():  # it brought samples for that
        holds = dataset.owners.validates.numpy()
    validation = np.flatnonzero(holds)
    train = np.flatnonzero(~holds) if agents.hold_out else np.arange(len(holds))
    nobody = np.zeros(federation.num_agents, dtype=bool)
    cluster = np.zeros(federation.num_agents, np.int64)
    attackers = Adversary(
        attack=Attack(),
        malicious=nobody,
        cluster=cluster,
        num_clusters=1,
        colludes=False,
        averages_own_model=False,
    )
    terms = build_run_spec(
        experiment,
        seed,
        dataset,
        num_agents=federation.num_agents,
        malicious_share=federation.share,
        max_samples=federation.most_samples,
        neighbours=build_neighbours(experiment, seed, torch.from_numpy(cluster)),
    )
    holdings = AgentData(
        agents=np.array([agent_id]),
        samples=dataset.pool,
        test=dataset.test,
        train=Ragged.from_arrays([train]),
        validation=Ragged.from_arrays([validation]),
        cluster=cluster[:1],
        num_clusters=1,
        num_classes=dataset.num_classes,
        malicious=nobody[:1],
        attack=Attack(),
        seed=seed,
    )
    return _build_setup(
        experiment, federation, agent_id, dataset, terms, attackers, holdings, AttackGoal((), ())
    )


def simulated_agent(
    federation: Federation, agent_id: int, experiment: Experiment, data_dir: Path | None = None
) -> AgentSetup:
    """Agent `me` of a simulation that does what the federation agreed on; raises ConfigError where it does not."""
    seed = federation.seed
    dataset = load_dataset(experiment, data_dir)
    if experiment.agents.num_agents != federation.num_agents:
        raise ConfigError(
            f"the simulation `{experiment.name}` has {experiment.agents.num_agents} agents, and the federation "
            f"{federation.num_agents} members"
        )
    if other := differing_keys(federation, experiment, dataset):
        raise ConfigError(
            f"the simulation `{experiment.name}` differs from the federation in {', '.join(other)}"
        )
    if experiment.attack is not None and experiment.attack.sybils:
        raise ConfigError(
            "real peers have the names that the federation gives them: `attack.sybils` is for simulations"
        )
    experiment = _with_single_process(experiment)
    prepared = prepare_seed(experiment, seed, _check_dataset(federation, dataset))
    terms = dataclasses.replace(prepared.spec, rounds=federation.rounds)
    holdings = prepared.build_agent_data([agent_id], torch.device("cpu"))
    return _build_setup(
        experiment,
        federation,
        agent_id,
        dataset,
        terms,
        prepared.adversary,
        holdings,
        attack_goal(experiment),
    )


def load_member_dataset(name: str, federation: Federation, data_dir: Path | None = None) -> Dataset:
    """The data that an organisation names: "module:function" that makes a data set, or a file.npz."""
    file = name.endswith(".npz")
    if file and not (Path(data_dir or ".").expanduser() / Path(name).expanduser()).is_file():
        raise DataError(f"--data: there is no file {name}{f' in {data_dir}' if data_dir else ''}")
    if not file and ":" not in name and name not in sets.__all__:
        raise ConfigError(f"--data is MODULE:FUNCTION or FILE.npz, got {name}")
    numbers = {"numbers": True} if federation.data.target is not None else {}
    part = {"name": "arrays", "path": name, **numbers} if file else {"name": name}
    return load_dataset(
        federation.experiment.model_copy(update={"data": Component(**part)}), data_dir
    )


def differing_keys(federation: Federation, experiment: Experiment, dataset: Dataset) -> list[str]:
    """The keys in which a simulation is another than what a federation agreed on."""
    there = make_federation(
        experiment, list(federation.members.values()), dataset=dataset, seed=federation.seed
    ).value_hashes()
    return [
        key for key in federation.differing_keys(there) if key.startswith(("experiment.", "data."))
    ]


def _placeholder_dataset(federation: Federation) -> Dataset:
    """Two blank samples of the federation's shape, and its classes: what a network has to fit."""
    target = federation.data.target
    y = torch.zeros(2, dtype=torch.int64) if target is None else torch.zeros(2, *target)
    blank = Shard(torch.zeros(2, *federation.shape), y)
    return Dataset(blank, blank, federation.class_names)


def build_network(federation: Federation) -> nn.Module:
    """The network that the federation agreed on, with the parameters that it begins with."""
    return build_module(federation.experiment, federation.seed, _placeholder_dataset(federation))


def load_model(folder: Path | str, *, allowed_functions: Collection[str] = ()) -> nn.Module:
    """The final model in the folder of a peer's run, as a module in evaluation mode; `own` are
    the functions outside fedcb2o that it may name.

    Raises ConfigError or RunError where there is none.
    """
    path = Path(folder) / "model.safetensors"
    module = build_network(
        read_federation(Path(folder) / "federation.toml", allowed_functions=allowed_functions)
    )
    if not path.exists():
        raise RunError(f"there is no {path}: it is written after the last round")
    try:
        parameters.load_state_(module, load_file(path))
    except (SafetensorError, ValueError, OSError) as error:
        raise records.damaged_error(path, str(error)) from error
    return module.eval()


def _with_single_process(experiment: Experiment) -> Experiment:
    """The same where each agent trains in a program of its own, as peers do."""
    return experiment.model_copy(update={"together": 1})


def _check_dataset(federation: Federation, dataset: Dataset) -> Dataset:
    """A data set whose samples and classes are those that the federation agreed on; raises DataError for another."""
    if not isinstance(dataset, Dataset):
        raise DataError(
            f"the data are a {type(dataset).__name__}, expected a fedcb2o.Dataset (see fedcb2o.dataset)"
        )
    if len(dataset.class_names) != len(federation.class_names):
        raise DataError(
            f"the data have {len(dataset.class_names)} classes, {_format_names(dataset.class_names)}, and the federation "
            f"{len(federation.class_names)}, {_format_names(federation.class_names)}"
        )
    for part in ("pool", "test"):
        shard = validate_shard(
            f"the data, in their {part},", getattr(dataset, part), len(federation.class_names)
        )
        if tuple(shard.x.shape[1:]) != federation.shape:
            raise DataError(
                f"the data have samples of shape {tuple(shard.x.shape[1:])} in their {part}, and the federation agreed "
                f"on {federation.shape}: the same columns in the same order"
            )
        if (
            federation.data.target is not None
            and tuple(shard.y.shape[1:]) != federation.data.target
        ):
            raise DataError(
                f"the data have numbers of shape {tuple(shard.y.shape[1:])} to be told in their {part}, and the "
                f"federation agreed on {federation.data.target}"
            )
    if dataset.class_names != federation.class_names:
        raise DataError(
            f"the data have the classes {_format_names(dataset.class_names)}, and the federation agreed on "
            f"{_format_names(federation.class_names)}, in this order: order `class_names` alike, and number `y` as they are"
        )
    return dataset


def _format_names(names: tuple[str, ...]) -> str:
    return ", ".join(map(str, names[:5])) + (
        f" and {len(names) - 5} more" if len(names) > 5 else ""
    )


def _build_setup(
    experiment: Experiment,
    federation: Federation,
    me: int,
    dataset: Dataset,
    terms: RunSpec,
    attackers: Adversary,
    holdings: AgentData,
    aim: AttackGoal,
) -> AgentSetup:
    precision = autotune.supported_precision(terms.training.precision, torch.device("cpu"))
    terms = dataclasses.replace(
        terms, training=dataclasses.replace(terms.training, precision=precision)
    )
    common = parameters.flatten(build_module(experiment, federation.seed, dataset))
    independent = experiment.agents.initialisation == "independent"
    first = (
        parameters.flatten(build_module(experiment, federation.seed, dataset, me))
        if independent
        else common
    )
    return AgentSetup(terms, attackers, holdings, aim, first, common, dataset_digest(dataset))
