"""Measures the time of a TCP handshake. Opens one socket at a time and sends no data.

It runs as a script (`python -I handshake.py HOST TIMES`) that imports nothing else of mend, so it
can start in a network namespace. No listener is needed, because a refusal also takes one round
trip.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time

CLOSED_PORT = 9
TIMEOUT_S = 25.0
"""Longer than any round trip that `--link` accepts, and than a handshake repeated after a loss."""


def handshake_ms(host: str, port: int = CLOSED_PORT) -> float:
    """Milliseconds until `host` accepts or refuses the connection.

    Raises OSError if it does neither.
    """
    with socket.socket() as asking:
        asking.settimeout(TIMEOUT_S)
        begun = time.perf_counter()
        with contextlib.suppress(ConnectionRefusedError):
            asking.connect((host, port))
        return 1000 * (time.perf_counter() - begun)


if __name__ == "__main__":
    for _ in range(int(sys.argv[2])):
        os.write(sys.stdout.fileno(), f"{handshake_ms(sys.argv[1]):.3f}\n".encode())
