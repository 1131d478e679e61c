"""Whom a fetch asks next."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mend.errors import ChecksumMismatch, PayloadGone, PeerUnreachable, TransferStalled
from mend.transport.asking import Asked, Ends, ask_around, most_telling
from mend.types import Address

A, B, C = (Address("10.0.0.1", port) for port in (1, 2, 3))
GONE, AWAY, WRONG = PayloadGone("gone"), PeerUnreachable("away"), ChecksumMismatch("wrong")


def asked(
    holders: list[Address], ends: Callable[[Address, int], Asked]
) -> tuple[list[Address], Ends]:
    """Who is asked, and the result. `ends`: of an attempt, by holder and number."""
    asking, order = ask_around(holders), list[Address]()
    try:
        holder = next(asking)
        while True:
            order.append(holder)
            holder = asking.send(ends(holder, len(order)))
    except StopIteration as ended:
        return order, ended.value


def test_each_holder_is_asked_once_without_verified_bytes() -> None:
    order, ends = asked([A, B, A], lambda holder, _: Asked(GONE if holder == A else AWAY))
    assert order == [A, B]
    assert ends == {A: GONE, B: AWAY}
    assert isinstance(most_telling(ends, b"key"), PeerUnreachable)


def test_holder_is_asked_again_after_a_turn_with_verified_bytes() -> None:
    order, ends = asked([A], lambda _, number: Asked(TransferStalled("slow"), min(number, 3)))
    assert order == [A] * 4, "the fourth turn brought nothing"
    assert list(ends) == [A]


def test_holder_with_a_wrong_chunk_is_asked_once_more() -> None:
    order, _ = asked([A], lambda *_: Asked(WRONG))
    assert order == [A, A]


@pytest.mark.parametrize("first", [TransferStalled("slow"), GONE])
def test_others_have_another_turn_after_a_culprit_is_found(first: Exception) -> None:
    """A gave its first chunk and stalled, B gave the rest, and the whole was wrong: all of it is
    missing again, so this turn brought no verified bytes; B was not asked for A's chunk. A that
    said meanwhile that it is gone was removed twice, which ended the loop of the rack."""
    story = {1: Asked(first, 10), 2: Asked(WRONG, 0, culprit=A), 3: Asked(None, 20)}
    order, ends = asked([A, B], lambda _, number: story[number])
    assert order == [A, B, B]
    assert ends == {}
