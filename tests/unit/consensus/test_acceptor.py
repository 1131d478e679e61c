"""One vote: a promise is kept, a log is taken whole or as far as it is decided, nothing decided is
undone."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from mend.consensus.acceptor import Acceptor
from mend.consensus.ballots import ballot_of
from mend.consensus.log import SENT_AT_ONCE, Log
from mend.consensus.records import Ballot, Record
from tests.unit.coordination.nouns import FIRST, commit, digest, genesis, log_of, offer

SECOND_, THIRD = ballot_of(2, 1), ballot_of(3, 0)
BEGIN = genesis(racks=3)


def of_rack(rack: int, count: int) -> list[Record]:
    """Genesis and commits that only this rack's coordinator wrote."""
    return [BEGIN, *(commit(v, [offer(rack, v)]) for v in range(1, count + 1))]


def give(
    acceptor: Acceptor,
    ballot: int,
    records: Sequence[Record],
    decided: int = 0,
    *,
    prev: int = 0,
    stop: int | None = None,
) -> bool:
    """The coordinator of `ballot`, whose log is `records`, sends records prev + 1 .. stop."""
    source = log_of(*records)
    piece = source.after(prev, stop)
    return acceptor.append(ballot, prev, source.chain(prev), piece, source.last, decided)


def content(acceptor: Acceptor) -> list[Record]:
    return list(acceptor.log.after(0))


# -------------------------------------------------------------- promises


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=20))
def test_a_promise_is_never_gone_back_on(asked: list[tuple[bool, int]]) -> None:
    """Whatever is asked in whatever order: nothing below the promise is granted or taken."""
    acceptor, highest = Acceptor(), 0
    for prepares, ballot in asked:
        said = acceptor.prepare(ballot) if prepares else give(acceptor, ballot, of_rack(0, ballot))
        assert said == (ballot >= highest)
        highest = max(highest, ballot)
        assert acceptor.promised == highest
        assert acceptor.accepted <= acceptor.promised


def test_an_append_below_the_promise_is_refused_and_changes_nothing() -> None:
    acceptor = Acceptor()
    give(acceptor, FIRST, of_rack(0, 1), 1)
    acceptor.prepare(THIRD)
    before = acceptor.acceptor_state()
    assert not give(acceptor, SECOND_, of_rack(0, 3), 3)
    assert acceptor.acceptor_state() == before
    assert acceptor.acceptor_state().promised == THIRD


def test_append_that_does_not_fit_is_refused_and_its_ballot_promised() -> None:
    """It may follow this coordinator; its ballot says from where on it needs the log."""
    acceptor = Acceptor()
    give(acceptor, FIRST, of_rack(0, 1), 1)
    assert give(acceptor, SECOND_, of_rack(1, 3), 4, prev=2)
    acceptor_state = acceptor.acceptor_state()
    assert (acceptor_state.promised, acceptor_state.accepted) == (SECOND_, FIRST)
    assert (acceptor_state.last, acceptor_state.decided) == (2, 1)
    assert content(acceptor) == of_rack(0, 1)


# -------------------------------------------------------------- whole logs


def test_first_whole_append_of_a_ballot_replaces_a_longer_old_tail() -> None:
    """Else a later take-over could adopt it with the number of a ballot that never had it."""
    acceptor = Acceptor()
    give(acceptor, FIRST, of_rack(0, 4), 1)
    newer = [*of_rack(0, 1), Ballot(SECOND_)]
    give(acceptor, SECOND_, newer, 1)
    assert content(acceptor) == newer
    assert acceptor.accepted == SECOND_
    same = Acceptor()
    give(same, FIRST, of_rack(0, 4), 1)
    give(same, SECOND_, of_rack(0, 2), 1, prev=3)
    assert same.log.last == 3, "also where the message holds no record that differs"


def test_an_old_message_of_the_same_ballot_cuts_nothing() -> None:
    """A log only grows within a ballot; what is shorter was overtaken on the way."""
    acceptor = Acceptor()
    give(acceptor, FIRST, of_rack(0, 4), 1)
    assert give(acceptor, FIRST, of_rack(0, 2), 1)
    assert give(acceptor, FIRST, of_rack(0, 1), 1, prev=2)
    assert content(acceptor) == of_rack(0, 4)


def test_records_of_a_newer_ballot_replace_undecided_ones() -> None:
    acceptor = Acceptor()
    give(acceptor, FIRST, of_rack(0, 3), 2)
    newer = [*of_rack(0, 1), commit(2, [offer(1, 9)])]
    assert give(acceptor, SECOND_, newer, 2, prev=1)
    assert content(acceptor) == newer
    assert acceptor.log.appended.versions == [2]


def test_nothing_decided_is_undone_whoever_asks() -> None:
    acceptor = Acceptor()
    give(acceptor, FIRST, of_rack(0, 3), 3)
    before = content(acceptor)
    assert not give(acceptor, SECOND_, of_rack(1, 3))
    assert content(acceptor) == before
    assert (acceptor.accepted, acceptor.log.decided) == (FIRST, 3)


def test_a_whole_log_that_is_shorter_than_what_is_decided_undoes_nothing() -> None:
    """A late message of a ballot from which a later piece has come already."""
    acceptor = Acceptor()
    give(acceptor, FIRST, of_rack(0, 3), 3, stop=3)
    assert (acceptor.log.decided, acceptor.accepted) == (3, 0)
    assert give(acceptor, FIRST, of_rack(0, 1), 1)
    assert (acceptor.log.last, acceptor.log.decided) == (3, 3)
    assert acceptor.accepted == FIRST


# -------------------------------------------------------------- pieces


def test_a_piece_of_a_log_is_taken_only_as_far_as_it_is_decided() -> None:
    acceptor = Acceptor()
    assert give(acceptor, FIRST, of_rack(0, 5), 2, stop=4)
    assert content(acceptor) == of_rack(0, 1)
    assert (acceptor.log.decided, acceptor.accepted) == (2, 0)
    assert give(acceptor, FIRST, of_rack(0, 5), 2, prev=2)
    assert (acceptor.log.last, acceptor.accepted) == (6, FIRST), "the rest makes it whole"


def test_a_piece_does_not_cost_what_was_accepted_in_an_older_ballot() -> None:
    """The quorum that counted it there must still find it here."""
    acceptor = Acceptor()
    give(acceptor, FIRST, of_rack(0, 3), 1)
    give(acceptor, SECOND_, [*of_rack(0, 1), *of_rack(1, 9)[2:]], 1, stop=4)
    assert content(acceptor) == of_rack(0, 3)
    assert (acceptor.accepted, acceptor.promised) == (FIRST, SECOND_)


def test_nothing_counts_as_decided_that_this_message_does_not_show() -> None:
    """An old tail is not decided because a record with its number is."""
    acceptor = Acceptor()
    give(acceptor, FIRST, of_rack(0, 3), 1)
    newer = [*of_rack(0, 1), *of_rack(1, 9)[2:]]
    give(acceptor, SECOND_, newer, 9, prev=1, stop=2)
    assert acceptor.log.decided == 2
    assert content(acceptor) == of_rack(0, 3)


def test_a_piece_behind_what_is_decided_brings_nothing() -> None:
    acceptor = Acceptor()
    give(acceptor, FIRST, of_rack(0, 3), 3)
    give(acceptor, FIRST, of_rack(0, 9), 1, prev=3, stop=7)
    assert (acceptor.log.last, acceptor.log.decided) == (4, 3)


@given(st.data())
def test_a_voter_gets_there_through_loss_repetition_and_disorder(data: st.DataObject) -> None:
    """Any messages of one coordinator in any order, then one whole one: it has the log."""
    acceptor, whole = Acceptor(), of_rack(0, 6)
    for _ in range(data.draw(st.integers(0, 12))):
        last = data.draw(st.integers(1, 7))
        prev = data.draw(st.integers(0, last))
        stop = data.draw(st.integers(prev, last))
        decided_before = acceptor.log.decided
        decided = data.draw(st.integers(0, last))
        give(acceptor, FIRST, whole[:last], decided, prev=prev, stop=stop)
        assert content(acceptor) == whole[: acceptor.log.last], "never anything else"
        assert acceptor.log.decided >= decided_before
    give(acceptor, FIRST, whole, 7)
    assert content(acceptor) == whole
    assert (acceptor.accepted, acceptor.log.decided) == (FIRST, 7)


# -------------------------------------------------------------- what it says


def test_a_candidate_is_shown_what_it_does_not_know() -> None:
    acceptor = Acceptor()
    give(acceptor, FIRST, of_rack(0, 2), 2)
    acceptor_state = acceptor.acceptor_state(1)
    assert (acceptor_state.prev, acceptor_state.chain) == (1, log_of(BEGIN).chain(1))
    assert list(acceptor_state.records) == of_rack(0, 2)[1:]
    assert acceptor.acceptor_state(0).records == tuple(of_rack(0, 2))
    further = acceptor.acceptor_state(9)
    assert (further.prev, further.last, further.records) == (3, 3, ()), "it has not that much"


def test_a_candidate_far_behind_is_shown_a_message_full() -> None:
    log = Log()
    for record in of_rack(0, SENT_AT_ONCE + 5):
        log.append(record)
    log.decide(log.last)
    acceptor_state = Acceptor(log, FIRST, FIRST).acceptor_state(0)
    assert len(acceptor_state.records) == SENT_AT_ONCE
    assert (acceptor_state.prev, acceptor_state.last) == (0, log.last)
    assert acceptor_state.chain != digest(0)
