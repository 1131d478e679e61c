"""The right to append: promises of every roster that may be in force, the log that was accepted
last, and only then accepts of this ballot."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from mend.consensus.acceptor import Acceptor
from mend.consensus.ballots import ballot_of
from mend.consensus.log import SENT_AT_ONCE, UNDECIDED_MAX
from mend.consensus.proposer import Proposer
from mend.consensus.records import DEAD_MAX, Ballot, Lineage, Record, Roster
from mend.types import WITNESS, Member
from tests.unit.coordination.nouns import (
    FIRST,
    acceptor_state,
    commit,
    digest,
    genesis,
    lineage,
    log_of,
    member,
    offer,
    roster,
    seat,
)

SECOND_, THIRD, FOURTH = ballot_of(2, 1), ballot_of(3, 2), ballot_of(4, 1)
BEGIN = genesis(racks=3)


def of_rack(rack: int, count: int, begin: Record = BEGIN) -> list[Record]:
    return [begin, *(commit(v, [offer(rack, v)]) for v in range(1, count + 1))]


class Cast:
    """Voters by member, some of whom can be reached by the candidate, `me`."""

    def __init__(self, *racks: int, me: int = 1) -> None:
        self.voters = {member(rack): Acceptor() for rack in racks}
        self.me = member(me)
        self.proposer = Proposer()

    def accepts(self, ballot: int, records: Sequence[Record], decided: int, *racks: int) -> None:
        """These racks accept this whole log in this ballot, however long it is."""
        source = log_of(*records)
        for rack in racks:
            acceptor = self.voters[member(rack)]
            for prev in range(0, max(1, source.last), SENT_AT_ONCE):
                sent = source.after(prev)
                acceptor.append(ballot, prev, source.chain(prev), sent, source.last, decided)

    def stand(self, ballot: int = FOURTH) -> Proposer:
        self.proposer.stand(ballot, self.voters[self.me].log)
        return self.proposer

    def promise(self, *racks: int) -> bool:
        """These racks (those of them that are asked) promise; whether the candidate leads then."""
        for rack in racks:
            if member(rack) in self.proposer.asked():
                acceptor = self.voters[member(rack)]
                acceptor.prepare(self.proposer.ballot)
                shown = acceptor.acceptor_state(self.proposer.log.decided)
                assert self.proposer.hear(member(rack), shown)
        return self.proposer.try_lead()

    def follow(self, *racks: int) -> list[Record]:
        """These racks accept all that was appended; what is newly decided by it."""
        log = self.proposer.log
        for rack in racks:
            acceptor = self.voters[member(rack)]
            acceptor.append(self.proposer.ballot, 0, "", log.after(0), log.last, log.decided)
            self.proposer.hear(member(rack), acceptor.acceptor_state())
        return self.proposer.decide()

    @property
    def begun(self) -> Lineage:
        """The lineage that the candidate begins with those who are left."""
        record = self.proposer.log.record(self.proposer.log.last)
        assert isinstance(record, Lineage)
        return record


def cast_of(*racks: int, me: int = 1, records: Sequence[Record] = (BEGIN,)) -> Cast:
    """All follow the first ballot and know that all of its log is decided."""
    cast = Cast(*racks, me=me)
    cast.accepts(FIRST, records, len(records), *racks)
    return cast


# -------------------------------------------------------------- whose promises suffice


@pytest.mark.parametrize(
    ("racks", "promised", "leads"),
    [
        ((0, 1), (1,), False), ((0, 1), (0,), True), ((0, 1, 2), (1,), False),
        ((0, 1, 2), (1, 2), True), ((0, 1, WITNESS), (1, WITNESS), True),
        ((0, 1, WITNESS), (WITNESS,), False), ((0, 1, 2, 3), (1, 3), False),
        ((0, 1, 2, 3), (0, 3), True),
    ],
)  # fmt: skip
def test_a_take_over_needs_a_quorum_of_promises(
    racks: tuple[int, ...], promised: tuple[int, ...], leads: bool
) -> None:
    inside = [rack for rack in racks if rack != WITNESS]
    cast = cast_of(*racks, records=[genesis(len(inside), witness=WITNESS in racks)])
    cast.stand()
    assert cast.promise(*promised) is leads
    assert cast.proposer.leading is leads
    assert cast.proposer.standing is not leads


def test_a_promise_to_another_ballot_is_none() -> None:
    cast = cast_of(0, 1, 2)
    proposer = cast.stand(THIRD)
    proposer.hear(member(0), cast.voters[member(0)].acceptor_state(1))
    proposer.hear(member(2), replace(cast.voters[member(2)].acceptor_state(1), promised=SECOND_))
    assert not cast.promise(1)
    assert cast.promise(0)


def test_votes_count_by_member_so_a_rack_that_was_started_again_has_none() -> None:
    """It has forgotten what it promised and accepted in its former life."""
    cast = cast_of(0, 1, 2)
    proposer = cast.stand()
    reborn = member(2, life=1)
    assert reborn not in proposer.asked()
    proposer.hear(reborn, replace(acceptor_state(), promised=FOURTH))
    assert not cast.promise(1)
    assert cast.promise(2)


def test_a_higher_promise_anywhere_ends_the_ballot() -> None:
    cast = cast_of(0, 1, 2)
    proposer = cast.stand(SECOND_)
    assert proposer.hear(member(0), acceptor_state(1, 1, SECOND_))
    assert not proposer.hear(member(0), acceptor_state(1, 1, THIRD))
    assert not proposer.hear(member(2), acceptor_state(1, 1, ballot_of(2, 2))), (
        "same number, higher rack"
    )
    proposer.step_down()
    assert (proposer.ballot, proposer.standing, proposer.leading) == (0, False, False)
    assert proposer.acceptor_states == {}


def test_candidate_that_steps_down_discards_the_log_of_its_candidacy() -> None:
    """A rack stood for a job that a witness then gave up; it kept that copy beside its new log."""
    cast = cast_of(0, 1, 2)
    proposer = cast.stand()
    assert proposer.log.committed.begun
    proposer.step_down()
    assert (proposer.log.last, proposer.log.decided) == (0, 0)


def test_ones_own_promise_is_given_last() -> None:
    """A candidate that nobody hears must not bar itself from the coordinator that others follow."""
    cast = cast_of(0, 1, 2)
    proposer = cast.stand()
    assert not proposer.would_win(cast.me)
    assert not cast.promise(2)
    assert proposer.would_win(cast.me)
    assert cast.promise(1)
    assert not proposer.would_win(cast.me), "it leads already"
    two = cast_of(0, 1, me=0, records=[genesis(2)])
    assert two.stand().would_win(member(0)), "half with the lowest is enough alone"


# -------------------------------------------------------------- what is taken over


def test_the_log_of_the_highest_ballot_is_adopted_before_a_longer_one() -> None:
    cast = cast_of(0, 1, 2)
    cast.accepts(FIRST, of_rack(0, 3), 1, 2)
    newest = [BEGIN, commit(1, [offer(1)]), Ballot(SECOND_)]
    cast.accepts(SECOND_, newest, 1, 1)
    proposer = cast.stand()
    assert cast.promise(1, 2)
    assert proposer.log.after(0) == (*newest, Ballot(FOURTH))


def test_candidates_own_tail_is_not_adopted_before_its_own_promise() -> None:
    """Its end may have been replaced in a ballot that it did not hear of."""
    cast = cast_of(0, 1, 2)
    cast.accepts(FIRST, of_rack(1, 4), 1, 1)
    newest = [BEGIN, Ballot(SECOND_), commit(1, [offer(0)])]
    cast.accepts(SECOND_, newest, 1, 0, 2)
    proposer = cast.stand()
    assert proposer.log.last == 5
    assert cast.promise(0, 2)
    assert proposer.log.after(0) == (*newest, Ballot(FOURTH))
    assert cast.voters[cast.me].log.after(0) == tuple(of_rack(1, 4)), "its vote is asked as others"


def test_record_that_no_promise_contains_is_not_carried_over_although_it_fits() -> None:
    cast = cast_of(0, 1, 2)
    cast.accepts(FIRST, of_rack(0, 3), 1, 1)
    cast.accepts(FIRST, of_rack(0, 1), 1, 0, 2)
    proposer = cast.stand()
    assert cast.promise(0, 2)
    assert proposer.log.after(0) == (*of_rack(0, 1), Ballot(FOURTH))


def test_record_outside_every_promise_is_lost() -> None:
    """A record that no quorum accepted may be lost, as nobody acted on it."""
    cast = cast_of(0, 1, 2)
    cast.accepts(FIRST, of_rack(0, 1), 1, 0)
    proposer = cast.stand()
    assert cast.promise(1, 2)
    assert proposer.log.after(0) == (BEGIN, Ballot(FOURTH))


def test_a_voter_without_a_promise_teaches_what_is_decided_too() -> None:
    """A decision is true for ever, in whatever ballot one hears of it."""
    cast = cast_of(0, 1, 2)
    cast.accepts(FIRST, of_rack(0, 3), 3, 2)
    proposer = cast.stand()
    proposer.hear(member(2), cast.voters[member(2)].acceptor_state(1))
    assert not proposer.try_lead()
    assert proposer.log.committed.versions == [2]


def test_another_history_teaches_nothing() -> None:
    cast = cast_of(0, 1, 2)
    cast.accepts(FIRST, of_rack(0, 2), 2, 2)
    proposer = cast.stand()
    shown = cast.voters[member(2)].acceptor_state(1)
    proposer.hear(member(2), replace(shown, chain="00", promised=FOURTH))
    assert not proposer.try_lead()
    assert proposer.log.decided == 1


def test_a_promise_that_does_not_show_all_of_its_log_does_not_count_yet() -> None:
    cast = cast_of(0, 1, 2)
    cast.accepts(FIRST, of_rack(0, 3), 1, 2)
    proposer = cast.stand()
    cast.promise(1)
    acceptor = cast.voters[member(2)]
    acceptor.prepare(FOURTH)
    shown = acceptor.acceptor_state(1)
    for part in (
        replace(shown, records=shown.records[:1]),
        acceptor.acceptor_state(2),
        acceptor.acceptor_state(),
    ):
        proposer.hear(member(2), part)
        assert not proposer.try_lead()
    proposer.hear(member(2), shown)
    assert proposer.try_lead()


def test_a_newest_log_that_ends_before_what_is_decided_leaves_nothing_to_adopt() -> None:
    """Rack 0 left in ballot 3; rack 1 knows it from a piece, rack 4 never heard of that ballot, and
    the two are a quorum of who stays."""
    begin, leave = genesis(racks=5), roster(1, [1, 2, 3, 4])
    cast = cast_of(0, 1, 2, 3, 4, records=[begin])
    cast.accepts(SECOND_, [begin, Ballot(SECOND_)], 1, 4)
    later = log_of(begin, Ballot(THIRD), leave, Ballot(THIRD))
    piece = later.after(0, 3)
    cast.voters[member(1)].append(THIRD, 0, "", piece, later.last, 3)
    proposer = cast.stand()
    assert proposer.log.decided == 3
    assert cast.promise(1, 4)
    assert proposer.log.after(0) == (*piece, Ballot(FOURTH))
    shown = cast.voters[member(4)].acceptor_state(3)
    assert (shown.accepted, shown.last) == (SECOND_, 2), "it is the newest of the two"


# -------------------------------------------------------------- rosters that may be in force


def undecided_roster(change: Roster) -> Cast:
    """Rack 1 stands; the change is written at rack 2 only, and maybe at rack 0."""
    cast = cast_of(0, 1, 2, 3, 4)
    cast.accepts(FIRST, [BEGIN, change], 1, 2)
    return cast


def test_every_roster_that_may_be_in_force_must_promise() -> None:
    """If the change is decided, others may have elected somebody without us."""
    cast = undecided_roster(roster(1, [2, 3, 4]))
    proposer = cast.stand()
    assert proposer.asked() == {member(0), member(1), member(2)}
    assert not cast.promise(1, 2), "a quorum of the roster before it, not of the one that may be"
    assert proposer.asked() == {member(rack) for rack in range(5)}
    assert not proposer.would_win(cast.me)
    assert cast.promise(4)
    assert proposer.log.after(0) == (BEGIN, roster(1, [2, 3, 4]), Ballot(FOURTH))


def test_the_roster_before_must_promise_as_well() -> None:
    cast = undecided_roster(roster(1, [2, 3, 4]))
    proposer = cast.stand()
    cast.promise(2)
    assert not cast.promise(3, 4), "all of the roster that may be, too few of the one before"
    assert not proposer.leading
    assert cast.promise(0)


def test_once_a_change_is_known_to_be_decided_the_roster_before_it_is_history() -> None:
    change = roster(1, [1, 2])
    cast = cast_of(0, 1, 2)
    cast.accepts(FIRST, [BEGIN, change], 2, 2)
    proposer = cast.stand()
    assert not cast.promise(2)
    assert proposer.asked() == {member(1), member(2)}
    assert cast.promise(1), "the lower of two"


def test_a_learner_is_not_asked() -> None:
    records = [BEGIN, roster(1, [0, 1, 2], non_voters=[2])]
    cast = cast_of(0, 1, 2, records=records)
    assert cast.stand().asked() == {member(0), member(1)}
    cast.proposer.hear(member(2), replace(acceptor_state(), promised=FOURTH))
    assert not cast.promise(1)


# -------------------------------------------------------------- opening


def test_rounds_open_only_behind_the_decided_record_of_the_ballot() -> None:
    """Else a later take-over could bring back a Commit whose bytes were freed meanwhile."""
    cast = cast_of(0, 1, 2)
    cast.accepts(FIRST, of_rack(0, 1), 1, 1)
    proposer = cast.stand()
    assert cast.promise(1, 2)
    assert not proposer.open
    assert cast.follow(1) == []
    assert not proposer.open
    assert cast.follow(2) == [commit(1, [offer(0)]), Ballot(FOURTH)]
    assert proposer.open
    proposer.step_down()
    assert not proposer.open


def test_only_who_leads_appends_and_decides() -> None:
    cast = cast_of(0, 1, 2)
    cast.accepts(FIRST, of_rack(0, 1), 1, 1)
    proposer = cast.stand()
    with pytest.raises(AssertionError, match="only a coordinator"):
        proposer.append(Ballot(FOURTH))
    for rack in (0, 1, 2):
        proposer.hear(member(rack), acceptor_state(2, 1, FOURTH))
    assert proposer.decide() == []
    assert proposer.log.decided == 1


# -------------------------------------------------------------- deciding


def leading(*racks: int, records: Sequence[Record] = (BEGIN,)) -> Cast:
    """Rack 1 leads in the fourth ballot, and that is decided."""
    cast = cast_of(*racks, records=records)
    cast.stand()
    assert cast.promise(*racks)
    cast.follow(*racks)
    assert cast.proposer.open
    return cast


def test_accepts_of_an_older_ballot_do_not_count() -> None:
    """What was accepted there may be replaced by who adopted another log in between."""
    cast = leading(0, 1, 2)
    proposer = cast.proposer
    proposer.append(commit(1, [offer(0)]))
    for rack in (0, 1, 2):
        proposer.hear(member(rack), replace(acceptor_state(9, 9, THIRD), promised=FOURTH))
    assert proposer.decide() == []
    assert len(cast.follow(1, 2)) == 1


def test_accepts_count_by_member() -> None:
    cast = leading(0, 1, 2)
    proposer = cast.proposer
    proposer.append(commit(1, [offer(0)]))
    cast.follow(1)
    proposer.hear(member(2, life=1), acceptor_state(3, 2, FOURTH))
    proposer.hear(Member(7, 1), acceptor_state(3, 2, FOURTH))
    assert proposer.decide() == []
    assert len(cast.follow(0)) == 1


def test_record_accepted_by_too_few_is_not_decided_with_the_one_before_it() -> None:
    cast = leading(0, 1, 2)
    proposer = cast.proposer
    for version in (1, 2):
        proposer.append(commit(version, [offer(0, version)]))
    proposer.hear(member(1), acceptor_state(4, 2, FOURTH))
    proposer.hear(member(2), acceptor_state(3, 2, FOURTH))
    assert proposer.decide() == [commit(1, [offer(0, 1)])]
    assert proposer.log.decided == 3


def test_each_record_is_decided_by_the_roster_before_it() -> None:
    cast = leading(0, 1, 2)
    proposer = cast.proposer
    change = roster(1, [1, 2])
    proposer.append(change)
    assert cast.follow(1) == [], "1 of 3, though it would be the lower of 2"
    assert cast.follow(2) == [change]
    proposer.append(commit(1, [offer(1)]))
    assert cast.follow(0) == [], "it has no vote any more"
    assert cast.follow(2) == [], "the higher half"
    assert cast.follow(1) == [commit(1, [offer(1)])]


def test_nothing_goes_behind_an_undecided_roster() -> None:
    cast = leading(0, 1, 2)
    proposer = cast.proposer
    assert proposer.may_append()
    proposer.append(roster(1, [0, 1]))
    assert not proposer.may_append()
    cast.follow(0, 1)
    assert proposer.may_append()


def test_the_undecided_end_stays_so_short_that_a_promise_shows_all_of_it() -> None:
    cast = leading(0, 1, 2)
    proposer = cast.proposer
    for version in range(1, UNDECIDED_MAX + 1):
        assert proposer.may_append()
        proposer.append(commit(version, [offer(0, version)]))
    assert not proposer.may_append()
    assert UNDECIDED_MAX < SENT_AT_ONCE
    cast.follow(1, 2)
    assert proposer.may_append()


def test_from_where_on_a_voter_is_told() -> None:
    """Behind what it accepted of this ballot; of an older one only what is decided is the same."""
    cast = leading(0, 1, 2)
    proposer = cast.proposer
    assert proposer.common(member(2)) == 2
    assert proposer.common(member(2, life=1)) == proposer.log.decided, "it has not spoken yet"
    proposer.hear(member(2), replace(acceptor_state(9, 1, THIRD), promised=FOURTH))
    assert proposer.common(member(2)) == 1
    proposer.hear(member(2), replace(acceptor_state(9, 9, THIRD), promised=FOURTH))
    assert proposer.common(member(2)) == proposer.log.last, "not more than there is here"


# -------------------------------------------------------------- other lives, other logs


def test_a_seat_that_changed_hands_votes_with_its_new_member_only() -> None:
    reborn = member(2, life=1)
    back = replace(roster(1, [0, 1]), members=(seat(0), seat(1), seat(2, life=1)))
    cast = cast_of(0, 1, 2, records=[BEGIN, back])
    cast.voters[reborn] = Acceptor()
    cast.stand()
    assert cast.proposer.asked() == {member(0), member(1), reborn}
    cast.proposer.hear(member(2), replace(acceptor_state(), promised=FOURTH))
    assert not cast.promise(1)
    cast.proposer.hear(reborn, replace(acceptor_state(), promised=FOURTH))
    assert cast.proposer.try_lead()


# -------------------------------------------------------------- those who are left


def bereft(records: Sequence[Record] = (BEGIN,), *, decided: int | None = None) -> Cast:
    """Of three racks, 0 and 2 are attested dead, and rack 1 stands."""
    cast = Cast(0, 1, 2, me=1)
    cast.accepts(FIRST, records, len(records) if decided is None else decided, 0, 1, 2)
    cast.stand()
    cast.proposer.dead = {member(0), member(2)}
    return cast


def test_last_rack_goes_on_alone_when_all_others_are_attested_dead() -> None:
    cast = bereft(of_rack(0, 2))
    proposer = cast.proposer
    assert proposer.would_win(cast.me)
    proposer.held[cast.me] = (2,)
    assert cast.promise(1)
    record = cast.begun
    assert [seat.member for seat in record.members] == [member(1)]
    assert (record.ballot, record.number, record.dead) == (FOURTH, 1, (member(0), member(2)))
    assert (record.versions, record.digests) == ((2,), ((digest(2000),),))
    assert not proposer.open
    assert cast.follow(1)[-1] == record
    assert proposer.open
    assert proposer.log.committed.voters == {member(1)}


def test_lineage_names_the_dead_with_seats_where_it_has_no_room_for_all() -> None:
    """A job may have seen more restarts than that. Nobody could read a longer record, so the job
    never went on."""
    cast = bereft()
    cast.proposer.dead |= {member(0, life) for life in range(1, 100)}
    cast.proposer.held[cast.me] = (0,)
    assert cast.promise(1)
    record = cast.begun
    assert len(record.dead) == DEAD_MAX
    assert {member(0), member(2)} <= set(record.dead)


def test_silence_attests_nobody() -> None:
    cast = bereft()
    cast.proposer.dead = {member(2)}
    cast.proposer.held[cast.me] = (0,)
    assert not cast.proposer.would_win(cast.me)
    assert not cast.promise(1)


def test_everybody_who_is_left_must_promise() -> None:
    cast = cast_of(0, 1, 2, 3, 4, records=[genesis(racks=5)])
    proposer = cast.stand()
    proposer.dead = {member(0), member(2), member(3)}
    for rack in (1, 4):
        proposer.held[member(rack)] = (0,)
    assert not cast.promise(1)
    assert cast.promise(4)
    assert [seat.member.rack for seat in cast.begun.members] == [1, 4]


def test_a_witness_that_was_started_again_has_a_seat_in_the_lineage_and_no_vote() -> None:
    """Its promise is one of another life: it has forgotten what it had accepted."""
    cast = cast_of(1, records=[genesis(witness=True)])
    proposer, again = cast.stand(), member(WITNESS, 1)
    proposer.dead = {member(0), member(WITNESS)}
    proposer.returned, proposer.held[cast.me] = again, (0,)
    assert cast.promise(1)
    record = cast.begun
    assert (record.witness, record.non_voters) == (again, (WITNESS,))
    assert [seat.member for seat in record.members] == [member(1)]
    assert proposer.log.appended.voters == {member(1)}


def test_a_lineage_begins_with_the_newest_that_any_of_them_holds() -> None:
    begin = genesis(racks=5, fragments=2)
    made = [commit(v, [offer(0, v, fragment=p)], fragment=p) for v in (1, 2) for p in (0, 1)]
    cast = cast_of(0, 1, 2, 3, 4, records=[begin, *made])
    proposer = cast.stand()
    proposer.dead = {member(0), member(2), member(3)}
    proposer.held = {member(1): (0, 1), member(4): (1, 0)}
    assert cast.promise(1, 4)
    record = cast.begun
    assert record.versions == (1, 1), "version 2 died with those who had it"
    assert record.digests == ((digest(1000),), (digest(1000),))


def halves(held: dict[int, tuple[int, int]], *, witness: bool = False) -> Cast:
    """Rack 1 of six stands. Only those of `held` are left, and the witness."""
    begin = genesis(racks=6, fragments=2, witness=witness)
    made = [commit(1, [offer(0, 1, fragment=p)], fragment=p) for p in (0, 1)]
    cast = cast_of(*range(6), *([WITNESS] if witness else []), records=[begin, *made])
    proposer = cast.stand()
    proposer.dead = {member(rack) for rack in range(6) if rack not in held}
    proposer.held = {member(rack): versions for rack, versions in held.items()}
    return cast


def test_lineage_of_racks_that_each_lack_a_version_needs_all_of_them() -> None:
    """Rack 1 alone is half of them with the lowest; it has no version 1 of fragment 0."""
    cast = halves({1: (0, 1), 4: (1, 0)})
    assert cast.promise(1, 4)
    record = cast.begun
    assert (record.unanimous, record.versions, record.non_voters) == (True, (1, 1), ())
    assert cast.follow(1) == []
    assert not cast.proposer.may_decide({member(1)})
    assert cast.follow(4)[-1] == record
    assert cast.proposer.may_decide({member(1), member(4)})
    assert not cast.proposer.may_decide({member(1)}), "nor anything after it"


def test_lineage_of_three_such_racks_is_not_decided_by_two() -> None:
    cast = halves({1: (0, 1), 4: (1, 0), 5: (0, 1)})
    assert cast.promise(1, 4, 5)
    assert cast.follow(1) == []
    assert cast.follow(5) == []
    assert cast.follow(4) != []


def test_witness_has_no_vote_in_a_lineage_that_needs_every_rack() -> None:
    cast = halves({1: (0, 1), 4: (1, 0)}, witness=True)
    assert cast.promise(1, 4, WITNESS)
    record = cast.begun
    assert (record.unanimous, record.non_voters) == (True, (WITNESS,))


def test_takeover_of_a_lineage_that_needs_every_rack_needs_their_promises_or_their_deaths() -> None:
    """Without rack 2 its only copy of a version is gone: the job goes back to the one before."""
    begin = genesis(racks=3, fragments=2)
    made = [commit(1, [offer(0, 1, fragment=p)], fragment=p) for p in (0, 1)]
    anew = replace(lineage(SECOND_, [1, 2], dead=[0], versions=(1, 1)), unanimous=True)
    cast = cast_of(1, 2, records=[begin, *made, anew])
    proposer = cast.stand()
    assert not cast.promise(1)
    proposer.dead, proposer.held = {member(0), member(2)}, {member(1): (0, 1)}
    assert proposer.try_lead()
    record = cast.begun
    assert (record.versions, record.unanimous) == ((0, 1), False)
    assert proposer.log.appended.voters == {member(1)}


def test_without_knowing_what_they_hold_no_lineage_begins() -> None:
    for held in ({}, {member(1): ()}, {member(1): (0, 0)}, {member(1): (-1,)}):
        cast = bereft()
        cast.proposer.held = held
        assert not cast.promise(1), held
        assert not cast.proposer.leading


def test_a_witness_alone_begins_nothing() -> None:
    """It has no bytes at all. With a rack it has a vote in the new lineage too."""
    begin = genesis(racks=2, witness=True)
    alone = Cast(0, 1, WITNESS, me=WITNESS)
    alone.accepts(FIRST, [begin], 1, 0, 1, WITNESS)
    alone.stand().dead = {member(0), member(1)}
    assert not alone.promise(WITNESS)
    wide = genesis(racks=4, witness=True)
    pair = Cast(0, 1, 2, 3, WITNESS, me=1)
    pair.accepts(FIRST, [wide], 1, 0, 1, 2, 3, WITNESS)
    proposer = pair.stand()
    proposer.dead = {member(0), member(2), member(3)}
    proposer.held[member(1)] = (0,)
    assert pair.promise(1, WITNESS)
    record = pair.begun
    assert record.witness == member(WITNESS)
    assert pair.follow(WITNESS) == []
    assert pair.follow(1) == [record]


def test_a_lineage_decides_with_itself_what_it_took_over() -> None:
    """What the dead would have been needed for."""
    cast = bereft(of_rack(0, 1), decided=1)
    cast.proposer.held[cast.me] = (1,)
    assert cast.promise(1)
    fresh = cast.follow(1)
    assert fresh == [commit(1, [offer(0)]), cast.proposer.log.record(3)]
    assert cast.proposer.log.decided == 3


def test_nothing_goes_behind_an_undecided_lineage_and_its_voters_are_asked() -> None:
    anew = lineage(THIRD, [1, 2], dead=[0])
    cast = cast_of(0, 1, 2)
    cast.accepts(THIRD, [BEGIN, anew], 1, 1)
    proposer = cast.stand()
    assert proposer.asked() == {member(1), member(2)}, "not the dead"
    assert cast.promise(1), "the lower of two"
    assert not proposer.may_append()
    cast.follow(1)
    assert proposer.may_append()


def test_a_lineage_is_not_decided_by_too_few_of_who_is_left() -> None:
    anew = lineage(THIRD, [1, 2], dead=[0])
    cast = cast_of(0, 1, 2)
    cast.accepts(THIRD, [BEGIN, anew], 1, 1)
    proposer = cast.stand()
    assert cast.promise(0, 1)
    assert cast.follow(2) == [], "the higher of two"
    assert cast.follow(1) == [anew, Ballot(FOURTH)]
    assert proposer.open


def test_a_lineage_needs_the_promise_of_who_has_a_seat_without_a_vote() -> None:
    """Of the voters none may be left: what they decided, only a learner may hold."""
    records = [BEGIN, roster(1, [0, 1, 2], non_voters=[1, 2])]
    cast = cast_of(0, 1, 2, records=records)
    proposer = cast.stand()
    proposer.dead = {member(0)}
    for rack in (1, 2):
        proposer.held[member(rack)] = (0,)
    assert proposer.asked() == {member(0), member(1), member(2)}
    assert not cast.promise(1)
    assert cast.promise(2)
    assert [seat.member.rack for seat in cast.begun.members] == [1, 2]


def test_a_learner_that_does_not_know_of_its_seat_promises_with_an_empty_log() -> None:
    """Its hello was enough once. But one that crossed the seat on its way said so of a rack that
    held, and trained on, what the dead had decided; and that was undone."""
    records = [BEGIN, roster(1, [0, 1, 2], non_voters=[2])]
    cast = cast_of(0, 1, 2, records=records)
    proposer = cast.stand()
    proposer.dead = {member(0)}
    proposer.held[member(1)] = (0,)
    assert not cast.promise(1)
    proposer.held[member(2)] = (-1,)
    proposer.hear(member(2), replace(acceptor_state(0, 0, proposer.ballot), accepted=0))
    assert proposer.try_lead()
    record = cast.begun
    assert [seat.member.rack for seat in record.members] == [1, 2], "and keeps its seat"
    assert record.non_voters == (2,)


def test_a_job_is_lost_where_nobody_who_is_left_holds_any_version_of_a_fragment() -> None:
    """Not before all of them have promised and said so; nor when one has copied it meanwhile."""
    records = [genesis(racks=3, fragments=2), roster(1, [0, 1, 2], non_voters=[1, 2])]
    cast = cast_of(0, 1, 2, records=records)
    proposer = cast.stand()
    proposer.dead = {member(0)}
    proposer.held = {member(1): (-1, 0), member(2): (-1, -1)}
    assert not cast.promise(1)
    assert not proposer.lost
    assert not cast.promise(2)
    assert proposer.lost
    proposer.dead = set()
    assert not proposer.try_lead()
    assert not proposer.lost, "rack 0 has spoken"
    proposer.dead, proposer.held[member(2)] = {member(0)}, (0, -1)
    assert proposer.try_lead()
    assert not proposer.lost


def test_rack_that_is_behind_has_no_vote_in_a_new_lineage() -> None:
    """A quorum of those that hold nothing could go on without the bytes."""
    records = [genesis(racks=5), commit(1, [offer(0)])]
    cast = cast_of(0, 1, 2, 3, 4, records=records)
    proposer = cast.stand()
    proposer.dead = {member(0), member(3), member(4)}
    proposer.held = {member(1): (0,), member(2): (1,)}
    assert not cast.promise(1)
    assert cast.promise(2)
    record = cast.begun
    assert (record.versions, record.non_voters) == ((1,), (1,))
    assert proposer.log.appended.voters == {member(2)}


def test_a_lineage_keeps_the_seat_that_a_record_gave_which_was_not_decided() -> None:
    """Of the voters behind that record one is a quorum, of those before it none is left."""
    again = replace(BEGIN.roster[2], member=member(2, life=1))
    back = replace(roster(1, [0, 1, 2], non_voters=[2]), members=(*BEGIN.roster[:2], again))
    cast = Cast(0, 1, 2, me=0)
    cast.accepts(FIRST, [BEGIN, back], 1, 0)
    proposer = cast.stand()
    proposer.dead = {member(1), member(2)}
    proposer.held = {member(0): (0,), again.member: (-1,)}
    assert not cast.promise(0)
    proposer.hear(again.member, replace(acceptor_state(0, 0, proposer.ballot), accepted=0))
    assert proposer.try_lead()
    assert [seat.member for seat in cast.begun.members] == [member(0), again.member]


def test_member_of_an_undecided_roster_is_asked_when_a_voter_of_the_one_before_died() -> None:
    """Rack 0 had died, was started again and got a seat without a vote; that could not be decided
    without its former life. All that are left must promise, so the new life too, but it was never
    asked: none of the voters of the undecided roster was dead. Nobody decided anything any more."""
    begin = genesis(racks=2)
    again = replace(begin.roster[0], member=member(0, life=1))
    back = replace(roster(1, [0, 1], non_voters=[0]), members=(again, begin.roster[1]))
    cast = Cast(0, 1, me=1)
    cast.accepts(FIRST, [begin, back], 1, 1)
    proposer = cast.stand()
    proposer.dead = {member(0)}
    proposer.held = {member(1): (0,), again.member: (-1,)}
    assert again.member in proposer.asked()
    assert not cast.promise(1)
    proposer.hear(again.member, replace(acceptor_state(0, 0, proposer.ballot), accepted=0))
    assert proposer.try_lead()
    assert cast.begun.non_voters == (0,)


def test_after_the_death_of_who_voted_alone_all_other_seats_begin_together() -> None:
    """Rack 0 decided alone; what it decided, rack 1 or the witness may know."""
    begin = genesis(racks=2, witness=True)
    records = [begin, roster(1, [0, 1], non_voters=[1, WITNESS], witness=True)]
    for first, second in ((1, WITNESS), (WITNESS, 1)):
        cast = Cast(0, 1, WITNESS, me=first)
        cast.accepts(FIRST, records, 2, 0, 1, WITNESS)
        proposer = cast.stand()
        proposer.held[member(1)] = (0,)
        proposer.dead = {member(0)}
        assert not cast.promise(first), "one of two"
        assert cast.promise(second)
        record = cast.begun
        assert record.witness == member(WITNESS)
        assert record.non_voters == (WITNESS,), "beside one rack it has no vote"
        assert cast.follow(1) == [record]


def test_ready_is_who_has_accepted_the_whole_log() -> None:
    cast = leading(0, 1)
    cast.proposer.append(commit(1, [offer(0)]))
    assert cast.proposer.ready() == set()
    cast.follow(1)
    assert cast.proposer.ready() == {member(1)}
