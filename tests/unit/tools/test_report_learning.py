"""Whether merging helped: what the recorded figures say, and the one thing to change first."""

from __future__ import annotations

from typing import Any

import pytest

from mend.tools.report.facts import RunFacts
from mend.tools.report.learning import (
    compared,
    learning,
    mean_cosine,
)
from tests.unit.tools.test_report_facts import Run, commit, progress


def recorded(step: int, **values: float) -> dict[str, Any]:
    tokens, at_ns = 10 * step, step
    return {"kind": "recorded", "step": step, "tokens": tokens, "at_ns": at_ns, "values": values}


def job(
    rounds: int = 20,
    agreement: float | None = 0.25,
    balance: float | None = None,
    looks: int = 1,
    **values: float,
) -> RunFacts:
    """Values are recorded at each look."""
    run = Run().both(progress(1))
    for version in range(1, rounds + 1):
        more = {"live": 2, "momentum": 0.5, "balance": balance}
        run.both({**commit(0, version, {0: version, 1: version}), **more})
    for look in range(1, looks + 1 if values else 1):
        run.both(recorded(look, **values))
    return run.both(progress(9, merges=rounds, agreement=agreement)).ends()


def without_exchange(steps: int = 9, **values: float) -> RunFacts:
    run = Run().both({"kind": "start", "exchange": False})
    return run.both(recorded(steps, **values)).both(progress(steps)).ends()


def test_merged_value_lower_than_the_racks_own_is_no_answer_without_a_run_alone() -> None:
    said = learning(job(held_out=2.0, held_out_merged=1.5), {}, 0.0)
    assert "model is 1.5, " in said[0]
    assert "(-25.0 %), lower in 2 of 2 looks" in said[0]
    assert "averag" in said[0]
    assert "cannot be said" in said[1]
    assert not any("merging helped" in each for each in said)


def test_merged_value_not_lower_than_the_racks_own_proves_nothing() -> None:
    said = learning(job(held_out=2.0, held_out_merged=2.5), {}, 0.0)
    assert "proves nothing" in said[0]
    assert said[-1] == "Change first: nothing that these figures show"


@pytest.mark.parametrize(
    ("alone", "word", "first"),
    [
        (1.6, "merging helped", "nothing"),
        (1.5, "did not help", "outer_optimizer_momentum, to 0"),
    ],
)
def test_run_without_exchange_of_equal_steps_answers(alone: float, word: str, first: str) -> None:
    facts = job(held_out=2.0, held_out_merged=1.5)
    said = learning(facts, {}, 0.0, without_exchange(held_out=alone))
    assert word in said[1]
    assert said[-1].startswith(f"Change first: {first}")
    shorter = without_exchange(steps=8, held_out=alone)
    assert "cannot be said" in learning(facts, {}, 0.0, shorter)[1]


def test_values_are_compared_at_equal_tokens_of_the_second_half() -> None:
    run = Run().both(progress(1)).both({**commit(0, 1, {0: 1, 1: 1}), "live": 2})
    for step in range(1, 9):
        run.both(recorded(step, held_out=1.0 * step))
        if step % 2 == 0:
            run.both(recorded(step, held_out_merged=1.0 * step - (step == 8)))
    (found,) = compared(run.both(progress(9)).ends(), None)
    assert (found.own, found.merged, found.looks, found.lower) == (7.0, 6.5, 4, 2)


def test_falling_loss_is_no_answer() -> None:
    said = learning(job(loss=2.0), {}, 0.0)
    assert "held_out_merged" in said[0]
    assert "A loss that falls is no answer" in said[0]


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
        (job(), {"sync_period_steps": 4}, 0.0, "sync_period_steps, from 4 to 32: that sends 4/32"),
        (job(agreement=0.01), {"sync_period_steps": 16}, 0.0, "nothing"),
        (job(agreement=-0.31), {"sync_period_steps": 16}, 0.0, "no setting, but the data"),
        (
            job(),
            {"sync_period_steps": 16, "racks": 2, "outer_optimizer_momentum": 0.9},
            0.0,
            "outer_optimizer_momentum, from 0.9 to its default, 0.5",
        ),
        (
            job(),
            {"sync_period_steps": 32, "racks": 4, "outer_optimizer_momentum": 0.9},
            0.0,
            "nothing",
        ),
        (job(), {"sync_period_steps": 32}, 0.0, "nothing"),
    ],
)
def test_first_change_is_the_first_that_applies(
    facts: RunFacts, settings: dict[str, object], stall: float, first: str
) -> None:
    assert learning(facts, settings, stall)[-1].startswith(f"Change first: {first}")


def test_run_without_rounds_says_nothing() -> None:
    assert learning(Run().both(progress(1)).ends(), {}, 0.0) == []
