"""One table says what a process does for each kind of effect."""

from __future__ import annotations

import pytest

from mend.coordination import events as ev
from mend.engine.loop.effects import Handlers
from mend.engine.loop.feature import LoopFeature
from mend.engine.rank_factory import loop_features
from mend.errors import InvariantError
from tests.unit.engine.test_concurrent_outer_step import Story
from tests.unit.engine.test_witness import Outside, following

KINDS = {
    kind for kind in vars(ev).values() if isinstance(kind, type) and issubclass(kind, ev.Effect)
} - {ev.Effect, ev.CommonEffect}


def test_rank_has_a_handler_for_every_effect() -> None:
    rank = Story().rank
    assert rank._handlers(rank.rank_machine).keys() == KINDS


def test_effect_without_a_handler_stops_the_rank() -> None:
    class Unknown(ev.Effect, frozen=True):
        pass

    rank = Story().rank
    with pytest.raises(InvariantError, match="an effect has no handler"):
        rank._queue.perform(Unknown(), rank.rank_machine)


def test_effect_that_two_features_perform_is_refused() -> None:
    class Twice(LoopFeature):
        def handlers(self) -> Handlers:
            return {ev.Encode: lambda _: None}

    with pytest.raises(InvariantError, match="two parts of a rank perform an effect"):
        Story(features=lambda parts: [*loop_features(parts), Twice()])


def test_witness_has_a_handler_for_every_effect_of_a_coordinator() -> None:
    """A coordinator that returned an effect which only ranks perform stopped the witness, and only
    once it led."""
    common = {kind for kind in KINDS if issubclass(kind, ev.CommonEffect)}
    witness = following(Outside())
    assert witness._handlers(witness.coordinator).keys() == common
