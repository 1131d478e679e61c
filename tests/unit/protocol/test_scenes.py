"""What a round sees: times that suit whoever is fastest."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from mend.protocol.log import NORMS_KEPT
from mend.protocol.scenes import ABSURD, NORMS_MIN, fastest_ns, norm_max, surroundings
from mend.protocol.view import View
from mend.terms import WITNESS
from tests.unit.protocol.nouns import commit, genesis, log_of, member, offer, report, roster


@pytest.mark.parametrize(
    ("times_ns", "fastest"),
    [([25, 375, 26], 25), ([0, 375], 375), ([0, 0], 0), ([], 0)],
)
def test_the_window_goes_by_the_fastest_rack(times_ns: list[int], fastest: int) -> None:
    """It went by the slowest: beside a rack 15 times slower the others waited in every round, 540
    to 730 ms of 200 (benchmarks/straggler.py). Who has not measured a step has no say."""
    assert fastest_ns(times_ns) == fastest


def test_a_step_is_absurd_by_what_was_merged_before() -> None:
    few = [0.5] * (NORMS_MIN - 1)
    assert norm_max(few) == math.inf, "too little is known"
    assert norm_max([*few, 1e9]) == ABSURD * 0.5, "one that got through is no measure"
    assert norm_max([0.0] * 9 + [1.0] * 8) == math.inf, "it stood still: anything may come"


def test_the_log_remembers_how_far_the_last_offers_moved_per_step() -> None:
    log = log_of(genesis(fragments=2))
    for version in range(1, NORMS_KEPT + 3):
        moved = replace(
            offer(0, version, fragment=1, base=version - 1, steps=4), norm=8.0 * version
        )
        made = commit(version, [moved], fragment=1)
        shares = (replace(made.members[0], norm=moved.norm),)
        log.append(replace(made, members=shares))
    assert log.written.norms[0] == ()
    assert log.written.norms[1] == tuple(2.0 * version for version in range(3, NORMS_KEPT + 3))
    assert log.told.norms == [], "nothing of it is decided"


def test_who_has_lost_its_vote_is_waited_for_like_any_other_who_has_just_come_is_not() -> None:
    log = log_of(
        genesis(racks=2, witness=True), roster(1, [0, 1, 2], learners=[1, 2, WITNESS], witness=True)
    ).written
    views = {rack: View(member(rack), 0, report=report(1)) for rack in range(3)}
    around = surroundings(log, views, {}, frozenset(range(3)))
    assert around.contributors == {0, 1}
    assert around.voters == {0}
