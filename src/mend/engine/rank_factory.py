"""Makes the parts of a live rank that a program outside mend may replace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mend.coordination.machines import Machines, ProcessSpec, machines_of
from mend.engine.checkpoint.checkpoint_writer import CheckpointWriter
from mend.engine.features.data_ledger import UnitCounter
from mend.engine.features.micro_benchmark import LinkProbes
from mend.engine.joining.rack_state_mirror import RackStateMirrors
from mend.engine.joining.state_copying import StateCopying
from mend.engine.loop.feature import LoopFeature, LoopParts
from mend.engine.state.published_state import PublishedState
from mend.engine.trainer.trainer import Trainer
from mend.engine.trainer.trainer_parts import TrainerParts
from mend.trace.writer import Tape
from mend.types import Layout, Peer


class RankFactory:
    """Makes the parts of a rank that trains in a job. `LiveRank` asks for each of them once.

    A program that runs a training script outside a job derives from this class and puts its own
    factory into the settings (`mend.config.override`). `layouts`: of all fragments, by number.
    """

    def __init__(self, me: Peer, layouts: Sequence[Layout]) -> None:
        self.me, self.layouts = me, layouts

    def published(self) -> PublishedState:
        return PublishedState(len(self.layouts))

    def trainer(self, parts: TrainerParts) -> Trainer:
        return Trainer(replace(parts, compares=True))

    def checkpoints(self, *args: Any, **options: Any) -> CheckpointWriter:
        """Takes the arguments of `CheckpointWriter`."""
        return CheckpointWriter(*args, **options)

    def machines(self, parts: ProcessSpec) -> Machines:
        """Raises MendError where this rank must not start."""
        return machines_of(parts)

    def tape(self, tape: Tape | None) -> Tape | None:
        """The tape that gets the events and effects of the machines. `tape`: that on disk, if
        any."""
        return tape

    def features(self, parts: LoopParts, *, mirrored: bool) -> list[LoopFeature]:
        """The features of the loop's half. `mirrored`: racks keep state of scope rack for each
        other."""
        features = loop_features(parts)
        return [*features, RackStateMirrors(parts)] if mirrored else features


def loop_features(parts: LoopParts) -> list[LoopFeature]:
    """The features of the loop's half that every rank has."""
    return [StateCopying(parts), LinkProbes(parts), UnitCounter(parts)]
