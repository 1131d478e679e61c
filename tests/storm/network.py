"""A network of namespaces for one storm: one per rack and for the witness, all links of which can
be cut, made slow or lossy while the job runs, in each direction. Root on Linux only.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mend.tools.links import remove_leftovers

DEVICE = Path(__file__).with_name("device.py")
NETWORK = "10.215.0."
"""No other network sees the addresses inside the namespaces."""
SLOW: dict[str, Any] = {"rate_bits": 2_000_000, "one_way_ms": 100, "loss": 0.0}
LOSSY: dict[str, Any] = {"rate_bits": 1_000_000_000, "one_way_ms": 5, "loss": 0.2}
CALM: dict[str, Any] = {"rate_bits": 1_000_000_000, "one_way_ms": 0, "loss": 0.0}
CUT: dict[str, Any] = {"cut": True}

_made = itertools.count()


def missing() -> str:
    """Why no links can be made here; empty: they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "no root on Linux"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun"
    return "" if shutil.which("ip") else "no program ip"


class Network:
    """`sites`: the racks, then the witness, if there is one. Gone after `close`."""

    def __init__(self, sites: int, seed: int) -> None:
        remove_leftovers()
        base = f"mend-{os.getpid()}-{next(_made)}"
        self.namespaces = [f"{base}-site{place}" for place in range(sites)]
        self.hosts = [f"{NETWORK}{place + 1}" for place in range(sites)]
        self._hub = f"{base}-hub"
        self._device: subprocess.Popen[str] | None = None
        try:
            self._make(seed)
        except BaseException:
            self.close()
            raise

    def _make(self, seed: int) -> None:
        for name in (self._hub, *self.namespaces):
            _ip("netns", "add", name)
        named = [f"site{place}={host}" for place, host in enumerate(self.hosts)]
        device = [sys.executable, "-I", str(DEVICE), str(seed), *named]
        self._device = subprocess.Popen(
            ["ip", "netns", "exec", self._hub, *device],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answer("ready")
        for place, (name, host) in enumerate(zip(self.namespaces, self.hosts, strict=True)):
            _ip("-n", self._hub, "link", "set", f"site{place}", "netns", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", f"site{place}", "up")
            _ip("-n", name, "addr", "add", f"{host}/24", "dev", f"site{place}")

    def put(self, pairs: Iterable[tuple[int, int]], how: dict[str, Any]) -> None:
        """These directions (from, to) are so from here on."""
        assert self._device is not None
        assert self._device.stdin is not None
        self._device.stdin.write(json.dumps({"pairs": list(pairs), **how}) + "\n")
        self._device.stdin.flush()
        self._answer("done")

    def from_(self, site: int) -> list[tuple[int, int]]:
        return [(site, other) for other in range(len(self.hosts)) if other != site]

    def to(self, site: int) -> list[tuple[int, int]]:
        return [(other, site) for other in range(len(self.hosts)) if other != site]

    def _answer(self, wanted: str) -> None:
        assert self._device is not None
        assert self._device.stdout is not None
        said = self._device.stdout.readline().strip()
        assert said == wanted, f"the network's device says {said!r}, not {wanted!r}"

    def close(self) -> None:
        if self._device is not None:
            self._device.kill()
            self._device.communicate()
        for name in (self._hub, *self.namespaces):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
