"""Recording sees what a script does, and changes none of it."""

from __future__ import annotations

import linecache
import os
from pathlib import Path

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


def source(line: str) -> str:
    """The text of "file.py:41"."""
    name, _, number = line.rpartition(":")
    assert not Path(name).is_absolute(), "it is shown from where the script was started"
    return linecache.getline(name, int(number)).strip()


def test_every_operator_has_the_line_that_calls_it_or_called_its_forward() -> None:
    lines = {
        (entry["at"][0], entry["at"][2]): source(entry["line"])
        for entry in recorded("atomic", detail=2).entries[2]
        if entry["line"]
    }
    assert lines["forward", "planted.atomic_sum.default"] == "return atomic_sum(x)"
    relu = "out: Tensor = self.last(self.tokens(self.first(x)).relu())"
    assert lines["forward", "aten.relu.default"] == relu
    assert lines["forward", "aten.pow.Tensor_Scalar"] == "loss = out.square().sum()"
    assert lines["backward", "aten.pow.Tensor_Scalar"] == "loss = out.square().sum()"
    assert lines["backward", "aten.sum.dim_IntList"] == "return x * self.weight"
    assert lines["backward", "aten.threshold_backward.default"] == relu
    assert lines["optimizer", "aten.addcdiv_.default"] == "optimizer.step()"


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
