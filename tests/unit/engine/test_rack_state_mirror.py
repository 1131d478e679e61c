"""A rank keeps what a rank of another rack has of its own, as of what was merged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from mend.consensus.records import Commit
from mend.engine.joining.inbox import MirrorInbox
from mend.engine.joining.rack_state_mirror import KEPT, SPARE, RackStateMirrors, holder_of
from mend.engine.joining.training_state import RACK_STATE_BYTES_MAX, Mirror, Mirrored
from mend.engine.rank_factory import loop_features
from mend.engine.state.published_state import NewestOrders
from mend.errors import PayloadGone, TransferStalled, require
from mend.transport.bulk_wire import checksum_of
from mend.types import Address, mirrors_key, rack_state_key
from tests.unit.coordination.nouns import commit, member, offer, roster
from tests.unit.engine.test_concurrent_outer_step import MINE, Asked, Story

GONE = PayloadGone("it is served no more")


def bytes_(value: int, size: int = 5) -> Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


class Mirrors(Story):
    """Rank 1 of rack 1, of three."""

    def __init__(self) -> None:
        super().__init__(features=lambda parts: [*loop_features(parts), RackStateMirrors(parts)])
        self.mirrors = require(self.rank.feature(RackStateMirrors), "it is made above")
        self.found = self.published.of(MirrorInbox)
        self.told()
        self.version = 0

    def merge(self, *captures: tuple[int, int], life: int = 0, **orders: Any) -> None:
        """Decide a round of these: (rack, number of the capture, which was made at 8 times it)."""
        self.version += 1
        made = [offer(rack, seq, ranks=2, life=life) for rack, seq in captures]
        self.told(commit(self.version, made, ranks=2), **orders)

    def begun(self) -> list[Asked]:
        """The pulls of mirrors that are under way."""
        return [pull for pull in self.host.pulls if pull.key[:1] in b"rk"]

    def answer(self, answer: Tensor | Exception) -> Asked:
        """The oldest of them."""
        pull = self.begun()[0]
        self.host.pulls.remove(pull)
        if isinstance(answer, Exception):
            pull.done(answer)
        else:
            pull.arrives(answer)
        return pull

    def keep(self, state: Tensor) -> None:
        """Answer head and state."""
        self.answer(head_of(state))
        self.answer(state)

    def listed(self) -> Tensor:
        """What it says that it keeps of rack 0."""
        served = self.host.served[mirrors_key(0, 1)]
        return torch.frombuffer(bytearray(served), dtype=torch.uint8)


def head_of(state: Tensor, size: int | None = None) -> Tensor:
    """As another rank tells it."""
    other = Mirrors()
    other.mirrors.serve(8, state)
    served = bytearray(other.host.served[rack_state_key(MINE, 1, 8)])
    if size is not None:
        served[:8] = size.to_bytes(8, "big")
    return torch.frombuffer(served, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("rack", "there", "holder"),
    [(0, (0, 1), 1), (1, (0, 1), 0), (1, (0, 1, 4), 4), (4, (0, 1, 4), 0), (2, (0, 4), 4),
     (3, (3,), None), (3, (), None)],
)  # fmt: skip
def test_the_next_rack_keeps_it(rack: int, there: tuple[int, ...], holder: int | None) -> None:
    assert holder_of(rack, there) == holder


def test_state_of_a_merged_capture_is_fetched_and_kept() -> None:
    story, state = Mirrors(), bytes_(7)
    story.merge((0, 3), (1, 3))
    head = story.answer(head_of(state))
    assert head.key == rack_state_key(member(0), 1, 24)
    assert head.holders == (Address("rack0", 11),), "the same rank of that rack"
    pull = story.answer(state)
    assert pull.key == rack_state_key(member(0), 1, 24, checksum_of(state.numpy().data))
    assert pull.checksum == checksum_of(state.numpy().data), "accepted by its digest"
    assert story.host.noted("mirror-kept") == [{"peer": 0, "step": 24, "bytes": 5}]
    assert story.host.served[pull.key] == bytes([7] * 5)
    assert story.found.kept_bytes == 5


def test_mirror_keeps_the_newest_two_states() -> None:
    story = Mirrors()
    for number in range(1, 5):
        story.merge((0, number))
        story.keep(bytes_(number))
    kept = [key for key in story.host.served if key[:1] == b"r"]
    assert len(kept) == KEPT
    assert story.found.kept_bytes == 5 * KEPT
    story.mirrors.committed(commit(1, [offer(0, 3, fragment=1)], fragment=1), 5)
    assert story.begun() == [], "a capture before the newest, of a fragment that was merged late"


def test_mirror_keeps_a_second_rack_while_the_holder_of_that_rack_is_silent() -> None:
    story = Mirrors()
    story.merge((2, 1))
    assert story.begun() == [], "rack 0 keeps that of rack 2, the last one"
    story.merge((2, 2), live=(1, 2))
    story.keep(bytes_(1))
    assert [note["peer"] for note in story.host.noted("mirror-kept")] == [2]
    story.merge((2, 3), live=(0, 1, 2))
    assert story.begun() == []
    assert mirrors_key(2, 1) not in story.host.served
    assert story.found.kept_bytes == 0


@pytest.mark.parametrize("size", [0, RACK_STATE_BYTES_MAX + 1, 1 << 60])
def test_a_size_out_of_bounds_is_refused_and_costs_no_memory(size: int) -> None:
    story = Mirrors()
    story.merge((0, 1))
    story.answer(head_of(bytes_(1), size))
    assert story.begun() == []
    (missed,) = story.host.noted("mirror-missed")
    assert missed["error"] == f"it has {size} bytes; at most {RACK_STATE_BYTES_MAX} are taken"


def test_one_that_does_not_come_leaves_the_one_before() -> None:
    story = Mirrors()
    story.merge((0, 1))
    story.keep(bytes_(1))
    before = story.listed()
    story.merge((0, 2))
    story.answer(GONE)
    assert story.host.noted("mirror-missed")[0]["step"] == 16
    assert torch.equal(story.listed(), before)


def test_a_person_is_told_once_when_mirrors_fail_in_a_row() -> None:
    story = Mirrors()
    for number, fails in enumerate([0, 1, 1, 1, 0, 1, 0, 1, 1], 1):
        story.merge((0, number))
        if fails:
            story.answer(GONE)
        else:
            story.keep(bytes_(number))
    told = [(note["step"], note["kept"]) for note in story.host.noted("mirror-failed")]
    assert told == [(24, "8"), (72, "56")]
    assert len(story.host.noted("mirror-missed")) == 6


def test_mirror_of_many_rounds_at_once_fetches_the_first_and_the_newest() -> None:
    """A rack that joins reads a long log."""
    story = Mirrors()
    for number in range(1, 6):
        story.merge((0, number))
    story.mirrors.committed(commit(1, [offer(0, 3, fragment=1)], fragment=1), 6)
    assert len(story.begun()) == 1, "and not one of a fragment that was merged late"
    story.answer(GONE)
    story.keep(bytes_(5))
    assert story.begun() == []
    assert [note["step"] for note in story.host.noted("mirror-kept")] == [40]


def test_the_last_capture_of_a_run_is_not_fetched() -> None:
    story = Mirrors()
    record = commit(1, [offer(0, 1)])
    last = replace(record, members=tuple(replace(s, closing=True) for s in record.members))
    story.mirrors.committed(last, 1)
    assert story.begun() == []


# -------------------------------------------------------------- own states


def test_own_states_are_served_as_long_as_they_may_be_asked_for() -> None:
    story = Mirrors()
    for step in range(8, 88, 8):
        story.mirrors.serve(step, bytes_(step))
    heads = [rack_state_key(MINE, 1, step) for step in range(8, 88, 8)]
    assert [key in story.host.served for key in heads] == [False] * (10 - SPARE) + [True] * SPARE


# -------------------------------------------------------------- giving back


def entries(story: Mirrors) -> list[Mirror]:
    """What rack 1 has listed, as the returned rack 0 reads it when rack 1 alone has anything."""
    back = Mirrors()
    back.mirrors.seek()
    assert [pull.key for pull in back.begun()] == [mirrors_key(1, 1)] * 2
    back.answer(GONE)
    assert not back.found.sought
    back.answer(story.listed())
    assert back.found.sought
    return list(back.found.mirrors)


def test_a_rack_that_returns_is_told_rounds_steps_and_lives() -> None:
    """A later life may stand at a lower step: it goes by rounds."""
    story = Mirrors()
    story.merge((0, 7))
    story.keep(bytes_(1))
    story.told(roster(1, (0, 1, 2), 2, lives={0: 1}))
    story.merge((0, 3), life=1)
    story.keep(bytes_(2, size=9))
    told = [(each.round, each.step, each.size, each.holder) for each in entries(story)]
    assert told == [(1, 56, 5, 2), (2, 24, 9, 2)]
    incarnations = [each.owner.incarnation for each in entries(story)]
    assert incarnations == [member(0).incarnation, member(0, 1).incarnation]


def test_search_without_live_holders_finds_no_mirrors() -> None:
    story = Mirrors()
    story.published.heard(NewestOrders((1,), (), ()))
    story.mirrors.seek()
    assert story.found.sought
    assert story.found.mirrors == ()


def test_a_rack_that_does_not_answer_hides_no_mirror_of_another_and_is_named() -> None:
    story = Mirrors()
    story.merge((0, 7))
    story.keep(bytes_(1))
    back = Mirrors()
    back.mirrors.seek()
    assert (back.found.mirrors, back.found.unheard) == ((), (0, 2))
    frozen = back.begun()[0]
    back.host.pulls.remove(frozen)
    back.answer(story.listed())
    assert [each.step for each in back.found.mirrors] == [56]
    assert (back.found.unheard, back.found.sought) == ((0,), False)
    frozen.done(TransferStalled("no verified byte"))
    assert (back.found.unheard, back.found.sought) == ((0,), True)


def test_one_is_fetched_from_its_holder_and_accepted_by_its_digest() -> None:
    story, state = Mirrors(), bytes_(3)
    digest = checksum_of(state.numpy().data)
    mirror = Mirror(4, member(1, 0), 24, 5, digest, 2)
    story.found.want(mirror)
    story.mirrors.fetch(mirror)
    pull = story.answer(state)
    assert (pull.holders, pull.checksum) == ((Address("rack2", 11),), digest)
    found = story.found.mirrored
    assert isinstance(found, Mirrored)
    assert torch.equal(found.data_B, state)
    story.mirrors.fetch(mirror)
    story.answer(GONE)
    assert story.found.mirrored == "PayloadGone: it is served no more"
    left = Mirror(4, member(1), 24, 5, digest, 9)
    story.found.want(left)
    story.mirrors.fetch(left)
    assert story.found.mirrored == "rack 9 has left"


def test_a_commit_of_a_life_that_has_no_seat_is_left_alone() -> None:
    story = Mirrors()
    made = offer(0, 1, ranks=2, life=1)
    record = commit(1, [made], ranks=2)
    assert isinstance(record, Commit)
    story.mirrors.committed(record, 1)
    assert story.begun() == []


def test_mirrored_state_of_a_retired_rack_is_freed() -> None:
    """It stayed in memory for good: no later commit names that rack. One that was only silent for
    too long may return, and gets it back."""
    story = Mirrors()
    story.merge((0, 1))
    story.keep(bytes_(1))
    story.told(replace(roster(1, (1, 2), ranks=2), reason="rack 0 was absent for too long"))
    assert story.found.kept_bytes == 5
    story.told(replace(roster(2, (1, 2), ranks=2), retired=(0,)))
    assert story.found.kept_bytes == 0
    assert mirrors_key(0, 1) not in story.host.served
    assert not any(key[:1] == b"r" for key in story.host.served)
