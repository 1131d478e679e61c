"""A voter's ears and mouth: whose orders it takes, whom it promises, what it tells who is over."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from mend.consensus.acceptor import Acceptor
from mend.consensus.ballots import NUMBER_MAX, ballot_of
from mend.consensus.records import AcceptorState, Ballot
from mend.coordination.acceptor_host import Follower, WitnessFollower
from mend.coordination.events import Connect, Effect, Heard, Tick
from mend.coordination.messages import Message, Orders, Prepare, Vote
from mend.types import SECOND, WITNESS, Member, Peer
from tests.unit.coordination.nouns import (
    DETECT_NS,
    FIRST,
    commit,
    digest,
    genesis,
    lineage,
    log_of,
    member,
    notes,
    offer,
    orders,
    rank_report,
    seat,
    sent,
)

ME = member(1)
FOUNDER, RIVAL = Peer(0, 0), Peer(2, 0)
BEGIN = genesis(racks=3)
LIFE = member(0).incarnation
LINEAGE = log_of(BEGIN).lineage


class Ears:
    """The follower of rack 1, which follows rack 0 from the start."""

    def __init__(self, *, begun: bool = True) -> None:
        self.follower = Follower(ME, Acceptor(), FOUNDER, DETECT_NS)
        self.now_ns = 100 * SECOND
        if begun:
            self.told(orders(1, [BEGIN]))

    def told(self, body: Orders, peer: Peer = FOUNDER, life: int = LIFE) -> list[Effect] | None:
        """The effects, or None for orders that are not the newest ones for me."""
        effects: list[Effect] = []
        if not self.follower.addressed(peer, body):
            return None
        new = self.follower.follow(peer, life, body, self.now_ns, effects)
        return effects if new or effects else None

    def asked(self, ballot: int, peer: Peer = RIVAL, **changes: Any) -> Vote | None:
        fields = {"serial": 7, "ballot": ballot, "lineage": LINEAGE, "after": 1, **changes}
        return self.follower.asked(peer, Prepare(**fields), self.now_ns)

    @property
    def acceptor_state(self) -> AcceptorState:
        return self.follower.acceptor.acceptor_state()


def more(serial: int, **changes: Any) -> Orders:
    return orders(serial, [BEGIN, commit(1, [offer(0)])], **changes)


@pytest.fixture
def ears() -> Ears:
    return Ears()


# -------------------------------------------------------------- whose orders are taken


@pytest.mark.parametrize(
    ("peer", "changes"),
    [
        (FOUNDER, {"to": member(1, life=1).incarnation}), (FOUNDER, {"lineage": digest(5)}),
        (FOUNDER, {"lineage": ""}), (FOUNDER, {"ballot": ballot_of(2, 2)}), (RIVAL, {}),
        (Peer(0, 1), {}),
    ],
    ids=["a former life", "another job", "a job not begun", "not its owner", "a rival", "a rank"],
)  # fmt: skip
def test_orders_are_for_me_of_this_job_and_of_the_owner_of_their_ballot(
    peer: Peer, changes: dict[str, Any]
) -> None:
    ears = Ears()
    assert ears.told(more(2, **changes), peer) is None
    assert ears.acceptor_state.last == 1
    assert ears.told(more(2)) == []
    assert ears.acceptor_state.last == 2


def test_a_newcomer_takes_the_log_of_whatever_job_it_asked_into() -> None:
    """What names a job is its first record, and that is not here yet."""
    ears = Ears(begun=False)
    assert ears.told(orders(1, [BEGIN])) == []
    assert ears.follower.acceptor.log.lineage == LINEAGE


def test_orders_are_taken_once_and_in_order(ears: Ears) -> None:
    assert ears.told(more(5)) == []
    assert ears.told(more(5)) is None
    third = orders(4, [BEGIN, commit(1, [offer(0)]), commit(2, [offer(0, 2)])])
    assert ears.told(third) is None
    assert ears.acceptor_state.last == 2


def test_an_old_frame_is_a_sign_of_life_though_nothing_new(ears: Ears) -> None:
    ears.now_ns += DETECT_NS
    assert ears.told(orders(1, [BEGIN])) is None
    ears.now_ns += DETECT_NS - 1
    ears.asked(ballot_of(2, 2))
    assert ears.acceptor_state.promised == FIRST


def test_each_ballot_counts_its_orders_from_one(ears: Ears) -> None:
    ears.told(more(500))
    ballot = ballot_of(2, 2)
    records = [BEGIN, commit(1, [offer(0)]), Ballot(ballot)]
    assert ears.told(orders(1, records, ballot=ballot), RIVAL, 77) == []
    assert (ears.acceptor_state.accepted, ears.acceptor_state.last) == (ballot, 3)
    assert ears.follower.coordinator == RIVAL


def test_before_the_first_record_a_coordinator_may_be_started_again() -> None:
    """Serials of its former life must not silence it; afterwards they count on."""
    ears = Ears(begun=False)
    ears.told(orders(500))
    assert ears.told(orders(1), life=LIFE + 1) == []
    assert ears.told(orders(1), life=LIFE + 1) is None
    assert ears.told(orders(2, [BEGIN]), life=LIFE + 1) == []
    assert ears.told(more(1), life=LIFE + 2) is None
    assert ears.acceptor_state.last == 1


def test_a_coordinator_whose_ballot_is_over_is_told_so(ears: Ears) -> None:
    ballot = ballot_of(2, 2)
    records = [BEGIN, Ballot(ballot)]
    ears.told(orders(9, records, ballot=ballot), RIVAL, 77)
    effects = ears.told(more(4))
    (vote,) = sent(effects, FOUNDER)
    assert vote.acceptor_state == ears.acceptor_state
    assert vote.acceptor_state.promised == ballot
    assert vote.serial >= 9, "newer than whatever it heard from here"
    assert ears.follower.coordinator == RIVAL, "and is not followed"
    assert ears.acceptor_state.last == 2


def test_a_coordinator_that_contradicts_a_decision_is_noted_and_not_believed(ears: Ears) -> None:
    ears.told(more(2))
    effects = ears.told(orders(3, [BEGIN, commit(1, [offer(2)])]))
    assert "contradicts what is decided, after record 0" in str(notes(effects, "fault"))
    assert ears.follower.acceptor.log.record(2) == commit(1, [offer(0)])


# -------------------------------------------------------------- promises


def test_voter_that_hears_its_coordinator_promises_nothing_to_others(ears: Ears) -> None:
    """A rack that was cut off must not depose the one that all others follow."""
    ears.now_ns += DETECT_NS - 1
    vote = ears.asked(ballot_of(2, 2))
    assert vote.acceptor_state.promised == FIRST, "an answer, and no promise"
    ears.now_ns += 1
    vote = ears.asked(ballot_of(2, 2))
    assert vote.acceptor_state.promised == ballot_of(2, 2)


def test_the_coordinator_itself_may_stand_again_at_once(ears: Ears) -> None:
    vote = ears.asked(ballot_of(2, 0), FOUNDER)
    assert vote.acceptor_state.promised == ballot_of(2, 0)


def test_acceptor_that_never_heard_orders_promises() -> None:
    ears = Ears(begun=False)
    ears.follower.acceptor.append(FIRST, 0, "", [BEGIN], 1, 1)
    ears.asked(ballot_of(2, 2))
    assert ears.acceptor_state.promised == ballot_of(2, 2)


def test_a_lower_candidate_is_shown_the_promise_that_bars_it(ears: Ears) -> None:
    ears.now_ns += DETECT_NS
    ears.asked(ballot_of(3, 2))
    vote = ears.asked(ballot_of(2, 0), FOUNDER)
    assert vote.acceptor_state.promised == ballot_of(3, 2)


def test_an_undecided_new_lineage_is_no_reason_not_to_answer_who_has_not_heard_of_it() -> None:
    """Else two of who is left, one with it and one without, could never again elect anybody."""
    ears = Ears()
    ballot = ballot_of(2, 2)
    anew = lineage(ballot, [1, 2], dead=[0])
    body = orders(1, [BEGIN, anew], ballot=ballot, lineage=LINEAGE, decided=1)
    assert ears.told(body, RIVAL, 77) == []
    assert ears.follower.acceptor.log.lineage != LINEAGE
    ears.now_ns += DETECT_NS
    vote = ears.asked(ballot_of(3, 2))
    assert vote.acceptor_state.promised == ballot_of(3, 2)
    assert vote.acceptor_state.records == (anew,)
    chain = log_of(BEGIN).chain(1)
    ears.follower.acceptor.append(ballot_of(3, 2), 1, chain, (anew,), 2, 2)
    assert ears.asked(ballot_of(4, 2)) is None, "what a zombie says once it is decided"


def test_the_answer_carries_the_question_and_what_the_candidate_does_not_know(ears: Ears) -> None:
    ears.told(more(2))
    vote = ears.asked(ballot_of(2, 2), serial=41, after=1)
    assert (vote.serial, vote.lineage) == (41, LINEAGE)
    assert (vote.acceptor_state.prev, vote.acceptor_state.records) == (1, (commit(1, [offer(0)]),))


@pytest.mark.parametrize(
    ("ballot", "changes"),
    [
        (ballot_of(2, 2), {"lineage": digest(5)}), (ballot_of(2, 2), {"lineage": ""}),
        (ballot_of(2, 2), {"peer": Peer(0, 0)}), (ballot_of(2, 2), {"peer": Peer(2, 1)}),
        (ballot_of(NUMBER_MAX, 2), {}), (ballot_of(0, 2), {}),
    ],
    ids=["another job", "no job", "not its owner", "a rank", "too great", "before the first"],
)  # fmt: skip
def test_candidates_of_another_job_or_talking_nonsense_get_no_answer(
    ballot: int, changes: dict[str, Any]
) -> None:
    """A ballot from nowhere, promised once, would bar every coordinator for ever."""
    ears = Ears()
    ears.now_ns += 10 * DETECT_NS
    assert ears.asked(ballot, **changes) is None
    assert ears.acceptor_state.promised == FIRST


# -------------------------------------------------------------- a beginning that was forgotten


ANEW = ballot_of(2, 0)
"""Of the founder's next life, which asks from an empty log."""


def forgetful() -> Ears:
    """It has accepted the first record, and its founder's next life asks it to begin anew."""
    ears = Ears(begun=False)
    ears.told(orders(1, [BEGIN], decided=0))
    asks = orders(1, [], ballot=ANEW, decided=0, lineage="")
    assert ears.told(asks, FOUNDER, member(0, life=1).incarnation) == []
    assert (ears.acceptor_state.last, ears.acceptor_state.promised) == (0, ANEW)
    return ears


def test_voter_without_the_first_record_promises_to_a_candidate_that_knows_it_decided() -> None:
    """A founder died right behind its first decision and was started again (seed 13): the one
    rack that knew of it and those that had forgotten it waited for each other for ever."""
    ears = forgetful()
    vote = ears.asked(ballot_of(3, 2))
    assert (
        vote.acceptor_state.promised,
        vote.acceptor_state.last,
        vote.acceptor_state.records,
    ) == (ballot_of(3, 2), 0, ())
    founder = orders(2, [], ballot=ballot_of(4, 0), decided=0, lineage="")
    assert ears.told(founder, FOUNDER, member(0, life=1).incarnation) is None
    assert ears.acceptor_state.promised == ballot_of(3, 2), "it has heard that the job lives"
    won = orders(1, [BEGIN, Ballot(ballot_of(3, 2))], ballot=ballot_of(3, 2), decided=1)
    assert ears.told(won, RIVAL, 77) == []
    assert ears.follower.acceptor.log.committed.begun
    assert ears.acceptor_state.accepted == ballot_of(3, 2)


def test_rack_without_a_seat_forgets_the_log_it_read_for_another_lineage() -> None:
    """Who begins anew needs the promise of every seat that a record gives, heard of or not."""
    ears = Ears(begun=False)
    others = replace(BEGIN, roster=(BEGIN.roster[0], BEGIN.roster[2]))
    assert ears.told(orders(1, [others])) == []
    ears.now_ns += DETECT_NS
    vote = ears.asked(ballot_of(3, 2), lineage=digest(5), after=4)
    assert (vote.acceptor_state.promised, vote.acceptor_state.last) == (ballot_of(3, 2), 0)


def test_nothing_is_promised_to_who_knows_of_no_decision() -> None:
    ears = forgetful()
    assert ears.asked(ballot_of(3, 2), lineage="", after=0) is None
    assert ears.acceptor_state.promised == ANEW


def test_a_promise_to_a_candidate_holds_where_one_to_a_founder_would_not() -> None:
    """Orders of a job that lives undo what was promised to a founder; but here a candidate of that
    very job counts on it, and the orders may be of the coordinator that it wants to follow."""
    ears = forgetful()
    ears.asked(ballot_of(3, 2))
    late = orders(9, [BEGIN, commit(1, [offer(0)])], ballot=FIRST, decided=2)
    assert ears.told(late) is not None, "an answer"
    assert ears.acceptor_state.promised == ballot_of(3, 2)
    assert ears.acceptor_state.last == 0


def test_a_vote_for_a_new_beginning_is_not_taken_back_by_late_words_of_the_dead() -> None:
    """Every rack has answered the founder in the life that the record names, so rack 2's former
    life is over; this voter's acceptance may be under way, and be the last that is needed."""
    ears = forgetful()
    anew = replace(BEGIN, roster=(*BEGIN.roster[:2], seat(2, life=1)))
    asks = orders(2, [anew], ballot=ANEW, decided=0, lineage="")
    assert ears.told(asks, FOUNDER, member(0, life=1).incarnation) == []
    assert ears.acceptor_state.accepted == ANEW
    dead = orders(9, [BEGIN], ballot=ballot_of(1, 2))
    assert ears.told(dead, RIVAL, member(2).incarnation) is None
    assert ears.asked(ballot_of(3, 2)) is None
    assert ears.follower.acceptor.log.record(1) == anew
    same = orders(9, [anew], ballot=ballot_of(3, 2), lineage="")
    assert ears.told(same, RIVAL, member(2, life=2).incarnation) == [], "a later life, that job"
    assert ears.follower.acceptor.log.committed.begun


# -------------------------------------------------------------- a voter that leads no rack


class Witness:
    def __init__(self) -> None:
        self.member = member(WITNESS)
        self.machine = WitnessFollower(
            Follower(self.member, Acceptor(), Peer(WITNESS, 0), DETECT_NS)
        )
        self.now_ns = 100 * SECOND

    def hear(self, peer: Peer, body: Message) -> list[Effect]:
        return self.machine.handle(Heard(peer, LIFE, body), self.now_ns)


def connected(effects: list[Effect]) -> list[int]:
    return [effect.peer.rack for effect in effects if isinstance(effect, Connect)]


def test_a_witness_answers_orders_with_its_ballot() -> None:
    witness = Witness()
    body = orders(3, [genesis(witness=True)], to=witness.member.incarnation)
    effects = witness.hear(FOUNDER, body)
    assert connected(effects) == [0, 1]
    (vote,) = sent(effects, FOUNDER)
    assert isinstance(vote, Vote)
    assert (vote.serial, vote.acceptor_state.last) == (3, 1)
    assert witness.hear(FOUNDER, body) == [], "once"
    stranger = orders(4, [genesis(witness=True)], to=Member(WITNESS, 1).incarnation)
    assert witness.hear(FOUNDER, stranger) == []


def test_a_witness_answers_candidates_and_nobody_else() -> None:
    witness = Witness()
    begin = genesis(witness=True)
    witness.hear(FOUNDER, orders(3, [begin], to=witness.member.incarnation))
    witness.now_ns += DETECT_NS
    question = Prepare(1, ballot_of(2, 1), log_of(begin).lineage, 1)
    (vote,) = sent(witness.hear(Peer(1, 0), question))
    assert isinstance(vote, Vote)
    assert vote.acceptor_state.promised == ballot_of(2, 1)
    assert witness.hear(Peer(2, 0), question) == []
    assert witness.hear(Peer(1, 0), rank_report(1)) == []
    assert witness.machine.handle(Tick(), witness.now_ns) == []
    assert witness.machine.deadline_ns() is None, "it waits for nothing"


# -------------------------------------------------------------- before it has a seat


def anew(*racks: int) -> list[Any]:
    """The log that goes on without what the first one decided behind its first record."""
    return [BEGIN, lineage(ballot_of(5, 2), racks, dead=[0])]


def of_the_new_lineage(serial: int, records: list[Any], **changes: Any) -> Orders:
    fields = {"ballot": ballot_of(5, 2), "lineage": log_of(*records).lineage, **changes}
    log = log_of(*records)
    prev = {"prev": len(records), "chain": log.chain(len(records)), "records": ()}
    return orders(serial, records, **prev, **fields)


def test_rack_without_a_seat_reads_the_log_of_a_new_lineage() -> None:
    """Rack 1 was started again, and read the log of a coordinator that then lost its quorum."""
    ears = Ears(begun=False)
    ears.follower.member = member(1, life=1)
    to = {"to": member(1, life=1).incarnation}
    ears.told(orders(1, [BEGIN, commit(1, [offer(0)])], decided=2, **to))
    assert ears.follower.acceptor.log.decided == 2
    assert ears.follower.homeless()
    assert ears.told(of_the_new_lineage(1, anew(2), **to), RIVAL, member(2).incarnation) == []
    assert ears.follower.acceptor.log.last == 0, "nobody counted what it had"
    assert ears.follower.acceptor.promised == ballot_of(5, 2)


def test_member_with_a_seat_refuses_a_new_lineage_without_it(ears: Ears) -> None:
    assert not ears.follower.homeless()
    assert ears.told(of_the_new_lineage(1, anew(2)), RIVAL, member(2).incarnation) is None
    assert ears.follower.acceptor.log.last == 1


def test_a_witness_that_was_started_again_answers_what_its_former_life_is_told() -> None:
    """It knows nobody's address. Who leads sends all there is to the silent witness, and learns
    by the answer that it lives again."""
    witness = Witness()
    log = log_of(genesis(witness=True))
    log.decide(1)
    snapshot = log.snapshot()
    other = member(WITNESS, life=1).incarnation
    body = orders(3, to=other, snapshot=snapshot)
    assert witness.hear(Peer(1, 0), body) == [], "not of the owner of this ballot"
    effects = witness.hear(FOUNDER, body)
    assert connected(effects) == [0, 1]
    (vote,) = sent(effects, FOUNDER)
    assert isinstance(vote, Vote)
    assert vote.acceptor_state.last == 0
    assert len(witness.hear(FOUNDER, body)) == 1, "the ways are known"
    witness.hear(FOUNDER, orders(4, [genesis(witness=True)], to=witness.member.incarnation))
    assert witness.hear(FOUNDER, body) == [], "it has a seat"


def test_a_rack_without_a_seat_answers_who_asks_for_another_job_unless_its_own_lives() -> None:
    """It has read the log of a job whose last racks died before they could decide its seat."""
    ears = Ears(begun=False)
    others = replace(BEGIN, roster=(BEGIN.roster[0],))
    assert ears.told(orders(1, [others])) == []
    question = orders(2, ballot=ballot_of(5, 0))
    assert ears.told(question) is None
    assert ears.acceptor_state.last == 1, "that job was heard just now"
    ears.now_ns += DETECT_NS
    assert ears.told(question) == []
    assert (ears.acceptor_state.last, ears.acceptor_state.promised) == (0, ballot_of(5, 0))
