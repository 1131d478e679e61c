"""Which calls of which optimizer are a step."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from mend.engine.hooks import scaled_steps
from mend.engine.hooks.step_hooks import Counting, StepHooks, optimizers_of
from mend.errors import GaveUp, UsageError


@pytest.fixture(autouse=True)
def no_hooks_are_left() -> Iterator[None]:
    """torch calls them at the steps of all optimizers, of other tests too."""
    of_all = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    before = [dict(hooks) for hooks in of_all]
    yield
    gc.collect()
    for hooks, kept in zip(of_all, before, strict=True):
        for number in hooks.keys() - kept.keys():
            del hooks[number]


class Counted:
    """What is told of the steps of a model of two layers."""

    def __init__(
        self, *given: Any, model: nn.Module | None = None, may_be_freed: bool = True
    ) -> None:
        self.model = model or nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.heard: list[str] = []
        self.tokens: list[int | None] = []
        self.between: list[int] = []
        """How much had been heard by then."""
        self.hooks = StepHooks(
            list(self.model.parameters()),
            given,
            between=lambda: self.between.append(len(self.heard)),
            before=lambda: self.heard.append("before"),
            after=lambda tokens: self.heard.append(f"after {tokens}"),
            take_tokens=lambda: self.tokens.pop() if self.tokens else None,
            found=lambda optimizer: self.heard.append(f"found {type(optimizer).__name__}"),
            may_be_freed=may_be_freed,
        )

    def optimizer(self, layer: int | None = None) -> torch.optim.Optimizer:
        part = self.model if layer is None else self.model.get_submodule(str(layer))
        return torch.optim.SGD(part.parameters(), lr=0.1)


def test_the_first_step_waits_for_the_second_or_for_a_word_of_the_script() -> None:
    counted = Counted()
    optimizer = counted.optimizer()
    counted.tokens = [7]
    optimizer.step()
    assert counted.heard == ["before", "found SGD"]
    optimizer.step()
    assert counted.heard[2:] == ["after 7", "before", "after None"]
    assert counted.hooks.counting is Counting.FOUND

    counted = Counted()
    counted.tokens = [7]
    counted.optimizer().step()
    assert counted.hooks.count_by_hand() == 7
    counted.optimizer().step()
    assert counted.heard == ["before", "found SGD", "before"], "the script counts"


def test_first_of_two_optimizers_of_a_model_counts_the_steps() -> None:
    """As Muon for matrices and AdamW for the rest."""
    counted = Counted()
    first, second = counted.optimizer(0), counted.optimizer(1)
    for _ in range(3):
        first.step()
        second.step()
    assert counted.heard.count("after None") == 3
    counted.hooks.flush()
    assert counted.heard.count("after None") == 3, "nothing waits"


def test_a_group_that_is_added_later_makes_an_optimizer_count() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    given = torch.optim.SGD(model[0].parameters(), lr=0.1)
    counted = Counted(given, model=model)
    other = torch.optim.SGD(model[1].parameters(), lr=0.1)
    other.step()
    assert counted.heard == []
    other.add_param_group({"params": list(model[0].parameters())})
    other.step()
    assert counted.heard == ["before", "after None"]


def test_an_optimizer_that_is_given_forbids_counting_by_hand() -> None:
    model = nn.Linear(2, 2)
    counted = Counted(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    with pytest.raises(UsageError, match=r"remove runtime\.step"):
        counted.hooks.count_by_hand()


def test_nothing_is_called_when_it_is_closed_or_forgotten() -> None:
    counted = Counted()
    optimizer = counted.optimizer()
    counted.hooks.close()
    counted.hooks.close()
    optimizer.step()
    assert counted.heard == []
    counted = Counted()
    optimizer, heard = counted.optimizer(), counted.heard
    del counted
    gc.collect()
    optimizer.step()
    assert heard == []


def test_step_of_parts_of_freed_model_is_refused_only_before_it_is_closed() -> None:
    counted = Counted(may_be_freed=False)
    optimizer = counted.optimizer(0)
    del counted
    gc.collect()
    with pytest.raises(GaveUp, match="freed"):
        optimizer.step()
    counted = Counted(may_be_freed=False)
    optimizer = counted.optimizer(0)
    counted.hooks.close()
    del counted
    gc.collect()
    optimizer.step()


def test_optimizers_are_none_one_or_several_and_others_are_refused() -> None:
    model = nn.Linear(2, 2)
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    assert optimizers_of(None) == []
    assert optimizers_of(one) == [one]
    assert optimizers_of((one, one)) == [one, one]
    with pytest.raises(UsageError, match="a list with Linear"):
        optimizers_of([one, model])


def test_between_two_steps_is_before_the_first_of_several_optimizers_moves() -> None:
    """What a rack that joins gets has all of one step, and nothing of the next."""
    counted = Counted()
    first, second = counted.optimizer(0), counted.optimizer(1)
    counted = Counted(first, second, model=counted.model)
    for _ in range(2):
        first.step()
        second.step()
    assert counted.heard == ["before", "after None"] * 2, "the last one counts"
    assert counted.between == [0, 0, 2, 2]
    counted = Counted()
    counted.hooks.count_by_hand()
    counted.optimizer().step()
    assert counted.between == [], "the script says when a step is done"


def test_tokens_of_a_step_that_a_scaler_skips_are_dropped_unless_another_one_trained_on_them() -> (
    None
):
    """They were counted with the next step. An optimizer of something else changes nothing."""
    counted = Counted()
    parts = [counted.optimizer(0), counted.optimizer(1)]
    counted = Counted(*parts, model=counted.model)
    stranger = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    finite = torch.amp.GradScaler("cpu", init_scale=1.0)
    finite.scale(torch.ones(1))
    counted.tokens = [7]
    for each, gradient in ((stranger, float("nan")), (parts[1], float("inf"))):
        assert counted.tokens == [7]
        for p in each.param_groups[0]["params"]:
            p.grad = torch.full_like(p, gradient)
        finite.step(each)
    assert counted.tokens == []
    finite.update()
    counted.tokens = [8]
    parts[0].step()
    finite.step(parts[1])
    assert counted.tokens == [8], "it comes with the next step"
    assert counted.heard == []


def test_scaler_after_its_last_listener_is_freed_is_torchs_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Listener:
        ends = 0

    plain = inspect.unwrap(torch.amp.GradScaler.step)
    monkeypatch.setattr(torch.amp.GradScaler, "step", plain)
    monkeypatch.setattr(scaled_steps, "_listeners", WeakSet())
    monkeypatch.setattr(scaled_steps, "_steps", (None, None))
    listener = Listener()
    scaled_steps.listen(listener)
    assert torch.amp.GradScaler.step is not plain
    del listener
    assert torch.amp.GradScaler.step is plain
