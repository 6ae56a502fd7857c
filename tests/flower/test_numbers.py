"""Rows of models and medians of metrics, which need no Flower."""

import importlib.util
from pathlib import Path

import pytest
import torch

import fedcb2o
from fedcb2o.errors import ConfigError

# The package `fedcb2o.flower` cannot be imported without Flower.
PATH = Path(fedcb2o.__file__).parent / "flower" / "_numbers.py"
SPEC = importlib.util.spec_from_file_location("_numbers", PATH)
numbers = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(numbers)

HONEST = [{"accuracy": value, "classes": [value, 1.0]} for value in (0.8, 0.9, 0.85)]
NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    "claim",
    [
        {"accuracy": 1e300, "classes": [1e300, -1e300]},
        {"accuracy": NAN, "classes": [NAN, NAN]},
        {"accuracy": -INFINITY, "classes": [-INFINITY, INFINITY]},
        {"accuracy": [0.0], "classes": 0.0},
        {"classes": [0.0]},
        {"invented": 1.0},
        {},
    ],
)
@pytest.mark.parametrize("position", [0, 3])
def test_one_client_cannot_set_a_metric(claim, position):
    records = [*HONEST]
    records.insert(position, claim)
    medians = numbers.median_metrics(records)
    assert medians.keys() - {"accuracy-without-value"} == {"accuracy", "classes"}
    assert 0.8 <= medians["accuracy"] <= 0.9
    assert 0.8 <= medians["classes"][0] <= 0.9


def test_medians_of_an_even_and_an_odd_number_of_clients():
    records = [{"a": 1, "b": [1.0, 4.0]}, {"a": 4, "b": [3.0, 0.0]}]
    assert numbers.median_metrics(records) == {"a": 2.5, "b": [2.0, 2.0]}
    assert numbers.median_metrics([*records, {"a": 2, "b": [9.0, 1.0]}]) == {"a": 2, "b": [3, 1]}
    assert numbers.median_metrics([{"a": [7.0], "b": []}]) == {"a": [7.0], "b": []}


def test_most_clients_without_a_number_give_none():
    assert torch.tensor(numbers.median_metrics([{"loss": NAN}] * 2 + [{"loss": 1}])["loss"]).isnan()
    assert numbers.median_metrics([{"loss": 1.0}, {}]) == {}


def test_clients_without_a_value_are_counted_and_left_out():
    """Neither a missing number nor NaN moves the median towards the large ones."""
    records = [{"auc": 0.6}, {"auc": NAN}, {"auc": 0.7}, {"auc": 0.8}, {}]
    assert numbers.median_metrics(records) == {"auc": 0.7, "auc-without-value": 2}
    lists = [{"a": [1.0, NAN]}, {"a": [2.0, 5.0]}, {"a": [NAN, 7.0]}]
    assert numbers.median_metrics(lists) == {"a": [1.5, 6.0]}


def test_metrics_of_outputs_by_name():
    outputs = torch.tensor([[2.0, 0.0], [1.0, 3.0], [0.0, 1.0], [0.5, 0.0]], requires_grad=True)
    y = torch.tensor([0, 1, 0, 1])
    weighted = {"name": "f1", "average": "weighted", "column": "f1_weighted"}
    # Probabilities of class 1 order 3 of 4 pairs; both classes have F1 = 1 / 2.
    found = numbers.output_metrics(outputs, y, ["auc", weighted, half])
    assert found == {"auc": 0.75, "f1_weighted": 0.5, "half": 0.5}
    assert torch.tensor(numbers.output_metrics(outputs, 0 * y, ["auc"])["auc"]).isnan()
    assert numbers.output_metrics(torch.tensor([1.0, 4.0]), torch.zeros(2), ["mae"]) == {"mae": 2.5}
    with pytest.raises(ConfigError, match="no metric `acu`"):
        numbers.output_metrics(outputs, y, ["acu"])


def half(outputs, targets):
    return 0.5


def test_rows_keep_the_digits_of_float64():
    w = torch.tensor([2**24 + 1, 1 / 3], dtype=torch.float64)  # 2^24 + 1 is not in float32
    state = {"n": torch.tensor(3), "w": w}
    row = numbers.to_row(state)
    assert row.dtype == torch.float64
    restored = numbers.from_row(row, state)
    assert torch.equal(restored["w"], state["w"])
    assert restored["w"][0] == 16777217
    mixed = {"a": torch.ones(1), "b": torch.full((1,), 0.1, dtype=torch.float64)}
    assert numbers.to_row(mixed).tolist() == [1.0, 0.1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_of_shorter_types_are_float32(dtype):
    assert numbers.to_row({"w": torch.ones(2, dtype=dtype)}).dtype == torch.float32
