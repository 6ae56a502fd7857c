"""Models that attacks craft, by hand."""

import dataclasses
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from tests import views
from tests.views import BENIGN, FELLOWS, assert_near, craft, ten_models, view_of

from fedcb2o.errors import ConfigError
from fedcb2o.federated import attacks
from fedcb2o.federated.attacks.model_poisoning import alie_z


def test_attacks_of_a_single_agent_by_hand():
    # The update is 0.5 everywhere.
    view = view_of()
    assert_near(craft("sign_flip", scale=2.0), view.previous - 2 * 0.5)
    assert_near(craft("boosting", factor=10.0), view.previous + 10 * 0.5)
    assert_near(craft("boosting", factor=1.0), view.own)
    assert craft("free_rider").equal(view.previous)
    assert not craft("free_rider", noise=0.1).equal(view.previous)
    assert craft("not_finite").isnan().all()
    assert craft("not_finite", value="-inf").tolist() == [-torch.inf] * 5
    assert craft("not_finite", value="huge").tolist() == [torch.finfo(torch.float32).max] * 5


@pytest.mark.parametrize("name", ["random_model", "gaussian_noise"])
def test_noise_has_the_scale_of_the_model(name):
    models = ten_models(20_000) * 3
    noise = craft(name, scale=0.5, view=view_of(models=models)) - (
        models[4] if name == "gaussian_noise" else 0
    )
    assert float(noise.std()) == pytest.approx(
        0.5 * float(models[4].square().mean().sqrt()), rel=0.03
    )
    assert abs(float(noise.mean())) < 0.05


def test_ipm_is_minus_eps_times_the_mean_update():
    view = view_of()
    update = craft("ipm", eps=0.3) - view.previous
    assert_near(update, -0.3 * (ten_models()[BENIGN] - view.previous).mean(0))


@pytest.mark.parametrize(
    ("n", "f", "share"), [(10, 2, 4 / 8), (50, 24, 24 / 26), (7, 3, 3 / 4), (10, 5, 4 / 5)]
)
def test_alie_z_by_hand(n, f, share):
    """For n = 50 and f = 24, s is 2 and Phi(z) is (50 - 24 - 2) / (50 - 24).

    With half attackers or more, s is 1.
    """
    assert alie_z(n, f) == pytest.approx(NormalDist().inv_cdf(share))


def test_alie_z_is_never_negative():
    assert alie_z(2, 1) == 0.0
    assert alie_z(10, 1) == 0.0  # Phi(z) = 4 / 9 is below 1 / 2
    assert alie_z(10, 9) == 0.0


def test_alie_is_the_mean_plus_z_deviations():
    models = ten_models()
    for source, ids in (("fellows", FELLOWS), ("benign", BENIGN)):
        subset = models[ids].numpy().astype(np.float64)
        expected = torch.from_numpy(subset.mean(0) + 1.5 * subset.std(0)).float()
        assert_near(craft("alie", z=1.5, estimated_from=source), expected)
    default = craft("alie")
    target = models[FELLOWS].mean(0) + alie_z(7, 3) * models[FELLOWS].std(0, correction=0)
    assert_near(default, target)


@pytest.mark.parametrize("direction", ["std", "unit", "sign"])
@pytest.mark.parametrize("d", [5, 70_000])
def test_min_max_and_min_sum_reach_their_bound_exactly(direction, d):
    models = ten_models(d)
    benign = models[BENIGN].double()
    benign_distances = torch.cdist(benign, benign)
    for name, bound in (
        ("min_max", benign_distances.max()),
        ("min_sum", benign_distances.square().sum(1).max()),
    ):
        model = craft(name, direction=direction, view=view_of(models=models)).double()
        distances = (model - benign).norm(dim=1)
        reached = distances.max() if name == "min_max" else distances.square().sum()
        assert float(reached) == pytest.approx(float(bound), rel=1e-4)


def test_min_max_of_equal_models_is_that_model():
    models = torch.ones(10, 5)
    for name in ("min_max", "min_sum"):
        assert craft(name, view=view_of(models=models)).tolist() == [1.0] * 5


def test_mimic_copies_the_outermost_model():
    """The benign models differ by up to 10 in one coordinate and hardly in another."""
    models = torch.zeros(10, 5)
    models[BENIGN, 1] = torch.tensor([0.0, 10.0, 2.0, 1.0])
    models[BENIGN, 3] = torch.tensor([0.1, 0.0, 0.2, -0.2])
    assert craft("mimic", agent="outermost", view=view_of(models=models)).equal(models[1])


def test_hybrid_sparse_by_hand():
    """The benign models have the deviations 1, 2, 3 and 4 in the four coordinates.

    The most sensitive parameter has the largest |before * (mean - before)|.
    """
    deviation = torch.tensor([1.0, 2.0, 3.0, 4.0])
    models = torch.zeros(10, 4)
    models[[0, 2]], models[[1, 3]] = 5 + deviation, 5 - deviation
    # sensitivities 0, 0.49, 0, 4
    view = dataclasses.replace(view_of(models=models), previous=torch.tensor([5.0, 4.9, 5.0, 1.0]))
    expected = 5 - torch.tensor([0.2, 0.4, 0.6, 6.0])
    assert_near(craft("hybrid_sparse", kept_share=0.25, scale=1.5, z=0.2, view=view), expected)
    # All benign models have |deviation|^2 = 30 from the mean. The perturbation of the sensitive
    # parameter takes 0.5^2 * 16 of it.
    z = math.sqrt((30 - 4) / (1 + 4 + 9))
    expected = 5 - torch.tensor([z, 2 * z, 3 * z, 2.0])
    assert_near(craft("hybrid_sparse", kept_share=0.25, scale=0.5, view=view), expected)
    # A strong perturbation beyond the bound leaves nothing for the other parameters. Without strong
    # perturbations, the attack is ALIE downwards, within the bound.
    expected = 5 - torch.tensor([0.0, 0.0, 0.0, 6.0])
    assert_near(craft("hybrid_sparse", kept_share=0.25, scale=1.5, view=view), expected)
    assert_near(craft("hybrid_sparse", kept_share=0.0, view=view), 5 - deviation)
    with pytest.raises(ConfigError, match="`kept_share` must be between 0 and 1, got 2"):
        craft("hybrid_sparse", kept_share=2.0)


def test_hybrid_sparse_reaches_the_smallest_sum_of_benign_distances():
    models = ten_models(400)
    benign = models[BENIGN].double()
    model = craft("hybrid_sparse", kept_share=0.01, view=view_of(models=models)).double()
    bound = torch.cdist(benign, benign).square().sum(1).min()
    assert float((model - benign).square().sum()) == pytest.approx(float(bound), rel=1e-5)


def test_mimic_copies_the_chosen_agent():
    models = ten_models()
    assert craft("mimic", agent=2).equal(models[2])
    assert craft("mimic", agent=5).equal(models[1])
    assert craft("mimic", cluster_offset=1).equal(models[7])


def test_gap_aware_reaches_the_bound_exactly():
    """The losses are the squared distance to the benign mean, times 1 and 2 for two classes."""
    models = ten_models()
    mean = models[BENIGN].mean(0)

    def losses(thetas):
        mean_loss = (thetas - mean).square().sum(1).double()
        by_class = torch.stack([mean_loss, 2 * mean_loss, 100 * mean_loss], 1)
        return views.losses(mean_loss, by_class, torch.tensor([True, True, False]))

    own_distance = float((models[4] - mean).square().sum())
    for bound in (0.01, 0.5, own_distance):
        view = view_of(losses=losses)
        model = craft("gap_aware", bound=bound, halvings=20, view=view)
        gap = 2 * float((model - mean).square().sum())
        assert gap == pytest.approx(bound, rel=1e-4)
    assert craft("gap_aware", bound=2 * own_distance + 1, view=view_of(losses=losses)).equal(
        models[4]
    )
    assert_near(craft("gap_aware", bound=0.0, view=view_of(losses=losses)), mean)
    with pytest.raises(ConfigError, match="`bound` must be 0 or more, got -1"):
        craft("gap_aware", bound=-1.0)


def test_slow_drift_moves_by_its_step():
    models = ten_models()
    mean = models[BENIGN].mean(0)
    spread = (models[BENIGN] - mean).square().sum(1).mean().sqrt()
    model = craft("slow_drift", step=0.25)
    assert float((model - mean).norm()) == pytest.approx(0.25 * float(spread), rel=1e-5)
    assert_near(torch.cosine_similarity(model - mean, models[4] - mean, dim=0), torch.tensor(1.0))
    assert_near(craft("slow_drift", step=100.0), models[4])


def test_built_in_attacks_declare_their_threat_model():
    without_knowledge = {
        "boosting",
        "free_rider",
        "gaussian_noise",
        "not_finite",
        "sign_flip",
        "random_model",
    }
    without_knowledge.add("factor_mixing")
    model_attacks = {name for name in attacks.__all__ if hasattr(getattr(attacks, name), "threat")}
    assert {
        name for name in model_attacks if not getattr(attacks, name).threat.knows
    } == without_knowledge
    assert {name for name in model_attacks if getattr(attacks, name).threat.each_receiver} == {
        "dissensus", "echo", "equivocation", "spectral", "user_isolation",
    }  # fmt: skip
    result = {n for n in model_attacks if getattr(attacks, n).threat.on_poisoned_data}
    assert result == {"descent", "echo", "gap_aware", "neurotoxin", "slow_drift"}
