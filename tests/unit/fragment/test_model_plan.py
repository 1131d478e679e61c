"""One plan of a model: what is exchanged, how it is cut, what racks compare."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mend.errors import ConfigError, UsageError
from mend.fragment.model_plan import ModelPlan
from mend.fragment.moments import FIRST, SECOND
from mend.types import Owned, Span
from tests import golden
from tests.unit.fragment.test_plan import Tied


def plan_of(model: nn.Module, fragments: int = 2, **options: Any) -> ModelPlan:
    return ModelPlan(model, fragments, **options)


def test_the_other_name_of_a_tied_tensor_is_a_fact() -> None:
    assert dict(plan_of(Tied()).facts())["tied head.weight"] == "emb.weight"
    other = Tied()
    other.head.weight = nn.Parameter(other.emb.weight.detach().clone())
    assert plan_of(Tied()).facts() != plan_of(other).facts(), "untied"


def test_frozen_parameters_are_exchanged_where_it_is_asked_for() -> None:
    model = Tied()
    model.body[0].requires_grad_(False)
    plan, whole = plan_of(model), plan_of(model, frozen=True)
    assert [*plan.parameters] == [*plan.trained] == ["emb.weight", "body.2.weight", "body.2.bias"]
    assert [*whole.parameters][1:3] == ["body.0.weight", "body.0.bias"]
    assert [*whole.trained] == [*plan.trained]
    known = {item.name for item in plan.inventory(hash_all=False) if item.exchanged}
    assert known == set(plan.parameters)


def test_fragments_of_moments_are_numbered_behind_those_of_the_weights() -> None:
    model = Tied()
    adam = torch.optim.AdamW(model.parameters())
    plan = plan_of(model, optimizers=[adam], moment_periods={FIRST: 4, SECOND: 8})
    assert [layout.fragment for layout in plan.layouts] == list(range(6))
    assert [bool(cut.moments) for cut in plan.planned] == [False] * 2 + [True] * 4
    assert [layout.numel for layout in plan.layouts] == [
        plan.layouts[p % 2].numel for p in range(6)
    ]
    assert [plan.names_in(cut) for cut in plan.planned] == [
        plan.names_in(plan.planned[p % 2]) for p in range(6)
    ]
    assert plan.layouts[3].slots[0].name == "exp_avg:body.0.weight"
    with golden.raises(ConfigError):
        _ = plan_of(
            model, optimizers=[torch.optim.RMSprop(model.parameters())], moment_periods={FIRST: 4}
        ).layouts


def test_a_view_reads_what_is_trained_and_says_when_it_is_trained_no_more() -> None:
    model = nn.Linear(3, 2)
    plan = plan_of(model, 1)
    (cut,) = plan.planned
    view, out = plan.view_of(cut), torch.empty(8)
    owned = Owned(tuple(Span(0, slot.numel) for slot in cut.layout.slots), 8)
    view.read(owned, out)
    assert torch.equal(out, torch.cat([model.weight.flatten(), model.bias]).detach())
    model.weight = nn.Parameter(torch.zeros(2, 3))
    with golden.raises(UsageError):
        view.read(owned, out)


# -------------------------------------------------------------- what is always merged by the mean


def plain_of(model: nn.Module, *patterns: str) -> dict[str, bool]:
    """Over two fragments, which have slots of their own."""
    plan = plan_of(model)
    flags = zip(plan.layouts, plan.plain_slots(plan.plain_names(patterns)), strict=True)
    return {
        slot.name: plain
        for layout, each in flags
        for slot, plain in zip(layout.slots, each, strict=True)
    }


def test_embeddings_are_merged_plainly_and_so_is_what_is_tied_to_them() -> None:
    found = plain_of(Tied())
    assert [name for name, plain in found.items() if plain] == ["emb.weight"]
    assert "head.weight" not in found, "one slot, one rule"
    assert sum(found.values()) == 1
    assert plain_of(nn.EmbeddingBag(4, 3)) == {"weight": True}


def test_names_that_fit_a_pattern_are_merged_plainly_under_each_of_their_names() -> None:
    found = plain_of(Tied(), "body.?.bias", "*.2.*")
    assert {name for name, plain in found.items() if plain} == {
        "emb.weight", "body.0.bias", "body.2.bias", "body.2.weight",
    }  # fmt: skip
    twice = nn.Module()
    twice.first, twice.wte = nn.Linear(3, 3, False), nn.Linear(3, 3, False)
    twice.wte.weight = twice.first.weight
    assert plain_of(twice, "*wte*") == {"first.weight": True}
    assert plain_of(nn.Linear(2, 2), "WEIGHT") == {"weight": False, "bias": False}


def test_moments_are_merged_by_the_mean() -> None:
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9)
    plan = plan_of(model, 1, optimizers=[sgd], moment_periods={FIRST: 4})
    assert plan.plain_slots(()) == [(False, False), (True, True)]


def test_a_ddp_deep_inside_is_seen() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        inner = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        assert plan_of(nn.Sequential(inner)).spread() == {0}
        assert plan_of(nn.Linear(2, 2)).spread() == set()
    finally:
        dist.destroy_process_group()
