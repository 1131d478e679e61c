"""Modules and attributes of tsugi-mend that do not exist here, because mend does their work
itself."""

from __future__ import annotations

REMEDIES = {
    "reducer": "mend merges by itself, in rack order. Remove what needs it.",
    "concurrent": "mend exchanges while training goes on. Remove the orchestrator.",
    "async_tp": "set async_tp_enabled; mend_init enables it.",
    "compression": "set codec, or use the codecs in mend.codec.",
    "topology": "use mend.rack_mesh, or rack_aware=True.",
    "failslow": "mend finds slow racks (`failslow_action`); `status().slow` names them.",
    "desync_optimizer": "set momentum_sync_period_steps, and give mend_init the optimizer.",
    "diagnostics": "set diagnostics_dir, and read it with `mend report` and `mend explain`.",
    "autotuner": "use `mend plan` and grace_window_ms='adaptive'.",
    "sideband": "mend opens its connections itself (`sideband_addr`, `sideband_peers`).",
}
"""module -> its replacement."""

ATTRIBUTES = {
    "sched": "use schedule_for(step).",
    "syncer": REMEDIES["concurrent"],
    "failslow": REMEDIES["failslow"],
    "effective_failslow_zscore_threshold": "read config.failslow_zscore_threshold: it stays.",
    "effective_sync_period_steps": "read config.sync_period_steps: it stays.",
    "effective_grace_window_ms": "read config.grace_window_ms; adaptive follows each round.",
    "diagnostics": REMEDIES["diagnostics"],
    "hostname": "use socket.gethostname().",
    "async_tp_active": "read status().async_tp.",
}
"""Attribute of the runtime -> its replacement."""


def absent(path: str, module: str = "") -> ImportError:
    """The error for importing `module`, or this name of it."""
    remedy = REMEDIES[module or path.rpartition(".")[2]]
    return ImportError(f"{path} has no counterpart in mend: {remedy}", name=path)
