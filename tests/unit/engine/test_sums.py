"""Partials and totals as bytes: what was said is what is read, garbage is a WireError and costs
nothing."""

from __future__ import annotations

import contextlib
import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mend.codec import CODECS
from mend.consensus.records import SUMS_BYTES_MAX
from mend.engine.compute.numerics import Numerics
from mend.engine.compute.sums import (
    Tensors,
    check_room,
    factors_in,
    partial_of,
    tensors_of,
    total_of,
)
from mend.errors import ConfigError, WireError
from mend.merge import Gram, Measuring, Radial, nothing
from mend.merge.gram import gram_of
from mend.outer import Nesterov
from mend.types import Layout, Owned, Slot, Span

WEIGHTS = (0.25, 0.75)
RULE = Radial()


def vectors(seed: int, numel: int = 300) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) * 10.0**m for m in range(2)]


def tensors(count: int) -> Tensors:
    return Tensors(tuple(range(count + 1)), (False,) * count)


def test_the_rule_is_given_what_the_ranks_have_measured_together() -> None:
    whole = [vectors(1), vectors(2, 77)]
    blobs = [
        partial_of(WEIGHTS, [gram_of([v[part] for v in each]) for each in whole])
        for part in (slice(0, 50), slice(50, None))
    ]
    expected = [RULE.factors(gram_of(each), WEIGHTS) for each in whole]
    for order in (blobs, blobs[::-1]):
        assert factors_in(total_of(RULE, order), WEIGHTS, tensors(2)) == expected
    assert expected[0] != WEIGHTS


def test_a_partial_keeps_every_bit_of_a_gram() -> None:
    """Also of the largest sums: 2^46 products of 2^46 each, with either sign."""
    huge = 2**92
    gram = Gram((5, -7), ((huge, -huge, 1, 0), (-huge, huge, 0, -1), (1, 0, 7, 0), (0, -1, 0, 9)))
    seen: list[Gram] = []

    class Spy(Radial):
        def factors(self, gram: Gram, weight: object) -> tuple[float, ...]:
            seen.append(gram)
            return WEIGHTS

    total_of(Spy(), [partial_of(WEIGHTS, [nothing(2), gram])])
    assert seen == [nothing(2), gram]


def test_ranks_that_measured_different_merges_are_not_added() -> None:
    mine = partial_of(WEIGHTS, [nothing(2)])
    for other in (
        partial_of((0.5, 0.5), [nothing(2)]),
        partial_of(WEIGHTS, [nothing(2)] * 2),
        partial_of((1.0,), [nothing(1)]),
    ):
        with pytest.raises(WireError):
            total_of(RULE, [mine, other])


def test_a_total_of_another_merge_is_refused() -> None:
    total = total_of(RULE, [partial_of(WEIGHTS, [gram_of(vectors(1))])])
    assert len(factors_in(total, WEIGHTS, tensors(1))) == 1
    for weights, count in (((0.5, 0.5), 1), ((0.25, 0.75, 0.0), 1), (WEIGHTS, 2), (WEIGHTS, 0)):
        with pytest.raises(WireError):
            factors_in(total, weights, tensors(count))


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_factor_that_is_not_finite_is_refused(wrong: float) -> None:
    total = total_of(RULE, [partial_of(WEIGHTS, [gram_of(vectors(1))])])
    with pytest.raises(WireError, match="not finite"):
        factors_in(total[:-4] + struct.pack("!f", wrong), WEIGHTS, tensors(1))


@pytest.mark.parametrize("cut", [0, 3, 9, 10, 17, 18, 100, -1])
def test_a_blob_is_whole_and_has_nothing_behind_it(cut: int) -> None:
    partial = partial_of(WEIGHTS, [gram_of(vectors(1))])
    total = total_of(RULE, [partial])
    for blob in (partial[:cut], partial + b"\0", total, b""):
        with pytest.raises(WireError):
            total_of(RULE, [blob])
    for blob in (total[: min(cut, len(total) - 1)], total + b"\0", partial, b""):
        with pytest.raises(WireError):
            factors_in(blob, WEIGHTS, tensors(1))


def test_head_that_claims_more_than_there_is_is_refused() -> None:
    """Nothing is made room for: 65,535 members of 2^32 - 1 tensors would be 2^71 bytes."""
    head = struct.pack("!4sHI", b"mdP1", 0xFFFF, 0xFFFFFFFF)
    for rest in (b"", bytes(4 * 0xFFFF)):
        with pytest.raises(WireError):
            total_of(RULE, [head + rest])


@given(st.data())
def test_damaged_bytes_are_sums_or_a_wire_error(data: st.DataObject) -> None:
    blob = bytearray(partial_of(WEIGHTS, [gram_of(vectors(1)), nothing(2)]))
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        total_of(RULE, [bytes(blob), partial_of(WEIGHTS, [gram_of(vectors(2)), nothing(2)])])


@given(st.binary(max_size=400))
def test_any_bytes_are_sums_or_a_wire_error(noise: bytes) -> None:
    for blob in (noise, b"mdP1" + noise, b"mdT1" + noise):
        with contextlib.suppress(WireError):
            total_of(RULE, [blob])
        with contextlib.suppress(WireError):
            factors_in(blob, WEIGHTS, tensors(1))


# -------------------------------------------------------------- where the tensors lie


def test_the_tensors_of_a_part_lie_end_to_end() -> None:
    owned = Owned((Span(10, 13), Span(0, 0), Span(4, 9)), 8)
    assert tensors_of(owned, (False, True, False)) == Tensors((0, 3, 3, 8), (False, True, False))
    assert tensors_of(owned).measured == [(0, 3), (3, 3), (3, 8)]
    with pytest.raises(AssertionError):
        tensors_of(Owned((Span(0, 3),), 4))


def test_neighbours_with_equal_weights_are_one_run() -> None:
    found = Tensors((0, 3, 5, 9, 9, 12), (True, True, False, True, False))
    assert found.measured == [(5, 9), (9, 12)]
    assert found.runs(WEIGHTS, [(0.5, 0.5), WEIGHTS]) == [
        (5, WEIGHTS),
        (9, (0.5, 0.5)),
        (12, WEIGHTS),
    ]


def test_sums_that_no_message_could_hold_are_refused_at_the_start() -> None:
    slots = tuple(Slot(f"w{i}", (1,), "float32", i, 1) for i in range(300))
    plan = (Layout(0, slots, 300),)
    check_room(plan, [(False,) * 300], racks=8, merge="rda")
    check_room(plan, [(True,) * 300], racks=64, merge="rda")
    with pytest.raises(ConfigError, match=f"At most {SUMS_BYTES_MAX}") as refused:
        check_room(plan, [(False,) * 300], racks=64, merge="rda")
    assert refused.value.field == "merge"


# -------------------------------------------------------------- the work itself


def numerics(codec: str, threads: int = 1) -> Numerics:
    return Numerics(CODECS[codec](), RULE, Nesterov(1.0, 0.0), threads)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_measured_products_are_those_of_the_decoded_payloads(codec: str) -> None:
    """Not the delta of the rank itself: that is known at its own rack only."""
    made, numel = numerics(codec), 70_003
    deltas = vectors(3, numel)
    payloads = [made.encode(d.clone(), None).payload for d in deltas]
    decoded = [made.codec.decode(p, 0, numel, torch.empty(numel)) for p in payloads]
    grams = [
        nothing(2) if start == stop else gram_of([d[start:stop] for d in decoded])
        for start, stop in ((0, 60_000), (60_000, 60_000), (60_007, numel))
    ]
    where = Tensors((0, 60_000, 60_000, 60_007, numel), (False, False, True, False))
    assert made.measure(payloads, WEIGHTS, where) == partial_of(WEIGHTS, grams)


def test_threads_share_a_measurement_and_change_nothing() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one, three = numerics("float32"), numerics("float32", 3)
        payloads = [one.codec.encode(d) for d in vectors(4, 2_500_000)]
        where = Tensors((0, 10, 2_300_000, 2_500_000), (False,) * 3)
        assert one.measure(payloads, WEIGHTS, where) == three.measure(payloads, WEIGHTS, where)
        three.close()
    finally:
        torch.set_num_threads(before)


def test_a_payload_of_another_size_is_refused() -> None:
    made = numerics("float32")
    payloads = [made.codec.encode(d) for d in vectors(5, 8)]
    with pytest.raises(WireError):
        made.measure([payloads[0], payloads[1][:-4]], WEIGHTS, Tensors((0, 8), (False,)))


def test_a_rule_that_measures_says_so() -> None:
    assert isinstance(numerics("float32").measuring, Measuring)
