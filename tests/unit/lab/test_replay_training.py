"""The training thread of a replay: it does what its tape says, at its steps, and only that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from mend.coordination.coordinator import CoordinatorOptions
from mend.coordination.events import Applied, Captured, Discarded, Leaving
from mend.coordination.fragment_replica import RankOptions
from mend.coordination.leader import LeaderOptions
from mend.coordination.machines import CoordinatorSpec, LeaderSpec, ProcessSpec, RankSpec
from mend.engine.compute.digest import digest_of_state
from mend.engine.joining.training_state import ReceivedState, TrainingState
from mend.errors import GaveUp, MendError, ReplayDiffers, TapeError
from mend.types import Peer
from mend_lab.replay.comparison import (
    ReplayComparison,
    ReplayReport,
    StateFiles,
    file_name,
    findings_in,
)
from mend_lab.replay.coordinator import ReplayCoordinator
from mend_lab.replay.script import Act, GivenState, Part, ReplayScript
from mend_lab.replay.training import ReplayedState, ReplayFactory, ReplayTrainer
from tests.unit.coordination.nouns import (
    DETECT_NS,
    HEARTBEAT_NS,
    commit,
    digest,
    genesis,
    hello,
    member,
    offer,
)
from tests.unit.engine.hand import MOVE, TOKENS, WAIT_TIMEOUT_NS, Hand

ME = Peer(0, 0)
CAPTURE, APPLY = Act("captured", 4, 0, 1, 0, 40, 4), Act("applied", 10, 0, 2)


def script_of(*acts: Act, ends: bool = True, rounds: int = 2) -> ReplayScript:
    part = Part(rack=0, acts=(acts,), ends=ends, config={})
    records = tuple(commit(version, [offer(1)]) for version in range(1, rounds + 1))
    return ReplayScript(
        job="job", facts=(("model", "tiny"), ("mend version", "0")), genesis=genesis(),
        records=records, rounds=rounds, parts=(part,), sums=(), versions={}, omitted=(),
    )  # fmt: skip


class Following(Hand):
    """A hand whose trainer follows; H = 4, tau = 2."""

    def __init__(self, folder: Path, script: ReplayScript, **options: Any) -> None:
        super().__init__(**options)
        old, self.folder = self.trainer, folder
        self.failed: list[MendError] = []
        report = ReplayReport(folder, ME)
        comparer = ReplayComparison(script, ME, [["w"]], report, self.failed.append)
        self.trainer = ReplayTrainer(
            old.parts, script=script, rank=0, report=report, comparer=comparer,
            states=StateFiles(folder),
        )  # fmt: skip

    def differs(self) -> str:
        (found,) = findings_in(self.folder / file_name(ME))
        assert found.kind == "differs"
        assert str(self.failed[0]) == found.text
        return found.text


def test_replayed_rack_applies_what_the_tape_says_though_more_is_there(tmp_path: Path) -> None:
    """Version 1 comes and goes by, version 2 is decided at once: it is applied at step 10."""
    hand = Following(tmp_path, script_of(CAPTURE, APPLY, rounds=3))
    hand.step(4)
    for to in (0.25, 0.5, 0.75):
        hand.decide(to)
    hand.step(5)
    assert hand.posted(Applied) == []
    hand.step()
    assert hand.posted(Applied) == [Applied(0, 2, 0, 10)]
    assert hand.theta() == 0.5 + 10 * MOVE


def test_replayed_rack_takes_as_many_micro_batches_as_then(tmp_path: Path) -> None:
    """Decided by how slow the machine was, so it is read from the tape."""
    script = script_of(CAPTURE, APPLY)
    part = msgspec.structs.replace(script.parts[0], batches=((2, 50), (3, 100)))
    hand = Following(tmp_path, msgspec.structs.replace(script, parts=(part,)))
    found = []
    for _ in range(4):
        hand.step()
        found.append(hand.trainer.ladder.batch_pct)
    assert found == [100, 50, 100, 100]


STATE = torch.frombuffer(bytearray(b"moments, step 6"), dtype=torch.uint8)


class TwinState:
    """What a script trains with beside the weights, as the trainer sees it."""

    def __init__(self) -> None:
        self.loaded: list[ReceivedState] = []
        self.fresh: list[str] = []

    def take(self, step: int, **_: object) -> Tensor:
        return STATE.clone() if step == 6 else torch.zeros(3, dtype=torch.uint8)

    def load(self, found: ReceivedState) -> None:
        self.loaded.append(found)

    def begins_fresh(self, reason: str) -> None:
        self.fresh.append(reason)


def given(digest: str = digest_of_state(STATE)) -> GivenState:
    """Seat 0 is the donor, or the life that joins."""
    return GivenState(donor=0, to=0, rack=3, step=6, digests=(digest,))


def twin(folder: Path, script: ReplayScript) -> tuple[Following, TwinState]:
    hand, state = Following(folder, script), TwinState()
    hand.trainer.states.state = state  # type: ignore[assignment]
    return hand, state


def test_a_life_that_joined_begins_with_its_versions_and_its_donors_state(tmp_path: Path) -> None:
    """Of version 1, though version 2 is decided when the donor's replay is as far."""
    acts = Act("applied", 0, 0, 1), Act("captured", 8, 0, 1, 1, 20, 2)
    part = Part(rack=1, acts=(acts,), ends=True, config={}, life=2, first=(1,))
    script = msgspec.structs.replace(script_of(), parts=(part,), given=(given(),))
    hand, state = twin(tmp_path, script)

    def progress() -> None:
        if hand.published.fragments[0].decided < 2:
            hand.decide(0.5)
        else:
            StateFiles(tmp_path).write(given(), 0, STATE)

    hand.during = progress
    hand.run(hand.trainer.begin(WAIT_TIMEOUT_NS))
    (received,) = state.loaded
    assert (received.donor, received.step, received.data_B.tolist()) == (3, 6, STATE.tolist())
    assert (hand.theta(), hand.trainer.step) == (0.5, 6)
    hand.step(2)
    assert hand.posted(Applied) == [Applied(0, 1, 0)]
    assert hand.posted(Captured) == [Captured(0, 1, 1, 8, 20, 2)]
    assert state.fresh == []


def own_state(batches: int) -> TrainingState:
    """Of a script that has read so many batches."""
    state = TrainingState([], {}, lambda *_: None, mirrored=True)
    state.register("place", Place(batches), "rack")
    return state


class Place:
    def __init__(self, batches: int) -> None:
        self.batches = batches

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


def mirror_of(batches: int) -> GivenState:
    """Behind step 4; seat 0 is the former life, or the one that begins with it."""
    data_B = own_state(batches).rack_state(4)
    assert data_B is not None
    return GivenState(donor=0, to=0, rack=0, step=4, digests=(digest_of_state(data_B),))


def test_a_former_life_keeps_what_a_later_one_begins_with_and_tells_if_it_is_another(
    tmp_path: Path,
) -> None:
    for batches in (9, 8):
        script = msgspec.structs.replace(script_of(CAPTURE), mirrors=(mirror_of(9),))
        hand = Following(tmp_path, script)
        hand.trainer.states.state = own_state(batches)
        if batches == 9:
            hand.step(4)
            continue
        with pytest.raises(ReplayDiffers):
            hand.step(4)
        assert "after step 4: what it has registered with scope rack has digest" in hand.differs()
    part = Part(rack=0, acts=((),), ends=True, config={}, life=2, first=(0,))
    later = Following(tmp_path, msgspec.structs.replace(script, parts=(part,)))
    later.published.publish(0, later.fragment_state().anchor)
    place, state = Place(0), TrainingState([], {}, lambda *_: None, mirrored=True)
    later.trainer.states.state = state
    later.run(later.trainer.begin(WAIT_TIMEOUT_NS))
    state.register("place", place, "rack")
    assert place.batches == 9


def test_a_life_without_a_copy_begins_fresh(tmp_path: Path) -> None:
    part = Part(rack=1, acts=((),), ends=True, config={}, life=2, first=(0,))
    hand, state = twin(tmp_path, msgspec.structs.replace(script_of(), parts=(part,)))
    hand.published.publish(0, hand.fragment_state().anchor)
    hand.run(hand.trainer.begin(WAIT_TIMEOUT_NS))
    assert (state.loaded, hand.trainer.step, len(state.fresh)) == ([], 0, 1)


def test_a_donor_keeps_its_state_before_it_stops(tmp_path: Path) -> None:
    """It was killed afterwards, and has no act left on its tape."""
    script = msgspec.structs.replace(script_of(CAPTURE, ends=False), given=(given(),))
    hand, _ = twin(tmp_path, script)
    hand.during = lambda: finish(hand)
    hand.step(6)
    assert hand.trainer.states.due is not None
    hand.trainer.give_state()
    assert StateFiles(tmp_path).read(given(), 0).tolist() == STATE.tolist()
    with pytest.raises(SystemExit):
        hand.step()


def test_a_state_that_is_another_is_source_its_donor(tmp_path: Path) -> None:
    script = msgspec.structs.replace(script_of(CAPTURE, ends=False), given=(given("ab" * 16),))
    hand, _ = twin(tmp_path, script)
    hand.step(6)
    with pytest.raises(ReplayDiffers):
        hand.trainer.give_state()
    assert hand.differs().startswith("rack 0 rank 0, after step 6: what it trains with besides")
    assert not StateFiles(tmp_path).has(given(), 0)


def test_replayed_rack_waits_for_a_version_as_long_as_rounds_are_decided(tmp_path: Path) -> None:
    hand = Following(tmp_path, script_of(CAPTURE, APPLY))
    hand.during = lambda: hand.decide(0.5)
    hand.step(10)
    assert hand.waits == [WAIT_TIMEOUT_NS] * 2, "the first decision was not what it waits for"
    assert hand.posted(Applied) == [Applied(0, 2, 0, 10)]
    stuck = Following(tmp_path, script_of(CAPTURE, APPLY))
    with pytest.raises(GaveUp, match=r"waited 60 s .* applied fragment 0 \(version 2\) at step 10"):
        stuck.step(10)


def test_other_tokens_are_told_where_they_are_counted(tmp_path: Path) -> None:
    hand = Following(tmp_path, script_of(CAPTURE))
    hand.step(3)
    with pytest.raises(ReplayDiffers):
        hand.step(1, tokens=TOKENS + 1)
    assert hand.differs() == (
        "rack 0 rank 0, after step 4: it has captured fragment 0 (seq 1) at step 4 with "
        "tokens=41; next on its tape is: captured fragment 0 (seq 1) at step 4 with tokens=40"
    )


def test_a_script_that_trains_longer_is_told(tmp_path: Path) -> None:
    tail = (Act("applied", 6, 0, 1), Act("captured", 7, 0, 2, 1, 30, 3), Act("applied", 7, 0, 2))
    hand = Following(tmp_path, script_of(CAPTURE, *tail))
    hand.step(4)
    hand.decide(0.5, names=True)
    hand.step(2)
    hand.during = lambda: hand.decide(0.75, names=True)
    hand.step()
    with pytest.raises(ReplayDiffers, match=r"after step 8: it has gone on; .* nothing more"):
        hand.step()
    assert [e.step for e in hand.posted(Captured)] == [4, 7]


def test_a_capture_is_followed_off_the_schedule(tmp_path: Path) -> None:
    """Another rack had opened a round; in the replay nobody does, and it is captured there."""
    hand = Following(tmp_path, script_of(Act("captured", 3, 0, 1, 0, 30, 3), APPLY))
    for to in (0.25, 0.5):
        hand.decide(to)
    hand.step(10)
    assert hand.posted(Captured) == [Captured(0, 1, 0, 3, 30, 3)]
    assert hand.posted(Applied) == [Applied(0, 2, 0, 10)]


def test_a_discard_waits_until_the_rack_knows(tmp_path: Path) -> None:
    hand = Following(tmp_path, script_of(CAPTURE, Act("discarded", 6, 0, 1)))
    hand.during = lambda: hand.published.discard(0, 1)
    hand.step(6)
    assert hand.posted(Discarded) == [Discarded(0, 1, 6)]
    assert hand.fragment_state().offer is None


def finish(hand: Following) -> None:
    for to in (0.5, 0.75)[hand.published.fragments[0].decided :]:
        hand.decide(to)
    if hand.posted(Leaving):
        hand.published.finish()


def test_where_the_tape_ends_the_script_is_ended_when_all_is_decided(tmp_path: Path) -> None:
    """The rack was killed; until then its bytes may be needed."""
    hand = Following(tmp_path, script_of(CAPTURE, ends=False))
    hand.during = lambda: finish(hand)
    hand.step(3)
    with pytest.raises(SystemExit) as ended:
        hand.step()
    assert ended.value.code == 0
    assert hand.posted(Leaving) == [Leaving()]
    (done,) = findings_in(tmp_path / file_name(ME))
    assert (done.kind, done.number) == ("done", 2)


def test_a_shutdown_captures_and_applies_its_tail(tmp_path: Path) -> None:
    tail = (Act("captured", 3, 0, 1, 0, 30, 3), Act("applied", 3, 0, 2))
    hand = Following(tmp_path, script_of(*tail))
    hand.during = lambda: finish(hand)
    hand.step(3)
    hand.run(hand.trainer.close())
    assert hand.posted(Applied) == [Applied(0, 2, 0, 3)]
    assert hand.theta() == 0.75, "the anchor"


def test_capture_passed_over_at_the_last_step_is_made_when_the_tape_says(
    tmp_path: Path,
) -> None:
    """Fragment 1 is due after step 8, where its offer was still open; the drain applied both, and
    then captured both."""
    tape = (
        Act("captured", 2, 0, 1, 0, 20, 2), Act("applied", 3, 0, 1),
        Act("captured", 4, 1, 1, 0, 40, 4), Act("captured", 6, 0, 2, 1, 40, 4),
        Act("applied", 8, 0, 2), Act("applied", 8, 1, 1),
        Act("captured", 8, 0, 3, 2, 20, 2), Act("captured", 8, 1, 2, 1, 40, 4),
    )  # fmt: skip
    hand = Following(tmp_path, script_of(*tape), fragments=2, period=4, overlap=1)
    hand.step(2)
    hand.decide(0.5, 0, names=True)
    hand.step(5)
    for fragment in (0, 1):
        hand.decide(0.25, fragment, names=True)
    hand.step()
    hand.during = hand.published.finish
    hand.run(hand.trainer.close(keep_local=True))
    captures = [(e.step, e.fragment, e.seq) for e in hand.posted(Captured)]
    assert captures == [(2, 0, 1), (4, 1, 1), (6, 0, 2), (8, 0, 3), (8, 1, 2)]


def test_a_shutdown_that_is_too_early_is_told(tmp_path: Path) -> None:
    hand = Following(tmp_path, script_of(CAPTURE))
    hand.step(3)
    with pytest.raises(ReplayDiffers, match="after step 3: it leaves the job; next on its tape"):
        hand.run(hand.trainer.close())


def test_the_board_keeps_what_is_still_to_be_applied() -> None:
    hand, published = Hand(), ReplayedState(1, {(0, 1)})
    anchors = [hand.decide(0.5, publish=False) for _ in range(2)]
    for anchor in anchors:
        published.publish(0, anchor)
        published.forget(0, anchor.version)
    assert list(published.fragments[0].anchors) == [1]
    published.applied(0, 1)
    assert list(published.fragments[0].anchors) == [1], "it is trained on"
    published.applied(0, 2)
    assert list(published.fragments[0].anchors) == []


def test_another_model_is_told_before_the_first_step(tmp_path: Path) -> None:
    factory = ReplayFactory(script_of(CAPTURE), tmp_path, ME, [])
    factory.check([("model", "tiny"), ("mend version", "1")])
    with pytest.raises(ReplayDiffers, match="model is tiny on the tape, large now"):
        factory.check([("model", "large")])
    assert isinstance(factory.published().failure, ReplayDiffers)
    with pytest.raises(TapeError, match="no rank 1 of rack 0"):
        ReplayFactory(script_of(CAPTURE), tmp_path, Peer(0, 1), [])


def test_the_leader_of_rack_0_decides_the_script_again_and_no_other_process_coordinates(
    tmp_path: Path,
) -> None:
    script = script_of(CAPTURE)
    facts = script.facts
    for rack in (0, 1):
        part = msgspec.structs.replace(script.parts[0], rack=rack)
        both = msgspec.structs.replace(script, parts=(script.parts[0], part))
        parts = ProcessSpec(
            Peer(rack, 0), member(rack), RankSpec(RankOptions(HEARTBEAT_NS), (digest(0),)),
            LeaderSpec(
                msgspec.structs.replace(hello(rack), facts=facts), Peer(0, 0),
                LeaderOptions(HEARTBEAT_NS, DETECT_NS, DETECT_NS), 0,
            ),
            CoordinatorSpec("job", CoordinatorOptions(2, HEARTBEAT_NS, DETECT_NS, rack == 0)),
        )  # fmt: skip
        machines = ReplayFactory(both, tmp_path, Peer(rack, 0), []).machines(parts)
        assert machines.leader is not None
        if rack:
            assert machines.coordinator is None
            continue
        assert isinstance(machines.coordinator, ReplayCoordinator)
        assert machines.coordinator.script == script.records
        assert machines.coordinator.acceptor is machines.leader.acceptor, "one process, one vote"
        assert machines.coordinator.sleep.clock is machines.leader.sleep.clock
