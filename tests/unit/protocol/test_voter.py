"""One vote: a promise is kept, a log is taken whole or as far as it is decided, nothing decided is
undone."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from mend.protocol.epochs import epoch_of
from mend.protocol.log import SENT_AT_ONCE, Log
from mend.protocol.messages import Ballot, Epoch, Record
from mend.protocol.voter import Voter
from tests.unit.protocol.nouns import FIRST, commit, digest, genesis, log_of, offer

SECOND_, THIRD = epoch_of(2, 1), epoch_of(3, 0)
BEGIN = genesis(racks=3)


def of_rack(rack: int, count: int) -> list[Record]:
    """Genesis and commits that only this rack's coordinator wrote."""
    return [BEGIN, *(commit(v, [offer(rack, v)]) for v in range(1, count + 1))]


def give(
    voter: Voter,
    epoch: int,
    records: Sequence[Record],
    decided: int = 0,
    *,
    prev: int = 0,
    stop: int | None = None,
) -> bool:
    """The coordinator of `epoch`, whose log is `records`, sends records prev + 1 .. stop."""
    source = log_of(*records)
    piece = source.after(prev, stop)
    return voter.append(epoch, prev, source.chain(prev), piece, source.last, decided)


def content(voter: Voter) -> list[Record]:
    return list(voter.log.after(0))


# -------------------------------------------------------------- promises


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=20))
def test_a_promise_is_never_gone_back_on(asked: list[tuple[bool, int]]) -> None:
    """Whatever is asked in whatever order: nothing below the promise is granted or taken."""
    voter, highest = Voter(), 0
    for prepares, epoch in asked:
        said = voter.prepare(epoch) if prepares else give(voter, epoch, of_rack(0, epoch))
        assert said == (epoch >= highest)
        highest = max(highest, epoch)
        assert voter.promised == highest
        assert voter.accepted <= voter.promised


def test_an_append_below_the_promise_is_refused_and_changes_nothing() -> None:
    voter = Voter()
    give(voter, FIRST, of_rack(0, 1), 1)
    voter.prepare(THIRD)
    before = voter.ballot()
    assert not give(voter, SECOND_, of_rack(0, 3), 3)
    assert voter.ballot() == before
    assert voter.ballot().promised == THIRD


def test_to_accept_is_to_promise() -> None:
    voter = Voter()
    assert give(voter, SECOND_, of_rack(0, 1))
    assert voter.promised == SECOND_
    assert not voter.prepare(FIRST)
    assert not give(voter, FIRST, of_rack(0, 2))


def test_what_does_not_fit_is_not_taken_but_its_epoch_is_promised() -> None:
    """It may follow this coordinator; its ballot says from where on it needs the log."""
    voter = Voter()
    give(voter, FIRST, of_rack(0, 1), 1)
    assert give(voter, SECOND_, of_rack(1, 3), 4, prev=2)
    ballot = voter.ballot()
    assert (ballot.promised, ballot.accepted) == (SECOND_, FIRST)
    assert (ballot.last, ballot.decided) == (2, 1)
    assert content(voter) == of_rack(0, 1)


# -------------------------------------------------------------- whole logs


def test_a_whole_log_is_accepted_in_the_epoch_that_sends_it() -> None:
    voter = Voter()
    assert give(voter, FIRST, of_rack(0, 2), 2)
    assert (voter.accepted, voter.log.last, voter.log.decided) == (FIRST, 3, 2)
    give(voter, FIRST, of_rack(0, 3), 3, prev=3)
    assert (voter.accepted, voter.log.last, voter.log.decided) == (FIRST, 4, 3)


def test_an_old_longer_tail_does_not_survive_the_first_whole_append_of_an_epoch() -> None:
    """Else a later take-over could adopt it with the number of an epoch that never had it."""
    voter = Voter()
    give(voter, FIRST, of_rack(0, 4), 1)
    newer = [*of_rack(0, 1), Epoch(SECOND_)]
    give(voter, SECOND_, newer, 1)
    assert content(voter) == newer
    assert voter.accepted == SECOND_
    same = Voter()
    give(same, FIRST, of_rack(0, 4), 1)
    give(same, SECOND_, of_rack(0, 2), 1, prev=3)
    assert same.log.last == 3, "also where the message holds no record that differs"


def test_an_old_message_of_the_same_epoch_cuts_nothing() -> None:
    """A log only grows within an epoch; what is shorter was overtaken on the way."""
    voter = Voter()
    give(voter, FIRST, of_rack(0, 4), 1)
    assert give(voter, FIRST, of_rack(0, 2), 1)
    assert give(voter, FIRST, of_rack(0, 1), 1, prev=2)
    assert content(voter) == of_rack(0, 4)


def test_what_differs_in_a_newer_epoch_replaces_what_nobody_decided() -> None:
    voter = Voter()
    give(voter, FIRST, of_rack(0, 3), 2)
    newer = [*of_rack(0, 1), commit(2, [offer(1, 9)])]
    assert give(voter, SECOND_, newer, 2, prev=1)
    assert content(voter) == newer
    assert voter.log.written.versions == [2]


def test_nothing_decided_is_undone_whoever_asks() -> None:
    voter = Voter()
    give(voter, FIRST, of_rack(0, 3), 3)
    before = content(voter)
    assert not give(voter, SECOND_, of_rack(1, 3))
    assert content(voter) == before
    assert (voter.accepted, voter.log.decided) == (FIRST, 3)


def test_a_whole_log_that_is_shorter_than_what_is_decided_undoes_nothing() -> None:
    """A late message of an epoch from which a later piece has come already."""
    voter = Voter()
    give(voter, FIRST, of_rack(0, 3), 3, stop=3)
    assert (voter.log.decided, voter.accepted) == (3, 0)
    assert give(voter, FIRST, of_rack(0, 1), 1)
    assert (voter.log.last, voter.log.decided) == (3, 3)
    assert voter.accepted == FIRST


# -------------------------------------------------------------- pieces


def test_a_piece_of_a_log_is_taken_only_as_far_as_it_is_decided() -> None:
    voter = Voter()
    assert give(voter, FIRST, of_rack(0, 5), 2, stop=4)
    assert content(voter) == of_rack(0, 1)
    assert (voter.log.decided, voter.accepted) == (2, 0)
    assert give(voter, FIRST, of_rack(0, 5), 2, prev=2)
    assert (voter.log.last, voter.accepted) == (6, FIRST), "the rest makes it whole"


def test_a_piece_does_not_cost_what_was_accepted_in_an_older_epoch() -> None:
    """The quorum that counted it there must still find it here."""
    voter = Voter()
    give(voter, FIRST, of_rack(0, 3), 1)
    give(voter, SECOND_, [*of_rack(0, 1), *of_rack(1, 9)[2:]], 1, stop=4)
    assert content(voter) == of_rack(0, 3)
    assert (voter.accepted, voter.promised) == (FIRST, SECOND_)


def test_a_piece_replaces_what_a_decision_contradicts() -> None:
    voter = Voter()
    give(voter, FIRST, of_rack(0, 3), 1)
    give(voter, SECOND_, of_rack(1, 9), 2, stop=3)
    assert content(voter) == of_rack(1, 1)
    assert (voter.accepted, voter.log.decided) == (FIRST, 2)


def test_nothing_counts_as_decided_that_this_message_does_not_show() -> None:
    """An old tail is not decided because a record with its number is."""
    voter = Voter()
    give(voter, FIRST, of_rack(0, 3), 1)
    newer = [*of_rack(0, 1), *of_rack(1, 9)[2:]]
    give(voter, SECOND_, newer, 9, prev=1, stop=2)
    assert voter.log.decided == 2
    assert content(voter) == of_rack(0, 3)


def test_a_piece_behind_what_is_decided_brings_nothing() -> None:
    voter = Voter()
    give(voter, FIRST, of_rack(0, 3), 3)
    give(voter, FIRST, of_rack(0, 9), 1, prev=3, stop=7)
    assert (voter.log.last, voter.log.decided) == (4, 3)


@given(st.data())
def test_a_voter_gets_there_through_loss_repetition_and_disorder(data: st.DataObject) -> None:
    """Any messages of one coordinator in any order, then one whole one: it has the log."""
    voter, whole = Voter(), of_rack(0, 6)
    for _ in range(data.draw(st.integers(0, 12))):
        last = data.draw(st.integers(1, 7))
        prev = data.draw(st.integers(0, last))
        stop = data.draw(st.integers(prev, last))
        decided_before = voter.log.decided
        decided = data.draw(st.integers(0, last))
        give(voter, FIRST, whole[:last], decided, prev=prev, stop=stop)
        assert content(voter) == whole[: voter.log.last], "never anything else"
        assert voter.log.decided >= decided_before
    give(voter, FIRST, whole, 7)
    assert content(voter) == whole
    assert (voter.accepted, voter.log.decided) == (FIRST, 7)


# -------------------------------------------------------------- what it says


def test_a_ballot_says_what_was_promised_and_accepted() -> None:
    voter = Voter()
    give(voter, FIRST, of_rack(0, 2), 2)
    voter.prepare(SECOND_)
    chain = log_of(*of_rack(0, 2)).chain(3)
    assert voter.ballot() == Ballot(SECOND_, FIRST, 3, 2, 3, chain, ())
    assert Voter().ballot() == Ballot(0, 0, 0, 0, 0, "", ())


def test_a_candidate_is_shown_what_it_does_not_know() -> None:
    voter = Voter()
    give(voter, FIRST, of_rack(0, 2), 2)
    ballot = voter.ballot(1)
    assert (ballot.prev, ballot.chain) == (1, log_of(BEGIN).chain(1))
    assert list(ballot.records) == of_rack(0, 2)[1:]
    assert voter.ballot(0).records == tuple(of_rack(0, 2))
    further = voter.ballot(9)
    assert (further.prev, further.last, further.records) == (3, 3, ()), "it has not that much"


def test_a_candidate_far_behind_is_shown_a_message_full() -> None:
    log = Log()
    for record in of_rack(0, SENT_AT_ONCE + 5):
        log.append(record)
    log.decide(log.last)
    ballot = Voter(log, FIRST, FIRST).ballot(0)
    assert len(ballot.records) == SENT_AT_ONCE
    assert (ballot.prev, ballot.last) == (0, log.last)
    assert ballot.chain != digest(0)
