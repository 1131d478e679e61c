"""Radial-directional averaging, tensor by tensor: the mean length in the mean direction. Uses no
peers, clocks or files.

    RDA = (sum_m w_m |v_m|) phi(sum_m w_m phi(v_m)),  phi(x) = x / |x|      (2604.21428)

The plain mean of nearly orthogonal deltas has only 1 / sqrt(M) of their length; this rule keeps it.
It is a weighted sum whose weights follow from the lengths and angles of the deltas.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from torch import Tensor

from mend.merge.average import Average
from mend.merge.gram import BIN_WRONG, Gram, gram_of

LENGTH_MIN = 1e-12
"""A shorter delta has no direction."""

DIRECTION_MIN = 1e-6
"""If the mean of the directions is shorter, they cancel out, and the plain mean is taken. The
factors are float32 numbers: their rounding turns the result by up to 2^-24 / this, 6 %."""


class Radial(Average):
    """sum_m f_m * delta_m with f_m = length * w_m / (|v_m| * |sum_l w_l phi(v_l)|)."""

    name = "rda"

    def measure(self, delta_N: Sequence[Tensor]) -> Gram:
        return gram_of(delta_N)

    def factors(self, gram: Gram, weight: Sequence[float]) -> tuple[float, ...]:
        """The factors f_m. They are the plain weights for a single delta, without a direction, or
        if a number is not finite."""
        plain, members = tuple(weight), range(len(weight))
        if len(plain) == 1 or BIN_WRONG in gram.bins:
            return plain
        roots = [math.sqrt(gram.product(m, m)) for m in members]  # of an exact integer
        lengths = [math.ldexp(roots[m], gram.step(m)) for m in members]
        mean_length = 0.0
        for m in members:
            mean_length += plain[m] * lengths[m]
        pointing = [m for m in members if lengths[m] > LENGTH_MIN]
        square = 0.0
        for m in pointing:
            for other in pointing:
                cosine = gram.product(m, other) / (roots[m] * roots[other])
                square += plain[m] * plain[other] * cosine
        direction = math.sqrt(max(square, 0.0))
        if direction < DIRECTION_MIN:
            return plain
        found = [0.0] * len(plain)
        for m in pointing:
            found[m] = mean_length * plain[m] / (lengths[m] * direction)
        try:
            return struct.unpack(f"<{len(found)}f", struct.pack(f"<{len(found)}f", *found))
        except OverflowError:  # one delta is 2^100 times as long as another
            return plain
