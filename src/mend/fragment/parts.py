"""The parts that racks of different sizes exchange. Uses no peers, clocks or files.

Normally rank k of a rack exchanges with rank k of the others, which needs equal numbers of ranks.
Racks with different numbers of ranks exchange by parts instead. Each part has one owner in every
rack, and a rank owns one or several parts. Of a tensor whose rows are spread over ranks
(`fully_shard`), a part has the rows that all of its owners hold. Of any other tensor it has an
equal slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from mend.errors import ConfigError
from mend.fragment.shards import WHOLE, Shard, by_rows, mesh_ranks, placement_of, row_box, shard_of
from mend.types import RANKS_MAX


class Rows(NamedTuple):
    """The rows of a tensor that a part has."""

    box: Shard
    placement: str
    inside: slice
    """Their range among the rows that the rank holds."""


NO_ROWS: Mapping[str, Rows] = {}


@dataclass(frozen=True, slots=True)
class JobParts:
    """The parts of a job, the same on all racks. `sizes`: numbers of ranks, ascending, distinct.
    `owners`: per part, its owner in a rack of each of these sizes, ascending."""

    sizes: tuple[int, ...]
    owners: tuple[tuple[int, ...], ...]

    def hosts(self, ranks: int) -> tuple[int, ...]:
        """For each part, its owner in a rack of so many ranks."""
        at = self.sizes.index(ranks)
        return tuple(owner[at] for owner in self.owners)

    def box(self, shape: tuple[int, ...], part: int) -> Shard:
        """The rows of a tensor, spread over the ranks of each rack, that a part has."""
        boxes = [
            row_box(shape, size, rank)
            for size, rank in zip(self.sizes, self.owners[part], strict=True)
        ]
        first, last = _meet(boxes)
        return Shard((last - first, *shape[1:]), (first, *(0 for _ in shape[1:])))

    def placement(self, shape: tuple[int, ...]) -> str:
        """How a tensor is spread over the parts: as `fully_shard` does it, or with other cuts."""
        count = len(self.owners)
        boxes = [self.box(shape, part) for part in range(count)]
        as_usual = boxes == [row_box(shape, count, part) for part in range(count)]
        sizes = " and ".join(map(str, self.sizes))
        return by_rows(count) if as_usual else f"S(0) over {sizes} ranks"

    def rows(
        self, parameters: Iterable[tuple[str, Tensor]], ranks: int, part: int
    ) -> dict[str, Rows]:
        """By name, the rows that a part has of the tensors whose rows are spread. `ranks`: number
        of ranks of its rack."""
        found = {}
        for name, parameter in parameters:
            if placement_of(parameter) == WHOLE:
                continue
            shape = tuple(parameter.shape)
            box = self.box(shape, part)
            first = box.offset[0] - row_box(shape, ranks, self.hosts(ranks)[part]).offset[0]
            inside = slice(first, first + box.shape[0])
            found[name] = Rows(box, self.placement(shape), inside)
        return found


def cut_job(
    sizes: Sequence[int], parameters: Mapping[str, Tensor], members: Sequence[int], rank: int
) -> JobParts:
    """The parts of a job of racks of these sizes. `parameters`: all parameters of the model, as
    rank `rank` of the rack with these global ranks holds them. Raises ConfigError for a parameter
    that is neither held completely by each rank, nor spread by rows over all of them."""
    shapes = set()
    for name, parameter in parameters.items():
        if placement_of(parameter) != WHOLE:
            _refuse_other_cuts(name, parameter, members, rank)
            shapes.add(tuple(parameter.shape))
    distinct = tuple(sorted(set(sizes)))
    most = distinct[-1]
    # Every rank owns a part, even if no tensor has rows for it.
    owners = {tuple(part * size // most for size in distinct) for part in range(most)}
    for shape in shapes:
        owners |= _owners_of_rows(shape, distinct)
    if len(owners) > RANKS_MAX:
        rule = f"cut the model into {len(owners)} parts, and a job has at most {RANKS_MAX}"
        raise ConfigError("ranks_by_rack", tuple(sizes), rule, "Use sizes that divide each other.")
    return JobParts(distinct, tuple(sorted(owners)))


def _owners_of_rows(shape: tuple[int, ...], sizes: Sequence[int]) -> set[tuple[int, ...]]:
    """The owners, in racks of these sizes, of each run of rows that no rack cuts."""
    owners: list[tuple[tuple[int, ...], list[Shard]]] = [((), [])]
    for size in sizes:
        boxes = [row_box(shape, size, rank) for rank in range(size)]
        owners = [
            ((*before, rank), [*held, box])
            for before, held in owners
            for rank, box in enumerate(boxes)
            if _filled([*held, box])
        ]
    return {owner for owner, _ in owners}


def _meet(boxes: Sequence[Shard]) -> tuple[int, int]:
    """First and end of the rows that all boxes share; equal: there are none."""
    first = max(box.offset[0] for box in boxes)
    return first, max(first, min(box.offset[0] + box.shape[0] for box in boxes))


def _filled(boxes: Sequence[Shard]) -> bool:
    first, last = _meet(boxes)
    return last > first


def _refuse_other_cuts(name: str, parameter: Tensor, members: Sequence[int], rank: int) -> None:
    over_all = mesh_ranks(parameter) == set(members)
    rows = over_all and placement_of(parameter) == by_rows(len(members))
    if rows and shard_of(name, parameter) == row_box(tuple(parameter.shape), len(members), rank):
        return
    rule = (
        f"is placed {placement_of(parameter)}, and racks of different sizes exchange only what "
        "each rank holds whole (DDP), or rows that fully_shard has spread over all ranks of a rack"
    )
    remedy = "Use DDP or fully_shard over the whole rack, or as many ranks on every rack."
    raise ConfigError("model", name, rule, remedy)
