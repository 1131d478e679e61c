"""Products have the bits of a library's, as all their sums are exact."""

from __future__ import annotations

import pytest
import torch

from mend.kernels import product_kernels


@pytest.mark.parametrize("rank", [1, 3, 4, 7, 8])
@pytest.mark.parametrize(("rows", "cols"), [(1, 9), (3, 5), (4, 64), (67, 131), (130, 66)])
def test_a_product_of_whole_numbers_is_exact(rank: int, rows: int, cols: int) -> None:
    pytest.importorskip("numba")
    kernels = product_kernels()
    assert kernels is not None
    random = torch.Generator().manual_seed(rank * rows)
    x_mn = torch.randn(rows, cols, generator=random)
    whole_mn = (x_mn * 2.0**20).round().double()
    assert not torch.equal(whole_mn, (x_mn * 2.0**20).double()), "there is something to round"
    right_rn, left_rm = (
        torch.randint(-(2**15), 2**15, (rank, length), generator=random).double() * 2.0**-15
        for length in (cols, rows)
    )
    found_rm = torch.full((rank, rows), torch.nan, dtype=torch.float64)
    kernels.right(x_mn.numpy(), right_rn.numpy(), 2.0**20, found_rm.numpy())
    assert torch.equal(found_rm, right_rn @ whole_mn.T)
    found_rn = torch.full((rank, cols), torch.nan, dtype=torch.float64)
    kernels.left(x_mn.numpy(), left_rm.numpy(), 2.0**20, found_rn.numpy())
    assert torch.equal(found_rn, left_rm @ whole_mn)
