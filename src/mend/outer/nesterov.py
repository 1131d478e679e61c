"""SGD on the merged delta, with or without Nesterov momentum. Element-wise fp32; no peers, no
clocks.

Legend: N elements of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from mend.errors import ConfigError, ensure
from mend.outer.base import Rates
from mend.types import fp32


class Nesterov:
    """b <- mu b + Delta;  A' = A - lr (Delta + mu b).   Every product and every sum is rounded to
    fp32.

    If racks that train are missing, a merge counts as the part s of a round and makes that part of
    the step: b <- (1 - s (1 - mu)) b + s Delta;  A' = A - (s lr) (Delta + mu b). So rounds whose
    parts add up to 1 do the same as one round of all racks.

    If the racks made unequal numbers of steps, `stretch` f > 1 increases the weight of the delta in
    the step: A' = A - (s lr) (f Delta + mu b). It does not change b: momentum adds up about ten
    merges, and the mean of such racks is noisier.

    A rack that trains alone gains nothing from momentum. A merge of only last offers loses by it,
    because no training follows. In both cases A' = A - s Delta, and b does not change.

    With `ramp` = c > 0 the momentum rises with the rounds k that the fragment has merged before:
    mu = min(k / (k + c), momentum). lr and mu are rounded to fp32 once, here. With momentum 0 there
    is no b, and A' = A - lr Delta.
    Source: Decoupled DiLoCo (arXiv 2604.21428); lr 1, mu 0 is plain averaging of the racks. The
    ramp: docs/internals/quality.md.
    """

    name = "nesterov"

    def __init__(self, lr: float, momentum: float, ramp: int = 0) -> None:
        if not (math.isfinite(lr) and 0 < lr <= 100):
            raise ConfigError("outer_lr", lr, "must be in (0, 100]", "1.0 averages the racks.")
        if not 0 <= momentum < 1:
            rule = "must be in [0, 1)"
            raise ConfigError("outer_momentum", momentum, rule, "0.0 keeps no momentum.")
        if ramp < 0:
            raise ConfigError("outer_ramp_rounds", ramp, "must be at least 0", "0 ramps nothing.")
        self.lr, self.momentum, self.ramp = fp32(lr), fp32(momentum), ramp
        if self.momentum >= 1 or self.lr == 0:
            both, rule = "outer_lr/outer_momentum", "leave their range in fp32"
            raise ConfigError(both, (lr, momentum), rule, "Use 1.0, 0.0.")

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def rates(self, rounds: Fraction, part: Fraction, *, plain: bool) -> Rates:
        ensure(rounds >= 0 < part <= 1, "a merge is a part of one round", rounds=rounds, part=part)
        if plain and self.states:
            return Rates(fp32(part), 0.0, 1.0, 0.0)
        mu = self.momentum
        if self.ramp:
            mu = min(fp32(rounds / (rounds + self.ramp)), mu)
        decay = 1 - part * (1 - Fraction(mu))
        return Rates(fp32(part * Fraction(self.lr)), mu, fp32(decay), float(part))

    def block(
        self,
        anchor_N: Tensor,
        states_N: Sequence[Tensor],
        delta_N: Tensor,
        anchor_out_N: Tensor,
        states_out_N: Sequence[Tensor],
        rates: Rates,
    ) -> None:
        """See `OuterOptimizer.block`. Overwrites `delta_N`."""
        given = len(states_N)
        ensure(given == len(self.states), "another number of state vectors", given=given)
        # With momentum there is one state, otherwise none.
        for b_N, b_out_N in zip(states_N, states_out_N, strict=True):
            torch.mul(b_N, rates.decay, out=b_out_N)  # a product with 1 changes no bit
            if rates.share == 1:
                b_out_N.add_(delta_N)
            elif rates.share:
                torch.mul(delta_N, rates.share, out=anchor_out_N)  # the output serves as scratch
                b_out_N.add_(anchor_out_N)
        if rates.stretch != 1:
            delta_N.mul_(rates.stretch)
        if rates.momentum:
            torch.mul(states_out_N[0], rates.momentum, out=anchor_out_N)
            delta_N.add_(anchor_out_N)
        if rates.lr != 1:
            delta_N.mul_(rates.lr)
        torch.sub(anchor_N, delta_N, out=anchor_out_N)
