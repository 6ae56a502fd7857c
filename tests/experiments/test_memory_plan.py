"""The memory plan of a run: number of processes, and models in memory or on disk."""

import functools
import json
import sys
from types import SimpleNamespace

import pytest
from tests.processes import needs_proc
from tests.tiny import FEDCB2O, bits, command, run_cli, set_processors, tiny, write

import fedcb2o
from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments.config.datasets import load_dataset
from fedcb2o.experiments.config.loading import load
from fedcb2o.experiments.runs import _memory_plan
from fedcb2o.parallel import _shared_memory
from fedcb2o.simulation import checkpoint


def plan(tmp_path, memory, count=1, **changes):
    """Plan the memory of 6 agents with 100,000 parameters each."""
    experiment = load(tiny(**changes))
    return _memory_plan.plan_memory(
        experiment, load_dataset(experiment, None), 100_000, count, memory, tmp_path
    )


def test_models_are_in_memory_if_they_fit_and_on_disk_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(_memory_plan, "PROCESS_BYTES", 0)
    in_memory = plan(tmp_path, 10**9)
    assert in_memory.model_bytes == 6 * 4 * 100_000
    assert (in_memory.folder, in_memory.columns_per_mix) == (None, None)
    assert plan(tmp_path, in_memory.other_bytes + in_memory.model_bytes).folder is None
    on_disk = plan(tmp_path, in_memory.other_bytes + in_memory.model_bytes - 1)
    assert on_disk.folder == tmp_path
    assert 4 * 6 * on_disk.columns_per_mix <= in_memory.model_bytes / 2
    assert "in memory" in str(in_memory)
    assert f"on disk, in {tmp_path}" in str(on_disk)


def test_the_error_names_the_number_of_agents_that_would_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(_memory_plan, "PROCESS_BYTES", 0)
    monkeypatch.setattr(_memory_plan.shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    in_memory = plan(tmp_path, 10**9)
    message = r"^6 agents need .* of memory, or on disk .* that are free: 3 agents would fit$"
    with pytest.raises(RunError, match=message):
        plan(tmp_path, in_memory.other_bytes + in_memory.model_bytes // 2)
    with pytest.raises(RunError, match=r": give more memory or take a smaller model$"):
        plan(tmp_path, 1000)


def test_too_little_memory_for_mixing_is_refused(tmp_path, monkeypatch):
    """Mixing needs memory even if the models are on disk."""
    monkeypatch.setattr(_memory_plan, "PROCESS_BYTES", 0)
    monkeypatch.setattr(
        _memory_plan.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**18)
    )
    overhead = plan(tmp_path, 10**9).other_bytes
    result = plan(tmp_path, overhead + 8 * 6 * _memory_plan.REDUCTION_TILE_COLUMNS).columns_per_mix
    assert result == _memory_plan.REDUCTION_TILE_COLUMNS
    with pytest.raises(RunError, match=r": 5 agents would fit$"):
        plan(tmp_path, overhead + 8 * 6 * _memory_plan.REDUCTION_TILE_COLUMNS - 1)


@pytest.fixture
def eight_processors(monkeypatch):
    """Simulate eight processors with work for all; processes need memory only for training."""
    monkeypatch.setattr(_memory_plan, "MIN_PARALLEL_FLOPS", 0.0)
    monkeypatch.setattr(_memory_plan, "PROCESS_BYTES", 0)
    set_processors(monkeypatch, 8)


def test_the_number_of_processes_is_limited_by_work_and_memory(
    tmp_path, eight_processors, monkeypatch
):
    many = {"agents": {"benign": 9}}
    assert plan(tmp_path, 10**9, None).processes == 6
    assert plan(tmp_path, 10**9, None, **many).processes == 8
    assert plan(tmp_path, 10**9, 3, **many).processes == 3
    monkeypatch.setattr(_memory_plan.shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    three = plan(tmp_path, 10**9, 3, **many)
    enough = three.model_bytes + three.other_bytes
    assert plan(tmp_path, enough, None, **many) == three
    assert plan(tmp_path, enough - 1, None, **many).processes == 2
    monkeypatch.setattr(_memory_plan, "MIN_PARALLEL_FLOPS", 1e99)
    assert plan(tmp_path, 10**9, None, **many).processes == 1


def test_up_to_half_of_the_processes_are_dropped_to_keep_models_in_memory(
    tmp_path, eight_processors, monkeypatch
):
    many = {"agents": {"benign": 60}}
    monkeypatch.setattr(
        _memory_plan.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**18)
    )
    eight, five, four = (plan(tmp_path, 10**10, count, **many) for count in (8, 5, 4))
    assert plan(tmp_path, eight.model_bytes + eight.other_bytes - 1, None, **many).processes == 7
    assert plan(tmp_path, five.model_bytes + five.other_bytes, None, **many) == five
    below = plan(tmp_path, four.model_bytes + four.other_bytes, None, **many)
    assert (below.processes, below.folder) == (5, tmp_path)
    asked = plan(tmp_path, five.model_bytes + five.other_bytes - 1, 5, **many)
    assert (asked.processes, asked.folder) == (5, tmp_path)


def test_the_error_names_the_number_of_processes_that_would_fit(
    tmp_path, eight_processors, monkeypatch
):
    monkeypatch.setattr(_memory_plan.shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    two = plan(tmp_path, 10**9, 2)
    with pytest.raises(RunError, match=r": --workers 2 would fit$"):
        plan(tmp_path, two.model_bytes + two.other_bytes, 5)
    with pytest.raises(RunError, match=r": give more memory or take a smaller model$"):
        plan(tmp_path, 1000, 5)
    with pytest.raises(RunError, match=r": give more memory or take a smaller model$"):
        plan(tmp_path, 1000, None)


def test_small_models_stay_in_memory_with_as_many_processes_as_fit(
    tmp_path, eight_processors, monkeypatch
):
    one = plan(tmp_path, 10**9, 1)
    assert one.model_bytes < one.other_bytes
    monkeypatch.setattr(_memory_plan._resources, "free_memory", lambda: one.model_bytes)
    assert plan(tmp_path, None, None) == one
    assert plan(tmp_path, None, 4) == plan(tmp_path, 10**9, 4)


def test_the_plan_counts_data_and_training_of_every_process(tmp_path, monkeypatch):
    for name in ("PROCESS_BYTES", "AGENT_BYTES", "CONTACT_BYTES"):
        monkeypatch.setattr(_memory_plan, name, 0)
    # small dense networks train in batches of this size
    training = 12 * _memory_plan.MAX_BATCH_PARAMETERS
    data = plan(tmp_path, 10**9).other_bytes - training
    assert plan(tmp_path, 10**9, together=50).other_bytes == data + 12 * 6 * 100_000
    # the data as read, and their shared copy
    assert plan(tmp_path, 10**9, count=2).other_bytes == 2 * (data + training)


def test_the_plan_counts_contacts_of_all_rounds(tmp_path, monkeypatch):
    few, many = (plan(tmp_path, 10**9, rounds=rounds) for rounds in (1, 50))
    budget = load(tiny()).agents.budget
    contacts = 5 - min(budget, 5)  # of 5 peers, those asked after the first round
    assert many.other_bytes - few.other_bytes == 6 * 40 * contacts
    monkeypatch.setattr(_memory_plan, "CONTACT_BYTES", 2**40)
    message = "TiB|GiB for data, contacts .* fewer agents, rounds or peers"
    with pytest.raises(RunError, match=message):
        plan(tmp_path, None, rounds=50)


def test_an_existing_checkpoint_needs_no_more_disk_space(tmp_path, monkeypatch):
    monkeypatch.setattr(_memory_plan, "PROCESS_BYTES", 0)
    in_memory = plan(tmp_path, 10**9)
    monkeypatch.setattr(
        _memory_plan.shutil,
        "disk_usage",
        lambda folder: SimpleNamespace(free=2 * in_memory.model_bytes),
    )
    memory = in_memory.other_bytes + in_memory.model_bytes - 1
    with pytest.raises(RunError, match="would fit"):
        plan(tmp_path, memory)
    (tmp_path / checkpoint.FILE).touch()
    assert plan(tmp_path, memory).folder == tmp_path


def test_the_memory_of_a_killed_run_counts_as_free(tmp_path, monkeypatch):
    """Shared memory of a killed run is released before the free memory is measured."""
    shared = tmp_path / "shm"
    shared.mkdir()
    leftover = shared / f"{_shared_memory.PREFIX}1-0{_shared_memory.SUFFIX}"
    leftover.touch()
    monkeypatch.setattr(_shared_memory, "_candidate_folders", lambda: [shared])
    monkeypatch.setattr(
        _memory_plan._resources, "free_memory", lambda: 1000 if leftover.exists() else 10**10
    )
    assert plan(tmp_path, None).folder is None
    assert not leftover.exists()


@pytest.mark.parametrize(
    ("asked", "processors", "expected"),
    [(40, 2, 2), (2, 2, 2), (40, 8, 6), (6, 8, 6), (1, 8, 1), (2, 1, 1)],
)
def test_processes_are_limited_by_processors_and_agents(
    monkeypatch, caplog, asked, processors, expected
):
    set_processors(monkeypatch, processors)
    assert _memory_plan.clip_workers(asked, 6, "agents") == expected
    note = (
        f"{expected} processes work, not {asked}: there are {processors} processors and 6 agents."
    )
    assert caplog.messages == ([] if asked == expected else [note])


def test_a_run_records_the_limited_number_of_processes(tmp_path, monkeypatch):
    set_processors(monkeypatch, 1)
    fedcb2o.run(tiny(rounds=1), out=tmp_path / "run", workers=40)
    assert json.loads((tmp_path / "run/seed-1000/environment.json").read_text())["workers"] == 1


@pytest.mark.parametrize("asked", [0, -1])
def test_fewer_than_one_process_is_refused(tmp_path, asked):
    with pytest.raises(ConfigError, match="`workers` must be a whole number, at least 1"):
        fedcb2o.run(tiny(), out=tmp_path / "run", workers=asked)
    assert not (tmp_path / "run").exists()


@needs_proc
@pytest.mark.parametrize(
    ("limit", "changes", "message"),
    [
        ("-v 700000", (), "PyTorch takes 1.00 GiB: raise it"),
        ("-v 1700000", ("model.hidden=[400000]",), "a process may map"),
        pytest.param(
            "-n 8",
            (),
            "cannot start a worker process (Too many open files): raise `ulimit -n`, or try with fewer",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_resource_limit_gives_a_one_line_error(tmp_path, limit, changes, message):
    path = write(tmp_path / "tiny.toml")
    options = [word for change in changes for word in ("--set", change)]
    arguments = ["run", path, "--out", tmp_path / "run", "--workers", 2, *options]
    line = command(
        "-c", f'ulimit {limit}; exec "$0" "$@"', FEDCB2O, *arguments, program="sh"
    ).one_line()
    assert message in line


def test_full_memory_gives_a_one_line_error(tmp_path, monkeypatch):
    errors = (
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to ..."),
    )
    worker_error = Exception(
        "Traceback ...: MemoryError\n\nThe above exception was the direct cause"
    )  # of a worker
    wrapped = [(ConfigError("the model `own` failed"), cause) for cause in (*errors, worker_error)]
    for error, cause in [*((error, None) for error in errors), *wrapped]:

        def fail(*arguments, error=error, cause=cause, **options):
            raise error from cause

        monkeypatch.setattr(
            sys.modules["fedcb2o.experiments.runs._local_backend"], "init_models_", fail
        )
        assert (
            "memory is full"
            in run_cli("run", write(tmp_path / "tiny.toml"), "--out", tmp_path / "run").one_line()
        )


def test_model_files_of_a_killed_run_are_removed_by_the_next_run(tmp_path):
    fedcb2o.run(tiny(rounds=1), out=tmp_path, workers=1)
    leftover = tmp_path / "seed-1000" / f"{_shared_memory.PREFIX}1-0{_shared_memory.SUFFIX}"
    leftover.write_bytes(b"models")
    fedcb2o.run(tiny(rounds=2), out=tmp_path, workers=1, resume=True)
    assert not leftover.exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * 2**30),
        ("24G", 24 * 2**30),
        ("24Gi", 24 * 2**30),
        ("24g", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("1.5 MB", 1_500_000),
        ("2M", 2**21),
        ("3 MiB", 3 * 2**20),
        ("5KiB", 5120),
        ("5K", 5120),
        ("5kB", 5000),
        ("5KB", 5000),
        ("0.5TB", 5 * 10**11),
        ("1T", 2**40),
        ("7", 7),
        ("7 bytes", 7),
        ("7B", 7),
        (7, 7),
    ],
)
def test_sizes_are_parsed(text, expected):
    assert _memory_plan.parse_size(text) == expected


@pytest.mark.parametrize("text", ["24 gigs", "-1GiB", "GiB", "", "24iB", "1e9", "1,5GB", "24 G B"])
def test_an_invalid_size_gives_a_one_line_error(tmp_path, text):
    with pytest.raises(ConfigError, match="needs a size such as 24GiB"):
        _memory_plan.parse_size(text)
    line = run_cli(
        "run", write(tmp_path / "tiny.toml"), "--out", tmp_path / "run", f"--memory={text}"
    ).one_line()
    assert "needs a size such as 24GiB" in line
    assert not (tmp_path / "run").exists()


def test_the_help_explains_sizes():
    help_text = " ".join(run_cli("run", "--help").out.replace("│", " ").split())
    assert "24GiB (1024^3 bytes each)" in help_text


def test_a_refused_run_writes_nothing_and_its_folder_can_be_used(tmp_path):
    path, out = write(tmp_path / "tiny.toml"), tmp_path / "run"
    line = run_cli(
        "run", path, "--set", "rounds=4", "--out", out, "--memory", "1MiB", "--workers", 1
    ).one_line()
    assert "need" in line
    assert not out.exists()
    with pytest.raises(RunError, match=r"agents need .* of 1\.0 MiB of memory"):
        fedcb2o.run(path, out=out, memory="1MiB")
    assert not out.exists()
    assert run_cli("run", path, "--set", "agents.budget=2", "--out", out).status == 0


def test_a_finished_run_needs_no_memory(tmp_path):
    done = fedcb2o.run(tiny(), out=tmp_path)
    again = fedcb2o.run(tiny(), out=tmp_path, memory="1MiB", resume=True)
    assert again.records.equals(done.records)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("algorithm", [{}, {"name": "by_rule", "rule": "trimmed_mean"}])
def test_models_on_disk_have_the_same_bits(tmp_path, monkeypatch, workers, algorithm):
    changes = {
        "model": {"hidden": [300]},
        "rounds": 2,
        **({"algorithm": algorithm} if algorithm else {}),
    }
    fedcb2o.run(tiny(**changes), out=tmp_path / "memory", workers=workers)
    make_plan = functools.partial(_memory_plan.MemoryPlan, workers, 0, 0, columns_per_mix=4100)
    monkeypatch.setattr(
        sys.modules["fedcb2o.experiments.runs._local_backend"],
        "plan_memory",
        lambda *arguments: make_plan(folder=arguments[-1]),
    )
    folders, allocate = [], _shared_memory.allocate_shared
    monkeypatch.setattr(
        _shared_memory,
        "allocate_shared",
        lambda specs, folder: folders.append(folder) or allocate(specs, folder),
    )
    fedcb2o.run(tiny(**changes), out=tmp_path / "disk", workers=workers)
    assert folders == [tmp_path / "disk/seed-1000"]
    assert not list(tmp_path.rglob("*.tensors"))
    assert bits(tmp_path / "disk") == bits(tmp_path / "memory")
