"""Server of /metrics and /health on a loopback port (extra `metrics`)."""

import json
import re
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fedcb2o.errors import ConfigError, RunError

_HOST = "127.0.0.1"
_REQUEST_SECONDS = 10.0
_LOCAL_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
"""Host of a request to this machine. A web page whose name leads to loopback has another one."""


class MetricsServer:
    """Server of the metrics and the health of a process.

    /health answers 503 if the process is not healthy. A request to another host than loopback gets
    421. Port 0 takes any free port. `expires`, the expiry of the TLS certificate, is a metric.
    `health` returns the state: the key `healthy`, and others. `before_metrics` is called before the
    metrics are read.
    """

    def __init__(
        self,
        port: int,
        *,
        expires: datetime,
        health: Callable[[], Mapping[str, Any]],
        before_metrics: Callable[[], None] = lambda: None,
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry, generate_latest
        except ImportError as error:
            raise ConfigError(
                "--metrics needs prometheus-client: pip install 'fedcb2o[metrics]'"
            ) from error
        # The global registry would mix the metrics of several nodes in one process.
        self._registry = CollectorRegistry()
        self._generate: Callable[[], bytes] = partial(generate_latest, self._registry)
        self._health = health
        self._before_metrics = before_metrics
        expiry = self.gauge(
            "certificate_expiry_seconds", "Expiry of the TLS certificate, Unix time"
        )
        expiry.set(expires.timestamp())
        self._server = self._listen(port)
        self.port = self._server.server_address[1]

    def start(self) -> None:
        """Serve from now on."""
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def gauge(self, key: str, text: str, *labels: str) -> Any:
        """Return a new gauge of prometheus-client.

        `key` is its name without "fedcb2o_".
        """
        from prometheus_client import Gauge

        return Gauge(f"fedcb2o_{key}", text, labels, registry=self._registry)

    def counter(self, key: str, text: str, *labels: str) -> Any:
        """Return a new counter of prometheus-client.

        `key` is its name without "fedcb2o_" and "_total".
        """
        from prometheus_client import Counter

        return Counter(f"fedcb2o_{key}", text, labels, registry=self._registry)

    def _listen(self, port: int) -> ThreadingHTTPServer:
        metrics = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_SECONDS

            def do_GET(self) -> None:
                hosts = self.headers.get_all("Host", [])
                if len(hosts) != 1 or not _LOCAL_HOST.fullmatch(hosts[0].strip()):
                    self.send_error(421, explain="the host must be localhost, 127.0.0.1 or [::1]")
                elif self.path == "/metrics":
                    metrics._before_metrics()
                    self._send(200, metrics._generate(), "text/plain; version=0.0.4")
                elif self.path == "/health":
                    content = metrics._health()
                    status = 200 if content["healthy"] else 503
                    self._send(status, json.dumps(content).encode(), "application/json")
                else:
                    self.send_error(404)

            def _send(self, status: int, content: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None: ...

        try:
            return ThreadingHTTPServer((_HOST, port), Handler)
        except OSError as error:
            raise RunError(
                f"cannot serve metrics at {_HOST}:{port}: {error.strerror or error}"
            ) from error
