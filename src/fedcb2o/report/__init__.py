"""Reports: tables, figures and pages from records, without training."""

from fedcb2o.records import summary
from fedcb2o.report._agent_figures import sample_images, weight_matrix
from fedcb2o.report._article import ArticleForm
from fedcb2o.report._explorer import explorer_page
from fedcb2o.report._figures import Curve, curve_panels, curves, figure6, source_counts
from fedcb2o.report._grid_page import grid_notes, regret_figure, report_grid
from fedcb2o.report._page import Page, create_page
from fedcb2o.report._panels import draw_panels
from fedcb2o.report._table_formats import to_html, to_latex, to_markdown, to_readable, to_rich
from fedcb2o.report.grid_results import GridResults, is_grid, read_grid
from fedcb2o.report.grid_tables import SettingResults, terminal_tables
from fedcb2o.report.run_page import report
from fedcb2o.report.tables import (
    by_agent,
    by_source_count,
    comparability_notes,
    compare,
    incomplete_note,
    left_out_note,
    net_attack_success,
    pair_statistics,
    seed_caption,
    unverified_note,
)

__all__ = [
    "ArticleForm",
    "Curve",
    "GridResults",
    "Page",
    "SettingResults",
    "by_agent",
    "by_source_count",
    "comparability_notes",
    "compare",
    "create_page",
    "curve_panels",
    "curves",
    "draw_panels",
    "explorer_page",
    "figure6",
    "grid_notes",
    "incomplete_note",
    "is_grid",
    "left_out_note",
    "net_attack_success",
    "pair_statistics",
    "read_grid",
    "regret_figure",
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
