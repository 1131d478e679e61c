"""Any way of cutting tensors over the ranks of a rack: every element is owned once, and replicas
put theirs together again."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from mend.errors import ConfigError
from mend.fragment.shards import Holding, Shard, holding, put_together, take
from mend.types import Layout, Slot
from tests import golden

SHAPES = ((7, 3), (3,), (), (4, 2), (1, 5))


def layout() -> Layout:
    slots, offset = [], 0
    for number, shape in enumerate(SHAPES):
        slots.append(Slot(f"p{number}", shape, "float32", offset, prod(shape)))
        offset += prod(shape)
    return Layout(0, tuple(slots), offset)


def rows(shape: tuple[int, ...], parts: int, part: int) -> Shard:
    """Dimension 0 in chunks, as torch cuts it: the last ones may be short or empty."""
    if not shape:
        return Shard((), ())
    size = -(-shape[0] // parts)
    start = min(part * size, shape[0])
    stop = min(start + size, shape[0])
    return Shard((stop - start, *shape[1:]), (start, *([0] * (len(shape) - 1))))


def rack(ways: list[tuple[int, int]]) -> list[list[Shard]]:
    """boxes[rank][slot]; ways[slot] = (parts, copies), ranks = parts * copies, copies outermost."""
    ranks = ways[0][0] * ways[0][1]
    return [
        [rows(shape, parts, rank % parts) for shape, (parts, _) in zip(SHAPES, ways, strict=True)]
        for rank in range(ranks)
    ]


def vectors(boxes: list[list[Shard]], values: list[torch.Tensor]) -> list[torch.Tensor]:
    """What every rank holds."""
    found = []
    for mine in boxes:
        parts = []
        for box, whole in zip(mine, values, strict=True):
            cut = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            parts.append(whole[cut].reshape(-1))
        found.append(torch.cat(parts))
    return found


@given(
    ranks=st.sampled_from([1, 2, 4, 6]),
    data=st.data(),
)
def test_every_element_is_owned_once_and_comes_back_to_its_replicas(
    ranks: int, data: st.DataObject
) -> None:
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    ways = []
    for _ in SHAPES:
        parts = data.draw(st.sampled_from(divisors))
        ways.append((parts, ranks // parts))
    boxes, plan = rack(ways), layout()
    values = [torch.randn(shape) for shape in SHAPES]
    held = vectors(boxes, values)
    mine = [holding(plan, boxes, rank) for rank in range(ranks)]
    assert sum(h.owned.numel for h in mine) == plan.numel, "nothing is missing, nothing twice"
    slices = [owned_of(h, held_N) for h, held_N in zip(mine, held, strict=True)]

    def gather(team: tuple[int, ...], slots: tuple[int, ...]) -> list[torch.Tensor]:
        rubbish = torch.full((3,), float("nan"))
        return [torch.cat([take(slices[r], mine[r].owned, slots), rubbish]) for r in team]

    for rank in range(ranks):
        assert torch.equal(put_together(mine[rank], slices[rank], gather), held[rank])
    for one in mine:
        for team in one.teams:
            assert all(team in mine[other].teams for other in team), "they wait for each other"
            assert all(mine[other].teams[team] == one.teams[team] for other in team)


def owned_of(mine: Holding, held_N: torch.Tensor) -> torch.Tensor:
    parts, start = [], 0
    for span, numel in zip(mine.owned.spans, mine.local, strict=True):
        parts.append(held_N[start + span.start : start + span.stop])
        start += numel
    return torch.cat(parts)


def test_a_tensor_of_which_something_is_missing_is_refused() -> None:
    """For example sharded over a mesh that reaches into another rack."""
    boxes = rack([(4, 1)] * len(SHAPES))[:2]
    with golden.raises(ConfigError):
        holding(layout(), boxes, 0)
