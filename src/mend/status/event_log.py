"""Records events in JSONL files and the log, in threads of its own.

A full disk loses events and a log without a reader loses lines, but training never waits. Lines of
the log have one grammar:

    mend rack=0 rank=0 commit fragment=2 version=17 reason="all-in, 2 of 2 racks"
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from mend.status.events_file import EventsFile
from mend.status.log_lines import LogLines, logger
from mend.status.loudness import Loudness
from mend.status.wall_clock import wall_ns

LOUD = frozenset(
    {
        "waiting", "refused", "resume-ignored", "resume-lost", "resume-recut", "fault", "differs",
        "declined", "diverged", "drop", "coordinator-silent", "coordinator-back", "takes-over",
        "deposed", "no-quorum", "lineage", "undone", "gives-up", "job-lost", "retired", "joined",
        "made-equal", "state-copied", "state-copy-failed", "state-fresh", "mirror-failed",
        "mirror-loaded", "mirror-refused", "state-unclaimed", "rack-silent", "rack-back",
        "pulling", "pulls-fail", "pulls-work", "stall-over", "left-alone", "expelled", "seat-lost",
        "leaving", "kept-local", "ended-unmerged", "uncounted", "drain-gave-up", "frame-refused",
        "strangers", "tape-gap", "tape-no-base", "tape-stopped", "placed", "buffers-changed",
        "buffers-differ", "statistics-reset", "weights-replaced", "late-steps",
        "rates-differ", "scheduler-refused", "same-data", "other-job", "checkpoint-moved",
        "rounds-short", "last-rounds-alone", "fail-slow", "fail-slow-cause", "fail-slow-over",
        "slow-link", "slow-link-over", "slow-rack-left", "slow-rack-awaited", "slow-rack-batch",
        "slow-rack-evicted", "evicted-rack-lost", "evicted", "eviction-failed", "local-batch",
        "name-unknown", "port-waits", "events-stopped", "events-resumed", "events-anew",
        "events-lost", "log-lost", "observer-unanswered", "async-tp-in-vain", "close-gave-up",
        "invariant-broken",
    }
)  # fmt: skip
"""Kinds that are logged as warnings, some only where `Loudness` says so. The rest is INFO or
DEBUG."""

USUAL = frozenset(
    {"captured", "encoded", "applied", "commit", "decided", "progress", "pulled", "recorded"}
)


class EventLog:
    """Writes `events-rack{r}-rank{k}.jsonl` and the log, in a thread each; without a directory only
    the log.

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

    def note(self, kind: str, fields: dict[str, object]) -> None:
        """Any thread. Never blocks."""
        self._say(kind, fields)
        if self._file is not None:
            self._file.put({"kind": kind, "time_ns": wall_ns(), **fields})

    def close(self) -> None:
        """Write the events that wait. Waits a few seconds at most for a disk that hangs or a log
        without a reader. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._file is not None:
            if lines := self._log.lost:
                self._file.put({"kind": "log-lost", "time_ns": wall_ns(), "lines": lines})
            self._file.close()
        self._log.close()

    def _say(self, kind: str, fields: Mapping[str, object]) -> None:
        level = logging.DEBUG if kind in USUAL else logging.INFO
        if (
            kind in LOUD
            and (warning := self._loudness.warning(kind, fields, wall_ns())) is not None
        ):
            level, fields = logging.WARNING, warning
        if logger.isEnabledFor(level):
            self._log.say(level, f"mend {self._who} {kind} {_grammar(fields)}")


def _grammar(fields: Mapping[str, object]) -> str:
    return " ".join(f"{key}={_value(value)}" for key, value in fields.items())


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(_value(item) for item in value) or "-"
    text = str(value.get("rack", value)) if isinstance(value, dict) else str(value)
    return f'"{text}"' if " " in text else text
