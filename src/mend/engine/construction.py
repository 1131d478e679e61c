"""Builds a live rank from settings and the names of its numerics, for the device of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mend.codec import codec_named
from mend.engine.cuda_staging import CudaPin
from mend.engine.live_rank import LiveRank
from mend.engine.numerics import Numerics, keeps_in_weights
from mend.engine.rank_config import Settings
from mend.engine.worker_pool import pool_threads
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
    near = replace(settings, io_loop=replace(settings.io_loop, cores=cores))
    return LiveRank(plan, near, numerics)
