"""Listening sockets, which end with the process that opened them.

A forked process, such as a worker of a DataLoader, has copies of all sockets. It may outlive a
`kill -9` of the training process by seconds and hold the rack's ports, so that a rack which is
started again at once finds them taken. So every forked process closes its copies.
"""

from __future__ import annotations

import os
import socket
import weakref

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def open_listener(family: int, where: tuple[object, ...], backlog: int) -> socket.socket:
    """A TCP socket that listens at `where`, an address from getaddrinfo. One that listens at all
    IPv6 addresses also accepts IPv4. Raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for a quick restart
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(where)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    _open.add(listener)
    return listener


def _close_in_fork() -> None:
    for listener in list(_open):
        listener.close()
    _open.clear()


os.register_at_fork(after_in_child=_close_in_fork)
