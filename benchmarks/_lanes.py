"""What benchmarks of the lane share: a payload held by a process of its own, and its arguments."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

from benchmarks._common import arguments, spread
from mend.types import Member, offer_key

KEY = offer_key(Member(0, 1), 0, 0, 1)
TOKEN = b"benchmarks.lane!"

Seconds = dict[str, list[float]]
"""Variant -> of every repeat."""


def lane_options(name: str, doc: str | None, megabytes: int) -> argparse.Namespace:
    """`megabytes`: of the payload, by default."""
    parser = arguments(name, doc)
    parser.add_argument(
        "--megabytes",
        type=int,
        default=megabytes,
        help=f"payload in 10^6 bytes (default {megabytes})",
    )
    parser.add_argument(
        "--repeats", type=int, default=15, help="turns that every variant takes (default 15)"
    )
    return parser.parse_args()


def payload(size: int) -> memoryview:
    """Random bytes, a million of them again and again."""
    block = random.Random(0).randbytes(1_000_000)
    return memoryview(block * (size // len(block)))


def measured(
    hold: Callable[[Connection, int], None],
    measure: Callable[[Connection, int, int], Awaitable[Seconds]],
    size: int,
    repeats: int,
) -> Seconds:
    """`hold` serves `size` bytes in a process of its own until it is told to end."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    holder = spawn.Process(target=hold, args=(theirs, size), daemon=True)
    holder.start()

    async def run() -> Seconds:
        return await measure(ours, size, repeats)

    try:
        seconds = asyncio.run(run())
        ours.send("end")
    finally:
        holder.join(5)
    return seconds


def speeds(size: int, seconds: Seconds) -> dict[str, object]:
    """GB/s of every variant."""
    return {
        name: spread([size / each / 1e9 for each in values]) for name, values in seconds.items()
    }
