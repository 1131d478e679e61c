"""The board between the loop and the training thread: facts are shown, waiters wake, nothing
grows."""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mend.consensus.records import CheckpointRecord, Drop
from mend.engine.checkpoint.checkpoint_barrier import CheckpointRecords
from mend.engine.compute.anchor import Anchor
from mend.engine.state.participation import ROUNDS_RECENT, SHORT_NS
from mend.engine.state.published_state import NewestOrders, PublishedState
from mend.errors import GaveUp, InvariantError, PlanMismatch, WorkerFailed
from tests.unit.coordination.nouns import commit, digest, genesis, log_of, offer, roster

LIMIT_S = 30.0
"""Never waited for: somebody always notifies. Reaching it is a failure."""


def anchor(version: int) -> Anchor:
    return Anchor(torch.zeros(2), 2, version, digest(version))


def waiting(published: PublishedState, ready: Callable[[], bool], then: Callable[[], None]) -> bool:
    """What `wait` says in a thread that sleeps when `then` happens."""
    asleep, answers = threading.Event(), list[bool]()

    def look() -> bool:
        asleep.set()  # under the lock, so `then` happens when this thread has let go of it
        return ready()

    thread = threading.Thread(target=lambda: answers.append(published.wait(look, LIMIT_S)))
    thread.start()
    assert asleep.wait(LIMIT_S)
    then()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "nobody woke it"
    return answers[0]


def test_versions_come_and_go() -> None:
    published = PublishedState(2)
    published.publish(1, anchor(3))
    published.publish(1, anchor(4))
    published.forget(1, 3)
    published.forget(1, 3)
    published.forget(0, 9)
    assert [sorted(known.anchors) for known in published.fragments] == [[], [4]]


def test_records_are_shown_as_they_are_decided() -> None:
    published = PublishedState(2)
    assert not published.job.begun
    published.on_decided(genesis(racks=3, fragments=2))
    assert published.job.begun
    assert published.job.seats == (0, 1, 2)
    assert published.digest(1, 0) == (digest(1),)
    merged = commit(1, [offer(0, fragment=1, tokens=7), offer(2, fragment=1, tokens=5)], fragment=1)
    published.on_decided(merged, (3.0, 0.25))
    assert published.fragments[1].commits == {1: merged}
    assert [known.decided for known in published.fragments] == [0, 1]
    assert published.digest(1, 1) == merged.digests
    assert published.look().rounds.outer == (3.0, 0.25)
    assert (published.rounds.count, published.rounds.members) == (1, (0, 2))
    assert published.rounds_by_racks() == ({2: 1}, ((2, 0),)), (
        "before the first orders nobody is known"
    )
    published.on_decided(Drop(0, (), "nothing to show"))
    published.on_decided(roster(1, [0, 2]))
    assert published.job.seats == (0, 2)
    assert published.rounds.count == 1


def test_a_round_is_compared_with_the_racks_of_the_roster_that_live() -> None:
    published = PublishedState(1)
    published.on_decided(genesis(racks=3))
    published.begin_to_train()
    published.heard(NewestOrders((0, 1, 2), (), (0,)))
    published.on_decided(commit(1, [offer(0)]))
    published.heard(NewestOrders((0, 2), (), (0,)))
    published.on_decided(commit(2, [offer(0)]))
    published.on_decided(roster(1, [0]))
    published.on_decided(commit(3, [offer(0)]))
    assert published.rounds_by_racks() == ({1: 3}, ((1, 3), (1, 2), (1, 1)))


def test_rounds_that_closed_before_this_rack_trained_are_compared_with_nobody() -> None:
    """A rack that returned read the rounds of the time that it was dead, compared them with those
    that live now, itself among them, and warned of short rounds."""
    published = PublishedState(1)
    published.on_decided(genesis(racks=2))
    published.heard(NewestOrders((0, 1), (), (0,)))
    for version in range(1, 1 + ROUNDS_RECENT):
        published.on_decided(commit(version, [offer(0, version)]))
        assert published.participation.warning(version * SHORT_NS) == ""
    assert published.rounds_by_racks() == ({1: ROUNDS_RECENT}, ((1, 0),) * ROUNDS_RECENT)
    published.begin_to_train()
    published.on_decided(commit(1 + ROUNDS_RECENT, [offer(0)]))
    assert published.rounds_by_racks()[1][-1] == (1, 2)


def test_applied_commits_are_not_kept() -> None:
    published = PublishedState(1)
    published.on_decided(genesis())
    for version in range(1, 5):
        published.on_decided(commit(version, [offer(0, version)]))
    published.applied(0, 3)
    assert sorted(published.fragments[0].commits) == [4]
    assert sorted(published.fragments[0].digests) == [3, 4], (
        "the applied one may still be asked for"
    )
    assert published.digest(0, 2) == ()


def test_the_first_failure_stays() -> None:
    published = PublishedState(1)
    published.fail(PlanMismatch("first"))
    published.fail(WorkerFailed("second"))
    assert str(published.failure) == "first"


Change = Callable[[PublishedState], None]
CHANGES: dict[str, tuple[Change, Callable[[PublishedState], bool]]] = {
    "publish": (lambda b: b.publish(0, anchor(1)), lambda b: 1 in b.fragments[0].anchors),
    "decided": (lambda b: b.on_decided(genesis()), lambda b: b.job.begun),
    "discard": (lambda b: b.discard(0, 5), lambda b: 5 in b.fragments[0].discarded),
    "finish": (lambda b: b.finish(), lambda b: b.finished),
    "settled": (
        lambda b: b.heard(NewestOrders((0,), (), (0,))),
        lambda b: b.orders.settled == (0,),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_waiter_wakes_when_its_condition_holds(name: str) -> None:
    published, (change, ready) = PublishedState(1), CHANGES[name]
    assert waiting(published, lambda: ready(published), lambda: change(published))


def test_waiter_wakes_when_the_state_fails() -> None:
    published = PublishedState(1)
    assert not waiting(published, lambda: False, lambda: published.fail(GaveUp("why")))
    assert published.wait(lambda: True, 0), "what is there is there, failure or not"


def test_a_wait_that_ends_says_whether_it_was_worth_it() -> None:
    published = PublishedState(1)
    assert not published.wait(lambda: False, 0)
    assert published.wait(lambda: True, 0)


def test_newest_orders_replace_the_previous_ones() -> None:
    published = PublishedState(1)
    published.heard(NewestOrders((0, 1), ("fragment 0: waiting for rack 1",), (3,), {0: 3}))
    assert published.orders.opened == {0: 3}
    published.heard(NewestOrders((0,), (), (3,)))
    assert published.orders == NewestOrders((0,), (), (3,))
    assert published.orders.opened == {}


def test_a_snapshot_shows_the_checkpoint_that_was_made_before_it() -> None:
    """A rank that was brought up to date by one waited until its time was over, and called a
    complete checkpoint incomplete."""
    first = CheckpointRecord(1, "one", "ab" * 32, (0, 1))
    written = CheckpointRecord(1, "one", "ab" * 32, (0, 1), written=True)
    log = log_of(genesis(), commit(1, [offer(0)]), first, commit(2, [offer(0, 2)]), written)
    log.decide(log.last - 1)
    published = PublishedState(1)
    records = published.of(CheckpointRecords)
    published.restore(log.snapshot())
    assert (records.begun, records.written) == ((first, (1,)), None)
    log.decide(log.last)
    published.restore(log.snapshot())
    assert records.written == written
    assert records.begun == (first, (1,)), "whose racks are those that were to write it"


def test_slice_that_takes_records_is_refused_after_the_first_one() -> None:
    published = PublishedState(1)
    published.on_decided(genesis())
    with pytest.raises(InvariantError, match="a slice is made after the first record"):
        published.of(CheckpointRecords)


def test_discarded_offer_is_the_newest_one_with_its_first_reason() -> None:
    published = PublishedState(1)
    shown = []
    for seq, bad in ((1, "NaN"), (1, ""), (2, ""), (1, "NaN")):
        published.discard(0, seq, bad)
        shown.append(published.fragments[0].discarded)
    assert shown == [{1: "NaN"}, {1: "NaN"}, {2: ""}, {2: ""}]


def test_published_state_and_tensor_store_are_changed_by_their_methods_alone() -> None:
    """`published.x = y` elsewhere would be a further writer, which no method and no lock shows."""
    written = [
        f"{ast.unparse(node)} in {path.name}"
        for path in (Path(__file__).parents[3] / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store)
    ]
    assert written
    assert [each for each in written if re.match(r"[\w.]*(published|store)[.\[]", each)] == []
