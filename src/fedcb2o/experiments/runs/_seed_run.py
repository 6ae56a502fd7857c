"""The run of one seed, from its last checkpoint or from the start (alg:FedCB2O, whole)."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fedcb2o import records
from fedcb2o.data import Dataset, features
from fedcb2o.errors import ConfigError, FedCB2OError, RunError
from fedcb2o.experiments.config.datasets import dataset_digest
from fedcb2o.experiments.config.prepared_seed import PreparedSeed, prepare_seed
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.runs._best_models import BestModels
from fedcb2o.experiments.runs._kernel_config import ENVIRONMENT, choose_kernels
from fedcb2o.experiments.runs._local_backend import LocalBackend
from fedcb2o.experiments.runs._progress import Progress, RoundCallback
from fedcb2o.experiments.runs._provenance import (
    describe_changed_versions,
    write_environment,
    write_provenance,
)
from fedcb2o.experiments.runs._recovery import verify_seed, write_summary
from fedcb2o.experiments.runs._round_records import choose_columns, metrics_record, pairs_record
from fedcb2o.experiments.runs._sources import changed_sources
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.privacy import spent_epsilon
from fedcb2o.kernels import _autotune, devices
from fedcb2o.nn import parameters
from fedcb2o.parallel import _resources
from fedcb2o.records import REPRODUCIBLE_LOGS, Manifest, RoundLog, damaged_error
from fedcb2o.simulation import checkpoint, dfca, ifca, server
from fedcb2o.simulation.adversarial_engine import AdversarialEngine, Stage
from fedcb2o.simulation.clock import Clock
from fedcb2o.simulation.local_engine import LocalEngine
from fedcb2o.simulation.rounds import OnPhase, Round, WorkerLostError, run_rounds
from fedcb2o.simulation.traces import make_traces

_LOG = logging.getLogger(__name__)

MAX_RETRIES = 5  # from one checkpoint, after a part of a cluster was lost
RETRY_PAUSE = 5.0  # seconds before a retry, in which the cluster notices the loss


class Place(Protocol):
    """The place of a seed's models: a plan of memory, or nodes of a cluster."""

    @property
    def folder(self) -> Path | None:
        """Folder of the models' file, or None for models in memory."""

    @property
    def processes(self) -> int:
        """Number of processes."""


class SeedEngine(Stage, Protocol):
    """An engine of all agents of a seed, whose state a checkpoint holds."""

    def persistent_models(self) -> Iterator[Float[Tensor, "k stride"]]:
        """Yield the models that outlive a round, in the order of their rows."""

    def persistent_state(self, state: AgentState) -> AgentState:
        """Return the state of all agents with the states of their rules."""

    def load_models_(self, models: Float[Tensor, "k stride"]) -> None:
        """Replace the models that outlive a round."""


P = TypeVar("P", bound=Place)
E = TypeVar("E", bound=SeedEngine)


class Backend(Protocol[P, E]):
    """One machine or a cluster; `LocalBackend` and `ClusterBackend` document the methods."""

    def connect(self, prepared: Sequence[PreparedSeed], /) -> AbstractContextManager[None]: ...
    def place(self, prepared: PreparedSeed, folder: Path, /) -> P: ...
    def open_engine(self, prepared: PreparedSeed, place: P, /) -> AbstractContextManager[E]: ...
    def init_models(self, engine: E, prepared: PreparedSeed, /) -> None: ...
    def status(self, place: P, measured: Mapping[str, Any], /) -> str: ...
    def traffic(self, engine: E, /) -> dict[str, Any]: ...


def run_seeds_locally(
    experiment: Experiment, dataset: Dataset, folder: Path, memory: int | None, watch: RoundCallback
) -> None:
    """Run seeds in this process alone, in a locked folder; by default with the free memory."""
    seeds = [validate_seed(experiment, seed, dataset) for seed in experiment.seeds]
    backend = LocalBackend(1, memory)
    for prepared in seeds:
        run_seed(prepared, folder / f"seed-{prepared.seed}", backend, watch)


def validate_seed(experiment: Experiment, seed: int, dataset: Dataset) -> PreparedSeed:
    """Prepare a seed and check the functions of users that its rounds call."""
    if experiment.records == "parquet":
        records.require_pyarrow()
    prepared = prepare_seed(experiment, seed, dataset)
    module = prepared.spec.module
    if (experiment.together or 1) > 1:
        obstacle = devices.batching_obstacle(module, features(dataset.pool.x[:2]))
        if obstacle:
            raise ConfigError(
                f"the model `{prepared.spec.model}` cannot be computed for "
                f"several agents at once: leave out `together` ({obstacle})"
            )
    return prepared


def run_seed_with_retries(
    prepared: PreparedSeed, folder: Path, backend: Backend[P, E], watch: RoundCallback
) -> None:
    """Run a seed on a cluster; retry `MAX_RETRIES` times where a part of it is lost."""
    losses = 0
    known = -1
    while True:
        try:
            return run_seed(prepared, folder, backend, watch)
        except WorkerLostError as error:
            done = checkpoint.rounds_done(folder)
            # A new checkpoint is progress: losses count from it, so that a long run survives many.
            losses = losses + 1 if done == known else 1
            known = done
            if losses > MAX_RETRIES:
                raise WorkerLostError(
                    f"{error}. It was retried {MAX_RETRIES} times, and stops: --resume continues it"
                ) from error
            _LOG.warning("%s. It continues from the last checkpoint.", error)
            time.sleep(RETRY_PAUSE)


def run_seed(
    prepared: PreparedSeed, folder: Path, backend: Backend[P, E], watch: RoundCallback
) -> None:
    """Run a seed from its last checkpoint, or from the start, to the last round."""
    experiment = prepared.experiment
    manifest = verify_seed(folder, experiment.rounds)
    if manifest is not None and manifest.rounds:
        changed = changed_sources(folder, experiment.settings())
        if changed:
            _LOG.warning(
                "%s began with another source of %s, and keeps its rounds: overwrite the run to "
                "begin anew",
                folder,
                changed,
            )
    # A finished seed is not opened, so that repeating a command costs little.
    if manifest is not None and manifest.has_finished(experiment.rounds):
        return
    fingerprint = f"{experiment.fingerprint(prepared.seed)} data {dataset_digest(prepared.dataset)}"
    make_clock, digest = _clock_maker(prepared)
    fingerprint += digest
    # A run that does not fit must leave no folder behind.
    place = backend.place(prepared, folder)
    records.make_folder(folder)
    columns = choose_columns(prepared, folder)
    log = RoundLog(folder, columns=columns)
    device = devices.resolve_device(experiment.device)
    kernels = choose_kernels(folder, prepared)
    if not (folder / ENVIRONMENT).exists():  # kept for the next start, if this one is killed
        write_environment(folder, prepared, place.processes, kernels, device)
    _log_choices(watch, prepared, place, kernels, device)
    prepared = prepared.with_kernels(**kernels)

    with contextlib.ExitStack() as stack:
        stack.enter_context(devices.deterministic(device))
        stack.enter_context(_translate_memory_errors(device))
        engine = stack.enter_context(backend.open_engine(prepared, place))

        # Start, or load the last checkpoint.
        shape = (prepared.num_persistent_rows, parameters.row_stride(prepared.spec.dim))
        saved = checkpoint.read_checkpoint(folder, fingerprint, shape)
        if saved is None:
            # Starting again would silently replace rounds that were finished.
            if manifest is not None and manifest.rounds:
                raise damaged_error(folder / checkpoint.FILE, "it is gone")
            backend.init_models(engine, prepared)
            # Files are written anew. Old checksums would call them damaged after a kill.
            Manifest.remove(folder)
            write_provenance(folder, prepared, place.processes, kernels, device)
            start = 0
            state = AgentState.initial(prepared.spec.num_agents)
        else:
            changed = describe_changed_versions(folder, device)
            if changed:
                _LOG.warning(
                    "%s began with %s: its next rounds may differ in bits.", folder, changed
                )
            start, state, models = saved
            engine.load_models_(models)
            # The copy of all models would otherwise live during the rounds.
            del models
        best = None
        if experiment.keep_best:
            count, dim = prepared.spec.num_agents, prepared.spec.dim
            best = BestModels(folder, count, dim, resume=saved is not None)
        del saved
        _resume_logs(folder, log, start, manifest)
        manifest = Manifest.create(folder, prepared.seed, experiment.settings(), start)

        # Run the rounds.
        measured: Mapping[str, Any] = {}
        goal = experiment.resolved.goal

        def on_phase(n: int, phase: str) -> None:
            if isinstance(watch, Progress):
                status = f"{phase}{backend.status(place, measured)}"
                watch.phase(experiment, prepared.seed, n + 1, status)

        every = experiment.evaluate_every
        clock = make_clock(state)
        results = run_algorithm(engine, state, start, experiment.rounds, every, on_phase, clock)
        del state  # the loop replaces it
        for result in results:
            done = result.n + 1
            record = metrics_record(goal, prepared.adversary.malicious, result)
            if prepared.spec.training.privacy is not None:
                # By the rounds done, so that a resumed round repeats its bits.
                record["epsilon"] = [
                    spent_epsilon(prepared.spec.training, len(samples), experiment.rounds, done)
                    for samples in prepared.population.train
                ]
            if clock is not None:
                record |= clock.record
            log.append("metrics", record)
            log.append("pairs", pairs_record(result, is_parquet=bool(columns)))
            seconds = dict(result.seconds)
            if best is not None:
                best.update(result, engine.persistent_models())
            if done % experiment.checkpoint_every == 0 or done == experiment.rounds:
                began = time.perf_counter()
                # Lines of a checkpoint's rounds are on disk before it, or a resume could miss them.
                log.sync()
                if best is not None:
                    best.save()
                checkpoint.save(
                    folder,
                    done,
                    engine.persistent_models(),
                    replace(
                        engine.persistent_state(result.state),
                        clock=None if clock is None else clock.state,
                    ),
                    fingerprint,
                    log.checksums(REPRODUCIBLE_LOGS),
                )
                manifest = manifest.record_checkpoint(folder, done)
                seconds["checkpoint"] = time.perf_counter() - began
            measured = backend.traffic(engine)
            log.append("timing", {"round": done, **seconds, **measured})
            watch(experiment, prepared.seed, record)
    write_summary(folder)
    # The manifest is last: a seed counts as finished only with all of its files.
    manifest.finish(folder, experiment.rounds, log.checksums())


def _resume_logs(folder: Path, log: RoundLog, start: int, manifest: Manifest | None) -> None:
    """Cut the logs to the checkpoint. Raise DamagedError where they do not fit it."""
    # An older checkpoint than the recorded one was put back by hand.
    path = folder / checkpoint.FILE
    if manifest is not None and start < manifest.rounds:
        raise damaged_error(
            path, f"it is of round {start}, and there was one of round {manifest.rounds}"
        )
    log.truncate(start)
    for name, expected in records.log_checksums(folder).items():
        if log.checksums()[name] != expected:
            raise damaged_error(
                folder / name, f"it differs from what it held when {path.name} was written"
            )


def _clock_maker(prepared: PreparedSeed) -> tuple[Callable[[AgentState], Clock | None], str]:
    """Return the clock as a function of the state at the start, and the digest of its traces.

    The traces are read at once. Those that the settings determine have an empty digest.
    """
    section, training = prepared.experiment.clock, prepared.spec.training
    if section is None:
        return (lambda state: None), ""
    traces = make_traces(section, prepared.seed, prepared.spec.num_agents)
    if training.local_steps is None:
        samples = np.array([float(len(own)) for own in prepared.population.train])
        samples *= training.local_epochs
    else:
        samples = np.full(prepared.spec.num_agents, training.local_steps * training.batch_size)
    digest = "" if section.traces is None else f"-{traces.crc32():08x}"
    size = 4 * prepared.spec.dim
    return (lambda state: Clock(section, traces, samples, size, state.clock)), digest


def run_algorithm(
    engine: SeedEngine,
    state: AgentState,
    start: int,
    stop: int,
    evaluate_every: int,
    on_phase: OnPhase,
    clock: Clock | None = None,
) -> Iterator[Round]:
    """Run rounds until `stop`, of Algorithm 1 or with models of clusters; models change."""
    clusters = engine.spec.algorithm.clusters
    if clusters is None:
        played = AdversarialEngine(engine, clock)
        return run_rounds(played, state, start, stop, evaluate_every, on_phase, clock=clock)
    assert isinstance(engine, LocalEngine)  # a cluster of machines refuses IFCA and DFCA
    if clusters.server is not None:
        return server.run_rounds(engine, state, start, stop, evaluate_every, on_phase)
    run_cluster_rounds = dfca.run_rounds if clusters.per_agent else ifca.run_rounds
    return run_cluster_rounds(engine, state, start, stop, evaluate_every, on_phase)


def _log_choices(
    watch: RoundCallback,
    prepared: PreparedSeed,
    place: Place,
    kernels: Mapping[str, Any],
    device: torch.device,
) -> None:
    """Log the place of the models and the kernels of a seed."""
    start = f"{prepared.experiment.name} seed {prepared.seed}"
    if isinstance(watch, Progress):
        if place.folder is None:  # else a warning says it
            watch.log(f"{start}: {place}")
        watch.log(f"{start}: processes {place.processes}{_describe_kernels(kernels, device)}")
    requested = prepared.experiment.training.precision
    used = kernels["precision"]
    supported = _autotune.supported_precision(requested, device)
    if used != supported:
        slower = f", though {used} is far slower here" if used == requested else ""
        _LOG.warning("%s began in %s, and keeps it%s.", start, used, slower)
    elif supported != requested:
        _LOG.warning("%s trains in %s: %s is far slower here.", start, supported, requested)
    if place.folder is not None:
        _LOG.warning("%s: %s.", start, place)


def _describe_kernels(kernels: Mapping[str, Any], device: torch.device) -> str:
    """Describe the device and the kernels of a seed."""
    text = "" if device.type == "cpu" else f" on {device}"
    if kernels["together"] is not None:
        text += f", {kernels['together']} agents at once"
    if kernels["together"] is not None or kernels["convolution"] != "grouped":
        text += f", convolutions {kernels['convolution']}"
    return f"{text}, large dense layers by {kernels['linear']}, images {kernels['layout']}"


@contextlib.contextmanager
def _translate_memory_errors(device: torch.device) -> Iterator[None]:
    """Raise RunError where the memory of the machine or of a device is full."""
    try:
        yield
    except (MemoryError, RuntimeError, FedCB2OError) as error:
        cause = error.__cause__ if isinstance(error, FedCB2OError) else error
        if isinstance(cause, torch.OutOfMemoryError):
            raise RunError(
                f"{device} is out of memory: let fewer agents train at once, by `together`"
            ) from error
        # A RunError names its own cure.
        if _resources.is_out_of_memory(cause) and not isinstance(error, RunError):
            raise RunError(
                f"memory is full ({error}): {_resources.MEMORY_CURES}; then continue with --resume"
            ) from error
        raise
