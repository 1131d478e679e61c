"""Who has heard the end of a job goes; a witness stays where racks were missing."""

from __future__ import annotations

import pytest

from mend.consensus.log import LogState
from mend.coordination.ending import END_REPEATED_NS, FAREWELL_NS, Ending, missing
from mend.types import SECOND, WITNESS
from tests.unit.coordination.nouns import genesis, log_of, roster

ALL = log_of(genesis(witness=True), roster(1, [], witness=True)).appended
WITHOUT_1 = log_of(genesis(witness=True), roster(1, [], non_voters=[1], witness=True)).appended


@pytest.mark.parametrize(
    ("rack", "log", "confirmed", "stays_ns"),
    [
        (WITNESS, ALL, True, 0),
        (WITNESS, ALL, False, FAREWELL_NS),
        (WITNESS, WITHOUT_1, True, END_REPEATED_NS),
        (0, WITHOUT_1, True, 0),
        (0, WITHOUT_1, False, FAREWELL_NS),
    ],
)
def test_how_long_it_stays(rack: int, log: LogState, confirmed: bool, stays_ns: int) -> None:
    ending = Ending(rack)
    if stays_ns:
        assert not ending.may_go(log, SECOND, confirmed=confirmed)
        assert not ending.may_go(log, SECOND + stays_ns - 1, confirmed=confirmed)
        assert ending.due_ns == SECOND + stays_ns
    assert ending.may_go(log, SECOND + stays_ns, confirmed=confirmed)
    assert ending.due_ns is None, "a deadline that has passed wakes its process for ever"


def test_no_rack_is_missing_before_the_end() -> None:
    running = log_of(genesis(racks=2), roster(1, [0, 1], non_voters=[1])).appended
    assert missing(running) == set()
    assert missing(WITHOUT_1) == {1}
