"""The network of a machine, of a tree of its own where it matters; findings of plain data."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mend.config import MendConfig
from mend.tools.doctor.local import (
    Card,
    Network,
    Route,
    System,
    limit_of,
    network_of,
    of_network,
    synchronized,
)

ETH0 = Card("eth0", "10.0.0.1", 10_000, 1500, "mlx5_core", True)
ETH1 = Card("eth1", "10.1.0.1", 1_000, 1500, "igb", True)
LO = Card("lo", "127.0.0.1", None, 65536, "", True)
PEER = Route("rack 1", "b", ("10.0.0.2",), "10.0.0.1", "eth0")
OWN = Route("this rack", "10.0.0.1", ("10.0.0.1",), "10.0.0.1", "eth0")
NETWORK = Network(
    cards=(LO, ETH0, ETH1), routes=(PEER,), listens="0.0.0.0", advertised=OWN, files=65536,
    locked=None, buffers=(32 << 20, 32 << 20), container=False, synchronized=True,
)  # fmt: skip


def told(*, gpu: bool = False, **more: Any) -> str:
    """All that is not ok."""
    found = of_network(replace(NETWORK, **more), racks=2, gpu=gpu)
    return "\n".join(f"{each.severity} {each}" for each in found if each.severity != "ok")


def test_a_good_machine_tells_which_card_carries_what() -> None:
    found = of_network(NETWORK, racks=2, gpu=True)
    assert {each.severity for each in found} == {"ok"}
    text = "\n".join(map(str, found))
    assert "b is reached from 10.0.0.1 over eth0 (10000 Mbit/s, MTU 1500, mlx5_core)" in text
    assert "it is reached at 10.0.0.1 (eth0" in text


ROUTES: dict[str, tuple[Route, str]] = {
    "name": (replace(PEER, numbers=(), source=None, card=None), "problem The name 'b' of rack 1"),
    "route": (replace(PEER, source=None, card=None), "problem No network of this machine leads"),
    "card": (replace(PEER, source="10.1.0.1", card="eth1"), "note b is reached over eth1"),
}


@pytest.mark.parametrize("name", ROUTES)
def test_ways_to_others(name: str) -> None:
    route, part = ROUTES[name]
    assert part in told(routes=(route,))


OWN_ADDRESS: dict[str, tuple[dict[str, Any], str]] = {
    "listens at loopback": (
        {"listens": "127.0.0.1", "advertised": None},
        "problem It listens at 127.0.0.1",
    ),
    "unknown name": (
        {"advertised": replace(OWN, host="me", numbers=())},
        "problem The name 'me', under which it tells others",
    ),
    "name in /etc/hosts": (
        {"advertised": replace(OWN, host="me", numbers=("127.0.1.1",))},
        "problem It tells others to reach it at me, which is 127.0.1.1",
    ),
    "behind NAT": (
        {"advertised": replace(OWN, host="me", numbers=("99.1.2.3",))},
        "note It tells others to reach it at 99.1.2.3, which no interface here has",
    ),
    "in a container": (
        {"advertised": replace(OWN, host="me", numbers=("172.17.0.2",)), "container": True},
        "note 172.17.0.2 is inside a container",
    ),
    "two cards": (
        {"advertised": replace(OWN, numbers=("10.1.0.1",))},
        "note It tells others 10.1.0.1 (eth1), and reaches rack 1 over eth0",
    ),
}


@pytest.mark.parametrize("name", OWN_ADDRESS)
def test_the_address_that_others_are_told(name: str) -> None:
    given, part = OWN_ADDRESS[name]
    assert part in told(**given)


def test_on_one_machine_loopback_is_right() -> None:
    peer = replace(PEER, host="127.0.0.1", numbers=("127.0.0.1",), source="127.0.0.1", card="lo")
    assert told(routes=(peer,), listens="127.0.0.1", advertised=replace(OWN, host="me")) == ""


def test_limits_and_clock() -> None:
    assert "note Only 256 files may be open" in told(files=256)
    assert told(files=None) == ""
    assert "note Only 8 MiB may be page-locked" in told(locked=8 << 20, gpu=True)
    assert told(locked=8 << 20) == "", "nothing is locked without a GPU"
    assert "note A TCP socket gets at most 208 KiB" in told(buffers=(208 << 10, 4 << 20))
    assert "note Nothing keeps this machine's time of day" in told(synchronized=False)
    assert told(synchronized=None, buffers=None) == ""


# ------------------------------------------------------------------ reading


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_cards_are_read(tmp_path: Path) -> None:
    io_loop = tmp_path / "sys/bus/pci/drivers/mlx5_core"
    io_loop.mkdir(parents=True)
    for name, text in {"speed": "100000\n", "mtu": "9000\n", "operstate": "up\n"}.items():
        put(tmp_path, f"sys/class/net/eth0/{name}", text)
    (tmp_path / "sys/class/net/eth0/device").mkdir()
    (tmp_path / "sys/class/net/eth0/device/driver").symlink_to(io_loop)
    put(tmp_path, "sys/class/net/eth1/speed", "-1\n")
    system = System(tmp_path)
    assert system.card("eth0", "10.0.0.1") == Card(
        "eth0", "10.0.0.1", 100_000, 9000, "mlx5_core", True
    )
    assert system.card("eth1", None) == Card("eth1", None, None, None, "", False)


def test_the_card_of_an_ipv6_address(tmp_path: Path) -> None:
    line = "fd000000000000000000000000000002 04 40 00 82     eth7\n"
    put(tmp_path, "proc/net/if_inet6", line)
    assert System(tmp_path).v6_card("fd00::2") == "eth7"
    assert System(tmp_path).v6_card("fd00::3") is None
    assert System(tmp_path).v6_card("10.0.0.1") is None


def test_buffers_and_memory(tmp_path: Path) -> None:
    assert System(tmp_path).buffers() is None
    put(tmp_path, "proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456\n")
    put(tmp_path, "proc/sys/net/ipv4/tcp_wmem", "4096\t16384\t4194304\n")
    assert System(tmp_path).buffers() == (6291456, 4194304)
    put(tmp_path, "proc/meminfo", "MemTotal:       1000 kB\nMemAvailable:    900 kB\nHuge: x\n")
    room = System(tmp_path).room()
    assert (room.limit, room.available) == (1_024_000, 921_600)
    put(tmp_path, "sys/fs/cgroup/memory.max", "500000\n")
    room = System(tmp_path).room()
    assert (room.limit, room.available) == (500_000, 500_000), "of the container, which is less"
    put(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
    assert System(tmp_path).room().limit == 1_024_000


def test_this_machine_can_be_read() -> None:
    """Loopback is the same everywhere."""
    config = MendConfig(rack=0, witness_addr="tcp://no.such.name.invalid:1")
    network = network_of(config)
    first, witness = network.routes
    assert (first.what, first.source, first.card) == ("rack 1", "127.0.0.1", "lo")
    assert witness.numbers == ()
    assert network.listens == "127.0.0.1"
    assert network.plain()["routes"][0]["host"] == "127.0.0.1"
    nobody = network_of(MendConfig())
    assert (nobody.listens, nobody.advertised) == ("", None)
    assert synchronized() in (True, False, None)
    assert limit_of(resource.RLIMIT_NOFILE) != 0
