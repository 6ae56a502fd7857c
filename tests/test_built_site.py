"""The built site in a browser, narrow and wide, light and dark: nothing overflows, images have
alternative texts, and contrast is sufficient.

The test needs Chromium and the packages of `make docs`, and is skipped without them.
"""

import html
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.test_browser import BROWSER, WIDTHS, browse

ROOT = Path(__file__).parents[1]
MIN_CONTRAST = 4.5
IS_READY = BROWSER is not None and importlib.util.find_spec("furo") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not IS_READY, reason="Chromium or the packages of `make docs` are missing"),
]

# The pages load one after the other in a frame, and this page measures them.
PROBE = """
<!doctype html><pre id="seen"></pre><script>
const frames = %s, seen = {};
const linear = v => v > .04045 ? ((v + .055) / 1.055) ** 2.4 : v / 12.92;
const bright = colour => colour.reduce((sum, v, i) => sum + linear(v / 255) * [.2126, .7152, .0722][i], 0);
const parsed = colour => colour.match(/[\\d.]+/g).map(Number);
const blend = (above, below) => below.map((v, i) => above[i] * (above[3] ?? 1) + v * (1 - (above[3] ?? 1)));
const contrast = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
function look(page) {
  const style = each => page.defaultView.getComputedStyle(each), width = page.documentElement.clientWidth;
  const parents = each => each === page.documentElement ? [] : [each.parentElement, ...parents(each.parentElement)];
  const behind = each => [each, ...parents(each)].map(e => parsed(style(e).backgroundColor)).reverse()
    .reduce((below, above) => blend(above, below), [255, 255, 255]);
  const scrolls = each => parents(each).some(e => e !== page.body && style(e).overflowX !== "visible");
  const name = each => `${each.tagName} ${each.className} ${each.textContent.trim().slice(0, 30)}`;
  const parts = [...page.querySelectorAll("[role=main], [role=main] *")].filter(each => each.checkVisibility());
  const texts = parts.filter(each => !each.closest("svg, math")
    && [...each.childNodes].some(node => node.nodeType === 3 && node.textContent.trim()));
  const shade = each => contrast(bright(behind(each)), bright(blend(parsed(style(each).color), behind(each))));
  return {
    paper: bright(behind(page.body)),
    wider: page.documentElement.scrollWidth - width,
    out: parts.filter(each => each.getBoundingClientRect().right > width + 1 && !scrolls(each)).map(name),
    pale: texts.filter(each => shade(each) < %s).map(each => `${shade(each).toFixed(2)} ${name(each)}`),
    unnamed: parts.filter(each => each.tagName === "IMG"
      && (each.alt.length < 20 || each.alt.includes("_images/"))).map(each => each.src),
  };
}
const load = i => {
  if (i === frames.length) return document.getElementById("seen").textContent = JSON.stringify(seen);
  const [name, src, width] = frames[i], frame = document.createElement("iframe");
  frame.onload = () => {
    seen[name] = look(frame.contentDocument);
    frame.remove();
    load(i + 1);
  };
  document.body.append(Object.assign(frame, {src, width, height: 900}));
};
load(0);
</script>
"""


@pytest.fixture(scope="module")
def pages():
    """Build the site as `make docs` does, and return its pages."""
    build = ROOT / "build" / "docs"
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", "--doctree-dir"]
    folders = map(str, (build / "doctrees", ROOT / "docs", build / "html"))
    subprocess.run([*command, *folders], check=True, cwd=ROOT)
    site = build / "html"
    sources = {
        path.relative_to(ROOT / "docs").with_suffix(".html") for path in ROOT.glob("docs/**/*.md")
    }
    return {str(name): site / name for name in sorted(sources) if (site / name).exists()}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_pages_are_legible_at_any_width(pages, tmp_path, dark):
    assert len(pages) > 40
    frames = [(f"{n} {width}", p.as_uri(), width) for n, p in pages.items() for width in WIDTHS]
    (tmp_path / "probe.html").write_text(PROBE % (json.dumps(frames), MIN_CONTRAST))
    options = ["--blink-settings=preferredColorScheme=0"] * dark
    done = browse((tmp_path / "probe.html").as_uri(), tmp_path, *options)
    match = re.search(r'<pre id="seen">(.+?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stderr
    measured = json.loads(html.unescape(match[1]))
    assert set(measured) == {name for name, *_ in frames}
    for name, page in measured.items():
        assert (page.pop("paper") < 0.1) == dark, name
        assert page == {"wider": 0, "out": [], "pale": [], "unnamed": []}, name
