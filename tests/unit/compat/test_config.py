"""The 51 settings of tsugi-mend 0.1.5, each with its default there."""

from __future__ import annotations

from typing import Any

import pytest

import mend
from mend import compat
from mend.config import describe
from mend.config.predecessor import BECOMES, FOREIGN, translated
from mend.errors import ConfigError
from tests import golden

AT = "tcp://127.0.0.1:7"
SHARED: list[tuple[str, Any, Any]] = [
    ("grace_window_ms", 2000, 300), ("token_weighted_merge", True, False),
    ("outer_optimizer_momentum", 0.9, 0.5), ("sync_period_steps", 128, 64),
    ("momentum_sync_period_steps", 512, 256), ("async_tp_enabled", True, False),
    ("concurrent_outer_step", True, False), ("simulated_merge_delay_ms", 0, 20),
    ("simulated_merge_delay_distribution", "constant", "bimodal"),
    ("failslow_window_steps", 50, 40), ("failslow_zscore_threshold", 3.0, 4.0),
    ("failslow_min_samples", 10, 12), ("rack_aware", True, False),
    ("sideband_addr", "tcp://0.0.0.0:51900", AT), ("sideband_peers", (), (AT, "tcp://127.0.0.1:8")),
    ("sideband_heartbeat_ms", 100, 200), ("diagnostics_dir", None, "diagnostics"),
]  # fmt: skip
"""name, default there, another value: settings that mend has."""

LEFT_OUT = {"momentum_sync_period_steps", "sideband_addr"}
"""Of these the default there stands for what mend does where nothing is said."""

REFUSED: list[tuple[str, Any, Any, str]] = [
    ("incremental_collect", False, True, "merges in rack order"),
    ("outer_step_cuda_stream_priority", 0, -1, "default priority"),
    ("auto_tune_sync_period", False, True, "`mend plan`"),
    ("auto_tune_runtime", False, True, "grace_window_ms='adaptive'"),
    ("nccl_topo_file", None, "topo.xml", "NCCL_TOPO_DUMP_FILE"),
    ("sideband_max_line_bytes", 4096, 1, "by itself"),
    ("sideband_inbound_read_timeout_s", 1.0, 2.0, "by itself"),
    ("sideband_max_inbound_connections", 64, 1, "by itself"),
    ("sideband_psk", None, "secret", "mend keys new"),
    ("sideband_peer_allowlist", None, ("secret",), "mend keys new"),
    ("sideband_tls", False, True, "mend keys new"),
    ("sideband_tls_certfile", None, "secret", "mend keys new"),
    ("sideband_tls_keyfile", None, "secret", "mend keys new"),
    ("sideband_tls_ca_file", None, "secret", "mend keys new"),
]
"""name, default there, another value, part of the remedy: settings that mend does not have."""

IDLE: list[tuple[str, Any, Any]] = [("sideband_connect_timeout_s", 0.5, 0.1)]
"""No value has an effect: what it bounds delays nobody here."""

OFF: list[tuple[str, Any, Any]] = [
    ("auto_tune_sync_period_warmup_steps", 50, 9), ("auto_tune_sync_period_min", 4, 9),
    ("auto_tune_runtime_window_steps", 50, 9), ("auto_tune_runtime_min_samples", 10, 9),
    ("auto_tune_zscore_min", 2.0, 1.0), ("auto_tune_zscore_max", 8.0, 9.0),
    ("auto_tune_grace_window_min_ms", 0, 9), ("auto_tune_grace_window_max_ms", 10_000, 9),
    ("auto_tune_cov_gain", 4.0, 9.0), ("auto_tune_grace_gain", 1.0, 9.0),
    ("auto_tune_sustain_windows", 1, 9), ("auto_tune_drift_ewma_alpha", 0.2, 0.9),
    ("auto_tune_drift_baseline_alpha", 0.02, 0.9), ("auto_tune_drift_cusum_slack", 1.0, 9.0),
    ("auto_tune_drift_cusum_threshold", 8.0, 9.0),
]  # fmt: skip
"""Settings of a tuner that is off, or refused: no value has an effect."""

RENAMED: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("quorum_min_learners", 4, 2, {"merge_min_racks": 2}),
    ("expected_learner_ids", None, ("rack-1", "learner_0"), {"expected_racks": (0, 1)}),
    ("outer_step_compression_mode", "none", "bf16", {"codec": "bfloat16"}),
    ("outer_step_compression_powersgd_rank", 4, 4, {}),
]
"""name, default there, another value, what that is here."""


def test_the_table_has_all_51_settings() -> None:
    names = [row[0] for row in (*SHARED, *REFUSED, *IDLE, *OFF, *RENAMED)]
    assert len(names) == len(set(names)) == 51
    assert set(FOREIGN) == {row[0] for row in (*REFUSED, *IDLE, *OFF)}
    assert set(BECOMES) == {row[0] for row in RENAMED}


@pytest.mark.parametrize(("name", "default", "other"), SHARED)
def test_a_shared_setting_has_its_meaning(name: str, default: Any, other: Any) -> None:
    racks = {"racks": 4} if name != "sideband_peers" else {}
    long = {"sync_period_steps": 128} if name == "outer_optimizer_momentum" else {}
    taken = compat.MendConfig(**racks, **long, **{name: default})
    if name in LEFT_OUT:
        assert taken == mend.MendConfig(**racks)
    else:
        assert getattr(taken, name) == default
    found = compat.MendConfig(**racks, **_with(name), **{name: other})
    assert found == mend.MendConfig(**racks, **_with(name), **{name: other})
    assert found.is_named(name)


def _with(name: str) -> dict[str, Any]:
    """What mend needs beside it. A momentum of .9 is for long periods."""
    if name == "outer_optimizer_momentum":
        return {"sync_period_steps": 128}
    return {"rack": 0, "advertise_host": "a"} if name == "sideband_addr" else {}


@pytest.mark.parametrize(("name", "default", "other", "remedy"), REFUSED)
def test_a_foreign_setting_is_accepted_at_its_default_and_else_refused_with_a_remedy(
    name: str, default: Any, other: Any, remedy: str
) -> None:
    assert compat.MendConfig(**{name: default}) == mend.MendConfig()
    with pytest.raises(ConfigError) as caught:
        compat.MendConfig(**{name: other})
    assert caught.value.field == name
    assert remedy in caught.value.remedy
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("name", "default", "other"), IDLE)
def test_idle_setting_is_accepted(name: str, default: Any, other: Any) -> None:
    for value in (default, other):
        assert compat.MendConfig(**{name: value}) == mend.MendConfig()


def test_variables_that_its_examples_read_are_not_mends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEND_SIDEBAND_PORT_BASE", "52900")
    monkeypatch.setenv("MEND_PROCESS_GROUP_TIMEOUT_S", "180")
    monkeypatch.setenv("MEND_RACKS", "3")
    assert compat.MendConfig().racks == 3


@pytest.mark.parametrize(("name", "default", "other"), OFF)
def test_a_setting_without_effect_is_accepted(name: str, default: Any, other: Any) -> None:
    for value in (default, other):
        assert compat.MendConfig(**{name: value}) == mend.MendConfig()
    switch = FOREIGN[name].needs
    assert switch in {row[0] for row in REFUSED}
    for given in ({name: other, switch: True}, {switch: True, name: other}):
        with golden.raises(ConfigError):
            compat.MendConfig(**given)


@pytest.mark.parametrize(("name", "default", "other", "own"), RENAMED)
def test_renamed_setting_becomes_mends_own(
    name: str, default: Any, other: Any, own: dict[str, Any]
) -> None:
    assert compat.MendConfig(racks=4, **{name: other}) == mend.MendConfig(racks=4, **own)
    if name == "quorum_min_learners":
        assert compat.MendConfig(**{name: default}).racks == 4
    elif name == "outer_step_compression_mode":  # who says so wants it
        assert compat.MendConfig(**{name: default}) == mend.MendConfig(codec="float32")
    else:
        assert compat.MendConfig(**{name: default}) == mend.MendConfig()


def test_low_rank_of_the_predecessor_is_part_of_the_codec() -> None:
    mode, rank = "outer_step_compression_mode", "outer_step_compression_powersgd_rank"
    assert compat.MendConfig(**{mode: "powersgd", rank: 8}).codec == "powersgd-8"
    assert compat.MendConfig(**{rank: 8, mode: "powersgd"}).codec == "powersgd-8"
    assert compat.MendConfig(**{mode: "powersgd"}).codec == "powersgd-4"
    assert compat.MendConfig(**{mode: "quant4"}).codec == "int4"
    with golden.raises(ConfigError):
        compat.MendConfig(**{rank: 8})


@pytest.mark.parametrize("given", [("powersgd", 4), 7, {"rack": 1}])
def test_value_of_the_wrong_type_is_refused_not_a_crash(given: Any) -> None:
    for name in ("outer_step_compression_mode", "expected_learner_ids", "quorum_min_learners"):
        with pytest.raises(ConfigError):
            compat.MendConfig(racks=2, **{name: given})


@pytest.mark.parametrize(
    "given", [{"quorum_min_learners": 2, "merge_min_racks": 2}, {"incremental_collect": 0}]
)
def test_both_names_of_one_setting_and_zero_for_false_are_refused(given: dict[str, int]) -> None:
    with golden.raises(ConfigError):
        compat.MendConfig(**given)


@pytest.mark.parametrize("name", BECOMES)
def test_other_name_of_a_setting_is_refused_with_the_right_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = BECOMES[name]
    assert new in {row.field for row in describe()}
    with golden.raises(ConfigError):
        mend.MendConfig(**{name: 2})
    monkeypatch.setenv(f"MEND_{name.upper()}", "2")
    with golden.raises(ConfigError):
        mend.MendConfig()


def test_a_config_of_all_defaults_is_accepted_without_a_word() -> None:
    rows = (*SHARED, *((n, d, o) for n, d, o, _ in (*REFUSED, *RENAMED)), *IDLE, *OFF)
    taken = compat.MendConfig(**{name: default for name, default, _ in rows})
    assert taken.merge_min_racks == taken.racks == 4
    assert taken.momentum_sync_period_steps is None


@pytest.mark.parametrize("name", FOREIGN)
def test_mends_own_config_names_the_class_that_takes_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with golden.raises(ConfigError) as caught:
        mend.MendConfig(**{name: FOREIGN[name].default})
    assert caught.value.remedy
    monkeypatch.setenv(f"MEND_{name.upper()}", "1")
    with golden.raises(ConfigError):
        mend.MendConfig()


def test_mends_own_settings_and_unknown_names_are_handed_on() -> None:
    assert compat.MendConfig(fragments=2).fragments == 2
    assert translated({"fragments": 2, "nonsense": 1}) == {"fragments": 2, "nonsense": 1}
    with golden.raises(ConfigError):
        compat.MendConfig(nonsense=1)
