"""A trace hashes numbers of kinds; tests/trace_kinds.py must have each kind once, and for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from mend.events.base import LoggedEvent
from mend.events.kinds import RoundDropped, VersionApplied
from tests.noted import kinds_made_in
from tests.trace_kinds import GONE, KINDS, WORDS, numbered

SOURCE = Path(__file__).parent.parent.parent / "src"
ROOMS = ("coordination", "engine")
"""What a simulated process runs."""

UNSEEN = {"uncounted"}
"""Of a script on real weights alone."""


def test_every_kind_that_a_simulated_process_may_note_has_a_number() -> None:
    paths = [path for room in ROOMS for path in (SOURCE / "mend" / room).rglob("*.py")]
    found = {kind for path in paths for kind in kinds_made_in(path)} - UNSEEN
    assert found == KINDS.keys(), (found - KINDS.keys(), KINDS.keys() - found)


def test_numbers_are_used_once() -> None:
    numbers = [number for number, _ in KINDS.values()]
    assert sorted([*numbers, *GONE]) == list(range(1, len(numbers) + len(GONE) + 1))
    assert len(set(WORDS.values())) == len(WORDS)
    for kind, (_, places) in KINDS.items():
        named = [name for name in places if name]
        assert len(set(named)) == len(named), kind


def test_names_and_sentences_are_not_hashed() -> None:
    applied = VersionApplied(step=4, fragment=1, version=2, fate="named", seq=3)
    assert numbered(applied) == (37, (1, 4), (2, 1), (3, 2), (4, 1), (5, 3))
    decided = RoundDropped(fragment=2, racks=(0, 1), reason="too old")
    assert numbered(decided) == (35, (1, 2), (2, (0, 1)))
    assert numbered(replace(decided, reason="another text")) == numbered(decided)


class Unheard(LoggedEvent, frozen=True, tag="unheard-of"):
    """A kind without a number."""


class Weighed(LoggedEvent, frozen=True, tag="applied"):
    weight: int


class Lost(LoggedEvent, frozen=True, tag="applied"):
    fate: str


@pytest.mark.parametrize(
    ("event", "named"),
    [
        (Unheard(), "give 'unheard-of' the next number"),
        (Weighed(3), "give 'weight' of 'applied' a place"),
        (Lost("lost"), "lost"),
    ],
)
def test_event_or_field_without_a_number_is_refused(event: LoggedEvent, named: str) -> None:
    """Else a trace would be silent about it."""
    with pytest.raises(KeyError, match=named):
        numbered(event)
