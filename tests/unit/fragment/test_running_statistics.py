from __future__ import annotations

import pytest
import torch
from torch import nn

from mend.errors import UsageError
from mend.fragment.running_statistics import StatisticsView, plan_statistics, statistics_of
from mend.types import Owned, Span
from tests import golden


def model(momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4, momentum=momentum)
    return nn.Sequential(nn.Linear(3, 4), norm, nn.Tanh(), nn.BatchNorm1d(4))


def view_of(module: nn.Module) -> tuple[StatisticsView, Owned]:
    found = statistics_of(module)
    layout = plan_statistics([(each.name, each.first) for each in found], 5)
    owned = Owned(tuple(Span(0, slot.numel) for slot in layout.slots), layout.numel)
    return StatisticsView(layout, found, lambda: None), owned


def trained(module: nn.Module, passes: int, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    for _ in range(passes):
        module(torch.randn(6, 3, generator=chance))


def test_statistics_are_the_buffers_of_modules_that_keep_them_in_one_fragment() -> None:
    view, _ = view_of(model())
    assert view.layout.fragment == 5
    assert [slot.name for slot in view.layout.slots] == [
        "1.running_mean", "1.running_var", "3.running_mean", "3.running_var",
    ]  # fmt: skip
    assert [s.name for s in statistics_of(nn.BatchNorm2d(2))] == ["running_mean", "running_var"]
    assert statistics_of(nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False))) == []


@pytest.mark.parametrize(("accumulated", "known"), [(1, True), (3, True), (1, False)])
def test_a_late_mean_is_what_averaging_at_once_and_the_same_passes_would_give(
    accumulated: int, known: bool
) -> None:
    """Passes count, not steps: a step may accumulate several micro-batches. After a resume the
    passes at the capture are not known, and a step counts as one."""
    late, at_once = model(), model()
    (view, owned), (other, _) = view_of(late), view_of(at_once)
    captured, mean = torch.empty(owned.numel), torch.rand(owned.numel)
    for each in (late, at_once):
        trained(each, 4, seed=1)
    view.read(owned, captured)
    if known:
        view.captured()
    other.write(owned, mean)
    for each in (late, at_once):
        trained(each, 5 * accumulated, seed=2)
    live, wanted = torch.empty(owned.numel), torch.empty(owned.numel)
    view.read(owned, live)
    other.read(owned, wanted)
    assert not torch.allclose(live, wanted, atol=1e-3)
    view.decay(owned, live, captured, mean, 5)
    assert torch.allclose(live, wanted, atol=1e-5)


def test_a_cumulative_average_moves_to_the_mean_and_keeps_what_it_has_learned_since() -> None:
    module = model(momentum=None)
    view, owned = view_of(module)
    trained(module, 3, seed=1)
    captured, live = torch.empty(owned.numel), torch.empty(owned.numel)
    view.read(owned, captured)
    view.captured()
    trained(module, 2, seed=2)
    view.read(owned, live)
    mean = captured + 1
    wanted = live + 1
    view.decay(owned, live, captured, mean, 2)
    assert torch.allclose(live[:8], wanted[:8], atol=1e-5), "of module 1"


def test_frozen_statistics_stay_to_the_bit_and_moving_ones_become_the_mean_to_the_bit() -> None:
    """The mean of equal values may differ in the last bit: their weights are rounded. A frozen
    BatchNorm of a pretrained model would drift."""
    module = model()
    trained(module, 3, seed=1)
    view, owned = view_of(module)
    view.captured()
    live = torch.empty(owned.numel)
    view.read(owned, live)
    view.write(owned, live)  # the mean of a round
    module[1].eval()
    trained(module, 1, seed=2)
    for moves in (True, False):
        view.captured()
        view.read(owned, live)
        captured, mean = live.clone(), live * 1.0000002
        view.decay(owned, live, captured, mean, 0)
        view.write(owned, live)
        assert torch.equal(live[:8], captured[:8]), "module 1 is frozen"
        assert torch.equal(live[8:], (mean if moves else captured)[8:]), "module 3 has moved once"


def test_statistics_of_a_module_that_never_counts_its_passes_are_averaged() -> None:
    """InstanceNorm has the counter of BatchNorm, and leaves it at zero."""
    module = nn.InstanceNorm1d(2, track_running_stats=True)
    view, owned = view_of(module)
    module(torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(1)))
    captured, mean = torch.empty(owned.numel), torch.rand(owned.numel)
    view.read(owned, captured)
    view.captured()
    live = captured.clone()
    view.decay(owned, live, captured, mean, 0)
    assert torch.equal(live, mean)


def test_no_variance_falls_below_zero() -> None:
    view, owned = view_of(model())
    live, zero = torch.full((owned.numel,), 0.5), torch.zeros(owned.numel)
    view.decay(owned, live, torch.ones(owned.numel), zero, 1)
    assert (live[:4] < 0).all(), "means have a sign"
    assert torch.equal(live[4:8], zero[4:8])


def test_a_buffer_of_another_type_is_refused_by_name() -> None:
    module = model()
    view, owned = view_of(module)
    module.double()
    with golden.raises(UsageError):
        view.read(owned, torch.empty(owned.numel))


def test_non_finite_statistics_are_replaced_by_the_last_written_ones() -> None:
    module = model()
    view, owned = view_of(module)
    mean = torch.rand(owned.numel)
    view.write(owned, mean)
    trained(module, 2, seed=1)
    assert view.repair() == []
    module(torch.full((6, 3), float("inf")))
    module[3].running_var.fill_(1e30)  # its square is infinite
    assert view.repair() == [slot.name for slot in view.layout.slots]
    live = torch.empty(owned.numel)
    view.read(owned, live)
    assert torch.equal(live, mean)
