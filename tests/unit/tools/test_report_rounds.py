"""The phases of rounds, from the tapes of simulated jobs; and tapes that cannot be read."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from mend.tools.report.rounds import ROUNDS_SHOWN, Bar, Rounds, measure, rounds_of
from mend.tools.trace_timeline import Story, story_of
from mend.types import MS, WITNESS
from mend_lab.sim.scenario import Scenario
from tests.unit.tools.simulated import tapes

CALM = Scenario(steps=(60, 60))
SLOW = Scenario(steps=(60, 60), step_ns=(50 * MS, 65 * MS))
"""Rack 1 is slower, so rounds wait for it."""


@cache
def told(scenario: Scenario) -> Story:
    return story_of((tape.header, tape.entries()) for tape in tapes(scenario))


def measured(scenario: Scenario) -> Rounds:
    story, found = told(scenario), Rounds()
    measure(story, {(made.fragment, made.version) for made in story.decided}, found)
    return found


def bars(found: Rounds, made: tuple[int, int], rack: int) -> dict[str, Bar]:
    return {b.phase: b for b in found.bars if (b.fragment, b.version) == made and b.rack == rack}


def test_a_round_goes_through_its_phases_in_order() -> None:
    found = measured(CALM)
    for made in found.shown:
        for rack in (0, 1):
            mine = bars(found, made, rack)
            assert {"encode", "exchange", "merge"} <= set(mine), (made, rack)
            assert mine["encode"].end_ns <= mine["merge"].begin_ns
            assert mine["exchange"].end_ns <= mine["merge"].begin_ns
            if "ready" in mine:
                assert mine["merge"].end_ns <= mine["ready"].begin_ns
    assert {bar.phase for bar in found.bars} >= {"capture", "ready", "apply"}
    assert all(bar.begin_ns <= bar.end_ns for bar in found.bars)
    assert {bar.rack for bar in found.bars} == {0, 1}, "the witness has no lane"


def test_the_newest_rounds_are_drawn_and_all_are_measured() -> None:
    found, story = measured(CALM), told(CALM)
    assert found.measured == len(story.decided) > ROUNDS_SHOWN
    newest = [(made.fragment, made.version) for made in story.decided[-ROUNDS_SHOWN:]]
    assert found.shown == newest
    assert len(found.ms[0, "merge"]) == found.measured
    middle, high, most = found.spread(0, "merge") or (0, 0, 0)
    assert 0 < middle <= high <= most
    assert found.spread(WITNESS, "merge") is None


def test_a_grace_window_is_there_where_somebody_is_waited_for() -> None:
    found = measured(SLOW)
    waited = [bar for bar in found.bars if bar.phase == "grace"]
    assert waited
    assert all(bar.end_ns - bar.begin_ns > MS for bar in waited[:1])


def test_capture_and_apply_at_the_end_are_not_a_cost_of_a_step() -> None:
    """It was: a rack that leaves applies its last rounds long after its last step, and that whole
    time counted as the training thread's."""
    story = told(CALM)
    for made in story.decided:
        for mine in made.ranks.values():
            assert mine.in_mend_ns is None or mine.in_mend_ns < 200 * MS
    tails = [made.ranks[0, 0] for made in story.decided[-CALM.fragments :]]
    assert any(mine.captured_ns is not None and mine.stepped_ns is None for mine in tails)


@pytest.mark.parametrize("data", [None, b"", b"not a tape at all" * 100])
def test_without_a_readable_tape_a_note_says_so(tmp_path: Path, data: bytes | None) -> None:
    if data is not None:
        (tmp_path / "tape-rack0-rank0.mend").write_bytes(data)
    found = rounds_of(tmp_path, [(0, 1, 5)], 9)
    assert found.bars == []
    assert "no tape that can be read" in found.notes[-1]
    assert len(found.notes) == (1 if data is None else 2), found.notes
