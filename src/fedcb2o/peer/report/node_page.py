"""One node's page: how accurate its model became, whom it asked, whom it believed, and what it refused."""

import html
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedcb2o.errors import RunError
from fedcb2o.peer.report import figures
from fedcb2o.peer.report.peer_records import PeerRecords
from fedcb2o.report.html import caption_html, figure_row, scrollable_table
from fedcb2o.report.page import Page, create_page
from fedcb2o.report.table_formats import html_text

_MAX_REASON_COLUMNS = 8  # columns of a table; the rarer reasons are summed up in one more
_SCORES_NOTE = "On this agent's own test samples, after it has mixed in what it received."
_PEERS_NOTE = (
    "Taken: it came in time, passed every check and was judged. Late: nothing came in time, or the peer said that "
    "it had nothing yet or was busy. Seconds: until the model was there and checked. "
    "Weight: what its model got, mean over the last fifth of the rounds, 0 in those in which it was not taken. Last "
    "alive: the last round in which its link was up."
)
_WEIGHTS_NOTE = (
    "How much of each peer's model went into the average of each round; the first row is the agent's own model. Blank: "
    "the peer was not asked. The scale is that of a cube root, so that small weights are seen."
)
_REFUSED_NOTE = "In how many rounds a model was refused, by the reason; what is refused is never judged or mixed in."
_TURNED_AWAY_NOTE = "Requests of others that this agent did not answer, by the reason."
_PROOFS_NOTE = (
    "Each file holds two different models' signatures of one agent for one round: proof that it told some one thing "
    "and others another. Anybody can check it, without a network: fedcb2o peer proof FILE."
)


def write_node_report(folder: Path, out: Path | None = None) -> Path:
    """Write `report.html` into `out`, by default into the node's own folder; returns its path.

    The folder may be that of a run that still goes on or was cut short. Raises RunError where it holds no round yet, or
    is damaged, or the page cannot be written.
    """
    recorded = PeerRecords.read(folder)
    if not recorded.rounds:
        raise RunError(
            f"{folder} holds no finished round yet, so there is nothing to report: let it go on first"
        )
    page = create_page(out or folder)
    _fill_page(page, recorded)
    page.write_page("report.html", f"fedcb2o: {recorded.info.name}")
    return page.paths[-1]


def _fill_page(page: Page, recorded: PeerRecords) -> None:
    lines = recorded.rounds
    about = recorded.info
    seconds = _response_times(recorded)
    page.body.append(f"<p>{_summary_html(recorded)}</p>")
    if recorded.proofs:
        told = ", ".join(sorted({proof.agent for proof in recorded.proofs}))
        page.body.append(
            f'<p class="warning">There is proof of equivocation: {html_text(told)}. The files are named below.</p>'
        )
    page.add_heading("How good its model became")
    _add_figures(page, "model", figures.draw_scores(lines), figures.draw_losses(lines))
    page.body.append(caption_html(_SCORES_NOTE))
    page.add_heading("Who was asked, and who answered")
    _add_figures(
        page,
        "asked",
        figures.draw_outcomes(recorded),
        figures.draw_response_times(recorded, seconds),
    )
    _add_table(page, peers_table(recorded), "Peers", _PEERS_NOTE)
    if (drawn := figures.draw_weights(recorded)) is not None:
        page.add_heading("Weights")
        _add_figures(page, "weights", drawn)
        page.body.append(caption_html(_WEIGHTS_NOTE))
    page.add_heading("What was refused")
    refused = refused_table(recorded)
    if refused.empty:
        page.body.append("<p>Nothing.</p>")
    else:
        _add_table(page, refused, "What was refused", _REFUSED_NOTE)
    turned: Counter[str] = Counter()
    for line in lines:
        turned.update(line.turned_away)
    if turned:
        counts = pd.DataFrame({"requests": [f"{count:,}" for _, count in turned.most_common()]})
        reasons = pd.Index([reason for reason, _ in turned.most_common()], name="reason")
        _add_table(page, counts.set_axis(reasons), "Requests turned away", _TURNED_AWAY_NOTE)
    if recorded.proofs:
        files = pd.DataFrame(
            [[proof.agent, proof.round] for proof in recorded.proofs], columns=["agent", "round"]
        )
        page.add_heading("Proofs of equivocation")
        proofs = files.set_axis(pd.Index([proof.file for proof in recorded.proofs], name="file"))
        _add_table(page, proofs, "Proofs of equivocation", _PROOFS_NOTE)
    page.add_heading("Bytes and seconds")
    _add_figures(page, "traffic", figures.draw_traffic(lines), figures.draw_phases(lines))
    others = ", ".join(
        f"{name} ({each})" for each, name in sorted(about.names.items()) if each != about.id
    )
    page.body.append(caption_html(_describe_totals(recorded)))
    page.body.append(
        caption_html(f"Agents by their ids: {about.name} ({about.id}, itself), {others}.")
    )


def _summary_html(recorded: PeerRecords) -> str:
    """Who, in which run, how far, and how good, in a few sentences of HTML."""
    about = recorded.info
    last = recorded.rounds[-1]
    of = f" of {about.rounds}" if about.rounds else ""
    told = [
        f"Agent {about.id} of run <code>{html.escape(about.run[:16])}</code>, version {about.version} of its "
        f"federation: {about.num_samples:,} samples train, {about.validation_samples:,} judge others' models.",
        f"Rounds done: {last.round}{of}.",
    ]
    found = {
        key: [value for line in recorded.rounds if (value := getattr(line, key)) is not None]
        for key in figures.SCORES
    }
    known = [
        f"{figures.SCORES[key]} {100 * values[-1]:.2f}%" for key, values in found.items() if values
    ]
    return " ".join([*told, *([f"<b>{', '.join(known).capitalize()}</b>."] if known else [])])


def _response_times(recorded: PeerRecords) -> dict[int, list[float]]:
    """The seconds in which each peer's models came, those of all rounds."""
    found: dict[int, list[float]] = defaultdict(list)
    for line in recorded.rounds:
        for each in line.received:
            found[each.id].append(each.seconds)
    return found


def peers_table(recorded: PeerRecords) -> pd.DataFrame:
    """A row a peer: how often it was asked and what became of it, how fast it was, its bytes and its weight."""
    seconds = _response_times(recorded)
    last = recorded.last_fifth
    told = Counter(
        (peer, fate) for line in recorded.rounds for peer, fate in figures.outcomes(line).items()
    )
    size: Counter[int] = Counter()
    weight = dict.fromkeys(recorded.peers, 0.0)
    for line in recorded.rounds:
        size.update({each.id: each.bytes for each in line.received})
    for line in last:
        for each in line.received:
            weight[each.id] = weight.get(each.id, 0.0) + (each.weight or 0.0) / len(last)
    seen = {peer: line.round for line in recorded.rounds for peer in line.alive}
    fates = [
        fate
        for fate in figures.OUTCOME_COLOURS
        if fate != "no answer" or any(fate == each for _, each in told)
    ]
    rows = {}
    for peer in recorded.peers:
        times = seconds.get(peer)
        rows[recorded.info.name_of(peer)] = {
            "asked": str(sum(told[peer, fate] for fate in figures.OUTCOME_COLOURS)),
            **{fate: str(told[peer, fate]) for fate in fates},
            "median s": f"{median(times):.3f}" if times else "–",
            "slowest s": f"{max(times):.3f}" if times else "–",
            "bytes in": format_bytes(size[peer]),
            "weight": f"{100 * weight[peer]:.2f}%" if np.isfinite(weight[peer]) else "–",
            "last alive": str(seen.get(peer, "–")),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("peer")


def refused_table(recorded: PeerRecords) -> pd.DataFrame:
    """Peers by reasons: in how many rounds a peer's model was refused; without the peers that were never refused."""
    counts = Counter(
        (peer, reason) for line in recorded.rounds for peer, reason in line.refused.items()
    )
    total: Counter[str] = Counter()
    for (_, reason), count in counts.items():
        total[reason] += count
    columns = [reason for reason, _ in total.most_common(_MAX_REASON_COLUMNS)]
    rows: dict[str, dict[str, str]] = {}
    for peer in sorted({peer for peer, _ in counts}):
        mine = {reason: count for (who, reason), count in counts.items() if who == peer}
        row = {reason: str(mine.pop(reason, 0)) for reason in columns}
        rows[recorded.info.name_of(peer)] = row | (
            {"other reasons": str(sum(mine.values()))} if len(total) > _MAX_REASON_COLUMNS else {}
        )
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("peer")


def _describe_totals(recorded: PeerRecords) -> str:
    lines = recorded.rounds
    incoming = sum(line.incoming_bytes for line in lines)
    outgoing = sum(line.sent for line in lines)
    served = sum(line.served for line in lines)
    whole = [line.duration_seconds for line in lines if line.seconds]
    worked = f"{median(whole):.2f} seconds (median), the longest {max(whole):.2f}" if whole else ""
    took = (
        f" The work of a round took {worked}; waiting for its time is not in it." if whole else ""
    )
    return (
        f"In all {format_bytes(incoming)} came in, and {format_bytes(outgoing)} went out in answer to {served:,} "
        f"requests.{took}"
    )


def format_bytes(count: int) -> str:
    """A number of bytes to read: "26.4 MB"."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if count >= 1000**power:
            return f"{count / 1000**power:,.1f} {unit}"
    return f"{count} B"


def _add_table(page: Page, table: pd.DataFrame, name: str, caption: str) -> None:
    page.body.append(scrollable_table(table, name) + caption_html(caption))


def _add_figures(page: Page, name: str, *drawn: Figure | None) -> None:
    page.body.append(figure_row([one for one in drawn if one is not None], name))
