"""Checks averages of moments: computes them again from the captured values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mend.engine.compute.anchor import Anchor
from mend.engine.state.fragment_state import OpenOffer
from mend.events.kinds import RoundCommitted
from mend.fragment.moments import SECOND

if TYPE_CHECKING:
    from mend_lab.sim.checkers import Watched

CLOSE = 1e-6
"""Tolerance for values up to 1e-2 that are rounded to fp32 a few times."""


class MomentChecks:
    """I1 and I8 of fragments of moments: a merge is the weighted mean of the values that its
    members captured (in doubles), and no second moment is below zero. `periods`: by order."""

    def __init__(self, problem: Callable[[str], None], periods: Mapping[int, int]) -> None:
        self._problem, self._periods = problem, [*periods.items()]
        self._captured: dict[tuple[object, ...], Tensor] = {}
        self.compared = 0
        """Merges that were compared, once per rank."""

    def captured(self, watched: Watched, offer: OpenOffer) -> None:
        """Remember the moments of a rank at a capture."""
        view = watched.trainer.fragment_states[offer.fragment].moments
        if view is None:
            return
        now_N = torch.empty(offer.delta_N.numel())
        view.read(watched.trainer.fragment_states[offer.fragment].owned, now_N)
        me = watched.process
        self._captured[me.me, me.member, offer.fragment, offer.seq] = now_N.double()

    def applied(
        self, watched: Watched, fragment: int, anchor: Anchor, commit: RoundCommitted | None
    ) -> None:
        trainer, me = watched.trainer, watched.me
        view = trainer.fragment_states[fragment].moments
        if view is None or commit is None:
            return
        order, _ = self._periods[fragment // len(trainer.weights) - 1]
        named, weights = list[Tensor](), list[float]()
        for each in commit.members:
            captured = [
                values
                for (peer, _, p, seq), values in self._captured.items()
                if (peer, p, seq) == ((each.rack, me.rank), fragment, each.seq)
            ]
            if len(captured) != 1:  # of several lives of a rack, or of one before this job
                return
            named.append(captured[0])
            steps = max(1, each.steps)
            weights.append(each.tokens / steps)
        self.compared += 1
        mean = sum((w * x for w, x in zip(weights, named, strict=True)), torch.zeros(()).double())
        error = (anchor.values.double() - mean / sum(weights)).abs().max().item()
        if named[0].numel() and not error <= CLOSE:
            what = f"fragment {fragment} version {anchor.version}"
            self._problem(f"I1: {me}: {what} is {error:.2e} beside the mean")
        live_N = torch.empty(trainer.fragment_states[fragment].owned.numel)
        view.read(trainer.fragment_states[fragment].owned, live_N)
        if order == SECOND and (live_N < 0).any():
            self._problem(f"I8: {me}: a second moment of fragment {fragment} is negative")
