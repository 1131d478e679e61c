"""Warns of settings that work together and train badly."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from mend.config.registered import NESTEROV

if TYPE_CHECKING:
    from mend.config.settings import MendConfig

GAIN_MAX = 2.0
"""Above this lr / (1 - momentum) the outer step overshoots, from random weights and unramped."""

GAIN_RAMPED_MAX = 12.0
"""The same if ramped or after a warm start; lr 1 with momentum .9 is the most that was measured."""


def warn_pairs(c: MendConfig) -> None:
    """Called by `MendConfig.__post_init__`."""
    if 4 * c.tau > c.sync_period_steps:
        _warn(
            f"overlap_steps={c.tau} is more than a quarter of sync_period_steps="
            f"{c.sync_period_steps}: late merges cost loss; take the least that hides the transfer"
        )
    if c.outer_optimizer != NESTEROV:
        return
    gain = c.outer_lr / (1 - c.outer_optimizer_momentum)
    steps = (
        f"outer_lr={c.outer_lr} with outer_optimizer_momentum={c.outer_optimizer_momentum} "
        f"makes outer steps of lr / (1 - momentum) = {gain:.3g}"
    )
    ramped = c.ramp_rounds > 0 and c.outer_optimizer_momentum > 0
    if gain > GAIN_RAMPED_MAX:
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
