"""A rank with one trainer, in contrast to one of several parts (`rank_of_parts`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Self

from mend.engine.trainer.trainer import Trainer


class OneTrainer:
    """The methods that such a rank delegates to its trainer."""

    trainer: Trainer

    @property
    def parts(self) -> Sequence[Self]:
        """The ranks of this process: itself. `RankOfParts` has one for each part."""
        return (self,)

    def untimed(self) -> AbstractContextManager[None]:
        """See `StepClock`."""
        return self.trainer.clock.untimed()

    def before_capture(self) -> None:
        """See `Trainer`."""
        self.trainer.parts.before_capture()

    def stepped(self, tokens: int, units: int) -> bool:
        """See `Trainer`."""
        return self.trainer.stepped(tokens, units)

    def give_state(self) -> None:
        """See `Trainer`."""
        self.trainer.give_state()
