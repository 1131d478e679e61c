"""Lengths and products that nobody's cutting can change: any pieces, any order, equal integers."""

from __future__ import annotations

import itertools
import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mend.merge import gram as module
from mend.merge.gram import BIN_WRONG, BIN_ZERO, Gram, gram_of, nothing
from mend_lab.reference.radial import on_grid


def from_bits(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


ANY_FINITE = st.integers(0, 0xFFFFFFFF).map(from_bits).filter(math.isfinite)
"""Uniform over bit patterns: every exponent, subnormals and both zeros are as likely as 1.5."""

CORNERS = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149), 2.0**-126, 2.0**127, 3.4028234663852886e38]
    + [2.0 ** (24 * k - 1) for k in range(-5, 6)]  # a half of a bin's step: ties
    + [-3 * 2.0 ** (24 * k - 2) for k in range(-4, 5)]
    + [2.0 ** (24 * k + 23) * (1 - 2.0**-24) for k in range(-5, 5)]  # the greatest of a bin
)
NUMBERS = st.one_of(ANY_FINITE, CORNERS, st.floats(-2, 2, width=32))


def exact(vectors: list[list[float]], m: int, other: int) -> Fraction:
    """By the definition: everything on the grid of the whole vector, in integers."""
    (x, step_x), (y, step_y) = (
        on_grid(torch.tensor(vectors[m])),
        on_grid(torch.tensor(vectors[other])),
    )
    return sum(a * b for a, b in zip(x, y, strict=True)) * Fraction(2) ** (step_x + step_y)


def value(gram: Gram, m: int, other: int) -> Fraction:
    return gram.product(m, other) * Fraction(2) ** (gram.step(m) + gram.step(other))


def of(vectors: list[list[float]], start: int = 0, stop: int | None = None) -> Gram:
    return gram_of([torch.tensor(v, dtype=torch.float32)[start:stop] for v in vectors])


@st.composite
def cut_vectors(draw: st.DrawFn) -> tuple[list[list[float]], list[int], list[int]]:
    """Some vectors, cuts through all of them, and an order of the pieces."""
    numel = draw(st.integers(0, 12))
    count = draw(st.integers(1, 3))
    vectors = [draw(st.lists(NUMBERS, min_size=numel, max_size=numel)) for _ in range(count)]
    inner = sorted(draw(st.lists(st.integers(0, numel), max_size=4)))
    cuts = [0, *inner, numel]
    return vectors, cuts, draw(st.permutations(range(len(cuts) - 1)))


@settings(max_examples=120)
@given(cut_vectors())
def test_any_cutting_in_any_order_gives_the_same_gram(
    drawn: tuple[list[list[float]], list[int], list[int]],
) -> None:
    vectors, cuts, order = drawn
    pieces = [of(vectors, a, b) for a, b in itertools.pairwise(cuts)]
    found = nothing(len(vectors))
    for position in order:
        found = found.plus(pieces[position])
    assert found == of(vectors)


@settings(max_examples=80)
@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=3, max_size=3))
def test_adding_is_associative_and_commutative(rows: list[list[float]]) -> None:
    a, b, c = (gram_of([torch.tensor([x]) for x in row]) for row in rows)
    assert a.plus(b).plus(c) == a.plus(b.plus(c)) == c.plus(b).plus(a)


@settings(max_examples=80)
@given(cut_vectors())
def test_gram_matrix_is_the_definition(
    drawn: tuple[list[list[float]], list[int], list[int]],
) -> None:
    vectors, _, _ = drawn
    gram = of(vectors)
    for m, other in itertools.product(range(len(vectors)), repeat=2):
        assert value(gram, m, other) == exact(vectors, m, other)


def test_a_vector_of_one_magnitude_loses_nothing() -> None:
    """The step is at most one fp32 step of the greatest element."""
    for exponent in range(-149, 128):
        for mantissa in (1.0, 1.5, 2.0 - 2.0**-23):
            x = (
                torch.tensor(mantissa).mul(2.0**exponent).item()
                if exponent > -126
                else 2.0**exponent
            )
            assert value(of([[x]]), 0, 0) == Fraction(x) ** 2, (exponent, mantissa)


@pytest.mark.parametrize("numel", [1, 127, 128, 129, 4096, 50_003])
def test_long_vectors_of_any_size_as_one_piece_or_many(numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    scale = 10.0 ** torch.randint(-9, 9, (numel,), generator=generator)
    vectors = [torch.randn(numel, generator=generator) * scale for _ in range(3)]
    whole = gram_of(vectors)
    found = nothing(3)
    for start in reversed(range(0, numel, 1009)):
        found = found.plus(gram_of([v[start : start + 1009] for v in vectors]))
    assert found == whole
    for m in range(3):
        plain = math.fsum((vectors[m].double() ** 2).tolist())
        assert math.isclose(float(value(whole, m, m)), plain, rel_tol=1e-6)


def test_the_largest_digits_of_the_longest_piece_stay_exact() -> None:
    """2^53 in every sum of a chunk, 2^62 over the chunks: within the limits of both types."""
    greatest = 2.0**23 - 0.5  # digits 2^23 and -2^23
    numel = module.PIECE_NUMEL_MAX
    gram = gram_of([torch.full((numel,), greatest), torch.full((numel,), -greatest)])
    assert value(gram, 0, 0) == numel * Fraction(greatest) ** 2
    assert value(gram, 0, 1) == -numel * Fraction(greatest) ** 2
    with pytest.raises(AssertionError):
        gram_of([torch.zeros(numel + 1)])


def test_the_order_of_the_library_does_not_matter() -> None:
    """Elements of a piece may change places: its sums are integers."""
    vectors = [torch.randn(5000, generator=torch.Generator().manual_seed(m)) for m in range(2)]
    places = torch.randperm(5000, generator=torch.Generator().manual_seed(9))
    assert gram_of([v[places] for v in vectors]) == gram_of(vectors)


def test_threads_do_not_matter() -> None:
    vectors = [torch.randn(60_000, generator=torch.Generator().manual_seed(m)) for m in range(2)]
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(gram_of(vectors))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


def test_nothing_and_zeros_have_no_bin() -> None:
    assert of([[], []]) == nothing(2) == of([[0.0, -0.0], [0.0, 0.0]])
    assert of([[1.0], [0.0]]).bins == (0, BIN_ZERO)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_nan_or_inf_in_any_part_is_found(wrong: float) -> None:
    vectors = [[1.0, 2.0, 3.0], [1.0, wrong, 3.0]]
    for whole in (
        of(vectors),
        of(vectors, 0, 1).plus(of(vectors, 1)),
        of(vectors, 2).plus(of(vectors, 0, 2)),
    ):
        assert whole.bins == (0, BIN_WRONG)
