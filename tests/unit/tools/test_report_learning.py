"""Whether merging helped: the facts, and the one setting to change first."""

from __future__ import annotations

from typing import Any

import pytest

from mend.tools.report.facts import RunFacts
from mend.tools.report.learning import learning, mean_cosine
from tests.unit.tools.test_report_facts import Run, commit, progress


def recorded(step: int, **values: float) -> dict[str, Any]:
    return {"kind": "recorded", "step": step, "tokens": 10, "at_ns": step, "values": values}


def job(rounds: int = 20, agreement: float | None = 0.25, **values: float) -> RunFacts:
    run = Run().both(progress(1))
    for version in range(1, rounds + 1):
        run.both({**commit(0, version, {0: version, 1: version}), "live": 2, "momentum": 0.5})
    run.both(progress(9, merges=rounds, agreement=agreement))
    return (run.both(recorded(9, **values)) if values else run).ends()


@pytest.mark.parametrize(("merged", "word"), [(1.5, "merging helped"), (2.5, "did not help")])
def test_merged_value_is_compared_with_the_racks_own(merged: float, word: str) -> None:
    said = learning(job(held_out=2.0, held_out_merged=merged), {}, 0.0)
    assert word in said[0]
    assert f"model is {merged}, " in said[0]
    assert f"({50 * (merged - 2):+.1f} %)" in said[0]


def test_what_was_not_recorded_is_asked_for() -> None:
    assert "held_out_merged" in learning(job(loss=2.0), {}, 0.0)[0]


def test_cosine_says_how_much_of_a_step_is_not_shared() -> None:
    """Shared .25, and half of .75 in a mean of two: .375 / .625."""
    facts = job(agreement=0.25)
    assert mean_cosine(facts) == 0.25
    assert any("cosine of 0.25" in each and "60%" in each for each in learning(facts, {}, 0.0))
    assert not any("cosine" in each for each in learning(job(agreement=None), {}, 0.0))


@pytest.mark.parametrize(
    ("facts", "settings", "stall", "first"),
    [
        (job(), {"sync_period_steps": 32}, 0.2, "codec"),
        (job(rounds=4), {"sync_period_steps": 64}, 0.0, "sync_period_steps, from 64 to 32: a frag"),
        (job(), {"sync_period_steps": 128}, 0.0, "sync_period_steps, from 128 to 32, with codec"),
        (job(agreement=0.01), {"sync_period_steps": 16}, 0.0, "sync_period_steps, from 16 to 8"),
        (job(loss=1.0, loss_merged=2.0), {}, 0.0, "sync_period_steps, to half"),
        (job(), {"sync_period_steps": 32}, 0.0, "nothing"),
    ],
)
def test_first_change_is_the_first_that_applies(
    facts: RunFacts, settings: dict[str, object], stall: float, first: str
) -> None:
    assert learning(facts, settings, stall)[-1].startswith(f"Change first: {first}")


def test_run_without_rounds_says_nothing() -> None:
    assert learning(Run().both(progress(1)).ends(), {}, 0.0) == []
