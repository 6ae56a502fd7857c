"""TensorBoard writer: event files in one folder per seed; the extra `tensorboard`.

The files are written in TensorBoard's record format, without its own writer, which starts a thread
and looks for TensorFlow.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from fedcb2o import records
from fedcb2o.errors import RunError
from fedcb2o.safe_files import open_append
from fedcb2o.tracking.scalars import Scalar, SeedRun

_EVENT_PATTERN = "*tfevents*"
_IDENTITY_FILE = "of.json"  # digest of the settings of the run


class TensorBoardWriter:
    """A writer of `folder`/NAME/seed-S/events.out.tfevents.*; NAME is that in a grid."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[SeedRun, Path] = {}

    def begin(self, seed_run: SeedRun) -> int:
        """Begin a new file and remove those of earlier copies; all rounds are written again."""
        folder = self.folder / seed_run.name / seed_run.folder.name
        for part in (folder, *folder.parents):
            if part != self.folder and part.is_relative_to(self.folder) and part.is_symlink():
                raise RunError(
                    f"{part} is a link, and old events in it are removed: name another folder, "
                    "tensorboard=DIR"
                )
        folder.mkdir(parents=True, exist_ok=True)
        identity_path = folder / _IDENTITY_FILE
        identity = {"settings": records.settings_digest(seed_run.settings())}
        old_files = list(folder.glob(_EVENT_PATTERN))
        if old_files:
            is_same = identity_path.exists() and records.read_json(identity_path) == identity
            if not is_same:
                raise RunError(
                    f"{folder} holds the events of another run: name another folder, "
                    "tensorboard=DIR"
                )
        records.write_json(identity_path, identity)

        self.files[seed_run] = folder / f"events.out.tfevents.{time.time_ns()}.fedcb2o"
        # The session log makes an open TensorBoard drop the events of the old files.
        start = SessionLog(status=SessionLog.START)
        self._add(seed_run, [Event(file_version="brain.Event:2"), Event(session_log=start)])
        for path in old_files:
            path.unlink()
        return 0

    def write(self, seed_run: SeedRun, scalars: Sequence[Scalar]) -> None:
        """Add scalars of one seed."""
        events = []
        for n, name, value in scalars:
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
            events.append(Event(step=n, summary=summary))
        self._add(seed_run, events)

    def end(self, seed_run: SeedRun, complete: bool) -> None:
        """Do nothing: event files have no end."""

    def _add(self, seed_run: SeedRun, events: Sequence[Event]) -> None:
        with os.fdopen(open_append(self.files[seed_run], 0o666), "ab") as file:
            for event in events:
                event.wall_time = time.time()
                RecordWriter(file).write(event.SerializeToString())
