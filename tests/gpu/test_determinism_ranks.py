"""Level shape on several GPUs: ranks that share a batch, a layer or both have the bits of one GPU.
Where there are fewer GPUs, ranks share them, over gloo.

torchrun --nproc-per-node 2 -m pytest tests/gpu/test_determinism_ranks.py -q
torchrun --nproc-per-node 4 -m pytest tests/gpu/test_determinism_ranks.py -q
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from benchmarks._determinism_models import Gpt, Llama, loss_in_bf16
from mend.determinism import (
    ColumnParallel,
    DeterministicTrainer,
    RowParallel,
    SequenceParallel,
    SplitTokens,
    cross_entropy,
    ddp_hook,
    enable,
    fix_fsdp,
)
from mend.determinism.enabling import PINNED
from mend.determinism.sharding import whole_tensor
from mend.errors import NotDeterministic
from tests.gpu.sharing import host_collectives

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        RANKS not in (2, 4) or not torch.cuda.is_available(),
        reason="needs torchrun --nproc-per-node 2 or 4, and a GPU",
    ),
    pytest.mark.filterwarnings("default"),  # what NCCL warns of is its own
]
SEED, ROWS, TOKENS, WORDS, STEPS = 7, 8, 128, 512, 3
SHARED = torch.cuda.device_count() < RANKS
KINDS = ("ddp", "fsdp", "tp", "sp", "tp x fsdp")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    os.environ.update(PINNED)  # before CUDA and NCCL start
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo" if SHARED else "nccl")
    with pytest.MonkeyPatch.context() as patch:
        if SHARED:
            for module, name, function in host_collectives():
                patch.setattr(module, name, function)
        yield
    dist.destroy_process_group()


def share(batch: Tensor, microbatches: int, group: Any) -> Tensor:
    """This rank's rows: of every microbatch its neighbours, in rank order."""
    if group is None:
        return batch
    parts = batch.chunk(microbatches * dist.get_world_size(group))
    return torch.cat(parts[dist.get_rank(group) :: dist.get_world_size(group)])


def cut_layers(model: nn.Module, mesh: DeviceMesh, tokens_cut: bool) -> None:
    """`tokens_cut`: also the tokens between the layers, and the vocabulary."""
    columns = partial(ColumnParallel, tokens_cut=tokens_cut)
    plan: dict[str, ParallelStyle] = {
        f"blocks.*.{name}": columns() for name in ("query", "key", "value")
    }
    plan["blocks.*.gate_up"] = columns(fused=2)
    plan |= {f"blocks.*.{name}": RowParallel(tokens_cut=tokens_cut) for name in ("out", "down")}
    if tokens_cut:
        plan |= {"words": SplitTokens(), "norm": SequenceParallel(), "head": columns()}
        plan |= {
            f"blocks.*.{name}": SequenceParallel() for name in ("norm_in", "norm_mid", "dropout")
        }
    parallelize_module(model, mesh, plan)


def shard(model: Any, mesh: DeviceMesh | None = None) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fix_fsdp(model)


def wrapped(model: nn.Module, how: str) -> tuple[nn.Module, Any]:
    """The model as `how` cuts it, and the ranks that share the batch."""
    if how == "ddp":
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, ddp_hook)
        return model, dist.group.WORLD
    if how == "fsdp":
        shard(model)
        return model, dist.group.WORLD
    if how in ("tp", "sp"):
        cut_layers(model, init_device_mesh("cuda", (RANKS,)), how == "sp")
    if how == "tp x fsdp":
        mesh = init_device_mesh("cuda", (RANKS // 2, 2), mesh_dim_names=("dp", "tp"))
        cut_layers(model, mesh["tp"], False)
        shard(model, mesh["dp"])
        return model, mesh["dp"].get_group()
    return model, None


def loss_over_words(model: nn.Module, words_BT: Tensor) -> Tensor:
    """loss_in_bf16() where every rank has its share of the vocabulary."""
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(words_BT[:, :-1])
        return cross_entropy(logits.flatten(0, 1), words_BT[:, 1:].flatten())


@cache
def trained(
    how: str, microbatches: int = 1, leaf_rows: int = 1, tokens: int = TOKENS, ckpt: bool = False
) -> tuple[str, tuple[float, ...]]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, WORDS, (STEPS, ROWS, tokens + 1), generator=generator).cuda()
    with enable(SEED, level="shape", leaf_rows=leaf_rows):
        torch.manual_seed(0)
        plain = Llama(WORDS, 256, 2, 8, 4, 512, dropout=0.1, checkpointed=ckpt).cuda()
        model, group = wrapped(plain, how)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        trainer = DeterministicTrainer(
            model, optimizer, SEED, level="shape", microbatches=microbatches, grad_norm_max=0.5,
            group=group,
        )  # fmt: skip
        loss_fn = loss_over_words if how == "sp" else loss_in_bf16
        losses = tuple(
            trainer.step(share(batch, microbatches, group), loss_fn).item() for batch in drawn
        )
        return trainer.digest(), losses


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("how", KINDS)
def test_ranks_have_the_bits_of_one(how: str, microbatches: int) -> None:
    if SHARED and "fsdp" in how:
        pytest.skip("FSDP2 needs a GPU for each rank")
    if how == "tp x fsdp" and RANKS < 4:
        pytest.skip("two ranks for each of two dimensions")
    assert trained(how, microbatches) == trained("alone")


@pytest.mark.parametrize("how", ["ddp", "tp", "sp"])
def test_ranks_have_the_bits_of_one_in_leaves_of_two_rows(how: str) -> None:
    found = trained(how, 1, leaf_rows=2)
    assert found == trained("alone", leaf_rows=2)
    assert found != trained("alone")


def test_checkpointing_changes_nothing_where_layers_are_cut() -> None:
    assert trained("sp", 2, ckpt=True) == trained("alone")


def test_tokens_that_ranks_cannot_share_equally_are_padded() -> None:
    """8 x 101 tokens in 8 microbatches: one more than a multiple of 2 and 4."""
    assert trained("tp", 8, tokens=101)[0] == trained("alone", tokens=101)[0]


def test_cut_layers_with_biases_have_the_bits_of_whole_ones() -> None:
    def made(is_cut: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 128)).cuda()
        x = torch.randn(3, 37, 256).cuda().requires_grad_()
        if is_cut:
            mesh = init_device_mesh("cuda", (RANKS,))
            parallelize_module(model, mesh, {"0": ColumnParallel(), "2": RowParallel()})
        with torch.autocast("cuda", torch.bfloat16):
            out = model(x)
        found = torch.autograd.grad(out.float().square().sum(), (x, *model.parameters()))
        return [out, *(whole_tensor(each) for each in found)]

    with enable(SEED, level="shape"):
        for one, other in zip(made(False), made(True), strict=True):
            assert torch.equal(one, other)


def refuse_tied() -> None:
    model = Gpt(WORDS, 128, 1, 2, TOKENS).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = DeterministicTrainer(model, optimizer, SEED, level="shape", group=dist.group.WORLD)
    trainer.step(torch.zeros(4, 9, dtype=torch.long, device="cuda"), loss_in_bf16)


def refuse_narrow() -> None:
    layer = nn.Linear(64, 64).cuda().bfloat16()
    parallelize_module(layer, init_device_mesh("cuda", (RANKS,)), ColumnParallel())
    layer(torch.zeros(2, 3, 64, device="cuda", dtype=torch.bfloat16))


def refuse_few() -> None:
    mesh = init_device_mesh("cuda", (RANKS,))
    parallelize_module(nn.Linear(64, 4 * RANKS).cuda(), mesh, ColumnParallel())


@pytest.mark.parametrize(
    ("refused", "named"),
    [
        (refuse_tied, "used twice, or on GPUs are not in fp32"),
        (refuse_narrow, "weights in torch.bfloat16"),
        (refuse_few, "has a multiple of 8"),
    ],
)
def test_layer_without_a_fixed_order_is_refused_on_several_ranks(refused: Any, named: str) -> None:
    with enable(SEED, level="shape"), pytest.raises(NotDeterministic, match=named):
        refused()
