"""Named streams: equal names give equal draws, and different names give different draws."""

import numpy as np
import pytest

from fedcb2o import rng
from fedcb2o.rng import agent_streams, permutations, stream, subsets, weighted_subsets


def test_equal_names_give_equal_draws():
    draws = [stream(3, "batches", 5, 7).integers(2**63, size=4).tolist() for _ in range(2)]
    assert draws[0] == draws[1]


def test_names_do_not_collide():
    names = [
        (0, "a"),
        (1, "a"),
        (0, "b"),
        (0, "a", 1),
        (0, "a", 11),
        (0, "a", 1, 1),
        (0, "a", "1"),
        (0, "a", "1", 1),
    ]
    assert len({tuple(stream(*name).integers(2**63, size=2).tolist()) for name in names}) == len(
        names
    )


def test_the_draws_of_a_name_are_fixed():
    """Other values here would change every recorded result."""
    assert stream(0, "batches", 0, 0).permutation(8).tolist() == [6, 5, 2, 1, 7, 0, 3, 4]


def test_streams_of_several_agents_equal_the_stream_of_each():
    for key in ((0, "batches", 5), (3, "attack"), (7, "it's", 'a "name"')):
        draws = [
            draw.integers(2**63, size=3).tolist()
            for draw in agent_streams(*key, agents=[0, 7, 12345])
        ]
        assert draws == [stream(*key, j).integers(2**63, size=3).tolist() for j in (0, 7, 12345)]


@pytest.fixture(params=[True, False], ids=["arrays", "generators"])
def _kind(request, monkeypatch):
    """Draw in both ways; NumPy of another version may only draw by generators."""
    assert rng._arrays_equal_generators()
    monkeypatch.setattr(rng, "_arrays_equal_generators", lambda: request.param)


def _assert_equal_continuation(draws, alone):
    for a, b in zip(draws, alone, strict=True):
        assert (a.random(), a.integers(7)) == (b.random(), b.integers(7))


@pytest.mark.usefixtures("_kind")
@pytest.mark.parametrize(("n", "times"), [(0, 1), (1, 2), (2, 1), (5, 1), (8, 3), (16, 1)])
def test_permutations_of_several_streams_equal_the_permutations_of_each(n, times):
    draws = agent_streams(n, "x", agents=range(300))
    alone = [stream(n, "x", k) for k in range(300)]
    orders = permutations(draws, n, times)
    expected = [np.concatenate([draw.permutation(n) for _ in range(times)]) for draw in alone]
    assert np.array_equal(orders, expected)
    _assert_equal_continuation(draws, alone)


@pytest.mark.usefixtures("_kind")
def test_subsets_of_several_streams_equal_choices_of_each():
    """Bounds close to 2^32 reject words; NumPy draws large subsets of many in another way."""
    counts = [0, 1, 20, 21, 50, 1000, 9999, 10_001, 20_000, 3 * 10**9, 2**32 - 1, 2**33]
    counts, sizes = (x.ravel() for x in np.meshgrid(counts, [0, 1, 5, 20, 45, 250]))
    draws = agent_streams(5, "x", agents=range(len(counts)))
    alone = [stream(5, "x", k) for k in range(len(counts))]
    values, lengths = subsets(draws, counts, sizes)
    assert lengths.tolist() == np.minimum(counts, sizes).tolist()
    ends = lengths.cumsum()
    for count, size, end, draw in zip(counts, sizes, ends, alone, strict=True):
        expected = np.arange(min(count, size))
        if size < count:
            expected = np.sort(draw.choice(count, size, replace=False))
        assert values[end - len(expected) : end].tolist() == expected.tolist()
    _assert_equal_continuation(draws, alone)


@pytest.mark.usefixtures("_kind")
@pytest.mark.parametrize(("k", "power"), [(1, 1), (9, 1), (30, 8), (300, 40)])
def test_weighted_subsets_of_several_streams_equal_choices_of_each(k, power):
    """Also after other draws of an odd number of words, and where repeats need many draws."""
    draws = agent_streams(k, "x", agents=range(90))
    alone = [stream(k, "x", j) for j in range(90)]
    first = np.arange(90) % 4
    subsets(draws, np.full(90, 50), first)
    for draw, size in zip(alone, first.tolist(), strict=True):
        draw.choice(50, size, replace=False)
    rows = np.arange(0, 90, 2)
    rest = np.random.default_rng(k)
    p = rest.random((len(rows), k)) ** power
    p[:, 1:][rest.random((len(rows), k - 1)) < 0.3] = 0
    p /= p.sum(1, keepdims=True)
    sizes = np.minimum((p > 0).sum(1), rest.integers(0, 8, len(rows)))
    numbers = weighted_subsets(draws, rows, p, sizes)
    for i, j in enumerate(rows.tolist()):
        expected = alone[j].choice(k, sizes[i], replace=False, p=p[i])
        assert numbers[i, : sizes[i]].tolist() == sorted(expected)
    _assert_equal_continuation(draws, alone)


def test_a_subset_of_a_list_of_generators_is_drawn_by_each():
    values, lengths = subsets([stream(0, "x")], np.array([9]), np.array([4]))
    assert lengths.tolist() == [4]
    assert values.tolist() == sorted(stream(0, "x").choice(9, 4, replace=False))
