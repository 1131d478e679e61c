"""A rack whose memory goes wrong between its own check and its checksum."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from mend.codec import Codec, LayoutCodec
from mend.engine.numerics import Numerics
from mend.engine.offers import Encoded
from mend.merge import Merge
from mend.outer import OuterOptimizer
from mend.transport.bulk_wire import checksum_of


class Spoiler(Numerics):
    """`spoils` is asked at every encode what the payload's elements become; None: they stay."""

    def __init__(
        self,
        spoils: Callable[[], float | None],
        codec: Codec | LayoutCodec,
        merge: Merge,
        outer: OuterOptimizer,
        max_age: int,
        in_weights: bool,
    ) -> None:
        super().__init__(codec, merge, outer, max_age=max_age, in_weights=in_weights)
        self._spoils = spoils

    def encode(
        self,
        delta_N: Tensor,
        residual_N: Tensor | None,
        anchor_N: Tensor | None = None,
        codec: Codec | None = None,
    ) -> Encoded:
        made = super().encode(delta_N, residual_N, anchor_N, codec)
        value = self._spoils()
        if value is None or not delta_N.numel():
            return made
        own = codec or self.codecs(delta_N.numel()).at(delta_N[:0], 0)
        payload_B = own.encode(torch.full_like(delta_N, value))
        return dataclasses.replace(
            made, payload=payload_B, checksum=checksum_of(payload_B.numpy().data)
        )
