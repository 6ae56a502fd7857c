"""The live page of a run and of a grid, and its server."""

import http.client
import threading

import pytest
from tests.report.synthetic import draw_run
from tests.report.test_matrix import FLIP, MEAN, make_grid

from fedcb2o.cli.watch import make_server
from fedcb2o.errors import RunError
from fedcb2o.report._live import live_page


@pytest.fixture
def folder(tmp_path):
    return draw_run(tmp_path / "run", {"title": "<Mine>"}, rounds=10, seeds=(0, 1)).folder


def test_a_run_that_goes_on_has_curves_and_the_time_left(folder):
    (folder / "seed-1" / "summary.json").unlink()
    log = folder / "seed-1" / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:4]) + lines[4][:20])  # the fifth line is half written
    page = live_page(folder, refresh=3)
    assert "1 of 2 cells done, about " in page
    assert "round 4 of 10" in page
    assert page.count("<polyline") == 1  # the other seed has one evaluated round at most
    assert 'http-equiv="refresh" content="3"' in page
    assert "&lt;Mine&gt;" in page
    assert "<Mine>" not in page


def test_a_finished_grid_lists_all_cells_and_is_not_loaded_again(tmp_path):
    page = live_page(make_grid(tmp_path / "grid"), refresh=3)
    assert f"{MEAN}, Attackers clean ({FLIP})" in page
    assert 'http-equiv="refresh"' not in page


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(RunError, match="there is no run and no grid in"):
        live_page(tmp_path, refresh=3)


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [("/", "127.0.0.1", 200), ("/", "evil.example", 421), ("/config.toml", "localhost", 404)],
)
def test_the_server_answers_browsers_of_this_machine_only(folder, path, host, status):
    with make_server(folder, 0, 5) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        connection.request("GET", path, headers={"Host": f"{host}:{server.server_port}"})
        response = connection.getresponse()
        assert response.status == status
        assert (b"2 of 2 cells done" in response.read()) == (status == 200)
        server.shutdown()
