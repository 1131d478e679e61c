"""Whom a fetch asks next, and how it ends. No sockets: the simulated network asks by it, too."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple

from mend.errors import (
    ChecksumMismatch,
    PayloadGone,
    PeerUnreachable,
    TransferStalled,
    TransportError,
)
from mend.types import Address

_TELLING = (ChecksumMismatch, TransferStalled, PeerUnreachable, PayloadGone)
"""When holders fail in different ways, the caller gets the first of these."""


class Asked(NamedTuple):
    """How an attempt ended. `verified`: bytes of the fetch that are verified by then."""

    error: TransportError | None
    verified: int = 0
    culprit: Address | None = None
    """The holder whose bytes do not have the checksum of the whole: it is not asked again."""


Ends = dict[Address, TransportError]
"""How each holder failed; empty when the payload is in."""


def ask_around(holders: Sequence[Address], verified: int = 0) -> Generator[Address, Asked, Ends]:
    """Yields the holder to ask next, and is sent how that ended. Holders are asked in turn, again
    and again while a turn brings verified bytes."""
    left, ends, going_on = list(dict.fromkeys(holders)), Ends(), True
    while left and going_on:
        before, going_on = verified, False
        for holder in tuple(left):
            error, verified, culprit = yield holder
            if error is None:
                return {}
            if culprit is not None:  # perhaps one that has said "gone" after its first chunks
                ends[culprit] = error
                left = [each for each in left if each != culprit]
                going_on = True  # the others have given nothing wrong
                continue
            if isinstance(error, ChecksumMismatch) and not isinstance(
                ends.get(holder), ChecksumMismatch
            ):
                # It may have dropped the payload and used the buffer again while a chunk was on
                # its way: ask once more, it will then say "gone".
                going_on = True
            elif isinstance(error, (PayloadGone, ChecksumMismatch)):
                left = [each for each in left if each != holder]
            ends[holder] = error
        going_on = going_on or verified > before
    return ends


def most_telling(ends: Mapping[Address, TransportError], key: bytes) -> TransportError:
    """One error of the most telling kind, naming how each holder ended."""
    kind = next(kind for kind in _TELLING if any(isinstance(e, kind) for e in ends.values()))
    reasons = "; ".join(str(error) for error in ends.values())
    return kind(f"key {key.hex()}: {len(ends)} holder(s) failed: {reasons}")


def no_holder(key: bytes) -> PeerUnreachable:
    return PeerUnreachable(f"key {key.hex()}: no holder is known. Wait for an announcement.")
