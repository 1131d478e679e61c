"""Applying an anchor: each formula with its own order of roundings, block by block, in place if
wanted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mend.errors import ConfigError
from mend.fragment import apply as module
from mend.fragment import realign
from tests import golden


def noise(numel: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(numel).astype(np.float32))


def naive(
    theta: np.ndarray,
    old: np.ndarray,
    delta: np.ndarray | None,
    new: np.ndarray,
    how: str,
    alpha: float,
) -> np.ndarray:
    if delta is None:
        return new + (theta - old)
    return {
        "carry": new + (theta - (old - delta)),
        "overwrite": new,
        "blend": new + np.float32(alpha) * (theta - new),
    }[how]


@pytest.mark.parametrize("apply_mode", ["carry", "overwrite", "blend"])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("numel", [0, 1, 1000, 300_001])
@pytest.mark.parametrize("in_place", [True, False])
def test_the_formulas(apply_mode: str, named: bool, numel: int, in_place: bool) -> None:
    theta, old, new = (noise(numel, seed) for seed in range(3))
    delta = noise(numel, 3) * 0.01 if named else None
    expected = naive(
        *(None if x is None else x.numpy().copy() for x in (theta, old, delta, new)),
        apply_mode,
        0.3,
    )
    kept = [x.clone() for x in (old, new)]
    out = theta if in_place else torch.full((numel,), float("nan"))
    realign(theta, old, delta, new, apply_mode, 0.3, out)
    assert np.array_equal(out.numpy().view(np.int32), expected.view(np.int32))
    assert all(torch.equal(a, b) for a, b in zip((old, new), kept, strict=True))


def test_the_block_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = [noise(5000, seed) for seed in range(4)]
    results = []
    for block in (17, 4096, 1 << 18):
        monkeypatch.setattr(module, "_BLOCK", block)
        out = torch.empty(5000)
        realign(*vectors, "carry", 0.5, out)
        results.append(out)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_an_unknown_apply_mode_and_vectors_that_do_not_fit() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    with golden.raises(ConfigError):
        realign(one, one, None, one, "mix", 0.5, one)
    with pytest.raises(AssertionError):
        realign(one, two, None, one, "carry", 0.5, one)
    with pytest.raises(AssertionError):
        realign(one, one, two, one, "carry", 0.5, one)
