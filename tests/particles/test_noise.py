"""The Brownian increments: standard normals, and the same ones however they are drawn."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from fedcb2o.particles.noise import Normals, _box_muller

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64)


def draws(seeds, n, dim, steps, dtype=torch.float64, purpose="noise"):
    """[steps, runs, n, d]."""
    normals = Normals(seeds, purpose, n, dim, dtype=dtype, device=CPU)
    return torch.stack([normals.next().clone() for _ in range(steps)])


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_they_are_standard_normals(dtype):
    drawn = draws([0, 1], 150, 7, 100, dtype).double().numpy()
    assert stats.kstest(drawn.ravel(), "norm").pvalue > 0.01
    assert drawn.mean() == pytest.approx(0, abs=4 / np.sqrt(drawn.size))
    assert drawn.var() == pytest.approx(1, abs=4 * np.sqrt(2 / drawn.size))
    # Nothing is drawn twice, nor correlated between runs, steps, particles or coordinates.
    assert len(np.unique(drawn)) > drawn.size * 0.99
    for axis in range(4):
        first, second = np.take(drawn, [0], axis).ravel(), np.take(drawn, [1], axis).ravel()
        assert abs(np.corrcoef(first, second)[0, 1]) < 4 / np.sqrt(first.size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tails_are_right(dtype):
    """How many of 4,000,000 lie beyond 3, 4 and 4.5, each side, within four standard deviations."""
    drawn = draws([0], 20_000, 20, 10, dtype).double().numpy().ravel()
    for at in (3, 4, 4.5):
        expected = stats.norm.sf(at) * drawn.size
        for found in ((drawn > at).sum(), (drawn < -at).sum()):
            assert found == pytest.approx(expected, abs=4 * np.sqrt(expected))


@pytest.mark.parametrize(("word", "share"), [(0, 1), (2**64 - 1, 0)])
def test_no_word_is_too_small_or_too_large(word, share):
    """The word 0 gives the largest radius, in the direction 0; the largest word none."""

    class Words(np.random.SFC64):
        def random_raw(self, count):
            return np.full(count, word, np.uint64)

    out = np.empty((1, 1, 4), "f4")
    _box_muller([np.random.Generator(Words())], out)
    assert out[0, 0, :2] == pytest.approx(share * np.sqrt(2 * 32 * np.log(2)), abs=1e-4)
    assert out[0, 0, 2:] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "dim"), [(1, 1), (5, 3), (16, 1), (50, 2), (33, 31), (700, 300)])
def test_a_run_sees_the_same_alone_and_in_a_batch(dtype, n, dim):
    """Small ones are drawn for many steps at once, how many depends on the batch; (700, 300) is
    more than a block."""
    steps = 140 if n * dim < 5000 else 3
    together = draws([7, 3, 11], n, dim, steps, dtype)
    for run, seed in enumerate([7, 3, 11]):
        assert torch.equal(together[:, run], draws([seed], n, dim, steps, dtype)[:, 0])
    many = draws([*range(40), 3], n, dim, 2, dtype)
    assert torch.equal(many[:, -1], together[:2, 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", [1, 63, 64, 65])
def test_runs_that_stop_leave_the_others_as_they_were(dtype, at):
    whole = draws([0, 1, 2, 3], 10, 3, 150, dtype)
    normals = Normals([0, 1, 2, 3], "noise", 10, 3, dtype=dtype, device=CPU)
    for step in range(at):
        assert torch.equal(normals.next(), whole[step])
    normals.keep_runs([1, 3])
    for step in range(at, at + 20):
        assert torch.equal(normals.next(), whole[step][[1, 3]])
    normals.keep_runs([1])
    for step in range(at + 20, 150):
        assert torch.equal(normals.next(), whole[step][[3]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_number_of_threads_changes_them(dtype, threads):
    """Two runs of 300,000 normals are six blocks."""
    found = []
    for number in (1, 2, 3):
        threads(number)
        found.append(draws([0, 1], 30_000, 10, 3, dtype))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    # None is left out or drawn twice. Float32 has few enough numbers that 1.2% of independent
    # normals coincide.
    assert len(found[0].unique()) > 0.98 * found[0].numel()


@pytest.mark.parametrize("dtype", DTYPES)
def test_seed_and_purpose_name_the_stream(dtype):
    found = [
        draws([seed], 20, 2, 2, dtype, purpose) for seed in (0, 1) for purpose in ("noise", "other")
    ]
    for one, other in itertools.combinations(found, 2):
        assert not torch.equal(one, other)
    assert torch.equal(found[0], draws([0], 20, 2, 2, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_one_run_differ(dtype):
    flat = draws([0], 300_000, 1, 1, dtype).flatten()
    first, second = flat[: 2**17], flat[2**17 : 2**18]
    assert not torch.equal(first, second)
    assert abs(np.corrcoef(first.numpy(), second.numpy())[0, 1]) < 4 / np.sqrt(2**17)
