"""Which units of data are free, given and done, from the records alone."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from msgspec.structs import replace

from mend.consensus.log import Log, LogState, log_state_of
from mend.consensus.records import CheckpointRecord, Commit, Genesis, Grant, Spans, Units
from mend.consensus.units import VERSIONS_KEPT, all_free, done_by_epoch, first_of, resume
from mend.errors import InvariantError
from mend.types import Member
from tests.unit.coordination.nouns import commit, genesis, lineage, log_of, member, offer, roster

A, B = member(0), member(1)


def begun(total: int = 100, racks: int = 2, fragments: int = 1) -> Genesis:
    return replace(genesis(racks, fragments=fragments), units=all_free(total))


def grant(*shares: tuple[Member, int, int]) -> Grant:
    return Grant(tuple((to, ((first, count),)) for to, first, count in shares))


def merged(version: int, *units: tuple[int, int], fragment: int = 0) -> Commit:
    """(rack, units) of each member."""
    made = commit(version, [offer(rack, version, fragment=fragment) for rack, _ in units])
    members = [replace(m, units=n) for m, (_, n) in zip(made.members, units, strict=True)]
    return replace(made, fragment=fragment, members=tuple(members))


def state(*records: object) -> LogState:
    return log_of(*records).appended


def units_of(*records: object) -> Units:
    found = state(*records).units
    assert found is not None
    return found


def counts(units: Units) -> tuple[int, int, int]:
    return units.done, units.open, sum(count for _, count in units.free)


def test_units_are_open_once_given_and_done_once_merged() -> None:
    first = (begun(), grant((A, 0, 10), (B, 10, 10)))
    assert counts(units_of(*first)) == (0, 20, 80)
    assert counts(units_of(*first, merged(1, (0, 4), (1, 7)))) == (11, 9, 80)


def test_unit_is_done_when_the_last_fragment_has_its_step() -> None:
    records = [begun(fragments=2), grant((A, 0, 10))]
    records += [merged(1, (0, 8))]
    assert units_of(*records).done == 0
    assert units_of(*records, merged(1, (0, 5), fragment=1)).done == 5
    assert units_of(*records, merged(1, (0, 9), fragment=1)).done == 8


def test_commit_of_moments_does_not_make_units_done() -> None:
    first = begun(fragments=2)
    from mend.consensus.records import MomentFragments

    policy = replace(first.policy, moments=(MomentFragments(1, 8),))
    records = [replace(first, policy=policy), grant((A, 0, 10)), merged(1, (0, 8), fragment=1)]
    assert units_of(*records).done == 0
    assert units_of(*records, merged(1, (0, 6))).done == 6


def test_removed_rack_gives_back_what_is_not_done() -> None:
    records = [begun(), grant((A, 0, 10), (B, 10, 10)), merged(1, (0, 4), (1, 3))]
    gone = units_of(*records, roster(1, [0]))
    assert gone.free == ((13, 87),)
    again = units_of(*records, roster(1, [0]), grant((A, 13, 20)))
    assert again.again == 7, "of the 20, these were rack 1's"
    assert counts(again) == (7, 26, 67)


def test_spans_of_one_grant_in_any_order_are_given_for_the_first_time() -> None:
    """In lockstep a rack gets a part of each epoch, and the next rack parts of the same epochs."""
    shares = ((A, ((0, 25), (50, 25))), (B, ((25, 25), (75, 25))))
    assert units_of(begun(), Grant(shares)).again == 0


def test_returned_incarnation_begins_with_an_empty_book() -> None:
    records = [begun(), grant((B, 0, 10)), roster(1, [0, 1], lives={1: 1})]
    books = {book.member: book for book in units_of(*records).books}
    assert books[member(1, 1)].given == 0
    assert units_of(*records).free == ((0, 100),)
    assert B not in books


def test_grant_of_a_unit_that_is_not_free_is_refused() -> None:
    with pytest.raises(InvariantError):
        units_of(begun(), grant((A, 0, 10)), grant((B, 9, 2)))


@pytest.mark.parametrize("units", [11, 3], ids=["more than given", "less than before"])
def test_commit_of_impossible_units_is_refused(units: int) -> None:
    with pytest.raises(InvariantError):
        units_of(begun(), grant((A, 0, 10)), merged(1, (0, 4)), merged(2, (0, units)))


def test_lineage_opens_the_units_of_undone_versions_again() -> None:
    records = [
        begun(), grant((A, 0, 10), (B, 10, 10)), merged(1, (0, 4)), merged(2, (0, 6), (1, 5)),
    ]  # fmt: skip
    assert units_of(*records).done == 11
    undone = units_of(*records, lineage(1 << 20, [0], [1], (1,)))
    assert undone.done == 4
    assert undone.free == ((10, 90),), "rack 1 is dead, and nothing of it is merged any more"


def test_units_of_a_former_rack_become_free_when_a_lineage_undoes_its_last_merge() -> None:
    """Its seat was gone already when the version was lost."""
    records = [begun(racks=3), grant((B, 0, 10)), merged(1, (1, 4)), merged(2, (1, 6))]
    left = [*records, roster(1, [0, 2])]
    assert units_of(*left).free == ((6, 94),)
    assert units_of(*left, lineage(1 << 20, [0], [2], (1,), number=2)).free == ((4, 96),)


def test_units_done_for_good_leave_the_books() -> None:
    records: list[object] = [begun(), grant((A, 0, 50))]
    records += [merged(version, (0, version)) for version in range(1, 41)]
    (book, _) = units_of(*records).books
    assert book.first == 40 - VERSIONS_KEPT
    assert book.done == 40
    assert len(book.merged[0]) == VERSIONS_KEPT + 1


def test_member_that_has_stopped_gives_its_units_back() -> None:
    records = [begun(), grant((A, 0, 10), (B, 10, 10)), merged(1, (0, 4), (1, 10))]
    units = units_of(*records, Grant((), back=(A,)))
    assert units.free == ((4, 6), (20, 80))
    assert not units.ended


def test_empty_grant_ends_the_units_until_some_become_free() -> None:
    records = [begun(20), grant((A, 0, 10), (B, 10, 10)), Grant(())]
    assert units_of(*records).ended
    assert not units_of(*records, roster(1, [0])).ended


def test_snapshot_keeps_units() -> None:
    mark = CheckpointRecord(1, "one", "", (0, 1))
    log = log_of(begun(), grant((A, 0, 10)), mark, grant((B, 10, 10)))
    log.decide(log.last)
    restored = log_state_of(log.snapshot())
    assert restored.units == log.committed.units
    assert restored.checkpoint_units == units_of(begun(), grant((A, 0, 10)))


def test_resumed_job_keeps_open_units_of_racks_that_return() -> None:
    records = [begun(), grant((A, 0, 10), (B, 10, 10)), merged(1, (0, 4), (1, 7))]
    taken = resume(units_of(*records), {0: member(0, 5)})
    assert taken.free == ((17, 83),), "rack 1 has no part of the checkpoint"
    (book,) = taken.books
    assert (book.member, book.first, book.given, book.done) == (member(0, 5), 4, 10, 4)
    assert counts(taken) == (11, 6, 83)


def test_cut_log_forgets_an_undecided_grant() -> None:
    log = Log()
    log.append(begun())
    log.decide(1)
    log.append(grant((A, 0, 10)))
    log.cut(1)
    assert log.appended.units == log.committed.units


def test_random_histories_never_lose_a_unit_and_never_give_one_twice() -> None:
    """Compared with books that are kept unit by unit."""
    for seed in range(30):
        rng = random.Random(seed)
        total, version, number, life = 60, 0, 0, [0, 0]
        log = log_of(begun(total))
        taken: dict[Member, list[int]] = {A: [], B: []}
        at: dict[Member, int] = {A: 0, B: 0}
        done: Counter[int] = Counter()
        for _ in range(60):
            units = log.appended.units
            assert units is not None
            what, rack = rng.randrange(3), rng.randrange(2)
            who = member(rack, life[rack])
            if what == 0 and units.free:
                spans: Spans = first_of(units.free, rng.randint(1, 9))
                log.append(Grant(((who, spans),)))
                taken[who] += [u for first, count in spans for u in range(first, first + count)]
            elif what == 1:
                version += 1
                upto = rng.randint(at[who], len(taken[who]))
                made = commit(version, [offer(rack, version, life=life[rack])])
                share = replace(made.members[0], units=upto)
                log.append(replace(made, members=(share,)))
                done.update(taken[who][at[who] : upto])
                at[who] = upto
            elif rng.random() < 0.3:
                life[rack], number = life[rack] + 1, number + 1
                lives = dict(enumerate(life))
                log.append(roster(number, [0, 1], lives=lives))
                taken[member(rack, life[rack])], at[member(rack, life[rack])] = [], 0
        units = log.appended.units
        assert units.done == sum(done.values()) == len(done)
        free = [u for first, count in units.free for u in range(first, first + count)]
        held = [u for r in range(2) for u in taken[member(r, life[r])][at[member(r, life[r])] :]]
        assert Counter(free) + Counter(held) + done == Counter(range(total))
        by_epoch = tuple(sum(unit // 20 == epoch for unit in done) for epoch in range(3))
        assert done_by_epoch(units, 3) == by_epoch
