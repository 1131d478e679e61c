"""Replay: the same events give the same effects; what comes otherwise is found and named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from msgspec import structs

from mend.coordination.events import Captured, Effect, Event, Merged, Send, StepReached, Tick
from mend.coordination.fragment_replica import RankOptions
from mend.coordination.machines import RANK_MACHINE, ProcessSpec, RankSpec, machines_of
from mend.coordination.messages import RankReport
from mend.errors import TapeError
from mend.trace.format import Entry, Gap, answer_of, read_record, record_of_entry
from mend.trace.replay import Replayed, first_difference, replay
from mend.types import MS, Peer
from tests.unit.coordination.nouns import digest, member

PARTS = ProcessSpec(Peer(0, 1), member(0), RankSpec(RankOptions(100 * MS, ranks=2), (digest(1),)))


def recorded() -> list[Entry]:
    """A learner that captures, and reports."""
    rank_machine = machines_of(PARTS).rank_machine
    assert rank_machine is not None
    events: list[Event] = [Tick(), StepReached(8, MS), Captured(0, 1, 0, 8, 64, 8), Tick()]
    found = []
    for number, event in enumerate(events, start=1):
        effects = rank_machine.handle(event, number * 60 * MS)
        entry = read_record(record_of_entry(RANK_MACHINE, number * 60 * MS, event, effects), number)
        assert isinstance(entry, Entry)
        found.append(entry)
    return found


def changed(entries: list[Entry], number: int, effects: list[Effect]) -> Replayed:
    """Replayed with other effects of one entry."""
    answers = tuple(answer_of(effect) for effect in effects)
    return replay(
        PARTS, (replace(e, answers=answers) if e.number == number else e for e in entries)
    )


def test_the_same_events_give_the_same_effects() -> None:
    entries = recorded()
    found = replay(PARTS, entries)
    assert found.difference is None
    assert (found.events, found.effects) == (4, sum(len(e.answers) for e in entries))
    assert found.effects > 3


def test_a_changed_field_is_found_deep_inside() -> None:
    entries = recorded()
    sent = entries[2].effects
    wrong = [
        structs.replace(e, body=structs.replace(e.body, step=9))
        if isinstance(e, Send) and isinstance(e.body, RankReport)
        else e
        for e in sent
    ]
    difference = changed(entries, 3, wrong).difference
    assert difference.entry.number == 3
    assert difference.where.endswith("Send.body.step")
    assert (difference.recorded, difference.came) == ("9", "8")


def test_an_effect_too_many_and_one_too_few_are_found() -> None:
    entries = recorded()
    effects = list(entries[2].effects)
    fewer = changed(entries, 3, effects[:-1]).difference
    assert (fewer.where, fewer.recorded) == (f"effect {len(effects)}", "nothing")
    more = changed(entries, 3, [*effects, effects[0]]).difference
    assert (more.where, more.came) == (f"effect {len(effects) + 1}", "nothing")


def test_an_exception_is_replayed_as_one() -> None:
    """What broke live breaks here, at the same event; and where it does not, that is told."""
    entries = recorded()
    broken = replace(
        entries[0],
        event=Merged(7, 1, 1, ""),
        error="IndexError: list index out of range",
        answers=(),
    )
    assert replay(PARTS, [broken]).difference is None
    unheard = replace(entries[0], error="AssertionError: ends twice", answers=())
    difference = replay(PARTS, [unheard]).difference
    assert (difference.where, difference.recorded) == ("raised", "AssertionError: ends twice")


def test_replay_ends_at_a_gap_and_says_so() -> None:
    def entries() -> Iterator[Entry | Gap]:
        yield from recorded()[:2]
        yield Gap(5, "slow")
        raise AssertionError("nothing behind a gap can be compared")

    found = replay(PARTS, entries())
    assert found.events == 2
    assert found.gap == Gap(5, "slow")


def test_a_machine_that_the_header_does_not_name_is_refused() -> None:
    with pytest.raises(TapeError, match="event 1 is of 'leader', which was never made"):
        replay(PARTS, [replace(recorded()[0], machine="leader")])


def test_the_innermost_difference_is_named() -> None:
    where, old, new = first_difference({"a": [1, (2, 3)]}, {"a": [1, (2, 4)]}, "x")
    assert (where, old, new) == ("x['a'][1][1]", 3, 4)


def test_values_of_different_kinds_differ_as_a_whole() -> None:
    assert first_difference(1, "1", "body.step") == ("body.step", 1, "1")
