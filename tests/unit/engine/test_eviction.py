"""A rack that the log evicts leaves behind a step of all its ranks, with its work merged."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future

import pytest

from mend.consensus.records import AWAITED, EVICTED, Mitigation
from mend.coordination.events import Captured, Leaving, Started
from mend.engine.io.process_age import process_age_ns, startup_ns
from mend.errors import EVICTED_EXIT, Evicted
from mend.types import SECOND
from tests.unit.engine.hand import MINE, SHUTDOWN_NS, TOKENS, Hand

REASON = "rack 0 is slow"


def told(hand: Hand, stage: int = EVICTED) -> None:
    hand.published.on_decided(Mitigation(MINE.rack, stage, REASON))


def others(hand: Hand) -> None:
    """Merge whatever this rack offers, and let it go."""
    if hand.fragment_state().offer is not None:
        hand.decide(0.5, names=True)
    elif hand.posted(Leaving):
        hand.published.finish()


def test_evicted_rack_leaves_with_its_last_work_merged_and_names_the_remedy() -> None:
    hand = Hand(polls=2, period=40, stall_max_ns=0)
    hand.during = lambda: others(hand)
    hand.step()
    told(hand)
    with pytest.raises(Evicted, match="rack 0 was evicted after step 2: rack 0 is slow") as found:
        hand.step()
    assert found.value.code == EVICTED_EXIT
    assert "Start it again" in str(found.value)
    assert [c.tokens for c in hand.posted(Captured)] == [2 * TOKENS]
    assert hand.trainer.open_tokens() == 0
    assert hand.posted(Leaving) == [Leaving(now=True)]
    ((_, about),) = hand.noted("evicted")
    assert (about["step"], about["reason"]) == (2, REASON)
    assert hand.trainer.outcome.word == "evicted"
    with pytest.raises(Evicted):
        hand.step(2)


def test_evicted_rack_merges_its_open_offer_before_its_later_work() -> None:
    hand = Hand(stall_max_ns=0)
    hand.step(4)
    hand.step()
    told(hand)
    hand.during = lambda: others(hand)
    with pytest.raises(Evicted):
        hand.step()
    assert [c.tokens for c in hand.posted(Captured)] == [4 * TOKENS, 2 * TOKENS]
    assert hand.trainer.open_tokens() == 0


def test_evicted_rack_trains_on_until_all_its_ranks_have_heard() -> None:
    hand, heard = Hand(ranks=2, polls=2, period=40, stall_max_ns=0), False
    hand.agree = lambda values: values if heard else [0 if v == 1 else v for v in values]
    hand.during = lambda: others(hand)
    told(hand)
    hand.step(3)
    assert hand.noted("evicted") == []
    heard = True
    with pytest.raises(Evicted):
        hand.step()


def test_evicted_rack_trains_on_until_its_checkpoint_is_complete() -> None:
    """Without its part no rack could complete it."""
    hand = Hand(polls=2, period=40, stall_max_ns=0)
    hand.during = lambda: others(hand)
    hand.trainer.life.writing = written = Future[None]()
    told(hand)
    hand.step(4)
    assert hand.posted(Leaving) == hand.noted("evicted") == []
    written.set_result(None)
    with pytest.raises(Evicted):
        hand.step(2)


def test_work_that_nobody_merges_keeps_it_in_the_job() -> None:
    """It tries once: each time costs it the time that a rack has to leave."""
    hand = Hand(polls=2, period=40, stall_max_ns=0)
    told(hand)
    hand.step(2)
    ((_, about),) = hand.noted("eviction-failed")
    assert "1 offers are still open" in about["detail"]
    assert hand.posted(Leaving) == []
    assert sum(hand.waits) >= SHUTDOWN_NS
    assert hand.posted(Started)[-1] == Started(0), "the coordinator is told"
    hand.step(6)
    assert len(hand.noted("eviction-failed")) == 1


def test_evicted_rack_stays_when_the_others_need_it_after_all() -> None:
    hand = Hand(polls=2, period=40, stall_max_ns=0)

    def merge() -> None:
        others(hand)
        told(hand, AWAITED)

    hand.during = merge
    told(hand)
    hand.step(2)
    assert hand.posted(Leaving) == []
    ((_, about),) = hand.noted("eviction-failed")
    assert about["detail"] == "it was taken back meanwhile"
    told(hand)
    hand.during = lambda: others(hand)
    with pytest.raises(Evicted):
        hand.step(2)


def test_start_duration_is_posted_once_with_the_first_step() -> None:
    hand = Hand(stall_max_ns=0)
    hand.trainer.life.started_ns -= 3 * SECOND
    hand.now_ns += SECOND
    hand.step(3)
    assert hand.posted(Started) == [Started(4 * SECOND)]


def test_a_process_knows_since_when_it_runs() -> None:
    begun_ns = time.monotonic_ns()
    before_ns = process_age_ns()
    assert before_ns > 0
    assert 0 <= process_age_ns() - before_ns <= time.monotonic_ns() - begun_ns


def test_a_second_life_in_a_process_costs_no_more_to_start_than_the_first() -> None:
    """What the first one trained is no part of it: the price grew with it, and nobody paid."""
    first_ns = startup_ns()
    assert startup_ns() == first_ns < process_age_ns()


def test_eviction_in_a_loop_that_catches_exceptions_ends_the_loop() -> None:
    """Loops catch Exception to skip a bad batch; the evicted rack trained on in it, merged
    nowhere."""
    steps: list[int] = []

    def train() -> None:
        for step in range(3):
            steps.append(step)
            with contextlib.suppress(Exception):
                raise Evicted("rack 0 was evicted")

    with pytest.raises(Evicted):
        train()
    assert steps == [0]
