"""The table of docs/robustness.md is what its command computes, as far as no search is in it."""

from pathlib import Path

import pytest
from paper.kappa import allows, exact_kappa, format_kappa, minimal_kappa, rules, upper_bound

PAGE = Path(__file__).parents[1] / "docs" / "robustness.md"
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| 11 |")
]


def test_every_rule_that_admits_so_many_attackers_has_a_row():
    expected = [(11, 2, name) for name, rule in rules(2).items() if allows(rule, 11, 2)]
    assert [(int(n), int(f), name) for n, f, name, *_ in ROWS] == expected


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[2]}-{row[1]}")
def test_bounds_are_computed_and_what_was_found_lies_between_them(row):
    n, f, name = int(row[0]), int(row[1]), row[2]
    found, own, most, mixed, most_mixed, fewest = row[3:]
    bounds = [
        exact_kappa(name, n, f),
        upper_bound(name, n, f),
        upper_bound(name, n, f, mixed=True),
        minimal_kappa(n, f),
    ]
    assert [own, most, most_mixed, fewest] == [format_kappa(value) for value in bounds]
    for value, bound in ((found, bounds[1]), (mixed, bounds[2])):
        if value != "unbounded":
            assert bounds[3] - 1e-3 <= float(value) <= (bound or float("inf")) + 1e-3
    assert not own or found == own
