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
    from mend.config import MendConfig  # late, so that `mend --help` needs no torch
    from mend.config.keyfile import protection_of, secrets_of
    from mend.engine import witness
    from mend.engine.served_metrics import MetricsAddress
    from mend.errors import ConfigError
    from mend.tools.prefixed_output import STDOUT, Printer

    # The same rules as in the racks: a witness with a mistyped address would wait for ever. Where a
    # rack that the same shell starts will listen does not concern it.
    try:
        config = MendConfig(
            witness_addr=bind,
            racks=racks,
            job_id=job_id,
            sideband_heartbeat_ms=heartbeat_ms,
            sideband_addr="",
            sideband_peers=(),
            rack=None,
            # A registered codec or outer optimizer is known to the racks only.
            codec="float32",
            encode_on="host",
            outer_optimizer="nesterov",
        )
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
    keys = secrets_of(config, bind, "bind")
    folder = diagnostics_dir or config.diagnostics_dir
    # Its loop says these lines, and must not wait for who reads them.
    with Printer(STDOUT, NAME) as printer:
        witness.run(
            bind,
            racks,
            job_id,
            heartbeat_ms,
            on_progress=lambda line: printer.line(f"{NAME} {line}"),
            diagnostics_dir=Path(folder) if folder else None,
            tape_max_mb=config.tape_max_mb,
            observe=config.observe,
            keys=keys,
            protection=protection_of(config, bind),
            socks_proxy=config.socks_proxy,
            metrics=MetricsAddress(config.metrics_host, config.metrics_port),
        )
