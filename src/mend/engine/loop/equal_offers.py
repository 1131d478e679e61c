"""Finds racks that train on the same data: their offers have equal bits."""

from __future__ import annotations

from collections.abc import Sequence

from mend.consensus.records import Offer
from mend.events.kinds import SameData

ROUNDS = 2
"""Rounds with equal offers before the warning. One may be chance: a step on an empty batch."""


class EqualOffers:
    """The equal offers that one rank has seen."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, ...], set[tuple[int, int]]] = {}
        """Racks -> (fragment, number of the first rack's offer)."""
        self._warned = False

    def warning(self, offers: Sequence[Offer]) -> SameData | None:
        """The warning, once, when the same racks have made equal offers in ROUNDS rounds; else
        None. Offers of norm 0 are left out: they are equal whatever the data."""
        if self._warned or len(offers) < 2:
            return None
        alike: dict[tuple[int, bytes], list[Offer]] = {}
        for offer in offers:
            if offer.norm > 0.0 and offer.checksums:
                alike.setdefault((offer.fragment, offer.checksums), []).append(offer)
        for (fragment, _), same in alike.items():
            if len(same) > 1:
                first, *_ = same = sorted(same, key=lambda offer: offer.member)
                racks = tuple(offer.member.rack for offer in same)
                rounds = self._found.setdefault(racks, set())
                rounds.add((fragment, first.seq))
                if len(rounds) >= ROUNDS:
                    self._warned = True
                    return SameData(racks)
        return None
