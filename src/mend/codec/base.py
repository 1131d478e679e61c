"""One flat fp32 vector <-> bytes. Runs on workers. Touches tensors; never peers, clocks, files.

Legend: N elements of a rank's part of a fragment, B payload bytes.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Codec(Protocol):
    """How an offer travels. `exact` codecs leave no residual."""

    name: str
    exact: bool

    def payload_bytes(self, numel: int) -> int:
        """B for N = numel elements."""

    def encode(self, x_N: Tensor) -> Tensor:
        """fp32 N -> uint8 B, contiguous on CPU. May alias x_N (raw fp32 does)."""

    def decode(self, payload_B: Tensor, start: int, stop: int, out: Tensor) -> Tensor:
        """Elements [start, stop) as fp32; into `out` (fp32, stop - start) or, where free, a view of
        the payload."""
