"""A worker of a DataLoader lives up to five seconds longer than a killed rack, and held its ports:
the rack that was started again ended with AddressInUse."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from mend.transport.listeners import open_listener

FORKS = """
import asyncio, os, sys, time
from mend.transport.bulk_client import BulkLane
from mend.transport.zmq import ZmqSideband

sideband, lane = sys.argv[1:]

async def main():
    held = ZmqSideband(f"tcp://{sideband}")
    ports = int(lane), int(lane)
    bulk = BulkLane("127.0.0.1", ports, token=bytes(16))
    if not os.fork():
        print("forked", os.getpid(), flush=True)
        time.sleep(60)
        os._exit(0)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "*", "localhost"])
def test_a_forked_process_does_not_hold_the_ports_of_a_killed_one(
    host: str, free_ports: Callable[[int], list[int]]
) -> None:
    ports = free_ports(2)
    argv = [sys.executable, "-c", FORKS, f"{host}:{ports[0]}", str(ports[1])]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        word, child = process.stdout.readline().split()
        assert word == "forked"
        process.kill()
        process.wait()
        try:
            for port in ports:
                open_listener(socket.AF_INET, ("127.0.0.1", port), 1).close()
        finally:
            subprocess.run(["kill", f"-{signal.SIGKILL}", child], check=True)
