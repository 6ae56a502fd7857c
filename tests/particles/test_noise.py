"""Brownian increments: standard normals, independent of batches, threads and block sizes."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from fedcb2o.particles.noise import Normals

DTYPES = (torch.float32, torch.float64)


def draw_increments(seeds, n, dim, steps, dtype=torch.float64, purpose="noise"):
    """Draw increments, shape [steps, runs, n, d]."""
    normals = Normals(seeds, purpose, n, torch.empty(dim, dtype=dtype))
    return torch.stack([normals.next().clone() for _ in range(steps)])


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_increments_are_standard_normals(dtype):
    sample = draw_increments([0, 1], 150, 7, 100, dtype).double().numpy()
    assert stats.kstest(sample.ravel(), "norm").pvalue > 0.01
    assert sample.mean() == pytest.approx(0, abs=4 / np.sqrt(sample.size))
    assert sample.var() == pytest.approx(1, abs=4 * np.sqrt(2 / sample.size))
    # Numbers are not repeated, and runs, steps, particles and coordinates are uncorrelated.
    assert len(np.unique(sample)) > sample.size * 0.99
    for axis in range(4):
        first, second = np.take(sample, [0], axis).ravel(), np.take(sample, [1], axis).ravel()
        assert abs(np.corrcoef(first, second)[0, 1]) < 4 / np.sqrt(first.size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tails_have_the_normal_probability(dtype):
    """Counts beyond 3, 4 and 4.5 on either side are within four standard errors of the normal."""
    sample = draw_increments([0], 20_000, 20, 10, dtype).double().numpy().ravel()
    for threshold in (3, 4, 4.5):
        expected = stats.norm.sf(threshold) * sample.size
        for count in ((sample > threshold).sum(), (sample < -threshold).sum()):
            assert count == pytest.approx(expected, abs=4 * np.sqrt(expected))


@pytest.mark.parametrize(("word", "relative_radius"), [(0, 1), (2**64 - 1, 0)])
def test_extreme_random_words_give_finite_normals(monkeypatch, word, relative_radius):
    """The word 0 gives the largest radius, at angle 0. The largest word gives radius 0."""

    class Words(np.random.SFC64):
        def random_raw(self, count):
            return np.full(count, word, np.uint64)

    monkeypatch.setattr(np.random, "SFC64", Words)
    normals = draw_increments([0], 4, 1, 1, torch.float32)[0, 0, :, 0]
    largest = relative_radius * np.sqrt(2 * 32 * np.log(2))
    assert normals.tolist() == pytest.approx([largest, largest, 0, 0], abs=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "dim"), [(1, 1), (5, 3), (16, 1), (50, 2), (33, 31), (700, 300)])
def test_a_run_draws_the_same_increments_alone_and_in_a_batch(dtype, n, dim):
    """Small ensembles are drawn for several steps at once; their number depends on the batch.

    (700, 300) exceeds a block.
    """
    steps = 140 if n * dim < 5000 else 3
    batch = draw_increments([7, 3, 11], n, dim, steps, dtype)
    for run, seed in enumerate([7, 3, 11]):
        assert torch.equal(batch[:, run], draw_increments([seed], n, dim, steps, dtype)[:, 0])
    large_batch = draw_increments([*range(40), 3], n, dim, 2, dtype)
    assert torch.equal(large_batch[:, -1], batch[:2, 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first_stop", [1, 63, 64, 65])
def test_stopped_runs_do_not_change_the_increments_of_others(dtype, first_stop):
    expected = draw_increments([0, 1, 2, 3], 10, 3, 150, dtype)
    normals = Normals([0, 1, 2, 3], "noise", 10, torch.empty(3, dtype=dtype))
    for step in range(first_stop):
        assert torch.equal(normals.next(), expected[step])
    normals.keep_runs([1, 3])
    for step in range(first_stop, first_stop + 20):
        assert torch.equal(normals.next(), expected[step][[1, 3]])
    normals.keep_runs([1])
    for step in range(first_stop + 20, 150):
        assert torch.equal(normals.next(), expected[step][[3]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_increments_do_not_depend_on_the_number_of_threads(dtype, set_threads):
    """Two runs of 300,000 normals are six blocks."""
    samples = []
    for count in (1, 2, 3):
        set_threads(count)
        samples.append(draw_increments([0, 1], 30_000, 10, 3, dtype))
    assert torch.equal(samples[0], samples[1])
    assert torch.equal(samples[0], samples[2])
    # Every position is drawn once. In float32, 1.2% of independent normals coincide.
    assert len(samples[0].unique()) > 0.98 * samples[0].numel()


@pytest.mark.parametrize("dtype", DTYPES)
def test_seed_and_purpose_select_the_stream(dtype):
    samples = [
        draw_increments([seed], 20, 2, 2, dtype, purpose)
        for seed in (0, 1)
        for purpose in ("noise", "other")
    ]
    for one, other in itertools.combinations(samples, 2):
        assert not torch.equal(one, other)
    assert torch.equal(samples[0], draw_increments([0], 20, 2, 2, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_one_run_differ(dtype):
    flat = draw_increments([0], 300_000, 1, 1, dtype).flatten()
    first, second = flat[: 2**17], flat[2**17 : 2**18]
    assert not torch.equal(first, second)
    assert abs(np.corrcoef(first.numpy(), second.numpy())[0, 1]) < 4 / np.sqrt(2**17)
