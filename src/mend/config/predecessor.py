"""The settings of tsugi-mend 0.1.5 that mend does not have, and what replaces each of them.

`mend.compat.MendConfig` takes them; `mend.MendConfig` names that class. Settings of the same name
in both libraries are not listed: they are mend's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mend.errors import ConfigError

WHERE = "mend.compat.MendConfig"
_KEYS = "Make a key with `mend keys new FILE`, and set key_file: mend encrypts and authenticates."
_BOUNDED = "mend bounds and paces its connections by itself. Leave it out."
_LINK = "`mend plan` computes a period for a link and a step time. Set sync_period_steps."
_ONLINE = (
    "grace_window_ms='adaptive' adapts to the racks, and each rank is compared with its own past."
)


@dataclass(frozen=True, slots=True)
class Foreign:
    """A setting that only the predecessor has. `default`: its default, which is accepted because it
    stands for what mend does. `remedy`: for any other value. `needs`: the setting without which
    this one has no effect. `idle`: it has no effect at all. `secret`: its value is not shown."""

    default: object
    remedy: str = ""
    needs: str = ""
    idle: bool = False
    secret: bool = False


FOREIGN: dict[str, Foreign] = {
    "incremental_collect": Foreign(
        False, "mend merges in rack order once a round has closed, on a worker. Leave it out."
    ),
    "outer_step_cuda_stream_priority": Foreign(
        0, "mend's copies have a stream of the default priority. Leave it out."
    ),
    "auto_tune_sync_period": Foreign(False, _LINK),
    "auto_tune_sync_period_warmup_steps": Foreign(50, needs="auto_tune_sync_period"),
    "auto_tune_sync_period_min": Foreign(4, needs="auto_tune_sync_period"),
    "auto_tune_runtime": Foreign(False, _ONLINE),
    "auto_tune_runtime_window_steps": Foreign(50, needs="auto_tune_runtime"),
    "auto_tune_runtime_min_samples": Foreign(10, needs="auto_tune_runtime"),
    "auto_tune_zscore_min": Foreign(2.0, needs="auto_tune_runtime"),
    "auto_tune_zscore_max": Foreign(8.0, needs="auto_tune_runtime"),
    "auto_tune_grace_window_min_ms": Foreign(0, needs="auto_tune_runtime"),
    "auto_tune_grace_window_max_ms": Foreign(10_000, needs="auto_tune_runtime"),
    "auto_tune_cov_gain": Foreign(4.0, needs="auto_tune_runtime"),
    "auto_tune_grace_gain": Foreign(1.0, needs="auto_tune_runtime"),
    "auto_tune_sustain_windows": Foreign(1, needs="auto_tune_runtime"),
    "auto_tune_drift_ewma_alpha": Foreign(0.2, needs="auto_tune_runtime"),
    "auto_tune_drift_baseline_alpha": Foreign(0.02, needs="auto_tune_runtime"),
    "auto_tune_drift_cusum_slack": Foreign(1.0, needs="auto_tune_runtime"),
    "auto_tune_drift_cusum_threshold": Foreign(8.0, needs="auto_tune_runtime"),
    "nccl_topo_file": Foreign(
        None, "Set NCCL_TOPO_DUMP_FILE to the file that NCCL has written; rack_aware reads it."
    ),
    # It limits how long a silent peer delays the others; in mend it delays nobody.
    "sideband_connect_timeout_s": Foreign(0.5, _BOUNDED, idle=True),
    "sideband_max_line_bytes": Foreign(4096, _BOUNDED),
    "sideband_inbound_read_timeout_s": Foreign(1.0, _BOUNDED),
    "sideband_max_inbound_connections": Foreign(64, _BOUNDED),
    "sideband_psk": Foreign(None, _KEYS, secret=True),
    "sideband_peer_allowlist": Foreign(None, _KEYS, secret=True),
    "sideband_tls": Foreign(False, _KEYS, secret=True),
    "sideband_tls_certfile": Foreign(None, _KEYS, secret=True),
    "sideband_tls_keyfile": Foreign(None, _KEYS, secret=True),
    "sideband_tls_ca_file": Foreign(None, _KEYS, secret=True),
}
"""name -> what replaces it, in the predecessor's order."""

UNSET: dict[str, object] = {
    "expected_learner_ids": None,
    "momentum_sync_period_steps": 512,
    "sideband_addr": "tcp://0.0.0.0:51900",
}
"""Settings that are left out if they have the predecessor's default: no roster, no exchange of
moments (the predecessor has a period but exchanges none), and the own entry of sideband_peers."""

OF_SCRIPTS = frozenset({"MEND_PROCESS_GROUP_TIMEOUT_S", "MEND_SIDEBAND_PORT_BASE"})
"""Variables that its examples read, and that its documentation tells users to set."""

_MODE, _COLUMNS = "outer_step_compression_mode", "outer_step_compression_powersgd_rank"

BECOMES = {
    "quorum_min_learners": "merge_min_racks",
    "expected_learner_ids": "expected_racks",
    _MODE: "codec",
    _COLUMNS: "codec",
}
"""Settings of the predecessor that have another name here."""

_CODECS = {"none": "float32", "bf16": "bfloat16", "quant4": "int4"}


def translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate arguments of the predecessor to mend's; other names are passed on. Raises
    ConfigError for a value that has no equivalent in mend."""
    own: dict[str, Any] = {}
    for name, value in given.items():
        foreign = FOREIGN.get(name)
        if foreign is None:
            if name not in UNSET or value != UNSET[name]:
                own |= _renamed(name, value, given)
        elif not (foreign.needs or foreign.idle) and not _is(value, foreign.default):
            shown = "***" if foreign.secret else value
            rule = "has no meaning here but its default"
            raise ConfigError(name, shown, rule, foreign.remedy)
        # Otherwise it has no effect: the setting that it needs is off, or was refused.
    return own


def _renamed(name: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The setting with mend's name and value."""
    new = BECOMES.get(name, name)
    if new != name and new in given:
        raise ConfigError(name, value, f"is {new} here, which is given, too", "Leave one out.")
    if name == _MODE and isinstance(value, str):
        low_rank = f"powersgd-{given.get(_COLUMNS, 4)}"
        value = low_rank if value == "powersgd" else _CODECS.get(value, value)
    elif name == _COLUMNS:
        if given.get(_MODE) != "powersgd" and value != 4:
            rule = f"has an effect with {_MODE}='powersgd' alone"
            raise ConfigError(name, value, rule, "Leave it out.")
        return {}
    elif name == "expected_learner_ids" and isinstance(value, list | tuple):
        value = tuple(map(_rack_of, value))
    return {new: value}


def _rack_of(name: str) -> int:
    """The rack that `rack-1`, `learner_1` or `1` names. Raises ConfigError without a number."""
    number = str(name)[len(str(name).rstrip("0123456789")) :]
    if not number:
        rule = "needs names that end in the number of a rack"
        raise ConfigError("expected_learner_ids", name, rule, "Set expected_racks.")
    return int(number)


def _is(value: object, default: object) -> bool:
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def refuse(name: str, value: object, what_is: str) -> ConfigError | None:
    """The error of `mend.MendConfig` for a setting of the predecessor; None: it is not one."""
    foreign = FOREIGN.get(name)
    if foreign is None and name not in BECOMES:
        return None
    rule = f"{what_is} a setting of tsugi-mend and none of mend. {WHERE} takes it where it can"
    if foreign is None:
        return ConfigError(name, value, rule, f"Set {BECOMES[name]}.")
    remedy = foreign.remedy or "Leave it out."
    return ConfigError(name, "***" if foreign.secret else value, rule, remedy)
