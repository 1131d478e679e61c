from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mend.config import MendConfig
from mend.config.wiring import numerics_of, settings_of
from mend.engine.hooks.model_checks import Copies
from mend.engine.io.rack import RackGroup
from mend.engine.rack_model import RackModel
from mend.engine.rank_config import TORCH, Introduction, parts_of
from mend.errors import ConfigError, UsageError
from mend.fragment.model_plan import ModelPlan
from mend.fragment.plan import Item
from mend.fragment.shards import by_rows
from mend.types import VERSION, Address, Member, Peer


class Rack(RackGroup):
    """Of ranks that say what this one says, but for `other`, which the last one says."""

    def __init__(self, ranks: int, other: object = None) -> None:
        super().__init__(None, 1.0)
        self.ranks, self.members, self._other = ranks, tuple(range(ranks)), other

    def gather(self, mine: Any, kind: Any) -> list[Any]:
        return [*[mine] * (self.ranks - 1), self._other or mine]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 3), nn.LayerNorm(3))


def rack_model(group: RackGroup, model: nn.Module | None = None, **fields: Any) -> RackModel:
    config = MendConfig(rack=0, fragments=2, **fields)
    plan = ModelPlan(model or net(), 2)
    plan.join([plan.contents] * group.ranks, group.members)
    settings = settings_of(config, None).completed(group.ranks, plan)
    return RackModel(plan, settings, group, numerics_of(config, plan))


def test_a_job_and_a_checkpoint_are_compared_by_the_same_facts() -> None:
    """They were put together in three places."""
    model, said = rack_model(Rack(2)), Introduction("", Address("", 1), Address("", 1), ("", ""))
    me, member = Peer(0, 0), Member(0, 1)
    parts = parts_of(
        model._settings, me, member, [said, said], model.facts, sums=False, started_ns=0
    )
    assert parts.leader is not None
    assert parts.leader.hello.facts == (
        ("mend version", VERSION), ("torch version", TORCH), *model.facts,
        *model._settings.job_facts,
    )  # fmt: skip
    assert ("ranks per rack", "2") in model.facts
    cuttable = model.cuttable()
    assert cuttable is not None
    assert cuttable.facts(2, frozenset()) == model.facts
    assert cuttable.facts(3, frozenset()) == rack_model(Rack(3)).facts
    sharded = dict(cuttable.facts(2, frozenset({"1.weight"})))
    assert sharded["placement 1.weight"] == by_rows(2)


def test_the_facts_name_what_the_mean_merges() -> None:
    assert rack_model(Rack(1)).plain == []
    model = rack_model(Rack(1), merge="rda", merge_mean_names=("2.*",))
    means = [name for name, value in model.facts if value == "mean" and name.startswith("merge ")]
    assert means == ["merge 0.weight", "merge 2.weight", "merge 2.bias"]
    assert [flag for flags in model.plain for flag in flags] == [True, False, False, True, True]


def test_replicas_with_other_bits_are_refused() -> None:
    items = ModelPlan(net(), 2).inventory(hash_all=True)
    other = (items[0], Item(*items[1][:4], "0" * 16), *items[2:])
    with pytest.raises(
        UsageError, match=r"ranks 0 and 1 of this rack hold different values of 1\."
    ):
        rack_model(Rack(2, other))


def test_replicas_that_train_apart_are_refused_once_and_kept_ones_are_not() -> None:
    model, group = net(), Rack(2)
    plan = ModelPlan(model, 2)
    plan.join([plan.contents] * 2, group.members)
    Copies(plan, group).refuse()
    copies = Copies(plan, Rack(2, ModelPlan(model, 2).inventory(hash_all=True)))
    with torch.no_grad():
        model.get_parameter("1.bias").add_(1)
    with pytest.raises(UsageError, match=r"ranks 0 and 1 of this rack began with .* of 1\.bias"):
        copies.refuse()
    copies.refuse()


def test_ranks_of_two_stages_own_theirs() -> None:
    stages = [nn.ModuleDict({name: nn.Linear(2, 3)}) for name in "ab"]
    plans = [ModelPlan(stage, 1) for stage in stages]
    items = plans[1].inventory(hash_all=True)
    group, plan = Rack(2, items), plans[0]
    plan.join([each.contents for each in plans], group.members)
    config = MendConfig(rack=0, fragments=1)
    settings = settings_of(config, None).completed(2, plan)
    model = RackModel(plan, settings, group, numerics_of(config, plan))
    (state,) = model.fragment_states()
    assert [span.numel for span in state.owned.spans] == [6, 3, 0, 0]
    assert state.holding.teams == {}
    assert model.elements == 18
    assert [name for name, _ in model.facts if name.startswith("param ")] == [
        "param a.weight", "param a.bias", "param b.weight", "param b.bias",
    ]  # fmt: skip
    assert model.cuttable() is None
    (part,) = model.parts([state]).parts
    assert [piece.name for piece in part.pieces] == ["a.weight", "a.bias"]


def test_a_model_that_is_spread_beyond_the_rack_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelPlan, "spread", lambda _: {0, 1, 2})
    with pytest.raises(UsageError, match=r"over ranks \[2\], which are not of rack 0"):
        rack_model(Rack(2))


def test_sums_of_more_tensors_than_a_message_takes_are_refused() -> None:
    many = nn.ModuleList(nn.Linear(1, 1) for _ in range(4000))
    with pytest.raises(ConfigError, match="merge='rda'"):
        rack_model(Rack(1), many, merge="rda", racks=64)


def test_ranks_that_hold_the_whole_model_own_a_slice_each() -> None:
    fragment_states = rack_model(Rack(2)).fragment_states()
    assert [state.owned.numel for state in fragment_states] == [4 + 3, 1 + 1 + 1]
    assert {team for state in fragment_states for team in state.holding.teams} == {(0, 1)}
