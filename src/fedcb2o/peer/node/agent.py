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
from fedcb2o.data._partition import validates
from fedcb2o.errors import ConfigError, DataError, RunError
from fedcb2o.experiments.config.build import module_of, neighbours_of, prepare, terms_of
from fedcb2o.experiments.config.datasets import aim_of, checked, dataset_of, digest_of
from fedcb2o.experiments.config.settings import Component, Experiment
from fedcb2o.federated.adversary import Attackers
from fedcb2o.federated.agent_data import Holdings
from fedcb2o.federated.agent_group import Block, Layout
from fedcb2o.federated.metrics import Aim
from fedcb2o.federated.ragged import Lists
from fedcb2o.federated.run_spec import Terms
from fedcb2o.federated.types import Attack
from fedcb2o.kernels import autotune
from fedcb2o.nn import parameters
from fedcb2o.peer.membership.federation import Federation, make, read


@dataclass(frozen=True)
class Agent:
    """What one agent is made of: its terms, who is malicious (in a simulation), what it holds, the model that it begins
    with, and the one that all know."""

    terms: Terms
    attackers: Attackers
    holdings: Holdings
    aim: Aim
    first: Float[Tensor, " d"]
    common: Float[Tensor, " d"]
    digest: str

    def block(self) -> Block:
        """The agent as a block of one, with rows for its models, and one for each that may arrive in a round."""
        attack = self.attackers.attack
        each = attack.num_published(1, len(self.attackers.benign))
        layout = Layout.of(np.zeros(1, np.int64), 1, self.holdings.malicious, each, self.terms.algorithm.keeps_before)
        rows = layout.inbox + self.terms.asked
        # Not zeros: memory is taken for those rows alone that are written to, and none is read before.
        pool = torch.empty(rows, parameters.row_stride(self.terms.dim))[:, : self.terms.dim]
        return Block(self.terms, self.holdings, self.attackers, layout, pool)


def own(federation: Federation, me: int, dataset: Dataset) -> Agent:
    """An agent with an organisation's own data, by a part of which, or all, it judges models; raises DataError or
    ConfigError where they do not fit the federation."""
    experiment, seed = _alone(federation.experiment), federation.seed
    dataset = _fitting(federation, dataset)
    if len(owners := dataset.names.owners) > 1:
        raise DataError(f"the data have {len(owners)} owners, {_few(owners)}: an organisation brings its own alone")
    agents = experiment.agents
    holds = validates(
        dataset.labels(dataset.pool).numpy(), me, agents.validation, agents.split, seed, hold_out=agents.hold_out
    )
    if dataset.owners is not None and dataset.owners.validates.any():  # it brought samples for that
        holds = dataset.owners.validates.numpy()
    validation = np.flatnonzero(holds)
    train = np.flatnonzero(~holds) if agents.hold_out else np.arange(len(holds))
    nobody = np.zeros(federation.num_agents, dtype=bool)
    cluster = np.zeros(federation.num_agents, np.int64)
    attackers = Attackers(
        attack=Attack(), malicious=nobody, cluster=cluster, num_clusters=1, collude=False, own_model=False
    )
    terms = terms_of(
        experiment,
        seed,
        dataset,
        num_agents=federation.num_agents,
        share=federation.share,
        most_samples=federation.most_samples,
        neighbours=neighbours_of(experiment, seed, torch.from_numpy(cluster)),
    )
    holdings = Holdings(
        agents=np.array([me]),
        samples=dataset.pool,
        test=dataset.test,
        train=Lists.of([train]),
        validation=Lists.of([validation]),
        cluster=cluster[:1],
        num_clusters=1,
        num_classes=dataset.num_classes,
        malicious=nobody[:1],
        attack=Attack(),
        seed=seed,
    )
    return _made(experiment, federation, me, dataset, terms, attackers, holdings, Aim((), ()))


def simulated(federation: Federation, me: int, experiment: Experiment, data_dir: Path | None = None) -> Agent:
    """Agent `me` of a simulation that does what the federation agreed on; raises ConfigError where it does not."""
    seed = federation.seed
    dataset = dataset_of(experiment, data_dir)
    if experiment.agents.num_agents != federation.num_agents:
        raise ConfigError(
            f"the simulation `{experiment.name}` has {experiment.agents.num_agents} agents, and the federation "
            f"{federation.num_agents} members"
        )
    if other := differing(federation, experiment, dataset):
        raise ConfigError(f"the simulation `{experiment.name}` differs from the federation in {', '.join(other)}")
    if experiment.attack is not None and experiment.attack.sybils:
        raise ConfigError(
            "real peers have the names that the federation gives them: `attack.sybils` is for simulations"
        )
    experiment = _alone(experiment)
    prepared = prepare(experiment, seed, _fitting(federation, dataset))
    terms = dataclasses.replace(prepared.terms, rounds=federation.rounds)
    holdings = prepared.holdings([me], torch.device("cpu"))
    return _made(experiment, federation, me, dataset, terms, prepared.attackers, holdings, aim_of(experiment))


def data_of(named: str, federation: Federation, data_dir: Path | None = None) -> Dataset:
    """The data that an organisation names: "module:function" that makes a data set, or a file.npz."""
    file = named.endswith(".npz")
    if file and not (Path(data_dir or ".").expanduser() / Path(named).expanduser()).is_file():
        raise DataError(f"--data: there is no file {named}{f' in {data_dir}' if data_dir else ''}")
    if not file and ":" not in named and named not in sets.__all__:
        raise ConfigError(f"--data is MODULE:FUNCTION or FILE.npz, got {named}")
    numbers = {"numbers": True} if federation.data.target is not None else {}
    part = {"name": "arrays", "path": named, **numbers} if file else {"name": named}
    return dataset_of(federation.experiment.model_copy(update={"data": Component(**part)}), data_dir)


def differing(federation: Federation, experiment: Experiment, dataset: Dataset) -> list[str]:
    """The keys in which a simulation is another than what a federation agreed on."""
    there = make(experiment, list(federation.members.values()), dataset=dataset, seed=federation.seed).keys()
    return [key for key in federation.differing(there) if key.startswith(("experiment.", "data."))]


def seen_by(federation: Federation) -> Dataset:
    """Two blank samples of the federation's shape, and its classes: what a network has to fit."""
    target = federation.data.target
    y = torch.zeros(2, dtype=torch.int64) if target is None else torch.zeros(2, *target)
    blank = Shard(torch.zeros(2, *federation.shape), y)
    return Dataset(blank, blank, federation.class_names)


def network(federation: Federation) -> nn.Module:
    """The network that the federation agreed on, with the parameters that it begins with."""
    return module_of(federation.experiment, federation.seed, seen_by(federation))


def load_model(folder: Path | str, *, own: Collection[str] = ()) -> nn.Module:
    """The final model in the folder of a peer's run, as a module in evaluation mode; `own` are
    the functions outside fedcb2o that it may name.

    Raises ConfigError or RunError where there is none.
    """
    path = Path(folder) / "model.safetensors"
    module = network(read(Path(folder) / "federation.toml", own=own))
    if not path.exists():
        raise RunError(f"there is no {path}: it is written after the last round")
    try:
        parameters.fill_(module, load_file(path))
    except (SafetensorError, ValueError, OSError) as error:
        raise records.damaged(path, str(error)) from error
    return module.eval()


def _alone(experiment: Experiment) -> Experiment:
    """The same where each agent trains in a program of its own, as peers do."""
    return experiment.model_copy(update={"together": 1})


def _fitting(federation: Federation, dataset: Dataset) -> Dataset:
    """A data set whose samples and classes are those that the federation agreed on; raises DataError for another."""
    if not isinstance(dataset, Dataset):
        raise DataError(f"the data are a {type(dataset).__name__}, expected a fedcb2o.Dataset (see fedcb2o.dataset)")
    if len(dataset.class_names) != len(federation.class_names):
        raise DataError(
            f"the data have {len(dataset.class_names)} classes, {_few(dataset.class_names)}, and the federation "
            f"{len(federation.class_names)}, {_few(federation.class_names)}"
        )
    for part in ("pool", "test"):
        shard = checked(f"the data, in their {part},", getattr(dataset, part), len(federation.class_names))
        if tuple(shard.x.shape[1:]) != federation.shape:
            raise DataError(
                f"the data have samples of shape {tuple(shard.x.shape[1:])} in their {part}, and the federation agreed "
                f"on {federation.shape}: the same columns in the same order"
            )
        if federation.data.target is not None and tuple(shard.y.shape[1:]) != federation.data.target:
            raise DataError(
                f"the data have numbers of shape {tuple(shard.y.shape[1:])} to be told in their {part}, and the "
                f"federation agreed on {federation.data.target}"
            )
    if dataset.class_names != federation.class_names:
        raise DataError(
            f"the data have the classes {_few(dataset.class_names)}, and the federation agreed on "
            f"{_few(federation.class_names)}, in this order: order `class_names` alike, and number `y` as they are"
        )
    return dataset


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(map(str, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _made(
    experiment: Experiment,
    federation: Federation,
    me: int,
    dataset: Dataset,
    terms: Terms,
    attackers: Attackers,
    holdings: Holdings,
    aim: Aim,
) -> Agent:
    precision = autotune.precision_of(terms.training.precision, torch.device("cpu"))
    terms = dataclasses.replace(terms, training=dataclasses.replace(terms.training, precision=precision))
    common = parameters.flatten(module_of(experiment, federation.seed, dataset))
    independent = experiment.agents.initialisation == "independent"
    first = parameters.flatten(module_of(experiment, federation.seed, dataset, me)) if independent else common
    return Agent(terms, attackers, holdings, aim, first, common, digest_of(dataset))
