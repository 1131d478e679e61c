"""The board between the loop and the training thread: facts are shown, waiters wake, nothing
grows."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from mend.errors import GaveUp, PlanMismatch, WorkerFailed
from mend.protocol.messages import Drop
from mend.runtime.handoff import Board
from mend.runtime.numerics import Anchor
from tests.unit.protocol.nouns import commit, digest, genesis, offer, roster

LIMIT_S = 30.0
"""Never waited for: somebody always notifies. Reaching it is a failure."""


def anchor(version: int) -> Anchor:
    return Anchor(torch.zeros(2), 2, version, digest(version))


def waiting(board: Board, ready: Callable[[], bool], then: Callable[[], None]) -> bool:
    """What `wait` says in a thread that sleeps when `then` happens."""
    asleep, answers = threading.Event(), list[bool]()

    def look() -> bool:
        asleep.set()  # under the lock, so `then` happens when this thread has let go of it
        return ready()

    thread = threading.Thread(target=lambda: answers.append(board.wait(look, LIMIT_S)))
    thread.start()
    assert asleep.wait(LIMIT_S)
    then()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "nobody woke it"
    return answers[0]


def test_versions_come_and_go() -> None:
    board = Board(2)
    board.publish(1, anchor(3))
    board.publish(1, anchor(4))
    board.forget(1, 3)
    board.forget(1, 3)
    board.forget(0, 9)
    assert [sorted(panel.anchors) for panel in board.panels] == [[], [4]]


def test_records_are_shown_as_they_are_decided() -> None:
    board = Board(2)
    assert not board.begun
    board.told(genesis(racks=3, fragments=2))
    assert board.begun
    assert board.seats == (0, 1, 2)
    assert board.digest(1, 0) == (digest(1),)
    merged = commit(1, [offer(0, fragment=1, tokens=7), offer(2, fragment=1, tokens=5)], fragment=1)
    board.told(merged, (3.0, 0.25))
    assert board.panels[1].commits == {1: merged}
    assert [panel.decided for panel in board.panels] == [0, 1]
    assert board.digest(1, 1) == merged.digests
    assert board.look().outer_last == (3.0, 0.25)
    assert (board.commits, board.members_last, board.tokens_merged) == (1, (0, 2), 12)
    assert board.turned_out() == ({2: 1}, ((2, 0),)), "before the first orders nobody is known"
    board.told(Drop(0, (), "nothing to show"))
    board.told(roster(1, [0, 2]))
    assert board.seats == (0, 2)
    assert board.commits == 1


def test_a_round_is_compared_with_the_racks_of_the_roster_that_live() -> None:
    board = Board(1)
    board.told(genesis(racks=3))
    board.heard((0, 1, 2), (), (0,))
    board.told(commit(1, [offer(0)]))
    board.heard((0, 2), (), (0,))
    board.told(commit(2, [offer(0)]))
    board.told(roster(1, [0]))
    board.told(commit(3, [offer(0)]))
    assert board.turned_out() == ({1: 3}, ((1, 3), (1, 2), (1, 1)))


def test_what_was_applied_is_not_kept() -> None:
    board = Board(1)
    board.told(genesis())
    for version in range(1, 5):
        board.told(commit(version, [offer(0, version)]))
    board.applied(0, 3)
    assert sorted(board.panels[0].commits) == [4]
    assert sorted(board.panels[0].digests) == [3, 4], "the applied one may still be asked for"
    assert board.digest(0, 2) == ()


def test_the_first_failure_stays() -> None:
    board = Board(1)
    board.fail(PlanMismatch("first"))
    board.fail(WorkerFailed("second"))
    assert str(board.failure) == "first"


Change = Callable[[Board], None]
CHANGES: dict[str, tuple[Change, Callable[[Board], bool]]] = {
    "publish": (lambda b: b.publish(0, anchor(1)), lambda b: 1 in b.panels[0].anchors),
    "told": (lambda b: b.told(genesis()), lambda b: b.begun),
    "discard": (lambda b: b.discard(0, 5), lambda b: 5 in b.panels[0].discarded),
    "finish": (lambda b: b.finish(), lambda b: b.finished),
    "settled": (lambda b: b.heard((0,), (), (0,)), lambda b: b.settled == (0,)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_who_waits_wakes_when_it_happens(name: str) -> None:
    board, (change, ready) = Board(1), CHANGES[name]
    assert waiting(board, lambda: ready(board), lambda: change(board))


def test_who_waits_wakes_when_it_can_only_fail() -> None:
    board = Board(1)
    assert not waiting(board, lambda: False, lambda: board.fail(GaveUp("why")))
    assert board.wait(lambda: True, 0), "what is there is there, failure or not"


def test_a_wait_that_ends_says_whether_it_was_worth_it() -> None:
    board = Board(1)
    assert not board.wait(lambda: False, 0)
    assert board.wait(lambda: True, 0)


def test_what_the_coordinator_said_last_is_shown() -> None:
    board = Board(1)
    board.heard((0, 1), ("fragment 0: waiting for rack 1",), (3,), {0: 3})
    assert board.opened == {0: 3}
    board.heard((0,), (), (3,))
    assert (board.live, board.why, board.settled, board.opened) == ((0,), (), (3,), {})
