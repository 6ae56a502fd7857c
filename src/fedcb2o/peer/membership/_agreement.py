"""Making of a federation from an experiment."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcb2o import plugins, records
from fedcb2o.data import Dataset, sample_values
from fedcb2o.errors import ConfigError
from fedcb2o.experiments.config.datasets import load_for_data
from fedcb2o.experiments.config.datasets import max_samples as experiment_max_samples
from fedcb2o.experiments.config.network import build_module, frozen_checksum
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.nn import parameters
from fedcb2o.peer.membership._agreed_experiment import check_supported, check_topology
from fedcb2o.peer.membership.federation import PROTOCOL_VERSION, Federation, validated_federation
from fedcb2o.peer.membership.federation_schema import (
    AGREED_AGENT_KEYS,
    KERNEL_KEYS,
    Limits,
    validate_plain,
)
from fedcb2o.peer.membership.identity import Member


def make_federation(
    experiment: Experiment | str | Path | Mapping[str, Any],
    members: Sequence[Member],
    *,
    dataset: Dataset,
    seed: int | None = None,
    share: float | None = None,
    most_samples: int | None = None,
    **options: Any,
) -> Federation:
    """Create version 1 of a federation from an experiment.

    Args:
        experiment: The experiment; its agents become these members, in order. Without
            `agents.benign` all members are benign that `agents.malicious` does not count.
        members: One member per agent.
        dataset: A data set with the agreed sample shape and classes.
        seed: Seed of the federation; by default the experiment's first.
        share: Assumed share of malicious agents; by default the experiment's.
        most_samples: Upper bound of claimed sample counts; by default the experiment's maximum.
        **options: Other keys of a `Federation`.

    Returns:
        The federation.

    Raises:
        ConfigError: Members or options do not fit the experiment.
    """
    experiment, _ = load_for_data(experiment, None, None, len(members))
    agents = experiment.agents
    if agents.num_agents != len(members):
        raise ConfigError(
            f"the experiment `{experiment.name}` has {agents.num_agents} agents, and there are "
            f"{len(members)} members: give one member for each agent, or change `agents.benign`, "
            "`agents.malicious` or `agents.num_clusters`"
        )
    if agents.participation < 1:
        raise ConfigError(
            "`agents.participation` below 1 is for simulations: a real peer is online, or it is not"
        )
    if experiment.clock is not None:
        raise ConfigError("`clock` is for simulations: real peers have real time, so leave it out")
    check_supported(experiment)
    ignored = [
        f"`{key}`" for key in ("metrics", "keep_best", "records") if getattr(experiment, key)
    ]
    if ignored:
        warnings.warn(
            f"a federation has no {' and '.join(ignored)}: each member chooses its own metrics, "
            "such as `fedcb2o peer run --measure auc`",
            stacklevel=2,
        )
    agreed = _agreed_settings(experiment)

    dim = parameters.dimension(build_module(experiment, experiment.seeds[0], dataset))
    if most_samples is None:
        most_samples = experiment_max_samples(experiment, dataset)
    entries = [{"id": id, **member.to_table()} for id, member in enumerate(members)]
    table = {
        "protocol": PROTOCOL_VERSION,
        "encoding": agents.encoding,
        "name": experiment.name,
        "rounds": experiment.rounds,
        "seed": experiment.seeds[0] if seed is None else seed,
        "share": agents.malicious_share if share is None else share,
        "most_samples": most_samples,
        "data": {
            "shape": list(dataset.pool.x.shape[1:]),
            "values": sample_values(dataset.pool.x),
            **_target_schema(dataset),
        },
        "experiment": records.canonical_settings(agreed),
        "versions": [{"members": entries}],
        "allowed_functions": list(plugins.foreign_names_in(agreed)),
    }
    federation = validated_federation({**table, **options}, "the federation")
    if "limits" not in options:
        size = dim if federation.encoding == "int8" else 4 * dim
        limits = Limits.for_model(size, federation.round_seconds)
        federation = federation.model_copy(update={"limits": limits})

    # Once more, with the defaults written out: a later release may have other ones.
    table = federation.model_dump(by_alias=True, exclude_none=True)
    federation = validated_federation(table, "the federation")
    check_topology(federation)
    return federation


def _agreed_settings(experiment: Experiment) -> dict[str, Any]:
    """Return the sections of an experiment that members agree on."""
    settings = experiment.settings()
    sections = (*KERNEL_KEYS, "model", "training", "algorithm")
    agreed = {key: settings[key] for key in sections if key in settings}
    agents = settings["agents"]
    agreed["agents"] = {key: agents[key] for key in AGREED_AGENT_KEYS if key in agents}
    if checksum := frozen_checksum(experiment):
        agreed["model"] = {**agreed["model"], "checksum": checksum}
    try:
        validate_plain(agreed)
    except ValueError as error:
        raise ConfigError(
            f"the experiment `{experiment.name}` cannot be agreed on: {error}"
        ) from error
    return agreed


def _target_schema(dataset: Dataset) -> dict[str, Any]:
    """Return the keys of [data] that describe the predicted classes or numbers."""
    if dataset.class_names:
        return {"class_names": list(dataset.class_names)}
    return {"target": list(dataset.pool.y.shape[1:])}
