"""Pages in a browser, at two widths, light and dark: layout, contrast and sorting of tables.

The results explorer computes the statistics of the reports.

The tests need Chromium (Debian: apt-get install chromium), and are skipped without it.
"""

import html
import json
import re
import shutil
import subprocess
from urllib.parse import urlencode

import pytest
from matplotlib.figure import Figure
from paper import results
from tests.peer.folders import draw_node
from tests.report.synthetic import draw_run
from tests.report.test_matrix import MEAN, make_grid

from fedcb2o.peer.report.node_page import write_node_report as report_node
from fedcb2o.report import (
    SettingResults,
    _article,
    _grid_page,
    _page,
    read_grid,
    report,
    report_grid,
)
from fedcb2o.report._regret import regrets
from fedcb2o.report._statistics import holm_correction, paired_differences, seed_statistics

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WIDTHS = (420, 1400)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")

# Each page in one frame per width, measured by this page, because the policy of a report forbids
# other scripts.
PROBE = """
<!doctype html><pre id="seen"></pre><script>
const frames = %s, seen = {};
const bright = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v > .04045 ? ((v + .055) / 1.055) ** 2.4 : v / 12.92)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const parsed = colour => colour.match(/[\\d.]+/g).map(Number);
const contrast = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
function look(page) {
  const all = what => [...page.querySelectorAll(what)], style = each => page.defaultView.getComputedStyle(each);
  const paper = parsed(style(page.body).backgroundColor);
  const cell = each => {
    const [r, g, b, alpha = 1] = parsed(style(each).backgroundColor);
    const under = [r, g, b].map((v, i) => v * alpha + paper[i] * (1 - alpha));
    return contrast(bright(parsed(style(each).color)), bright(under));
  };
  const figures = all("svg").map(each => [each.getAttribute("aria-label"),
    each.getBoundingClientRect().width / each.viewBox.baseVal.width]);
  const table = () => page.querySelector("table"), head = () => table().querySelector("thead th:nth-child(2)");
  const column = () => [...table().tBodies[0].rows].map(row => row.cells[1].textContent);
  const before = column(), orders = [];
  for (let i = 0; i < 3; i++) {
    head().querySelector("button").click();
    orders.push([head().getAttribute("aria-sort"), column()]);
  }
  let moved = null;
  if (page.getElementById("data")) {
    const cells = table().tBodies[0].rows[0].cells;
    cells[1].focus();
    cells[1].dispatchEvent(new page.defaultView.KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}));
    moved = [page.activeElement === cells[2], cells[2].dataset.detail];
  }
  const unnamed = all("select, input, button").filter(each =>
    !each.textContent.trim() && !each.closest("label")?.textContent.trim()).length;
  return {
    paper: bright(paper), wider: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    contrasts: all("td, th, p, a, summary").map(cell), figures, before, orders,
    frames: all(".scroll").map(each => each.tabIndex),
    out: all("table, svg").filter(each => !each.closest(".scroll")
      && each.getBoundingClientRect().right > page.documentElement.clientWidth + 1).length,
    moved, unnamed, lost: all("nav a").filter(each => !page.getElementById(each.hash.slice(1))).length,
  };
}
let left = frames.length;
for (const [name, address, width] of frames) {
  const frame = document.createElement("iframe");
  Object.assign(frame, {width, height: 900, src: address});
  const wait = () => {
    const page = frame.contentDocument;
    if (page.getElementById("data") && !page.body.dataset.ready) return setTimeout(wait, 50);
    seen[name] = look(page);
    if (--left === 0) document.getElementById("seen").textContent = JSON.stringify(seen);
  };
  frame.onload = wait;
  document.body.append(frame);
}
</script>
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    options = {"rounds": 10, "seeds": (0, 1), "benign": 3, "malicious": 1}
    runs = [
        draw_run(folder / f"run-{i}", {"title": f"FedCB2O, variant {i}"}, **options, hit=i / 5)
        for i in range(2)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_page, "to_file", lambda *_: b"")  # files next to the page
        report(runs, folder / "runs")
        for module in (_article, _grid_page):
            patch.setattr(module, "draw_heat_map", lambda *tables, **look: Figure(figsize=(1, 1)))
        report_grid(read_grid(make_grid(folder / "grid")), folder / "matrices")
    node = draw_node(folder / "node", agents=5, rounds=8, budget=3)
    report_node(node)
    return {name: folder / name / "report.html" for name in ("runs", "matrices", "node")}


def browse(address, folder, *options):
    """Return the DOM of a page after its scripts have run."""
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    arguments += ["--timeout=30000", "--virtual-time-budget=10000", "--dump-dom"]
    command = [BROWSER, *arguments, f"--user-data-dir={folder / 'profile'}", *options, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def measure_pages(pages, folder, *options):
    """Return the measurements of the probe for each page at each width."""
    frames = [
        (f"{name} {width}", path.as_uri(), width)
        for name, path in pages.items()
        for width in WIDTHS
    ]
    (folder / "probe.html").write_text(PROBE % json.dumps(frames))
    done = browse((folder / "probe.html").as_uri(), folder, *options)
    match = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stderr
    return json.loads(html.unescape(match[1]))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_pages_are_legible_at_any_width(pages, tmp_path, dark):
    for name, measured in measure_pages(
        pages, tmp_path, *["--blink-settings=preferredColorScheme=0"] * dark
    ).items():
        assert (measured["paper"] < 0.1) == dark, name
        assert measured["wider"] <= 0, name
        assert measured["out"] == 0, name
        assert min(measured["contrasts"]) > 4.5, name
        # pixels per point of text
        assert min((scale for _, scale in measured["figures"]), default=1) > 0.8, name
        assert all(len(text) > 20 for text, _ in measured["figures"]), name
        assert set(measured["frames"]) == {0}, name  # the frames scroll by keys
        assert measured["lost"] == 0, name
        assert measured["unnamed"] == 0, name
        if measured["moved"]:
            is_next_cell, detail = measured["moved"]
            assert is_next_cell, name
            assert re.search(
                r"Median, Attackers clean: 87\.5; too few seeds for an interval", detail
            )
        (_, up), (_, down), (_, unsorted) = measured["orders"]
        assert [order for order, _ in measured["orders"]] == ["ascending", "descending", None], name
        assert list(map(first_number, up)) == sorted(map(first_number, up)), name
        assert list(map(first_number, down)) == sorted(map(first_number, up), reverse=True), name
        assert unsorted == measured["before"], name


def first_number(cell):
    return float(re.match(r"[\d.]+", cell)[0])


def explorer_table(folder, **state):
    """Return the texts of the explorer's table by row and column, with plain minus signs."""
    address = (
        f"{results.EXPLORER.as_uri()}#{urlencode({'grid': 'attacks-all-data', 'ci': 1, **state})}"
    )
    dom = browse(address, folder).stdout
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", dom, re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
    plain = [[html.unescape(re.sub(r"<[^>]+>", "", text)) for text in row] for row in cells]
    head, *body = plain
    return {
        row[0]: {name: text.replace("−", "-") for name, text in zip(head[1:], row[1:], strict=True)}
        for row in body
    }


def numbers(text):
    return [float(part) for part in re.findall(r"[+-]?\d+\.\d", text)]


@pytest.mark.slow
@pytest.mark.parametrize("value", ["accuracy", "attack_success_rate"])
def test_the_explorer_computes_the_differences_of_the_reports(tmp_path, value):
    view = SettingResults(results.grid_results("attacks-all-data"), "")
    table = explorer_table(tmp_path, measure=value, show="difference")
    complete = results._complete_defences(view)
    rows = view.rows[view.rows.defence.isin(complete)]
    expected = paired_differences(rows, value, view.results.reference)
    p = holm_correction(expected.p)
    assert set(table) == set(complete)
    assert len(expected) >= 60
    for (defence, attack), row in expected.iterrows():
        text = table[defence][attack]
        percentages = [100 * row[name] for name in ("mean", "low", "high")]
        assert numbers(text) == pytest.approx(percentages, abs=0.11), (defence, attack)
        if abs(p[defence, attack] - 0.05) > 0.001:  # the page has rounded values
            assert ("*" in text) == (p[defence, attack] < 0.05), (defence, attack)


@pytest.mark.slow
@pytest.mark.parametrize("show", ["value", "regret"])
def test_the_explorer_computes_the_intervals_and_regrets_of_the_reports(tmp_path, show):
    view = SettingResults(results.grid_results("attacks-all-data"), "")
    statistics = seed_statistics(view.rows, "accuracy")
    if show == "regret":
        statistics = regrets(view.shortfalls("accuracy"))
    for defence, cells in explorer_table(tmp_path, show=show).items():
        for attack in view.columns("accuracy"):
            if cells[attack].startswith("best"):
                continue
            row = statistics.loc[defence, attack]
            percentages = [100 * row[name] for name in ("mean", "low", "high")]
            assert numbers(cells[attack]) == pytest.approx(percentages, abs=0.11), (defence, attack)


DROP = """
<!doctype html><pre id="seen"></pre><iframe src="%s"></iframe><script>
const frame = document.querySelector("iframe");
const wait = () => {
  const page = frame.contentDocument;
  if (!page.body.dataset.ready) return setTimeout(wait, 50);
  // As a reader's file manager drops it.
  const {DataTransfer, DragEvent, File} = frame.contentWindow, dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([%s], "mine.csv", {type: "text/csv"}));
  page.body.dispatchEvent(new DragEvent("drop", {dataTransfer, bubbles: true, cancelable: true}));
  read(page);
};
const read = page => {
  if (page.getElementById("table").rows.length < 4) return setTimeout(() => read(page), 50);
  const rows = [...page.getElementById("table").rows].map(row => [...row.cells].map(cell => cell.innerText));
  document.getElementById("seen").textContent = JSON.stringify(rows);
};
frame.onload = wait;
</script>
"""


def test_a_summary_of_the_reader_is_shown_beside_the_grid(tmp_path):
    grid = read_grid(make_grid(tmp_path / "grid"))
    (tmp_path / "report.html").write_text(_grid_page.explorer_page([grid], "Hand"))
    text = grid.summary_csv().replace(f",{MEAN},", ',"Mine, tuned",')
    page = DROP % ((tmp_path / "report.html").as_uri(), json.dumps(text))
    (tmp_path / "probe.html").write_text(page)
    done = browse((tmp_path / "probe.html").as_uri(), tmp_path)
    match = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    rows = {row[0].split(" (")[0]: row[1:] for row in json.loads(html.unescape(match[1]))}
    assert rows["Mine, tuned"] == rows[MEAN]
    assert len(rows) == 1 + 3  # a head above two defences and the added one
