"""The verification of a seed's files before the seed is resumed or skipped.

Each file has a checksum in the manifest of the seed. A damaged file is refused by its name, and
nothing is overwritten.
"""

import logging
from pathlib import Path

from fedcb2o import records
from fedcb2o.errors import RunError
from fedcb2o.records import (
    CHECKPOINT_FILE,
    INITIAL_FILES,
    DamagedError,
    Manifest,
    Run,
    damaged_error,
)

_LOGGER = logging.getLogger(__name__)

_SUMMARY = "summary.json"


def has_ended(folder: Path, rounds: int, *, whole: bool = False) -> bool:
    """Return whether a seed has run all rounds; `whole` verifies its files too."""
    try:
        manifest = Manifest.read(folder)
        if manifest is None or not manifest.has_finished(rounds):
            return False
        if not whole:
            return True
        manifest.verify_all(folder, exclude=[CHECKPOINT_FILE])
    except DamagedError:
        return False
    checkpoint = folder / CHECKPOINT_FILE
    return checkpoint.exists() and checkpoint.stat().st_size == manifest.files[CHECKPOINT_FILE][0]


def verify_seed(folder: Path, rounds: int) -> Manifest | None:
    """Verify a seed's files, except logs that grow; return its manifest, None if not begun."""
    manifest = Manifest.read(folder)
    if manifest is None:
        if (folder / CHECKPOINT_FILE).exists() or (folder / _SUMMARY).exists():
            raise damaged_error(folder / "sums.json", "it is gone")
        return None
    names = list(manifest.files)
    if not manifest.has_finished(rounds):
        names = list(INITIAL_FILES)
        if _SUMMARY in manifest.files:  # the seed had finished fewer rounds
            names.append(_SUMMARY)
    for name in names:
        manifest.verify(folder, name)
    return manifest


def write_summary(folder: Path) -> None:
    """Write a seed's summary.json from its records; RunError if no result is finite."""
    seed = int(folder.name.removeprefix("seed-"))
    run = Run(folder.parent)
    table = run.records_of(seed)
    scores = records.summary(table, run.custom_metrics)
    if scores.empty or scores["round"].iloc[0] < scores["rounds"].iloc[0]:
        raise RunError(
            f"the results of {folder} at its last round are not finite for any agent, as where a"
            " test loss overflows: divide the targets by their standard deviation, or look for test"
            " targets and samples that are far larger than the others"
        )
    for note in records.left_out(table, run.custom_metrics):
        _LOGGER.warning("%s.", note)
    content = records.to_json({str(name): scores[name].iloc[0] for name in scores})
    records.atomic_write(folder / _SUMMARY, content)
