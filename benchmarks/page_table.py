"""Tables of pages made from committed values."""

import csv
from collections.abc import Sequence
from pathlib import Path


def write_table(page: Path, marks: tuple[str, str], values: Path, num_labels: int) -> None:
    """Write a CSV file as a table between two marks of a page.

    Args:
        page: The page, in Markdown.
        marks: Lines before and after the table.
        values: The values, with a header.
        num_labels: Number of columns of text, the first ones; the others are numbers.
    """
    with values.open(encoding="utf-8") as file:
        rows = list(csv.reader(file))
    replace_table(page, marks, rows, num_labels)


def replace_table(
    page: Path, marks: tuple[str, str], rows: Sequence[Sequence[str]], num_labels: int
) -> None:
    """Write rows as a table between two marks of a page.

    Args:
        page: The page, in Markdown.
        marks: Lines before and after the table.
        rows: The header and the rows.
        num_labels: Number of columns of text, the first ones; the others are numbers.
    """
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * num_labels + "---:|" * (len(rows[0]) - num_labels))
    before, rest = page.read_text(encoding="utf-8").split(marks[0])
    after = rest.split(marks[1])[1]
    table = "\n".join(lines)
    page.write_text(f"{before}{marks[0]}\n\n{table}\n\n{marks[1]}{after}", encoding="utf-8")
