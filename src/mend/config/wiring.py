"""config.wiring: what a rank is built from, out of a configuration. Reads no source itself."""

from __future__ import annotations

from pathlib import Path

from mend.config.settings import MendConfig
from mend.runtime.driver import DriverOptions
from mend.runtime.start import Settings
from mend.runtime.steps import StepOptions
from mend.terms import MS, SECOND


def settings_of(config: MendConfig, members: tuple[int, ...] | None) -> Settings:
    """`members`: global ranks of the rack; None: all ranks of the process group."""
    rack = config.rack_number
    bind = config.bind_address
    grace = config.grace_window_ms
    return Settings(
        rack=rack,
        racks=config.racks,
        job=config.job_id,
        facts=config.hyper_facts(),
        driver=DriverOptions(
            bind=bind,
            lane_host=bind.removeprefix("tcp://").rsplit(":", 1)[0].strip("[]"),
            advertise_host=config.advertise_host,
            ports=config.data_port_range,
            stall_ns=int(config.transfer_stall_s * SECOND),
            delay_ns=int(config.simulated_merge_delay_ms * MS),
            delay_distribution=config.simulated_merge_delay_distribution,
            delay_seed=config.simulated_merge_delay_seed,
        ),
        peers=config.peer_addresses,
        witness=config.witness_addr,
        heartbeat_ms=config.sideband_heartbeat_ms,
        start_timeout_ns=int(config.start_timeout_s * SECOND),
        fragments=config.fragments,
        period_steps=config.sync_period_steps,
        overlap_steps=config.tau,
        quorum_min_learners=config.quorum_min_learners,
        grace_ns=-1 if grace == "adaptive" else int(float(grace) * MS),
        max_age=config.max_age,
        token_weighted=config.token_weighted_merge,
        merge_mean_names=config.merge_mean_names,
        step=StepOptions(
            ranks=1,
            overlapped=config.concurrent_outer_step,
            lockstep=config.lockstep,
            alignment=config.alignment,
            blend_alpha=config.blend_alpha,
            stall_max_ns=int(config.stall_max_s * SECOND),
            give_up_ns=int(config.give_up_s * SECOND),
            shutdown_ns=int(config.shutdown_timeout_s * SECOND),
        ),
        diagnostics=Path(config.diagnostics_dir) if config.diagnostics_dir else None,
        members=members,
    )


def spare_vectors(config: MendConfig) -> int:
    """A round takes an offer of every rack, an anchor and perhaps a copy of the live weights, and
    gives back as many of the last."""
    rounds_at_once = -(-config.fragments // config.sync_period_steps)
    return (config.racks + 2) * rounds_at_once
