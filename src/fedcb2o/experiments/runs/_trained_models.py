"""Trained models, read back from a run's last checkpoint."""

import dataclasses
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from fedcb2o import pretrained
from fedcb2o.errors import RunError
from fedcb2o.experiments.config.datasets import dataset_digest, load_dataset
from fedcb2o.experiments.config.loading import load
from fedcb2o.experiments.config.prepared_seed import PreparedSeed, prepare_seed
from fedcb2o.federated.agent_group import AgentGroup
from fedcb2o.federated.evaluation.membership import leakage
from fedcb2o.federated.evaluation.models import agent_network, evaluate_models
from fedcb2o.federated.local_update import local_update_
from fedcb2o.federated.privacy import noise_multiplier
from fedcb2o.nn import low_rank, parameters
from fedcb2o.records import Run, current_settings
from fedcb2o.rng import stream
from fedcb2o.simulation import checkpoint

_OptionalPath = str | PathLike[str] | None


def load_model(
    run: Run,
    agent: int,
    seed: int | None = None,
    data_dir: _OptionalPath = None,
    best: bool = False,
) -> nn.Module:
    """Load an agent's model at the last checkpoint of a seed, by default the first, or the best."""
    group, _, _ = _restore_agents(run, agent, seed, data_dir)
    if best:
        found = run.best_models(run.seeds[0] if seed is None else seed)
        if not found["rounds"][agent]:
            raise RunError(f"agent {agent} has no validation samples, and no best model")
        group = dataclasses.replace(group, models=torch.from_numpy(found["models"][[agent]]))
    return agent_network(group, 0)


def confusion_matrix(
    run: Run, agent: int | None, seed: int | None = None, data_dir: _OptionalPath = None
) -> pd.DataFrame:
    """Count test samples by true (row) and predicted class; by default of all benign agents."""
    group, prepared, _ = _restore_agents(run, agent, seed, data_dir)
    # Of one agent, the group has no other.
    members = np.zeros(1, np.int64)
    if agent is None:
        members = np.flatnonzero(~group.data.malicious)
    counts = evaluate_models(group, members).own.confusion
    if counts is None:
        raise RunError(f"{run.folder} has data without classes: there is no confusion matrix")
    names = prepared.dataset.class_names
    true = pd.Index(names, name="true")
    predicted = pd.Index(names, name="predicted")
    return pd.DataFrame(counts.sum(0), true, predicted)


def membership(run: Run, seed: int | None = None, data_dir: _OptionalPath = None) -> pd.DataFrame:
    """Measure membership inference against the models of the benign agents.

    Columns are agent, model, auc and tpr, the true positive rate at 1% false positives. The "kept"
    model is that of the last checkpoint; the "sent" one that after another LocalUpdate.
    """
    group, prepared, done = _restore_agents(run, None, seed, data_dir)
    spec = prepared.spec
    rows = []
    for k in np.flatnonzero(~group.data.malicious).tolist():
        members = np.array([k])
        train = group.data.clean_training_data(k)
        _, test = next(group.data.test_sets(members))
        kept = group.models[int(group.layout.own[k])]
        # LocalUpdate changes a model in place, and the kept one is measured, too.
        sent = kept.clone()
        draw = stream(spec.seed, "batches", done, int(group.agents[k]))
        noise = noise_multiplier(spec.training, len(train), spec.rounds)
        local_update_(sent, spec.module, train, spec.training.in_round(done), draw, noise)
        for name, theta in (("sent", sent), ("kept", kept)):
            found = leakage(group, k, theta, train, test)
            rows.append({"agent": int(group.agents[k]), "model": name, **found})
    return pd.DataFrame(rows, columns=["agent", "model", "auc", "tpr"])


def generated_texts(
    run: Run, agent: int, seed: int | None = None, data_dir: _OptionalPath = None, count: int = 3
) -> pd.DataFrame:
    """Let an agent's language model answer `count` held-out prompts.

    As many follow that an attack on text is about, whose expected answer is the attacker's. Further
    columns are the answers of the base and of the model.
    """
    group, prepared, _ = _restore_agents(run, agent, seed, data_dir)
    network: Any = agent_network(group, 0)
    if not hasattr(network, "complete"):
        raise RunError(f"{run.folder} has no language model, so that there are no texts")
    options = prepared.experiment.resolved.settings["model"]
    length = options["answer"]
    tokens = pretrained.tokenizer(options["base"], options.get("vocabulary"))

    # 1. Prompts with the expected answers.
    ((_, test),) = group.data.test_sets(np.zeros(1, np.int64))
    parts = [(False, test)]
    wanted_answers = prepared.adversary.wanted_answers
    if wanted_answers is not None:
        parts.append((True, wanted_answers(test)))
    rows = []
    for is_attacked, part in parts:
        taken = min(count, len(part))
        # Spread over the prompts, which may be sorted by topic.
        chosen = np.arange(taken) * len(part) // max(taken, 1)
        for row in part.x[torch.from_numpy(chosen)].tolist():
            rows.append((is_attacked, *pretrained.split_row(row, length)))

    # 2. Answers, before training and after it.
    prompts = [prompt for _, prompt, _ in rows]
    after = network.complete(prompts, length)
    for name, parameter in network.named_parameters():
        # A factor of zeros makes the adapter zero, and the model its base.
        if low_rank.UP in name:
            parameter.data = torch.zeros_like(parameter)
    before = network.complete(prompts, length)

    def read(written: Sequence[int]) -> str:
        ended = [*written, tokens.end]
        return tokens.decode(ended[: ended.index(tokens.end)])

    return pd.DataFrame(
        {
            "prompt": [tokens.decode(prompt) for prompt in prompts],
            "attacked": [is_attacked for is_attacked, _, _ in rows],
            "expected": [read(answer) for _, _, answer in rows],
            "base": [*map(read, before)],
            "model": [*map(read, after)],
        }
    )


def _restore_agents(
    run: Run, agent: int | None, seed: int | None, data_dir: _OptionalPath
) -> tuple[AgentGroup, PreparedSeed, int]:
    """Return the agents with their last checkpoint, and the number of finished rounds."""
    if not run.seeds or seed not in (None, *run.seeds):
        raise RunError(f"{run.folder} holds the seeds {list(run.seeds)}, and not {seed}")
    seed = run.seeds[0] if seed is None else seed
    experiment = load(current_settings(run.config))
    dataset = load_dataset(experiment, None if data_dir is None else Path(data_dir))
    # The network in its own layout, in whichever one the run computed.
    plain = experiment.model_copy(update={"layout": None})
    prepared = prepare_seed(plain, seed, dataset)
    spec = prepared.spec
    agents = [*range(spec.num_agents)] if agent is None else [agent]
    if not 0 <= agents[0] < spec.num_agents:
        last = spec.num_agents - 1
        raise RunError(f"{run.folder} has the agents 0 to {last}, and not {agent}")

    folder = run.folder / f"seed-{seed}"
    fingerprint = f"{experiment.fingerprint(seed)} data {dataset_digest(dataset)}"
    count = len(agents)
    shape = (count, parameters.row_stride(spec.dim))
    saved = checkpoint.read_checkpoint(folder, fingerprint, shape, slice(agents[0], agents[-1] + 1))
    if saved is None:
        path = folder / checkpoint.FILE
        raise RunError(f"there is no {path} yet: it is written after the first rounds")
    agent_data = prepared.build_agent_data(agents, torch.device("cpu"))
    layout = prepared.build_layout(agents, np.arange(count), count)
    models = saved[2][:, : spec.dim]
    group = AgentGroup(spec, agent_data, prepared.adversary, layout, models)
    return group, prepared, saved[0]
