"""Without keys: which connection speaks for a process."""

from __future__ import annotations

from mend.engine.io.connection_owners import SILENT_NS, SPEAKERS_MAX, ConnectionOwners
from mend.types import Member

RACK = Member(1, 7)
FIRST, SECOND = b"first", b"second"


def speakers(gone: set[bytes]) -> ConnectionOwners:
    return ConnectionOwners(lambda route: route not in gone)


def test_a_second_connection_is_not_heard_while_the_first_stands_and_speaks() -> None:
    known = speakers(set())
    assert known.admits(RACK, 0, FIRST, 0)
    assert not known.admits(RACK, 0, SECOND, SILENT_NS - 1)
    assert known.admits(RACK, 0, FIRST, SILENT_NS)
    assert not known.admits(RACK, 0, SECOND, 2 * SILENT_NS - 1)


def test_a_process_that_connects_anew_is_heard_at_once() -> None:
    gone: set[bytes] = set()
    known = speakers(gone)
    known.admits(RACK, 0, FIRST, 0)
    gone.add(FIRST)
    assert known.admits(RACK, 0, SECOND, 1)
    assert known.admits(RACK, 0, SECOND, 2)


def test_a_connection_that_is_silent_may_be_half_dead() -> None:
    known = speakers(set())
    known.admits(RACK, 0, FIRST, 0)
    assert known.admits(RACK, 0, SECOND, SILENT_NS)
    assert not known.admits(RACK, 0, FIRST, SILENT_NS + 1), "its place is taken"


def test_lives_and_ranks_do_not_speak_for_each_other() -> None:
    known = speakers(set())
    known.admits(RACK, 0, FIRST, 0)
    assert known.admits(Member(1, 8), 0, SECOND, 1)
    assert known.admits(RACK, 1, SECOND, 1)


def test_names_without_end_take_bounded_memory() -> None:
    known = speakers(set())
    for life in range(SPEAKERS_MAX + 500):
        known.admits(Member(1, life), 0, FIRST, life)
    assert len(known._routes) == SPEAKERS_MAX
