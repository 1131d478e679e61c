"""Faults that only a GPU has are found in its recordings, and a recorded step waits for it once."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mend.determinism.comparison import Finding, Recording, compare, recording_of
from mend.determinism.recorder import Recorder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
ROWS, PAIRS, WIDTH, STEPS = 8, 1 << 14, 32, 3
PARTS = 128
"""Of a sum that is split: as many atomic adds meet in every element."""


def added_by_atomics(parts: Tensor) -> Tensor:
    """The sum over the first dimension, in the order in which blocks of threads come to it."""
    total, where = torch.zeros_like(parts[:1]), parts.new_zeros(len(parts), dtype=torch.long)
    return total.index_add_(0, where, parts)[0]


def products(x_MK: Tensor, weight_KN: Tensor, parts: int) -> Tensor:
    """(parts, M, N): of each part of the pairs."""
    x_PMK = x_MK.unflatten(1, (parts, -1)).transpose(0, 1)
    return torch.bmm(x_PMK, weight_KN.unflatten(0, (parts, -1)))


@torch.library.custom_op("planted_gpu::split_k_product", mutates_args=())
def split_k_product(x: Tensor, weight: Tensor) -> Tensor:
    return added_by_atomics(products(x, weight, PARTS))


@torch.library.custom_op("planted_gpu::batch_product", mutates_args=())
def batch_product(x: Tensor, weight: Tensor) -> Tensor:
    """In more parts where there are fewer rows, as kernels that would leave a GPU idle."""
    return products(x, weight, PARTS // len(x)).sum(0)


def keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def spread(context: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = context.saved_tensors
    return grad @ weight.t(), x.t() @ grad


for planted in (split_k_product, batch_product):
    planted.register_autograd(spread, setup_context=keep)


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fault = "none"
        self.weight = nn.Parameter(torch.randn(PAIRS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "split-K":
            return split_k_product(x, self.weight)
        if self.fault == "batch":
            return batch_product(x, self.weight)
        if self.fault == "atomic add":
            part = x[:, :PARTS, None] * self.weight[:PARTS]
            where = torch.arange(len(x), device=x.device).repeat_interleave(PARTS)
            return x.new_zeros(len(x), WIDTH).index_add(0, where, part.flatten(0, 1))
        return x @ self.weight


def train(fault: str, fault_step: int, microbatches: int) -> None:
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = nn.Sequential(nn.ReLU(), Mix(), nn.Tanh())
        batches = torch.randn(STEPS, ROWS, PAIRS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        model[1].fault = fault if step + 1 >= fault_step else "none"  # type: ignore[assignment]
        optimizer.zero_grad()
        for part in batches[step].chunk(microbatches):
            model(part).square().sum().backward()
        optimizer.step()


def recorded(fault: str, detail: int, microbatches: int = 1) -> Recording:
    lines: list[str] = []
    with Recorder(lambda record: lines.append(json.dumps(record)), detail=(detail, detail)):
        train(fault, detail or 2, microbatches)
    return recording_of(json.loads(line) for line in lines)


def found(fault: str, step: int, other: int = 1) -> Finding:
    runs = [[recorded(fault, step, microbatches)] for microbatches in (1, other)]
    finding = compare(*runs)
    assert finding is not None
    return finding


def test_runs_without_a_fault_are_equal() -> None:
    assert compare([recorded("none", 2)], [recorded("none", 2)]) is None


@pytest.mark.parametrize(
    ("fault", "operator"),
    [
        ("atomic add", "aten.index_add.default"),
        ("split-K", "planted_gpu.split_k_product.default"),
    ],
)
def test_an_order_that_only_the_gpu_knows_is_found(fault: str, operator: str) -> None:
    finding = found(fault, 2)
    assert (finding.step, finding.direction, finding.module) == (2, "forward", "1")
    assert finding.operator == operator
    assert "order depends on threads or time" in finding.cause


def test_a_kernel_that_depends_on_the_batch_is_found_between_microbatches() -> None:
    finding = found("batch", 1, other=4)
    assert (finding.step, finding.direction, finding.module) == (1, "forward", "1")
    assert finding.operator == "planted_gpu.batch_product.default"
    assert "how many rows" in finding.cause


@pytest.mark.parametrize("detail", [0, 2])
def test_a_recorded_step_waits_for_the_gpu_once(detail: int) -> None:
    recorded("none", detail)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            recorded("none", detail)
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits = [str(each.message) for each in said if "called a synchronizing" in str(each.message)]
    assert len(waits) == STEPS, waits
