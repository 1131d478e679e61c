"""Recording sees what a script does, and changes none of it."""

from __future__ import annotations

import os

import torch
from torch import nn

from mend.determinism.comparison import compare
from mend.determinism.recorder import MODULE, Recorder
from tests.unit.determinism.recorded import recorded


def test_a_script_without_faults_is_equal_to_itself_recorded_or_not() -> None:
    plain, detailed = recorded("none"), recorded("none", detail=2)
    assert sorted(plain.steps) == [1, 2, 3]
    assert compare([plain], [detailed]) is None
    assert not plain.entries
    assert set(detailed.entries) == {2}
    assert [len(plain.steps[2][part]) for part in ("gradients", "weights", "optimizer")] == [32] * 3
    assert len({plain.steps[step]["weights"] for step in (1, 2, 3)}) == 3


def test_every_operator_has_its_module_and_direction() -> None:
    places = {tuple(entry["at"]) for entry in recorded("none", detail=2).entries[2]}
    assert {
        ("forward", "first", "aten.mul.Tensor"), ("forward", "tokens", MODULE),
        ("forward", "Model", "aten.relu.default"), ("forward", "", "aten.sum.default"),
        ("backward", "Model", "aten.threshold_backward.default"),
        ("backward", "first", "aten.mul.Tensor"), ("optimizer", "AdamW", "aten.addcdiv_.default"),
    } <= places  # fmt: skip


def test_a_script_is_ended_behind_the_last_step() -> None:
    assert sorted(recorded("none", last=2).steps) == [1, 2]


def test_hooks_and_autograd_are_as_before() -> None:
    backward = torch.autograd.backward
    recorded("none", detail=1)
    assert torch.autograd.backward is backward
    module = nn.Linear(2, 2)
    module(torch.ones(2, 2)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()


def test_a_forked_child_records_nothing() -> None:
    """A loader's worker inherits the hooks, and would write into the recording of its parent."""
    found: list[object] = []
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with Recorder(found.append):
        if not (child := os.fork()):
            found.clear()
            optimizer.step()
            os._exit(len(found))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        optimizer.step()
    assert len(found) == 2
