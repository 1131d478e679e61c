"""How many of the live racks the rounds merged, and when somebody is told."""

from __future__ import annotations

from mend.engine.turnout import ROUNDS_LEAST, ROUNDS_RECENT, Turnout, short_of, told


def test_it_is_said_in_one_line() -> None:
    assert told([]) == ""
    assert told([(2, 2)]) == "1 round merged every live rack"
    assert told([(2, 2)] + [(1, 2)] * 9) == "9 of 10 rounds merged 1 of 2 live racks"
    mixed = [(1, 3), (2, 3), (2, 2), (3, 4), (3, 3)]
    assert told(mixed) == "3 of 5 rounds merged 1 to 3 of 3 to 4 live racks"
    assert short_of(mixed) == 3


def test_all_rounds_are_counted_and_the_newest_are_kept() -> None:
    turnout = Turnout()
    for _ in range(30):
        turnout.add((0,), {0, 1})
    turnout.add((0, 1), {0, 1})
    assert turnout.by_racks == {1: 30, 2: 1}
    assert list(turnout.recent) == [(1, 2)] * (ROUNDS_RECENT - 1) + [(2, 2)]


def test_a_member_that_died_meanwhile_lived_and_an_unknown_rest_is_not_counted_as_missing() -> None:
    turnout = Turnout()
    assert turnout.add((0, 2), {0, 1}) == (2, 3)
    assert turnout.add((0,), ()) == (1, 0)
    assert told([(1, 0)]) == ""


def test_it_warns_once_and_again_only_after_it_was_well() -> None:
    turnout, warnings = Turnout(), []

    def rounds(count: int, *members: int) -> None:
        for _ in range(count):
            turnout.add(members, {0, 1})
            if said := turnout.warning():
                warnings.append(said)

    rounds(ROUNDS_LEAST - 1, 0)
    assert warnings == [], "too early to say"
    rounds(1, 0)
    assert warnings == ["10 of 10 rounds merged 1 of 2 live racks"]
    rounds(50, 0)
    rounds(10, 0, 1)  # half of the recent ones are short: not well yet
    rounds(10, 1)
    assert len(warnings) == 1
    rounds(20, 0, 1)
    rounds(10, 1)
    assert len(warnings) == 1
    rounds(1, 1)
    assert warnings[1:] == ["11 of 20 rounds merged 1 of 2 live racks"]
