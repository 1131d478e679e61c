"""Bytes to peers and back. Owns sockets and the threads that serve them; knows no message, no
policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mend.types import Address, Extent, Peer


class Sideband(Protocol):
    """Control plane: small frames. Delivery is best effort; the protocol repeats what matters."""

    def connect(self, peer: Peer, address: str) -> None:
        """Open (or keep) the outgoing side towards `peer`; `address` is `tcp://host:port`."""

    def send(self, peer: Peer, frame: bytes) -> bool:
        """Queue one frame without ever blocking. False: dropped (no connection, queue full, too
        large)."""

    async def receive(self) -> bytes:
        """The next frame, from anybody. At most `frame_bytes_max` long."""

    def close(self) -> None: ...


class Lane(Protocol):
    """Bulk plane: receiver-driven. One verb serves offers and state copies."""

    def serve(self, key: bytes, view: memoryview) -> None:
        """Offer `view` (bytes, read-only use) under `key` until `drop(key)`."""

    def drop(self, key: bytes) -> None:
        """Stop serving `key`; unknown keys are ignored. Readers in flight end with PayloadGone."""

    async def fetch(
        self,
        holders: Sequence[Address],
        key: bytes,
        checksum: str,
        into: memoryview,
        extent: Extent | None = None,
    ) -> None:
        """Fill `into` with the bytes of `key` from the first holder that has them, resuming at the
        next. `extent`: where `into` lies in them; None: it is all of them.

        `checksum` is the xxh3_128 hex of what fills `into` ("" = the caller verifies the content
        itself). Raises PeerUnreachable, PayloadGone, TransferStalled or ChecksumMismatch when no
        holder is left.
        """

    def close(self) -> None: ...
