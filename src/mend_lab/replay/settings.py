"""Settings of a replay: those of the tape, whatever the script says.

MENDLAB_REPLAY names the script of a replay, which `python -m mend_lab replay TAPE... -- train.py`
writes. What belongs to this run only (rack number, addresses, folders) comes from the usual
sources.

Every life of a rack is a process of its own in a replay, and takes part as a rack whose number is
its seat in the script. MENDLAB_REPLAY_SEAT has this number and the addresses of all. To the
training script it is the rack that it was.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from msgspec import structs

from mend.config.sources import Named
from mend.engine.rank_config import Settings
from mend.errors import ConfigError, TapeError, UsageError
from mend_lab.replay.script import ReplayScript, decode_script
from mend_lab.replay.training import ReplayFactory

REPLAY, REPLAY_SEAT = "MENDLAB_REPLAY", "MENDLAB_REPLAY_SEAT"

OWN = (
    "rack",
    "sideband_addr",
    "sideband_peers",
    "advertise_host",
    "data_ports",
    "key_file",
    "encrypt_payloads",
    "insecure",
)
"""Settings of this run, not of the tape; from the environment rather than from the script."""

PINNED: Mapping[str, object] = {
    "witness_addr": "",
    "tape_max_mb": 0,
    "seat_timeout_s": 0.0,
    "simulated_merge_delay_ms": 0.0,
}
"""Rack 0 coordinates, no rack is evicted, nothing is delayed on purpose; no tape of a replay."""


@dataclass(frozen=True, slots=True)
class ReplaySeat:
    """`addresses`: of all seats, in their order."""

    number: int
    addresses: tuple[str, ...]


def seat_environment(rack: int, racks: int, seat: int, addresses: Sequence[str]) -> dict[str, str]:
    """Environment in which a life of `rack`, of so many racks, is started."""
    return {
        "MEND_RACK": str(rack),
        "MEND_RACKS": str(racks),
        "MEND_SIDEBAND_ADDR": addresses[seat],
        "MEND_SIDEBAND_PEERS": "",
        REPLAY_SEAT: ",".join((str(seat), *addresses)),
    }


class ReplaySettings:
    """The `Override` of one process of a replay. `path`: its script. `seat` None: it is the rack
    number. Raises ConfigError when the script cannot be read."""

    def __init__(self, path: Path, seat: ReplaySeat | None) -> None:
        self._path, self._seat = path, seat
        try:
            self._script: ReplayScript = decode_script(path.read_bytes())
        except (OSError, TapeError) as error:
            remedy = "Start it as `python -m mend_lab replay TAPE... -- train.py`."
            raise ConfigError(REPLAY, str(path), str(error), remedy) from error

    @classmethod
    def from_environment(cls) -> ReplaySettings:
        number, *addresses = os.environ.get(REPLAY_SEAT, "").split(",")
        seat = ReplaySeat(int(number), tuple(addresses)) if number else None
        return cls(Path(os.environ.get(REPLAY, "")), seat)

    def named(
        self, names: Collection[str], environment: Mapping[str, Named], given: Mapping[str, Named]
    ) -> dict[str, Named]:
        """The settings on the tape of this life, or of the first if this one is not known."""
        own = {name: environment[name] for name in OWN if name in environment}
        rack, seat = {**given, **own}.get("rack"), self._seat
        number = seat.number if seat is not None else rack.value if rack is not None else None
        part = self._script.part(number) if isinstance(number, int) else None
        taped = (part or self._script.parts[0]).config
        values = {name: taped[name] for name in names if name in taped and name not in OWN}
        values |= {**PINNED, "diagnostics_dir": self._path.parent / "events"}
        return {**{name: Named(value, "the tape") for name, value in values.items()}, **own}

    def settings(self, settings: Settings) -> Settings:
        """Those of its seat. No launcher reads how it ends, and no slow rank is validated. Raises
        UsageError for a script with a data ledger."""
        if settings.ledger is not None:
            raise UsageError(
                "a replay of the training has no log that gives out the rows of a DataLedger. "
                "`mend replay` without the script compares the decisions of the run"
            )
        factory = partial(ReplayFactory, self._script, self._path.parent)
        detector = replace(settings.detector, validates=False)
        made = replace(settings, factory=factory, detector=detector, outcomes=None)
        if (seat := self._seat) is None:
            return made
        policy = structs.replace(settings.policy, racks=len(seat.addresses))
        peers = dict(enumerate(seat.addresses))
        return replace(made, rack=seat.number, policy=policy, peers=peers)
