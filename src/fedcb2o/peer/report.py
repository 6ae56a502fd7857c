"""One node's page: how accurate its model became, whom it asked, whom it believed, and what it refused."""

import html
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedcb2o.errors import RunError
from fedcb2o.peer import figures
from fedcb2o.peer.recorded import Recorded
from fedcb2o.records import atomic_write
from fedcb2o.report.page import document, image
from fedcb2o.report.render import html_text, to_html

REASONS = 8  # columns of a table; the rarer reasons are summed up in one more
LOOK = (
    "<style>.pair { display: flex; flex-wrap: wrap; gap: 0 1.2rem; } .pair > div { max-width: 100%; } "
    "h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; } th { white-space: nowrap; } td, th { padding: .32rem .6rem; } "
    ".scroll img { max-width: none; }</style>"
)
SCORES = "On this agent's own test samples, after it has mixed in what it received."
PEERS = (
    "Taken: it came in time, passed every check and was judged. Late: nothing came in time, or the peer said that "
    "it had nothing yet or was busy. Seconds: until the model was there and checked. "
    "Weight: what its model got, mean over the last fifth of the rounds, 0 in those in which it was not taken. Last "
    "alive: the last round in which its link was up."
)
WEIGHTS = (
    "How much of each peer's model went into the average of each round; the first row is the agent's own model. White: "
    "the peer was not asked. The scale is that of a square root, so that small weights are seen."
)
REFUSED = "In how many rounds a model was refused, by the reason; what is refused is never judged or mixed in."
TURNED_AWAY = "Requests of others that this agent did not answer, by the reason."
PROOFS = (
    "Each file holds two different models' signatures of one agent for one round: proof that it told some one thing "
    "and others another. Anybody can check it, without a network: fedcb2o peer proof FILE."
)


def report(folder: Path, out: Path | None = None) -> Path:
    """Write `report.html` into `out`, by default into the node's own folder; returns its path.

    The folder may be that of a run that still goes on or was cut short. Raises RunError where it holds no round yet, or
    is damaged, or the page cannot be written.
    """
    recorded = Recorded.read(folder)
    if not recorded.lines:
        raise RunError(f"{folder} holds no finished round yet, so there is nothing to report: let it go on first")
    path = (out or folder) / "report.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the folder {path.parent} ({error.strerror}): name another with --out") from error
    atomic_write(path, document(f"fedcb2o: {recorded.about.name}", list(_body(recorded))).encode())
    return path


def _body(recorded: Recorded) -> Iterable[str]:
    lines, about = recorded.lines, recorded.about
    seconds = seconds_of(recorded)
    yield LOOK + f"<p>{_head(recorded)}</p>"
    if recorded.proofs:
        told = ", ".join(sorted({proof.agent for proof in recorded.proofs}))
        yield f'<p class="warning">There is proof of equivocation: {html_text(told)}. The files are named below.</p>'
    yield "<h2>How good its model became</h2>"
    yield _pair(("Accuracy", figures.scores(lines)), ("Losses", figures.losses(lines)))
    yield f'<p class="note">{html_text(SCORES)}</p>'
    yield "<h2>Who was asked, and who answered</h2>"
    yield _pair(("What became of asking", figures.answers(recorded)), ("How fast", figures.speeds(recorded, seconds)))
    yield _table(peers_table(recorded), PEERS)
    if (drawn := figures.weights(recorded)) is not None:
        yield f'<h2>Weights</h2><div class="scroll">{image("Weights", drawn)[1]}</div>'
        yield f'<p class="note">{html_text(WEIGHTS)}</p>'
    yield "<h2>What was refused</h2>"
    refused = refused_table(recorded)
    yield "<p>Nothing.</p>" if refused.empty else _table(refused, REFUSED)
    turned: Counter[str] = Counter()
    for line in lines:
        turned.update(line.turned_away)
    if turned:
        counts = pd.DataFrame({"requests": [f"{count:,}" for _, count in turned.most_common()]})
        yield _table(
            counts.set_axis(pd.Index([reason for reason, _ in turned.most_common()], name="reason")), TURNED_AWAY
        )
    if recorded.proofs:
        files = pd.DataFrame([[proof.agent, proof.round] for proof in recorded.proofs], columns=["agent", "round"])
        yield "<h2>Proofs of equivocation</h2>"
        yield _table(files.set_axis(pd.Index([proof.file for proof in recorded.proofs], name="file")), PROOFS)
    yield "<h2>Bytes and seconds</h2>"
    yield _pair(("Bytes", figures.traffic(lines)), ("Seconds of a round", figures.phases(lines)))
    yield f'<p class="note">{html_text(_totals(recorded))}</p>'
    others = ", ".join(f"{name} ({each})" for each, name in sorted(about.names.items()) if each != about.id)
    yield f"<p class='note'>Agents by their ids: {html_text(about.name)} ({about.id}, itself), {html_text(others)}.</p>"


def _head(recorded: Recorded) -> str:
    """Who, in which run, how far, and how good, in a few sentences of HTML."""
    about, last = recorded.about, recorded.lines[-1]
    of = f" of {about.rounds}" if about.rounds else ""
    told = [
        f"Agent {about.id} of run <code>{html.escape(about.run[:16])}</code>, version {about.version} of its "
        f"federation, with {about.num_samples:,} samples for training, {about.validation_samples:,} for judging.",
        f"Rounds done: {last.round}{of}.",
    ]
    found = {
        key: [value for line in recorded.lines if (value := getattr(line, key)) is not None] for key in figures.SCORES
    }
    known = [f"{figures.SCORES[key]} {100 * values[-1]:.2f}%" for key, values in found.items() if values]
    return " ".join([*told, *([f"<b>{', '.join(known).capitalize()}</b>."] if known else [])])


def seconds_of(recorded: Recorded) -> dict[int, list[float]]:
    """The seconds in which each peer's models came, those of all rounds."""
    found: dict[int, list[float]] = defaultdict(list)
    for line in recorded.lines:
        for each in line.received:
            found[each.id].append(each.seconds)
    return found


def peers_table(recorded: Recorded) -> pd.DataFrame:
    """A row a peer: how often it was asked and what became of it, how fast it was, its bytes and its weight."""
    seconds, last = seconds_of(recorded), recorded.last_fifth
    told = Counter((peer, fate) for line in recorded.lines for peer, fate in figures.fates(line).items())
    size: Counter[int] = Counter()
    weight = dict.fromkeys(recorded.peers, 0.0)
    for line in recorded.lines:
        size.update({each.id: each.bytes for each in line.received})
    for line in last:
        for each in line.received:
            weight[each.id] = weight.get(each.id, 0.0) + (each.weight or 0.0) / len(last)
    seen = {peer: line.round for line in recorded.lines for peer in line.alive}
    fates = [fate for fate in figures.FATES if fate != "no answer" or any(fate == each for _, each in told)]
    rows = {}
    for peer in recorded.peers:
        times = seconds.get(peer)
        rows[recorded.about.name_of(peer)] = {
            "asked": str(sum(told[peer, fate] for fate in figures.FATES)),
            **{fate: str(told[peer, fate]) for fate in fates},
            "median s": f"{median(times):.3f}" if times else "–",
            "slowest s": f"{max(times):.3f}" if times else "–",
            "bytes in": bytes_told(size[peer]),
            "weight": f"{100 * weight[peer]:.2f}%" if np.isfinite(weight[peer]) else "–",
            "last alive": str(seen.get(peer, "–")),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("peer")


def refused_table(recorded: Recorded) -> pd.DataFrame:
    """Peers by reasons: in how many rounds a peer's model was refused; without the peers that were never refused."""
    counts = Counter((peer, reason) for line in recorded.lines for peer, reason in line.refused.items())
    total: Counter[str] = Counter()
    for (_, reason), count in counts.items():
        total[reason] += count
    columns = [reason for reason, _ in total.most_common(REASONS)]
    rows: dict[str, dict[str, str]] = {}
    for peer in sorted({peer for peer, _ in counts}):
        mine = {reason: count for (who, reason), count in counts.items() if who == peer}
        row = {reason: str(mine.pop(reason, 0)) for reason in columns}
        rows[recorded.about.name_of(peer)] = row | (
            {"other reasons": str(sum(mine.values()))} if len(total) > REASONS else {}
        )
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("peer")


def _totals(recorded: Recorded) -> str:
    lines = recorded.lines
    incoming = sum(line.incoming for line in lines)
    outgoing, served = sum(line.sent for line in lines), sum(line.served for line in lines)
    whole = [line.took for line in lines if line.seconds]
    worked = f"{median(whole):.2f} seconds (median), the longest {max(whole):.2f}" if whole else ""
    took = f" The work of a round took {worked}; waiting for its time is not in it." if whole else ""
    return (
        f"In all {bytes_told(incoming)} came in, and {bytes_told(outgoing)} went out in answer to {served:,} "
        f"requests.{took}"
    )


def bytes_told(count: int) -> str:
    """A number of bytes to read: "26.4 MB"."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if count >= 1000**power:
            return f"{count / 1000**power:,.1f} {unit}"
    return f"{count} B"


def _table(table: pd.DataFrame, caption: str) -> str:
    return f'<div class="scroll">{to_html(table)}</div><p class="note">{html_text(caption)}</p>'


def _pair(*drawn: tuple[str, Figure | None]) -> str:
    """Figures side by side, where there is room for it."""
    shown = [f"<div><h3>{html_text(title)}</h3>{image(title, one)[1]}</div>" for title, one in drawn if one is not None]
    return f'<div class="pair">{"".join(shown)}</div>'
