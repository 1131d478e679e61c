"""A real poor network on one machine, for `--link`. Makes network namespaces, TUN interfaces and
their device; removes them. Touches nothing that it did not make.

One namespace per rack and for the witness, each with one interface. Its rate is the kernel's (tbf);
the other ends are all held by one process (transport/tun.py), which delays and loses packets. Even
`kill -9` leaves no more than empty namespaces, which the next run removes.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from mend.errors import LinkError
from mend.tools.links_check import verify
from mend.tools.links_spec import Link, Net, Site
from mend.tools.processes import Child

__all__ = ["Link", "Net", "Site", "links", "remove_leftovers"]

BURST_MS = 4
"""What tbf may send at once, two packets at least; so its timer fires at most this often."""
QUEUE_MS = 50
"""Longest queue of packets that wait to be sent; a packet that finds more is dropped."""

NETWORK = "10.213.0."
"""Addresses inside the namespaces; no other network sees them. Rack r is r + 1."""
WITNESS_HOST = 254
INTERFACE = "mend0"
DEVICE = Path(__file__).parents[1] / "transport" / "tun.py"
NETNS = Path("/run/netns")
TUN = Path("/dev/net/tun")
START_S = 10.0
SEED = "0"
"""Seed of the losses: the same packets are lost in every run."""

_NAME = re.compile(r"mend-(\d+)-\d+-\w+")
_made = itertools.count()

Say = Callable[[str], None]


@contextmanager
def links(
    link: Link, *, racks: int, witness: bool = True, say: Say | None = None, measure: bool = True
) -> Iterator[Net]:
    """Namespaces for `racks` racks (and the witness), joined by `link`. They are measured before
    they are handed out, and removed after the `with`, whatever happens inside. `measure=False`: the
    caller measures, and needs no iperf3.

    Main thread only: the device dies with the thread that started it. Processes that run inside
    must have ended before. Raises LinkError: not root, a program or the kernel's part is missing,
    the link is not what was asked for, or its device has died by the end.
    """
    _require(measure=measure)
    remove_leftovers()
    base = f"mend-{os.getpid()}-{next(_made)}"
    made = [Site(f"{base}-rack{rack}", f"{NETWORK}{rack + 1}") for rack in range(racks)]
    acceptor = Site(f"{base}-witness", f"{NETWORK}{WITNESS_HOST}") if witness else None
    net = Net(link, tuple(made), acceptor, "")
    with ExitStack() as undo:
        for name in (base + "-hub", *(site.namespace for site in net.sites)):
            undo.callback(_delete, name)
            _ip(["netns", "add", name])
        output: list[str] = []
        device = _device(base + "-hub", net, output)
        undo.callback(_end, device)
        for number, site in enumerate(net.sites):
            _join(site, f"site{number}", base + "-hub", link)
        alone = "not measured: joins nobody" if len(net.sites) < 2 else ""
        measured = alone or (str(verify(net)) if measure else "not measured")
        if say is not None:
            say(f"link={link} {measured}")
        yield replace(net, measured=measured)
        if not device.running():
            device.read()
            raise LinkError(
                f"the link's device died while it was in use: {' / '.join(output[-3:])}"
            )


def _require(*, measure: bool) -> None:
    """Say what is missing before anything is made."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise LinkError(
            "a link needs network namespaces, so root on Linux. Use sudo, or a container with "
            "--cap-add NET_ADMIN --cap-add SYS_ADMIN --device /dev/net/tun; or have delays "
            "simulated inside mend: simulated_merge_delay_ms."
        )
    if not TUN.exists():
        raise LinkError(
            f"{TUN} is missing: modprobe tun, or start the container with --device {TUN}."
        )
    programs = {"ip": "iproute2", "tc": "iproute2"} | ({"iperf3": "iperf3"} if measure else {})
    for program, package in programs.items():
        if shutil.which(program) is None:
            raise LinkError(f"the program {program} is missing: apt install {package}.")


def remove_leftovers() -> list[str]:
    """Namespaces of launches whose process is gone (it was killed); returns their names."""
    if not NETNS.exists():
        return []
    found = [(path.name, _NAME.fullmatch(path.name)) for path in sorted(NETNS.iterdir())]
    dead = [name for name, match in found if match and not Path("/proc", match[1]).exists()]
    for name in dead:
        _delete(name)
    return dead


def _device(hub: str, net: Net, output: list[str]) -> Child:
    """The process that holds the other end of every interface; there when this returns. `output`
    gets its lines."""
    link = net.link
    sites = [f"site{number}={host}" for number, host in enumerate(net.hosts)]
    command = [
        *("ip", "netns", "exec", hub, sys.executable, "-I", str(DEVICE)),
        *(str(link.rate_bits), str(round(link.rtt_ms * 500_000)), str(link.loss_pct / 100)),
        *(SEED, *sites),
    ]
    child = Child("link", command, os.environ, lambda _, line: output.append(line), None)
    if not child.await_line(lambda: "ready" in output, START_S):
        _end(child)
        raise LinkError(f"the link's device did not start: {' / '.join(output[-3:]) or 'silent'}")
    return child


def _join(site: Site, interface: str, hub: str, link: Link) -> None:
    """Bring the interface into its namespace, with address and rate."""
    burst = max(2 * link.mtu, link.rate_bits * BURST_MS // 8000)
    limit = max(8 * link.mtu, link.rate_bits * QUEUE_MS // 8000) + burst
    inside, name = ["-n", site.namespace], INTERFACE
    _ip(["-n", hub, "link", "set", interface, "netns", site.namespace, "name", name])
    _ip([*inside, "link", "set", "lo", "up"])
    _ip([*inside, "link", "set", name, "mtu", str(link.mtu), "txqueuelen", "1000", "up"])
    _ip([*inside, "addr", "add", f"{site.host}/24", "dev", name])
    shape = ["rate", f"{link.rate_bits}bit", "burst", str(burst), "limit", str(limit)]
    _run(["tc", *inside, "qdisc", "add", "dev", name, "root", "tbf", *shape])


def _ip(arguments: list[str]) -> None:
    _run(["ip", *arguments])


def _run(command: list[str]) -> None:
    """Run a command. Raises LinkError with what the program said."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise LinkError(
            f"{' '.join(command)}: {ended.stderr.strip() or ended.returncode}. The kernel needs "
            "network namespaces, tun and tbf (sch_tbf), and the right to make them."
        )


def _delete(namespace: str) -> None:
    """Delete a namespace, which may not have been made yet, or be gone."""
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _end(device: Child) -> None:
    if device.running():
        device.process.kill()
    device.close()
