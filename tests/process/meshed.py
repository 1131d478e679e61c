"""One torchrun over several racks: what `rack_mesh` makes on each rank, and a training on it.

`python -m tests.process.meshed '{"out": "...", ...}'`, see Options; model, data and results are
those of train.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.process.train import (
    build,
    leave_group,
    loss_of,
    mend_threads,
    optimizer_of,
    run_script,
    seen,
    tokens_of,
    weights,
)


@dataclass(frozen=True)
class Options:
    out: str
    mesh: dict[str, Any] = field(default_factory=dict)
    """Arguments of rack_mesh."""
    only: dict[str, dict[str, str]] = field(default_factory=dict)
    """rank -> variables that this rank alone has."""
    behind: dict[str, str] = field(default_factory=dict)
    """Variables that are set once the mesh is made."""
    parallel: str = "ddp"
    steps: int = 0
    config: dict[str, Any] = field(default_factory=dict)


def look(mesh: DeviceMesh) -> dict[str, Any]:
    """The mesh as this rank has it, and who is in its group of each dimension."""
    from mend.mesh import rack_of

    names = mesh.mesh_dim_names or ()
    seat = rack_of(mesh)
    return {
        "names": list(names),
        "ranks": mesh.mesh.tolist(),
        "groups": {n: dist.get_process_group_ranks(mesh[n].get_group()) for n in names},
        "seat": [seat.rack, seat.racks, list(seat.ranks)],
    }


def train(mesh: DeviceMesh, options: Options, result: dict[str, Any]) -> None:
    """With rack_aware mend is not shown the mesh, which then is the one that it has to find."""
    import mend

    rack, rank = mesh.get_local_rank("rack"), mesh.get_local_rank("dp")
    model = build("plain", rack)
    wrapped: nn.Module
    if options.parallel == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    else:
        wrapped = fully_shard(model, mesh=mesh["dp"])
    optimizer = optimizer_of(model)
    config = mend.MendConfig(**options.config)
    shown = None if config.rack_aware else mesh
    with mend.session(wrapped, config, optimizer, mesh=shown) as runtime:
        for step in range(1, options.steps + 1):
            loss = loss_of(wrapped, rack, rank, step)
            optimizer.zero_grad()
            loss.backward()
            runtime.count_tokens(tokens_of(rack, step))
            optimizer.step()
    result["weights"] = weights(model)
    result["status"] = seen(runtime.status())
    result["threads"] = mend_threads()


def run(options: Options, result: dict[str, Any]) -> None:
    import mend

    os.environ.update(options.only.get(os.environ["RANK"], {}))
    dist.init_process_group("gloo")
    mesh = mend.rack_mesh(**options.mesh)
    result["mesh"] = look(mesh)
    os.environ.update(options.behind)
    if options.steps:
        train(mesh, options, result)
    leave_group()


if __name__ == "__main__":
    run_script(Options, run)
