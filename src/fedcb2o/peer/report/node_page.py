"""Page of one node: accuracy, peers, weights and refused models."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from fedcb2o.errors import RunError
from fedcb2o.peer.report import figures
from fedcb2o.peer.report.peer_records import PeerRecords, RoundRecord
from fedcb2o.report import Page, create_page

_MAX_REASON_COLUMNS = 8  # of a table; rarer reasons share one more column
_SCORES_NOTE = "On this agent's own test samples, after averaging."
_PEERS_NOTE = (
    "Averaged: the model arrived in time, passed every check and has a weight. Not averaged: the "
    "method left the received model out, for a reason named below. Late: no model "
    "arrived in time, or the peer was busy. Behind: the peer's newest model was too many rounds "
    "old. No model: the peer was not behind, and offered none. Relay down: this agent did not "
    "reach the relay. Seconds: until the model was downloaded and checked. "
    "Weight: mean over the last fifth of the rounds, 0 in rounds without its model. Contribution: "
    "mean loss on this agent's own test samples without its model in the average, minus the loss "
    "with it. Last alive: last round in which its link was up."
)
_GAIN_NOTE = (
    "Accuracy on this agent's own test samples, of its model and of the model that it would have "
    "had alone (same initial model, same training samples), and the difference in points with its "
    "95% interval, for paired proportions (Bonett and Price, 2012). The difference is significant "
    "where the interval excludes 0. The intervals of the classes are not corrected for the number "
    "of classes. The interval of a mean over rounds is the mean of their intervals: it is not too "
    "short, although the rounds depend on each other. There is no gain before the local baseline "
    "has trained nine tenths of the rounds, as after a late start."
)
_CONTRIBUTIONS_NOTE = (
    "Contribution of a model to an average: the loss on this agent's own test samples without the "
    "model, minus the loss with it. Negative: the model made the average worse."
)
_LEAKAGE_NOTE = (
    "Membership inference by a loss threshold, on this agent's own samples: AUC, and the true "
    "positive rate at 1% false positives. 50 and 1 are those of a guess. Sent: the model that "
    "others may download. Kept: the model after averaging."
)
_WEIGHTS_NOTE = (
    "Weight of each peer's model in the average of each round; the first row is the agent's own "
    "model. Blank: the peer was not asked. The scale is that of a cube root, so that small weights "
    "are visible."
)
_REFUSED_NOTE = (
    "Number of rounds in which a model was refused, by reason. A refused model is never validated "
    "or averaged."
)
_NOT_AVERAGED_NOTE = (
    "Number of rounds in which a received model had weight 0 in the average, by reason. A loss "
    "above the quantile is normal: the method averages the better half of the models. The reasons "
    "of distance and sensitivity are those of guards, which do not admit a model."
)
_TURNED_AWAY_NOTE = "Requests of other members that this agent did not answer, by reason."
_PROOFS_NOTE = (
    "Each file contains two different signed manifests of one agent for one round, a proof that it "
    "sent different models to different peers. Verify it offline with: fedcb2o peer proof FILE."
)


def write_node_report(folder: Path, out: Path | None = None, *, membership: bool = False) -> Path:
    """Write the page `report.html` of a run, which may still go on.

    It is written to the run directory, or to the folder `out`. `membership` shows membership
    inference against the sent and the kept model. A run without a finished round is a RunError.
    """
    records = PeerRecords.read(folder)
    if not records.rounds:
        raise RunError(
            f"{folder} holds no finished round yet, so there is nothing to report: let it go on "
            "first"
        )
    page = create_page(out or folder)
    _add_summary(page, records)
    _add_gain(page, records)
    if membership:
        page.add_heading("Membership inference")
        table = leakage_table(records.rounds)
        page.show_table(table, "Membership inference", caption=_LEAKAGE_NOTE)
    _add_peers(page, records)
    _add_refusals(page, records)
    _add_traffic(page, records)
    page.write_page("report.html", f"fedcb2o: {records.info.name}")
    return page.paths[-1]


def _add_summary(page: Page, records: PeerRecords) -> None:
    page.add_text(_summary(records))
    if records.proofs:
        names = ", ".join(sorted({proof.agent for proof in records.proofs}))
        page.add_warning(f"There is proof of equivocation: {names}. The files are named below.")
    page.add_heading("Quality of the model")
    rounds = records.rounds
    drawn = [
        figures.draw_scores(rounds),
        figures.draw_losses(rounds),
        figures.draw_metrics(rounds),
    ]
    page.show_figures(_existing(drawn), "model", caption=_SCORES_NOTE)


def _add_gain(page: Page, records: PeerRecords) -> None:
    record = records.last_assessed
    if record is None or record.gain is None:
        return
    page.add_heading("Gain over training alone")
    page.show_table(gain_table(records), "Gain over training alone", caption=_GAIN_NOTE)
    if record.alone_rounds is not None:
        page.add_text(
            f"In round {record.round} the local baseline had {record.alone_rounds} rounds of "
            "training."
        )
    contributions = figures.draw_contributions(records)
    if contributions is not None:
        page.show_figures([contributions], "contributions", caption=_CONTRIBUTIONS_NOTE)


def gain_table(records: PeerRecords) -> pd.DataFrame:
    """Tabulate the gain over training alone, over all samples and by class.

    One row is the mean of the last rounds, one has all samples in the last assessed round, and each
    class has one. The records must have a gain.
    """
    record = records.last_assessed
    assert record is not None
    gains = {"all": record.gain, **record.class_gains}
    if records.mean_gain is not None:
        mean, count = records.mean_gain
        gains = {f"all, mean of the last {count} rounds": mean, **gains}
    has_gain = record.comparable_gain is not None
    rows = {
        name: {
            "samples": str(gain.samples),
            "accuracy": f"{100 * gain.accuracy:.1f}%",
            "local baseline": f"{100 * gain.alone:.1f}%",
            "gain": str(gain) if has_gain else "–",
        }
        for name, gain in gains.items()
        if gain is not None
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("class")


def leakage_table(rounds: Iterable[RoundRecord]) -> pd.DataFrame:
    """Tabulate membership inference in the last assessed round.

    One row per model, sent and kept; empty without a measurement.
    """
    rows = {}
    for record in rounds:
        for name in ("sent", "kept"):
            auc = getattr(record, f"{name}_auc")
            if auc is not None:
                rate = getattr(record, f"{name}_tpr")
                row = {"AUC": f"{100 * auc:.1f}", "TPR at 1% FPR": f"{100 * rate:.1f}"}
                rows[name] = {"round": str(record.round), **row}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("model")


def _summary(records: PeerRecords) -> Markup:
    info = records.info
    total = f" of {info.rounds}" if info.rounds else ""
    text = Markup(
        "Agent {} of run <code>{}</code>, version {} of its federation: {:,} training samples, "
        "{:,} validation samples. Last round: {}{}. Rounds trained: {}, skipped: {}."
    ).format(
        info.id,
        info.run[:16],
        info.version,
        info.num_samples,
        info.validation_samples,
        records.rounds[-1].round,
        total,
        len(records.rounds),
        records.rounds[-1].round - len(records.rounds),
    )
    scores = []
    for key, name in figures.SCORES.items():
        values = [getattr(record, key) for record in records.rounds]
        values = [value for value in values if value is not None]
        if values:
            scores.append(f"{name} {100 * values[-1]:.2f}%")
    for name, value in records.rounds[-1].metrics.items():
        count = sum(record.metrics.get(name, 0) is None for record in records.rounds)
        number = "no value" if value is None else f"{value:.4g}"
        scores.append(f"{name} {number}" + f" ({count} rounds without a value)" * (count > 0))
    if (assessed := records.last_assessed) is not None:
        scores.append(_describe_gain(records, assessed))
    epsilon = records.rounds[-1].epsilon
    if epsilon is not None:
        scores.append(f"epsilon {epsilon:.3g}")
    if not scores:
        return text
    return text + Markup(" <b>{}</b>.").format(", ".join(scores).capitalize())


def _describe_gain(records: PeerRecords, assessed: RoundRecord) -> str:
    if assessed.comparable_gain is None:
        return (
            f"no gain yet: {assessed.alone_rounds} rounds of training alone in round "
            f"{assessed.round}"
        )
    text = f"gain over training alone {assessed.gain} points"
    if records.mean_gain is not None:
        mean, count = records.mean_gain
        text += f", mean of the last {count} rounds {mean}"
    return text


def _add_peers(page: Page, records: PeerRecords) -> None:
    page.add_heading("Requests and answers")
    page.show_table(peers_table(records), "Peers", caption=_PEERS_NOTE)

    weights = figures.draw_weights(records)
    if weights is not None:
        page.add_heading("Weights")
        page.show_figures([weights], "weights", caption=_WEIGHTS_NOTE)


def _add_refusals(page: Page, records: PeerRecords) -> None:
    page.add_heading("Refused models")
    refused = refused_table(records)
    if refused.empty:
        page.add_text("None.")
    else:
        page.show_table(refused, "Refused models", caption=_REFUSED_NOTE)
    not_averaged = not_averaged_table(records)
    if not not_averaged.empty:
        page.add_heading("Models not averaged")
        page.show_table(not_averaged, "Models not averaged", caption=_NOT_AVERAGED_NOTE)

    turned_away: Counter[str] = Counter()
    for record in records.rounds:
        turned_away.update(record.turned_away)
    if turned_away:
        reasons, counts = zip(*turned_away.most_common(), strict=True)
        index = pd.Index(reasons, name="reason")
        table = pd.DataFrame({"requests": [f"{count:,}" for count in counts]}, index=index)
        page.show_table(table, "Requests turned away", caption=_TURNED_AWAY_NOTE)

    if records.proofs:
        page.add_heading("Proofs of equivocation")
        table = pd.DataFrame(
            [[proof.agent, proof.round] for proof in records.proofs],
            index=pd.Index([proof.file for proof in records.proofs], name="file"),
            columns=["agent", "round"],
        )
        page.show_table(table, "Proofs of equivocation", caption=_PROOFS_NOTE)


def _add_traffic(page: Page, records: PeerRecords) -> None:
    page.add_heading("Bytes and seconds")
    rounds = records.rounds
    page.show_figures(_existing([figures.draw_phases(rounds)]), "phases")
    page.add_note(_describe_totals(rounds))
    info = records.info
    ids = sorted(info.names.keys() - {info.id})
    others = ", ".join(f"{info.name_of(id)} ({id})" for id in ids)
    text = f"Agents by their ids: {info.name} ({info.id}, itself), {others}."
    page.add_note(text)


def peers_table(records: PeerRecords) -> pd.DataFrame:
    """Tabulate requests, outcomes, response times, bytes, weight and last link by peer."""
    seconds: dict[int, list[float]] = defaultdict(list)
    outcomes = [figures.outcomes(record) for record in records.rounds]
    counts = Counter(item for round_outcomes in outcomes for item in round_outcomes.items())
    last_alive = {peer: record.round for record in records.rounds for peer in record.alive}
    received_bytes: Counter[int] = Counter()
    for record in records.rounds:
        received_bytes.update({model.id: model.bytes for model in record.received})
    last_rounds = records.last_fifth
    contributions: dict[int, list[float]] = defaultdict(list)
    for record in records.rounds:
        for model in record.received:
            seconds[model.id].append(model.seconds)
            if model.contribution is not None:
                contributions[model.id].append(model.contribution)
    weights: dict[int, float] = defaultdict(float)
    for record in last_rounds:
        for model in record.received:
            weights[model.id] += (model.weight or 0.0) / len(last_rounds)

    columns = list(figures.OUTCOMES)
    # On a narrow page, columns of zeros only would hide the others.
    for rare in ("not averaged", "behind", "no model", "relay down", "no answer"):
        if not any(outcome == rare for _, outcome in counts):
            columns.remove(rare)
    rows = {}
    for peer in records.peers:
        times = seconds.get(peer)
        weight = weights[peer]
        rows[records.info.name_of(peer)] = {
            "asked": str(sum(counts[peer, outcome] for outcome in columns)),
            **{outcome: str(counts[peer, outcome]) for outcome in columns},
            "median s": f"{median(times):.3f}" if times else "–",
            "slowest s": f"{max(times):.3f}" if times else "–",
            "bytes in": format_bytes(received_bytes[peer]),
            "weight": f"{100 * weight:.2f}%" if np.isfinite(weight) else "–",
            "last alive": str(last_alive.get(peer, "–")),
        }
        if contributions:
            rows[records.info.name_of(peer)]["contribution"] = _format_contribution(
                contributions[peer]
            )
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("peer")


def _format_contribution(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):+.4f}" if values else "–"


def refused_table(records: PeerRecords) -> pd.DataFrame:
    """Tabulate the rounds with a refused model by peer and reason.

    Peers that were never refused have no row.
    """
    reasons = (item for record in records.rounds for item in record.refused.items())
    return _reasons_table(records, reasons)


def not_averaged_table(records: PeerRecords) -> pd.DataFrame:
    """Tabulate the rounds with a received model of weight 0 by peer and reason.

    Peers with models that were always averaged have no row.
    """
    received = (model for record in records.rounds for model in record.received)
    return _reasons_table(
        records, ((model.id, model.unused_reason) for model in received if model.unused_reason)
    )


def _reasons_table(records: PeerRecords, reasons: Iterable[tuple[int, str]]) -> pd.DataFrame:
    by_peer: dict[int, Counter[str]] = defaultdict(Counter)
    totals: Counter[str] = Counter()
    for peer, reason in reasons:
        by_peer[peer][reason] += 1
        totals[reason] += 1

    columns = [reason for reason, _ in totals.most_common(_MAX_REASON_COLUMNS)]
    rows: dict[str, dict[str, str]] = {}
    for peer, counts in sorted(by_peer.items()):
        row = {reason: str(counts[reason]) for reason in columns}
        if len(totals) > _MAX_REASON_COLUMNS:
            num_others = counts.total() - sum(counts[reason] for reason in columns)
            row["other reasons"] = str(num_others)
        rows[records.info.name_of(peer)] = row
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("peer")


def _describe_totals(rounds: Iterable[RoundRecord]) -> str:
    rounds = list(rounds)
    received = format_bytes(sum(record.incoming_bytes for record in rounds))
    sent = format_bytes(sum(record.sent for record in rounds))
    served = sum(record.served for record in rounds)
    text = f"In total {received} were received, and {sent} were sent in {served:,} answers."

    durations = [record.duration_seconds for record in rounds if record.seconds]
    if not durations:
        return text
    return (
        f"{text} The work of a round took {median(durations):.2f} seconds (median), the longest "
        f"{max(durations):.2f}; waiting for the end of a round is not included."
    )


def format_bytes(count: int) -> str:
    """Format a number of bytes."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if count >= 1000**power:
            return f"{count / 1000**power:,.1f} {unit}"
    return f"{count} B"


def _existing(drawn: Iterable[Figure | None]) -> list[Figure]:
    return [figure for figure in drawn if figure is not None]
