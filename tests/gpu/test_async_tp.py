"""On two GPUs, torch pipelines a tensor-parallel MLP, and mend counts what it fused.

    torchrun --nproc-per-node 2 -m pytest tests/gpu/test_async_tp.py -q

Sequence-parallel in and out, as in a transformer block: an all-gather in front of the first matmul,
a reduce-scatter behind the second, and their mirror images in the backward pass.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from mend.events.kinds import AsyncTpUnused
from mend.hardware.async_tp import AsyncTp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        int(os.environ.get("WORLD_SIZE", "1")) < 2 or torch.cuda.device_count() < 2,
        reason="needs torchrun --nproc-per-node 2 on two GPUs",
    ),
    # What the compiler and NCCL warn of is theirs.
    pytest.mark.filterwarnings("default"),
]

WIDTH, HIDDEN, ROWS = 256, 1024, 512


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    yield init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def model_on(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(3)
    plan = {
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    }
    return parallelize_module(Mlp().cuda().bfloat16(), mesh, plan)


def trained(model: nn.Module, mesh: DeviceMesh) -> tuple[Tensor, list[Tensor]]:
    """The local output and gradients of one step."""
    torch.manual_seed(100 + mesh.get_rank())
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = model(x)
    y = y.to_local() if isinstance(y, DTensor) else y
    y.float().square().sum().backward()
    grads = [p.grad for p in model.parameters()]
    return y.detach(), [
        g.to_local() if isinstance(g, DTensor) else g for g in grads if g is not None
    ]


def test_async_tp_report_matches_the_compiled_graphs(mesh: DeviceMesh) -> None:
    plain_y, plain_grads = trained(model_on(mesh), mesh)
    model = model_on(mesh)
    notes: list[dict[str, object]] = []
    tp = AsyncTp.enable(model, note=lambda event: notes.append(event.fields()))
    try:
        torch._dynamo.reset()
        y, grads = trained(torch.compile(model), mesh)
        tp.stepped()
        print(f"rank {mesh.get_rank()}: async_tp {tp.description} graphs={tp.census.graphs}")
        assert len(notes) == 1
        if tp.description.startswith(
            "not active: the GPUs of a tensor-parallel group share no memory"
        ):
            pytest.skip(tp.description)
        assert tp.census.fused > 0, tp.description
        assert tp.description == f"on: {tp.census.fused} fused matmul-collectives"
        # Other kernels, another order of sums: close, not equal.
        torch.testing.assert_close(y, plain_y, rtol=5e-2, atol=5e-2)
        for one, other in zip(grads, plain_grads, strict=True):
            torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-1)
    finally:
        tp.close()


def test_a_model_that_is_not_compiled_gets_a_reason(mesh: DeviceMesh) -> None:
    model = model_on(mesh)
    notes: list[object] = []
    tp = AsyncTp.enable(model, note=notes.append)
    try:
        trained(model, mesh)
        tp.stepped()
        assert tp.description.startswith("not active: ")
        assert notes[1:] == [AsyncTpUnused(tp.description)]
    finally:
        tp.close()
