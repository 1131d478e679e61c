"""In a replay the tape's settings are in force; who this is and where it listens is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mend.config import MendConfig
from mend.config.override import overriding
from mend.config.wiring import settings_of
from mend.errors import ConfigError
from mend_lab.replay.script import Part, ReplayScript, decode_script, encode_script
from mend_lab.replay.settings import REPLAY, ReplaySettings, seat_environment
from tests.unit.coordination.nouns import genesis


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    configs: list[dict[str, object]] = [
        {"rack": rack, "racks": 2, "fragments": 3, "stall_max_s": 1.0 + rack, "job_id": "then",
         "sideband_addr": "tcp://far:1", "diagnostics_dir": "/then", "witness_addr": "tcp://w:1",
         "merge_mean_names": ["*a*"], "simulated_merge_delay_ms": 9.0, "no_longer_a_setting": 1}
        for rack in (0, 1)
    ]  # fmt: skip
    parts = tuple(Part(rack, ((),), True, config) for rack, config in enumerate(configs))
    made = ReplayScript("then", (), genesis(), (), 0, parts, (), {}, ())
    path = tmp_path / "script"
    path.write_bytes(encode_script(made))
    monkeypatch.setenv(REPLAY, str(path))
    return path


def config_of(**given: Any) -> MendConfig:
    with overriding(ReplaySettings.from_environment()):
        return MendConfig(**given)


def test_the_tape_wins_over_the_script(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEND_RACK", "1")
    monkeypatch.setenv("MEND_SIDEBAND_ADDR", "tcp://127.0.0.1:7001")
    config = config_of(
        fragments=8, racks=4, sideband_addr="tcp://127.0.0.1:1", diagnostics_dir="/mine"
    )
    assert (config.rack, config.racks, config.fragments, config.job_id) == (1, 2, 3, "then")
    assert (config.stall_max_s, config.merge_mean_names) == (2.0, ("*a*",))
    assert config.sideband_addr == "tcp://127.0.0.1:7001", "of this run"
    assert config.diagnostics_dir == script.parent / "events", "never the folder of the tapes"
    assert (config.witness_addr, config.simulated_merge_delay_ms, config.tape_max_mb) == ("", 0, 0)


def test_a_later_life_is_its_rack_to_the_script_and_its_seat_to_the_job(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seat 1 is the second life of rack 0."""
    made = decode_script(script.read_bytes())
    parts = (made.parts[0], replace(made.parts[1], rack=0, life=2))
    script.write_bytes(encode_script(replace(made, parts=parts)))
    addresses = ("tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002")
    for name, value in seat_environment(0, 2, 1, addresses).items():
        monkeypatch.setenv(name, value)
    with overriding(ReplaySettings.from_environment()):
        config = MendConfig()
        settings = settings_of(config, None)
    assert (config.rack, config.racks, config.stall_max_s) == (0, 2, 2.0)
    assert (settings.rack, settings.policy.racks) == (1, 2)
    assert settings.peers == dict(enumerate(addresses))
    assert settings.io_loop.bind == addresses[1]


def test_a_script_that_cannot_be_read_is_named(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"MENDLAB_REPLAY.*not a script of a replay"):
        ReplaySettings.from_environment()
    monkeypatch.setenv(REPLAY, str(script.parent / "gone"))
    with pytest.raises(ConfigError, match="replay TAPE"):
        ReplaySettings.from_environment()


def test_without_an_override_nothing_of_a_tape_is_in_force(script: Path) -> None:
    assert MendConfig(racks=4, fragments=8).fragments == 8
