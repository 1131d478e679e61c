"""The witness of a job: its configuration, and the process that serves it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mend.config.keyfile import protection_of, secrets_of
from mend.config.settings import MendConfig
from mend.engine import witness
from mend.engine.features.served_metrics import MetricsAddress


def witness_config(bind: str, racks: int, job_id: str, **more: object) -> MendConfig:
    """The configuration of a witness that listens at `bind`, checked by the same rules as that of
    a rack, because with a mistyped address the witness would wait forever. Raises ConfigError."""
    return MendConfig(
        witness_addr=bind,
        racks=racks,
        job_id=job_id,
        # Where a rack that the same shell starts will listen does not concern it.
        sideband_addr="",
        sideband_peers=(),
        rack=None,
        # A registered codec or outer optimizer is known to the racks only.
        codec="float32",
        encode_on="host",
        outer_optimizer="nesterov",
        **more,  # type: ignore[arg-type]  # checked as every setting is
    )


def serve_witness(
    config: MendConfig, on_progress: Callable[[str], None], folder: Path | None = None
) -> None:
    """Serve one job until every rack has left, or SIGINT / SIGTERM.

    `folder`: of its events and its tape; None: as `config` says. Raises AddressInUse, ConfigError,
    MendError.
    """
    bind, chosen = config.witness_addr, folder or config.diagnostics_dir
    witness.run(
        bind,
        config.racks,
        config.job_id,
        config.sideband_heartbeat_ms,
        on_progress=on_progress,
        diagnostics_dir=Path(chosen) if chosen else None,
        tape_max_mb=config.tape_max_mb,
        observe=config.observe,
        keys=secrets_of(config, bind, "bind"),
        protection=protection_of(config, bind),
        socks_proxy=config.socks_proxy,
        metrics=MetricsAddress(config.metrics_host, config.metrics_port),
    )
