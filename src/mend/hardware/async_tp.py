"""Asks torch to pipeline tensor parallelism inside a rack, and counts the fused operations.

The compiler of torch can split an all-gather -> matmul, or a matmul -> reduce-scatter, into parts
that are sent through symmetric memory while others are multiplied (micro-pipelining;
torch/_inductor/fx_passes/micro_pipeline_tp.py). It does so silently or not at all. This module
enables it for the groups that shard this model's matmuls, and counts the fused operations in the
compiled graphs, so that `status()` reports it as on only if a graph contains one.

Which mesh dimensions are tensor-parallel is derived from the parameters. A dimension that shards a
DTensor parameter counts if it is named "tp", or if `fully_shard` has not made it. fully_shard puts
its own dimensions first and shards over one of them. So for a parameter inside an FSDP module, the
first sharded dimension belongs to fully_shard, and later ones do not.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mend.events.base import Emit, LoggedEvent
from mend.events.kinds import AsyncTpChosen, AsyncTpUnused

NAME = "tp"
PROBE_BYTES = 1 << 20

FUSED = (
    "symm_mem.fused_all_gather_matmul",
    "symm_mem.fused_all_gather_scaled_matmul",
    "symm_mem.fused_matmul_reduce_scatter",
    "symm_mem.fused_scaled_matmul_reduce_scatter",
)
"""Operators that the compiler puts in place of a collective and its matmuls."""


@dataclass
class Census:
    """Counts of the graphs compiled since mend_init, forward and backward."""

    graphs: int = 0
    fused: int = 0

    def look(self, graph: torch.fx.Graph) -> None:
        self.graphs += 1
        self.fused += sum(
            node.op == "call_function" and str(node.target).startswith(FUSED)
            for node in graph.nodes
        )


class AsyncTp:
    """Whether and how tensor parallelism is pipelined. Off, unless made by `enable`. `description`:
    what status() shows."""

    def __init__(self) -> None:
        self.census = Census()
        self.asked = False
        self._refused = ""
        self._told = True
        self._note: Emit = _nobody
        self._restore: dict[str, object] = {}

    @classmethod
    def enable(cls, model: nn.Module, mesh: Any = None, note: Emit | None = None) -> AsyncTp:
        """Enable it, on all ranks of a rack together, before the model's first compiled step.
        `mesh`: a DeviceMesh with a dimension "tp", if the parameters do not show it. If it cannot
        work, this warns and changes nothing; it never raises for that. What only a step can show is
        noted as `async-tp-in-vain`."""
        enabled = cls()
        enabled.asked, enabled._told, enabled._note = True, False, note or _nobody
        groups = tp_groups(model, mesh)
        enabled._refused = why_not(groups, cuda=torch.cuda.is_available()) or _share_memory(groups)
        if enabled._refused:
            enabled._tell()
        else:
            enabled._switch_on()
        return enabled

    @property
    def description(self) -> str:
        """ "off", "on: 12 fused matmul-collectives", or "not active: " and the reason."""
        if not self.asked:
            return "off"
        if self.census.fused and not self._refused:
            return f"on: {self.census.fused} fused matmul-collectives"
        return f"not active: {self._refused or self._unfound()}"

    def stepped(self) -> None:
        """Report after the first optimizer step, which has compiled forward and backward."""
        if not self._told:
            self._tell()

    def close(self) -> None:
        """Restore the compiler's settings; compiled graphs stay. Idempotent."""
        config, restore = _inductor_config(), self._restore
        self._restore = {}
        for name, value in restore.items():
            setattr(config, name, value)

    def _switch_on(self) -> None:
        config = _inductor_config()
        passes = config.post_grad_custom_post_pass
        self._restore = {"_micro_pipeline_tp": config._micro_pipeline_tp,
                         "post_grad_custom_post_pass": passes}  # fmt: skip
        config._micro_pipeline_tp = True
        config.post_grad_custom_post_pass = with_census(passes, self.census)

    def _unfound(self) -> str:
        if not self._told:
            return "no step yet"
        if not self.census.graphs:
            return "nothing was compiled since mend_init (use torch.compile, and step after it)"
        return (
            f"{self.census.graphs} compiled graphs hold no matmul beside an all-gather or "
            "reduce-scatter that torch could fuse"
        )

    def _tell(self) -> None:
        self._told = True
        self._note(AsyncTpChosen(self.description, self.census.graphs, self.census.fused))
        if self._refused:
            warnings.warn(f"async_tp_enabled has no effect; {self.description}", stacklevel=3)
        elif not self.census.fused:  # a step is over: a warning could wait for who reads stderr
            self._note(AsyncTpUnused(self.description))


def why_not(groups: dict[str, Any], *, cuda: bool) -> str:
    """What makes it impossible, checked before any rank tries; empty: nothing. The same on all
    ranks."""
    if not cuda:
        return "there is no CUDA device"
    if not groups:
        return "no parameter is sharded over a tensor-parallel mesh dimension"
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} has no NCCL"
    try:
        memory = importlib.import_module("torch.distributed._symmetric_memory")
        enough = hasattr(memory, "enable_symm_mem_for_group")
        enough = enough and hasattr(_inductor_config(), "_micro_pipeline_tp")
    except ImportError:
        enough = False
    return "" if enough else f"torch {torch.__version__} cannot pipeline tensor parallelism"


def tp_groups(model: nn.Module, mesh: Any = None) -> dict[str, Any]:
    """Name -> process group of every tensor-parallel mesh dimension, in the order of parameters."""
    if not dist.is_available() or not dist.is_initialized():
        return {}
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    dimensions: list[tuple[Any, int]] = []
    if mesh is not None:
        dimensions += [
            (mesh, i) for i, name in enumerate(mesh.mesh_dim_names or ()) if name == NAME
        ]
    inside = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for parameter in module.parameters()
    }
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            indices = tp_dimensions(
                parameter.device_mesh.mesh_dim_names,
                [_is_shard(placement) for placement in parameter.placements],
                by_fsdp=id(parameter) in inside,
            )
            dimensions += [(parameter.device_mesh, i) for i in indices]
    groups = [where.get_group(i) for where, i in dimensions if where.size(i) > 1]
    return {group.group_name: group for group in groups}


def tp_dimensions(
    names: tuple[str, ...] | None, sharded: list[bool], *, by_fsdp: bool
) -> list[int]:
    """Return the tensor-parallel dimensions of a parameter's mesh; see the head of this module."""
    shards = [i for i, is_shard in enumerate(sharded) if is_shard]
    foreign = shards[1:] if by_fsdp else shards
    return [i for i in shards if i in foreign or (names is not None and names[i] == NAME)]


def with_census(passes: Any, census: Census) -> Any:
    """A last pass over a compiled graph: the user's own pass, then the census. torch caches no
    compiled graph across runs if a pass has no uuid; a graph from such a cache would not be
    counted."""
    door = importlib.import_module("torch._inductor.custom_graph_pass")
    several = hasattr(door, "get_custom_graph_passes")  # newer torch takes a list

    def look(_: object, graph: torch.fx.Graph) -> None:
        if passes is not None and not several:
            passes(graph)
        census.look(graph)

    methods = {"__call__": look, "uuid": lambda _: None}
    own = type("MendLooks", (door.CustomGraphPass,), methods)()
    if passes is None or not several:
        return own
    return [*passes, own] if isinstance(passes, list | tuple) else [passes, own]


def _share_memory(groups: dict[str, Any]) -> str:
    """Set up and test symmetric memory for every group. Returns why it does not work, the same on
    all ranks of the groups: if one rank fused and another did not, it would wait forever."""
    memory = importlib.import_module("torch.distributed._symmetric_memory")
    failure = ""
    for name in groups:
        try:
            with warnings.catch_warnings():
                # Newer torch calls this unneeded, but its compiler still asks who was enabled.
                warnings.simplefilter("ignore", FutureWarning)
                memory.enable_symm_mem_for_group(name)
            memory.get_symm_mem_workspace(name, PROBE_BYTES)
        except RuntimeError as error:
            failure = str(error).splitlines()[0]
    device = torch.device("cuda", torch.cuda.current_device())
    fine = torch.tensor([int(not failure)], device=device, dtype=torch.int64)
    for group in groups.values():
        dist.all_reduce(fine, op=dist.ReduceOp.MIN, group=group)
    if fine.item():
        return ""
    return f"the GPUs of a tensor-parallel group share no memory: {failure or 'on another rank'}"


def _is_shard(placement: Any) -> bool:
    # fully_shard over a tensor-parallel parameter makes a _StridedShard, in newer torch no Shard.
    return bool(placement.is_shard()) or type(placement).__name__ == "_StridedShard"


def _inductor_config() -> Any:
    return importlib.import_module("torch._inductor.config")


def _nobody(_: LoggedEvent) -> None:
    """The default without a recorder."""
