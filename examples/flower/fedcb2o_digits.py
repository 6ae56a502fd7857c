"""FedAssay in Flower: agents train on digits; two of five label every 9 as a 4."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from torch import nn

from fedcb2o import Agent
from fedcb2o.data import digits
from fedcb2o.flower import AgentMod, AttackMod, PeerRelay, output_metrics, training_data

FLIP = {"name": "label_flip", "source": 9, "target": 4}


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def samples(context):
    part = slice(context.node_config["partition-id"], None, context.node_config["num-partitions"])
    return digits().pool.x[part], digits().pool.y[part]


attack = AttackMod(FLIP, is_malicious=lambda context: context.node_config["partition-id"] % 5 > 2)
agent = AgentMod(lambda context: Agent(network(), validation=samples(context)))
client = ClientApp(mods=[attack, agent])
server = ServerApp()


@client.train()
def train(message, context):
    net = network()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = training_data(*samples(context))
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for batch in torch.randperm(len(x)).split(16):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
        optimiser.step()
    metrics = MetricRecord({"num-examples": len(x)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@client.evaluate()
def evaluate(message, context):
    net = network()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    test = digits().test
    outputs = net(test.x)
    values = {"num-examples": len(test), **output_metrics(outputs, test.y, ["auc"])}
    values["accuracy"] = (outputs.argmax(1) == test.y).float().mean().item()
    return Message(RecordDict({"metrics": MetricRecord(values)}), reply_to=message)


@server.main()
def main(grid, context):
    start = ArrayRecord(network().state_dict())
    PeerRelay(budget=context.run_config["budget"]).start(grid, start, context.run_config["rounds"])
