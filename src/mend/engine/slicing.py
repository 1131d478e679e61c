"""Slices of sharded attempts: pulled, merged, served. Runs on the loop; a worker touches elements.

All merged slices of an attempt lie in one vector of this rank's part, each in its place: the own
one is merged into it and served from it, the others are pulled into it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mend.coordination import events as ev
from mend.engine.merging import said
from mend.engine.numerics import Numerics
from mend.errors import MendError
from mend.types import Extent, offer_key, slice_key

if TYPE_CHECKING:
    from mend.engine.concurrent_outer_step import ConcurrentOuterStep

_BYTES = torch.uint8

Key = tuple[int, int, int]
"""(fragment, version, attempt)"""


@dataclass
class Attempt:
    """`cuts`: where slice i begins, and the last one ends. `parts`: (rack, position) of own slices
    of its payload, until they are merged. `own`: positions of those that are."""

    merged_N: Tensor
    cuts: list[int]
    parts: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    own: list[int] = field(default_factory=list)

    def merged(self, position: int) -> Tensor:
        return self.merged_N[self.cuts[position] : self.cuts[position + 1]]


class Slicing:
    """Performs FetchSlice, MergeSlice and FreeSlices. `attempts`: those that are not freed."""

    def __init__(self, rank: ConcurrentOuterStep) -> None:
        self._rank = rank
        self.attempts: dict[Key, Attempt] = {}

    def perform(self, effect: ev.FetchSlice | ev.MergeSlice | ev.FreeSlices) -> None:
        match effect:
            case ev.FetchSlice():
                self._fetch(effect)
            case ev.MergeSlice():
                self._merge(effect)
            case ev.FreeSlices():
                self._free(effect)

    def _fetch(self, effect: ev.FetchSlice) -> None:
        rank, fragment, numerics = self._rank, effect.fragment, self._numerics(effect.fragment)
        key = (fragment, effect.version, effect.attempt)
        attempt = self._attempt(key, effect.count)
        own_rank = rank.me.rank
        if effect.seq:
            begin, end = _bytes(numerics, attempt, effect.position)
            part_B = numerics.buffers.empty(end - begin, _BYTES)
            extent = Extent(begin, numerics.payload_bytes(rank.owned[fragment]))
            at = offer_key(effect.member, own_rank, fragment, effect.seq)
        else:
            part_B = attempt.merged(effect.position).view(_BYTES)
            extent = Extent(0, part_B.numel())
            at = slice_key(own_rank, *key, effect.position)

        def done(error: Exception | None) -> None:
            if error is None and effect.seq:
                attempt.parts[effect.member.rack, effect.position] = part_B
            rack, size = effect.member.rack, part_B.numel()
            rank.tell(ev.SliceFetched(*key, rack, effect.seq, said(error), size))

        if part_B.numel():
            rank.host.fetch(effect.holders, at, "", part_B.numpy().data, done, extent)
        else:
            done(None)

    def _merge(self, effect: ev.MergeSlice) -> None:
        rank, numerics = self._rank, self._numerics(effect.fragment)
        key = (effect.fragment, effect.version, effect.attempt)
        attempt, position = self._attempt(key, effect.count), effect.position
        begin, end = _bytes(numerics, attempt, position)
        inputs = [
            rank.payloads[(member, effect.fragment, seq)][begin:end]
            if member == rank.member
            else attempt.parts.pop((member.rack, position))
            for member, seq in effect.members
        ]
        out_n = attempt.merged(position)

        def done(result: Exception | None) -> None:
            if isinstance(result, MendError):
                rank.tell(ev.SliceMerged(*key, said(result)))
            elif isinstance(result, Exception):
                rank.broken(result)
            else:
                if self.attempts.get(key) is attempt and out_n.numel():
                    view = out_n.view(_BYTES).numpy().data
                    rank.host.serve(slice_key(rank.me.rank, *key, position), view)
                    attempt.own.append(position)
                rank.tell(ev.SliceMerged(*key))

        rank.host.work(lambda: numerics.merge_slice(inputs, effect.weights, out_n), done)

    def _free(self, effect: ev.FreeSlices) -> None:
        key = (effect.fragment, effect.version, effect.attempt)
        attempt = self.attempts.pop(key, None)
        for position in attempt.own if attempt is not None else ():
            self._rank.host.drop(slice_key(self._rank.me.rank, *key, position))

    def merged(self, fragment: int, version: int, attempt: int) -> Tensor:
        """All slices of an attempt, which are here."""
        return self.attempts[fragment, version, attempt].merged_N

    def _attempt(self, key: Key, count: int) -> Attempt:
        if key not in self.attempts:
            owned, numerics = self._rank.owned[key[0]], self._numerics(key[0])
            cuts = numerics.cuts(owned, count)
            self.attempts[key] = Attempt(numerics.buffers.empty(owned.numel), cuts)
        return self.attempts[key]

    def _numerics(self, fragment: int) -> Numerics:
        return self._rank.numerics_of[fragment]


def _bytes(numerics: Numerics, attempt: Attempt, position: int) -> tuple[int, int]:
    """Where a slice lies in a payload."""
    return numerics.slice_bytes(attempt.cuts[position], attempt.cuts[position + 1])
