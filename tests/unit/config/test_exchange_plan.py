"""Which plan racks come to: decided by settings that all of them share."""

from __future__ import annotations

from typing import Any

import pytest

from mend import MendConfig
from mend.config.declared import Scope
from mend.errors import ConfigError
from tests import golden


def sharded(**fields: Any) -> bool:
    return MendConfig(rack=0, **fields).sharded


@pytest.mark.parametrize("racks", [2, 3, 4, 8])
def test_auto_shards_for_more_than_three_racks(racks: int) -> None:
    assert sharded(racks=racks, exchange_plan="auto", codec="float32") == (racks > 3)
    assert not sharded(racks=racks, exchange_plan="mesh")


@pytest.mark.parametrize(("codec", "racks"), [("bf16", 4), ("int8", 5), ("int4", 9)])
def test_auto_shards_where_it_is_less_as_merged_slices_travel_as_fp32(
    codec: str, racks: int
) -> None:
    """A payload of b bytes per element: b + 4 < racks * b."""
    plan = {"exchange_plan": "auto", "codec": codec}
    assert sharded(racks=racks, **plan)
    assert not sharded(racks=racks - 1, **plan)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"racks": 2}, "needs 3 racks or more; racks is 2. Use mesh"),
        ({"racks": 4, "merge": "rda"}, "cannot be with merge='rda'"),
        ({"racks": 4, "codec": "topk"}, "cannot be with payloads of topk"),
        ({"racks": 4, "codec": "powersgd"}, "powersgd-4"),
    ],
)
def test_job_that_cannot_merge_by_slice_is_refused_or_with_auto_a_mesh(
    fields: dict[str, Any], why: str
) -> None:
    with golden.raises(ConfigError) as raised:
        sharded(exchange_plan="sharded", **fields)
    assert why in str(raised.value)
    assert not sharded(exchange_plan="auto", **fields)


def plan_said(**fields: Any) -> str:
    return dict(MendConfig(rack=0, **fields).facts(Scope.JOB))["exchange_plan"]


def test_racks_compare_what_came_of_it_not_how_it_was_asked_for() -> None:
    assert plan_said(racks=3, exchange_plan="auto") == "mesh"
    assert plan_said(racks=3, exchange_plan="sharded") == "sharded"
    assert plan_said(racks=5, exchange_plan="auto") == "sharded"


def test_auto_is_what_a_job_has_that_says_nothing() -> None:
    assert plan_said(racks=4) == "mesh"
    assert plan_said(racks=5) == "sharded"
    assert plan_said(racks=4, codec="float32") == "sharded"
