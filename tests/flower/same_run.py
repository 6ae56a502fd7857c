"""A Flower app of eight agents with the data, seeds and training of `fedcb2o run`."""

import functools
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedcb2o import Agent
from fedcb2o.data import Shard, digits
from fedcb2o.experiments.config import load
from fedcb2o.experiments.config.network import initial_model
from fedcb2o.experiments.config.prepared_seed import prepare_seed
from fedcb2o.federated.local_update import local_update_
from fedcb2o.flower import AgentMod, PeerRelay
from fedcb2o.nn import parameters
from fedcb2o.rng import stream

SEED = 1000
TABLE = {
    "name": "flower",
    "seeds": [SEED],
    "rounds": 10,
    "data": {"name": "digits"},
    "agents": {"num_clusters": 1, "benign": 8, "malicious": 0, "benign_samples": 60, "budget": 7},
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"gamma": 0.05, "batch_size": 8, "local_epochs": 2},
    "algorithm": {
        "name": "fedcb2o",
        "alpha": 1.0,
        "beta": 0.5,
        "own_model": "judged",
        "guards": {"interpolation": 0.5, "loss_tolerance": 2.0},
    },
}


@functools.cache
def prepared():
    return prepare_seed(load(TABLE), SEED, digits())


@functools.cache
def data_of(j):
    return prepared().build_agent_data([j], torch.device("cpu"))


@functools.cache
def start():
    return initial_model(load(TABLE), SEED, digits())


def network():
    module = prepared().spec.module
    parameters.load_state_(module, parameters.tensor_views(module, start()))
    return module


def make_agent(context):
    data = data_of(context.node_config["partition-id"])
    indices = data.validation[0]
    spec = prepared().spec
    return Agent(
        network(),
        validation=(data.samples.x[indices], data.samples.y[indices]),
        method=TABLE["algorithm"],
        seed=SEED,
        gamma=spec.training.gamma,
        rounds=spec.rounds,
        num_samples=len(data.train[0]),
    )


client = ClientApp(mods=[AgentMod(make_agent)])


@client.train()
def train(message, context):
    j = context.node_config["partition-id"]
    n = message.content["config"]["server-round"] - 1
    spec = prepared().spec
    spec.module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    theta = parameters.flatten(spec.module)
    x, y = data_of(j).training_data(np.array([0]), n)
    draw = stream(SEED, "batches", n, j)
    local_update_(theta, spec.module, Shard(x[0], y[0]), spec.training, draw)
    state = {name: tensor.clone() for name, tensor in spec.module.state_dict().items()}
    metrics = MetricRecord({"num-examples": len(x[0])})
    content = RecordDict({"arrays": ArrayRecord(state), "metrics": metrics})
    return Message(content, reply_to=message)


@client.evaluate()
def evaluate(message, context):
    """Return the model as metrics, for the test."""
    prepared().spec.module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    theta = parameters.flatten(prepared().spec.module).tolist()
    metrics = MetricRecord({"num-examples": 1, "theta": theta})
    content = RecordDict({"metrics": metrics})
    return Message(content, reply_to=message)


def models_of(records, key):
    """Collect the models of all clients in place of an average."""
    thetas = [next(iter(record.metric_records.values()))["theta"] for record in records]
    return MetricRecord({str(k): theta for k, theta in enumerate(thetas)})


server = ServerApp()


@server.main()
def main(grid, context):
    relay = PeerRelay(budget=7, evaluate_metrics_aggr_fn=models_of, min_available_nodes=8)
    arrays = ArrayRecord(network().state_dict())
    result = relay.start(grid, arrays, num_rounds=TABLE["rounds"])
    models = result.evaluate_metrics_clientapp[TABLE["rounds"]]
    path = Path(context.run_config["out"])
    torch.save(torch.tensor([models[str(k)] for k in range(8)], dtype=torch.float64), path)
