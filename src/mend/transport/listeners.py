"""Listening sockets, which end with the process that opened them.

A forked process, such as a worker of a DataLoader, has copies of all sockets. It may live for
seconds after a `kill -9` of the process that trains, and would hold the rack's ports as long: a
rack that is started again at once would find them taken. So a fork closes them.
"""

from __future__ import annotations

import os
import socket
import weakref

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def open_listener(family: int, where: tuple[object, ...], backlog: int) -> socket.socket:
    """A TCP socket that listens at `where`, an address of getaddrinfo; one of all IPv6 addresses
    also at those of IPv4. Raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart finds its port
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
