"""The settings of a replay. They are the tape's, whatever a script says.

MEND_REPLAY names the script of a replay, which `mend replay TAPE... -- train.py` writes. What
belongs to this run only (who I am, addresses, folders) comes from the usual sources all the same.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from mend.config.sources import REPLAY, Named
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
"""Rack 0 directs, nobody is put out, nothing is slow on purpose; no tape of a tape."""


def replay_path() -> Path | None:
    """The script of the replay that this process is part of; None: it is not."""
    named = os.environ.get(REPLAY, "")
    return Path(named) if named else None


def from_replay(
    names: Collection[str], environment: Mapping[str, Named], given: Mapping[str, Named]
) -> dict[str, Named]:
    """What the tape of this rack (where that is not known, of the first) says of the settings.
    `given`: what all other sources say. Raises ConfigError when MEND_REPLAY cannot be read."""
    path = replay_path()
    if path is None:
        return {}
    try:
        script = decode_script(path.read_bytes())
    except (OSError, TapeError) as error:
        remedy = "Start it as `mend replay TAPE... -- train.py`."
        raise ConfigError(REPLAY, str(path), str(error), remedy) from error
    own = {name: environment[name] for name in OWN if name in environment}
    rack = {**given, **own}.get("rack")
    part = script.part(rack.value) if rack and isinstance(rack.value, int) else None
    told = (part or script.parts[0]).config
    values = {name: told[name] for name in names if name in told and name not in OWN}
    values |= {**PINNED, "diagnostics_dir": path.parent / "events"}
    return {**{name: Named(value, "the tape") for name, value in values.items()}, **own}
