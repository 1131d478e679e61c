"""What ranks with different modules exchange together."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from mend.errors import ConfigError
from mend.fragment.model_plan import ModelPlan
from mend.fragment.shards import NOTHING, holding
from mend.fragment.stages import Contents, HeldTensor, Together
from mend.types import Layout
from tests import golden


def held(*names: str, numel: int = 4, team: tuple[int, ...] = ()) -> Contents:
    return Contents(tuple(HeldTensor(name, (numel,), "float32", team) for name in names))


def layers(*names: str) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(3, 2) for name in names})


def joined(*ranks: nn.Module, fragments: int = 2, me: int = 0) -> ModelPlan:
    plans = [ModelPlan(model, fragments) for model in ranks]
    plans[me].join([plan.contents for plan in plans], range(len(ranks)))
    return plans[me]


def names_of(layouts: tuple[Layout, ...]) -> list[list[str]]:
    return [[slot.name for slot in layout.slots] for layout in layouts]


def test_each_fragment_has_an_equal_part_of_every_stage() -> None:
    stages = layers("a", "b"), layers("c", "d")
    for me in range(2):
        layouts = joined(*stages, me=me).layouts
        assert names_of(layouts) == [
            ["a.weight", "a.bias", "c.weight", "c.bias"],
            ["b.weight", "b.bias", "d.weight", "d.bias"],
        ]
        for layout in layouts:
            ends = [slot.offset + slot.numel for slot in layout.slots]
            assert [slot.offset for slot in layout.slots] == [0, *ends[:-1]]
            assert layout.numel == ends[-1]


def test_a_stage_of_fewer_tensors_than_fragments_is_spread_over_them() -> None:
    ranks = [held("a", "b", "c", "d", "e"), held("x", "y")]
    together = Together(ranks, [0, 1])
    slots = [(name, name, one.like) for name, one in together.parameters.items()]
    found = names_of(together.cut(slots, 5, 3))
    assert found == [["a", "x"], ["b"], ["c", "y"], ["d"], ["e"]]
    assert [layout.fragment for layout in together.cut(slots, 5, 3)] == [3, 4, 5, 6, 7]


def test_parameters_of_another_stage_read_as_nothing_and_are_not_written() -> None:
    stages = layers("a"), layers("b")
    plan = joined(*stages, fragments=1, me=1)
    items = [ModelPlan(stage, 1).inventory(hash_all=True) for stage in stages]
    boxes = [{item.name: item.shard for item in each} for each in items]
    (cut,) = plan.weights
    shards = [[of.get(name, NOTHING) for name in plan.names_in(cut)] for of in boxes]
    mine = holding(cut.layout, shards, 1)
    assert mine.teams == {}
    assert [stop - start for start, stop in pairwise(mine.owned.cuts)] == [0, 0, 6, 2]
    view, out = plan.view_of(cut), torch.empty(8)
    view.read(mine.owned, out)
    expected = torch.cat([p.detach().reshape(-1) for p in stages[1].parameters()])
    assert torch.equal(out, expected)
    view.write(mine.owned, torch.arange(8.0))
    assert stages[1].get_parameter("b.bias").tolist() == [6.0, 7.0]


def test_one_name_on_ranks_with_different_modules_is_refused() -> None:
    with golden.raises(ConfigError):
        Together([held("norm", "a"), held("norm", "b")], [0, 1])
    with golden.raises(ConfigError):
        Together([held("norm", "a"), Contents(held("norm", numel=5).parameters)], [4, 5])
    statistics = held("norm.running_mean").parameters
    ranks = [Contents(held(name).parameters, statistics=statistics) for name in "ab"]
    with golden.raises(ConfigError):
        Together(ranks, [0, 1])


@pytest.mark.parametrize("team", [(4, 5), (4, 5, 6), ()])
def test_ranks_with_different_modules_share_what_spans_exactly_them(team: tuple[int, ...]) -> None:
    shared = HeldTensor("dense", (4,), "float32", team)
    ranks = [Contents((shared, *held(name).parameters)) for name in ("one", "two")]
    if team == (4, 5):
        together = Together(ranks, [4, 5])
        assert [*together.parameters] == ["dense", "one", "two"]
        assert together.unproven == set()
        assert together.differ
    else:
        with pytest.raises(ConfigError, match="dense"):
            Together(ranks, [4, 5])


def test_replicas_that_nothing_proves_are_named() -> None:
    assert Together([held("a", "b")] * 2, [0, 1]).unproven == {"a", "b"}
    assert Together([held("a", "b", team=(0, 1))] * 2, [0, 1]).unproven == set()
    assert Together([held("a", "b")], [0]).unproven == set()
