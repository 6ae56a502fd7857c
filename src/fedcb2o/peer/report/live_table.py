"""What a node is doing: on a terminal a table that is redrawn, a row a peer; elsewhere a line a round."""

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live as Drawn
from rich.table import Table
from rich.text import Text

_OTHER_LINES = 6  # lines of a terminal that are not rows of peers


@dataclass(frozen=True)
class _PeerStatus:
    """What a node last saw of a peer."""

    alive: bool = False
    round: int = 0
    seconds: float | None = None
    weight: float | None = None
    refused: int = 0
    reason: str = ""


class LiveTable:
    """Shows the rounds of a node, on standard error; any thread may call.

    `names` are those of all agents by their ids, `me` among them. Of a node that is resumed, so many rounds are `done`.
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
        self._lock = threading.Lock()
        self._n = done
        self._at = ""
        self._scores = ""
        self._peers = {peer: _PeerStatus() for peer in sorted(names) if peer != agent_id}
        self._drawn = Drawn(
            console=self.console,
            get_renderable=self._table,
            refresh_per_second=4,
            auto_refresh=True,
        )

    def __enter__(self) -> "LiveTable":
        if self.is_live:
            self._drawn.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.is_live:
            self._at = ""
            self._drawn.stop()

    def on_phase(self, n: int, name: str) -> None:
        """Show what round `n`, counted from 1, is at."""
        with self._lock:
            self._n = n
            self._at = name

    def on_round(self, line: Mapping[str, Any]) -> None:
        """Show that a round is done, by its line of rounds.jsonl."""
        with self._lock:
            self._n, self._at, self._scores = (
                int(line["round"]),
                "",
                _format_scores(line) or self._scores,
            )
            for peer, seen in self._peers.items():
                self._peers[peer] = _updated_status(seen, peer, line)
        if not self.is_live:
            told = filter(
                None, (_format_scores(line), self._describe_answers(line), _format_duration(line))
            )
            self._print(
                f"{self.names[self.agent_id]}: round {line['round']}/{self.rounds}: {', '.join(told)}"
            )

    def on_note(self, text: str) -> None:
        """Say a line that stays."""
        if self.is_live:
            self.console.print(_plain_cell(f"{self.names[self.agent_id]}: {text}"), soft_wrap=True)
        else:
            self._print(f"{self.names[self.agent_id]}: {text}")

    def _print(self, line: str) -> None:
        print(
            _printable(line),
            file=sys.stderr if self.console.stderr else self.console.file,
            flush=True,
        )

    def _describe_answers(self, line: Mapping[str, Any]) -> str:
        """How many models were taken, who did not answer in time, and what was refused of whom."""
        asked = [
            peer for peer in line["asked"] if peer != self.agent_id
        ]  # attackers count themselves among those
        told = [f"{len(line['received'])} of {len(asked)} taken"]
        if late := line.get("late"):
            told.append(f"nothing yet from: {' '.join(self._name(peer) for peer in late)}")
        if not asked and (
            down := [self._name(peer) for peer in self._peers if peer not in line.get("alive", ())]
        ):
            told.append(
                f"down: {' '.join(down[:5])}{f' and {len(down) - 5} more' if len(down) > 5 else ''}"
            )
        refused = {
            self._name(int(peer)): reason for peer, reason in line.get("refused", {}).items()
        }
        return ", ".join(
            [*told, *(f"refused {name} ({reason})" for name, reason in refused.items())]
        )

    def _name(self, peer: int) -> str:
        return self.names.get(peer, f"agent-{peer}")

    def _table(self) -> RenderableType:
        """The table as it is now; of more peers than there is room for, the first."""
        with self._lock:
            n = self._n
            at = self._at
            scores = self._scores
            peers = dict(self._peers)
        told = ", ".join(filter(None, (at, scores)))
        head = Text(
            f"{self.names[self.agent_id]}: round {n}/{self.rounds}{f', {told}' if told else ''}",
            style="bold",
        )
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
        table.add_column("peer", overflow="ellipsis", no_wrap=True)
        for name in ("link", "last round", "seconds", "weight", "refused"):
            table.add_column(
                name, justify="left" if name in ("link", "refused") else "right", no_wrap=True
            )
        room = max(3, self.console.height - _OTHER_LINES)
        for peer in [*peers][:room]:
            table.add_row(*map(_plain_cell, _table_row(self._name(peer), peers[peer])))
        rest = len(peers) - room
        return Group(head, table, *([Text(f"and {rest} more")] if rest > 0 else []))


def _updated_status(seen: _PeerStatus, peer: int, line: Mapping[str, Any]) -> _PeerStatus:
    """What is known of a peer after a round."""
    seen = replace(seen, alive=peer in line.get("alive", ()))
    taken = next((each for each in line["received"] if each["id"] == peer), None)
    if taken is not None:
        seen = replace(seen, round=line["round"], seconds=taken["seconds"], weight=taken["weight"])
    refused = line.get("refused", {})
    reason = refused.get(str(peer), refused.get(peer))  # JSON's keys are text
    return seen if reason is None else replace(seen, refused=seen.refused + 1, reason=reason)


def _table_row(name: str, seen: _PeerStatus) -> tuple[str, ...]:
    return (
        name,
        "up" if seen.alive else "–",
        str(seen.round or "–"),
        "–" if seen.seconds is None else f"{seen.seconds:.2f}",
        "–" if seen.weight is None else f"{100 * seen.weight:.1f}%",
        f"{seen.refused}, last: {seen.reason}" if seen.refused else "",
    )


def _plain_cell(text: str) -> Text:
    return Text(_printable(text))  # no markup: names and reasons are others'


def _format_scores(line: Mapping[str, Any]) -> str:
    words = (
        ("accuracy", "accuracy"),
        ("source_accuracy", "source"),
        ("attack_success_rate", "attack"),
    )
    known = [(word, line[key]) for key, word in words if line.get(key) is not None]
    told = [f"{word} {100 * value:.1f}%" for word, value in known]
    loss = line.get("test_loss")
    return ", ".join(told if loss is None else [*told, f"loss {loss:.4g}"])


def _format_duration(line: Mapping[str, Any]) -> str:
    whole = line.get("seconds", {}).get("round")
    return "" if whole is None else f"{whole:.1f} s"


def _printable(text: str) -> str:
    """Text that moves no cursor: what others chose may hold control characters."""
    return "".join(each if each.isprintable() else "?" for each in text)
