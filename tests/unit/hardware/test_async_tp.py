"""Asynchronous tensor parallelism says what it did, or why it did nothing; it never just says yes.

The groups are those of a fake world of four ranks in this process: their meshes and placements are
real, and nothing is sent. What torch's compiler makes of them on GPUs: tests/gpu/test_async_tp.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # defines the fused operations
from torch import nn
from torch._inductor import config as inductor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from mend.hardware.async_tp import AsyncTp, Census, tp_dimensions, tp_groups, why_not, with_census
from tests.noted import flat, pair


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))


def tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def graph(*operations: Any) -> torch.fx.Graph:
    made = torch.fx.Graph()
    shard = made.placeholder("shard")
    for operation in operations:
        shard = made.call_function(operation, (shard,))
    made.output(shard)
    return made


# ---------------------------------------------------------------------- which groups


@pytest.mark.parametrize("sharded", [False, True])
def test_dimension_that_shards_layers_is_found_by_what_it_does(world: None, sharded: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outside", "inside"))
    model = tensor_parallel(mlp(), mesh["inside"])
    if sharded:
        fully_shard(model, mesh=mesh["outside"])
    assert list(tp_groups(model)) == [mesh["inside"].get_group().group_name]


def test_a_dimension_that_fully_shard_made_is_not_tensor_parallel(world: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    plain = mlp()
    fully_shard(plain, mesh=mesh["shards"])
    assert tp_groups(plain) == {}
    hybrid = mlp()
    fully_shard(hybrid, mesh=mesh)
    assert tp_groups(hybrid) == {}


def test_a_mesh_that_is_given_counts_by_its_name(world: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert list(tp_groups(mlp(), mesh)) == [mesh["tp"].get_group().group_name]
    assert tp_groups(mlp(), mesh["dp"]) == {}


def test_a_dimension_of_one_rank_is_nobody_to_share_with(world: None) -> None:
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    assert tp_groups(tensor_parallel(mlp(), mesh["tp"]), mesh) == {}


def test_without_a_process_group_there_are_none() -> None:
    assert tp_groups(mlp()) == {}


@pytest.mark.parametrize(
    ("names", "sharded", "by_fsdp", "found"),
    [
        (None, [True], False, [0]), (None, [True], True, []), (None, [False, True], True, []),
        (None, [True, True], True, [1]), (None, [False, True, True], True, [2]),
        (("tp",), [True], True, [0]), (("tp",), [False], False, []),
    ],
)  # fmt: skip
def test_the_first_sharded_dimension_is_that_of_fully_shard(
    names: tuple[str, ...] | None, sharded: list[bool], by_fsdp: bool, found: list[int]
) -> None:
    assert tp_dimensions(names, sharded, by_fsdp=by_fsdp) == found


# ---------------------------------------------------------------------- why not


def test_every_reason_is_said() -> None:
    group = {"7": object()}
    assert "no CUDA" in why_not(group, cuda=False)
    assert "tensor-parallel mesh dimension" in why_not({}, cuda=True)


def test_a_torch_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert "has no NCCL" in why_not({"7": object()}, cuda=True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert why_not({"7": object()}, cuda=True) == ""
    monkeypatch.delattr(torch.distributed._symmetric_memory, "enable_symm_mem_for_group")
    assert "cannot pipeline" in why_not({"7": object()}, cuda=True)


def test_async_tp_that_is_not_enabled_says_off() -> None:
    tp = AsyncTp()
    tp.stepped()
    tp.close()
    assert tp.description == "off"


def test_asked_for_in_vain_it_warns_and_notes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    notes: list[tuple[str, dict[str, object]]] = []
    with pytest.warns(UserWarning, match="no effect; not active: there is no CUDA device"):
        tp = AsyncTp.enable(mlp(), note=lambda event: notes.append(pair(event)))
    tp.stepped()
    assert tp.description == "not active: there is no CUDA device"
    assert notes == [("async-tp", {"description": tp.description, "graphs": 0, "fused": 0})]
    assert inductor._micro_pipeline_tp is False


# ---------------------------------------------------------------------- what was found


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AsyncTp, list[object]]]:
    """As on GPUs that share memory; the compiler then works for whatever is compiled."""
    monkeypatch.setattr("mend.hardware.async_tp.why_not", lambda *_, **__: "")
    monkeypatch.setattr("mend.hardware.async_tp._share_memory", lambda _: "")
    notes: list[object] = []
    tp = AsyncTp.enable(mlp(), note=lambda event: notes.append(flat(event)))
    yield tp, notes
    tp.close()


def test_until_a_step_it_promises_nothing(switched_on: tuple[AsyncTp, list[object]]) -> None:
    tp, notes = switched_on
    assert (tp.description, notes) == ("not active: no step yet", [])
    assert inductor._micro_pipeline_tp is True


def test_async_tp_without_a_compiled_model_says_not_active(
    switched_on: tuple[AsyncTp, list[object]],
) -> None:
    tp, notes = switched_on
    tp.stepped()
    tp.stepped()
    assert tp.description.startswith("not active: nothing was compiled since mend_init")
    assert notes == [
        {"kind": "async-tp", "description": tp.description, "graphs": 0, "fused": 0},
        {"kind": "async-tp-in-vain", "description": tp.description},
    ], "in the log, not on stderr: training does not wait for who reads that"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler about itself
def test_the_compiler_shows_its_graphs_and_a_model_without_collectives_has_no_pattern(
    switched_on: tuple[AsyncTp, list[object]],
) -> None:
    tp, notes = switched_on
    model = torch.compile(mlp())
    model(torch.ones(2, 8)).sum().backward()
    assert tp.census.graphs >= 2
    tp.stepped()
    assert "no matmul beside an all-gather" in tp.description
    assert notes == [
        {"kind": "async-tp", "description": tp.description, "graphs": tp.census.graphs, "fused": 0},
        {"kind": "async-tp-in-vain", "description": tp.description},
    ]


def test_fused_operations_are_counted_by_what_they_are(
    switched_on: tuple[AsyncTp, list[object]],
) -> None:
    tp, notes = switched_on
    fused, aten = torch.ops.symm_mem, torch.ops.aten
    forward = graph(fused.fused_all_gather_matmul.default, aten.relu.default,
                    fused.fused_matmul_reduce_scatter.default)  # fmt: skip
    passes = inductor.post_grad_custom_post_pass
    for each in passes if isinstance(passes, list) else [passes]:
        each(forward)
        each(graph(fused.fused_all_gather_scaled_matmul.default, aten.mm.default))
    tp.stepped()
    assert tp.description == "on: 3 fused matmul-collectives"
    assert notes == [{"kind": "async-tp", "description": tp.description, "graphs": 2, "fused": 3}]


def test_the_users_own_pass_comes_first_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    census = Census()
    chained = with_census(seen.append, census)
    looked_at = graph(torch.ops.aten.relu.default)
    for each in chained if isinstance(chained, list) else [chained]:
        each(looked_at)
    assert seen == [looked_at]
    assert census == Census(graphs=1, fused=0)


def test_closing_puts_the_compiler_back(switched_on: tuple[AsyncTp, list[object]]) -> None:
    tp, _ = switched_on
    tp.close()
    tp.close()
    assert inductor._micro_pipeline_tp is False
    assert not inductor.post_grad_custom_post_pass
