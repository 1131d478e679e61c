"""Who decides a setting: argument, environment, file, default; and nothing misspelt passes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mend.config import MendConfig
from mend.config.sources import named_key_file
from mend.errors import ConfigError
from tests import golden


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TOML file that MEND_CONFIG names; the test writes into it."""
    path = tmp_path / "job.toml"
    path.write_text("")
    monkeypatch.setenv("MEND_CONFIG", str(path))
    return path


def test_the_first_source_that_names_a_setting_decides(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("[mend]\nfragments = 3\nstaleness_max_rounds = 3\nlockstep = true\n")
    monkeypatch.setenv("MEND_FRAGMENTS", "4")
    monkeypatch.setenv("MEND_STALENESS_MAX_ROUNDS", "4")
    config = MendConfig(fragments=5)
    assert (config.fragments, config.staleness_max_rounds, config.lockstep, config.racks) == (
        5, 4, True, 2,
    )  # fmt: skip


TEXTS: list[tuple[str, str, Any]] = [
    ("rack", "1", 1), ("rack", "none", None), ("overlap_steps", "None", None),
    ("overlap_steps", " 3 ", 3), ("grace_window_ms", "adaptive", "adaptive"),
    ("grace_window_ms", "250", 250.0), ("outer_lr", "5e-1", 0.5),
    ("outer_ramp_rounds", "none", None), ("outer_start", "warm", "warm"),
    *(("lockstep", text, True) for text in ("true", "1", "yes", "on", "True", "ON")),
    *(("token_weighted_merge", text, False) for text in ("false", "0", "no", "off", "No")),
    ("diagnostics_dir", "runs/a", Path("runs/a")), ("diagnostics_dir", "none", None),
    ("expected_racks", "1, 0", (0, 1)),
    ("sideband_peers", "tcp://a:1,tcp://b:1", ("0=tcp://a:1", "1=tcp://b:1")),
    ("data_ports", "6000-6010", "6000-6010"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "value"), TEXTS)
def test_the_environment_is_read_as_people_write_it(
    name: str, text: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"MEND_{name.upper()}", text)
    assert getattr(MendConfig(), name) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("racks", "two"), ("racks", "2.0"), ("racks", "0"), ("lockstep", "maybe"),
        ("grace_window_ms", "soon"), ("blend_alpha", "nan"), ("outer_lr", "-1"), ("rack", "null"),
        ("merge", "MEAN"),
    ],
)  # fmt: skip
def test_a_wrong_text_names_the_variable_to_change(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"MEND_{name.upper()}", text)
    with golden.raises(ConfigError) as caught:
        MendConfig()
    assert caught.value.field == name


def test_an_empty_variable_counts_as_not_set(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("fragments = 3\n")
    monkeypatch.setenv("MEND_FRAGMENTS", "")
    monkeypatch.setenv("MEND_RACK", " ")
    config = MendConfig()
    assert (config.fragments, config.rack) == (3, None)


@pytest.mark.parametrize(
    "variable", ["MEND_MERGE_MIN", "MEND_FRAGMENT", "MEND_CONFIGS", "MEND_CONFIG"]
)
def test_misspelt_variable_or_file_that_is_not_there_is_refused(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the closest name; MEND_OUTCOMES, which `mend launch` sets, is as close to the first."""
    monkeypatch.setenv(variable, "/no/such/file.toml" if variable == "MEND_CONFIG" else "4")
    with golden.raises(ConfigError):
        MendConfig()


SERVICE = {
    "MEND_SERVICE_HOST": "10.0.0.1", "MEND_SERVICE_PORT": "21900",
    "MEND_SERVICE_PORT_SIDEBAND": "21900", "MEND_PORT": "tcp://10.0.0.1:21900",
    "MEND_PORT_21900_TCP": "tcp://10.0.0.1:21900", "MEND_PORT_21900_TCP_PROTO": "tcp",
    "MEND_PORT_21900_TCP_PORT": "21900", "MEND_PORT_21900_TCP_ADDR": "10.0.0.1",
}  # fmt: skip
"""What Kubernetes sets in every pod for a Service called `mend`."""


@pytest.mark.parametrize("name", ["MEND_", "MEND_WITNESS_"])
def test_variables_of_a_service_called_mend_are_ignored(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rack was refused as soon as somebody made a Service of that name in the namespace."""
    for variable, text in SERVICE.items():
        monkeypatch.setenv(variable.replace("MEND_", name, 1), text)
    assert MendConfig().fragments == 4


def test_port_of_a_service_called_mend_metrics_is_no_port_of_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, text in SERVICE.items():
        monkeypatch.setenv(variable.replace("MEND_", "MEND_METRICS_", 1), text)
    assert MendConfig().metrics_port == 0
    monkeypatch.setenv("MEND_METRICS_PORT", "9464")  # the pod's own wins
    assert MendConfig().metrics_port == 9464


@pytest.mark.parametrize(
    "variable", ["MEND_PORT", "MEND_PORT_X_TCP", "MEND_SERVICE_HOSTS", "MEND_RACK_PORT"]
)
def test_typo_that_looks_like_a_variable_of_a_service_is_refused(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable != "MEND_PORT":
        monkeypatch.setenv("MEND_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv(variable, "tcp://10.0.0.1:21900")
    with golden.raises(ConfigError):
        MendConfig()


def test_variables_of_others_are_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MENDED", "MEND", "TSUGI_MEND_RACKS", "mend_fragments"):
        monkeypatch.setenv(name, "9")
    assert MendConfig() == MendConfig(fragments=4)


# ------------------------------------------------------------------ the file


def test_lists_and_tables_of_the_file_are_taken(file: Path) -> None:
    file.write_text('sideband_peers = ["tcp://a:1", "tcp://b:1"]\nexpected_racks = [1]\n')
    config = MendConfig()
    assert config.peer_addresses == {0: "tcp://a:1", 1: "tcp://b:1"}
    assert config.expected_racks == (1,)
    file.write_text('[mend.sideband_peers]\n1 = "tcp://b:1"\n0 = "tcp://a:1"\n')
    assert MendConfig() == MendConfig(sideband_peers=config.sideband_peers)


@pytest.mark.parametrize(
    "text",
    [
        'racks = "2"', "racks = 2.0", "lockstep = 1", "racks = 99",
        "[mend]\nfragment = 3\n",
        "racks = 2\nmerge_min_racks = 3\n",  # only racks that nobody names follow the quorum
        pytest.param(f"rakcs = 0x{'f' * 5000}\n", id="an integer that Python does not print"),
    ],
)  # fmt: skip
def test_wrong_value_or_key_of_the_file_is_refused_by_name(file: Path, text: str) -> None:
    file.write_text(text)
    with golden.raises(ConfigError):
        MendConfig()


@pytest.mark.parametrize("content", [b"racks = ", b"\xff\xfe", b"racks = 2\nracks = 3"])
def test_a_file_that_is_no_toml_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)  # what tomllib says differs between versions of Python
    with pytest.raises(ConfigError, match=r"^MEND_CONFIG='.*job\.toml': cannot be read as TOML"):
        MendConfig()


def test_config_file_that_is_a_pipe_is_refused_at_once(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    with pytest.raises(ConfigError, match="Not a regular file"):
        MendConfig()


@pytest.mark.parametrize(
    ("text", "variable", "found"),
    [
        ('[mend]\nkey_file = "b.key"\nfragments = "wrong"', "", Path("b.key")),
        ('key_file = "b.key"', "", Path("b.key")),
        ('[mend]\nkey_file = "b.key"', "a.key", Path("a.key")),
        ('[mend]\nkey_file = "b.key"', "none", None),
        ('[mend]\nkey_file = "none"', "", None),
        ("[mend]\nfragments = 4\n", "", None),
        ("[mend", "", None),
    ],
)
def test_key_file_is_found_for_tools_whatever_else_is_wrong(
    text: str, variable: str, found: Path | None, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(text)
    monkeypatch.setenv("MEND_KEY_FILE", variable)
    assert named_key_file() == found
