"""`mend coordinate`: runs the witness and prints its lines."""

from __future__ import annotations

from pathlib import Path

NAME = "mend witness"
"""Beginning of each of its lines."""


def coordinate(
    bind: str, racks: int, job_id: str, heartbeat_ms: int, diagnostics_dir: Path | None
) -> None:
    """Serve one job until every rack has left, or SIGINT / SIGTERM.

    `diagnostics_dir` None: as MEND_DIAGNOSTICS_DIR says. Raises AddressInUse, ConfigError.
    """
    # late, so that `mend --help` needs no torch
    from mend.config.witness import serve_witness, witness_config
    from mend.errors import ConfigError
    from mend.tools.prefixed_output import STDOUT, Printer

    try:
        config = witness_config(bind, racks, job_id, sideband_heartbeat_ms=heartbeat_ms)
    except ConfigError as wrong:
        options = {
            "witness_addr": "--bind",
            "racks": "--racks",
            "job_id": "--job-id",
            "sideband_heartbeat_ms": "--heartbeat-ms",
        }
        option = options.get(wrong.field)
        if option is None:
            raise
        raise ConfigError(option, wrong.value, wrong.rule, f"Change {option}.") from wrong
    # Its loop says these lines, and must not wait for who reads them.
    with Printer(STDOUT, NAME) as printer:
        serve_witness(config, lambda line: printer.line(f"{NAME} {line}"), diagnostics_dir)
