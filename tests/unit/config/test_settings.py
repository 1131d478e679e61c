"""A config that exists is a config that works: each value alone, and all of them together."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import warnings
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mend.codec import CODECS, LAYOUT_CODECS, RANK_MAX
from mend.config import MendConfig, describe, settings
from mend.config import kinds as k
from mend.config.declared import Group, Scope, text_of
from mend.config.registered import OWN_MERGES
from mend.config.wiring import numerics_of
from mend.consensus.records import Filled
from mend.errors import ConfigError, MendError
from mend.fragment import ApplyMode
from mend.fragment.model_plan import ModelPlan
from mend.merge import MERGES
from mend.outer import OUTERS, Nesterov
from mend.transport.delayed import Distribution
from mend.types import CODEC_NAMES, OWN_CODECS, fp32
from tests import golden
from tests.configuration_table import PAGE, with_table

# ------------------------------------------------------------------ what it is


def test_the_defaults_are_two_racks_of_this_machine() -> None:
    config = MendConfig()
    assert (config.racks, config.fragments, config.sync_period_steps, config.tau) == (2, 4, 32, 8)
    assert config.peer_addresses == {0: "tcp://127.0.0.1:21900", 1: "tcp://127.0.0.1:21901"}
    assert (config.codec, config.diagnostics_dir) == ("int8", None)


def test_the_quick_start_of_the_older_library_builds_a_job_of_four() -> None:
    config = MendConfig(
        merge_min_racks=4, grace_window_ms=2000, token_weighted_merge=True, sync_period_steps=128,
        concurrent_outer_step=True, diagnostics_dir="./results/mend_diag",
    )  # fmt: skip
    assert config.racks == 4
    assert config.grace_window_ms == 2000.0
    assert config.diagnostics_dir == Path("results/mend_diag")


def test_config_is_frozen_and_takes_no_positions() -> None:
    config = MendConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.racks = 3
    with pytest.raises(TypeError):
        MendConfig(0, 2)


def test_signature_of_config_names_every_field() -> None:
    """People and editors see the fields, not `**given`."""
    names = list(inspect.signature(MendConfig).parameters)
    assert names == [f.name for f in dataclasses.fields(MendConfig)]


def test_config_survives_pickle_copy_and_repr_as_the_same() -> None:
    config = MendConfig(rack=1, sideband_peers=["tcp://a:1", "tcp://b:2"], diagnostics_dir="runs")
    for twin in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert twin == config
        assert hash(twin) == hash(config)
    assert "racks=2" in repr(config)


def test_replace_changes_what_it_names_and_reads_no_source(monkeypatch: Any) -> None:
    """What was decided once stays decided, whatever has come into the environment since."""
    config = MendConfig(rack=0, fragments=7)
    monkeypatch.setenv("MEND_FRAGMENTS", "9")
    monkeypatch.setenv("MEND_RACKS", "5")
    monkeypatch.setenv("MEND_NONSENSE", "1")
    monkeypatch.setenv("MEND_CONFIG", "/no/such/file.toml")
    changed = dataclasses.replace(config, rack=1)
    assert dataclasses.asdict(changed) == dataclasses.asdict(config) | {"rack": 1}


def test_an_argument_that_no_setting_has_is_named_with_the_closest() -> None:
    with golden.raises(ConfigError):
        MendConfig(fragment=3)


@pytest.mark.parametrize("name", ["sideband_psk", "sideband_tls", "sideband_peer_allowlist"])
def test_a_protection_that_is_not_there_is_refused_not_ignored(name: str) -> None:
    """Who sets a key and hears nothing believes that it protects. What does protect is named."""
    with golden.raises(ConfigError):
        MendConfig(**{name: "secret"})


# ------------------------------------------------------------------ values

WRONG: dict[str, tuple[Any, ...]] = {
    "outer_optimizer": ("adam", 1),
    "rack": (-1, 64, "0", 0.0, True),
    "racks": (0, 65, "2", 2.0, None, True),
    "job_id": ("", "a b", "x" * 65, "ä", "a\n", 7),
    "fragments": (0, 1025, None),
    "sync_period_steps": (0, -1, 1.5),
    "overlap_steps": (-1, 128, 1000, "8"),
    "concurrent_outer_step": (1, 0, "true", None),
    "exchange": (1, 0, "false", None),
    "merge_min_racks": (0, 65),
    "grace_window_ms": (-1, 600_001, "2000", "auto", None, float("nan")),
    "token_weighted_merge": (1, "yes"),
    "apply_mode": ("Carry", "", None, 1),
    "blend_alpha": (-0.1, 1.1, "0.5"),
    "outer_lr": (0, -1, 101, 1e-60, 1e60, float("inf"), float("nan")),
    "outer_optimizer_momentum": (1, -0.1, 1 - 1e-12, float("nan")),
    "outer_ramp_rounds": (-1, 1_000_001, 2.5, "10", "None"),
    "outer_start": ("cold", "Warm", None),
    "merge": ("median", None),
    "merge_mean_names": (("*a*", "*a*"), ("",), (1,), 5),
    "encode_on": ("gpu", None),
    "lockstep": ("on", 1),
    "exchange_frozen": ("on", 1),
    "exchange_statistics": ("on", 1),
    "join_copies_state": ("on", 1),
    "mirror_rack_state": ("on", 1),
    "staleness_max_rounds": (-1, 65),
    "tape_max_mb": (-1, 0.5),
    "start_timeout_s": (0, -1, 86_401, float("inf")),
    "stall_max_s": (-0.1, "1"),
    "seat_timeout_s": (-1, "600"),
    "restart_attests_death": ("yes", 1),
    "wait_timeout_s": (0,),
    "shutdown_timeout_s": (-1,),
    "transfer_stall_s": (0,),
    "sideband_addr": (
        "10.0.0.1:5", "tcp://:5", "tcp://*:5", "tcp://a", 5, "tcp://a:65536", "tcp://a:5 ",
        "ipc://x", "tcp://a:b",
    ),
    "witness_addr": ("tcp://a:0", "a:5", None),
    "sideband_heartbeat_ms": (9, 10_001, 100.0),
    "observe": (1, 0, "no", None),
    "metrics_port": (-1, 65_536, "9464", 1.5, None),
    "metrics_host": ("a:9464", "a b", "tcp://a", None),
    "advertise_host": ("tcp://a", "a:5", "a b", "::1", None),
    "key_file": (7, 1.5),
    "socks_proxy": ("a:1080", "tcp://a:0", 5, "tcp://a:1080"),  # no key
    "encrypt_payloads": (0, "no", None, False),  # False without a key
    "insecure": (1, "yes", None),
    "data_ports": ("5", "9-5", "0-5", "5-65536", "a-b", "1-2-3", 5, "-5"),
    "diagnostics_dir": (5, b"x"),
    "simulated_merge_delay_ms": (-1, 600_001),
    "simulated_merge_delay_distribution": ("normal",),
    "simulated_merge_delay_seed": (-1, 2**63),
    "momentum_sync_period_steps": (0,),
    "second_moment_sync_period_steps": (0, "seldom"),
    "async_tp_enabled": ("yes",),
    "failslow_window_steps": (1,),
    "failslow_zscore_threshold": (0,),
    "failslow_min_samples": (1,),
    "failslow_action": ("judge",),
    "exchange_plan": ("ring",),
    "rack_aware": (2,),
    "codec": ("none", "zip", 8, None, "powersgd-65", ["int8"]),
    "expected_racks": ((1, 1), ("rack-1",), (-1,), (64,), (True,), 5),
    "ranks_by_rack": ((0, 1), ("two", 1), (True, 1), 5, (1, 2, 3)),
    "sideband_peers": (
        5, None, (5,), ["tcp://a:1", 5], ["b:1", "a:1"], "0=tcp://a:1,tcp://b:1",
        "tcp://a:1,1=tcp://b:1", "0=tcp://a:1,0=tcp://b:1", "x=tcp://a:1", "=tcp://a:1",
        "0=tcp://a:0,1=tcp://b:1", {-1: "tcp://a:1"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in WRONG.items() for value in values],
    ids=repr,
)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        MendConfig(**{name: value})
    assert caught.value.field == name
    assert caught.value.value == value or value != value
    assert caught.value.rule
    assert caught.value.remedy.endswith(".")
    assert isinstance(caught.value, MendError)


def test_every_field_has_a_wrong_value_in_this_test() -> None:
    assert WRONG.keys() == {f.name for f in dataclasses.fields(MendConfig)}


RIGHT: list[tuple[str, Any, Any]] = [
    ("racks", 64, 64), ("job_id", "Run_7.b-2", "Run_7.b-2"), ("overlap_steps", 0, 0),
    ("grace_window_ms", 0, 0.0), ("grace_window_ms", "adaptive", "adaptive"), ("outer_lr", 1, 1.0),
    ("stall_max_s", 0, 0.0), ("sideband_addr", "tcp://[::1]:0", "tcp://[::1]:0"),
    ("sideband_addr", "tcp://node-7.rack_2.example:21900", "tcp://node-7.rack_2.example:21900"),
    ("advertise_host", "10.0.0.7", "10.0.0.7"), ("diagnostics_dir", "", None),
    ("diagnostics_dir", Path("a"), Path("a")), ("expected_racks", [1, 0], (0, 1)),
    ("codec", "bf16", "bfloat16"), ("codec", "powersgd", "powersgd-4"),
    ("codec", "powersgd-8", "powersgd-8"),
    ("merge_mean_names", "*emb*, head.weight", ("*emb*", "head.weight")),
    ("merge_mean_names", [], ()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "stored"), RIGHT)
def test_a_right_value_is_stored_in_one_form(name: str, value: Any, stored: Any) -> None:
    found = getattr(MendConfig(**{name: value}), name)
    assert found == stored
    assert type(found) is type(stored)


def test_the_words_are_those_of_the_code_they_choose() -> None:
    hints = get_type_hints(MendConfig)
    ranks = {f"powersgd-{rank}" for rank in range(1, RANK_MAX + 1)}
    assert set(OWN_CODECS) == {*CODECS, *LAYOUT_CODECS} - ranks, "the list in types.py"
    assert CODEC_NAMES.endswith(f"powersgd-{RANK_MAX}")
    assert MendConfig(codec="powersgd").codec == "powersgd-4"
    assert set(OWN_MERGES) == set(MERGES)
    assert set(get_args(hints["apply_mode"])) == set(get_args(ApplyMode))
    distribution = hints["simulated_merge_delay_distribution"]
    assert set(get_args(distribution)) == set(get_args(Distribution))
    for name in ("apply_mode", "simulated_merge_delay_distribution"):
        for word in get_args(hints[name]):
            assert getattr(MendConfig(**{name: word}), name) == word


# ------------------------------------------------------------------ values together


@pytest.mark.parametrize(
    ("period", "tau"), [(1, 0), (2, 0), (3, 0), (4, 1), (16, 4), (32, 8), (33, 8), (1000, 8)]
)
def test_the_overlap_is_a_quarter_of_the_period_at_most_eight(period: int, tau: int) -> None:
    assert MendConfig(sync_period_steps=period).tau == tau


@given(period=st.integers(1, 10_000))
def test_the_default_overlap_never_warns_and_always_fits(period: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 0 <= MendConfig(sync_period_steps=period).tau < period


def test_an_overlap_above_a_quarter_of_the_period_is_said() -> None:
    with golden.warns(UserWarning) as caught:
        assert MendConfig(sync_period_steps=32, overlap_steps=9).tau == 9
    assert caught[0].filename == __file__


def test_an_overlap_as_long_as_the_period_is_refused() -> None:
    with golden.raises(ConfigError):
        MendConfig(sync_period_steps=10, overlap_steps=10)


def test_an_outer_step_that_overshoots_is_said() -> None:
    with golden.warns(UserWarning):
        MendConfig(
            outer_lr=0.7, outer_optimizer_momentum=0.9, outer_ramp_rounds=0, sync_period_steps=128
        )
    with golden.warns(UserWarning):
        MendConfig(outer_optimizer_momentum=0.925, sync_period_steps=128)


@pytest.mark.parametrize(
    "changes",
    [
        {"outer_lr": 0.7, "outer_optimizer_momentum": 0.9, "outer_start": "warm",
         "outer_ramp_rounds": 0, "sync_period_steps": 128},
        {"outer_optimizer_momentum": 0.9, "sync_period_steps": 128},
        {"outer_optimizer_momentum": 0.9, "sync_period_steps": 64},
        {"sync_period_steps": 1},
        {"outer_optimizer_momentum": 0.9, "outer_start": "warm", "sync_period_steps": 64},
        {"outer_optimizer_momentum": 0.3, "outer_ramp_rounds": 0},
    ],
)  # fmt: skip
def test_outer_steps_that_were_measured_to_help_warn_of_nothing(changes: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MendConfig(**changes)


@pytest.mark.parametrize(
    ("racks", "period", "most"),
    [
        (2, 1, 1 / 17), (2, 4, 0.2), (2, 16, 0.5), (2, 64, 0.8), (2, 128, 8 / 9), (2, 10_000, 0.9),
        (4, 4, 1 / 3), (4, 32, 0.8), (8, 32, 8 / 9), (1, 32, 2 / 3), (64, 1, 2 / 3),
    ],
)  # fmt: skip
def test_default_momentum_rises_with_the_period_and_the_racks(
    racks: int, period: int, most: float
) -> None:
    config = MendConfig(sync_period_steps=period, racks=racks)
    assert config.outer_momentum == pytest.approx(most)
    # A checkpoint may be resumed by fewer racks, of which it follows as well.
    assert ("outer_optimizer_momentum", "None") in config.facts(Scope.PLAN)
    assert numerics_of(config, ModelPlan(nn.Linear(2, 2), 1)).outer.momentum == fp32(most)


def test_given_momentum_too_long_for_the_period_warns_with_the_remedy() -> None:
    with golden.warns(UserWarning):
        config = MendConfig(sync_period_steps=16, outer_optimizer_momentum=0.9)
    assert config.outer_momentum == 0.9  # who asks for it has it


def test_a_rack_beyond_the_racks_is_refused() -> None:
    with golden.raises(ConfigError):
        MendConfig(rack=2, racks=2)
    assert MendConfig(rack=2, racks=3).rack_number == 2


def test_rack_number_and_address_without_a_rack_are_refused() -> None:
    config = MendConfig()
    with golden.raises(ConfigError):
        _ = config.rack_number
    with golden.raises(ConfigError):
        _ = config.bind_address


# ------------------------------------------------------------------ addresses

TWO = {0: "tcp://a:1", 1: "tcp://b:2"}


@pytest.mark.parametrize(
    "given",
    [
        ("tcp://a:1", "tcp://b:2"), ["1=tcp://b:2", "0=tcp://a:1"], "tcp://a:1, tcp://b:2",
        "1=tcp://b:2,0=tcp://a:1,", {1: "tcp://b:2", 0: "tcp://a:1"},
        {"1": "tcp://b:2", "0": "tcp://a:1"},
    ],
)  # fmt: skip
def test_peers_in_any_form_are_the_same_config(given: Any) -> None:
    config = MendConfig(rack=1, sideband_peers=given)
    assert config.peer_addresses == TWO
    assert list(config.peer_addresses) == [0, 1]
    assert config == MendConfig(rack=1, sideband_peers=TWO)
    assert dataclasses.replace(config, rack=0).peer_addresses == TWO


@pytest.mark.parametrize("given", ["tcp://a:1", "0=tcp://a:1,2=tcp://b:2", "0=tcp://a:1"])
def test_peers_that_leave_a_rack_out_are_refused(given: str) -> None:
    """A list of only the others would count them as racks 0, 1, ... and find the wrong ones."""
    with golden.raises(ConfigError):
        MendConfig(sideband_peers=given)


@pytest.mark.parametrize(
    "given",
    [
        {"racks": 4, "sideband_peers": "tcp://a:1,tcp://b:2"},
        {"racks": 2, "sideband_peers": "tcp://a:1,tcp://b:2,tcp://c:3"},
        {"rack": 0, "sideband_peers": "0=tcp://a:1,2=tcp://b:2"},
    ],
)
def test_peers_that_leave_more_than_this_rack_out_are_refused(given: dict[str, Any]) -> None:
    with golden.raises(ConfigError):
        MendConfig(sideband_addr="tcp://0.0.0.0:5", **given)


def test_a_rack_listens_where_it_is_told_or_where_the_others_look_for_it() -> None:
    assert MendConfig(rack=1).bind_address == "tcp://127.0.0.1:21901"
    assert MendConfig(rack=1, sideband_peers=TWO).bind_address == "tcp://b:2"
    addr = "tcp://10.0.0.7:9"
    assert MendConfig(rack=1, sideband_peers=TWO, sideband_addr=addr).bind_address == addr


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:21900", "tcp://[::]:21900"])
def test_wildcard_address_without_advertise_host_is_refused(address: str) -> None:
    """Otherwise the other racks would be told to connect to 0.0.0.0, which is themselves."""
    with golden.raises(ConfigError):
        MendConfig(rack=0, sideband_addr=address)
    config = MendConfig(rack=0, sideband_addr=address, advertise_host="10.0.0.1")
    assert config.bind_address == address


def test_the_port_range_is_two_numbers() -> None:
    assert MendConfig().data_port_range is None
    assert MendConfig(data_ports="6000-6063").data_port_range == (6000, 6063)
    assert MendConfig(data_ports="6000-6000").data_port_range == (6000, 6000)


# ------------------------------------------------------------------ what others read

ELSE: dict[str, Any] = {
    "fragments": 5, "sync_period_steps": 64, "overlap_steps": 3, "apply_mode": "blend",
    "blend_alpha": 0.25, "outer_lr": 0.5, "outer_optimizer_momentum": 0.5, "outer_start": "warm",
    "outer_ramp_rounds": 4, "merge": "rda", "outer_optimizer": "mine",
    "momentum_sync_period_steps": 384, "second_moment_sync_period_steps": 768,
    "merge_mean_names": ("head.*",), "codec": "int4",
    "lockstep": True, "exchange_frozen": True, "staleness_max_rounds": 3,
    "exchange_statistics": False,
    "token_weighted_merge": False, "mirror_rack_state": True, "grace_window_ms": 5,
    "stall_max_s": 0.5, "seat_timeout_s": 9, "restart_attests_death": False,
    "racks": 3, "job_id": "other", "merge_min_racks": 2, "failslow_action": "detect",
    "expected_racks": (0,), "exchange_plan": "sharded", "encrypt_payloads": False,
    "ranks_by_rack": (2, 4),
}  # fmt: skip
"""Of every setting that must be equal on all racks, another value than the default."""

BESIDE: dict[str, dict[str, Any]] = {
    "outer_ramp_rounds": {"outer_optimizer_momentum": 0.5},  # without, it is warned about
    "exchange_plan": {"racks": 3},
}
"""What such a value needs beside it."""


def _facts(config: MendConfig) -> dict[str, str]:
    return dict((*config.facts(Scope.PLAN), *config.facts(Scope.JOB)))


def test_an_outer_optimizer_has_to_be_registered_and_racks_to_have_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(OUTERS, "fedadam", OUTERS["nesterov"])
    with golden.raises(ConfigError):
        MendConfig(outer_optimizer="mine")
    with monkeypatch.context() as patch:
        patch.setenv("MEND_OUTER_OPTIMIZER", "mine")
        with golden.raises(ConfigError):
            MendConfig()
    with golden.raises(ConfigError):
        MendConfig(outer_optimizer=3)
    monkeypatch.setitem(OUTERS, "mine", type("Mine", (Nesterov,), {}))
    mine = MendConfig(outer_optimizer="mine", outer_lr=9, outer_optimizer_momentum=0.5)
    assert ("outer_optimizer", "mine") in mine.facts(Scope.PLAN)
    assert type(numerics_of(mine, ModelPlan(nn.Linear(2, 2), 1)).outer).__name__ == "Mine"


SHARED = [row.field for row in describe() if row.declared.scope is not Scope.RACK]


@pytest.mark.parametrize("name", SHARED)
def test_shared_setting_other_value_shows_in_the_facts(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever declares a setting as shared has racks compare it: nothing else needs to be said."""
    monkeypatch.setitem(OUTERS, "mine", OUTERS["nesterov"])
    beside = BESIDE.get(name, {})
    if name == "encrypt_payloads":
        (key := tmp_path / "key").write_text("")
        beside = {"key_file": key}
    one, other = _facts(MendConfig(**beside)), _facts(MendConfig(**beside, **{name: ELSE[name]}))
    assert one[name] != other[name]


@pytest.mark.parametrize(
    ("value", "text"), [("", "''"), (" ", "' '"), ("''", "\"''\""), ("a", "a")]
)
def test_text_of_a_setting_is_visible_and_its_own(value: str, text: str) -> None:
    """A refusal said that a setting "is  there", and two texts must not look the same."""
    assert text_of(value) == Filled("weather").text(value) == text


def test_every_shared_setting_has_another_value_in_this_test() -> None:
    assert ELSE.keys() == set(SHARED)


def test_shared_setting_declared_once_is_read_checked_compared_and_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one line that a new setting takes, here in a class like MendConfig."""

    @settings._from_all_sources
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wider(MendConfig):
        cooldown_rounds: int = settings._tuning(
            3, k.whole(0, 9, "rounds"), "rounds without momentum", Scope.PLAN
        )

    monkeypatch.setenv("MEND_COOLDOWN_ROUNDS", "4")
    assert ("cooldown_rounds", "4") in Wider().facts(Scope.PLAN)
    assert ("cooldown_rounds", "5") in Wider(cooldown_rounds=5).facts(Scope.PLAN)
    with golden.raises(ConfigError):
        Wider(cooldown_rounds=10)
    assert "cooldown_rounds" in inspect.signature(Wider).parameters
    (row,) = (row for row in settings._table(Wider) if row not in describe())
    assert (row.field, row.unit, row.declared.group) == ("cooldown_rounds", "rounds", Group.TUNING)


def test_the_facts_are_text_of_the_values_in_force() -> None:
    facts = _facts(MendConfig(outer_lr=1, grace_window_ms=5, overlap_steps=8))
    assert all(type(value) is str for value in facts.values())
    assert facts == _facts(MendConfig(outer_lr=1.0, rack=1, grace_window_ms=5.0))
    assert (facts["grace_window_ms"], facts["stall_max_s"]) == ("5", "0.1")


def test_a_number_has_its_unit_in_the_name() -> None:
    bare = {"fragments", "racks"}
    for row in describe():
        if row.unit and row.field not in bare:
            assert row.field.endswith(f"_{row.unit}"), row.field


def test_people_set_few_settings() -> None:
    groups = {g: [r for r in describe() if r.declared.group is g] for g in Group}
    assert len(groups[Group.PEOPLE]) < 20 < len(groups[Group.TUNING])


def test_moments_are_averaged_less_often_than_they_overlap() -> None:
    config = MendConfig(momentum_sync_period_steps=9, second_moment_sync_period_steps=20)
    assert config.moment_periods == {1: 9, 2: 20}
    assert MendConfig(second_moment_sync_period_steps=20).moment_periods == {2: 20}
    assert MendConfig().moment_periods == {}
    with golden.raises(ConfigError):
        MendConfig(second_moment_sync_period_steps=8, sync_period_steps=128)


def test_conflicting_failslow_settings_are_refused() -> None:
    with golden.raises(ConfigError):
        MendConfig(failslow_window_steps=4, failslow_min_samples=5)
    with golden.raises(ConfigError):
        MendConfig(failslow_action="evict", lockstep=True)


def test_mirrored_rack_state_in_lockstep_is_refused() -> None:
    with golden.raises(ConfigError):
        MendConfig(lockstep=True, mirror_rack_state=True)


def test_expected_racks_are_racks_of_the_job() -> None:
    assert MendConfig(racks=4, expected_racks=(3, 0, 1)).expected_racks == (0, 1, 3)
    with golden.raises(ConfigError):
        MendConfig(racks=2, expected_racks=(2,))
    with golden.raises(ConfigError):
        MendConfig(lockstep=True, expected_racks=(0,))


def test_a_copy_of_a_config_has_named_what_the_first_one_had() -> None:
    """`replace` gives every field to the class: that must not count as naming them all."""
    silent, named = MendConfig(fragments=3), MendConfig(rack_aware=False)
    for copied in (pickle.loads(pickle.dumps(silent)), dataclasses.replace(silent, rack=1)):
        assert not copied.is_named("rack_aware")
    for copied in (
        pickle.loads(pickle.dumps(named)), copy.deepcopy(named), dataclasses.replace(named, rack=1),
        dataclasses.replace(dataclasses.replace(named, rack=1), rack=0),
    ):  # fmt: skip
        assert copied.is_named("rack_aware")
    assert named == MendConfig()
    assert "named" not in repr(named)


def test_the_page_on_configuration_is_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "run: python -m tests.configuration_table"
    for setting in describe():
        assert f"| `{setting.field}` |" in page


@pytest.mark.parametrize(
    ("more", "stall_s"),
    [
        ({}, 0.1), ({"overlap_steps": 0}, 1.0), ({"concurrent_outer_step": False}, 1.0),
        ({"overlap_steps": 0, "stall_max_s": 0.2}, 0.2), ({"stall_max_s": 5}, 5.0),
    ],
)  # fmt: skip
def test_a_stall_is_short_where_a_late_result_costs_little(
    more: dict[str, Any], stall_s: float
) -> None:
    """With an overlap it is applied at the next poll. A death cost training 1 s, the default."""
    assert MendConfig(**more).stall_s == stall_s


def test_device_encoding_of_float32_is_refused() -> None:
    with pytest.raises(ConfigError, match="encode_on"):
        MendConfig(encode_on="device", codec="float32")
    assert MendConfig(encode_on="device").codec == "int8"
