"""benchmarks.qwen_parallel: the model of qwen with tensor and sequence parallelism, and FSDP2.

Activations between the matmuls are sharded over positions: an all-gather is in front of q, k, v and
of gate, up; a reduce-scatter behind out and behind down. That is what torch can pipeline, but for
q, k and v: it does not fuse matmuls with a bias.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks import qwen
from benchmarks._common import noise
from benchmarks.h200_rank import local


def build(shape: qwen.Shape, positions: int, mesh: DeviceMesh) -> nn.Module:
    """bf16 on the mesh ("dp", "tp"), sharded over both; the same bits on every kind of device. The
    loss has to be computed and differentiated under `loss_parallel()`."""
    with torch.device("meta"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = qwen.Qwen(shape, positions)
        finally:
            torch.set_default_dtype(torch.float32)
    _shard(model, mesh)
    model.to_empty(device=mesh.device_type)
    if shape.tied:  # each module got memory of its own
        model.head.weight = model.embed.weight
    device = model.embed.weight.device
    model.cos, model.sin = qwen.rope(positions, shape.head_numel, device)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            part = local(parameter)
            if parameter.ndim == 1:
                part.fill_(0.0 if name.endswith("bias") else 1.0)
            else:  # sharded over all ranks, so that each may draw its own
                values_N = noise(part.numel(), 1000 * number + mesh.get_rank())
                part.copy_(values_N.view_as(part) * qwen.INIT_STD)
    return model


def _shard(model: qwen.Qwen, mesh: DeviceMesh) -> None:
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))
    # One all-gather behind a norm serves all matmuls that read it.
    gather = PrepareModuleOutput(
        output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False
    )
    norms = ("norm_attention", "norm_mlp")
    plan = {
        **dict.fromkeys(norms, SequenceParallel()),
        **dict.fromkeys(("attention.q", "attention.k", "attention.v", "gate", "up"), columns),
        **dict.fromkeys(("attention.out", "down"), rows),
    }
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
        parallelize_module(block, mesh["tp"], dict.fromkeys(norms, gather))
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh["tp"], ends)
    if model.shape.tied:
        model.head.weight = model.embed.weight
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
