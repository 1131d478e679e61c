"""`mend explain` from the tapes of simulated jobs: what it says is what was on them."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from mend.errors import ConfigError
from mend.tools.explain import chosen, left_out, overview, sentences
from mend.tools.trace_timeline import RoundFacts, Story, newest_job, story_of
from mend.types import MS, SECOND, WITNESS
from mend_lab.sim.scenario import Fault, Scenario
from tests.unit.tools.simulated import tapes

CALM = Scenario(steps=(24, 24))
SLOW = Scenario(steps=(36, 24), step_ns=(50 * MS, 75 * MS), grace_ns=0)
"""Rack 1 comes late to every round, and nobody waits for it."""

UNEVEN = Scenario(steps=(36, 24), step_ns=(50 * MS, 75 * MS))
LOCKSTEP = replace(UNEVEN, steps=(24, 24), lockstep=True)
CRASH = Scenario(
    racks=3, steps=(80,) * 3, step_ns=(50 * MS,) * 3,
    faults=(Fault("crash", 700 * MS, 60 * SECOND, a=2),),
)  # fmt: skip
NAN = Scenario(steps=(24, 24), non_finite=((1, 6),))


@cache
def told(scenario: Scenario, coordinator: bool = True) -> Story:
    return story_of(
        (tape.header, tape.entries())
        for tape in tapes(scenario)
        if coordinator or (tape.header.rack != WITNESS and tape.header.rank == 0)
    )


def reasons(story: Story, rack: int) -> list[str]:
    """Why it was left out of each round that it was left out of."""
    return [
        left_out(story, made, rack)
        for made in story.decided
        if made.commit is not None and rack not in {s.member.rack for s in made.commit.members}
    ]


def test_newest_of_several_jobs_in_one_folder_is_explained() -> None:
    """The rounds of both were mixed, and one took -50 s."""
    old, new = tapes(CRASH, 0), tapes(CALM, 3600 * SECOND)
    jobs, newest = newest_job([*new, *old])
    assert jobs == 2
    number, alone = newest_job(new)
    assert number == 1
    story, only = story_of(newest), story_of(alone)
    assert [text(story, made) for made in story.decided] == [
        text(only, made) for made in only.decided
    ]


def text(story: Story, made: RoundFacts) -> str:
    return "\n".join(sentences(story, made))


def test_a_calm_round_is_told_from_its_opening_to_the_last_apply() -> None:
    story = told(CALM)
    made = story.decided[1]
    said = text(story, made)
    assert said.startswith(f"round 2: fragment {made.fragment}, version 0 -> 1, ")
    assert "closed by: all-in" in said
    assert "left out" not in said
    order = [
        "rack 0 captures", "opens: rack ", "rack 0's offer is announced",
        "closes: merge racks 0, 1", "rack 0 says it holds the result", "the commit is written",
        "decided", "rack 1 trains on it",
    ]  # fmt: skip
    places = [said.index(words) for words in order]
    assert places == sorted(places)
    assert "cost: 2 MB pulled by 2 ranks" in said
    times = [float(each) for each in re.findall(r"^ +([+-][\d.]+) ms", said, re.MULTILINE)]
    assert times == sorted(times)
    assert 0.0 in times


def test_a_sharded_round_counts_the_bytes_of_its_slices() -> None:
    """Of three racks each pulls a third of two payloads of 1,200 bytes, and two merged thirds."""
    sharded = Scenario(
        racks=3, steps=(24,) * 3, step_ns=(50 * MS,) * 3, fragments=1, numel=300, sharded=True
    )
    story = told(sharded)
    made = story.decided[1]
    assert "closed by: all-in, 3 of 3 racks, sharded" in text(story, made)
    assert {rank.pulled_bytes for rank in made.ranks.values()} == {1600}
    for (rack, _), rank in made.ranks.items():
        assert sorted(rank.pulls) == sorted({0, 1, 2} - {rack})
        assert all(begun_ns < came_ns for begun_ns, came_ns in rank.pulls.values())


def test_the_words_are_those_of_the_log_and_of_the_status() -> None:
    """`reason` of the commit, and why it waited as `status().waiting` says it."""
    story = told(SLOW)
    for made in story.decided:
        assert made.commit is not None
        assert f"closed by: {made.commit.reason}" in text(story, made)
        for _, why in made.whys:
            assert why.text in text(story, made)


@pytest.mark.parametrize(("scenario", "runs"), [(UNEVEN, True), (LOCKSTEP, False)])
def test_a_grace_window_runs_where_rounds_do_not_wait_for_all_anyway(
    scenario: Scenario, runs: bool
) -> None:
    story = told(scenario)
    assert any(why.open_for for made in story.decided for _, why in made.whys)
    said = [text(story, made) for made in story.decided]
    assert any("; the grace window runs" in each for each in said) == runs


def test_a_rack_that_is_late_is_left_out_with_its_reason() -> None:
    story = told(SLOW)
    assert any(
        re.fullmatch(r"its offer \d+ came [\d.]+ ms too late; it stays open", reason)
        for reason in reasons(story, 1)
    )
    late = [made for made in story.decided if "without rack 1" in text(story, made)]
    assert all("left out: rack 1: " in text(story, made) for made in late)
    assert late


def test_a_rack_that_died_was_silent() -> None:
    """At first nobody knows; then the time since it was heard grows until it counts as silent."""
    said = reasons(told(CRASH), 2)
    assert re.fullmatch(r"it had nothing to offer, last heard [\d.]+ ms before", said[0])
    assert re.fullmatch(r"it was silent, last heard \d{4}\.\d ms before", said[-1])


def test_a_delta_that_is_not_finite_is_the_reason() -> None:
    assert "its delta is not finite" in reasons(told(NAN), 1)


def test_without_the_coordinators_tape_it_says_what_is_missing() -> None:
    story = told(CALM, coordinator=False)
    assert not story.coordinated
    assert any("no tape of a coordinator" in line for line in overview(story))
    said = text(story, story.decided[0])
    assert "in: rack 0, with" in said
    assert "rack 1 trains on it" in said


def test_the_overview_counts_why_rounds_closed() -> None:
    story = told(CALM)
    lines = overview(story)
    count = len(story.decided)
    assert lines[0] == f"{count} decided rounds on these tapes"
    assert f"    {count} x all-in, 2 of 2 racks" in lines
    assert any("genesis: racks 0,1 have met" in line for line in lines)


def test_rounds_are_chosen_by_number_by_fragment_or_all() -> None:
    story = told(CALM)
    rounds = story.decided
    assert chosen(story, number=3) == [rounds[2]]
    assert chosen(story) == rounds[-1:]
    assert chosen(story, everything=True)[: len(rounds)] == rounds
    (one,) = chosen(story, fragment=1, version=2)
    assert (one.fragment, one.version) == (1, 2)
    assert {made.fragment for made in chosen(story, fragment=1, everything=True)} == {1}
    for wrong, named in (
        ({"number": 0}, "--round=0"), ({"number": 99}, "--round=99"),
        ({"fragment": 7}, "--fragment='7'"), ({"version": 99}, "--version='99'"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{named}: "):
            chosen(story, **wrong)  # type: ignore[arg-type]


def test_a_slow_rack_is_told_with_when_how_much_and_how_sure() -> None:
    slow = Scenario(
        racks=3, steps=(200,) * 3, step_ns=(50 * MS,) * 3, period_steps=16,
        faults=(Fault("slow_rack", 3 * SECOND, 9 * SECOND, a=1, amount=4),), validates=True,
    )  # fmt: skip
    said = "\n".join(overview(told(slow)))
    assert (
        "rack 1 rank 0 is slow by the compute of rank 0 (its device, its clock or a neighbour); "
        "a matrix product takes 4.0 times" in said
    )
    own = r"rack 1 rank 0 is slow: \d\.\d+x the time per token of its own past, since its step "
    assert re.search(own + r"\d+; found at step \d+, 99\.\d+ % sure", said)
    assert re.search(r"rack 1 is slow: .* of the median of the other racks; found at", said)
    assert "rack 1 rank 0 is no longer slower than its own past" in said
    assert "fail-slow" not in said, "in sentences, not as raw notes"


def test_a_slow_link_is_told_with_its_direction_how_much_and_until_when() -> None:
    slow = Scenario(
        racks=2, steps=(230,) * 2, step_ns=(50 * MS,) * 2, period_steps=8, overlap_steps=4,
        delay_ns=30 * MS, jitter_ns=0,
        faults=(Fault("slow_link", 8 * SECOND, 16 * SECOND, a=0, b=1, amount=90 * MS),),
    )  # fmt: skip
    said = "\n".join(overview(told(slow)))
    link = r"the link 1 -> 0 is slow: pulls by rank 0 of rack 0 take \d\.\d+x the time per byte of "
    assert re.search(
        link + r"its own past, since its step \d+; found at step \d+, [\d.]+ % sure", said
    )
    assert "the link 1 -> 0 is as fast as it was, as rank 0 of rack 0 pulls at its step " in said
    assert "the link 0 -> 1 is slow: pulls by rank 0 of rack 1 take " in said
    assert "slow-link" not in said, "in sentences, not as raw notes"
