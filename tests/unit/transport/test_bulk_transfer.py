"""Incoming and the request length: what a transfer remembers and how much it asks for at once."""

from __future__ import annotations

import random
import socket
import threading

import pytest
import xxhash

from mend.errors import PayloadGone, TransferStalled
from mend.transport.bulk_client import BulkLane, checksum_of
from mend.transport.bulk_transfer import (
    LENGTH_FIRST,
    LENGTH_MIN,
    LENGTH_SWIFT,
    Incoming,
    TransferAttempt,
)
from mend.types import Address

HOLDER, OTHER = Address("holder", 1), Address("other", 2)


def attempt(
    stall_s: float = 16.0, chunk_bytes: int = 4 << 20, first: int = LENGTH_MIN
) -> TransferAttempt:
    return TransferAttempt(
        Incoming(memoryview(bytearray(1)), ""), HOLDER, b"", chunk_bytes=chunk_bytes,
        stall_s=stall_s, clock_s=lambda: 0.0, count=lambda _: None, first=first,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_chunks_gives_the_checksum_of_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    sent = rng.randbytes(1000)
    incoming = Incoming(memoryview(bytearray(1000)), checksum_of(sent))
    owed: list[tuple[int, int]] = []
    while not incoming.complete:
        if part := incoming.take(rng.randint(1, 90)):
            owed.append(part)
        start, stop = owed.pop(rng.randrange(len(owed)))
        if rng.random() < 0.3:
            incoming.give_back(start, stop)
        else:
            incoming.into[start:stop] = sent[start:stop]
            incoming.accept(start, stop, HOLDER)
        if part is None and not owed and not incoming.complete:
            continue
    assert bytes(incoming.into) == sent
    assert incoming.verified == 1000
    assert incoming.settle() is None


def test_a_wrong_whole_starts_over_and_blames_who_came_first() -> None:
    incoming = Incoming(memoryview(bytearray(10)), checksum_of(b"0123456789"))
    for holder, (start, stop) in ((OTHER, (0, 4)), (HOLDER, (4, 10))):
        assert incoming.take(stop - start) == (start, stop)
        incoming.accept(start, stop, holder)
    blamed, error = incoming.settle() or (None, None)
    assert blamed == OTHER
    assert "announced" in str(error)
    assert not incoming.complete
    assert incoming.verified == 10  # of what was moved in all
    assert incoming.take(100) == (0, 10)


def test_the_lowest_missing_range_is_asked_for_first() -> None:
    incoming = Incoming(memoryview(bytearray(10)), "")
    assert [incoming.take(4) for _ in range(4)] == [(0, 4), (4, 8), (8, 10), None]
    incoming.give_back(8, 10)
    incoming.give_back(0, 4)
    assert [incoming.take(4) for _ in range(3)] == [(0, 4), (8, 10), None]


class SlowHash:
    """A hash whose `update` waits for the test."""

    def __init__(self) -> None:
        self.hash = xxhash.xxh3_128()
        self.begins, self.may_end = threading.Semaphore(0), threading.Semaphore(0)

    def update(self, data: memoryview) -> None:
        self.begins.release()
        assert self.may_end.acquire(timeout=20)
        self.hash.update(data)

    def hexdigest(self) -> str:
        return self.hash.hexdigest()


def test_transfer_is_incomplete_while_a_thread_hashes() -> None:
    """Else the checksum of a part would be compared, and a good holder blamed."""
    sent = b"01234567"
    incoming = Incoming(memoryview(bytearray(sent)), checksum_of(sent))
    incoming._hash = slow = SlowHash()
    parts = [incoming.take(4), incoming.take(4)]
    assert parts == [(0, 4), (4, 8)]
    assert incoming.all_taken
    first = threading.Thread(target=incoming.accept, args=(0, 4, HOLDER))
    first.start()
    assert slow.begins.acquire(timeout=20)
    incoming.accept(4, 8, OTHER)  # the first thread finds this range as well
    assert not incoming.complete
    slow.may_end.release()
    assert slow.begins.acquire(timeout=20)
    assert not incoming.complete
    slow.may_end.release()
    first.join(20)
    assert incoming.complete
    assert incoming.settle() is None


def test_all_is_taken_when_no_range_is_left_to_ask_for() -> None:
    incoming = Incoming(memoryview(bytearray(4)), "")
    assert not incoming.all_taken
    incoming.take(4)
    assert incoming.all_taken
    incoming.give_back(0, 2)
    assert not incoming.all_taken


def test_further_connections_begin_at_once_where_the_holder_is_known_to_be_quick() -> None:
    assert attempt().widens.is_set()
    waiting = attempt(first=0)
    assert not waiting.widens.is_set()
    waiting.stop(None)
    assert waiting.widens.is_set()


def test_requests_grow_while_replies_are_quick() -> None:
    length, lengths = LENGTH_MIN, []
    for _ in range(5):
        length = attempt()._next_length(length, length, 0.5)
        lengths.append(length)
    assert lengths == [256 << 10, 1 << 20, 4 << 20, 4 << 20, 4 << 20]


def test_a_whole_chunk_that_comes_at_once_tells_that_the_holder_is_swift() -> None:
    asked = attempt()
    asked._next_length(1 << 20, 1 << 20, 0.0)
    assert asked.swift is None
    for took_s, swift in ((0.3, False), (0.2, True), (0.3, True)):
        asked._next_length(4 << 20, 4 << 20, took_s)
        assert asked.swift is swift


def test_the_next_pull_begins_as_the_holder_has_answered() -> None:
    lane = BulkLane("127.0.0.1", None, token=b"0123456789abcdef")
    stalled = TransferStalled("")

    def after(quick: bool | None, swift: bool | None, error: TransferStalled | None = None) -> int:
        ended = attempt()
        ended.quick, ended.swift, ended.error = quick, swift, error
        lane._learn(ended)
        return lane._quick.get(HOLDER, LENGTH_FIRST)

    assert after(None, None) == LENGTH_FIRST
    assert after(True, None) == LENGTH_MIN
    assert after(True, True) == LENGTH_SWIFT
    assert after(True, None) == LENGTH_SWIFT, "a short payload tells nothing"
    assert after(True, False) == LENGTH_MIN
    assert after(True, True) == LENGTH_SWIFT
    assert after(None, None) == LENGTH_SWIFT
    assert after(None, None, stalled) == LENGTH_FIRST
    assert after(True, True, stalled) == LENGTH_FIRST, "it was swift until then"
    assert after(False, True) == LENGTH_FIRST
    lane.close()


def test_requests_shrink_before_a_reply_takes_the_stall_timeout() -> None:
    """A fixed length would never verify a byte on a link that needs the time-out for one chunk."""
    asked = attempt(stall_s=16.0)
    assert asked._next_length(1 << 20, 1 << 20, 2.0) == 1 << 20
    assert asked._next_length(1 << 20, 1 << 20, 5.0) == 256 << 10
    assert asked._next_length(LENGTH_MIN, LENGTH_MIN, 15.0) == LENGTH_MIN // 4


def test_the_short_last_chunk_does_not_make_requests_grow() -> None:
    assert attempt()._next_length(100, LENGTH_MIN, 0.0) == LENGTH_MIN


def test_a_stopped_attempt_takes_no_socket_and_keeps_its_first_error() -> None:
    one, two = socket.socketpair()
    with one, two:
        asked = attempt()
        assert asked.adopt(one)
        asked.stop(PayloadGone("first"))
        asked.stop(TransferStalled("second"))
        assert one.recv(1) == b""  # woken
        assert not asked.release(one)
        assert not asked.adopt(two)
    assert isinstance(asked.error, PayloadGone)
