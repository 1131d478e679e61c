"""How many of the live racks the rounds merged, and when somebody is told."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from mend.consensus.records import merge_member_of
from mend.engine.state.participation import (
    ALONE_LEAST,
    ROUNDS_LEAST,
    ROUNDS_RECENT,
    SHORT_NS,
    LastRounds,
    Participation,
    describe_rounds,
    short_of,
)
from mend.errors import require
from mend.types import SECOND
from tests.unit.coordination.nouns import commit, offer


def test_participation_is_described_in_one_line() -> None:
    assert describe_rounds([]) == ""
    assert describe_rounds([(2, 2)]) == "1 round merged every live rack"
    assert describe_rounds([(2, 2)] + [(1, 2)] * 9) == "9 of 10 rounds merged 1 of 2 live racks"
    mixed = [(1, 3), (2, 3), (2, 2), (3, 4), (3, 3)]
    assert describe_rounds(mixed) == "3 of 5 rounds merged 1 to 3 of 3 to 4 live racks"
    assert short_of(mixed) == 3


def test_all_rounds_are_counted_and_the_newest_are_kept() -> None:
    participation = Participation()
    for _ in range(30):
        participation.add((0,), {0, 1})
    participation.add((0, 1), {0, 1})
    assert participation.by_racks == {1: 30, 2: 1}
    assert list(participation.recent) == [(1, 2)] * (ROUNDS_RECENT - 1) + [(2, 2)]


def test_a_member_that_died_meanwhile_lived_and_an_unknown_rest_is_not_counted_as_missing() -> None:
    participation = Participation()
    assert participation.add((0, 2), {0, 1}) == (2, 3)
    assert participation.add((0,), ()) == (1, 0)
    assert describe_rounds([(1, 0)]) == ""


class Rounds:
    """Rounds of two live racks, `apart_ns` from each other."""

    def __init__(self, apart_ns: int) -> None:
        self.apart_ns, self.now_ns = apart_ns, 7 * SECOND
        self.participation, self.warnings = Participation(), list[str]()

    def merge(self, count: int, *members: int) -> None:
        for _ in range(count):
            self.participation.add(members, {0, 1})
            self.now_ns += self.apart_ns
            if said := self.participation.warning(self.now_ns):
                self.warnings.append(said)


def test_participation_warning_repeats_only_after_recovery() -> None:
    rounds = Rounds(SHORT_NS)
    rounds.merge(ROUNDS_LEAST, 0)
    assert rounds.warnings == [], "too early to say"
    rounds.merge(1, 0)
    assert rounds.warnings == ["11 of 11 rounds merged 1 of 2 live racks"]
    rounds.merge(50, 0)
    rounds.merge(10, 0, 1)  # half of the recent ones are short: not well yet
    rounds.merge(10, 1)
    assert len(rounds.warnings) == 1
    rounds.merge(20, 0, 1)
    rounds.merge(11, 1)
    assert len(rounds.warnings) == 1
    rounds.merge(1, 1)
    assert rounds.warnings[1:] == ["12 of 20 rounds merged 1 of 2 live racks"]


def test_rounds_that_are_short_for_a_moment_are_no_warning() -> None:
    """A healthy job of 50 rounds in a second warned on a busy machine, on every rack."""
    rounds = Rounds(SHORT_NS // 100)
    for _ in range(10):
        rounds.merge(40, 0)
        rounds.merge(20, 0, 1)
    assert rounds.warnings == []
    rounds.merge(ROUNDS_RECENT + 100, 0)
    assert len(rounds.warnings) == 1


# -------------------------------------------------------------- the last rounds


@dataclass
class Log:
    """Commits of two fragments, one after the other, and what rack 0 is told of them."""

    rounds: LastRounds = field(default_factory=LastRounds)
    versions: list[int] = field(default_factory=lambda: [0, 0])

    def period(self, *racks: int, step: int, closing: int | None = None) -> None:
        """A round of each fragment, captured at `step`, the last one of the rack `closing`."""
        for fragment in range(2):
            self.versions[fragment] += 1
            offers = [
                replace(offer(rack, fragment=fragment), capture_step=step, closing=rack == closing)
                for rack in racks
            ]
            merged = commit(self.versions[fragment], offers, fragment=fragment)
            shares = tuple(merge_member_of(each) for each in offers)
            self.rounds.add(replace(merged, members=shares))


def test_a_rack_that_trains_on_alone_is_told_since_when() -> None:
    """It pulled the model to its own data, and nothing said so."""
    log = Log()
    log.period(0, 1, step=8)
    log.period(0, 1, step=16, closing=1)
    for period in range(3, 3 + ALONE_LEAST):
        assert log.rounds.alone() is None
        log.period(0, step=8 * period)
    about = require(log.rounds.alone(), "no rack was alone")
    assert (about.alone, about.rounds, about.since_step) == (0, 2 * ALONE_LEAST, 24)
    assert about.others == ("rack 1 ended at its step 16",)
    tokens = ALONE_LEAST * offer(0).tokens
    assert about.tokens == tokens, "of a fragment: each holds what the same steps did"
    assert log.rounds.in_words() == (
        f"the last {2 * ALONE_LEAST} rounds merged rack 0 alone, {tokens} tokens, from its "
        "capture at step 24 on (rack 1 ended at its step 16)"
    )


def test_a_rack_that_was_lost_did_not_end() -> None:
    log = Log()
    log.period(0, 1, 2, step=8, closing=2)
    for period in range(2, 9):
        log.period(0, step=8 * period)
    alone = require(log.rounds.alone(), "no rack was alone")
    ends = ("rack 1 was last merged at its step 8", "rack 2 ended at its step 8")
    assert alone.others == ends


def test_a_rack_has_ended_although_an_older_offer_of_it_is_merged_last() -> None:
    log = Log()
    log.period(0, 1, step=16, closing=1)
    log.period(0, 1, step=12)
    for period in range(3, 3 + ALONE_LEAST):
        log.period(0, step=8 * period)
    alone = require(log.rounds.alone(), "no rack was alone")
    assert alone.others == ("rack 1 ended at its step 16",)


@pytest.mark.parametrize("rounds", range(ALONE_LEAST))
def test_closing_rounds_alone_are_usual(rounds: int) -> None:
    log = Log()
    log.period(0, 1, step=8, closing=1)
    for period in range(rounds):
        log.period(0, step=16 + 8 * period, closing=0)
    assert log.rounds.alone() is None


def test_a_rack_that_came_back_ends_the_time_alone() -> None:
    log = Log()
    log.period(0, 1, step=8)
    for period in range(2, 20):
        log.period(0, step=8 * period)
    log.period(0, 1, step=160)
    assert log.rounds.alone() is None
    log.period(0, step=168)
    assert log.rounds.alone() is None, "and the rounds before are not counted"
    log.period(1, step=168)
    assert log.rounds.alone() is None


def test_a_job_of_one_rack_is_not_told_that_it_is_alone() -> None:
    log = Log()
    for period in range(1, 20):
        log.period(0, step=8 * period)
    assert log.rounds.alone() is None


def test_rack_that_ends_a_little_later_is_no_warning() -> None:
    """The example of the quick start ended with a long warning on any machine."""
    log = Log()
    for period in range(1, 10 * ALONE_LEAST):
        log.period(0, 1, step=8 * period)
    for period in range(10 * ALONE_LEAST, 11 * ALONE_LEAST):
        log.period(0, step=8 * period)
    assert log.rounds.alone() is None
    for period in range(11 * ALONE_LEAST, 13 * ALONE_LEAST):
        log.period(0, step=8 * period)
    assert require(log.rounds.alone(), "no rack was alone").rounds == 2 * 3 * ALONE_LEAST
