"""The part of a fragment of the live model that a rank owns, as one flat fp32 vector. Runs on the
training thread, between steps.

Legend: N elements of the vector.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mend.errors import ensure
from mend.fragment.parts import NO_ROWS, Rows
from mend.fragment.shards import local_of
from mend.types import Layout, Owned

Pieces = list[tuple[Tensor, slice]]
"""Elements of a vector (fp32, n), and which of the vector they are."""


def portions(pieces: Pieces, numel: int) -> list[Pieces]:
    """The same elements in the same order, in portions of `numel` elements; the last may be
    less."""
    found: list[Pieces] = []
    room = 0
    for elements_n, place in pieces:
        start = 0
        while start < elements_n.numel():
            if room == 0:
                found.append([])
                room = numel
            stop = min(start + room, elements_n.numel())
            found[-1].append(
                (elements_n[start:stop], slice(place.start + start, place.start + stop))
            )
            room -= stop - start
            start = stop
    return found


def between(pieces: Pieces, begin: int, end: int) -> Pieces:
    """The elements [begin, end) of the vector. `pieces`: in the order of the vector."""
    first = bisect_right(pieces, begin, key=lambda piece: piece[1].stop)
    found: Pieces = []
    for elements_n, place in pieces[first:]:
        if place.start >= end:
            break
        start, stop = max(place.start, begin), min(place.stop, end)
        found.append((elements_n[start - place.start : stop - place.start], slice(start, stop)))
    return found


class FragmentView:
    """Reads and writes what a rank owns of a fragment. Elements of a tensor count in row-major
    order of what the rank holds of it, however that is stored."""

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[Tensor],
        check: Callable[[], None] = lambda: None,
        rows: Mapping[str, Rows] = NO_ROWS,
    ) -> None:
        """`parameters` are those of `layout.slots`, in that order; a shard where it is a DTensor, a
        vector without elements where only other ranks of the rack hold it.

        `check` is called before every access, see `in_place.InPlace`. `rows`: by parameter, those
        of a part, where the rank holds more; then the part counts as all that the rank holds.
        """
        for slot, parameter in zip(layout.slots, parameters, strict=True):
            shape = tuple(parameter.shape)
            ensure(shape in (slot.shape, (0,)), "a tensor of another shape", slot=slot, shape=shape)
        self.layout = layout
        self._parameters, self._check_place = tuple(parameters), check
        self._rows = [rows.get(name) for name in self._names()]

    @torch.no_grad()
    def read(self, owned: Owned, out: Tensor) -> None:
        """Copy the owned elements to `out` (fp32 N)."""
        self._check(owned, out)
        for live, inner, outer in self.pieces(owned):
            # reshape is a view of a contiguous parameter and a copy of any other
            out[outer].copy_(live.reshape(-1)[inner])

    @torch.no_grad()
    def write(self, owned: Owned, values_N: Tensor) -> None:
        """Round the values (fp32 N) to each parameter's type, in place; elements that are not owned
        stay."""
        self._check(owned, values_N)
        for live, inner, outer in self.pieces(owned):
            if live.is_contiguous():
                live.view(-1)[inner].copy_(values_N[outer])
            else:
                flat = live.reshape(-1)
                flat[inner].copy_(values_N[outer])
                live.copy_(flat.view(live.shape))

    @torch.no_grad()
    def first_unequal(self, owned: Owned, values_N: Tensor) -> str:
        """The first tensor that is not the values (fp32 N) rounded to its type; empty: all are."""
        self._check(owned, values_N)
        places = pairwise(owned.cuts)
        rows = zip(self.layout.slots, owned.spans, places, self.held(), strict=True)
        for slot, span, place, held in rows:
            live_n = held.reshape(-1)[slice(*span)]
            if not torch.equal(live_n, values_N[slice(*place)].to(live_n)):
                return slot.name
        return ""

    @torch.no_grad()
    def in_place(self, owned: Owned) -> Pieces | None:
        """The owned elements themselves, where all of them lie as fp32 on the CPU in their order.
        None: only `read` and `write` get at them."""
        pieces = list(self.pieces(owned))
        if all(
            live.dtype == torch.float32 and live.device.type == "cpu" and live.is_contiguous()
            for live, _, _ in pieces
        ):
            return [(live.view(-1)[inner], outer) for live, inner, outer in pieces]
        return None

    def pieces(self, owned: Owned) -> Iterator[tuple[Tensor, slice, slice]]:
        """(what the rank holds of a tensor, its owned elements, their place in the vector) of every
        tensor the rank owns something of."""
        places = pairwise(owned.cuts)
        for span, place, held in zip(owned.spans, places, self.held(), strict=True):
            if span.numel:
                yield held, slice(*span), slice(*place)

    def held(self) -> list[Tensor]:
        """The elements that the rank holds of every tensor, sharing its memory.

        Shards are looked up each time, because FSDP2 may replace them.
        """
        self._check_place()
        return self._of_part([local_of(parameter) for parameter in self._parameters])

    def _of_part(self, held: list[Tensor]) -> list[Tensor]:
        """The rows of the part, where the rank holds more."""
        return [
            each if rows is None else each[rows.inside]
            for each, rows in zip(held, self._rows, strict=True)
        ]

    def _names(self) -> list[str]:
        """Names of the parameters."""
        return [slot.name for slot in self.layout.slots]

    def _check(self, owned: Owned, vector_N: Tensor) -> None:
        spans, tensors = len(owned.spans), len(self._parameters)
        ensure(spans == tensors, "not one span per tensor", spans=spans, tensors=tensors)
        for span, slot in zip(owned.spans, self.layout.slots, strict=True):
            inside = 0 <= span.start <= span.stop <= slot.numel
            ensure(inside, "a span beyond its tensor", slot=slot, span=span)
        found, wanted = (tuple(vector_N.shape), vector_N.dtype), ((owned.numel,), torch.float32)
        ensure(found == wanted, "no fp32 vector of what is owned", wanted=wanted, found=found)
