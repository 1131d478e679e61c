"""The user-space device of `--link`: forwards IP packets with delay and loss.

It runs as a script (`python -I tun.py ...`) that imports nothing else of mend, so it starts in a
few milliseconds. It forwards a packet in about 10 us. The interfaces end with the process.
"""

from __future__ import annotations

import fcntl
import hashlib
import heapq
import os
import select
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000

PACKET_BYTES_MAX = 65_535
READS_MAX = 64
"""Limit of the packets that are read from one interface before due packets are forwarded."""

QUEUE_NS_MAX = 100_000_000
"""A packet that would wait longer than this for others to the same interface is dropped."""

BITS = 8_000_000_000
"""Bits per byte times nanoseconds per second."""


class Wire:
    """Decides which packets are lost, and when the others arrive. Deterministic: time is an
    argument, and losses are drawn from the seed and the packet's number.

    The kernel (tbf) limits the rate of each sender before its packets arrive here. Here packets
    from several senders to one receiver also share the receiver's rate. Packets to one receiver
    keep their order.
    """

    def __init__(self, *, rate_bits: int, one_way_ns: int, loss: float, seed: int) -> None:
        self._rate_bits, self._one_way_ns, self._seed = rate_bits, one_way_ns, seed
        self._lost_below = round(loss * 2**64)
        self._free_ns: dict[int, int] = {}
        self._heap: list[tuple[int, int, int, bytes]] = []
        self.taken = self.lost = self.dropped = 0
        """Counts of packets: received, lost on purpose, dropped at a full queue."""

    def take(self, packet: bytes, to: int, now_ns: int) -> None:
        """Take a packet for interface `to`."""
        self.taken += 1
        if self._lost_below and self._draw(self.taken) < self._lost_below:
            self.lost += 1
            return
        start_ns = max(now_ns, self._free_ns.get(to, 0))
        if start_ns - now_ns > QUEUE_NS_MAX:
            self.dropped += 1
            return
        self._free_ns[to] = start_ns + len(packet) * BITS // self._rate_bits
        heapq.heappush(self._heap, (start_ns + self._one_way_ns, self.taken, to, packet))

    def _draw(self, number: int) -> int:
        """64 pseudo-random bits of a seed and a number."""
        named = struct.pack("!QQ", self._seed, number)
        return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "big")

    def pop_arrived(self, now_ns: int) -> list[tuple[int, bytes]]:
        """Remove and return the packets that have arrived: (interface, packet), in order."""
        packets = []
        while self._heap and self._heap[0][0] <= now_ns:
            _, _, to, packet = heapq.heappop(self._heap)
            packets.append((to, packet))
        return packets

    @property
    def deadline_ns(self) -> int | None:
        """When the next packet arrives. None: no packet is in flight."""
        return self._heap[0][0] if self._heap else None


def destination(packet: bytes) -> bytes | None:
    """The destination of an IPv4 packet as 4 bytes. None: it is not an IPv4 packet."""
    return packet[16:20] if len(packet) >= 20 and packet[0] >> 4 == 4 else None


def open_tun(name: str) -> int:
    """Create a TUN interface in this process's network namespace. It ends with the file."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def forward(tuns: dict[bytes, int], wire: Wire) -> None:
    """Forward packets between the interfaces (by address). Does not return."""
    files = list(tuns.values())
    while True:
        due_ns = wire.deadline_ns
        wait_s = None if due_ns is None else max(0, due_ns - time.monotonic_ns()) / 1e9
        ready, _, _ = select.select(files, [], [], wait_s)
        for tun in ready:
            _take_all(tun, tuns, wire)
        for to, packet in wire.pop_arrived(time.monotonic_ns()):
            try:
                os.write(to, packet)
            except OSError:  # its interface is down or full, where a network drops packets, too
                wire.dropped += 1


def _take_all(tun: int, tuns: dict[bytes, int], wire: Wire) -> None:
    for _ in range(READS_MAX):
        try:
            packet = os.read(tun, PACKET_BYTES_MAX)
        except BlockingIOError:
            return
        to = tuns.get(destination(packet) or b"")
        if to is not None:
            wire.take(packet, to, time.monotonic_ns())


def main(arguments: list[str]) -> None:
    """`RATE_BITS ONE_WAY_NS LOSS SEED NAME=ADDRESS...`. Prints `ready` once the interfaces
    exist."""
    rate_bits, one_way_ns, loss, seed, *sites = arguments
    named = (site.partition("=") for site in sites)
    tuns = {bytes(map(int, host.split("."))): open_tun(name) for name, _, host in named}
    wire = Wire(
        rate_bits=int(rate_bits), one_way_ns=int(one_way_ns), loss=float(loss), seed=int(seed)
    )
    os.write(sys.stdout.fileno(), b"ready\n")
    forward(tuns, wire)


if __name__ == "__main__":
    main(sys.argv[1:])
