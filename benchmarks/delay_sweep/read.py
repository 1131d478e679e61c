"""Reads the figures of one run of a sweep from its files.

Throughput is between two steps whose ends were noted (`progress`, and `recorded` where the script
calls `runtime.record`), so start, warm-up and shutdown are outside.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from mend.errors import ConfigError, MendError, TapeError
from mend.trace.reader import read_tape
from mend.types import MS, SECOND, WITNESS

LOSS = "loss"
"""Name of the recorded value that is compared."""

_FILE = re.compile(r"events-rack(\d+)-rank(\d+)\.jsonl")
_LONG = ("losses", "commits")

Event = Mapping[str, Any]
Files = Mapping[tuple[int, int], Sequence[Event]]
"""(rack, rank) -> its events."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One run. Times are of the training threads, means are over all ranks."""

    tokens_per_s: float
    """Rate of all ranks together."""
    step_ms: float
    """Time of a counted step, with its waits."""
    stall_ms_per_round: float
    stall_share: float
    """Part of the counted time in which training waited for mend."""
    rounds: float
    """Rounds whose stall was counted, per rank."""
    steps: int
    """Steps of the whole run."""
    bytes_sent: int
    losses: dict[str, list[float]]
    """Rank -> its recorded losses, in order. Empty lists: the script records none."""
    commits: dict[str, list[list[Any]]]
    """Rack -> [fragment, version, digests] of what was decided, by fragment and version."""

    def figures(self) -> dict[str, Any]:
        """Return all of it, with a hash in place of each long list."""
        short = {key: value for key, value in asdict(self).items() if key not in _LONG}
        return short | {f"{key}_sha256": bits_of(getattr(self, key)) for key in _LONG}


def bits_of(value: object) -> str:
    """Equal only for values that are equal to the last bit: JSON floats keep all of theirs."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


# ------------------------------------------------------------------ files


def event_files(folder: Path, ranks: int) -> Files:
    """The events of all `ranks` processes. Raises MendError when they are not all there."""
    found = {}
    for path in sorted(folder.glob("events-rack*.jsonl")):
        if (named := _FILE.fullmatch(path.name)) and int(named[1]) != WITNESS:
            lines = path.read_text(encoding="utf-8").splitlines()
            found[int(named[1]), int(named[2])] = [json.loads(line) for line in lines]
    if len(found) != ranks:
        raise MendError(
            f"{len(found)} of {ranks} ranks left events in {folder}: the script must call "
            "mend.mend_init(model, mend.MendConfig(), ...), and leave diagnostics_dir to MEND_*"
        )
    return found


def check_settings(folder: Path, files: Files, wanted: Mapping[str, object]) -> None:
    """Did the script take the cell's settings from MEND_*, or say others itself?

    Without exchange the `start` event says so; else the tape knows, if there is one. Raises
    ConfigError with the setting's name.
    """
    remedy = "Leave it out of MendConfig(...) in the script; the sweep sets MEND_* for every cell."
    if not wanted["exchange"]:
        starts = [event for event in files[min(files)] if event["kind"] == "start"]
        if not all(start.get("exchange") is False for start in starts):
            raise ConfigError("exchange", True, "the script sets it itself", remedy)
        return
    for path in sorted(folder.glob("tape-rack0-rank0.mend")):
        try:
            recorded_config = read_tape(path).header.config
        except TapeError:  # judged by `mend replay`, not here
            continue
        for name, value in wanted.items():
            if name in recorded_config and recorded_config[name] != value:
                rule = f"the script sets it itself, where this cell wants {value!r}"
                raise ConfigError(name, recorded_config[name], rule, remedy)


# ------------------------------------------------------------------ figures


class Mark(NamedTuple):
    """The end of a step."""

    step: int
    tokens: int
    at_ns: int


class Stall(NamedTuple):
    """Stall between two `progress` events."""

    ms: float
    rounds: int
    share: float


def measure(files: Files, *, counted_from: int, gap: int, blocking: bool) -> Measured:
    """`counted_from`: the first step that counts; `gap`: steps between two rounds.

    Raises MendError when a run is too short.
    """
    spans = [_span(events, counted_from, gap) for events in files.values()]
    stalls = [_stall(events, counted_from, gap, blocking) for events in files.values()]
    last = [_of(events, "progress")[-1] for events in files.values()]
    seconds = [(end.at_ns - begin.at_ns) / SECOND for begin, end in spans]
    return Measured(
        tokens_per_s=sum(
            (end.tokens - begin.tokens) / s for (begin, end), s in zip(spans, seconds, strict=True)
        ),
        step_ms=fmean(
            1e3 * s / (end.step - begin.step)
            for (begin, end), s in zip(spans, seconds, strict=True)
        ),
        stall_ms_per_round=fmean(stall.ms / max(1, stall.rounds) for stall in stalls),
        stall_share=fmean(stall.share for stall in stalls),
        rounds=fmean(stall.rounds for stall in stalls),
        steps=max(event["step"] for event in last),
        bytes_sent=sum(event["bytes_sent"] for event in last),
        losses={f"rack {rack} rank {rank}": _losses(files[rack, rank]) for rack, rank in files},
        commits={str(rack): _commits(files[rack, rank]) for rack, rank in files if rank == 0},
    )


def _of(events: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in events if event["kind"] == kind]


def _span(events: Sequence[Event], counted_from: int, gap: int) -> tuple[Mark, Mark]:
    """Return the span from the first counted step over as many whole gaps as were noted, so that
    all modes are charged for whole rounds. Where only some steps were noted: to the last of
    them."""
    noted = {
        event["step"]: Mark(event["step"], event["tokens"], event["at_ns"])
        for event in events
        if event["kind"] in ("progress", "recorded")
    }
    counted = [noted[step] for step in sorted(noted) if step >= counted_from]
    if len(counted) < 2:
        last = max(noted, default=0)
        remedy = "let the script make more steps, or lower --tau or --warm-up"
        if last > counted_from + gap:
            remedy = (
                f"only the ends of {sorted(noted)} were noted; call runtime.record(loss=...) after "
                "each step, or let the script train for some seconds"
            )
        raise MendError(
            f"the run has {last} steps, of which those from {counted_from} on count: {remedy}"
        )
    begin = counted[0]
    whole = [mark for mark in counted[1:] if (mark.step - begin.step) % gap == 0]
    return begin, (whole or counted)[-1]


def _stall(events: Sequence[Event], counted_from: int, gap: int, blocking: bool) -> Stall:
    """Per round that was waited for: blocking waits after a capture, concurrent at an apply."""
    progress = _of(events, "progress")
    end = progress[-1]
    # A short run may have none between warm-up and its last round; then all of it counts.
    settled = (e for e in progress if counted_from <= e["step"] <= end["step"] - gap)
    begin = next(settled, progress[0])
    ms = end["stall_ms_total"] - begin["stall_ms_total"]
    rounds = [
        event
        for event in _of(events, "captured" if blocking else "applied")
        if begin["step"] < event["step"] and event["time_ns"] <= end["at_ns"]
    ]
    wall_ms = (end["at_ns"] - begin["at_ns"]) / MS
    return Stall(ms, len(rounds), ms / wall_ms if wall_ms else 0.0)


def _losses(events: Sequence[Event]) -> list[float]:
    """The recorded losses. The recorder writes NaN and infinity as words."""
    return [
        float(event["values"][LOSS]) for event in _of(events, "recorded") if LOSS in event["values"]
    ]


def _commits(events: Sequence[Event]) -> list[list[Any]]:
    return sorted([e["fragment"], e["version"], e["digests"]] for e in _of(events, "commit"))
