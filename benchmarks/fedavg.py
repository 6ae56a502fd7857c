"""The same FedAvg work in this library, in a plain PyTorch loop, in Flower and in pfl: the sides of simulators.py.

Each side runs in a process of its own and calls `turn(n)` before it begins round n, and once after the last. All hold
the same samples, begin with the same model and take the same batches in the same order, so that they must end with the
same model, to rounding. The plain loop and Flower's app share `train`, written as a PyTorch user would, without the
cost of a `DataLoader`.
"""

import contextlib
import functools
import itertools
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn, optim
from torch.nn import functional as F

import fedcb2o
from fedcb2o.data.shard import Dataset, Shard
from fedcb2o.federated.local_update import Training, batches
from fedcb2o.streams import stream

Turn = Callable[[int], None]
NUM_CLASSES = 10
LR, MOMENTUM, BATCH = 0.01, 0.9, 64


class Net(nn.Module):
    """Two 5x5 convolutions and two dense layers, d = 107,998, in the order in which everybody writes them."""

    def __init__(self, num_classes: int = NUM_CLASSES) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2)
        self.fc1 = nn.Linear(32 * 7 * 7, 60)
        self.fc2 = nn.Linear(60, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, num_classes] of images [n, 1, 28, 28]."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def multiplications() -> tuple[float, float]:
    """Multiply-add pairs that one image costs: forward, and in the backward pass (the images need no gradient)."""
    first = 28 * 28 * 16 * 25
    rest = 14 * 14 * 32 * 25 * 16 + 32 * 7 * 7 * 60 + 60 * NUM_CLASSES
    return first + rest, first + 2 * rest


def net(input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """The network as the library's configurations take it: a user's own model."""
    return Net(num_classes)


def images(*, count: int) -> Dataset:
    """Random images and labels of MNIST's shapes, and a few to test on."""
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.integers(0, 256, (count, 1, 28, 28), dtype=np.uint8))
    shard = Shard(x, torch.from_numpy(draw.integers(0, NUM_CLASSES, count)))
    test = Shard(x[:NUM_CLASSES], torch.arange(NUM_CLASSES))
    return Dataset(pool=shard, test=test, class_names=tuple(map(str, range(NUM_CLASSES))))


@dataclass(frozen=True)
class Work:
    """What there is to do; the shards and the initial model lie in `folder`."""

    agents: int
    samples: int
    rounds: int
    cores: int
    folder: Path

    @property
    def shards(self) -> list[tuple[Tensor, Tensor]]:
        """Each agent's images, as numbers in [0, 1], and labels."""
        return _shards(self.folder)

    def state(self) -> dict[str, Tensor]:
        """The initial model."""
        return dict(torch.load(self.folder / "model.pt"))

    def order(self, n: int, j: int) -> list[Tensor]:
        """The batches of agent j in round n: those that the library draws."""
        training = Training(
            gamma=LR, lambda2=1.0, momentum=MOMENTUM, batch_size=BATCH, local_epochs=1, local_steps=None
        )
        drawn = batches(len(self.shards[j][1]), training, stream(0, "batches", n, j))
        return [torch.from_numpy(batch) for batch in drawn]

    def finish(self, theta: Tensor) -> None:
        """Leave the final model for the comparison."""
        torch.save(theta.detach().clone(), self.folder / f"{os.getpid()}.pt")


@functools.cache
def _shards(folder: Path) -> list[tuple[Tensor, Tensor]]:
    return [(x.float() / 255, y) for x, y in torch.load(folder / "shards.pt")]


def configuration(work: Work, precision: str) -> dict[str, Any]:
    """FedAvg as this library says it: everybody asks everybody and averages by numbers of samples."""
    never = work.rounds + 1
    return {
        "name": "fedavg",
        "seeds": [0],
        "rounds": work.rounds,
        "evaluate_every": never,
        "checkpoint_every": never,
        "data": {"name": images, "count": work.agents * work.samples},
        "agents": {
            **{"num_clusters": 1, "benign": work.agents, "malicious": 0, "malicious_role": "benign"},
            **{"benign_samples": work.samples, "malicious_samples": 1, "hold_out": False},
            "budget": work.agents - 1,
        },
        "model": {"name": net},
        "training": {
            **{"gamma": LR, "lambda2": 1.0, "momentum": MOMENTUM, "batch_size": BATCH, "local_epochs": 1},
            "precision": precision,
        },
        "algorithm": {"name": "dfedavgm", "selection": "everyone"},
    }


def library(work: Work, turn: Turn, *, precision: str) -> None:
    """This library by its public way, a process a core."""
    with tempfile.TemporaryDirectory() as folder:
        turn(0)
        # The watch is told of a round when all of it is done; the last also evaluates and saves, and is not timed.
        run = fedcb2o.run(
            configuration(work, precision),
            out=Path(folder) / "run",
            workers=work.cores,
            watch=lambda experiment, seed, line: turn(int(line["round"])),
        )
        models = load_file(run.folder / "seed-0" / "checkpoint.safetensors")["models"]
        work.finish(models[0, : sum(p.numel() for p in Net().parameters())])


def train(net: nn.Module, x: Tensor, y: Tensor, order: Sequence[Tensor]) -> float:
    """An epoch of SGD with momentum; the mean of the mini-batch losses."""
    optimiser = optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
    net.train()
    total = torch.zeros(())
    for batch in order:
        optimiser.zero_grad()
        loss = F.cross_entropy(net(x[batch]), y[batch])
        loss.backward()
        optimiser.step()
        total += loss.detach()
    return float(total) / len(order)


def share(work: Work, state: Mapping[str, Tensor], n: int, agents: Sequence[int]) -> dict[str, Tensor]:
    """The sum of some agents' trained models, each times its number of samples."""
    net, total = Net(), {key: torch.zeros_like(value) for key, value in state.items()}
    for j in agents:
        net.load_state_dict(state)
        train(net, *work.shards[j], work.order(n, j))
        for key, value in net.state_dict().items():
            total[key].add_(value, alpha=len(work.shards[j][1]))
    return total


def plain(work: Work, turn: Turn, *, processes: int, threads: int) -> None:
    """A loop over the agents; with several processes, each has its part of them and sends a sum back."""
    torch.set_num_threads(threads)
    state, everyone = work.state(), range(work.agents)
    count = sum(len(y) for _, y in work.shards)
    with contextlib.ExitStack() as stack:
        pool = None
        if processes > 1:
            pool = stack.enter_context(get_context("spawn").Pool(processes, _start, (work,)))
        for n in range(work.rounds):
            turn(n)
            if pool is None:
                sums = [share(work, state, n, everyone)]
            else:
                numpy = {key: value.numpy() for key, value in state.items()}
                tasks = [(numpy, n, list(everyone[p::processes])) for p in range(processes)]
                sums = [
                    {key: torch.from_numpy(value) for key, value in found.items()}
                    for found in pool.starmap(_share, tasks, chunksize=1)
                ]
            state = {key: torch.stack([part[key] for part in sums]).sum(0) / count for key in state}
        turn(work.rounds)
    work.finish(torch.cat([value.flatten() for value in state.values()]))


_here: list[Work] = []


def _start(work: Work) -> None:
    torch.set_num_threads(1)
    _here.append(work)


def _share(state: Mapping[str, np.ndarray], n: int, agents: Sequence[int]) -> dict[str, np.ndarray]:
    tensors = {key: torch.from_numpy(value) for key, value in state.items()}
    return {key: value.numpy() for key, value in share(_here[0], tensors, n, agents).items()}


def flower(work: Work, turn: Turn) -> None:
    """Flower's simulation engine on Ray: an actor a core, one thread each, no evaluation."""
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    client, server = ClientApp(), ServerApp()

    @client.train()
    def trained(message: Message, context: Context) -> Message:
        net, j, n = Net(), int(context.node_config["partition-id"]), int(message.content["config"]["server-round"]) - 1
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = work.shards[j]
        loss = train(net, x, y, work.order(n, j))
        content = {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"train_loss": loss, "num-examples": len(y)}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    @server.main()
    def served(grid: Grid, context: Context) -> None:
        def told(n: int, arrays: ArrayRecord) -> None:
            turn(n)  # 0 before the first round, then after each

        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=work.agents)
        found = strategy.start(
            grid=grid, initial_arrays=ArrayRecord(work.state()), num_rounds=work.rounds, evaluate_fn=told
        )
        arrays = found.arrays.to_torch_state_dict()
        work.finish(torch.cat([arrays[key].flatten() for key in work.state()]))

    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=work.agents,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": work.cores, "include_dashboard": False, "log_to_driver": False},
        },
    )


def pfl(work: Work, turn: Turn, *, processes: int, threads: int, rank: int = 0) -> None:
    """pfl's simulation on its PyTorch backend, without evaluation; with several processes, by `torch.distributed`."""
    workers: list[subprocess.Popen[bytes]] = []
    if processes > 1 and not rank:
        with contextlib.closing(socket.socket()) as free:
            free.bind(("localhost", 0))
            os.environ["PFL_WORKER_ADDRESSES"] = ",".join([f"localhost:{free.getsockname()[1]}"] * processes)
        command = [sys.executable, "-c", "import sys, fedavg; fedavg.join(*sys.argv[1:])"]
        for r in range(1, processes):
            environment = os.environ | {"PFL_WORKER_RANK": str(r), "PYTHONPATH": os.pathsep.join(sys.path)}
            arguments = [work.agents, work.samples, work.rounds, work.cores, work.folder, processes, threads, r]
            workers.append(subprocess.Popen([*command, *map(str, arguments)], env=environment))
        os.environ["PFL_WORKER_RANK"] = "0"
    torch.set_num_threads(threads)

    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset as UserDataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Module(Net):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.train()(x), y)

        @torch.no_grad()
        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            return {"loss": Weighted(F.cross_entropy(self(x), y, reduction="sum").item(), len(y))}

    class Turns(TrainingProcessCallback):
        round = 0

        def wait(self) -> None:
            turn(self.round)
            if processes > 1:
                torch.distributed.barrier()  # no process begins before its turn

        def on_train_begin(self, *, model: Any) -> Any:
            self.wait()
            return Metrics()

        def after_central_iteration(self, aggregate: Any, model: Any, *, central_iteration: int) -> Any:
            self.round = central_iteration + 1
            self.wait()
            return False, Metrics()

    turns = Turns()

    def held_by(j: int) -> UserDataset:
        x, y = work.shards[j]
        order = torch.cat(work.order(turns.round, j))
        return UserDataset(raw_data=(x[order], y[order]), user_id=j)

    module = Module()
    module.load_state_dict(work.state())
    data = FederatedDataset(held_by, functools.partial(next, itertools.cycle(range(work.agents))))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=work.rounds,
            evaluation_frequency=10 * work.rounds,  # round 0 evaluates, which is not timed
            train_cohort_size=work.agents,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]),
        PyTorchModel(
            module,
            functools.partial(optim.SGD, momentum=MOMENTUM),
            central_optimizer=optim.SGD(module.parameters(), lr=1.0),
        ),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH),
        NNEvalHyperParams(local_batch_size=BATCH),
        callbacks=[turns],
        send_metrics_to_platform=False,
    )
    if not rank:
        work.finish(torch.cat([p.flatten() for p in module.parameters()]))
    for worker in workers:
        worker.wait()


def join(*arguments: str) -> None:
    """Another process of pfl's, begun by its first."""
    agents, samples, rounds, cores = map(int, arguments[:4])
    processes, threads, rank = map(int, arguments[5:])
    work = Work(agents, samples, rounds, cores, Path(arguments[4]))
    pfl(work, lambda n: None, processes=processes, threads=threads, rank=rank)
