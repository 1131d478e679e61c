"""Assembles the tensors of the model from the parts of a rack's ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from mend.errors import WireError
from mend.status.follow_messages import Part, Parts, Piece

Shape = tuple[int, ...]
_Box = tuple[Shape, Shape]


class Puzzle:
    """The places of the parts of all ranks. Raises WireError if they do not make up the model."""

    def __init__(self, ranks: Sequence[Parts]) -> None:
        self.ranks = len(ranks)
        self.fragments = {part.fragment: part.moving for part in ranks[0].parts}
        """Fragment -> whether it is of running statistics."""
        self._parts: dict[tuple[int, int], Part] = {}
        for rank, parts in enumerate(ranks):
            if (parts.rank, parts.ranks) != (rank, len(ranks)):
                raise WireError(f"a layout of rank {parts.rank} of {parts.ranks}, not of {rank}")
            self._parts |= {(part.fragment, rank): part for part in parts.parts}
        self.numels = {
            key: sum(_numel(p) for p in part.pieces) for key, part in self._parts.items()
        }
        """By (fragment, rank): elements of its part."""
        for fragment in self.fragments:
            self._check(fragment)

    def number(self, versions: Sequence[int]) -> int:
        """Commits of weights up to these versions."""
        return sum(versions[p] for p, moving in self.fragments.items() if not moving)

    def _check(self, fragment: int) -> None:
        """Raise WireError unless every element of every tensor is owned once."""
        for pieces in self._of_each_tensor(fragment).values():
            first, boxes = pieces[0], defaultdict[_Box, list[Piece]](list)
            for piece in pieces:
                if (piece.shape, piece.dtype) != (first.shape, first.dtype) or not _fits(piece):
                    raise WireError(f"ranks differ in the place of {first.name}")
                boxes[piece.box, piece.at].append(piece)
            for found in boxes.values():
                spans = sorted((p.start, p.stop) for p in found if p.start < p.stop)
                ends = [0, *(stop for _, stop in spans)]
                if [start for start, _ in spans] != ends[:-1] or ends[-1] != prod(found[0].box):
                    raise WireError(f"a part of {first.name} is owned by no rank, or by several")
            full = [each for each in boxes if prod(each[0])]
            if sum(prod(box) for box, _ in full) != prod(first.shape) or not _are_cells(
                first.shape, full
            ):
                raise WireError(f"the ranks of a rack do not hold all of {first.name}")

    def _of_each_tensor(self, fragment: int) -> dict[str, list[Piece]]:
        found = defaultdict[str, list[Piece]](list)
        for rank in range(self.ranks):
            part = self._parts.get((fragment, rank))
            if part is None:
                raise WireError(f"rank {rank} has no layout of fragment {fragment}")
            for piece in part.pieces:
                found[piece.name].append(piece)
        return found

    def tensors(self, fragment: int, vectors: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """The tensors of a fragment, in the types of the model, from the vectors (fp32) of its
        ranks. They do not share memory with these."""
        boxes: dict[tuple[str, Shape, Shape], Tensor] = {}
        kinds: dict[str, Piece] = {}
        for rank, vector_N in vectors.items():
            at = 0
            for piece in self._parts[fragment, rank].pieces:
                kinds[piece.name], place = piece, (piece.name, piece.box, piece.at)
                if place not in boxes:
                    boxes[place] = torch.empty(prod(piece.box), dtype=_type(piece), device="cpu")
                boxes[place][piece.start : piece.stop] = vector_N[at : at + _numel(piece)]
                at += _numel(piece)
        made: dict[str, Tensor] = {}
        for (name, box, offset), held_N in boxes.items():
            shape, held = kinds[name].shape, held_N.view(box)
            if box == shape:
                made[name] = held
                continue
            whole = made.setdefault(name, torch.empty(shape, dtype=held.dtype, device="cpu"))
            whole[tuple(slice(o, o + n) for o, n in zip(offset, box, strict=True))] = held
        return made


def _numel(piece: Piece) -> int:
    return piece.stop - piece.start


def _fits(piece: Piece) -> bool:
    """Whether the box lies in the tensor."""
    if not len(piece.shape) == len(piece.box) == len(piece.at):
        return False
    inside = zip(piece.at, piece.box, piece.shape, strict=True)
    return piece.start <= piece.stop and all(at + box <= whole for at, box, whole in inside)


def _are_cells(shape: Shape, boxes: Sequence[_Box]) -> bool:
    """Whether the boxes are distinct cells of one grid over the tensor, so they do not overlap."""
    for axis, whole in enumerate(shape):
        starts = sorted({at[axis] for _, at in boxes})
        ends = dict(zip(starts, [*starts[1:], whole], strict=True)) if starts else {}
        if any(at[axis] + box[axis] != ends[at[axis]] for box, at in boxes):
            return False
    return len({at for _, at in boxes}) == len(boxes)


def _type(piece: Piece) -> torch.dtype:
    found = getattr(torch, piece.dtype, None)
    if not isinstance(found, torch.dtype):
        raise WireError(f"{piece.name} is of type {piece.dtype!r}, which torch does not have")
    return found
