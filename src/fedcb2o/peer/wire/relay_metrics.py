"""Health and metrics of a relay on a loopback port (extra `metrics`)."""

from collections import Counter
from datetime import datetime
from typing import Any

from fedcb2o.peer._closeable import Closeable
from fedcb2o.peer._metrics_server import MetricsServer
from fedcb2o.peer.wire.relay import Relay


class RelayMetrics(Closeable):
    """Metrics and health of a relay on a port of 127.0.0.1; 0 takes any free one."""

    def __init__(self, relay: Relay, port: int, *, expires: datetime) -> None:
        self._relay = relay
        self._server = server = MetricsServer(
            port, expires=expires, health=self.health, before_metrics=self._update
        )
        self.port = server.port
        self._connections = server.gauge(
            "relay_connections", "Connections of each member", "member"
        )
        self._messages = server.counter("relay_messages", "Messages by outcome", "outcome")
        self._bytes = server.counter("relay_traffic_bytes", "Bytes of stored messages")
        self._last = Counter[str]()
        server.start()

    def close(self) -> None:
        self._server.close()

    def health(self) -> dict[str, Any]:
        """Return the state of the relay: healthy while it accepts connections."""
        connected = [name for name, count in self._relay.connections().items() if count]
        return {"healthy": self._relay.is_listening, "name": "relay", "connected": connected}

    def _update(self) -> None:
        for name, count in self._relay.connections().items():
            self._connections.labels(name).set(count)
        counts = self._relay.counts()
        for outcome in ("stored", "full", "no box"):
            # Counters of Prometheus only grow, by differences.
            self._messages.labels(outcome).inc(counts[outcome] - self._last[outcome])
        self._bytes.inc(counts["bytes"] - self._last["bytes"])
        self._last = counts
