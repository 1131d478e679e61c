"""Without lockstep racks differ in speed and links in delay. Nothing is decided beforehand, and
still everything is accounted for, and can be computed again from what the racks recorded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.process.conftest import Jobs
from tests.process.racks import Result
from tests.process.replayed import anchor_bits, model_bits, replayed
from tests.process.train import bits

CONFIG: dict[str, Any] = {
    "fragments": 3, "sync_period_steps": 12, "overlap_steps": 3, "staleness_max_rounds": 8,
    "simulated_merge_delay_ms": 20, "simulated_merge_delay_distribution": "long_tail",
    "simulated_merge_delay_seed": 5,
}  # fmt: skip
SLOW_MS, FAST_MS = 7.0, 4.0


def accounts_close(result: Result) -> None:
    for status in (result.before_shutdown, result.status):
        ledger = status["ledger"]
        assert ledger["discarded"] == 0
        assert sum(ledger.values()) == pytest.approx(status["tokens"])
    assert result.status["ledger"]["open"] == 0


RAMPED = {"outer_optimizer_momentum": 0.5, "outer_ramp_rounds": 3}


@pytest.mark.parametrize(
    "payload", ["float32", "bfloat16", pytest.param("int4", marks=pytest.mark.slow), "topk"]
)
def test_a_free_run_can_be_computed_again(jobs: Jobs, payload: str) -> None:
    config = {**CONFIG, "codec": payload, **(RAMPED if payload == "bfloat16" else {})}
    slow = {"pace_ms": SLOW_MS, "steps": 70}
    results = jobs(witness=payload == "float32").run(
        steps=110, pace_ms=FAST_MS, keep_local=True, config=config, per={1: slow}
    )
    first, second = results
    assert first.digest == second.digest
    assert first.commits == second.commits
    for result in results:
        accounts_close(result)
        assert not result.kinds("kept-local", "discarded", "drain-gave-up")
    merged = [
        sum(m["tokens"] for c in first.commits for m in c["members"] if m["rack"] == rack)
        for rack in (0, 1)
    ]
    assert merged == [3 * result.status["tokens"] for result in results], "in each of 3 fragments"

    parts = [commit["part"] for commit in first.commits]
    assert all(
        (part < 1) == bool(c["absent"]) for part, c in zip(parts, first.commits, strict=True)
    )

    outcome = replayed(results, "plain", config)
    thetas = [model_bits(result, "plain", config) for result in results]
    assert thetas == [[bits(theta) for theta in rack] for rack in outcome.thetas]
    assert len(outcome.anchors[0]) > 4, "a run without merges proves nothing"


@pytest.mark.parametrize("payload", ["int4", "topk"])
def test_last_offers_of_unequal_numbers_of_steps_are_computed_again(
    jobs: Jobs, payload: str
) -> None:
    """No capture falls into so short a run, and rack 0 makes its steps before the other's last
    offers open rounds: each fragment is merged once, of 30 steps and 10. With topk it is the mean,
    as its last offers hold all that was left out before, however long that took."""
    config = {
        **CONFIG, "sync_period_steps": 400, "overlap_steps": 0, "grace_window_ms": 60_000.0,
        "codec": payload,
    }  # fmt: skip
    job = jobs()
    made = job.gate("made")
    ends = {0: {"at": {"end": [["touch", made]]}},
            1: {"at": {"end": [["gate", made]]}, "steps": 10}}  # fmt: skip
    results = job.run(ends, steps=30, pace_ms=FAST_MS, config=config)
    merges = [[(m["rack"], m["steps"]) for m in c["members"]] for c in results[0].commits]
    assert merges == [[(0, 30), (1, 10)]] * 3
    outcome = replayed(results, "plain", config)
    for result in results:
        assert model_bits(result, "plain", config) == anchor_bits(outcome)


def test_the_anchor_that_is_left_behind_is_the_replayed_one(jobs: Jobs) -> None:
    results = jobs().run(steps=50, pace_ms=FAST_MS, config=CONFIG, per={1: {"pace_ms": SLOW_MS}})
    assert results[0].weights == results[1].weights
    outcome = replayed(results, "plain", CONFIG)
    assert model_bits(results[0], "plain", CONFIG) == anchor_bits(outcome)


@pytest.mark.parametrize(
    "payload",
    [
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("bf16", "int8", "e3m0")),
        "int4",
        "topk",
    ],
)
def test_every_update_is_in_exactly_one_place(jobs: Jobs, payload: str) -> None:
    """U + sent + residual + (anchor - theta) = 0, up to the rounding of a few thousand fp32
    sums."""
    config = {**CONFIG, "codec": payload}
    job, per = jobs(), {0: {"pace_ms": FAST_MS}, 1: {"pace_ms": SLOW_MS}}
    job.run(per, script="tests.process.ledger", steps=60, config=config)
    for told in (job.told(0), job.told(1)):
        assert told["named"] >= 6
        assert len(told["ledger"]) == 3
        assert max(told["ledger"]) < 1e-5
