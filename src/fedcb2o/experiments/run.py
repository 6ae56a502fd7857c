"""Run an experiment: one folder, a subfolder a seed, resumable at any moment (alg:FedCB2O, whole)."""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedcb2o import models, plugins, records
from fedcb2o.data.shard import features
from fedcb2o.errors import ConfigError, FedCB2OError, RunError
from fedcb2o.experiments import arguments
from fedcb2o.experiments.assemble import (
    Prepared,
    aim_of,
    block_of,
    dataset_of,
    digest_of,
    first_models_,
    own_parts,
    prepare,
    shared_data,
    specs_of,
)
from fedcb2o.experiments.config import Experiment, load
from fedcb2o.experiments.folder import alone, begin, make, told_anew
from fedcb2o.experiments.lines import metrics_line, pairs_line
from fedcb2o.experiments.memory import Plan, bounded, plan, size
from fedcb2o.experiments.mend import has_ended, mended, sum_up
from fedcb2o.experiments.primitives import ENVIRONMENT, primitives_of
from fedcb2o.experiments.progress import Progress, Watch
from fedcb2o.experiments.surroundings import changed_versions, describe, keep
from fedcb2o.federated.peers import Memory
from fedcb2o.output import kept
from fedcb2o.records import SEEDED, Records, Run, Sums, damaged
from fedcb2o.runtime import arena, checkpoint, devices, ifca, machine, onednn, workers
from fedcb2o.runtime.engine import Round, rounds
from fedcb2o.runtime.shared import Shared


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
) -> Run:
    """Run an experiment for each of its seeds and return its records.

    `experiment` is a preset's name, a TOML file, a mapping or an `Experiment`; `out` the run's folder (by default
    runs/NAME); `workers` the number of processes (by default chosen from the work, the processors and the memory, and
    never more than processors or agents; it changes no bit of the result; on another device than the CPU one). `memory`
    is what it may take, such as "24GiB" or "24GB" (by default what is free): models that need more lie in a file in the
    run's folder. With `resume` a stopped run goes on from its last checkpoint, and a finished one is read.

    Raises ConfigError, DataError or RunError, each with one line that says what to do.
    """
    arguments.check_count("workers", workers)
    arguments.check_watch(watch)
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
    prepared = {seed: prepare(experiment, seed, dataset) for seed in experiment.seeds}
    for seed, each in prepared.items():  # what is wrong with the settings shows before anything is written
        module, x = each.terms.module, features(dataset.pool.x[:2])
        if (experiment.together or 1) > 1 and (why := devices.cannot_be_several(module, x)):
            raise ConfigError(
                f"the model `{plugins.label(experiment.model.name)}` cannot be computed several times at once: leave "
                f"out `together` ({why})"
            )
        if not has_ended(folder / f"seed-{seed}", experiment.rounds):
            plan(experiment, dataset, each.terms.dim, workers, limit, folder / f"seed-{seed}")
    with alone(folder), Progress() if watch is None else contextlib.nullcontext(watch) as watch:
        begin(folder, experiment, resume)
        for seed in experiment.seeds:
            run_seed(prepared.pop(seed), folder / f"seed-{seed}", workers, limit, watch)
    return Run(folder)


def run_seed(prepared: Prepared, folder: Path, count: int | None, memory: int | None, watch: Watch) -> None:
    """Run one seed from its last checkpoint, or from the start, to the last round."""
    experiment, seed, dataset, dim = prepared.experiment, prepared.seed, prepared.dataset, prepared.terms.dim
    sums = mended(prepared, folder)
    if sums is not None and sums.ended(experiment.rounds):
        return
    fingerprint = f"{experiment.fingerprint(seed)} data {digest_of(dataset)}"
    place = plan(experiment, dataset, dim, count, memory, folder)
    make(folder)
    log = Records(folder)
    device = devices.device_of(experiment.device)
    chosen = primitives_of(folder, prepared)
    if not (folder / ENVIRONMENT).exists():  # a start that is killed from here on has chosen for the next one
        keep(folder, seed, place.processes, chosen, device)
    prepared = prepared.by(**chosen)
    _say(watch, prepared, place, chosen, device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(devices.repeatable(device))
        stack.enter_context(_room(device))
        engine = _enter(stack, prepared, place)
        block = engine.block
        kept = block.pool[: prepared.kept]
        padded = kept.as_strided((len(kept), models.row_stride(dim)), (models.row_stride(dim), 1))
        saved = checkpoint.load_(folder, padded, fingerprint)
        if saved is not None and (changed := changed_versions(folder, device)):
            print(f"Note: {folder} began with {changed}: its next rounds may differ in bits.", file=sys.stderr)
        if saved is None:
            if sums is not None and sums.rounds:
                raise damaged(folder / checkpoint.FILE, "it is gone")
            first_models_(kept, prepared, range(len(kept)))
            Sums.forget(folder)
            describe(folder, prepared, place.processes, chosen, device)
            saved = 0, Memory.blank(prepared.terms.num_agents)
        start = saved[0]
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
                watch.phase(experiment, seed, n + 1, phase)

        made = rounds_of(engine)(engine, saved[1], start, experiment.rounds, evaluated, tell)
        del saved
        for done in made:
            line = metrics_line(aim_of(experiment), block.attackers.malicious, done)
            log.append("metrics", line)
            log.append("pairs", pairs_line(done))
            seconds = dict(done.seconds)
            if (done.n + 1) % experiment.checkpoint_every == 0 or done.n + 1 == experiment.rounds:
                began = time.perf_counter()
                log.sync()
                checkpoint.save(folder, done.n + 1, [padded], done.memory, fingerprint, log.sums(SEEDED))
                sums = sums.reached(folder, done.n + 1)
                seconds["checkpoint"] = time.perf_counter() - began
            log.append("timing", {"round": done.n + 1, **seconds})
            watch(experiment, seed, line)
    sum_up(folder)
    sums.end(folder, experiment.rounds, log.sums())


def rounds_of(engine: Shared) -> Callable[..., Iterator[Round]]:
    """The loop over rounds: Algorithm 1's, or that of a coordinator where the algorithm has one."""
    return rounds if engine.terms.algorithm.coordinator is None else ifca.rounds


def _say(watch: Watch, prepared: Prepared, place: Plan, chosen: Mapping[str, Any], device: torch.device) -> None:
    """Tell where the models of a seed lie, and by what its rounds are computed."""
    start = f"{prepared.experiment.name} seed {prepared.seed}"
    if isinstance(watch, Progress):
        where = "" if device.type == "cpu" else f" on {device}"
        if chosen["together"] is not None:
            where += f", {chosen['together']} agents at once, convolutions {chosen['convolution']}"
        if place.folder is None:  # else a note says it
            watch.say(f"{start}: {place}")
        done_by = f"large dense layers by {chosen['linear']}, images {chosen['layout']}"
        watch.say(f"{start}: processes {place.processes}{where}, {done_by}")
    if place.folder is not None:
        print(f"Note: {start}: {place}.", file=sys.stderr)


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
    make = functools.partial(block_of, experiment, seed, dataset.class_names, dim)
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
