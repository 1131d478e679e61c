"""What the benchmarks of failures make of what racks saw. The racks themselves: test_benchmarks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import kill, rejoin, straggler, unequal
from benchmarks._work import Seen

AT_START = Seen(
    rack=0, at_s=10.0, step=1, commits=1, merged=(0, 1), live=(0, 1), stall_ms=0.0, mend_ms=1.0,
    longest_ms=1.0, began_s=9.0,
)  # fmt: skip


def at(at_s: float, **changes: object) -> Seen:
    return replace(AT_START, at_s=at_s, **changes)  # type: ignore[arg-type]


def test_the_next_merge_is_the_first_one_without_the_dead_rack() -> None:
    """A merge that was under way when the rack died still names it, and does not count."""
    seen = [
        at(10.0),
        at(10.2, commits=2),
        at(10.4, commits=3),
        at(10.45, rack=1, commits=3, merged=(0,)),  # the dead one's own view is nobody's
        at(10.6, commits=4),  # under way when it died at 10.5
        at(12.6, live=(0,), stall_ms=900.0),
        at(13.1, commits=5, merged=(0,), live=(0,), stall_ms=1000.0),
        at(13.3, commits=6, merged=(0,), live=(0,), stall_ms=1000.0),
    ]
    found = kill.outcome(seen, dead=1, killed_s=10.5, wait_s=9.0)
    assert found["merged"] is True
    assert found["merged_s"] == pytest.approx(2.6)
    assert found["stall_ms"] == 1000.0
    assert found["usual_s"] == pytest.approx(0.2)


def test_a_merge_that_never_comes_is_not_told_as_a_fast_one() -> None:
    seen = [at(10.0), at(10.2, commits=2), at(12.6, live=(0,))]
    found = kill.outcome(seen, dead=1, killed_s=10.5, wait_s=9.0)
    assert (found["merged"], found["merged_s"]) == (False, 9.0)


def test_stall_before_the_kill_is_not_the_kills() -> None:
    seen = [at(10.0, stall_ms=70.0), at(13.0, merged=(0,), stall_ms=90.0)]
    assert kill.outcome(seen, dead=1, killed_s=10.5, wait_s=9.0)["stall_ms"] == 20.0


def test_a_rack_has_joined_when_a_new_merge_names_it() -> None:
    """Its heartbeat comes first, and with it a status that still shows the newest merge of its
    former life: that one is old."""
    seen = [
        at(10.0, commits=4),
        at(12.5, commits=4, live=(0,), stall_ms=1000.0, mend_ms=1100.0),
        at(21.0, rack=1, began_s=20.8, commits=0, merged=()),
        at(21.1, commits=4, merged=(0, 1), stall_ms=1000.0, mend_ms=1110.0, longest_ms=9.0),
        at(21.6, commits=5, merged=(0,), stall_ms=1040.0, mend_ms=1150.0, longest_ms=40.0),
        at(22.0, commits=6, merged=(0, 1), stall_ms=1040.0, mend_ms=1160.0, longest_ms=3.0),
        at(29.0, commits=9, merged=(0, 1), stall_ms=9999.0, mend_ms=9999.0, longest_ms=999.0),
    ]
    found = rejoin.outcome(seen, killed_s=10.1, restarted_s=13.0)
    assert found["joins_s"] == pytest.approx(9.0)
    assert found["ready_s"] == pytest.approx(7.8)
    assert found["waited_ms"] == 40.0
    assert found["longest_ms"] == 40.0
    assert found["lost_s"] == pytest.approx(0.060)
    assert found["outage_stall_ms"] == 1000.0


def test_a_straggler_costs_what_the_fast_racks_steps_get_longer() -> None:
    """100 steps of 10 ms alone, of 12 ms beside the slow one, a merge every 8 steps: 16 ms each."""
    alike = {rack: at(10.0, rack=rack, began_s=9.0, step=100) for rack in range(3)}
    slow = {rack: at(10.2, rack=rack, began_s=9.0, step=100) for rack in range(3)}
    assert straggler.costs_ms([(alike, slow)], gap=8) == pytest.approx([16.0, 16.0])


def test_merged_percentage_of_a_straggler_is_of_its_own_tokens() -> None:
    job = {rack: at(10.0, rack=rack, tokens=100, tokens_merged=95.0) for rack in (0, 1)}
    job[2] = at(10.0, rack=2, tokens=8, tokens_merged=6.0)
    assert straggler.merged_pct([job], (2,)) == [75.0]
    assert straggler.merged_pct([job], (0, 1)) == [95.0, 95.0]


def test_unequal_racks_are_compared_by_tokens_and_not_by_steps() -> None:
    """10 s of both: 9 of 10 thousand tokens of the one, all 1,000 of the other."""
    ended = {0: at(19.0, tokens=9_000), 1: at(19.0, rack=1, tokens=1_000)}
    assert unequal.share_pct(ended, {0: 1_000.0, 1: 100.0}) == pytest.approx(100 * 10 / 11)
