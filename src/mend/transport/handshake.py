"""Measures the time of a TCP handshake. Opens one socket at a time and sends no data.

Run as a file (`python -I handshake.py HOST TIMES`), so that nothing else of mend is imported and it
may start inside a network namespace. No listener is needed: a refusal takes one round trip, too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time

CLOSED_PORT = 9
TIMEOUT_S = 25.0
"""Longer than any round trip that `--link` takes, and a handshake that is repeated after a loss."""


def handshake_ms(host: str, port: int = CLOSED_PORT) -> float:
    """Milliseconds until `host` has answered, by accepting or by refusing.

    Raises OSError when it does not answer at all.
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
