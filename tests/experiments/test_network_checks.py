"""Checks of networks: an output must depend only on the parameters and one sample."""

import contextlib
import functools
import math
import random

import numpy as np
import pytest
import torch
from tests.networks import Tied
from tests.tiny import bits_for_any_workers, tiny
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, weight_norm

from fedcb2o.data import Shard
from fedcb2o.errors import ConfigError
from fedcb2o.experiments import run
from fedcb2o.federated import losses
from fedcb2o.federated.part_checks import check_model
from fedcb2o.nn import architectures, batch_norm, parameters
from fedcb2o.nn.network_checks import (
    accepts_single_sample,
    bounded_outputs,
    check_construction,
    check_network,
    is_sample_independent,
    perturbed_constants,
)
from fedcb2o.nn.random_evaluation import seed_evaluation_, seed_if_random_
from fedcb2o.rng import stream

X = torch.from_numpy(stream(0, "x").normal(size=(2, 12))).float()
IMAGES = torch.from_numpy(stream(1, "x").random((2, 3, 8, 8))).float()


class Net(nn.Module):
    """A dense layer between two optional functions (module, x)."""

    def __init__(self, before=None, after=None, **attributes):
        super().__init__()
        self.layer = nn.Linear(12, 4)
        self.before = before
        self.after = after
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        if self.before is not None:
            x = self.before(self, x)
        x = self.layer(x)
        return x if self.after is None else self.after(self, x)


class Tokens(nn.Module):
    """A network for three tokens of four numbers each; `make(width)` returns its middle layer."""

    def __init__(self, make):
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.layer = make(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        h = self.embed(x.view(-1, 3, 4))
        inputs = (h,) * (3 if isinstance(self.layer, nn.MultiheadAttention) else 1)
        h = self.layer(*inputs)
        return self.head((h[0] if isinstance(h, tuple) else h).mean(1))


class Embedded(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.embed = nn.Embedding(10, 8, sparse=sparse)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.embed(x.abs().long().clamp(max=9)).mean(1))


class Counter(nn.Module):
    """A layer with a count of its training steps, which `use` may read."""

    def __init__(self, use, steps=0):
        super().__init__()
        self.use = use
        self.steps = steps

    def forward(self, x):
        if self.training:
            self.steps = self.steps + 1
        return self.use(x, self.steps)


def check(make, x=X, buffers="local", random_evaluation=False):
    """Build a network twice, as `build_module` does, and check it."""

    def build():
        module = make()
        batch_norm.set_statistics_mode(module, buffers)
        if random_evaluation:
            seed_evaluation_(module, stream(0, "evaluation"))
        return module

    module, twin = (parameters.initialise(build, stream(0, "model")) for _ in range(2))
    check_construction("own", module, twin)
    before = parameters.flatten(module)
    with perturbed_constants(module, twin):
        check_network("own", module, twin, x, random_evaluation=random_evaluation)
    assert parameters.flatten(module).equal(before)
    assert not module.training


def zeroed():
    network = architectures.mlp([12], 4, hidden=[8])
    for p in network.parameters():
        nn.init.zeros_(p)
    return network


def dead():
    network = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))
    nn.init.constant_(network[0].bias, -100.0)
    return network


def deep():
    return nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(60)))


def norms(kind):
    return nn.Sequential(nn.Conv2d(3, 4, 3), kind, nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))


def keep(self, x):
    self.seen = x
    self.shapes = (*self.shapes[-3:], tuple(x.shape))
    self.calls = self.calls + 1
    return x


def routed(self, x):
    return x * F.one_hot(x.argmax(1), 12)


def copies(share=False):
    """Return a network with the initial parameters of `PRETRAINED`."""
    network = nn.Linear(12, 4)
    if share:
        network.weight.data = PRETRAINED.weight.data
        network.bias.data = PRETRAINED.bias.data
    else:
        network.load_state_dict(PRETRAINED.state_dict())
    return network


PRETRAINED = nn.Linear(12, 4)
nn.init.zeros_(PRETRAINED.bias)
BACKBONE = nn.Linear(12, 12).requires_grad_(False)

GOOD = {
    "zeros": zeroed,
    "dead": dead,
    "deep": deep,
    "tied": lambda: nn.Sequential(nn.ZeroPad1d(2), Tied()),
    "constant": lambda: Net(after=lambda self, x: x * 0),
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(12, 4), nn.AlphaDropout(0.2)),
    "functional dropout": lambda: Net(lambda self, x: F.dropout(x, 0.5, self.training)),
    "softmax": lambda: Net(after=lambda self, x: x.softmax(1)),
    "keeps what it saw": lambda: Net(keep, seen=None, shapes=(), calls=0),
    "routed": lambda: Net(routed),
    "fourier": lambda: Net(lambda self, x: torch.fft.fft(x).abs()),
    "huge": lambda: Net(lambda self, x: x * 1e9, lambda self, x: torch.sin(x)),
    "masked": lambda: Net(after=lambda self, x: x.masked_fill(torch.eye(4).bool()[0], -torch.inf)),
    "lstm": lambda: Tokens(lambda width: nn.LSTM(width, 16, batch_first=True)),
    "gru": lambda: Tokens(lambda width: nn.GRU(width, 8, bidirectional=True, batch_first=True)),
    "attention": lambda: Tokens(lambda width: nn.MultiheadAttention(width, 2, batch_first=True)),
    "transformer": lambda: Tokens(
        lambda width: nn.TransformerEncoderLayer(width, 2, 32, batch_first=True)
    ),
    "embedding": Embedded,
    "sparse embedding": lambda: Embedded(sparse=True),
    "weight norm": lambda: Net(layer=weight_norm(nn.Linear(12, 4))),
    "parametrised": lambda: Net(layer=parametrizations.orthogonal(nn.Linear(12, 4))),
    "frozen backbone of all": lambda: nn.Sequential(BACKBONE, nn.Linear(12, 4)),
    "hidden, but frozen": lambda: Net(teachers=[BACKBONE]),
    "copies of values": copies,
    "views of values": lambda: copies(share=True),
}
GOOD_ON_IMAGES = {
    "cnn": lambda: architectures.cnn([3, 8, 8], 4, hidden=8),
    "resnet": lambda: architectures.resnet([3, 8, 8], 4, width=8),
    "batch norm": lambda: norms(nn.BatchNorm2d(4)),
    "instance norm": lambda: norms(nn.InstanceNorm2d(4, track_running_stats=True)),
    "group norm": lambda: norms(nn.GroupNorm(2, 4)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("name", GOOD)
def test_valid_networks_pass(name):
    check(GOOD[name])


@pytest.mark.parametrize("buffers", ["local", "shared", "dropped"])
@pytest.mark.parametrize("name", GOOD_ON_IMAGES)
def test_valid_networks_on_images_pass(name, buffers):
    check(GOOD_ON_IMAGES[name], IMAGES, buffers)


def by_data(transpose=False):
    first, second = nn.Linear(12, 12), nn.Linear(12, 12)
    second.weight.data = first.weight.data.t() if transpose else first.weight.data
    return nn.Sequential(first, second)


def stale():
    """Return a network that computes a product of weights only once."""

    def before(self, x):
        if self.product is None:
            self.product = (self.scale * self.scale).detach()
        return x * self.product

    return Net(before, product=None, scale=nn.Parameter(torch.randn(12)))


def hidden_state():
    def before(self, x):
        self.memory = 0.5 * self.memory + x.detach().mean()
        return x + self.memory

    return Net(before, memory=torch.zeros(()))


def running_mean():
    def before(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean

    return Net(before, mean=torch.zeros(12))


def initialised_by_data():
    def before(self, x):
        if self.training and not self.ready:
            self.scale.data.copy_(x.std(0))
            self.ready = True
        return x * self.scale

    return Net(before, ready=False, scale=nn.Parameter(torch.ones(12)))


def buffered(training_only):
    def before(self, x):
        if self.training or not training_only:
            self.count += 1
        return x

    network = Net(before)
    network.register_buffer("count", torch.zeros(1))
    return network


def always_training(layer):
    layer.train = lambda mode=True: layer
    return layer


def listed(self, x):
    self.steps[0] += self.training
    return x * (0.1 if self.steps[0] > 500 else 1.0)


class Default(nn.Linear):
    """A counter whose initial value is a class attribute."""

    steps = 0

    def __init__(self):
        super().__init__(12, 4)

    def forward(self, x):
        self.steps += self.training
        return super().forward(x) * (0.1 if self.steps > 500 else 1.0)


def expanded():
    return Net(scale=nn.Parameter(torch.ones(1).expand(12)))


GENERATOR = torch.Generator()
SHARED = nn.Linear(12, 4)

BAD = {
    # random numbers in evaluation
    "functional dropout": (
        lambda: Net(lambda self, x: F.dropout(x, 0.5)),
        r"random numbers in evaluation, first in the forward pass of Net.*random_evaluation",
    ),
    "noise": (
        lambda: Net(after=lambda self, x: x + 1e-2 * torch.randn_like(x)),
        "draws random numbers in evaluation",
    ),
    "always dropping": (
        lambda: nn.Sequential(nn.Linear(12, 4), always_training(nn.Dropout(0.5))),
        r"first in its layer `1` \(Dropout\)",
    ),
    "dropout in a list": (
        lambda: Net(lambda self, x: self.drops[0](x), drops=[nn.Dropout(0.5)]),
        "draws random numbers in evaluation",
    ),
    "numpy": (
        lambda: Net(lambda self, x: x * np.random.rand()),  # noqa: NPY002 (of a user's network)
        "returns other outputs for the same samples in its next evaluation",
    ),
    "generator": (
        lambda: Net(lambda self, x: x + torch.randn(12, generator=GENERATOR)),
        "next evaluation, first in the forward pass of Net",
    ),
    "numpy in training": (
        lambda: Net(lambda self, x: x * random.random() if self.training else x),
        "keeps state in something that it keeps, .* draw random numbers by PyTorch alone",
    ),
    # outputs that depend on other samples
    "batch statistics": (
        lambda: Net(lambda self, x: (x - x.mean(0)) / (x.std(0) + 1e-5)),
        "mixes samples, first in the forward pass of Net: .* batch_first=True",
    ),
    "softmax": (
        lambda: nn.Sequential(nn.Linear(12, 4), nn.Softmax(dim=0)),
        r"mixes samples, first in its layer `1` \(Softmax\)",
    ),
    "softmax of zeros": (
        lambda: nn.Sequential(zeroed(), nn.Softmax(dim=0)),
        r"mixes samples, first in its layer `1` \(Softmax\)",
    ),
    "positions of samples": (
        lambda: Net(lambda self, x: x + torch.arange(len(x)).unsqueeze(1)),
        "mixes samples",
    ),
    "lstm": (
        lambda: Tokens(lambda width: nn.LSTM(width, 16)),
        r"first in its layer `layer` \(LSTM",
    ),
    "transformer": (
        lambda: Tokens(lambda width: nn.TransformerEncoderLayer(width, 2, 32)),
        r"first in its layer `layer.self_attn` \(MultiheadAttention\)",
    ),
    "squeezed": (
        lambda: Net(after=lambda self, x: x.squeeze()),
        r"returned shape \(4,\) for one sample, expected \(1, 4\)",
    ),
    # state
    "hidden state": (hidden_state, "other outputs for the same samples in its next evaluation"),
    "running mean": (running_mean, "keeps state in its attribute `mean`"),
    "stale product": (stale, "keeps state in something that it keeps"),
    "annealed": (
        lambda: nn.Sequential(nn.Linear(12, 4), Counter(lambda x, n: x * min(1.0, 0.02 * n))),
        "keeps state in its attribute `1.steps`",
    ),
    "annealed late": (
        lambda: nn.Sequential(nn.Linear(12, 4), Counter(lambda x, n: x * (0.1 if n > 500 else 1))),
        "keeps state in its attribute `1.steps`",
    ),
    "annealed by a tensor": (
        lambda: nn.Sequential(
            nn.Linear(12, 4),
            Counter(lambda x, n: torch.where(n > 500, 0.1, 1.0) * x, torch.tensor(0)),
        ),
        "keeps state in its attribute `1.steps`",
    ),
    "annealed by a list": (
        lambda: Net(listed, steps=[0, 7]),
        r"keeps state in its attribute `steps\[0\]`",
    ),
    "annealed by a class": (Default, "keeps state in its attribute `steps`"),
    "norm in training mode": (
        lambda: nn.Sequential(always_training(nn.BatchNorm1d(12)), nn.Linear(12, 4)),
        r"in evaluation, here into `0\.running_mean`",
    ),
    "statistics of a batch": (
        lambda: Net(lambda self, x: F.batch_norm(x, None, None, training=True)),
        r"cannot evaluate a single sample \(Expected more than 1 value",
    ),
    "initialised by data": (initialised_by_data, "writes into its parameter `scale`"),
    "buffer in training": (
        lambda: buffered(True),
        "changes its buffer `count` in training, which is neither a parameter",
    ),
    "buffer in evaluation": (lambda: buffered(False), "writes into the samples that it reads, or"),
    # parameters
    "one instance": (lambda: SHARED, "returned the same `weight` in two calls"),
    "one layer": (
        lambda: nn.Sequential(nn.Linear(12, 12), SHARED),
        "returned the same `1.weight` in two calls",
    ),
    "tied by data": (by_data, "`0.weight` and `1.weight` in the same memory"),
    "tied by a transpose": (lambda: by_data(True), "`0.weight` and `1.weight` in the same memory"),
    "expanded": (expanded, "has the parameter `scale`, whose numbers share memory"),
    "layers in a list": (
        lambda: Net(lambda self, x: self.layers[0](x), layers=[nn.Linear(12, 12)]),
        "has a Linear in its attribute `layers` that PyTorch does not see",
    ),
    "a tensor to train": (
        lambda: Net(lambda self, x: x * self.w, w=torch.ones(12, requires_grad=True)),
        "has a Tensor in its attribute `w` that PyTorch does not see",
    ),
    "drawn by numpy": (
        lambda: Net(scale=nn.Parameter(torch.rand(12) + np.random.rand())),  # noqa: NPY002
        "has other initial values of `scale` in a second call",
    ),
    # outputs
    "detached": (
        lambda: Net(after=lambda self, x: x.detach()),
        r"outputs without a gradient in training, .* take out `detach\(\)`",
    ),
    "not a number": (lambda: Net(lambda self, x: x.log()), "returns NaN for samples"),
}


@pytest.mark.parametrize("name", BAD)
def test_networks_that_depend_on_other_samples_or_state_are_reported(name):
    make, message = BAD[name]
    expected = pytest.raises(ConfigError, match=message)
    if "mixes samples" in message or "first in its layer `layer" in message:
        expected = pytest.warns(UserWarning, match=message)
    elif "random numbers in eval" in message or "Dropout" in message:
        modules = [make(), make()]
        with pytest.warns(UserWarning, match=message):
            assert seed_if_random_("own", modules, X, seed=3)
        assert modules[0].eval()(X).equal(modules[0](X))
        return
    with expected:
        check(make)


def test_random_evaluation_is_repeatable():
    """Outputs equal plain dropout after one seed; the generator of PyTorch does not change."""
    check(lambda: Net(lambda self, x: F.dropout(x, 0.5)), random_evaluation=True)
    network = Net(lambda self, x: F.dropout(x, 0.5)).eval()
    torch.manual_seed(int(stream(3, "evaluation").integers(2**63)))
    expected = network(X)
    seed_evaluation_(network, stream(3, "evaluation"))
    torch.manual_seed(5)
    assert network(X).equal(expected)
    assert network(X).equal(expected)
    drawn = torch.rand(2)
    torch.manual_seed(5)
    assert torch.rand(2).equal(drawn)
    assert not network.train()(X).equal(expected)


def dropping(input_shape, num_classes):
    return nn.Sequential(
        nn.Flatten(), Net(lambda self, x: F.dropout(x, 0.2), layer=nn.Linear(64, 10))
    )


@pytest.mark.slow
def test_random_evaluation_gives_the_same_bits_in_one_and_two_processes(tmp_path):
    experiment = tiny(model={"name": dropping, "random_evaluation": True}, rounds=2)
    bits_for_any_workers(tmp_path, experiment)
    with pytest.warns(UserWarning, match=r"the model `.*dropping` draws random numbers"):
        warned = run(tiny(model={"name": dropping}, rounds=2), out=tmp_path / "warned")
    configured = run(experiment, out=tmp_path / "meant")
    assert warned.records.accuracy.equals(configured.records.accuracy)


def test_sample_independence_in_training_is_detected():
    normed, drawing = norms(nn.BatchNorm2d(4)), nn.Sequential(nn.Dropout(0.5), nn.Linear(12, 4))
    plain = architectures.cnn([3, 8, 8], 4, hidden=8)
    centred = Net(lambda self, x: x - x.mean(0))
    tracking = norms(nn.InstanceNorm2d(4, track_running_stats=True))
    nn.init.zeros_(normed[-1].weight)  # the norm does not change the outputs
    assert is_sample_independent(plain, IMAGES)
    assert not any(is_sample_independent(network, IMAGES) for network in (normed, tracking))
    assert not any(is_sample_independent(network, X) for network in (drawing, centred))


def test_norms_that_refuse_a_single_sample_are_detected():
    network = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4))
    assert not accepts_single_sample(network, X[:1])
    assert network[1].num_batches_tracked == 0
    assert accepts_single_sample(norms(nn.BatchNorm2d(4)), IMAGES[:1])
    assert accepts_single_sample(nn.Linear(12, 4), X[:1])
    batch_norm.set_statistics_mode(network, "dropped")
    assert accepts_single_sample(network, X[:1])


BOUNDED = {
    "softmax": (lambda: nn.Sequential(nn.Linear(12, 4), nn.Softmax(1)), "softmax"),
    "functional softmax": (GOOD["softmax"], "softmax"),
    "deep softmax": (lambda: nn.Sequential(deep(), nn.Softmax(1)), "softmax"),
    "softmax of zeros": (lambda: nn.Sequential(zeroed(), nn.Softmax(1)), "softmax"),
    "sigmoid": (lambda: nn.Sequential(nn.Linear(12, 4), nn.Sigmoid()), "sigmoid"),
    "linear": (lambda: nn.Linear(12, 4), ""),
    "log softmax": (lambda: nn.Sequential(nn.Linear(12, 4), nn.LogSoftmax(1)), ""),
    "ReLU": (lambda: nn.Sequential(nn.Linear(12, 4), nn.ReLU()), ""),
    "small ReLU": (lambda: Net(after=lambda self, x: x.relu() / 20), ""),
    "shifted": (lambda: Net(after=lambda self, x: x / 10 + 0.5), ""),
    "constant": (GOOD["constant"], ""),
    "temperature": (lambda: Net(after=lambda self, x: 3 * x.softmax(1)), ""),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_outputs_that_are_probabilities_for_any_weights_are_found(name):
    make, kind = BOUNDED[name]
    network = parameters.initialise(make, stream(0, "model"))
    with perturbed_constants(network):
        assert bounded_outputs(network, torch.randn(8, 12)) == kind


def own_cross_entropy(outputs, targets):
    return F.cross_entropy(outputs, targets, weight=torch.arange(1.0, 5.0), reduction="none")


def log_likelihood(outputs, targets):
    return F.nll_loss(outputs.clamp(min=1e-9).log(), targets, reduction="none")


def margin(outputs, targets):
    return F.multi_margin_loss(outputs, targets, reduction="none")


SMOOTH = functools.partial(losses.cross_entropy, label_smoothing=0.1)


@pytest.mark.parametrize(
    ("end", "loss", "message"),
    [
        (nn.Softmax, None, r"probabilities, of which the cross-entropy .*\(0\.74 in nats"),
        (nn.Softmax, SMOOTH, "probabilities, of which the loss `cross_entropy` .*Leave out"),
        (nn.Softmax, own_cross_entropy, "the loss `.*own_cross_entropy` .*LogSoftmax is right"),
        (nn.Sigmoid, None, "numbers from 0 to 1, .*the Sigmoid or the like at its end"),
        (nn.Softmax, log_likelihood, None),
        (nn.Softmax, margin, None),
        (nn.LogSoftmax, None, None),
        (nn.ReLU, None, None),
    ],
)
def test_a_softmax_before_the_cross_entropy_gives_a_warning(end, loss, message):
    last = end() if end in (nn.Sigmoid, nn.ReLU) else end(1)
    networks = [nn.Sequential(nn.Linear(12, 4), last) for _ in range(2)]
    networks[1].load_state_dict(networks[0].state_dict())
    shard = Shard(torch.randn(20, 12), torch.arange(20) % 4)
    before = {key: value.clone() for key, value in networks[0].state_dict().items()}
    expected = pytest.warns(UserWarning, match=message) if message else contextlib.nullcontext()
    with expected:
        check_model("own", networks, shard, 0, num_classes=4, loss=loss)
    assert all(torch.equal(before[key], value) for key, value in networks[0].state_dict().items())


def with_softmax(input_shape, num_classes):
    linear = nn.Linear(math.prod(input_shape), num_classes)
    return nn.Sequential(nn.Flatten(), linear, nn.Softmax(1))


def test_a_run_of_a_network_that_ends_in_a_softmax_gives_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="`.*with_softmax` returns probabilities"):
        run(tiny(model={"name": with_softmax}, rounds=1), out=tmp_path / "run")
