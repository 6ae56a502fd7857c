"""Runs on a cluster: the same files as on one machine, resumption, failures and bad input."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.language import TALK
from tests.tiny import ENVIRONMENT, run_cli, tiny

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.experiments import load, run
from fedcb2o.experiments.config.datasets import load_dataset
from fedcb2o.experiments.config.prepared_seed import prepare_seed
from fedcb2o.experiments.runs._cluster_backend import ClusterBackend
from fedcb2o.nn.parameters import row_stride
from fedcb2o.parallel import _resources

pytest.importorskip("ray")

import ray

from fedcb2o.ray_backend import _connect, _placement

FILES = ("metrics.jsonl", "pairs.jsonl", "summary.json", "checkpoint.safetensors", "agents.json")


def spread(rounds: int = 4, **changes: object) -> dict[str, object]:
    return tiny(rounds=rounds, agents={"benign": 3, "budget": 2}, **changes) | {
        "together": 1,
        "checkpoint_every": 1,
    }


def whole(folder: Path) -> dict[str, bytes]:
    return {name: (folder / "seed-1000" / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    run(spread(), out=folder, workers=1)
    return whole(folder)


@pytest.mark.parametrize("first", ["cluster", "one machine"])
def test_a_run_moves_between_one_machine_and_a_cluster(cluster, undisturbed, tmp_path, first):
    both_options = [{"cluster": cluster, "blocks": 3}, {"workers": 1}]
    for rounds, options in zip(
        (2, 4), both_options if first == "cluster" else both_options[::-1], strict=True
    ):
        run(spread(rounds), out=tmp_path / "run", resume=True, **options)
    assert whole(tmp_path / "run") == undisturbed


@pytest.mark.slow
def test_adapters_of_a_language_model_have_the_same_bits_as_on_one_machine(cluster, tmp_path):
    pytest.importorskip("peft")
    experiment = {**TALK, "together": 1, "checkpoint_every": 1}
    run(experiment, out=tmp_path / "one", workers=1)
    run(experiment, out=tmp_path / "blocks", cluster=cluster, blocks=3)
    assert whole(tmp_path / "blocks") == whole(tmp_path / "one")


def actors_now() -> list[int]:
    """List the processes of actors that this process or its children started."""
    parents, actors = dict[int, int](), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rpartition(")")[2].split()[1]
            )
            if (folder / "cmdline").read_bytes().startswith(b"ray::AgentWorker"):
                actors.append(int(folder.name))
        except OSError:
            pass

    def is_descendant(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and is_descendant(parents[pid]))

    return list(filter(is_descendant, actors))


def no_actor_is_left() -> bool:
    """Wait up to 10 seconds until no actor is left; return False otherwise."""
    for _ in range(100):
        if not actors_now():
            return True
        time.sleep(0.1)
    return False


def test_a_run_continues_after_an_actor_is_killed(
    cluster, undisturbed, tmp_path, capfd, caplog, monkeypatch
):
    monkeypatch.setattr(sys.modules["fedcb2o.experiments.runs._seed_run"], "RETRY_PAUSE", 0.5)
    # retries from one checkpoint
    monkeypatch.setattr(sys.modules["fedcb2o.experiments.runs._seed_run"], "MAX_RETRIES", 1)
    killed = []

    def kill(experiment, seed, line):
        if line["round"] in (1, 3) and line["round"] not in killed:
            killed.append(line["round"])
            os.kill(actors_now()[0], signal.SIGKILL)

    run(spread(), out=tmp_path / "run", cluster=cluster, blocks=3, watch=kill)
    assert killed == [1, 3]
    assert whole(tmp_path / "run") == undisturbed
    assert caplog.text.count("continues from the last checkpoint") == 2
    assert "raylet" not in capfd.readouterr().out
    assert no_actor_is_left()


def test_a_run_stops_after_the_maximum_of_retries(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["fedcb2o.experiments.runs._seed_run"], "MAX_RETRIES", 1)
    monkeypatch.setattr(sys.modules["fedcb2o.experiments.runs._seed_run"], "RETRY_PAUSE", 0.0)
    with pytest.raises(RunError, match="was retried 1 times, and stops: --resume continues it"):
        run(
            spread() | {"checkpoint_every": 4},
            out=tmp_path / "run",
            cluster=cluster,
            blocks=2,
            watch=lambda *_: os.kill(actors_now()[0], signal.SIGKILL),
        )
    assert no_actor_is_left()


def test_blocks_are_reduced_to_the_number_of_processors(cluster, tmp_path, capsys):
    run(spread(1), out=tmp_path / "run", cluster=cluster, blocks=7)
    message = "tiny seed 1000: 4 blocks on 1 node, not 7: there are 4 processors\n"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 2}, "`workers` are processes of one machine"),
        ({"memory": "257MiB"}, "needs .* for 3 blocks, and has 0.25 GiB"),
    ],
)
def test_invalid_options_are_refused(cluster, tmp_path, options, message):
    with pytest.raises((ConfigError, RunError), match=message):
        run(spread(), out=tmp_path / "run", cluster=cluster, blocks=3, **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("blocks", [None, 3])
def test_too_little_memory_is_refused_before_a_cluster_is_joined(tmp_path, forbid_cluster, blocks):
    forbid_cluster()
    message = r"each process needs 0.25 GiB or more, and `memory` is 1.0 MiB"
    with pytest.raises(RunError, match=message):
        run(spread(), out=tmp_path / "run", cluster="auto", blocks=blocks, memory="1MiB")


def node(name: str, processors: int, *, memory: int = 2**34, store: int = 2**33) -> _placement.Node:
    return _placement.Node(name, name, processors, memory, store)


def names(nodes: list[_placement.Node]) -> str:
    return "".join(n.name for n in nodes)


def test_nodes_get_blocks_in_proportion_to_their_processors():
    nodes = [node("a", 4), node("b", 2)]
    assert names(_placement.place_groups(6, nodes)) == "aabaab"
    assert names(_placement.place_groups(4, nodes)) == "aaba"


def place_agents(
    monkeypatch,
    nodes: list[_placement.Node],
    blocks: int | None = None,
    memory: int | None = None,
    **changes: object,
):
    """Place 4 agents with 30 samples each, 3 of them benign; return the placement and the seed."""
    agents = {
        "benign": 3,
        "malicious": 1,
        "benign_samples": 30,
        "malicious_samples": 30,
        "budget": 2,
        "num_clusters": 1,
    }
    experiment = load({**tiny(agents=agents), "together": 1, **changes})
    prepared = prepare_seed(experiment, 1000, load_dataset(experiment, None))
    monkeypatch.setattr(_placement, "list_nodes", lambda user_modules, device: nodes)
    return ClusterBackend("auto", blocks, memory).place(prepared, Path()), prepared


def test_agents_are_distributed_so_that_all_nodes_finish_together(monkeypatch):
    placement, _ = place_agents(monkeypatch, [node("a", 2), node("b", 2)], blocks=3)
    assert (names(placement.nodes), sorted(map(len, placement.shares))) == ("aba", [1, 1, 2])
    assert str(placement) == "3 blocks on 2 nodes"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "4 blocks on 2 nodes, not 9: there are 4 agents"),
        (
            {"together": 2},
            "3 blocks on 2 nodes, not 9: agents who train in one program stay together (--set",
        ),
    ],
)
def test_the_reason_for_fewer_blocks_is_reported(monkeypatch, changes, message):
    placement, _ = place_agents(monkeypatch, [node("a", 3), node("b", 5)], blocks=9, **changes)
    assert str(placement).startswith(message)


def test_the_required_memory_of_a_node_is_computed(monkeypatch):
    placement, prepared = place_agents(monkeypatch, [node("a", 1), node("b", 1)])
    row, data = 4 * row_stride(prepared.spec.dim), 1797 * (4 * 64 + 8)
    rows, stored = placement.required_bytes(prepared, placement.nodes[0])
    # two own models and two received ones
    assert rows == 2**28 + 12 * prepared.spec.dim + row * (2 + 2)
    # two own rows for each of two nodes, and two rows copied from others
    assert stored == data + row * (2 * 2 + 2)


@pytest.mark.parametrize(("selection", "inbox"), [("prob_sampling", 2), ("everyone", 3)])
def test_an_agent_that_asks_all_peers_receives_more_than_the_budget(monkeypatch, selection, inbox):
    algorithm = {"name": "fedcb2o", "alpha": 2.0, "selection": selection}
    placement, prepared = place_agents(
        monkeypatch, [node(name, 1) for name in "abcd"], algorithm=algorithm
    )
    row = 4 * row_stride(prepared.spec.dim)
    assert placement.required_bytes(prepared, placement.nodes[0])[
        0
    ] == 2**28 + 12 * prepared.spec.dim + row * (1 + inbox)


@pytest.mark.parametrize(
    ("nodes", "memory", "message"),
    [
        (
            [node("a", 1), node("b", 1, store=2**16)],
            None,
            r"node b needs 0.\d MiB of Ray's store for 1 block, and has 64.0 KiB: start it by "
            r"`ray start --object-store-memory \d+ \.\.\.`",
        ),
        (
            [node("a", 1), node("b", 1, memory=2**20)],
            None,
            "node b needs .* for 1 block, and has 1.0 MiB",
        ),
        ([node("a", 1)], 2**21, "node a needs .* for 1 block, and has 2.0 MiB"),
        ([], None, "no node of the cluster has processors"),
    ],
)
def test_a_node_with_too_little_memory_is_refused(monkeypatch, nodes, memory, message):
    with pytest.raises(RunError, match=message):
        place_agents(monkeypatch, nodes, memory=memory)


def test_blocks_on_gpus_need_a_node_with_gpus(cluster, monkeypatch):
    assert _placement.list_nodes(device="cuda") == []
    (ray_node,) = ray.nodes()
    monkeypatch.setattr(
        ray,
        "nodes",
        lambda: [ray_node, {**ray_node, "Resources": {**ray_node["Resources"], "GPU": 3.0}}],
    )
    (gpu_node,) = _placement.list_nodes(device="cuda")
    assert gpu_node.processors == 3
    message = "no node of the cluster has GPUs, which `device` = 'cuda' needs"
    with pytest.raises(RunError, match=message):
        place_agents(monkeypatch, [], device="cuda")


def test_an_algorithm_with_a_coordinator_refuses_a_cluster(cluster, tmp_path):
    with pytest.raises(ConfigError, match="run on one machine: no --cluster"):
        run(
            spread(algorithm={"name": "ifca", "models": 2}),
            out=tmp_path / "run",
            cluster=cluster,
            blocks=2,
        )


def test_blocks_need_a_cluster(tmp_path):
    with pytest.raises(ConfigError, match="`blocks` need a cluster"):
        run(spread(), out=tmp_path / "run", blocks=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("bench", "--cluster", "digits"),
            "'digits' is no address of a cluster. Addresses are local",
        ),
        (("run", "--cluster", "digits-fedassay"), "'digits-fedassay' is no address of a cluster"),
        (
            ("run", "digits-fedassay", "--cluster", "10.0.0.1"),
            "'10.0.0.1' is no address of a cluster",
        ),
        (
            ("run", "digits-fedassay", "--cluster", "head:70000"),
            "'head:70000' is no address of a cluster",
        ),
        (
            ("run", "digits-fedassay", "--cluster", "ray://head:10001"),
            "run this command on one of its machines",
        ),
    ],
)
def test_an_invalid_address_is_refused(arguments, message):
    assert message in run_cli(*arguments).one_line()


@pytest.fixture
def outside_cluster(monkeypatch):
    """Pretend that this process is not in a cluster."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)  # the cluster of the other tests stays


def test_a_missing_cluster_is_an_error(outside_cluster, monkeypatch):
    def init(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", init)
    with (
        pytest.raises(RunError, match="this machine is in no cluster: `ray start`"),
        _connect.connected("auto"),
    ):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_ray_starts_takes_effect_after_the_start(
    outside_cluster, monkeypatch, number
):
    events = []

    def init(**_: object) -> None:
        signal.raise_signal(number)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray sets its own handler
        events.append("started")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: events.append("ended"))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), _connect.connected("local"):
            events.append("entered")
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert events == ["started", "ended"]


@pytest.mark.parametrize("name", ["none.invalid", "first..example"])
def test_an_unknown_host_name_is_an_error(outside_cluster, name):
    message = rf"no cluster can be reached at '{name}:6379' \(.*\): check the name '{name}'"
    with pytest.raises(RunError, match=message), _connect.connected(f"{name}:6379"):
        pass


def test_a_server_other_than_ray_is_refused(outside_cluster):
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server, address = threading.Thread(target=answer), f"127.0.0.1:{listener.getsockname()[1]}"
        server.start()
        with (
            pytest.raises(
                RunError, match=rf"the program that listens at '{address}' is not a Ray cluster"
            ),
            _connect.connected(address),
        ):
            pass
        server.join()
    with (
        pytest.raises(RunError, match=rf"no cluster can be reached at '{address}' \(.*refused"),
        _connect.connected(address),
    ):
        pass


@pytest.mark.parametrize(
    "arguments", [("--cluster",), ("--cluster", "--blocks", "2"), ("--cluster", "local")]
)
def test_the_default_address_is_this_machine(tmp_path, monkeypatch, arguments):
    monkeypatch.setattr(
        sys.modules["fedcb2o.experiments.runs._runner"], "run_loaded", run_mock := Mock()
    )
    assert run_cli("run", "digits-fedassay", *arguments).status == 0
    assert run_mock.call_args.kwargs["cluster"] == "local"
    assert run_mock.call_args.kwargs["blocks"] == (2 if "--blocks" in arguments else None)


def test_a_finished_run_does_not_join_the_cluster(cluster, tmp_path, forbid_cluster):
    run(spread(1), out=tmp_path / "run", workers=1)
    forbid_cluster()
    run(spread(1), out=tmp_path / "run", cluster=cluster, blocks=2, resume=True)


def test_an_error_without_ray_names_the_package_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("fedcb2o.experiments.runs._cluster_backend.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fedcb2o\[cluster\]'"):
        run(spread(), out=tmp_path / "run", cluster="local")


USER_MODULE = """
import os, sys
import torch
import fedcb2o
from beside_own import gap, told  # what lies beside goes with it
{}

def digits():
    told(__file__, "data-")
    return fedcb2o.data.digits()

def mlp(shape, classes):
    torch.rand(1)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))


def criterion(judged):
    told(__file__)
    return gap(judged)
"""
NEIGHBOUR_MODULE = """
import os
from pathlib import Path

def told(file, kind=""):
    (Path({!r}) / (kind + str(os.getpid()))).write_text(file + " " + __file__)

def gap(judged):
    return (judged.losses.by_class - judged.own_losses.by_class).amax(-1)
"""


@pytest.fixture
def user_modules(tmp_path, monkeypatch):
    """Return a function that writes user modules and returns an experiment with them.

    The modules record their paths in a folder; `import_line` is an optional line of code.
    """
    (tmp_path / "told").mkdir()

    def write(import_line: str = "") -> dict[str, object]:
        (tmp_path / "parts").mkdir()
        (tmp_path / "parts" / "own_parts.py").write_text(USER_MODULE.format(import_line))
        (tmp_path / "parts" / "beside_own.py").write_text(
            NEIGHBOUR_MODULE.format(str(tmp_path / "told"))
        )
        algorithm = {"name": "fedcb2o", "alpha": 2.0, "criterion": "own_parts:criterion"}
        return spread(2, algorithm=algorithm) | {
            "model": {"name": "own_parts:mlp"},
            "data": {"name": "own_parts:digits"},
        }

    monkeypatch.syspath_prepend(tmp_path / "parts")
    yield write
    for name in ("own_parts", "beside_own"):
        sys.modules.pop(name, None)


def test_a_changed_user_module_is_imported_again(cluster, tmp_path, user_modules):
    experiment = user_modules()
    for name in ("run", "other"):
        run(experiment, out=tmp_path / name, cluster=cluster, blocks=2)
        path = tmp_path / "parts" / "beside_own.py"
        path.write_text(path.read_text().replace("amax(-1)", "mean(-1)"))
    assert whole(tmp_path / "run") != whole(tmp_path / "other")
    path.write_text(path.read_text().replace("mean(-1)", "amax(-1)"))
    run(experiment, out=tmp_path / "one", workers=1)
    assert whole(tmp_path / "run") == whole(tmp_path / "one")


STDIN = """
import beside
import fedcb2o

def mean_gap(judged):
    return (judged.losses.by_class - judged.own_losses.by_class).mean(-1)

experiment = {{**{!r}, "algorithm": {{"name": "fedcb2o", "alpha": 2.0, "criterion": mean_gap}}}}
for blocks in (None, 2):
    fedcb2o.run(experiment, out=f"blocks-{{blocks}}", cluster={!r}, blocks=blocks)
print("done")
"""


@pytest.mark.slow
def test_user_functions_from_standard_input_run_on_a_cluster(cluster, tmp_path):
    (tmp_path / "beside.py").touch()
    script = STDIN.format(spread(2), ray.get_runtime_context().gcs_address)
    done = subprocess.run(
        [sys.executable, "-"],
        input=script,
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout == "done\n", done.stderr
    assert whole(tmp_path / "blocks-2") == whole(tmp_path / "blocks-None")


def test_a_user_module_that_a_node_cannot_import_is_an_error(cluster, tmp_path, user_modules):
    experiment = user_modules('if "default_worker" in sys.argv[0]: import surely_not_there')
    with pytest.raises(RunError) as error:
        run(experiment, out=tmp_path / "run", cluster=cluster, blocks=2)
    assert re.fullmatch(
        r"node \S+ of the cluster cannot import your `own_parts` \(ModuleNotFoundError: No "
        r"module named "
        r"'surely_not_there'\): install it and what it needs on each node, or put it into a "
        r"folder that all nodes share",
        str(error.value),
    )
    assert not (tmp_path / "run").exists()


def test_other_versions_on_a_node_are_refused(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(_placement, "version", lambda name: "0.0")
    with pytest.raises(
        RunError,
        match=(
            r"node \S+ of the cluster has fedcb2o \S+ \(\w+\), here 0.0 \(\w+\), torch .* "
            r"must be the same"
        ),
    ):
        run(spread(), out=tmp_path / "run", cluster=cluster, blocks=2)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"blocks": 2}, {}])
def test_other_processors_are_reported_once(cluster, tmp_path, monkeypatch, caplog, options):
    monkeypatch.setattr(_resources, "processor_model", lambda: "Abacus")
    run(spread(1), out=tmp_path / "run", cluster=cluster, **options)
    note = r"1 node of the cluster with other processors .*here Abacus\): bits may differ"
    assert len(re.findall(note, caplog.text)) == 1


def test_nodes_that_do_not_answer_are_named(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(_placement, "ANSWER_SECONDS", 0.0)
    message = rf"did not answer within 0 seconds: {socket.gethostname()}; see `ray status`"
    with pytest.raises(RunError, match=message):
        run(spread(1), out=tmp_path / "run", cluster=cluster, blocks=2)


@pytest.mark.slow
def test_occupied_processors_are_an_error_after_a_timeout(cluster, tmp_path, monkeypatch):
    with _placement.start_workers(_placement.list_nodes() * 4):
        monkeypatch.setattr(_placement, "PLACEMENT_SECONDS", 1.0)
        message = "2 of 2 blocks found no free processor on the cluster in 1 seconds"
        with pytest.raises(RunError, match=message):
            run(spread(), out=tmp_path / "run", cluster=cluster, blocks=2)
