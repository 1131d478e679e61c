"""A sampler for `DataLoader` whose rows the log gives out, so that each is trained on once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

from mend.consensus.records import EPOCHS_MAX, CheckpointRecord, Record, Snapshot, Units
from mend.coordination.events import Event, UnitsAsked, UnitsChanged
from mend.engine.loop.effects import Handlers
from mend.engine.loop.feature import LoopFeature, LoopParts
from mend.engine.state.fragment_state import Request, Wait
from mend.engine.state.published_state import PublishedSlice, PublishedState
from mend.engine.trainer.trainer_end import NOTE_NS
from mend.engine.trainer.trainer_rounds import TrainerRounds
from mend.errors import GaveUp, UsageError
from mend.events.kinds import RowsAwaited, RowsCounted
from mend.status.status import data_rows
from mend.types import SECOND, Member, whole_number

ASK_MIN = 64
"""Minimum number of units that a rack asks for."""

LOOK_NS = 2 * SECOND

ROWS_MAX, SEED_MAX = 1 << 40, (1 << 64) - 1

ORDERS_KEPT = 2
"""Orders of epochs that are kept in memory: a rack may still have rows of the epoch before."""


class DataUnits(PublishedSlice):
    """The units of data, if the job gives them out."""

    units: Units | None = None
    """After the newest record; replaced as a whole."""
    marked: Units | None = None
    """As they were at the newest checkpoint."""

    def __init__(self, published: PublishedState) -> None:
        super().__init__(published)
        self.closed: dict[Member, int] = {}
        """Rack -> the units that it had got when the log said that there are no more. It takes none
        after them, though some may become free again: one of its ranks may have ended already."""

    def count(self, units: Units) -> None:
        with self.changed:
            if units.ended:
                self.closed = {book.member: book.given for book in units.books} | self.closed
            self.units = units  # behind it: who reads new units without the lock finds both
            self.changed.notify_all()

    def decided(self, record: Record) -> None:
        if isinstance(record, CheckpointRecord) and not record.written:
            self.marked = self.units

    def restored(self, snapshot: Snapshot) -> None:
        if snapshot.checkpoint is not None:
            self.marked = snapshot.checkpoint_units


class UnitCounter(LoopFeature):
    """Publishes and notes the units of data."""

    def __init__(self, parts: LoopParts) -> None:
        self._published, self._leader = parts.jobs.published.of(DataUnits), parts.leader
        self._note = parts.store.host.note

    def handlers(self) -> Handlers:
        return {UnitsChanged: self._count}

    def _count(self, effect: UnitsChanged) -> None:
        self._published.count(effect.units)
        if self._leader is not None:
            rows = data_rows(effect.units, self._leader.hello.policy)
            counts = rows.done, rows.open, rows.left, rows.given_again
            self._note(RowsCounted(*counts, rows.of_epoch))


class UnitFeed:
    """The units of data of one rank's rack, in the order in which the log gives them. Training
    thread."""

    def __init__(
        self, trainer: TrainerRounds, post: Callable[[Event], None], now_ns: Callable[[], int]
    ) -> None:
        self.trainer, self._post, self._published = trainer, post, trainer.published
        self._units, self._now_ns = trainer.published.of(DataUnits), now_ns
        self._seen: Units | None = None
        self._first = self.given = 0
        self._spans: tuple[tuple[int, int], ...] = ()
        self._end: int | None = None
        """Position from which on it gets no units; None: the log has not said so."""
        self._asks_from = 0
        """Position from which on it asks for more units: where the newest grant begins."""
        self._asked: tuple[int, bool] = (-1, False)
        self._run = (0, 0, 0)
        """(position, first unit, number of units) of the span that was read last."""

    def here(self, position: int) -> int | None:
        """The unit at this position; None: it has not been given out yet. Asks for more units."""
        units = self._units.units
        if units is not self._seen and units is not None:
            self._read(units)
        if self._closed(position):
            return None
        empty, asks = position >= self.given, self._end is None
        if asks and position >= self._asks_from and (self.given, empty) != self._asked:
            self._asked = self.given, empty
            self._post(UnitsAsked(self.given, self._size(), empty))
        begin, first, count = self._run
        if begin <= position < begin + count:
            return first + position - begin
        return None if empty else self._find(position)

    def take(self, position: int) -> Generator[Request, Any, int | None]:
        """The unit at this position, once it is here; None: the rack gets no more. Raises GaveUp
        if no quorum is heard for wait_timeout_s, as nobody can give out units then; in lockstep, if
        another rack reads no row for as long, as all get theirs by one record."""
        published, limit_ns = self._published, self.trainer.options.wait_timeout_ns
        heard_ns = begun_ns = noted_ns = self._now_ns()
        while (unit := self.here(position)) is None:
            seen = self._seen
            if published.failure is not None:
                raise published.failure
            if published.finished or self._closed(position):
                return None
            now_ns = self._now_ns()
            heard_ns = now_ns if published.orders.live else heard_ns
            if now_ns - heard_ns > limit_ns:
                raise GaveUp(
                    f"no rows of the data ledger for wait_timeout_s={limit_ns / SECOND:g} s, as no "
                    f"quorum is heard that could give them out ({self.trainer.why()})"
                )
            if self.trainer.policy.lockstep and now_ns - begun_ns > limit_ns:
                raise GaveUp(
                    f"no rows of the data ledger within wait_timeout_s={limit_ns / SECOND:g} s in "
                    f"lockstep, where all racks get theirs together ({self.trainer.why()}): let "
                    "the loop of every rack read the ledger, or raise wait_timeout_s"
                )
            if now_ns - noted_ns > NOTE_NS:
                noted_ns = now_ns
                self.trainer.parts.note(RowsAwaited(self.trainer.step, self.trainer.why()))
            yield Wait(partial(self._changed, seen), LOOK_NS)
        return unit

    def _closed(self, position: int) -> bool:
        """Whether the log has said that this rack gets no unit at this position."""
        return self._end is not None and position >= self._end

    @property
    def over(self) -> bool:
        """Whether this rack has left the job."""
        return self._published.finished

    def _changed(self, seen: Units | None) -> bool:
        return self._published.finished or self._units.units is not seen

    def _read(self, units: Units) -> None:
        member = self.trainer.member
        book = next((book for book in units.books if book.member == member), None)
        self._seen, self._end = units, self._units.closed.get(member)
        if book is not None:
            if book.given != self.given:
                self._asks_from = self.given
            self._first, self.given, self._spans = book.first, book.given, book.spans
            self._run = (0, 0, 0)

    def _find(self, position: int) -> int:
        begin = self._first
        for first, count in self._spans:
            if begin <= position < begin + count:
                self._run = begin, first, count
                return first + position - begin
            begin += count
        raise UsageError(
            f"row {position} of this rank is merged already: iterate over the ledger once, and "
            "count the rows of each step with runtime.count_rows"
        )

    def _size(self) -> int:
        """About the units of one period."""
        trainer = self.trainer
        period = trainer.policy.period_steps * trainer.units // max(1, trainer.step)
        return max(ASK_MIN, period)


class DataLedger(Sampler[int]):
    """A sampler that gives each row of a map-style dataset to one rack, through the log.

    `rows`: the number of rows of the dataset; each epoch has them in another order, drawn from
    `seed` and the number of the epoch. Or the row numbers of one pass in their order, an int64
    tensor of shape (N,) or any iterable of whole numbers. The same on all ranks of all racks. The
    number of rows is a multiple of the ranks per rack.

    Give it to `mend_init(ledger=)` and to `DataLoader(sampler=)`, and count the rows that each step
    takes on this rank with `Runtime.count_rows`; all ranks of a rack take equally many. A row is
    done when offers of its step are merged into all fragments. Rows of a rack that dies or is
    evicted, and that are not done, are given out again, in the epoch that the others are in by
    then.

    Each iterator ends with the rows of its epoch that the rack gets. Racks do not wait for each
    other there; at the end of the last epoch the iterator ends when all racks have taken what they
    got and nothing is left. Rows that a former iterator gave and that were not counted come first.
    It has no len(): the log decides how many rows a rack gets. Raises UsageError (no rows, or of
    another type; epochs below 1, above 1000, or of an order that is given; used before mend_init;
    iterated more often than `epochs`).
    """

    def __init__(
        self, rows: int | Iterable[int] | Tensor, *, epochs: int = 1, seed: int = 0
    ) -> None:
        order_N: NDArray[np.int64] | None = None
        if isinstance(rows, Tensor) or not hasattr(rows, "__index__"):
            order_N = _rows_of(rows).numpy()  # reading an element of a tensor takes 3 us
        self._order_N = order_N
        self.rows = _whole("rows", rows if order_N is None else len(order_N), 1, ROWS_MAX)
        self.epochs = _whole("epochs", epochs, 1, EPOCHS_MAX)
        self._seed = _whole("seed", seed, 0, SEED_MAX)
        if order_N is not None and (epochs > 1 or seed):
            raise UsageError(
                "DataLedger(order) with epochs or seed: give it the number of rows, and mend draws "
                "the order of each epoch; or the orders of all passes, one after another"
            )
        self.handed = 0
        """Rows that this rank's sampler has given so far."""
        self._counted: int | None = None
        """Rows of the step that is being made."""
        self._waiting: list[int | None] = []
        """Rows of the step that has ended and is not counted yet."""
        self._feed: UnitFeed | None = None
        self._next: int | None = None
        """Epoch of the next iterator; None: that of the first unit."""
        self._ended = 0
        """Iterators that have ended with their epoch."""

    def __len__(self) -> NoReturn:
        raise TypeError(
            "a DataLedger has no len(), as the log decides how many rows a rack gets: compute a "
            "schedule from the rows of all racks, and see runtime.status().data"
        )

    @property
    def fact(self) -> tuple[str, str]:
        """(key, value) of the plan: all racks must have the same ledger."""
        how = f"{self.epochs} epochs of seed {self._seed}"
        if self._order_N is not None:
            how = f"the order {hashlib.sha256(self._order_N.data).hexdigest()[:16]}"
        return "data ledger", f"{self.rows} rows in {how}"

    def attach(
        self,
        feed: UnitFeed,
        rank: int,
        ranks: int,
        drive: Callable[[Generator[Request, Any, int | None]], int | None],
    ) -> None:
        """Give out the rows of this rank from now on. `drive`: runs a generator of the trainer."""
        self._feed, self._rank, self._ranks, self._drive = feed, rank, ranks, drive
        self._units = self.rows // ranks
        self.handed, self._counted, self._waiting = feed.trainer.units, None, []
        self._next, self._ended = None, 0

    @property
    def epoch(self) -> int:
        """The epoch of the next iterator, from 0; `epochs` when nothing is left. It is above 0 at
        first on a rack that resumes or joins: `for epoch in range(ledger.epoch, epochs)`. Equal on
        all ranks of a rack; it may wait for the log. Raises UsageError before mend_init."""
        if self._next is None:
            unit = self._unit(self._position())
            self._next = self.epochs if unit is None else unit // self._units
        return self._next

    def __iter__(self) -> Iterator[int]:
        feed = self._fed()
        if self._ended >= self.epochs and not feed.over:
            raise UsageError(
                f"the ledger has epochs={self.epochs}, and the loop wants more: give DataLedger as "
                "many as the loop makes"
            )
        epoch = self.epoch
        self.handed = position = self._position()
        while (unit := self._unit(position)) is not None:
            if unit // self._units > epoch:
                break
            self.handed = position = position + 1
            yield self._row(unit)
        self._next, self._ended = min(epoch + 1, self.epochs), self._ended + 1

    def count(self, rows: int) -> None:
        """Count rows of the step that is being made. Several calls add up."""
        self._counted = rows if self._counted is None else self._counted + rows

    def hold(self) -> None:
        """The step has ended and will be counted later: what is counted from now on is the next
        one's."""
        self._waiting, self._counted = [self._counted], None

    def unite(self) -> None:
        """The step that waits is counted as one with the step that is being made."""
        for rows in self._waiting:
            self.count(rows or 0)
        self._waiting = []

    def stepped(self) -> int:
        """The rows of the step that is counted, as the script counted them. Raises UsageError if it
        did not count them, or counted more than the sampler has given."""
        if self._waiting:
            rows = self._waiting.pop()
        else:
            rows, self._counted = self._counted, None
        taken = self._fed().trainer.units
        if rows is None:
            raise UsageError(
                "a step with a data ledger, and without runtime.count_rows: call it before "
                "optimizer.step() with the number of rows of the batch"
            )
        if taken + rows > self.handed:
            raise UsageError(
                f"count_rows: {taken + rows} rows were trained on this rank, and its sampler has "
                f"given {self.handed}: count each row once, and give the ledger to the DataLoader"
            )
        return rows

    def _fed(self) -> UnitFeed:
        if self._feed is None:
            raise UsageError("the ledger is used before mend_init(ledger=): call that first")
        return self._feed

    def _position(self) -> int:
        """The position of the first row that no step has taken, nor the one that is being made."""
        uncounted = sum(rows or 0 for rows in (*self._waiting, self._counted))
        return self._fed().trainer.units + uncounted

    def _unit(self, position: int) -> int | None:
        """The unit at this position; None: the rack gets no more."""
        feed = self._fed()
        unit = feed.here(position)
        if unit is None:
            with feed.trainer.clock.untimed():
                unit = self._drive(feed.take(position))
        return unit

    def _row(self, unit: int) -> int:
        epoch, place = divmod(unit, self._units)
        place = place * self._ranks + self._rank
        order_N = self._order_N
        if order_N is None:
            order_N = shuffled(self.rows, self._seed, epoch)
        return int(order_N[place])


@lru_cache(maxsize=ORDERS_KEPT)
def shuffled(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of an epoch, int64 (rows,), the same on every machine: the rows sorted by numbers
    of SplitMix64 (Steele, Lea, Flood 2014), which has a stream per seed and epoch."""
    stream = _mixed(_mixed(np.array([seed], dtype=np.uint64)) + np.uint64(epoch))
    counter_N = np.arange(1, rows + 1, dtype=np.uint64)
    keys_N = _mixed(stream + counter_N * np.uint64(0x9E3779B97F4A7C15))
    return np.argsort(keys_N, kind="stable")


def _mixed(x_N: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's bijection of 64-bit numbers, uint64 (N,)."""
    x_N = (x_N ^ (x_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_N = (x_N ^ (x_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_N ^ (x_N >> np.uint64(31))


def _whole(name: str, value: object, least: int, most: int) -> int:
    number = whole_number(value)
    if number is None:
        raise UsageError(f"DataLedger({name}={value!r}): give it a whole number")
    if not least <= number <= most:
        raise UsageError(f"DataLedger({name}={number}): give it {least} to {most}")
    return number


def _rows_of(order: Iterable[int] | Tensor) -> Tensor:
    """The row numbers, int64 (N,). Raises UsageError."""
    if not isinstance(order, Tensor):
        values = list(order)
        wrong = next((value for value in values if not hasattr(value, "__index__")), None)
        if wrong is not None:
            raise UsageError(f"DataLedger(order) with {wrong!r}: give it whole row numbers")
        order = torch.tensor(values, dtype=torch.int64, device="cpu")
    whole = order.dtype in (torch.int64, torch.int32)
    if not whole or order.dim() != 1 or not len(order) or int(order.min()) < 0:
        raise UsageError(
            f"DataLedger(order) of {order.dtype}, shape {tuple(order.shape)}: give it the row "
            "numbers, whole numbers from 0 on in one dimension, at least one"
        )
    return order.detach().to("cpu", torch.int64).contiguous()
