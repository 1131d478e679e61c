"""Merge weights and the part of a round that a merge is: exact integers, rounded to fp32 here
only."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction

_FLOAT32 = struct.Struct("<f")

WHOLE = 1 << 24
"""A round with nobody absent. Parts of it are whole numbers, so that each over WHOLE is a float32,
and any sum of them is exact."""

Work = Sequence[tuple[int, int]]
"""(tokens, steps) of each rack, both >= 1."""


def merge_weights(work: Work, *, token_weighted: bool, period_steps: int) -> list[float]:
    """Shares of a merge, in the order given.

    w = tokens^2 / steps (Decoupled DiLoCo: tokens times tokens per step) per period spanned, or
    equal shares. The share w / sum(w) is formed as a Fraction and rounded once to float32, so that
    its product with any fp32 value is exact in fp64 and every machine multiplies by the same
    number.
    """
    raw = _raw(work, token_weighted, period_steps)
    total = sum(raw, Fraction(0))
    assert total > 0, f"a merge of nothing: {work=}"
    return [_FLOAT32.unpack(_FLOAT32.pack(float(share / total)))[0] for share in raw]


def part_of(named: Work, absent: Work, *, token_weighted: bool, period_steps: int) -> int:
    """Which part of WHOLE a merge of `named` is while `absent` train as well."""
    if not absent:
        return WHOLE
    here = sum(_raw(named, token_weighted, period_steps), Fraction(0))
    away = sum(_raw(absent, token_weighted, period_steps), Fraction(0))
    return max(1, round(WHOLE * here / (here + away)))


def _raw(work: Work, token_weighted: bool, period_steps: int) -> list[Fraction]:
    """An offer of several periods has moved several times as far: per period it weighs as one."""
    if not token_weighted:
        return [Fraction(1)] * len(work)
    return [
        Fraction(tokens * tokens * period_steps, steps * max(period_steps, steps))
        for tokens, steps in work
    ]
