"""Converts a configuration into the options of a rank's parts. Reads no source itself."""

from __future__ import annotations

import os
import warnings
from dataclasses import fields
from pathlib import Path

from mend.codec import codec_named
from mend.codec.on_device import encoder_on
from mend.config.declared import Scope
from mend.config.keyfile import protection_of, secrets_of
from mend.config.override import override_in_force
from mend.config.settings import MendConfig
from mend.config.sources import OUTCOMES
from mend.consensus.records import Policy, filled_fields
from mend.detector import DetectorOptions
from mend.engine.checkpoint.saved_state import SavedState
from mend.engine.compute.buffers import Spare
from mend.engine.compute.numerics import Numerics, keeps_in_weights
from mend.engine.compute.worker_pool import pool_threads
from mend.engine.features.data_ledger import DataLedger
from mend.engine.features.served_metrics import MetricsAddress
from mend.engine.io.io_loop import IoLoopOptions
from mend.engine.rank_config import Settings
from mend.engine.state.fragment_state import StepOptions
from mend.engine.trainer.cuda_staging import CudaPin
from mend.errors import ConfigError
from mend.fragment.model_plan import ModelPlan
from mend.hardware.cpu_affinity import worker_cores
from mend.merge import MERGES
from mend.outer import OUTERS
from mend.types import MS, SECOND

HEARD_HEARTBEATS, HEARD_NS_MIN = 4, 2 * SECOND
"""How much later a rack learns about the bytes that another one has pulled: the heartbeats report
them, and some may be lost."""


def numerics_of(
    config: MendConfig, plan: ModelPlan, cores: frozenset[int] | None = None
) -> Numerics:
    """The numerics of a rank, with page-locked memory for a model on a GPU. Raises ConfigError if
    offers cannot be encoded on the device of the model."""
    codec, merge = codec_named(config.codec), MERGES[config.merge]()
    momentum, ramp = config.outer_momentum, config.ramp_rounds
    outer = OUTERS[config.outer_optimizer](config.outer_lr, momentum, ramp)
    pin = CudaPin() if plan.gpu is not None else None
    in_weights = keeps_in_weights(codec, config.apply_mode)
    on_device = None
    if config.encode_on == "device":
        on_device = encoder_on(plan.device, codec, in_weights)
    return Numerics(
        codec, merge, outer, pool_threads(), spare_vectors(config), pin, cores,
        config.staleness_max_rounds, in_weights, on_device, config.racks,
    )  # fmt: skip


def cores_near(plan: ModelPlan) -> frozenset[int] | None:
    """The cores for the workers of this process: those near the GPU of its model. None: any."""
    if plan.gpu is None:
        return None
    rank, world = os.environ.get("LOCAL_RANK", "0"), os.environ.get("LOCAL_WORLD_SIZE", "1")
    known = rank.isdecimal() and world.isdecimal() and int(rank) < int(world)
    place = (int(rank), int(world)) if known else (0, 1)  # among those that torchrun started here
    return worker_cores(plan.gpu.index or 0, *place)


def settings_of(
    config: MendConfig,
    members: tuple[int, ...] | None,
    cores: frozenset[int] | None = None,
    resume: Path | SavedState | None = None,
    ledger: DataLedger | None = None,
) -> Settings:
    """`members`: global ranks of the rack; None: all ranks of the process group.
    `cores`: the cores of worker threads; None: any. `resume`, `ledger`: see `mend_init`."""
    if starves := starving(config):
        warnings.warn(starves, stacklevel=2)
    settings = Settings(
        rack=config.rack_number,
        policy=policy_of(config, config.racks),
        job=config.job_id,
        facts=config.facts(Scope.PLAN),
        job_facts=config.facts(Scope.JOB),
        io_loop=_io_loop_options(config, cores),
        peers=config.peer_addresses,
        witness=config.witness_addr,
        heartbeat_ms=config.sideband_heartbeat_ms,
        start_timeout_ns=int(config.start_timeout_s * SECOND),
        merge_mean_names=config.merge_mean_names,
        tape_max_mb=config.tape_max_mb,
        config={field.name: getattr(config, field.name) for field in fields(config)},
        step=StepOptions(
            overlapped=config.concurrent_outer_step,
            apply_mode=config.apply_mode,
            blend_alpha=config.blend_alpha,
            wait_timeout_ns=int(config.wait_timeout_s * SECOND),
            shutdown_ns=int(config.shutdown_timeout_s * SECOND),
            stall_ns=int(config.transfer_stall_s * SECOND)
            + max(HEARD_HEARTBEATS * config.sideband_heartbeat_ms * MS, HEARD_NS_MIN),
        ),
        detector=detector_options(config),
        diagnostics=Path(config.diagnostics_dir) if config.diagnostics_dir else None,
        unequal=len(set(config.ranks_by_rack)) > 1,
        members=members,
        resume=resume,
        ledger=ledger,
        metrics=MetricsAddress(config.metrics_host, config.metrics_port),
        outcomes=Path(folder) if (folder := os.environ.get(OUTCOMES)) else None,
    )
    override = override_in_force()
    return override.settings(settings) if override is not None else settings


def starving(config: MendConfig) -> str:
    """Why the offers of one rack may never be merged, as text; empty: they will be. With two racks
    this cannot happen, because the other one also waits for the next offer."""
    none_late = config.staleness_max_rounds == 0 and config.grace_window_ms == 0
    if config.racks < 3 or config.lockstep or not none_late:
        return ""
    return (
        f"staleness_max_rounds=0 with grace_window_ms=0 and racks={config.racks}: "
        "rounds wait for no rack, and an offer that is late by one round is dropped, so a rack may "
        "never be merged. Set "
        "staleness_max_rounds=1 or more, or leave out grace_window_ms"
    )


def policy_of(config: MendConfig, racks: int) -> Policy:
    """The policy of a job whose racks have one rank, without moments."""
    settings = {
        field: filled.of(config.in_force(filled.setting))
        for field, filled in filled_fields().items()
    }
    return Policy(**{**settings, "racks": racks, "ranks": 1})


def _io_loop_options(config: MendConfig, cores: frozenset[int] | None) -> IoLoopOptions:
    bind = config.bind_address
    options = IoLoopOptions(
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
        socks_proxy=config.socks_proxy,
    )
    if options.has_one_port and config.key_file is None:
        rule = "is the sideband's port, which needs a key: nothing else shows who a peer is then"
        remedy = "Make a key with `mend keys new FILE` and set key_file, or use another port."
        raise ConfigError("data_ports", config.data_ports, rule, remedy)
    return options


def detector_options(config: MendConfig) -> DetectorOptions:
    """Options of the detector of slow ranks."""
    return DetectorOptions(
        window=config.failslow_window_steps,
        zscore=config.failslow_zscore_threshold,
        samples_min=config.failslow_min_samples,
        validates=config.failslow_action != "detect",
    )


def rounds_in_flight(config: MendConfig) -> int:
    """Return the most rounds that are between capture and apply at once."""
    periods = [config.sync_period_steps, *config.moment_periods.values()]
    return sum(config.tau * config.fragments // period + 1 for period in periods)


def spare_vectors(config: MendConfig) -> Spare:
    """Return how many large vectors are kept to be used again, and what the number follows from.

    Every fragment has two versions. A round takes an offer of every rack and a copy of the live
    weights, or a result, and gives back as many as the one before it took. A codec that leaves
    something out keeps it, and during a round also what the round before left out.
    """
    fragments, rounds = config.fragments, rounds_in_flight(config)
    versions = fragments * (1 + len(config.moment_periods))
    residuals = keeps_residuals(config)
    left_out = fragments + rounds if residuals else 0
    return Spare(versions + left_out + (config.racks + 2) * rounds, rounds, residuals)


def keeps_residuals(config: MendConfig) -> bool:
    """Whether what offers leave out is kept on the host until the next one."""
    codec = codec_named(config.codec)
    in_weights = keeps_in_weights(codec, config.apply_mode)
    return not codec.exact and not in_weights and config.encode_on == "host"
