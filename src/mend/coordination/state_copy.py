"""Copies of the training state on one rank: those that it serves as a donor, and the one that it
pulls when its rack joins."""

from __future__ import annotations

from dataclasses import dataclass, field

from mend.consensus.log import LogState
from mend.coordination.events import (
    AskedState,
    CopyState,
    Effect,
    FreeState,
    NoState,
    Note,
    StateCopied,
    StateTaken,
)
from mend.coordination.fetch_queue import RETRY_NS_MIN
from mend.coordination.messages import RankCopy, RankOrders, StateCopy
from mend.events.kinds import StateCopyFailed
from mend.types import Member, Peer

TRIES_MAX = 4
"""Failed pulls of one copy after which a joining rack waits for another donor."""


@dataclass
class StateCopies:
    """A pure machine. `wants`: this rank's rack joins and waits for a donor's state."""

    me: Peer
    wants: bool = False
    given: dict[Member, RankCopy] = field(default_factory=dict)
    """As a donor: the copies that are served, by receiving rack."""
    asked: tuple[Member, ...] = ()
    """As a donor: the racks that wait for a copy."""
    found: StateCopy | None = None
    """As a joining rack: the copy that a donor has made for it."""
    pulling: bool = False
    done: bool = False
    tries: int = 0
    """Failed pulls of `found`."""
    retry_ns: int = 0

    def set_wanted(self, on: bool) -> None:
        """Start or stop waiting for a state. Called again with True if its ranks got different
        copies: then all pull once more."""
        self.wants, self.done, self.tries, self.retry_ns = on, False, 0, 0

    def on_taken(self, event: StateTaken) -> None:
        copy = RankCopy(event.to, event.step, event.size, event.digest, event.refused)
        self.given[event.to] = copy

    def read(self, orders: RankOrders, log: LogState) -> list[Effect]:
        """Read orders. A refusal is kept while the receiving rack has its seat, because it is the
        reason why this rack is not asked again."""
        refused = {
            to for to, copy in self.given.items() if copy.refused and log.member(to.rack) == to
        }
        gone = sorted(self.given.keys() - refused - set(orders.asked))
        for to in gone:
            del self.given[to]
        if orders.copy is not None and orders.copy != self.found:
            self.found, self.tries, self.retry_ns = orders.copy, 0, 0
        effects: list[Effect] = [FreeState(to) for to in gone]
        if orders.asked != self.asked:
            self.asked = orders.asked
            effects.append(AskedState(orders.asked))
        return effects

    def pull(self, log: LogState, now_ns: int) -> list[Effect]:
        """Start the pull that is due."""
        copy = self.found
        waits = not self.wants or self.pulling or self.done or now_ns < self.retry_ns
        if copy is None or waits or self.tries >= TRIES_MAX:
            return []
        if copy.refused:
            self.done = True
            own = copy.donor == copy.to
            donor = "" if own else f"rack {copy.donor.rack} cannot give it: "
            return [NoState(donor + copy.refused, copy.step)]
        if log.member(copy.donor.rack) != copy.donor:
            self.tries = TRIES_MAX
            return []
        self.pulling, self.retry_ns, rank = True, 0, self.me.rank
        return [
            CopyState(
                copy.donor,
                copy.step,
                copy.sizes[rank],
                copy.digests[rank],
                log.seats[copy.donor.rack].lanes[rank],
                shared=len(copy.digests) > 1 and len(set(copy.digests)) == 1,
            )
        ]

    def on_copied(self, event: StateCopied, now_ns: int) -> list[Effect]:
        self.pulling = False
        if not event.error:
            self.done = True
            return []
        if self.found is not None and self.found.donor == event.donor:
            self.tries += 1
            self.retry_ns = now_ns + (RETRY_NS_MIN << self.tries)
        return [Note(StateCopyFailed(event.donor.rack, event.step, event.error))]

    def due_ns(self) -> list[int]:
        waits = self.wants and 0 < self.tries < TRIES_MAX and not (self.pulling or self.done)
        return [self.retry_ns] if waits else []
