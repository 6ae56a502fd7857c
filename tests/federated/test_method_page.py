"""The weights of FedAssay equal steps 4 and 5 of docs/method.md, read word by word.

The oracle is in float64 and has no code in common with the package. Samples are few, so that
classes of one sample, roundings of (1 - c) m and absent classes occur.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from tests import views

from fedcb2o.federated.algorithms import fedassay
from fedcb2o.federated.guards.checks import tolerated
from fedcb2o.federated.inference import losses_from_samples


def lower_median(values):
    finite = sorted(value for value in values if math.isfinite(value))
    return finite[(len(finite) - 1) // 2]


def variance_within_classes(differences, labels):
    """Return the variance of a model's differences, as the item about sigma says."""
    present = sorted(set(labels))
    counts = {c: labels.count(c) for c in present}
    freedom = sum(n - 1 for n in counts.values())
    centre = {c: np.mean(differences[np.array(labels) == c]) for c in present}
    if freedom == 0:
        centre = dict.fromkeys(present, np.mean(differences))
        freedom = max(1, len(labels) - 1)
    return sum((d - centre[c]) ** 2 for d, c in zip(differences, labels, strict=True)) / freedom


def page_excess(own, models, labels):
    """Return G of each model; `own` and `models` have one loss per sample."""
    present = sorted(set(labels))
    root = {c: math.sqrt(labels.count(c)) for c in present}
    is_of = {c: np.array(labels) == c for c in present}
    gaps = [{c: np.mean((L - own)[is_of[c]]) for c in present} for L in models]
    means = [np.mean(L) for L in models]
    better = [i for i, mean in enumerate(means) if mean <= lower_median(means)]

    variances = [variance_within_classes(L - own, labels) for L in models]
    sigma = max(0.001, math.sqrt(lower_median([variances[i] for i in better])))
    largest = max(sigma / root[c] for c in present)
    centres = [max(0.0, lower_median(d.values())) for d in gaps]
    spreads = []
    for d in gaps:
        middle = lower_median(d.values())
        spreads.append(1.4826 * lower_median([abs(gap - middle) for gap in d.values()]))
    if len(present) == 1:
        centres, spreads = [0.0] * len(models), [0.0] * len(models)
    bounds = [
        min(max(lower_median([values[i] for i in better]), largest / 2), largest)
        for values in (centres, spreads)
    ]

    scores, errors = [], []
    for d, b, D in zip(gaps, centres, spreads, strict=True):
        b, D = min(b, bounds[0]), min(D, bounds[1])
        errors.append({c: math.hypot(sigma / root[c], D) for c in present})
        scores.append({c: (d[c] - b) / errors[-1][c] for c in present})
    m = lower_median([max(scores[i].values()) for i in better])
    m = min(max(0.0, m), math.sqrt(2 * math.log(len(present))) + 2)
    return [
        max(max(0.0, z[c] - m) * max(e[c], 0.8 / root[c]) for c in present)
        for z, e in zip(scores, errors, strict=True)
    ]


def page_weights(own, models, labels, num_classes):
    """Return the weights mu of the models and, last, of the agent's own."""
    n = len(labels)
    shares = np.array([labels.count(c) / n for c in set(labels)])
    H = -float(np.sum(shares * np.log(shares)))
    c = min(1.0, math.exp(H) / num_classes) ** 2
    L = [np.mean(model) for model in [*models, own]]

    level = sorted(L)[math.ceil(0.5 * len(L)) - 1]
    bound = L[-1] + 0.1 / c * (H - L[-1])
    Q = {i for i, loss in enumerate(L) if loss <= level and loss <= bound} | {len(models)}
    for i, model in enumerate(models):
        error = np.std(model - own, ddof=1) / math.sqrt(n) if n > 1 else 0.0
        if L[i] <= L[-1] + 2 * error:
            Q.add(i)
    beyond = sorted(loss for loss in L if loss > level)
    count = round((1 - c) * len(beyond))
    if count:
        Q |= {i for i, loss in enumerate(L) if level < loss <= beyond[count - 1]}

    G = [*page_excess(own, models, labels), 0.0]
    mu = np.array([math.exp(-c * G[i]) if i in Q else 0.0 for i in range(len(L))])
    return mu / mu.sum()


@pytest.mark.parametrize("seed", range(60))
def test_the_weights_equal_the_page(seed):
    rng = np.random.default_rng(seed)
    num_classes = int(rng.integers(2, 6))
    labels = rng.integers(0, num_classes, int(rng.choice([1, 2, 4, 12, 30]))).tolist()
    if seed % 4 == 0:
        labels = list(range(num_classes))  # one sample of each class
    m = int(rng.integers(1, 7))
    own = rng.exponential(0.4, len(labels))
    # A loss and gaps of classes of each model's own, from memorised samples to poisoned models.
    scale = rng.choice([0.001, 0.3, 1.5], (m, 1))
    shift = rng.exponential(1.0, (m, num_classes))[:, labels] * scale
    models = np.abs(own + shift + rng.normal(0, 0.3, (m, len(labels))) * scale)

    known = losses_from_samples(
        torch.tensor(np.vstack([models, own])), torch.tensor(labels), num_classes
    )
    view = views.criterion_input([[0.0] * num_classes] * m, [0.0] * num_classes)
    known = dataclasses.replace(known, is_cross_entropy=True)
    losses, own_losses = known.select(slice(None, -1)), known.select(slice(-1, None))
    algorithm = fedassay()
    accepted = tolerated(algorithm.guards, losses, own_losses)
    view = dataclasses.replace(view, losses=losses, own_losses=own_losses, tolerated=accepted)
    output, _ = algorithm.weigh(view, {})
    expected = page_weights(own, list(models), labels, num_classes)
    assert output.outcome.double().numpy() == pytest.approx(expected, abs=1e-6)
