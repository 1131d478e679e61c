"""The parts of a rack's ranks make up the model, or are refused by the tensor's name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mend.errors import WireError
from mend.following.puzzle import Puzzle
from mend.status.follow_messages import Part, Parts, Piece

SHAPE = (5, 4)


def piece(box: tuple[int, int], at: tuple[int, int], start: int, stop: int) -> Piece:
    return Piece("w", "float32", SHAPE, box, at, start, stop)


def parts(*pieces: Piece) -> list[Parts]:
    return [Parts(k, len(pieces), (Part(0, (each,)),)) for k, each in enumerate(pieces)]


def taken(whole: Tensor, each: Piece) -> Tensor:
    (rows, columns), (top, left) = each.box, each.at
    box = whole[top : top + rows, left : left + columns]
    return box.reshape(-1)[each.start : each.stop]


@pytest.mark.parametrize(
    "pieces",
    [
        [piece((5, 4), (0, 0), 0, 20)],
        [piece((5, 4), (0, 0), 0, 7), piece((5, 4), (0, 0), 7, 20)],
        [piece((3, 4), (0, 0), 0, 12), piece((2, 4), (3, 0), 0, 8), piece((0, 4), (5, 0), 0, 0)],
        [piece((5, 2), (0, 0), 0, 10), piece((5, 2), (0, 2), 0, 10)],
        [
            piece((5, 2), (0, 0), 0, 5), piece((5, 2), (0, 0), 5, 10),
            piece((5, 2), (0, 2), 0, 5), piece((5, 2), (0, 2), 5, 10),
        ],
    ],
    ids=["one", "ddp", "uneven rows", "columns", "columns of replicas"],
)  # fmt: skip
def test_parts_give_the_tensor(pieces: list[Piece]) -> None:
    whole = torch.arange(20, dtype=torch.float32).view(SHAPE)
    puzzle = Puzzle(parts(*pieces))
    vectors = {rank: taken(whole, each) for rank, each in enumerate(pieces)}
    assert torch.equal(puzzle.tensors(0, vectors)["w"], whole)


@pytest.mark.parametrize(
    "pieces",
    [
        [piece((5, 4), (0, 0), 0, 19)],
        [piece((5, 4), (0, 0), 0, 8), piece((5, 4), (0, 0), 7, 20)],
        [piece((3, 4), (0, 0), 0, 12), piece((1, 4), (3, 0), 0, 4)],
        [piece((5, 4), (1, 0), 0, 20)],
        [piece((3, 4), (0, 0), 0, 12), piece((2, 4), (2, 0), 0, 8)],
        [piece((5, 4), (0, 0), 0, 20), piece((5, 4), (0, 0), 0, 20)],
    ],
    ids=["a hole", "an overlap", "rows missing", "outside", "boxes that overlap", "twice"],
)
def test_parts_that_do_not_fit_are_refused(pieces: list[Piece]) -> None:
    with pytest.raises(WireError, match="w"):
        Puzzle(parts(*pieces))


def test_layout_of_another_rank_is_refused() -> None:
    with pytest.raises(WireError, match="rank 0 of 2"):
        Puzzle(parts(piece((5, 4), (0, 0), 0, 7), piece((5, 4), (0, 0), 7, 20))[:1])
