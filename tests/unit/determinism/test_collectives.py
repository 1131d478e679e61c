"""Sums over ranks: what one process sees of them; real ranks in process/test_equal_bits.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

from mend.determinism import all_gather, all_reduce, collectives, fix_fsdp, reduce_scatter
from mend.errors import NotDeterministic, UsageError

pytestmark = pytest.mark.usefixtures("mesh")


@pytest.mark.parametrize("numel", [0, 7, collectives.SMALL_BYTES])
def test_one_rank_is_the_sum(numel: int) -> None:
    x = torch.arange(float(numel))[::2]
    expected = x.clone()
    all_reduce(x, mean=True)
    assert torch.equal(x, expected)
    assert torch.equal(all_gather(x), x)


def test_shares_must_fit() -> None:
    with pytest.raises(UsageError, match="7 elements are not 1 shares of 6"):
        reduce_scatter(torch.zeros(6), torch.zeros(7))


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(UsageError, match="fully_shard"):
        fix_fsdp(nn.Linear(2, 2))


def test_a_torch_that_takes_no_reduce_scatter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fsdp.FSDPModule, "set_custom_reduce_scatter")
    with pytest.raises(NotDeterministic, match="takes no reduce_scatter"):
        fix_fsdp(nn.Linear(2, 2))
    monkeypatch.setattr(collectives, "FSDPModule", None)
    with pytest.raises(NotDeterministic, match="takes no reduce_scatter"):
        fix_fsdp(nn.Linear(2, 2))


def test_an_operation_that_is_no_sum_is_refused() -> None:
    scatter, x = collectives.FixedReduceScatter(), torch.ones(4)
    out = scatter.allocate((4,), dtype=x.dtype, device=x.device)
    group = dist.group.WORLD
    assert group is not None
    scatter(out, x, group, dist.ReduceOp.AVG)
    assert torch.equal(out, x)
    with pytest.raises(NotDeterministic, match="MAX"):
        scatter(out, x, group, dist.ReduceOp.MAX)
