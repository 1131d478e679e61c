"""The kernel that hashes tensors on a GPU, beside torch's operators. Without a GPU in Triton's
interpreter, where Triton is installed:

    TRITON_INTERPRET=1 python -m pytest tests/unit/determinism/test_hash_kernels.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from mend.determinism import tensor_hashes
from mend.determinism.tensor_hashes import TensorHashes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

pytestmark = [
    pytest.mark.gpu if not INTERPRETED else pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def kernel() -> Any:
    return pytest.importorskip("mend.determinism.hash_kernels").chunk_sums


def by_torch(tensor: Tensor, rows: int) -> str:
    """By the definition, on the CPU."""
    hashes = TensorHashes(lambda tensor: True)
    pending = hashes.rows(tensor.cpu(), rows)
    hashes.fetch()
    return str(pending)


def test_kernel_makes_the_hashes_of_the_definition(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_hashes, "CHUNK_BYTES", 1 << 14)
    chance = torch.Generator().manual_seed(3)
    octets = torch.randint(0, 256, (1 << 16,), generator=chance, dtype=torch.uint8).to(DEVICE)
    sizes = (0, 1, 7, 8, 9, 8191, 8192, 8193, 1 << 14, (1 << 14) + 5, 1 << 16)
    asked = [(octets[:size], 1) for size in sizes]
    asked += [(octets[first : first + 4096], 1) for first in (1, 4, 8)]
    asked += [(octets[: 8 * 1023], 8), (octets[: 7 * 512], 7), (octets[: 3 * 17], 3)]
    hashes = TensorHashes(lambda tensor: True, kernel)
    pending = [hashes.rows(tensor, rows) for tensor, rows in asked]
    hashes.fetch()
    assert list(map(str, pending)) == [by_torch(*each) for each in asked]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs on the CPU")
def test_kernel_is_what_a_gpu_uses(kernel: Any) -> None:
    assert tensor_hashes._kernel_of(torch.device("cuda", 0)) is kernel
