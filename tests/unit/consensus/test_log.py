"""The one list of decisions: how it grows, how replicas follow it, and what it adds up to."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from mend.consensus.acceptor import Acceptor
from mend.consensus.ballots import ballot_of
from mend.consensus.log import (
    RECORDS_KEPT,
    SENT_AT_ONCE,
    Log,
    LogState,
    log_state_of,
    offers_of,
    witness_votes,
)
from mend.consensus.records import (
    AWAITED,
    EVICTED,
    Absent,
    Ballot,
    Commit,
    Drop,
    Mitigation,
    Offer,
    Record,
)
from mend.consensus.weights import WHOLE
from mend.types import WITNESS, Peer
from tests.unit.coordination.nouns import (
    FIRST,
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


def folded(*records: Record) -> LogState:
    found = LogState()
    for record in records:
        found.take(record)
    return found


def commits(count: int) -> list[Record]:
    return [genesis(), *(commit(v, [offer(0, v)]) for v in range(1, count + 1))]


# -------------------------------------------------------------- what records add up to


def test_a_log_begins_with_genesis_and_ends_with_an_empty_roster() -> None:
    assert not LogState().begun
    assert not LogState().over
    begun = folded(genesis(witness=True))
    assert begun.begun
    assert begun.voters == {member(0), member(1), member(WITNESS)}
    assert begun.versions == [0]
    over = folded(genesis(), roster(1, []))
    assert over.over
    assert over.voters == set()


def test_ballot_record_names_the_new_coordinator() -> None:
    found = folded(genesis(), Ballot(FIRST))
    assert found.ballot == FIRST
    assert found.versions == [0]


def test_a_commit_moves_one_fragment_to_the_next_version() -> None:
    found = folded(genesis(fragments=2), commit(1, [offer(0, fragment=1)], fragment=1))
    assert found.versions == [0, 1]
    assert found.digests[1] == (digest(1000),)


def test_a_version_is_never_skipped_or_repeated() -> None:
    for wrong in (0, 1, 3):
        log = folded(genesis(), commit(1, [offer(0, 1)]))
        with pytest.raises(AssertionError, match="after 1"):
            log.take(commit(wrong, [offer(0, 2)]))


def test_members_must_ascend() -> None:
    with pytest.raises(AssertionError, match="must ascend"):
        folded(genesis(), commit(1, [offer(1), offer(0)]))


def test_an_offer_ends_once() -> None:
    """Named and dropped are both an end, and an older one cannot come after a newer one."""
    begin = folded(genesis(), commit(1, [offer(0, 5)], dropped=[offer(1, 2)]))
    assert not begin.is_open(member(0), 0, 5)
    assert not begin.is_open(member(0), 0, 4)
    assert begin.is_open(member(0), 0, 6)
    assert not begin.is_open(member(1), 0, 2)
    assert begin.is_open(member(1), 0, 3)
    for again in (commit(2, [offer(0, 5)]), commit(2, [offer(1, 2)]), commit(2, [offer(0, 3)])):
        with pytest.raises(AssertionError, match="ends twice"):
            folded(genesis(), commit(1, [offer(0, 5)], dropped=[offer(1, 2)]), again)


def test_a_record_names_and_drops_the_offers_that_it_ends() -> None:
    both = commit(1, [offer(0)], dropped=[offer(1, 2)])
    assert [each.member for each in offers_of(both)] == [member(0), member(1)]
    assert offers_of(Drop(0, both.dropped, "too old")) == both.dropped


def test_offers_of_another_life_or_of_a_removed_rack_are_not_open() -> None:
    found = folded(genesis())
    assert not found.is_open(member(1, life=1), 0, 1)
    found.take(roster(1, [0]))
    assert found.member(1) is None
    assert not found.is_open(member(1), 0, 1)
    assert found.roster_number == 1


def test_a_second_genesis_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="second Genesis"):
        folded(genesis(), genesis())


def test_a_rail_is_the_same_rank_of_the_other_racks_owner_first() -> None:
    found = folded(genesis(racks=4, ranks=2))
    lanes = {rack: seat(rack, 2).lanes[1] for rack in range(4)}
    assert found.rail(Peer(1, 1)) == (lanes[0], lanes[2], lanes[3])
    assert found.rail(Peer(1, 1), 3) == (lanes[3], lanes[0], lanes[2])
    assert found.rail(Peer(1, 1), 1) == (lanes[0], lanes[2], lanes[3])


# -------------------------------------------------------------- a log and its replicas


def test_after_is_cut_into_messages() -> None:
    log = log_of(*commits(SENT_AT_ONCE + 10))
    assert len(log.after(0)) == SENT_AT_ONCE
    assert len(log.after(SENT_AT_ONCE)) == 11
    assert log.after(3, 5) == tuple(commits(5)[3:5])
    assert log.after(log.last) == ()
    assert log.after(log.last + 1) == ()


def test_old_records_are_compacted() -> None:
    log = log_of(*commits(9), kept=4)
    assert len(log.decide(6)) == 6
    assert log.reaches(1), "what was decided just now can be read"
    log.decide(8)
    assert not log.reaches(3)
    assert log.reaches(4)
    assert log.after(3) == ()
    assert len(log.after(4)) == 6
    assert not log.matches(3, log_of(*commits(2)).chain(3)), "nobody can say any more"
    assert log.chain(4) == log_of(*commits(3)).chain(4)


# -------------------------------------------------------------- in place of the beginning


def test_an_evicted_rack_stays_noted_until_its_next_life_has_the_seat_and_is_counted() -> None:
    evicted, without = Mitigation(1, EVICTED, "slow"), roster(1, [0])
    log = log_of(*commits(1), evicted, without)
    log.decide(log.last)
    assert log.committed.mitigations == {1: evicted}
    assert log_state_of(log.snapshot()) == log.committed
    log.append(roster(2, [0, 1], lives={1: 2}))
    log.decide(log.last)
    assert log.committed.mitigations == {}
    assert log.committed.evictions == {1: 1}
    log.append(evicted)
    log.append(Mitigation(1, AWAITED, "well"))
    log.decide(log.last)
    assert (log.committed.mitigations, log.committed.evictions) == ({}, {1: 2})
    assert log_state_of(log.snapshot()) == log.committed


def test_a_reader_that_is_too_far_behind_goes_on_from_a_snapshot() -> None:
    log = log_of(*commits(9), kept=3)
    log.decide(8)
    for known in (0, 2):
        other = log_of(*commits(9)[:known])
        other.decide(known)
        other.install(log.snapshot())
        assert (other.last, other.decided, other.lineage) == (8, 8, log.lineage)
        assert other.committed == other.appended == log.committed
        assert not other.reaches(7)
        assert other.put(8, log.after(8))
        assert other.chain(10) == log.chain(10)
        assert other.continues(log.lineage, 8)


def test_accepted_tail_that_fits_a_snapshot_is_kept() -> None:
    """It may be decided by just this acceptance."""
    log = log_of(*commits(5), kept=1)
    log.decide(4)
    ahead = log_of(*commits(5))
    ahead.decide(2)
    ahead.install(log.snapshot())
    assert (ahead.decided, ahead.last) == (4, 6)
    other = log_of(*commits(2), *([Ballot(FIRST)] * 4))
    other.decide(2)
    other.install(log.snapshot())
    assert (other.decided, other.last) == (4, 4), "what differs from a decision was none"
    before = log_of(*commits(5))
    before.decide(6)
    before.install(log.snapshot())
    assert before.decided == 6, "older than what is known here"


def test_a_rack_joins_behind_70_000_records() -> None:
    """65,536 were kept, and who had not read the first could never join: day 9.7 of a job."""
    log, acceptor = Log(), Acceptor()
    log.append(genesis())
    for version in range(1, 70_000):
        log.append(commit(version, [offer(0, version)]))
        log.decide(log.last)
    assert len(log.after(log.decided - RECORDS_KEPT, log.last)) == SENT_AT_ONCE
    assert not log.reaches(log.decided - RECORDS_KEPT - 1)
    assert len(vars(log)["_records"]) == RECORDS_KEPT
    log.append(commit(70_000, [offer(0, 70_000)]))
    shown, records = log.snapshot(), log.after(log.decided)
    taken = acceptor.append(FIRST, shown.index, shown.chain, records, log.last, log.decided, shown)
    assert taken
    assert (acceptor.log.last, acceptor.log.decided, acceptor.accepted) == (
        log.last,
        log.decided,
        FIRST,
    )
    assert acceptor.log.committed == log.committed
    assert acceptor.log.chain(log.last) == log.chain(log.last)


# -------------------------------------------------------------- what nobody decided


def test_cut_records_leave_no_trace() -> None:
    """A later reading must be as if it had never been written."""
    log = log_of(*commits(2), roster(1, [0]))
    log.decide(2)
    log.cut(3)
    log.cut(3)
    same = log_of(*commits(2))
    assert (log.last, log.chain(3)) == (3, same.chain(3))
    assert log.appended == same.appended
    log.cut(2)
    log.append(commit(2, [offer(1)]))
    assert log.appended.versions == [2]
    assert log.appended.is_open(member(0), 0, 2), "the commit that named it was cut"
    assert not log.reaches(4)


def test_decided_records_are_never_cut() -> None:
    log = log_of(*commits(3))
    log.decide(3)
    with pytest.raises(AssertionError, match="record 3 is decided"):
        log.cut(2)
    log.cut(3)
    assert log.last == 3


def test_a_roster_decides_from_the_record_behind_it() -> None:
    """A record is decided by the newest roster before it; the first record brings its own."""
    log = log_of(genesis(racks=3), commit(1, [offer(0)]), roster(1, [1, 2]), Ballot(FIRST))
    all_three, two = {member(0), member(1), member(2)}, {member(1), member(2)}
    expected = [all_three, all_three, all_three, two, two]
    for decided in range(5):
        log.decide(decided)
        found = [log.roster_at(index).voters for index in range(decided + 1, 6)]
        assert found == expected[decided:], f"{decided=}"


# -------------------------------------------------------------- those who are left


SECOND_ = ballot_of(2, 2)


def test_a_lineage_begins_anew_with_those_who_are_left_and_what_they_hold() -> None:
    """The newest version was known to the dead only; what it named counts as dropped."""
    before = [*commits(2), roster(1, [0, 1], non_voters=[1], witness=True)]
    found = folded(*before, lineage(SECOND_, [1], dead=[0], versions=[1], number=2))
    assert (found.voters, sorted(found.seats)) == ({member(1)}, [1])
    assert (found.former, found.witness) == ((member(0),), None)
    assert (found.roster_number, found.ballot) == (2, SECOND_)
    assert (found.versions, found.digests) == ([1], [(digest(1000),)])
    assert not found.is_open(member(0), 0, 2)
    assert found.named == {}, "an undone commit has named nobody"
    found.take(commit(2, [offer(1, 7)]))
    assert found.versions == [2]


def test_a_lineage_has_a_name_of_its_own_and_one_that_is_cut_has_none() -> None:
    """So that frames of the job as it was, or of what a zombie makes of it, are another job's."""
    log = log_of(*commits(1))
    first = log.lineage
    assert first == log.chain(1)
    log.append(lineage(SECOND_, [1], dead=[0]))
    second = log.lineage
    assert second == log.chain(3) != first
    assert [log.lineage_at(index) for index in range(4)] == ["", first, first, second]
    copied = log.copy()
    log.cut(2)
    assert (log.lineage, copied.lineage) == (first, second)


def test_frames_of_a_lineage_are_heard_until_it_is_known_to_be_over() -> None:
    """An undecided one may be lost again: who has it must still hear who has not, and who has not
    must hear who has. What a zombie says once it is decided is another job's."""
    before = log_of(*commits(1))
    first = before.lineage
    log = log_of(*commits(1), lineage(SECOND_, [1], dead=[0]))
    log.decide(2)
    second = log.lineage
    assert log.continues(first, 2)
    assert log.continues(second, 2)
    assert not log.continues(first, 3), "not behind what ends it"
    assert not log.continues("", 0)
    assert not log.continues(digest(5), 2)
    assert not before.continues(second, 2), "nobody has told it here yet"
    log.decide(3)
    assert log.continues(second, 3)
    assert not log.continues(first, 2), "it is over"


def test_the_digests_of_any_version_that_was_made_are_known() -> None:
    second = lineage(SECOND_, [0, 1], versions=[1], number=1)
    log = log_of(*commits(2), second, commit(2, [offer(1, 5)]), kept=2)
    assert log.digests_of(0, 0) == genesis().digests[0]
    assert log.digests_of(0, 1) == (digest(1000),)
    assert log.digests_of(0, 2) == (digest(2000),)
    assert log.digests_of(0, 3) is None
    two = log_of(genesis(fragments=2), commit(1, [offer(0, fragment=1)], fragment=1))
    assert (two.digests_of(0, 1), two.digests_of(1, 1)) == (None, (digest(1000),))
    anew = log_of(*commits(1), replace(second, digests=((digest(7),),)))
    assert anew.digests_of(0, 1) == (digest(7),), "the newest that says so"
    assert len(log.decide(1)) + len(log.decide(5)) == 5
    assert log.digests_of(0, 0) is None, "compacted"
    assert log.digests_of(0, 2) == (digest(2000),)


def missed(version: int, *offers: Offer) -> Commit:
    """A commit that half of the work is missing in."""
    made = commit(version, offers)
    return replace(made, absent=tuple(Absent(9 + each.member.rack, 10, 2) for each in offers))


def test_rounds_count_by_what_was_in_them() -> None:
    log = log_of(genesis(fragments=2), missed(1, offer(0)), commit(2, [offer(0, 2)]))
    assert log.appended.rounds == [WHOLE + WHOLE // 2, 0]
    assert [log.rounds_of(0, version) for version in range(3)] == [0, WHOLE // 2, 3 * WHOLE // 2]
    assert log.rounds_of(1, 0) == 0
    assert log.rounds_of(0, 3) is None, "no such version"
    copied = log.copy()
    copied.append(missed(3, offer(0, 3)))
    assert (log.appended.rounds[0], copied.appended.rounds[0]) == (3 * WHOLE // 2, 2 * WHOLE)


def test_a_new_lineage_counts_from_the_version_it_goes_on_from() -> None:
    """What it undoes was not merged; versions are given anew, and so are the rounds."""
    anew = replace(lineage(SECOND_, [0, 1], versions=[1], number=1), rounds=(WHOLE // 2,))
    first = [genesis(), missed(1, offer(0)), commit(2, [offer(0, 2)])]
    log = log_of(*first, anew, missed(2, offer(1, 5)), kept=2)
    assert [log.rounds_of(0, version) for version in range(3)] == [0, WHOLE // 2, WHOLE]
    assert len(log.decide(2)) + len(log.decide(log.last)) == log.last
    assert (log.rounds_of(0, 1), log.rounds_of(0, 2)) == (WHOLE // 2, WHOLE)
    assert log.rounds_of(0, 0) is None, "compacted"
    assert log.committed.work == {(member(1), 0): (40, 10, 2, 0)}, (
        "what only an undone commit named is none"
    )


def test_racks_that_all_weigh_alike_are_missing_alike() -> None:
    first = genesis()
    log = log_of(replace(first, policy=replace(first.policy, token_weighted=False)))
    log.append(replace(missed(1, offer(0)), absent=(Absent(1, 99, 1),)))
    assert log.appended.rounds == [WHOLE // 2]


def test_voter_that_keeps_only_its_seat_is_demoted_until_it_votes_again() -> None:
    log = log_of(
        genesis(racks=3, witness=True), roster(1, range(3), non_voters=[1, 2], witness=True)
    )
    assert log.appended.demoted == {1, 2}
    log.append(roster(2, range(3), non_voters=[2, WITNESS], witness=True))
    assert log.appended.demoted == {2}
    log.append(roster(3, range(2), non_voters=[]))
    log.append(roster(4, range(3), non_voters=[2]))
    assert log.appended.demoted == set(), "a newcomer had none"
    log.append(roster(5, range(3), non_voters=[1, 2]))
    back = roster(6, range(3), non_voters=[1, 2])
    log.append(replace(back, members=(back.members[0], seat(1, life=1), back.members[2])))
    assert log.appended.demoted == set(), "another life"


def test_a_witness_is_of_use_beside_an_even_number_of_racks() -> None:
    assert [witness_votes(member(WITNESS), racks) for racks in (1, 2, 3)] == [False, True, False]
    assert not witness_votes(None, 2)
    begin = replace(genesis(racks=3, witness=True), non_voters=(WITNESS,))
    assert log_of(begin).appended.voters == {member(0), member(1), member(2)}
