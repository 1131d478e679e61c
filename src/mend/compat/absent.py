"""Modules of tsugi-mend that are parts of a job which mend runs itself."""

from __future__ import annotations

REMEDIES = {
    "reducer": "mend merges by itself, in rack order. Remove the fragment provider that needs it.",
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
"""module -> what to use in its place."""


def absent(module: str) -> ImportError:
    """The error of importing it."""
    name = module.rpartition(".")[2]
    return ImportError(f"{module} has no counterpart in mend: {REMEDIES[name]}", name=module)
