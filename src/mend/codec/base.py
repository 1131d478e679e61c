"""One flat fp32 vector <-> bytes. Runs on workers. Touches tensors; never peers, clocks, files.

Legend: N elements of a rank's part of a fragment, B payload bytes.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mend.errors import WireError


class Codec(Protocol):
    """How an offer travels. Several threads share one instance, so it holds no scratch memory.

    Equal elements give equal bytes, and equal bytes give equal elements, on every machine and with
    any number of threads: every rack merges what `decode` returns, the sender of the bytes too.
    """

    name: str
    exact: bool
    """Whether `decode` returns every bit of what was encoded; then nothing is left for the
    residual."""
    block: int
    """Elements that are encoded together. A vector that is cut at multiples of `block` and encoded
    part by part gives the same bytes, end to end. 0: only the whole vector can be encoded."""

    def payload_bytes(self, numel: int) -> int:
        """B for N = numel elements."""

    def encode(self, x_N: Tensor) -> Tensor:
        """fp32 N -> uint8 B, contiguous on CPU. May alias x_N only where `exact`. Every element is
        a number below `NORM_MAX`."""

    def decode(self, payload_B: Tensor, start: int, stop: int, out: Tensor) -> Tensor:
        """Elements [start, stop) as fp32; into `out` (fp32, stop - start) or, where free, a view of
        the payload. Any range is allowed; one that is cut at multiples of `block` is fast. Raises
        WireError when the payload has no such elements."""


def check_row(payload_B: Tensor) -> None:
    """Raises WireError for what can be no payload."""
    if payload_B.dtype != torch.uint8 or payload_B.dim() != 1 or not payload_B.is_contiguous():
        raise WireError(
            f"a payload is one row of uint8, got {payload_B.dtype} {tuple(payload_B.shape)}"
        )
