"""What test runs share on one machine: process tokens, port ranges, and the processor.

All state is held by the kernel: byte locks of one file, a network namespace, a page of memory. A
process that dies gives everything back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS = 0x8914
IFF_UP = 1

TOKENS_PER_CORE = 3
"""Ranks wait for each other about two thirds of the time."""
POLL_S = 0.02

FIRST_PORT, PORTS, RANGES = 20_000, 500, 20
"""Below the ephemeral range: see `mend.tools.ports`."""

TICK_S = 0.05
TICKS = struct.Struct("qq")
"""Monotonic time of the sentinel's last tick, and its longest delay since `reset`, in ns."""


WORKERS_MIN, WORKERS_MAX = 6, 16
"""Half of them run tests whose processes wait for each other most of the time. Each may need a
range of ports."""


def workers() -> int:
    return min(max(WORKERS_MIN, os.cpu_count() or 1), WORKERS_MAX)


class Locks:
    """Byte locks of one file per user and machine. A fork does not inherit them."""

    def __init__(self, name: str) -> None:
        path = Path(tempfile.gettempdir()) / f"mend-tests-{os.getuid()}-{name}.lock"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def try_take(self, byte: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def give(self, byte: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)


class Tokens:
    """A pool of tokens that all test processes of this machine share. A test takes as many as it
    has live ranks at once. One process collects at a time, so two never wait for each other."""

    def __init__(self, size: int = 0, name: str = "tokens") -> None:
        self.size = size or TOKENS_PER_CORE * max(2, os.cpu_count() or 1)
        self._locks = Locks(name)
        self._queue = self.size

    @contextlib.contextmanager
    def take(self, count: int) -> Iterator[None]:
        count, held = min(count, self.size), list[int]()
        try:
            while not self._locks.try_take(self._queue):
                time.sleep(POLL_S)
            try:
                while len(held) < count:
                    free = (byte for byte in range(self.size) if byte not in held)
                    found = next(filter(self._locks.try_take, free), None)
                    held += [] if found is None else [found]
                    if found is None:
                        time.sleep(POLL_S)
            finally:
                self._locks.give(self._queue)
            yield
        finally:
            for byte in held:
                self._locks.give(byte)


def take_port_range() -> str:
    """A range of ports that no other test process of this machine has while this one lives."""
    locks = Locks("ports")
    for number in range(RANGES):
        if locks.try_take(number):
            first = FIRST_PORT + PORTS * number
            return f"{first}-{first + PORTS - 1}"
    raise RuntimeError(f"{RANGES} test processes hold all port ranges. Wait for them to end.")


def enter_own_network() -> bool:
    """Move the calling thread, and what it starts, to a network with only a loopback interface.
    Returns False where the system does not allow it (Linux as root does)."""
    try:
        unshare = ctypes.CDLL(None, use_errno=True).unshare
    except AttributeError:  # not Linux
        return False
    if unshare(CLONE_NEWNET):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", IFF_UP)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, request)
    return True


class Sentinel:
    """A process that only sleeps and measures by how much the system wakes it too late."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
            self._process = subprocess.Popen(
                [sys.executable, "-IS", __file__, str(file.fileno())],
                stdin=subprocess.PIPE, pass_fds=[file.fileno()],
            )  # fmt: skip
        while not TICKS.unpack_from(self._page)[0] and self._process.poll() is None:
            time.sleep(TICK_S)  # its own start is no delay

    def reset(self) -> None:
        last_ns, _ = TICKS.unpack_from(self._page)
        TICKS.pack_into(self._page, 0, last_ns, 0)

    def delay_ms(self) -> int:
        """The longest delay since `reset`; one that lasts counts up to now."""
        last_ns, longest_ns = TICKS.unpack_from(self._page)
        current_ns = time.monotonic_ns() - last_ns - int(TICK_S * 1e9)
        return max(longest_ns, current_ns) // 1_000_000

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def tick(descriptor: int) -> None:
    """The sentinel's own process; it ends with the one that started it."""
    page, parent = mmap.mmap(descriptor, mmap.PAGESIZE), os.getppid()
    last_ns = time.monotonic_ns()
    while os.getppid() == parent:
        time.sleep(TICK_S)
        now_ns = time.monotonic_ns()
        longest_ns = TICKS.unpack_from(page)[1]
        delay_ns = now_ns - last_ns - int(TICK_S * 1e9)
        TICKS.pack_into(page, 0, now_ns, max(longest_ns, delay_ns))
        last_ns = now_ns


if __name__ == "__main__":
    tick(int(sys.argv[1]))
