"""The figure and the animation of particles: every scene is drawn, and panel (b) has its values."""

import dataclasses

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from fedcb2o.report import Decay, Scene, draw_landscape, write_animation


def scene(*, dim=2, clusters=1, runs=1, malicious=3, upper=True, target=True, band=True, frames=8):
    draw = np.random.default_rng(0)
    num_drawn, n = min(dim, 2), 20 * clusters
    grid = np.linspace(-2, 2, 31) if dim <= 2 else None
    lower = None if grid is None else np.stack(
        [np.add.outer(grid**2, (grid - k) ** 2) if dim == 2 else (grid - k) ** 2 for k in range(clusters)]
    )  # fmt: skip
    shrink = np.exp(-np.arange(frames))[:, None, None]
    t = np.linspace(0, 3, 40)
    V = (
        2
        * np.exp(-1.5 * t)[:, None, None]
        * np.linspace(0.5, 1.5, runs)[None, :, None]
        * np.ones(clusters)
    )
    line = np.repeat(2 * np.exp(-t)[:, None], clusters, 1)
    return Scene(
        title="a title < with & signs", dim=dim, box=(-2.0, 2.0), grid=grid, lower_values=lower,
        upper_values=lower[0] + 1 if upper and lower is not None else None, times=np.arange(frames) * 0.5,
        theta=shrink * draw.standard_normal((n, num_drawn)), cluster=np.repeat(np.arange(clusters), 20),
        theta_m=np.ones((frames, malicious, num_drawn)), m=shrink * np.ones((clusters, num_drawn)),
        final_points=draw.standard_normal((runs, clusters, num_drawn)), target=np.zeros((clusters, num_drawn)) if target else None,
        decay=Decay(
            t, V, [1.5] * clusters, [(0.0, 1.0)] * clusters, "theory: 1", line, (line**1.1, line**0.9) if band else None
        ),
    )  # fmt: skip


CASES = {
    "plane": {},
    "line": {"dim": 1},
    "high": {"dim": 5, "upper": False},
    "clusters": {"clusters": 2, "malicious": 0},
    "runs": {"runs": 60, "band": False},
    "bare": {"target": False, "upper": False, "malicious": 0},
    "one frame": {"frames": 1},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_scene_is_drawn_without_changing_matplotlibs_settings(case, tmp_path):
    before, scene_of_case = dict(mpl.rcParams), scene(**case)
    figure = draw_landscape(scene_of_case)
    figure.savefig(tmp_path / "figure.png", dpi=30)
    assert (tmp_path / "figure.png").stat().st_size > 2000
    assert dict(mpl.rcParams) == before
    left, right = figure.axes[:2]
    labels = [text.get_text() for text in left.get_legend().get_texts()]
    assert ("malicious" in labels) == (scene_of_case.theta_m.shape[1] > 0)
    assert ("target" in labels) == (scene_of_case.target is not None)
    assert any(name.startswith("t = ") for name in labels)
    assert ("without landscape" in left.get_title(loc="left")) == (scene_of_case.dim > 2)
    assert right.get_yscale() == "log"


def test_panel_b_shows_the_median_the_fit_and_the_theory():
    scene_of_runs = scene(runs=5)
    right = draw_landscape(scene_of_runs).axes[1]
    median = next(
        line for line in right.lines if str(line.get_label()).startswith("median of 5 runs")
    )
    assert median.get_ydata() == pytest.approx(np.median(scene_of_runs.decay.V[..., 0], 1))
    assert "fitted rate 1.5 (dashed, t = 0 to 1)" in median.get_label()
    dashed = right.lines[-1]
    slope = np.polyfit(dashed.get_xdata(), np.log(dashed.get_ydata()), 1)[0]
    assert slope == pytest.approx(-1.5)
    assert [artist.get_label() for artist in right.collections] == ["theory: 1"]
    line = draw_landscape(scene(band=False)).axes[1]
    assert "theory: 1" in [artist.get_label() for artist in line.lines]


def test_diverged_and_missing_particles_are_omitted(tmp_path):
    scene_with_gaps = scene()
    values = scene_with_gaps.decay.V.copy()
    values[3], values[5], values[7] = np.nan, np.inf, 0.0
    theta = scene_with_gaps.theta.copy()
    theta[2], theta[3, 0] = np.nan, np.inf
    lower = scene_with_gaps.lower_values.copy()
    lower[:, :3] = np.nan
    scene_with_gaps = dataclasses.replace(
        scene_with_gaps,
        theta=theta,
        lower_values=lower,
        decay=dataclasses.replace(scene_with_gaps.decay, V=values, fitted_rates=[np.nan]),
    )
    draw_landscape(scene_with_gaps).savefig(tmp_path / "figure.png", dpi=30)
    no_decay = dataclasses.replace(
        scene_with_gaps.decay, V=np.full_like(values, np.nan), theory=None, theory_bounds=None
    )
    figure = draw_landscape(dataclasses.replace(scene_with_gaps, decay=no_decay))
    figure.savefig(tmp_path / "figure.png", dpi=30)
    assert "theory: 1" in [text.get_text() for text in figure.axes[1].get_legend().get_texts()]


def test_a_gif_has_all_frames(tmp_path):
    write_animation(scene(frames=6), tmp_path / "film.gif")
    with Image.open(tmp_path / "film.gif") as film:
        assert film.n_frames == 6
        assert film.width > 300


@pytest.mark.parametrize(
    "case", [{"dim": 1, "runs": 3}, {"dim": 3, "clusters": 2}], ids=["line", "high"]
)
def test_a_page_needs_no_other_files(tmp_path, case):
    write_animation(scene(frames=4, **case), tmp_path / "film.html")
    page = (tmp_path / "film.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 4
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "<link" not in page
    assert "<title>a title &lt; with &amp; signs</title>" in page
    assert "▶" in page
    assert 'alt="Particles on the landscape until t = ' in page
