"""Top-k differences: by hand, the sum of what is sent, and a simulation with them."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.peer.members import experiment

import fedcb2o
from fedcb2o.errors import ConfigError
from fedcb2o.federated import top_k


def test_kept_numbers_codes_and_magnitudes_by_hand():
    """Three of 48 numbers are kept: 8 and 6 share the magnitude 7, and -2 has its own."""
    difference = torch.zeros(48)
    difference[torch.tensor([5, 10, 30, 47])] = torch.tensor([6.0, -2.0, 8.0, 1.5])
    positions, codes, levels = top_k.top_k(difference)
    assert positions.tolist() == [5, 10, 30]
    assert codes.tolist() == [1, 2, 1]
    assert levels.tolist() == [[2.0, 7.0]]
    sent = torch.ones(48)
    top_k.add_(sent, positions, codes, levels)
    assert sent[[5, 10, 30, 47]].tolist() == [8.0, -1.0, 8.0, 1.0]


def test_sizes_by_hand():
    """One number of 16 is kept in each chunk of 4096, rounded up in the last one."""
    assert top_k.kept_counts(4096 + 17).tolist() == [256, 2]
    assert top_k.message_bytes(4096) == 8 + 256 * 14 // 8 == 456
    assert top_k.message_bytes(4096 + 17) == 16 + 452  # 258 * 14 bits are 451.5 bytes
    assert top_k.download_bytes(4096, 0) == 0
    assert top_k.download_bytes(4096, 32) == 32 * 456
    assert top_k.download_bytes(4096, 33) == 4 * 4096


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9000), st.integers(0, 2**31), st.booleans())
def test_the_two_magnitudes_have_the_least_squared_error(dim, seed, has_ties):
    difference = torch.randn(dim, generator=torch.Generator().manual_seed(seed))
    if has_ties:
        difference = difference.round()
    positions, codes, levels = top_k.top_k(difference)
    assert len(positions) == top_k.kept_counts(dim).sum()
    assert (positions.diff() > 0).all()
    sent = torch.zeros(dim)
    top_k.add_(sent, positions, codes, levels)
    for start in range(0, dim, top_k.CHUNK):
        chunk = difference[start : start + top_k.CHUNK].double()
        kept = chunk.abs().sort(descending=True).values[: -(-len(chunk) // 16)]
        errors = [
            sum(float((part - part.mean()).square().sum()) for part in parts if len(part))
            for parts in (torch.tensor_split(kept, [k]) for k in range(len(kept)))
        ]
        rest = float(chunk.square().sum() - kept.square().sum())
        error = float((chunk - sent[start : start + top_k.CHUNK]).square().sum())
        assert error == pytest.approx(min(errors) + rest, rel=1e-5, abs=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**31))
def test_all_that_is_sent_is_all_differences_but_the_residual(dim, seed):
    """Error feedback as it is usually written: e <- e + delta - Q(e + delta)."""
    generator = torch.Generator().manual_seed(seed)
    sent = torch.zeros(dim)
    theta = torch.zeros(dim)
    residual, total = torch.zeros(dim, dtype=torch.float64), torch.zeros(dim, dtype=torch.float64)
    for _ in range(6):
        delta = torch.randn(dim, generator=generator)
        theta += delta
        before = sent.clone()
        top_k.advance_(sent, theta)
        message = sent.double() - before
        residual += delta - message
        total += message
    torch.testing.assert_close(total, theta.double() - residual, rtol=0, atol=1e-5)
    torch.testing.assert_close(residual, (theta - sent).double(), rtol=0, atol=1e-5)


def test_a_model_that_stands_still_arrives_exactly_or_nearly():
    theta = torch.randn(6000, generator=torch.Generator().manual_seed(0))
    sent = torch.zeros(6000)
    errors = []
    for _ in range(60):
        top_k.advance_(sent, theta)
        errors.append(float((theta - sent).norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3 * errors[0]


def test_no_difference_changes_no_bit():
    sent = torch.tensor([-0.0, 0.0, 1.0] * 50)
    before = sent.clone()
    top_k.advance_(sent, before)
    assert torch.equal(sent.view(torch.int32), before.view(torch.int32))


# Simulations

SETTINGS = {"rounds": 4, "agents": {"budget": 2, "encoding": "top_k"}}


def checkpoint(folder, settings, **options):
    fedcb2o.run(settings, out=folder, watch=lambda *_: None, **options)
    seed = settings["seeds"][0]
    return load_file(folder / f"seed-{seed}" / "checkpoint.safetensors")["models"]


def test_bits_are_the_same_for_every_number_of_workers_and_after_a_resume(tmp_path):
    settings = {**experiment(6, **SETTINGS), "together": 1}
    whole = checkpoint(tmp_path / "1", settings, workers=1)
    assert len(whole) == 12
    assert torch.equal(whole, checkpoint(tmp_path / "2", settings, workers=2))
    checkpoint(tmp_path / "3", {**settings, "rounds": 2}, workers=1)
    resumed = checkpoint(tmp_path / "3", settings, workers=1, resume=True)
    assert torch.equal(whole, resumed)


def test_agents_receive_published_models(tmp_path):
    """With one round, published models differ from theta_0 by the kept numbers."""
    settings = {**experiment(3, **{**SETTINGS, "rounds": 1}), "together": 1}
    models = checkpoint(tmp_path / "run", settings, workers=1)
    initial = checkpoint(tmp_path / "still", {**settings, "training": {"gamma": 1e-30}}, workers=1)
    changed = (models[3:] != initial[3:]).sum(1)
    assert (changed <= top_k.kept_counts(610).sum()).all()
    assert changed.any()
    lines = (tmp_path / "run").glob("seed-*/pairs.jsonl")
    assert all(json.loads(path.read_text())["ids"] == [[1, 2], [0, 2], [0, 1]] for path in lines)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agents.initialisation": "independent"}, "initial model"),
        ({"clock": {}}, "clock.model_bytes"),
        ({"algorithm": {"name": "ifca", "models": 2}}, "agents ask peers"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        fedcb2o.load(experiment(3, **SETTINGS), changes)
