"""`mend replay`: feeds the machines of a tape its events again, and compares their effects."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import typer

from mend.errors import TapeError
from mend.tools import versions
from mend.trace.reader import RecordedTape, part_to_replay, read_tape, tapes_in
from mend.trace.replay import TEXT_MAX, ReplayDifference, replay
from mend.types import SECOND

EQUAL, DIFFERENT, UNREADABLE = 0, 1, 2


def replay_machines(paths: Sequence[Path]) -> int:
    """One line per tape; returns the exit status, the worst of all tapes.

    Raises TapeError when there is no tape at all.
    """
    status = EQUAL
    for path in tapes_in(paths):
        try:
            status = max(status, _replay(read_tape(path)))
        except TapeError as error:
            typer.echo(f"cannot be replayed: {error}")
            status = UNREADABLE
    return status


def _replay(tape: RecordedTape) -> int:
    base, tape = part_to_replay(tape)
    started = time.monotonic()
    found = replay(tape.header.parts, tape.entries(), base)
    seconds = time.monotonic() - started
    end = ""
    where = f" from {tape.files[0].path.name} on, the earlier files are deleted" if base else ""
    if found.gap is not None:
        end = f"; then {found.gap.count} events are missing ({found.gap.reason})"
    elif tape.lost:
        end = f"; {tape.lost}"
    elif not tape.whole:
        end = "; it was never closed: its process was killed, or still runs"
    if found.difference is None:
        typer.echo(
            f"{tape.path}: equal{where}: {found.events} events, {found.effects} effects, "
            f"{found.rounds} rounds, {seconds:.2f} s{end}"
        )
        return EQUAL
    for line in describe(found.difference, tape):
        typer.echo(line)
    return DIFFERENT


def describe(difference: ReplayDifference, tape: RecordedTape) -> list[str]:
    """The first difference, for people."""
    entry, header = difference.entry, tape.header
    after_s = (entry.now_ns - header.mono_ns) / SECOND
    event = repr(entry.event)
    recorded = " ".join(f"{name}={version}" for name, version in header.versions.items())
    return [
        f"{tape.path}: different: event {entry.number}, {after_s:.3f} s after the start, "
        f"machine {entry.machine}",
        f"    given     {event if len(event) <= TEXT_MAX else event[:TEXT_MAX] + '...'}",
        f"    in        {difference.where}",
        f"    recorded  {difference.recorded}",
        f"    now       {difference.came}",
        f"    recorded by {recorded}; this is {versions()}",
    ]
