"""Numbers for the tests of level shape."""

from __future__ import annotations

import torch
from torch import Tensor


def noise(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
