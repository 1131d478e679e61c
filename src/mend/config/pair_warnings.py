"""Warns about settings that train badly together, and computes the default outer momentum."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from mend.config.registered import NESTEROV

if TYPE_CHECKING:
    from mend.config.settings import MendConfig

GAIN_MAX = 2.0
"""Above this lr / (1 - momentum) the outer step overshoots, from random weights without a ramp."""

GAIN_RAMPED_MAX = 12.0
"""The same with a ramp or after a warm start; lr 1 with momentum .9 is the most that was
measured."""

GAIN_SHORT_MAX = 2.01
"""Times the gain of the default momentum at this period: lr 1 and momentum .9 have 2.0 at H 64, and
were measured to help there."""

OVERLAP_STEPS_DEFAULT = 8
"""Or a quarter of the period, whichever is less."""

MOMENTUM_MAX, MOMENTUM_STEPS = 0.9, 32
"""Default outer momentum: R H / (R H + MOMENTUM_STEPS), at most MOMENTUM_MAX. Momentum mu makes the
racks' movement 1 / (1 - mu) times as long. Over many steps the inner optimizer has reached the end
of what its learning rate allows, and a longer step helps; over few steps it multiplies that rate
and ruins the model. The mean of many racks has less noise, so the same steps bear more momentum
(docs/internals/quality.md)."""


def default_overlap(period_steps: int) -> int:
    """Return the default tau of a job with this sync_period_steps (H)."""
    return min(OVERLAP_STEPS_DEFAULT, period_steps // 4)


def default_momentum(period_steps: int, racks: int) -> float:
    """Return the default outer momentum of a job of R racks with this sync_period_steps (H)."""
    steps = max(2, racks) * period_steps
    return min(MOMENTUM_MAX, steps / (steps + MOMENTUM_STEPS))


def warn_pairs(c: MendConfig) -> None:
    """Called by `MendConfig.__post_init__`."""
    if 4 * c.tau > c.sync_period_steps:
        _warn(
            f"overlap_steps={c.tau} is more than a quarter of sync_period_steps="
            f"{c.sync_period_steps}: late merges cost loss; take the least that hides the transfer"
        )
    if c.outer_optimizer != NESTEROV:
        return
    gain = c.outer_lr / (1 - c.outer_momentum)
    steps = (
        f"outer_lr={c.outer_lr} with outer_optimizer_momentum={c.outer_momentum:.3g} "
        f"makes outer steps of lr / (1 - momentum) = {gain:.3g}"
    )
    ramped = c.ramp_rounds > 0 and c.outer_momentum > 0
    period = c.sync_period_steps
    default = default_momentum(period, c.racks)
    if c.outer_optimizer_momentum and gain * (1 - default) > GAIN_SHORT_MAX:
        _warn(
            f"{steps}: with sync_period_steps={period} and racks={c.racks} that ruins a model. "
            f"Leave outer_optimizer_momentum out, which makes it {default:.3g}"
        )
    elif gain > GAIN_RAMPED_MAX:
        _warn(f"{steps}: more than 10, of lr 1 and momentum 0.9, was never seen to help")
    elif gain > GAIN_MAX and not ramped and c.outer_start == "scratch":
        _warn(
            f"{steps} from the first round: from random weights that was worse than none in every "
            "run. Leave outer_ramp_rounds out, or say outer_start='warm' where the racks "
            "begin at trained weights"
        )


def _warn(message: str) -> None:
    # _warn, warn_pairs, __post_init__, the generated __init__, merged: the sixth is the caller's.
    warnings.warn(message, UserWarning, stacklevel=6)
