"""The links of a storm: IP packets between TUN interfaces, each direction of each pair by itself.

`python -I device.py SEED NAME=ADDRESS...`, inside the hub's namespace. Says `ready`, then takes one
JSON line at a time on stdin, and answers `done`: `{"pairs": [[0, 1], ...], "cut": true}`, or pairs
with `rate_bits`, `one_way_ms` and `loss`. A pair is (from, to), by place of the interface.
Ends with its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src" / "mend" / "transport"))
import tun  # the file alone, without the rest of mend

CALM = {"rate_bits": 1_000_000_000, "one_way_ms": 0, "loss": 0.0}
READ_BYTES = 1 << 16


class Device:
    def __init__(self, seed: int, sites: list[str]) -> None:
        named = [site.partition("=") for site in sites]
        self.files = [tun.open_tun(name) for name, _, _ in named]
        self.addresses = {
            bytes(map(int, host.split("."))): place for place, (_, _, host) in enumerate(named)
        }
        self._seed = seed
        places = range(len(sites))
        pairs = [[a, b] for a in places for b in places if a != b]
        self.wires: dict[tuple[int, int], Any] = {}
        """A direction that is cut is not in it."""
        self.obey({"pairs": pairs, **CALM})

    def obey(self, order: dict[str, Any]) -> None:
        for a, b in order["pairs"]:
            self.wires.pop((a, b), None)
            if not order.get("cut"):
                self.wires[a, b] = tun.Wire(
                    rate_bits=order["rate_bits"], one_way_ns=round(order["one_way_ms"] * 1e6),
                    loss=order["loss"], seed=self._seed + 64 * a + b,
                )  # fmt: skip

    def forward(self) -> None:
        text = b""
        while True:
            due = [wire.deadline_ns for wire in self.wires.values() if wire.deadline_ns is not None]
            wait_s = max(0, min(due) - time.monotonic_ns()) / 1e9 if due else None
            ready, _, _ = select.select([0, *self.files], [], [], wait_s)
            if 0 in ready:
                chunk = os.read(0, READ_BYTES)
                if not chunk:
                    return
                *lines, text = (text + chunk).split(b"\n")
                for line in lines:
                    self.obey(json.loads(line))
                    os.write(1, b"done\n")
            for place, file in enumerate(self.files):
                if file in ready:
                    self._take(place, file)
            for wire in self.wires.values():
                for to, packet in wire.pop_arrived(time.monotonic_ns()):
                    with contextlib.suppress(OSError):  # its interface is full: it is lost
                        os.write(to, packet)

    def _take(self, place: int, file: int) -> None:
        for _ in range(tun.READS_MAX):
            try:
                packet = os.read(file, tun.PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            to = self.addresses.get(tun.destination(packet) or b"", -1)
            wire = self.wires.get((place, to))
            if wire is not None:
                wire.take(packet, self.files[to], time.monotonic_ns())


if __name__ == "__main__":
    device = Device(int(sys.argv[1]), sys.argv[2:])
    os.write(1, b"ready\n")
    device.forward()
