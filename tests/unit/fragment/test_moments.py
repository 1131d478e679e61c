from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mend.errors import ConfigError, UsageError
from mend.fragment.model_plan import ModelPlan
from mend.fragment.moments import FIRST, SECOND, MomentsView, moments_of
from mend.fragment.plan import cut_layouts, exchanged_parameters
from mend.types import Owned, Span
from tests import golden


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def stepped(module: nn.Module, optimizer: torch.optim.Optimizer, count: int = 1) -> None:
    for _ in range(count):
        module(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()


def view_of(
    module: nn.Module, optimizers: list[Any], order: int = FIRST
) -> tuple[MomentsView, Owned]:
    found = moments_of(exchanged_parameters(module), optimizers, order, 8)
    (layout,) = cut_layouts([(each.name, each.parameter) for each in found], 1)
    owned = Owned(tuple(Span(0, slot.numel) for slot in layout.slots), layout.numel)
    return MomentsView(layout, found), owned


def test_moments_not_yet_made_read_as_zero_and_are_not_created() -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters())
    view, owned = view_of(module, [optimizer])
    out = torch.full((owned.numel,), 7.0)
    view.read(owned, out)
    assert not out.any()
    view.write(owned, torch.ones(owned.numel))
    assert not optimizer.state
    stepped(module, optimizer)
    view.write(owned, torch.arange(owned.numel, dtype=torch.float32))
    view.read(owned, out)
    assert out.tolist() == list(range(owned.numel))
    assert optimizer.state[module[0].bias]["exp_avg"].tolist() == [12, 13, 14, 15]
    optimizer.load_state_dict(optimizer.state_dict())
    view.write(owned, out + 1)
    assert optimizer.state[module[0].bias]["exp_avg"].tolist() == [13, 14, 15, 16]


@pytest.mark.parametrize(("order", "beta"), [(FIRST, 0.9), (SECOND, 0.99)])
def test_a_late_mean_is_what_averaging_at_once_and_the_same_steps_would_give(
    order: int, beta: float
) -> None:
    """numerics: u <- beta^tau mean + (u - beta^tau captured)."""
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), betas=(0.9, 0.99))
    view, owned = view_of(module, [optimizer], order)
    captured, mean = torch.rand(owned.numel), torch.rand(owned.numel)
    at_once, late = mean.clone(), captured.clone()
    for step in range(5):
        grad = torch.randn(owned.numel, generator=torch.Generator().manual_seed(step))
        for each in (at_once, late):
            each.mul_(beta).add_(grad**order, alpha=1 - beta)
    view.decay(owned, late, captured, mean, 5)
    assert torch.allclose(late, at_once, atol=1e-6)
    now = captured.clone()
    view.decay(owned, now, captured, mean, 0)
    assert torch.equal(now, mean), "at once it is the mean to the bit"


def test_no_second_moment_falls_below_zero() -> None:
    module = model()
    view, owned = view_of(module, [torch.optim.Adam(module.parameters())], SECOND)
    live, zero = torch.full((owned.numel,), 0.5), torch.zeros(owned.numel)
    view.decay(owned, live, torch.ones(owned.numel), zero, 1)
    assert torch.equal(live, zero)
    first, owned = view_of(module, [torch.optim.Adam(module.parameters())], FIRST)
    live = torch.full((owned.numel,), 0.5)
    first.decay(owned, live, torch.ones(owned.numel), zero, 1)
    assert (live < 0).all(), "first moments have a sign"


def test_every_parameter_has_the_moment_of_its_own_optimizer_and_group() -> None:
    module = model()
    sgd = torch.optim.SGD(
        [{"params": [module[0].weight]}, {"params": [module[0].bias], "momentum": 0.0}],
        momentum=0.8,
    )
    adam = torch.optim.AdamW(module[1].parameters(), betas=(0.7, 0.99))

    class Wrapper:
        optimizer = adam
        param_groups = adam.param_groups

    found = moments_of(exchanged_parameters(module), [sgd, Wrapper()], FIRST, 8)
    told = [(each.name, each.kind.state, each.beta) for each in found]
    assert told == [
        ("0.weight", "momentum_buffer", 0.8), ("1.weight", "exp_avg", 0.7),
        ("1.bias", "exp_avg", 0.7),
    ]  # fmt: skip
    adam.param_groups[0]["betas"] = (0.6, 0.99)
    assert found[1].beta == 0.6
    plan = ModelPlan(module, 2, optimizers=[sgd, Wrapper()], moment_periods={FIRST: 8})
    layouts = [fragment.layout for fragment in plan.moments[0]]
    assert [layout.fragment for layout in layouts] == [2, 3]
    names = [slot.name for layout in layouts for slot in layout.slots]
    assert names == ["momentum_buffer:0.weight", "exp_avg:1.weight", "exp_avg:1.bias"]
    assert len(moments_of(exchanged_parameters(module), [sgd, adam], SECOND, 8)) == 2


def test_moments_that_cannot_be_averaged_are_refused_by_name() -> None:
    module = model()
    named = exchanged_parameters(module)
    with golden.raises(ConfigError):
        moments_of(named, [], FIRST, 8)
    with golden.raises(ConfigError):
        moments_of(named, [torch.optim.RMSprop(module.parameters())], FIRST, 8)
    plain = torch.optim.SGD(module.parameters())
    with golden.raises(ConfigError):
        moments_of(named, [plain], FIRST, 8)
    with golden.raises(ConfigError):
        moments_of(named, [torch.optim.SGD(module.parameters(), momentum=0.9)], SECOND, 8)
    adam = torch.optim.Adam(module.parameters())
    view, owned = view_of(module, [adam])
    stepped(module, adam)
    adam.state[module[0].bias] = {"state1": torch.zeros(2)}
    with golden.raises(UsageError):
        view.read(owned, torch.zeros(owned.numel))
    for packed in (torch.zeros(4, dtype=torch.uint8), torch.zeros(2)):
        adam.state[module[0].bias]["exp_avg"] = packed
        with golden.raises(UsageError):
            view.read(owned, torch.zeros(owned.numel))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="of torch 2.9")
def test_muon_and_adam_side_by_side() -> None:
    module = model()
    matrices = [p for p in module.parameters() if p.dim() == 2]
    rest = [p for p in module.parameters() if p.dim() != 2]
    optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]
    view, owned = view_of(module, optimizers)
    out = torch.zeros(owned.numel)
    module(torch.randn(5, 3)).square().sum().backward()
    for each in optimizers:
        each.step()
    view.read(owned, out)
    assert torch.equal(out[:12], optimizers[0].state[matrices[0]]["momentum_buffer"].reshape(-1))
    assert torch.equal(out[12:16], optimizers[1].state[rest[0]]["exp_avg"])
    assert [each.kind.state for each in view.moments] == ["momentum_buffer", "exp_avg"] * 2
