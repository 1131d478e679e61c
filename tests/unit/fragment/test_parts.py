"""The parts of a job of racks of different sizes: each has one owner in every rack."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mend.fragment import parts
from mend.fragment.parts import JobParts, cut_job
from mend.fragment.shards import Shard, row_box

SIZES = st.lists(st.integers(1, 9), min_size=2, max_size=4)
SHAPES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3)), min_size=1, max_size=4)


def of_shards(sizes: list[int], shapes: list[tuple[int, int]]) -> JobParts:
    """As `cut_job` makes them of tensors of these shapes, all in rows over the ranks."""
    distinct = tuple(sorted(set(sizes)))
    owners = set(cut_job(sizes, {}, (0,), 0).owners)
    for shape in shapes:
        owners |= parts._owners_of_rows(shape, distinct)
    return JobParts(distinct, tuple(sorted(owners)))


def rows_of(box: Shard) -> range:
    return range(box.offset[0], box.offset[0] + box.shape[0])


@given(SIZES, SHAPES)
def test_every_row_is_of_one_part_and_held_by_its_owner_in_every_rack(
    sizes: list[int], shapes: list[tuple[int, int]]
) -> None:
    found = of_shards(sizes, shapes)
    for shape in shapes:
        boxes = [found.box(shape, part) for part in range(len(found.owners))]
        assert sorted(row for box in boxes for row in rows_of(box)) == [*range(shape[0])]
        for size in set(sizes):
            for box, host in zip(boxes, found.hosts(size), strict=True):
                assert set(rows_of(box)) <= set(rows_of(row_box(shape, size, host)))


@given(SIZES, SHAPES)
def test_every_rank_hosts_a_part_and_rank_zero_the_first_one(
    sizes: list[int], shapes: list[tuple[int, int]]
) -> None:
    found = of_shards(sizes, shapes)
    for size in sizes:
        assert set(found.hosts(size)) == {*range(size)}
        assert found.hosts(size)[0] == 0


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 5))
def test_parts_of_sizes_that_divide_each_other_and_the_rows_are_the_ranks_of_the_larger(
    small: int, times: int, each: int
) -> None:
    large = small * times
    shape = (large * each, 2)
    found = of_shards([small, large], [shape])
    assert found.hosts(large) == tuple(range(large))
    assert found.placement(shape) == f"S(0) over {large}"


def test_parts_of_whole_tensors_are_as_many_as_the_largest_rack_has_ranks() -> None:
    whole = {"weight": torch.empty(3, 2)}
    assert cut_job([3, 1, 2], whole, (0, 1), 1).owners == ((0, 0, 0), (0, 0, 1), (0, 1, 2))


def test_rows_of_a_part_are_those_of_its_rank_from_where_the_part_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts, "placement_of", lambda _: "S(0) over 3")
    found, weight = of_shards([2, 3], [(10, 1)]), [("weight", torch.empty(10, 1))]
    cuts = []
    for part, host in enumerate(found.hosts(3)):
        rows = found.rows(weight, 3, part)["weight"]
        cuts.append((host, rows.inside.start, rows.inside.stop, rows.box.offset[0]))
    assert cuts == [(0, 0, 4, 0), (1, 0, 1, 4), (1, 1, 4, 5), (2, 0, 2, 8)]
