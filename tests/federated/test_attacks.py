"""Attacks by hand: what they make of a shard, what they craft, and what they may look at."""

import dataclasses
from statistics import NormalDist

import numpy as np
import pytest
import torch

from fedcb2o import knows
from fedcb2o.data.shard import Shard
from fedcb2o.errors import ConfigError
from fedcb2o.federated import attacks
from fedcb2o.federated.data_poisoning import patch
from fedcb2o.federated.metrics import Aim, taken_for
from fedcb2o.federated.model_poisoning import alie_z
from fedcb2o.federated.types import Attack, Losses, Threat, View
from fedcb2o.models import rows_of
from fedcb2o.streams import stream

# Attacks on models

BENIGN, FELLOWS = [0, 1, 2, 3], [4, 5, 6]  # in cluster 0; cluster 1 has benign agents 7 and 8 and attacker 9


def models_of(d=5, seed=0):
    return torch.from_numpy(stream(seed, "models").normal(size=(10, d))).float()


def view_of(attack=None, *, models=None, agent=4, losses=None, see=("fellows", "benign")):
    models = models_of() if models is None else models
    ids = {("benign", 0): BENIGN, ("fellows", 0): FELLOWS, ("benign", 1): [7, 8], ("fellows", 1): [9]}
    return View(
        n=3,
        agent=agent,
        cluster=0,
        num_clusters=2,
        num_fellows=3,
        num_benign=4,
        receivers=torch.tensor([0, 1, 2, 3, 7, 8]),
        own=models[agent].clone(),
        before=models[agent] - 0.5,
        data=Shard(torch.zeros(2, 3), torch.tensor([0, 1])),
        losses=losses or (lambda thetas: pytest.fail("losses")),
        threat=Threat(frozenset(see)) if attack is None else attack.threat,
        _ids_of=lambda whose, cluster: ids[whose, cluster],
        _look=lambda chosen: rows_of(models, chosen),
    )


def crafted(name, *, view=None, **parameters):
    attack = getattr(attacks, name)
    return attack(view or view_of(attack), stream(0, "draw"), **parameters)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_what_an_agent_alone_can_do():
    view = view_of()
    close(crafted("sign_flip", scale=2.0), view.before - 2 * 0.5)  # its update is 0.5 everywhere
    close(crafted("boosting", factor=10.0), view.before + 10 * 0.5)
    close(crafted("boosting", factor=1.0), view.own)
    assert crafted("free_rider").equal(view.before)
    assert not crafted("free_rider", noise=0.1).equal(view.before)
    assert crafted("not_finite").isnan().all()
    assert crafted("not_finite", value="-inf").tolist() == [-torch.inf] * 5
    assert crafted("not_finite", value="huge").tolist() == [torch.finfo(torch.float32).max] * 5


@pytest.mark.parametrize("name", ["trash", "gaussian_noise"])
def test_noise_is_as_large_as_the_model(name):
    models = models_of(20_000) * 3
    noise = crafted(name, scale=0.5, view=view_of(models=models)) - (models[4] if name == "gaussian_noise" else 0)
    assert float(noise.std()) == pytest.approx(0.5 * float(models[4].square().mean().sqrt()), rel=0.03)
    assert abs(float(noise.mean())) < 0.05


def test_ipm_is_minus_eps_times_the_mean_update():
    view = view_of()
    update = crafted("ipm", eps=0.3) - view.before
    close(update, -0.3 * (models_of()[BENIGN] - view.before).mean(0))


@pytest.mark.parametrize(("n", "f", "share"), [(10, 2, 4 / 8), (50, 24, 24 / 26), (7, 3, 3 / 4), (10, 5, 4 / 5)])
def test_alie_z_by_hand(n, f, share):
    """n = 50, f = 24: s = 26 - 24 = 2, so (50 - 24 - 2) / (50 - 24); with half attackers or more s is 1."""
    assert alie_z(n, f) == pytest.approx(NormalDist().inv_cdf(share))


def test_alie_z_ends():
    assert alie_z(2, 1) == 0.0
    assert alie_z(10, 1) == 0.0  # Phi(z) = 4 / 9: not even the mean is small enough
    assert alie_z(10, 9) == 0.0


def test_alie_is_the_mean_and_z_deviations():
    models = models_of()
    for seen, ids in (("fellows", FELLOWS), ("benign", BENIGN)):
        some = models[ids].numpy().astype(np.float64)
        expected = torch.from_numpy(some.mean(0) + 1.5 * some.std(0)).float()
        close(crafted("alie", z=1.5, estimated_from=seen), expected)
    default = crafted("alie")
    close(default, models[FELLOWS].mean(0) + alie_z(7, 3) * models[FELLOWS].std(0, correction=0))


@pytest.mark.parametrize("direction", ["std", "unit", "sign"])
@pytest.mark.parametrize("d", [5, 70_000])
def test_min_max_and_min_sum_hold_their_bound_and_are_tight(direction, d):
    models = models_of(d)
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


def test_mimic_copies():
    models = models_of()
    assert crafted("mimic", whom=2).equal(models[2])
    assert crafted("mimic", whom=5).equal(models[1])
    assert crafted("mimic", clusters_on=1).equal(models[7])


def test_dissensus_undoes_what_averaging_brings():
    """Four benign agents of one cluster and three attackers, equal weights: the mean of all is the receiver's own."""
    models = models_of()
    found = crafted("dissensus")
    assert found.shape == (6, 5)
    for k, i in enumerate(BENIGN):
        average = (models[BENIGN].sum(0) + 3 * found[k]) / 7
        close(average, models[i])


def test_equivocation_tells_two_stories():
    models = models_of()
    found = crafted("equivocation", z=2.0)
    mean, std = models[BENIGN].mean(0), models[BENIGN].std(0, correction=0)
    for k in range(6):
        close(found[k], mean + (2 if k % 2 else -2) * std)


def test_gap_aware_goes_to_the_bound_and_no_farther():
    """Losses that are the squared distance to the mean of the benign models, times 1 and 2 for two classes."""
    models = models_of()
    mean = models[BENIGN].mean(0)

    def losses(thetas):
        one = (thetas - mean).square().sum(1).double()
        by_class = torch.stack([one, 2 * one, 100 * one], 1)
        return Losses(one, by_class, torch.tensor([True, True, False]), torch.zeros_like(one))

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
    models = models_of()
    mean = models[BENIGN].mean(0)
    spread = (models[BENIGN] - mean).square().sum(1).mean().sqrt()
    found = crafted("slow_drift", step=0.25)
    assert float((found - mean).norm()) == pytest.approx(0.25 * float(spread), rel=1e-5)
    close(torch.cosine_similarity(found - mean, models[4] - mean, dim=0), torch.tensor(1.0))
    close(crafted("slow_drift", step=100.0), models[4])


def test_an_attack_sees_what_it_declares_and_no_more():
    for whose, call in (
        ("fellows", lambda view: view.fellows()),
        ("benign", lambda view: view.benign(1)),
        ("benign", lambda view: view.model_of(2)),
    ):
        other = "benign" if whose == "fellows" else "fellows"
        call(view_of(see=(whose,)))
        with pytest.raises(ConfigError, match=rf'which it does not declare to know: write @fedcb2o.knows\("{whose}"\)'):
            call(view_of(see=(other,)))
    with pytest.raises(ConfigError, match=r"an attack may know the models of .*, got \['everybody'\]"):
        knows("everybody")


def test_built_in_attacks_declare_their_threat_model():
    alone = {"boosting", "free_rider", "gaussian_noise", "not_finite", "sign_flip", "trash"}
    on_models = {name for name in attacks.__all__ if hasattr(getattr(attacks, name), "threat")}
    assert {name for name in on_models if not getattr(attacks, name).threat.knows} == alone
    assert {name for name in on_models if getattr(attacks, name).threat.each_receiver} == {"dissensus", "equivocation"}
    assert {n for n in on_models if getattr(attacks, n).threat.on_poisoned_data} == {"gap_aware", "slow_drift"}


def test_models_are_seen_without_a_copy_where_they_lie_together():
    models = models_of()
    view = view_of(models=models)
    assert view.benign().data_ptr() == models.data_ptr()
    scattered = dataclasses.replace(view, _ids_of=lambda whose, cluster: [0, 2])
    assert scattered.benign().equal(models[[0, 2]])
    scattered.benign()[:] = 0  # a copy
    assert models[0].any()


def test_rounds_before_the_first_are_honest():
    sleeper = Attack(poison=attacks.label_flip, craft=attacks.trash, from_round=3)
    assert [sleeper.poisons(n) for n in range(5)] == [sleeper.crafts(n) for n in range(5)] == [False] * 3 + [True] * 2
    assert Attack().num_published(3, 4) == Attack(poison=attacks.label_flip).num_published(3, 4) == 0
    assert sleeper.num_published(3, 4) == 3
    assert Attack(craft=attacks.dissensus, threat=attacks.dissensus.threat).num_published(3, 4) == 12


# Attacks on data

NEEDED = {
    "backdoor": {"target": 3},
    "clean_label": {"target": 3, "share": 0.5},
    "feature_noise": {},
    "label_flip": {"source": 0, "target": 1},
    "label_flips": {"pairs": ((0, 1), (1, 0))},
    "random_labels": {"share": 0.5},
    "rarest_flip": {"target": 3},
    "shifted_labels": {},
    "spread_flip": {"target": 3},
}


def shard(n=400, classes=4, dtype=torch.float32):
    draw = stream(0, "shard")
    x = torch.from_numpy(draw.random((n, 1, 6, 6))).float()
    return Shard((255 * x).to(torch.uint8) if dtype == torch.uint8 else x, torch.arange(n) % classes)


def test_label_flip_by_hand():
    x, y = torch.arange(7.0).view(7, 1), torch.tensor([9, 4, 0, 9, 4, 9, 8])
    s = Shard(x.clone(), y.clone())
    flipped = attacks.label_flip(s, stream(0, "x"), source=9, target=4)
    assert flipped.y.tolist() == [4, 4, 0, 4, 4, 4, 8]  # every 9 is a 4, and no 4 is a 9
    assert flipped.y.dtype == torch.int64
    assert flipped.x.equal(x)
    assert s.x.equal(x)  # what it was given stays as it was
    assert s.y.equal(y)
    assert attacks.label_flip(s, stream(0, "x"), source=4, target=9).y.tolist() == [9, 9, 0, 9, 9, 9, 8]
    assert attacks.label_flip(s, stream(0, "x"), source=3, target=4).y.equal(y)  # nothing to flip


def test_label_flips():
    s = shard(8)
    assert attacks.label_flips(s, stream(0, "x"), pairs=((0, 1), (1, 2))).y.tolist() == [1, 2, 2, 3] * 2
    assert attacks.label_flips(s, stream(0, "x"), pairs=((3, 0),)).x is s.x


def test_shifted_labels_go_around_among_those_held():
    assert attacks.shifted_labels(shard(8), stream(0, "x")).y.tolist() == [1, 2, 3, 0] * 2
    some = Shard(torch.zeros(3, 2), torch.tensor([7, 2, 5]))
    assert attacks.shifted_labels(some, stream(0, "x"), by=2).y.tolist() == [5, 7, 2]


def test_random_labels():
    s = shard(4000)
    found = attacks.random_labels(s, stream(0, "x"), share=0.5).y
    assert float((found != s.y).float().mean()) == pytest.approx(0.5 * 3 / 4, abs=0.03)
    assert found.unique().tolist() == [0, 1, 2, 3]
    assert attacks.random_labels(s, stream(0, "x"), share=0.0).y.equal(s.y)
    with pytest.raises(ConfigError, match=r"`share` must be between 0 and 1, got 1.5"):
        attacks.random_labels(s, stream(0, "x"), share=1.5)


def test_a_spread_flip_takes_as_much_of_every_class():
    s = shard(4000)
    found = attacks.spread_flip(s, stream(0, "x"), target=2, share=0.25).y
    assert found[s.y == 2].eq(2).all()
    assert set(found[found != s.y].tolist()) == {2}
    for c in (0, 1, 3):
        assert float((found[s.y == c] == 2).float().mean()) == pytest.approx(0.25, abs=0.05)


def test_the_rarest_class_is_flipped():
    s = Shard(torch.zeros(9, 1), torch.tensor([0, 0, 0, 2, 4, 4, 5, 5, 5]))  # 2 is the rarest, then 4
    assert attacks.rarest_flip(s, stream(0, "x"), target=0).y.tolist() == [0, 0, 0, 0, 4, 4, 5, 5, 5]
    assert attacks.rarest_flip(s, stream(0, "x"), target=2).y.tolist() == [0, 0, 0, 2, 2, 2, 5, 5, 5]
    assert attacks.rarest_flip(s, stream(0, "x"), target=9).y.tolist() == [0, 0, 0, 9, 4, 4, 5, 5, 5]
    equal = Shard(torch.zeros(2, 1), torch.tensor([0, 1]))
    drawn = {tuple(attacks.rarest_flip(equal, stream(k, "x"), target=3).y.tolist()) for k in range(9)}
    assert drawn == {(3, 1), (0, 3)}
    alone = Shard(torch.zeros(2, 1), torch.tensor([1, 1]))
    assert attacks.rarest_flip(alone, stream(0, "x"), target=1) is alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_feature_noise(dtype):
    s = shard(dtype=dtype)
    noisy = attacks.feature_noise(s, stream(0, "x"), std=0.1)
    assert noisy.x.dtype == dtype
    assert noisy.y is s.y
    scale = 255 if dtype == torch.uint8 else 1
    assert float((noisy.x.float() - s.x.float()).std()) / scale == pytest.approx(0.1, rel=0.1)


def test_a_patch_is_where_it_should_be():
    x = torch.zeros(1, 1, 4, 4)
    assert patch(x, size=2)[0, 0].tolist() == [[0] * 4, [0] * 4, [0, 0, 1, 1], [0, 0, 1, 1]]
    assert patch(x, size=2, corner="top left", margin=1, pattern="checkerboard", value=0.5)[0, 0].tolist() == [
        [0] * 4, [0, 0.5, 0, 0], [0, 0, 0.5, 0], [0] * 4
    ]  # fmt: skip
    assert patch(x, size=3, corner="bottom left", pattern="cross")[0, 0].tolist() == [
        [0] * 4, [1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 1, 0]
    ]  # fmt: skip
    assert patch(x.to(torch.uint8), size=1)[0, 0, 3, 3] == 255
    assert not x.any()


def test_a_backdoor_marks_and_relabels_together():
    s = shard()
    found = attacks.backdoor(s, stream(0, "x"), target=2, share=0.3)
    hit = (found.x != s.x).flatten(1).any(1)
    assert float(hit.float().mean()) == pytest.approx(0.3, abs=0.07)
    assert found.x[hit].equal(patch(s.x[hit], size=2))
    assert found.y[hit].eq(2).all()
    assert found.y[~hit].equal(s.y[~hit])


def test_a_clean_label_trigger_is_on_samples_of_its_target_and_no_label_changes():
    s = shard()
    found = attacks.clean_label(s, stream(0, "x"), target=2, share=0.5, size=3)
    hit = (found.x != s.x).flatten(1).any(1)
    assert found.y is s.y
    assert s.y[hit].eq(2).all()
    assert float(hit[s.y == 2].float().mean()) == pytest.approx(0.5, abs=0.15)
    assert found.x[hit].equal(patch(s.x[hit], size=3))
    every = attacks.clean_label(s, stream(0, "x"), target=2)
    assert every.x[s.y == 2].equal(patch(s.x[s.y == 2]))


def test_the_parts_of_a_distributed_backdoor_make_it_up():
    s, parts = Shard(torch.zeros(1, 1, 6, 6), torch.tensor([0])), {}
    for agent in range(60):
        x = attacks.backdoor(s, stream(0, "attack", agent), target=1, share=1.0, size=3, parts=3).x
        parts[tuple(x.flatten().nonzero().flatten().tolist())] = x
    assert [len(pixels) for pixels in parts] == [3, 3, 3]
    assert sum(parts.values()).equal(patch(s.x, size=3))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"size": 7}, r"a trigger of `size` 7 and `margin` 0 does not fit into samples of shape \(1, 6, 6\)"),
        ({"size": 2, "parts": 5}, "`parts` must be between 1 and 4, the pixels of the trigger, got 5"),
        ({"size": 0}, "does not fit"),
    ],
)
def test_a_trigger_that_does_not_fit(parameters, message):
    with pytest.raises(ConfigError, match=message):
        attacks.backdoor(shard(), stream(0, "x"), target=1, **parameters)


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_equal_draws_make_equal_poison(name):
    s = shard()
    one, two = (getattr(attacks, name)(s, stream(5, "attack", 3), **NEEDED[name]) for _ in range(2))
    assert one.x.equal(two.x)
    assert one.y.equal(two.y)
    assert s.x.equal(shard().x)
    assert s.y.equal(shard().y)


# What success is


def test_success_by_hand():
    table = torch.tensor([[8, 1, 1], [1, 6, 3], [0, 0, 10]])
    assert Aim().accuracy(table) is Aim().success(table) is None
    two = Aim((0, 1), (1, 2))
    assert two.accuracy(table) == pytest.approx((0.8 + 0.6) / 2)
    assert two.success(table) == pytest.approx((0.1 + 0.3) / 2)
    assert Aim((1,)).accuracy(table) == pytest.approx(0.6)
    assert Aim((1,)).success(table) is None
    # Of the 20 samples of classes 0 and 1, 1 + 3 are taken for class 2; those of class 2 itself do not count.
    assert taken_for(table, 2) == pytest.approx(4 / 20)
    assert Aim((), (2,)).success(torch.eye(3, dtype=torch.int64), table) == pytest.approx(4 / 20)
    assert Aim((), (2,)).success(table) == pytest.approx(4 / 20)
    assert Aim((), (2,)).accuracy(table) is None
