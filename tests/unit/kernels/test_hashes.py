"""Hashes of kernels against xxhash."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash

pytest.importorskip("numba")

from mend.kernels import compiled
from mend.kernels.hashes import FIRST, ROW_BYTES, feed, finish


def _feed(lanes_8: Any, data: Any, rows: Any, ends: Any) -> None:
    feed(lanes_8, data.ctypes.data, rows, ends)


@pytest.mark.parametrize("cuts", [(4,), (1, 3), (2, 1, 1)])
def test_block_fed_in_rows_has_the_digest_of_xxhash(cuts: tuple[int, ...]) -> None:
    run = compiled("void(u8[::1], u1[::1], i8, b1)", _feed)
    data = np.random.default_rng(1).integers(0, 256, 4 * ROW_BYTES, np.uint8)
    lanes, done = FIRST.copy(), 0
    for rows in cuts:
        part = data[done * ROW_BYTES : (done + rows) * ROW_BYTES]
        done += rows
        run(lanes, part, rows, done == 4)
    assert finish(lanes[None], len(data)) == xxhash.xxh3_128_digest(data)


def test_blocks_that_are_finished_together_have_their_digests_in_order() -> None:
    run = compiled("void(u8[::1], u1[::1], i8, b1)", _feed)
    blocks = np.random.default_rng(2).integers(0, 256, (300, 2 * ROW_BYTES), np.uint8)
    lanes = np.stack([FIRST] * len(blocks))
    for own, block in zip(lanes, blocks, strict=True):
        run(own, block, 2, True)
    expected = b"".join(xxhash.xxh3_128_digest(block) for block in blocks)
    assert finish(lanes, 2 * ROW_BYTES) == expected
