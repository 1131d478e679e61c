"""mesh: which ranks of one torchrun share a rack."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mend.errors import ConfigError

RACK_DIM = "rack"


@dataclass(frozen=True, slots=True)
class RackSeat:
    """Where this process sits in a job whose torchrun spans several racks."""

    rack: int
    racks: int
    ranks: tuple[int, ...]
    """Global ranks of this rack, in the order of the mesh."""


def rack_of(mesh: DeviceMesh) -> RackSeat:
    """The rack of this process. Raises ConfigError for a mesh without a dimension "rack"."""
    names = mesh.mesh_dim_names or ()
    if RACK_DIM not in names:
        raise ConfigError("mesh", names, 'has no dimension "rack"', "Use mend.rack_mesh().")
    axis = names.index(RACK_DIM)
    by_rack = mesh.mesh.movedim(axis, 0).reshape(mesh.shape[axis], -1).tolist()
    mine = next(rack for rack, ranks in enumerate(by_rack) if dist.get_rank() in ranks)
    return RackSeat(mine, len(by_rack), tuple(int(rank) for rank in by_rack[mine]))
