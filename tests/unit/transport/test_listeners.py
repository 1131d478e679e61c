"""A process that is forked from a rack holds none of its ports.

A worker of a DataLoader lives up to five seconds longer than a killed rack, and held its ports: the
rack that was started again ended with AddressInUse.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from contextlib import closing

from mend.transport.bulk_client import BulkLane
from mend.transport.zmq import ZmqSideband

RACK = """
import asyncio, os, sys, time
from mend.transport.bulk_client import BulkLane
from mend.transport.zmq import ZmqSideband

async def rack():
    sideband = ZmqSideband("tcp://127.0.0.1:*")
    lane = BulkLane("127.0.0.1", None, token=bytes(16))
    print(sideband.address.rpartition(":")[2], lane.address.port, flush=True)
    sys.stdin.buffer.raw.read(1)  # somebody is connected
    if os.fork() == 0:
        print("forked", flush=True)
        sys.stdin.buffer.raw.read(1)  # as a worker of a data loader, until it notices
        os._exit(0)
    time.sleep(600)

asyncio.run(rack())
"""


async def open_sideband(port: int) -> None:
    ZmqSideband(f"tcp://127.0.0.1:{port}").close()


def test_a_forked_process_takes_nothing_from_its_rack_and_keeps_no_port_of_a_killed_one() -> None:
    """What the child closes is its own copy."""
    command = [sys.executable, "-W", "ignore", "-c", RACK]  # of forks beside threads
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rack:
        sideband, lane = map(int, rack.stdout.readline().split())
        with (
            closing(socket.create_connection(("127.0.0.1", sideband))) as friend,
            closing(socket.create_connection(("127.0.0.1", lane))),
        ):
            assert friend.recv(1), "libzmq has taken it in, and greets"
            rack.stdin.write(b".")
            rack.stdin.flush()
            assert rack.stdout.readline() == b"forked\n"
            for port in (sideband, lane):
                with closing(socket.create_connection(("127.0.0.1", port), 10)) as later:
                    assert port == lane or later.recv(1), "libzmq still answers"
            rack.send_signal(signal.SIGKILL)
            rack.wait()
            asyncio.run(open_sideband(sideband))
            BulkLane("127.0.0.1", (lane, lane), token=bytes(16)).close()
