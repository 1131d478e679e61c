"""Builds a live rank from settings and the names of its numerics, for the device of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mend.codec import Codec, LayoutCodec, codec_named
from mend.codec.on_device import DeviceEncoder, device_encoder, no_kernel
from mend.engine.cuda_staging import CudaPin
from mend.engine.live_rank import LiveRank
from mend.engine.numerics import Numerics, keeps_in_weights
from mend.engine.rank_config import Settings
from mend.engine.worker_pool import pool_threads
from mend.errors import ConfigError
from mend.fragment.model_plan import ModelPlan
from mend.hardware.cpu_affinity import worker_cores
from mend.merge import MERGES
from mend.outer import OUTERS


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What is computed. `spare`: large vectors that are kept from round to round."""

    codec: str
    merge: str
    outer: str
    outer_lr: float
    momentum: float
    momentum_ramp: int
    spare: int


def live_rank(
    plan: ModelPlan, settings: Settings, rules: Rules, place: tuple[int, int]
) -> LiveRank:
    """`place`: (number, count) of this process among those on this machine. With a model on a GPU
    memory is locked, and workers stay on the cores near it. Raises what a LiveRank raises."""
    outer = OUTERS[rules.outer](rules.outer_lr, rules.momentum, rules.momentum_ramp)
    codec, merge = codec_named(rules.codec), MERGES[rules.merge]()
    device, pin, cores = plan.device, None, None
    if device is not None and device.type == "cuda":
        pin, cores = CudaPin(), worker_cores(device.index or 0, *place)
    in_weights = keeps_in_weights(codec, settings.step.alignment)
    numerics = Numerics(
        codec, merge, outer, pool_threads(), rules.spare, pin, cores, settings.max_age, in_weights
    )
    if settings.encodes_on_device:
        numerics.on_device = _encoder_of(codec, device)
    near = replace(settings, io_loop=replace(settings.io_loop, cores=cores))
    return LiveRank(plan, near, numerics)


def _encoder_of(codec: Codec | LayoutCodec, device: torch.device | None) -> DeviceEncoder:
    """Compiled. Raises ConfigError where offers cannot be encoded on this device."""
    if isinstance(codec, LayoutCodec):
        raise no_kernel(codec.name)
    if device is None or device.type != "cuda":
        where = "several devices" if device is None else f"the {device.type.upper()}"
        rule = f"needs a model on one GPU; this one is on {where}"
        raise ConfigError("encode_on", "device", rule, "Move it before mend_init, or use 'host'.")
    encoder = device_encoder(codec)
    encoder.compile(device)
    return encoder
