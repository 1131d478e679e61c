"""Is a link what was asked for? Starts iperf3 in two namespaces and reads it.

Round trip: TCP handshakes, timed. Rate: iperf3, both directions at once; by TCP, as mend sends, and
over a link with losses by UDP, since what TCP makes of a loss is not the link's rate.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mend.errors import LinkError
from mend.tools.links_spec import Link, Net, Site
from mend.tools.processes import Child
from mend.transport import handshake

TOLERANCE = 0.15
RTT_SLACK_MS = 2.0
"""Time that a handshake may take longer in any case, for the device and the scheduler."""
LOSS_SIGMAS = 4.0
LOSS_SLACK_PCT = 0.5

HANDSHAKES = 7
STREAMS = 4
SECONDS, OMITTED_S = 2, 1
"""Length of a measurement by iperf3, and of its beginning, which does not count."""
UDP_OFFERED = 1.25
"""Share of the rate that is sent to measure it: the excess must not come through."""
UDP_LOSS_OFFERED = 0.5
"""Share of the rate that is sent to measure losses, at which nothing queues."""
DATAGRAM_HEADERS_BYTES = 28
"""IP and UDP; the rest of a packet is payload."""
BUFFER_BYTES = 2_000_000
SOCKETS = Path("/proc/sys/net/core")
TRIES = 3
"""A machine that is busy for a moment shows less than the link can do; it is asked again."""
START_S, RUN_S = 10.0, 60.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of a link. Rates are bits of payload per second: from the first site, and back."""

    rtt_ms: float
    rate_bits: tuple[float, float]
    loss_pct: tuple[float, float] | None

    def __str__(self) -> str:
        there, back = (f"{rate / 1e6:.4g}" for rate in self.rate_bits)
        text = f"measured rtt={self.rtt_ms:.1f}ms rate={there}/{back}mbit"
        if self.loss_pct is not None:
            text += " loss={:.2f}/{:.2f}%".format(*self.loss_pct)
        return text


def verify(net: Net) -> Measured:
    """Measure between the first two sites: all are made alike.

    Raises LinkError when the link is not what was asked for, with what was measured.
    """
    wrong, measured = "", None
    for _ in range(TRIES):
        measured = measure(net)
        wrong = difference(net.link, measured)
        if not wrong:
            return measured
    raise LinkError(
        f"the link {net.link} was asked for, but {wrong} ({measured}). The device forwards some "
        "1 Gbit/s on an idle core: ask for less, or for a less busy machine."
    )


def difference(link: Link, measured: Measured) -> str:
    """Say what is outside the tolerance; empty: nothing is."""
    most_ms = max((1 + TOLERANCE) * link.rtt_ms, link.rtt_ms + RTT_SLACK_MS)
    if not (1 - TOLERANCE) * link.rtt_ms <= measured.rtt_ms <= most_ms:
        return f"the round trip is {measured.rtt_ms:.1f} ms"
    for rate in measured.rate_bits:
        if abs(rate / link.rate_bits - 1) > TOLERANCE:
            return f"the rate is {rate / 1e6:.4g} Mbit/s"
    share = link.loss_pct / 100
    packets = UDP_LOSS_OFFERED * SECONDS * link.rate_bits / 8 / link.mtu
    for lost in measured.loss_pct or ():
        sigma_pct = 100 * math.sqrt(share * (1 - share) / packets)
        if abs(lost - link.loss_pct) > LOSS_SIGMAS * sigma_pct + LOSS_SLACK_PCT:
            return f"the loss is {lost:.2f} %"
    return ""


def measure(net: Net) -> Measured:
    """Round trip, rates and, where some is wanted, loss between the first two sites."""
    here, there = net.sites[:2]
    rtt_ms = min(_handshakes(here, there))
    with _server(there):
        if not net.link.loss_pct:
            sums = _iperf3(here, there, "-P", str(STREAMS), "-O", str(OMITTED_S))
            return Measured(rtt_ms, _both(sums, "bits_per_second"), None)
        datagram = str(net.link.mtu - DATAGRAM_HEADERS_BYTES)
        udp = ("-u", "-l", datagram, "-w", str(_buffer_bytes()), "-b")
        loss = _iperf3(here, there, *udp, str(round(UDP_LOSS_OFFERED * net.link.rate_bits)))
        rate = _iperf3(here, there, *udp, str(round(UDP_OFFERED * net.link.rate_bits)))
    kept = 1 - net.link.loss_pct / 100
    there_bits, back_bits = _both(rate, "bits_per_second")
    return Measured(rtt_ms, (there_bits / kept, back_bits / kept), _both(loss, "lost_percent"))


def _buffer_bytes() -> int:
    """Return the largest allowed buffer of a UDP socket: a full one loses what the link did not."""
    allowed = (SOCKETS / "rmem_max", SOCKETS / "wmem_max")
    return min(BUFFER_BYTES, *(int(path.read_text()) for path in allowed))


def _both(sums: dict[str, Any], figure: str) -> tuple[float, float]:
    """A figure of iperf3's, of each direction."""
    there, back = sums["sum_received"], sums["sum_received_bidir_reverse"]
    return float(there[figure]), float(back[figure])


def _handshakes(here: Site, there: Site) -> list[float]:
    file = str(Path(handshake.__file__))
    command = [*here.prefix, sys.executable, "-I", file, there.host, str(HANDSHAKES)]
    return [float(line) for line in _output(command).split()]


def _iperf3(here: Site, there: Site, *how: str) -> dict[str, Any]:
    """The sums at the end of one run, both directions at once."""
    command = [*here.prefix, "iperf3", "-c", there.host, "-t", str(SECONDS), "--bidir", "-J", *how]
    answer = json.loads(_output(command))
    if "error" in answer:
        raise LinkError(f"iperf3 over the link: {answer['error']}")
    sums: dict[str, Any] = answer["end"]
    return sums


def _output(command: list[str]) -> str:
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=RUN_S, env=os.environ
        )
    except subprocess.TimeoutExpired:
        raise LinkError(f"{' '.join(command)}: no answer over the link in {RUN_S:g} s") from None
    if ended.returncode and not ended.stdout.startswith("{"):
        raise LinkError(f"{' '.join(command)}: {ended.stderr.strip() or ended.returncode}")
    return ended.stdout


@contextmanager
def _server(site: Site) -> Iterator[None]:
    """iperf3 listens at `site`, until the end of the `with`."""
    output: list[str] = []
    command = [*site.prefix, "iperf3", "-s", "--forceflush"]
    child = Child("iperf3", command, os.environ, lambda _, line: output.append(line), None)
    try:
        if not child.await_line(lambda: any("listening" in line for line in output), START_S):
            raise LinkError(f"iperf3 does not listen: {' / '.join(output[-3:]) or 'silent'}")
        yield
    finally:
        child.process.kill()
        child.close()
