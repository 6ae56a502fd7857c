"""Attacks on models by hand: what they craft."""

import dataclasses
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from tests import views
from tests.views import BENIGN, FELLOWS, ten_models, view_of

from fedcb2o.errors import ConfigError
from fedcb2o.federated import attacks
from fedcb2o.federated.attacks.model_poisoning import alie_z
from fedcb2o.rng import stream


def crafted(name, *, view=None, **parameters):
    attack = getattr(attacks, name)
    return attack(view or view_of(attack), stream(0, "draw"), **parameters)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_what_an_agent_alone_can_do():
    view = view_of()
    close(crafted("sign_flip", scale=2.0), view.previous - 2 * 0.5)  # its update is 0.5 everywhere
    close(crafted("boosting", factor=10.0), view.previous + 10 * 0.5)
    close(crafted("boosting", factor=1.0), view.own)
    assert crafted("free_rider").equal(view.previous)
    assert not crafted("free_rider", noise=0.1).equal(view.previous)
    assert crafted("not_finite").isnan().all()
    assert crafted("not_finite", value="-inf").tolist() == [-torch.inf] * 5
    assert crafted("not_finite", value="huge").tolist() == [torch.finfo(torch.float32).max] * 5


@pytest.mark.parametrize("name", ["random_model", "gaussian_noise"])
def test_noise_is_as_large_as_the_model(name):
    models = ten_models(20_000) * 3
    noise = crafted(name, scale=0.5, view=view_of(models=models)) - (
        models[4] if name == "gaussian_noise" else 0
    )
    assert float(noise.std()) == pytest.approx(
        0.5 * float(models[4].square().mean().sqrt()), rel=0.03
    )
    assert abs(float(noise.mean())) < 0.05


def test_ipm_is_minus_eps_times_the_mean_update():
    view = view_of()
    update = crafted("ipm", eps=0.3) - view.previous
    close(update, -0.3 * (ten_models()[BENIGN] - view.previous).mean(0))


@pytest.mark.parametrize(
    ("n", "f", "share"), [(10, 2, 4 / 8), (50, 24, 24 / 26), (7, 3, 3 / 4), (10, 5, 4 / 5)]
)
def test_alie_z_by_hand(n, f, share):
    """n = 50, f = 24: s = 26 - 24 = 2, so (50 - 24 - 2) / (50 - 24); with half attackers or more s
    is 1."""
    assert alie_z(n, f) == pytest.approx(NormalDist().inv_cdf(share))


def test_alie_z_ends():
    assert alie_z(2, 1) == 0.0
    assert alie_z(10, 1) == 0.0  # Phi(z) = 4 / 9: not even the mean is small enough
    assert alie_z(10, 9) == 0.0


def test_alie_is_the_mean_and_z_deviations():
    models = ten_models()
    for seen, ids in (("fellows", FELLOWS), ("benign", BENIGN)):
        some = models[ids].numpy().astype(np.float64)
        expected = torch.from_numpy(some.mean(0) + 1.5 * some.std(0)).float()
        close(crafted("alie", z=1.5, estimated_from=seen), expected)
    default = crafted("alie")
    close(default, models[FELLOWS].mean(0) + alie_z(7, 3) * models[FELLOWS].std(0, correction=0))


@pytest.mark.parametrize("direction", ["std", "unit", "sign"])
@pytest.mark.parametrize("d", [5, 70_000])
def test_min_max_and_min_sum_hold_their_bound_and_are_tight(direction, d):
    models = ten_models(d)
    benign = models[BENIGN].double()
    between = torch.cdist(benign, benign)
    for name, bound in (("min_max", between.max()), ("min_sum", between.square().sum(1).max())):
        found = crafted(name, direction=direction, view=view_of(models=models)).double()
        far = (found - benign).norm(dim=1)
        reached = far.max() if name == "min_max" else far.square().sum()
        assert float(reached) == pytest.approx(float(bound), rel=1e-4)


def test_min_max_of_equal_models_is_that_model():
    models = torch.ones(10, 5)
    for name in ("min_max", "min_sum"):
        assert crafted(name, view=view_of(models=models)).tolist() == [1.0] * 5


def test_mimic_of_the_outermost():
    """On a line through other numbers: 0, 1, 2 and 10 along one direction, hardly anything along
    another."""
    models = torch.zeros(10, 5)
    models[BENIGN, 1] = torch.tensor([0.0, 10.0, 2.0, 1.0])
    models[BENIGN, 3] = torch.tensor([0.1, 0.0, 0.2, -0.2])
    assert crafted("mimic", agent="outermost", view=view_of(models=models)).equal(models[1])


def test_hybrid_sparse_by_hand():
    """Two benign models at -1 and 1 of each coordinate's deviation: 1, 2, 3, 4; the parameter that
    is felt most is that with the largest |before * (mean - before)|."""
    deviation = torch.tensor([1.0, 2.0, 3.0, 4.0])
    models = torch.zeros(10, 4)
    models[[0, 2]], models[[1, 3]] = 5 + deviation, 5 - deviation
    view = dataclasses.replace(
        view_of(models=models), previous=torch.tensor([5.0, 4.9, 5.0, 1.0])
    )  # 0, 0.49, 0, 4
    close(
        crafted("hybrid_sparse", kept_share=0.25, scale=1.5, z=0.2, view=view),
        5 - torch.tensor([0.2, 0.4, 0.6, 6.0]),
    )
    # The nearest to the others is any of them, at |deviation|^2 = 30 from the mean: 0.5^2 * 16 is
    # spent on the blow.
    z = math.sqrt((30 - 4) / (1 + 4 + 9))
    close(
        crafted("hybrid_sparse", kept_share=0.25, scale=0.5, view=view),
        5 - torch.tensor([z, 2 * z, 3 * z, 2.0]),
    )
    # A blow beyond the bound leaves no drift; nothing kept is ALIE downwards, and holds the bound.
    close(
        crafted("hybrid_sparse", kept_share=0.25, scale=1.5, view=view),
        5 - torch.tensor([0.0, 0.0, 0.0, 6.0]),
    )
    close(crafted("hybrid_sparse", kept_share=0.0, view=view), 5 - deviation)
    with pytest.raises(ConfigError, match="`kept_share` must be between 0 and 1, got 2"):
        crafted("hybrid_sparse", kept_share=2.0)


def test_hybrid_sparse_is_as_far_as_the_benign_model_that_is_nearest_to_the_others():
    models = ten_models(400)
    benign = models[BENIGN].double()
    found = crafted("hybrid_sparse", kept_share=0.01, view=view_of(models=models)).double()
    nearest = torch.cdist(benign, benign).square().sum(1).min()
    assert float((found - benign).square().sum()) == pytest.approx(float(nearest), rel=1e-5)


def test_mimic_copies():
    models = ten_models()
    assert crafted("mimic", agent=2).equal(models[2])
    assert crafted("mimic", agent=5).equal(models[1])
    assert crafted("mimic", cluster_offset=1).equal(models[7])


def test_gap_aware_goes_to_the_bound_and_no_farther():
    """Losses that are the squared distance to the mean of the benign models, times 1 and 2 for two
    classes."""
    models = ten_models()
    mean = models[BENIGN].mean(0)

    def losses(thetas):
        one = (thetas - mean).square().sum(1).double()
        by_class = torch.stack([one, 2 * one, 100 * one], 1)
        return views.losses(one, by_class, torch.tensor([True, True, False]))

    far = float((models[4] - mean).square().sum())
    for bound in (0.01, 0.5, far):
        view = view_of(losses=losses)
        found = crafted("gap_aware", bound=bound, halvings=20, view=view)
        gap = 2 * float((found - mean).square().sum())
        assert gap == pytest.approx(bound, rel=1e-4)
    assert crafted("gap_aware", bound=2 * far + 1, view=view_of(losses=losses)).equal(models[4])
    close(crafted("gap_aware", bound=0.0, view=view_of(losses=losses)), mean)
    with pytest.raises(ConfigError, match="`bound` must be 0 or more, got -1"):
        crafted("gap_aware", bound=-1.0)


def test_slow_drift_keeps_its_step():
    models = ten_models()
    mean = models[BENIGN].mean(0)
    spread = (models[BENIGN] - mean).square().sum(1).mean().sqrt()
    found = crafted("slow_drift", step=0.25)
    assert float((found - mean).norm()) == pytest.approx(0.25 * float(spread), rel=1e-5)
    close(torch.cosine_similarity(found - mean, models[4] - mean, dim=0), torch.tensor(1.0))
    close(crafted("slow_drift", step=100.0), models[4])


def test_built_in_attacks_declare_their_threat_model():
    alone = {"boosting", "free_rider", "gaussian_noise", "not_finite", "sign_flip", "random_model"}
    alone.add("factor_mixing")
    on_models = {name for name in attacks.__all__ if hasattr(getattr(attacks, name), "threat")}
    assert {name for name in on_models if not getattr(attacks, name).threat.knows} == alone
    assert {name for name in on_models if getattr(attacks, name).threat.each_receiver} == {
        "dissensus", "echo", "equivocation", "spectral", "user_isolation",
    }  # fmt: skip
    assert {n for n in on_models if getattr(attacks, n).threat.on_poisoned_data} == {
        "echo",
        "gap_aware",
        "neurotoxin",
        "slow_drift",
    }
