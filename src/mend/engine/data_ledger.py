"""Rows of data that the log gives out: a sampler for `DataLoader`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from mend.consensus.records import Units
from mend.coordination.events import Event, UnitsAsked
from mend.engine.digest import bytes_of
from mend.engine.fragment_state import Request, Wait
from mend.engine.trainer_rounds import TrainerRounds
from mend.errors import GaveUp, UsageError, require
from mend.types import SECOND

ASK_MIN = 64
"""Least number of units that a rack asks for."""

LOOK_NS = 2 * SECOND


class UnitFeed:
    """The units of data of one rank's rack, in the order in which the log gives them. Training
    thread."""

    def __init__(
        self, trainer: TrainerRounds, post: Callable[[Event], None], now_ns: Callable[[], int]
    ) -> None:
        self.trainer, self._post, self._published = trainer, post, trainer.published
        self._now_ns = now_ns
        self._seen: Units | None = None
        self._first = self.given = 0
        self._spans: tuple[tuple[int, int], ...] = ()
        self._asks_from = 0
        """Position from which on it asks for more: where the newest grant begins."""
        self._asked: tuple[int, bool] = (-1, False)
        self._run = (0, 0, 0)
        """(position, first unit, number of units) of the span that was read last."""

    def here(self, position: int) -> int | None:
        """The unit at this position; None: it is not here yet."""
        units = self._published.units
        if units is not self._seen and units is not None:
            self._read(units)
        empty = position >= self.given
        if position >= self._asks_from and (self.given, empty) != self._asked:
            self._asked = self.given, empty
            self._post(UnitsAsked(self.given, self._size(), empty))
        begin, first, count = self._run
        if begin <= position < begin + count:
            return first + position - begin
        return None if empty else self._find(position)

    def take(self, position: int) -> Generator[Request, Any, int | None]:
        """The unit at this position, once it is here; None: the rack gets no more. Raises GaveUp
        if no quorum is heard for wait_timeout_s, as nobody can give out units then."""
        published, limit_ns = self._published, self.trainer.options.give_up_ns
        heard_ns = self._now_ns()
        while (unit := self.here(position)) is None:
            seen = self._seen
            if published.failure is not None:
                raise published.failure
            if published.finished or (seen is not None and seen.ended):
                return None
            now_ns = self._now_ns()
            heard_ns = now_ns if published.live else heard_ns
            if now_ns - heard_ns > limit_ns:
                raise GaveUp(
                    f"no rows of the data ledger for wait_timeout_s={limit_ns / SECOND:g} s, as no "
                    f"quorum is heard that could give them out ({self.trainer.why()})"
                )
            yield Wait(partial(self._changed, seen), LOOK_NS)
        return unit

    def _changed(self, seen: Units | None) -> bool:
        return self._published.finished or self._published.units is not seen

    def _read(self, units: Units) -> None:
        member = self.trainer.member
        book = next((book for book in units.books if book.member == member), None)
        self._seen = units
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

    `order`: the row numbers of one pass, or of several one after another, such as
    `torch.randperm(len(dataset), generator=g)`: an int64 tensor of shape (N,) or any iterable of
    whole numbers, the same on all ranks of all racks; N is a multiple of the ranks per rack.

    Give it to `mend_init(ledger=)` and to `DataLoader(sampler=)`, and count the rows that each step
    takes on this rank with `Runtime.count_rows`; all ranks of a rack take equally many. A row is
    done when offers of its step are merged into all fragments. Rows of a rack that dies or is
    evicted, and that are not done, are given out again. The sampler ends when all racks have taken
    what they got and nothing is left. Raises UsageError (an order that is empty or of another type;
    used before mend_init).
    """

    def __init__(self, order: Iterable[int] | Tensor) -> None:
        self._order_N = _rows_of(order)
        self.rows = len(self._order_N)
        self.handed = 0
        """Rows that this rank's sampler has given so far."""
        self._feed: UnitFeed | None = None

    @property
    def fact(self) -> tuple[str, str]:
        """What all racks must have in common."""
        digest = hashlib.sha256(bytes_of(self._order_N)).hexdigest()[:16]
        return "data ledger", f"{self.rows} rows in the order {digest}"

    def attach(
        self,
        feed: UnitFeed,
        rank: int,
        ranks: int,
        live: Callable[[Generator[Request, Any, int | None]], int | None],
    ) -> None:
        """Give out the rows of this rank from now on. `live`: drives a generator of the trainer."""
        self._feed, self._rank, self._ranks, self._live = feed, rank, ranks, live
        self.handed = feed.trainer.units

    def __iter__(self) -> Iterator[int]:
        if self._feed is None:
            raise UsageError("the ledger is used before mend_init(ledger=): call that first")
        feed = self._feed
        self.handed = position = feed.trainer.units
        while True:
            unit = feed.here(position)
            if unit is None:
                with feed.trainer.clock.untimed():
                    unit = self._live(feed.take(position))
            if unit is None:
                return
            self.handed = position = position + 1
            yield int(self._order_N[unit * self._ranks + self._rank])

    def check(self, rows: int | None) -> int:
        """The rows of a step, counted by the script. Raises UsageError if it has not counted them,
        or more than the sampler has given."""
        taken = require(self._feed, "a step before mend_init").trainer.units
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
