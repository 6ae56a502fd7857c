"""User inputs against a plain PyTorch loop; `make inputs` tries random combinations."""

import re

import pytest
from tests.experiments import plain_loop
from tests.experiments.input_choices import DEFAULTS
from tests.experiments.random_inputs import outcome_of

EQUAL = [
    {},
    {"algorithm": "dfedavgm", "settings": "independent", "owners": "words", "spread": "uneven"},
    {"dtype": "uint8", "scale": "bytes", "shape": "image", "model": "cnn", "settings": "two clusters"},
    {"dtype": "big-endian", "container": "transposed", "test": "alike", "standardise": "yes"},
    {"dtype": "float16", "container": "Fortran order", "scale": "signed", "labels": "bool"},
    {"dtype": "int8", "container": "list", "scale": "signed", "labels": "other numbers"},
    {"container": "nullable frame", "labels": "nullable", "owners": "categories"},
    {"container": "mixed frame", "labels": "categories", "owners": "datasets by name"},
    {"container": "masked array without a mask", "scale": "constant feature", "standardise": "yes"},
    {"container": "bfloat16 tensor", "labels": "words", "owners": "datasets", "test": "alike"},
    {"scale": "offset", "standardise": "yes", "optimiser": "Adam"},
    {"labels": "targets", "loss": "huber_error", "optimiser": "SGD"},
    {"labels": "two targets", "loss": "own", "owners": "PyTorch data sets"},
    {"names": "mapping", "labels": "uint8", "loss": "smoothed"},
    {"model": "batch norm", "settings": "batch of 7"},
    {"model": "batch norm", "settings": "shared", "algorithm": "dfedavgm"},
    {"model": "LSTM", "shape": "sequence", "optimiser": "nesterov"},
    {"model": "embedding", "shape": "tokens", "scale": "levels", "dtype": "int64"},
    {"model": "functional dropout", "settings": "steps"},
    {"model": "tied", "settings": "NumPy integers", "owners": "by hand"},
    {"model": "unused parameter", "optimiser": "adamw"},
]  # fmt: skip
OTHERS = [
    ("refused", {"container": "!frame with a gap"}, r"`x` has 1 missing value"),
    ("refused", {"container": "!sparse matrix", "owners": "datasets"}, r"toarray"),
    ("refused", {"labels": "!multi-hot"}, r"`y` .* several labels .* `numbers=True`"),
    ("refused", {"owners": "!masked"}, r"`owner` has masked values"),
    ("refused", {"test": "!bytes for numbers, numbers for bytes"}, r"`x_test` are bytes"),
    ("refused", {"model": "!counts in an attribute"}, r"`count`"),
    ("warned", {"loss": "!broadcasts"}, r"depends on other samples"),
    ("refused", {"optimiser": "!scheduler"}, r"the optimiser .* StepLR"),
    ("refused", {"settings": "!NumPy fraction"}, r"`rounds`"),
    ("warned", {"container": "frame", "test": "columns in another order"}, r"matched by their names"),
    ("warned", {"scale": "large", "settings": "independent", "algorithm": "dfedavgm"}, r"no peer accepts"),
]  # fmt: skip


@pytest.mark.parametrize("changes", EQUAL, ids=str)
def test_results_equal_a_plain_loop(changes):
    assert outcome_of({**DEFAULTS, **changes}) == ("equal", "")


@pytest.mark.parametrize(("outcome", "changes", "message"), OTHERS, ids=str)
def test_one_line_of_an_error_or_a_warning_names_the_input(outcome, changes, message):
    actual, text = outcome_of({**DEFAULTS, **changes})
    assert actual == outcome, text
    assert re.search(message, text), text


def test_a_changed_step_size_is_detected(monkeypatch):
    original = plain_loop.train

    def train(network, problem, *arguments):
        problem.settings["gamma"] *= 1.001
        try:
            return original(network, problem, *arguments)
        finally:
            problem.settings["gamma"] /= 1.001

    monkeypatch.setattr(plain_loop, "train", train)
    outcome, message = outcome_of(DEFAULTS)
    assert outcome == "fault"
    assert "parameters differ" in message
