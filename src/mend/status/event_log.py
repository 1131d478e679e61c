"""Records events in JSONL files and in the log, in separate threads.

A full disk loses events and a log without a reader loses lines, but training never waits. Lines of
the log have one grammar:

    mend rack=0 rank=0 rack-silent peer=1 msg="rack 1 is silent: ..." remedy="see ..."
"""

from __future__ import annotations

import logging
from pathlib import Path

from mend.events.base import LoggedEvent, Severity, log_text
from mend.events.kinds import LogLost, ValuesRecorded
from mend.events.lines import TimedEvent, encode_line
from mend.status.events_file import EventsFile
from mend.status.log_lines import LogLines, logger
from mend.status.loudness import Loudness
from mend.status.wall_clock import wall_ns

FOLLOWER = "events-follower.jsonl"
"""The file with the values that followers of the merged model record."""


class EventLog:
    """Writes `events-rack{r}-rank{k}.jsonl` and the log, each in its own thread. Without a
    directory it writes only the log.

    A rack that is started again appends to the file of its former life, from its own `start` on.
    """

    def __init__(self, who: dict[str, int], directory: Path | None) -> None:
        self._who = " ".join(f"{key}={value}" for key, value in who.items())
        self._log = LogLines(self._who)
        self._file: EventsFile | None = None
        self._closed = False
        self._loudness = Loudness()
        if directory is not None:
            name = "events-" + "-".join(f"{key}{value}" for key, value in who.items())
            self._file = EventsFile(directory / f"{name}.jsonl", self._say)

    @property
    def lost(self) -> int:
        """Events that are not in the file."""
        return self._file.lost if self._file is not None else 0

    @property
    def lines_lost(self) -> int:
        """Lines of the log that had no reader."""
        return self._log.lost

    def note(self, event: LoggedEvent) -> None:
        """Any thread. Never blocks."""
        now_ns = wall_ns()
        self._say(event, now_ns)
        if self._file is not None:
            self._file.put(TimedEvent(now_ns, event))

    def close(self) -> None:
        """Write the events that wait. Waits a few seconds at most for a disk that hangs or a log
        without a reader. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._file is not None:
            if lines := self._log.lost:
                self._file.put(TimedEvent(wall_ns(), LogLost(lines)))
            self._file.close()
        self._log.close()

    def _say(self, event: LoggedEvent, now_ns: int) -> None:
        """Log an event. A loud one is shown even if logging is not configured: as a warning at
        least."""
        level: int = event.severity
        if event.loud:
            shown = self._loudness.shown(event, now_ns)
            event = event if shown is None else shown
            level = logging.INFO if shown is None else max(level, Severity.WARNING)
        if logger.isEnabledFor(level):
            self._log.say(level, f"mend {self._who} {log_text(event)}")


def append_values(folder: Path, step: int, values: dict[str, float | str]) -> None:
    """Append a follower's measurements of the merged model to the events of a job. Raises
    OSError."""
    now_ns = wall_ns()
    line = encode_line(TimedEvent(now_ns, ValuesRecorded(step, 0, now_ns, values)))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FOLLOWER).open("ab") as file:
        file.write(line)
