"""Run an experiment: one folder, a subfolder a seed, resumable at any moment (alg:FedCB2O, whole)."""

import contextlib
import fcntl
import functools
import math
import os
import platform
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from safetensors.torch import save_file

from fedcb2o import models, plugins, records
from fedcb2o.data.partition import rotate
from fedcb2o.data.shard import Dataset, features
from fedcb2o.errors import ConfigError, FedCB2OError, RunError
from fedcb2o.experiments.assemble import (
    Prepared,
    aim_of,
    block_of,
    dataset_of,
    first_models_,
    prepare,
    shared_data,
    specs_of,
)
from fedcb2o.experiments.config import Experiment, identity, load
from fedcb2o.experiments.memory import Plan, plan, size
from fedcb2o.experiments.primitives import ENVIRONMENT, primitives_of
from fedcb2o.experiments.progress import Progress, Watch
from fedcb2o.federated import metrics
from fedcb2o.federated.choices import Choices
from fedcb2o.federated.peers import Memory
from fedcb2o.records import Records, Run
from fedcb2o.runtime import arena, checkpoint, devices, ifca, machine, onednn, workers
from fedcb2o.runtime.engine import Round, rounds
from fedcb2o.runtime.shared import Shared


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
    runs/NAME); `workers` the number of processes (by default chosen from the work, the processors and the memory;
    it changes no bit of the result; on another device than the CPU one). `memory` is what it may take, such as "24GiB"
    or "24GB" (by default what is free): models that need more lie in a file in the run's folder. With `resume` a
    stopped run goes on from its last checkpoint, and a finished one is read.

    Raises ConfigError, DataError or RunError, each with one line that says what to do.
    """
    experiment = load(experiment)
    if seeds is not None:
        chosen = tuple(int(seed) for seed in seeds)
        experiment = load({**experiment.model_dump(exclude_unset=True), "seeds": chosen})
    folder, limit = Path(out) if out is not None else Path("runs") / experiment.name, None
    if memory is not None:
        limit = size(memory)
    dataset = dataset_of(experiment, None if data_dir is None else Path(data_dir))
    if devices.device_of(experiment.device).type != "cpu" and (workers or 1) > 1:
        raise ConfigError(
            f"one process works on `device` = {experiment.device!r}, and `workers` is {workers}: leave it out"
        )
    prepared = {seed: prepare(experiment, seed, dataset) for seed in experiment.seeds}
    for seed, each in prepared.items():  # what is wrong with the settings shows before anything is written
        module, x = each.terms.module, features(dataset.pool.x[:2])
        if (experiment.together or 1) > 1 and (why := devices.cannot_be_several(module, x)):
            raise ConfigError(
                f"the model `{plugins.label(experiment.model.name)}` cannot be computed several times at once: leave "
                f"out `together` ({why})"
            )
        if not _done(experiment, folder / f"seed-{seed}"):
            plan(experiment, dataset, each.terms.dim, workers, limit, folder / f"seed-{seed}")
    with alone(folder), Progress() if watch is None else contextlib.nullcontext(watch) as watch:
        _prepare(folder, experiment, resume)
        for seed in experiment.seeds:
            run_seed(prepared.pop(seed), folder / f"seed-{seed}", workers, limit, watch)
    return Run(folder)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make the run's folder and keep other processes from writing to it; raises RunError where one does."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is not a folder: choose another --out")
    _make(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(f"another process is writing to {folder}: wait for it, or choose another --out") from error
        yield
    finally:
        os.close(descriptor)  # and with it the lock


def _prepare(folder: Path, experiment: Experiment, resume: bool) -> None:
    """Make the run's folder and its config.toml, or check that what is there is this run."""
    path = folder / "config.toml"
    seeds = list(experiment.seeds)
    if path.exists():
        try:
            there = tomllib.loads(path.read_text("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RunError(f"{path} is damaged ({error}): choose another --out") from error
        if difference := difference_of(there, experiment.settings()):
            raise RunError(f"{folder} holds another run ({difference}): choose another --out")
        busy = [seed for seed in seeds if (folder / f"seed-{seed}" / "agents.json").exists()]
        if busy and not resume:
            raise RunError(
                f"{folder} already holds seed {busy[0]} of this run: --resume goes on with it, or choose another --out"
            )
        if there.get("rounds", 0) > experiment.rounds:
            raise RunError(
                f"{folder} holds this run with `rounds` = {there['rounds']}: it can only be made longer; "
                f"go on with --set rounds={there['rounds']}"
            )
        seeds = sorted({*seeds, *there.get("seeds", ())})
    elif any(inside.name != f"{path.name}.tmp" for inside in folder.iterdir()):
        raise RunError(f"{folder} is not empty and holds no run: choose another --out")
    records.write_toml(path, {**experiment.settings(), "seeds": seeds})


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the folder {folder}: {error.strerror}; choose another --out") from error


def difference_of(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """The first setting that two runs differ in, or None where they are one."""
    old, new = _flat(identity(there)), _flat(identity(here))
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if not changed:
        return None
    was, now = ("not set" if (value := each.get(changed[0])) is None else repr(value) for each in (old, new))
    return f"`{changed[0]}` is {was} there and {now} here"


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def run_seed(prepared: Prepared, folder: Path, count: int | None, memory: int | None, watch: Watch) -> None:
    """Run one seed from its last checkpoint, or from the start, to the last round."""
    experiment, seed, dataset, dim = prepared.experiment, prepared.seed, prepared.dataset, prepared.terms.dim
    if _done(experiment, folder):
        return
    fingerprint = f"{experiment.fingerprint(seed)} data {_digest(dataset)}"
    place = plan(experiment, dataset, dim, count, memory, folder)
    _make(folder)
    log = Records(folder)
    device = devices.device_of(experiment.device)
    chosen = primitives_of(folder, prepared)
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
        if saved is not None and (changed := _changed_versions(folder, device)):
            print(f"Note: {folder} began with {changed}: its next rounds may differ in bits.", file=sys.stderr)
        if saved is None:
            first_models_(kept, prepared, range(len(kept)))
            _describe(folder, prepared, place.processes, chosen, device)
            saved = 0, Memory.blank(prepared.terms.num_agents)
        start = saved[0]
        log.cut(start)

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
                checkpoint.save(folder, done.n + 1, [padded], done.memory, fingerprint)
                seconds["checkpoint"] = time.perf_counter() - began
            log.append("timing", {"round": done.n + 1, **seconds})
            watch(experiment, seed, line)
    scores = records.summary(Run(folder.parent).records_of(seed))
    records.write_json(folder / "summary.json", {str(name): scores[name].iloc[0] for name in scores})


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


def _done(experiment: Experiment, folder: Path) -> bool:
    """Whether a seed has run to its last round."""
    summary = folder / "summary.json"
    return summary.exists() and records.read_json(summary).get("rounds", 0) >= experiment.rounds


def _enter(stack: contextlib.ExitStack, prepared: Prepared, place: Plan) -> Shared:
    """The engine of one seed; the models lie in memory, or in a file."""
    experiment, seed, dataset, dim = prepared.experiment, prepared.seed, prepared.dataset, prepared.terms.dim
    specs, count = specs_of(dataset, experiment.num_models, dim), place.processes
    if count == 1 and dim >= onednn.LARGE:
        machine.keep_memory()
    if count == 1 and place.folder is None:
        theta = torch.zeros(specs["models"][1], device=devices.device_of(experiment.device))
        block = prepared.block(theta[:, :dim])
        return Shared(block, workers.Here(block))
    shared = stack.enter_context(arena.shared(specs, place.folder))
    tensors = shared.tensors()
    for name, tensor in shared_data(dataset).items():
        tensors[name].copy_(tensor)
    make = functools.partial(block_of, experiment, seed, dataset.class_names, dim)
    block = prepared.block(tensors["models"][:, :dim])
    who = workers.Here(block) if count == 1 else workers.Processes(count, shared, make)
    return Shared(block, who, place.columns)


@contextlib.contextmanager
def _room(device: torch.device) -> Iterator[None]:
    """Raises RunError where a device's memory is full."""
    try:
        yield
    except (torch.OutOfMemoryError, FedCB2OError) as error:
        if isinstance(error.__cause__ or error, torch.OutOfMemoryError):
            raise RunError(f"{device} is out of memory: let fewer agents train at once, by `together`") from error
        raise


def _digest(dataset: Dataset) -> str:
    """What a data set's content adds up to."""
    return "-".join(f"{checkpoint.adds_up_to(tensor):08x}" for tensor in shared_data(dataset).values())


def _describe(folder: Path, prepared: Prepared, count: int, chosen: Mapping[str, Any], device: torch.device) -> None:
    """Write who takes part, in what surroundings, and a few samples as each cluster sees them."""
    experiment, seed, dataset, population = prepared.experiment, prepared.seed, prepared.dataset, prepared.population
    sources = torch.tensor(aim_of(experiment).sources, dtype=torch.int64)
    environment = {"seed": seed, **_versions(device), "platform": platform.platform(), "workers": count}
    records.write_json(folder / ENVIRONMENT, {**environment, **chosen})
    held = [
        int(torch.isin(dataset.pool.y[v], sources).sum()) if len(v) and len(sources) else None
        for v in population.validation
    ]
    who = {
        "class_names": list(dataset.class_names),
        "num_classes": dataset.num_classes,
        "clusters": population.num_clusters,
        "angles": [k * 360 // population.num_clusters for k in range(population.num_clusters)],
        "dim": prepared.terms.dim,
        "cluster": population.cluster.tolist(),
        "malicious": population.malicious.tolist(),
        "num_samples": [len(chosen) for chosen in population.train],
        "source_in_validation": held,
    }
    records.write_json(folder / "agents.json", who)
    if dataset.pool.x.ndim == 4:
        y = dataset.pool.y
        labels = torch.linspace(0, dataset.num_classes - 1, min(10, dataset.num_classes)).long()
        first = torch.stack([(y == c).nonzero()[0, 0] if (y == c).any() else torch.tensor(0) for c in labels])
        images = (features(dataset.pool.x[first]).mean(1) * 255).clamp(0, 255).to(torch.uint8)
        seen = torch.stack([rotate(images, k, population.num_clusters) for k in range(population.num_clusters)])
        seen = seen.contiguous()
        records.atomic_write(folder / "samples.safetensors", lambda path: save_file({"images": seen}, path))


def _versions(device: torch.device) -> dict[str, Any]:
    """The versions that the bits of a run depend on, and the device by its name."""
    packages = ("fedcb2o", "torch", "numpy")
    versions = {"versions": {name: version(name) for name in packages}, "python": platform.python_version()}
    return versions if device.type == "cpu" else {**versions, "device": devices.name_of(device)}


def _changed_versions(folder: Path, device: torch.device) -> str:
    """What a seed began with, where it now is another: "torch 2.5.0, now 2.6.0"."""
    path, now = folder / ENVIRONMENT, _flat(_versions(device))
    there = _flat(records.read_json(path)) if path.exists() else now
    changed = {
        key.removeprefix("versions."): (there.get(key), new) for key, new in now.items() if there.get(key) != new
    }
    return ", ".join(f"{name} {old}, now {new}" for name, (old, new) in changed.items())


def metrics_line(aim: metrics.Aim, malicious: Bool[np.ndarray, " N"], done: Round) -> dict[str, Any]:
    """The line of a round in metrics.jsonl: what each agent lost, took in from malicious peers, and scores.

    `malicious_weight` is in m_j, before the mixing factor: the share in the new model is that times the factor.
    """
    choices = done.choices
    line: dict[str, Any] = {
        "round": done.n + 1,
        "train_loss": done.train_loss.tolist(),
        "validation_loss": [loss if math.isfinite(loss) else None for loss in choices.own_loss.tolist()],
        "malicious_weight": _malicious_weights(choices, malicious),
        "answered": choices.received.sizes.tolist(),
    }
    if done.confusion is None:
        return line
    triggered = done.triggered or {}
    scores: dict[str, Callable[[int, torch.Tensor], float | None]] = {
        "accuracy": lambda j, c: metrics.accuracy(c),
        "source_accuracy": lambda j, c: aim.accuracy(c),
        "attack_success_rate": lambda j, c: aim.success(c, triggered.get(j)),
    }
    for name, score in scores.items():
        line[name] = [score(j, done.confusion[j]) if j in done.confusion else None for j in range(len(malicious))]
    return line


def _malicious_weights(choices: Choices, malicious: Bool[np.ndarray, " N"]) -> list[float | None]:
    """The weight that each benign agent gave to malicious peers, where weights say it."""
    received = choices.received
    sums = np.bincount(received.owners, choices.weights * malicious[received.values], len(choices))
    unknown = malicious | np.isnan(sums)
    return [None if hidden else found for found, hidden in zip(sums.tolist(), unknown.tolist(), strict=True)]


def pairs_line(done: Round) -> dict[str, Any]:
    """The line of a round in pairs.jsonl: whom each agent asked, whose models it received, and with what weights.

    `before` is the weight of the model that an agent began the round with, and `f` the attackers that its rule assumed,
    where any has such.
    """
    choices = done.choices
    weights, own = ([float(f"{w:.6g}") for w in each.tolist()] for each in (choices.weights, choices.own_weight))
    line: dict[str, Any] = {
        "round": done.n + 1,
        "asked": choices.asked.tolist(),
        "ids": choices.received.tolist(),
        "weights": choices.received.having(np.array(weights)).tolist(),
        "own": own,
    }
    if not np.isnan(choices.before).all():
        line["before"] = np.nan_to_num(choices.before).tolist()
    if not np.isnan(choices.f).all():
        line["f"] = [None if math.isnan(f) else int(f) for f in choices.f.tolist()]
    return line
