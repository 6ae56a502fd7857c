"""The bounds in the table of notes/robustness.md are computed here; values found must obey them."""

from pathlib import Path

import pytest
from paper.kappa import allows, exact_kappa, format_kappa, minimal_kappa, rules, upper_bound

PAGE = Path(__file__).parents[1] / "notes" / "robustness.md"
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| 11 |")
]


def test_every_rule_for_two_of_eleven_attackers_has_a_row():
    expected = [(11, 2, name) for name, rule in rules(2).items() if allows(rule, 11, 2)]
    assert [(int(n), int(f), name) for n, f, name, *_ in ROWS] == expected


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[2]}-{row[1]}")
def test_bounds_equal_computed_ones_and_contain_the_values_found(row):
    n, f, name = int(row[0]), int(row[1]), row[2]
    largest_found, exact, upper, mixed, upper_mixed, lower = row[3:]
    bounds = [
        exact_kappa(name, n, f),
        upper_bound(name, n, f),
        upper_bound(name, n, f, mixed=True),
        minimal_kappa(n, f),
    ]
    assert [exact, upper, upper_mixed, lower] == [format_kappa(value) for value in bounds]
    for value, bound in ((largest_found, bounds[1]), (mixed, bounds[2])):
        if value != "unbounded":
            assert bounds[3] - 1e-3 <= float(value) <= (bound or float("inf")) + 1e-3
    assert not exact or largest_found == exact
