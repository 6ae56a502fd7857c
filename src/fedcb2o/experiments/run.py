"""Run an experiment: one folder, a subfolder a seed, resumable at any moment (alg:FedCB2O, whole)."""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedcb2o import models, plugins, records, tracking
from fedcb2o.data.shard import Dataset, features
from fedcb2o.errors import ConfigError, FedCB2OError, RunError
from fedcb2o.experiments import arguments, away
from fedcb2o.experiments.assemble import Prepared, block_of, first_models_, own_parts, prepare, specs_of
from fedcb2o.experiments.cluster import Spread, check_memory, several
from fedcb2o.experiments.config import Experiment, load
from fedcb2o.experiments.folder import alone, begin, make, told_anew
from fedcb2o.experiments.lines import check_metrics, metrics_line, pairs_line
from fedcb2o.experiments.memory import Plan, bounded, plan, size
from fedcb2o.experiments.mend import has_ended, mended, sum_up
from fedcb2o.experiments.primitives import ENVIRONMENT, primitives_of
from fedcb2o.experiments.progress import Progress, Watch
from fedcb2o.experiments.samples import aim_of, dataset_of, digest_of, shared_data
from fedcb2o.experiments.surroundings import changed_versions, describe, keep
from fedcb2o.federated.optimisers import stepping
from fedcb2o.federated.peers import Memory
from fedcb2o.output import kept
from fedcb2o.records import SEEDED, Records, Run, Sums, damaged
from fedcb2o.runtime import arena, checkpoint, devices, dfca, ifca, machine, onednn, timed, workers
from fedcb2o.runtime.engine import LostError, Round, rounds
from fedcb2o.runtime.shared import Shared

LOSSES = 5  # times that a run goes on by itself from one checkpoint after a part of its cluster was lost
PAUSE = 5.0  # seconds before it does, until the cluster knows what it has lost


@kept()
def run(
    experiment: str | Path | Mapping[str, Any] | Experiment,
    *,
    out: str | Path | None = None,
    seeds: Sequence[int] | None = None,
    data_dir: str | Path | None = None,
    workers: int | None = None,
    memory: str | int | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    cluster: str | None = None,
    blocks: int | None = None,
    track: str | Sequence[str] | None = None,
) -> Run:
    """Run an experiment for each of its seeds and return its records.

    `experiment` is a preset's name, a TOML file, a mapping or an `Experiment`; `out` the run's folder (by default
    runs/NAME); `workers` the number of processes (by default chosen from the work, the processors and the memory, and
    never more than processors or agents; it changes no bit of the result; on another device than the CPU one). `memory`
    is what it may take, such as "24GiB" or "24GB" (by default what is free): models that need more lie in a file in the
    run's folder. With `resume` a stopped run goes on from its last checkpoint, and a finished one is read.

    With a `cluster`, the address of one of Ray's, "auto" for the one that this machine is in or "local" for one of this
    machine alone, seeds are run on its nodes, each by itself, and their files come back here about once a minute; one
    that fails does not stop the others, and `memory` is what each of them may take. With `blocks` the agents of each
    seed are spread over the nodes, which changes no bit either; `memory` is then what each node gives. What is lost
    with a part of the cluster is done again.

    With `track` the records are copied to trackers as they are written: "tensorboard", "tensorboard=DIR", "mlflow" or
    "mlflow=URI", one or several of them.

    Raises ConfigError, DataError or RunError, each with one line that says what to do.
    """
    arguments.check_count("workers", workers)
    arguments.check_count("blocks", blocks)
    arguments.check_address(cluster)
    if workers is not None and cluster is not None:
        raise ConfigError("`workers` are processes of one machine: on a cluster give `blocks`, or nothing")
    if blocks is not None and cluster is None:
        raise ConfigError("`blocks` are those of a cluster: give it by --cluster, or leave `blocks` out")
    arguments.check_watch(watch)
    targets = tracking.check(track)
    for name, path in (("out", out), ("data_dir", data_dir)):
        arguments.check_path(name, path)
    experiment = load(experiment)
    if seeds is not None:
        chosen = arguments.seeds_of(seeds)
        experiment = load({**experiment.model_dump(exclude_unset=True), "seeds": chosen})
    folder, limit = Path(out) if out is not None else Path("runs") / experiment.name, None
    if memory is not None:
        limit = size(memory)
    dataset = dataset_of(experiment, None if data_dir is None else Path(data_dir))
    if devices.device_of(experiment.device).type != "cpu" and (workers or 1) > 1:
        raise ConfigError(
            f"one process works on `device` = {experiment.device!r}, and `workers` is {workers}: leave it out"
        )
    if workers is not None:
        workers = bounded(workers, experiment.agents.num_agents, "agents")
    prepared = {seed: _ready(experiment, seed, dataset) for seed in experiment.seeds}  # before anything is written
    lacking = [seed for seed in experiment.seeds if not has_ended(folder / f"seed-{seed}", experiment.rounds)]
    where: OneMachine | Spread = OneMachine(workers, limit) if blocks is None else Spread(str(cluster), blocks, limit)
    if cluster is None:
        for seed in lacking:
            plan(experiment, dataset, prepared[seed].terms.dim, workers, limit, folder / f"seed-{seed}")
    elif lacking:
        check_memory(limit, prepared[lacking[0]])
    elsewhere = cluster if blocks is None and lacking else None
    what = f"{experiment.name}: {several(len(lacking), 'seed')}"
    with (
        where.joined([prepared[seed] for seed in lacking]),
        away.joined(elsewhere, what, [experiment], [(experiment.data, dataset)], limit) as there,
        alone(folder),
        Progress() if watch is None else contextlib.nullcontext(watch) as watch,
    ):
        begin(folder, experiment, resume)
        with tracking.following(folder, targets):
            for seed in experiment.seeds:
                if there is None or seed not in lacking:  # what has ended is looked at here
                    _run_on(prepared.pop(seed), folder / f"seed-{seed}", where, watch)
            if there is not None:
                _run_away(there, experiment, folder, lacking, watch)
    return Run(folder)


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


def _run_away(there: away.Away, experiment: Experiment, folder: Path, seeds: Sequence[int], watch: Watch) -> None:
    """Run seeds on a cluster, each by itself; raises RunError in the end where some failed."""
    errors: dict[int, str] = {}

    def heard(seed: int, result: tuple[float, str | None]) -> None:
        if result[1] is not None:
            errors[seed] = result[1]

    runs = [(seed, (experiment.model_copy(update={"seeds": (seed,)}), folder)) for seed in seeds]
    there.work(
        min(there.processors, len(runs)),
        runs,
        heard,
        watch=lambda _, seed, line: watch(experiment, seed, line),
        held=True,
    )
    if errors:
        why = "; ".join(f"seed {seed}: {error}" for seed, error in sorted(errors.items()))
        raise RunError(f"{len(errors)} of {len(experiment.seeds)} seeds failed, which --resume tries again: {why}")


def _run_on(prepared: Prepared, folder: Path, where: "OneMachine | Spread", watch: Watch) -> None:
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


def run_seed(prepared: Prepared, folder: Path, where: "OneMachine | Spread", watch: Watch) -> None:
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
        saved = checkpoint.read(folder, fingerprint, (prepared.kept, models.row_stride(dim)))
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
    if used != (here := timed.precision_of(asked, device)):
        slower = f", though {used} is far slower here" if used == asked else ""
        print(f"Note: {start} began in {used}, and keeps to it{slower}.", file=sys.stderr)
    elif here != asked:
        print(f"Note: {start} trains in {here}: {asked} is far slower here.", file=sys.stderr)
    if place.folder is not None:
        print(f"Note: {start}: {place}.", file=sys.stderr)


@dataclass(frozen=True)
class OneMachine:
    """That a run works on this machine, by so many `workers`, in so much `memory`."""

    workers: int | None
    memory: int | None

    def joined(self, prepared: Sequence[Prepared]) -> contextlib.AbstractContextManager[None]:
        """There is nothing to join."""
        return contextlib.nullcontext()

    def place(self, prepared: Prepared, folder: Path) -> Plan:
        """Where the models of a seed go; raises RunError where there is no room for them."""
        return plan(prepared.experiment, prepared.dataset, prepared.terms.dim, self.workers, self.memory, folder)

    @contextlib.contextmanager
    def entered(self, prepared: Prepared, place: Plan) -> Iterator[Shared]:
        """The engine of one seed."""
        with contextlib.ExitStack() as stack:
            yield _enter(stack, prepared, place)

    def begin_models(self, engine: Shared, prepared: Prepared) -> None:
        """Fill the rows of all agents, and of clusters, with their first models."""
        kept = engine.block.pool[: prepared.kept]
        first_models_(kept, prepared.experiment, prepared.seed, prepared.dataset, range(len(kept)))

    def told(self, place: Plan, measured: Mapping[str, Any]) -> str:
        """There is nothing more to tell."""
        return ""

    def measured(self, engine: Shared) -> dict[str, Any]:
        """There is nothing more to note of a round."""
        return {}


def _enter(stack: contextlib.ExitStack, prepared: Prepared, place: Plan) -> Shared:
    """The engine of one seed; the models lie in memory, or in a file."""
    experiment, seed, dataset, dim = prepared.experiment, prepared.seed, prepared.dataset, prepared.terms.dim
    specs, count = specs_of(dataset, experiment.num_models, dim), place.processes
    if count == 1 and dim >= onednn.LARGE:
        machine.keep_memory()
    if count == 1 and place.folder is None:
        theta = torch.zeros(specs["models"][1], device=devices.device_of(experiment.device))
        block = prepared.block(theta[:, :dim])
        return Shared(block, workers.Here(block), own=own_parts(experiment))
    shared = stack.enter_context(arena.shared(specs, place.folder))
    tensors = shared.tensors()
    for name, tensor in shared_data(dataset).items():
        tensors[name].copy_(tensor)
    make = functools.partial(block_of, experiment, seed, dataset.names, dim)
    block = prepared.block(tensors["models"][:, :dim])
    if count == 1:
        shared.path.unlink()  # a mapping outlives it, and a kill then leaves nothing
    who = workers.Here(block) if count == 1 else workers.Processes(count, shared, make)
    return Shared(block, who, place.columns, own_parts(experiment))


@contextlib.contextmanager
def _room(device: torch.device) -> Iterator[None]:
    """Raises RunError where memory is full, the machine's or a device's."""
    try:
        yield
    except (MemoryError, RuntimeError, FedCB2OError) as error:
        cause = error.__cause__ if isinstance(error, FedCB2OError) else error
        if isinstance(cause, torch.OutOfMemoryError):
            raise RunError(f"{device} is out of memory: let fewer agents train at once, by `together`") from error
        if machine.is_full(cause) and not isinstance(error, RunError):  # which says what to do
            raise RunError(f"memory is full ({error}): {machine.MORE}; then go on with --resume") from error
        raise
