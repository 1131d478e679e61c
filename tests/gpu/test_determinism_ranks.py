"""Level shape on two GPUs: ranks that share a batch have the bits of one GPU.

torchrun --nproc-per-node 2 -m pytest tests/gpu/test_determinism_ranks.py -q
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks._determinism_models import Gpt, Llama, loss_in_bf16
from mend.determinism import DeterministicTrainer, ddp_hook, enable, fix_fsdp
from mend.determinism.enabling import PINNED
from mend.errors import NotDeterministic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        int(os.environ.get("WORLD_SIZE", "1")) != 2 or torch.cuda.device_count() < 2,
        reason="needs torchrun --nproc-per-node 2 on two GPUs",
    ),
    pytest.mark.filterwarnings("default"),  # what NCCL warns of is its own
]
SEED, ROWS, TOKENS, WORDS, STEPS = 7, 8, 128, 512, 3


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    os.environ.update(PINNED)  # before CUDA and NCCL start
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    yield
    dist.destroy_process_group()


def share(batch: Tensor, microbatches: int) -> Tensor:
    """This rank's rows: of every microbatch its neighbours, in rank order."""
    parts = batch.chunk(microbatches * dist.get_world_size())
    return torch.cat(parts[dist.get_rank() :: dist.get_world_size()])


def trained(how: str, microbatches: int = 1, leaf_rows: int = 1) -> tuple[str, list[float]]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, WORDS, (STEPS, ROWS, TOKENS + 1), generator=generator).cuda()
    with enable(SEED, level="shape", leaf_rows=leaf_rows):
        torch.manual_seed(0)
        model: nn.Module = Llama(WORDS, 256, 2, 4, 2, 512, dropout=0.1).cuda()
        if how == "ddp":
            model = DistributedDataParallel(model)
            model.register_comm_hook(None, ddp_hook)
        elif how == "fsdp":
            for block in model.blocks:  # type: ignore[union-attr]
                fully_shard(block)
            fully_shard(model)
            fix_fsdp(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        trainer = DeterministicTrainer(
            model, optimizer, SEED, level="shape", microbatches=microbatches, grad_norm_max=0.5,
            group=None if how == "alone" else dist.group.WORLD,
        )  # fmt: skip
        losses = [
            trainer.step(
                batch if how == "alone" else share(batch, microbatches), loss_in_bf16
            ).item()
            for batch in drawn
        ]
        return trainer.digest(), losses


@pytest.mark.parametrize(
    ("how", "microbatches"), [("ddp", 1), ("ddp", 4), ("fsdp", 1), ("fsdp", 2)]
)
def test_two_ranks_have_the_bits_of_one(how: str, microbatches: int) -> None:
    assert trained(how, microbatches) == trained("alone")


def test_two_ranks_have_the_bits_of_one_in_leaves_of_two_rows() -> None:
    assert trained("ddp", 2, leaf_rows=2) == trained("alone", leaf_rows=2)


def test_a_tied_weight_is_refused_on_two_ranks() -> None:
    with enable(SEED, level="shape"):
        model = Gpt(WORDS, 128, 1, 2, TOKENS).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        trainer = DeterministicTrainer(
            model, optimizer, SEED, level="shape", group=dist.group.WORLD
        )
        with pytest.raises(NotDeterministic, match="used twice, or on GPUs are not in fp32"):
            trainer.step(torch.zeros(2, 9, dtype=torch.long, device="cuda"), loss_in_bf16)
