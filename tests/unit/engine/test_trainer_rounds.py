"""What the training thread does after a step. Offers are counted at capture and end by the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from mend.consensus.records import AWAITED, SMALLER, TEXT_MAX, Last, Mitigation, Snapshot
from mend.coordination.events import (
    Applied,
    BatchSet,
    Captured,
    Discarded,
    StepReached,
    StillOpen,
    Timed,
)
from mend.engine.compute import offers
from mend.engine.compute.digest import digest_of_state
from mend.engine.joining.training_state import LikeFirst, Mirror, Replicas, TrainingState
from mend.engine.state.fragment_state import AgreeMin, GatherSlices, OpenOffer
from mend.engine.state.published_state import NewestOrders
from mend.engine.trainer.trainer_rounds import ASLEEP_NS
from mend.errors import Diverged, GaveUp, MendError, NonFinite, require
from mend.transport.growth import Growth
from mend.types import SECOND, Member
from mend_lab.sim.vector_ledger import VectorLedger
from tests.unit.coordination.nouns import genesis, log_of
from tests.unit.engine.hand import MINE, NUMEL, STALL_NS, THEIRS, WAIT_TIMEOUT_NS, Hand

PATIENT: dict[str, Any] = {"stall_max_ns": 0}
"""Options of a thread that never waits."""


def steps_of(hand: Hand, *kinds: str) -> list[tuple[str, int, int]]:
    return [(kind, fields["step"], fields["fragment"]) for kind, fields in hand.noted(*kinds)]


# -------------------------------------------------------------- the order in a step


def test_within_a_step_first_what_is_applied_then_what_is_captured() -> None:
    hand = Hand(fragments=2, period=2, overlap=1)
    for _ in range(4):
        hand.step()
        for fragment in (0, 1):
            if hand.fragment_state(fragment).offer is not None:
                hand.decide(0.5, fragment, names=True)
    assert steps_of(hand, "applied", "captured") == [
        ("captured", 1, 0),
        ("applied", 2, 0), ("captured", 2, 1),
        ("applied", 3, 1), ("captured", 3, 0),
        ("applied", 4, 0), ("captured", 4, 1),
    ]  # fmt: skip


def test_fragments_of_one_step_ascend() -> None:
    hand = Hand(fragments=4, period=2, overlap=1, **PATIENT)
    hand.step(2)
    assert steps_of(hand, "captured") == [
        ("captured", 1, 1), ("captured", 1, 2), ("captured", 2, 0), ("captured", 2, 3),
    ]  # fmt: skip


def test_without_overlap_a_capture_is_awaited_and_applied_in_its_own_step() -> None:
    hand = Hand(period=2, overlap=0)
    hand.during = lambda: hand.decide(0.125, names=True)
    hand.step(2)
    assert steps_of(hand, "captured", "applied") == [("captured", 2, 0), ("applied", 2, 0)]
    assert hand.theta() == 0.125, "nothing was learnt meanwhile"


def test_blocking_waits_at_capture_and_still_applies_tau_steps_later() -> None:
    hand = Hand(overlapped=False)
    hand.during = lambda: hand.decide(0.75, names=True)
    hand.step(4)
    assert hand.waits == [STALL_NS]
    assert hand.theta() == 1.0
    assert hand.noted("applied") == []
    hand.step(2)
    assert steps_of(hand, "applied") == [("applied", 6, 0)]
    assert hand.theta() == 1.25


@pytest.mark.parametrize("size", [3, 1 << 20])
@pytest.mark.parametrize("options", [{"overlap": 0}, {"overlapped": False}, {"lockstep": True}])
def test_offer_encoded_behind_the_copy_has_the_bits_of_one_encoded_later(
    options: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where training waits, the training thread encodes portion by portion while it copies."""
    grown: list[tuple[torch.Tensor, Growth]] = []

    def grows(offer: OpenOffer, payload_B: torch.Tensor) -> Growth:
        assert hand.offers == [offer], "the loop begins to pull before the first byte is encoded"
        grown.append((payload_B, Growth()))
        return grown[-1][1]

    monkeypatch.setattr(offers, "PORTION_NUMEL", size)
    made = []
    for later in (False, True):
        hand = Hand(numel=7, period=4, **options)
        hand.replace_parts(grows=grows)
        if later:
            monkeypatch.setattr(hand.trainer, "_waits_for_result", lambda: False)
        hand.during = lambda hand=hand: hand.decide(0.125, names=True)
        hand.step(4, move=0.1)
        made.append(hand.offers[0])
    behind, later = made
    waits = "lockstep" not in options
    assert (behind.encoding is not None, later.encoding) == (waits, None)
    assert torch.equal(behind.delta_N, later.delta_N)
    assert behind.anchor.values.sub(behind.delta_N).abs().max() > 0
    assert len(grown) == waits
    for payload_B, growth in grown:
        assert growth.filled == payload_B.numel() == 4 * 7
        assert torch.equal(payload_B, behind.delta_N.view(torch.uint8))


def test_offer_with_nan_that_is_encoded_behind_the_copy_is_declined() -> None:
    hand = Hand(period=2, overlap=0)
    hand.step(1)
    with pytest.raises(Diverged):
        hand.step(1, move=float("nan"))
    (offer,) = hand.offers
    with pytest.raises(NonFinite, match="element 0 of the delta"):
        require(offer.encoding, "it is encoded by a worker")()


def test_progress_is_told_without_the_time_that_was_waited() -> None:
    hand = Hand(overlapped=False)
    for _ in range(4):
        hand.now_ns += SECOND
        hand.step()
    assert hand.waits == [STALL_NS]
    for _ in range(2):
        hand.now_ns += SECOND
        hand.step()
    assert hand.posted(StepReached) == [StepReached(step, SECOND) for step in (4, 6)]


def test_untimed_section_is_not_part_of_a_step() -> None:
    """A checkpoint of a minute made all racks slow, and every grace window behind it wider."""
    hand = Hand(**PATIENT)
    for step in range(1, 9):
        hand.now_ns += SECOND
        hand.step()
        if step == 2:
            with hand.trainer.clock.untimed():
                hand.now_ns += 60 * SECOND
    assert {progress.step_ns for progress in hand.posted(StepReached)} == {SECOND}
    assert {timed.ns for timed in hand.posted(Timed)} == {SECOND}


# -------------------------------------------------------------- fewer micro-batches


def test_a_slow_rack_takes_fewer_from_an_apply_point_on_that_all_its_ranks_share() -> None:
    """Another rank has not heard of it yet at the first apply point, and would take all."""
    hand, heard = Hand(ranks=2, polls=2, period=40, **PATIENT), False
    hand.agree = lambda values: values if heard else [*values[:2], 100, -100, *values[4:]]
    mine, reason = MINE.rack, "rack 0 is slow"
    hand.published.on_decided(Mitigation(THEIRS.rack, SMALLER, "slow", 10))
    hand.published.on_decided(Mitigation(mine, SMALLER, reason, 50))
    hand.step(3)
    assert hand.trainer.ladder.batch_pct == 100
    heard = True
    hand.step()
    assert hand.trainer.ladder.batch_pct == 50
    assert hand.posted(BatchSet) == [BatchSet(4, 50)], "it is on the tape, for a replay"
    assert hand.noted("local-batch") == [
        ("local-batch", {"step": 4, "batch_pct": 50, "reason": reason})
    ]
    hand.published.on_decided(Mitigation(mine, AWAITED, "it is no longer slow"))
    hand.step(4)
    assert hand.posted(BatchSet)[1:] == [BatchSet(6, 100)]


def test_how_many_the_script_asks_about_is_told_with_the_time_of_the_step() -> None:
    hand = Hand(**PATIENT)
    for batch in (8, 8, 0):
        hand.trainer.clock.batch = batch or hand.trainer.clock.batch
        hand.now_ns += SECOND
        hand.step()
    assert [timed.batch for timed in hand.posted(Timed)] == [8, 0]


# -------------------------------------------------------------- an offer that is named


def test_training_since_the_capture_is_carried_over_the_apply() -> None:
    """A = 0; theta is 1 at capture and 1.5 at the apply; the merge went to 0.75."""
    hand = Hand()
    hand.step(4)
    (captured,) = hand.posted(Captured)
    assert captured == Captured(0, 1, 0, 4, 40, 4)
    hand.decide(0.75, names=True)
    hand.step(2)
    assert hand.theta() == 0.75 + 0.5
    assert hand.posted(Applied) == [Applied(0, 1, 1, 6)]
    assert hand.fragment_state().offer is None
    assert hand.trainer.ledger.merged == 40
    assert hand.trainer.ledger.discarded == 0
    assert hand.trainer.ledger.missed == {}


def test_tokens_are_counted_from_capture_to_capture() -> None:
    """The apply at step 6 must not take the tokens of steps 5 and 6 along."""
    hand = Hand()
    hand.step(4)
    hand.decide(0.75, names=True)
    hand.step(4)
    assert [(c.step, c.tokens, c.steps) for c in hand.posted(Captured)] == [(4, 40, 4), (8, 40, 4)]
    assert hand.trainer.open_tokens() == 40


@pytest.mark.parametrize(
    ("apply_mode", "theta", "given_up"),
    [("overwrite", 0.5, 20), ("blend", 0.5 + 0.25 * (1.5 - 0.5), 0)],
)
def test_overwrite_gives_up_what_was_learnt_since_and_blend_offers_all_of_it_again(
    apply_mode: str, theta: float, given_up: int
) -> None:
    hand = Hand(apply_mode=apply_mode, blend_alpha=0.25)
    hand.step(4)
    hand.decide(0.5, names=True)
    hand.step(2)
    assert hand.theta() == theta
    assert (hand.trainer.ledger.merged, hand.trainer.ledger.discarded) == (40, given_up)
    hand.step(2)
    assert [c.tokens for c in hand.posted(Captured)] == [40, 40 - given_up]
    assert hand.trainer.open_tokens() == 40 - given_up


@pytest.mark.parametrize("apply_mode", ["carry", "overwrite", "blend"])
def test_training_of_a_rack_missing_from_the_commit_is_carried_in_every_mode(
    apply_mode: str,
) -> None:
    hand = Hand(apply_mode=apply_mode)
    hand.step(4)
    hand.decide(0.5)
    hand.step(2)
    assert hand.theta() == 0.5 + 1.5
    assert hand.trainer.ledger.discarded == 0


# -------------------------------------------------------------- an offer that is late, or dropped


def test_a_late_offer_stays_open_and_is_measured_in_the_new_frame() -> None:
    """Captured at 1 over A = 0; then A = 0.5 without it: its snapshot is now 1.5, not 1."""
    hand = Hand()
    hand.step(4)
    hand.decide(0.5)
    hand.step(2)
    assert hand.theta() == 2.0
    assert hand.posted(Applied) == [Applied(0, 1, 0, 6)]
    assert hand.trainer.ledger.missed == {
        "offer was late": 1, "result not there at the apply point": 1
    }  # fmt: skip
    hand.step(2)
    assert hand.posted(StillOpen) == [StillOpen(0, 1)]
    assert len(hand.posted(Captured)) == 1
    hand.decide(2.0, names=True)
    hand.step(2)
    assert hand.theta() == 2.0 + (3.0 - 1.5)
    assert hand.posted(Applied)[1:] == [Applied(0, 2, 1, 10)]
    hand.step(2)
    assert [(c.tokens, c.steps, c.base) for c in hand.posted(Captured)] == [(40, 4, 0), (80, 8, 2)]


def test_an_open_offer_is_not_captured_again() -> None:
    hand = Hand(**PATIENT)
    hand.step(12)
    assert [c.seq for c in hand.posted(Captured)] == [1]
    assert hand.posted(StillOpen) == [StillOpen(0, 0), StillOpen(0, 0)]
    assert steps_of(hand, "still-open") == [("still-open", 8, 0), ("still-open", 12, 0)]
    assert hand.trainer.ledger.missed["previous offer still open"] == 2
    assert hand.fragment_state().seq == 1


def test_a_dropped_offer_is_as_if_it_was_never_made() -> None:
    hand = Hand()
    hand.step(4)
    hand.decide(0.5, drops=True)
    hand.step(2)
    assert hand.theta() == 0.5 + 1.5
    assert hand.posted(Applied) == [Applied(0, 1, 1, 6)]
    assert hand.fragment_state().offer is None
    assert (hand.trainer.ledger.merged, hand.trainer.ledger.discarded) == (0, 0)
    assert hand.trainer.ledger.missed == {"offer dropped: too old": 1}
    hand.step(2)
    assert [(c.seq, c.tokens) for c in hand.posted(Captured)] == [(1, 40), (2, 80)]


def test_the_fate_is_read_from_every_commit_on_the_way() -> None:
    """Versions 1 and 2 were decided meanwhile, 1 names the offer: 2 is applied, as named."""
    for first, fate in (({"names": True}, "named"), ({"drops": True}, "dropped"), ({}, "none")):
        hand = Hand()
        hand.step(4)
        hand.decide(0.5, **first)
        hand.decide(0.75)
        hand.step(2)
        ((_, fields),) = hand.noted("applied")
        assert (fields["version"], fields["fate"]) == (2, fate)
        assert hand.posted(Applied) == [Applied(0, 2, 1 if first else 0, 6)]
        assert hand.theta() == (0.75 + 0.5 if fate == "named" else 0.75 + 1.5)


def test_rounding_is_owed_once_the_offer_is_named_and_not_before() -> None:
    """bfloat16 cannot say 0.1: what it leaves out is pending until the log names the offer."""
    hand = Hand(payload="bfloat16")
    hand.step(4, move=0.1)
    first = hand.offers[0].pend_N
    assert first is not None
    assert first.abs().max() > 0
    assert hand.fragment_state().residual_N is None
    hand.decide(0.5, names=True)
    hand.step(2)
    assert hand.fragment_state().residual_N is first
    hand.step(2)
    second = hand.offers[1].pend_N
    assert hand.offers[1].residual_N is first
    hand.decide(0.5, drops=True)
    hand.step(2)
    assert hand.fragment_state().residual_N is first, "a dropped offer took nothing along"
    assert second is not None
    assert not torch.equal(first, second)


def test_with_feedback_in_the_weights_what_was_left_out_stays_there() -> None:
    """topk cannot say 0.4: it sends 0.400390625, the bfloat16 nearest to it."""
    hand, sent_ = Hand(payload="topk", in_weights=True), 0.400390625
    hand.step(4, move=0.1)
    theta = hand.theta()
    offer = hand.offers[0]
    assert offer.sent_N is not None
    assert offer.sent_N.tolist() == [-sent_] * 4
    assert (offer.pend_N, offer.residual_N) == (None, None)
    hand.decide(-0.25)
    hand.step(2, move=0)
    assert hand.theta() == pytest.approx(theta - 0.25), "refused so far: nothing is lost"
    hand.decide(-0.5, names=True)
    hand.step(2, move=0)
    assert hand.theta() == pytest.approx(theta - sent_ - 0.5, abs=1e-7)
    assert hand.fragment_state().residual_N is None
    hand.step(2, move=0.1)
    assert hand.offers[1].residual_N is None


def test_with_feedback_in_the_weights_a_step_is_left_for_the_closing_offer() -> None:
    """The script ends at a capture: all that topk could not say must have something to go with."""
    hand = Hand(payload="topk", in_weights=True, overlap=0)

    def others() -> None:
        if hand.fragment_state().offer is None:
            hand.published.finish()
        else:
            hand.decide(-0.5, names=True)

    hand.during = others
    hand.step(4, move=0.1)
    assert hand.fragment_state().offer is None, "named at once"
    assert [(c.tokens, c.steps) for c in hand.posted(Captured)] == [(30, 3)]
    assert hand.trainer.open_tokens() == 10
    hand.run(hand.trainer.close())
    assert hand.trainer.open_tokens() == 0
    last = hand.offers[-1]
    assert last.closing
    assert last.sent_N is None, "all of it is sent"
    assert [(c.tokens, c.steps) for c in hand.posted(Captured)] == [(30, 3), (10, 1)]


Fate = st.sampled_from(["named", "late", "dropped", "nothing"])


@given(
    st.lists(Fate, max_size=12),
    st.sampled_from(["float32", "bfloat16", "topk"]),
    st.integers(0, 3),
)
def test_carry_neither_loses_nor_doubles_an_update(
    fates: list[str], payload: str, overlap: int
) -> None:
    """The one-ledger identity (mend_lab.sim.vector_ledger), whatever becomes of the offers."""
    hand = Hand(payload=payload, in_weights=payload == "topk", overlap=overlap, **PATIENT)
    ledger, state, before_N, theta_N = (
        VectorLedger(NUMEL),
        hand.fragment_state(),
        *torch.empty(2, NUMEL),
    )
    for fate in [*fates, "nothing"]:
        for _ in range(4):
            hand.notes.clear()
            state.view.read(state.owned, before_N)
            hand.update(0.1)
            state.view.read(state.owned, theta_N)
            ledger.moved(before_N, theta_N)
            hand.counted()
            for _, fields in hand.noted("applied"):
                if fields["fate"] == "named":
                    ledger.named(sent(hand.offers[fields["seq"] - 1]))
        if fate == "late" or (fate != "nothing" and state.offer is not None):
            hand.decide(0.3, names=fate == "named", drops=fate == "dropped")
    state.view.read(state.owned, theta_N)
    assert ledger.error(theta_N, state.anchor.values, state.residual_N) < 1e-6


def sent(offer: OpenOffer) -> torch.Tensor:
    """What the others decode."""
    if offer.sent_N is not None:
        return offer.sent_N.double()
    y_N = offer.delta_N.double()
    if offer.residual_N is not None:
        y_N = y_N + offer.residual_N
    return y_N if offer.pend_N is None else y_N - offer.pend_N


# -------------------------------------------------------------- captures that give no offer


def test_a_discarded_capture_is_forgotten_and_trained_on() -> None:
    hand = Hand(**PATIENT)
    hand.step(4)
    hand.published.discard(0, 1)
    hand.step(2)
    assert hand.posted(Discarded) == [Discarded(0, 1, 6)]
    assert hand.fragment_state().offer is None
    assert hand.theta() == 1.5
    assert hand.trainer.ledger.missed["declined or too old"] == 1
    hand.step(2)
    assert [(c.seq, c.tokens) for c in hand.posted(Captured)] == [(1, 40), (2, 80)]


def test_offer_is_discarded_only_when_all_ranks_of_the_rack_know() -> None:
    """Else one rank would capture anew while another still has the old offer."""
    hand = Hand(ranks=2, **PATIENT)
    hand.step(4)
    hand.published.discard(0, 1)
    hand.agree = lambda values: [*values[:-1], 0]  # the other rank has not heard of it
    hand.step(2)
    assert hand.posted(Discarded) == []
    assert hand.fragment_state().offer is not None
    hand.agree = lambda values: values
    hand.step(4)
    assert hand.posted(Discarded) == [Discarded(0, 1, 8)]


# -------------------------------------------------------------- the ranks of a rack


def test_the_collective_is_taken_at_every_apply_point_news_or_not() -> None:
    """A rank that skips it, or takes one more, leaves the others waiting for ever."""
    hand = Hand(ranks=2, fragments=2, period=4, overlap=1, **PATIENT)
    for step in range(1, 13):
        hand.asked = []
        hand.step()
        schedule = hand.trainer.calendar.schedule
        due = schedule.captures(step - 1) or schedule.captures(step)
        assert len(hand.agreements) == int(bool(due)), step
    assert all(isinstance(request, AgreeMin) for request in hand.asked)


def test_a_version_that_another_rank_lacks_is_not_applied() -> None:
    hand = Hand(ranks=2)
    hand.step(4)
    hand.decide(0.75, names=True)
    hand.agree = lambda values: [*values[:4], 0, 0, 0]  # newest 0, oldest 0
    hand.step(2)
    assert hand.noted("applied") == []
    assert hand.theta() == 1.5
    hand.agree = lambda values: values
    hand.step(4)
    assert [fields["version"] for _, fields in hand.noted("applied")] == [1]


def test_ranks_take_the_newest_version_that_all_of_them_have() -> None:
    hand = Hand(ranks=2)
    hand.step(4)
    for to in (0.5, 0.75):
        hand.decide(to)
    hand.agree = lambda values: [*values[:4], 1, -1, 0]  # the other has version 1 only
    hand.step(2)
    assert [fields["version"] for _, fields in hand.noted("applied")] == [1]
    assert hand.theta() == 0.5 + 1.5


def test_ranks_without_a_common_version_apply_nothing() -> None:
    """This rank copied version 2 and never had 1; the other has only 1: min(newest) is not here."""
    hand = Hand(ranks=2)
    hand.step(4)
    hand.decide(0.5, publish=False)
    hand.decide(0.75)
    hand.agree = lambda values: [*values[:4], 1, -1, 0]
    hand.step(2)
    assert hand.agreements == [[100, -100, 0, 0, 2, -2, 0]]
    assert hand.noted("applied") == []
    assert hand.theta() == 1.5


def test_every_rank_writes_the_whole_fragment_from_all_slices() -> None:
    hand = Hand(ranks=2)
    assert hand.fragment_state().owned.numel == NUMEL // 2
    hand.step(4)
    hand.decide(0.75, names=True)
    hand.step(2)
    assert [type(request) for request in hand.asked] == [AgreeMin, GatherSlices]
    assert hand.theta() == 1.25


def test_a_fragment_is_not_applied_within_its_own_overlap() -> None:
    """Fragment 1 is captured at 4 and its overlap ends at 7: the apply point of fragment 0 at 5 is
    too early for it, whatever is decided."""
    hand = Hand(fragments=2, period=4, overlap=3, **PATIENT)
    hand.step(4)
    hand.decide(0.5, 1)
    hand.step()
    assert hand.noted("applied") == []
    hand.step(2)
    assert steps_of(hand, "applied") == [("applied", 7, 1)]


@pytest.mark.parametrize(("decided_after", "applied"), [(3, 4), (4, 5)])
def test_a_late_result_is_applied_when_any_fragment_is_captured_or_due(
    decided_after: int, applied: int
) -> None:
    """Fragment 1 is captured after step 4 and due after step 5."""
    hand = Hand(fragments=2, period=4, overlap=1, **PATIENT)
    hand.step(decided_after)
    hand.decide(0.5, 0, names=True)
    hand.step(2)
    assert steps_of(hand, "applied") == [("applied", applied, 0)]


def test_a_rack_catches_up_before_it_captures() -> None:
    """It was 15 times slower than the others, who had merged four times since its last overlap: its
    offer was too old before anybody had it, so its work never counted."""
    hand = Hand(**PATIENT)
    hand.step(4)
    hand.decide(0.75, names=True)
    hand.step(2)
    for value in (0.5, 0.25, 0.125):
        hand.decide(value)
    hand.step(2)
    assert [event.base for event in hand.posted(Captured)] == [0, 4]


def test_in_lockstep_nothing_is_applied_at_a_capture() -> None:
    """It would be as luck has it, and other bits in the next run."""
    hand = Hand(lockstep=True)
    hand.step(4)
    hand.decide(0.75, names=True)
    hand.step(2)
    hand.decide(0.5)
    hand.step(2)
    assert [event.base for event in hand.posted(Captured)] == [0, 1]


# -------------------------------------------------------------- waiting


def test_a_stall_says_why_where_the_coordinator_says_nothing() -> None:
    """It said `why=-`: of a round that is decided the coordinator says nothing any more, and the
    merged bytes are still to come."""
    for decided, why in (
        (0, "the coordinator has not answered the offers yet"),
        (1, "fragment 0: version 1 is decided and not here yet"),
    ):
        hand = Hand()
        hand.step(5)
        hand.published.fragments[0].decided = decided
        hand.step(1)
        ((_, fields),) = hand.noted("stall-over")
        assert fields["why"] == [why]


def test_an_outage_has_one_stall_budget() -> None:
    hand = Hand()
    hand.step(6)
    assert hand.waits == [STALL_NS]
    ((_, fields),) = hand.noted("stall-over")
    assert (fields["step"], fields["fragments"], fields["ms"]) == (6, [0], 1000)
    for _ in range(3):
        hand.asked = []
        hand.step(4)
        assert hand.waits == [], "it was used up"
    assert hand.trainer.stalls.total_ns == STALL_NS + 1
    hand.decide(0.5, names=True)
    hand.asked = []
    hand.step(4)
    assert hand.waits == [STALL_NS], "an apply ended the outage"


def test_an_overlap_that_is_still_short_is_waited_for_in_lockstep_only() -> None:
    """Captured at 8 on version 0, so tau is 1 of 6. The result is applied as soon as it is there,
    and waited for behind all six."""
    hand = Hand(period=8, overlap=6, ramp=10, polls=2)
    hand.step(9)
    assert hand.waits == []
    hand.decide(0.75, names=True)
    hand.step(1)
    assert steps_of(hand, "applied") == [("applied", 10, 0)]
    assert hand.trainer.stalls.total_ns == 0
    hand.step(12)
    assert (hand.trainer.step, hand.waits) == (22, [STALL_NS])
    assert hand.trainer.ledger.missed == {"result not there at the apply point": 1}

    steady = Hand(period=8, overlap=6, ramp=10, lockstep=True)
    steady.during = lambda: steady.decide(0.75, names=True)
    steady.step(9)
    assert steady.waits == [WAIT_TIMEOUT_NS]
    assert steps_of(steady, "applied") == [("applied", 9, 0)]


def test_unused_stall_budget_remains_for_later_waits() -> None:
    hand = Hand(fragments=2, period=4, overlap=1)

    def half() -> None:
        """A part of the time passes; a discard ends the wait, and is no apply."""
        hand.now_ns += STALL_NS // 4
        for fragment in (0, 1):
            if (offer := hand.fragment_state(fragment).offer) is not None:
                hand.published.discard(fragment, offer.seq)

    hand.during = half
    hand.step(3)
    assert hand.waits == [STALL_NS]
    hand.step(2)
    assert hand.waits == [STALL_NS - STALL_NS // 4]


def test_a_rack_whose_offer_was_too_old_waits_for_the_versions_that_made_it_so() -> None:
    """The drop ended the wait. A rack that had slept then trained to its end on the old version,
    one offer after the other too old, and added all of it to what the others had merged."""
    hand = Hand()
    hand.step(5)
    hand.published.discard(0, 1)
    for to in (0.25, 0.5, 0.75):
        hand.decide(to, publish=False)
    anchor = hand.numerics.adopt(torch.full((NUMEL,), 0.75), NUMEL, 3)
    hand.during = lambda: hand.published.publish(0, anchor)
    hand.step()
    assert hand.waits == [STALL_NS]
    assert steps_of(hand, "discarded", "applied") == [("discarded", 6, 0), ("applied", 6, 0)]
    hand.step(4)
    assert hand.offers[-1].anchor.version == 3, "the next offer is not too old"


def test_in_lockstep_a_discarded_offer_ends_the_wait() -> None:
    """What a rack declines is merged without it, and waited for at the next point, as ever."""
    hand = Hand(lockstep=True)
    hand.step(5)
    hand.published.discard(0, 1)
    hand.decide(0.25, publish=False)
    hand.step()
    assert hand.waits == []


def test_a_process_that_stood_still_in_a_wait_waits_again() -> None:
    """Its own sleep used up the budget for outages elsewhere: it trained on without having pulled
    anything of what the others had decided meanwhile."""
    hand = Hand()
    hand.step(5)

    def sleep() -> None:
        hand.now_ns += 2 * ASLEEP_NS
        hand.during = lambda: hand.decide(0.75, names=True)

    hand.during = sleep
    hand.step()
    assert hand.waits == [STALL_NS, STALL_NS]
    assert steps_of(hand, "applied") == [("applied", 6, 0)]
    assert hand.noted("stall-over") == []
    assert hand.trainer.stalls.total_ns == STALL_NS + 1 + 2 * ASLEEP_NS


def test_a_result_that_is_there_is_not_waited_for() -> None:
    hand = Hand()
    hand.step(4)
    hand.decide(0.5, names=True)
    hand.step(2)
    assert hand.asked == []


def test_a_result_that_comes_in_time_is_applied_at_its_own_point() -> None:
    hand = Hand()
    hand.during = lambda: hand.decide(0.75, names=True)
    hand.step(6)
    assert steps_of(hand, "applied") == [("applied", 6, 0)]
    assert hand.noted("stall-over") == []


def test_lockstep_waits_until_it_gives_up_with_the_reason() -> None:
    hand = Hand(lockstep=True)
    hand.published.heard(NewestOrders((0,), ("fragment 0: waiting for rack 1",), ()))
    hand.step(5)
    with pytest.raises(GaveUp, match=r"step 6: no decision on fragment 0 .* waiting for rack 1"):
        hand.step()
    assert hand.waits == [WAIT_TIMEOUT_NS]


def test_lockstep_has_no_budget_to_use_up() -> None:
    hand = Hand(lockstep=True)
    hand.during = lambda: hand.decide(0.5, names=True)
    for _ in range(3):
        hand.step(4)
    hand.step(2)
    assert hand.waits == [WAIT_TIMEOUT_NS]
    assert len(hand.noted("applied")) == 3


def test_a_failure_of_the_loop_is_raised_at_the_next_apply_point() -> None:
    hand = Hand(**PATIENT)
    hand.step(5)
    hand.published.fail(MendError("bad memory"))
    with pytest.raises(MendError, match="bad memory"):
        hand.step()
    waiting = Hand(lockstep=True)
    waiting.during = lambda: waiting.published.fail(MendError("bad memory"))
    with pytest.raises(MendError, match="bad memory"):
        waiting.step(6)


def test_steps_without_work_cost_nothing() -> None:
    """Captures at 4 and 8, applies at 6 and 10. The result of 6 comes at 8."""
    hand, worked = Hand(**PATIENT), []
    for step in range(1, 11):
        if hand.trainer.stepped(1):
            worked.append(step)
            hand.run(hand.trainer.work())
    assert worked == [4, 6, 8, 10]


# -------------------------------------------------------------- a round that another rack opened


def captured(hand: Hand) -> list[tuple[int, int, int]]:
    """(step, fragment, base)."""
    return [(c.step, c.fragment, c.base) for c in hand.posted(Captured)]


def test_a_rack_joins_a_round_that_another_has_opened() -> None:
    """H = 4, tau = 1: at 3 instead of 4. Its result is awaited at 4, its next capture is at 7."""
    hand = Hand(polls=1, overlap=1)
    hand.step(2)
    assert captured(hand) == []
    hand.opened(0)
    hand.step()
    assert captured(hand) == [(3, 0, 0)]
    assert hand.posted(StepReached) == [StepReached(3, 0)], "a tape tells what the capture cost"
    hand.decide(0.75, names=True)
    hand.opened(-1)
    hand.step(8)
    assert captured(hand)[1:2] == [(7, 0, 1)]
    assert steps_of(hand, "applied") == [("applied", 4, 0)]


def test_open_round_is_joined_at_poll_points_only() -> None:
    hand = Hand(polls=3, period=8)
    hand.opened(0)
    hand.step(2)
    assert captured(hand) == []
    hand.step()
    assert captured(hand) == [(3, 0, 0)]


def test_in_lockstep_nobody_polls() -> None:
    hand = Hand(ranks=2, lockstep=True)
    hand.opened(0)
    hand.step(3)
    assert (captured(hand), hand.agreements) == ([], [])


def test_a_round_of_another_version_than_it_trains_on_is_not_joined() -> None:
    hand = Hand(polls=1, overlap=1, period=8)
    hand.opened(1)
    hand.step(2)
    assert captured(hand) == [], "of version 1 nothing is decided here"
    hand.decide(0.5, publish=False)
    hand.step()
    assert captured(hand) == [], "version 1 is not here yet"
    hand.opened(0)
    hand.step()
    assert captured(hand) == [], "that round is over"


def test_decided_round_is_applied_before_the_next_one_is_joined() -> None:
    hand = Hand(polls=1, overlap=1, period=8)
    hand.step(2)
    hand.decide(0.5)
    hand.opened(1)
    hand.step()
    assert steps_of(hand, "applied") == [("applied", 3, 0)]
    assert captured(hand) == [(3, 0, 1)]


def test_one_round_is_joined_once() -> None:
    """Its offer was declined: the next capture is its own."""
    hand = Hand(polls=1, overlap=1, period=6)
    hand.opened(0)
    hand.step(2)
    hand.published.discard(0, 1)
    hand.step(4)
    assert len(hand.posted(Discarded)) == 1
    assert captured(hand) == [(1, 0, 0)]
    hand.step()
    assert captured(hand) == [(1, 0, 0), (7, 0, 0)]


def test_an_offer_that_is_open_counts_in_the_round_that_another_has_opened() -> None:
    """Captured at 8, left out of version 1: it is in the round of 2 from the beginning, and the
    next capture is a period behind that, not a period behind 8."""
    hand = Hand(polls=1, overlap=1, period=8, **PATIENT)
    hand.step(8)
    hand.decide(0.5)
    hand.step(2)
    hand.opened(1)
    hand.step(3)
    assert captured(hand) == [(8, 0, 0)]
    assert hand.posted(StillOpen) == [StillOpen(0, 1)]
    hand.decide(0.75, names=True)
    hand.opened(-1)
    hand.step(5)
    assert captured(hand) == [(8, 0, 0)]
    hand.step()
    assert captured(hand) == [(8, 0, 0), (19, 0, 2)]


def test_open_rounds_are_joined_one_at_a_time_longest_waiting_first() -> None:
    """Own captures at 4, 8, 12: fragment 0 was captured at 4, the others never."""
    hand = Hand(polls=1, overlap=1, period=12, fragments=3, **PATIENT)
    hand.step(4)
    hand.decide(0.5, names=True)
    hand.step()
    hand.opened(1, 0, 0)
    hand.step(3)
    assert captured(hand) == [(4, 0, 0), (6, 1, 0), (7, 2, 0), (8, 0, 1)]


def test_a_round_is_joined_when_all_ranks_have_heard_of_it() -> None:
    hand = Hand(ranks=2, polls=1, period=8)
    hand.opened(0)
    hand.agree = lambda values: [-1, 1, *values[2:]]
    hand.step(2)
    assert captured(hand) == []
    hand.agree = lambda values: [1, -1, *values[2:]]
    hand.step()
    assert captured(hand) == [], "the other rank has heard of the next one already"
    hand.agree = lambda values: values
    hand.step()
    assert captured(hand) == [(4, 0, 0)]


def test_rack_without_a_step_since_the_apply_joins_at_the_next_poll() -> None:
    """Under overwrite the steps count from the apply on."""
    hand = Hand(polls=1, overlap=1, period=8, apply_mode="overwrite")
    hand.step(8)
    hand.decide(0.5, names=True)
    hand.opened(1)
    hand.step()
    assert (steps_of(hand, "applied"), captured(hand)) == ([("applied", 9, 0)], [(8, 0, 0)])
    hand.step()
    assert captured(hand) == [(8, 0, 0), (10, 0, 1)]
    assert hand.posted(Captured)[1].steps == 1


@pytest.mark.parametrize("how", [{"overlap": 0}, {"overlapped": False, "overlap": 1}])
def test_rack_that_waits_at_captures_waits_for_a_joined_round(how: dict[str, Any]) -> None:
    hand = Hand(polls=1, period=8, **how)
    hand.opened(0)
    hand.during = lambda: hand.decide(0.5, names=True)
    hand.step()
    assert hand.waits == [STALL_NS]
    hand.step()
    assert hand.fragment_state().offer is None
    assert captured(hand) == [(1, 0, 0)]


# -------------------------------------------------------------- commits that never came


@pytest.mark.parametrize(
    ("named", "ended", "theta"), [(1, 1, 0.75 + 0.5), (0, 1, 0.75 + 1.5), (0, 0, 0.75 + 1.5)]
)
def test_the_fate_is_read_from_a_snapshot_where_commits_are_missing(
    named: int, ended: int, theta: float
) -> None:
    """Captured in step 4 with 1.0, two steps ago; what was not named is carried on top."""
    hand = Hand(stall_max_ns=0)
    hand.step(5)
    hand.published.restore(snapshot_with(MINE, named, ended, version=3))
    anchor = hand.numerics.adopt(torch.full((4,), 0.75), 4, 3)
    hand.published.publish(0, anchor)
    hand.step(1)
    assert hand.theta() == theta
    ((_, fields),) = hand.noted("applied")
    fate = {(1, 1): "named", (0, 1): "dropped", (0, 0): "none"}[(named, ended)]
    assert (fields["version"], fields["fate"]) == (3, fate)
    assert (hand.fragment_state().offer is None) == bool(ended)


def snapshot_with(rack: Member, named: int, ended: int, version: int) -> Snapshot:
    log = log_of(genesis())
    log.decide(1)
    last = Last(rack, 0, named, version if named else 0, ended)
    return replace(log.snapshot(), versions=(version,), last=(last,))


# -------------------------------------------------------------- mirrors of scope rack


class Served:
    """Takes what is mirrored."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def serve(self, step: int, data_B: Tensor) -> None:
        self.steps.append(step)

    def seek(self) -> None:
        raise AssertionError("it does not join")

    def fetch(self, mirror: Mirror) -> None:
        raise AssertionError("it does not join")


def test_rack_state_is_mirrored_once_per_step_with_captures() -> None:
    """H 4: behind 4, 8, ...; two fragments that are captured behind one step have one mirror. The
    last capture of the run has none, as nobody returns to it."""
    hand, served = Hand(fragments=2), Served()
    state = TrainingState([], {}, lambda *_: None, mirrored=True)
    hand.trainer.states.state, hand.trainer.states.mirrors = state, served
    hand.step(4)
    captured = {offer.capture_step for offer in hand.offers}
    assert captured == {2, 4}
    assert served.steps == [], "nothing is registered"
    state.register("place", torch.nn.Linear(1, 1), "rack")
    hand.trainer.fragment_states[0].offer = hand.trainer.fragment_states[1].offer = None
    hand.step(2)
    hand.trainer._capture(1)
    assert served.steps == [6]
    hand.step()
    hand.trainer.fragment_states[0].offer = None
    hand.trainer._capture(0, closing=True)
    assert served.steps == [6]


# -------------------------------------------------------------- a donor


def donor(**options: Any) -> Hand:
    hand = Hand(polls=2, **options)
    optimizer = torch.optim.SGD(hand.model.parameters(), lr=0.5)
    hand.trainer.states.state = TrainingState([optimizer], {}, lambda *_: None)
    return hand


def test_a_donor_copies_once_before_the_step_behind_a_poll() -> None:
    """All that belongs to a step is done by then: a scheduler steps behind the optimizer."""
    hand = donor()
    hand.inbox.ask((THEIRS,))
    hand.step_and_give()
    assert hand.given == [], "it has not looked yet"
    hand.step()
    assert hand.given == []
    hand.trainer.give_state()
    ((to, step, data_B),) = hand.given
    assert (to, step) == (THEIRS, 2)
    assert isinstance(data_B, Tensor)
    hand.step_and_give(4)
    assert len(hand.given) == 1, "it was asked once"
    hand.inbox.ask(())
    hand.step(2)
    hand.inbox.ask((THEIRS,))
    hand.step_and_give(2)
    assert len(hand.given) == 1, "the copy is still there"
    hand.inbox.free(THEIRS)
    hand.step_and_give(2)
    assert [step for _, step, _ in hand.given] == [2, 12], "the copy was freed, and nobody saw it"


def test_a_rank_that_has_its_copy_still_makes_another_where_another_rank_lost_its_own() -> None:
    hand = donor(ranks=2)
    hand.inbox.ask((THEIRS,))
    hand.step_and_give(2)
    hand.step_and_give(2)
    assert [step for _, step, _ in hand.given] == [2]
    hand.agree = lambda values: [*values[:4], -1, *values[5:]]
    hand.step_and_give(2)
    assert [step for _, step, _ in hand.given] == [2, 6]


@pytest.mark.parametrize(("first", "same"), [(True, True), (False, True), (False, False)])
def test_first_replica_alone_copies_a_state_that_all_have(first: bool, same: bool) -> None:
    """The others copy as well where a rank has registered something else."""
    hand, agreed = donor(ranks=2), list[list[int]]()

    def minimum(values: list[int]) -> list[int]:
        agreed.append(values)
        return values if same else [value - 1 for value in values]

    hand.trainer.states.replicas = Replicas(first, minimum)
    hand.inbox.ask((THEIRS,))
    hand.step_and_give(2)
    ((_, _, given),) = hand.given
    assert hand.trainer.states.state is not None
    whole = hand.trainer.states.state.take(2)
    if first or not same:
        assert isinstance(given, Tensor)
        assert torch.equal(given, whole)
    else:
        assert given == LikeFirst(whole.numel(), digest_of_state(whole))
    words = [int(digest_of_state(whole)[i : i + 8], 16) for i in (0, 8, 16, 24)]
    assert agreed == [[*words, *(-word for word in words)]], "one agreement on the same digest"


def test_a_replica_that_cannot_copy_agrees_all_the_same() -> None:
    """Else the other ranks would wait for it."""
    hand, agreed = donor(ranks=2), list[list[int]]()
    hand.trainer.states.state = TrainingState([Wrapper()], {}, lambda *_: None)
    hand.trainer.states.replicas = Replicas(False, lambda values: agreed.append(values) or values)
    hand.inbox.ask((THEIRS,))
    hand.step_and_give(2)
    assert hand.given == [(THEIRS, 2, "optimizer (Wrapper) has no state_dict")]
    assert len(agreed) == 1


def test_several_joining_racks_each_get_a_copy() -> None:
    hand, other = donor(), Member(7, 70)
    hand.inbox.ask((THEIRS, other))
    for _ in range(6):
        hand.step_and_give()
    assert sorted(to for to, _, _ in hand.given) == sorted((THEIRS, other))


def test_ranks_of_a_donor_copy_behind_one_step() -> None:
    """The other rank hears of it later."""
    hand = donor(ranks=2)
    hand.inbox.ask((THEIRS,))
    hand.agree = lambda values: [*values[:2], 0, 0, 0, *values[5:]]  # behind what is open
    hand.step_and_give(2)
    assert hand.given == []
    hand.agree = lambda values: values
    hand.step_and_give(2)
    assert [step for _, step, _ in hand.given] == [4]


def test_a_donor_that_cannot_says_why() -> None:
    hand = donor()
    hand.trainer.states.state = TrainingState([Wrapper()], {}, lambda *_: None)
    hand.inbox.ask((THEIRS,))
    hand.step_and_give(2)
    assert hand.given == [(THEIRS, 2, "optimizer (Wrapper) has no state_dict")]


@pytest.mark.parametrize("error", [KeyError("momentum"), MemoryError("x" * 2 * TEXT_MAX)])
def test_an_error_of_a_state_dict_is_a_refusal_and_the_donor_trains_on(error: Exception) -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise error

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    hand = donor()
    assert hand.trainer.states.state is not None
    hand.trainer.states.state._registered["mine"] = (Broken(), "job")
    hand.inbox.ask((THEIRS,))
    hand.step_and_give(2)
    ((_, _, refused),) = hand.given
    assert isinstance(refused, str)
    assert refused.startswith(type(error).__name__)
    assert len(refused) <= TEXT_MAX


class Wrapper:
    """Of an optimizer; it has nothing but its groups."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []


def test_a_donor_copies_into_memory_that_was_made_ready_beside_training() -> None:
    """The first touch of fresh memory took four times as long as the copying: it is the worker's.
    The ranks copy once the memory is there, and a rank that has none ready may copy no less."""
    hand, asked = donor(), list[int]()
    hand.trainer.states.reserve = asked.append
    hand.inbox.ask((THEIRS,))
    hand.step_and_give(4)
    assert (len(asked), hand.given) == (1, []), "asked for once; until it is there it trains on"
    hand.inbox.make_room(room_B := torch.zeros(asked[0], dtype=torch.uint8))
    hand.step_and_give(2)
    ((_, step, data_B),) = hand.given
    assert isinstance(data_B, Tensor)
    assert hand.trainer.states.state is not None
    assert torch.equal(data_B, hand.trainer.states.state.take(step))
    assert data_B.data_ptr() == room_B.data_ptr()
    assert hand.inbox.room_B is None, "the copy alone keeps it alive"
    hand.inbox.free(THEIRS)
    hand.step(2)
    hand.inbox.make_room(torch.zeros(2, dtype=torch.uint8))  # the state has grown since
    hand.step_and_give(2)
    assert torch.equal(hand.given[1][2], hand.trainer.states.state.take(10))


def test_ranks_of_a_donor_ask_together_how_much_memory_a_copy_takes() -> None:
    """A state_dict may be a collective, as that of an average of sharded weights."""
    calls = list[int]()

    class Averages:
        def state_dict(self) -> dict[str, Any]:
            calls.append(hand.trainer.step)
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    hand, reserved = donor(ranks=2), list[int]()
    assert hand.trainer.states.state is not None
    hand.trainer.states.state._registered["averages"] = (Averages(), "job")
    hand.trainer.states.reserve = reserved.append
    hand.inbox.ask((THEIRS,))
    hand.agree = lambda values: [*values[:2], 0, 0, -1, *values[5:]]  # the other has not heard
    hand.step(2)
    assert (calls, reserved) == ([], [])
    life = THEIRS.incarnation
    hand.agree = lambda values: [*values[:2], life, -life, -2, *values[5:]]
    hand.step(2)
    assert (calls, len(reserved)) == ([4], 1)
    hand.inbox.make_room(torch.zeros(reserved[0], dtype=torch.uint8))
    hand.step_and_give(2)
    assert (calls, len(reserved), hand.given) == ([4, 6], 1, []), "the other still waits for memory"
    hand.agree = lambda values: values
    hand.step_and_give(2)
    assert (calls, len(reserved), len(hand.given)) == ([4, 6, 8], 1, 1)


def test_memory_for_a_copy_that_nobody_wants_any_more_is_freed() -> None:
    hand = donor()
    hand.trainer.states.reserve = lambda size: hand.inbox.make_room(torch.zeros(size))
    hand.inbox.ask((THEIRS,))
    hand.step(2)
    assert hand.inbox.room_B is not None
    hand.inbox.ask(())
    hand.step(2)
    assert hand.inbox.room_B is None


# -------------------------------------------------------------- polls without news


def news_of(hand: Hand) -> dict[str, Callable[[], object]]:
    """What a poll must see, by what it is."""
    published, trainer = hand.published, hand.trainer
    mitigation = Mitigation(MINE.rack, SMALLER, "slow", 50)
    return {
        "an open round": lambda: hand.opened(0),
        "a version": lambda: hand.decide(0.5),
        "a version that is not here yet": lambda: hand.decide(0.5, publish=False),
        "a failure": lambda: published.fail(MendError("broken")),
        "the end": lambda: published.finish(MINE),
        "a mitigation": lambda: published.on_decided(mitigation),
        "a smaller batch": lambda: setattr(trainer.ladder, "batch_pct", 50),
        "a lost seat": lambda: setattr(trainer.life, "lost", True),
    }


@pytest.mark.parametrize("what", sorted(news_of(Hand())))
def test_poll_is_due_when_there_is_news_and_else_not(what: str) -> None:
    hand = Hand(polls=2, period=100)
    hand.step(3)
    assert not hand.trainer.due(4), "nothing to be found"
    hand.step()
    assert not hand.trainer.due(6)
    hand.step(1)
    news_of(hand)[what]()
    assert not hand.trainer.due(7), "no poll"
    assert hand.trainer.due(8)


def test_poll_is_not_due_for_an_open_round_in_which_the_rack_has_captured() -> None:
    hand = Hand(polls=1, period=100, overlap=4)
    hand.step(3)
    hand.opened(0)
    assert hand.trainer.due(4)
    hand.step()
    assert captured(hand) == [(4, 0, 0)]
    assert not hand.trainer.due(5), "the round is still open, but there is nothing to do"


def test_poll_of_several_ranks_is_always_due_as_they_agree() -> None:
    assert Hand(ranks=2, polls=2, period=100).trainer.due(2)


def test_poll_is_due_where_an_open_offer_was_discarded() -> None:
    hand = Hand(polls=2, period=5, overlap=4)
    hand.step(5)
    assert not hand.trainer.due(6)
    hand.published.discard(0, 1)
    assert hand.trainer.due(8)


def test_poll_is_due_where_a_joining_rack_waits_for_the_state_or_memory_is_kept() -> None:
    hand = Hand(polls=2, period=100)
    hand.trainer.states.state = TrainingState([], {}, lambda *_: None)
    assert not hand.trainer.due(2)
    hand.inbox.ask((THEIRS,))
    assert hand.trainer.due(4)
    hand.inbox.ask(())
    assert not hand.trainer.due(4)
    hand.inbox.make_room(torch.empty(1))
    assert hand.trainer.due(6)
