"""kernels.applies: fragment.apply in one pass, in place. Touches arrays only.

Legend: n elements.
"""

from __future__ import annotations

from typing import Any

from mend.kernels import ApplyKernel, compiled
from mend.kernels.self_checks import check_apply

_N = "f4[::1]"


def _apply(
    theta_n: Any, anchor_n: Any, delta_n: Any, next_n: Any, blends: Any, alpha: Any
) -> None:  # fmt: skip
    if len(delta_n) == 0:
        for i in range(len(theta_n)):
            theta_n[i] = next_n[i] + (theta_n[i] - anchor_n[i])
    elif blends:
        for i in range(len(theta_n)):
            theta_n[i] = next_n[i] + (theta_n[i] - next_n[i]) * alpha
    else:
        for i in range(len(theta_n)):
            theta_n[i] = next_n[i] + (theta_n[i] - (anchor_n[i] - delta_n[i]))


def apply() -> ApplyKernel:
    return check_apply(compiled(f"void({_N}, {_N}, {_N}, {_N}, b1, f4)", _apply))
