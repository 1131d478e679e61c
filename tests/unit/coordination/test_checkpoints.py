"""When a checkpoint is due: all racks that can ask for the same one, and later have written it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from mend.consensus.log import LogState
from mend.consensus.records import CheckpointRecord, Record
from mend.coordination.checkpoints import barrier_of_rack, next_checkpoint, waits
from mend.coordination.messages import BarrierState, Report
from tests.unit.coordination.nouns import genesis, log_of, rank_report, report, roster

LINEAGE = "ab" * 32
ALL = frozenset({0, 1, 2})
ASK, DONE = BarrierState(1, "one", False), BarrierState(1, "one", True)
FIRST = CheckpointRecord(1, "one", LINEAGE, (0, 1, 2))


def log(*records: Record) -> LogState:
    return log_of(genesis(3), *records).appended


def reports(*barriers: BarrierState | None, **changes: Any) -> dict[int, Report]:
    """Of rack 0, 1, ..."""
    return {rack: report(1, barrier=barrier, **changes) for rack, barrier in enumerate(barriers)}


def test_checkpoint_is_due_when_all_ask_for_it_and_then_no_more() -> None:
    asked = reports(ASK, ASK, ASK)
    assert next_checkpoint(log(), LINEAGE, asked, ALL) == FIRST
    assert next_checkpoint(log(FIRST), LINEAGE, asked, ALL) is None, (
        "the same reports, said once more"
    )


@pytest.mark.parametrize(
    "others",
    [None, BarrierState(1, "two", False), BarrierState(2, "one", False), DONE],
    ids=["trains", "another name", "another number", "written"],
)
def test_checkpoint_waits_for_every_rack_that_lives(others: BarrierState | None) -> None:
    assert next_checkpoint(log(), LINEAGE, reports(ASK, others, ASK), ALL) is None
    without = next_checkpoint(log(), LINEAGE, reports(ASK, others, ASK), frozenset({0, 2}))
    assert without == CheckpointRecord(1, "one", LINEAGE, (0, 2)), "a dead one is not waited for"


def test_a_rack_that_has_said_nothing_yet_is_waited_for() -> None:
    told = reports(ASK, ASK, ASK)
    del told[1]
    assert next_checkpoint(log(), LINEAGE, told, ALL) is None


def test_checkpoint_does_not_wait_for_racks_that_leave_or_still_copy() -> None:
    leaving = reports(ASK, ASK) | {2: report(1, leaving=True)}
    assert next_checkpoint(log(), LINEAGE, leaving, ALL) == CheckpointRecord(
        1, "one", LINEAGE, (0, 1)
    )
    joined = log(roster(1, (0, 1, 2), non_voters=(2,)))
    # A learner that had a vote before has what it trains on, and is in.
    assert next_checkpoint(joined, LINEAGE, reports(ASK, ASK, None), ALL) is None
    waits = reports(ASK, ASK) | {2: report(1, wants=True)}
    assert next_checkpoint(joined, LINEAGE, waits, ALL) == CheckpointRecord(
        1, "one", LINEAGE, (0, 1)
    )
    newcomer = log(roster(1, (0, 1)), roster(2, (0, 1, 2), non_voters=(2,)))
    found = next_checkpoint(newcomer, LINEAGE, reports(ASK, ASK, None), ALL)
    assert found == CheckpointRecord(1, "one", LINEAGE, (0, 1))


def test_in_lockstep_a_silent_rack_is_waited_for() -> None:
    begun = log()
    begun.policy = replace(begun.policy, lockstep=True)
    asked = reports(ASK, ASK, ASK)
    assert next_checkpoint(begun, LINEAGE, asked, frozenset({0, 1})) == FIRST
    assert next_checkpoint(begun, LINEAGE, asked | {2: report(1)}, frozenset({0, 1})) is None


def test_checkpoint_is_written_when_all_its_racks_say_so() -> None:
    assert next_checkpoint(log(FIRST), LINEAGE, reports(DONE, DONE, ASK), ALL) is None
    found = next_checkpoint(log(FIRST), LINEAGE, reports(DONE, DONE, DONE), ALL)
    assert found == CheckpointRecord(1, "one", LINEAGE, (0, 1, 2), written=True)
    assert found is not None
    assert next_checkpoint(log(FIRST, found), LINEAGE, reports(DONE, DONE, DONE), ALL) is None


def test_a_rack_that_dies_before_it_has_written_is_missing_in_the_record() -> None:
    found = next_checkpoint(log(FIRST), LINEAGE, reports(DONE, ASK, DONE), frozenset({0, 2}))
    assert found == CheckpointRecord(1, "one", LINEAGE, (0, 2), written=True)
    back = log(FIRST, roster(1, (0, 2)), roster(2, (0, 1, 2), non_voters=(1,)))
    again = reports(DONE, None, DONE)
    assert next_checkpoint(back, LINEAGE, again, ALL) == found, "nor is its next life waited for"


@pytest.mark.parametrize(
    "other", [None, BarrierState(2, "two", False)], ids=["trains", "in the next"]
)
def test_a_rack_that_could_not_write_holds_nobody_up(other: BarrierState | None) -> None:
    assert next_checkpoint(log(FIRST), LINEAGE, reports(DONE, other, ASK), ALL) is None
    found = next_checkpoint(log(FIRST), LINEAGE, reports(DONE, other, DONE), ALL)
    assert found == CheckpointRecord(1, "one", LINEAGE, (0, 2), written=True)


def test_checkpoint_that_was_given_up_does_not_stand_in_the_way_of_the_next() -> None:
    again = BarrierState(2, "two", False)
    found = next_checkpoint(log(FIRST), LINEAGE, reports(again, again, again), ALL)
    assert found == CheckpointRecord(2, "two", LINEAGE, (0, 1, 2))


def test_checkpoint_that_is_not_due_says_who_waits_where() -> None:
    assert waits(log(), reports(None, None, None)) == ""
    said = waits(log(), reports(ASK, BarrierState(1, "two", False), None))
    assert said == "checkpoint: rack 0 in 'one', rack 1 in 'two'; rack 2 is in none"
    assert waits(log(), reports(ASK, ASK, None)).startswith("checkpoint: racks 0,1 in 'one';")


OTHER = BarrierState(1, "other", False)


@pytest.mark.parametrize(
    ("barriers", "said"),
    [
        ((ASK, ASK), ASK), ((DONE, DONE), DONE), ((DONE, ASK), ASK), ((ASK, None), None),
        ((DONE, None), None), ((ASK, OTHER), None), ((None, None), None),
    ],
    ids=str,
)  # fmt: skip
def test_a_rack_writes_until_all_its_ranks_have_written(
    barriers: tuple[BarrierState | None, ...], said: BarrierState | None
) -> None:
    """Between its first and its last rank it said that it was in no checkpoint, which means that it
    has given up: the checkpoint counted as incomplete."""
    assert barrier_of_rack([rank_report(1, barrier=barrier) for barrier in barriers]) == said
