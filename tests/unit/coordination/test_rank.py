"""One rank: pulls what is offered, merges what is named, holds what is decided, frees the rest."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from mend.consensus.ballots import ballot_of
from mend.consensus.records import Absent, Ballot, CheckpointRecord, Drop, Ended, Offer, Record
from mend.consensus.weights import WHOLE
from mend.coordination import events as ev
from mend.coordination.events import Effect, Event
from mend.coordination.fetch_queue import RETRY_NS_MAX, RETRY_NS_MIN
from mend.coordination.flow import batch_ns
from mend.coordination.fragment_replica import LINGER_NS, RankOptions
from mend.coordination.messages import Held, MergeProposal, Message, Partial, RankReport, Total
from mend.coordination.rank import ENDED_NS, RankMachine
from mend.events.kinds import VersionsUndone
from mend.types import SECOND, Peer
from tests.unit.coordination.nouns import (
    FIRST,
    HEARTBEAT_NS,
    commit,
    digest,
    genesis,
    hello,
    lineage,
    log_of,
    member,
    notes,
    offer,
    offer_id,
    rank_orders,
    roster,
    seat,
    sent,
)

E = TypeVar("E")

MINE, OTHER, THIRD = 0, 1, 2


class Rack:
    """Rank 0 of rack 0, with a leader and threads that do what the test says."""

    def __init__(
        self, *, rack: int = MINE, racks: int = 3, rank: int = 0, ranks: int = 1,
        fragments: int = 1, token_weighted: bool = True, own_digests: tuple[str, ...] = (),
        sums: bool = False,
    ) -> None:  # fmt: skip
        self.me, self.now_ns, self.serial = Peer(rack, rank), 100 * SECOND, 0
        own = own_digests or tuple(
            digests[rank] for digests in hello(0, ranks=ranks, fragments=fragments).digests
        )
        options = RankOptions(HEARTBEAT_NS, ranks, sums)
        self.machine = RankMachine(self.me, member(rack), options, own)
        self.records: list[Record] = []
        self.fields: dict[str, Any] = {}
        first = genesis(racks, ranks, fragments)
        weighted = replace(first.policy, token_weighted=token_weighted)
        self.genesis = replace(first, policy=weighted)

    def __call__(self, event: Event) -> list[Effect]:
        return self.machine.handle(event, self.now_ns)

    def hear(self, body: Message, *, peer: Peer | None = None, life: int = 0) -> list[Effect]:
        leader = peer or Peer(self.me.rack, 0)
        return self(ev.Heard(leader, member(self.me.rack, life).incarnation, body))

    def told(self, *records: Record, **fields: Any) -> list[Effect]:
        """Orders with the whole log; `fields` stay until they are changed."""
        self.records += records
        self.fields |= fields
        self.serial += 1
        return self.hear(rank_orders(self.serial, self.records, **self.fields))

    def tick(self, after_ns: int = 0) -> list[Effect]:
        self.now_ns += after_ns
        return self(ev.Tick())

    def begun(self) -> Rack:
        self.told(self.genesis)
        return self

    # -------------------------------------------------------------- what threads usually do

    def captured(self, seq: int = 1, base: int = 0, fragment: int = 0) -> Offer:
        """An own offer, encoded, and announced by the coordinator."""
        self(ev.Captured(fragment, seq, base, 8 * seq, 10, 2))
        made = offer(self.me.rack, seq, base=base, fragment=fragment)
        self(ev.Encoded(fragment, seq, made.checksum(0)))
        return made

    def fetched(self, *offers: Offer) -> list[Effect]:
        effects: list[Effect] = []
        for each in offers:
            effects += self(ev.Fetched(each.member, each.fragment, each.seq))
        return effects

    def proposal(self, version: int, *offers: Offer, attempt: int = 1) -> list[Effect]:
        fragment = offers[0].fragment
        return self.told(proposals=(MergeProposal(fragment, version, attempt, offers),))

    def ready(self, *offers: Offer) -> list[Effect]:
        """These are here, and named for version 1."""
        self.told(offers=offers)
        self.fetched(*offers)
        return self.proposal(1, *offers)

    def merged(self, version: int, result: int | None = None, attempt: int = 1) -> list[Effect]:
        found = digest(1000 * version if result is None else result)
        return self(ev.Merged(0, version, attempt, found))

    def version(self, version: int) -> list[Effect]:
        """A whole round of racks 0 and 1, up to the decision."""
        mine = self.captured(version, version - 1)
        theirs = offer(OTHER, version, base=version - 1)
        self.told(offers=(mine, theirs))
        self.fetched(theirs)
        self.proposal(version, mine, theirs)
        self.merged(version)
        return self.told(commit(version, [mine, theirs]), offers=(), proposals=())

    @property
    def report(self) -> RankReport:
        """What its leader would hear now."""
        (body,) = sent(self.tick(HEARTBEAT_NS))
        assert isinstance(body, RankReport)
        return body


@pytest.fixture
def rack() -> Rack:
    return Rack().begun()


def of(kind: type[E], effects: list[Effect]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


# -------------------------------------------------------------- the start


def test_a_rack_with_the_lowest_racks_weights_holds_version_0() -> None:
    rack = Rack()
    assert rack.report.versions == (-1,)
    effects = rack.told(rack.genesis)
    assert of(ev.PublishAnchor, effects) == [ev.PublishAnchor(0, 0, 0)]
    assert of(ev.RecordCommitted, effects) == [ev.RecordCommitted(rack.genesis)]
    assert of(ev.Copy, effects) == []
    assert rack.report.versions == (0,)


def test_a_rack_with_other_weights_copies_version_0() -> None:
    rack = Rack(rack=OTHER, own_digests=(digest(5),))
    (copy,) = of(ev.Copy, rack.told(rack.genesis))
    lanes = (seat(0).lanes[0], seat(2).lanes[0])
    assert copy == ev.Copy(0, 0, digest(0), lanes)
    assert rack.report.versions == (-1,)
    assert of(ev.Copy, rack.tick()) == [], "one at a time"
    assert of(ev.PublishAnchor, rack(ev.Copied(0, 0))) == [ev.PublishAnchor(0, 0, 0)]
    assert rack.report.versions == (0,)


def test_each_rank_copies_its_own_part_from_its_own_rail() -> None:
    rack = Rack(rack=OTHER, rank=1, ranks=2, own_digests=(digest(5),))
    (copy,) = of(ev.Copy, rack.told(rack.genesis))
    assert copy.digest == digest(1)
    assert copy.holders == (seat(0, 2).lanes[1], seat(2, 2).lanes[1])


def test_a_copy_that_fails_is_tried_again_each_time_twice_as_late() -> None:
    rack = Rack(rack=OTHER, own_digests=(digest(5),)).begun()
    wait_ns = RETRY_NS_MIN
    for _ in range(7):
        effects = rack(ev.Copied(0, 0, error="the donor's bits are not those of the log"))
        assert notes(effects, "copy-failed")[0]["version"] == 0
        assert of(ev.PublishAnchor, effects) == of(ev.Copy, effects) == []
        assert of(ev.Copy, rack.tick(wait_ns - 1)) == []
        due_ns = rack.machine.deadline_ns()
        assert due_ns <= rack.now_ns + 1
        assert len(of(ev.Copy, rack.tick(1))) == 1
        wait_ns = min(2 * wait_ns, RETRY_NS_MAX)
    rack(ev.Copied(0, 0))
    assert rack.report.versions == (0,)


def test_a_rack_without_a_seat_waits_for_nothing_that_it_could_not_do() -> None:
    """Else a retry that is due would be due for ever."""
    rack = Rack(rack=OTHER, own_digests=(digest(5),)).begun()
    rack(ev.Copied(0, 0, error="the donor is gone"))
    rack.told(roster(1, [0, 2]))
    rack.tick(RETRY_NS_MAX)
    due_ns = rack.machine.deadline_ns()
    assert due_ns > rack.now_ns


# -------------------------------------------------------------- orders that come again


def test_stale_orders_are_not_read(rack: Rack) -> None:
    theirs = offer(OTHER)
    old = rank_orders(rack.serial, rack.records, offers=(offer(OTHER, 9),), settled=(-1,))
    rack.told(offers=(theirs,), settled=(0,))
    for serial in (rack.serial, rack.serial - 1, 0):
        effects = rack.hear(rank_orders(serial, old.records, offers=old.offers, settled=(-1,)))
        assert of(ev.Fetch, effects) == of(ev.RecordCommitted, effects) == []
    assert rack.machine.settled == (0,)


def test_a_decided_record_is_applied_once_however_often_it_comes(rack: Rack) -> None:
    effects = rack.version(1)
    assert len(of(ev.RecordCommitted, effects)) == 1
    assert of(ev.PublishAnchor, effects) == [ev.PublishAnchor(0, 1, 1)], "the tentative result"
    for _ in range(3):
        effects = rack.told()  # the whole log again, under a new serial
        assert of(ev.RecordCommitted, effects) == of(ev.PublishAnchor, effects) == []
    overlap = rank_orders(rack.serial + 1, rack.records[1:], prev=1)
    assert of(ev.RecordCommitted, rack.hear(overlap)) == []
    assert rack.report.decided == 2
    assert rack.report.versions == (1,)


def test_rank_ignores_which_rack_decides(rack: Rack) -> None:
    rack.version(1)
    before = rack.report
    effects = rack.told(Ballot(ballot_of(2, OTHER)))
    assert [type(effect) for effect in effects if not isinstance(effect, ev.Send)] == [
        ev.RecordCommitted
    ]
    after = rack.report
    assert (after.versions, after.parts) == (before.versions, before.parts)
    assert after.decided == before.decided + 1


def test_records_behind_a_gap_wait_for_what_is_missing(rack: Rack) -> None:
    second = commit(2, [offer(0, 2), offer(1, 2)])
    assert of(ev.RecordCommitted, rack.hear(rank_orders(50, [second], prev=2))) == []
    assert rack.report.decided == 1


def test_only_its_own_leader_in_this_life_is_obeyed() -> None:
    rack = Rack(ranks=2, rank=1)
    for peer, life in ((Peer(MINE, 1), 0), (Peer(OTHER, 0), 0), (Peer(MINE, 0), 1)):
        effects = rack.hear(rank_orders(5, [rack.genesis]), peer=peer, life=life)
        assert of(ev.RecordCommitted, effects) == []
    effects = rack.hear(rank_orders(6, [genesis(fragments=2)]))
    assert of(ev.RecordCommitted, effects) == [], "another plan"
    assert len(of(ev.RecordCommitted, rack.hear(rank_orders(7, [rack.genesis])))) == 1


def test_an_index_from_the_network_never_reaches_a_list(rack: Rack) -> None:
    assert of(ev.Fetch, rack.told(offers=(offer(OTHER, fragment=77),))) == []
    rack.fields.clear()
    assert of(ev.DropOffer, rack.told(discarded=((77, 1),))) == []


# -------------------------------------------------------------- pulling


def test_offers_of_others_are_pulled_from_their_owner_first(rack: Rack) -> None:
    theirs = offer(THIRD)
    (fetch,) = of(ev.Fetch, rack.told(offers=(theirs,)))
    assert fetch == ev.Fetch(theirs, (seat(THIRD).lanes[0], seat(OTHER).lanes[0]))
    assert rack.report.got == ()
    rack.fetched(theirs)
    assert rack.report.got == (offer_id(theirs),)


def test_report_of_held_offers_waits_for_more_in_a_job_of_many_racks() -> None:
    rack = Rack(racks=20).begun()
    first, second = offer(OTHER), offer(THIRD)
    rack.told(offers=(first, second))
    rack.tick(HEARTBEAT_NS)
    assert sent(rack.fetched(first)) == []
    assert rack.machine.deadline_ns() == rack.now_ns + batch_ns(20)
    rack.now_ns += batch_ns(20) - 1
    assert sent(rack.fetched(second)) == []
    (told,) = sent(rack.tick(1))
    assert told.got == (offer_id(first), offer_id(second))


def test_own_offers_are_not_pulled(rack: Rack) -> None:
    mine = rack.captured()
    assert of(ev.Fetch, rack.told(offers=(mine,))) == []
    assert rack.report.got == (offer_id(mine),)


def test_a_pull_that_fails_is_tried_again(rack: Rack) -> None:
    theirs = offer(OTHER)
    rack.told(offers=(theirs,))
    effects = rack(ev.Fetched(theirs.member, 0, 1, error="TransferStalled: no byte"))
    ((note),) = notes(effects, "fetch-failed")
    assert (note["rack"], note["seq"], note["error"]) == (OTHER, 1, "TransferStalled: no byte")
    assert of(ev.Fetch, rack.tick(RETRY_NS_MIN - 1)) == []
    assert len(of(ev.Fetch, rack.tick(1))) == 1


def test_offers_that_have_ended_are_not_pulled(rack: Rack) -> None:
    rack.version(1)
    stale = (offer(OTHER, 1), offer(OTHER, 3, life=1), offer(THIRD, 1))
    fetches = of(ev.Fetch, rack.told(roster(1, [0, 1]), offers=stale))
    assert fetches == []


# -------------------------------------------------------------- merging


def test_a_merge_starts_when_all_payloads_are_here(rack: Rack) -> None:
    a, b = offer(OTHER, tokens=10, steps=1), offer(THIRD, tokens=20, steps=1)
    rack.told(offers=(a, b))
    assert of(ev.Merge, rack.proposal(1, a, b)) == []
    assert of(ev.Merge, rack.fetched(b)) == []
    (merge,) = of(ev.Merge, rack.fetched(a))
    assert merge.members == ((a.member, 1), (b.member, 1)), "as named, not as arrived"
    assert merge.weights == pytest.approx((1 / 3, 2 / 3))
    assert merge.stretch == 1, "as many steps"
    assert (merge.fragment, merge.version, merge.attempt, merge.verify) == (0, 1, 1, False)
    assert of(ev.Merge, rack.told()) == [], "one at a time"
    assert rack.report.held == ()
    rack.merged(1)
    assert rack.report.held == (Held(0, 1, 1, (digest(1000),)),)
    assert of(ev.Merge, rack.told()) == []


def test_weights_may_be_equal_by_configuration() -> None:
    rack = Rack(token_weighted=False).begun()
    a, b = offer(OTHER, tokens=10), offer(THIRD, tokens=20)
    (merge,) = of(ev.Merge, rack.ready(a, b))
    assert merge.weights == (0.5, 0.5)


def test_offers_of_unequal_steps_stretch_the_step(rack: Rack) -> None:
    a = offer(OTHER, tokens=8, steps=8)
    b = offer(THIRD, tokens=4, steps=4)
    (merge,) = of(ev.Merge, rack.ready(a, b))
    assert merge.weights == (0.5, 0.5), "each step alike"
    assert merge.stretch == pytest.approx(2 * (64 + 16) / 12**2)


def test_momentum_waits_where_the_offers_of_a_merge_point_against_it() -> None:
    for balances, waits in ((((40, 60), (40, 60)), True), (((40, 60), (60, 40)), False)):
        rack = Rack().begun()
        a, b = (
            replace(offer(each), along=along, against=against)
            for each, (along, against) in zip((OTHER, THIRD), balances, strict=True)
        )
        (merge,) = of(ev.Merge, rack.ready(a, b))
        assert merge.waits is waits


def test_racks_that_train_and_are_not_in_a_merge_make_it_a_part_of_a_round(rack: Rack) -> None:
    a = offer(OTHER, tokens=10, steps=8)
    absent = (Absent(THIRD, 10, 8),)
    rack.told(offers=(a,), proposals=(MergeProposal(0, 1, 1, (a,), absent),))
    (merge,) = of(ev.Merge, rack.fetched(a))
    assert merge.part == WHOLE // 2
    assert merge.weights == (1.0,)
    rack.merged(1)
    effects = rack.told(replace(commit(1, [a]), absent=absent))
    (told,) = of(ev.RecordCommitted, effects)
    assert (told.rounds, told.part) == (0, WHOLE // 2)
    b = offer(OTHER, 2, base=1, tokens=10, steps=8)
    rack.told(offers=(b,), proposals=(MergeProposal(0, 2, 1, (b,)),))
    (merge,) = of(ev.Merge, rack.fetched(b))
    assert merge.part == WHOLE
    (told,) = of(ev.RecordCommitted, rack.told(commit(2, [b])))
    assert (told.rounds, told.part) == (WHOLE // 2, WHOLE)


def test_another_list_of_absent_racks_is_other_bits_on_purpose(rack: Rack) -> None:
    """What another attempt was decided with is not told as a difference."""
    a = offer(OTHER, tokens=10, steps=8)
    rack.told(offers=(a,), proposals=(MergeProposal(0, 1, 1, (a,), (Absent(THIRD, 10, 8),)),))
    rack.fetched(a)
    rack.merged(1, result=7)
    effects = rack.told(commit(1, [a]))
    assert not [note for note in of(ev.Note, effects) if note.kind == "differs"]
    (copy,) = of(ev.Copy, effects)
    assert (copy.version, copy.rounds) == (1, WHOLE), "as the log says"


def test_a_copied_state_comes_with_the_rounds_behind_it(rack: Rack) -> None:
    a = offer(OTHER, tokens=10, steps=8)
    effects = rack.told(replace(commit(1, [a]), absent=(Absent(THIRD, 20, 8),)))
    (copy,) = of(ev.Copy, effects)
    assert (copy.version, copy.rounds) == (1, round(WHOLE / 3))


def test_a_gather_brings_offers_that_were_not_announced(rack: Rack) -> None:
    (fetch,) = of(ev.Fetch, rack.proposal(1, offer(OTHER)))
    assert fetch.offer == offer(OTHER)


def test_another_attempt_begins_anew_and_looks_at_its_inputs(rack: Rack) -> None:
    a, b = offer(OTHER), offer(THIRD)
    rack.ready(a, b)
    rack.merged(1)
    effects = rack.proposal(1, a, attempt=2)
    assert of(ev.DropAnchor, effects) == [ev.DropAnchor(0, 1, 1)]
    (merge,) = of(ev.Merge, effects)
    assert merge.members == ((a.member, 1),)
    assert merge.weights == (1.0,)
    assert merge.verify
    assert rack.report.held == ()
    assert of(ev.Merge, rack.proposal(1, a, b, attempt=1)) == [], "the first attempt is over"
    rack.merged(1, 7, attempt=2)
    assert rack.report.held == (Held(0, 1, 2, (digest(7),)),)


def test_a_result_nobody_asks_for_any_more_is_forgotten(rack: Rack) -> None:
    a, b = offer(OTHER), offer(THIRD)
    rack.ready(a, b)
    rack.proposal(1, a, attempt=2)
    effects = rack.merged(1, attempt=1)
    assert of(ev.DropAnchor, effects) == [ev.DropAnchor(0, 1, 1)]
    assert [merge.attempt for merge in of(ev.Merge, effects)] == [2]


def test_a_spoiled_input_is_fetched_again_and_merged_again(rack: Rack) -> None:
    theirs = offer(OTHER)
    rack.ready(theirs)
    rack(ev.Fetched(theirs.member, 0, 1, error="its bytes changed in memory"))
    effects = rack(ev.Merged(0, 1, 1, "", error="an input failed its checksum"))
    assert notes(effects, "merge-failed")[0]["error"] == "an input failed its checksum"
    assert len(of(ev.Fetch, rack.tick(RETRY_NS_MIN))) == 1
    assert rack.report.got == ()
    assert len(of(ev.Merge, rack.fetched(theirs))) == 1


def test_a_spoiled_anchor_is_copied_again_before_anything_is_merged_onto_it(rack: Rack) -> None:
    theirs = offer(OTHER)
    rack.ready(theirs)
    effects = rack(ev.Spoiled(0, 0))
    assert of(ev.DropAnchor, effects) == [ev.DropAnchor(0, 0)]
    effects = rack(ev.Merged(0, 1, 1, "", error="an input failed its checksum"))
    effects += rack.tick(RETRY_NS_MAX)
    assert of(ev.Merge, effects) == []
    assert [copy.version for copy in of(ev.Copy, effects)] == [0]
    assert len(of(ev.Merge, rack(ev.Copied(0, 0)))) == 1


# -------------------------------------------------------------- what is decided


def test_another_result_than_the_logs_is_never_published(rack: Rack) -> None:
    theirs = offer(OTHER)
    rack.ready(theirs)
    rack.merged(1, 666)
    effects = rack.told(commit(1, [theirs]))
    assert of(ev.PublishAnchor, effects) == []
    assert of(ev.DropAnchor, effects) == [ev.DropAnchor(0, 1, 1)]
    (note,) = notes(effects, "differs")
    assert (note["mine"], note["log"]) == (digest(666), digest(1000))
    (copy,) = of(ev.Copy, effects)
    assert (copy.version, copy.digest) == (1, digest(1000))
    assert rack.report.versions == (0,)


def test_another_attempt_than_the_decided_one_is_no_fault(rack: Rack) -> None:
    """Its members were others, so that its bits must be."""
    theirs, third = offer(OTHER), offer(THIRD)
    rack.ready(theirs, third)
    rack.merged(1, 666)
    effects = rack.told(commit(1, [theirs]))
    assert of(ev.PublishAnchor, effects) == []
    assert notes(effects, "differs") == []


def test_proposal_is_not_guessed_after_the_next_round_gathers(rack: Rack) -> None:
    theirs, later = offer(OTHER), offer(OTHER, 2, base=1)
    rack.ready(theirs)
    rack.merged(1, 666)
    effects = rack.told(commit(1, [theirs]), proposals=(MergeProposal(0, 2, 1, (later,)),))
    assert of(ev.PublishAnchor, effects) == []
    assert of(ev.DropAnchor, effects) == [ev.DropAnchor(0, 1, 1)]
    assert notes(effects, "differs") == []


def test_decided_before_it_was_merged_here_it_is_merged_still(rack: Rack) -> None:
    theirs = offer(OTHER)
    rack.told(offers=(theirs,))
    rack.proposal(1, theirs)
    effects = rack.told(commit(1, [theirs]), proposals=(), offers=())
    assert of(ev.Copy, effects) == [], "its bytes are under way"
    (merge,) = of(ev.Merge, rack.fetched(theirs))
    assert (merge.version, merge.members) == (1, ((theirs.member, 1),))
    assert of(ev.PublishAnchor, rack.merged(1)) == [ev.PublishAnchor(0, 1, 1)]


def test_a_merge_under_way_is_waited_for(rack: Rack) -> None:
    theirs = offer(OTHER)
    rack.ready(theirs)
    assert of(ev.Copy, rack.told(commit(1, [theirs]))) == []
    assert of(ev.PublishAnchor, rack.merged(1)) == [ev.PublishAnchor(0, 1, 1)]


def test_rank_that_was_absent_copies_only_the_newest_version(rack: Rack) -> None:
    """Versions between are never needed: the newest holds them."""
    effects = rack.told(commit(1, [offer(1)]), commit(2, [offer(1, 2)]), commit(3, [offer(1, 3)]))
    assert [copy.version for copy in of(ev.Copy, effects)] == [3]
    assert [told.record for told in of(ev.RecordCommitted, effects)] == rack.records[1:]
    effects = rack.told(commit(4, [offer(1, 4)]))
    assert of(ev.Copy, effects) == [], "one at a time"
    effects = rack(ev.Copied(0, 3))
    assert of(ev.PublishAnchor, effects) == [ev.PublishAnchor(0, 3, 0)]
    assert [copy.version for copy in of(ev.Copy, effects)] == [4]


# -------------------------------------------------------------- what is freed


def test_a_named_payload_is_kept_until_every_live_rack_has_the_result(rack: Rack) -> None:
    """A rack that lacks it may still ask for it."""
    effects = rack.version(1)
    effects += rack.told(settled=(0,))
    effects += rack.tick(LINGER_NS)
    assert of(ev.Free, effects) == []
    freed = of(ev.Free, rack.told(settled=(1,)))
    assert set(freed) == {ev.Free(member(MINE), 0, 1), ev.Free(member(OTHER), 0, 1)}
    assert of(ev.Free, rack.told()) == []


def test_payload_that_was_named_is_kept_until_all_have_it_or_for_a_while() -> None:
    """Also of a rack that was removed; a rack that never gets it does not hold it for ever."""
    for settle in (False, True):
        rack = Rack().begun()
        rack.version(1)
        rack.told(settled=(0,))
        kept = rack.told(roster(1, [MINE, THIRD])) if settle else rack.tick(LINGER_NS)
        assert of(ev.Free, kept) == []
        assert len(of(ev.Free, rack.told(settled=(1,)) if settle else rack.tick(1))) == 2


def test_a_payload_is_kept_while_its_result_is_not_here(rack: Rack) -> None:
    mine, theirs = rack.captured(), offer(OTHER)
    rack.told(offers=(mine, theirs))
    rack.proposal(1, mine, theirs)
    effects = rack.told(commit(1, [mine, theirs]), settled=(1,))
    assert of(ev.Free, effects) == [], "rack 0 itself has not merged it"


def test_dropped_offers_of_others_are_freed_at_once(rack: Rack) -> None:
    theirs, third = offer(OTHER), offer(THIRD)
    rack.told(offers=(theirs, third))
    rack.fetched(theirs, third)
    effects = rack.told(commit(1, [theirs], dropped=[third]))
    assert of(ev.Free, effects) == [ev.Free(third.member, 0, 1)]
    effects = rack.told(Drop(0, (Ended(theirs.member, 2),), "older than staleness_max_rounds"))
    assert of(ev.Free, effects) == [], "it was never here"


def test_a_payload_of_a_removed_rack_is_freed_and_one_that_lands_later_too(rack: Rack) -> None:
    here, flying = offer(THIRD), offer(OTHER)
    rack.told(offers=(here, flying))
    rack.fetched(here)
    effects = rack.told(roster(1, [MINE]), offers=())
    assert of(ev.Free, effects) == [ev.Free(here.member, 0, 1)]
    assert of(ev.Free, rack.fetched(flying)) == [ev.Free(flying.member, 0, 1)]
    assert rack.report.got == ()


def test_versions_are_forgotten_but_for_the_newest_two_and_the_one_trained_on(rack: Rack) -> None:
    effects = [e for version in (1, 2, 3, 4) for e in rack.version(version)]
    assert of(ev.DropAnchor, effects) == [ev.DropAnchor(0, 1), ev.DropAnchor(0, 2)], (
        "0 is trained on"
    )
    effects = rack(ev.Applied(0, 4, 0))
    assert of(ev.DropAnchor, effects) == [ev.DropAnchor(0, 0)]
    assert rack.machine.replicas[0].held == {3, 4}


def at_a_checkpoint() -> Rack:
    """It lies behind version 1, and this rank has not come to it yet; others train on."""
    rack = Rack().begun()
    rack(ev.BarrierChanged("one"))
    rack.version(1)
    rack.told(CheckpointRecord(1, "one", "ab" * 32, (MINE, OTHER, THIRD)))
    effects = [e for version in (2, 3, 4) for e in rack.version(version)]
    assert of(ev.DropAnchor, effects) == [ev.DropAnchor(0, 2)]
    return rack


def test_the_version_of_a_checkpoint_is_kept_until_this_rank_has_come_to_it() -> None:
    rack = at_a_checkpoint()
    assert of(ev.DropAnchor, rack(ev.Applied(0, 1, 0))) == [ev.DropAnchor(0, 0)]
    assert of(ev.DropAnchor, rack(ev.Applied(0, 4, 0))) == [ev.DropAnchor(0, 1)]


def test_the_version_of_a_checkpoint_that_is_given_up_is_forgotten() -> None:
    assert of(ev.DropAnchor, at_a_checkpoint()(ev.BarrierChanged(""))) == [ev.DropAnchor(0, 1)]


def test_a_rank_that_is_always_behind_keeps_no_more_than_others(rack: Rack) -> None:
    """Each copy is there only when the next version is decided; the newest one it has is kept."""
    for version in range(1, 10):
        rack.told(commit(version, [offer(OTHER, version, base=version - 1)]))
        if version > 1:
            rack(ev.Copied(0, version - 1))
    assert rack.machine.replicas[0].held == {0, 8}, "0 is trained on"


# -------------------------------------------------------------- own offers


def test_a_capture_is_encoded_and_reported(rack: Rack) -> None:
    effects = rack(ev.Captured(0, 1, 0, 8, 10, 2))
    assert of(ev.Encode, effects) == [ev.Encode(0, 1)]
    (part,) = rack.report.parts
    assert (part.seq, part.tokens, part.steps, part.checksum) == (1, 10, 2, "")
    rack(ev.Encoded(0, 2, "ff"))
    assert rack.report.parts[0].checksum == "", "of another capture"
    rack(ev.Encoded(0, 1, "ab"))
    rack(ev.StillOpen(0, 3))
    (part,) = rack.report.parts
    assert (part.checksum, part.applied, part.base) == ("ab", 3, 0)


def test_an_offer_ends_with_the_apply_that_resolves_it(rack: Rack) -> None:
    rack.captured()
    rack(ev.Applied(0, 1, 0))
    assert len(rack.report.parts) == 1, "it was not named yet"
    rack(ev.Applied(0, 2, 1))
    assert rack.report.parts == ()


def test_an_old_end_does_not_end_a_newer_offer(rack: Rack) -> None:
    rack.captured(2)
    rack(ev.Applied(0, 1, 1))
    assert [part.seq for part in rack.report.parts] == [2]


def test_a_refused_capture_is_forgotten_by_the_training_thread_first(rack: Rack) -> None:
    rack(ev.Captured(0, 1, 0, 8, 10, 2))
    rack(ev.Encoded(0, 1, "", declined="its delta is not finite"))
    assert rack.report.parts[0].declined == "its delta is not finite"
    assert of(ev.DropOffer, rack.told(discarded=((0, 2),))) == []
    assert of(ev.DropOffer, rack.told(discarded=((0, 1),))) == [ev.DropOffer(0, 1)]
    assert len(rack.report.parts) == 1
    assert of(ev.Free, rack(ev.Discarded(0, 1))) == [ev.Free(member(MINE), 0, 1)]
    assert rack.report.parts == ()


def test_a_dropped_own_offer_is_forgotten_by_the_training_thread_first(rack: Rack) -> None:
    mine = rack.captured()
    effects = rack.told(Drop(0, (Ended(mine.member, mine.seq),), "older than staleness_max_rounds"))
    assert of(ev.DropOffer, effects) == [ev.DropOffer(0, 1)]
    assert of(ev.Free, effects) == []


# -------------------------------------------------------------- telling, and the end


def test_a_report_is_sent_at_once_when_it_changes_else_each_heartbeat(rack: Rack) -> None:
    first = rack.report
    assert sent(rack.tick(HEARTBEAT_NS - 1)) == []
    assert rack.machine.deadline_ns() == rack.now_ns + 1
    (again,) = sent(rack.tick(1))
    assert again == replace(first, serial=first.serial + 1)
    (changed,) = sent(rack(ev.StepReached(7, 50)))
    assert (changed.step, changed.step_ns, changed.serial) == (7, 50, first.serial + 2)


def test_idle_is_said_only_for_the_newest_versions_and_with_nothing_open(rack: Rack) -> None:
    rack(ev.Leaving())
    assert rack.report.leaving
    assert not rack.report.hurry
    rack(ev.Idle((0,)))
    assert rack.report.idle
    rack.told(commit(1, [offer(OTHER)]))
    assert not rack.report.idle, "version 1 is not here"
    rack(ev.Copied(0, 1))
    assert not rack.report.idle, "and not trained on"
    rack(ev.Applied(0, 1, 0))
    rack(ev.Idle((1,)))
    assert rack.report.idle
    rack.captured()
    assert not rack.report.idle
    rack(ev.Leaving(now=True))
    assert rack.report.hurry
    rack(ev.Leaving())
    assert rack.report.hurry, "a hurry is not taken back"


def test_the_end_is_said_once_and_to_who_did_not_expect_it_with_a_reason(rack: Rack) -> None:
    rack(ev.Leaving())
    assert of(ev.Finished, rack.told(finish=True)) == [], "it has not read the end yet"
    effects = rack.told(roster(2, ()))
    assert of(ev.Finished, effects) == [ev.Finished()]
    assert notes(effects, "expelled") == []
    assert of(ev.Finished, rack.told()) == []
    slept = Rack().begun()
    assert len(notes(slept.told(roster(2, ()), finish=True), "expelled")) == 1
    lost = Rack().begun()
    effects = lost.told(roster(2, [OTHER]), finish=True)
    assert of(ev.Finished, effects) == [ev.Finished()]
    assert notes(effects, "expelled") == [], "the job is not over"


def test_version_decided_before_the_end_is_copied_from_the_last_racks(rack: Rack) -> None:
    """The roster of the end has no racks, and so no addresses."""
    rack(ev.Leaving())
    effects = rack.told(commit(1, [offer(OTHER)]), roster(2, ()), finish=True)
    (copy,) = of(ev.Copy, effects)
    assert (copy.version, copy.holders) == (1, Rack().begun().machine.folded.rail(rack.me))
    assert copy.holders
    assert of(ev.Copy, rack(ev.Copied(0, 1, error="gone"))) == []
    assert len(of(ev.Copy, rack.tick(RETRY_NS_MIN))) == 1
    rack.tick(ENDED_NS)
    rack(ev.Copied(0, 1, error="gone"))
    assert of(ev.Copy, rack.tick(RETRY_NS_MAX)) == [], "nobody is left to serve it"


def test_reason_to_stop_reaches_every_rank_except_its_leader() -> None:
    reason = ("PlanMismatch", "steps is 9 there and 8 here")
    assert of(ev.Fail, Rack(rank=1, ranks=2).told(failure=reason)) == [ev.Fail(*reason)]
    assert of(ev.Fail, Rack(rank=0, ranks=2).told(failure=reason)) == []


# -------------------------------------------------------------- merges that need sums over the rack


def asked(rack: Rack, *offers: Offer) -> None:
    """These are here and named, and this rank has measured its part."""
    rack.ready(*offers)
    rack(ev.Measured(0, 1, 1, b"mine"))


def test_a_rank_measures_first_reports_it_and_merges_with_the_total() -> None:
    rack = Rack(sums=True, ranks=2).begun()
    a, b = offer(OTHER, ranks=2), offer(THIRD, ranks=2)
    rack.told(offers=(a, b))
    rack.proposal(1, a, b)
    assert of(ev.Measure, rack.fetched(b)) == []
    effects = rack.fetched(a)
    (measure,) = of(ev.Measure, effects)
    assert measure.members == ((a.member, 1), (b.member, 1))
    assert measure.weights == (0.5, 0.5)
    assert of(ev.Merge, effects) == of(ev.Merge, rack.told()) == []
    assert rack.report.partials == ()
    assert of(ev.Merge, rack(ev.Measured(0, 1, 1, b"mine"))) == []
    assert rack.report.partials == (Partial(0, 1, 1, b"mine"),)
    (merge,) = of(ev.Merge, rack.told(totals=(Total(0, 1, 1, b"all"),)))
    assert (merge.members, merge.weights, merge.total) == (measure.members, (0.5, 0.5), b"all")
    assert rack.report.partials == ()
    assert of(ev.Merge, rack.told()) == [], "one at a time"
    rack.merged(1)
    assert rack.report.held == (Held(0, 1, 1, (digest(1000),)),)


def test_the_offer_of_one_rack_needs_no_sums() -> None:
    rack = Rack(sums=True, ranks=2).begun()
    alone = offer(OTHER, ranks=2)
    rack.told(offers=(alone,))
    rack.proposal(1, alone)
    effects = rack.fetched(alone)
    assert of(ev.Measure, effects) == []
    assert [merge.total for merge in of(ev.Merge, effects)] == [b""]


def test_another_attempt_is_measured_anew_and_looks_at_its_inputs() -> None:
    rack = Rack(sums=True, ranks=2).begun()
    a, b = offer(OTHER, ranks=2), offer(THIRD, ranks=2)
    asked(rack, a, b)
    (measure,) = of(ev.Measure, rack.proposal(1, a, b, attempt=2))
    assert (measure.attempt, measure.verify) == (2, True)
    assert of(ev.Merge, rack.told(totals=(Total(0, 1, 1, b"first"),))) == []
    effects = rack(ev.Measured(0, 1, 2, b"", error="an input failed its checksum"))
    assert notes(effects, "merge-failed")[0]["error"] == "an input failed its checksum"
    (again,) = of(ev.Measure, rack.tick(RETRY_NS_MIN))
    assert again == measure
    rack(ev.Measured(0, 1, 2, b"second"))
    (merge,) = of(ev.Merge, rack.told(totals=(Total(0, 1, 2, b"both"),)))
    assert (merge.attempt, merge.total, merge.verify) == (2, b"both", True)


def test_a_decided_version_is_waited_for_while_its_total_may_come() -> None:
    rack = Rack(sums=True, ranks=2).begun()
    a, b = offer(OTHER, ranks=2), offer(THIRD, ranks=2)
    asked(rack, a, b)
    effects = rack.told(commit(1, [a, b], ranks=2), proposals=(), offers=())
    assert of(ev.Copy, effects) == []
    assert rack.report.partials == (Partial(0, 1, 1, b"mine"),), "the others may need it"
    (merge,) = of(ev.Merge, rack.told(totals=(Total(0, 1, 1, b"all"),)))
    assert merge.version == 1
    assert of(ev.PublishAnchor, rack.merged(1)) == [ev.PublishAnchor(0, 1, 1)]


def test_a_decided_version_whose_total_never_comes_is_copied() -> None:
    """Its rack-mate has copied it, so the sums stay incomplete for ever."""
    rack = Rack(sums=True, ranks=2).begun()
    a, b = offer(OTHER, ranks=2), offer(THIRD, ranks=2)
    asked(rack, a, b)
    never = (Total(0, 1, 1, b""),)
    assert of(ev.Copy, rack.told(totals=never)) == [], "it is not decided"
    (copy,) = of(ev.Copy, rack.told(commit(1, [a, b], ranks=2), proposals=(), offers=()))
    assert (copy.version, copy.digest) == (1, digest(1000))
    rack(ev.Copied(0, 1))
    assert rack.report.versions == (1,)
    assert rack.report.partials == ()


def test_measurement_for_other_members_does_not_serve_a_commit() -> None:
    """The racks went on to an attempt that this rank has not heard of."""
    rack = Rack(sums=True, ranks=2).begun()
    a, b = offer(OTHER, ranks=2), offer(THIRD, ranks=2)
    asked(rack, a, b)
    effects = rack.told(commit(1, [b], ranks=2), proposals=(), offers=())
    assert [copy.version for copy in of(ev.Copy, effects)] == [1]
    assert of(ev.Merge, effects) == of(ev.Measure, effects) == []
    plain = Rack(ranks=2).begun()
    asked(plain, a, b)
    effects = plain.told(commit(1, [b], ranks=2), proposals=(), offers=())
    assert of(ev.Copy, effects) == [], "the mean needs none"


def test_totals_of_fragments_that_are_not_there_are_not_read() -> None:
    rack = Rack(sums=True).begun()
    theirs = offer(OTHER)
    assert of(ev.Fetch, rack.told(totals=(Total(77, 1, 1, b"all"),), offers=(theirs,))) == []


# -------------------------------------------------------------- those who are left begin anew


def anew(version: int, *racks: int) -> Record:
    return lineage(FIRST, racks, dead=[THIRD], versions=[version])


def test_lineage_forgets_undone_versions_and_drops_their_offers(rack: Rack) -> None:
    rack.version(1)
    mine, theirs = rack.captured(2, 1), offer(OTHER, 2, base=1)
    rack.told(commit(2, [mine, theirs]))
    effects = rack.told(anew(1, MINE, OTHER))
    assert of(ev.DropOffer, effects) == [ev.DropOffer(0, 2)]
    assert of(ev.RecordCommitted, effects)[-1].record == anew(1, MINE, OTHER)
    assert rack.report.versions == (1,)
    rack(ev.Copied(0, 2, error="nobody has it"))
    effects = rack.told(commit(2, [offer(OTHER, 3, base=1)]))
    assert [copy.version for copy in of(ev.Copy, effects)] == [2], "counted on from there"


def test_an_own_offer_that_an_undone_commit_dropped_stays_dropped(rack: Rack) -> None:
    """The log says that it has ended, so it can never be named."""
    rack.version(1)
    mine = rack.captured(2, 1)
    rack.told(commit(2, [offer(OTHER, 2, base=1)], dropped=[mine]))
    assert of(ev.DropOffer, rack.told(anew(1, MINE, OTHER))) == [ev.DropOffer(0, 2)]


@pytest.mark.parametrize("late", [False, True])
def test_rank_that_trains_on_an_undone_version_stops_and_holds_it_no_more(late: bool) -> None:
    """The version came between the promise of its leader and the lineage: its number is given to
    other bits, which this rank would take for its own. `late`: it is applied after the lineage."""
    rack = Rack().begun()
    rack.version(1)
    rack(ev.Applied(0, 1, 0))
    rack.version(2)
    effects = [] if late else rack(ev.Applied(0, 2, 0))
    assert of(ev.Finished, effects) == []
    effects = rack.told(anew(1, MINE, OTHER))
    assert ev.DropAnchor(0, 2) in effects
    assert rack.report.versions == (1,)
    if late:
        assert of(ev.Finished, effects) == []
        effects = rack(ev.Applied(0, 2, 0))
    (stop,) = of(ev.Finished, effects)
    assert stop.reason.startswith("it trained on version 2 of fragment 0, which the other racks un")


def test_undone_version_is_named_by_the_racks_of_the_lineage(rack: Rack) -> None:
    rack.version(1)
    rack.told(commit(2, [offer(OTHER, 2, base=1)]))
    notes = [note.event for note in of(ev.Note, rack.told(anew(1, MINE, OTHER)))]
    undone = VersionsUndone(("fragment 0 from version 2 to 1",), (THIRD,))
    assert [event for event in notes if isinstance(event, VersionsUndone)] == [undone]
    assert of(ev.Note, rack.told(anew(1, MINE, OTHER))) == [], "nothing is undone"


def test_a_copy_of_an_undone_version_that_lands_later_is_not_the_new_one_of_its_number() -> None:
    rack = Rack().begun()
    rack.version(1)
    (copy,) = of(ev.Copy, rack.told(commit(2, [offer(OTHER, 2, base=1)])))
    rack.told(anew(1, MINE, OTHER))
    other = replace(commit(2, [offer(OTHER, 3, base=1)]), digests=(digest(77),))
    rack.told(other)
    effects = rack(ev.Copied(0, copy.version))
    assert of(ev.PublishAnchor, effects) == []
    assert of(ev.DropAnchor, effects) == [ev.DropAnchor(0, 2)]
    assert [again.digest for again in of(ev.Copy, effects)] == [digest(77)], "now the right one"
    assert rack.report.versions == (1,)
    rack(ev.Copied(0, 2))
    assert rack.report.versions == (2,)


def test_a_new_lineage_leaves_alone_what_it_takes_over(rack: Rack) -> None:
    rack.version(1)
    open_ = rack.captured(2, 1)
    effects = rack.told(anew(1, MINE, OTHER))
    assert of(ev.DropAnchor, effects) == of(ev.DropOffer, effects) == []
    assert rack.report.versions == (1,)
    assert [part.seq for part in rack.report.parts if part.seq == open_.seq] == [2]


def test_payloads_of_the_dead_are_freed_with_them(rack: Rack) -> None:
    theirs = offer(THIRD)
    rack.told(offers=(theirs,))
    rack.fetched(theirs)
    effects = rack.told(anew(0, MINE, OTHER), offers=())
    assert of(ev.Free, effects) == [ev.Free(member(THIRD), 0, 1)]


# -------------------------------------------------------------- snapshots


def restored(rack: Rack, *records: Record, **fields: Any) -> list[Effect]:
    """Its leader has no records any more that it could use."""
    log = log_of(*records)
    log.decide(log.last)
    shown = log.snapshot()
    rack.serial += 1
    return rack.hear(
        replace(rank_orders(rack.serial, (), **fields), prev=shown.index, snapshot=shown)
    )


def test_a_rank_that_has_read_nothing_begins_with_a_snapshot() -> None:
    rack = Rack(own_digests=(digest(99),))
    effects = restored(rack, rack.genesis, *(commit(v, [offer(OTHER, v)]) for v in (1, 2)))
    assert [each.snapshot.index for each in of(ev.Restored, effects)] == [3]
    (copy,) = of(ev.Copy, effects)
    assert (copy.version, copy.digest) == (2, digest(2000))
    assert rack.report.decided == 3
    rack.records = [rack.genesis, *(commit(v, [offer(OTHER, v)]) for v in (1, 2))]
    assert of(ev.RecordCommitted, rack.told(commit(3, [offer(OTHER, 3)])))[0].record.version == 3


def test_its_own_version_0_is_held_as_after_genesis() -> None:
    rack = Rack()
    assert of(ev.PublishAnchor, restored(rack, rack.genesis)) == [ev.PublishAnchor(0, 0, 0)]


@pytest.mark.parametrize("fate", ["named", "dropped", "open"])
def test_snapshot_has_the_fate_of_the_ranks_own_offer(rack: Rack, fate: str) -> None:
    rack.captured(1)
    theirs = offer(OTHER)
    first = commit(1, [offer(MINE), theirs] if fate == "named" else [theirs])
    more = [Drop(0, (Ended(member(MINE), 1),), "too old")] if fate == "dropped" else []
    effects = restored(rack, rack.genesis, first, *more)
    assert of(ev.DropOffer, effects) == ([ev.DropOffer(0, 1)] if fate == "dropped" else [])
    assert [part.seq for part in rack.report.parts] == [1], "until the training thread has heard"


def test_payloads_that_were_named_meanwhile_are_freed_in_time(rack: Rack) -> None:
    theirs = offer(OTHER)
    rack.told(offers=(theirs,))
    rack.fetched(theirs)
    effects = restored(rack, rack.genesis, commit(1, [theirs]))
    assert of(ev.Free, effects) == [], "another rack may still need it"
    assert of(ev.Free, rack.tick(LINGER_NS + 1)) == [ev.Free(theirs.member, 0, 1)]


def test_versions_that_may_be_undone_are_not_held_any_more(rack: Rack) -> None:
    """A new lineage may be among the records that did not come, with numbers given anew."""
    rack.version(1)
    effects = restored(rack, rack.genesis, *(commit(v, [offer(OTHER, v)]) for v in (1, 2)))
    assert ev.DropAnchor(0, 1) in of(ev.DropAnchor, effects)
    assert rack.report.versions == (0,)


def test_an_older_snapshot_changes_nothing(rack: Rack) -> None:
    rack.version(1)
    assert of(ev.Restored, restored(rack, rack.genesis)) == []
