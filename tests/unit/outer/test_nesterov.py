"""The outer step: every product and sum rounded to fp32, momentum in front, and settings that
cannot work refused."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from mend.errors import ConfigError
from mend.outer import OUTERS, Nesterov, Rates


def noise(numel: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(numel).astype(np.float32))


def rates(
    outer: Nesterov, rounds: float, part: Fraction = Fraction(1), *, plain: bool = False
) -> Rates:
    return outer.rates(Fraction(rounds), part, plain=plain)


@pytest.mark.parametrize("numel", [1, 31, 100_003])
@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.0), (0.7, 0.9), (1.0, 0.3)])
def test_three_steps_are_the_formula_in_numpy(numel: int, lr: float, momentum: float) -> None:
    outer, lr32, mu32 = Nesterov(lr, momentum), np.float32(lr), np.float32(momentum)
    anchor, states = noise(numel, 1), [torch.zeros(numel) for _ in outer.states]
    A, b = anchor.numpy().copy(), np.zeros(numel, np.float32)
    for step in range(3):
        delta = noise(numel, 10 + step)
        D = delta.numpy().copy()
        next_anchor, next_states = torch.empty(numel), [torch.empty(numel) for _ in states]
        held = anchor.clone()
        outer.block(anchor, states, delta, next_anchor, next_states, rates(outer, step))
        assert torch.equal(anchor, held), "an anchor is never written to"
        anchor, states = next_anchor, next_states
        if momentum:
            b = mu32 * b + D
            A = A - lr32 * (D + mu32 * b)
            assert np.array_equal(states[0].numpy().view(np.int32), b.view(np.int32))
        else:
            A = A - lr32 * D
        assert np.array_equal(anchor.numpy().view(np.int32), A.view(np.int32))


def test_without_momentum_there_is_no_state() -> None:
    assert Nesterov(1.0, 0.0).states == ()
    assert Nesterov(1.0, 0.5).states == ("momentum",)
    outer, one = Nesterov(1.0, 0.5), torch.ones(1)
    with pytest.raises(AssertionError, match="state"):
        outer.block(one, (), torch.ones(1), torch.ones(1), (), rates(outer, 0))


def test_the_momentum_rises_with_the_rounds_up_to_its_limit() -> None:
    """k / (k + 10), at most .9: with fp32 numbers, so that every machine multiplies alike."""
    outer = Nesterov(1.0, 0.9, 10)
    found = [rates(outer, rounds) for rounds in (0, 1, 5, 10, 89, 90, 10**9)]
    assert {(each.lr, each.share) for each in found} == {(1.0, 1.0)}
    assert [each.decay for each in found] == [each.momentum for each in found]
    risen = [0, 1 / 11, 1 / 3, 1 / 2, 89 / 99, 0.9, 0.9]
    assert [each.momentum for each in found] == [float(np.float32(mu)) for mu in risen]
    assert found[4].momentum < float(np.float32(0.9)) == found[5].momentum


def test_without_a_ramp_the_momentum_is_whole_from_the_first_round() -> None:
    assert {rates(Nesterov(0.7, 0.5), rounds) for rounds in (0, 1, 1000)} == {
        Rates(float(np.float32(0.7)), 0.5, 0.5, 1.0)
    }


def test_the_first_round_of_a_ramp_is_a_plain_step_and_is_remembered() -> None:
    outer, delta = Nesterov(1.0, 0.9, 4), noise(5, 3)
    anchor, state = torch.empty(5), torch.empty(5)
    seven = torch.full((5,), 7.0)
    outer.block(torch.zeros(5), [seven], delta.clone(), anchor, [state], rates(outer, 0))
    assert torch.equal(anchor, -delta)
    assert torch.equal(state, delta)


@pytest.mark.parametrize(
    ("lr", "momentum"),
    [
        (0.0, 0.0), (-1.0, 0.0), (float("nan"), 0.0), (1e3, 0.0), (1e-60, 0.0), (1.0, 1.0),
        (1.0, -0.1), (1.0, float("nan")), (1.0, 1 - 1e-12),
    ],
)  # fmt: skip
def test_a_step_that_cannot_work_cannot_be_built(lr: float, momentum: float) -> None:
    with pytest.raises(ConfigError):
        OUTERS["nesterov"](lr, momentum)


@pytest.mark.parametrize(
    "part", [Fraction(1, 4), Fraction(3, 1 << 24), Fraction(5_592_405, 1 << 24)]
)
def test_a_part_of_a_round_is_the_formula_in_numpy(part: Fraction) -> None:
    outer, delta, old, state = Nesterov(0.7, 0.9), noise(999, 3), noise(999, 4), noise(999, 5)
    anchor, after = torch.empty(999), torch.empty(999)
    outer.block(old, [state], delta.clone(), anchor, [after], rates(outer, 7, part))
    s, mu, lr = np.float32(float(part)), np.float32(0.9), np.float32(0.7)
    decay = np.float32(float(1 - part * (1 - Fraction(float(mu)))))
    b = decay * state.numpy() + delta.numpy() * s
    A = old.numpy() - (delta.numpy() + mu * b) * np.float32(float(part * Fraction(float(lr))))
    assert np.array_equal(after.numpy().view(np.int32), b.view(np.int32))
    assert np.array_equal(anchor.numpy().view(np.int32), A.view(np.int32))


def test_without_momentum_a_part_of_a_round_is_that_part_of_the_step() -> None:
    outer, delta, anchor = Nesterov(1.0, 0.0), noise(9, 3), torch.empty(9)
    outer.block(torch.zeros(9), (), delta.clone(), anchor, (), rates(outer, 7, Fraction(1, 4)))
    assert torch.equal(anchor, -delta / 4)


def test_steady_parts_that_come_to_a_round_go_as_far_as_a_whole_one() -> None:
    """Where every delta is the same: gain 1 / (1 - mu) per round, however it is cut."""
    outer, gone = Nesterov(1.0, 0.75), []
    for part in (Fraction(1), Fraction(1, 4)):
        anchor, state = torch.zeros(1), torch.full((1,), 4.0)
        for _ in range(part.denominator):
            new, b = torch.empty(1), torch.empty(1)
            outer.block(anchor, [state], torch.ones(1), new, [b], rates(outer, 7, part))
            anchor, state = new, b
        assert state.item() == 4.0
        gone.append(anchor.item())
    assert gone == [-4.0, -4.0]


@pytest.mark.parametrize("lr", [1.0, 0.7])
def test_a_rack_that_is_alone_trains_on_and_keeps_the_momentum(lr: float) -> None:
    outer, delta, old, state = Nesterov(lr, 0.9), noise(9, 3), noise(9, 4), noise(9, 5)
    anchor, after = torch.empty(9), torch.empty(9)
    outer.block(old, [state], delta.clone(), anchor, [after], rates(outer, 7, plain=True))
    assert torch.equal(anchor, old - delta)
    assert torch.equal(after, state)
    assert rates(Nesterov(lr, 0.0), 7, plain=True).lr == float(np.float32(lr)), "as it was said"


def test_a_part_of_last_offers_is_a_part_of_the_mean() -> None:
    """Another rack trains on, and the momentum is kept for it."""
    outer, delta, old, state = Nesterov(0.7, 0.9), noise(9, 3), noise(9, 4), noise(9, 5)
    anchor, after = torch.empty(9), torch.empty(9)
    quarter = rates(outer, 7, Fraction(1, 4), plain=True)
    outer.block(old, [state], delta.clone(), anchor, [after], quarter)
    assert torch.equal(anchor, old - delta / 4)
    assert torch.equal(after, state)


def test_a_ramp_of_less_than_no_rounds_cannot_be_built() -> None:
    with pytest.raises(ConfigError, match="outer_ramp_rounds"):
        OUTERS["nesterov"](1.0, 0.5, -1)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_stretch_is_of_the_step_and_not_of_the_momentum(momentum: float) -> None:
    """A' = A - s lr (f D + mu b'), b' = (1 - s (1 - mu)) b + s D: by hand."""
    outer = Nesterov(0.5, momentum)
    stretched = rates(outer, 3, Fraction(1, 2))._replace(stretch=1.5)
    anchor, state = torch.empty(2), torch.empty(2)
    states = ([torch.tensor([4.0, 0.0])], [state]) if momentum else ([], [])
    outer.block(torch.tensor([1.0, 1.0]), states[0], torch.tensor([2.0, -8.0]), anchor, states[1],
                stretched)  # fmt: skip
    if momentum:
        assert state.tolist() == [4.0, -4.0]
        assert anchor.tolist() == [1 - 0.25 * (3 + 2), 1 - 0.25 * (-12 - 2)]
    else:
        assert anchor.tolist() == [1 - 0.25 * 3, 1 + 0.25 * 12]
