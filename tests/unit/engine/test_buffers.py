"""A vector goes back when its last reader lets go of it, not before, whoever that is."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from mend.engine.compute.buffers import POOLED_BYTES_MIN, Buffers

NUMEL = POOLED_BYTES_MIN // 4

READERS: dict[str, Callable[[torch.Tensor], object]] = {
    "slice": lambda vector: vector[5:7],
    "bytes": lambda vector: vector.view(torch.uint8),
    "memoryview": lambda vector: memoryview(vector.numpy().data).cast("B")[8:16],
    "numpy": lambda vector: vector.numpy()[1:],
}


def test_buffer_without_readers_is_reused() -> None:
    buffers = Buffers(1)
    first = buffers.empty(NUMEL)
    where = first.data_ptr()
    assert buffers.idle_bytes == 0
    del first
    assert buffers.idle_bytes == POOLED_BYTES_MIN
    assert buffers.empty(NUMEL).data_ptr() == where


def test_a_vector_is_whole_and_of_the_type_asked_for() -> None:
    buffers = Buffers(2)
    values = buffers.empty(NUMEL).fill_(2.5)
    raw = buffers.empty(4 * NUMEL + 3, torch.uint8).fill_(7)
    assert (values.shape, values.dtype) == ((NUMEL,), torch.float32)
    assert (raw.shape, raw.dtype) == ((4 * NUMEL + 3,), torch.uint8)
    assert values.is_contiguous()
    assert bool((values == 2.5).all())


@pytest.mark.parametrize("kind", sorted(READERS))
def test_a_part_that_is_still_read_keeps_the_whole(kind: str) -> None:
    """A connection may be sending the last chunk of a payload that is dropped already: its memory
    must not become the next snapshot."""
    buffers = Buffers(4)
    vector = buffers.empty(NUMEL)
    reader: object = READERS[kind](vector)
    where = vector.data_ptr()
    del vector
    assert buffers.idle_bytes == 0
    assert buffers.empty(NUMEL).data_ptr() != where
    assert buffers.idle_bytes == POOLED_BYTES_MIN, "the other one came back"
    del reader
    assert buffers.idle_bytes == 2 * POOLED_BYTES_MIN


def test_a_little_larger_is_taken_much_larger_is_not() -> None:
    """Fragments are of about equal size; a small one must not hold the memory of a large one."""
    buffers = Buffers(2)
    del_me = buffers.empty(2 * NUMEL)
    where = del_me.data_ptr()
    del del_me
    small = buffers.empty(NUMEL)
    assert small.data_ptr() != where
    close = buffers.empty(2 * NUMEL - 100)
    assert close.data_ptr() == where


def test_blocks_for_fragments_of_nearly_one_size_fit_each_of_them() -> None:
    """A fragment is a little larger than the others, and found no block among theirs."""
    buffers, a_little, a_lot = Buffers(2), NUMEL * 104 // 100, NUMEL * 110 // 100
    buffers.sizes = (4 * a_little,)
    where = buffers.empty(NUMEL).data_ptr()  # made for a smaller one
    assert buffers.empty(a_little).data_ptr() == where
    assert buffers.total_bytes == 4 * a_little
    buffers.sizes = (4 * NUMEL * 120 // 100,)
    held = buffers.empty(a_lot)
    assert buffers.total_bytes == 4 * (a_little + a_lot), "too much would be wasted"
    del held


def test_only_so_many_wait() -> None:
    buffers = Buffers(2)
    vectors = [buffers.empty(NUMEL) for _ in range(5)]
    assert buffers.idle_bytes == 0
    vectors.clear()
    assert buffers.idle_bytes == 2 * POOLED_BYTES_MIN


def test_without_room_every_vector_is_fresh() -> None:
    buffers = Buffers(0)
    for _ in range(3):
        buffers.empty(NUMEL).zero_()
        assert buffers.idle_bytes == 0


def test_small_vectors_are_none_of_its_business() -> None:
    buffers = Buffers(2)
    assert buffers.empty(0).numel() == 0
    assert buffers.empty(NUMEL - 1).numel() == NUMEL - 1
    assert buffers.idle_bytes == 0


def test_after_close_nothing_is_kept_and_nothing_is_taken_from_a_reader() -> None:
    buffers = Buffers(2)
    still_read = buffers.empty(NUMEL).fill_(3.0)
    buffers.empty(NUMEL).zero_()
    assert buffers.idle_bytes == POOLED_BYTES_MIN
    buffers.close()
    assert buffers.idle_bytes == 0
    assert bool((still_read == 3.0).all())
    del still_read
    assert buffers.idle_bytes == 0


def test_threads_never_get_the_same_memory() -> None:
    buffers, wrong = Buffers(3), []
    start = threading.Barrier(4)

    def use(mark: int) -> None:
        start.wait()
        for _ in range(200):
            vector = buffers.empty(NUMEL)
            vector[::4096] = mark
            if not bool((vector[::4096] == mark).all()):
                wrong.append(mark)

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert buffers.idle_bytes <= 3 * POOLED_BYTES_MIN


class Locks:
    """What a GPU's driver would be told."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def lock(self, address: int, size: int) -> None:
        assert address not in self.locked, "locked twice"
        self.locked[address] = size

    def unlock(self, address: int) -> None:
        del self.locked[address]


def test_memory_is_locked_for_as_long_as_it_exists() -> None:
    locks = Locks()
    buffers = Buffers(1, locks)
    first, second = buffers.empty(NUMEL), buffers.empty(NUMEL)
    assert sorted(locks.locked) == sorted([first.data_ptr(), second.data_ptr()])
    assert buffers.total_bytes == sum(locks.locked.values()) == 2 * POOLED_BYTES_MIN
    del first
    assert len(locks.locked) == 2, "it waits"
    del second
    assert buffers.total_bytes == sum(locks.locked.values()) == POOLED_BYTES_MIN, "one too many"
    buffers.close()
    assert not locks.locked
    assert buffers.total_bytes == 0


def test_a_locked_block_also_serves_what_is_a_good_deal_smaller() -> None:
    buffers = Buffers(2, Locks())
    large = buffers.empty(4 * NUMEL)
    where = large.data_ptr()
    del large
    assert buffers.empty(NUMEL).data_ptr() == where
    much = buffers.empty(5 * NUMEL)
    where = much.data_ptr()
    del much
    assert buffers.empty(NUMEL).data_ptr() != where, "a small anchor would keep it for long"


def test_vector_for_the_loop_is_locked_later_or_never() -> None:
    """Heartbeats waited for the driver."""
    locks = Locks()
    buffers = Buffers(2, locks)
    first = buffers.empty(NUMEL, locked=False)
    assert locks.locked == {}
    where = first.data_ptr()
    del first
    second = buffers.empty(NUMEL)
    assert second.data_ptr() != where, "for a copy from a GPU only locked memory is reused"
    again = buffers.empty(NUMEL, locked=False)
    assert again.data_ptr() == where
    buffers.lock(again)
    buffers.lock(again)
    assert sorted(locks.locked) == sorted([where, second.data_ptr()])
    del again, second
    buffers.close()
    assert locks.locked == {}
    del buffers
