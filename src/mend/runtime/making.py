"""runtime.making: a rank out of its settings and the names of its numerics. Finds the device that
the model is on, and what belongs to it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from mend.codec import CODECS
from mend.fragment.device import device_of
from mend.fragment.plan import exchanged_parameters
from mend.merge import MERGES
from mend.outer import OUTERS
from mend.runtime.beside import CudaPin
from mend.runtime.crew import crew_threads
from mend.runtime.near import worker_cores
from mend.runtime.numerics import Numerics
from mend.runtime.parts import Settings
from mend.runtime.start import LiveRank


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What is computed. `spare`: large vectors that are kept from round to round."""

    codec: str
    merge: str
    outer_lr: float
    momentum: float
    momentum_ramp: int
    spare: int


def live_rank(
    model: nn.Module, settings: Settings, rules: Rules, place: tuple[int, int]
) -> LiveRank:
    """`place`: (number, count) of this process among those on this machine. With a model on a GPU
    memory is locked, and workers stay on the cores near it. Raises what a LiveRank raises."""
    outer = OUTERS["nesterov"](rules.outer_lr, rules.momentum, rules.momentum_ramp)
    codec, merge = CODECS[rules.codec](), MERGES[rules.merge]()
    device = device_of(p for _, p in exchanged_parameters(model, frozen=settings.frozen))
    pin, cores = None, None
    if device is not None and device.type == "cuda":
        pin, cores = CudaPin(), worker_cores(device.index or 0, *place)
    numerics = Numerics(codec, merge, outer, crew_threads(), rules.spare, pin, cores)
    near = replace(settings, driver=replace(settings.driver, cores=cores))
    return LiveRank(model, near, numerics)
