"""The run of one seed: from its last checkpoint, or from the start, to the last round (alg:FedCB2O, whole)."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fedcb2o import plugins, records
from fedcb2o.data._dataset import Dataset, features
from fedcb2o.errors import ConfigError, FedCB2OError, RunError
from fedcb2o.experiments.config.build import PreparedSeed, prepare_seed
from fedcb2o.experiments.config.datasets import attack_goal, dataset_digest
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.runs.cluster_backend import ClusterBackend
from fedcb2o.experiments.runs.kernel_config import ENVIRONMENT, choose_kernels
from fedcb2o.experiments.runs.local_backend import LocalBackend
from fedcb2o.experiments.runs.memory_plan import MemoryPlan
from fedcb2o.experiments.runs.progress import Progress, RoundCallback
from fedcb2o.experiments.runs.provenance import (
    describe_changed_versions,
    write_environment,
    write_provenance,
)
from fedcb2o.experiments.runs.recovery import verify_and_repair, write_summary
from fedcb2o.experiments.runs.round_records import check_user_metrics, metrics_record, pairs_record
from fedcb2o.experiments.runs.run_directory import log_rewrite, make_folder
from fedcb2o.federated.contacts import AgentState
from fedcb2o.federated.optimisers import make_step
from fedcb2o.kernels import autotune, devices
from fedcb2o.nn import parameters
from fedcb2o.parallel import resources
from fedcb2o.records import REPRODUCIBLE_LOGS, Manifest, RoundLog, damaged_error
from fedcb2o.simulation import checkpoint, dfca, ifca
from fedcb2o.simulation.rounds import Round, WorkerLostError, run_rounds

MAX_RETRIES = (
    5  # times that a run goes on by itself from one checkpoint after a part of its cluster was lost
)

RETRY_PAUSE = 5.0  # seconds before it does, until the cluster knows what it has lost


def run_seeds_locally(
    experiment: Experiment, dataset: Dataset, folder: Path, memory: int | None, watch: RoundCallback
) -> None:
    """Run the seeds of an experiment by this process alone, in a folder that is theirs."""
    for prepared in [validate_seed(experiment, seed, dataset) for seed in experiment.seeds]:
        _run_seed(prepared, folder / f"seed-{prepared.seed}", LocalBackend(1, memory), watch)


def validate_seed(experiment: Experiment, seed: int, dataset: Dataset) -> PreparedSeed:
    """One seed of an experiment; raises ConfigError for what is wrong with the settings."""
    prepared = prepare_seed(experiment, seed, dataset)
    module = prepared.spec.module
    x = features(dataset.pool.x[:2])
    if (experiment.together or 1) > 1 and (why := devices.batching_obstacle(module, x)):
        raise ConfigError(
            f"the model `{plugins.label(experiment.model.name)}` cannot be computed several times at once: leave out "
            f"`together` ({why})"
        )
    training = prepared.spec.training
    if training.optimiser is not None:
        trained = [p for p in module.parameters() if p.requires_grad]
        make_step(training.optimiser, trained, training.lambda2 * training.gamma)
    check_user_metrics(experiment.user_metrics(), len(dataset.class_names))
    return prepared


def run_seed_with_retries(
    prepared: PreparedSeed,
    folder: Path,
    backend: LocalBackend | ClusterBackend,
    watch: RoundCallback,
) -> None:
    """Run one seed to its end, in spite of some losses of parts of a cluster."""
    losses = 0
    known = -1
    while True:
        try:
            return _run_seed(prepared, folder, backend, watch)
        except WorkerLostError as error:
            reached = checkpoint.rounds_done(folder)
            losses = losses + 1 if reached == known else 1
            known = reached
            if losses > MAX_RETRIES:
                raise WorkerLostError(
                    f"{error}. It has gone on {MAX_RETRIES} times, and gives up: --resume goes on"
                ) from error
            print(f"Note: {error}. It goes on from the last checkpoint.", file=sys.stderr)
            time.sleep(RETRY_PAUSE)


def _run_seed(
    prepared: PreparedSeed,
    folder: Path,
    backend: LocalBackend | ClusterBackend,
    watch: RoundCallback,
) -> None:
    """Run one seed from its last checkpoint, or from the start, to the last round."""
    experiment = prepared.experiment
    seed = prepared.seed
    dataset = prepared.dataset
    dim = prepared.spec.dim
    sums = verify_and_repair(prepared, folder)
    if sums is not None and sums.has_finished(experiment.rounds):
        return
    fingerprint = f"{experiment.fingerprint(seed)} data {dataset_digest(dataset)}"
    place: Any = backend.place(prepared, folder)
    make_folder(folder)
    log = RoundLog(folder)
    device = devices.resolve_device(experiment.device)
    chosen = choose_kernels(folder, prepared)
    if not (
        folder / ENVIRONMENT
    ).exists():  # a start that is killed from here on has chosen for the next one
        write_environment(folder, seed, place.processes, chosen, device)
    _log_choices(watch, prepared, place, chosen, device)
    prepared = prepared.with_kernels(**chosen)
    with contextlib.ExitStack() as stack:
        stack.enter_context(devices.deterministic(device))
        stack.enter_context(_translate_memory_errors(device))
        engine: Any = stack.enter_context(backend.open_engine(prepared, place))
        saved = checkpoint.read_checkpoint(
            folder, fingerprint, (prepared.num_persistent_rows, parameters.row_stride(dim))
        )
        if saved is not None and (changed := describe_changed_versions(folder, device)):
            print(
                f"Note: {folder} began with {changed}: its next rounds may differ in bits.",
                file=sys.stderr,
            )
        if saved is None:
            if sums is not None and sums.rounds:
                raise damaged_error(folder / checkpoint.FILE, "it is gone")
            backend.init_models(engine, prepared)
            Manifest.remove(folder)
            write_provenance(folder, prepared, place.processes, chosen, device)
            start = 0
            memory = AgentState.initial(prepared.spec.num_agents)
        else:
            start, memory, there = saved
            engine.load_models_(there)
            del there
        if sums is not None and start < sums.rounds:
            raise damaged_error(
                folder / checkpoint.FILE,
                f"it is of round {start}, and there was one of {sums.rounds}",
            )
        log.truncate(start)
        for name, known in records.log_checksums(folder).items():
            if log.checksums()[name] != known:
                raise damaged_error(
                    folder / name,
                    f"it does not hold what it did when {checkpoint.FILE} was written",
                )
        if start and sums is None:
            log_rewrite(folder / "sums.json")
        sums = Manifest.create(folder, seed, experiment.settings(), start)

        def evaluated(n: int) -> bool:
            return (n + 1) % experiment.evaluate_every == 0 or n + 1 == experiment.rounds

        def tell(n: int, phase: str) -> None:
            if isinstance(watch, Progress):
                watch.phase(experiment, seed, n + 1, f"{phase}{backend.status(place, measured)}")

        measured: Mapping[str, Any] = {}
        own = experiment.user_metrics()
        made = round_loop(engine)(engine, memory, start, experiment.rounds, evaluated, tell)
        del saved, memory
        for done in made:
            line = metrics_record(attack_goal(experiment), engine.adversary.malicious, done, own)
            log.append("metrics", line)
            log.append("pairs", pairs_record(done))
            seconds = dict(done.seconds)
            if (done.n + 1) % experiment.checkpoint_every == 0 or done.n + 1 == experiment.rounds:
                began = time.perf_counter()
                log.sync()
                checkpoint.save(
                    folder,
                    done.n + 1,
                    engine.persistent_models(),
                    done.memory,
                    fingerprint,
                    log.checksums(REPRODUCIBLE_LOGS),
                )
                sums = sums.record_checkpoint(folder, done.n + 1)
                seconds["checkpoint"] = time.perf_counter() - began
            measured = backend.traffic(engine)
            log.append("timing", {"round": done.n + 1, **seconds, **measured})
            watch(experiment, seed, line)
    write_summary(folder)
    sums.finish(folder, experiment.rounds, log.checksums())


def round_loop(engine: Any) -> Callable[..., Iterator[Round]]:
    """The loop over rounds: Algorithm 1's, or that of an algorithm with models of clusters."""
    clusters = engine.spec.algorithm.clusters
    if clusters is None:
        return run_rounds
    return dfca.run_rounds if clusters.per_agent else ifca.run_rounds


def _log_choices(
    watch: RoundCallback,
    prepared: PreparedSeed,
    plan: MemoryPlan,
    kernels: Mapping[str, Any],
    device: torch.device,
) -> None:
    """Tell where the models of a seed lie, and by what its rounds are computed."""
    start = f"{prepared.experiment.name} seed {prepared.seed}"
    if isinstance(watch, Progress):
        where = "" if device.type == "cpu" else f" on {device}"
        if kernels["together"] is not None:
            where += f", {kernels['together']} agents at once"
        if kernels["together"] is not None or kernels["convolution"] != "grouped":
            where += f", convolutions {kernels['convolution']}"
        if plan.folder is None:  # else a note says it
            watch.log(f"{start}: {plan}")
        done_by = f"large dense layers by {kernels['linear']}, images {kernels['layout']}"
        watch.log(f"{start}: processes {plan.processes}{where}, {done_by}")
    asked = prepared.experiment.training.precision
    used = kernels["precision"]
    if used != (here := autotune.supported_precision(asked, device)):
        slower = f", though {used} is far slower here" if used == asked else ""
        print(f"Note: {start} began in {used}, and keeps to it{slower}.", file=sys.stderr)
    elif here != asked:
        print(f"Note: {start} trains in {here}: {asked} is far slower here.", file=sys.stderr)
    if plan.folder is not None:
        print(f"Note: {start}: {plan}.", file=sys.stderr)


@contextlib.contextmanager
def _translate_memory_errors(device: torch.device) -> Iterator[None]:
    """Raises RunError where memory is full, the machine's or a device's."""
    try:
        yield
    except (MemoryError, RuntimeError, FedCB2OError) as error:
        cause = error.__cause__ if isinstance(error, FedCB2OError) else error
        if isinstance(cause, torch.OutOfMemoryError):
            raise RunError(
                f"{device} is out of memory: let fewer agents train at once, by `together`"
            ) from error
        if resources.is_out_of_memory(cause) and not isinstance(
            error, RunError
        ):  # which says what to do
            raise RunError(
                f"memory is full ({error}): {resources.MEMORY_CURES}; then go on with --resume"
            ) from error
        raise
