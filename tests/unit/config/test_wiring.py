from __future__ import annotations

import re
import warnings
from dataclasses import fields
from typing import Any

import pytest
from msgspec import structs

from mend.config import MendConfig
from mend.config.declared import Scope
from mend.config.wiring import policy_of, settings_of
from mend.consensus.records import MomentFragments, Policy, filled_fields
from mend.coordination.validation import Difference, policy_differences
from mend.types import SECOND
from tests import golden

SETTINGS = {field.name for field in fields(MendConfig)}
FOUND_LATER = {"ranks", "moments", "units", "epochs"}
OF_SETTINGS: dict[str, tuple[dict[str, Any], object]] = {
    "racks": ({"racks": 5}, 5), "fragments": ({"fragments": 7}, 7),
    "merge_min_racks": ({"merge_min_racks": 2}, 2),
    "grace_ns": ({"grace_window_ms": 1.5}, 1_500_000), "lockstep": ({"lockstep": True}, True),
    "staleness_max_rounds": ({"staleness_max_rounds": 3}, 3),
    "period_steps": ({"sync_period_steps": 64}, 64), "overlap_steps": ({"overlap_steps": 5}, 5),
    "overlap_ramp": ({"outer_ramp_rounds": 5}, 5), "stall_max_ns": ({"stall_max_s": 3}, 3 * SECOND),
    "seat_timeout_ns": ({"seat_timeout_s": 0}, 0),
    "restart_attests": ({"restart_attests_death": False}, False),
    "token_weighted": ({"token_weighted_merge": False}, False),
    "expected": ({"expected_racks": (1, 0)}, (0, 1)), "acts": ({"failslow_action": "act"}, True),
    "evicts": ({"failslow_action": "evict"}, True),
    "sharded": ({"exchange_plan": "sharded", "racks": 3}, True),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({*Policy.__struct_fields__} - FOUND_LATER))
def test_a_setting_is_in_the_policy(name: str) -> None:
    changes, value = OF_SETTINGS[name]
    with warnings.catch_warnings(action="ignore"):
        one, other = MendConfig(rack=0), MendConfig(rack=0, **changes)
    assert getattr(policy_of(one, one.racks), name) != value
    assert getattr(settings_of(other, None).policy, name) == value


@pytest.mark.parametrize("name", sorted({*Policy.__struct_fields__} - FOUND_LATER))
def test_a_refusal_names_the_setting_of_a_policy(name: str) -> None:
    """It named the field of the policy, with its value in ns: `stall_max_ns is 300000000`."""
    changes, _ = OF_SETTINGS[name]
    with warnings.catch_warnings(action="ignore"):
        one, other = MendConfig(rack=0, racks=3), MendConfig(rack=0, **{"racks": 3, **changes})
    found, *_ = policy_differences(policy_of(one, one.racks), policy_of(other, other.racks))
    assert set(re.findall(r"\w+", found.name)) & (changes.keys() & SETTINGS)
    assert found.there != found.here


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"grace_window_ms": 0.25}, "grace_window_ms is 0.25 there and adaptive here"),
        ({"seat_timeout_s": 0}, "seat_timeout_s is 0 there and 600 here"),
        ({"expected_racks": (1,)}, "expected_racks is 1 there and empty"),
        ({"failslow_action": "evict"}, "failslow_action is evict there and detect or validate"),
        ({"exchange_plan": "sharded"}, "exchange_plan is sharded there and not sharded here"),
    ],
)
def test_a_refusal_has_both_values_in_the_unit_of_the_setting(
    changes: dict[str, Any], said: str
) -> None:
    one, other = MendConfig(rack=0, racks=3), MendConfig(rack=0, racks=3, **changes)
    (found,) = policy_differences(policy_of(one, 3), policy_of(other, 3))
    assert found.for_log().startswith(said)


def test_moments_are_named_and_not_the_fragments_that_they_add() -> None:
    policy = policy_of(MendConfig(rack=0), 2)
    moments = (MomentFragments(4, 384),)
    other = structs.replace(policy, fragments=8, moments=moments)
    averaged = "momentum_sync_period_steps, second_moment_sync_period_steps, exchange_statistics"
    assert policy_differences(policy, other) == [Difference(averaged, "384 (4 fragments)", "none")]
    (ranks,) = policy_differences(policy, structs.replace(policy, ranks=2))
    assert ranks.for_log() == "ranks per rack is 2 there and 1 here"


def test_every_field_of_the_policy_is_a_setting_that_racks_compare() -> None:
    """The start names a difference by the facts, a later rack learns it from the policy."""
    filled = filled_fields()
    assert filled.keys() == {*Policy.__struct_fields__} - FOUND_LATER
    config = MendConfig(rack=0)
    facts = {name for scope in (Scope.JOB, Scope.PLAN) for name, _ in config.facts(scope)}
    assert {each.setting for each in filled.values()} <= facts


def test_settings_that_may_starve_a_rack_are_warned_of() -> None:
    addresses = tuple(f"tcp://127.0.0.1:{port}" for port in (1, 2, 3))
    options: dict[str, Any] = {"rack": 0, "staleness_max_rounds": 0, "grace_window_ms": 0}
    three = {"racks": 3, "sideband_peers": addresses}
    with golden.warns(UserWarning):
        settings_of(MendConfig(**options, **three), None)
    settings_of(MendConfig(**options, racks=2, sideband_peers=addresses[:2]), None)
    settings_of(MendConfig(**options, **three, lockstep=True), None)
    settings_of(MendConfig(**{**options, "staleness_max_rounds": 1}, **three), None)
