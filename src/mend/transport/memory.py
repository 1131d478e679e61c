"""Peers in one event loop, for tests. No sockets, no threads, no clock."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import xxhash

from mend.errors import AddressInUse, ChecksumMismatch, PayloadGone, PeerUnreachable, TransportError
from mend.types import Address, Extent, Peer

INBOX_FRAMES_MAX = 4096
CHUNK_BYTES = 64 << 10


class MemoryNetwork:
    """What joins the sidebands and lanes of one test."""

    def __init__(self) -> None:
        self.sidebands: dict[str, MemorySideband] = {}
        self.lanes: dict[Address, MemoryLane] = {}

    def sideband(self, address: str, *, frame_bytes_max: int = 8 << 20) -> MemorySideband:
        """A sideband listening at `address` (any string). Raises AddressInUse."""
        if address in self.sidebands:
            raise AddressInUse(
                f"sideband address={address!r}: taken. Close its owner, or choose another."
            )
        made = self.sidebands[address] = MemorySideband(self, address, frame_bytes_max)
        return made

    def lane(self, address: Address) -> MemoryLane:
        """A lane listening at `address`. Raises AddressInUse."""
        if address in self.lanes:
            raise AddressInUse(
                f"lane address={address}: taken. Close its owner, or choose another."
            )
        made = self.lanes[address] = MemoryLane(self, address)
        return made


class MemorySideband:
    """`Sideband` by direct delivery into the other's bounded inbox."""

    def __init__(self, network: MemoryNetwork, address: str, frame_bytes_max: int) -> None:
        self.address = address
        self.dropped = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self._network = network
        self._frame_bytes_max = frame_bytes_max
        self._peers: dict[Peer, str] = {}
        self._inbox: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._closed = False

    def connect(self, peer: Peer, address: str) -> None:
        """Send to `peer` at `address` from now on."""
        self._peers[peer] = address

    def send(self, peer: Peer, frame: bytes) -> bool:
        """Deliver now. False: unknown peer, too large, nobody there, or its inbox is full."""
        there = self._network.sidebands.get(self._peers.get(peer, ""))
        if self._closed or there is None or len(frame) > self._frame_bytes_max:
            return False
        if len(there._inbox) >= INBOX_FRAMES_MAX:
            return False
        there._inbox.append(frame)
        there._arrived.set()
        self.bytes_sent += len(frame)
        return True

    async def receive(self) -> bytes:
        """The next frame, in order of sending. Raises TransportError once closed."""
        while not self._inbox or self._closed:
            if self._closed:
                raise TransportError("sideband: closed while receiving. Cancel the receiver first.")
            self._arrived.clear()
            await self._arrived.wait()
        frame = self._inbox.popleft()
        self.bytes_received += len(frame)
        return frame

    def close(self) -> None:
        """Free the address. Idempotent."""
        if not self._closed:
            self._closed = True
            self._arrived.set()
            del self._network.sidebands[self.address]


class MemoryLane:
    """`Lane` by copying, a chunk per turn of the loop: drop, close, cancel may come in between."""

    def __init__(self, network: MemoryNetwork, address: Address) -> None:
        self.address = address
        self.bytes_sent = 0
        self.bytes_received = 0
        self._network = network
        self._served: dict[bytes, memoryview] = {}
        self._closed = False

    def serve(self, key: bytes, view: memoryview) -> None:
        """Offer `view` (C-contiguous) under `key`."""
        self._served[key] = view.cast("B").toreadonly()

    def drop(self, key: bytes) -> None:
        """Stop serving `key`."""
        self._served.pop(key, None)

    async def fetch(
        self,
        holders: Sequence[Address],
        key: bytes,
        checksum: str,
        into: memoryview,
        extent: Extent | None = None,
    ) -> None:
        """See `Lane.fetch`; each holder is asked once, going on where the one before ended."""
        flat, done = into.cast("B"), 0
        extent = extent or Extent(0, len(flat))
        ends: list[TransportError] = []
        for holder in holders or [Address("nobody", 0)]:
            try:
                while done < len(flat):
                    await asyncio.sleep(0)
                    done += self._copy_chunk(holder, key, flat, done, extent)
            except TransportError as error:
                ends.append(error)
                continue
            if not checksum or xxhash.xxh3_128_hexdigest(flat) == checksum:
                return
            done = 0
            ends.append(ChecksumMismatch(f"holder {holder}: not the bytes announced. Ask another."))
        for kind in (ChecksumMismatch, PeerUnreachable):
            if any(isinstance(end, kind) for end in ends):
                raise kind("; ".join(map(str, ends)))
        raise PayloadGone("; ".join(map(str, ends)))

    def _copy_chunk(
        self, holder: Address, key: bytes, flat: memoryview, done: int, extent: Extent
    ) -> int:
        """Copy what comes after the first `done` bytes; how many that were."""
        there = self._network.lanes.get(holder)
        if there is None or self._closed:
            raise PeerUnreachable(f"holder {holder}: nobody listens. Check that it runs.")
        view = there._served.get(key)
        if view is None:
            raise PayloadGone(f"holder {holder}: no key {key.hex()}. Ask for a newer one.")
        if len(view) != extent.total:
            raise ChecksumMismatch(f"holder {holder}: {len(view)} bytes, {extent.total} expected.")
        part = view[extent.offset : extent.offset + len(flat)][done : done + CHUNK_BYTES]
        flat[done : done + len(part)] = part
        there.bytes_sent += len(part)
        self.bytes_received += len(part)
        return len(part)

    def close(self) -> None:
        """Free the address. Idempotent."""
        if not self._closed:
            self._closed = True
            self._served.clear()
            del self._network.lanes[self.address]
