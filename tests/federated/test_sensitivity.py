"""Sensitivities of classes to noise by hand."""

import math

import numpy as np
import pytest
import torch

from fedcb2o.federated.guards.sensitivity import IMAGES, class_sensitivities, noise_images, rises


@pytest.mark.parametrize("shape", [(5, 6), (3, 8, 8)])
def test_half_of_the_noise_has_pixels_and_half_has_blocks(shape):
    images = noise_images(torch.Size(shape), (-1.0, 3.0), np.random.default_rng(0))
    assert images.shape == (IMAGES, *shape)
    assert images.unique().tolist() == [-1.0, 3.0]
    fine, coarse = images.chunk(2)
    columns = torch.arange(shape[-1]) * 4 // shape[-1]
    in_same_block = (columns[1:] == columns[:-1]).nonzero().flatten()
    assert coarse[..., in_same_block].equal(coarse[..., in_same_block + 1])
    assert not fine[..., in_same_block].equal(fine[..., in_same_block + 1])


def test_samples_that_are_not_images_have_noise_in_each_feature():
    images = noise_images(torch.Size([3]), (0.0, 1.0), np.random.default_rng(0))
    assert images.mean(0).tolist() == pytest.approx([0.5] * 3, abs=0.2)


def test_a_sensitivity_is_a_spread_over_noise_in_units_of_the_median_class():
    # Outputs +-s after centring; the standard deviation is in proportion to s.
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
    outputs = torch.stack([3 * signs, signs, -4 * signs], -1).unsqueeze(0) + 7.0
    expected = [0.0, math.log(1 / 3), math.log(4 / 3)]
    assert class_sensitivities(outputs)[0].tolist() == pytest.approx(expected)
    assert class_sensitivities(100 * outputs)[0].tolist() == pytest.approx(expected)


def test_a_rise_exceeds_both_own_models_in_units_of_their_movement():
    own = torch.tensor([[0.0, 0.3, 0.0]])
    previous = torch.tensor([[0.3, 0.0, 0.0]])
    received = torch.tensor([[0.5, 0.2, 0.0], [-1.0, -1.0, 1.0]])
    movement = math.sqrt((0.09 + 0.09) / 3)
    expected = [0.2 / movement, 1 / movement]
    assert rises(received, own, previous).tolist() == pytest.approx(expected)


def test_a_model_without_a_sensitivity_has_no_rise():
    constant = class_sensitivities(torch.zeros(1, 4, 3)).float()
    assert not torch.isfinite(rises(constant, torch.zeros(1, 3), torch.zeros(1, 3))).any()
