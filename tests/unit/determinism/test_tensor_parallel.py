"""What cannot be cut to equal bits is refused. Real ranks: tests/process/test_equal_bits.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from mend.determinism import ColumnParallel, RowParallel, enable, weight_digest
from mend.determinism.digests import same_bits
from mend.errors import NotDeterministic, UsageError


class Mesh:
    """Of three ranks, one of which is here."""

    ndim = 1

    def __init__(self, device_type: str = "cpu") -> None:
        self.device_type = device_type

    def size(self) -> int:
        return 3


@pytest.mark.parametrize("style", [ColumnParallel, RowParallel])
def test_one_rank_is_the_layer(mesh: DeviceMesh, style: type[ColumnParallel]) -> None:
    with enable(1, "shape"):
        layer, x = nn.Linear(16, 8), torch.randn(3, 5, 16)
        before, expected = weight_digest(layer), layer(x)
        cut = parallelize_module(layer, mesh, style())
        assert weight_digest(cut) == before
        assert same_bits(cut(x), expected)
        with pytest.raises(NotDeterministic, match="second derivative"):
            torch.autograd.grad(cut(x.requires_grad_()).sum(), x, create_graph=True)


def test_outside_of_level_shape_it_is_refused(mesh: DeviceMesh) -> None:
    cut = parallelize_module(nn.Linear(16, 8), mesh, RowParallel())
    with pytest.raises(UsageError, match="level"):
        cut(torch.randn(3, 16))


def test_another_module_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(UsageError, match="not Embedding"):
        parallelize_module(nn.Embedding(4, 4), mesh, RowParallel())


@pytest.mark.parametrize(("inputs", "style"), [(24, RowParallel), (9, RowParallel)])
def test_ranks_that_cannot_share_the_leaves_are_refused(
    inputs: int, style: type[RowParallel]
) -> None:
    with pytest.raises(NotDeterministic, match="3 ranks cannot share"):
        style()._apply(nn.Linear(inputs, 8), Mesh())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outputs", "fused", "named"),
    [(95, 1, "95 features on 3 GPUs"), (24, 2, "24 features of 2 fused")],
)
def test_gpus_that_cannot_share_aligned_features_are_refused(
    outputs: int, fused: int, named: str
) -> None:
    mesh: Any = Mesh("cuda")
    with pytest.raises(NotDeterministic, match=named):
        ColumnParallel(fused=fused)._apply(nn.Linear(8, outputs), mesh)
