"""protocol: merge weights from exact integers, rounded to fp32 in this one place."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from fractions import Fraction

_FLOAT32 = struct.Struct("<f")


def merge_weights(work: Sequence[tuple[int, int]], *, token_weighted: bool) -> list[float]:
    """Shares of a merge, in the order given, from each member's (tokens, steps), both >= 1.

    w = tokens^2 / steps (Decoupled DiLoCo: tokens times tokens per step), or equal shares. The
    share w / sum(w) is formed as a Fraction and rounded once to float32, so that its product with
    any fp32 value is exact in fp64 and every machine multiplies by the same number.
    """
    raw = [
        Fraction(tokens * tokens, steps) if token_weighted else Fraction(1)
        for tokens, steps in work
    ]
    total = sum(raw, Fraction(0))
    assert total > 0, f"a merge of nothing: {work=}"
    return [_FLOAT32.unpack(_FLOAT32.pack(float(share / total)))[0] for share in raw]
