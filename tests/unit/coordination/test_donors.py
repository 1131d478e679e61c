"""Which rack gives its training state to one that joins, and how that is passed on."""

from __future__ import annotations

from typing import Any

import pytest

from mend.consensus.log import LogState
from mend.coordination.donors import asked_of, copies_of, copies_of_rack, copy_for, donors_of
from mend.coordination.messages import Donor, RankCopy, Report, StateCopy
from mend.coordination.validation import report_misfit
from tests.unit.coordination.nouns import (
    digest,
    genesis,
    log_of,
    member,
    orders,
    policy,
    rank_report,
    report,
    roster,
)

ALL = frozenset({0, 1, 2})
JOINER = member(2)


def log() -> LogState:
    """Rack 2 has joined a job of two."""
    return log_of(genesis(2), roster(2, (0, 1, 2), non_voters=(2,))).appended


def reports(**changes: Any) -> dict[int, Report]:
    """Rack 2 asks; `changes`: of rack 0."""
    return {0: report(1, **changes), 1: report(1), 2: report(1, wants=True)}


def no(rack: int) -> StateCopy:
    return StateCopy(JOINER, member(rack), 7, (), (), "it cannot")


def test_the_lowest_rack_that_trains_is_the_donor() -> None:
    assert donors_of(log(), reports(), ALL) == (Donor(JOINER, member(0)),)
    assert donors_of(log(), reports() | {2: report(1)}, ALL) == (), "nobody asks"


@pytest.mark.parametrize(
    ("changes", "live"),
    [
        ({}, frozenset({1, 2})),
        ({"leaving": True}, ALL),
        ({"wants": True}, ALL),
        ({"copies": (no(0),)}, ALL),
    ],
    ids=["is silent", "leaves", "joins itself", "has refused"],
)
def test_donor_that_cannot_give_is_passed_over(changes: Any, live: frozenset[int]) -> None:
    assert Donor(JOINER, member(1)) in donors_of(log(), reports(**changes), live)


def test_a_donor_that_has_copied_is_kept() -> None:
    """A lower rack is back meanwhile; to it a refusal is no copy."""
    mine = StateCopy(JOINER, member(1), 9, (10,), (digest(2),))
    told = reports() | {1: report(1, copies=(mine,))}
    assert donors_of(log(), told, ALL) == (Donor(JOINER, member(1)),)
    assert copies_of(log(), told, ALL, donors_of(log(), told, ALL)) == (mine,)
    told |= {1: report(1, copies=(no(1),))}
    assert donors_of(log(), told, ALL) == (Donor(JOINER, member(0)),)


def test_a_newcomer_has_nothing_to_give() -> None:
    joined = log_of(genesis(2), roster(2, (0, 1, 2, 3), non_voters=(2, 3))).appended
    told = {2: reports()[2], 3: report(1)}
    assert donors_of(joined, told, ALL | {3}) == ()


def test_only_what_the_donor_has_copied_is_passed_on() -> None:
    copy = StateCopy(JOINER, member(0), 7, (10,), (digest(1),))
    other = StateCopy(JOINER, member(1), 9, (10,), (digest(2),))
    told = reports(copies=(copy,)) | {1: report(1, copies=(other,))}
    donors = donors_of(log(), told, ALL)
    assert copies_of(log(), told, ALL, donors) == (copy,)
    said = orders(1, donors=donors, copies=(copy,))
    assert asked_of(said, member(0)) == (JOINER,)
    assert asked_of(said, member(1)) == asked_of(None, member(0)) == ()
    assert copy_for(said, JOINER) == copy
    assert copy_for(said, member(1)) is copy_for(None, JOINER) is None


def test_where_all_refuse_the_joiner_hears_it() -> None:
    told = reports(copies=(no(0),)) | {1: report(1, copies=(no(1),))}
    assert donors_of(log(), told, ALL) == ()
    assert copies_of(log(), told, ALL, ()) == (no(0),)


def test_where_all_leave_the_joiner_hears_it() -> None:
    """They wait for it: it must not wait for them. It goes on from where they are."""
    told = reports(leaving=True, step=40) | {1: report(1, leaving=True, step=48)}
    assert donors_of(log(), told, ALL) == ()
    (said,) = copies_of(log(), told, ALL, ())
    assert (said.donor, said.refused) == (member(0), "it leaves the job, and no other rack trains")
    assert said.step == 48
    told = reports(leaving=True)
    del told[1]
    assert copies_of(log(), told, frozenset({1, 2}), ()) == (), "one may be heard yet"
    assert copies_of(log(), told, frozenset({0, 2}), ()) == (), "a new coordinator has no report"
    told = reports(leaving=True)
    assert copies_of(log(), told, frozenset({0, 2}), ()) == (), "rack 1 is silent, and trains"


def test_one_voter_begins_fresh_if_every_rack_joins() -> None:
    """All that trained were started again: they would wait for each other."""
    told = reports(wants=True) | {1: report(1, wants=True)}
    (said,) = copies_of(log(), told, ALL, ())
    assert (said.to, said.donor, said.refused) == (
        member(0), member(0), "every rack of the job joins, and none trains"
    )  # fmt: skip
    (said,) = copies_of(log(), told, ALL - {0}, ())
    assert said.to == member(1), "rack 0 is gone again"
    began = told | {0: report(0)}
    assert copies_of(log(), began, ALL, donors_of(log(), began, ALL)) == (), "rack 0 gives it"
    del told[1]
    assert copies_of(log(), told, ALL, ()) == (), "rack 1 may train"


def test_a_racks_copy_is_that_of_all_its_ranks_at_one_step() -> None:
    def ranks(*copies: RankCopy | None) -> Any:
        return [rank_report(1, copies=(copy,) if copy else ()) for copy in copies]

    one, two = RankCopy(JOINER, 7, 10, digest(1)), RankCopy(JOINER, 7, 12, digest(2))
    whole = StateCopy(JOINER, member(0), 7, (10, 12), (digest(1), digest(2)))
    assert copies_of_rack(member(0), ranks(one, two)) == (whole,)
    assert copies_of_rack(member(0), ranks(one, None)) == ()
    assert copies_of_rack(member(0), ranks(one, RankCopy(JOINER, 8, 12, digest(2)))) == ()
    (refused,) = copies_of_rack(member(0), ranks(one, RankCopy(JOINER, 7, 0, "", "a hook")))
    assert (refused.refused, refused.sizes) == ("a hook", ())
    assert refused.step == 0, "the joiner begins with the script's first step"


def test_a_copy_of_another_plan_or_in_another_name_is_refused() -> None:
    fine = StateCopy(JOINER, member(0), 7, (10,), (digest(1),))
    short = StateCopy(JOINER, member(0), 7, (10, 11), (digest(1),))
    assert report_misfit(report(1, copies=(fine,)), member(0), policy()) == ""
    assert report_misfit(report(1, copies=(fine,)), member(1), policy()) != ""
    assert report_misfit(report(1, copies=(short,)), member(0), policy()) != ""
