"""Closing offers: the last offer of a fragment is sent as fp32. Runs on workers. Touches tensors;
never peers, clocks, files.

With feedback in the weights, a rack's weights hold what its codec has left out of every offer so
far, and the merged model lacks it. The last offer of each fragment is sent as fp32 and brings all
of it at once. Its payload is the elements and one byte, 1. Only such a payload has an odd length,
so a reader can distinguish the two kinds by the payload alone.

Legend: N elements of a rank's part of a fragment, B payload bytes, S elements of a codec's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mend.codec.base import (
    Codec,
    Feedback,
    FragmentCodec,
    LayoutCodec,
    Stateless,
    Varying,
    check_row,
)
from mend.codec.raw import RawFloat32
from mend.errors import WireError
from mend.types import Owned

_MARK = 1
_FP32 = RawFloat32()


def _closes(payload_B: Tensor) -> bool:
    return payload_B.numel() % 2 == 1


class Closing:
    """Encodes closing offers."""

    name = "closing"
    exact = True
    feedback: Feedback = "weights"
    block = 0

    def payload_bytes(self, numel: int) -> int:
        return _FP32.payload_bytes(numel) + 1

    def encode(self, x_N: Tensor) -> Tensor:
        payload_B = torch.empty(self.payload_bytes(x_N.numel()), dtype=torch.uint8, device="cpu")
        payload_B[:-1].copy_(_FP32.encode(x_N))
        payload_B[-1] = _MARK
        return payload_B

    def check(self, payload_B: Tensor, numel: int) -> None:
        check_row(payload_B)
        if payload_B.numel() != self.payload_bytes(numel) or payload_B[-1] != _MARK:
            what = f"{payload_B.numel()} bytes are not a closing payload of {numel} elements"
            raise WireError(what)

    def decode(self, payload_B: Tensor, start: int, stop: int, out: Tensor) -> Tensor:
        return _FP32.decode(payload_B[:-1], start, stop, out)


CLOSING = Closing()


class EitherCodec:
    """Encodes like `codec`, and also decodes closing payloads."""

    def __init__(self, codec: Codec) -> None:
        self.codec, self.name, self.exact = codec, codec.name, codec.exact
        self.feedback, self.block = codec.feedback, codec.block
        self.compiled: str = getattr(codec, "compiled", "")

    def payload_bytes(self, numel: int) -> int:
        """Limit of what `encode` makes."""
        return self.codec.payload_bytes(numel)

    def encode(self, x_N: Tensor) -> Tensor:
        return self.codec.encode(x_N)

    def check(self, payload_B: Tensor, numel: int) -> None:
        if _closes(payload_B):
            CLOSING.check(payload_B, numel)
        elif isinstance(self.codec, Varying):
            self.codec.check(payload_B, numel)
        elif payload_B.numel() != self.codec.payload_bytes(numel):
            wanted = self.codec.payload_bytes(numel)
            raise WireError(f"{payload_B.numel()} bytes of {self.name}, {wanted} are needed")

    def decode(self, payload_B: Tensor, start: int, stop: int, out: Tensor) -> Tensor:
        codec = CLOSING if _closes(payload_B) else self.codec
        return codec.decode(payload_B, start, stop, out)


@dataclass(frozen=True, slots=True)
class Either:
    """The FragmentCodec of a codec with feedback in the weights."""

    codecs: FragmentCodec

    @property
    def state_numel(self) -> int:
        return self.codecs.state_numel

    @property
    def varies(self) -> bool:
        return True

    @property
    def payload_bytes(self) -> int:
        """Limit of all payloads except closing ones."""
        return self.codecs.payload_bytes

    def first(self, state_S: Tensor) -> None:
        self.codecs.first(state_S)

    def at(self, state_S: Tensor, version: int) -> Codec:
        return EitherCodec(self.codecs.at(state_S, version))

    def advance(
        self,
        payloads: Sequence[Tensor],
        weights: Sequence[float],
        state_S: Tensor,
        version: int,
        out_S: Tensor,
    ) -> None:
        """Closing offers do not change a codec's state."""
        pairs = zip(payloads, weights, strict=True)
        kept = [(payload, weight) for payload, weight in pairs if not _closes(payload)]
        payloads, weights = [payload for payload, _ in kept], [weight for _, weight in kept]
        self.codecs.advance(payloads, weights, state_S, version, out_S)


def fragment_codec(
    codec: Codec | LayoutCodec, owned: Owned, staleness_max_rounds: int
) -> FragmentCodec:
    """The codec of a rank's part of a fragment."""
    made: FragmentCodec
    if isinstance(codec, LayoutCodec):
        made = codec.of(owned, staleness_max_rounds)
    else:
        made = Stateless(codec, owned.numel)
    return Either(made) if codec.feedback == "weights" else made
