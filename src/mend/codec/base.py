"""One flat fp32 vector <-> bytes. Runs on workers. Touches tensors; uses no peers, clocks or files.

Legend: N elements of a rank's part of a fragment, B payload bytes, S elements of a codec's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from mend.errors import WireError
from mend.types import Owned

Feedback = Literal["buffer", "weights"]


class Codec(Protocol):
    """Encodes and decodes offers. Several threads share an instance, so it holds no scratch memory.
    Equal elements give equal bytes, and equal bytes give equal elements, on every machine and with
    any number of threads, because every rack merges what `decode` returns, including the sender of
    the bytes."""

    name: str
    exact: bool
    """Whether `decode` returns every encoded bit; then there is no residual."""
    feedback: Feedback
    """Where a rack keeps what the codec left out of an offer that was merged: in a buffer that is
    added to its next offer, or in its own weights, whose next offer then holds it by itself. The
    latter is for codecs that send a small part of a delta. A payload of such a codec has an even
    number of bytes (see codec.closing)."""
    block: int
    """Elements that are encoded together. A vector that is cut at multiples of `block` and encoded
    part by part gives the same bytes, concatenated. 0: only the whole vector can be encoded."""

    def payload_bytes(self, numel: int) -> int:
        """B for N = numel elements; the limit of B for a codec that is `Varying`."""

    def encode(self, x_N: Tensor) -> Tensor:
        """fp32 N -> uint8 B, contiguous on CPU. May alias x_N only where `exact`. Every element is
        a number below `NORM_MAX`."""

    def decode(self, payload_B: Tensor, start: int, stop: int, out: Tensor) -> Tensor:
        """Elements [start, stop) as fp32; into `out` (fp32, stop - start) or, where free, a view of
        the payload. Any range is allowed; one that is cut at multiples of `block` is fast. Both may
        be on one GPU, with equal bits. Raises WireError when the payload has no such elements."""


@runtime_checkable
class Varying(Protocol):
    """A codec whose payloads of N elements differ in size. Its offers carry the size."""

    def check(self, payload_B: Tensor, numel: int) -> None:
        """Raises WireError if `decode` could not read all N elements of this payload."""


class FragmentCodec(Protocol):
    """The codec of a rank's part of one fragment. Its state is a vector that follows the values of
    every anchor: it has that anchor's version, is in its digest, and travels with it to a rack
    that joins and into checkpoints."""

    @property
    def state_numel(self) -> int:
        """S; 0: it has no state."""

    @property
    def varies(self) -> bool:
        """Whether its codecs are `Varying`."""

    @property
    def payload_bytes(self) -> int:
        """Limit of a payload; a closing one (codec.closing) may be longer."""

    def first(self, state_S: Tensor) -> None:
        """Write the initial state of a run (fp32): equal bits on every rack."""

    def at(self, state_S: Tensor, version: int) -> Codec:
        """The codec of the anchor of this version: encodes offers against it, and decodes those of
        every base that a merge into the next version may still name."""

    def advance(
        self,
        payloads: Sequence[Tensor],
        weights: Sequence[float],
        state_S: Tensor,
        version: int,
        out_S: Tensor,
    ) -> None:
        """Write the state of `version` + 1, from that of `version` and what was merged into it,
        ascending by rack. Equal bits on every machine: the digest of the anchor covers them."""


@runtime_checkable
class LayoutCodec(Protocol):
    """A codec that needs to know which tensors a vector holds, or what was merged before."""

    name: str
    exact: bool
    feedback: Feedback

    def of(self, owned: Owned, staleness_max_rounds: int) -> FragmentCodec:
        """The codec for these elements. A merged offer may be `staleness_max_rounds` versions
        old."""


@dataclass(frozen=True, slots=True)
class Stateless:
    """The FragmentCodec of a `Codec`, which is the same for every fragment and version."""

    codec: Codec
    numel: int

    @property
    def state_numel(self) -> int:
        return 0

    @property
    def varies(self) -> bool:
        return isinstance(self.codec, Varying)

    @property
    def payload_bytes(self) -> int:
        return self.codec.payload_bytes(self.numel)

    def first(self, state_S: Tensor) -> None:
        """Nothing to write: there is no state."""

    def at(self, state_S: Tensor, version: int) -> Codec:
        return self.codec

    def advance(
        self,
        payloads: Sequence[Tensor],
        weights: Sequence[float],
        state_S: Tensor,
        version: int,
        out_S: Tensor,
    ) -> None:
        """Nothing to write: there is no state."""


def check_row(payload_B: Tensor) -> None:
    """Raises WireError for a tensor that cannot be a payload."""
    if payload_B.dtype != torch.uint8 or payload_B.dim() != 1 or not payload_B.is_contiguous():
        raise WireError(
            f"a payload is one row of uint8, got {payload_B.dtype} {tuple(payload_B.shape)}"
        )
