"""What a rank is built from, out of a configuration. Reads no source itself."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

from mend.config.keyfile import protection_of, secrets_of
from mend.config.replaying import replay_path, replay_seat
from mend.config.settings import MendConfig
from mend.config.sources import OUTCOMES
from mend.detector import DetectorOptions
from mend.engine.construction import Rules
from mend.engine.io_loop import IoLoopOptions
from mend.engine.rank_config import Settings
from mend.engine.trainer import StepOptions
from mend.types import MS, SECOND


def rules_of(config: MendConfig) -> Rules:
    """What a rank computes with."""
    return Rules(
        codec=config.codec,
        merge=config.merge,
        outer=config.outer_optimizer,
        outer_lr=config.outer_lr,
        momentum=config.outer_optimizer_momentum,
        momentum_ramp=config.ramp_rounds,
        spare=spare_vectors(config),
    )


def local_place() -> tuple[int, int]:
    """(number, count) of this process among those that torchrun started on this machine."""
    rank, world = os.environ.get("LOCAL_RANK", "0"), os.environ.get("LOCAL_WORLD_SIZE", "1")
    if rank.isdecimal() and world.isdecimal() and int(rank) < int(world):
        return int(rank), int(world)
    return 0, 1


def settings_of(
    config: MendConfig, members: tuple[int, ...] | None, cores: frozenset[int] | None = None
) -> Settings:
    """`members`: global ranks of the rack; None: all ranks of the process group.
    `cores`: where worker threads stay; None: anywhere."""
    grace, seat = config.grace_window_ms, replay_seat()
    return Settings(
        rack=seat.number if seat else config.rack_number,
        racks=len(seat.addresses) if seat else config.racks,
        job=config.job_id,
        facts=config.hyper_facts(),
        io_loop=_io_loop_options(config, cores),
        peers=dict(enumerate(seat.addresses)) if seat else config.peer_addresses,
        witness=config.witness_addr,
        heartbeat_ms=config.sideband_heartbeat_ms,
        start_timeout_ns=int(config.start_timeout_s * SECOND),
        evict_ns=int(config.evict_s * SECOND),
        restart_attests=config.restart_attests_death,
        period_steps=config.sync_period_steps,
        overlap_steps=config.tau,
        overlap_ramp=config.ramp_rounds,
        quorum_min_learners=config.quorum_min_learners,
        grace_ns=-1 if grace == "adaptive" else int(float(grace) * MS),
        expected=config.expected_racks,
        max_age=config.max_age,
        token_weighted=config.token_weighted_merge,
        merge_mean_names=config.merge_mean_names,
        tape_mb_max=config.tape_mb_max,
        config={field.name: getattr(config, field.name) for field in fields(config)},
        step=StepOptions(
            ranks=1,
            overlapped=config.concurrent_outer_step,
            lockstep=config.lockstep,
            alignment=config.alignment,
            blend_alpha=config.blend_alpha,
            stall_max_ns=int(config.stall_s * SECOND),
            give_up_ns=int(config.give_up_s * SECOND),
            shutdown_ns=int(config.shutdown_timeout_s * SECOND),
        ),
        detector=detector_options(config),
        acts=config.failslow_action in ("act", "evict"),
        evicts=config.failslow_action == "evict",
        sharded=config.sharded,
        mirrors=config.mirror_rack_state,
        encodes_on_device=config.encode_on == "device",
        diagnostics=Path(config.diagnostics_dir) if config.diagnostics_dir else None,
        members=members,
        replay=replay_path(),
        outcomes=Path(folder) if (folder := os.environ.get(OUTCOMES)) else None,
    )


def _io_loop_options(config: MendConfig, cores: frozenset[int] | None) -> IoLoopOptions:
    bind = config.bind_address
    return IoLoopOptions(
        bind=bind,
        lane_host=bind.removeprefix("tcp://").rsplit(":", 1)[0].strip("[]"),
        advertise_host=config.advertise_host,
        ports=config.data_port_range,
        stall_ns=int(config.transfer_stall_s * SECOND),
        delay_ns=int(config.simulated_merge_delay_ms * MS),
        delay_distribution=config.simulated_merge_delay_distribution,
        delay_seed=config.simulated_merge_delay_seed,
        cores=cores,
        observe=config.observe,
        secrets=secrets_of(config, bind) if config.exchange else (),
        protection=protection_of(config, bind),
        conceal=config.encrypt_payloads,
        peers=(*config.peer_addresses.values(), config.witness_addr),
    )


def detector_options(config: MendConfig) -> DetectorOptions:
    """What a slow rank is found by."""
    return DetectorOptions(
        window=config.failslow_window_steps,
        zscore=config.failslow_zscore_threshold,
        samples_min=config.failslow_min_samples,
        validates=config.failslow_action != "detect",
    )


def rounds_in_flight(config: MendConfig) -> int:
    """Rounds between their capture and their apply at once, at most."""
    periods = [config.sync_period_steps, *config.moment_periods.values()]
    return sum(config.tau * config.fragments // period + 1 for period in periods)


def spare_vectors(config: MendConfig) -> int:
    """How many large vectors may wait to be used again.

    Every fragment has two versions at times. A round takes an offer of every rack and a copy of the
    live weights, or a result, and gives back as many as the one before it took.
    """
    fragments = config.fragments * (1 + len(config.moment_periods))
    return fragments + (config.racks + 1) * rounds_in_flight(config)
