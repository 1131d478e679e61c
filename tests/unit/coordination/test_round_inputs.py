"""What a round sees: times that suit whoever is fastest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from mend.consensus.log import NORMS_KEPT, Log
from mend.consensus.records import Absent, Commit, Grant, MomentFragments
from mend.consensus.units import all_free
from mend.coordination.messages import Declined, Sliced, UnitsAsk
from mend.coordination.round_inputs import (
    ABSURD,
    HARMLESS,
    NAMED_LATELY_MIN,
    NORMS_MIN,
    fastest_ns,
    inputs_of,
    norm_max,
    surroundings,
)
from mend.types import WITNESS
from tests.unit.coordination.nouns import commit, genesis, log_of, member, offer, report, roster


@pytest.mark.parametrize(
    ("times_ns", "fastest"), [([25, 375, 26], 25), ([0, 375], 375), ([0, 0], 0), ([], 0)]
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


def test_a_converged_job_may_move_by_the_rounding_of_its_weights() -> None:
    """Racks that had reached the optimum of a linear problem were called diverged, as they moved by
    7e-9 per step and the median had fallen to 4e-16."""
    assert norm_max([4.4e-16] * NORMS_MIN) == HARMLESS
    assert HARMLESS > 7.45e-09


def test_the_log_remembers_how_far_the_last_offers_moved_per_step() -> None:
    log = log_of(genesis(fragments=2))
    for version in range(1, NORMS_KEPT + 3):
        moved = replace(
            offer(0, version, fragment=1, base=version - 1, steps=4), norm=8.0 * version
        )
        made = commit(version, [moved], fragment=1)
        shares = (replace(made.members[0], norm=moved.norm),)
        log.append(replace(made, members=shares))
    assert log.appended.norms[0] == ()
    assert log.appended.norms[1] == tuple(2.0 * version for version in range(3, NORMS_KEPT + 3))
    assert log.committed.norms == [], "nothing of it is decided"


def test_a_moment_is_absurd_after_no_number_of_steps() -> None:
    """Its offers are values, as great after one step as after a period. Judged per step, a rack
    that joined behind a long period was called diverged."""
    first = genesis(fragments=2)
    policy = replace(first.policy, moments=(MomentFragments(1, 64),))
    log = log_of(replace(first, policy=policy))
    for version, fragment in [(v, f) for v in range(1, NORMS_MIN + 1) for f in (0, 1)]:
        moved = offer(0, version, fragment=fragment, base=version - 1, steps=4)
        made = commit(version, [moved], fragment=fragment)
        log.append(replace(made, members=(replace(made.members[0], norm=8.0),)))
    reports = {rack: report(1, 2) for rack in (0, 1)}
    offers = {(0, fragment): offer(0, 99, fragment=fragment, base=NORMS_MIN) for fragment in (0, 1)}
    around = surroundings(log.appended, reports, offers, frozenset(reports))
    found = [inputs_of(p, around, log.appended, reports, offers, {}).norm_max for p in (0, 1)]
    assert found == [ABSURD * 2.0, math.inf]


@pytest.mark.parametrize(
    ("fields", "arrived"),
    [({}, []), ({"sharded": True}, [1]), ({"sharded": True, "lockstep": True}, [1, 2])],
)
def test_where_rounds_are_sharded_a_live_racks_offer_has_arrived_though_nobody_pulled_it(
    fields: dict[str, bool], arrived: list[int]
) -> None:
    """Rack 2 is silent; in lockstep it is waited for."""
    first = genesis(3)
    log = log_of(replace(first, policy=replace(first.policy, **fields)))
    reports = {rack: report(rack, 2) for rack in range(3)}
    offers = {(rack, 0): offer(rack) for rack in (1, 2)}
    around = surroundings(log.appended, reports, offers, frozenset({0, 1}))
    found = inputs_of(0, around, log.appended, reports, offers, {}).arrived
    assert [each.member.rack for each in found] == arrived


def test_how_racks_stand_in_a_sharded_attempt_is_read_of_the_next_version() -> None:
    log = log_of(genesis(2))
    said = (Sliced(0, 1, 7, 2), Sliced(0, 1, 8, 1), Sliced(0, 2, 9, 2))
    reports = {0: report(0, 2), 1: report(1, 2, slices=said)}
    around = surroundings(log.appended, reports, {}, frozenset(reports))
    assert inputs_of(0, around, log.appended, reports, {}, {}).slices == {1: said[1]}


def test_a_rack_has_declined_if_it_says_so_of_this_fragment_and_version() -> None:
    log = log_of(genesis(4, fragments=2))
    said = {1: Declined(0, 0, "NaN"), 2: Declined(1, 0, "NaN"), 3: Declined(0, 5, "NaN")}
    reports = {rack: report(1, 2, declined=(each,)) for rack, each in said.items()}
    around = surroundings(log.appended, reports, {}, frozenset(reports))
    assert inputs_of(0, around, log.appended, reports, {}, {}).declined == {1}


def test_rack_without_rows_offers_what_is_under_way() -> None:
    """Rack 0 leaves, and the others have taken all their rows."""
    first, ask = genesis(4, fragments=2), UnitsAsk(5, 64, True)
    shares = tuple((member(rack), ((5 * rack, 5),)) for rack in range(4))
    first = replace(first, units=all_free(20), policy=replace(first.policy, units=20, epochs=1))
    log = log_of(first, Grant(shares)).appended
    reports = {rack: report(1, 2, units=ask) for rack in range(4)}
    reports |= {0: report(1, 2, leaving=True), 2: report(1, 2, units=ask, coming=(0,))}
    offers = {(rack, 0): offer(rack) for rack in (0, 1)}
    around = surroundings(log, reports, offers, frozenset(reports))
    found = [inputs_of(p, around, log, reports, offers, {}).without_rows for p in (0, 1)]
    assert found == [{3}, {1, 2, 3}]


def seen(log: Log, **changes: Any) -> Mapping[int, Absent]:
    """Racks whose work is to come. All report step 99, unless it is said of rack 1."""
    reports = {rack: report(1, 2, step=99) for rack in log.appended.seats}
    reports[1] = replace(reports[1], **changes)
    around = surroundings(log.appended, reports, {}, frozenset(reports))
    found = inputs_of(1, around, log.appended, reports, {}, {})
    return {rack: found.works[rack] for rack in sorted(found.coming & found.works.keys())}


def named(version: int, *racks: int) -> Commit:
    made = [offer(rack, version, fragment=1, tokens=10 + rack) for rack in racks]
    return commit(version, made, fragment=1)


def test_a_rack_that_was_named_lately_weighs_as_it_did_then() -> None:
    log = log_of(genesis(3, fragments=2), named(1, 0, 1), named(2, 1))
    (captured,) = {each.capture_step for each in named(2, 1).members}
    found = seen(log, step=captured + 1)
    assert found[1] == Absent(1, 11, 2)
    assert sorted(found) == [0, 1], "rack 2 was never named"


def test_a_rack_that_has_trained_more_since_it_was_named_weighs_as_all_of_that() -> None:
    """Its next offer was of 192 steps, and it weighed as its last one, of 8: what was merged
    meanwhile counted as two thirds of a round in place of half, and was added."""
    log = log_of(genesis(3, fragments=2), named(1, 0, 1))
    (captured,) = {each.capture_step for each in named(1, 1).members}
    assert seen(log, step=captured + 20)[1] == Absent(1, 110, 20)


@pytest.mark.parametrize("changes", [{"step": 16}, {"leaving": True}])
def test_a_rack_that_has_not_stepped_since_or_leaves_has_nothing_to_come(
    changes: dict[str, Any],
) -> None:
    log = log_of(genesis(fragments=2), named(1, 0), named(2, 0, 1))
    assert set(seen(log)) == {0, 1}
    assert set(seen(log, **changes)) == {0}


def test_a_rack_that_never_gets_in_is_absent_for_a_while_only() -> None:
    log = log_of(genesis(fragments=2), named(1, 1))
    for version in range(2, NAMED_LATELY_MIN + 1):
        log.append(named(version, 0))
        assert set(seen(log)) == {0, 1}
    log.append(named(NAMED_LATELY_MIN + 1, 0))
    assert set(seen(log)) == {0}


def coming(log: Log, fragment: int = 1, offered: int = -1, **changes: Any) -> set[int]:
    """Racks whose work is to come; rack 1 says `changes`, and has an offer if it is `offered`."""
    reports = {0: report(1, 2, step=99), 1: report(1, 2, step=99, **changes)}
    offers = {(1, fragment): offer(1, 99, fragment=fragment)} if offered == fragment else {}
    around = surroundings(log.appended, reports, offers, frozenset(reports))
    return set(inputs_of(fragment, around, log.appended, reports, offers, {}).coming)


def test_a_founder_that_was_not_named_yet_counts_while_the_job_is_young() -> None:
    log = log_of(genesis(fragments=2))
    for version in range(1, NAMED_LATELY_MIN):
        log.append(named(version, 0))
        assert coming(log) == {0, 1}
    log.append(named(NAMED_LATELY_MIN, 0))
    assert coming(log) == {0}, "it never gets in"


def test_a_rack_that_leaves_has_work_to_come_as_long_as_it_offers_it() -> None:
    log = log_of(genesis(fragments=2), named(1, 0, 1))
    assert coming(log, leaving=True) == {0}
    assert coming(log, leaving=True, offered=1) == {0, 1}
    assert coming(log, leaving=True, offered=0) == {0}, "of another fragment"
    assert coming(log, leaving=True, coming=(1,)) == {0, 1}, "it is being encoded"


def test_many_racks_may_take_turns() -> None:
    log = log_of(genesis(5, fragments=2), *(named(1 + rack, rack) for rack in range(5)))
    assert set(seen(log)) == set(range(5))


def test_nonvoter_is_awaited_unless_it_waits_for_a_training_state() -> None:
    log = log_of(
        genesis(racks=2, witness=True),
        roster(1, [0, 1, 2], non_voters=[1, 2, WITNESS], witness=True),
    ).appended
    reports = {rack: report(1) for rack in range(3)}
    around = surroundings(log, reports, {}, frozenset(range(3)))
    assert around.contributors == {0, 1}
    assert around.voters == {0}
    reports[1] = report(1, wants=True)
    around = surroundings(log, reports, {}, frozenset(range(3)))
    assert around.contributors == {0}, "it waits for the training state of a donor"
