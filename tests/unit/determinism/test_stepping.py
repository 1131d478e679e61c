"""A known optimizer is not watched, and steps on what a rank holds of DTensors, to the bits of
torch's own step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from mend.determinism import Determinism, enable, optimizer_digest
from mend.determinism.digests import same_bits
from mend.determinism.stepping import make_step
from mend.errors import NotDeterministic

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1, amsgrad=True),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.1, weight_decay=0.1),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "plain SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
}


def watched(state: Determinism) -> list[str]:
    """Names of the operators that were watched for the first time, but for torch's own profiler,
    which every step of an optimizer calls before any hook."""
    watch: Any = state._coverage
    return [each.name() for each in watch._known if each.namespace != "profiler"]


def parameters(mesh: DeviceMesh) -> list[nn.Parameter]:
    """One that is cut, one that every rank has, a plain one, and one without a gradient."""
    found = []
    for number, place in enumerate((Shard(0), Replicate(), None, Shard(1))):
        tensor = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        whole = tensor if place is None else DTensor.from_local(tensor, mesh, [place])
        found.append(nn.Parameter(whole))
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_is_torchs_to_the_bit(mesh: DeviceMesh, name: str) -> None:
    with enable(1, "shape") as state:
        mine, theirs = parameters(mesh), parameters(mesh)
        ours, own = (OPTIMIZERS[name](each) for each in (mine, theirs))
        watch: Any = state._coverage
        for step in range(3):
            for each in (*mine[:3], *theirs[:3]):
                each.grad = each.detach() * (step + 1)
            watch._known.clear()
            make_step(ours)
            assert not watched(state), "watched, or of DTensors"
            own.step()
        assert [id(each) for each in ours.param_groups[0]["params"]] == [id(each) for each in mine]
        assert optimizer_digest(ours) == optimizer_digest(own)
        for one, other in zip(mine, theirs, strict=True):
            assert same_bits(one.detach(), other.detach())
            kinds = [
                {key: type(value) for key, value in optimizer.state.get(each, {}).items()}
                for optimizer, each in ((ours, one), (own, other))
            ]
            assert kinds[0] == kinds[1]


def test_a_step_that_fails_leaves_the_optimizer_as_it_was(mesh: DeviceMesh) -> None:
    mine = parameters(mesh)
    with enable(1, "shape"):
        optimizer = torch.optim.SGD(mine, lr=0.1, momentum=0.9)
        mine[0].grad = mine[0].detach()
        make_step(optimizer)
        optimizer.param_groups[0]["lr"] = "much"
        with pytest.raises(TypeError):
            make_step(optimizer)
    assert optimizer.param_groups[0]["params"][0] is mine[0]
    assert set(optimizer.state) == {mine[0]}


class Sums(torch.optim.SGD):
    """Known to nobody: its step has a sum of torch's own order."""

    def step(self, closure: Any = None) -> Any:
        X.cumsum(-1)
        return super().step(closure)


def sums_before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    X.cumsum(-1)


def hooked(weight: nn.Parameter) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([weight])
    optimizer.register_step_pre_hook(sums_before)
    return optimizer


UNKNOWN = {
    "cumsum": lambda weight: Sums([weight], lr=0.1),
    "cumsum.default": hooked,
    "_fused_adamw_": lambda weight: torch.optim.AdamW([weight], fused=True),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_the_trainer_watches_a_step_that_it_does_not_know(name: str) -> None:
    weight = nn.Parameter(X.clone())
    weight.grad = torch.ones_like(X)
    with enable(1, "shape"):
        make_step(torch.optim.AdamW([weight]))
        with pytest.raises(NotDeterministic, match=name):
            make_step(UNKNOWN[name](weight))


def test_a_step_that_is_known_is_not_watched() -> None:
    """And another mode sees all of it, as without the trainer."""
    weight = nn.Parameter(X.clone())
    weight.grad = torch.ones_like(X)
    optimizer = torch.optim.AdamW([weight])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with enable(1, "shape") as state:
        watch: Any = state._coverage
        watch._known.clear()
        make_step(optimizer)
        schedule.step()
        assert watched(state) == []
        with Counts() as counts:
            make_step(optimizer)
        assert counts.seen > 5
        assert torch.ops.aten.addcdiv_.default in watch._known


def test_hooks_for_all_optimizers_run_watched_on_whole_tensors_around_an_unwatched_step(
    mesh: DeviceMesh,
) -> None:
    """mend counts the steps of a job by such hooks, and applies merged weights in them. Where they
    were, every step was watched and of DTensors, ten times slower."""
    mine = parameters(mesh)
    seen: list[list[int]] = []
    with enable(1, "shape") as state:
        optimizer = torch.optim.AdamW(mine, lr=0.1)
        watch: Any = state._coverage

        def look(*_: object) -> None:
            seen.append([id(each) for each in optimizer.param_groups[0]["params"]])
            X.neg()

        hooks = [
            register_optimizer_step_pre_hook(look),
            register_optimizer_step_post_hook(look),
        ]
        try:
            for each in mine[:3]:
                each.grad = each.detach()
            watch._known.clear()
            make_step(optimizer)
        finally:
            for hook in hooks:
                hook.remove()
    assert seen == [[id(each) for each in mine]] * 2
    assert watched(state) == ["aten::neg"]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))
