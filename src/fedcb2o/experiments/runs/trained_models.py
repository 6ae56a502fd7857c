"""From what a run has written back to what its agents learned: a network, and what it takes samples for."""

from os import PathLike
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

from fedcb2o.errors import RunError
from fedcb2o.experiments.config.build import PreparedSeed, prepare_seed
from fedcb2o.experiments.config.datasets import dataset_digest, load_dataset
from fedcb2o.experiments.config.settings import load
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.validation import agent_network, evaluate_models
from fedcb2o.nn import parameters
from fedcb2o.records import Run
from fedcb2o.simulation import checkpoint

_OptionalPath = str | PathLike[str] | None


def load_model(run: Run, agent: int, seed: int | None, data_dir: _OptionalPath) -> nn.Module:
    """The model of an agent at the last checkpoint of a seed, in evaluation mode."""
    block, _ = _restore_agent(run, agent, seed, data_dir)
    return agent_network(block, 0)


def confusion_matrix(
    run: Run, agent: int, seed: int | None, data_dir: _OptionalPath
) -> pd.DataFrame:
    """How often that model takes a test sample of a class (row) for another (column)."""
    block, prepared = _restore_agent(run, agent, seed, data_dir)
    (found,) = evaluate_models(block, np.zeros(1, np.int64))
    if (counts := found.own.confusion) is None:
        raise RunError(
            f"{run.folder} has data without classes, so that there is nothing to confuse"
        )
    names = prepared.dataset.class_names
    return pd.DataFrame(
        counts.numpy(), pd.Index(names, name="true"), pd.Index(names, name="predicted")
    )


def _restore_agent(
    run: Run, agent: int, seed: int | None, data_dir: _OptionalPath
) -> tuple[AgentGroup, PreparedSeed]:
    """The block of one agent, its model as the last checkpoint has it."""
    if not run.seeds or seed not in (None, *run.seeds):
        raise RunError(f"{run.folder} holds the seeds {list(run.seeds)}, and not {seed}")
    seed = run.seeds[0] if seed is None else seed
    experiment = load(run.config)
    dataset = load_dataset(experiment, None if data_dir is None else Path(data_dir))
    # As its function makes it, whatever images are laid out for.
    prepared = prepare_seed(experiment.model_copy(update={"layout": None}), seed, dataset)
    terms = prepared.spec
    folder = run.folder / f"seed-{seed}"
    if not 0 <= agent < terms.num_agents:
        raise RunError(f"{run.folder} has the agents 0 to {terms.num_agents - 1}, and not {agent}")
    fingerprint = f"{experiment.fingerprint(seed)} data {dataset_digest(dataset)}"
    stride = parameters.row_stride(terms.dim)
    found = checkpoint.read_checkpoint(folder, fingerprint, (1, stride), slice(agent, agent + 1))
    if found is None:
        raise RunError(
            f"there is no {folder / checkpoint.FILE} yet: it is written after the first rounds"
        )
    place = np.zeros(1, np.int64)
    holdings = prepared.build_agent_data([agent], torch.device("cpu"))
    return AgentGroup(
        terms,
        holdings,
        prepared.adversary,
        prepared.build_layout([agent], place, 1),
        found[2][:, : terms.dim],
    ), prepared
