"""Health and metrics of a node on a loopback port (extra `metrics`)."""

import math
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from fedcb2o.federated.evaluation.gain import is_comparable
from fedcb2o.peer._closeable import Closeable
from fedcb2o.peer._metrics_server import MetricsServer
from fedcb2o.peer.node.observer import NodeObserver

_MIN_STALE_SECONDS = 600.0


class NodeMetrics(Closeable):
    """Observer that passes a node's progress on and serves it at /metrics and /health.

    /health answers 503 if the node began no phase of a round for a long time. The port is that of
    127.0.0.1; 0 takes any free one. `round_seconds` is the longest usual duration of a round
    without its training.
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
        self._inner = inner
        self._name = name
        self._rounds = rounds
        self._stale_seconds = max(_MIN_STALE_SECONDS, 5 * round_seconds)
        self._round = 0
        self._phase = "starting"
        self._last_progress = time.monotonic()
        self._server = server = MetricsServer(port, expires=expires, health=self.health)
        self.port = server.port
        server.gauge("rounds", "Rounds of the run").set(rounds)
        self._gauges = {
            "round": server.gauge("round", "Rounds that are done"),
            "accuracy": server.gauge("accuracy", "Accuracy on the node's own test samples"),
            "train_loss": server.gauge("train_loss", "Training loss of the last round"),
            "own_weight": server.gauge("own_weight", "Weight of the node's own model"),
        }
        # Chosen metrics of the test samples; NaN stands for one without a value.
        self._chosen = server.gauge("metric", "Metric of the key `metrics`", "name")
        text = "Accuracy minus that of training alone on the same samples, NaN if not comparable"
        self._gain = {
            "gain": server.gauge("gain", text),
            "low": server.gauge("gain_low", "Lower end of the 95% interval of the gain"),
            "high": server.gauge("gain_high", "Upper end of the 95% interval of the gain"),
            "alone": server.gauge("accuracy_alone", "Accuracy of the model trained alone"),
        }
        for gauge in self._gain.values():
            gauge.set(math.nan)
        self._peers = server.gauge("peers_connected", "Members with a working link")
        self._seconds = server.gauge(
            "round_seconds", "Duration of the last round without its pause"
        )
        self._received = server.counter("models_received", "Received models")
        self._not_admitted = server.counter(
            "models_not_admitted", "Received models that a guard did not admit", "reason"
        )
        self._averaged = server.counter("models_averaged", "Received models with a weight")
        self._missing = server.counter(
            "models_missing", "Asked models that did not arrive", "reason"
        )
        self._refused = server.counter("models_refused", "Refused models", "reason")
        self._bytes = server.counter("traffic_bytes", "Bytes of answers", "direction")
        self._notes = server.counter("notes", "Messages for the operator")
        server.start()

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
        for key, value in line.get("metrics", {}).items():
            # A gauge keeps its last value, which would look like the present one.
            self._chosen.labels(key).set(math.nan if value is None else value)
        self._peers.set(len(line["alive"]))
        self._seconds.set(line["seconds"]["round"])
        self._received.inc(len(line["received"]))
        self._set_gain(line)
        for model in line["received"]:
            if "admission" in model:
                self._not_admitted.labels(model["admission"]).inc()
            elif model["weight"] != 0:
                self._averaged.inc()
        for reason in ("late", "behind", "no_model", "relay_down"):
            self._missing.labels(reason).inc(len({*line[reason]} & {*line["asked"]}))
        for reason in line["refused"].values():
            self._refused.labels(reason).inc()
        self._bytes.labels("sent").inc(line["sent"])
        self._bytes.labels("received").inc(line["got"])
        self._inner.on_round(line)

    def _set_gain(self, line: Mapping[str, Any]) -> None:
        """Set the gain of an assessed round, NaN where it compares unequal training."""
        gain = line.get("gain")
        if gain is None:
            return
        values = dict.fromkeys(self._gain, math.nan)
        if is_comparable(line.get("alone_rounds"), line["round"]):
            values.update(gain=gain["accuracy"] - gain["alone"], low=gain["low"], high=gain["high"])
        values["alone"] = gain["alone"]
        for key, gauge in self._gain.items():
            gauge.set(values[key])

    def on_note(self, text: str) -> None:
        self._notes.inc()
        self._inner.on_note(text)

    def close(self) -> None:
        """Stop serving."""
        self._server.close()

    def health(self) -> dict[str, Any]:
        """Return the state of the node."""
        age = time.monotonic() - self._last_progress
        return {
            "healthy": age < self._stale_seconds,
            "name": self._name,
            "round": self._round,
            "rounds": self._rounds,
            "phase": self._phase,
            "seconds_since_progress": round(age, 1),
        }
