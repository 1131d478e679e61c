"""fragment.view: a fragment of the live model as one flat fp32 vector. Runs on the training thread,
between steps.

Legend: N elements of the span.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from mend.terms import Layout, Span

Pieces = list[tuple[Tensor, slice]]
"""Elements of a span (fp32, n), and which of the span they are."""


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


class FragmentView:
    """Reads and writes spans of a fragment. Elements of a tensor count in row-major order, however
    it is stored."""

    def __init__(self, layout: Layout, parameters: Sequence[nn.Parameter]) -> None:
        """`parameters` are those of `layout.slots`, in that order."""
        for slot, parameter in zip(layout.slots, parameters, strict=True):
            assert tuple(parameter.shape) == slot.shape, (
                f"{slot.name}: {tuple(parameter.shape)} != {slot.shape}"
            )
        self.layout = layout
        self._parameters = tuple(parameters)

    @torch.no_grad()
    def read(self, span: Span, out: Tensor) -> None:
        """Copy the span's elements to `out` (fp32 N, CPU)."""
        self._check(span, out)
        for parameter, inner, outer in self._pieces(span):
            # reshape is a view of a contiguous parameter and a copy of any other
            out[outer].copy_(parameter.detach().reshape(-1)[inner])

    @torch.no_grad()
    def write(self, span: Span, values_N: Tensor) -> None:
        """Round the values (fp32 N, CPU) to each parameter's type, in place; elements outside the
        span stay."""
        self._check(span, values_N)
        for parameter, inner, outer in self._pieces(span):
            live = parameter.detach()
            if live.is_contiguous():
                live.view(-1)[inner].copy_(values_N[outer])
            else:
                flat = live.reshape(-1)
                flat[inner].copy_(values_N[outer])
                live.copy_(flat.view(live.shape))

    @torch.no_grad()
    def in_place(self, span: Span) -> Pieces | None:
        """The span's elements themselves, where all of them lie as fp32 on the CPU in their order.
        None: only `read` and `write` get at them."""
        pieces = [(p.detach(), inner, outer) for p, inner, outer in self._pieces(span)]
        if all(
            live.dtype == torch.float32 and live.device.type == "cpu" and live.is_contiguous()
            for live, _, _ in pieces
        ):
            return [(live.view(-1)[inner], outer) for live, inner, outer in pieces]
        return None

    def _pieces(self, span: Span) -> Iterator[tuple[nn.Parameter, slice, slice]]:
        """(parameter, its elements, the span's elements) of every overlap of the span with a
        tensor."""
        for slot, parameter in zip(self.layout.slots, self._parameters, strict=True):
            start, stop = max(span.start, slot.offset), min(span.stop, slot.offset + slot.numel)
            if start < stop:
                yield (
                    parameter,
                    slice(start - slot.offset, stop - slot.offset),
                    slice(start - span.start, stop - span.start),
                )

    def _check(self, span: Span, vector_N: Tensor) -> None:
        assert 0 <= span.start <= span.stop <= self.layout.numel, (
            f"{span=} of {self.layout.numel} elements"
        )
        found = (tuple(vector_N.shape), vector_N.dtype)
        assert found == ((span.numel,), torch.float32), f"{span=} with a vector {found}"
