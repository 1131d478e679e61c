"""Fp32 as it is, or rounded to bfloat16. Runs on workers. Touches tensors; never peers, clocks,
files.

Legend: N elements of a rank's part of a fragment, B payload bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mend.codec.base import Feedback, check_row
from mend.codec.blocks import strip_numel
from mend.errors import WireError


def _window(payload_B: Tensor, start: int, stop: int, element: torch.dtype) -> Tensor:
    """Elements [start, stop) of the payload as a view of type `element`. Raises WireError when they
    do not fit."""
    size = element.itemsize
    check_row(payload_B)
    if payload_B.numel() % size or not 0 <= start <= stop <= payload_B.numel() // size:
        raise WireError(
            f"elements [{start}, {stop}) of {size} bytes each are not in {payload_B.numel()} bytes"
        )
    return payload_B[start * size : stop * size].view(element)


class RawFloat32:
    """The delta itself. Nothing is lost, so there is no residual; encoding copies nothing."""

    name = "float32"
    exact = True
    feedback: Feedback = "buffer"
    block = 0  # there is no work to share

    def payload_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, x_N: Tensor) -> Tensor:
        if x_N.numel() == 0:  # may have any stride, which a view refuses
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return x_N.contiguous().view(torch.uint8)

    def decode(self, payload_B: Tensor, start: int, stop: int, out: Tensor) -> Tensor:
        return _window(payload_B, start, stop, torch.float32)


class RawBfloat16:
    """Half the bytes: rounded to nearest, ties to even. Relative error <= 2**-8 (normal
    numbers)."""

    name = "bfloat16"
    exact = False
    feedback: Feedback = "buffer"
    block = 1
    compiled = "bfloat16"
    """mend.kernels makes its offers; torch encodes and decodes in one pass."""

    def payload_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, x_N: Tensor) -> Tensor:
        half_N, step = torch.empty(x_N.numel(), dtype=torch.bfloat16, device="cpu"), strip_numel()
        for start in range(0, x_N.numel(), step):
            half_N[start : start + step].copy_(x_N[start : start + step])
        return half_N.view(torch.uint8)

    def decode(self, payload_B: Tensor, start: int, stop: int, out: Tensor) -> Tensor:
        return out.copy_(_window(payload_B, start, stop, torch.bfloat16))
