"""Server of /metrics and /health on a loopback port (extra `metrics`)."""

import json
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Any

from fedcb2o.errors import ConfigError
from fedcb2o.loopback_server import loopback_server


class MetricsServer:
    """Server of the metrics and the health of a process.

    /health answers 503 if the process is not healthy. Port 0 takes any free port. `expires`, the
    expiry of the TLS certificate, is a metric. `health` returns the state: the key `healthy`, and
    others. `before_metrics` is called before the metrics are read.
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
        self._server = loopback_server(port, self._answer)
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

    def _answer(self, target: str) -> tuple[int, bytes, str]:
        if target == "/metrics":
            self._before_metrics()
            return 200, self._generate(), "text/plain; version=0.0.4"
        if target == "/health":
            content = self._health()
            return (
                200 if content["healthy"] else 503,
                json.dumps(content).encode(),
                "application/json",
            )
        return 404, b"there are /metrics and /health", "text/plain"
