"""Whether merging helped: what the recorded figures say, and the one thing to change first."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mend.tools.report.facts import RunFacts
from mend.tools.report.learning import (
    compared,
    learning,
    mean_cosine,
    momentum_cosine,
    momentum_noise,
)
from mend_lab.reference import Anchor, Settings, outer_step
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
    [(1.6, "merging helped", "nothing"), (1.5, "did not help", "outer_optimizer_momentum, to 0")],
)
def test_run_without_exchange_of_equal_steps_answers(alone: float, word: str, first: str) -> None:
    facts = job(held_out=2.0, held_out_merged=1.5)
    said = learning(facts, {}, 0.0, without_exchange(held_out=alone))
    assert word in said[1]
    assert said[-1].startswith(f"Change first: {first}")
    shorter = without_exchange(steps=8, held_out=alone)
    assert "cannot be said" in learning(facts, {}, 0.0, shorter)[1]


def test_steps_between_capture_and_apply_are_said_with_their_limit() -> None:
    run = Run().both(progress(1))
    for seq, step in ((1, 12), (2, 15)):
        run.both({"kind": "captured", "fragment": 0, "seq": seq, "step": 10})
        run.both({**commit(0, seq, {0: seq, 1: seq}), "live": 2})
        run.both({"kind": "applied", "fragment": 0, "seq": seq, "step": step, "fate": "named"})
    facts = run.both(progress(9)).ends()
    said = "Racks made 3.5 steps on average between the capture of an offer and the apply"
    for settings, limit in (
        ({}, "merge; the"),
        ({"overlap_steps": 9}, "merge (overlap_steps 9); "),
        ({"overlap_steps": None, "sync_period_steps": 24}, "merge (overlap_steps 6); "),
    ):
        (sentence,) = [each for each in learning(facts, settings, 0.0) if said in each]
        assert limit in sentence


def test_values_are_compared_at_equal_tokens_of_the_second_half() -> None:
    run = Run().both(progress(1)).both({**commit(0, 1, {0: 1, 1: 1}), "live": 2})
    for step in range(1, 9):
        run.both(recorded(step, held_out=1.0 * step))
        if step % 2 == 0:
            run.both(recorded(step, held_out_merged=1.0 * step - (step == 8)))
    (found,) = compared(run.both(progress(9)).ends(), None)
    assert (found.own, found.merged, found.looks, found.lower) == (7.0, 6.5, 4, 2)


def test_infinities_of_both_signs_have_a_mean_that_is_no_number() -> None:
    """An exact sum of them raises, and there was no report."""
    run = Run().both(progress(1)).both({**commit(0, 1, {0: 1, 1: 1}), "live": 2})
    for step, word in enumerate(("0", "0", "inf", "-inf")):
        run.both({**recorded(step), "values": dict.fromkeys(("held_out", "held_out_merged"), word)})
    assert "model is nan, " in learning(run.both(progress(9)).ends(), {}, 0.0)[0]


def test_falling_loss_is_no_answer() -> None:
    said = learning(job(loss=2.0), {}, 0.0)
    assert "held_out_merged" in said[0]
    assert "A loss that falls is not an answer" in said[0]


def test_cosine_says_how_much_of_a_step_is_not_shared() -> None:
    """Shared .25, and half of .75 in a mean of two: .375 / .625."""
    facts = job(agreement=0.25)
    assert mean_cosine(facts) == 0.25
    assert any("cosine of 0.25" in each and "60%" in each for each in learning(facts, {}, 0.0))
    said = learning(job(agreement=None), {}, 0.0)
    assert not any("cosine" in each for each in said)


def test_what_was_not_compared_is_said_with_the_reason() -> None:
    """The lines were left out, and nobody knew why."""
    (line,) = [each for each in learning(job(agreement=None), {}, 0.0) if "not known" in each]
    assert line.endswith("not known, as no two deltas were compared")
    (line,) = [each for each in learning(job(agreement=0.25), {}, 0.0) if "not known" in each]
    assert line.startswith("Noise of the momentum: not known, as no offer was compared")
    run = Run().both(progress(1)).both({**commit(0, 1, {0: 1}), "live": 2})
    said = learning(run.both(progress(9, merges=1, agreement=0.25)).ends(), {}, 0.0)
    assert any(each.endswith("most rounds merged one rack alone") for each in said)


def test_balance_of_signs_says_how_much_of_the_momentum_is_noise() -> None:
    """sin(pi / 6) is a half, and 1 - .25 / .3125 a fifth."""
    facts = job(agreement=0.3125, balance=1 / 3)
    assert momentum_cosine(facts) == pytest.approx(0.5)
    said = " ".join(learning(facts, {}, 0.0))
    assert "in 20 rounds: 20% of its squared length" in said
    assert momentum_cosine(job()) is None
    assert momentum_noise(0.5, -0.1) == 1.0, "it points against them"
    assert momentum_noise(-0.1, 0.1) == 1.0, "they have nothing in common"
    assert momentum_noise(0.1, 0.9) is None, "each goes on in a direction of its own"
    assert "direction of its own" in " ".join(learning(job(agreement=0.1, balance=0.5), {}, 0.0))


@pytest.mark.parametrize(("shared", "turn"), [(0.3, 0.0), (1.0, 0.0), (0.6, 0.2)])
def test_noise_of_a_momentum_is_that_of_planted_offers(shared: float, turn: float) -> None:
    """Four racks, whose deltas are a common direction, which turns from round to round, and normal
    noise of length 1: the estimate from signs and cosines is the part of the momentum that is not
    along the direction of the round."""
    numel, generator = 200_000, torch.Generator().manual_seed(4)
    settings = Settings(fragments=[[0]], period=16, overlap=0, outer_lr=1.0, momentum=0.8)

    def normal() -> torch.Tensor:
        return torch.randn(numel, generator=generator) / math.sqrt(numel)

    anchor, common = Anchor(0, torch.zeros(numel), torch.zeros(numel)), shared * normal()
    for _ in range(20):
        common = math.sqrt(1 - turn) * common + math.sqrt(turn) * shared * normal()
        offers = [common + normal() for _ in range(4)]
        before = anchor.state
        assert before is not None
        anchor = outer_step(anchor, sum(offers[1:], offers[0]) / 4, settings)
    units = torch.stack([each / each.norm() for each in offers])
    agreement = (float(units.sum(0).square().sum()) - 4) / 12
    balance = float(torch.stack([(each.sign() * before.sign()).mean() for each in offers]).mean())
    along = float(torch.dot(before, common)) / float(before.norm() * common.norm())
    estimate = momentum_noise(agreement, math.sin(math.pi / 2 * balance))
    assert estimate == pytest.approx(1 - along * along, abs=0.03)


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({"outer_optimizer_momentum": 0.6}, "outer_optimizer_momentum (lower than 0.6), or the"),
        ({}, "the learning rate (lower), unless"),
    ],
)
def test_first_change_after_a_warning_of_growing_offers_makes_steps_shorter(
    settings: dict[str, object], first: str
) -> None:
    facts = job()
    facts.fault_counts["offers-grow"] += 1
    said = learning(facts, {"sync_period_steps": 32, "racks": 2, **settings}, 0.0)
    assert said[-1].startswith(f"Change first: {first}")


@pytest.mark.parametrize(
    ("facts", "settings", "stall", "first"),
    [
        (
            job(),
            {"codec": "float32"},
            0.2,
            "codec, from float32 to int8, or overlap_steps (longer)",
        ),
        (job(), {"codec": "int8"}, 0.2, "codec, from int8 to int4, or overlap_steps (longer)"),
        (job(), {"codec": "topk"}, 0.2, "overlap_steps (longer), because"),
        (job(), {"sync_period_steps": 32}, 0.2, "overlap_steps (longer), because"),
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
