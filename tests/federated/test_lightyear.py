"""LIGHTYEAR: its scores by hand and by plain loops, its agreement, and how its trust ends."""

import math

import pytest
import torch
from tests.views import local, no_losses, received

from fedcb2o.errors import ConfigError
from fedcb2o.federated import CriterionInput
from fedcb2o.federated.aggregation._lightyear import lightyear, prediction_scores
from fedcb2o.rng import stream


def plain_scores(outputs, labels, bins):
    """As the authors' code has it: sample by sample and bin by bin."""
    probabilities = [[math.exp(v) / sum(math.exp(w) for w in row) for v in row] for row in outputs]
    surest = [max(row) for row in probabilities]
    right = [row.index(max(row)) == label for row, label in zip(probabilities, labels, strict=True)]
    error = 0.0
    for i in range(bins):
        members = [k for k, p in enumerate(surest) if i / bins < p <= (i + 1) / bins]
        if members:
            accuracy = sum(right[k] for k in members) / len(members)
            confidence = sum(surest[k] for k in members) / len(members)
            error += abs(accuracy - confidence) * len(members) / len(labels)
    return sum(right) / len(labels), error, sum(surest) / len(labels)


def logits_for(*rows):
    """Outputs whose softmax are these probabilities."""
    return torch.tensor(rows).log()


def test_scores_by_hand():
    # Sure of 0.75, right and wrong: of one bin of half, an accuracy of 0.5; sure of 0.5 and right,
    # the other bin.
    outputs = logits_for([0.75, 0.25], [0.25, 0.75], [0.5, 0.5])
    labels = torch.tensor([0, 0, 0])
    accuracy, error, sharpness = prediction_scores(outputs.unsqueeze(0), labels, bins=2)[
        :, 0
    ].tolist()
    assert accuracy == pytest.approx(2 / 3)
    assert error == pytest.approx((2 * 0.25 + 0.5) / 3)
    assert sharpness == pytest.approx(2 / 3)


def test_scores_equal_the_plain_loop():
    outputs = torch.from_numpy(stream(0, "outputs").normal(size=(3, 40, 5)) * 2)
    labels = torch.from_numpy(stream(0, "labels").integers(5, size=40))
    found = prediction_scores(outputs, labels).T
    for row, one in zip(found, outputs, strict=True):
        assert row.tolist() == pytest.approx(plain_scores(one.tolist(), labels.tolist(), 15))


def test_the_released_confidence_is_an_output():
    outputs = torch.tensor([[[0.5, 0.2], [4.0, 1.0]]])
    accuracy, error, sharpness = prediction_scores(
        outputs, torch.tensor([0, 0]), 15, probability=False
    )[:, 0].tolist()
    assert (accuracy, sharpness) == (1.0, 2.25)
    assert error == pytest.approx(0.5 / 2)  # the second lies in no bin


def view(outputs, labels, n=0, own=None):
    """Agent m judges models 0 to m - 1; the own one is the last."""
    m = len(outputs) - 1
    ids = torch.arange(m)
    return CriterionInput(
        n,
        torch.zeros(m + 1, 2),
        None,
        None,
        received(ids),
        received(torch.tensor([m if own is None else own])),
        no_losses,
        local(outputs=lambda models, change=None: (outputs[models.rows], labels)),
    )


LABELS = torch.tensor([0, 0, 1, 1])


def sure(*guesses, of=0.75):
    rows = [[of, 1 - of] if guess == 0 else [1 - of, of] for guess in guesses]
    return torch.tensor(rows).log()


def test_who_agrees_is_averaged_and_trust_decays():
    # The own model is right in three of four; another errs elsewhere, and agrees wholly; one errs
    # always, another is less sure.
    own, other, wrong, vague = (
        sure(0, 0, 1, 0),
        sure(1, 0, 1, 1),
        sure(1, 1, 0, 0),
        sure(0, 0, 1, 0, of=0.55),
    )
    outputs = torch.stack([other, wrong, vague, own])
    # Of wrong: accuracy 0 against 3/4, calibration 0.75 against 0, sharpness the same: (1/4 + 1/4 +
    # 1) / 3 = 1/2. Of vague: accuracy the same, calibration 0.2, sharpness 0.2 less: (1 + 0.8 +
    # 0.8) / 3.
    assert lightyear(view(outputs, LABELS)).tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
    assert lightyear(view(outputs, LABELS), threshold=0.49).tolist() == pytest.approx([0.25] * 4)
    assert lightyear(view(outputs, LABELS), threshold=0.9).tolist() == pytest.approx(
        [0.5, 0, 0, 0.5]
    )
    later = lightyear(view(outputs, LABELS, n=3), decay=0.5).tolist()
    assert later == pytest.approx([1 / 24, 0, 1 / 24, 1 - 2 / 24])


def test_who_drew_itself_and_who_is_broken():
    outputs = torch.stack(
        [sure(0, 0, 1, 0), sure(1, 0, 1, 1), torch.full((4, 2), torch.nan), sure(0, 0, 1, 0)]
    )
    assert lightyear(view(outputs, LABELS, own=0)).tolist() == pytest.approx([0, 0.5, 0, 0.5])
    assert lightyear(view(outputs[-1:], LABELS)).tolist() == [1]


@pytest.mark.parametrize("bad", [{"threshold": 1.5}, {"decay": -0.1}, {"bins": 0}])
def test_what_does_not_fit_is_told(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        lightyear(view(torch.stack([sure(0, 0, 1, 0)] * 2), LABELS), **bad)
