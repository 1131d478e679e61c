"""Shares of tokens: one rank is the module, and what cannot be shared is refused. Several ranks:
tests/process/test_equal_bits.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from mend.determinism import (
    ColumnParallel,
    GatherTokens,
    RowParallel,
    SequenceParallel,
    SplitTokens,
    enable,
    sequences,
)
from mend.determinism.digests import same_bits
from mend.errors import UsageError
from tests.unit.determinism.numbers import noise

MODULES = {
    "rms norm": (lambda: nn.RMSNorm(16), SequenceParallel()),
    "layer norm": (lambda: nn.LayerNorm(16), SequenceParallel()),
    "split": (lambda: nn.Linear(16, 16), SplitTokens()),
    "gather": (lambda: nn.Linear(16, 16), GatherTokens()),
    "columns": (lambda: nn.Linear(16, 16), ColumnParallel(tokens_cut=True)),
    "fused columns": (lambda: nn.Linear(16, 16), ColumnParallel(fused=2, tokens_cut=True)),
    "rows": (lambda: nn.Linear(16, 16), RowParallel(tokens_cut=True)),
}


@pytest.mark.parametrize("name", MODULES)
def test_one_rank_is_the_module(mesh: DeviceMesh, name: str) -> None:
    make, style = MODULES[name]
    with enable(1, "shape"):
        torch.manual_seed(2)
        plain = make()
        torch.manual_seed(2)
        cut = parallelize_module(make(), mesh, style)
        found = []
        for module in (plain, cut):
            x = noise(3, 5, 16).requires_grad_()
            out = module(x)
            (out * noise(3, 5, 16, seed=4)).sum().backward()
            found.append([out, x.grad, *(each.grad for each in module.parameters())])
        for one, other in zip(*found, strict=True):
            whole = getattr(other, "full_tensor", lambda other=other: other)()
            assert same_bits(one, whole)


def test_dropout_counts_by_the_token(mesh: DeviceMesh) -> None:
    with enable(1, "shape"):
        cut = parallelize_module(nn.Dropout(0.5), mesh, SequenceParallel())
        x = torch.ones(2, 4, 8)
        torch.manual_seed(3)
        mine = cut(x)
        torch.manual_seed(3)
        assert same_bits(mine, nn.functional.dropout(x, 0.5))


def test_unsupported_module_or_input_of_sequence_parallel_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(UsageError, match="knows RMSNorm, LayerNorm, Dropout, not Linear"):
        parallelize_module(nn.Linear(2, 2), mesh, SequenceParallel())
    norm = parallelize_module(nn.RMSNorm(16), mesh, SequenceParallel())
    style: ParallelStyle = RowParallel(tokens_cut=True)
    rows = parallelize_module(nn.Linear(16, 16), mesh, style)
    with pytest.raises(UsageError, match="under enable"):
        norm(noise(2, 3, 16))
    with enable(1, "shape"):
        for module in (norm, rows):
            with pytest.raises(UsageError, match="rows, tokens, features"):
                module(noise(3, 16))
        with sequences([2, 1]), pytest.raises(UsageError, match="packed sequences"):
            norm(noise(1, 3, 16))
