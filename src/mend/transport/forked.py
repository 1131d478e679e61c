"""Has a forked process give up the sockets of the rack that it was forked from.

A worker of a data loader outlives a rack that is killed by up to seconds. While it had the sockets,
too, a new life of the rack found its port taken.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet


class Owner(Protocol):
    def disinherit(self) -> None:
        """Close the sockets, in a child that was forked. The threads that use them, and may hold
        any lock, are not here."""


_owners: WeakSet[Owner] = WeakSet()


def watch(owner: Owner) -> None:
    """Have `owner` asked in every child."""
    _owners.add(owner)


def close_all(port: int) -> None:
    """Close every descriptor of a TCP connection, or listening socket, with this local port."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the listing itself; no socket
            sock = socket.socket(fileno=number)
            try:
                inet = sock.family in (socket.AF_INET, socket.AF_INET6)
                ours = inet and sock.type == socket.SOCK_STREAM and sock.getsockname()[1] == port
            except OSError:
                ours = False
            if not ours:
                sock.detach()
            sock.close()


def _disinherit() -> None:
    for owner in list(_owners):
        with suppress(OSError):
            owner.disinherit()
    _owners.clear()


os.register_at_fork(after_in_child=_disinherit)
