"""The outer step: every product and sum rounded to fp32, momentum in front, and settings that
cannot work refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mend.errors import ConfigError
from mend.outer import OUTERS, Nesterov


def noise(numel: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(numel).astype(np.float32))


@pytest.mark.parametrize("numel", [1, 31, 100_003])
@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.0), (0.7, 0.9), (1.0, 0.3)])
def test_three_steps_are_the_formula_in_numpy(numel: int, lr: float, momentum: float) -> None:
    outer, lr32, mu32 = Nesterov(lr, momentum), np.float32(lr), np.float32(momentum)
    anchor, state = noise(numel, 1), torch.zeros(numel) if outer.has_state else None
    A, b = anchor.numpy().copy(), np.zeros(numel, np.float32)
    for step in range(3):
        delta = noise(numel, 10 + step)
        D = delta.numpy().copy()
        next_anchor, next_state = torch.empty(numel), None if state is None else torch.empty(numel)
        held = anchor.clone()
        outer.block(anchor, state, delta, next_anchor, next_state)
        assert torch.equal(anchor, held), "an anchor is never written to"
        anchor, state = next_anchor, next_state
        if momentum:
            b = mu32 * b + D
            A = A - lr32 * (D + mu32 * b)
            assert state is not None
            assert np.array_equal(state.numpy().view(np.int32), b.view(np.int32))
        else:
            A = A - lr32 * D
        assert np.array_equal(anchor.numpy().view(np.int32), A.view(np.int32))


def test_without_momentum_there_is_no_state() -> None:
    assert not Nesterov(1.0, 0.0).has_state
    assert Nesterov(1.0, 0.5).has_state
    with pytest.raises(AssertionError, match="state"):
        Nesterov(1.0, 0.5).block(torch.ones(1), None, torch.ones(1), torch.ones(1), None)


@pytest.mark.parametrize(
    ("lr", "momentum"),
    [
        (0.0, 0.0),
        (-1.0, 0.0),
        (float("nan"), 0.0),
        (1e3, 0.0),
        (1e-60, 0.0),
        (1.0, 1.0),
        (1.0, -0.1),
        (1.0, float("nan")),
        (1.0, 1 - 1e-12),
    ],
)
def test_a_step_that_cannot_work_cannot_be_built(lr: float, momentum: float) -> None:
    with pytest.raises(ConfigError):
        OUTERS["nesterov"](lr, momentum)
