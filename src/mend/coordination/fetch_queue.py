"""The payloads that a rank still has to fetch, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field

from mend.consensus.records import Offer
from mend.coordination.events import Fetch
from mend.types import MS, SECOND, Address, Member

FETCHES_MAX = 4
"""Concurrent pulls; the rest waits, with proposed offers first. Beyond this limit one pull is
allowed from each rack that has none in flight: racks that all pulled the same four offers would
leave the links of the others idle."""

SENDERS_MAX = 32
"""Limit of all concurrent pulls; the lane makes no more at once."""

RETRY_NS_MIN, RETRY_NS_MAX = 100 * MS, 2 * SECOND

Key = tuple[Member, int, int]
"""(member, fragment, seq)"""


@dataclass
class Pull:
    """One offer: its header, whether its bytes are here or being pulled, and when to retry."""

    offer: Offer
    here: bool = False
    flying: bool = False
    retry_ns: int = 0
    wait_ns: int = RETRY_NS_MIN

    @property
    def idle(self) -> bool:
        return not self.here and not self.flying


@dataclass
class FetchQueue:
    """The offers of all racks. Own offers need no pull."""

    _pulls: dict[Key, Pull] = field(default_factory=dict)

    def want(self, key: Key, offer: Offer, mine: bool) -> bool:
        """Returns whether the offer is new here."""
        if (known := self._pulls.get(key)) is not None:
            known.offer = offer
            return False
        self._pulls[key] = Pull(offer, here=mine)
        return True

    def end_pull(self, key: Key, error: str, now_ns: int) -> bool:
        """Record the end of a pull. Returns False if the offer is no longer wanted."""
        pull = self._pulls.get(key)
        if pull is None:
            return False
        pull.flying, pull.here = False, not error
        if error:
            pull.retry_ns = now_ns + pull.wait_ns
            pull.wait_ns = min(2 * pull.wait_ns, RETRY_NS_MAX)
        return True

    def start(
        self, now_ns: int, named: Set[Key], me: int, holders: Callable[[int], tuple[Address, ...]]
    ) -> list[Fetch]:
        """The fetches to start: proposed offers first, then by base version, then by
        rack, cyclically from the rack after this one (`me`), so that racks do not all begin with
        the same one."""
        flying = [key[0].rack for key, pull in self._pulls.items() if pull.flying]
        ready = [key for key, pull in self._pulls.items() if pull.idle and now_ns >= pull.retry_ns]
        fetches = []
        for key in sorted(
            ready,
            key=lambda key: (key not in named, self._pulls[key].offer.base, key[0].rack < me, key),
        ):
            pull, rack = self._pulls[key], key[0].rack
            pull.retry_ns = 0  # a past deadline must not wake the process again
            if len(flying) < (FETCHES_MAX if rack in flying else SENDERS_MAX):
                pull.flying = True
                flying.append(rack)
                fetches.append(Fetch(pull.offer, holders(rack)))
        return fetches

    def due(self, now_ns: int) -> bool:
        """Whether a pull is ready to start."""
        pulls = self._pulls.values()
        return any(pull.idle and now_ns >= pull.retry_ns for pull in pulls)

    def here(self, key: Key) -> bool:
        return key in self._pulls and self._pulls[key].here

    def flying(self, key: Key) -> bool:
        return key in self._pulls and self._pulls[key].flying

    def wanted(self) -> list[Key]:
        return list(self._pulls)

    def waiting(self) -> list[Key]:
        """Offers whose pull has not begun or has failed."""
        return [key for key, pull in self._pulls.items() if pull.idle]

    def held(self) -> list[Key]:
        return [key for key, pull in self._pulls.items() if pull.here]

    def sources(self, fragment: int, base: int) -> set[Member]:
        """Whose offers of this fragment against version `base` are here, or wanted."""
        return {
            key[0]
            for key, pull in self._pulls.items()
            if key[1] == fragment and pull.offer.base == base
        }

    def forget(self, key: Key) -> bool:
        """Forget an offer. Returns whether there are bytes to free now; those of a running pull are
        freed when it ends."""
        pull = self._pulls.pop(key, None)
        return pull is not None and not pull.flying

    def dues_ns(self) -> list[int]:
        return [pull.retry_ns for pull in self._pulls.values() if pull.idle and pull.retry_ns]
