"""Progress of a node: a live table, or one line per round."""

import math
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedcb2o.federated.evaluation.gain import is_comparable
from fedcb2o.peer.report.peer_records import MEAN_ROUNDS, GainRecord, mean_gain_record
from fedcb2o.printable import one_line
from fedcb2o.records import METRICS

_OTHER_LINES = 6  # lines of a terminal that are not rows of peers
_MAX_NAMES = 5  # names in a list
_MISSING = {
    "late": "late",
    "behind": "too far behind",
    "no_model": "offers no model yet",
    "relay_down": "relay cannot be reached",
}
"""Reasons of missing models in words, by their key in rounds.jsonl."""


@dataclass(frozen=True)
class _PeerStatus:
    """Last known state of a peer."""

    alive: bool = False
    round: int = 0
    seconds: float | None = None
    weight: float | None = None
    not_used: str = ""
    refused: int = 0
    reason: str = ""


class LiveTable:
    """Display of a node's rounds on standard error; safe in any thread.

    `names` has the names of all agents by id.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        *,
        agent_id: int,
        rounds: int,
        done: int = 0,
        console: Console | None = None,
    ) -> None:
        self.names = names
        self.agent_id = agent_id
        self.rounds = rounds
        self.console = console or Console(stderr=True)
        self.is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._prints_lines = not self.is_live
        self._gains = deque[GainRecord](maxlen=MEAN_ROUNDS)
        self._lock = threading.Lock()
        self._n = done
        self._phase = ""
        self._scores = ""
        self._peers = {peer: _PeerStatus() for peer in sorted(names) if peer != agent_id}
        self._live = Live(
            console=self.console,
            # Rich calls it in a thread of its own.
            get_renderable=self._table,
            refresh_per_second=4,
            auto_refresh=True,
        )

    def __enter__(self) -> "LiveTable":
        if self.is_live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.is_live:
            self._phase = ""
            self._live.stop()

    def on_phase(self, n: int, name: str) -> None:
        """Show the current phase of round `n`, counted from 1."""
        with self._lock:
            self._n = n
            self._phase = name

    def on_round(self, line: Mapping[str, Any]) -> None:
        """Show a finished round."""
        if line.get("gain") is not None and _is_comparable(line):
            self._gains.append(GainRecord(**line["gain"]))
        scores = _format_scores(line, self._gains)
        with self._lock:
            self._n = int(line["round"])
            self._phase = ""
            self._scores = scores or self._scores
            for peer, status in self._peers.items():
                self._peers[peer] = _updated_status(status, peer, line)
        if self._prints_lines:
            parts = (scores, self._describe_answers(line), _format_duration(line))
            text = ", ".join(filter(None, parts))
            self._print(f"{self._own_name}: round {line['round']}/{self.rounds}: {text}")

    def on_note(self, text: str) -> None:
        """Print a message that stays."""
        message = f"{self._own_name}: {text}"
        if self.is_live:
            self.console.print(_plain_cell(message), soft_wrap=True)
        if self._prints_lines:
            self._print(message)

    @property
    def _own_name(self) -> str:
        return self.names[self.agent_id]

    def _print(self, line: str) -> None:
        file = sys.stderr if self.console.stderr else self.console.file
        print(one_line(line), file=file, flush=True)

    def _describe_answers(self, line: Mapping[str, Any]) -> str:
        """Describe the received models, the missing peers and the refused models."""
        # Attackers of a simulation ask themselves, too.
        asked = [peer for peer in line["asked"] if peer != self.agent_id]
        received = line["received"]
        averaged = [model for model in received if model["weight"] != 0]
        count = f"{len(received)} of {len(asked)} received, {len(averaged)} averaged"
        names = " ".join(map(self._describe_weight, averaged))
        parts = [f"{count}: {names}" if names else count]
        for key, words in (("admission", "not admitted"), ("not_averaged", "not averaged")):
            for reason in dict.fromkeys(model.get(key) for model in received):
                if reason:
                    peers = [model["id"] for model in received if model.get(key) == reason]
                    parts.append(f"{words}: {self._list(peers)} ({reason})")
        for key, words in _MISSING.items():
            if line.get(key):
                parts.append(f"{words}: {self._list(line[key])}")
        cut_off = line.get("relay_down", ())
        down = [i for i in self._peers if i not in line.get("alive", ()) and i not in cut_off]
        if down and not asked:
            parts.append(f"down: {self._list(down)}")
        for peer, reason in line.get("refused", {}).items():
            parts.append(f"refused {self._name(int(peer))} ({reason})")
        return ", ".join(parts)

    def _describe_weight(self, model: Mapping[str, Any]) -> str:
        name = self._name(model["id"])
        weight = model["weight"]
        return name if math.isnan(weight) else f"{name} {weight:.2g}"  # NaN: without weights

    def _list(self, peers: Sequence[int]) -> str:
        """List names, at most a few."""
        more = f" and {len(peers) - _MAX_NAMES} more" if len(peers) > _MAX_NAMES else ""
        return f"{' '.join(map(self._name, peers[:_MAX_NAMES]))}{more}"

    def _name(self, peer: int) -> str:
        return self.names.get(peer, f"agent-{peer}")

    def _table(self) -> RenderableType:
        """Return the current table, with as many peers as fit."""
        with self._lock:
            status = ", ".join(filter(None, (self._phase, self._scores)))
            title = f"{self._own_name}: round {self._n}/{self.rounds}"
            peers = dict(self._peers)
        head = Text(f"{title}, {status}" if status else title, style="bold")

        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
        table.add_column("peer", overflow="ellipsis", no_wrap=True)
        for name in ("link", "round of model", "seconds", "weight", "not used", "refused"):
            is_text = name in ("link", "not used", "refused")
            table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
        max_rows = max(3, self.console.height - _OTHER_LINES)
        for peer in [*peers][:max_rows]:
            table.add_row(*map(_plain_cell, _table_row(self._name(peer), peers[peer])))

        # Rich cuts a table that is too long, and its last rows with it.
        num_more = len(peers) - max_rows
        if num_more > 0:
            return Group(head, table, Text(f"and {num_more} more"))
        return Group(head, table)


def _updated_status(status: _PeerStatus, peer: int, line: Mapping[str, Any]) -> _PeerStatus:
    status = replace(status, alive=peer in line.get("alive", ()))
    for model in line["received"]:
        if model["id"] == peer:
            seconds, weight = model["seconds"], model["weight"]
            not_used = model.get("admission") or model.get("not_averaged", "")
            status = replace(
                status, round=model["round"], seconds=seconds, weight=weight, not_used=not_used
            )
            break
    for key, words in _MISSING.items():
        if peer in line.get(key, ()):
            status = replace(status, not_used=words)
    refused = line.get("refused", {})
    # Keys of JSON are texts.
    reason = refused.get(str(peer), refused.get(peer))
    if reason is None:
        return status
    return replace(status, refused=status.refused + 1, reason=reason)


def _table_row(name: str, status: _PeerStatus) -> tuple[str, ...]:
    seconds = "–" if status.seconds is None else f"{status.seconds:.2f}"
    weight = "–" if status.weight is None else f"{100 * status.weight:.1f}%"
    refused = f"{status.refused}, last: {status.reason}" if status.refused else ""
    link = "up" if status.alive else "–"
    model_round = str(status.round or "–")
    return (name, link, model_round, seconds, weight, status.not_used, refused)


def _plain_cell(text: str) -> Text:
    # Without markup, because names and reasons come from others.
    return Text(one_line(text))


def _is_comparable(line: Mapping[str, Any]) -> bool:
    return is_comparable(line.get("alone_rounds"), line["round"])


def _format_scores(line: Mapping[str, Any], gains: Sequence[GainRecord] = ()) -> str:
    """Format the scores of a round, and the mean of the last gains."""
    parts = [
        metric.format_short(line[name])
        for name, metric in METRICS.items()
        if line.get(name) is not None
    ]
    for name, value in line.get("metrics", {}).items():
        parts.append(f"{name} without a value" if value is None else f"{name} {value:.4g}")
    if line.get("gain") is not None:
        parts.extend(_format_gain(line, gains))
    return ", ".join(parts)


def _format_gain(line: Mapping[str, Any], gains: Sequence[GainRecord]) -> list[str]:
    """Format gain, mean gain, and the class with the largest significant loss."""
    gain = GainRecord(**line["gain"])
    alone = f"alone {100 * gain.alone:.1f}%"
    if not _is_comparable(line):
        return [f"{alone} after {line['alone_rounds']} rounds of training (no gain yet)"]
    if (rounds := line.get("alone_rounds")) is not None:
        alone += f" ({rounds} {'round' if rounds == 1 else 'rounds'})"
    parts = [alone, f"gain {gain}"]
    if (mean := mean_gain_record(gains)) is not None:
        parts.append(f"mean of {mean[1]} rounds {mean[0]}")
    classes = {name: GainRecord(**record) for name, record in line["class_gains"].items()}
    losses = {
        name: record for name, record in classes.items() if record.to_gain().is_loss(len(classes))
    }
    if len(classes) > 1 and losses:
        worst = min(losses, key=lambda name: losses[name].accuracy - losses[name].alone)
        parts.append(f"worse in class {worst}: {losses[worst]}")
    return parts


def _format_duration(line: Mapping[str, Any]) -> str:
    seconds = line.get("seconds", {}).get("round")
    return "" if seconds is None else f"{seconds:.1f} s of work"
