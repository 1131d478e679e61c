"""The conservation identity of a rack's fragment, in doubles.

Legend: N elements of a fragment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mend.errors import ensure, require


class VectorLedger:
    """U + sum(y of the commits that named this rack) + e + (A - theta) = 0, at any moment.

    U: the sum of all inner optimizer updates; y: the offer as the others decode it; e: the
    residual; A: the anchor applied last; theta: the live parameters. Exact for `carry` with carried
    exclusions and a residual that is taken over only when an offer is named. Movement that is lost
    or counted twice shows as a nonzero sum. Wrong weights and counters do not show. A pending offer
    needs no term: until its commit is applied, A - theta still holds it.
    """

    def __init__(self, numel: int) -> None:
        self._moved_N = torch.zeros(numel, dtype=torch.float64, device="cpu")
        self._path_N = torch.zeros(numel, dtype=torch.float64, device="cpu")
        self._sent_N = torch.zeros(numel, dtype=torch.float64, device="cpu")
        self._open_N: Tensor | None = None

    def moved(self, theta_before_N: Tensor, theta_after_N: Tensor) -> None:
        """Record one inner optimizer step."""
        update_N = theta_after_N.double() - theta_before_N.double()
        self._moved_N += update_N
        self._path_N += update_N.abs()

    def captured(self, y_N: Tensor) -> None:
        """Record an offer: y is what its payload decodes to."""
        ensure(self._open_N is None, "a second open offer of a fragment")
        self._open_N = y_N.double().clone()

    def named(self, y_N: Tensor | None = None) -> None:
        """Record that the commit that names the offer was applied. `y_N`: the offer, if `captured`
        was not called."""
        sent_N = self._open_N if y_N is None else y_N.double()
        self._sent_N += require(sent_N, "named without an offer")
        self._open_N = None

    def dropped(self) -> None:
        """Record that the offer was dropped, or its rack has forgotten it: nothing was sent."""
        self._open_N = None

    def error(self, theta_N: Tensor, anchor_N: Tensor, residual_N: Tensor | None) -> float:
        """Movement that is missing or counted twice, as a fraction of all movement (ratio of
        norms)."""
        owed_N = anchor_N.double() - theta_N.double()
        if residual_N is not None:
            owed_N += residual_N.double()
        gap_N = self._moved_N + self._sent_N + owed_N
        return float(gap_N.norm() / self._path_N.norm().clamp_min(torch.finfo(torch.float64).tiny))
