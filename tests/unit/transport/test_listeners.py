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


def test_a_killed_rack_s_ports_are_free_while_a_forked_process_lives_on() -> None:
    command = [sys.executable, "-W", "ignore", "-c", RACK]  # of forks beside threads
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rack:
        assert rack.stdin is not None
        sideband, lane = map(int, rack.stdout.readline().split())
        with (
            closing(socket.create_connection(("127.0.0.1", sideband))) as friend,
            closing(socket.create_connection(("127.0.0.1", lane))),
        ):
            assert friend.recv(1), "libzmq has taken it in, and greets"
            rack.stdin.write(b".")
            rack.stdin.flush()
            assert rack.stdout.readline() == b"forked\n"
            rack.send_signal(signal.SIGKILL)
            rack.wait()
            asyncio.run(open_sideband(sideband))
            BulkLane("127.0.0.1", (lane, lane), token=bytes(16)).close()


def test_a_rack_goes_on_beside_a_forked_process() -> None:
    """What the child closes is its own copy."""
    command = [sys.executable, "-W", "ignore", "-c", RACK]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rack:
        assert rack.stdin is not None
        ports = list(map(int, rack.stdout.readline().split()))
        rack.stdin.write(b".")
        rack.stdin.flush()
        assert rack.stdout.readline() == b"forked\n"
        for port in ports:
            with closing(socket.create_connection(("127.0.0.1", port), 10)) as friend:
                friend.settimeout(10)
                assert port == ports[1] or friend.recv(1), "libzmq still answers"
        rack.kill()
