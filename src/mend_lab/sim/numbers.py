"""Numerics of a rack whose memory is corrupted between its own check and its checksum."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mend.codec import Codec
from mend.engine.compute.numerics import Numerics
from mend.engine.compute.offers import EncodedOffer, Read
from mend.transport.bulk_wire import checksum_of
from mend.transport.growth import Growth


class Spoiler(Numerics):
    """Calls `spoils` at every encode for the value of all elements of the payload; None: unchanged.
    `rules`, `options`: those of Numerics."""

    def __init__(self, spoils: Callable[[], float | None], *rules: Any, **options: Any) -> None:
        super().__init__(*rules, **options)
        self._spoils = spoils

    def encode(
        self,
        delta_N: Tensor,
        residual_N: Tensor | None,
        anchor_N: Tensor | None = None,
        codec: Codec | None = None,
        read: Read | None = None,
        grows: Callable[[Tensor], Growth] | None = None,
    ) -> EncodedOffer:
        made = super().encode(delta_N, residual_N, anchor_N, codec, read)
        value = self._spoils()
        if value is None or not delta_N.numel():
            return made
        own = codec or self._stateless(delta_N.numel())
        payload_B = own.encode(torch.full_like(delta_N, value))
        return dataclasses.replace(
            made, payload=payload_B, checksum=checksum_of(payload_B.numpy().data)
        )
