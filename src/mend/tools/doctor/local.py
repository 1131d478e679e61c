"""The network of this machine as a job would use it: cards, routes, names, limits, clock. Reads
sysfs, procfs and the resolver; sends nothing to any rack."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import resource
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mend.config.settings import MendConfig
from mend.engine.io.port_holders import find_holder
from mend.hardware.cpu_affinity import read_short
from mend.tools.doctor.estimate import Room
from mend.tools.doctor.terms import Finding, ok, problem, remark
from mend.transport import probe

FILES_BASE, FILES_PER_RACK = 256, 16
"""Descriptors of one rank: its lane's connections, and sockets by rack; and torch's own."""

TIME_ERROR = 5
"""Answer of adjtimex while the clock is not synchronized."""

MARKS_OF_A_CONTAINER = (".dockerenv", "run/.containerenv")
BRIDGE = ipaddress.ip_network("172.16.0.0/12")
"""Default range of the addresses of container bridges."""

SMALL_BUFFER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Card:
    """A network interface. speed_mbit: None where it is virtual, or down."""

    name: str
    address: str | None
    speed_mbit: int | None
    mtu: int | None
    driver: str
    up: bool


@dataclass(frozen=True, slots=True)
class Route:
    """The way to an address that the settings name."""

    what: str
    host: str
    numbers: tuple[str, ...]
    source: str | None
    card: str | None


@dataclass(frozen=True, slots=True)
class Network:
    """The network of this machine, as plain data."""

    cards: tuple[Card, ...]
    routes: tuple[Route, ...]
    listens: str
    advertised: Route | None
    """None: nothing says it, or this rack listens at loopback by default."""
    files: int | None
    locked: int | None
    buffers: tuple[int, int] | None
    container: bool
    synchronized: bool | None

    def plain(self) -> dict[str, Any]:
        return asdict(self)


class System:
    """Reads the files in which Linux describes the machine; tests have trees of their own."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def text(self, path: str) -> str:
        """A short file, stripped; empty: there is none, or it has no answer."""
        return read_short(self._root / path)

    def has(self, path: str) -> bool:
        return (self._root / path).exists()

    def card(self, name: str, address: str | None) -> Card:
        folder = f"sys/class/net/{name}"
        speed, mtu = self._whole(f"{folder}/speed"), self._whole(f"{folder}/mtu")
        driver = ""
        with contextlib.suppress(OSError):
            driver = (self._root / folder / "device/driver").resolve(strict=True).name
        up = self.text(f"{folder}/operstate") in ("up", "unknown")
        return Card(name, address, speed if speed and speed > 0 else None, mtu, driver, up)

    def v6_card(self, number: str) -> str | None:
        """The interface that has this IPv6 address."""
        with contextlib.suppress(ValueError):
            wanted = ipaddress.IPv6Address(number).packed.hex()
            for line in self.text("proc/net/if_inet6").splitlines():
                parts = line.split()
                if len(parts) == 6 and parts[0] == wanted:
                    return parts[5]
        return None

    def buffers(self) -> tuple[int, int] | None:
        """Return the most that autotuning gives one TCP socket: (receive, send) bytes."""
        found = [self.text(f"proc/sys/net/ipv4/tcp_{way}mem").split() for way in ("r", "w")]
        if all(len(each) == 3 and each[2].isdigit() for each in found):
            return int(found[0][2]), int(found[1][2])
        return None

    def room(self) -> Room:
        """Memory of the machine or of this process's control group, whichever is less."""
        values = {}
        for line in self.text("proc/meminfo").splitlines():
            name, _, rest = line.partition(":")
            if rest.split() and rest.split()[0].isdigit():
                values[name] = int(rest.split()[0]) << 10
        group = self.text("sys/fs/cgroup/memory.max")
        group = group or self.text("sys/fs/cgroup/memory/memory.limit_in_bytes")
        limits = [values.get("MemTotal"), int(group) if group.isdigit() else None]
        limit = min((each for each in limits if each is not None), default=None)
        available = values.get("MemAvailable")
        if available is not None and limit is not None:
            available = min(available, limit)
        return Room(available, limit, limit_of(resource.RLIMIT_MEMLOCK))

    def holder(self, port: int) -> str:
        """Name the process that listens on a TCP port: `process 77 (python train.py)`. Empty:
        nobody does, or this user may not look at it."""
        found = find_holder(port, self._root)
        return found.who if found else ""

    def _whole(self, path: str) -> int | None:
        text = self.text(path)
        return int(text) if text.removeprefix("-").isdigit() else None


def limit_of(which: int) -> int | None:
    """The soft limit of this process. None: there is none."""
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def synchronized() -> bool | None:
    """Return whether something (NTP, PTP) keeps the time of day. None: the system does not say."""
    room = ctypes.create_string_buffer(512)  # a struct timex; modes = 0 only asks
    struct.pack_into("I", room, 0, 0)
    try:
        state = int(ctypes.CDLL(None, use_errno=True).adjtimex(room))
    except (OSError, AttributeError):
        return None
    return state != TIME_ERROR if state >= 0 else None


# ------------------------------------------------------------------ reading


def network_of(config: MendConfig) -> Network:
    """Looks up every host that the settings name, and the way there; behind a SOCKS5 proxy, which
    knows the names and the ways of the others, only that of the proxy."""
    system = System()
    cards = tuple(system.card(name, number) for name, number in probe.cards().items())
    by_number = {card.address: card.name for card in cards if card.address is not None}

    def route(what: str, host: str) -> Route:
        numbers = probe.numbers_of(host)
        source = probe.source_to(numbers[0]) if numbers else None
        card = by_number.get(source or "") or (system.v6_card(source) if source else None)
        return Route(what, host, numbers, source, card)

    wanted = {
        f"rack {rack}": address
        for rack, address in config.peer_addresses.items()
        if rack != config.rack
    }
    if config.witness_addr:
        wanted["witness"] = config.witness_addr
    if config.socks_proxy:
        wanted = {"proxy": config.socks_proxy}
    routes = tuple(route(what, probe.host_and_port(at)[0]) for what, at in wanted.items())
    listens = probe.host_and_port(config.bind_address)[0] if config.rack is not None else ""
    tells = config.advertise_host or (listens if listens not in ("0.0.0.0", "::") else "")
    return Network(
        cards=cards,
        routes=routes,
        listens=listens,
        advertised=route("this rack", tells) if tells else None,
        files=limit_of(resource.RLIMIT_NOFILE),
        locked=limit_of(resource.RLIMIT_MEMLOCK),
        buffers=system.buffers(),
        container=any(system.has(mark) for mark in MARKS_OF_A_CONTAINER),
        synchronized=synchronized(),
    )


# ------------------------------------------------------------------ findings


def of_network(network: Network, *, racks: int, gpu: bool) -> list[Finding]:
    """Pure."""
    findings = list(_of_routes(network))
    if any(not _loops(route) for route in network.routes if route.numbers):
        findings += _of_own_address(network)
    findings += _of_limits(network, racks, gpu=gpu)
    return findings


def _loops(route: Route) -> bool:
    return any(ipaddress.ip_address(number).is_loopback for number in route.numbers)


def _of_routes(network: Network) -> Iterator[Finding]:
    cards = {card.name: card for card in network.cards}
    for route in network.routes:
        if not route.numbers:
            yield problem(
                route.what,
                f"The name {route.host!r} of {route.what} is unknown here.",
                "Correct MEND_SIDEBAND_PEERS, MEND_WITNESS_ADDR or MEND_SOCKS_PROXY, enter the "
                "name in DNS or /etc/hosts, or use the number.",
            )
        elif route.source is None:
            found = f"No network of this machine leads to {route.host} ({route.numbers[0]})."
            change = "Check the address, the routes (`ip route`), and that the interface is up."
            yield problem(route.what, found, change)
        else:
            card = cards.get(route.card or "")
            text = f"{route.host} is reached from {route.source} over {_named(card)}"
            yield ok(route.what, text)
            yield from _of_card(route, card, cards)


def _of_card(route: Route, card: Card | None, cards: Mapping[str, Card]) -> Iterator[Finding]:
    if card is None or card.speed_mbit is None:
        return
    others = (other for other in cards.values() if other.up and other.address)
    better = max(others, key=lambda other: other.speed_mbit or 0)
    if (better.speed_mbit or 0) > card.speed_mbit:
        yield remark(
            route.what,
            f"{route.host} is reached over {card.name} ({card.speed_mbit} Mbit/s), and "
            f"{better.name} has {better.speed_mbit} Mbit/s.",
            f"If both lead there, name the address of {better.name} in MEND_SIDEBAND_PEERS "
            "and MEND_ADVERTISE_HOST.",
        )


def _named(card: Card | None) -> str:
    if card is None:
        return "a card that is not known"
    if card.name == "lo":
        return "lo"
    parts = [f"{card.speed_mbit} Mbit/s" if card.speed_mbit else "speed unknown"]
    parts += [f"MTU {card.mtu}"] if card.mtu else []
    parts += [card.driver] if card.driver else []
    return f"{card.name} ({', '.join(parts)})"


def _of_own_address(network: Network) -> Iterator[Finding]:
    """Judge this rack's own address in a job that spans machines."""
    own = network.advertised
    if network.listens in ("localhost", "::1") or network.listens.startswith("127."):
        yield problem(
            "this rack",
            f"It listens at {network.listens}, where no other machine reaches it.",
            "Set MEND_SIDEBAND_ADDR=tcp://0.0.0.0:PORT and MEND_ADVERTISE_HOST, or this machine's "
            "own address in MEND_SIDEBAND_PEERS.",
        )
    if own is None:
        return
    elsewhere = [route for route in network.routes if route.numbers and not _loops(route)]
    if not own.numbers:
        found = f"The name {own.host!r}, under which it tells others to reach it, is unknown here."
        change = "Set MEND_ADVERTISE_HOST to a name or number that the other racks know."
        yield problem("this rack", found, change)
    elif _loops(own) and own.host != network.listens:
        yield problem(
            "this rack",
            f"It tells others to reach it at {own.host}, which is {own.numbers[0]}: themselves.",
            "Set MEND_ADVERTISE_HOST to the number; many systems have their own name as 127.0.1.1 "
            "in /etc/hosts.",
        )
    elif not _loops(own):
        yield from _of_advertised(network, own, elsewhere[0])


def _of_advertised(network: Network, own: Route, peer: Route) -> Iterator[Finding]:
    mine = {card.address for card in network.cards} | {own.source}
    number = ipaddress.ip_address(own.numbers[0])
    holder = next((c for c in network.cards if c.address == own.numbers[0]), None)
    if network.container and number in BRIDGE:
        yield remark(
            "this rack",
            f"{number} is inside a container; other machines may not reach it.",
            "Use the host's network (--network host, hostNetwork: true), or publish the ports and "
            "set MEND_ADVERTISE_HOST to the host's address.",
        )
    elif own.numbers[0] not in mine:
        found = f"It tells others to reach it at {number}, which no interface here has."
        change = "This is right if NAT forwards these ports; otherwise correct MEND_ADVERTISE_HOST."
        yield remark("this rack", found, change)
    elif holder is not None and peer.card is not None and holder.name != peer.card:
        yield remark(
            "this rack",
            f"It tells others {number} ({holder.name}), and reaches {peer.what} over {peer.card}.",
            f"To use one card both ways, set MEND_ADVERTISE_HOST to {peer.source}.",
        )
    else:
        yield ok("this rack", f"it is reached at {number} ({_named(holder)})")


def _of_limits(network: Network, racks: int, *, gpu: bool) -> Iterator[Finding]:
    needed = FILES_BASE + FILES_PER_RACK * racks
    if network.files is not None and network.files < needed:
        found = f"Only {network.files} files may be open; a rank needs up to {needed}."
        change = f"`ulimit -n {max(4096, needed)}` before torchrun."
        yield remark("limits", found, change)
    else:
        yield ok("limits", f"open files: {network.files or 'no limit'}")
    if gpu and network.locked is not None:
        yield remark(
            "limits",
            f"Only {network.locked >> 20} MiB may be page-locked (ulimit -l).",
            "`ulimit -l unlimited`; in containers --ulimit memlock=-1. Else copies to and from "
            "the GPU may hold training up.",
        )
    if network.buffers is not None and min(network.buffers) < SMALL_BUFFER_BYTES:
        yield remark(
            "limits",
            f"A TCP socket gets at most {network.buffers[0] >> 10} KiB to receive and "
            f"{network.buffers[1] >> 10} KiB to send, too little for long links.",
            "Raise the last number of net.ipv4.tcp_rmem and tcp_wmem (16777216 suits most links).",
        )
    if network.synchronized is False:
        found = "Nothing keeps this machine's time of day."
        change = "Nothing is decided by it, but logs of the racks are hard to compare: run chrony."
        yield remark("clock", found, change)
    elif network.synchronized:
        yield ok("clock", "the time of day is synchronized")
