"""Networks and the vector theta that holds their parameters."""

import pytest
import torch
from torch import nn

from fedcb2o.data import Shard, features
from fedcb2o.errors import ConfigError
from fedcb2o.federated.local_update import local_update_
from fedcb2o.federated.run_spec import Training
from fedcb2o.nn import architectures, parameters
from fedcb2o.rng import stream
from tests.tiny import empty_models


def test_the_papers_network_has_the_papers_dimension():
    network = architectures.cnn([1, 28, 28], 47)
    assert parameters.dimension(network) == 6_572_975
    assert network(torch.zeros(2, 1, 28, 28)).shape == (2, 47)


def test_the_papers_network_equals_its_layers():
    # 5x5 convolution to 32 channels (same padding), ReLU, pooling, 64 channels, ReLU, pooling,
    # dense, ReLU, dense.
    torch.manual_seed(0)
    network, x = architectures.cnn([3, 8, 12], 5, hidden=7), torch.randn(4, 3, 8, 12)
    first, second, third, last = (p for p in network if isinstance(p, nn.Conv2d | nn.Linear))
    h = nn.functional.max_pool2d(
        nn.functional.conv2d(x, first.weight, first.bias, padding=2).relu(), 2
    )
    h = nn.functional.max_pool2d(
        nn.functional.conv2d(h, second.weight, second.bias, padding=2).relu(), 2
    )
    h = h.flatten(1) @ third.weight.T + third.bias
    torch.testing.assert_close(network(x), h.relu() @ last.weight.T + last.bias)
    released = architectures.cnn([3, 8, 12], 5, hidden=7, dense_activation="none")
    released.load_state_dict(
        dict(zip(released.state_dict(), network.state_dict().values(), strict=True))
    )
    torch.testing.assert_close(released(x), h @ last.weight.T + last.bias)


def test_dense_networks_have_the_expected_dimensions():
    result = parameters.dimension(architectures.mlp([1, 8, 8], 10, hidden=[32, 16]))
    assert result == 64 * 32 + 32 + 32 * 16 + 16 + 16 * 10 + 10
    assert parameters.dimension(architectures.logistic([1, 8, 8], 10)) == 650
    assert architectures.mlp([5], 3)(torch.zeros(2, 5)).shape == (2, 3)


def test_the_network_of_characters_equals_its_layers():
    network = architectures.characters([5], 7, embedding=3, hidden=4, layers=2)
    x = torch.tensor([[0.0, 1, 2, 3, 6], [6, 5, 4, 3, 9]])
    # a number beyond the last one counts as the last one
    vectors = network.vectors(torch.tensor([[0, 1, 2, 3, 6], [6, 5, 4, 3, 6]]))
    expected = network.dense(network.lstm(vectors)[0][:, -1])
    assert network(x).equal(expected)
    # LEAF's: vectors 80 x 8, two LSTM layers of 256 with two biases, and the dense layer
    leaf = architectures.characters([80], 80)
    lstm = 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2)
    assert sum(p.numel() for p in leaf.parameters()) == 640 + lstm + 80 * 257
    with pytest.raises(ConfigError, match="needs rows of numbers"):
        architectures.characters([1, 8, 8], 10)
    with pytest.raises(ConfigError, match="needs rows of numbers"):
        architectures.characters([5], 7, layers=0)


def test_the_factorisation_by_hand():
    network = architectures.factorisation([2], 1, sizes=[3, 2], dim=1)
    with torch.no_grad():
        network.users.weight[:] = torch.tensor([[1.0, 0.1], [2.0, 0.2], [3.0, 0.3]])
        network.items.weight[:] = torch.tensor([[10.0, 0.01], [20.0, 0.02]])
        network.bias[:] = 5
    # a number beyond the last one counts as the last one
    x = torch.tensor([[0.0, 0.0], [2.0, 1.0], [9.0, 7.0]])
    expected = [[15.11], [65.32], [65.32]]
    assert network(x).tolist() == [pytest.approx(row) for row in expected]
    for shape, outputs, sizes, dim in (([3], 1, [3, 2], 1), ([2], 2, [3, 2], 1)):
        with pytest.raises(ConfigError, match="two numbers, user and item"):
            architectures.factorisation(shape, outputs, sizes=sizes, dim=dim)
    for sizes, dim in (([3], 1), ([0, 2], 1), ([3, 2], 0)):
        with pytest.raises(ConfigError, match="`sizes` must be two numbers"):
            architectures.factorisation([2], 1, sizes=sizes, dim=dim)


def test_the_residual_network_equals_its_layers():
    # Three stages of one block, with 8, 16 and 32 channels. A block that doubles the channels also
    # halves the resolution.
    torch.manual_seed(0)
    network, x = architectures.resnet([3, 9, 12], 5, width=8), torch.randn(4, 3, 9, 12)
    parameters = iter(network.parameters())
    for p in network.parameters():
        # also scales and shifts, which start at 1 and 0
        p.data = torch.randn_like(p) / p[0].numel() ** 0.5

    def normed(h, stride=1):
        h = nn.functional.conv2d(h, next(parameters), padding=1, stride=stride)
        groups = h.view(4, h.shape[1] // 8, -1)
        groups = (groups - groups.mean(-1, keepdim=True)) / (
            groups.var(-1, keepdim=True, correction=0) + 1e-5
        ).sqrt()
        return (
            groups.view(h.shape) * next(parameters)[:, None, None] + next(parameters)[:, None, None]
        )

    h = normed(x).relu()
    for stride in (1, 2, 2):
        past = h[:, :, ::stride, ::stride]
        past = past if stride == 1 else torch.cat([past, torch.zeros_like(past)], 1)
        h = (past + normed(normed(h, stride).relu())).relu()
    expected = h.mean((2, 3)) @ next(parameters).T + next(parameters)
    torch.testing.assert_close(network(x), expected)
    assert next(parameters, None) is None


@pytest.mark.parametrize("shape", [[1, 8, 8], [1, 28, 28], [3, 32, 32], [2, 4, 5]])
@pytest.mark.parametrize("blocks", [1, 2])
def test_the_residual_network_reads_small_images(shape, blocks):
    network = architectures.resnet(shape, 7, blocks=blocks)
    layers = [p for p in network.modules() if isinstance(p, nn.Conv2d | nn.Linear)]
    assert len(layers) == 6 * blocks + 2
    assert parameters.dimension(network) == sum(p.numel() for p in network.parameters())
    assert network(torch.zeros(2, *shape)).shape == (2, 7)
    assert network(torch.zeros(1, *shape)).isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 12}, "`width` must be a multiple of 8, the channels of a group, got 12"),
        ({"width": 0}, "`width` must be a multiple of 8, .* got 0"),
        ({"blocks": 0}, "`blocks` must be at least 1 and at most 200, got 0"),
    ],
)
def test_an_invalid_residual_network_is_refused(change, message):
    with pytest.raises(ConfigError, match=f"model `resnet`: {message}"):
        architectures.resnet([1, 8, 8], 10, **change)


@pytest.mark.parametrize("make", [architectures.cnn, architectures.resnet])
@pytest.mark.parametrize("shape", [[64], [1, 3, 8], [1, 8, 3], [8, 8]])
def test_a_convolutional_network_needs_images(make, shape):
    with pytest.raises(ConfigError, match=f"model `{make.__name__}` needs images"):
        make(shape, 10)


@pytest.mark.parametrize("make", [architectures.cnn, architectures.mlp])
@pytest.mark.parametrize("width", [0, -1])
def test_layers_need_units(make, width):
    with pytest.raises(ConfigError, match=r"`hidden` needs layers of 1 unit or more, got \["):
        make([1, 8, 8], 10, hidden=width if make is architectures.cnn else [8, width])


@pytest.mark.parametrize(
    "make", [architectures.cnn, architectures.resnet, architectures.mlp, architectures.logistic]
)
def test_theta_and_the_network_share_memory(make):
    network = make([1, 8, 8], 10)
    d = parameters.dimension(network)
    rows = empty_models(3, d)
    rows[1] = parameters.flatten(network)
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = network(x).detach()
    parameters.bind_(network, rows[1])
    assert parameters.is_bound(network, rows[1])
    assert not parameters.is_bound(network, rows[0])
    assert network(x).equal(expected)
    assert parameters.flatten(network).equal(rows[1])
    network(x).sum().backward()
    before = rows[1].clone()
    with torch.no_grad():
        for p in network.parameters():
            p.sub_(0.1 * p.grad)
    assert not rows[1].equal(before)  # training the network trains the row
    assert not rows[0].any()
    assert not rows[2].any()


@pytest.mark.parametrize(
    "make", [architectures.cnn, architectures.resnet, architectures.mlp, architectures.logistic]
)
def test_training_in_a_row_equals_pytorchs_training(make):
    """LocalUpdate on a row equals torch.optim.SGD on a separate network, for any memory format."""
    draw, images = stream(0, "data"), stream(1, "data").random((40, 3, 8, 8), dtype="float32")
    shard = Shard(torch.from_numpy(images), torch.from_numpy(draw.integers(4, size=40)))
    network, reference = (
        parameters.initialise(lambda: make([3, 8, 8], 4), stream(0, "model")) for _ in range(2)
    )
    rows = empty_models(3, parameters.dimension(network))
    rows[1] = parameters.flatten(network)
    training = Training(gamma=0.05, lambda2=1.0, momentum=0.9, batch_size=40, local_epochs=3)
    local_update_(rows[1], network, shard, training, stream(0, "batches"))
    assert parameters.is_bound(network, rows[1])
    assert not rows[0].any()
    assert not rows[2].any()
    optimiser = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9, fused=False)
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.cross_entropy(reference(features(shard.x)), shard.y).backward()
        optimiser.step()
    torch.testing.assert_close(rows[1], parameters.flatten(reference), atol=1e-5, rtol=1e-3)


def test_a_parameter_outside_of_its_row_is_detected():
    network = architectures.mlp([4], 2, hidden=[3])
    theta = parameters.flatten(network)
    parameters.bind_(network, theta)
    network[1].weight.data = network[1].weight.data.clone()
    assert not parameters.is_bound(network, theta)
    convolution = nn.Conv2d(2, 3, 3)
    theta = parameters.flatten(convolution)
    parameters.bind_(convolution, theta)
    assert parameters.is_bound(convolution, theta)
    convolution.to(memory_format=torch.channels_last)  # detaches silently
    assert not parameters.is_bound(convolution, theta)


def test_rows_begin_at_cache_lines():
    for d in (1, 15, 16, 17, 650):
        rows = empty_models(4, d)
        assert rows.shape == (4, d)
        assert {(row.data_ptr() - rows.data_ptr()) % 64 for row in rows} == {0}


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (
            nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)),
            "norm `0` keeps no statistics",
        ),
        (nn.Linear(2, 2).double(), "all of type float32"),
        (nn.Flatten(), "needs parameters to train"),
        (nn.Linear(2, 2).requires_grad_(False), "needs parameters to train"),
        (nn.Sequential(nn.Linear(2, 2), nn.ParameterList([torch.zeros(0)])), "none of them empty"),
    ],
    ids=["batches", "double", "none", "frozen", "empty"],
)
def test_a_network_that_theta_does_not_describe_is_refused(network, message):
    with pytest.raises(ConfigError, match=message):
        parameters.dimension(network)


class OwnHead(nn.Module):
    """A head without nn.Linear, registered before the body."""

    def __init__(self):
        super().__init__()
        self.head = nn.Parameter(torch.ones(3, 4))
        self.head_bias = nn.Parameter(torch.zeros(3))
        self.body = nn.Linear(5, 4)


def frozen(layer):
    layer.requires_grad_(False)
    return layer


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3)), (9, 18, 3, (18, 21))),
        (nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 3, bias=False)), (12, 24, 4, None)),
        (nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), (0, 6, 2, (6, 9))),
        (nn.Sequential(nn.Linear(2, 3, bias=False), nn.LayerNorm(3)), (0, 6, 2, None)),
        (nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten()), (0, 24, 8, (24, 27))),
        (nn.Sequential(nn.Linear(2, 3), frozen(nn.Linear(3, 3))), (0, 6, 2, (6, 9))),
        (OwnHead(), (0, 12, 4, (12, 15))),
        (nn.Sequential(nn.Linear(2, 4), frozen(nn.Linear(4, 3))), None),
        (nn.Linear(2, 1), None),
    ],
)
def test_the_last_layer_has_a_row_per_class(network, expected):
    found = parameters.last_layer(network, 3)
    if expected is None:
        assert found is None
        return
    start, stop, width, bias = expected
    bias = None if bias is None else slice(*bias)
    assert found == parameters.LastLayer(slice(start, stop), 3, width, bias)


def test_initial_values_depend_on_the_stream_alone():
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first = parameters.initialise(lambda: architectures.mlp([8], 3), stream(7, "model"))
    assert torch.random.get_rng_state().equal(state)
    torch.manual_seed(6)
    second = parameters.initialise(lambda: architectures.mlp([8], 3), stream(7, "model"))
    other = parameters.initialise(lambda: architectures.mlp([8], 3), stream(8, "model"))
    assert parameters.flatten(first).equal(parameters.flatten(second))
    assert not parameters.flatten(first).equal(parameters.flatten(other))


@pytest.mark.parametrize("dim", [16, 17, parameters.MIN_FOREACH_SIZE])
@pytest.mark.parametrize("to", [[3, 4, 5], [5, 3, 4]])
@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0, 1]])
def test_rows_are_copied_within_a_buffer_with_and_without_gaps(dim, to, rows):
    models = empty_models(6, dim)
    models.copy_(torch.arange(6 * dim).view(6, dim))
    before = models.clone()
    parameters.copy_rows_(models, to, rows)
    assert models[to].equal(before[rows])
    assert models[:3].equal(before[:3])
