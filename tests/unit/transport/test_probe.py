"""Looking at the network without saying anything."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from mend.errors import ConfigError
from mend.transport import probe
from mend.transport.zmq import ZmqSideband
from mend.types import Address
from tests.process.racks import until


def test_addresses_are_taken_apart() -> None:
    assert probe.host_and_port("tcp://a.b:77") == ("a.b", 77)
    assert probe.host_and_port("tcp://[::1]:77") == ("::1", 77)
    for wrong in ("a:1", "tcp://a", "tcp://a:x", "tcp://a:\N{SUPERSCRIPT TWO}"):
        with pytest.raises(ConfigError, match="tcp://host:port"):
            probe.host_and_port(wrong)


def test_names_and_ways() -> None:
    assert probe.numbers_of("127.0.0.1") == ("127.0.0.1",)
    assert probe.numbers_of("no.such.name.invalid") == ()
    assert probe.numbers_of("x" * 300) == ()
    assert probe.source_to("127.0.0.9") == "127.0.0.1"
    assert probe.source_to("no number") is None
    assert probe.cards()["lo"] == "127.0.0.1"


async def test_a_port_where_nobody_listens_refuses(free_port: int) -> None:
    assert (await probe.knock("127.0.0.1", free_port, 5.0)).answer == "refused"
    assert (await probe.knock("no.such.name.invalid", 1, 30.0)).answer == "no such name"


async def test_a_sideband_is_recognized_and_goes_on(free_ports: Callable[[int], list[int]]) -> None:
    (port,) = free_ports(1)
    with closing(ZmqSideband(f"tcp://127.0.0.1:{port}")):
        found = await probe.knock("127.0.0.1", port, 5.0)
    assert found == probe.Knock("open", True)


def test_a_round_trip_is_a_connection(free_port: int) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        took_ns = probe.trip_ns(Address(*listening.getsockname()), 5.0)
    assert took_ns > 0
    assert probe.trip_ns(Address("127.0.0.1", free_port), 5.0) is None
    assert probe.trip_ns(Address("no.such.name.invalid", 1), 5.0) is None


async def test_another_program_is_open_and_does_not_speak_our_way() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        found = await probe.knock("127.0.0.1", listening.getsockname()[1], 5.0)
    assert found == probe.Knock("open", False)


async def test_dropped_packets_are_silence() -> None:
    """A listener whose queue is full drops the first packet, as a firewall does."""
    with closing(socket.socket()) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        where = listening.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(where)
        found = await probe.knock("127.0.0.1", where[1], 0.3)
        for each in waiting:
            each.close()
    assert found.answer == "silent"
    assert "0.3 s" in found.detail


async def test_ports_behind_a_proxy_answer_as_they_are(
    free_ports: Callable[[int], list[int]], tmp_path: Path
) -> None:
    there, absent, proxy, no_proxy = (Address("127.0.0.1", port) for port in free_ports(4))
    argv = ["-m", "tests.process.socks_server", *map(str, proxy), str(tmp_path / "log")]
    with subprocess.Popen([sys.executable, *argv]) as serving, ExitStack() as stack:  # noqa: ASYNC220
        stack.callback(serving.kill)
        until(lambda: probe.trip_ns(proxy, 5.0) is not None, "the proxy listens")
        with closing(ZmqSideband(f"tcp://127.0.0.1:{there.port}")):
            assert probe.knock_through(proxy, there, 5.0) == probe.Knock("open", True)
        refused = probe.knock_through(proxy, absent, 5.0)
        assert (refused.answer, refused.speaks) == ("refused", False)
    silent = probe.knock_through(no_proxy, there, 5.0)
    assert silent.answer == "silent"
    assert f"through the proxy at 127.0.0.1:{no_proxy.port}" in silent.detail
