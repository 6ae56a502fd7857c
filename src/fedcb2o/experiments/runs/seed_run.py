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
from fedcb2o.experiments.config.build import Prepared, prepare
from fedcb2o.experiments.config.datasets import aim_of, digest_of
from fedcb2o.experiments.config.settings import Experiment
from fedcb2o.experiments.runs.cluster_backend import Spread
from fedcb2o.experiments.runs.kernel_config import ENVIRONMENT, primitives_of
from fedcb2o.experiments.runs.local_backend import OneMachine
from fedcb2o.experiments.runs.memory_plan import Plan
from fedcb2o.experiments.runs.progress import Progress, Watch
from fedcb2o.experiments.runs.provenance import changed_versions, describe, keep
from fedcb2o.experiments.runs.recovery import mended, sum_up
from fedcb2o.experiments.runs.round_records import check_metrics, metrics_line, pairs_line
from fedcb2o.experiments.runs.run_directory import make, told_anew
from fedcb2o.federated.contacts import Memory
from fedcb2o.federated.optimisers import stepping
from fedcb2o.kernels import autotune, devices
from fedcb2o.nn import parameters
from fedcb2o.parallel import resources
from fedcb2o.records import SEEDED, Records, Sums, damaged
from fedcb2o.simulation import checkpoint, dfca, ifca
from fedcb2o.simulation.rounds import LostError, Round, rounds

LOSSES = 5  # times that a run goes on by itself from one checkpoint after a part of its cluster was lost

PAUSE = 5.0  # seconds before it does, until the cluster knows what it has lost


def run_here(experiment: Experiment, dataset: Dataset, folder: Path, memory: int | None, watch: Watch) -> None:
    """Run the seeds of an experiment by this process alone, in a folder that is theirs."""
    for prepared in [_ready(experiment, seed, dataset) for seed in experiment.seeds]:
        run_seed(prepared, folder / f"seed-{prepared.seed}", OneMachine(1, memory), watch)


def _ready(experiment: Experiment, seed: int, dataset: Dataset) -> Prepared:
    """One seed of an experiment; raises ConfigError for what is wrong with the settings."""
    prepared = prepare(experiment, seed, dataset)
    module, x = prepared.terms.module, features(dataset.pool.x[:2])
    if (experiment.together or 1) > 1 and (why := devices.cannot_be_several(module, x)):
        raise ConfigError(
            f"the model `{plugins.label(experiment.model.name)}` cannot be computed several times at once: leave out "
            f"`together` ({why})"
        )
    training = prepared.terms.training
    if training.optimiser is not None:
        trained = [p for p in module.parameters() if p.requires_grad]
        stepping(training.optimiser, trained, training.lambda2 * training.gamma)
    check_metrics(experiment.own_metrics(), len(dataset.class_names))
    return prepared


def _run_on(prepared: Prepared, folder: Path, where: OneMachine | Spread, watch: Watch) -> None:
    """Run one seed to its end, in spite of some losses of parts of a cluster."""
    losses, known = 0, -1
    while True:
        try:
            return run_seed(prepared, folder, where, watch)
        except LostError as error:
            reached = checkpoint.reached(folder)
            losses, known = losses + 1 if reached == known else 1, reached
            if losses > LOSSES:
                raise LostError(f"{error}. It has gone on {LOSSES} times, and gives up: --resume goes on") from error
            print(f"Note: {error}. It goes on from the last checkpoint.", file=sys.stderr)
            time.sleep(PAUSE)


def run_seed(prepared: Prepared, folder: Path, where: OneMachine | Spread, watch: Watch) -> None:
    """Run one seed from its last checkpoint, or from the start, to the last round."""
    experiment, seed, dataset, dim = prepared.experiment, prepared.seed, prepared.dataset, prepared.terms.dim
    sums = mended(prepared, folder)
    if sums is not None and sums.ended(experiment.rounds):
        return
    fingerprint = f"{experiment.fingerprint(seed)} data {digest_of(dataset)}"
    place: Any = where.place(prepared, folder)
    make(folder)
    log = Records(folder)
    device = devices.device_of(experiment.device)
    chosen = primitives_of(folder, prepared)
    if not (folder / ENVIRONMENT).exists():  # a start that is killed from here on has chosen for the next one
        keep(folder, seed, place.processes, chosen, device)
    _say(watch, prepared, place, chosen, device)
    prepared = prepared.by(**chosen)
    with contextlib.ExitStack() as stack:
        stack.enter_context(devices.repeatable(device))
        stack.enter_context(_room(device))
        engine: Any = stack.enter_context(where.entered(prepared, place))
        saved = checkpoint.read(folder, fingerprint, (prepared.kept, parameters.row_stride(dim)))
        if saved is not None and (changed := changed_versions(folder, device)):
            print(f"Note: {folder} began with {changed}: its next rounds may differ in bits.", file=sys.stderr)
        if saved is None:
            if sums is not None and sums.rounds:
                raise damaged(folder / checkpoint.FILE, "it is gone")
            where.begin_models(engine, prepared)
            Sums.forget(folder)
            describe(folder, prepared, place.processes, chosen, device)
            start, memory = 0, Memory.blank(prepared.terms.num_agents)
        else:
            start, memory, there = saved
            engine.fill_(there)
            del there
        if sums is not None and start < sums.rounds:
            raise damaged(folder / checkpoint.FILE, f"it is of round {start}, and there was one of {sums.rounds}")
        log.cut(start)
        for name, known in records.lines_of(folder).items():
            if log.sums()[name] != known:
                raise damaged(folder / name, f"it does not hold what it did when {checkpoint.FILE} was written")
        if start and sums is None:
            told_anew(folder / "sums.json")
        sums = Sums.begin(folder, seed, experiment.settings(), start)

        def evaluated(n: int) -> bool:
            return (n + 1) % experiment.evaluate_every == 0 or n + 1 == experiment.rounds

        def tell(n: int, phase: str) -> None:
            if isinstance(watch, Progress):
                watch.phase(experiment, seed, n + 1, f"{phase}{where.told(place, measured)}")

        measured: Mapping[str, Any] = {}
        own = experiment.own_metrics()
        made = rounds_of(engine)(engine, memory, start, experiment.rounds, evaluated, tell)
        del saved, memory
        for done in made:
            line = metrics_line(aim_of(experiment), engine.attackers.malicious, done, own)
            log.append("metrics", line)
            log.append("pairs", pairs_line(done))
            seconds = dict(done.seconds)
            if (done.n + 1) % experiment.checkpoint_every == 0 or done.n + 1 == experiment.rounds:
                began = time.perf_counter()
                log.sync()
                checkpoint.save(folder, done.n + 1, engine.models(), done.memory, fingerprint, log.sums(SEEDED))
                sums = sums.reached(folder, done.n + 1)
                seconds["checkpoint"] = time.perf_counter() - began
            measured = where.measured(engine)
            log.append("timing", {"round": done.n + 1, **seconds, **measured})
            watch(experiment, seed, line)
    sum_up(folder)
    sums.end(folder, experiment.rounds, log.sums())


def rounds_of(engine: Any) -> Callable[..., Iterator[Round]]:
    """The loop over rounds: Algorithm 1's, or that of an algorithm with models of clusters."""
    clusters = engine.terms.algorithm.clusters
    if clusters is None:
        return rounds
    return dfca.rounds if clusters.each else ifca.rounds


def _say(watch: Watch, prepared: Prepared, place: Plan, chosen: Mapping[str, Any], device: torch.device) -> None:
    """Tell where the models of a seed lie, and by what its rounds are computed."""
    start = f"{prepared.experiment.name} seed {prepared.seed}"
    if isinstance(watch, Progress):
        where = "" if device.type == "cpu" else f" on {device}"
        if chosen["together"] is not None:
            where += f", {chosen['together']} agents at once"
        if chosen["together"] is not None or chosen["convolution"] != "grouped":
            where += f", convolutions {chosen['convolution']}"
        if place.folder is None:  # else a note says it
            watch.say(f"{start}: {place}")
        done_by = f"large dense layers by {chosen['linear']}, images {chosen['layout']}"
        watch.say(f"{start}: processes {place.processes}{where}, {done_by}")
    asked, used = prepared.experiment.training.precision, chosen["precision"]
    if used != (here := autotune.precision_of(asked, device)):
        slower = f", though {used} is far slower here" if used == asked else ""
        print(f"Note: {start} began in {used}, and keeps to it{slower}.", file=sys.stderr)
    elif here != asked:
        print(f"Note: {start} trains in {here}: {asked} is far slower here.", file=sys.stderr)
    if place.folder is not None:
        print(f"Note: {start}: {place}.", file=sys.stderr)


@contextlib.contextmanager
def _room(device: torch.device) -> Iterator[None]:
    """Raises RunError where memory is full, the machine's or a device's."""
    try:
        yield
    except (MemoryError, RuntimeError, FedCB2OError) as error:
        cause = error.__cause__ if isinstance(error, FedCB2OError) else error
        if isinstance(cause, torch.OutOfMemoryError):
            raise RunError(f"{device} is out of memory: let fewer agents train at once, by `together`") from error
        if resources.is_full(cause) and not isinstance(error, RunError):  # which says what to do
            raise RunError(f"memory is full ({error}): {resources.MORE}; then go on with --resume") from error
        raise
