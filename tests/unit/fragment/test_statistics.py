"""Which buffers of a model training changes, and how they are named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mend.fragment.plan import inventory
from mend.fragment.statistics import (
    BUFFER_NUMEL_MAX,
    FROZEN_NUMEL_MAX,
    digests_of_buffers,
    digests_of_rest,
    in_few_words,
    running_statistics,
)
from mend.types import BUFFERS_MAX


class Subclass(Tensor):
    """As quantization libraries have them: its bytes are not its values."""


class Table(nn.Module):
    """A mask, a rotary table, a counter, and something that is nobody's state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3, 3).tril().to(torch.bfloat16))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("none_yet", torch.empty(0))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_modules_with_running_statistics_are_named_by_their_path() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False),
        nn.InstanceNorm1d(4), nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True)),
        nn.LayerNorm(4), Table(),
    )  # fmt: skip
    assert running_statistics(model) == ["1", "4.0"]
    assert running_statistics(torch.compile(model, backend="eager")) == ["1", "4.0"]
    assert running_statistics(nn.BatchNorm2d(3)) == ["BatchNorm2d"]
    assert running_statistics(nn.SyncBatchNorm(3)) == ["SyncBatchNorm"]


def test_constant_buffers_keep_their_digests_and_statistics_have_none() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), Table())
    before = digests_of_rest(model, ())
    assert list(before) == ["1.mask", "1.scale", "1.none_yet"]
    model(torch.randn(8, 4))
    assert digests_of_rest(model, ()) == before
    with torch.no_grad():
        model[1].scale += 1
        model[1].scratch += 1
        model[1].count += 1
    after = digests_of_rest(model, ())
    assert [name for name in after if after[name] != before[name]] == ["1.scale"]


def test_many_names_are_counted() -> None:
    assert in_few_words(["a", "b"]) == "a, b"
    assert in_few_words(f"m{n}" for n in range(53)) == "m0, m1, m2, m3 and 49 more"


def test_a_frozen_teacher_that_is_averaged_is_found_and_a_frozen_base_is_not() -> None:
    """As of BYOL or MoCo: racks ended `merged` with other teachers, and nobody said so."""
    model = nn.ModuleDict({"student": nn.Linear(2, 2), "teacher": nn.Linear(2, 2)})
    model["base"] = nn.Linear(FROZEN_NUMEL_MAX, 2, bias=False)
    model["taken along"] = nn.Linear(2, 2)
    for name in ("teacher", "base", "taken along"):
        model[name].requires_grad_(False)
    before = digests_of_rest(model, list(model["taken along"].parameters()))
    assert sorted(before) == ["base.weight", "teacher.bias", "teacher.weight"]
    with torch.no_grad():
        for student, teacher in zip(
            model["student"].parameters(), model["teacher"].parameters(), strict=True
        ):
            teacher.data = teacher.data * 0.9 + student.data * 0.1  # no version counts this
    after = digests_of_rest(model, ())
    changed = [name for name, digest in before.items() if after[name] != digest]
    assert changed == ["teacher.weight", "teacher.bias"]


def test_racks_compare_buffers_of_every_type_but_no_statistics() -> None:
    model = nn.Sequential(Table(), nn.BatchNorm1d(2))
    before = dict(digests_of_buffers(model))
    assert list(before) == ["0.mask", "0.scale", "0.none_yet", "0.count", "0.scratch"]
    table = model[0]
    assert isinstance(table, Table)
    with torch.no_grad():
        table.count += 1
        table.scratch += 1
        model[1](torch.randn(4, 2))
    after = dict(digests_of_buffers(model))
    assert [name for name in before if before[name] != after[name]] == ["0.count", "0.scratch"]
    table.scale = table.scale.reshape(1)
    assert dict(digests_of_buffers(model))["0.scale"] != after["0.scale"], "another shape"


def test_the_beginning_of_a_large_buffer_is_compared_and_not_copied_whole() -> None:
    model = nn.Module()
    model.register_buffer("large", torch.zeros(1, 3, BUFFER_NUMEL_MAX))
    model.register_buffer("wide", torch.zeros(1).expand(1 << 20, 1 << 20))  # 4 TiB, if copied
    before = digests_of_buffers(model)
    model.get_buffer("large")[0, 1:] = 1
    assert digests_of_buffers(model) == before
    model.get_buffer("large")[0, 0, -1] = 1
    assert digests_of_buffers(model) != before


def test_many_buffers_are_a_bounded_number_of_lines() -> None:
    model = nn.Module()
    for number in range(BUFFERS_MAX + 9):
        model.register_buffer(f"b{number}", torch.zeros(2))
    before = digests_of_buffers(model)
    assert len(before) == BUFFERS_MAX
    assert before[-1][0] == "10 more"
    model.get_buffer(f"b{BUFFERS_MAX + 8}").add_(1)
    assert [one for one, other in zip(before, digests_of_buffers(model), strict=True)
            if one != other] == [before[-1]]  # fmt: skip


@pytest.mark.parametrize(
    "buffer",
    [
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        Subclass(torch.ones(2)),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch._neg_view(torch.ones(2)),
    ],
    ids=["sparse", "nested", "subclass", "conjugate", "negative"],
)
def test_a_buffer_of_any_kind_is_no_obstacle(buffer: Tensor) -> None:
    """A sparse one, such as the adjacency of a graph, ended mend_init with a RuntimeError."""
    model = nn.Module()
    model.register_buffer("buffer", buffer)
    digests_of_rest(model, ())
    plain = type(buffer) is Tensor and buffer.layout == torch.strided
    assert [name for name, _ in digests_of_buffers(model)] == ["buffer"] * plain


@pytest.mark.parametrize(
    "frozen",
    [torch.eye(3).to_sparse(), Subclass(torch.ones(2)), torch.empty(2, device="meta")],
    ids=["sparse", "subclass", "meta"],
)
def test_a_frozen_parameter_of_any_kind_is_no_obstacle(frozen: Tensor) -> None:
    """A base that a library had quantized ended mend_init with the library's error."""
    model = nn.Linear(2, 2)
    model.register_parameter("base", nn.Parameter(frozen, requires_grad=False))
    assert digests_of_rest(model, ()) == {}
    base = inventory(model, {id(model.weight), id(model.bias)}, hash_all=False)[-1]
    model.register_parameter("base", nn.Parameter(frozen.to(torch.float64), requires_grad=False))
    other = inventory(model, {id(model.weight), id(model.bias)}, hash_all=False)[-1]
    assert base.hash != other.hash
