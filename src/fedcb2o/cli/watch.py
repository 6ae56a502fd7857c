"""The command `watch`: a live page of a run or a grid, for this machine only."""

import html
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fedcb2o.errors import ConfigError, FedCB2OError

_HOST = "127.0.0.1"


def watch(
    folder: Annotated[Path, Argument(metavar="RUN_OR_GRID", help="Folder of a run or of a grid.")],
    port: Annotated[int, Option(min=0, max=65535, help="Port of the page; 0 for any.")] = 8642,
    refresh: Annotated[int, Option(min=1, help="Seconds between two views.")] = 5,
) -> None:
    """Show a run or a grid while it goes on: curves, cells done, time left. Ctrl-C ends it.

    Example: fedcb2o watch runs/quick, then open the address that it prints
    """
    with make_server(folder, port, refresh) as server:
        print(f"http://{_HOST}:{server.server_port}/  (Ctrl-C ends it)", flush=True)
        server.serve_forever()


def make_server(folder: Path, port: int, refresh: int) -> ThreadingHTTPServer:
    """Return a server of the live page, on the loopback interface."""
    from fedcb2o.report._live import live_page

    live_page(folder, refresh)  # raises where the folder holds no run

    class Handler(BaseHTTPRequestHandler):
        """Answers with the page, to browsers of this machine only."""

        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rpartition(":")[0]
            # A page of another site may lead its own name to this machine.
            if self.path != "/" or host not in (_HOST, "localhost"):
                self.send_error(404)
                return
            try:
                page = live_page(folder, refresh)
            except (FedCB2OError, OSError) as error:  # a file is replaced at this moment
                page = f'<meta http-equiv="refresh" content="{refresh}">{html.escape(str(error))}'
            content = page.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            """Print nothing for a request."""

    try:
        return ThreadingHTTPServer((_HOST, port), Handler)
    except OSError as error:
        raise ConfigError(f"port {port} is taken: choose another --port, or 0 for any") from error
