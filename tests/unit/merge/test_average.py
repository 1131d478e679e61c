"""The mean has one meaning: fp64, in the order given, rounded once. A naive program must agree bit
for bit."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from mend.merge import MERGES, Average


def noise(numel: int, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(
        (rng.standard_normal(numel) * 10.0 ** rng.integers(-12, 12, numel)).astype(np.float32)
    )


def naive(deltas: list[torch.Tensor], weights: list[float]) -> np.ndarray:
    """numpy never fuses: multiply, round, add, round."""
    total = deltas[0].numpy().astype(np.float64) * weights[0]
    for delta, weight in zip(deltas[1:], weights[1:], strict=True):
        total = total + delta.numpy().astype(np.float64) * weight
    return total.astype(np.float32)


def check(deltas: list[torch.Tensor], weights: list[float]) -> None:
    out = torch.full_like(deltas[0], float("nan"))
    Average().block(deltas, weights, out)
    assert np.array_equal(out.numpy().view(np.int32), naive(deltas, weights).view(np.int32))


@pytest.mark.parametrize("racks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("numel", [0, 1, 17, 4096, 100_003])
def test_the_mean_is_the_naive_sum(racks: int, numel: int) -> None:
    deltas = [noise(numel, seed) for seed in range(racks)]
    check(deltas, [float(np.float32(1 / (m + 1.7))) for m in range(racks)])


def test_a_product_with_an_fp32_weight_is_exact_so_fusing_changes_nothing() -> None:
    """This is why weights must be float32-representable: 24 + 24 bits fit fp64's 53."""
    weight = float(np.float32(1 / 3))
    for value in noise(200, 3).tolist():
        assert Fraction(value * weight) == Fraction(value) * Fraction(weight)


def test_a_merge_of_nothing_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        Average().block([], [], torch.empty(3))


def test_the_configuration_knows_it_by_name() -> None:
    assert MERGES["mean"]().name == "mean"


def test_two_racks_of_equal_weight_take_a_shorter_way_to_the_same_bits() -> None:
    """Halving a sum in fp32 is exact, but for sums that overflow and halves below the normal range:
    every pair of these corners must come out as in fp64."""
    info = torch.finfo(torch.float32)
    corners = [0.0, -0.0, 1.0, 1.0 + info.eps, info.tiny, 3e-45, 1.4e-45, info.max, info.max / 2]
    corners += [info.tiny * (1 + info.eps), 2 * info.tiny * (1 - info.eps), 1e-38, 2.0**24 + 1]
    values = torch.tensor(corners + [-corner for corner in corners])
    first = values.repeat_interleave(len(values))
    second = values.repeat(len(values))
    deltas = [torch.cat([first, noise(20_000, 1)]), torch.cat([second, noise(20_000, 2)])]
    for start, stop in ((0, len(deltas[0])), (len(first), len(deltas[0]))):
        check([delta[start:stop] for delta in deltas], [0.5, 0.5])
    for a, b in zip(first, second, strict=True):  # one by one: an overflow hides none of the others
        check([a.reshape(1), b.reshape(1)], [0.5, 0.5])
