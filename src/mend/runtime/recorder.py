"""runtime.recorder: events to JSONL and to the log, off every thread that matters.

A full disk loses events, not training. One grammar for people:

    mend rack=0 rank=0 commit fragment=2 version=17 reason=all-in
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from pathlib import Path

logger = logging.getLogger("mend")

QUEUE_MAX = 10_000
CLOSE_S = 5.0

LOUD = frozenset(
    {
        "waiting",
        "refused",
        "fault",
        "differs",
        "declined",
        "coordinator-silent",
        "coordinator-back",
        "takes-over",
        "deposed",
        "no-quorum",
        "lineage",
        "joined",
        "rack-silent",
        "rack-back",
        "stall-over",
        "left-alone",
        "expelled",
        "leaving",
        "kept-local",
        "drain-gave-up",
        "frame-refused",
        "tape-gap",
        "tape-stopped",
    }
)
"""Kinds a person should see without asking: logged as warnings. The rest is INFO or DEBUG."""

USUAL = frozenset({"captured", "applied", "commit", "decided", "progress", "recorded"})


class Recorder:
    """Writes `events-rack{r}-rank{k}.jsonl` in its own thread; without a directory only the log.

    A rack that is started again goes on in the file of its former life, behind its own `start`.
    """

    def __init__(self, who: dict[str, int], directory: Path | None) -> None:
        self._who = " ".join(f"{key}={value}" for key, value in who.items())
        self.lost = 0
        self._queue: queue.Queue[dict[str, object] | None] = queue.Queue(QUEUE_MAX)
        self._thread: threading.Thread | None = None
        if directory is not None:
            path = directory / (
                "events-" + "-".join(f"{key}{value}" for key, value in who.items()) + ".jsonl"
            )
            self._thread = threading.Thread(
                target=self._write, args=(path,), name="mend-recorder", daemon=True
            )
            self._thread.start()

    def note(self, kind: str, fields: dict[str, object]) -> None:
        """Any thread. Never blocks."""
        level = (
            logging.WARNING if kind in LOUD else logging.DEBUG if kind in USUAL else logging.INFO
        )
        if logger.isEnabledFor(level):
            logger.log(level, "mend %s %s %s", self._who, kind, _grammar(fields))
        if self._thread is not None:
            try:
                self._queue.put_nowait({"kind": kind, "time_ns": time.time_ns(), **fields})
            except queue.Full:
                self.lost += 1

    def close(self) -> None:
        """Write what is queued; a disk that hangs is waited for a few seconds only."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:  # make room, so that the writer ends if the disk ever comes back
            with contextlib.suppress(queue.Empty, queue.Full):
                self._queue.get_nowait()
                self.lost += 1
                self._queue.put_nowait(None)
        thread.join(CLOSE_S)

    def _write(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                while (event := self._queue.get()) is not None:
                    file.write(json.dumps(event, separators=(",", ":")) + "\n")
                    if self._queue.empty():
                        file.flush()
        except OSError as error:
            self.lost += 1
            logger.warning(
                "mend %s events-stopped path=%s reason=%s remedy=free some space",
                self._who,
                path,
                error,
            )
            while self._queue.get() is not None:
                self.lost += 1


def _grammar(fields: dict[str, object]) -> str:
    return " ".join(f"{key}={_value(value)}" for key, value in fields.items())


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(_value(item) for item in value) or "-"
    text = str(value.get("rack", value)) if isinstance(value, dict) else str(value)
    return f'"{text}"' if " " in text else text
