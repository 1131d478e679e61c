"""What a feature adds to the loop's half of a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mend.consensus.records import Record
from mend.coordination.leader import Leader
from mend.coordination.rank import RankMachine
from mend.engine.loop.effects import Handlers
from mend.engine.loop.jobs import Jobs
from mend.engine.loop.store import TensorStore


@dataclass(frozen=True, slots=True)
class LoopParts:
    """What a feature is given to work with. `leader`: None on ranks that do not lead their rack."""

    store: TensorStore
    jobs: Jobs
    machine: RankMachine
    leader: Leader | None


class LoopFeature:
    """One feature of a rank. Loop thread."""

    def handlers(self) -> Handlers:
        """The effects that it performs. No other feature performs them."""
        return {}

    def decided(self, record: Record) -> None:
        """Take a committed record. It has been published already."""


Features = Callable[[LoopParts], Sequence[LoopFeature]]
