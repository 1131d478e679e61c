"""The mean length in the mean direction; and the plain mean wherever there is no direction."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mend.merge import MERGES, Measuring, Radial
from mend.merge.gram import nothing
from mend.merge.radial import DIRECTION_MIN
from mend_lab.reference.radial import fp32, radial


def factors(vectors: list[torch.Tensor], weights: list[float]) -> tuple[float, ...]:
    rule = Radial()
    return rule.factors(rule.measure(vectors), weights)


def merged(vectors: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    out = torch.empty_like(vectors[0])
    Radial().block(vectors, factors(vectors, weights), out)
    return out


def noise(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def formula(vectors: list[torch.Tensor], weights: list[float]) -> np.ndarray:
    """(sum w |v|) phi(sum w phi(v)) in doubles, as the paper writes it."""
    v = [x.double().numpy() for x in vectors]
    length = sum(w * np.linalg.norm(x) for w, x in zip(weights, v, strict=True))
    direction = sum(w * x / np.linalg.norm(x) for w, x in zip(weights, v, strict=True))
    return length * direction / np.linalg.norm(direction)


@pytest.mark.parametrize("racks", [2, 3, 8])
def test_radial_merge_is_the_formula(racks: int) -> None:
    weights = [fp32((m + 1) / (racks * (racks + 1) / 2)) for m in range(racks)]
    vectors = [noise(3000, m) * 10.0 ** (m - 4) for m in range(racks)]
    expected = formula(vectors, weights)
    assert np.allclose(
        merged(vectors, weights).numpy(), expected, rtol=0, atol=2e-7 * abs(expected).max()
    )


def test_orthogonal_deltas_keep_their_length_and_the_mean_would_not() -> None:
    vectors = [torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0])]
    assert math.isclose(float(merged(vectors, [0.5, 0.5]).norm()), 3.0, rel_tol=1e-6)
    assert math.isclose(float((vectors[0] + vectors[1]).norm() / 2), 3 / math.sqrt(2), rel_tol=1e-6)


@pytest.mark.parametrize("other", [[-2.0, -4.0], [-2.0 * (1 + 2**-23), -4.0]])
def test_directions_that_cancel_out_give_the_plain_mean(other: list[float]) -> None:
    assert factors([torch.tensor([1.0, 2.0]), torch.tensor(other)], [0.5, 0.5]) == (0.5, 0.5)


def test_just_above_that_the_length_is_right() -> None:
    """The floor of the direction is where float32 factors stop to say which way it points."""
    angle = 20 * DIRECTION_MIN
    vectors = [torch.tensor([1.0, 0.0]), torch.tensor([-math.cos(angle), math.sin(angle)])]
    assert math.isclose(float(merged(vectors, [0.5, 0.5]).norm()), 1.0, rel_tol=0.01)


def test_a_delta_without_length_has_no_direction_but_counts_in_the_length() -> None:
    vectors = [noise(50, 1), torch.zeros(50)]
    assert factors(vectors, [0.5, 0.5]) == (0.5, 0.0)
    assert factors([torch.full((4,), 1e-14), noise(4, 1)], [0.25, 0.75])[0] == 0.0
    assert factors([torch.zeros(5), torch.zeros(5)], [0.25, 0.75]) == (0.25, 0.75)
    assert Radial().factors(nothing(2), [0.25, 0.75]) == (0.25, 0.75), "an empty tensor"


def test_delta_with_inf_gets_the_factors_of_the_plain_mean() -> None:
    vectors = [noise(50, 1), noise(50, 2)]
    vectors[1][7] = math.inf
    assert factors(vectors, [0.25, 0.75]) == (0.25, 0.75)


def test_factors_beyond_float32_are_not_taken() -> None:
    huge, tiny = torch.full((3,), 3e38), torch.full((3,), 1e-11)
    assert factors([huge, tiny], [0.5, 0.5]) == (0.5, 0.5)


@settings(max_examples=80)
@given(st.data())
def test_the_reference_finds_the_same_factors(data: st.DataObject) -> None:
    racks, numel = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    number = st.floats(width=32, allow_nan=False, allow_infinity=False)
    vectors = [
        torch.tensor(data.draw(st.lists(number, min_size=numel, max_size=numel)))
        for _ in range(racks)
    ]
    weights = [fp32(1 / data.draw(st.integers(1, 9))) for _ in range(racks)]
    found = factors(vectors, weights)
    assert found == tuple(radial(vectors, weights))
    assert all(struct.unpack("<f", struct.pack("<f", f))[0] == f for f in found)


def test_the_configuration_knows_it_by_name_and_that_it_measures() -> None:
    assert isinstance(MERGES["rda"](), Measuring)
    assert MERGES["rda"]().name == "rda"
    assert not isinstance(MERGES["mean"](), Measuring)
