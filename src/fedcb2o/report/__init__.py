"""From records to tables, figures and one page; it reads records and never trains."""

from fedcb2o.records import summary
from fedcb2o.report.agent_figures import sample_images, weight_matrix
from fedcb2o.report.figures import curves, figure6, source_counts
from fedcb2o.report.grid_page import grid_notes, report_grid
from fedcb2o.report.grid_results import is_grid, read_grid
from fedcb2o.report.grid_tables import terminal_tables
from fedcb2o.report.page import report
from fedcb2o.report.table_formats import to_html, to_latex, to_markdown, to_readable, to_rich
from fedcb2o.report.tables import (
    by_source_count,
    compare,
    incomplete_note,
    net_attack_success,
    pair_statistics,
    seed_caption,
    unverified_note,
)

__all__ = [
    "by_source_count",
    "compare",
    "curves",
    "figure6",
    "grid_notes",
    "incomplete_note",
    "is_grid",
    "net_attack_success",
    "pair_statistics",
    "read_grid",
    "report",
    "report_grid",
    "sample_images",
    "seed_caption",
    "source_counts",
    "summary",
    "terminal_tables",
    "to_html",
    "to_latex",
    "to_markdown",
    "to_readable",
    "to_rich",
    "unverified_note",
    "weight_matrix",
]
