"""The life of a training loop: it begins with all racks on one version, and ends without losing
work in silence."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace as replaced
from functools import partial
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from mend.consensus.log import Log
from mend.consensus.records import (
    CheckpointRecord,
    Commit,
    Genesis,
    MergeMember,
    Record,
    Roster,
    Seat,
)
from mend.coordination.events import (
    BarrierChanged,
    Captured,
    Idle,
    Leaving,
    RackStateLoaded,
    StillOpen,
    Wanting,
)
from mend.engine.checkpoint.checkpoint_barrier import CheckpointRecords
from mend.engine.compute.digest import digest_of_state
from mend.engine.joining.state_exchange import MIRROR_NS
from mend.engine.joining.training_state import (
    Mirror,
    Mirrored,
    ReceivedState,
    StateUnavailable,
    TrainingState,
)
from mend.engine.state.fragment_state import POLL_NS, Requests, Wait
from mend.engine.state.published_state import NewestOrders
from mend.engine.state.pulls import LOOK_NS
from mend.engine.trainer.trainer_end import LEAVE_NS, NOTE_NS
from mend.errors import (
    CheckpointError,
    Diverged,
    GaveUp,
    JobLost,
    PlanMismatch,
    StartTimeout,
    StateRefused,
)
from mend.events.base import LoggedEvent
from mend.types import SECOND
from tests.noted import flat, pair
from tests.unit.coordination.nouns import policy
from tests.unit.engine.hand import MINE, SHUTDOWN_NS, THEIRS, Hand

SEATS = tuple(Seat(member, f"tcp://rack{member.rack}:1", ()) for member in (MINE, THEIRS))


def begin(hand: Hand, values: float = 0.0) -> None:
    """What the loop shows once every rack holds version 0."""
    digests = []
    for fragment, state in enumerate(hand.trainer.fragment_states):
        anchor = hand.numerics.genesis(torch.full((state.owned.numel,), values))
        digests.append((anchor.digest,))
        hand.published.publish(fragment, anchor)
    hand.published.on_decided(Genesis(SEATS, None, policy(), "", tuple(digests)))
    hand.published.heard(NewestOrders((0, 1), (), (0,) * len(digests)))


# -------------------------------------------------------------- begin


def test_a_rack_begins_on_the_lowest_racks_weights() -> None:
    hand = Hand(fragments=2)
    hand.during = lambda: begin(hand, 3.0)
    hand.run(hand.trainer.begin(9 * SECOND))
    assert hand.waits == [LOOK_NS]
    assert [hand.theta(p) for p in (0, 1)] == [3.0, 3.0]
    assert [state.anchor.version for state in hand.trainer.fragment_states] == [0, 0]


def test_weights_that_are_replaced_at_the_start_are_said_and_by_how_much() -> None:
    """A rack that had resumed by its framework alone lost its weights without a word."""
    hand = Hand()
    hand.replace_parts(compares=True)
    own = hand.theta(0)
    begin(hand, 4.0)
    hand.run(hand.trainer.begin(9 * SECOND))
    ((_, said),) = hand.noted("weights-replaced")
    assert said["differ_pct"] == pytest.approx(100 * abs(own - 4.0) / 4.0, abs=1e-3)


def test_equal_weights_are_not_replaced() -> None:
    hand = Hand()
    hand.replace_parts(compares=True)
    begin(hand, hand.theta(0))
    hand.run(hand.trainer.begin(9 * SECOND))
    assert not hand.noted("weights-replaced")


def test_all_racks_begin_together() -> None:
    """To hold version 0 is not enough: a head start would put captures into other rounds."""
    hand = Hand()
    begin(hand)
    hand.published.heard(NewestOrders((0,), ("waiting for rack 1",), (-1,)))
    with pytest.raises(
        StartTimeout, match=r"after 9 s and .* without a byte \(waiting for rack 1\)"
    ):
        hand.run(hand.trainer.begin(9 * SECOND))


def test_a_start_waits_for_every_rank_of_the_rack() -> None:
    hand = Hand(ranks=2)
    begin(hand)
    hand.agree = lambda values: [0, 1, 0]
    with pytest.raises(StartTimeout):
        hand.run(hand.trainer.begin(SECOND))


def test_failure_during_the_start_is_raised() -> None:
    hand = Hand()
    hand.during = lambda: hand.published.fail(PlanMismatch("lr is 9 there and 0.1 here"))
    with pytest.raises(PlanMismatch, match="lr is 9"):
        hand.run(hand.trainer.begin(SECOND))


def test_one_rank_that_finds_the_job_lost_ends_the_start_of_all() -> None:
    """Also of those that hold all of their own: they begin again together."""
    for ready in (False, True):
        hand = Hand(ranks=2)
        if ready:
            begin(hand)
            hand.agree = lambda values: [0, 0, 0]
        else:
            hand.during = partial(hand.published.fail, JobLost("rack 0 died"))
        with pytest.raises(JobLost, match="says so" if ready else "rack 0 died"):
            hand.run(hand.trainer.begin(SECOND))
        assert hand.agreements == [[int(ready)] * 3]
        assert not hand.published.trains


def test_rank_that_holds_all_asks_its_mates_when_the_job_looks_lost() -> None:
    """It ignored that, and a rank of its rack that lacked some bytes waited for it, up to twice
    `start_timeout_s`, before both began again."""
    for mates in (0, 1):
        hand = Hand(ranks=2)
        begin(hand)
        hand.published.heard(NewestOrders())  # other racks have not copied it yet
        settle = partial(hand.published.heard, NewestOrders((0, 1), (), (0,)))
        happens = iter([hand.published.look_again, settle])
        hand.during = lambda happens=happens: next(happens)()
        hand.agree = lambda values, mates=mates: [*values[:1], mates, *values[2:]][: len(values)]
        began_ns = hand.now_ns
        with contextlib.nullcontext() if mates else pytest.raises(JobLost, match="says so"):
            hand.run(hand.trainer.begin(60 * SECOND))
        asked = [values for values in hand.agreements if len(values) == 3]
        assert asked == ([[0, 1, 1], [1, 1, 1]] if mates else [[0, 1, 1]])
        assert hand.now_ns == began_ns, "at once"
        assert hand.published.trains == bool(mates)


def miss_first(hand: Hand, version: int = 3) -> None:
    """The others have begun without this rack, and freed what they began with."""
    for fragment, state in enumerate(hand.trainer.fragment_states):
        hand.published.forget(fragment, 0)
        newest = hand.numerics.genesis(torch.full((state.owned.numel,), 5.0))
        hand.published.publish(fragment, dataclasses.replace(newest, version=version))
        hand.published.fragments[fragment].decided = version
    hand.published.heard(NewestOrders((0, 1), (), (version,) * len(hand.trainer.fragment_states)))


def test_a_founder_that_has_missed_the_first_version_begins_with_the_newest() -> None:
    """Rack 1 got no processor for 2 s at its start. Rack 0 began alone, merged twice and freed
    version 0, for which rack 1 then waited until its start timed out."""
    hand = Hand(fragments=2)
    begin(hand, 3.0)
    hand.published.forget(0, 0)
    hand.published.forget(1, 0)
    hand.during = lambda: miss_first(hand)
    hand.run(hand.trainer.begin(9 * SECOND))
    assert [hand.theta(p) for p in (0, 1)] == [5.0, 5.0]
    assert [state.anchor.version for state in hand.trainer.fragment_states] == [3, 3]
    assert ("joined", {"versions": [3, 3]}) in hand.notes


def test_a_rank_that_holds_the_first_version_follows_one_that_has_missed_it() -> None:
    hand = Hand(ranks=2)
    begin(hand, 3.0)
    hand.agree = lambda values: [-1] if values == [0] else values
    miss_first(hand)
    hand.published.publish(0, hand.trainer.fragment_states[0].anchor)
    hand.run(hand.trainer.begin(9 * SECOND))
    assert hand.trainer.fragment_states[0].anchor.version == 3


# -------------------------------------------------------------- a rack that joins


def joiner(momentum: float = 0.9, **options: Any) -> tuple[Hand, torch.optim.Optimizer]:
    """Of a job that was begun by others; it has read the log."""
    hand = Hand(**options)
    begin(hand)
    hand.published.job.founders = frozenset({THEIRS})
    optimizer = torch.optim.SGD(hand.model.parameters(), lr=0.5, momentum=momentum)
    hand.trainer.states.state = state_of(hand, optimizer)
    return hand, optimizer


def state_of(hand: Hand, *optimizers: torch.optim.Optimizer) -> TrainingState:
    def note(event: LoggedEvent) -> None:
        hand.notes.append(pair(event))

    return TrainingState(optimizers, {}, note)


def given(step: int) -> ReceivedState:
    """By a donor of the same model, with another learning rate."""
    hand = Hand()
    optimizer = torch.optim.SGD(hand.model.parameters(), lr=0.25, momentum=0.9)
    hand.model[0].grad = torch.ones(hand.model[0].shape)
    optimizer.step()
    data_B = state_of(hand, optimizer).take(step)
    return ReceivedState(1, step, digest_of_state(data_B), data_B)


def test_a_rack_whose_job_is_lost_has_not_loaded_the_state_that_it_copied() -> None:
    """It begins again in the same process, and would train fresh weights with the momentum and the
    step of others."""
    hand, optimizer = joiner()
    hand.published.fragments[0].anchors.clear()
    hand.inbox.receive(given(7))
    hand.during = partial(hand.published.fail, JobLost("rack 0 died"))
    with pytest.raises(JobLost, match="rack 0 died"):
        hand.run(hand.trainer.begin(SECOND))
    assert optimizer.state == {}
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_rack_that_joins_goes_on_from_a_donors_step() -> None:
    """H 4, tau 2: behind step 9 it is due after 12, as its donor is."""
    hand, optimizer = joiner()
    hand.during = lambda: hand.inbox.receive(given(9))
    hand.run(hand.trainer.begin(9 * SECOND))
    assert hand.posted(Wanting) == [Wanting(True), Wanting(False)]
    assert optimizer.param_groups[0]["lr"] == 0.25
    (held,) = optimizer.state.values()
    assert held["momentum_buffer"].tolist() == [1.0] * 4
    assert hand.trainer.standing[:2] == (9, 0)
    hand.step(3)
    (captured,) = hand.posted(Captured)
    assert (captured.step, captured.steps, captured.tokens) == (12, 3, 30)


@pytest.mark.parametrize(
    ("told", "reason", "step"),
    [
        (StateUnavailable("rack 1 cannot give it: a hook"), "rack 1 cannot give it: a hook", 0),
        (StateUnavailable("all leave", 9), "all leave; the job is at step 9", 9),
        (None, "no rack gave a copy within 4.5 s", 0),
    ],
)
def test_without_a_donors_state_it_begins_fresh_and_says_so(
    told: StateUnavailable | None, reason: str, step: int
) -> None:
    hand, optimizer = joiner()
    if told is not None:
        hand.during = lambda: hand.inbox.receive(told)
    hand.run(hand.trainer.begin(9 * SECOND))
    assert dict(hand.notes)["state-fresh"]["reason"] == reason
    assert hand.trainer.states.state is not None
    assert hand.trainer.states.state.account == f"fresh: {reason}"
    assert (hand.trainer.step, optimizer.param_groups[0]["lr"]) == (step, 0.5)


def test_state_that_one_rank_cannot_load_is_refused_by_the_whole_rack() -> None:
    hand, _ = joiner(ranks=2)
    hand.during = lambda: hand.inbox.receive(given(9))
    hand.agree = lambda values: (
        [0] if values == [1] and hand.trainer.states.state.copied else values
    )
    with pytest.raises(StateRefused, match="another rank of this rack cannot take"):
        hand.run(hand.trainer.begin(9 * SECOND))


def test_ranks_whose_copies_are_of_different_steps_begin_fresh() -> None:
    hand, optimizer = joiner(ranks=2)
    hand.during = lambda: hand.inbox.receive(given(9))
    other = [1, 7, -1, -7, 0]
    hand.agree = lambda values: other if values[:2] == [1, 9] else values
    hand.run(hand.trainer.begin(9 * SECOND))
    assert "different steps" in dict(hand.notes)["state-fresh"]["reason"]
    assert (hand.trainer.step, optimizer.param_groups[0]["lr"]) == (0, 0.5)


def test_a_rank_wants_the_copy_until_all_ranks_of_its_rack_have_it() -> None:
    """The donor frees what the rack does not want; the other rank may still pull."""
    hand, _ = joiner(ranks=2)
    hand.during = lambda: hand.inbox.receive(given(9))
    wanted: list[bool] = []

    def agree(values: list[int]) -> list[int]:
        if values[:2] == [1, 9]:
            wanted.extend(event.on for event in hand.posted(Wanting))
        return values

    hand.agree = agree
    hand.run(hand.trainer.begin(9 * SECOND))
    assert wanted == [True]
    assert Wanting(False) in hand.events


@pytest.mark.parametrize("other", [(1, 7), (0, 9)], ids=["another step", "another donor"])
def test_ranks_whose_donor_changed_between_their_pulls_pull_again(other: tuple[int, int]) -> None:
    hand, _ = joiner(ranks=2)
    hand.during = lambda: hand.inbox.receive(given(9))
    theirs = iter([[*other, -other[0], -other[1], 1]])
    hand.agree = lambda values: next(theirs, values) if values[:2] == [1, 9] else values
    hand.run(hand.trainer.begin(9 * SECOND))
    assert hand.trainer.step == 9
    assert [event.on for event in hand.posted(Wanting)] == [True, True, False]


def test_ranks_agree_whether_their_rack_joins_before_any_waits_for_a_copy() -> None:
    """One of them has not read the roster in time; this one has."""
    hand, _ = joiner(ranks=2)
    first = iter([[0]])
    hand.agree = lambda values: next(first, values)
    hand.run(hand.trainer.begin(9 * SECOND))
    assert not hand.posted(Wanting)
    reason = dict(hand.notes)["state-fresh"]["reason"]
    assert reason == "this rack was not in the roster in time"


def test_state_passed_on_inside_a_rack_is_compared_with_its_digest() -> None:
    hand, _ = joiner(ranks=2)
    whole = given(9)
    other = replaced(whole, data_B=whole.data_B.flip(0), shared=True)
    hand.during = lambda: hand.inbox.receive(other)
    with pytest.raises(StateRefused, match="damaged inside this rack"):
        hand.run(hand.trainer.begin(9 * SECOND))


# -------------------------------------------------------------- its own state of scope rack


class Way:
    """The loop's side: `kept` are the rounds of which others keep a mirror, of `lost` the bytes do
    not come."""

    def __init__(self, hand: Hand, kept: Sequence[int], lost: Sequence[int]) -> None:
        self.hand, self.kept, self.lost = hand, kept, lost
        self.unheard: tuple[int, ...] = ()
        registered = TrainingState([], {}, lambda *_: None, mirrored=True)
        registered.register("place", nn.Linear(1, 1), "rack")
        data_B = registered.rack_state(8)
        assert data_B is not None
        self.data_B = data_B

    def serve(self, step: int, data_B: Tensor) -> None:
        raise AssertionError("it captures nothing")

    def seek(self) -> None:
        found = [Mirror(number, THEIRS, 8 * number, 5, "ab", 1) for number in self.kept]
        self.hand.found.find(tuple(found), self.unheard, complete=not self.unheard)

    def fetch(self, mirror: Mirror) -> None:
        found = "it is gone" if mirror.round in self.lost else Mirrored(mirror, self.data_B)
        self.hand.found.take_back(mirror, found)


def together(*doings: Requests) -> None:
    """Ranks of one rack, each on its thread."""
    answers: list[Any] = [None] * len(doings)
    for _ in range(100):
        asked, ended = [], 0
        for doing, answer in zip(doings, answers, strict=True):
            try:
                asked.append(doing.send(answer))
            except StopIteration:
                ended += 1
        if ended:
            assert ended == len(doings), "one rank goes on alone"
            return
        if isinstance(asked[0], Wait):
            answers = [each.ready() for each in asked]
        else:
            least = list(map(min, zip(*(each.values for each in asked), strict=True)))
            answers = [least] * len(doings)
    raise AssertionError("they never agree")


@pytest.mark.parametrize(
    ("kept", "lost", "step", "reason"),
    [
        (([7, 8], [7, 8]), ((), ()), 64, ""),
        (([7, 8], [6, 7]), ((), ()), 56, ""),
        (([8], [7]), ((), ()), None, "no rack that lives keeps a mirror of it"),
        (([7, 8], [1, 5, 7]), ((), ()), 56, ""),
        (([7, 8], []), ((), ()), None, "no rack that lives keeps a mirror of it"),
        (([7, 8], [7, 8]), ((), (8,)), 56, ""),
        (([7, 8], [7, 8]), ((7,), (8,)), None, "the mirror of step 56 could not be fetched: "),
    ],
)
def test_ranks_of_a_rack_that_returns_load_mirrors_of_one_step_the_newest_that_all_have(
    kept: tuple[list[int], ...], lost: tuple[tuple[int, ...], ...], step: int | None, reason: str
) -> None:
    doings, notes, states = list[Requests](), list[dict[str, Any]](), list[TrainingState]()
    for rank in (0, 1):
        hand, _ = joiner(ranks=2, rank=rank)
        hand.trainer.states.mirrors = Way(hand, kept[rank], lost[rank])
        state = TrainingState([], {}, lambda event: notes.append(flat(event)))
        states.append(state)
        doings.append(hand.trainer.states._load_mirror(state))
    together(*doings)
    loaded = [note["step"] for note in notes if note["kind"] == "mirror-loaded"]
    assert loaded == ([] if step is None else [step] * 2)
    for state in states:
        state.begins_fresh("no donor")
        state.register("other", nn.Linear(1, 1), "rack")
    fresh = {note["reason"] for note in notes if note.get("name") == "other"}
    if step is None:
        assert all(each.startswith(reason) for each in fresh), fresh
    else:
        assert fresh == {f"the mirror of step {step} on rack 1 has no such name"}


class SlowWay(Way):
    """The bytes of a mirror come while the rank waits, behind `waits` limits; those of another one,
    which nobody wants, before them."""

    def __init__(self, hand: Hand, waits: int) -> None:
        super().__init__(hand, [7], [])
        self.waits = waits

    def fetch(self, mirror: Mirror) -> None:
        late = replaced(mirror, round=8, step=64)
        self.hand.found.take_back(late, Mirrored(late, self.data_B))

        def wait() -> None:
            self.waits -= 1
            if self.waits < 0:
                super(SlowWay, self).fetch(mirror)

        self.hand.during = wait


@pytest.mark.parametrize("waits", [0, 3])
def test_the_mirror_that_the_ranks_agreed_on_is_waited_for_and_no_other_one_is_taken(
    waits: int,
) -> None:
    """A late one of another step left the ranks of a rack at different places in the data."""
    hand, _ = joiner(ranks=2)
    hand.trainer.states.mirrors = SlowWay(hand, waits)
    hand.run(hand.trainer.states._load_mirror(state_of(hand)))
    assert [note["step"] for _, note in hand.noted("mirror-loaded")] == [56]
    assert [event.step for event in hand.posted(RackStateLoaded)] == [56]


@pytest.mark.parametrize(("kept", "step"), [([7], [56]), ([], [])])
def test_a_rack_that_does_not_say_what_it_keeps_is_not_waited_for_beyond_the_limit(
    kept: list[int], step: list[int]
) -> None:
    """What another one keeps is taken; if there is nothing, the reason names who was silent."""
    hand, _ = joiner()
    way = Way(hand, kept, [])
    hand.trainer.states.mirrors = way
    way.unheard = (2, 3)
    state = state_of(hand)
    hand.run(hand.trainer.states._load_mirror(state))
    assert hand.waits[0] == MIRROR_NS
    assert [note["step"] for _, note in hand.noted("mirror-loaded")] == step
    if not step:
        state.begins_fresh("no donor")
        state.register("place", nn.Linear(1, 1), "rack")
        assert [note["reason"] for _, note in hand.noted("state-fresh")][-1] == (
            "no rack that answered keeps a mirror of it; no answer from racks 2, 3"
        )


def test_the_failure_of_a_rank_ends_its_wait_for_a_mirror() -> None:
    hand, _ = joiner()
    hand.trainer.states.mirrors = SlowWay(hand, 9)
    hand.published.fail(JobLost("the bytes are gone"))
    hand.run(hand.trainer.states._load_mirror(state_of(hand)))
    assert hand.noted("mirror-loaded") == []


# -------------------------------------------------------------- drain


def test_a_drain_waits_until_nothing_is_open_and_all_that_is_decided_is_applied() -> None:
    hand = Hand(fragments=2, stall_max_ns=0)
    hand.step(4)
    assert [state.offer is not None for state in hand.trainer.fragment_states] == [True, True]
    acts = iter(
        [
            lambda: hand.decide(0.5, 0, names=True),
            lambda: hand.decide(0.5, 1),  # without ours
            lambda: hand.decide(0.75, 1, names=True),
            lambda: hand.decide(0.875, 1, publish=False),  # decided, and not here yet
            lambda: hand.published.publish(1, hand.numerics.adopt(torch.full((4,), 0.875), 4, 3)),
        ]
    )
    hand.during = lambda: next(acts, int)()
    hand.run(hand.trainer.drain(60 * SECOND))
    assert next(acts, None) is None
    assert [state.anchor.version for state in hand.trainer.fragment_states] == [1, 3]
    assert all(state.offer is None for state in hand.trainer.fragment_states)


def test_a_drain_says_again_what_is_open_with_each_version_that_it_applies() -> None:
    """A late offer opens no round until its rack trains on the newest version."""
    hand = Hand(stall_max_ns=0)
    hand.step(4)
    acts = iter([lambda: hand.decide(0.5), lambda: hand.decide(0.75, names=True)])
    hand.during = lambda: next(acts, int)()
    hand.run(hand.trainer.drain(60 * SECOND))
    assert hand.posted(StillOpen) == [StillOpen(0, 0), StillOpen(0, 1)]


def test_a_drain_gives_up_with_the_reason() -> None:
    hand = Hand(stall_max_ns=0)
    hand.published.heard(NewestOrders((0,), ("the coordinator is silent",), ()))
    hand.step(4)
    with pytest.raises(
        GaveUp, match=r"1 offers are still open: after 1 s \(the coordinator is sil"
    ):
        hand.run(hand.trainer.drain(SECOND))


def test_a_drain_of_a_rack_that_the_job_has_left_behind_ends_at_once() -> None:
    hand = Hand(stall_max_ns=0)
    hand.step(4)
    hand.published.finish()
    with pytest.raises(GaveUp, match="the job is over for this rack"):
        hand.run(hand.trainer.drain(60 * SECOND))
    assert hand.waits == []


def test_one_ranks_drain_goes_on_until_all_ranks_are_done() -> None:
    hand = Hand(ranks=2)
    done = list[int]()
    hand.agree = lambda values: [len(done), *values[1:]]
    hand.during = lambda: done.append(1)
    hand.run(hand.trainer.drain(60 * SECOND))
    assert len(hand.agreements) == 2


# -------------------------------------------------------------- close


def merging(hand: Hand) -> None:
    """A coordinator that names whatever is offered, and lets racks go that are done."""
    offered = [p for p, state in enumerate(hand.trainer.fragment_states) if state.offer is not None]
    for fragment in offered:
        known = hand.published.fragments[fragment]
        if known.decided == hand.fragment_state(fragment).anchor.version:
            hand.decide(8.0, fragment, names=True)
    if hand.posted(Idle):
        hand.published.finish()


def test_a_close_merges_the_tail_and_leaves_the_anchor_in_the_model() -> None:
    hand = Hand()
    hand.during = lambda: merging(hand)
    hand.step(6)
    assert hand.trainer.open_tokens() == 20
    hand.run(hand.trainer.close())
    assert [(c.step, c.tokens) for c in hand.posted(Captured)] == [(4, 40), (6, 20)]
    assert set(hand.posted(Leaving)) == {Leaving()}, "in no hurry"
    assert hand.posted(Idle) == [Idle((2,))]
    assert hand.trainer.open_tokens() == 0
    assert hand.theta() == 8.0
    assert hand.noted("left-alone", "kept-local", "drain-gave-up") == []


def test_a_tail_is_offered_before_anything_is_waited_for() -> None:
    """Tails of racks that end together belong into one round; one by one they would add up."""
    hand = Hand()
    seen = []

    def act() -> None:
        seen.append((len(hand.posted(Captured)), len(hand.posted(Leaving))))
        merging(hand)

    hand.during = act
    hand.step(3)
    hand.run(hand.trainer.close())
    assert seen[0] == (1, 1)
    assert [(c.step, c.tokens) for c in hand.posted(Captured)] == [(3, 30)]


def test_a_close_captures_nothing_when_there_is_nothing_new() -> None:
    hand = Hand()
    hand.during = lambda: merging(hand)
    hand.run(hand.trainer.close())
    assert hand.posted(Captured) == []
    assert hand.theta() == 0.0


@pytest.mark.parametrize("keep_local", [False, True])
def test_the_own_weights_are_kept_on_request(keep_local: bool) -> None:
    """With blend they differ from the anchor though everything is merged."""
    hand = Hand(apply_mode="blend")
    hand.during = lambda: merging(hand)
    hand.step(6)
    hand.run(hand.trainer.close(keep_local=keep_local))
    anchor = float(hand.fragment_state().anchor.values[0])
    assert anchor == 8.0
    assert (hand.theta() == anchor) is not keep_local


def test_commit_decided_while_a_closing_rack_waits_for_the_others_is_applied() -> None:
    hand = Hand()
    hand.step(3)
    later = iter([lambda: hand.decide(1.0), lambda: hand.decide(2.0), hand.published.finish])

    def act() -> None:
        if hand.posted(Idle):
            next(later)()
        else:
            merging(hand)

    hand.during = act
    hand.run(hand.trainer.close())
    assert hand.posted(Idle) == [Idle((1,)), Idle((2,)), Idle((3,))]
    assert hand.theta() == 2.0


def test_a_rack_that_nobody_lets_go_hurries_and_then_leaves_alone() -> None:
    hand = Hand()
    hand.published.heard(NewestOrders((0,), ("the coordinator is silent",), ()))
    started_ns = hand.now_ns
    hand.run(hand.trainer.close())
    *patient, last = hand.posted(Leaving)
    assert (set(patient), last) == ({Leaving()}, Leaving(now=True))
    waited_ns = hand.now_ns - started_ns
    assert SHUTDOWN_NS + LEAVE_NS < waited_ns < SHUTDOWN_NS + LEAVE_NS + 3 * POLL_NS
    ((_, fields),) = hand.noted("left-alone")
    assert fields == {"why": ["the coordinator is silent"], "open_tokens": 0}
    assert len(hand.noted("leaving")) == 1, f"each {NOTE_NS} ns while it waits"
    assert hand.theta() == 0.0


def test_work_that_nobody_merged_stays_in_the_weights_and_is_reported() -> None:
    hand = Hand(stall_max_ns=0)
    hand.step(6)
    hand.run(hand.trainer.close())
    assert hand.theta() == 1.5
    ((_, fields),) = hand.noted("kept-local")
    assert fields["open_tokens"] == 60
    assert len(hand.noted("left-alone")) == 1
    assert [fields["open_tokens"] for _, fields in hand.noted("drain-gave-up")] == [60], "once"


def test_unmerged_work_names_the_pulls_that_fail() -> None:
    hand = Hand(stall_max_ns=0)
    hand.replace_parts(troubles=lambda: ["no pull from hostB:22000 succeeds"])
    hand.step(6)
    hand.run(hand.trainer.close())
    assert hand.trainer.outcome.word == "kept-local"
    assert hand.trainer.outcome.detail.endswith("no pull from hostB:22000 succeeds")


def test_a_rack_that_was_silent_at_the_end_is_named_by_who_left() -> None:
    """A rack froze, the others ended as merged without a word of it, and its work was nowhere."""
    hand = Hand()
    hand.during = lambda: merging(hand)
    hand.step(6)
    end = Roster(2, (), (THEIRS.rack,), None, "all racks are done")
    hand.published.on_decided(end)
    hand.run(hand.trainer.close())
    assert hand.trainer.outcome.word == "merged"
    assert hand.trainer.outcome.detail.startswith(f"without rack {THEIRS.rack}, silent or gone")


def test_one_rank_with_unmerged_work_makes_all_ranks_keep_theirs() -> None:
    """Else the ranks of one rack would end with different models."""
    hand = Hand(ranks=2)
    hand.published.finish()
    hand.agree = lambda values: [-5, 0] if hand.posted(Leaving) and values == [0, 0] else values
    with torch.no_grad():
        hand.model[0].fill_(7.0)
    hand.run(hand.trainer.close())
    assert hand.theta() == 7.0
    assert len(hand.noted("kept-local")) == 1


def test_a_rack_whose_last_capture_is_no_number_ends_with_that() -> None:
    """It ended in order, on the merged weights, as if its own work had been merged."""
    hand = Hand(fragments=2, stall_max_ns=0)
    hand.step(3)
    hand.published.finish()
    with torch.no_grad():
        hand.model[1][0] = float("inf")
    with pytest.raises(Diverged, match="rack 0, fragment 1, step 3: 1 holds inf"):
        hand.run(hand.trainer.close())
    assert [fields["fragment"] for _, fields in hand.noted("diverged")] == [1]


def test_so_does_one_with_nothing_left_to_capture() -> None:
    hand = Hand(fragments=2, stall_max_ns=0)
    hand.step(3)  # fragment 0 is captured in step 2, and its offer stays open
    hand.published.finish()
    hand.model[0].data.fill_(float("nan"))
    with pytest.raises(Diverged, match="rack 0, fragment 0, step 3: 0 holds nan"):
        hand.run(hand.trainer.close())
    assert hand.noted("kept-local") == []


def test_weights_that_a_rack_mate_finds_to_be_no_numbers_end_all_ranks() -> None:
    """A NaN may be in one rank's shard alone; a rack ends as a whole."""
    hand = Hand(ranks=2, fragments=2, stall_max_ns=0)
    hand.step(3)
    hand.published.finish()
    hand.agree = lambda values: [0, 0] if values == [1, 1] else values
    with pytest.raises(Diverged, match="another rank of this rack"):
        hand.run(hand.trainer.close())
    assert hand.noted("kept-local") == []


def test_a_close_in_lockstep_waits_as_long_as_lockstep_does() -> None:
    hand = Hand(lockstep=True, wait_timeout_ns=4 * SHUTDOWN_NS)
    started_ns = hand.now_ns
    hand.step(3)
    hand.run(hand.trainer.close())
    assert hand.now_ns - started_ns > 4 * SHUTDOWN_NS


# -------------------------------------------------------------- looking, and putting back


def test_local_weights_are_a_copy_and_can_be_put_back() -> None:
    hand = Hand(fragments=2)
    hand.step(3)
    kept = hand.trainer.local_weights()
    hand.run(hand.trainer.publish_anchor())
    assert [hand.theta(p) for p in (0, 1)] == [0.0, 0.0]
    hand.trainer.put_back(kept)
    assert [hand.theta(p) for p in (0, 1)] == [0.75, 0.75]


# -------------------------------------------------------------- a checkpoint behind a snapshot

OURS = CheckpointRecord(1, "one", "ab" * 32, (0, 1))
ALONE = replace(OURS, racks=(1,))


def snapshot(hand: Hand, *records: Record) -> Callable[[], None]:
    """A snapshot comes, in place of Genesis and these records."""

    def comes() -> None:
        log = Log()
        for record in (Genesis(SEATS, None, policy(), "", (("",),)), *records):
            log.append(record)
        log.decide(log.last)
        hand.published.restore(log.snapshot())

    return comes


def merged(version: int) -> Commit:
    return Commit(
        0, version, (MergeMember(THEIRS, version, version - 1, 4, 10, 1),), (), ("",), "all-in"
    )


def run_with(hand: Hand, doing: Requests, *comes: Callable[[], None]) -> None:
    """Each of these happens at one of its waits, one after the other."""
    left = list(comes)
    hand.during = lambda: left.pop(0)() if left else None
    hand.run(doing)


def test_a_snapshot_says_at_once_that_a_checkpoint_was_made_without_this_rack() -> None:
    hand = Hand()
    begin(hand)
    began_ns = hand.now_ns
    for found in (ALONE, replace(ALONE, written=True)):
        with pytest.raises(CheckpointError, match="'one' was made without rack 0"):
            run_with(hand, hand.barrier.cut("one", 60 * SECOND), snapshot(hand, merged(1), found))
        hand.published.of(CheckpointRecords).begun = None
        hand.published.of(CheckpointRecords).answered = 0
    assert hand.now_ns == began_ns, "it waited until the time was over"


@pytest.mark.parametrize("missed", [True, False], ids=["while it trained", "before it trained"])
def test_checkpoint_without_this_rack_concerns_no_later_call_of_the_same_name(missed: bool) -> None:
    """`checkpoint_state` gives all of its checkpoints one name: a rack that had joined, or had been
    silent once, refused every one from then on."""
    hand = Hand()
    old = snapshot(hand, ALONE)
    if not missed:
        old()
    hand.published.begin_to_train()
    if missed:
        with pytest.raises(CheckpointError, match="'one' was made without rack 0"):
            run_with(hand, hand.barrier.cut("one", 60 * SECOND), old)
    next_one = replace(OURS, number=2)
    cut = hand.barrier.cut("one", 60 * SECOND)
    run_with(hand, cut, snapshot(hand, ALONE, replace(ALONE, written=True), next_one))
    assert hand.published.of(CheckpointRecords).answered == 2


def test_a_rack_that_has_what_was_decided_before_a_checkpoint_takes_part_behind_a_snapshot() -> (
    None
):
    hand = Hand()
    begin(hand)
    anchor = hand.numerics.adopt(torch.ones(4), 4, 1)
    come = snapshot(hand, merged(1), OURS)
    run_with(
        hand, hand.barrier.cut("one", 60 * SECOND), come, lambda: hand.published.publish(0, anchor)
    )
    assert hand.fragment_state().anchor.version == 1


def test_a_rack_whose_snapshot_is_of_behind_a_checkpoint_gives_that_up_at_once() -> None:
    """It cannot have what was decided before: states are copied as they are now."""
    hand = Hand()
    begin(hand)
    began_ns = hand.now_ns
    come = snapshot(hand, merged(1), OURS, merged(2))
    with pytest.raises(
        CheckpointError, match="'one' was not made: later decisions overtook this rack"
    ):
        run_with(hand, hand.barrier.cut("one", 60 * SECOND), come)
    assert hand.now_ns == began_ns
    assert hand.posted(BarrierChanged)[-1] == BarrierChanged(""), "the others need not wait for it"


def test_a_snapshot_says_that_all_have_written() -> None:
    hand = Hand()
    begin(hand)
    written = replace(OURS, written=True)
    come = snapshot(hand, merged(1), OURS, merged(2), written)
    run_with(hand, hand.barrier.await_written(OURS, 60 * SECOND), come)
    missing = replace(written, racks=(0,))
    hand.published.of(CheckpointRecords).written = None
    with pytest.raises(CheckpointError, match="incomplete: racks 1 have not written it"):
        run_with(hand, hand.barrier.await_written(OURS, 60 * SECOND), snapshot(hand, OURS, missing))


@pytest.mark.parametrize("by", ["snapshot", "record"])
def test_rank_that_hears_of_the_next_checkpoint_first_reports_this_one_incomplete(
    by: str,
) -> None:
    hand = Hand()
    begin(hand)
    began_ns, second = hand.now_ns, CheckpointRecord(2, "two", "ab" * 32, (1,))
    decided = lambda: hand.published.on_decided(second)  # noqa: E731
    come = snapshot(hand, OURS, second) if by == "snapshot" else decided
    with pytest.raises(CheckpointError, match="may be incomplete: the next one was begun"):
        run_with(hand, hand.barrier.await_written(OURS, 60 * SECOND), come)
    assert hand.now_ns == began_ns


def test_a_rack_that_others_have_overtaken_gives_a_checkpoint_up_at_once() -> None:
    """They train on as soon as they have taken their state. It has copied a newer version."""
    hand = Hand()
    begin(hand)
    began_ns, published = hand.now_ns, hand.published

    def overtaken() -> None:
        for record in (merged(1), OURS, merged(2)):
            published.on_decided(record)
        published.publish(0, hand.numerics.adopt(torch.ones(4), 4, 2))

    with pytest.raises(
        CheckpointError, match="'one' was not made: later decisions overtook this rack"
    ):
        run_with(hand, hand.barrier.cut("one", 60 * SECOND), overtaken)
    assert hand.now_ns == began_ns
    assert hand.fragment_state().anchor.version == 0


def test_a_rack_that_waits_in_a_checkpoint_says_for_whom() -> None:
    """Racks in checkpoints of different names were silent for wait_timeout_s, ten minutes."""
    hand = Hand()
    begin(hand)
    hand.published.heard(NewestOrders(why=("checkpoint: rack 0 in 'one', rack 1 in 'two'",)))
    with pytest.raises(CheckpointError, match="rack 1 in 'two'"):
        hand.run(hand.barrier.cut("one", 12 * SECOND))
    said = [fields for _, fields in hand.noted("waiting")]
    assert [each["seconds"] for each in said] == [5, 10]
    assert all("rack 1 in 'two'" in each["for"] for each in said)


def test_commit_decided_behind_a_checkpoint_is_not_applied_before_it() -> None:
    hand = Hand()
    begin(hand)

    def come() -> None:
        for record in (merged(1), OURS, merged(2)):
            hand.published.on_decided(record)
        for version in (1, 2):
            hand.published.publish(0, hand.numerics.adopt(torch.ones(4), 4, version))

    run_with(hand, hand.barrier.cut("one", 60 * SECOND), come)
    assert hand.fragment_state().anchor.version == 1
