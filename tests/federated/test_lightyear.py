"""LIGHTYEAR: scores by hand and by plain loops, agreement of models, and decay of trust."""

import math

import pytest
import torch
from tests.views import rule_input

from fedcb2o.errors import ConfigError
from fedcb2o.federated.aggregation import lightyear
from fedcb2o.federated.aggregation._lightyear import prediction_scores
from fedcb2o.rng import stream


def plain_scores(outputs, labels, bins):
    """Scores as in the authors' code, sample by sample and bin by bin."""
    probabilities = [[math.exp(v) / sum(math.exp(w) for w in row) for v in row] for row in outputs]
    confidences = [max(row) for row in probabilities]
    is_correct = [
        row.index(max(row)) == label for row, label in zip(probabilities, labels, strict=True)
    ]
    error = 0.0
    for i in range(bins):
        members = [k for k, p in enumerate(confidences) if i / bins < p <= (i + 1) / bins]
        if members:
            accuracy = sum(is_correct[k] for k in members) / len(members)
            confidence = sum(confidences[k] for k in members) / len(members)
            error += abs(accuracy - confidence) * len(members) / len(labels)
    return sum(is_correct) / len(labels), error, sum(confidences) / len(labels)


def logits_for(*rows):
    """Outputs with these probabilities as their softmax."""
    return torch.tensor(rows).log()


def test_scores_by_hand():
    # Confidence 0.75, correct and wrong: one bin, with accuracy 0.5. Confidence 0.5, correct: the
    # other bin.
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
    scores = prediction_scores(outputs, labels).T
    for row, model_outputs in zip(scores, outputs, strict=True):
        assert row.tolist() == pytest.approx(
            plain_scores(model_outputs.tolist(), labels.tolist(), 15)
        )


def test_the_confidence_of_the_released_code_is_an_output():
    outputs = torch.tensor([[[0.5, 0.2], [4.0, 1.0]]])
    accuracy, error, sharpness = prediction_scores(
        outputs, torch.tensor([0, 0]), 15, probability=False
    )[:, 0].tolist()
    assert (accuracy, sharpness) == (1.0, 2.25)
    assert error == pytest.approx(0.5 / 2)  # the second is in no bin


def view(outputs, labels, n=0, own=None):
    """View of agent m, which evaluates models 0 to m - 1. Its own model is the last."""
    m = len(outputs) - 1

    def evaluate(models, change=None):
        return outputs[models.rows], labels

    own = m if own is None else own
    return rule_input(torch.zeros(m + 1, 2), range(m), own, n=n, outputs=evaluate)


LABELS = torch.tensor([0, 0, 1, 1])


def outputs_for(*classes, confidence=0.75):
    rows = [
        [confidence, 1 - confidence] if c == 0 else [1 - confidence, confidence] for c in classes
    ]
    return torch.tensor(rows).log()


def test_agreeing_models_are_averaged_and_trust_decays():
    # Its own model is correct for three of four samples. `other` errs on another sample and agrees
    # fully, `wrong` always errs, and `vague` is less confident.
    own = outputs_for(0, 0, 1, 0)
    other = outputs_for(1, 0, 1, 1)
    wrong = outputs_for(1, 1, 0, 0)
    vague = outputs_for(0, 0, 1, 0, confidence=0.55)
    outputs = torch.stack([other, wrong, vague, own])
    # `wrong` has accuracy 0 against 3/4, calibration 0.75 against 0 and equal sharpness:
    # (1/4 + 1/4 + 1) / 3 = 1/2. `vague` has equal accuracy, calibration 0.2 and 0.2 less sharpness:
    # (1 + 0.8 + 0.8) / 3.
    assert lightyear(view(outputs, LABELS)).tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
    assert lightyear(view(outputs, LABELS), threshold=0.49).tolist() == pytest.approx([0.25] * 4)
    assert lightyear(view(outputs, LABELS), threshold=0.9).tolist() == pytest.approx(
        [0.5, 0, 0, 0.5]
    )
    later = lightyear(view(outputs, LABELS, n=3), decay=0.5).tolist()
    assert later == pytest.approx([1 / 24, 0, 1 / 24, 1 - 2 / 24])


def test_sampled_own_model_and_broken_models_have_weight_0():
    outputs = torch.stack(
        [
            outputs_for(0, 0, 1, 0),
            outputs_for(1, 0, 1, 1),
            torch.full((4, 2), torch.nan),
            outputs_for(0, 0, 1, 0),
        ]
    )
    assert lightyear(view(outputs, LABELS, own=0)).tolist() == pytest.approx([0, 0.5, 0, 0.5])
    assert lightyear(view(outputs[-1:], LABELS)).tolist() == [1]


@pytest.mark.parametrize("parameters", [{"threshold": 1.5}, {"decay": -0.1}, {"bins": 0}])
def test_parameters_out_of_range_are_refused(parameters):
    with pytest.raises(ConfigError, match=next(iter(parameters))):
        lightyear(view(torch.stack([outputs_for(0, 0, 1, 0)] * 2), LABELS), **parameters)
