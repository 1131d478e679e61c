"""Pulls an offer before it is announced: while its rack still encodes it.

A rank that captures a fragment expects an offer against the same version from each other rack, and
asks for it by a key that names no more than that. What comes is kept until the offer is announced,
and is used only if its checksum is that of the offer. In all other cases the offer is pulled in the
usual way, so a wrong guess costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mend.consensus.records import Offer
from mend.coordination.fetch_queue import FETCHES_MAX
from mend.engine.loop.store import TensorStore
from mend.errors import ChecksumMismatch
from mend.types import Address, Member, Meter, growing_key

GUESSES_MAX = 2
"""Maximum number of such pulls from one rack at once. It is below the number of pulls that the lane
makes from a rack that has not answered quickly (`transport.bulk_client.THIN_MAX`): a rack that is
out of step offers something else, each of these pulls then waits a second in vain, and they must
not keep its announced offers waiting."""


@dataclass(slots=True, eq=False)
class Ahead:
    """One pull of an offer against version `base`. `checksum`: of the offer, once it is announced;
    `tell` then gets the result. `before`: bytes that had come by then."""

    base: int
    payload_B: Tensor
    meter: Meter
    ended: bool = False
    error: Exception | None = None
    checksum: str = ""
    before: int = 0
    tell: Callable[[Ahead, Exception | None], None] | None = None

    def look(self) -> None:
        """Report the result, once the pull has ended and `tell` is set."""
        if not self.ended or self.tell is None:
            return
        error = self.error
        if error is None and self.meter.checksum != self.checksum:
            error = ChecksumMismatch("what came before the offer was announced is another one")
        self.tell(self, error)


class PullsAhead:
    """The early pulls of one rank. Loop thread."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store
        self._pulls: dict[tuple[Member, int], Ahead] = {}
        """By (member, fragment), until their offer is announced."""
        self._guesses: dict[Ahead, Member] = {}
        """The pulls under way whose offer is not announced yet."""

    def begin(self, fragment: int, base: int, racks: Sequence[tuple[Member, Address]]) -> None:
        """Begin to pull an offer against version `base` from each of these racks, unless they are
        more than FETCHES_MAX or the size of an offer is not known beforehand."""
        store, rules = self._store, self._store.rules[fragment]
        size = rules.payload_bytes
        if rules.varies or not size or len(racks) > FETCHES_MAX:
            return
        for member, lane in racks:
            if [*self._guesses.values()].count(member) >= GUESSES_MAX:
                continue
            payload_B = rules.numerics.buffers.empty(size, torch.uint8, locked=False)
            ahead = Ahead(base, payload_B, Meter(size, member.rack))
            self._pulls[member, fragment] = ahead
            self._guesses[ahead] = member
            key = growing_key(member, store.me.rank, fragment, base)
            done = partial(self._ended, (member, fragment), ahead)
            store.host.pull_ahead(lane, key, payload_B.numpy().data, done, ahead.meter)

    def _ended(self, key: tuple[Member, int], ahead: Ahead, error: Exception | None) -> None:
        ahead.ended, ahead.error = True, error
        self._guesses.pop(ahead, None)
        if error is not None and self._pulls.get(key) is ahead:
            del self._pulls[key]
        ahead.look()

    def join(
        self,
        offer: Offer,
        size: int,
        checksum: str,
        tell: Callable[[Ahead, Exception | None], None],
    ) -> bool:
        """Whether a pull for this offer was begun and has not failed; `tell` gets its result."""
        ahead = self._pulls.pop((offer.member, offer.fragment), None)
        if ahead is None or (ahead.base, ahead.meter.size) != (offer.base, size):
            return False
        self._guesses.pop(ahead, None)
        ahead.checksum, ahead.tell = checksum, tell
        ahead.before = ahead.meter.verified
        self._store.pulls.count(ahead.meter)
        ahead.look()
        return True
