"""What a seed's folder holds, looked at before the seed goes on or is called done, and mended where the rest allows.

What the seed gives (who takes part, samples) or the records give (the summary) is made again; what cannot be is refused
by its name, and nothing is overwritten that is not known to be damaged.
"""

import hashlib
import json
from pathlib import Path

from fedcb2o import records
from fedcb2o.errors import RunError
from fedcb2o.experiments.assemble import Prepared
from fedcb2o.experiments.folder import told_anew
from fedcb2o.experiments.surroundings import participants
from fedcb2o.records import DESCRIBED, LINES, Run, Sums, damaged
from fedcb2o.runtime.checkpoint import FILE as CHECKPOINT

SUMMARY = "summary.json"


def has_ended(folder: Path, rounds: int, *, whole: bool = False) -> bool:
    """Whether a seed has run so many rounds to its end, by its sums and, if `whole`, each of its files as well."""
    try:
        sums = Sums.read(folder)
        if sums is not None and whole:
            sums.check_all(folder)
    except RunError:
        return False
    return sums is not None and sums.complete and sums.rounds >= rounds


def mended(prepared: Prepared, folder: Path) -> Sums | None:
    """The sums of a seed whose files hold what was written, those that can be made again being so; None where it has
    not begun, or its sums were lost or never written.

    Raises RunError where a file is damaged that cannot be made again.
    """
    try:
        sums = Sums.read(folder)
    except RunError:
        told_anew(folder / "sums.json")
        sums = None
    if sums is None:
        if (folder / CHECKPOINT).exists():
            for name, content in participants(prepared).items():
                _again(folder / name, content)
        elif (folder / SUMMARY).exists():
            raise damaged(folder / CHECKPOINT, "it is gone")
        return None
    if sums.seed != prepared.seed or sums.settings != records.digest(prepared.experiment.settings()):
        raise RunError(f"{folder} holds another seed or another run, by its sums.json: choose another --out")
    ended = has_ended(folder, prepared.experiment.rounds)
    for name in sums.files if ended else (*DESCRIBED, *LINES):  # a checkpoint to go on from is looked at as it is read
        try:
            sums.check(folder, name)
        except RunError:
            content = summed_up(folder) if name == SUMMARY else participants(prepared).get(name, b"")
            if sums.files.get(name) != (len(content), hashlib.sha256(content).hexdigest()):
                raise
            _again(folder / name, content)
    return sums


def summed_up(folder: Path) -> bytes:
    """What a seed's summary.json holds, by its records."""
    scores = records.summary(Run(folder.parent).records_of(int(folder.name.removeprefix("seed-"))))
    return records.json_of({str(name): scores[name].iloc[0] for name in scores})


def sum_up(folder: Path) -> None:
    """Write a seed's summary.json.

    Raises RunError where one of as many rounds is there that says something else: its records are not what they were.
    """
    path, content = folder / SUMMARY, summed_up(folder)
    try:
        there = records.read_json(path)
    except RunError:
        there = {}
    now = json.loads(content)
    if there.get("rounds") == now["rounds"] and any(now[name] != there.get(name, now[name]) for name in now):
        raise damaged(folder / "metrics.jsonl", f"it does not say what {SUMMARY} says")
    records.atomic_write(path, content)


def _again(path: Path, content: bytes) -> None:
    if not path.exists() or path.read_bytes() != content:
        told_anew(path)
        records.atomic_write(path, content)
