"""Accounts for the units of data: each is given to one member at a time, and is done when its work
is merged.

All functions are pure: every process computes the same books from the records. A unit is done when
every fragment of weights has merged an offer that contains the step that trained it. When a member
loses its seat, its units that are not done become free and are given again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from mend.consensus.records import Grant, MergeMember, Positions, Spans, UnitBook, Units
from mend.errors import ensure, require
from mend.types import Member

VERSIONS_KEPT = 8
"""How far back a lineage may go for its undone units to become free again."""


def all_free(total: int) -> Units:
    """`total` units, none of which was ever given."""
    return Units(total, ((0, total),))


def done_by_epoch(units: Units, epochs: int) -> tuple[int, ...]:
    """Number of units done, per epoch."""
    size = units.total // epochs
    done = [size] * epochs
    spans = [*units.free]
    for book in units.books:
        spans += without(book.spans, first_of(book.spans, book.done - book.first), ordered=False)
    for first, count in spans:
        for epoch in range(first // size, -(-(first + count) // size)):
            begin = epoch * size
            done[epoch] -= min(first + count, begin + size) - max(first, begin)
    return tuple(done)


def seat(units: Units, members: Collection[Member], fragments: int) -> Units:
    """The units after a change of the roster. `fragments`: number of fragments of weights."""
    kept = [b if b.member in members else replace(b, seated=False) for b in units.books]
    known = {book.member for book in kept}
    new = [UnitBook(m, 0, (), (((0, 0),),) * fragments) for m in members if m not in known]
    return _free_undone(units, [*kept, *new])


def merge(units: Units, fragment: int, version: int, members: Iterable[MergeMember]) -> Units:
    """The units after a commit of a fragment of weights. Raises InvariantError if an offer claims
    units that its member did not have."""
    shares = {share.member: share.units for share in members}
    books = []
    for book in units.books:
        positions, share = book.merged[fragment], shares.get(book.member)
        if share is not None:
            fits = positions[-1][1] <= share <= book.given
            ensure(fits, "an offer of units that its member does not have", book=book, units=share)
            positions = (*positions, (version, share))
        positions = _newest(positions, version)
        books.append(_settle(_with(book, fragment, positions)))
    return _free_undone(units, books)


def undo(units: Units, versions: Sequence[int]) -> Units:
    """The units after a lineage that continues from these versions."""
    books = []
    for book in units.books:
        for fragment, positions in enumerate(book.merged):
            left = tuple(each for each in positions if each[0] <= versions[fragment])
            book = _with(book, fragment, left or positions[:1])
        books.append(book)
    return _free_undone(units, books)


def give(units: Units, grant: Grant) -> Units:
    """The units after a grant. Raises InvariantError for a unit that is not free."""
    units = _free_undone(units, units.books, grant.back)
    free, fresh, again = units.free, units.fresh, units.again
    books = {book.member: book for book in units.books}
    for member, spans in grant.shares:
        free = without(free, spans)
        book = books[member]
        books[member] = replace(book, spans=_joined([*book.spans, *spans]))
        for first, count in spans:
            # Against the former grants: spans of one grant come in any order, and never again.
            again += max(0, min(units.fresh, first + count) - first)
            fresh = max(fresh, first + count)
    ended = not (grant.shares or grant.back)
    ordered = tuple(books[member] for member in sorted(books))
    return Units(units.total, free, fresh, again, ended, ordered)


def resume(units: Units, members: Mapping[int, Member]) -> Units:
    """The units of a checkpoint, for the job that resumes it. `members`: by rack, the members that
    have their part of the checkpoint. They keep their open units, whose work is in their
    weights."""
    books = []
    for book in units.books:
        stays = book.seated and book.member.rack in members
        member = members[book.member.rack] if stays else book.member
        merged = tuple(positions[-1:] for positions in book.merged)
        books.append(replace(book, member=member, merged=merged, seated=stays))
    free = _free_undone(units, books)
    return replace(free, books=tuple(map(_settle, (b for b in free.books if b.seated))))


def first_of(free: Spans, count: int) -> Spans:
    """The first `count` units of `free`."""
    taken = []
    for first, here in free:
        if count > 0:
            taken.append((first, min(here, count)))
            count -= here
    return tuple(taken)


def _with(book: UnitBook, fragment: int, positions: Positions) -> UnitBook:
    merged = (*book.merged[:fragment], positions, *book.merged[fragment + 1 :])
    return replace(book, merged=merged)


def _newest(positions: Positions, version: int) -> Positions:
    """The positions that a lineage may still return to."""
    later = sum(at > version - VERSIONS_KEPT for at, _ in positions)
    return positions[-min(len(positions), later + 1) :]


def _settle(book: UnitBook) -> UnitBook:
    """The book without the units that are permanently done."""
    floor = min(positions[0][1] for positions in book.merged)
    settled = first_of(book.spans, floor - book.first)
    return replace(book, first=floor, spans=without(book.spans, settled, ordered=False))


def _free_undone(units: Units, books: Iterable[UnitBook], back: Collection[Member] = ()) -> Units:
    """Free the units that are not done of former members, and of those in `back`. Drops the book of
    a former member that has no units left."""
    kept, freed = [], list[tuple[int, int]]()
    for book in books:
        if (not book.seated or book.member in back) and book.given > book.done:
            done = first_of(book.spans, book.done - book.first)
            freed += without(book.spans, done, ordered=False)
            book = replace(book, spans=done)
        if book.seated or book.spans:
            kept.append(book)
    ordered = tuple(sorted(kept, key=lambda book: book.member))
    free = _joined(sorted([*units.free, *freed]))
    return replace(units, free=free, ended=units.ended and not freed, books=ordered)


def _joined(spans: Iterable[tuple[int, int]]) -> Spans:
    """`spans` with adjacent ones joined."""
    joined = list[tuple[int, int]]()
    for first, count in spans:
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((first, count))
    return tuple(joined)


def without(spans: Spans, gone: Spans, *, ordered: bool = True) -> Spans:
    """`spans` without `gone`. Raises InvariantError unless each span of `gone` lies in one of
    `spans`."""
    left = list(spans)
    for first, count in gone:
        fits = (i for i, (a, n) in enumerate(left) if a <= first and first + count <= a + n)
        at = require(next(fits, None), "units that are not there", spans=spans, gone=gone)
        begin, length = left[at]
        parts = [(begin, first - begin), (first + count, begin + length - first - count)]
        left[at : at + 1] = [part for part in parts if part[1] > 0]
    return tuple(sorted(left)) if ordered else tuple(left)
