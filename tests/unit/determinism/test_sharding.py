"""Shares are put together as they were cut, many by one collective. Real ranks:
tests/process/test_equal_bits.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from mend.determinism import sharding
from mend.determinism.digests import digest
from mend.determinism.sharding import Share, _pad, assemble, share_of, whole_of

RANKS = 4


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Of four ranks, one of which is here."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "dim", "fused"),
    [
        *[((8, 3), 0, 1), ((8,), 0, 1), ((3, 8), 1, 1), ((2, 8, 3), 1, 1)],
        *[((6, 3), 0, 1), ((2, 3), 0, 1), ((5,), 0, 1), ((3, 9), 1, 1), ((3, 2, 2), 1, 1)],
        *[((8, 3), 0, 2), ((16,), 0, 4)],
    ],
)
def test_the_whole_comes_back(
    group: dist.ProcessGroup, shape: tuple[int, ...], dim: int, fused: int
) -> None:
    """Also where ranks have unequal shares, or none, and of layers that are fused."""
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    pieces = [piece.chunk(RANKS, dim) for piece in whole.chunk(fused, dim)]
    parts = []
    for rank in range(RANKS):
        mine = [piece[rank] for piece in pieces if rank < len(piece)]
        local = torch.cat(mine, dim) if mine else whole.narrow(dim, 0, 0)
        parts.append(_pad(Share(local, whole.shape, dim, fused, group)))
    share = Share(parts[0], whole.shape, dim, fused, group)
    assert torch.equal(assemble(share, torch.stack(parts)), whole)


@pytest.mark.parametrize("shape", [(8, 3), (6, 3), (2, 3), (1, 3), (5, 2, 3), (3, 0)])
def test_sums_of_rows_come_back(group: dist.ProcessGroup, shape: tuple[int, ...]) -> None:
    """Also of a tensor with fewer rows than there are ranks."""
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    pieces, shares = whole.chunk(RANKS), []
    for rank in range(RANKS):
        local = pieces[rank] if rank < len(pieces) else whole.narrow(0, 0, 0)
        shares.append(Share(local, whole.shape, 0, 1, group).of_rows(local.sum(-1).reshape(-1)))
    found = assemble(shares[0], torch.stack([_pad(each) for each in shares]))
    assert torch.equal(found.reshape(-1), whole.sum(-1).reshape(-1))


PLACES: dict[Placement, bool] = {
    Shard(0): True, Shard(1): True, _StridedShard(0, split_factor=2): True,
    _StridedShard(1, split_factor=2): False, Replicate(): False,
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_placement_that_only_torch_can_assemble_has_no_share(
    group: dist.ProcessGroup, place: Placement
) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    tensor = DTensor.from_local(torch.ones(4, 4), mesh, [place])
    assert (share_of(tensor) is not None) == PLACES[place]
    two = DTensor.from_local(
        torch.ones(4, 4), init_device_mesh("cpu", (2, 2)), [place, Replicate()]
    )
    assert share_of(two) is None
    assert share_of(torch.ones(4)) is None


def test_few_collectives_gather_many_tensors(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = [torch.randn(3, 4), torch.randn(5), torch.randn(2, 2).double(), torch.randn(6, 2)]
    cut = [DTensor.from_local(each, mesh, [Shard(0)]) for each in plain]
    calls: list[Tensor] = []

    def counted(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        calls.append(tensor)
        return tensor

    monkeypatch.setattr(sharding, "all_gather", counted)
    shares = [share for each in cut if (share := share_of(each)) is not None]
    for whole, each in zip(whole_of(shares), plain, strict=True):
        assert torch.equal(whole, each)
    assert [len(each[0]) for each in calls] == [17, 4, 12], "one for each dtype in a row"
    calls.clear()
    monkeypatch.setattr(sharding, "ELEMENTS_MAX", 12)
    assert [tuple(each.shape) for each in whole_of(shares)] == [(3, 4), (5,), (2, 2), (6, 2)]
    assert [len(each[0]) for each in calls] == [12, 5, 4, 12]
    nested = {"a": plain, "b": [plain[0], 3]}
    assert digest({"a": cut, "b": [cut[0], 3]}) == digest(nested)
