"""What the benchmark of slow racks makes of what racks saw. The racks themselves are started as in
the other benchmarks of failures."""

from __future__ import annotations

import argparse
from dataclasses import replace

from benchmarks.mitigation import SLOW, Rates, Step, arms, rates, row_of


def steps(count: int, step_s: float, taken: int, since_s: float = 0.0) -> list[Step]:
    """A round per step."""
    return [Step(since_s + step_s * n, taken, n) for n in range(1, count + 1)]


def test_tokens_are_those_of_all_racks_and_rounds_those_that_one_saw() -> None:
    seen = {0: steps(20, 0.5, 8), 1: steps(20, 0.5, 4)}
    assert rates(seen, 5.0, 10.0) == Rates(tokens=24.0, rounds=1.8)


def test_a_row_compares_the_time_behind_the_onset_with_that_before() -> None:
    """The slow rack takes a fourth of its micro-batches, and steps as fast as before."""
    options = argparse.Namespace(healthy=10, seconds=20.0)
    seen = {rack: steps(60, 0.5, 8) for rack in range(3)}
    seen[SLOW] = [*seen[SLOW][:10], *steps(50, 0.5, 2, since_s=5.0)]
    seen[SLOW][14] = replace(seen[SLOW][14], found="input")
    row = row_of(("input", "lockstep", "oracle"), seen, options)
    assert row.startswith("| input | lockstep | oracle | 75 % | ")
    assert row.endswith(" | 5 steps: input |")


def test_in_lockstep_no_rack_is_left() -> None:
    found = arms(["input", "link"])
    assert ("input", "lockstep", "not waited for") not in found
    assert ("input", "grace 30 s", "not waited for") in found
    assert {arm for cause, _, arm in found if cause == "link"} == {
        "nothing", "not waited for", "oracle",
    }  # fmt: skip
