"""Health and metrics of a node on a loopback port (extra `metrics`)."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fedcb2o.errors import ConfigError, RunError
from fedcb2o.peer.node._observer import NodeObserver

_HOST = "127.0.0.1"
_MIN_STALE_SECONDS = 600.0
_REQUEST_SECONDS = 10.0


class NodeMetrics:
    """Observer that passes a node's progress on and serves it at /metrics and /health.

    /health answers 503 if the node began no phase of a round for a long time.

    Args:
        inner: The next observer.
        port: Port of 127.0.0.1; 0 for any.
        name: The member's name.
        rounds: Number of rounds.
        round_seconds: Longest usual duration of a round without its training.
        expires: Expiry of the TLS certificate.

    Attributes:
        port: The port.

    Raises:
        ConfigError: The extra is missing.
        RunError: The port cannot be used.
    """

    def __init__(
        self,
        inner: NodeObserver,
        port: int,
        *,
        name: str,
        rounds: int,
        round_seconds: float,
        expires: datetime,
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
        except ImportError as error:
            raise ConfigError(
                "--metrics needs prometheus-client: pip install 'fedcb2o[metrics]'"
            ) from error
        self._inner = inner
        self._name = name
        self._rounds = rounds
        self._stale_seconds = max(_MIN_STALE_SECONDS, 5 * round_seconds)
        self._round = 0
        self._phase = "starting"
        self._last_progress = time.monotonic()
        registry = CollectorRegistry()
        self._generate: Callable[[], bytes] = partial(generate_latest, registry)

        def gauge(key: str, text: str) -> Any:
            return Gauge(f"fedcb2o_{key}", text, registry=registry)

        def counter(key: str, text: str, *labels: str) -> Any:
            return Counter(f"fedcb2o_{key}", text, labels, registry=registry)

        gauge("rounds", "Rounds of the run").set(rounds)
        expiry = gauge("certificate_expiry_seconds", "Expiry of the TLS certificate, Unix time")
        expiry.set(expires.timestamp())
        self._gauges = {
            "round": gauge("round", "Rounds that are done"),
            "accuracy": gauge("accuracy", "Accuracy on the node's own test samples"),
            "train_loss": gauge("train_loss", "Training loss of the last round"),
            "own_weight": gauge("own_weight", "Weight of the node's own model"),
        }
        self._peers = gauge("peers_connected", "Members with a working link")
        self._seconds = gauge("round_seconds", "Duration of the last round without its pause")
        self._received = counter("models_received", "Received models")
        self._late = counter("models_missing", "Asked models that did not arrive")
        self._refused = counter("models_refused", "Refused models", "reason")
        self._bytes = counter("traffic_bytes", "Bytes of answers", "direction")
        self._notes = counter("notes", "Messages for the operator")
        self._server = self._listen(port)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def on_phase(self, n: int, name: str) -> None:
        self._last_progress = time.monotonic()
        self._phase = name
        self._inner.on_phase(n, name)

    def on_round(self, line: Mapping[str, Any]) -> None:
        self._last_progress = time.monotonic()
        self._round = int(line["round"])
        for key, gauge in self._gauges.items():
            if line.get(key) is not None:
                gauge.set(line[key])
        self._peers.set(len(line["alive"]))
        self._seconds.set(line["seconds"]["round"])
        self._received.inc(len(line["received"]))
        self._late.inc(len(line["late"]))
        for reason in line["refused"].values():
            self._refused.labels(reason).inc()
        self._bytes.labels("sent").inc(line["sent"])
        self._bytes.labels("received").inc(line["got"])
        self._inner.on_round(line)

    def on_note(self, text: str) -> None:
        self._notes.inc()
        self._inner.on_note(text)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> "NodeMetrics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def health(self) -> tuple[int, bytes]:
        """Return the state of the node.

        Returns:
            Status of HTTP, 200 or 503, and a JSON object.
        """
        age = time.monotonic() - self._last_progress
        is_healthy = age < self._stale_seconds
        content = {
            "healthy": is_healthy,
            "name": self._name,
            "round": self._round,
            "rounds": self._rounds,
            "phase": self._phase,
            "seconds_since_progress": round(age, 1),
        }
        return 200 if is_healthy else 503, json.dumps(content).encode()

    def _listen(self, port: int) -> ThreadingHTTPServer:
        metrics = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_SECONDS

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._send(200, metrics._generate(), "text/plain; version=0.0.4")
                elif self.path == "/health":
                    self._send(*metrics.health(), "application/json")
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
