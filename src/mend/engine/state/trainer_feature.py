"""What a feature adds to the training thread's half of a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager


class TrainerFeature:
    """One feature of a rank. Training thread."""

    @property
    def idle(self) -> bool:
        """Whether a poll now would change nothing. The loop may write at the same time; the next
        poll sees that."""
        return True

    def stepped(
        self, step: int, step_ns: int, untimed: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Called at the end of a step that began at `step_ns`. Do long work inside `untimed`."""

    def asks(self) -> list[int]:
        """The numbers that this rank adds to the one MIN over the ranks at an apply point. Their
        count must be the same on all ranks."""
        return []

    def agreed(self, least: Sequence[int], step: int) -> None:
        """Take the minimum of these numbers over the ranks, which is the same on all of them."""

    def close(self) -> None:
        """Training ends: leave nothing in the model. Idempotent."""
