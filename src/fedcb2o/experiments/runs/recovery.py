"""What a seed's folder holds, looked at before the seed goes on or is called done, and mended where the rest allows.

What the seed gives (who takes part, samples) or the records give (the summary) is made again; what cannot be is refused
by its name, and nothing is overwritten that is not known to be damaged.
"""

import json
import math
from pathlib import Path
from typing import Any

from fedcb2o import records
from fedcb2o.errors import RunError
from fedcb2o.experiments.config.build import PreparedSeed
from fedcb2o.experiments.runs.kernel_config import ENVIRONMENT
from fedcb2o.experiments.runs.provenance import participant_files
from fedcb2o.experiments.runs.run_directory import log_rewrite
from fedcb2o.records import (
    CHECKPOINT_FILE,
    INITIAL_FILES,
    DamagedError,
    Manifest,
    Run,
    damaged_error,
)

SUMMARY = "summary.json"
SAMPLES = "samples.safetensors"


def has_ended(folder: Path, rounds: int, *, whole: bool = False) -> bool:
    """Whether a seed has run so many rounds to its end, by its sums and, if `whole`, by each of its files as well; of
    the checkpoint, which may be large and no figure depends on, by its size."""
    try:
        sums = Manifest.read(folder)
        if sums is None or not sums.has_finished(rounds):
            return False
        if whole:
            sums.verify_all(folder, exclude=[CHECKPOINT_FILE])
    except DamagedError:
        return False
    checkpoint = folder / CHECKPOINT_FILE
    return not whole or (
        checkpoint.exists() and checkpoint.stat().st_size == sums.files[CHECKPOINT_FILE][0]
    )


def verify_and_repair(prepared: PreparedSeed, folder: Path) -> Manifest | None:
    """The sums of a seed whose files hold what was written, those that can be made again being so; None where it has
    not begun, or its sums were lost or never written.

    What grows is looked at here where the seed has ended, and else where it goes on. Raises DamagedError where a file
    is damaged that cannot be made again.
    """
    try:
        sums = Manifest.read(folder)
    except DamagedError:
        sums = None
    if sums is None:
        if (folder / CHECKPOINT_FILE).exists():
            if not (folder / ENVIRONMENT).exists():
                raise damaged_error(folder / ENVIRONMENT, "it is gone")
            for name, content in participant_files(prepared).items():
                _rewrite(folder / name, content)
        elif (folder / SUMMARY).exists():
            raise damaged_error(folder / CHECKPOINT_FILE, "it is gone")
        return None
    for name in sums.files if sums.has_finished(prepared.experiment.rounds) else INITIAL_FILES:
        try:
            if name == SAMPLES and name in sums.files and not (folder / name).exists():
                raise damaged_error(folder / name, "it is gone")  # what readers do without
            sums.verify(folder, name)
        except DamagedError as error:
            whole = (
                _summary_bytes(folder) if name == SUMMARY else participant_files(prepared).get(name)
            )
            if whole is None:
                raise
            if sums.files.get(name) == records.checksum_bytes(whole):
                _rewrite(folder / name, whole)
            elif name != SAMPLES or (folder / name).exists():
                cure = (
                    "remove it to do without pictures"
                    if name == SAMPLES
                    else records.rerun_advice(folder)
                )
                raise RunError(
                    f"{folder / name} is damaged, and would not be made again as it was: {cure}"
                ) from error
    return sums


def _summary_bytes(folder: Path) -> bytes:
    """What a seed's summary.json holds, by its records."""
    scores = records.summary(Run(folder.parent).records_of(int(folder.name.removeprefix("seed-"))))
    return records.to_json({str(name): scores[name].iloc[0] for name in scores})


def write_summary(folder: Path) -> None:
    """Write a seed's summary.json.

    Raises DamagedError where nothing else says what the records were (an older checkpoint), and a summary of as many
    rounds says something else.
    """
    path = folder / SUMMARY
    content = _summary_bytes(folder)
    try:
        there = records.read_json(path)
    except DamagedError:
        there = {}
    now = json.loads(content)
    alike = all(_is_close(now[name], there.get(name, now[name])) for name in now)
    if there.get("rounds") == now["rounds"] and not alike and not records.log_checksums(folder):
        raise damaged_error(folder / "metrics.jsonl", f"it does not say what {SUMMARY} says")
    records.atomic_write(path, content)


def _is_close(one: Any, other: Any) -> bool:
    """Whether two numbers are one, but for the order in which something was added up."""
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return math.isclose(one, other, rel_tol=1e-9) if numbers else one == other


def _rewrite(path: Path, content: bytes) -> None:
    if not path.exists() or path.read_bytes() != content:
        log_rewrite(path)
        records.atomic_write(path, content)
