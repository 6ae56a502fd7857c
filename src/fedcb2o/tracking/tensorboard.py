"""TensorBoard's event files, a folder for each seed; the extra `tensorboard`.

They are written by TensorBoard's own record format, without its writer, which has a thread and looks for TensorFlow.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from fedcb2o import records
from fedcb2o.errors import RunError
from fedcb2o.tracking.scalars import Scalar, SeedRun

_EVENT_PATTERN = "*tfevents*"
_IDENTITY_FILE = "of.json"  # whose events a folder holds: of a run with which settings


class TensorBoardWriter:
    """Writes `folder`/[name of the run in its grid]/seed-S/events.out.tfevents.*, anew whenever it begins."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, dict[SeedRun, Path]()

    def begin(self, place: SeedRun) -> int:
        """Make a new file, and remove that of an earlier time; raises RunError where there is that of another run."""
        folder = self.folder / place.name / place.folder.name
        folder.mkdir(parents=True, exist_ok=True)
        before = list(folder.glob(_EVENT_PATTERN))
        mine = {"settings": records.settings_digest(place.settings())}
        if before and not (
            (folder / _IDENTITY_FILE).exists()
            and records.read_json(folder / _IDENTITY_FILE) == mine
        ):
            raise RunError(
                f"{folder} holds the events of another run: name another folder, tensorboard=DIR"
            )
        records.write_json(folder / _IDENTITY_FILE, mine)
        self.files[place] = folder / f"events.out.tfevents.{time.time_ns()}.fedcb2o"
        # A TensorBoard that looks on forgets by the second one what it has read of the earlier file.
        self._add(
            place,
            [
                Event(file_version="brain.Event:2"),
                Event(session_log=SessionLog(status=SessionLog.START)),
            ],
        )
        for path in before:
            path.unlink()
        return 0

    def write(self, place: SeedRun, points: Sequence[Scalar]) -> None:
        """Add scalars."""
        self._add(
            place,
            [
                Event(step=n, summary=Summary(value=[Summary.Value(tag=tag, simple_value=v)]))
                for n, tag, v in points
            ],
        )

    def end(self, place: SeedRun, complete: bool) -> None:
        """There is nothing to do."""

    def _add(self, place: SeedRun, events: Sequence[Event]) -> None:
        with self.files[place].open("ab") as file:
            for event in events:
                event.wall_time = time.time()
                RecordWriter(file).write(event.SerializeToString())
