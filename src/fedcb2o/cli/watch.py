"""The command `watch`: a live page of a run or a grid, for this machine only."""

import html
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedcb2o.errors import FedCB2OError
from fedcb2o.loopback_server import HOST, loopback_server


def watch(
    folder: Annotated[Path, Argument(metavar="RUN_OR_GRID", help="Folder of a run or of a grid.")],
    port: Annotated[int, Option(min=0, max=65535, help="Port of the page; 0 for any.")] = 8642,
    refresh: Annotated[int, Option(min=1, help="Seconds between two views.")] = 5,
) -> None:
    """Show a run or a grid while it goes on: curves, cells done, time left. Ctrl-C ends it.

    Example: fedcb2o watch runs/quick, then open the address that it prints
    """
    with make_server(folder, port, refresh) as server:
        print(f"http://{HOST}:{server.server_port}/  (Ctrl-C ends it)", flush=True)
        server.serve_forever()


def make_server(folder: Path, port: int, refresh: int) -> ThreadingHTTPServer:
    """Return a server of the live page, on the loopback interface."""
    from fedcb2o.report._live import live_page

    live_page(folder, refresh)  # raises where the folder holds no run

    def answer(target: str) -> tuple[int, bytes, str]:
        if target != "/":
            return 404, b"the page is at /", "text/plain"
        try:
            page = live_page(folder, refresh)
        except (FedCB2OError, OSError) as error:  # a file is replaced at this moment
            page = f'<meta http-equiv="refresh" content="{refresh}">{html.escape(str(error))}'
        return 200, page.encode(), "text/html; charset=utf-8"

    return loopback_server(port, answer)
