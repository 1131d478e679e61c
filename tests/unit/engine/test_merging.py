"""A merge that needs sums of the whole rack: measured here, added at the leader, merged here."""

from __future__ import annotations

import pytest
import torch

from mend.consensus.records import Offer
from mend.coordination import events as ev
from mend.coordination.messages import MergeProposal, Total
from mend.engine.compute.anchor import Anchor
from mend.engine.compute.sums import partial_of
from mend.errors import InvariantError, WorkerFailed, ensure
from mend.types import Owned, Span
from tests.unit.coordination.nouns import member
from tests.unit.engine.test_concurrent_outer_step import N, Story, theirs_of

OURS = torch.tensor([3.0, 0.0, 1.0, 1.0])
"""This rank's part of what rack 0 offers; the last two elements belong to another tensor."""

THEIRS = torch.tensor([0.0, 4.0, 1.0, 1.0])


def story() -> tuple[Story, tuple[Offer, Offer]]:
    """The payloads of racks 0 and 2 are here."""
    made = Story(merge="rda", owned=Owned((Span(0, 2), Span(0, 2)), N), plain=((False, True),))
    offers = (theirs_of(OURS), theirs_of(THEIRS, 2))
    made.told(offers=offers)
    for each, values in zip(offers, (OURS, THEIRS), strict=True):
        made.arrived(each, values)
    return made, offers


def test_a_rank_reports_its_part_and_merges_with_what_the_leader_made_of_all() -> None:
    made, offers = story()
    proposals = (MergeProposal(0, 1, 1, offers),)
    made.told(proposals=proposals)
    (partial,) = made.report.partials
    assert made.report.held == ()
    rack_mate = partial_of((0.5, 0.5), [made.numerics.rule.measure([torch.zeros(1)] * 2)])
    total = made.numerics.total([rack_mate, partial.blob])
    made.told(proposals=proposals, totals=(Total(0, 1, 1, total),))
    (held,) = made.report.held
    # |(3, 0)| = 3 and |(0, 4)| = 4: mean length 3.5, direction 45 degrees; the plain tensor: 1.
    result: Anchor = made.rank.store.tentative[(0, 1, 1)]
    assert torch.allclose(result.values, -torch.tensor([3.5 / 2**0.5, 3.5 / 2**0.5, 1.0, 1.0]))
    assert held.digests == (result.digest,)


def test_garbage_instead_of_a_total_fails_the_merge_and_stops_nobody() -> None:
    made, offers = story()
    proposals = (MergeProposal(0, 1, 1, offers),)
    made.told(proposals=proposals)
    made.told(proposals=proposals, totals=(Total(0, 1, 1, b"garbage"),))
    assert "WireError" in made.host.noted("merge-failed")[0]["error"]
    assert made.published.failure is None
    assert made.report.held == ()


def test_spoiled_bytes_are_found_before_they_are_measured_again() -> None:
    made, offers = story()
    made.rank.store.payloads[member(2), 0, 1].data_B[0] ^= 1
    made.told(proposals=(MergeProposal(0, 1, 1, offers),))
    assert len(made.report.partials) == 1, "nobody has looked yet"
    made.told(proposals=(MergeProposal(0, 1, 2, offers),))
    (note,) = made.host.noted("fetch-failed")
    assert note["error"] == "its bytes changed in memory"
    assert made.report.partials == ()
    made.later()
    made.arrived(offers[1], THEIRS)
    made.later()
    (partial,) = made.report.partials
    assert partial.attempt == 2


@pytest.mark.parametrize("blobs", [(b"",), (b"garbage", b"garbage")])
def test_a_leader_that_is_given_garbage_says_so(blobs: tuple[bytes, ...]) -> None:
    made, _ = story()
    told: list[ev.Event] = []
    made.rank._merging.sum(ev.Sum(0, 1, 1, blobs), told.append)
    (event,) = told
    assert isinstance(event, ev.Summed)
    assert event.blob == b""
    assert event.error.startswith("WireError: ")


def test_a_bug_in_the_sums_stops_the_rack_where_the_user_looks() -> None:
    made, _ = story()
    made.rank._merging.sum(ev.Sum(0, 1, 1, ()), lambda event: None)  # of nobody
    assert isinstance(made.published.failure, WorkerFailed)


def test_broken_invariant_of_a_job_is_raised_on_the_loop_and_is_no_failed_merge() -> None:
    """It would be tried again for ever."""
    made, _ = story()
    given: list[object] = []
    with pytest.raises(InvariantError, match="planted"):
        made.rank.jobs.run(lambda: ensure(False, "planted"), given.append)
    assert given == []
