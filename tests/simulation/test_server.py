"""A server against plain loops: gradients, momenta, attackers, and a run that stops."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from tests import agents as ours
from tests.agents import BENIGN_IDS, MALICIOUS_IDS, network, run_rounds
from tests.tiny import tiny
from torch.nn import functional as F

from fedcb2o import aggregators
from fedcb2o.aggregators.server import ALGORITHM, server
from fedcb2o.errors import ConfigError
from fedcb2o.experiments import load, run
from fedcb2o.federated.adversary import Attack, Threat
from fedcb2o.federated.attacks import ipm, optimal_ipm
from fedcb2o.federated.run_spec import Training
from fedcb2o.nn import parameters
from fedcb2o.rng import stream

LR = 0.2
STEP = Training(gamma=LR, lambda2=1.0, momentum=0.0, batch_size=1000, local_steps=1)
KNOWS = Threat(frozenset({"benign"}))
NUM_AGENTS = len(ours.CLUSTER)


def reversed_mean(view, draw):
    return ipm(view, draw, eps=1.0)


def engine_of(algorithm, craft=reversed_mean):
    attack = Attack(craft=craft, threat=KNOWS)
    return ours.local_engine(algorithm, attack=attack, collude=False, training=STEP)


def gradient(engine, x, j):
    """Return the gradient of agent j on all of its samples, as autograd computes it."""
    module = network()
    parameters.bind_(module, x.clone())
    data = engine.group.data.clean_training_data(j)
    F.cross_entropy(module(data.x), data.y).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters()])


def test_server_equals_a_plain_loop():
    algorithm = server(
        aggregator="TrMean",
        pre_aggregators=[{"name": "Clipping", "c": 0.5}],
        f=4,
        momentum=0.9,
        dampening=0.9,
        weight_decay=0.01,
    )
    engine = engine_of(algorithm)
    x = engine.group.models[0].clone()
    rounds = run_rounds(engine, 3)

    m = dict.fromkeys(BENIGN_IDS, 0.0)
    for _ in range(3):
        for j in BENIGN_IDS:
            m[j] = 0.9 * m[j] + 0.1 * gradient(engine, x, j)
        sent = {j: m[j] for j in BENIGN_IDS}
        for j in MALICIOUS_IDS:
            own = [m[i] for i in BENIGN_IDS if ours.CLUSTER[i] == ours.CLUSTER[j]]
            sent[j] = -torch.stack(own).mean(0)
        clipped = [g * min(1.0, 0.5 / float(g.norm())) for g in sent.values()]
        # Nine values without the four lowest and the four highest.
        aggregate = torch.stack(clipped).sort(0).values[4]
        x = x - LR * (aggregate + 0.01 * x)
    for model in engine.group.models[:NUM_AGENTS]:
        torch.testing.assert_close(model, x, rtol=1e-4, atol=1e-5)
    assert [len(one.decisions.received.values) for one in rounds] == [0, 0, 0]


@pytest.mark.parametrize(("sent", "sign"), [("gradients", -1), ("updates", 1), ("models", 1)])
def test_the_aggregate_is_of_sent_vectors(sent, sign):
    whole = server(aggregator={"name": "GeometricMedian", "T": 1}, sent=sent).server
    x, last = torch.tensor([1.0, 1.0]), torch.zeros(2)
    models = torch.tensor([[1.5, 1.0], [3.0, 1.0]])
    model, aggregate = whole.step(models, x, last, 0.5, stream(0, "server", 0))
    # One step from 0: weights by 1 / norm.
    vectors = {
        "gradients": [[-1.0, 0.0], [-4.0, 0.0]],
        "updates": [[0.5, 0.0], [2.0, 0.0]],
        "models": [[1.5, 1.0], [3.0, 1.0]],
    }[sent]
    v = torch.tensor(vectors)
    weights = 1 / v.norm(dim=1)
    expected = (weights[:, None] * v).sum(0) / weights.sum()
    torch.testing.assert_close(aggregate, expected)
    scale = 0.5 if sent == "gradients" else 1.0
    torch.testing.assert_close(model, expected if sent == "models" else x + sign * scale * expected)


def test_centred_clipping_starts_at_the_last_aggregate():
    whole = server(aggregator={"name": "CenteredClipping", "tau": 1.0}).server
    last = torch.tensor([0.0, 3.0])
    gradients = torch.tensor([[0.0, 5.0], [0.0, 3.5]])
    models = -gradients
    _, aggregate = whole.step(models, torch.zeros(2), last, 1.0, stream(0, "server", 0))
    assert aggregate.tolist() == [0.0, 3.75]


def test_the_search_harms_the_servers_rule():
    algorithm = server(aggregator="TrMean", f=1)
    harms = []

    def craft(view, draw):
        best = optimal_ipm(view, draw, rule="server", evaluations=6, step=1.0)
        models = view.benign()
        crafted = best.expand(view.num_colluders, -1)
        mean = models.mean(0)
        direction = view.previous - mean
        tried = [view.previous + t * direction for t in (0.0, 1.0, 3.0)]
        found = view.server(torch.cat([models, crafted]))
        others = [view.server(torch.cat([models, o.expand(2, -1)])) for o in tried]
        harms.append([float((one - mean).norm()) for one in (found, *others)])
        return best

    run_rounds(engine_of(algorithm, craft))
    assert harms
    assert all(found >= max(others) - 1e-6 for found, *others in harms)


def test_a_search_without_a_server_is_an_error():
    from fedcb2o.federated import algorithms

    engine = engine_of(
        algorithms.dfedavgm(), lambda view, draw: optimal_ipm(view, draw, rule="server")
    )
    with pytest.raises(ConfigError, match="for an algorithm with a server"):
        run_rounds(engine)


EXPERIMENT = {
    "rounds": 4,
    "agents": {"num_clusters": 1, "hold_out": False},
    "training": {"gamma": 0.3, "local_steps": 1, "momentum": 0.0},
    "algorithm": {
        "name": ALGORITHM,
        "aggregator": {"name": "MultiKrum", "definition": "byzfl"},
        "pre_aggregators": ["NNM", {"name": "Bucketing", "s": 1}],
        "f": 1,
        "momentum": 0.5,
    },
}


def settings(**changes):
    table = copy.deepcopy(tiny())
    table["agents"] |= {"benign": 3, "malicious": 1}
    for key, value in {**EXPERIMENT, **changes}.items():
        table[key] = {**table[key], **value} if key in ("agents", "training") else value
    return table


def test_a_run_goes_on_where_it_stopped(tmp_path):
    run(settings(), out=tmp_path / "whole")
    run(settings(rounds=2), out=tmp_path / "parts")
    run(settings(), out=tmp_path / "parts", resume=True)
    paths = [tmp_path / name / "seed-1000" for name in ("whole", "parts")]
    one, other = (load_file(path / "checkpoint.safetensors")["models"] for path in paths)
    assert one.equal(other)
    # Four agents, the server's model and its last aggregate, and four momenta.
    assert len(one) == 4 + 2 + 4
    assert one[:4].equal(one[4].expand(4, -1))
    metrics = [(path / "metrics.jsonl").read_text() for path in paths]
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aggregator": "TrMeann"}, "there is no aggregator `TrMeann`. Did you mean `TrMean`?"),
        ({"aggregator": "FLTrust"}, "the aggregator `FLTrust` reads more"),
        ({"aggregator": {"name": "TrMean", "nu": 1}}, "`TrMean` has no parameter `nu` here"),
        ({"momentum": 1.0}, "`momentum` must be from 0 and below 1"),
    ],
)
def test_errors_name_the_part(changes, message):
    table = settings(algorithm={**EXPERIMENT["algorithm"], **changes})
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        load(table)


def test_clusters_of_machines_and_peers_refuse_a_server():
    from fedcb2o.peer.membership._agreed_experiment import check_supported

    with pytest.raises(ConfigError, match="has a coordinator"):
        check_supported(load(settings()))


def test_all_aggregators_by_models_alone_are_known():
    from fedcb2o.aggregators.server import _NAMES

    assert {"Average", "NNM", "Krum"} < set(_NAMES) < set(aggregators.__all__)
