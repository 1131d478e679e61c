"""Decides which holder a fetch asks next, and how the fetch ends. Pure: the simulated network uses
it, too."""

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
"""If holders fail in different ways, the caller gets the error that comes first here."""


class Asked(NamedTuple):
    """How an attempt ended. `verified`: bytes of the whole fetch that are verified by then."""

    error: TransportError | None
    verified: int = 0
    culprit: Address | None = None
    """The holder to blame for a wrong checksum of the whole payload. It is not asked again."""


Ends = dict[Address, TransportError]
"""How each holder failed; empty if the payload is complete."""


def ask_around(holders: Sequence[Address], verified: int = 0) -> Generator[Address, Asked, Ends]:
    """Yield the holder to ask next, and receive how that ended. Holders are asked in turn, again
    and again while a turn brings verified bytes."""
    left, ends, going_on = list(dict.fromkeys(holders)), Ends(), True
    while left and going_on:
        before, going_on = verified, False
        for holder in tuple(left):
            error, verified, culprit = yield holder
            if error is None:
                return {}
            if culprit is not None:  # perhaps one that answered "gone" after its first chunks
                ends[culprit] = error
                left = [each for each in left if each != culprit]
                going_on = True  # the others have sent no wrong bytes
                continue
            if isinstance(error, ChecksumMismatch) and not isinstance(
                ends.get(holder), ChecksumMismatch
            ):
                # It may have dropped the payload and reused the buffer while a chunk was in
                # flight. Ask it once more; it will then answer "gone".
                going_on = True
            elif isinstance(error, (PayloadGone, ChecksumMismatch)):
                left = [each for each in left if each != holder]
            ends[holder] = error
        going_on = going_on or verified > before
    return ends


def most_telling(ends: Mapping[Address, TransportError], key: bytes) -> TransportError:
    """One error of the most informative kind, whose text says how each holder failed."""
    kind = next(kind for kind in _TELLING if any(isinstance(e, kind) for e in ends.values()))
    reasons = "; ".join(str(error) for error in ends.values())
    return kind(f"key {key.hex()}: {len(ends)} holder(s) failed: {reasons}")


def no_holder(key: bytes) -> PeerUnreachable:
    return PeerUnreachable(f"key {key.hex()}: no holder is known. Wait for an announcement.")
