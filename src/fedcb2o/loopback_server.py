"""Web server for programs of this machine alone."""

import re
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fedcb2o.errors import RunError

HOST = "127.0.0.1"
Answer = Callable[[str], tuple[int, bytes, str]]
"""(target) -> status, content and its type."""

_REQUEST_SECONDS = 10.0
_LOCAL_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
"""Host of a request to this machine. A web page whose name leads to loopback has another one."""


def loopback_server(port: int, answer: Answer) -> ThreadingHTTPServer:
    """Return a server of GET requests at a port; 0 takes any free one.

    A request to another host than loopback gets 421. RunError is raised if the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_SECONDS

        def do_GET(self) -> None:
            hosts = self.headers.get_all("Host", [])
            if len(hosts) != 1 or not _LOCAL_HOST.fullmatch(hosts[0].strip()):
                self.send_error(421, explain="the host must be localhost, 127.0.0.1 or [::1]")
                return
            status, content, kind = answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"cannot serve at {HOST}:{port} ({reason}): choose another port") from error
