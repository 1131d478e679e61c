"""Reads the event files of run folders in the order of time. Damaged files are used as far as they
go, and what is left out is counted."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from mend.errors import ConfigError, EventError
from mend.events.kinds import EventsCut
from mend.events.lines import TimedEvent, decode_line
from mend.files import open_regular
from mend.status.event_log import FOLLOWER
from mend.status.events_file import BYTES_MAX, older_of
from mend.tools.report.facts import FactCollector, RunFacts, clean
from mend.types import WITNESS

FILES_MAX = 256
"""Event files that are read of one run: those of the lowest ranks."""
LINE_BYTES_MAX = 1 << 20
_NAME = re.compile(r"events-rack(\d{1,5})-rank(\d{1,6})\.jsonl")

OF_FOLLOWER = (-1, -1)

Line = tuple[tuple[int, int], TimedEvent]
"""(rank, event)."""


@dataclass
class Damage:
    """The parts of a file that could not be used."""

    torn: bool = False
    """The last line has no end: the process was killed, or still writes."""
    lines: int = 0
    """Lines that are not events of this version of mend."""
    why: str = ""
    """Of the first of them."""
    cut: bool = False
    """The oldest events were deleted."""
    error: str = ""
    events: int = 0


def runs_in(folder: Path) -> list[tuple[str, Path]]:
    """(name, folder) of every run in there: one, or several where a folder holds folders of runs.

    Raises ConfigError when there is none.
    """
    remedy = (
        "Give the diagnostics_dir of a job (MEND_DIAGNOSTICS_DIR), or a folder of such folders."
    )
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ConfigError("RUN_DIR", str(folder), what, remedy)
    try:
        paths = [path for path in folder.rglob("events-*.jsonl") if _NAME.fullmatch(path.name)]
        if not all(path.is_file() for path in paths):
            raise ConfigError("RUN_DIR", str(folder), "its events are not files", remedy)
    except OSError as error:
        raise ConfigError("RUN_DIR", str(folder), f"cannot be read ({error})", remedy) from error
    parents = sorted({path.parent for path in paths}, key=lambda path: _first_ns(path))
    if not parents:
        rule = "there is no events-rack*-rank*.jsonl in there"
        raise ConfigError("RUN_DIR", str(folder), rule, remedy)
    return [(_title(folder, parent), parent) for parent in parents]


def _first_ns(folder: Path) -> tuple[int, str]:
    """Return when the run began, by the oldest of its files, then its name."""
    times = [path.stat().st_mtime_ns for path in folder.glob("events-*.jsonl")]
    return (min(times), str(folder))


def _title(folder: Path, parent: Path) -> str:
    """Return the name that tells the run from others in the folder."""
    parts = [part for part in parent.relative_to(folder).parts if part != "events"]
    if parts:
        return "/".join(parts)
    full = parent.resolve()
    return full.parent.name if full.name == "events" else full.name


def read_run(folder: Path) -> RunFacts:
    """Read all events of one run. Its notes say what was left out or damaged."""
    found = {}
    for path in folder.glob("events-*.jsonl"):
        if named := _NAME.fullmatch(path.name):
            found[int(named[2]), int(named[1])] = path
    chosen = sorted(found.items())[:FILES_MAX]
    trained = [(rack, rank) for (rank, rack), _ in chosen if rack != WITNESS]
    collector = FactCollector(trained)
    damages = {path: Damage() for _, path in chosen}
    streams = [_halves(path, (rack, rank), damages[path]) for (rank, rack), path in chosen]
    if (followed := folder / FOLLOWER).exists():
        damages[followed] = Damage()
        streams.append(_halves(followed, OF_FOLLOWER, damages[followed]))
    for who, timed in heapq.merge(*streams, key=lambda line: line[1].time_ns):
        if who == OF_FOLLOWER:
            collector.take_followed(timed)
        else:
            collector.take(*who, timed)
    facts = collector.finish()
    facts.events = sum(each.events for each in damages.values())
    facts.notes += _notes(damages, len(found) - len(chosen), facts.earlier_jobs)
    return facts


def _notes(damages: dict[Path, Damage], left_out: int, earlier: int) -> list[str]:
    notes = []
    for path, damage in sorted(damages.items()):
        if damage.error:
            notes.append(f"{path.name} cannot be read to its end: {damage.error}")
        elif not (damage.events or damage.torn or damage.lines):
            notes.append(
                f"{path.name} has no event: its process has written none yet, or could not"
            )
        if damage.torn:
            notes.append(
                f"{path.name} ends inside a line, which is left out: its process was killed, or "
                "still writes"
            )
        if damage.cut:
            notes.append(
                f"{path.name}: the oldest events were deleted, as the file and its older half had "
                f"reached {BYTES_MAX >> 20} MiB; rounds, waits and faults are counted from there on"
            )
        if damage.lines:
            notes.append(
                f"{path.name}: lines left out, of which this version of mend can make no event: "
                f"{damage.lines}; the first: {damage.why}"
            )
    if left_out:
        notes.append(f"{left_out} event files of higher ranks are not read ({FILES_MAX} at most)")
    if earlier:
        notes.append(f"the folder holds {earlier + 1} jobs; this is the newest")
    return notes


def _halves(path: Path, who: tuple[int, int], damage: Damage) -> Iterator[Line]:
    older = older_of(path)
    halves = [older, path] if older.exists() else [path]
    return chain.from_iterable(_lines(half, who, damage) for half in halves)


def _lines(path: Path, who: tuple[int, int], damage: Damage) -> Iterator[Line]:
    try:
        with open_regular(path) as file:
            while data := file.readline(LINE_BYTES_MAX):
                try:
                    timed = decode_line(data)
                except EventError as error:
                    _count(file, data, damage, error)
                    continue
                damage.events += 1
                damage.cut |= isinstance(timed.event, EventsCut)
                yield who, timed
    except OSError as error:
        damage.error = str(error)


def _count(file: BinaryIO, data: bytes, damage: Damage, error: EventError) -> None:
    """Count a line that is not an event. The rest of one that is too long is skipped."""
    if len(data) < LINE_BYTES_MAX and not data.endswith(b"\n"):
        damage.torn = True
        return
    while data and not data.endswith(b"\n"):
        data = file.readline(LINE_BYTES_MAX)
    damage.lines += 1
    damage.why = damage.why or clean(str(error))
