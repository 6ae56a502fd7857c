"""Pages in a browser, narrow and wide, by day and by night: nothing is cut off, all can be read,
tables sort by keys.

It takes Chromium (Debian: apt-get install chromium), and is skipped where that is not installed.
"""

import html
import json
import re
import shutil
import subprocess

import pytest
from matplotlib.figure import Figure
from tests.peer.folders import draw_node
from tests.report.synthetic import draw_run
from tests.report.test_matrix import make_grid

from fedcb2o.peer.report import write_node_report as report_node
from fedcb2o.report import _grid_page, _page, read_grid, report, report_grid

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WIDTHS = (420, 1400)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")

# Each page in a frame of its own for each width, looked at from outside: its policy lets no other
# script into it.
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
  const table = page.querySelector("table"), button = table.querySelector("th:nth-child(2) button");
  const column = () => [...table.tBodies[0].rows].map(row => row.cells[1].textContent);
  const before = column(), orders = [];
  for (let i = 0; i < 3; i++) {
    button.click();
    orders.push([button.parentNode.getAttribute("aria-sort"), column()]);
  }
  return {
    paper: bright(paper), wider: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    contrasts: all("td, th, p, a, summary").map(cell), figures, before, orders,
    frames: all(".scroll").map(each => each.tabIndex),
    out: all("table, svg").filter(each => !each.closest(".scroll")
      && each.getBoundingClientRect().right > page.documentElement.clientWidth + 1).length,
    lost: all("nav a").filter(each => !page.getElementById(each.hash.slice(1))).length,
  };
}
let left = frames.length;
for (const [name, address, width] of frames) {
  const frame = document.createElement("iframe");
  Object.assign(frame, {width, height: 900, src: address});
  frame.onload = () => {
    seen[name] = look(frame.contentDocument);
    if (--left === 0) document.getElementById("seen").textContent = JSON.stringify(seen);
  };
  document.body.append(frame);
}
</script>
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    few = {"rounds": 10, "seeds": (0, 1), "benign": 3, "malicious": 1}
    runs = [
        draw_run(folder / f"run-{i}", {"title": f"FedCB2O, variant {i}"}, **few, hit=i / 5)
        for i in range(2)
    ]
    with pytest.MonkeyPatch.context() as patch:
        for module in (_page, _grid_page):
            patch.setattr(module, "to_png", lambda _: b"")  # the files beside the page
        report(runs, folder / "runs")
        patch.setattr(_grid_page, "draw_heat_map", lambda *tables, **look: Figure(figsize=(1, 1)))
        report_grid(read_grid(make_grid(folder / "grid")), folder / "matrices")
    node = draw_node(folder / "node", agents=5, rounds=8, budget=3)
    report_node(node)
    return {name: folder / name / "report.html" for name in ("runs", "matrices", "node")}


def seen(pages, folder, *options):
    """What the browser sees of each page at each width."""
    frames = [
        (f"{name} {width}", path.as_uri(), width)
        for name, path in pages.items()
        for width in WIDTHS
    ]
    (folder / "probe.html").write_text(PROBE % json.dumps(frames))
    own = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--timeout=30000",
    ]
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [BROWSER, *own, profile, "--virtual-time-budget=10000", *options, "--dump-dom"]
    done = subprocess.run(
        [*command, str(folder / "probe.html")], capture_output=True, text=True, timeout=60
    )
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    return json.loads(html.unescape(found[1]))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_pages_are_legible_at_any_width(pages, tmp_path, dark):
    for name, found in seen(
        pages, tmp_path, *["--blink-settings=preferredColorScheme=0"] * dark
    ).items():
        assert (found["paper"] < 0.1) == dark, name
        assert found["wider"] <= 0, name
        assert found["out"] == 0, name
        assert min(found["contrasts"]) > 4.5, name
        assert min((scale for _, scale in found["figures"]), default=1) > 0.8, (
            name
        )  # pixels for each point of letters
        assert all(len(told) > 30 for told, _ in found["figures"]), name
        assert set(found["frames"]) == {0}, name  # they scroll by keys
        assert found["lost"] == 0, name
        (_, up), (_, down), (_, again) = found["orders"]
        assert [way for way, _ in found["orders"]] == ["ascending", "descending", None], name
        assert list(map(number, up)) == sorted(map(number, up)), name
        assert list(map(number, down)) == sorted(map(number, up), reverse=True), name
        assert again == found["before"], name


def number(cell):
    return float(re.match(r"[\d.]+", cell)[0])
