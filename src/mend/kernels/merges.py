"""kernels.merges: the mean of two racks of equal weight and the outer step, in one pass. Touches
arrays only.

Every operation is one of merge.average and outer.nesterov, rounded to fp32 where theirs is.

Legend: n elements of a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mend.kernels import HalvesKernel, compiled

_F32, _I32 = np.float32, np.int32
_SIZE = _I32(0x7FFFFFFF)
"""All bits of a number but its sign: magnitudes have the order of these bits, and Inf and NaN are
above all numbers."""

_N = "f4[::1]"
_HALVES = f"f4({_N}, {_N}, {_N}, {_N}, f4, f4, f4, f4, f4, {_N}, {_N})"


def _halves(
    first_n: Any, second_n: Any, anchor_n: Any, state_n: Any,
    decay: Any, share: Any, stretch: Any, momentum: Any, lr: Any,
    out_n: Any, state_out_n: Any,
) -> Any:  # fmt: skip
    top, bits_n, half = _I32(0), out_n.view(_I32), _F32(0.5)
    keeps = len(state_n) > 0
    for i in range(len(out_n)):
        delta = (first_n[i] + second_n[i]) * half
        moved = delta * stretch
        if keeps:
            state = state_n[i] * decay
            if share != _F32(0):
                state = state + delta * share
            state_out_n[i] = state
            if momentum != _F32(0):
                moved = moved + state * momentum
        out_n[i] = anchor_n[i] - moved * lr
        top = max(top, _I32(bits_n[i] & _SIZE))
    return _I32(top).view(_F32)


def halves() -> HalvesKernel:
    return compiled(_HALVES, _halves)
