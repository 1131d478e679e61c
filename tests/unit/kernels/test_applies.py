"""The compiled apply against fragment.apply."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mend.engine.compute.vectors import PORTION_NUMEL
from mend.engine.trainer import model_access
from mend.engine.trainer.model_access import ModelAccess
from mend.fragment import realign
from mend.kernels import apply_kernel

ODD = torch.tensor([0.0, -0.0, 1e-45, -1e-39, 3e38, -3e38, float("inf"), 1.0])


def noise(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(PORTION_NUMEL + 77, generator=generator)
    values[: 8 * 8] = ODD.repeat(8) if seed % 2 else ODD.repeat_interleave(8)
    return values


@pytest.mark.parametrize("apply_mode", ["carry", "overwrite", "blend"])
@pytest.mark.parametrize("named", [True, False])
def test_compiled_apply_has_the_bits_of_realign_and_counts_as_a_write(
    monkeypatch: pytest.MonkeyPatch, apply_mode: Any, named: bool
) -> None:
    """UncountedWrites and autograd go by the version of a parameter."""
    pytest.importorskip("numba")
    theta, old, new, delta = (noise(seed) for seed in range(4))
    given = delta if named else None
    expected = torch.empty_like(theta)
    realign(theta, old, given, new, apply_mode, 0.3, expected)
    calls: list[int] = []
    kernel = apply_kernel()
    assert kernel is not None
    counted = lambda *arguments: calls.append(1) or kernel(*arguments)  # noqa: E731
    monkeypatch.setattr(model_access, "apply_kernel", lambda: counted)
    access: Any = SimpleNamespace(apply_mode=apply_mode, _alpha=0.3)
    before = theta._version
    cuts = (0, 1000, PORTION_NUMEL, len(theta))
    pieces = [(theta[a:b], slice(a, b)) for a, b in pairwise(cuts)]
    ModelAccess._move(access, old, given, new, pieces)
    assert bool(calls) == (apply_mode != "overwrite" or not named)
    same = theta.numpy().view(np.int32) == expected.numpy().view(np.int32)
    assert bool((same | np.isnan(expected.numpy())).all())
    assert theta._version > before
