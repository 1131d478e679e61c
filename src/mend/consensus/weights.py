"""Computes the weights of a merge, the part of a round that it counts as, and the factor of its
outer step. All are exact fractions, rounded to fp32 only here."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from mend.errors import ensure
from mend.types import fp32

WHOLE = 1 << 24
"""A round without absent racks. Parts of a round are integers below it, so that each, divided by
WHOLE, is a float32, and any sum of them is exact."""

Work = Sequence[tuple[int, int]]
"""(tokens, steps) of each rack, both >= 1."""


def merge_weights(work: Work, *, token_weighted: bool) -> list[float]:
    """The weights of a merge, in the order given; they sum to about 1.

    w = tokens / steps, the batch size: an offer of n steps is n steps long already, so each step
    counts by its tokens. Without `token_weighted` all weights are equal. w / sum(w) is computed as
    a Fraction and rounded once to float32, so its product with any fp32 value is exact in fp64 and
    every machine multiplies by the same number.
    """
    raw = _batches(work, token_weighted)
    total = sum(raw, Fraction(0))
    ensure(total > 0, "a merge of nothing", work=work)
    return [fp32(share / total) for share in raw]


def stretch_of(work: Work, *, token_weighted: bool, period_steps: int) -> float:
    """The factor that corrects the length of a merged delta whose racks made unequal numbers of
    steps. From 1 to R, the number of racks.

    It is the mean of the offers' steps, weighted by tokens, over their mean weighted by batch sizes
    (the effective steps of FedNova, 2007.07481). For equal batches and n steps per rack that is
    R sum n^2 / (sum n)^2, which is 1 if all n are equal. In the first mean, tokens of steps beyond
    a period do not count. Source: docs/internals/quality.md.
    """
    if not token_weighted or len(work) < 2:
        return 1.0
    counted = _tokens(work, True, period_steps)
    lag = sum(each * steps for each, (_, steps) in zip(counted, work, strict=True))
    wanted = lag / sum(counted)
    made = sum(tokens for tokens, _ in work) / sum(_batches(work, True))
    return fp32(min(max(wanted / made, 1), len(work)))


MOMENTUM_WAITS = Fraction(-3, 20)
"""Balance of signs below which a merge is made without momentum. Source:
docs/internals/quality.md, Small problems."""


def momentum_waits(signs: Sequence[tuple[int, int]], weights: Sequence[float]) -> bool:
    """Whether the offers of a merge point against the outer momentum.

    `signs`: for each offer, how many of its elements point (along, against) the momentum. Their
    mean balance is exact, so it depends neither on the order of the offers nor on how a rack is
    sharded. An offer that was not compared counts as 0.
    """
    return mean_balance(signs, weights) < MOMENTUM_WAITS


def mean_balance(signs: Sequence[tuple[int, int]], weights: Sequence[float]) -> Fraction:
    """The weighted mean of the offers' balances, (along - against) / (along + against); exact."""
    balances = [Fraction(a - b, (a + b) or 1) for a, b in signs]
    pairs = zip(weights, balances, strict=True)
    return sum((Fraction(w) * each for w, each in pairs), Fraction(0))


def part_of(named: Work, absent: Work, *, token_weighted: bool, period_steps: int) -> int:
    """The part of WHOLE that a merge of `named` counts as while the racks of `absent` train."""
    if not absent:
        return WHOLE
    here = sum(_tokens(named, token_weighted, period_steps), Fraction(0))
    away = sum(_tokens(absent, token_weighted, period_steps), Fraction(0))
    return max(1, round(WHOLE * here / (here + away)))


def _batches(work: Work, token_weighted: bool) -> list[Fraction]:
    return [Fraction(*each) if token_weighted else Fraction(1) for each in work]


def _tokens(work: Work, token_weighted: bool, period_steps: int) -> list[Fraction]:
    """Tokens per offer. An offer of several periods has moved several times as far and counts as
    one."""
    if not token_weighted:
        return [Fraction(1)] * len(work)
    return [Fraction(tokens * min(period_steps, steps), steps) for tokens, steps in work]
