"""Settings of a replay: those of the tape, whatever the script says.

MEND_REPLAY names the script of a replay, which `mend replay TAPE... -- train.py` writes. What
belongs to this run only (rack number, addresses, folders) comes from the usual sources.

Every life of a rack is a process of its own in a replay, and takes part as a rack whose number is
its seat in the script. MEND_REPLAY_SEAT has this number and the addresses of all. To the training
script it is the rack that it was.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mend.config.sources import REPLAY, REPLAY_SEAT, Named
from mend.errors import ConfigError, TapeError
from mend.trace.replay_script import decode_script

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
    "tape_mb_max": 0,
    "evict_s": 0.0,
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


def replay_seat() -> ReplaySeat | None:
    """The seat of this process. None: it is the rack number, or this is no replay."""
    number, *addresses = os.environ.get(REPLAY_SEAT, "").split(",")
    if not number or replay_path() is None:
        return None
    return ReplaySeat(int(number), tuple(addresses))


def replay_path() -> Path | None:
    """The script of the replay that this process is part of; None: it is not."""
    named = os.environ.get(REPLAY, "")
    return Path(named) if named else None


def from_replay(
    names: Collection[str], environment: Mapping[str, Named], given: Mapping[str, Named]
) -> dict[str, Named]:
    """The settings on the tape of this life, or of the first if this one is not known. `given`:
    those of all other sources. Raises ConfigError when MEND_REPLAY cannot be read."""
    path = replay_path()
    if path is None:
        return {}
    try:
        script = decode_script(path.read_bytes())
    except (OSError, TapeError) as error:
        remedy = "Start it as `mend replay TAPE... -- train.py`."
        raise ConfigError(REPLAY, str(path), str(error), remedy) from error
    own = {name: environment[name] for name in OWN if name in environment}
    rack, seat = {**given, **own}.get("rack"), replay_seat()
    number = seat.number if seat is not None else rack.value if rack is not None else None
    part = script.part(number) if isinstance(number, int) else None
    taped = (part or script.parts[0]).config
    values = {name: taped[name] for name in names if name in taped and name not in OWN}
    values |= {**PINNED, "diagnostics_dir": path.parent / "events"}
    return {**{name: Named(value, "the tape") for name, value in values.items()}, **own}
