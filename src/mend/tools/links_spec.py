"""The description of a link, and the sites that it joins. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mend.errors import ConfigError

UNITS = {"kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}
RATE_BITS = (1_000_000, 100_000_000_000)
RTT_MS_MAX = 10_000.0
MADE_RTT_MS_MAX = 1_000.0
"""Longest round trip of a link that is made: TCP repeats the first packet of a connection after 1 s
(RFC 6298) and begins slowly, so that the link could not be measured."""
LOSS_PCT_MAX = 50.0

JUMBO_FROM_BITS = 100_000_000
MTU, MTU_JUMBO = 1500, 9000
"""MTU of slow links (a large packet would hold up the others), and from 100 Mbit/s on of fast ones
(fewer packets for the device)."""


@dataclass(frozen=True, slots=True)
class Link:
    """The link between any two racks. `rtt_ms`: there and back, as ping shows it; rate and loss are
    of each direction."""

    rate_bits: int
    rtt_ms: float = 0.0
    loss_pct: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Link:
        """`400mbit`, `400mbit,20ms` or `400mbit,20ms,1%`. Raises ConfigError."""
        found = re.fullmatch(
            r"(?P<rate>\d+(\.\d+)?)(?P<unit>kbit|mbit|gbit)"
            r"(,(?P<rtt>\d+(\.\d+)?)ms)?(,(?P<loss>\d+(\.\d+)?)%)?",
            text.replace(" ", "").lower(),
        )
        if found is None:
            raise _wrong(text, "is not RATE[,ROUND TRIP[,LOSS]], like 400mbit,20ms,1%")
        rate = float(found["rate"]) * UNITS[found["unit"]]
        if not RATE_BITS[0] <= rate <= RATE_BITS[1]:
            raise _wrong(text, "the rate must be from 1mbit to 100gbit")
        link = cls(round(rate), float(found["rtt"] or 0), float(found["loss"] or 0))
        if link.rtt_ms > RTT_MS_MAX:
            raise _wrong(text, f"the round trip must be at most {RTT_MS_MAX:g}ms")
        if link.loss_pct > LOSS_PCT_MAX:
            raise _wrong(text, f"the loss must be at most {LOSS_PCT_MAX:g}%")
        return link

    @classmethod
    def to_make(cls, text: str) -> Link:
        """As `parse`, for a link that is made and measured. Raises ConfigError."""
        link = cls.parse(text)
        if link.rtt_ms > MADE_RTT_MS_MAX:
            rule = f"the round trip of a link that is made must be at most {MADE_RTT_MS_MAX:g}ms"
            raise _wrong(text, rule)
        return link

    @property
    def mtu(self) -> int:
        """Bytes of the largest packet."""
        return MTU_JUMBO if self.rate_bits >= JUMBO_FROM_BITS else MTU

    @property
    def rate_text(self) -> str:
        """The rate in the largest unit that leaves at least 1."""
        unit = max((u for u in UNITS if UNITS[u] <= self.rate_bits), key=lambda unit: UNITS[unit])
        return f"{self.rate_bits / UNITS[unit]:g}{unit}"

    def __str__(self) -> str:
        loss = f",{self.loss_pct:g}%" if self.loss_pct else ""
        return f"{self.rate_text},{self.rtt_ms:g}ms{loss}"


def _wrong(text: str, rule: str) -> ConfigError:
    return ConfigError("--link", text, rule, "Try --link 400mbit,20ms.")


@dataclass(frozen=True, slots=True)
class Site:
    """One namespace: where a rack's processes run, and the address others reach them at."""

    namespace: str
    host: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Put in front of a command, it runs there."""
        return ("ip", "netns", "exec", self.namespace)


@dataclass(frozen=True, slots=True)
class Net:
    """All sites of a run, joined and verified. `measured`: one line of figures for the reader."""

    link: Link
    racks: tuple[Site, ...]
    witness: Site | None
    measured: str

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of the racks, ascending, then that of the witness, if there is one."""
        return tuple(site.host for site in self.sites)

    @property
    def sites(self) -> tuple[Site, ...]:
        return (*self.racks, *([self.witness] if self.witness is not None else []))
