"""Replays the machines of a tape: equal events must give equal effects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import Struct

from mend.consensus.records import Commit
from mend.coordination.events import Effect, Note, RecordCommitted
from mend.coordination.machines import ProcessSpec, machines_of
from mend.errors import TapeError, format_error
from mend.events.kinds import RoundDecided
from mend.trace.format import Answer, Entry, Gap, answer_of, effect_of
from mend.trace.state import decode_state

TEXT_MAX = 300
"""Characters of a value in a difference."""


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """The first event whose effects differ. `where`: the path to the field that differs."""

    entry: Entry
    where: str
    recorded: str
    came: str


@dataclass(slots=True)
class Replayed:
    """The extent of a replay. `gap`: where it stopped, because later events cannot be compared."""

    events: int = 0
    effects: int = 0
    rounds: int = 0
    difference: ReplayDifference | None = None
    gap: Gap | None = None


def replay(parts: ProcessSpec, entries: Iterable[Entry | Gap], base: bytes = b"") -> Replayed:
    """Feed new machines the events of the tape and compare the effects. `base`: the machines' state
    at the beginning of `entries`, if that is not the beginning of the job. Raises TapeError for a
    tape that names a machine that its header does not, and for a state that does not fit."""
    machines = decode_state(base) if base else machines_of(parts).named()
    result, rounds = Replayed(), set()
    for entry in entries:
        if isinstance(entry, Gap):
            result.gap = entry
            break
        machine = machines.get(entry.machine)
        if machine is None:
            raise TapeError(f"event {entry.number} is of {entry.machine!r}, which was never made")
        came: list[Effect] = []
        error = ""
        try:
            came = machine.handle(entry.event, entry.now_ns)
        except Exception as raised:  # a machine's bug is on the tape, too
            error = format_error(raised)
        result.events, result.effects = result.events + 1, result.effects + len(came)
        answers = tuple(answer_of(effect) for effect in came)
        if answers != entry.answers or error != entry.error:
            result.difference = _difference(entry, answers, error)
            break
        rounds |= _committed(came)
    result.rounds = len(rounds)
    return result


def _committed(effects: list[Effect]) -> set[tuple[int, int]]:
    """(fragment, version) pairs that a rank reads as committed, or a coordinator has decided."""
    versions: set[tuple[int, int]] = set()
    for effect in effects:
        if isinstance(effect, RecordCommitted) and isinstance(effect.record, Commit):
            versions.add((effect.record.fragment, effect.record.version))
        elif isinstance(effect, Note) and isinstance(effect.event, RoundDecided):
            versions.add((effect.event.fragment, effect.event.version))
    return versions


def _difference(entry: Entry, came: tuple[Answer, ...], error: str) -> ReplayDifference:
    if error != entry.error:
        return ReplayDifference(entry, "raised", entry.error or "nothing", error or "nothing")
    for index, (old, new) in enumerate(zip(entry.answers, came, strict=False), start=1):
        if old != new:
            before, after = effect_of(old), effect_of(new)
            where, one, other = first_difference(before, after, type(before).__name__)
            return ReplayDifference(entry, f"effect {index}, {where}", _text(one), _text(other))
    shorter = min(len(entry.answers), len(came))
    more = entry.answers if len(entry.answers) > shorter else came
    extra = _text(effect_of(more[shorter]))
    sides = (extra, "nothing") if more is entry.answers else ("nothing", extra)
    return ReplayDifference(entry, f"effect {shorter + 1}", *sides)


def first_difference(old: object, new: object, where: str) -> tuple[str, object, object]:
    """The path to the innermost difference of two values, and both values there."""
    pairs: list[tuple[str, object, object]] = []
    if type(old) is type(new):
        if isinstance(old, Struct):
            names = old.__struct_fields__
            pairs = [(f".{name}", getattr(old, name), getattr(new, name)) for name in names]
        elif isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
            pairs = [(f"[{key!r}]", old[key], new[key]) for key in old]
        elif isinstance(old, list | tuple) and isinstance(new, list | tuple):
            both = enumerate(zip(old, new, strict=False)) if len(old) == len(new) else ()
            pairs = [(f"[{index}]", one, other) for index, (one, other) in both]
    for step, one, other in pairs:
        if one != other:
            return first_difference(one, other, where + step)
    return where, old, new


def _text(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= TEXT_MAX else text[:TEXT_MAX] + "..."
